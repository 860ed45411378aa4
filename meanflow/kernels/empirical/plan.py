"""Which method computes a tangent kernel with the fewest operations within the memory that is allowed?

The costs are rough counts for dense layers: P parameters cost 2 P operations a forward pass of one sample. They are
good enough to choose between methods, which differ by orders of magnitude.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Shaped

from meanflow import _checks
from meanflow.kernels.empirical import structured
from meanflow.kernels.empirical.coupling import STATS, KernelMaps, kernel_maps
from meanflow.kernels.empirical.modules import Apply, Batch, Normalized, Params, batch

METHODS = ("auto", "jacobian", "products", "structured")
OUTPUTS = ("full", "trace", "diagonal")
LIMIT = 4 * 2**30  # bytes


class NtkPlan(NamedTuple):
    """What ``empirical_ntk`` will do.

    Attributes:
        method: "jacobian", "products" or "structured".
        chunk: rows of the kernel computed at a time.
        coupled: whether samples are treated as depending on each other.
        flops: rough count of floating point operations, for each method that applies.
        bytes: rough peak memory beside parameters and inputs, for each method that applies.
        reason: the choice in words.
    """

    method: str
    chunk: int
    coupled: bool
    flops: dict[str, float]
    bytes: dict[str, float]
    reason: str


class _Sizes(NamedTuple):
    """T rows, S columns, C outputs a sample, P parameters, and bytes of one number."""

    rows: int
    columns: int
    outputs: int
    parameters: int
    item: int


def _sizes(maps: KernelMaps, params: Params) -> _Sizes:
    """Read all sizes off the shapes, without computing a number."""
    left, right = jax.eval_shape(maps.left, params), jax.eval_shape(maps.right, params)
    for name, out in (("x", left), ("z", right)):
        if not isinstance(out, jax.ShapeDtypeStruct) or out.ndim < 1:
            raise ValueError(f"apply must return one array (samples, ...), got {out} at {name}")
    count = sum(math.prod(np.shape(a)) for a in jax.tree.leaves(params))
    return _Sizes(left.shape[0], right.shape[0], math.prod(left.shape[1:]), count, left.dtype.itemsize)


# How a kernel is to be computed; the same for ``ntk_plan`` and ``empirical_ntk``.
OPTIONS = {
    "apply": _checks.function,
    "params": _checks.anything,
    "x": batch,
    "z": _checks.optional(batch),
    "stats": _checks.optional(_checks.choice(*STATS)),
    "outputs": _checks.choice(*OUTPUTS),
    "chunk": _checks.optional(_checks.count(1)),
    "method": _checks.choice(*METHODS),
    "limit": _checks.number(above=0),
}


@_checks.arguments(**OPTIONS)
def ntk_plan(
    apply: Apply | Normalized,
    params: Params,
    x: Shaped[ArrayLike, "T ..."],
    z: Shaped[ArrayLike, "S ..."] | None = None,
    *,
    stats: str | None = None,
    outputs: str = "full",
    chunk: int | None = None,
    method: str = "auto",
    limit: int = LIMIT,
) -> NtkPlan:
    """Return the method, chunk and cost that ``empirical_ntk`` with these arguments would use.

    All arguments are those of ``empirical_ntk``. No kernel is computed.

    >>> import jax.numpy as jnp
    >>> apply = lambda p, x: jnp.tanh(jnp.tanh(x @ p[0]) @ p[1]) @ p[2]
    >>> params = (jnp.ones((2, 100)), jnp.ones((100, 100)), jnp.ones(100))
    >>> ntk_plan(apply, params, jnp.ones((300, 2))).method
    'structured'
    """
    left, right = jnp.asarray(x), None if z is None else jnp.asarray(z)
    maps = kernel_maps(apply, params, left, right, stats)
    return plan_for(maps, params, left, outputs, chunk, method, limit)


def plan_for(
    maps: KernelMaps,
    params: Params,
    x: Batch,
    outputs: str,
    chunk: int | None,
    method: str,
    limit: int,
) -> NtkPlan:
    """Choose method and chunk for the kernel of ``maps``; the other arguments are those of ``empirical_ntk``."""
    sizes = _sizes(maps, params)
    kept = {"full": sizes.outputs**2, "diagonal": sizes.outputs, "trace": 1}[outputs]
    result = sizes.item * sizes.rows * sizes.columns * kept
    if result > limit:
        raise ValueError(
            f"the kernel alone takes {result:.3g} bytes, above limit={limit:.3g}; "
            "kernels.ntk_operator multiplies by it without forming it"
        )
    coupled = maps.single is None
    block = chunk if chunk is not None else _block(sizes, limit, coupled)
    flops, memory = _costs(maps, params, x, sizes, result, block)
    if method == "structured" and "structured" not in flops:
        raise ValueError(
            'method="structured" needs samples that do not depend on each other; use "jacobian", "products", '
            "or kernels.batchnorm_ntk for batch norm on the output"
        )
    chosen, reason = _choose(method, flops, memory, limit)
    if chunk is not None:
        at_a_time = chunk
    elif chosen == "structured":  # temporaries of a block stay below a quarter of the limit
        share = limit / 4 / max(3 * sizes.item * sizes.columns * sizes.outputs**2, 1)
        at_a_time = max(1, min(sizes.rows, int(share)))
    else:
        at_a_time = block
    return NtkPlan(chosen, at_a_time, coupled, flops, memory, reason)


def _costs(
    maps: KernelMaps,
    params: Params,
    x: Batch,
    sizes: _Sizes,
    result: int,
    block: int,
) -> tuple[dict[str, float], dict[str, float]]:
    """Count operations and bytes of every method that applies; ``result`` is the kernel's own bytes."""
    rows, columns, size, count, item = sizes
    forward = 2.0 * count  # of one sample, for dense layers
    # a coupled function is linearized on the whole batch, so that each row's gradient costs T samples
    pulls = rows * size * (rows if maps.single is None else 1) * 2 * forward
    flops = {
        "jacobian": pulls + 2.0 * rows * columns * size**2 * count,
        "products": pulls + 2.0 * rows * columns * size * forward,
    }
    memory = {
        "jacobian": 2.0 * item * columns * size * count + result,
        "products": float(2 * item * block * size * count + result),
    }
    if maps.single is None:
        return flops, memory
    leaves, treedef = jax.tree.flatten(params)
    _, found = structured.analyze(maps.single, leaves, treedef, x)
    covered = found.structured()
    widths = sum(max(np.shape(leaves[i]), default=1) for i in covered)
    uncovered = [a for i, a in enumerate(leaves) if i not in covered and i in found.uses]
    rest = sum(math.prod(np.shape(a)) for a in uncovered)
    flops["structured"] = (
        (rows + columns) * forward * (1 + size)
        + 2.0 * rows * columns * widths * (1 + size**2)
        + rest * 2.0 * rows * columns * size**2
    )
    memory["structured"] = item * ((rows + columns) * (widths * (1 + size) + rest * size)) + 2.0 * result
    return flops, memory


def _choose(method: str, flops: dict[str, float], memory: dict[str, float], limit: int) -> tuple[str, str]:
    """Return the method and the reason in words; "auto" is resolved, and too large a Jacobian refused."""
    if method == "auto":
        fitting = {m: f for m, f in flops.items() if memory[m] <= limit}
        # "products" can always be made to fit, by smaller chunks
        chosen = min(fitting, key=lambda m: fitting[m]) if fitting else "products"
        return chosen, (
            f"{chosen}: fewest operations ({flops[chosen]:.2g}) among methods within {limit:.2g} bytes"
        )
    if method == "jacobian" and memory["jacobian"] > limit:
        raise ValueError(
            f"the Jacobian takes {memory['jacobian']:.3g} bytes, above limit={limit:.3g}; use "
            'method="products" with chunk=, or kernels.ntk_operator'
        )
    return method, f"{method}: asked for"


def _block(sizes: _Sizes, limit: int, coupled: bool) -> int:
    """Return how many rows' gradients, and the activations that carry them, fit in an eighth of the limit."""
    rows, columns, size, count, item = sizes
    one = item * size * (count + columns * size + (rows if coupled else 1) * math.isqrt(count + 1))
    return max(1, min(rows, int(limit / 8 / one)))
