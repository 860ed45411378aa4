"""Speed of sweeps: against loops over single runs, PyTorch in eager mode, the memory bandwidth, and one process."""

import functools
import os
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import meanflow as mf
import meanflow.sweeps  # noqa: F401 (rooms load on first use, and importing is not what is measured)
from meanflow_benchmarks.peers import NAMES, interpreters, left_out
from meanflow_benchmarks.timing import interleaved

WIDTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
STEP = 1e-3
TRAFFIC = 8  # numbers moved per particle and step: a, b, c, balance and weight read, a, b, c written


def grid_speed(
    widths: tuple[int, ...] = WIDTHS,
    deltas: int = 9,
    seeds: int = 8,
    steps: int = 2000,
    samples: int = 20,
    peers: tuple[str, ...] = NAMES,
) -> dict[str, float | str]:
    """Width x delta x seed of univariate networks in one sweep, against the same runs one by one.

    The loop runs two cells per width, compiled once per width, and is scaled to the grid. PyTorch runs 50 steps of one
    cell per width, eagerly, and is scaled likewise. No program can be faster than the memory moves ``TRAFFIC`` numbers
    per particle and step, the bandwidth bound.

    Args:
        widths, deltas, seeds: the grid: the widths, and how many balances and seeds.
        steps, samples: steps of descent and size of the data set.
        peers: which peers to run beside, here only "torch" (PyTorch); ``scripts/peers`` installs it.

    Returns:
        Processor seconds (``run``, ``compile``, ``loop``, ``torch``), ``particle_steps`` per second,
        ``ns_per_particle_step``, the ratios ``speedup_loop``, ``speedup_torch`` and ``bandwidth_share`` (of the bound),
        the number of compiled ``programs`` and the share of padding ``waste``.
    """
    flow, x = mf.lifted(alpha="sqrt"), np.linspace(-1, 1, samples)
    data = mf.Dataset(x, np.sin(2 * np.pi * x), "sum")
    balances = [-np.inf, *np.linspace(-20, 20, deltas - 2), np.inf]
    plan = mf.sweep(
        flow,
        data,
        widths=widths,
        deltas=balances,
        seeds=seeds,
        steps=steps,
        step=STEP,
        observe=("angle_displacement",),
        compute=False,
    )
    begin = time.process_time()
    plan.run()  # this one also compiles
    cold, run = time.process_time() - begin, interleaved({"run": plan.run}, 2)["run"]
    particles = sum(widths) * deltas * seeds * steps
    chosen = {w: [plan.cloud(width=w, delta=balances[k], seed=0) for k in (1, -1)] for w in widths}
    observers = plan.cell(plan.groups[0]).observe
    alone = lambda cloud: (
        mf.descend(flow, cloud, data, steps, step=STEP, clock="lazy", observe=observers).energy
    )
    spent = lambda cloud: interleaved({"cell": lambda: alone(cloud)}, 2)["cell"]
    each = [np.mean([spent(cloud) for cloud in clouds]) for clouds in chosen.values()]
    loop = float(sum(each)) * deltas * seeds
    itemsize = jnp.dtype(jnp.result_type(float)).itemsize
    numbers: dict[str, float | str] = {
        "run": run,
        "compile": cold - run,
        "programs": len(plan.groups),
        "waste": plan.waste,
        "particle_steps": particles / run,
        "ns_per_particle_step": 1e9 * run / particles,
        "loop": loop,
        "speedup_loop": loop / run,
        "bandwidth_share": particles / run * TRAFFIC * itemsize / _bandwidth(),
    }
    for interpreter in interpreters(peers, ("torch",)).values():
        eager = _torch_seconds(interpreter, widths, samples) * deltas * seeds * steps
        numbers["torch"] = eager
        numbers["torch_ns_per_particle_step"] = 1e9 * eager / particles
        numbers["speedup_torch"] = eager / run
    return numbers | left_out(peers, ("torch",))


def by_hand(
    widths: tuple[int, ...] = WIDTHS,
    deltas: int = 9,
    seeds: int = 4,
    steps: int = 1000,
    samples: int = 20,
    repeats: int = 2,
) -> dict[str, float]:
    """Width x delta x seed of univariate networks with default observables, against a program by hand for each width.

    The programs by hand vmap a scan of plain descent in (a, b, c) over the networks of one width and return the loss at
    the end. ``grad`` leaves the gradient to ``jax.grad``; ``masks`` writes it out with products of the pattern of
    activations, as this package does. Neither keeps the balance of the neurons, pads, or records anything on the way.

    Args:
        widths, deltas, seeds: the grid: the widths, and how many balances and seeds.
        steps, samples: steps of descent and size of the data set.
        repeats: measurements of which the best counts.

    Returns:
        Seconds of processor time: ``compile`` of the sweep (the first run less a later one) and ``compile_grad`` of the
        programs by hand; ``sweep``, ``grad`` and ``masks`` of warm runs; ``ratio_grad`` and ``ratio_masks`` (goal 1.1).
    """
    x = np.linspace(-1, 1, samples)
    data = mf.Dataset(x, np.sin(2 * np.pi * x), "sum")
    balances = [-np.inf, *np.linspace(-20, 20, deltas - 2), np.inf]
    begin = time.process_time()
    plan = mf.sweep(
        mf.lifted(alpha="sqrt"),
        data,
        widths=widths,
        deltas=balances,
        seeds=seeds,
        steps=steps,
        step=STEP,
        compute=False,
    )
    plan.run()
    cold = time.process_time() - begin
    rng, cells = np.random.default_rng(0), deltas * seeds
    start = {w: tuple(jnp.asarray(rng.normal(size=(cells, w)), float) for _ in range(3)) for w in widths}
    jobs: dict[str, Callable[[], object]] = {"sweep": plan.run}
    numbers = {}
    for name, gradient in {"grad": _by_grad, "masks": _by_masks}.items():
        begin = time.process_time()
        run = functools.partial(_descent, gradient, data.x, data.y, steps)
        programs = {w: jax.jit(jax.vmap(run)).lower(start[w]).compile() for w in widths}
        numbers[f"compile_{name}"] = time.process_time() - begin
        jobs[name] = lambda programs=programs: [programs[w](start[w]) for w in widths]  # type: ignore[misc]
    seconds = interleaved(jobs, repeats)
    ratios = {f"ratio_{name}": seconds["sweep"] / seconds[name] for name in ("grad", "masks")}
    return {"compile": cold - seconds["sweep"]} | numbers | seconds | ratios


Raw = tuple[jax.Array, jax.Array, jax.Array]  # (a, b, c) of the neurons c relu(a x - b)


def _residual(w: Raw, x: jax.Array, y: jax.Array) -> jax.Array:
    a, b, c = w
    return jax.nn.relu(x[:, None] * a[None, :] - b[None, :]) @ c / a.shape[0] ** 0.5 - y


def _by_grad(w: Raw, x: jax.Array, y: jax.Array) -> Raw:
    return jax.grad(lambda w: 0.5 * jnp.sum(_residual(w, x, y) ** 2))(w)


def _by_masks(w: Raw, x: jax.Array, y: jax.Array) -> Raw:
    a, b, c = w
    active, scale = (x[:, None] * a[None, :] > b[None, :]).astype(a.dtype), a.shape[0] ** -0.5
    g = scale * (scale * (x * (active @ (c * a)) - active @ (c * b)) - y)
    along, up = (g * x) @ active, g @ active
    return c * along, -c * up, a * along - b * up


def _descent(gradient: Callable[..., Raw], x: jax.Array, y: jax.Array, steps: int, start: Raw) -> jax.Array:
    """Return the loss after plain descent."""

    def step(w: Raw, _: None) -> tuple[Raw, None]:
        a, b, c = (u - STEP * g for u, g in zip(w, gradient(w, x, y), strict=True))
        return (a, b, c), None

    return 0.5 * jnp.sum(_residual(jax.lax.scan(step, start, length=steps)[0], x, y) ** 2)


def _torch_seconds(interpreter: str, widths: tuple[int, ...], samples: int) -> float:
    """Return the seconds of one step of one network of each width in eager PyTorch, summed over the widths."""
    script = pathlib.Path(__file__).with_name("eager.py")
    precision = jnp.dtype(jnp.result_type(float)).name
    command = [interpreter, str(script), ",".join(map(str, widths)), str(samples), "50", precision]
    each = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return sum(map(float, each))


def _bandwidth(megabytes: int = 256) -> float:
    """Return the bytes per second of y = x + 1 on a large array (one read, one write)."""
    x = jnp.zeros(megabytes * 2**20 // jnp.dtype(jnp.result_type(float)).itemsize)
    shifted = jax.jit(lambda u: u + 1)
    return 2 * x.nbytes / interleaved({"pass": lambda: shifted(x)}, 5)["pass"]


def two_processes(width: int = 512, cells: int = 64, steps: int = 10_000) -> dict[str, float]:
    """One process pinned to one core against two on a core each, over JAX's distributed runtime (gloo).

    Args:
        width, cells, steps: the sweep, of ``cells`` seeds of a network of ``width`` neurons.

    Returns:
        Seconds of the sweep without compilation in each case, and their ratio ``speedup``; NaN on a single core.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        return {"one": np.nan, "two": np.nan, "speedup": np.nan}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    module = [sys.executable, "-m", "meanflow_benchmarks.team"]

    def team(count: int) -> float:
        jobs = [
            subprocess.Popen(
                [*module, *map(str, (k, count, port, cores[k], width, cells, steps))],
                stdout=subprocess.PIPE,
                text=True,
            )
            for k in range(count)
        ]
        return max(float(job.communicate()[0].split()[-1]) for job in jobs)  # the slowest decides

    one, two = team(1), team(2)
    return {"one": one, "two": two, "speedup": one / two}
