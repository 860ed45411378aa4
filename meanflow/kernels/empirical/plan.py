"""Which method computes a tangent kernel in the least time within the memory that is allowed?

All counts come from the traced program (``cost``): operations of matrix products and convolutions, and numbers that
pass through memory. Nothing is compiled.
"""

import collections
import functools
import math
import time
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Shaped

from meanflow import _checks
from meanflow.kernels.empirical import cost, structured
from meanflow.kernels.empirical.cost import Block, Cost
from meanflow.kernels.empirical.coupling import STATS, KernelMaps, kernel_maps
from meanflow.kernels.empirical.modules import PARAMS, Apply, Batch, Normalized, Params
from meanflow.kernels.empirical.samples import as_arrays, batches

METHODS = ("auto", "jacobian", "products", "structured")
OUTPUTS = ("full", "trace", "diagonal")
LIMIT = 4 * 2**30  # bytes


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
    "method": _checks.choice(*METHODS),
    "limit": _checks.count(1, 2**62),
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

    All arguments are those of ``empirical_ntk``. No kernel is computed; one small matrix product tells how fast this
    machine is.

    >>> import jax.numpy as jnp
    >>> apply = lambda p, x: jnp.tanh(jnp.tanh(x @ p[0]) @ p[1]) @ p[2]
    >>> params = (jnp.ones((2, 100)), jnp.ones((100, 100)), jnp.ones(100))
    >>> ntk_plan(apply, params, jnp.ones((300, 2))).method
    'structured'
    """
    function, left, right = as_arrays(apply, x, z)
    plan, total = _plan(function, params, left, right, stats, outputs, chunk, method, limit)
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
_PLANS: collections.OrderedDict[object, _Planned] = collections.OrderedDict()


def _plan(
    apply: Apply | Normalized,
    params: Params,
    x: Batch,
    z: Batch | None,
    *options: object,
) -> _Planned:
    """Probe the function and plan, or return the plan of the same function, shapes and options."""
    key = _key((apply, params, x, z), options)
    if key is not None and key in _PLANS:
        _PLANS.move_to_end(key)
        return _PLANS[key]
    stats, outputs, chunk, method, limit = options
    maps = kernel_maps(apply, params, x, z, stats)  # type: ignore[arg-type]
    planned = plan_for(maps, params, x, z, outputs, chunk, method, limit)  # type: ignore[arg-type]
    if key is not None:
        _PLANS[key] = planned
        if len(_PLANS) > 64:
            _PLANS.popitem(last=False)
    return planned


def plan_once(*args: object) -> NtkPlan:
    """Return the plan for these arguments of ``empirical_ntk``, without times; made once a function and shapes."""
    return _plan(*args)[0]  # type: ignore[arg-type]


def _key(arguments: object, options: tuple[object, ...]) -> object:
    """Return what decides a plan; None while tracing, or for what cannot be compared."""
    leaves, structure = jax.tree.flatten(arguments)
    described = []
    for leaf in leaves:
        if isinstance(leaf, jax.Array | np.ndarray):
            is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)  # a network's streams of random numbers
            numbers = jax.random.key_data(leaf) if is_key else leaf
            if (
                isinstance(leaf, jax.Array)
                and _checks.concrete(numbers[:0] if leaf.ndim else numbers) is None
            ):
                return None
            described.append((leaf.shape, leaf.dtype))
        else:
            described.append(leaf)
    key = (structure, tuple(described), options)
    try:
        hash(key)
    except TypeError:
        return None
    return key


class Layout(NamedTuple):
    """How the structured method goes about a kernel.

    Attributes:
        shares: how each parameter's share is computed.
        rows: rows of the kernel contracted at a time.
        held: whether the factors of all columns are kept; otherwise they are made anew for every block of rows.
        piece: samples (for coupled functions: rows of outputs) differentiated at a time.
        cost: operations and numbers.
        bytes: peak memory, the kernel included.
    """

    shares: list[structured.Share]
    rows: int
    held: bool
    piece: int
    cost: Cost
    bytes: float


def free_layout(traced: structured.Traced, block: Block, chunk: int | None, limit: int) -> Layout:
    """Lay out the kernel of samples that do not depend on each other; ``traced`` maps one sample."""
    whole = _lay_out(traced, block, chunk, limit, sliced=True)
    if whole.held and whole.rows == block.rows:
        return whole
    return _lay_out(
        traced, block, chunk, limit, sliced=False
    )  # slices of J serve all rows and columns at once


def _lay_out(traced: structured.Traced, block: Block, chunk: int | None, limit: int, sliced: bool) -> Layout:
    item, many = traced.output.dtype.itemsize, block.outputs
    counted = cost.passes(traced.analysis.scope.closed.jaxpr, len(traced.leaves))

    def choose(size: structured.forms.Sizes) -> str:
        if cost.by_gram(block, size).total < cost.by_jacobian(block, size).total:
            return "gram"
        # J takes less room than the cotangents that it is made of where there are more positions than inputs
        return "slices" if sliced and size.inputs >= size.positions else "jacobian"

    plan = structured.shares(traced, choose)
    taps = sum(math.prod(s.lengths) * math.prod(s.out.shape) for s in traced.sites.values())
    stored = sum(_stored(traced, s, many) for s in plan)
    # cotangents reach the taps one after the other, and the compiler uses the room in between again
    passing = counted.stored + many * (taps + 2 * counted.largest) + stored
    piece = _fit(block.samples, limit / 16, item * passing)
    held = item * stored * block.samples <= limit / 4
    wide = [_pairs(s, block) for s in plan]
    row = item * block.columns * (max(wide, default=0.0) + 2 * block.kernel)
    rows = chunk if chunk is not None else _fit(block.rows, limit / 32, row)
    if not held:
        rows = min(rows, _fit(block.rows, limit / 8, item * stored))
    rows = min(rows, block.rows)
    piece = piece if held else min(piece, rows)
    again = 1.0 if held else 1.0 + math.ceil(block.rows / rows) * block.columns / block.samples
    total = (counted.forward + counted.backward * many) * block.samples * again
    for share in plan:
        way = cost.by_jacobian if share.mode in ("jacobian", "slices") else cost.by_gram
        total = total + way(block, share.sizes)
    samples = block.samples if held else 2 * rows
    formed = max((_formed(s, many) for s in plan), default=0.0)
    memory = (
        item * (block.rows * block.columns * block.kernel + samples * (stored + formed) + piece * passing)
        + rows * row
    )
    return Layout(plan, rows, held, piece, total, memory)


def _stored(traced: structured.Traced, share: structured.Share, outputs: int) -> float:
    """Return how many numbers are kept of one sample after its backward passes, for one share."""
    if share.mode == "jacobian":
        return outputs * share.sizes.groups * share.sizes.inputs * share.sizes.outputs
    sites = [traced.sites[n] for n in share.sites]
    return sum(math.prod(s.lengths) * (s.partner + outputs * math.prod(s.out.shape)) for s in sites)


def _formed(share: structured.Share, outputs: int) -> float:
    """Return how many numbers one share's factors take for one sample while they are contracted."""
    groups, positions, inputs, width = share.sizes
    if share.mode == "jacobian" or groups * positions == 1:
        return 0.0
    return groups * positions * ((0 if share.mode == "rows" else inputs) + outputs * width)


def _pairs(share: structured.Share, block: Block) -> float:
    """Return the numbers that one share takes for a pair of samples while it is contracted."""
    groups, positions, _, outputs = share.sizes
    if share.mode in ("jacobian", "slices") or groups * positions == 1:
        return float(block.kernel)
    if block.kept == "full" and block.outputs > 1:  # one row at a time, whatever the chunk
        return float(block.kernel)
    return 2.0 * groups * positions**2 * (block.outputs if block.kept == "diagonal" else 1)


_PULLED = (
    2**25
)  # bytes of cotangents that are pulled back at a time through coupled samples: a part of the cache


def coupled_layout(
    left: structured.Traced, right: structured.Traced, block: Block, chunk: int | None, limit: int
) -> Layout:
    """Lay out the kernel of samples that depend on each other; the traces map whole batches."""
    item, many = left.output.dtype.itemsize, block.outputs
    counted = cost.passes(left.analysis.scope.closed.jaxpr, len(left.leaves))
    rows, columns = block.rows * many, block.columns * many
    sides = rows if block.symmetric else rows + columns
    full = block.kept == "full"
    product = block.pairs(many if full else 1) * (many**2 if full else many)

    def ways(size: structured.forms.Sizes) -> tuple[Cost, Cost]:
        groups, positions, inputs, outputs = size
        entries = groups * inputs * outputs
        jacobian = Cost(2.0 * (sides * positions * entries + product * entries), 3.0 * sides * entries)
        spread = groups * positions * outputs
        gram = Cost(
            2.0 * (groups * positions**2 * (inputs + columns * outputs) + product * spread),
            3.0 * sides * spread,
        )
        return jacobian, gram

    fits = lambda size: 3 * item * sides * size.groups * size.positions * size.outputs <= limit / 4
    plan = structured.shares(
        left, lambda s: "jacobian" if ways(s)[0].total <= ways(s)[1].total or not fits(s) else "gram"
    )
    taps = sum(math.prod(s.lengths) * math.prod(s.out.shape) for s in left.sites.values())
    row = item * many * (2 * taps + counted.stored / 2 + _entries(left))
    piece = chunk if chunk is not None else _fit(block.rows, min(limit / 8, _PULLED), row)
    total = counted.forward + counted.backward * sides
    stored = 0.0
    for share in plan:
        total = total + ways(share.sizes)[0 if share.mode == "jacobian" else 1]
        groups, positions, inputs, outputs = share.sizes
        stored += sides * groups * outputs * (inputs if share.mode == "jacobian" else positions)
    kernel = block.rows * block.columns * block.kernel * (2 if block.kept == "full" else 1)
    memory = item * (kernel + stored + 2 * counted.stored) + min(piece, block.rows) * row
    return Layout(plan, block.rows, True, min(piece, block.rows), total, memory)


def _entries(traced: structured.Traced) -> int:
    return sum(math.prod(traced.leaves[i].shape) for i in traced.used)


def _fit(most: int, limit: float, one: float) -> int:
    """Return how many things of ``one`` byte size fit, at least one and at most ``most``, in even parts of ``most``."""
    parts = math.ceil(most / max(1, min(most, int(limit / max(one, 1.0)))))
    return math.ceil(most / parts)


def plan_for(
    maps: KernelMaps,
    params: Params,
    x: Batch,
    z: Batch | None,
    outputs: str,
    chunk: int | None,
    method: str,
    limit: int,
) -> _Planned:
    """Choose method and chunk for the kernel of ``maps``; the other arguments are those of ``empirical_ntk``."""
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
        else free_layout(left, block, chunk, limit)
    )
    counted = cost.passes(left.analysis.scope.closed.jaxpr, len(moving))
    total, memory, at_a_time = _plain(
        left, counted, block, coupled, sum(a.size for a in moving), chunk, limit
    )
    total["structured"], memory["structured"] = layout.cost, layout.bytes
    chosen, reason = _choose(method, {m: c.total for m, c in total.items()}, memory, limit)
    rows = (layout.piece if coupled else layout.rows) if chosen == "structured" else at_a_time
    flops = {m: c.flops for m, c in total.items()}
    return NtkPlan(chosen, chunk or rows, coupled, flops, memory, {}, reason), total


def _plain(
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
    pull = counted.backward + counted.forward + slow
    rows, columns = block.rows * many, block.columns * many
    both = rows if block.symmetric else rows + columns
    product = 2.0 * block.rows * block.columns * parameters * (many**2 if block.kept == "full" else many)
    batches = (
        1.0 if coupled else float(block.columns)
    )  # a coupled function is evaluated on the whole batch at once
    total = {
        "jacobian": pull * both + Cost(product, 3.0 * both * parameters),
        "products": pull * rows + (counted.forward + counted.forward + slow) * (rows * batches),
    }
    kernel = block.rows * block.columns * block.kernel * (2 if block.kept == "full" else 1)
    one = item * many * (parameters + 2 * counted.stored + block.columns * many)
    fitting = chunk if chunk is not None else _fit(block.rows, limit / 8, one)
    memory = {
        "jacobian": item * (2.0 * both * parameters + kernel) + min(fitting, block.rows) * one,
        "products": item * kernel + min(fitting, block.rows) * (one + item * many * counted.stored * batches),
    }
    return total, memory, fitting


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
