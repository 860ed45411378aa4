"""Exact transport against scipy and POT, normalization layers against flax: time and error in the same run."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import ot
import scipy.stats
from flax import nnx
from jaxtyping import Array, Float

from meanflow import layers, transport
from meanflow_benchmarks.timing import interleaved


def distances(
    line: int = 100_000,
    cloud: int = 1000,
    uneven: tuple[int, int] = (400, 500),
    dimension: int = 8,
    repeats: int = 10,
) -> dict[str, float]:
    """Exact distances: W_1 of points on the line against numpy and scipy, W_1 and W_2 of clouds against POT.

    Args:
        line: number of points on the line.
        cloud: number of points of two clouds of equal size, for W_1.
        uneven: numbers of points of two clouds of different size, for W_2.
        dimension: dimension of the points of the clouds.
        repeats: measurements of which the best counts.

    Returns:
        Milliseconds of processor time of each job and its peers; ``*_gap``, how far our value is from the peer's; and
        ``ratio_line`` (over numpy, goal 1.1), ``ratio_equal`` and ``ratio_uneven`` (over POT, goal 1.3).
    """
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, line)).astype("float32")
    device = jnp.asarray(x), jnp.asarray(y)
    a, b = rng.normal(size=(2, cloud, dimension)).astype("float32")
    u, v = (rng.normal(size=(count, dimension)).astype("float32") for count in uneven)
    jobs: dict[str, Callable[[], Any]] = {
        "line": lambda: transport.wasserstein(*device),
        "line_numpy": lambda: np.mean(np.abs(np.sort(x) - np.sort(y)), dtype="float64"),
        "line_scipy": lambda: scipy.stats.wasserstein_distance(x, y),
        "equal": lambda: transport.wasserstein(a, b),
        "equal_pot": lambda: _by_pot(a, b, 1),
        "uneven": lambda: transport.wasserstein(u, v, 2),
        "uneven_pot": lambda: _by_pot(u, v, 2),
    }
    peers = {"line": "line_numpy", "equal": "equal_pot", "uneven": "uneven_pot"}
    seconds = interleaved(jobs, repeats)
    out = {f"{name}_ms": 1e3 * value for name, value in seconds.items()}
    out |= {f"{job}_gap": abs(float(jobs[job]()) - float(jobs[peer]())) for job, peer in peers.items()}
    return out | {f"ratio_{job}": seconds[job] / seconds[peer] for job, peer in peers.items()}


def _by_pot(x: np.ndarray, y: np.ndarray, p: int) -> float:
    """Return W_p of two uniform clouds by POT, from the points on."""
    costs = ot.dist(x.astype("float64"), y.astype("float64"), metric="euclidean" if p == 1 else "sqeuclidean")
    return float(ot.emd2(np.full(len(x), 1 / len(x)), np.full(len(y), 1 / len(y)), costs)) ** (1 / p)


def batch_norm(
    batch: int = 256, features: int = 512, images: tuple[int, ...] = (64, 32, 32, 64), repeats: int = 20
) -> dict[str, float]:
    """Forward and backward through one layer on dense batches and on images, and its error on hard data.

    The layers are ours, ours with unitization, flax's default (mean and variance in one pass over the data) and flax
    with two passes. One pass subtracts two large numbers, which data of mean 1e4 and spread 0.1 show.

    Args:
        batch, features: shape of the dense data.
        images: shape of the images, (batch, height, width, channels).
        repeats: measurements of which the best counts.

    Returns:
        Milliseconds of processor time by layer; ``ratio_*`` over the faster layer of flax (goal 1.1); and ``*_error``
        of the output's standard deviation on the hard data, which should be 1.
    """
    # float32 as the layers' parameters are, whatever the precision of the other benchmarks
    hard = 1e4 + 0.1 * jax.random.normal(jax.random.key(1), (4096, 1), jnp.float32)
    makes: dict[str, Callable[..., nnx.Module]] = {
        "ours": layers.BatchNorm,
        "ours_unitized": layers.UnitizedBatchNorm,
        "flax": nnx.BatchNorm,
        "flax_two_pass": partial(nnx.BatchNorm, use_fast_variance=False),
    }
    out: dict[str, float] = {}
    for kind, shape in {"dense": (batch, features), "images": images}.items():
        x = jax.random.normal(jax.random.key(0), shape, jnp.float32)
        seconds = interleaved(
            {name: _gradient(make(shape[-1], rngs=nnx.Rngs(0)), x) for name, make in makes.items()}, repeats
        )
        out |= {f"{kind}_{name}_ms": 1e3 * value for name, value in seconds.items()}
        best = min(seconds["flax"], seconds["flax_two_pass"])
        out |= {f"ratio_{kind}_{name}": seconds[name] / best for name in ("ours", "ours_unitized")}
    return out | {
        f"{n}_error": abs(float(jnp.std(make(1, rngs=nnx.Rngs(0))(hard))) - 1) for n, make in makes.items()
    }


def _gradient(layer: nnx.Module, x: Float[Array, "n ..."]) -> Callable[[], object]:
    """Return the job of computing the gradient of mean(sin(layer(x))) in parameters and x."""
    graph, params, *others = nnx.split(layer, nnx.Param, ...)

    def loss(params: nnx.State, rest: nnx.State, x: Array) -> tuple[Array, nnx.State]:
        model = nnx.merge(graph, params, rest, copy=True)
        value = jnp.mean(jnp.sin(model(x)))
        # the running statistics are part of the work, so the program must return them
        return value, nnx.state(model, nnx.BatchStat)

    step = jax.jit(jax.grad(loss, argnums=(0, 2), has_aux=True))
    return lambda: step(params, others[0], x)
