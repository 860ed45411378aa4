"""Speed and memory of the empirical tangent kernel, against matrix multiplication and against its peers."""

import json
import pathlib
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanflow import kernels
from meanflow.layers.functional import recenter, rescale
from meanflow_benchmarks import networks as networks_module
from meanflow_benchmarks.memory import program_memory
from meanflow_benchmarks.networks import NETWORKS
from meanflow_benchmarks.operations import share_of_products
from meanflow_benchmarks.peers import NAMES, interpreters, left_out
from meanflow_benchmarks.resident import grown_bytes
from meanflow_benchmarks.timing import interleaved, timed

Params = list[tuple[Float[Array, "m n"], Float[Array, " n"]]]  # weights and biases by layer
Apply = Callable[[Params, Float[Array, "samples d"]], Float[Array, " samples"]]

# The peer's own interpreter runs this, with a jax old enough for it; it prints one line of JSON. The network is drawn
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
        start = time.process_time()
        kernel(x, None, params).block_until_ready()
        best = min(best, time.process_time() - start)
row = np.asarray(result).reshape(samples, samples)[0].tolist()
print(json.dumps({"seconds": best, "jax": jax.__version__, "row": row}))
"""


def _best(function: Callable[..., object], *args: object, repeats: int = 20) -> float:
    return interleaved({"job": lambda: function(*args)}, repeats)["job"]


def _network(widths: tuple[int, ...], samples: int) -> tuple[Apply, Params, Float[Array, "samples d"]]:
    """Return (apply, params, x) of a ReLU network with biases and one output, in float32."""
    # not jax.random, whose numbers differ between the peer's jax and ours
    draw = np.random.default_rng(0).normal
    x = jnp.asarray(draw(size=(samples, widths[0])), jnp.float32)
    params = [
        (jnp.asarray(draw(size=(m, n)) / np.sqrt(m), jnp.float32), jnp.zeros(n, jnp.float32))
        for m, n in zip(widths[:-1], widths[1:], strict=True)
    ]

    def apply(p: Params, x: Float[Array, "samples d"]) -> Float[Array, " samples"]:
        for w, b in p[:-1]:
            x = jax.nn.relu(x @ w + b[None])
        return (x @ p[-1][0] + p[-1][1][None])[:, 0]

    return apply, params, x


def _structured_flops(widths: tuple[int, ...], samples: int) -> float:
    """Return the operations of the structured path: forward, backward, and two Gram matrices per layer.

    A multiplication and an addition count as two.
    """
    pairs = list(zip(widths[:-1], widths[1:], strict=True))
    passes = sum(2 * samples * m * n for m, n in pairs) + sum(2 * samples * m * n for m, n in pairs[1:])
    return float(passes + sum(2 * samples**2 * (m + n) for m, n in pairs))


def speed(
    widths: tuple[int, ...] = (2, 1024, 1024, 1),
    samples: int = 256,
    repeats: int = 20,
    peers: tuple[str, ...] = NAMES,
) -> dict[str, float | str]:
    """The structured path against Jacobian contraction, matrix multiplication and neural-tangents.

    Args:
        widths, samples: size of the network and of the batch, in float32.
        repeats: measurements of which the best counts; the Jacobian, which is slow, has two.
        peers: which peers to run beside, here only "tangents" (neural-tangents); ``scripts/peers`` installs it.

    Returns:
        Seconds and the ratios that matter: ``vs_jacobian`` (target 100), ``of_matmul_peak`` (0.5), ``vs_peer`` (1.3,
        its structured mode) and ``memory_ratio``, the program's bytes over those of the kernel and activations (2).
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
    peak = _matmul_rate(max(repeats // 2, 3))
    # once more after the peak, so that a busy machine does not slow down only one side of the ratio
    ours = min(ours, _best(ways["structured"], params, x, repeats=repeats))
    rate = _structured_flops(widths, samples) / ours
    kernel, reference = ways["structured"](params, x), ways["jacobian"](params, x)
    memory = program_memory(ways["structured"].lower(params, x).compile())
    # what must be stored: the kernel, and the input and gradient of every layer
    needed = x.dtype.itemsize * (samples**2 + samples * (sum(widths[:-1]) + sum(widths[1:])))
    out: dict[str, float | str] = {
        "structured": ours,
        "jacobian": jacobian,
        "vs_jacobian": jacobian / ours,
        "gflops": rate / 1e9,
        "matmul_gflops": peak / 1e9,
        "of_matmul_peak": rate / peak,
        "relative_difference": float(jnp.max(jnp.abs(kernel - reference)) / jnp.max(reference)),
        "temporary_bytes": memory.temporary,
        "memory_ratio": (memory.temporary + memory.output) / needed,
        "jax": jax.__version__,
    }
    for interpreter in interpreters(peers, ("tangents",)).values():
        out |= _peer_numbers(interpreter, widths, samples, repeats, ours, np.asarray(kernel[0]))
    return out | left_out(peers, ("tangents",))


def _matmul_rate(repeats: int, size: int = 2048) -> float:
    """Return the operations per second of a product of square float32 matrices, the machine's peak in practice."""
    square = jnp.ones((size, size), jnp.float32)
    return 2 * size**3 / _best(jax.jit(jnp.matmul), square, square, repeats=repeats)


def _peer_numbers(
    interpreter: str, widths: tuple[int, ...], samples: int, repeats: int, ours: float, row: np.ndarray
) -> dict[str, float | str]:
    """Run the peer and return its seconds, our speedup and the relative difference of the kernel's first row."""
    command = [interpreter, "-c", _PEER, json.dumps([list(widths), samples, repeats])]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    other = json.loads(answer.stdout.strip().splitlines()[-1])
    return {
        "peer": other["seconds"],
        "peer_jax": other["jax"],
        "vs_peer": other["seconds"] / ours,
        "peer_difference": float(np.max(np.abs(row - np.asarray(other["row"]))) / np.max(np.abs(row))),
    }


def large(
    samples: int = 8192, widths: tuple[int, ...] = (2, 1024, 1024, 1), chunk: int = 512
) -> dict[str, float]:
    """The full kernel of many samples, block of rows by block: seconds and the program's memory (target 2 GB).

    Args:
        samples, widths: size of the batch and of the network, in float32.
        chunk: rows per block.

    Returns:
        Seconds, bytes, speed, and the relative difference of the first four rows from a direct computation.
    """
    apply, params, x = _network(widths, samples)
    method = kernels.Method(chunk=chunk)
    kernel = jax.jit(lambda p, x: kernels.empirical_ntk(apply, p, x, stats="frozen", method=method))
    program = kernel.lower(params, x).compile()
    memory = program_memory(program)
    result, seconds = timed(program, params, x)
    rows = kernels.empirical_ntk(apply, params, x[:4], x, stats="frozen")
    return {
        "seconds": seconds,
        "kernel_bytes": memory.output,
        "peak_bytes": memory.output + memory.temporary + memory.arguments,
        "difference_of_first_rows": float(jnp.max(jnp.abs(result[:4] - rows)) / jnp.max(jnp.abs(rows))),
        "gflops": _structured_flops(widths, samples) / seconds / 1e9,
    }


def convolutions(samples: int = 1024, limit: int = 2**30) -> dict[str, float]:
    """The trace kernel of a convolutional network at many samples within a stated limit of memory.

    Args:
        samples: size of the batch, of 16 x 16 pixels.
        limit: the most bytes that ``empirical_ntk`` may take.

    Returns:
        Processor ``seconds``, ``planned_bytes``, ``bytes`` by which the process grew (target: at most ``limit``), and
        the relative difference of the first two rows from those computed alone.
    """
    apply, params, x = networks_module.convolutional(samples, 16, 32)
    method = kernels.Method(limit=limit)
    kernel = lambda a, b: kernels.empirical_ntk(
        apply, params, a, b, outputs="trace", stats="frozen", method=method
    )
    plan = method.plan(apply, params, x, outputs="trace", stats="frozen")
    found: dict[str, Any] = {}
    run = lambda: found.update(kernel=jax.block_until_ready(kernel(x, None)))
    run()
    grown = grown_bytes(run)
    start = time.process_time()
    run()
    seconds = time.process_time() - start
    rows = kernel(x[:2], x)
    return {
        "seconds": seconds,
        "planned_bytes": plan.bytes[plan.method],
        "bytes": grown,
        "difference_of_first_rows": float(
            jnp.max(jnp.abs(found["kernel"][:2] - rows)) / jnp.max(jnp.abs(rows))
        ),
    }


def scaling(factor: int = 4, repeats: int = 2) -> dict[str, float]:
    """Exponents with which the time of a kernel grows, between two sizes ``factor`` apart.

    The docstring of ``empirical_ntk`` gives the exponents of its parts, of which the largest bounds the whole: at most
    2 in samples, width, channels and outputs.

    Returns:
        Exponents in ``samples`` (dense, trace), ``width`` (dense, trace), ``channels`` (convolutions, trace) and
        ``outputs`` (dense, full); target at most 2.1.
    """
    dense = networks_module.dense
    jobs = {
        "samples": (lambda n: dense(512 * n, (64, 256, 256, 1)), "trace"),
        "width": (lambda n: dense(64, (64, 512 * n, 512 * n, 1)), "trace"),
        "channels": (lambda n: networks_module.convolutional(16, 8, 32 * n), "trace"),
        "outputs": (lambda n: dense(64, (64, 256, 256, 10 * n)), "full"),
    }
    out = {}
    for name, (network, kept) in jobs.items():
        ways = {}
        for size in (1, factor):
            apply, params, x = network(size)
            ways[str(size)] = lambda apply=apply, params=params, x=x, kept=kept: kernels.empirical_ntk(
                apply, params, x, outputs=kept, stats="frozen"
            )
        spent = interleaved(ways, repeats)
        out[name] = float(np.log(spent[str(factor)] / spent["1"]) / np.log(factor))
    return out


def coupled(repeats: int = 2, samples: tuple[int, int] = (256, 32), width: int = 512) -> dict[str, float]:
    """Kernels under hidden batch norm against Jacobians written by hand, jacrev and their products.

    Returns:
        For a dense network and one of convolutions, in processor time: ``seconds``, and how many times slower the Gram
        matrix ``by hand`` is (target 1.2) and method="jacobian" (3).
    """
    dense = networks_module.dense(samples[0], (64, width, width, 1), 0)
    convolved = networks_module.convolutional(samples[1], 16, width // 16, 1, batch_norm=True)
    return _against_jacobians("dense", *dense, repeats) | _against_jacobians("conv", *convolved, repeats)


def _against_jacobians(name: str, apply: Any, params: Any, x: Array, repeats: int) -> dict[str, float]:
    flat = lambda j: j.reshape(x.shape[0], -1)
    gram = lambda p: sum(flat(j) @ flat(j).T for j in jax.tree.leaves(jax.jacrev(apply)(p, x)))
    by_hand = jax.jit(gram)
    ours = lambda method: lambda: kernels.empirical_ntk(apply, params, x, stats="batch", method=method)
    ways = {"auto": ours("auto"), "by hand": lambda: by_hand(params), "jacobian": ours("jacobian")}
    spent = interleaved(ways, repeats)
    ratios = {f"{name}: {k}": spent[k] / spent["auto"] for k in ("by hand", "jacobian")}
    return {f"{name}: seconds": spent["auto"], **ratios}


def regression(
    samples: int = 5000, width: int = 512, ridge: float = 1e-3, top: int = 50, large: int = 0
) -> dict[str, float]:
    """Kernel regression by conjugate gradients on products alone, against the matrix and its Cholesky factor.

    Args:
        samples: rows that both solve.
        width: of the hidden layer of a ReLU network on 10 inputs, in float32.
        ridge: in units of the mean eigenvalue times the number of samples.
        top: leading eigenvalues that are taken out first.
        large: rows that conjugate gradients solve alone; 0 for none.

    Returns:
        Processor seconds of ``dense`` and of ``iteration``, their ratio, the relative ``residual``, and the relative
        ``difference`` of the fitted values; with ``large`` its seconds, residual, and bytes of the matrix it spares.
    """
    draw = np.random.default_rng(1).normal(size=(max(samples, large), 1))

    def problem(count: int) -> tuple[Any, ...]:
        apply, params, x = _network((10, width, 1), count)
        size = float(jnp.trace(kernels.empirical_ntk(apply, params, x[:256], stats="frozen"))) / 256
        y = jnp.sin(x[:, 0]) + 0.1 * jnp.asarray(draw[:count, 0], x.dtype)
        return apply, params, x, y, ridge * size * count

    def iterate(count: int) -> tuple[Array, Array]:
        apply, params, x, y, shift = problem(count)
        found = kernels.ntk_operator(apply, params, x).solve(y, ridge=shift, top=top, key=jax.random.key(0))
        return y - shift * found.values, found.residual  # K a = y - ridge a

    def dense() -> Array:
        apply, params, x, y, shift = problem(samples)
        matrix = kernels.empirical_ntk(apply, params, x, stats="frozen")
        factor = jax.scipy.linalg.cho_factor(matrix + shift * jnp.eye(samples, dtype=x.dtype))
        return y - shift * jax.scipy.linalg.cho_solve(factor, y)

    spent = interleaved({"dense": dense, "iteration": lambda: iterate(samples)}, 2)
    (ours, residual), exact = iterate(samples), dense()
    out = {
        **spent,
        "dense to iteration": spent["dense"] / spent["iteration"],
        "residual": float(residual),
        "difference": float(jnp.linalg.norm(ours - exact) / jnp.linalg.norm(exact)),
    }
    if large:
        start = time.process_time()
        _, residual = iterate(large)
        seconds = time.process_time() - start
        out |= {
            "large: seconds": seconds,
            "large: residual": float(residual),
            "large: bytes of K": 4.0 * large**2,
        }
    return out


def operator(width: int = 1024, samples: int = 1024) -> dict[str, float]:
    """Seconds of a product of a vector with a batch-norm network's kernel, in units of a forward pass.

    Args:
        width: of the input and of both hidden layers.
        samples: size of the batch, which is the size of the kernel.

    Returns:
        Seconds of ``product`` and ``forward``, and ``passes``, their ratio.
    """
    apply, params, x = _network((width, width, width, 1), samples)
    normed = lambda p, x: rescale(recenter(apply(p, x)))
    forward = _best(jax.jit(normed), params, x, repeats=3)
    kernel = kernels.ntk_operator(normed, params, x, stats="batch")
    product = _best(lambda v: kernel @ v, jnp.ones(samples, x.dtype), repeats=3)
    return {"product": product, "forward": forward, "passes": product / forward}


# Each peer runs one network in a process of its own, on one thread, and prints one line of JSON: processor seconds of
# the best of its ways, the bytes by which the process grew in one compiled call of it, and the kernel's first row.
_TANGENTS = r"""
import json, sys, time
sys.path.insert(0, sys.argv[1])
import numpy as np, jax, jax.numpy as jnp
from jax.interpreters import ad
from jax._src import source_info_util
for name, value in (("source_info_util", source_info_util), ("config", jax.config)):
    if not hasattr(ad, name):  # neural-tangents 0.6.5 reads them there
        setattr(ad, name, value)
import neural_tangents as nt
import networks, resident
name, outputs, repeats = sys.argv[2], sys.argv[3], int(sys.argv[4])
apply, params, x = networks.NETWORKS[name]()
best, way, size = 1e9, "", 0.0
modes = nt.NtkImplementation
for mode in (modes.STRUCTURED_DERIVATIVES, modes.JACOBIAN_CONTRACTION):
    axes = None if name.startswith("batch norm") else 0
    trace = () if outputs == "full" else (-1,)
    kernel = jax.jit(nt.empirical_ntk_fn(apply, trace_axes=trace, vmap_axes=axes, implementation=mode))
    result = jax.block_until_ready(kernel(x, None, params))
    start = time.process_time()
    grown = resident.grown_bytes(lambda: jax.block_until_ready(kernel(x, None, params)))
    if time.process_time() - start > 3 * best:  # out of the question
        continue
    for _ in range(repeats):
        start = time.process_time()
        jax.block_until_ready(kernel(x, None, params))
        spent = time.process_time() - start
        best, way, size = min((best, way, size), (spent, mode.name, grown))
count = 1 if outputs == "full" else jax.eval_shape(apply, params, x).shape[-1]  # it averages instead of summing
row = (count * np.asarray(result)[0]).ravel().tolist()
print(json.dumps({"seconds": best, "way": way, "bytes": size, "row": row}))
"""
_TORCH = r"""
import json, sys, time
sys.path.insert(0, sys.argv[1])
import numpy as np, torch, resident
import torch.nn.functional as F
torch.set_num_threads(1)
name, outputs, repeats = sys.argv[2], sys.argv[3], int(sys.argv[4])
held = np.load(sys.argv[5])
x = torch.tensor(held["x"])
params = {k: torch.tensor(held[k]) for k in held.files if k != "x"}
def conv(x, w, groups=1, stride=1):
    return F.conv2d(x, w.permute(3, 2, 0, 1), None, stride, w.shape[0] // 2 if stride == 1 else 0, 1, groups)
def unit(x, axis):
    mean = x.mean(axis, keepdim=True)
    return (x - mean) / torch.sqrt(((x - mean) ** 2).mean(axis, keepdim=True) + 1e-5)
def dense(p, x):
    count = len(p) // 2
    axis = {"layer": -1, "batch": 0}.get(name.split()[0])
    for i in range(count):
        x = x @ p[f"[{i}]['w']"] + p[f"[{i}]['b']"]
        if i < count - 1:
            x = torch.relu(x if axis is None else unit(x, axis))
    return x
def cnn(p, x):
    x = x.permute(0, 3, 1, 2)
    for i in range(3):
        x = torch.relu(conv(x, p[f"['layers'][{i}]['w']"]) + p[f"['layers'][{i}]['b']"].reshape(1, -1, 1, 1))
    return x.mean((2, 3)) @ p["['head']"]
def resnet(p, x):
    x = conv(x.permute(0, 3, 1, 2), p["['first']"])
    for i in range(3):
        a, b = (p[f"['blocks'][{i}]['{n}']"] for n in "ab")
        x = x + conv(torch.relu(conv(torch.relu(x), a)), b)
    return x.mean((2, 3)) @ p["['head']"]
def convnext(p, x):
    x = conv(x.permute(0, 3, 1, 2), p["['first']"], stride=2)
    for i in range(2):
        get = lambda n: p[f"['blocks'][{i}]['{n}']"]
        h = unit(conv(x, get("depth"), x.shape[1]).permute(0, 2, 3, 1), -1) * get("s")
        x = x + (F.gelu(h @ get("up")) @ get("down")).permute(0, 3, 1, 2)
    return x.mean((2, 3)) @ p["['head']"]
def grouped(p, x):
    x = conv(x.permute(0, 3, 1, 2), p["['first']"])
    for i in range(2):
        get = lambda n: p[f"['blocks'][{i}]['{n}']"]
        h = conv(torch.relu(conv(x, get("in")[None, None])), get("mid"), 4)
        x = x + conv(torch.relu(h), get("out")[None, None])
    return x.mean((2, 3)) @ p["['head']"]
def mixer(p, x):
    for i in range(2):
        get = lambda n: p[f"['blocks'][{i}]['{n}']"]
        x = x + (torch.relu(unit(x, -1).transpose(1, 2) @ get("a")) @ get("b")).transpose(1, 2)
        x = x + torch.relu(unit(x, -1) @ get("c")) @ get("d")
    return x.mean(1) @ p["['head']"]
def gru(p, x):
    h = torch.zeros(x.shape[0], x.shape[2])
    get = lambda n: p[f"['{n}']"]
    for i in range(x.shape[1]):
        now = x[:, i]
        reset = torch.sigmoid(now @ get("ur") + h @ get("wr"))
        update = torch.sigmoid(now @ get("uz") + h @ get("wz"))
        h = (1 - update) * torch.tanh(now @ get("un") + reset * (h @ get("wn"))) + update * h
    return h @ get("head")
def unet(p, x):
    get = lambda n: p[f"['{n}']"]
    first = torch.relu(conv(x.permute(0, 3, 1, 2), get("in")))
    h = torch.relu(conv(torch.relu(conv(first, get("down"), stride=2)), get("mid")))
    h = torch.cat([h.repeat_interleave(2, 2).repeat_interleave(2, 3), first], 1)
    return torch.relu(conv(h, get("up"))).mean((2, 3)) @ get("head")
def experts(p, x):
    get = lambda n: p[f"['{n}']"]
    gate = torch.softmax(x @ get("gate"), -1)
    h = torch.relu(torch.einsum("td,dek->tek", x, get("up")))
    return torch.einsum("te,ted->td", gate, torch.einsum("tek,ekd->ted", h, get("down"))) @ get("head")
def vit(p, x):
    count, side = x.shape[0], x.shape[1] // 4
    x = x.reshape(count, side, 4, side, 4, 3).permute(0, 1, 3, 2, 4, 5).reshape(count, side**2, 48)
    token = p["['token']"].expand(count, 1, -1)
    x = torch.cat([token, x @ p["['patch']"]], 1) + p["['place']"]
    return attention(p, x, F.gelu)[:, 0] @ p["['head']"]
def transformer(p, x):
    return attention(p, x, torch.relu).mean(1) @ p["['head']"]
def attention(p, x, activation):
    for i in range(2):
        get = lambda n: p[f"['blocks'][{i}]['{n}']"]
        h = unit(x, -1) * get("s")[0]
        q, k, v = ((h @ get(n)).reshape(h.shape[0], h.shape[1], 4, -1) for n in "qkv")
        weight = torch.softmax(torch.einsum("bthk,bshk->bhts", q, k) / (x.shape[2] / 4) ** 0.5, -1)
        x = x + torch.einsum("bhts,bshk->bthk", weight, v).reshape(h.shape) @ get("o")
        x = x + activation((unit(x, -1) * get("s")[1]) @ get("up")) @ get("down")
    return x
def recurrent(p, x):
    h = torch.zeros(x.shape[0], x.shape[2])
    for i in range(x.shape[1]):
        h = torch.tanh(x[:, i] @ p["['u']"] + h @ p["['w']"])
    return h @ p["['head']"]
kinds = {"cnn": cnn, "resnet": resnet, "transformer": transformer, "recurrent": recurrent, "convnext": convnext}
kinds |= {"grouped": grouped, "vit": vit, "mixer": mixer, "gru": gru, "unet": unet, "experts": experts}
apply = kinds.get(name.split(",")[0], dense)
def kernel():
    if name.startswith("batch norm"):
        jacobian = torch.func.jacrev(lambda p: apply(p, x))(params)
    else:
        one = torch.func.jacrev(lambda p, s: apply(p, s[None])[0])
        jacobian = torch.func.vmap(one, (None, 0))(params, x)
    flat = [j.flatten(2) for j in jacobian.values()]
    if outputs == "trace":
        return sum(j.flatten(1) @ j.flatten(1).T for j in flat)
    return sum(torch.einsum("tcm,sdm->tscd", j, j) for j in flat)
result, best = kernel(), 1e9
grown = resident.grown_bytes(kernel)
for _ in range(repeats):
    start = time.process_time()
    kernel()
    best = min(best, time.process_time() - start)
print(json.dumps({"seconds": best, "bytes": grown, "row": result[0].ravel().tolist()}))
"""
_SCRIPTS = {"tangents": _TANGENTS, "torch": _TORCH}


def of_networks(
    names: tuple[str, ...] = tuple(NETWORKS),
    outputs: tuple[str, ...] = ("full", "trace"),
    repeats: int = 3,
    peers: tuple[str, ...] = NAMES,
) -> dict[str, float | str]:
    """Kernels of convolutional, residual, attending, recurrent and normalized networks, with peers in the same run.

    All times are processor seconds of one thread, when XLA_FLAGS holds ``--xla_cpu_multi_thread_eigen=false``.

    Args:
        names: which of ``networks.NETWORKS``.
        outputs: kernels kept: "full", "trace".
        repeats: measurements of which the best counts.
        peers: which of "tangents" (neural-tangents) and "torch" (PyTorch; its kernel is vmap(jacrev) with a product of
            Jacobians) to run beside; ``scripts/peers`` installs them.

    Returns:
        For every network and kept outputs: seconds of ``auto``, what was planned (target: within a factor 2), its time
        over that of the best method (1.2), bytes by which one call lets the process grow, the share of matrix products
        in all operations (.95), and for each peer its seconds, its bytes, how many times slower it is (1.3), and the
        relative difference of the first row.
    """
    out: dict[str, float | str] = {}
    for name in names:
        for kept in outputs:
            out |= {
                f"{name}, {kept}: {k}": v
                for k, v in _network_numbers(name, kept, repeats, interpreters(peers)).items()
            }
    return out | left_out(peers)


def _network_numbers(name: str, outputs: str, repeats: int, peers: dict[str, str]) -> dict[str, float | str]:
    """Time one network here and in the peers' interpreters."""
    apply, params, x = NETWORKS[name]()
    stats = "batch" if name.startswith("batch norm") else None
    plan, rate = kernels.Method().plan(apply, params, x, outputs=outputs, stats=stats), _matmul_rate(40, 384)
    kernel = lambda method, p: kernels.empirical_ntk(
        apply, p, x, outputs=outputs, stats=stats or "frozen", method=method
    )
    way = lambda method: lambda: jax.block_until_ready(kernel(method, params))
    row = np.asarray(way("auto")())[0].ravel()
    grown = grown_bytes(way("auto"))
    # the other methods where they are not out of the question
    rivals = [
        m
        for m, count in plan.operations.items()
        if count < 5 * plan.operations[plan.method] and plan.bytes[m] < 2**30
    ]
    measured = interleaved({m: way(m) for m in {*rivals, plan.method}}, repeats)
    best = measured[plan.method]
    out: dict[str, float | str] = {
        "method": plan.method,
        "planned seconds": plan.operations[plan.method] / rate,
        "auto to best": best / min(measured.values()),
        "planned bytes": plan.bytes[plan.method],
        "bytes": grown,
        "share of products": share_of_products(jax.make_jaxpr(lambda p: kernel("auto", p))(params)),
    }
    folder = str(pathlib.Path(networks_module.__file__).parent)
    with tempfile.NamedTemporaryFile(suffix=".npz") as file:
        leaves, _ = jax.tree_util.tree_flatten_with_path(params)
        arrays: dict[str, Any] = {jax.tree_util.keystr(k): np.asarray(v) for k, v in leaves}
        np.savez(file, x=np.asarray(x), **arrays)
        file.flush()
        for label, interpreter in peers.items():
            command = [interpreter, "-c", _SCRIPTS[label], folder, name, outputs, str(repeats + 4), file.name]
            answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
            if answer.returncode:
                said = answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"]
                out[f"{label} failed"] = said[-1][:200]
                continue
            other = json.loads(answer.stdout.strip().splitlines()[-1])
            # the machine may be less busy now; the peer has as many measurements
            best = min(best, *(interleaved({"again": way(plan.method)}, 1)["again"] for _ in "12"))
            out |= {
                f"{label} seconds": other["seconds"],
                f"{label} bytes": other["bytes"],
                f"{label} difference": float(
                    np.max(np.abs(row - np.asarray(other["row"]))) / np.max(np.abs(row))
                ),
            }
    ratios = {
        f"vs {peer}": float(out[f"{peer} seconds"]) / best for peer in peers if f"{peer} seconds" in out
    }
    return {"seconds": best, **out, **ratios}
