"""Exact transport against scipy and POT, normalisation layers against flax: time and error in the same run."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from flax import nnx

from meanflow import layers, transport
from meanflow_benchmarks.timing import best_time


def distances(
    line: int = 100_000, cloud: int = 1000, dimension: int = 8, repeats: int = 3
) -> dict[str, float]:
    """Seconds of exact W_1: sorted on the line against scipy, by assignment against POT; and the largest gap.

    Returns POT's entries as NaN where it is not installed (it is an extra of the tests).
    """
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, line)).astype("float32")
    a, b = rng.normal(size=(2, cloud, dimension)).astype("float32")
    device = jnp.asarray(x), jnp.asarray(y)
    compile_line, ours_line = best_time(jax.jit(transport.wasserstein), *device, repeats=repeats)
    _, scipy_line = best_time(scipy.stats.wasserstein_distance, x, y, repeats=repeats)
    _, ours_cloud = best_time(transport.wasserstein, a, b, repeats=repeats)
    out = {
        "line_seconds": ours_line,
        "line_first_call_seconds": compile_line,
        "line_scipy_seconds": scipy_line,
        "line_gap": abs(float(transport.wasserstein(*device)) - scipy.stats.wasserstein_distance(x, y)),
        "cloud_seconds": ours_cloud,
    }
    try:
        import ot
    except ImportError:
        return out | {"cloud_pot_seconds": float("nan"), "cloud_gap": float("nan")}
    mass = np.full(cloud, 1 / cloud)
    peer = lambda: ot.emd2(mass, mass, ot.dist(a.astype("float64"), b.astype("float64"), metric="euclidean"))
    _, pot = best_time(peer, repeats=repeats)
    return out | {"cloud_pot_seconds": pot, "cloud_gap": abs(float(transport.wasserstein(a, b)) - peer())}


def batch_norm(batch: int = 256, features: int = 512, repeats: int = 20) -> dict[str, float]:
    """Seconds of forward and backward through one layer, and its error on data of mean 1e4 and spread 0.1.

    Rows: ours, ours with unitization, flax's default (one pass) and flax with two passes. The error is that of
    the output's standard deviation, which should be 1.
    """
    x = jax.random.normal(jax.random.key(0), (batch, features))
    hard = 1e4 + 0.1 * jax.random.normal(jax.random.key(1), (4096, 1))
    makes = {
        "ours": layers.BatchNorm,
        "ours_unitized": layers.UnitizedBatchNorm,
        "flax": nnx.BatchNorm,
        "flax_two_pass": partial(nnx.BatchNorm, use_fast_variance=False),
    }
    out: dict[str, float] = {}
    for name, make in makes.items():
        graph, params, *rest = nnx.split(make(features, rngs=nnx.Rngs(0)), nnx.Param, ...)

        def loss(params, stats, x, graph=graph):
            model = nnx.merge(graph, params, stats, copy=True)
            value = jnp.mean(jnp.sin(model(x)))
            return value, nnx.state(model, nnx.BatchStat)

        step = jax.jit(jax.grad(loss, argnums=(0, 2), has_aux=True))
        first, best = best_time(step, params, rest[0], x, repeats=repeats)
        out |= {f"{name}_seconds": best, f"{name}_first_call_seconds": first}
        out[f"{name}_error"] = abs(float(jnp.std(make(1, rngs=nnx.Rngs(0))(hard))) - 1)
    return out
