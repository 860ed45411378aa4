"""Which method computes a tangent kernel in the least time within the memory that is allowed?

All counts come from the traced program (``cost``): operations of matrix products and convolutions, and numbers that
pass through memory. Nothing is compiled.
"""

import dataclasses
import functools
import inspect
import math
import time
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, ArrayLike, PyTree, Shaped

from meanflow import _checks
from meanflow._reuse import kept_by_shape
from meanflow.kernels._empirical import cost, structured
from meanflow.kernels._empirical.contraction import fitting
from meanflow.kernels._empirical.cost import Block, Cost
from meanflow.kernels._empirical.coupling import STATS, KernelMaps, kernel_maps
from meanflow.kernels._empirical.layout import coupled_layout, free_layout
from meanflow.kernels._empirical.modules import PARAMS, Apply, Batch, Normalized, Params
from meanflow.kernels._empirical.samples import as_arrays, batches

METHODS = ("auto", "jacobian", "products", "structured")
OUTPUTS = ("full", "trace", "diagonal")
LIMIT = 4 * 2**30  # bytes


@_checks.constructor(
    name=_checks.choice(*METHODS),
    limit=_checks.count(1, 2**62),
    mesh=_checks.optional(_checks.instance(Mesh, hint="see jax.make_mesh")),
)
@dataclasses.dataclass(frozen=True)
class Method:
    """How a tangent kernel is computed; the result does not depend on it.

    Args:
        name: "jacobian" forms both Jacobians; "products" computes one vector-Jacobian and one Jacobian-vector product a
            row; "structured" finds every product of a parameter in the trace of the function and takes, parameter by
            parameter, Gram matrices or that layer's Jacobian; "auto" takes the cheapest that fits.
        limit: the most bytes that the computation may take, 4 GiB by default.
        mesh: devices over which the rows are split, any number of rows over any number of devices; for samples that do
            not depend on each other.

    >>> Method("structured", limit=2**30).limit
    1073741824
    """

    name: str = "auto"
    limit: int = LIMIT
    mesh: Mesh | None = None


def method_kind(name: str, value: object) -> object:
    """Accept a ``Method``, or its name."""
    return value if isinstance(value, Method) else _checks.choice(*METHODS)(name, value)


class Options(NamedTuple):
    """What decides a kernel beside function, parameters and batches: the arguments of ``empirical_ntk``, checked."""

    stats: str | None
    outputs: str
    chunk: int | None
    method: str
    limit: int


class NtkPlan(NamedTuple):
    """What ``empirical_ntk`` will do.

    Attributes:
        method: "jacobian", "products" or "structured".
        chunk: rows of the kernel computed at a time.
        coupled: whether samples are treated as depending on each other.
        flops: count of floating point operations in products, for each method.
        bytes: peak memory beside parameters and inputs, for each method.
        seconds: estimated time on this machine, for each method.
        reason: the choice in words.
    """

    method: str
    chunk: int
    coupled: bool
    flops: dict[str, float]
    bytes: dict[str, float]
    seconds: dict[str, float]
    reason: str


# How a kernel is to be computed; the same for ``ntk_plan`` and ``empirical_ntk``.
OPTIONS = {
    "apply": _checks.taking(2),
    "params": PARAMS,
    "x": batches,
    "z": _checks.optional(batches),
    "stats": _checks.optional(_checks.choice(*STATS)),
    "outputs": _checks.choice(*OUTPUTS),
    "chunk": _checks.optional(_checks.count(1)),
    "method": method_kind,
}


@_checks.arguments(**OPTIONS)
def ntk_plan(
    apply: Apply | Normalized,
    params: Params,
    x: PyTree[Shaped[ArrayLike, "T ..."]],
    z: PyTree[Shaped[ArrayLike, "S ..."]] | None = None,
    *,
    stats: str | None = None,
    outputs: str = "full",
    chunk: int | None = None,
    method: str | Method = "auto",
) -> NtkPlan:
    """Return the method, chunk and cost that ``empirical_ntk`` with these arguments would use.

    All arguments are those of ``empirical_ntk``. No kernel is computed; one small matrix product tells how fast this
    machine is.

    >>> import jax.numpy as jnp
    >>> apply = lambda p, x: jnp.tanh(jnp.tanh(x @ p[0]) @ p[1]) @ p[2]
    >>> params = (jnp.ones((2, 100)), jnp.ones((100, 100)), jnp.ones(100))
    >>> ntk_plan(apply, params, jnp.ones((300, 2))).method
    'structured'
    """
    function, left, right = as_arrays(apply, x, z)
    how = method if isinstance(method, Method) else Method(method)
    options = Options(stats, outputs, chunk, how.name, how.limit)
    plan, total = _plan(function, params, left, right, options)
    rate = _rate(jnp.result_type(*jax.tree.leaves(params)).name)
    return plan._replace(seconds={name: c.total / rate for name, c in total.items()})


@functools.cache
def _rate(dtype: str) -> float:
    """Return the operations per second of a matrix product of this dtype on this machine, measured once."""
    size = 384
    with jax.ensure_compile_time_eval():
        square = jnp.ones((size, size), dtype)
        product = jax.jit(jnp.matmul)
        jax.block_until_ready(product(square, square))
        best = math.inf
        for _ in range(40):  # short ones, so that some run undisturbed on a busy machine
            start = time.perf_counter()
            jax.block_until_ready(product(square, square))
            best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best


_Planned = tuple[NtkPlan, dict[str, Cost]]


@kept_by_shape
def _plan(
    apply: Apply | Normalized,
    params: Params,
    x: Batch,
    z: Batch | None,
    options: Options,
) -> _Planned:
    """Probe the function and plan, or return the plan of the same function, shapes and options."""
    return _plan_for(kernel_maps(apply, params, x, z, options.stats), params, x, z, options)


def plan_once(
    apply: Apply | Normalized, params: Params, x: Batch, z: Batch | None, options: Options
) -> NtkPlan:
    """Return the plan for these arguments of ``empirical_ntk``, without times; made once a function and shapes."""
    arguments = (apply, params, x, z)
    # what is being traced is probed at other values, and may be planned in another way
    make = inspect.unwrap(_plan) if any(map(_is_traced, jax.tree.leaves(arguments))) else _plan
    return make(*arguments, options)[0]


def _is_traced(leaf: object) -> bool:
    if not isinstance(leaf, jax.Array):
        return False
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)  # a network's streams of random numbers
    numbers = jax.random.key_data(leaf) if is_key else leaf
    return _checks.concrete(numbers[:0] if leaf.ndim else numbers) is None


def _plan_for(maps: KernelMaps, params: Params, x: Batch, z: Batch | None, options: Options) -> _Planned:
    """Choose method and chunk for the kernel of ``maps``."""
    _, outputs, chunk, method, limit = options
    moving = [a for a in jax.tree.leaves(params) if eqx.is_inexact_array(a)]
    if not moving:
        raise ValueError("params must hold at least one array of floating point numbers, got none")
    left, right = traces(maps, params, x)
    if not left.used and not right.used:
        raise ValueError("the outputs of apply do not depend on params, so that its kernel is zero")
    block = block_of(maps, params, z is None, outputs)
    item = left.output.dtype.itemsize
    result = item * block.rows * block.columns * block.kernel
    if result > limit:
        raise ValueError(
            f"the kernel alone takes {result:.3g} bytes, above limit={limit:.3g}; "
            "kernels.ntk_operator multiplies by it without forming it"
        )
    coupled = maps.single is None
    layout = (
        coupled_layout(left, right, block, chunk, limit)
        if coupled
        else free_layout(left, block, chunk, limit, cpu=jax.default_backend() == "cpu")
    )
    counted = cost.passes(left.analysis.scope.closed, len(moving))
    total, memory, at_a_time = _count_plain_methods(
        left, counted, block, coupled, sum(a.size for a in moving), chunk, limit
    )
    total["structured"], memory["structured"] = layout.cost, layout.bytes
    chosen, reason = _choose(method, {m: c.total for m, c in total.items()}, memory, limit)
    rows = (layout.piece if coupled else layout.rows) if chosen == "structured" else at_a_time
    flops = {m: c.flops for m, c in total.items()}
    return NtkPlan(chosen, chunk or rows, coupled, flops, memory, {}, reason), total


def _count_plain_methods(
    traced: structured.Traced,
    counted: cost.Passes,
    block: Block,
    coupled: bool,
    parameters: int,
    chunk: int | None,
    limit: int,
) -> tuple[dict[str, Cost], dict[str, float], int]:
    """Count the methods that know nothing of the network: operations, memory, and rows that fit at a time."""
    item, many = traced.output.dtype.itemsize, block.outputs
    # gradients of convolutions in their parameters, sample by sample, run at a small part of a product's speed
    slow = Cost(40.0 * counted.convolved) if not coupled else Cost(10.0 * counted.convolved)
    # one gradient in the parameters: forward, backward, and the slow part of convolutions
    pull = counted.backward + counted.forward + slow
    rows, columns = block.rows * many, block.columns * many
    both = rows if block.symmetric else rows + columns
    # J J', of which only equal outputs are multiplied unless the full kernel is kept
    product = 2.0 * block.rows * block.columns * parameters * (many**2 if block.kept == "full" else many)
    # a coupled function is evaluated on the whole batch at once
    batches = 1.0 if coupled else float(block.columns)
    total = {
        "jacobian": pull * both + Cost(product, 3.0 * both * parameters),
        "products": pull * rows + (counted.forward + counted.forward + slow) * (rows * batches),
    }
    kernel = block.rows * block.columns * block.kernel * (2 if block.kept == "full" else 1)
    # bytes of one row: its gradients, its activations, and its row of the kernel
    one = item * many * (parameters + 2 * counted.stored + block.columns * many)
    at_a_time = chunk if chunk is not None else fitting(block.rows, limit / 8, one)
    memory = {
        "jacobian": item * (2.0 * both * parameters + kernel) + min(at_a_time, block.rows) * one,
        "products": item * kernel
        + min(at_a_time, block.rows) * (one + item * many * counted.stored * batches),
    }
    return total, memory, at_a_time


def block_of(maps: KernelMaps, params: Params, symmetric: bool, outputs: str) -> Block:
    """Read the sizes of a kernel off the shapes of its two functions."""
    left, right = jax.eval_shape(maps.left, params), jax.eval_shape(maps.right, params)
    return Block(left.shape[0], right.shape[0], math.prod(left.shape[1:]), outputs, symmetric)


def traces(maps: KernelMaps, params: Params, x: Batch) -> tuple[structured.Traced, structured.Traced]:
    """Return the traces of both sides: of one sample where samples are free, else of the whole batches."""
    moving, still = eqx.partition(params, eqx.is_inexact_array)
    leaves, structure = jax.tree.flatten(moving)
    whole = lambda some: eqx.combine(jax.tree.unflatten(structure, some), still)
    if maps.single is None:
        return (
            structured.trace(lambda some, _: maps.left(whole(some)), leaves, ()),
            structured.trace(lambda some, _: maps.right(whole(some)), leaves, ()),
        )
    one = one_sample(maps, params, x)
    traced = structured.trace(lambda some, sample: one(whole(some), sample), leaves, jax.tree.map(_first, x))
    return traced, traced


def _first(batch: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(batch.shape[1:], batch.dtype)


def one_sample(maps: KernelMaps, params: Params, x: Batch) -> Apply:
    """Return (params, sample) -> outputs at that sample, of a function whose samples are free."""
    single = maps.single
    assert single is not None
    wanted = jax.eval_shape(maps.left, params).shape[1:]
    alone = jax.eval_shape(
        single, params, jax.tree.map(lambda a: jax.ShapeDtypeStruct((1, *a.shape[1:]), a.dtype), x)
    )
    # a function that squeezes its outputs loses the axis of a single sample: it gets two equal ones
    copies = 1 if alone.shape == (1, *wanted) else 2
    repeat = lambda a: jnp.broadcast_to(a[None], (copies, *a.shape))
    return lambda p, sample: single(p, jax.tree.map(repeat, sample))[0]


def _choose(method: str, total: dict[str, float], memory: dict[str, float], limit: int) -> tuple[str, str]:
    """Return the method and the reason in words; "auto" is resolved, and too large a Jacobian refused."""
    if method == "auto":
        fitting = {m: f for m, f in total.items() if memory[m] <= limit}
        # when nothing fits, the one that comes closest
        chosen = min(fitting, key=lambda m: fitting[m]) if fitting else min(memory, key=lambda m: memory[m])
        return (
            chosen,
            f"{chosen}: least time ({total[chosen]:.2g} operations) among methods within {limit:.2g} bytes",
        )
    if method == "jacobian" and memory["jacobian"] > limit:
        raise ValueError(
            f"the Jacobian takes {memory['jacobian']:.3g} bytes, above limit={limit:.3g}; use "
            'method="products" with chunk=, or kernels.ntk_operator'
        )
    return method, f"{method}: asked for"
