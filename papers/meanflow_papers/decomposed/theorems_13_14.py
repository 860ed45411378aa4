"""Theorems 13 and 14: the invariant representation and one layer from it."""

import jax
import jax.numpy as jnp

from meanflow import depth
from meanflow.depth.observables import gram
from meanflow_papers.entry import entry
from meanflow_papers.outcome import Criterion, Outcome


@entry(
    "002/theorems-13-14",
    title="the invariant representation and one layer from it",
    minutes=(0.2, 0.2),
    verdict="corrected",
    setup="10 points in 4 dimensions: closed forms and 100000 random rows.",
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
        return gram(depth.propagation.Stages()(z))

    exact = depth.invariant.one_layer(x)
    measured = layer(jax.random.key(13), x, exact.alpha)
    off = spread / jnp.linalg.norm(spread, axis=1).at[0].set(1.0)[:, None]
    near = depth.invariant.one_layer(x + 1e-6 * off)
    i, j = jnp.triu_indices(n - 1, 1)
    pairs = lambda d: d[1:n, 1:n][i, j]
    growth = jnp.max(pairs(near.expected_distances) / pairs(near.distances))
    wide = depth.invariant.one_layer(x.at[0].multiply(1.5) + 0.2 / n**2 * off)
    shrink = pairs(wide.expected_distances) / pairs(wide.distances)
    return Outcome(
        name="002/theorems-13-14",
        claim="The expected batch is again invariant, and the cluster contracts.",
        finding="The expected Gram matrix is invariant; the cluster contracts in one layer with R > n/(n-1); "
        f"at the invariant scale close pairs grow by {n**2 / (n**2 - 2 * n + 2):.4f}.",
        data={"exact": exact._asdict(), "measured_gram": measured, "shrink": shrink, "radius": wide.radius},
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
