"""Speed of sweeps: against loops over single runs, PyTorch in eager mode, the memory bandwidth, and one process."""

import importlib.util
import os
import pathlib
import socket
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import meanflow as mf
from meanflow_benchmarks.timing import best_time

WIDTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
TRAFFIC = 8  # numbers moved per particle and step: a, b, c, balance and weight read, a, b, c written


def grid_speed(
    widths: tuple[int, ...] = WIDTHS,
    deltas: int = 9,
    seeds: int = 8,
    steps: int = 2000,
    samples: int = 20,
    torch: str | None = None,
) -> dict[str, float]:
    """Width x delta x seed of univariate networks in one sweep, against the same runs one by one.

    The loop runs two cells per width, jitted once per width, and is scaled to the grid; PyTorch runs 50 steps of
    one cell per width, eagerly, and is scaled likewise. The bandwidth bound is that of moving ``TRAFFIC`` numbers
    per particle and step.

    Args:
        widths, deltas, seeds, steps, samples: the grid.
        torch: interpreter that has PyTorch; default this one, if it has.

    Returns:
        Seconds (``run``, ``compile``, ``loop``, ``torch``), ``particle_steps`` per second, ``ns_per_particle_step``,
        the ratios ``speedup_loop``, ``speedup_torch`` and ``bandwidth_share`` (of the bound), number of ``programs``
        and padding ``waste``.
    """
    flow, x = mf.lifted(alpha="sqrt"), np.linspace(-1, 1, samples)
    data = mf.Dataset(x, np.sin(2 * np.pi * x), "sum")
    chosen = {"steps": steps, "step": 1e-3, "observe": ("angle_displacement",)}
    balances = [-np.inf, *np.linspace(-20, 20, deltas - 2), np.inf]
    plan = mf.sweeps.prepare(flow, data, widths=widths, deltas=balances, seeds=seeds, **chosen)
    some = {w: [plan.cloud(width=w, delta=balances[k], seed=0) for k in (1, -1)] for w in widths}
    first = {chunk.group: chunk for chunk in reversed(plan.chunks)}
    everything, plan.chunks = plan.chunks, list(first.values())
    cold, warm = _seconds(plan.run), _seconds(plan.run)  # one chunk of each group
    plan.chunks = everything
    run = _seconds(plan.run)
    particles = sum(widths) * deltas * seeds * steps
    loop = 0.0
    for clouds in some.values():
        alone = lambda c: (
            mf.descend(
                flow, c, data, steps, step=1e-3, clock="lazy", observe=plan.cell(plan.groups[0]).observers()
            ).energy
        )
        loop += sum(best_time(alone, c, repeats=2)[1] for c in clouds) / len(clouds) * deltas * seeds
    dtype = jnp.dtype(jnp.result_type(float))
    numbers = {
        "run": run,
        "compile": cold - warm,
        "programs": len(plan.groups),
        "waste": plan.waste,
        "particle_steps": particles / run,
        "ns_per_particle_step": 1e9 * run / particles,
        "loop": loop,
        "speedup_loop": loop / run,
        "bandwidth_share": particles / run * TRAFFIC * dtype.itemsize / _bandwidth(),
    }
    if torch is None and importlib.util.find_spec("torch") is not None:
        torch = sys.executable
    if torch is not None:
        script = pathlib.Path(__file__).with_name("eager.py")
        command = [torch, str(script), ",".join(map(str, widths)), str(samples), "50", dtype.name]
        each = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        numbers["torch"] = sum(map(float, each)) * deltas * seeds * steps
        numbers["torch_ns_per_particle_step"] = 1e9 * numbers["torch"] / particles
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


def two_processes(width: int = 512, cells: int = 64, steps: int = 10_000) -> dict[str, float]:
    """One process pinned to one core against two on a core each, over JAX's distributed runtime (gloo).

    Returns:
        Seconds of the sweep without compilation in each case, and their ratio ``speedup``; NaN on a single core.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        return {"one": np.nan, "two": np.nan, "speedup": np.nan}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def team(count: int) -> float:
        jobs = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "meanflow_benchmarks.team",
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
