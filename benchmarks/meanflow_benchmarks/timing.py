"""How long a call takes."""

import time
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")


def timed(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> tuple[R, float]:
    """Call a function once and return its result and the wall-clock seconds until that was ready.

    Example:
        >>> total, seconds = timed(sum, [1, 2, 3])
        >>> total, seconds < 1
        (6, True)
    """
    start = time.perf_counter()
    # JAX returns before the work is done; without waiting only the dispatch would be timed
    result = jax.block_until_ready(function(*args, **kwargs))
    return result, time.perf_counter() - start


def best_time(function: Callable[..., object], *args: object, repeats: int = 10) -> tuple[float, float]:
    """Return the seconds of the first call, compilation included, and the best of ``repeats`` later calls.

    The best is reported because everything that disturbs a measurement makes it longer.

    Args:
        function: what is measured, for instance the result of ``jax.jit``.
        args: its arguments.
        repeats: how many calls follow the first one.

    Example:
        >>> first, best = best_time(jax.jit(jax.numpy.sin), 1.0, repeats=3)
        >>> best <= first
        True
    """
    first = timed(function, *args)[1]
    return first, min(timed(function, *args)[1] for _ in range(repeats))


def interleaved(jobs: Mapping[str, Callable[[], object]], repeats: int = 5) -> dict[str, float]:
    """Return the best processor time of each job in seconds; jobs take turns, so that a busy machine slows all alike.

    Every second round goes backwards: a job that always came after the same one would always find the caches as that
    leaves them, and one that always came first would find them cold for its peers.

    Args:
        jobs: functions without arguments by name; each is called once before to compile.
        repeats: measurements of each.

    Example:
        >>> sorted(interleaved({"a": lambda: 1, "b": lambda: 2}, repeats=1))
        ['a', 'b']
    """
    for job in jobs.values():
        jax.block_until_ready(job())
    best = dict.fromkeys(jobs, float("inf"))
    for k in range(repeats):
        for name in list(jobs)[:: 1 if k % 2 == 0 else -1]:
            start = time.process_time()
            jax.block_until_ready(jobs[name]())
            best[name] = min(best[name], time.process_time() - start)
    return best
