"""Speed of the core: a velocity against the matrix products it cannot avoid, and what a call costs beside its work."""

import time
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import meanflow as mf
from meanflow.flows import equation
from meanflow_benchmarks.timing import best_time


def velocity_speed(
    width: int = 10_000, points: int = 1000, dim: int = 100, repeats: int = 10, dtype: str = "float32"
) -> dict[str, float]:
    """One velocity of the batch-norm flows and of the vanilla flow, against the products x b^T and w^T x.

    Every velocity needs the inner products of neurons and samples and, for the gradient, a product with the samples
    again; the ratio says what is lost beside them.

    Args:
        width: number of neurons.
        points, dim: number and dimension of the samples.
        repeats: measurements of which the best counts.
        dtype: precision of all arrays.

    Returns:
        Seconds of the two bare products and of each velocity, and ``ratio_*``, velocity over products.
    """
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (points, dim), dtype)
    data = mf.Dataset(x, jnp.abs(x[:, 0]))
    b = jax.random.normal(keys[1], (width, dim), dtype)
    a = jax.random.normal(keys[2], (width,), dtype)
    raw = mf.Cloud(mf.Neurons(a, b))

    products = jax.jit(lambda x, b, w: (x @ b.T, w.T @ x))
    w = jax.random.normal(keys[3], (points, width), dtype)
    numbers = {"products": best_time(products, x, b, w, repeats=repeats)[1]}
    flows = {
        "vanilla": (mf.vanilla(), raw),
        "batchnorm": (mf.batchnorm().bind(data), raw),
        "manifold": (mf.batchnorm_manifold().bind(data), mf.geometry.project(raw, data.moments()[1])),
    }
    for name, (flow, cloud) in flows.items():
        numbers[name] = best_time(jax.jit(mf.velocity), flow, cloud, data, repeats=repeats)[1]
        numbers[f"ratio_{name}"] = numbers[name] / numbers["products"]
    return numbers


def dispatch(width: int = 16, points: int = 20, dim: int = 2, calls: int = 200) -> dict[str, float]:
    """What a call from Python costs on a problem so small that its work is nothing: checks, binding, compiled call.

    Public functions are compared with the same function inside ``jax.jit``, which checks nothing at run time, and with
    ``equinox.filter_jit`` of the inner function on the same arguments. Times are processor time, interleaved.

    Args:
        width, points, dim: size of the problem.
        calls: calls of each function; the median counts.

    Returns:
        Microseconds of each call, and ``excess_solve`` (milliseconds above the jitted call, goal 0.5) and
        ``ratio_energy``, ``ratio_velocity`` (over filter_jit, goal 3).
    """
    x = jax.random.normal(jax.random.key(0), (points, dim))
    data = mf.Dataset(x, jnp.abs(x[:, 0]))
    flow = mf.vanilla("tanh")
    cloud = flow.init(jax.random.key(1), width, dim=dim)
    solved = jax.jit(lambda flow, cloud, data: mf.solve(flow, cloud, data, 1.0, step=0.5))
    jobs: dict[str, Callable[[], object]] = {
        "solve": lambda: mf.solve(flow, cloud, data, 1.0, step=0.5),
        "solve_jit": lambda: solved(flow, cloud, data),
        "descend": lambda: mf.descend(flow, cloud, data, 2, step=0.5),
    }
    for name in ("energy", "velocity"):
        public, inner = getattr(mf, name), eqx.filter_jit(getattr(equation, name))
        jobs[name] = lambda public=public: public(flow, cloud, data)  # type: ignore[misc]
        jobs[f"{name}_filter_jit"] = lambda inner=inner: inner(flow, cloud, data)  # type: ignore[misc]
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(calls + 2):  # the first two compile and warm up
        for name, job in jobs.items():
            start = time.process_time()
            jax.block_until_ready(job())
            seconds[name].append(time.process_time() - start)
    median = {name: float(np.median(times[2:])) for name, times in seconds.items()}
    numbers = {f"{name}_us": 1e6 * value for name, value in median.items()}
    numbers["excess_solve"] = 1e3 * (median["solve"] - median["solve_jit"])
    return numbers | {f"ratio_{n}": median[n] / median[f"{n}_filter_jit"] for n in ("energy", "velocity")}
