"""Speed of sweeps: against loops over single runs, PyTorch in eager mode, and the memory bandwidth."""

import importlib.util
import os
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import meanflow as mf
from meanflow.bench.timing import best_time

WIDTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)


def _problem(samples: int) -> mf.Dataset:
    x = np.linspace(-1, 1, samples)
    return mf.Dataset(x, np.sin(2 * np.pi * x), "sum")


def _settings(deltas: int, seeds: int, steps: int) -> dict[str, Any]:
    return {
        "deltas": [-np.inf, *np.linspace(-20, 20, deltas - 2), np.inf],
        "seeds": seeds,
        "steps": steps,
        "step": 1e-3,
        "observe": ("angle_displacement",),
    }


def grid_speed(
    widths: tuple[int, ...] = WIDTHS, deltas: int = 9, seeds: int = 8, steps: int = 2000, samples: int = 20
) -> dict[str, float]:
    """Width x delta x seed of univariate networks in one sweep, against the same runs one by one.

    The loop runs one cell per width, jitted once per width, and is scaled to the grid; PyTorch (if installed) runs
    a few steps of one cell per width, eagerly, and is scaled likewise. The bandwidth bound is that of reading r, theta,
    delta and weight and writing r and theta once a step.

    Returns:
        Seconds (``run``, ``compile``, ``loop``, ``torch``), ``particle_steps`` per second, ``ns_per_particle_step``,
        the ratios ``speedup_loop``, ``speedup_torch`` and ``bandwidth_share``, number of ``programs`` and padding
        ``waste``.
    """
    flow, data = mf.lifted(alpha="sqrt"), _problem(samples)
    plan = mf.sweeps.prepare(flow, data, widths=widths, **_settings(deltas, seeds, steps))
    first = _seconds(plan.run)
    run = _seconds(plan.run)  # programs are kept: this is the run without compilation
    particles = sum(widths) * deltas * seeds * steps
    loop = 0.0
    for width in widths:
        cloud = plan.cloud(width=width, delta=plan.grid.axes["delta"][1], seed=0)
        alone = lambda c: mf.descend(flow, c, data, steps, step=1e-3, clock="lazy").energy
        loop += best_time(alone, cloud, repeats=1)[1] * deltas * seeds
    size = jnp.dtype(jnp.result_type(float)).itemsize
    bound = _bandwidth() / (6 * size)
    numbers = {
        "run": run,
        "compile": first - run,
        "programs": len(plan.groups),
        "waste": plan.waste,
        "particle_steps": particles / run,
        "ns_per_particle_step": 1e9 * run / particles,
        "loop": loop,
        "speedup_loop": loop / run,
        "bandwidth_share": particles / run / bound,
    }
    if importlib.util.find_spec("torch") is not None:
        numbers["torch"] = sum(_torch_step(w, data) for w in widths) * deltas * seeds * steps
        numbers["speedup_torch"] = numbers["torch"] / run
    return numbers


def _seconds(function: Any) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _bandwidth(megabytes: int = 256) -> float:
    """Bytes per second of y = x + 1 on a large array (one read, one write)."""
    x = jnp.zeros(megabytes * 2**20 // jnp.dtype(jnp.result_type(float)).itemsize)
    seconds = best_time(jax.jit(lambda u: u + 1), x, repeats=5)[1]
    return 2 * x.nbytes / seconds


def _torch_step(width: int, data: mf.Dataset, steps: int = 50) -> float:
    """Seconds of one eager gradient step of the same network in PyTorch."""
    import torch

    rng = np.random.default_rng(0)
    kind = torch.float64 if data.x.dtype == jnp.float64 else torch.float32
    a, b, c = (torch.tensor(rng.uniform(-1, 1, width), dtype=kind, requires_grad=True) for _ in range(3))
    x, y = (torch.tensor(np.asarray(u), dtype=kind) for u in (data.x, data.y))

    def steps_of(count: int) -> None:
        for _ in range(count):
            step()

    def step() -> None:
        f = (c * torch.relu(a * x[:, None] - b)).sum(1) / width**0.5
        loss = 0.5 * ((f - y) ** 2).sum()
        grads = torch.autograd.grad(loss, (a, b, c))
        with torch.no_grad():
            for parameter, grad in zip((a, b, c), grads, strict=True):
                parameter -= 1e-3 * grad

    step()
    return _seconds(lambda: steps_of(steps)) / steps


def two_processes(width: int = 512, cells: int = 64, steps: int = 2000) -> dict[str, float]:
    """One process pinned to one core against two on a core each, over JAX's distributed runtime (gloo).

    Returns:
        Seconds of the sweep without compilation in each case, and their ratio ``speedup``; NaN on a single core.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        return {"one": np.nan, "two": np.nan, "speedup": np.nan}
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def team(count: int) -> float:
        jobs = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "meanflow.bench.team",
                    *map(str, (k, count, port, cores[k], width, cells, steps)),
                ],
                stdout=subprocess.PIPE,
                text=True,
            )
            for k in range(count)
        ]
        return max(float(job.communicate()[0].split()[-1]) for job in jobs)

    one, two = team(1), team(2)
    return {"one": one, "two": two, "speedup": one / two}
