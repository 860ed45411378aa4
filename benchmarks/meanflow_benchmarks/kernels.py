"""Speed and memory of the empirical tangent kernel, against matrix multiplication and against its peer.

Each function returns a dict of numbers; times are the best of several runs after compilation, in seconds.
"""

import json
import subprocess
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meanflow import kernels
from meanflow.kernels.batchnorm import normalize
from meanflow_benchmarks.timing import best_time

# Run by the peer's own interpreter, with a jax old enough for it; prints one line of JSON. The network is drawn
# as in _network. Its structured mode runs with and without vmap over samples, and the faster one counts.
_PEER = r"""
import json, sys, time
import numpy as np, jax, jax.numpy as jnp
from jax.interpreters import ad
from jax._src import source_info_util
for name, value in (("source_info_util", source_info_util), ("config", jax.config)):
    if not hasattr(ad, name):  # neural-tangents 0.6.5 reads them there
        setattr(ad, name, value)
import neural_tangents as nt
widths, samples, repeats = json.loads(sys.argv[1])
draw = np.random.default_rng(0).normal
x = jnp.asarray(draw(size=(samples, widths[0])), jnp.float32)
params = [
    (jnp.asarray(draw(size=(m, n)) / m**0.5, jnp.float32), jnp.zeros(n, jnp.float32))
    for m, n in zip(widths[:-1], widths[1:])
]
def apply(p, x):
    for w, b in p[:-1]:
        x = jax.nn.relu(x @ w + b)
    return x @ p[-1][0] + p[-1][1]
best = 1e9
for axes in (0, None):
    kernel = jax.jit(nt.empirical_ntk_fn(
        apply, trace_axes=(), vmap_axes=axes, implementation=nt.NtkImplementation.STRUCTURED_DERIVATIVES))
    result = kernel(x, None, params).block_until_ready()
    for _ in range(repeats):
        start = time.perf_counter()
        kernel(x, None, params).block_until_ready()
        best = min(best, time.perf_counter() - start)
row = np.asarray(result).reshape(samples, samples)[0].tolist()
print(json.dumps({"seconds": best, "jax": jax.__version__, "row": row}))
"""


def _best(function: Callable[..., Any], *args: Any, repeats: int = 20) -> float:
    return best_time(function, *args, repeats=repeats)[1]


def _network(widths: tuple[int, ...], samples: int) -> tuple[Any, Any, jax.Array]:
    """(apply, params, x) of a ReLU network with biases, float32."""
    draw = np.random.default_rng(
        0
    ).normal  # not jax.random, whose numbers differ between the peer's jax and ours
    x = jnp.asarray(draw(size=(samples, widths[0])), jnp.float32)
    params = [
        (jnp.asarray(draw(size=(m, n)) / np.sqrt(m), jnp.float32), jnp.zeros(n, jnp.float32))
        for m, n in zip(widths[:-1], widths[1:], strict=True)
    ]

    def apply(p: Any, x: jax.Array) -> jax.Array:
        for w, b in p[:-1]:
            x = jax.nn.relu(x @ w + b[None])
        return (x @ p[-1][0] + p[-1][1][None])[:, 0]

    return apply, params, x


def _structured_flops(widths: tuple[int, ...], samples: int) -> float:
    """Multiply-adds x 2 of the structured path: forward, backward, and two Gram matrices a layer."""
    pairs = list(zip(widths[:-1], widths[1:], strict=True))
    passes = sum(2 * samples * m * n for m, n in pairs) + sum(2 * samples * m * n for m, n in pairs[1:])
    return float(passes + sum(2 * samples**2 * (m + n) for m, n in pairs))


def speed(
    widths: tuple[int, ...] = (2, 1024, 1024, 1),
    samples: int = 256,
    repeats: int = 20,
    peer: str | None = None,
) -> dict[str, Any]:
    """The structured path against Jacobian contraction, matrix multiplication and neural-tangents.

    Args:
        widths, samples: of the network and the batch, float32.
        repeats: of the fast rows; the Jacobian runs twice.
        peer: path of a Python interpreter that has neural-tangents and a jax it imports on; None skips it.

    Returns:
        Seconds, and the ratios that matter: ``vs_jacobian`` (target 100), ``of_matmul_peak`` (0.5),
        ``vs_peer`` (1.3; its structured mode), ``memory_ratio``: temporary bytes over kernel + activations (2).
    """
    apply, params, x = _network(widths, samples)
    ways = {
        method: jax.jit(
            lambda p, x, method=method: kernels.empirical_ntk(apply, p, x, stats="frozen", method=method)
        )
        for method in ("structured", "jacobian")
    }
    ours = _best(ways["structured"], params, x, repeats=repeats)
    jacobian = _best(ways["jacobian"], params, x, repeats=2)
    difference = ways["structured"](params, x) - ways["jacobian"](params, x)
    size = 2048
    square = jnp.ones((size, size), jnp.float32)
    multiply = _best(jax.jit(jnp.matmul), square, square, repeats=max(repeats // 2, 3))
    ours = min(ours, _best(ways["structured"], params, x, repeats=repeats))  # around the peak's measurement
    rate, peak = _structured_flops(widths, samples) / ours, 2 * size**3 / multiply
    memory: Any = ways["structured"].lower(params, x).compile().memory_analysis()
    item = x.dtype.itemsize
    # activations: input and gradient of every layer
    factors = item * samples * (sum(widths[:-1]) + sum(widths[1:]))
    out = {
        "structured": ours,
        "jacobian": jacobian,
        "vs_jacobian": jacobian / ours,
        "gflops": rate / 1e9,
        "matmul_gflops": peak / 1e9,
        "of_matmul_peak": rate / peak,
        "relative_difference": float(jnp.max(jnp.abs(difference)) / jnp.max(ways["jacobian"](params, x))),
        "temporary_bytes": memory.temp_size_in_bytes,
        "memory_ratio": (memory.temp_size_in_bytes + memory.output_size_in_bytes)
        / (item * samples**2 + factors),
        "jax": jax.__version__,
    }
    if peer is not None:
        command = [peer, "-c", _PEER, json.dumps([list(widths), samples, repeats])]
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
        other = json.loads(answer.stdout.strip().splitlines()[-1])
        row = np.asarray(ways["structured"](params, x)[0])
        out |= {
            "peer": other["seconds"],
            "peer_jax": other["jax"],
            "vs_peer": other["seconds"] / ours,
            "peer_difference": float(np.max(np.abs(row - np.asarray(other["row"]))) / np.max(np.abs(row))),
        }
    return out


def large(
    samples: int = 8192, widths: tuple[int, ...] = (2, 1024, 1024, 1), chunk: int = 512
) -> dict[str, Any]:
    """The full kernel of many samples in row blocks: seconds, and the program's memory (target 2 GB)."""
    apply, params, x = _network(widths, samples)
    kernel = jax.jit(lambda p, x: kernels.empirical_ntk(apply, p, x, stats="frozen", chunk=chunk))
    program = kernel.lower(params, x).compile()
    memory: Any = program.memory_analysis()
    start = time.perf_counter()
    result = jax.block_until_ready(program(params, x))
    seconds = time.perf_counter() - start
    rows = kernels.empirical_ntk(apply, params, x[:4], x, stats="frozen")
    return {
        "seconds": seconds,
        "kernel_bytes": memory.output_size_in_bytes,
        "peak_bytes": memory.output_size_in_bytes + memory.temp_size_in_bytes + memory.argument_size_in_bytes,
        "difference_of_first_rows": float(jnp.max(jnp.abs(result[:4] - rows)) / jnp.max(jnp.abs(rows))),
        "gflops": _structured_flops(widths, samples) / seconds / 1e9,
    }


def operator(width: int = 1024, samples: int = 1024) -> dict[str, float]:
    """Seconds for a product with a batch-norm network's kernel, and for a forward pass."""
    apply, params, x = _network((width, width, width, 1), samples)
    normed = lambda p, x: normalize(apply(p, x))
    forward = _best(jax.jit(normed), params, x, repeats=3)
    kernel = kernels.ntk_operator(normed, params, x, stats="batch")
    product = _best(lambda v: kernel @ v, jnp.ones(samples, x.dtype), repeats=3)
    return {"product": product, "forward": forward, "passes": product / forward}
