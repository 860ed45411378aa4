"""Speed of the core: a velocity against the matrix products it cannot avoid, and what a call costs beside its work."""

import time
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import meanflow as mf
from meanflow_benchmarks.memory import MEGABYTE, program_memory
from meanflow_benchmarks.timing import interleaved


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
        Seconds of processor time of the two bare products and of each velocity, and ``ratio_*``, their quotient.
    """
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (points, dim), dtype)
    data = mf.Dataset(x, jnp.abs(x[:, 0]))
    b = jax.random.normal(keys[1], (width, dim), dtype)
    a = jax.random.normal(keys[2], (width,), dtype)
    raw = mf.Cloud(mf.Neurons(a, b))

    products = jax.jit(lambda x, b, w: (x @ b.T, w.T @ x))
    w = jax.random.normal(keys[3], (points, width), dtype)
    jobs: dict[str, Callable[[], object]] = {"products": lambda: products(x, b, w)}
    flows = {
        "vanilla": (mf.vanilla(), raw),
        "batchnorm": (mf.batchnorm().bind(data), raw),
        "manifold": (mf.batchnorm_manifold().bind(data), mf.geometry.project(raw, data.moments()[1])),
    }
    for name, (flow, cloud) in flows.items():
        jobs[name] = lambda flow=flow, cloud=cloud: mf.velocity(flow, cloud, data)  # type: ignore[misc]
    seconds = interleaved(jobs, repeats)
    return seconds | {f"ratio_{name}": seconds[name] / seconds["products"] for name in flows}


def growth(
    widths: tuple[int, int] = (20_000, 80_000),
    points: tuple[int, int] = (2000, 8000),
    dim: int = 10,
    repeats: int = 3,
) -> dict[str, float]:
    """How the time of one velocity grows with the number of neurons and of samples beyond the caches (goal 1).

    Args:
        widths: two numbers of neurons, at the first number of samples.
        points: two numbers of samples, at the first number of neurons.
        dim: dimension of the samples.
        repeats: measurements of which the best counts.

    Returns:
        Milliseconds of processor time, and the exponents ``slope_width`` and ``slope_points``.
    """
    flow, jobs = mf.vanilla("tanh"), {}
    for width, count in ((widths[0], points[0]), (widths[1], points[0]), (widths[0], points[1])):
        x = jax.random.normal(jax.random.key(0), (count, dim))
        cloud, data = flow.init(jax.random.key(1), width, dim=dim), mf.Dataset(x, jnp.tanh(x[:, 0]))
        jobs[f"m{width}_n{count}"] = lambda cloud=cloud, data=data: mf.velocity(flow, cloud, data)
    seconds = interleaved(jobs, repeats)
    base, wide, many = seconds.values()
    return {f"{name}_ms": 1e3 * value for name, value in seconds.items()} | {
        "slope_width": float(np.log(wide / base) / np.log(widths[1] / widths[0])),
        "slope_points": float(np.log(many / base) / np.log(points[1] / points[0])),
    }


def tangent_kernel(
    points: int = 256, width: int = 2000, dim: int = 100, repeats: int = 10
) -> dict[str, float]:
    """The tangent kernel of two trainable layers of tanh neurons, against its formula by hand.

    By hand it is K = (H H' + (D D') o (X X')) / m with H = tanh(x b') and D = a tanh'(x b').

    Args:
        points, dim: number and dimension of the samples.
        width: number of neurons.
        repeats: measurements of which the best counts.

    Returns:
        Milliseconds of processor time, ``gap``, the largest difference over the largest entry, ``ratio`` (goal 1.1).
    """
    x = jax.random.normal(jax.random.key(0), (points, dim))
    flow = mf.vanilla("tanh")
    cloud = flow.init(jax.random.key(1), width, dim=dim)

    @jax.jit
    def by_hand(a: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ b.T)
        d = a[None, :] * (1 - h**2)
        return (h @ h.T + (d @ d.T) * (x @ x.T)) / a.shape[0]

    jobs: dict[str, Callable[[], jax.Array]] = {
        "ours": lambda: mf.tangent_kernel(flow, cloud, x),
        "by_hand": lambda: by_hand(*cloud.particles, x),
    }
    seconds, ours, peer = interleaved(jobs, repeats), jobs["ours"](), jobs["by_hand"]()
    gap = float(jnp.max(jnp.abs(ours - peer)) / jnp.max(jnp.abs(peer)))
    return {f"{name}_ms": 1e3 * value for name, value in seconds.items()} | {
        "gap": gap,
        "ratio": seconds["ours"] / seconds["by_hand"],
    }


class _Whole(type(mf.vanilla().feature)):  # type: ignore[misc]
    """Neurons of two layers, treated all at once whatever their number."""

    def blocks(self, cloud: mf.Cloud, x: jax.Array) -> int:
        """Return 1."""
        return 1


def blocks(
    widths: tuple[int, ...] = (1000, 10_000, 40_000),
    points: int = 1000,
    dim: int = 10,
    steps: int = 10,
    repeats: int = 3,
) -> dict[str, float]:
    """Descent in blocks of neurons, as the library chooses them, against all neurons at once, for growing widths.

    Args:
        widths: numbers of neurons, growing.
        points, dim: number and dimension of the samples.
        steps: steps of descent.
        repeats: measurements of which the best counts.

    Returns:
        Milliseconds of processor time a step and megabytes of temporaries of each, ``ratio_*`` of the times, and
        ``growth``, the exponent of the time in blocks between the last two widths (goal 1).
    """
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (points, dim))
    data = mf.Dataset(x, jnp.tanh(x[:, 0]))
    chosen = mf.vanilla("tanh")
    flows = {"blocks": chosen, "whole": mf.flows.make_flow(_Whole(jnp.tanh), mf.geometry.Space())}
    programs: dict[str, jax.stages.Compiled] = {}
    clouds = {}
    for width in widths:
        cloud = chosen.init(keys[1], width, dim=dim)
        for name, flow in flows.items():
            run = jax.jit(lambda cloud, flow=flow: mf.descend(flow, cloud, data, steps, step=0.1).final)
            programs[f"{name}_{width}"], clouds[f"{name}_{width}"] = run.lower(cloud).compile(), cloud
    seconds = interleaved({name: lambda n=name: programs[n](clouds[n]) for name in programs}, repeats)  # type: ignore[misc]
    numbers = {f"{name}_ms": 1e3 * value / steps for name, value in seconds.items()}
    numbers |= {f"{n}_mb": program_memory(p).temporary / MEGABYTE for n, p in programs.items()}
    numbers |= {f"ratio_{w}": seconds[f"blocks_{w}"] / seconds[f"whole_{w}"] for w in widths}
    last = [seconds[f"blocks_{w}"] for w in widths[-2:]]
    return numbers | {"growth": float(np.log(last[1] / last[0]) / np.log(widths[-1] / widths[-2]))}


def dispatch(width: int = 16, points: int = 20, dim: int = 2, calls: int = 200) -> dict[str, float]:
    """What a call from Python costs on a problem so small that its work is nothing: checks, binding, compiled call.

    Public functions are compared with the same function inside ``jax.jit``, which checks nothing at run time, and with
    ``equinox.filter_jit`` of the inner function on the same arguments. ``batchnorm`` is a velocity under batch norm,
    ``ntk`` an empirical kernel of a small network. Times are processor time, interleaved.

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
    normed = mf.batchnorm("tanh").bind(data)
    apply = lambda w, x: jnp.tanh(x @ w[0]) @ w[1]
    weights = (jnp.ones((dim, width)), jnp.ones((width, 1)))
    kernel = lambda w, x: mf.kernels.empirical_ntk(apply, w, x, stats="frozen")
    kernel_jit = jax.jit(kernel)
    jobs |= {
        "batchnorm": lambda: mf.velocity(normed, cloud, data),
        "ntk": lambda: kernel(weights, x),
        "ntk_jit": lambda: kernel_jit(weights, x),
    }
    for name in ("energy", "velocity"):
        public, inner = getattr(mf, name), eqx.filter_jit(getattr(mf, name))
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
