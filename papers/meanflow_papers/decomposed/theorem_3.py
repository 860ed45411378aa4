"""Theorem 3: how many random neurons give a batch full rank.

The waiting times y_1, ..., y_n for each further rank are dominated by independent geometric ones, though they are not
independent themselves. Hence for d neurons and alpha = d gamma / n > 1

    P(rank < n) <= P(Binomial(d, gamma) < n) <= exp(-d KL(n/d || gamma))   (7a)
                <= exp(-n (alpha - 1 - log alpha))                         (7b)

and E[neurons to full rank] <= n / gamma.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float
from matplotlib.figure import Figure

from meanflow_papers.decomposed import rank
from meanflow_papers.entry import entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.style import COLORS, DASHES, panels


def polygon(n: int) -> jax.Array:
    """n equally spaced points on the unit circle, (n, 2)."""
    angle = 2 * jnp.pi * jnp.arange(n) / n
    return jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)


class RankBounds(NamedTuple):
    """Theorem 3 of "BN decomposed": bounds on the probability that d neurons do not reach rank n.

    Attributes:
        expected: n / gamma, a bound on the expected number of neurons to full rank (item 1).
        binomial: P(Binomial(d, gamma) < n), the sharpest bound on the probability.
        chernoff: (7a), a bound on ``binomial``; 1 where alpha <= 1.
        simple: (7b), a bound on ``chernoff``; 1 where alpha <= 1.
        alpha: d gamma / n.
    """

    expected: Float[Array, "*shape"]
    binomial: Float[Array, "*shape"]
    chernoff: Float[Array, "*shape"]
    simple: Float[Array, "*shape"]
    alpha: Float[Array, "*shape"]


def rank_bounds(
    n: int, gamma: Float[ArrayLike, "*#shape"] | float, neurons: Float[ArrayLike, "*#shape"] | int
) -> RankBounds:
    """Return the bounds of Theorem 3 on the probability that random ReLU neurons do not reach full rank.

    The paper asks for alpha = neurons gamma / n > 2. In fact alpha > 1 is enough, and below it (7a) and (7b) bound
    nothing.

    Args:
        n: number of samples, of which no two may be collinear.
        gamma: the least volume of a cell, from ``gamma``. For Corollary 4 (recentering, batch norm) take it of the
            recentered batch, whose samples must be nonzero and not collinear.
        neurons: number d of neurons; it broadcasts against ``gamma``.

    >>> bounds = rank_bounds(5, 0.1, 100)
    >>> [f"{float(u):.3f}" for u in (bounds.binomial, bounds.chernoff, bounds.simple)]
    ['0.024', '0.188', '0.216']
    """
    g, d = jnp.broadcast_arrays(jnp.asarray(gamma, float), jnp.asarray(neurons, float))
    alpha = d * g / n
    # P(Binomial(d, g) <= n - 1) is the regularized incomplete beta function I_{1-g}(d - n + 1, n); 1 where d < n
    enough = d >= n
    binomial = jnp.where(
        enough, jax.scipy.special.betainc(jnp.where(enough, d - n + 1, 1.0), jnp.full_like(d, n), 1 - g), 1.0
    )
    # below alpha = 1 the formulas bound nothing; a harmless 2 stands in there, for values and derivatives
    far = alpha > 1
    a = jnp.where(far, alpha, 2.0)
    # -KL(n/d || gamma) d / n = (d/n) log alpha - (d/n - 1) log((alpha - gamma)/(1 - gamma)), and
    # (alpha/gamma - 1) log((alpha-gamma)/(1-gamma)) -> 0 as d -> n
    rest = jnp.where(d > n, (d / n - 1) * jnp.log(jnp.where(d > n, (a - g) / (1 - g), 1.0)), 0.0)
    return RankBounds(
        expected=n / g,
        binomial=binomial,
        chernoff=jnp.where(far, jnp.exp(-n * (-d / n * jnp.log(a) + rest)), 1.0),
        simple=jnp.where(far, jnp.exp(-n * (a - 1 - jnp.log(a))), 1.0),
        alpha=alpha,
    )


def expected_neurons_bound(x: np.ndarray | jax.Array) -> float:
    """Return sum_t 1 / gamma(X_t) over the first t samples of a batch (n, k), a bound on the neurons to full rank.

    It is sharper than n / gamma, by the same proof.
    """
    batch = np.asarray(x, float)
    return float(sum(1 / rank.gamma(batch[: t + 1]).value for t in range(len(batch))))


@partial(jax.jit, static_argnames=("runs", "target", "max_neurons"))
def neurons_to_full_rank(
    key: jax.Array, x: jax.Array, runs: int, *, target: int | None = None, max_neurons: int = 10_000
) -> jax.Array:
    """Draw how many random ReLU neurons it takes until the batch has full rank; O(n^2 + n k) for each neuron.

    A neuron counts as new when its outputs, scaled to norm 1, leave the span of the former ones by more than 1e-9.

    Args:
        key: PRNG key. Run j uses the same sequence of neurons whatever the batch, so x[:t] gives the times r_t of the
            proof of Theorem 3.
        x: batch (n, k). For Corollary 4, subtract its mean first; rescaling changes no rank.
        runs: number of independent draws.
        target: the rank to wait for; n by default.
        max_neurons: give up after so many neurons and return max_neurons + 1.

    Returns:
        The number of neurons in each run (runs,).
    """
    n, k = x.shape
    enough = n if target is None else target

    def one(key: jax.Array) -> jax.Array:
        def add(state: tuple) -> tuple:
            basis, rank, d = state
            row = jax.nn.relu(x @ jax.random.normal(jax.random.fold_in(key, d), (k,), x.dtype))
            size = jnp.sqrt(jnp.sum(jnp.square(row)))
            row = row / jnp.where(size > 0, size, 1.0)
            # Gram-Schmidt; the second pass removes what rounding of the basis left in the first
            rest = row - basis.T @ (basis @ row)
            rest = rest - basis.T @ (basis @ rest)
            length = jnp.sqrt(jnp.sum(jnp.square(rest)))
            new = length > 1e-9
            basis = basis.at[rank].add(jnp.where(new, rest / jnp.where(new, length, 1.0), 0.0))
            return basis, rank + new, d + 1

        going = lambda state: (state[1] < enough) & (state[2] < max_neurons)
        start = (jnp.zeros((n, n), x.dtype), jnp.zeros((), int), jnp.zeros((), int))
        _, rank, d = jax.lax.while_loop(going, add, start)
        return jnp.where(rank >= enough, d, max_neurons + 1)

    return jax.vmap(one)(jax.random.split(key, runs))


def draw(data: Arrays) -> Figure:
    """Probability of missing full rank against the number of neurons, and three bounds."""
    figure, grid = panels(1, len(data), width=3.2, height=3.4)
    for ax, (name, row) in zip(grid, data.items(), strict=True):
        neurons = np.asarray(row["neurons"])
        failure = np.asarray(row["failure"], float)
        seen = failure > 0
        ax.plot(neurons[seen], failure[seen], "o", color=COLORS[0], ms=3.5, label="measured, 2000 runs")
        for k, (bound, label) in enumerate(
            (("binomial", "binomial tail"), ("chernoff", "(7a)"), ("simple", "(7b)"))
        ):
            values = np.minimum(np.asarray(row["bounds"][bound]), 1.0)
            ax.plot(neurons, values, color=COLORS[k + 1], ls=DASHES[k], lw=1.1, label=label)
        ax.set(xscale="log", yscale="log", ylim=(1e-4, 1.6), xlabel="neurons $d$")
        title = name.replace("random (3, 8)", "8 random points in 3-D").replace("random (3, 4)", "4 of them")
        ax.set_title(f"{title}, $\\gamma$ = {float(row['gamma']):.2g}")
    grid[0].set_ylabel("probability that the rank is below $n$")
    figure.legend(handles=grid[0].get_legend_handles_labels()[0], loc="outside lower center", ncols=4)
    return figure


@entry(
    "002/theorem-3",
    title="neurons needed for full rank: the bounds and their slack",
    claims=(
        ("Theorem 3.1", "E[y] <= n/gamma"),
        ("Theorem 3.2, equation (7b)", ">= 1 - exp{-n (alpha - 1 - log alpha)}"),
    ),
    minutes=(0.17, 0.17),
    setup="regular 5- and 9-gon, random batches; 2000 runs each.",
    draw=draw,
)
def theorem_3(runs: int = 2000) -> Outcome:
    """Count the random neurons needed for full rank, and compare with the bounds of Theorem 3.

    The paper claims E[neurons] <= n/gamma with the tails (7a) and (7b). We draw neurons for polygons and
    random batches until the rank is full.

    Decisive is that no bound is violated, and gamma of the regular 5-gon.
    """
    key = jax.random.key(3)
    batches = {f"{n}-gon": polygon(n) for n in (5, 9)}
    batches["random (3, 8)"] = jax.random.normal(jax.random.key(38), (8, 3))
    batches["random (3, 4)"] = jax.random.normal(jax.random.key(34), (4, 3))
    table: Arrays = {}
    violations = 0.0
    for name, x in batches.items():
        n = x.shape[0]
        found = rank.gamma(x)
        y = neurons_to_full_rank(key, x, runs)
        # from n neurons, the least possible, to four times the expected bound
        neurons = jnp.unique(jnp.round(jnp.geomspace(n, 4 * n / min(found.value, 1 / n), 30)).astype(int))
        bounds = rank_bounds(n, found.value, neurons)
        missed = jnp.mean(y[None, :] > neurons[:, None], axis=1)
        # four standard errors of a frequency, and four runs where none failed
        noise = 4 * jnp.sqrt(missed * (1 - missed) / runs) + 4 / runs
        ordered = (bounds.binomial <= bounds.chernoff + 1e-12) & (bounds.chernoff <= bounds.simple + 1e-12)
        violations += float(jnp.sum(~ordered) + jnp.sum(missed > bounds.binomial + noise))
        sharper = expected_neurons_bound(x)
        violations += float(y.mean() > sharper) + float(sharper > bounds.expected[0] * (1 + 1e-9))
        table[name] = {
            "gamma": found.value,
            "mean neurons": float(y.mean()),
            "sum 1/gamma": sharper,
            "n/gamma": float(bounds.expected[0]),
            "neurons": neurons,
            "failure": missed,
            "bounds": bounds._asdict(),
        }
    five = table["5-gon"]
    return Outcome(
        name="002/theorem-3",
        finding=f"True, with gamma = 1/(2n) for odd polygons, and loose: {five['mean neurons']:.2f} against "
        f"{five['n/gamma']:.0f} for the 5-gon.",
        data=table,
        criteria=(
            Criterion("violated or disordered bounds", violations, 0, 0),
            Criterion("gamma of the 5-gon", five["gamma"], 0.1 - 1e-12, 0.1 + 1e-12),
        ),
    )
