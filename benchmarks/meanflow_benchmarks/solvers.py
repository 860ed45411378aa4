"""Speed of descent: minibatches and gradients against loops written by hand, in the same run."""

from collections.abc import Callable
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from scipy.integrate import solve_ivp

import meanflow as mf
from meanflow_benchmarks.memory import MEGABYTE, program_memory
from meanflow_benchmarks.timing import interleaved

Weights = tuple[jax.Array, jax.Array]
LEARNING_RATE = 0.1


def _loss(w: Weights, x: jax.Array, y: jax.Array) -> jax.Array:
    """Half the mean square error of the mean of a tanh(b . x) over the neurons."""
    return 0.5 * jnp.mean((jnp.mean(w[0][None] * jnp.tanh(x @ w[1].T), axis=1) - y) ** 2)


def _step(w: Weights, x: jax.Array, y: jax.Array) -> Weights:
    rate = LEARNING_RATE * w[0].shape[0]
    return jax.tree.map(lambda u, g: u - rate * g, w, jax.grad(_loss)(w, x, y))


def _problem(width: int, points: int, dim: int) -> tuple[mf.Flow, mf.Cloud, mf.Dataset]:
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (points, dim))
    flow = mf.vanilla("tanh")
    return flow, flow.init(keys[1], width, dim=dim), mf.Dataset(x, jnp.tanh(x[:, 0]))


def minibatches(
    points: int = 200_000,
    dim: int = 20,
    width: int = 100,
    batch: int = 64,
    steps: int = 12_500,
    repeats: int = 3,
) -> dict[str, float]:
    """Descent on minibatches, by epochs and with replacement, against scans written by hand.

    The peers record what ``descend`` records, the energy of all data at the start and at the end; those called ``bare``
    return the weights alone. By epochs the peer permutes all samples once an epoch; with replacement it draws integers.

    Args:
        points, dim: number and dimension of the samples.
        width: number of neurons.
        batch: samples of a batch.
        steps: number of steps, a multiple of the steps of an epoch.
        repeats: measurements of which the best counts.

    Returns:
        Microseconds of processor time a step, and ``ratio_epochs``, ``ratio_replace`` (goal 1.3), and the same over the
        bare peers.
    """
    flow, cloud, data = _problem(width, points, dim)
    key, rounds = jax.random.key(2), points // batch

    def record(run: Callable[[Weights, mf.Dataset], Weights]) -> Callable[..., tuple]:
        def whole(w: Weights, data: mf.Dataset) -> tuple:
            end = run(w, data)
            return end, _loss(w, data.x, data.y), _loss(end, data.x, data.y)

        return jax.jit(whole)

    def by_epochs(w: Weights, data: mf.Dataset) -> Weights:
        def epoch(w: Weights, number: jax.Array) -> tuple[Weights, None]:
            order = jax.random.permutation(jax.random.fold_in(key, number), points)
            rows = order[: rounds * batch].reshape(rounds, batch)
            return jax.lax.scan(lambda w, r: (_step(w, data.x[r], data.y[r]), None), w, rows)[0], None

        return jax.lax.scan(epoch, w, jnp.arange(steps // rounds))[0]

    def replaced(w: Weights, data: mf.Dataset) -> Weights:
        def one(w: Weights, number: jax.Array) -> tuple[Weights, None]:
            rows = jax.random.randint(jax.random.fold_in(key, number), (batch,), 0, points)
            return _step(w, data.x[rows], data.y[rows]), None

        return jax.lax.scan(one, w, jnp.arange(steps))[0]

    start = tuple(cloud.particles)
    settings: dict[str, Any] = {"step": LEARNING_RATE, "observe": _nothing}
    by_epoch, drawn = mf.Batches(batch, key), mf.Batches(batch, key, replace=True)
    epochs_by_hand, replaced_by_hand = record(by_epochs), record(replaced)
    epochs_bare, replaced_bare = jax.jit(by_epochs), jax.jit(replaced)
    seconds = interleaved(
        {
            "epochs": lambda: mf.descend(flow, cloud, data, steps, batches=by_epoch, **settings),
            "epochs_by_hand": lambda: epochs_by_hand(start, data),
            "replace": lambda: mf.descend(flow, cloud, data, steps, batches=drawn, **settings),
            "replace_by_hand": lambda: replaced_by_hand(start, data),
            "epochs_bare": lambda: epochs_bare(start, data),
            "replace_bare": lambda: replaced_bare(start, data),
        },
        repeats,
    )
    ratios = {f"ratio_{n}": seconds[n] / seconds[f"{n}_by_hand"] for n in ("epochs", "replace")}
    ratios |= {f"ratio_{n}_bare": seconds[n] / seconds[f"{n}_bare"] for n in ("epochs", "replace")}
    return {f"{name}_us": 1e6 * value / steps for name, value in seconds.items()} | ratios


def _nothing(flow: mf.Flow, cloud: mf.Cloud, data: mf.Dataset) -> jax.Array:
    return cloud.width


def fixed_steps(
    width: int = 200, points: int = 100, dim: int = 10, steps: int = 1000, repeats: int = 3
) -> dict[str, float]:
    """Fixed steps of the solver Tsit5 by ``solve``, against a scan over steps of diffrax's own solver.

    Args:
        width: number of neurons.
        points, dim: number and dimension of the samples.
        steps: number of steps.
        repeats: measurements of which the best counts.

    Returns:
        Microseconds of processor time a step, ``open_loops_*``, the loops in each program whose length the
        compiler does not know (an accelerator asks the host before each turn of them), and ``ratio_solve`` over the
        scan (goal 1.1).
    """
    flow, cloud, data = _problem(width, points, dim)
    method, size = diffrax.Tsit5(), 0.1

    def scan(cloud: mf.Cloud) -> Any:
        term = diffrax.ODETerm(lambda t, w, _: mf.velocity(flow, cloud.at(w), data))
        state = method.init(term, 0.0, size, cloud.particles, None)

        def one(carry: Any, _: None) -> tuple[Any, None]:
            stepped = method.step(term, 0.0, size, carry[0], None, carry[1], made_jump=False)
            return (stepped[0], stepped[3]), None  # the particles, and the state of the method

        return jax.lax.scan(one, (cloud.particles, state), length=steps)[0][0]

    functions = {
        "solve": lambda cloud: (
            mf.solve(flow, cloud, data, steps * size, solver=method, step=size).final.particles
        ),
        "scan": scan,
    }
    programs = {name: jax.jit(f).lower(cloud).compile() for name, f in functions.items()}
    seconds = interleaved({name: lambda p=p: p(cloud) for name, p in programs.items()}, repeats)  # type: ignore[misc]
    numbers = {f"{name}_us": 1e6 * value / steps for name, value in seconds.items()}
    for name, program in programs.items():
        loops = [line for line in (program.as_text() or "").splitlines() if " while(" in line]
        numbers[f"open_loops_{name}"] = float(sum("known_trip_count" not in line for line in loops))
    return numbers | {"ratio_solve": seconds["solve"] / seconds["scan"]}


def kernel_steps(
    width: int = 2000, points: int = 256, dim: int = 100, steps: int = 40, repeats: int = 3
) -> dict[str, float]:
    """What steps by the kernel, and the change of the kernel as an observable, cost beside plain descent.

    Args:
        width: number of neurons.
        points, dim: number and dimension of the samples.
        steps: number of steps; the kernel is computed once for each 20, and the observable recorded as often.
        repeats: measurements of which the best counts.

    Returns:
        Milliseconds of processor time a step, and megabytes of temporaries of each program.
    """
    flow, cloud, data = _problem(width, points, dim)
    runs: dict[str, dict[str, Any]] = {
        "plain": {"step": LEARNING_RATE, "observe": _nothing},
        "kernel_step": {"step": mf.KernelStep(0.5, 20), "observe": _nothing},
        "kernel_drift": {"step": LEARNING_RATE, "observe": ("kernel_drift",)},
    }
    programs = {
        name: jax.jit(lambda cloud, own=own: mf.descend(flow, cloud, data, steps, every=20, **own).observed)
        .lower(cloud)
        .compile()
        for name, own in runs.items()
    }
    seconds = interleaved({name: lambda p=p: p(cloud) for name, p in programs.items()}, repeats)  # type: ignore[misc]
    memory = {f"{n}_mb": program_memory(p).temporary / MEGABYTE for n, p in programs.items()}
    return {f"{name}_ms": 1e3 * value / steps for name, value in seconds.items()} | memory


def gradients(
    width: int = 200, points: int = 100, dim: int = 10, steps: int = 1000, repeats: int = 5
) -> dict[str, float]:
    """The gradient of the last energy of descent in the targets, against ``jax.grad`` of a plain scan.

    Args:
        width: number of neurons.
        points, dim: number and dimension of the samples.
        steps: number of steps.
        repeats: measurements of which the best counts.

    Returns:
        Milliseconds of processor time, megabytes of temporaries of each program, and ``ratio_checkpoint``,
        ``ratio_full`` (goal 1.2).
    """
    flow, cloud, data = _problem(width, points, dim)

    def by_descend(adjoint: str) -> Callable[[jax.Array], jax.Array]:
        def last(y: jax.Array) -> jax.Array:
            there = mf.Dataset(data.x, y)
            return mf.descend(flow, cloud, there, steps, step=LEARNING_RATE, adjoint=adjoint).energy[-1]

        return last

    def by_hand(y: jax.Array) -> jax.Array:
        step = lambda w, _: (_step(w, data.x, y), None)
        return _loss(jax.lax.scan(step, tuple(cloud.particles), length=steps)[0], data.x, y)

    functions = {"checkpoint": by_descend("checkpoint"), "full": by_descend("full"), "by_hand": by_hand}
    programs = {name: jax.jit(jax.grad(f)).lower(data.y).compile() for name, f in functions.items()}
    seconds = interleaved({name: lambda p=p: p(data.y) for name, p in programs.items()}, repeats)  # type: ignore[misc]
    numbers = {f"{name}_ms": 1e3 * value for name, value in seconds.items()}
    memory = {f"{n}_mb": program_memory(p).temporary / MEGABYTE for n, p in programs.items()}
    ratios = {f"ratio_{n}": seconds[n] / seconds["by_hand"] for n in ("checkpoint", "full")}
    return numbers | memory | ratios


def overlaps(size: int = 4, end: float = 20.0, rate: float = 1.0, repeats: int = 3) -> dict[str, float]:
    """One-pass descent of a committee machine in its overlaps, against scipy's integrator on the same equations.

    The peer is ``scipy.integrate.solve_ivp`` (RK45) on the compiled velocity, at the tolerances of ``solve``. Both
    return the final state; errors are those of its largest entry, against a run with small steps.

    Args:
        size: number of students and of teachers.
        end: time on the clock ``"gradient"``.
        rate: learning rate times d.
        repeats: measurements of which the best counts.

    Returns:
        Milliseconds of processor time, their ratio (goal 0.5), and both errors.
    """
    flow = mf.vanilla("erf", alpha="one", outer=0.0)
    teacher = mf.Cloud(mf.Neurons(jnp.ones(size), jnp.eye(size, 2 * size)))
    key = jax.random.key(0)
    students = mf.Cloud(mf.Neurons(jnp.ones(size), 0.3 * jax.random.normal(key, (size, 2 * size))))
    law, start = mf.flows.GaussianPopulation(flow, teacher).overlaps(students, rate=rate)
    shape, fixed = start.particles.b.shape, start.particles.a

    @jax.jit
    def velocity(b: jax.Array) -> jax.Array:
        here = start.at(mf.Neurons(fixed, b.reshape(shape)))
        return mf.velocity(flow, here, law).b.ravel() / size  # on the gradient clock

    rtol, atol = 1e-4, 1e-6

    def by_scipy() -> np.ndarray:
        first = np.asarray(start.particles.b).ravel()
        return solve_ivp(lambda _, b: np.asarray(velocity(b)), (0.0, end), first, rtol=rtol, atol=atol).y[
            :, -1
        ]

    def by_loop(step: mf.Adaptive | float) -> jax.Array:
        run = mf.solve(flow, start, law, end, clock="gradient", step=step, observe=_nothing)
        return run.final.particles.b.ravel()

    ours = mf.Adaptive(rtol, atol)
    best = by_loop(0.01)
    seconds = interleaved({"solve": lambda: by_loop(ours), "scipy": by_scipy}, repeats)
    return {
        **{f"{name}_ms": 1e3 * value for name, value in seconds.items()},
        "ratio": seconds["solve"] / seconds["scipy"],
        "error_solve": float(jnp.abs(by_loop(ours) - best).max()),
        "error_scipy": float(jnp.abs(by_scipy() - best).max()),
    }
