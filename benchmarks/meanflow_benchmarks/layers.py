"""Exact transport against scipy and POT, normalization layers against flax: time and error in the same run."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from flax import nnx
from jaxtyping import Array, Float

from meanflow import layers, transport
from meanflow_benchmarks.timing import best_time


def distances(
    line: int = 100_000, cloud: int = 1000, dimension: int = 8, repeats: int = 3
) -> dict[str, float]:
    """Seconds of the exact distance W_1: sorted on the line against scipy, by assignment against POT.

    Args:
        line: number of points on the line.
        cloud, dimension: number and dimension of the points elsewhere.
        repeats: measurements of which the best counts.

    Returns:
        Seconds of each, and ``*_gap``, how far our value is from the peer's. POT's entries are NaN where it is not
        installed.
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

    The layers are ours, ours with unitization, flax's default (mean and variance in one pass over the data) and flax
    with two passes. One pass subtracts two large numbers, which the hard data show.

    Args:
        batch, features: shape of the data.
        repeats: measurements of which the best counts.

    Returns:
        Seconds by layer, and ``*_error`` of the output's standard deviation on the hard data, which should be 1.
    """
    # float32 as the layers' parameters are, whatever the precision of the other benchmarks
    x = jax.random.normal(jax.random.key(0), (batch, features), jnp.float32)
    hard = 1e4 + 0.1 * jax.random.normal(jax.random.key(1), (4096, 1), jnp.float32)
    makes: dict[str, Callable[..., nnx.Module]] = {
        "ours": layers.BatchNorm,
        "ours_unitized": layers.UnitizedBatchNorm,
        "flax": nnx.BatchNorm,
        "flax_two_pass": partial(nnx.BatchNorm, use_fast_variance=False),
    }
    out: dict[str, float] = {}
    for name, make in makes.items():
        first, best = _gradient_time(make(features, rngs=nnx.Rngs(0)), x, repeats)
        out |= {f"{name}_seconds": best, f"{name}_first_call_seconds": first}
        out[f"{name}_error"] = abs(float(jnp.std(make(1, rngs=nnx.Rngs(0))(hard))) - 1)
    return out


def _gradient_time(layer: nnx.Module, x: Float[Array, "n k"], repeats: int) -> tuple[float, float]:
    """Return the seconds of the first and of the best gradient of mean(sin(layer(x))) in parameters and x."""
    graph, params, *others = nnx.split(layer, nnx.Param, ...)

    def loss(params: nnx.State, rest: nnx.State, x: Array) -> tuple[Array, nnx.State]:
        model = nnx.merge(graph, params, rest, copy=True)
        value = jnp.mean(jnp.sin(model(x)))
        # the running statistics are part of the work, so the program must return them
        return value, nnx.state(model, nnx.BatchStat)

    step = jax.jit(jax.grad(loss, argnums=(0, 2), has_aux=True))
    return best_time(step, params, others[0], x, repeats=repeats)
