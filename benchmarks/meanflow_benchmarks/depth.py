"""Speed and memory of random normalized networks, of the tree model and of exact gamma."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from meanflow import depth
from meanflow_benchmarks.memory import MEGABYTE, peak_bytes, program_memory
from meanflow_benchmarks.timing import best_time, timed

BATCH_NORM = depth.Layer(rescale="std")


def propagation(
    seeds: int = 100,
    layers: int = 100,
    width: int = 1000,
    batch: int = 64,
    chunk: int = 4,
    dtype: DTypeLike = jnp.float32,
) -> dict[str, float]:
    """Many random networks (recenter, rescale, ReLU) in one compiled program, with all default observations.

    Args:
        seeds: how many networks.
        layers, width: depth and width of each network.
        batch: how many samples pass through them.
        chunk: how many networks are held in memory side by side.
        dtype: precision of all arrays.

    Returns:
        Seconds of compiling and running, layers per second, and memory in MB. ``mean_angle`` of the last layer
        should be close to ``infinite_width_angle`` (degrees), a check that the program did the right thing.
    """
    x = jax.random.normal(jax.random.key(0), (batch, 100), dtype)
    keys = jax.random.split(jax.random.key(1), seeds)
    run = lambda keys, x: depth.propagate(keys, x, [width] * layers, BATCH_NORM, chunk=chunk)
    before = peak_bytes()
    # compiled by hand, so that neither seconds nor memory of compiling are mixed with those of running
    compiled, compile_seconds = timed(lambda: jax.jit(run).lower(keys, x).compile())
    memory = program_memory(compiled)
    result, run_seconds = timed(compiled, keys, x)
    wide = depth.expected_gram(jnp.eye(batch), 1, BATCH_NORM)[
        1
    ]  # orthogonal samples are at the fixed point at once
    return {
        "compile_seconds": compile_seconds,
        "run_seconds": run_seconds,
        "layers_per_second": seeds * layers / run_seconds,
        "temporary_mb": memory.temporary / MEGABYTE,
        "output_mb": memory.output / MEGABYTE,
        "peak_resident_mb": peak_bytes() / MEGABYTE,
        "resident_before_mb": before / MEGABYTE,
        "mean_angle": float(result.layers.pair_angles[:, -1].mean()),
        "infinite_width_angle": float(depth.Gram(wide).pair_angles.mean()),
    }


def propagation_peer(layers: int = 10, width: int = 1000, batch: int = 64) -> dict[str, float]:
    """Seconds per layer of one network: both ways of drawing it, against a numpy loop with the same records."""
    x = np.random.default_rng(0).normal(size=(batch, 100)).astype(np.float32)
    result = {
        "numpy_seconds_per_layer": best_time(lambda: _numpy_layers(x, layers, width), repeats=2)[1] / layers
    }
    # the law of x W where the weights are known by name, else weights are drawn
    for draw, weights in (("law", "he"), ("weights", jax.nn.initializers.he_normal())):
        layer = depth.Layer(rescale="std", weights=weights)
        call = lambda layer=layer: depth.propagate(jax.random.key(0), jnp.asarray(x), [width] * layers, layer)
        result[f"{draw}_seconds_per_layer"] = best_time(call, repeats=2)[1] / layers
    return result


def _numpy_layers(x: np.ndarray, layers: int, width: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return per layer the Gram matrix, the singular values and how many neurons see k samples, by plain numpy."""
    rng, records, y = np.random.default_rng(0), [], x
    for _ in range(layers):
        z = y @ (rng.standard_normal((y.shape[1], width), np.float32) * np.sqrt(2 / y.shape[1]))
        z = (z - z.mean(0)) / z.std(0)
        y = np.maximum(z, 0)
        active = np.bincount((y > 0).sum(0), minlength=len(x) + 1)
        records.append((y @ y.T, np.linalg.svd(y, compute_uv=False), active))
    return records
