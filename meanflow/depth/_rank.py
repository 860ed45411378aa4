"""ReLU raises the rank of a batch: gamma(X), Theorem 3 and Corollary 4 of "BN decomposed", and the neurons needed.

The hyperplanes {w : w . x_i = 0} of the samples cut the space of neurons w into cells, and gamma(X) is the least volume
of a cell (``meanflow.depth._cells``). Each further neuron raises the rank with probability at least gamma, *given the
past*: the waiting times y_1, ..., y_n are dominated by independent geometric ones, though they are not independent
themselves. Hence for d neurons and alpha = d gamma / n > 1

    P(rank < n) <= P(Binomial(d, gamma) < n) <= exp(-d KL(n/d || gamma))   (7a)
                <= exp(-n (alpha - 1 - log alpha))                         (7b)

and E[neurons to full rank] <= sum_t 1/gamma(X_t) <= n / gamma, where X_t are the first t samples.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, Key, Shaped

from meanflow import _checks
from meanflow._checks import array, choice, count, flag, host_array, number, optional, prng_key
from meanflow.depth._cells import cells, distinct_lines, general_position_count


class Gamma(NamedTuple):
    """The least positive volume of a cell, as ``gamma`` finds it.

    Attributes:
        value: the exact volume; or under Monte Carlo the least observed frequency, which bounds nothing, because cells
            may have been missed.
        low: lower end of the confidence interval, 0 while cells may have been missed. Equal to ``value`` if exact.
        high: upper end of the confidence interval. Equal to ``value`` if exact.
        cells: number of cells that were found.
        total: sum of their volumes, which is 1 if the enumeration missed none.
    """

    value: float
    low: float
    high: float
    cells: int
    total: float


@_checks.arguments(
    x=host_array((None, None), least=1),
    recenter=flag,
    method=choice("exact", "monte_carlo"),
    key=optional(prng_key),
    samples=count(1),
    confidence=number(above=0, below=1, static=True),
)
def gamma(
    x: Shaped[ArrayLike, "n k"],
    *,
    recenter: bool = False,
    method: str = "exact",
    key: Key[Array, ""] | None = None,
    samples: int = 100_000,
    confidence: float = 0.95,
) -> Gamma:
    """Return gamma(X) of Definition 1 of "BN decomposed", the least probability of a sign pattern of the batch.

    A random neuron w ~ N(0, I) sees the signs of w . x_i. Each pattern of signs that can occur is a cell, and gamma is
    the least probability among them. The function runs on the host.

    Args:
        x: batch.
        recenter: subtract the mean of the batch first, as in Corollary 4.
        method: ``"exact"`` enumerates the cells, for any n in the plane and otherwise up to rank r = 6 and
            C(n, r-1) 2^r = 200 000. ``"monte_carlo"`` counts the sign patterns of random neurons.
        key: PRNG key for Monte Carlo.
        samples: number of neurons drawn by Monte Carlo.
        confidence: level of the Monte Carlo interval. It is an interval for gamma itself: Clopper-Pearson for each
            cell, with a union bound over the largest possible number of cells.

    >>> import jax.numpy as jnp, meanflow as mf
    >>> angle = 2 * jnp.pi * jnp.arange(5) / 5
    >>> pentagon = jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)
    >>> found = mf.depth.gamma(pentagon)
    >>> found.cells, round(found.value, 6)                    # 2n cells and 1/(2n), not n and 1/n
    (10, 0.1)
    """
    batch = np.asarray(x, float)
    if recenter:
        batch = batch - batch.mean(0)
    if method == "exact":
        found = cells(batch)
        value = float(found.volumes.min())
        return Gamma(value, value, value, len(found.volumes), float(found.volumes.sum()))
    if key is None:
        raise ValueError("key must be given for method='monte_carlo', got None")
    return _counted(batch, key, samples, confidence)


def _counted(batch: np.ndarray, key: jax.Array, samples: int, confidence: float) -> Gamma:
    """Estimate gamma from the sign patterns of random neurons, with a confidence interval."""
    from scipy.stats import beta

    lines, _ = distinct_lines(batch)
    draws = np.asarray(jax.random.normal(key, (samples, lines.shape[1])))
    packed = np.packbits(draws @ lines.T > 0, axis=1)
    count = np.unique(packed, axis=0, return_counts=True)[1]
    possible = general_position_count(len(lines), int(np.linalg.matrix_rank(lines))) if len(lines) else 1
    tail = (1 - confidence) / (2 * possible)
    # a cell that was never hit may be arbitrarily small: there is a lower end only once all cells have been seen
    low = float(beta.ppf(tail, count, samples - count + 1).min()) if len(count) == possible else 0.0
    over = np.where(count < samples, beta.ppf(1 - tail, count + 1, np.maximum(samples - count, 1)), 1.0)
    return Gamma(float(np.min(count)) / samples, low, float(over.min()), len(count), 1.0)


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


@_checks.arguments(n=count(1), gamma=array(above=0, high=1), neurons=array(low=1))
def rank_bounds(
    n: int, gamma: Shaped[ArrayLike, "*#shape"], neurons: Shaped[ArrayLike, "*#shape"]
) -> RankBounds:
    """Return the bounds of Theorem 3 on the probability that random ReLU neurons do not reach full rank.

    The paper asks for alpha = neurons gamma / n > 2. In fact alpha > 1 is enough, and below it (7a) and (7b) bound
    nothing.

    Args:
        n: number of samples, of which no two may be collinear.
        gamma: the least volume of a cell, from ``gamma``. For Corollary 4 (recentering, batch norm) take it of the
            recentered batch, whose samples must be nonzero and not collinear.
        neurons: number d of neurons; it broadcasts against ``gamma``.

    >>> import meanflow as mf
    >>> bounds = mf.depth.rank_bounds(5, 0.1, 100)
    >>> bool(bounds.binomial <= bounds.chernoff <= bounds.simple < 1)
    True
    """
    known = _checks.concrete(neurons)
    if known is not None and np.any(known != np.round(known)):
        raise ValueError(f"neurons must be whole numbers, got {_checks.show(neurons)}")
    try:
        g, d = jnp.broadcast_arrays(jnp.asarray(gamma, float), jnp.asarray(neurons, float))
    except ValueError:
        raise ValueError(
            f"neurons must broadcast against gamma of shape {np.shape(gamma)}, got shape {np.shape(neurons)}"
        ) from None
    alpha = d * g / n
    enough = d >= n
    binomial = jnp.where(
        enough, jax.scipy.special.betainc(jnp.where(enough, d - n + 1, 1.0), jnp.full_like(d, n), 1 - g), 1.0
    )
    far = alpha > 1
    a = jnp.where(far, alpha, 2.0)
    # (alpha/gamma - 1) log((alpha-gamma)/(1-gamma)) -> 0 as d -> n
    rest = jnp.where(d > n, (d / n - 1) * jnp.log(jnp.where(d > n, (a - g) / (1 - g), 1.0)), 0.0)
    return RankBounds(
        expected=n / g,
        binomial=binomial,
        chernoff=jnp.where(far, jnp.exp(-n * (-d / n * jnp.log(a) + rest)), 1.0),
        simple=jnp.where(far, jnp.exp(-n * (a - 1 - jnp.log(a))), 1.0),
        alpha=alpha,
    )


def expected_neurons_bound(x: Shaped[ArrayLike, "n k"], *, recenter: bool = False) -> float:
    """Return sum_t 1 / gamma(X_t) over the first t samples of a batch, a bound on the expected neurons to full rank.

    It is sharper than n / gamma, by the same proof.

    Args:
        x: batch.
        recenter: subtract the mean of the whole batch first (Corollary 4).
    """
    batch = np.asarray(x, float)
    batch = batch - batch.mean(0) if recenter else batch
    return float(sum(1 / gamma(batch[: t + 1]).value for t in range(len(batch))))


def limiting_rank(x: Shaped[ArrayLike, "n k"], *, recenter: bool = False, tolerance: float = 1e-9) -> int:
    """Return the rank of relu(x W) for sufficiently many Gaussian neurons, exactly and for any batch.

    It is the number of distinct lines spanned by nonzero samples, plus the rank of the directions of those lines that
    have samples on both sides: relu(t) and relu(-t) of one line span |t| and t, and the t's are linear.

    Args:
        x: batch.
        recenter: subtract the mean of the batch first.
        tolerance: unit vectors closer than this count as one line.

    >>> limiting_rank(np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, 2.0]]))
    3
    """
    batch = np.asarray(x, float)
    batch = batch - batch.mean(0) if recenter else batch
    lines, label = distinct_lines(batch, tolerance)
    both = [j for j in range(len(lines)) if (label == j + 1).any() and (label == -j - 1).any()]
    return len(lines) + (int(np.linalg.matrix_rank(lines[both], tol=tolerance)) if both else 0)


@partial(jax.jit, static_argnames=("target", "max_neurons"))
def _waiting(keys: jax.Array, x: jax.Array, target: int, max_neurons: int, rtol: ArrayLike) -> jax.Array:
    """Add neurons one by one until their outputs span ``target`` dimensions; once for each key."""
    n, k = x.shape

    def one(key: jax.Array) -> jax.Array:
        def add(state: tuple) -> tuple:
            basis, rank, d = state
            row = jax.nn.relu(x @ jax.random.normal(jax.random.fold_in(key, d), (k,), x.dtype))
            size = jnp.sqrt(jnp.sum(jnp.square(row)))
            row = row / jnp.where(size > 0, size, 1.0)
            rest = row - basis.T @ (basis @ row)
            rest = rest - basis.T @ (basis @ rest)  # once more: the first pass leaves rounding of the basis
            length = jnp.sqrt(jnp.sum(jnp.square(rest)))
            new = length > rtol
            basis = basis.at[rank].add(jnp.where(new, rest / jnp.where(new, length, 1.0), 0.0))
            return basis, rank + new, d + 1

        going = lambda state: (state[1] < target) & (state[2] < max_neurons)
        start = (jnp.zeros((n, n), x.dtype), jnp.zeros((), int), jnp.zeros((), int))
        _, rank, d = jax.lax.while_loop(going, add, start)
        return jnp.where(rank >= target, d, max_neurons + 1)

    return jax.vmap(one)(keys)


def neurons_to_full_rank(
    key: Key[Array, ""],
    x: Float[ArrayLike, "n k"],
    runs: int,
    *,
    recenter: bool = False,
    target: int | None = None,
    max_neurons: int = 10_000,
    rtol: float = 1e-9,
) -> Int[Array, "{runs}"]:
    """Draw how many random ReLU neurons it takes until the batch has full rank.

    Args:
        key: PRNG key. Run j uses the same sequence of neurons whatever the batch, so x[:t] gives the times r_t of the
            proof of Theorem 3.
        x: batch.
        runs: number of independent draws.
        recenter: subtract the mean of the batch before ReLU (Corollary 4; rescaling changes no rank).
        target: the rank to wait for; n by default.
        max_neurons: give up after so many neurons and return max_neurons + 1.
        rtol: a neuron counts as new when its outputs, scaled to norm 1, leave the span of the former ones by more than
            this.

    Returns:
        The number of neurons in each run. The cost is O(n^2 + n k) for each neuron.

    >>> neurons_to_full_rank(jax.random.key(0), jnp.eye(2), 4).shape
    (4,)
    """
    x = jnp.asarray(x)
    _checks.shape("x", x, (None, None))
    _checks.finite("x", x)
    x = x - jnp.mean(x, axis=0, keepdims=True) if recenter else x
    target = x.shape[0] if target is None else _checks.whole("target", target, 1)
    return _waiting(jax.random.split(key, runs), x, target, max_neurons, rtol)
