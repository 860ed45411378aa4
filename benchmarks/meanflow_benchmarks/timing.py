"""Timing of compiled functions."""

import time
from collections.abc import Callable
from typing import Any

import jax


def best_time(function: Callable[..., Any], *args: Any, repeats: int = 10) -> tuple[float, float]:
    """Seconds of the first call (compilation included) and the best of ``repeats`` later ones."""

    def once() -> float:
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        return time.perf_counter() - start

    return once(), min(once() for _ in range(repeats))
