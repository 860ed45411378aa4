"""Theorems 13 and 14: the invariant representation and one layer from it."""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from meanflow import depth
from meanflow.depth._observables import gram
from meanflow_papers.entry import entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.style import COLORS, PALE, below, panels


def draw(data: Arrays) -> Figure:
    """By which factor close pairs of the cluster grow in one layer, by the distance R; the Gram matrix of one layer."""
    figure, (left, right) = panels(1, 2, width=5.2, height=4.0)
    n = int(data["n"])
    radius, low, high = (np.asarray(data[k]) for k in ("radii", "least factor", "largest factor"))
    left.fill_between(radius, low, high, color=COLORS[0], alpha=0.3, lw=0)
    left.plot(radius, high, color=COLORS[0], label="pairs of the cluster, exact (range)")
    left.plot(radius, (n / (n - 1)) ** 2 / radius**2, "k--", lw=0.9, label=r"$\alpha = (n/(n-1))^2/R^2$")
    left.axhline(1.0, color=PALE, lw=1)
    left.axvline(
        float(data["invariant radius"]), color=COLORS[1], lw=1, label="$R$ of the invariant representation"
    )
    left.axvline(n / (n - 1), color=COLORS[2], lw=1, ls=":", label="$R = n/(n-1)$, asked for by Theorem 14")
    left.plot(
        [float(data["invariant radius"])],
        [n**2 / (n**2 - 2 * n + 2)],
        "o",
        color=COLORS[1],
        label=f"$n^2/(n^2-2n+2)$ = {n**2 / (n**2 - 2 * n + 2):.4f}",
    )
    left.set(
        xlabel="distance $R$ of the odd point to the cluster",
        ylabel="squared distance\nof close pairs, after / before",
    )
    left.set_title(f"one layer, $n = {n}$: pairs grow left of $n/(n-1)$")
    below(left, columns=1)
    exact, measured = (np.asarray(data[k]) for k in ("gram", "measured_gram"))
    places = np.arange(n)
    right.plot(places, np.diag(exact), "_", ms=16, color=COLORS[0], label="squared norm, invariant")
    right.plot(
        places, np.diag(measured), "o", mfc="none", color=COLORS[0], label="after a layer, 100000 random rows"
    )
    right.plot(
        places[1:], exact[0, 1:], "_", ms=16, color=COLORS[1], label="product with the odd point, invariant"
    )
    right.plot(places[1:], measured[0, 1:], "s", mfc="none", color=COLORS[1], label="after a layer")
    right.set_yscale("symlog", linthresh=1e-3)
    right.set(xlabel="sample (0 is the odd point)", ylabel="entries of the Gram matrix")
    right.set_title("Theorem 13 for Gram matrices")
    below(right, columns=1)
    return figure


@entry(
    "002/theorems-13-14",
    title="the invariant representation and one layer from it",
    minutes=(0.13, 0.13),
    verdict="corrected",
    setup="10 points in 4 dimensions: closed forms and 100000 random rows.",
    draw=draw,
)
def theorems_13_14(n: int = 10, rows: int = 100_000) -> Outcome:
    """Check the invariant representation in closed form and by Monte Carlo.

    The paper claims that the expected batch after a layer is again invariant and that the cluster
    contracts. Decisive are the expected Gram matrix (not the expected batch), its estimate from random
    rows, and by which factor close pairs grow or shrink in one layer.
    """
    x = depth.invariant_representation(n, 4)
    spread = jax.random.normal(jax.random.key(14), (n, 4)).at[0].set(0.0)

    def layer(key: jax.Array, x: jax.Array, alpha: jax.Array) -> jax.Array:
        z = x @ (jax.random.normal(key, (4, rows)) * jnp.sqrt(2 * alpha / rows))
        return gram(depth._propagation.Stages()(z))

    exact = depth._invariant.one_layer(x)
    measured = layer(jax.random.key(13), x, exact.alpha)
    off = spread / jnp.linalg.norm(spread, axis=1).at[0].set(1.0)[:, None]
    near = depth._invariant.one_layer(x + 1e-6 * off)
    i, j = jnp.triu_indices(n - 1, 1)
    pairs = lambda d: d[1:n, 1:n][i, j]
    growth = jnp.max(pairs(near.expected_distances) / pairs(near.distances))

    def factors(scale: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Distance of a scaled odd point, and the least and largest factor of close pairs in one layer."""
        moved = depth._invariant.one_layer(x.at[0].multiply(scale) + 1e-6 * off)
        ratio = pairs(moved.expected_distances) / pairs(moved.distances)
        return moved.radius, jnp.min(ratio), jnp.max(ratio)

    radii, least, largest = jax.vmap(factors)(jnp.linspace(0.7, 1.8, 45))
    wide = depth._invariant.one_layer(x.at[0].multiply(1.5) + 0.2 / n**2 * off)
    shrink = pairs(wide.expected_distances) / pairs(wide.distances)
    return Outcome(
        name="002/theorems-13-14",
        claim="The expected batch is again invariant, and the cluster contracts.",
        finding="The expected Gram matrix is invariant; the cluster contracts in one layer with R > n/(n-1); "
        f"at the invariant scale close pairs grow by {n**2 / (n**2 - 2 * n + 2):.4f}.",
        data={
            "n": n,
            "exact": exact._asdict(),
            "gram": gram(x),
            "measured_gram": measured,
            "shrink": shrink,
            "radius": wide.radius,
            "invariant radius": exact.radius,
            "radii": radii,
            "least factor": least,
            "largest factor": largest,
        },
        criteria=(
            Criterion(
                "defect of the expected Gram", float(jnp.max(jnp.abs(exact.gram[:n, :n] - gram(x)))), 0, 1e-12
            ),
            Criterion("Monte Carlo error", float(jnp.max(jnp.abs(measured - gram(x)))), high=0.03),
            Criterion("odd . center, any weights", float(jnp.abs(measured[0, 1])), 0, 0),
            Criterion("growth / (n^2/(n^2-2n+2))", float(growth * (n**2 - 2 * n + 2) / n**2), 0.999, 1.001),
            Criterion("one layer, R > n/(n-1): largest factor", float(shrink.max()), high=1),
        ),
    )
