"""Cost of univariate forces and of the sliding solver, with peers measured in the same run."""

import time
from collections.abc import Callable

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from meanflow import univariate as uni
from meanflow.flows import Flow, velocity
from meanflow.measures import Affine, Cloud, Dataset
from meanflow.solvers import Adaptive, descend, solve
from meanflow_benchmarks.memory import GIGABYTE, peak_bytes
from meanflow_benchmarks.timing import best_time, interleaved, timed

SLIDING_EVALUATIONS = 3  # forces in a step of the sliding solver


def _problem(
    width: int, samples: int, seed: int = 0, dtype: DTypeLike = jnp.float32
) -> tuple[Cloud, Dataset]:
    """Return Gaussian neurons, each twice with c = 1 and c = -1 (so that f = 0 at the start), and a sinusoid."""
    a, b = jax.random.normal(jax.random.key(seed), (2, width // 2), dtype)
    c = jnp.concatenate([jnp.ones(width // 2, dtype), -jnp.ones(width // 2, dtype)])
    x = jnp.linspace(-1, 1, samples, dtype=dtype)
    cloud = Cloud(Affine(jnp.concatenate([a, a]), jnp.concatenate([b, b]), c))
    return cloud, Dataset(x, jnp.sin(6 * x))


@eqx.filter_jit
def _evaluate(flow: Flow, cloud: Cloud, data: Dataset) -> Affine:
    return velocity(flow, cloud, data)


@eqx.filter_jit
def _autodiff(cloud: Cloud, data: Dataset) -> Affine:
    """Return the gradient the plain way: reverse mode through the dense network."""

    def loss(w: Affine) -> Float[Array, ""]:
        z = jax.nn.relu(w.a[None, :] * data.x[:, None] - w.b[None, :])
        f = z @ w.c / cloud.size
        return 0.5 * jnp.sum(data.weights * (f - data.y) ** 2)

    return jax.grad(loss)(cloud.particles)


def _exponent(sizes: tuple[int, ...], seconds: list[float]) -> float:
    """Return the least-squares slope of log seconds against log size."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def force_cost(
    width: int = 100_000,
    samples: tuple[int, ...] = (20, 100, 500, 1000, 5000),
    widths: tuple[int, ...] = (1000, 10_000, 100_000, 1_000_000),
    fixed: int = 1000,
) -> dict[str, float | list[int] | list[float]]:
    """Seconds per force evaluation by number of samples and by width, and the exponents of their growth.

    Args:
        width: the width at which the number of samples varies.
        samples: those numbers.
        widths: the widths at ``fixed`` samples.
        fixed: that number.
    """
    fast = uni.full(forces="fast")

    def measure(m: int, s: int) -> float:
        cloud, data = _problem(m, s)
        return best_time(_evaluate, fast, cloud, data)[1]

    over_s = [measure(width, s) for s in samples]
    over_m = [measure(m, fixed) for m in widths]
    return {
        "samples": list(samples),
        "seconds_over_samples": over_s,
        "slope_samples": _exponent(samples, over_s),
        "widths": list(widths),
        "seconds_over_widths": over_m,
        "slope_widths": _exponent(widths, over_m),
    }


def against_dense(width: int = 100_000, samples: int = 1000) -> dict[str, float]:
    """Seconds of the fast forces, the dense forces and autodiff on one problem, and of forces="auto" at 20 samples.

    Args:
        width, samples: size of the problem.
    """
    cloud, data = _problem(width, samples)
    few = _problem(width, 20)
    seconds = {
        "fast": best_time(_evaluate, uni.full(forces="fast"), cloud, data)[1],
        "dense": best_time(_evaluate, uni.full(forces="dense"), cloud, data, repeats=2)[1],
        "autodiff": best_time(_autodiff, cloud, data, repeats=2)[1],
        "auto_20": best_time(_evaluate, uni.full(forces="auto"), *few)[1],
        "dense_20": best_time(_evaluate, uni.full(forces="dense"), *few)[1],
    }
    return seconds | {"speedup_over_autodiff": seconds["autodiff"] / seconds["fast"]}


def by_hand(width: int = 100_000, samples: int = 1000, steps: int = 20, repeats: int = 5) -> dict[str, float]:
    """Steps of descent with fast forces, against a scan by hand that looks knots up with ``searchsorted``.

    The peer orders nothing at run time, like ours, and takes neurons on samples for active or not as rounding has it.

    Args:
        width, samples: size of the problem.
        steps: steps of descent.
        repeats: measurements of which the best counts.

    Returns:
        Nanoseconds of processor time a neuron and step, ``gap``, the largest difference of the coordinates over the
        largest, and ``ratio`` (goal 1.1) of the call from Python, ``ours``, which also records the energy and the
        neurons at both ends. ``ratio_steps`` is that of the steps alone, ``ours_steps``, as the peer takes them.
    """
    cloud, data = _problem(width, samples)
    flow, size = uni.full(forces="fast"), 0.1
    peer = jax.jit(lambda w: _descent_by_hand(w, data, size, steps))
    called = lambda w: descend(flow, cloud.at(w), data, steps, step=size).final.particles
    program = jax.jit(called)
    jobs = {
        "ours": lambda: called(cloud.particles),
        "by_hand": lambda: peer(cloud.particles),
        "ours_steps": lambda: program(cloud.particles),
    }
    seconds, ours, theirs = interleaved(jobs, repeats), jobs["ours"](), jobs["by_hand"]()
    gap = max(float(jnp.max(jnp.abs(u - v)) / jnp.max(jnp.abs(v))) for u, v in zip(ours, theirs, strict=True))
    return {f"{name}_ns": 1e9 * value / width / steps for name, value in seconds.items()} | {
        "gap": gap,
        "ratio": seconds["ours"] / seconds["by_hand"],
        "ratio_steps": seconds["ours_steps"] / seconds["by_hand"],
    }


def _descent_by_hand(w: Affine, data: Dataset, size: float, steps: int) -> Affine:
    """Descend on neurons c relu(a x - b), averaged: forces are differences of cumulative sums over sorted samples."""
    x, y, q = data.x, data.y, data.weights
    count = x.shape[0]

    def step(w: Affine, _: None) -> tuple[Affine, None]:
        a, b, c = w
        # samples before this place are on the left of the knot; a > 0 is active on its right, a < 0 on its left
        place, right = jnp.searchsorted(x, b / a, side="right"), a > 0
        sides = [
            jax.ops.segment_sum(u, jnp.where(right, place, place + count + 1), 2 * count + 2).reshape(2, -1)
            for u in (c * a, c * b)
        ]
        slope, shift = (jnp.cumsum(u[0])[:-1] + jnp.cumsum(u[1][::-1])[::-1][1:] for u in sides)
        g = q * ((x * slope - shift) / a.shape[0] - y)
        sums = [jnp.concatenate([jnp.zeros(1, x.dtype), jnp.cumsum(u)]) for u in (g * x, g)]
        along, up = (jnp.where(right, total[-1] - total[place], total[place]) for total in sums)
        return Affine(a - size * c * along, b + size * c * up, c - size * (a * along - b * up)), None

    return jax.lax.scan(step, w, length=steps)[0]


def crossover(width: int = 100_000, samples: tuple[int, ...] = (10, 20, 40, 80)) -> dict[str, list[float]]:
    """Seconds of the fast and the dense forces around the number of samples where they meet.

    Args:
        width: number of neurons.
        samples: the numbers of samples to measure.
    """
    rows: dict[str, list[float]] = {"fast": [], "dense": []}
    for s in samples:
        cloud, data = _problem(width, s)
        for kind, row in rows.items():
            flow = uni.full(forces=kind)
            row.append(best_time(_evaluate, flow, cloud, data)[1])
    return {"samples": [float(s) for s in samples], **rows}


def against_tsit5(width: int = 200, end: float = 20.0, max_steps: int = 200_000) -> dict[str, float]:
    """Force evaluations at equal error of the parameters: sliding steps against adaptive Tsit5.

    The error is the largest difference from a sliding run with a step of 0.05 / 64. The step of the sliding solver is
    halved until its error is at most that of Tsit5, which takes 6 evaluations per step.

    Args:
        width: number of neurons, coupled through 10 samples.
        end: time at which the parameters are compared.
        max_steps: limit of the adaptive solver; ``tsit5_reached_the_end`` is 0 where it was not enough.
    """
    rng = np.random.default_rng(0)
    x = np.linspace(-1, 1, 10)
    data = Dataset(x, np.sin(4 * x), weights="sum")
    cloud = Cloud(Affine(*rng.standard_normal((3, width))))
    flow = uni.full(alpha="sqrt")
    run = lambda **options: solve(flow, cloud, data, end, clock="gradient", **options)
    exact = run(solver="sliding", step=0.05 / 64).final.particles
    error = lambda w: float(max(jnp.max(jnp.abs(u - v)) for u, v in zip(w, exact, strict=True)))
    black_box = run(solver=diffrax.Tsit5(), step=Adaptive(1e-6, 1e-8, max_steps))
    reached = bool(black_box.ok)
    target = error(black_box.final.particles) if reached else np.inf
    step = 0.4
    while True:
        step /= 2
        ours = run(solver="sliding", step=step)
        if error(ours.final.particles) <= max(target, 1e-9) or step < 1e-3:
            break
    return {
        "sliding_error": error(ours.final.particles),
        "sliding_evaluations": SLIDING_EVALUATIONS * float(ours.stats["num_steps"]),
        "tsit5_reached_the_end": float(reached),
        "tsit5_error": target,
        "tsit5_evaluations": 6.0 * float(black_box.stats["num_steps"]),
    }


def million(width: int = 1_000_000, samples: int = 100, steps: int = 1000) -> dict[str, float]:
    """Seconds and peak memory of sliding steps of a million neurons in float32.

    Args:
        width, samples: size of the problem.
        steps: how many steps of length 0.02.

    Returns:
        Times, memory, the energy before and after, how many events (crossings, captures, releases) were met, and
        ``ok``, which is 1 where the solver reached the end.
    """
    cloud, data = _problem(width, samples)
    flow = uni.full(alpha="m")
    step = 0.02
    run = lambda: solve(flow, cloud, data, step * steps, solver="sliding", step=step)
    work = time.process_time()
    sol, seconds = timed(run)
    return {
        "seconds_with_compilation": seconds,
        "steps_per_second": float(sol.stats["num_steps"]) / seconds,
        "processor_seconds": time.process_time() - work,
        "peak_gigabytes": peak_bytes() / GIGABYTE,
        "steps": float(sol.stats["num_steps"]),
        "energy_before": float(0.5 * jnp.mean(data.y**2)),
        "energy": float(sol.energy[-1]),
        "events": float(sol.stats["crossings"] + sol.stats["captures"] + sol.stats["releases"]),
        "ok": float(bool(sol.ok)),
    }


def sliding(
    width: int = 100_000,
    samples: int = 1000,
    steps: int = 20,
    few: tuple[int, int, int] = (200, 20, 100),
    repeats: int = 3,
) -> dict[str, float]:
    """Steps of the sliding solver on many neurons, and the gradient of a run of few beside the run itself.

    Args:
        width, samples, steps: the run of many neurons, with steps of length 0.02.
        few: width, samples and steps of the run whose last energy is differentiated in the targets.
        repeats: measurements of which the best counts.

    Returns:
        ``neuron_steps_per_second``, ``ratio`` of gradient and run (goal 8), and the seconds of compiling the two,
        ``compile_run`` and ``compile_gradient`` (goal 5); all in processor time.
    """
    flow, size = uni.full(alpha="m"), 0.02

    def energy(
        cloud: Cloud, x: Float[Array, " n"], end: float
    ) -> Callable[[Float[Array, " n"]], Float[Array, ""]]:
        return lambda y: solve(flow, cloud, Dataset(x, y), end, solver="sliding", step=size).energy[-1]

    cloud, data = _problem(width, samples)
    many = jax.jit(energy(cloud, data.x, size * steps))
    cloud, here = _problem(few[0], few[1])
    run = energy(cloud, here.x, size * few[2])
    programs, numbers = {}, {}
    for name, function in {"run": run, "gradient": jax.grad(run)}.items():
        begin = time.process_time()
        programs[name] = jax.jit(function).lower(here.y).compile()
        numbers[f"compile_{name}"] = time.process_time() - begin
    seconds = interleaved({name: lambda p=p: p(here.y) for name, p in programs.items()}, repeats)  # type: ignore[misc]
    spent = interleaved({"many": lambda: many(data.y)}, repeats)["many"]
    numbers |= {f"{name}_ms": 1e3 * value for name, value in seconds.items()}
    ratio = seconds["gradient"] / seconds["run"]
    return numbers | {"ratio": ratio, "neuron_steps_per_second": width * steps / spent}
