"""The sliding solver for vector inputs: work against precision beside ordinary solvers, and its cost at scale."""

import functools
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import diffrax
import jax
import jax.numpy as jnp
import numpy as np

import meanflow as mf
from meanflow.measures import Cloud, Dataset, Neurons
from meanflow.solvers import Solution, descend, solve
from meanflow_benchmarks.memory import GIGABYTE
from meanflow_benchmarks.resident import grown_bytes

P = ParamSpec("P")
R = TypeVar("R")

ADAPTIVE = {"tsit5": (diffrax.Tsit5(), 6), "dopri8": (diffrax.Dopri8(), 13)}
STAGES = 3  # force evaluations in a step of the sliding solver
FIXED = {"euler": (diffrax.Euler(), 1), "heun": (diffrax.Heun(), 2)}


def _problem(width: int, samples: int, dim: int, seed: int = 0) -> tuple[Cloud, Dataset]:
    """Return Gaussian neurons, inputs of length about 1 and the targets of a small ReLU network with noise."""
    rng = np.random.default_rng(seed)
    dtype = jnp.result_type(float)
    x = rng.standard_normal((samples, dim)) / np.sqrt(dim)
    y = np.maximum(x @ rng.standard_normal((dim, 3)), 0).sum(1) - 1 + 0.5 * rng.standard_normal(samples)
    a, b = rng.standard_normal(width), rng.standard_normal((width, dim))
    return Cloud(Neurons(jnp.asarray(a, dtype), jnp.asarray(b, dtype))), Dataset(
        jnp.asarray(x, dtype), jnp.asarray(y, dtype)
    )


def _processor_seconds(run: Callable[[], Solution]) -> tuple[Solution, float]:
    """Return the result of a second call, and its processor time: the first one compiles."""
    jax.block_until_ready(run().final.particles.a)
    start = time.process_time()
    sol = run()
    jax.block_until_ready(sol.final.particles.a)
    return sol, time.process_time() - start


def _needed(target: float, error: list[float], cost: list[float]) -> float:
    """Return the cost at which an error falls to ``target``, by interpolation of the logarithms; inf if never."""
    for k in range(len(error)):
        if error[k] <= target:
            if k == 0:
                return cost[0]
            part = np.log(error[k - 1] / target) / np.log(error[k - 1] / error[k])
            return float(cost[k - 1] * (cost[k] / cost[k - 1]) ** part)
    return float("inf")


def _in_float64(benchmark: Callable[P, R]) -> Callable[P, R]:
    """Run a benchmark with arrays of float64, whatever the precision of the others."""

    @functools.wraps(benchmark)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.enable_x64(True):
            return benchmark(*args, **kwargs)

    return run


@_in_float64
def work_precision(
    width: int = 200,
    samples: int = 100,
    dim: int = 10,
    end: float = 10.0,
    target: float = 1e-4,
    sliding: tuple[int, ...] = (1, 2, 4, 8, 32),
    finest: int = 512,
    euler: tuple[int, ...] = (1000, 10_000, 50_000),
    tolerances: tuple[float, ...] = (1e-4, 1e-5, 1e-6, 1e-7),
    max_steps: int = 20_000,
) -> dict[str, float | list[float]]:
    """Force evaluations and processor seconds at an error of the parameters, against ordinary solvers.

    The error is the largest difference from a sliding run with ``finest`` steps a unit of time. In float64, whatever
    the precision of the other benchmarks.

    Args:
        width, samples, dim: size of the problem.
        end: time at which the parameters are compared.
        target: the error at which work is compared.
        sliding: steps per unit of time of the sliding solver.
        finest: the same for what counts as exact.
        euler: total force evaluations of Euler's and Heun's method.
        tolerances: of the adaptive solvers, relative ones; the absolute ones are a hundredth of these.
        max_steps: limit of the adaptive solvers; a run that reaches it has stalled.

    Returns:
        For every method its evaluations, errors and seconds, what it needs for the target by interpolation (inf where
        it was not reached), and how many adaptive runs stalled.
    """
    cloud, data = _problem(width, samples, dim)
    flow = mf.vanilla()

    def slide(rate: int) -> Solution:
        step = jnp.asarray(1 / rate)
        return solve(flow, cloud, data, end, solver="sliding", step=step)

    best = slide(finest)
    error = lambda sol: float(
        max(jnp.max(jnp.abs(u - v)) for u, v in zip(sol.final.particles, best.final.particles, strict=True))
    )
    found: dict[str, float | list[float]] = {
        "captures": float(best.stats["captures"]),
        "crossings": float(best.stats["crossings"]),
        "planes": float(best.stats["planes"]),
    }

    def enter(name: str, rows: list[tuple[float, float, float]]) -> None:
        rows = sorted(rows)
        work, errors, seconds = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [])
        found[f"{name}_evaluations"], found[f"{name}_error"], found[f"{name}_seconds"] = work, errors, seconds
        found[f"{name}_evaluations_at_target"] = _needed(target, errors, work)
        found[f"{name}_seconds_at_target"] = _needed(target, errors, seconds)

    rows = []
    for rate in sliding:
        sol, seconds = _processor_seconds(functools.partial(slide, rate))
        rows.append((STAGES * float(sol.stats["num_steps"]), error(sol), seconds))
    enter("sliding", rows)
    for name, (solver, stages) in FIXED.items():
        rows = []
        for count in euler:
            step = jnp.asarray(end * stages / count)
            run = lambda solver=solver, step=step: solve(flow, cloud, data, end, solver=solver, step=step)
            sol, seconds = _processor_seconds(run)
            rows.append((float(count), error(sol), seconds))
        enter(name, rows)
    for name, (solver, stages) in ADAPTIVE.items():
        rows, stalled = [], 0
        for rtol in tolerances:
            run = lambda solver=solver, rtol=rtol: solve(
                flow,
                cloud,
                data,
                end,
                solver=solver,
                step=mf.Adaptive(rtol, rtol / 100, max_steps),
                throw=False,
            )
            sol, seconds = _processor_seconds(run)
            if bool(sol.ok):
                rows.append((stages * float(sol.stats["num_steps"]), error(sol), seconds))
            else:
                stalled += 1
        enter(name, rows)
        found[f"{name}_stalled"] = float(stalled)
    return found


def scale(
    width: int = 10_000, samples: int = 1000, dim: int = 100, steps: int = 200, step: float = 0.1
) -> dict[str, float]:
    """Seconds and memory of sliding steps in float32, against three times as many plain Euler steps.

    Neurons are Gaussian (variance 1 for every coordinate), inputs have length about 1.

    Args:
        width, samples, dim: size of the problem.
        steps: number of sliding steps; Euler takes three times as many, a third as long.
        step: their length.

    Returns:
        Times after compilation, their ratio, events, and by how much the process grows in a run.
    """
    cloud, data = _problem(width, samples, dim)
    flow = mf.vanilla()
    run = lambda: solve(flow, cloud, data, step * steps, solver="sliding", step=step)
    plain = lambda: descend(flow, cloud, data, 3 * steps, step=step / 3)
    sol, seconds = _processor_seconds(run)
    grown = grown_bytes(lambda: jax.block_until_ready(run().final))
    other, euler = _processor_seconds(plain)
    return {
        "seconds": seconds,
        "euler_seconds": euler,
        "ratio": seconds / euler,
        "grown_gigabytes": grown / GIGABYTE,
        "energy": float(sol.energy[-1]),
        "euler_energy": float(other.energy[-1]),
        "crossings": float(sol.stats["crossings"]),
        "captures": float(sol.stats["captures"]),
        "sliding": float(sol.stats["sliding"]),
        "planes": float(sol.stats["planes"]),
        "ok": float(bool(sol.ok)),
    }
