"""The main programs of the library at the sizes people run, as functions of arrays, for compilers of other devices.

Each entry of ``PROGRAMS`` builds (function, arguments): the arguments are shapes, so that nothing is drawn or run. All
numbers are float32.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import PyTree

import meanflow as mf
from meanflow import kernels
from meanflow_benchmarks import networks
from meanflow_benchmarks.hlo import Program, Work

STEPS = 1000  # of the runs below


class Job(NamedTuple):
    """A program to compile.

    Attributes:
        function: of arrays.
        arguments: their shapes and types.
        steps: how many steps of a solver it takes, 0 where their number is not fixed.
        loop: the place of the loop over steps among the loops of the program, where their number is not fixed.
        mesh, specs: devices over which the arguments are split and how, for programs of several devices.
    """

    function: Callable[..., PyTree]
    arguments: tuple[PyTree, ...]
    steps: int = 0
    loop: int | None = None
    mesh: Mesh | None = None
    specs: PyTree = None

    def unit(self, built: Program) -> Work:
        """Return the work of one step of a run, or of the whole program where it has no steps."""
        if self.steps:
            return built.step_loop(self.steps).work
        return built.work if self.loop is None else built.loops[self.loop].work


def shape(*sizes: int) -> Any:
    """Return the description of an array of float32, which stands where a function is given the array."""
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def line(width: int, samples: int) -> tuple[PyTree, ...]:
    """Return neurons and data of a univariate network."""
    return mf.Affine(shape(width), shape(width), shape(width)), shape(samples), shape(samples)


def plane(width: int, samples: int, dim: int) -> tuple[PyTree, ...]:
    """Return neurons and data of a two-layer network."""
    return mf.Neurons(shape(width), shape(width, dim)), shape(samples, dim), shape(samples)


def velocity(flow: mf.Flow) -> Callable[..., PyTree]:
    """Return one evaluation of the velocity as a function of (particles, x, y)."""
    return lambda w, x, y: mf.velocity(flow, mf.Cloud(w), mf.Dataset(x, y))


def descent(flow: mf.Flow, steps: int = STEPS) -> Callable[..., PyTree]:
    """Return a run of gradient descent that records nothing but the energy of start and end."""

    def run(w: PyTree, x: jax.Array, y: jax.Array) -> PyTree:
        out = mf.descend(flow, mf.Cloud(w), mf.Dataset(x, y), steps, step=0.1, observe={}, throw=False)
        return out.final.particles, out.energy

    return run


def solution(flow: mf.Flow, end: float, **options: Any) -> Callable[..., PyTree]:
    """Return a run in continuous time."""

    def run(w: PyTree, x: jax.Array, y: jax.Array) -> PyTree:
        out = mf.solve(flow, mf.Cloud(w), mf.Dataset(x, y), end, observe={}, throw=False, **options)
        return out.final.particles, out.energy

    return run


def gradient(flow: mf.Flow, steps: int) -> Callable[..., PyTree]:
    """Return the derivative of the last energy of a descent with respect to the first particles."""

    def last(w: PyTree, x: jax.Array, y: jax.Array) -> jax.Array:
        return descent(flow, steps)(w, x, y)[1][-1]

    return jax.grad(last)


def sweep(
    flow: mf.Flow,
    *,
    widths: tuple[int, ...],
    seeds: int,
    dim: int | None,
    mesh: Mesh | None = None,
    **settings: Any,
) -> Job:
    """Return the program of one chunk of a sweep: all its cells side by side, on one device or split over a mesh."""
    samples = 64
    x = np.random.default_rng(0).normal(size=samples if dim is None else (samples, dim)).astype(np.float32)
    data = mf.Dataset(x, np.sin(3 * x) if dim is None else np.sin(3 * x[:, 0]))
    plan = mf.sweep(flow, data, widths=widths, seeds=seeds, step=0.1, compute=False, **settings)
    group = plan.groups[0]
    inputs = plan.inputs(group, group.cells)

    def run(data: mf.Dataset, inputs: PyTree) -> PyTree:
        return plan.batched(group, data, inputs, mesh)

    described = jax.tree.map(lambda u: jax.ShapeDtypeStruct(u.shape, u.dtype), (data, inputs))
    # clouds are split along both axes, everything else along the cells
    split = jax.tree.map(lambda _: PartitionSpec("sweep"), inputs)
    both = lambda u: PartitionSpec(*("sweep", "particles")[: min(u.ndim, 2)])
    split["cloud"] = jax.tree.map(both, inputs["cloud"])
    specs = (jax.tree.map(lambda _: PartitionSpec(), data), split)
    return Job(run, described, settings.get("steps", 0), -1, mesh, specs)


def kernel(name: str, **options: Any) -> Job:
    """Return the tangent kernel of one of the networks of the kernel benchmarks."""
    apply, params, x = networks.NETWORKS[name]()
    function = lambda p, x: kernels.empirical_ntk(apply, p, x, **options)
    return Job(function, jax.tree.map(lambda u: shape(*u.shape), (params, x)))


EULER: dict[str, Any] = {"solver": diffrax.Euler(), "step": 1e-3}
TANH: dict[str, Any] = {"widths": (128,), "seeds": 32, "dim": 10}

PROGRAMS: dict[str, Callable[[], Job]] = {
    "force, fast": lambda: Job(velocity(mf.full(forces="fast")), line(100_000, 1000)),
    "force, dense": lambda: Job(velocity(mf.full(forces="dense")), line(100_000, 1000)),
    "force, auto": lambda: Job(velocity(mf.full()), line(100_000, 1000)),
    "descend, univariate, m = 1e6, n = 1e3": lambda: Job(descent(mf.full()), line(1_000_000, 1000), STEPS),
    "descend, univariate, fast forces": lambda: Job(
        descent(mf.full(forces="fast")), line(10_000, 1000), STEPS
    ),
    "descend, tanh, m = 128, n = 64": lambda: Job(descent(mf.vanilla("tanh")), plane(128, 64, 10), STEPS),
    "descend, batch norm, m = 128, n = 64": lambda: Job(
        descent(mf.batchnorm("tanh")), plane(128, 64, 10), STEPS
    ),
    "solve, Euler, m = 128, n = 64": lambda: Job(
        solution(mf.vanilla("tanh"), 1.0, **EULER), plane(128, 64, 10), loop=-1
    ),
    "solve, adaptive, m = 128, n = 64": lambda: Job(
        solution(mf.vanilla("tanh"), 1.0), plane(128, 64, 10), loop=-1
    ),
    "sweep of 32, descend, nothing observed": lambda: sweep(
        mf.vanilla("tanh"), steps=STEPS, observe=[], **TANH
    ),
    "sweep of 32, Euler, nothing observed": lambda: sweep(
        mf.vanilla("tanh"), t1=100.0, solver=diffrax.Euler(), observe=[], **TANH
    ),
    "sweep of 32, default observables": lambda: sweep(mf.vanilla("tanh"), steps=STEPS, every=100, **TANH),
    "sweep of 32, univariate, default observables": lambda: sweep(
        mf.full(alpha="sqrt"), steps=STEPS, every=100, widths=(128,), seeds=32, dim=None
    ),
    "gradient of 64 steps, m = 1e4, n = 1e3, d = 100": lambda: Job(
        gradient(mf.vanilla("tanh"), 64), plane(10_000, 1000, 100), 64
    ),
    "gradient of 64 steps, univariate, m = 1e4, n = 1e3": lambda: Job(
        gradient(mf.full(), 64), line(10_000, 1000), 64
    ),
    "sliding, univariate, m = 200, n = 20": lambda: Job(
        solution(mf.full(), 1.0, solver="sliding", step=0.01), line(200, 20), loop=0
    ),
    "sliding, univariate, m = 8192, n = 1e3": lambda: Job(
        solution(mf.full(), 1.0, solver="sliding", step=0.01), line(8192, 1000), loop=0
    ),
    "sliding, d = 10, m = 200, n = 100": lambda: Job(
        solution(mf.vanilla("relu"), 1.0, solver="sliding", step=0.01), plane(200, 100, 10), loop=0
    ),
    "kernel, dense": lambda: kernel("dense, 1 output"),
    "kernel, dense, Jacobian": lambda: kernel("dense, 1 output", method="jacobian"),
    "kernel, dense, 10 outputs": lambda: kernel("dense, 10 outputs"),
    "kernel, cnn": lambda: kernel("cnn", outputs="trace"),
    "kernel, cnn, 64 channels": lambda: kernel("cnn, 64 channels", outputs="trace"),
    "kernel, transformer": lambda: kernel("transformer"),
}
