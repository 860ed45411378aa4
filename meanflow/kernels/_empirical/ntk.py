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

from meanflow._reuse import compiled
from meanflow.kernels._empirical import contraction, structured
from meanflow.kernels._empirical.cost import Block
from meanflow.kernels._empirical.coupling import FIXED, KernelMaps, kernel_maps, uncoupled_maps
from meanflow.kernels._empirical.layout import Layout, coupled_layout, free_layout
from meanflow.kernels._empirical.modules import Apply, Batch, Normalized, Outputs, Params
from meanflow.kernels._empirical.plan import Options, block_of, one_sample, plan_once, traces


def kernel_of_arrays(
    apply: Apply | Normalized,
    params: Params,
    x: Batch,
    z: Batch | None,
    options: Options,
) -> Float[Array, "T S ..."]:
    """Return K(x, z) for one batch of arrays or two; ``kernel.empirical_ntk`` describes and checks the arguments."""
    plan = plan_once(apply, params, x, z, options)
    return _evaluate(apply, params, x, z, options, plan.method, plan.chunk)


@compiled
def _evaluate(
    apply: Apply | Normalized,
    params: Params,
    x: Batch,
    z: Batch | None,
    options: Options,
    method: str,
    rows: int,
) -> Float[Array, "T S ..."]:
    """Compute the kernel by ``method``, planned with ``rows`` rows at a time; compiled once for every shape."""
    stats, outputs = options.stats, options.outputs
    # The caller has probed the function outside of jit: here one that needs no statistics is known to be uncoupled.
    if stats in (None, *FIXED) and not isinstance(apply, Normalized):
        maps = uncoupled_maps(apply, x, z)
    else:
        maps = kernel_maps(apply, params, x, z, stats)
    shape = jax.eval_shape(maps.left, params).shape[1:]
    if method == "structured":
        kernel = _structured_kernel(maps, params, x, z, options)
    else:
        # integer leaves are constants: they have no gradient
        moving, still = eqx.partition(params, eqx.is_inexact_array)
        whole = lambda p: eqx.combine(p, still)
        single = None
        if maps.single is not None:
            one = one_sample(maps, params, x)
            single = lambda p, sample: one(whole(p), sample)
        plain = KernelMaps(lambda p: maps.left(whole(p)), lambda p: maps.right(whole(p)), single)
        compute = _by_jacobians if method == "jacobian" else _by_products
        kernel = compute(plain, moving, x, z, rows, outputs)
    kept = {"full": shape + shape, "diagonal": shape, "trace": ()}[outputs]
    return kernel.reshape(kernel.shape[:2] + kept)


def _structured_kernel(
    maps: KernelMaps, params: Params, x: Batch, z: Batch | None, options: Options
) -> Float[Array, "T S ..."]:
    """Sum the shares of all parameters, each by the cheaper contraction; (T, S), (T, S, C) or (T, S, C, C)."""
    leaves = [a for a in jax.tree.leaves(params) if eqx.is_inexact_array(a)]
    left, right = traces(maps, params, x)
    outputs, chunk, limit = options.outputs, options.chunk, options.limit
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


def _by_jacobians(
    maps: KernelMaps, params: Params, x: Batch, z: Batch | None, chunk: int, outputs: str
) -> Float[Array, "T S ..."]:
    """Form both Jacobians, without knowing anything about the network, and contract them parameter by parameter.

    ``maps.single``, if there is one, maps one sample to its outputs here; so it does in ``_by_products``.
    """
    mine = _jacobian(maps.left, maps.single, params, x, chunk)
    theirs = mine if z is None else _jacobian(maps.right, maps.single, params, z, chunk)
    pattern = {"full": "tcp,sdp->tscd", "diagonal": "tcp,scp->tsc", "trace": "tcp,scp->ts"}[outputs]
    product = lambda a, b: jnp.einsum(pattern, a, b, precision=contraction.HIGH)
    return jax.tree.reduce(jnp.add, jax.tree.map(product, mine, theirs))


def _by_products(
    maps: KernelMaps, params: Params, x: Batch, z: Batch | None, chunk: int, outputs: str
) -> Float[Array, "T S ..."]:
    """Pull each row's outputs back to the parameters, and push their gradients forward to all columns."""
    gradients, items = _gradients(maps.left, maps.single, params, x)
    _, push = jax.linearize(lambda p: _flat(maps.right(p)), params)

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
        # coupled samples: one row of outputs is pulled back through the whole batch
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
