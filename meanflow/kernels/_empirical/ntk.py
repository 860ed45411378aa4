"""The tangent kernel K(x, z) = J(x) J(z)' of any JAX function, right under batch normalization.

J = df/dparams is taken at the given parameters. ``coupling`` decides which functions are differentiated, ``plan`` by
which method; this module evaluates the kernel.
"""

import functools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from meanflow.kernels._empirical import contraction, structured
from meanflow.kernels._empirical.cost import Block
from meanflow.kernels._empirical.coupling import FIXED, KernelMaps, kernel_maps, uncoupled_maps
from meanflow.kernels._empirical.layout import Layout, coupled_layout, free_layout
from meanflow.kernels._empirical.modules import Apply, Batch, Normalized, Outputs, Params
from meanflow.kernels._empirical.plan import block_of, one_sample, plan_once, traces


def kernel_of_arrays(
    apply: Apply | Normalized,
    params: Params,
    x: Batch,
    z: Batch | None,
    *,
    stats: str | None,
    outputs: str,
    chunk: int | None,
    method: str,
    limit: int,
) -> Float[Array, "T S ..."]:
    """Return K(x, z) for one batch of arrays or two; ``kernel.empirical_ntk`` describes and checks the arguments."""
    plan = plan_once(apply, params, x, z, stats, outputs, chunk, method, limit)
    return _evaluate(apply, params, x, z, stats, outputs, plan.method, plan.chunk, chunk, limit)


@eqx.filter_jit
def _evaluate(
    apply: Apply | Normalized,
    params: Params,
    x: Batch,
    z: Batch | None,
    stats: str | None,
    outputs: str,
    method: str,
    rows: int,
    chunk: int | None,
    limit: int,
) -> Float[Array, "T S ..."]:
    """Compute the kernel by ``method``, compiled once for every shape."""
    # The caller has probed the function outside of jit: here one that needs no statistics is known to be uncoupled.
    if stats in (None, *FIXED) and not isinstance(apply, Normalized):
        maps = uncoupled_maps(apply, x, z)
    else:
        maps = kernel_maps(apply, params, x, z, stats)
    shape = jax.eval_shape(maps.left, params).shape[1:]
    if method == "structured":
        kernel = structured_kernel(maps, params, x, z, outputs, chunk, limit)
    else:
        # integer leaves are constants: they have no gradient
        moving, still = eqx.partition(params, eqx.is_inexact_array)
        whole = lambda p: eqx.combine(p, still)
        single = None
        if maps.single is not None:
            one = one_sample(maps, params, x)
            single = lambda p, sample: one(whole(p), sample)
        sides = (lambda p: maps.left(whole(p))), (lambda p: maps.right(whole(p)))
        kernel = _plain_kernel(*sides, single, moving, x, z, method, rows, outputs)
    kept = {"full": shape + shape, "diagonal": shape, "trace": ()}[outputs]
    return kernel.reshape(kernel.shape[:2] + kept)


def structured_kernel(
    maps: KernelMaps, params: Params, x: Batch, z: Batch | None, outputs: str, chunk: int | None, limit: int
) -> Float[Array, "T S ..."]:
    """Sum the shares of all parameters, each by the cheaper contraction; (T, S), (T, S, C) or (T, S, C, C)."""
    leaves = [a for a in jax.tree.leaves(params) if eqx.is_inexact_array(a)]
    left, right = traces(maps, params, x)
    block = block_of(maps, params, z is None, outputs)
    if maps.single is not None:
        return _free_kernel(left, leaves, x, z, block, chunk, limit)
    plan = coupled_layout(left, right, block, chunk, limit)
    if not plan.shares:
        return _zeros(left, block)
    if z is None:
        mine = theirs = structured.coupled_factors(left, plan.shares, leaves, block.rows, plan.piece)
    else:
        first, second = structured.align(left, right, plan.shares)
        mine = structured.coupled_factors(left, first, leaves, block.rows, plan.piece)
        theirs = structured.coupled_factors(right, second, leaves, block.columns, plan.piece)
    return contraction.all_pairs(mine, theirs, outputs, block.rows, z is None)


def _zeros(traced: structured.Traced, block: Block) -> Float[Array, "T S ..."]:
    """Return the kernel of a function that does not depend on its parameters."""
    kept = {"full": (block.outputs,) * 2, "diagonal": (block.outputs,), "trace": ()}[block.kept]
    return jnp.zeros((block.rows, block.columns, *kept), traced.output.dtype)


def _free_kernel(
    traced: structured.Traced,
    leaves: list[Array],
    x: Batch,
    z: Batch | None,
    block: Block,
    chunk: int | None,
    limit: int,
) -> Float[Array, "T S ..."]:
    """Return the kernel of samples that do not depend on each other, laid out for the platform it is compiled for."""
    plans = [free_layout(traced, block, chunk, limit, cpu=cpu) for cpu in (True, False)]
    if not plans[0].shares:
        return _zeros(traced, block)
    first, other = (functools.partial(_laid_out_kernel, traced, block, plan) for plan in plans)
    if plans[0] == plans[1]:
        return first(leaves, x, z)
    return jax.lax.platform_dependent(leaves, x, z, cpu=first, default=other)


def _laid_out_kernel(
    traced: structured.Traced, block: Block, plan: Layout, leaves: list[Array], x: Batch, z: Batch | None
) -> Float[Array, "T S ..."]:
    """Differentiate and contract as a layout says."""
    at = lambda batch: structured.factors(traced, plan.shares, leaves, batch, plan.piece)
    if plan.parts > 1:
        edges = contraction.cuts(block.rows, plan.parts)
        parts = [at(x[start:stop]) for start, stop in zip(edges[:-1], edges[1:], strict=True)]
        return contraction.pairs_of_blocks(parts, block.kept)
    if plan.held:
        left = at(x)
        return contraction.all_pairs(left, left if z is None else at(z), block.kept, plan.rows, z is None)
    other = x if z is None else z

    def rows(some: Batch) -> Array:
        mine = at(some)
        columns = lambda batch: jnp.moveaxis(contraction.contract(mine, at(batch), block.kept), 1, 0)
        return jnp.moveaxis(contraction.by_pieces(columns, other, plan.rows), 0, 1)

    return contraction.by_pieces(rows, x, plan.rows)


def _flat(outputs: Outputs) -> Float[Array, "T C"]:
    """Flatten the outputs of each sample."""
    return outputs.reshape(outputs.shape[0], -1)


def _plain_kernel(
    left: Callable[[Params], Outputs],
    right: Callable[[Params], Outputs],
    single: Apply | None,
    params: Params,
    x: Batch,
    z: Batch | None,
    method: str,
    chunk: int,
    outputs: str,
) -> Float[Array, "T S ..."]:
    """Compute K without knowing anything about the network: by both Jacobians, or by products row by row."""
    high = jax.lax.Precision.HIGHEST
    if method == "jacobian":
        mine = _jacobian(left, single, params, x, chunk)
        theirs = mine if z is None else _jacobian(right, single, params, z, chunk)
        first, second, out = {
            "full": ("tc", "sd", "tscd"),
            "diagonal": ("tc", "sc", "tsc"),
            "trace": ("tc", "sc", "ts"),
        }[outputs]
        pattern = f"{first}p,{second}p->{out}"
        terms = jax.tree.map(lambda a, b: jnp.einsum(pattern, a, b, precision=high), mine, theirs)
        return jax.tree.reduce(jnp.add, terms)
    gradients, items = _gradients(left, single, params, x)
    _, push = jax.linearize(lambda p: _flat(right(p)), params)

    def row(item: Array) -> Array:
        kernel = jnp.moveaxis(jax.vmap(push)(gradients(item)), 0, 1)  # (S, C, C)
        if outputs == "full":
            return kernel
        return jnp.diagonal(kernel, axis1=1, axis2=2) if outputs == "diagonal" else jnp.trace(kernel, 0, 1, 2)

    return contraction.by_pieces(jax.vmap(row), items, chunk)


def _gradients(
    function: Callable[[Params], Outputs], single: Apply | None, params: Params, x: Batch
) -> tuple[Callable[[Array], Params], Batch]:
    """Return the map from an item to the gradients (C, ...) of one sample's outputs, and the items of all samples."""
    if single is not None:
        return lambda sample: jax.jacrev(lambda p: single(p, sample).reshape(-1))(params), x
    outputs, pull = jax.vjp(lambda p: _flat(function(p)), params)
    rows, size = outputs.shape

    def gradients(item: Array) -> Params:
        onehot = (jnp.arange(rows) == item).astype(outputs.dtype)
        basis = onehot[None, :, None] * jnp.eye(size, dtype=outputs.dtype)[:, None, :]
        return jax.vmap(lambda c: pull(c)[0])(basis)

    return gradients, jnp.arange(rows)


def _jacobian(
    function: Callable[[Params], Outputs], single: Apply | None, params: Params, x: Batch, chunk: int
) -> PyTree[Float[Array, "T C _"]]:
    """Return a pytree of Jacobians (T, C, size of the parameter), made ``chunk`` rows at a time."""
    gradients, items = _gradients(function, single, params, x)
    flat = lambda item: jax.tree.map(lambda g: g.reshape(g.shape[0], -1), gradients(item))
    return contraction.by_pieces(jax.vmap(flat), items, chunk)
