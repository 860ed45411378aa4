"""Benchmarks of the depth room. Times are wall-clock seconds, compile and run apart; memory in MB."""

import resource
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meanflow import depth


def _peak_memory() -> float:
    """Largest resident size of this process so far, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _seconds(call: Callable[[], Any], repeat: int = 1) -> float:
    best = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        jax.block_until_ready(call())
        best = min(best, time.perf_counter() - start)
    return best


def propagation(
    seeds: int = 100,
    layers: int = 100,
    width: int = 1000,
    batch: int = 64,
    chunk: int = 4,
    draw: str = "law",
    dtype: Any = jnp.float32,
) -> dict[str, float]:
    """Many random networks (recenter, rescale, ReLU) as one compiled program, with all default observations.

    Returns compile and run seconds, layers a second, memory, and the mean angle of the last layer with the
    infinite-width value as a check that the program did the right thing.
    """
    x = jax.random.normal(jax.random.key(0), (batch, 100), dtype)
    keys = jax.random.split(jax.random.key(1), seeds)
    run = lambda keys, x: depth.propagate(keys, x, [width] * layers, rescale="std", draw=draw, chunk=chunk)
    before = _peak_memory()
    start = time.perf_counter()
    compiled = jax.jit(run).lower(keys, x).compile()
    compile_seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    start = time.perf_counter()
    result = jax.block_until_ready(compiled(keys, x))
    seconds = time.perf_counter() - start
    megabyte = 2.0**20
    return {
        "compile_seconds": compile_seconds,
        "run_seconds": seconds,
        "layers_per_second": seeds * layers / seconds,
        "temporary_mb": memory.temp_size_in_bytes / megabyte if memory else float("nan"),
        "output_mb": memory.output_size_in_bytes / megabyte if memory else float("nan"),
        "peak_resident_mb": _peak_memory(),
        "resident_before_mb": before,
        "mean_angle": float(result.layers.pair_angles[:, -1].mean()),
        "infinite_width_angle": float(jnp.degrees(jnp.arccos(depth.batchnorm_cosine(batch)))),
    }


def propagation_peer(layers: int = 10, width: int = 1000, batch: int = 64) -> dict[str, float]:
    """One layer of one network: both ways of drawing it here, and a numpy loop with the same records."""
    x = np.random.default_rng(0).normal(size=(batch, 100)).astype(np.float32)

    def plain() -> list[tuple]:
        rng, out, y = np.random.default_rng(0), [], x
        for _ in range(layers):
            z = y @ (rng.standard_normal((y.shape[1], width), np.float32) * np.sqrt(2 / y.shape[1]))
            z = (z - z.mean(0)) / z.std(0)
            y = np.maximum(z, 0)
            out.append(
                (
                    y @ y.T,
                    np.linalg.svd(y, compute_uv=False),
                    np.bincount((y > 0).sum(0), minlength=batch + 1),
                )
            )
        return out

    result = {"numpy_seconds_per_layer": _seconds(plain, 2) / layers}
    for draw in ("law", "weights"):
        call = lambda draw=draw: depth.propagate(
            jax.random.key(0), jnp.asarray(x), [width] * layers, rescale="std", draw=draw
        )
        call()
        result[f"{draw}_seconds_per_layer"] = _seconds(call, 2) / layers
    return result


def tree_cost(sizes: tuple[int, ...] = (10, 20, 40, 80, 160), layers: int = 2000) -> dict[str, float]:
    """Seconds a layer of the tree algorithm by batch size, the growth exponent, and the 2^t peer."""
    result: dict[str, float] = {}
    for n in sizes:
        x = jax.random.normal(jax.random.key(n), (n,))
        call = lambda x=x: depth.tree(x, layers + 1, every=layers)
        call()
        result[f"n={n}"] = _seconds(call, 2) / layers
    times = [result[f"n={n}"] for n in sizes]
    result["exponent"] = float(np.polyfit(np.log(sizes[1:]), np.log(times[1:]), 1)[0])

    def explicit(depth_: int) -> np.ndarray:
        rows = np.random.default_rng(0).normal(size=(1, sizes[0]))
        for _ in range(depth_):
            rows = rows - rows.mean(1, keepdims=True)
            rows = np.concatenate([np.maximum(rows, 0), np.maximum(-rows, 0)])
        return rows.T @ rows

    result["explicit 2^18 rows, seconds in all"] = _seconds(lambda: explicit(18))
    shallow = lambda: depth.tree(np.random.default_rng(0).normal(size=sizes[0]), 18, every=17)
    shallow()
    result["same depth here, seconds in all"] = _seconds(shallow, 3)
    return result


def gamma_cost(shapes: tuple[tuple[int, int], ...] = ((2, 50), (3, 10), (3, 20), (4, 8))) -> dict[str, float]:
    """Seconds and cells of exact gamma for random batches (k, n)."""
    result: dict[str, float] = {}
    for k, n in shapes:
        x = np.random.default_rng(0).normal(size=(n, k))
        start = time.perf_counter()
        found = depth.gamma(x)
        result[f"k={k} n={n}: seconds"] = time.perf_counter() - start
        result[f"k={k} n={n}: cells"] = found.cells
        result[f"k={k} n={n}: missing volume"] = abs(found.total - 1)
    return result
