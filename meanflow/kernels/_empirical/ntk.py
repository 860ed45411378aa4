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
from meanflow.kernels._empirical.coupling import KernelMaps
from meanflow.kernels._empirical.layout import Layout, free_layout
from meanflow.kernels._empirical.modules import Apply, Batch, Outputs, Params
from meanflow.kernels._empirical.plan import Job, Laid, laid_out, planned


def _evaluate(job: Job, platform: str | None) -> Float[Array, "T S ..."]:
    """Trace the function, plan, and compute the kernel, of a job that was accepted by ``plan.probe``.

    ``platform`` is that of the devices on which it runs, such as "cpu"; None if that is not known yet.
    """
    maps, here = job.maps(), platform or jax.default_backend()
    laid = laid_out(job, maps, here == "cpu")
    method, rows, *_ = planned(job, laid)
    if method == "structured":
        kernel = _structured_kernel(laid, job, platform)
    else:
        # integer leaves are constants: they have no gradient
        moving, still = eqx.partition(job.params, eqx.is_inexact_array)
        whole = lambda p: eqx.combine(p, still)
        one = laid.single
        single = None if one is None else lambda p, sample: one(whole(p), sample)[0]
        plain = KernelMaps(lambda p: maps.left(whole(p)), lambda p: maps.right(whole(p)), single)
        compute = _by_jacobians if method == "jacobian" else _by_products
        kernel = compute(plain, moving, job, rows)
    kept = {"full": laid.shape * 2, "diagonal": laid.shape, "trace": ()}[laid.block.kept]
    return kernel.reshape(kernel.shape[:2] + kept)


# Compiled once for every shape. On CPUs less effort of the compiler saves a tenth of its time and costs no speed, which
# lies in products of matrices.
evaluate = compiled(_evaluate)
evaluate_on_cpu = compiled(_evaluate, compiler_options={"xla_backend_optimization_level": 1})


def _structured_kernel(laid: Laid, job: Job, platform: str | None) -> Float[Array, "T S ..."]:
    """Sum the shares of all parameters, each by the cheaper contraction; (T, S), (T, S, C) or (T, S, C, C)."""
    leaves = [a for a in jax.tree.leaves(job.params) if eqx.is_inexact_array(a)]
    left, right, block, layout = laid.left, laid.right, laid.block, laid.layout
    if laid.single is None:
        first, second = layout.shares, layout.shares
        if job.z is not None:
            first, second = structured.align(left, right, layout.shares)
        mine = theirs = structured.coupled_factors(left, first, leaves, block.rows, layout.piece)
        if job.z is not None:
            theirs = structured.coupled_factors(right, second, leaves, block.columns, layout.piece)
        return contraction.contract(mine, theirs, block.kept)
    way = lambda plan: functools.partial(_free_kernel, left, block, plan, job)
    if platform is not None:
        return way(layout)(leaves)
    # a program that is traced here may be lowered for any platform, of which only that one's branch is compiled
    lay_out = lambda cpu: free_layout(left, laid.passes, block, job.method.chunk, job.method.limit, cpu)
    on_cpu, elsewhere = lay_out(True), lay_out(False)
    if on_cpu == elsewhere:
        return way(on_cpu)(leaves)
    return jax.lax.platform_dependent(leaves, cpu=way(on_cpu), default=way(elsewhere))


def _free_kernel(
    traced: structured.Traced, block: Block, plan: Layout, job: Job, leaves: list[Array]
) -> Float[Array, "T S ..."]:
    """Differentiate and contract samples that do not depend on each other, as a layout says."""
    at = lambda batch: structured.factors(traced, plan.shares, leaves, batch, plan.piece)
    if plan.held:
        left = at(job.x)
        right = left if job.z is None else at(job.z)
        return contraction.contract(left, right, block.kept, plan.rows)
    other = job.x if job.z is None else job.z

    def rows(some: Batch) -> Array:
        mine = at(some)
        columns = lambda batch: jnp.moveaxis(contraction.contract(mine, at(batch), block.kept), 1, 0)
        return jnp.moveaxis(contraction.by_pieces(columns, other, plan.rows), 0, 1)

    return contraction.by_pieces(rows, job.x, plan.rows)


def _flat(outputs: Outputs) -> Float[Array, "T C"]:
    """Flatten the outputs of each sample."""
    return outputs.reshape(outputs.shape[0], -1)


def _by_jacobians(maps: KernelMaps, params: Params, job: Job, chunk: int) -> Float[Array, "T S ..."]:
    """Form both Jacobians, without knowing anything about the network, and contract them parameter by parameter.

    ``maps.single``, if there is one, maps one sample to its outputs here; so it does in ``_by_products``.
    """

    def jacobian(function: Callable[[Params], Outputs], x: Batch) -> PyTree[Float[Array, "T C _"]]:
        gradients, items = _gradients(function, maps.single, params, x)
        flat = lambda item: jax.tree.map(lambda g: g.reshape(g.shape[0], -1), gradients(item))
        return contraction.by_pieces(jax.vmap(flat), items, chunk)

    mine = jacobian(maps.left, job.x)
    theirs = mine if job.z is None else jacobian(maps.right, job.z)
    pattern = {"full": "tcp,sdp->tscd", "diagonal": "tcp,scp->tsc", "trace": "tcp,scp->ts"}[str(job.outputs)]
    product = lambda a, b: jnp.einsum(pattern, a, b, precision=contraction.HIGH)
    return jax.tree.reduce(jnp.add, jax.tree.map(product, mine, theirs))


def _by_products(maps: KernelMaps, params: Params, job: Job, chunk: int) -> Float[Array, "T S ..."]:
    """Pull each row's outputs back to the parameters, and push their gradients forward to all columns."""
    gradients, items = _gradients(maps.left, maps.single, params, job.x)
    _, push = jax.linearize(lambda p: _flat(maps.right(p)), params)

    def row(item: Array) -> Array:
        kernel = jnp.moveaxis(jax.vmap(push)(gradients(item)), 0, 1)  # (S, C, C)
        if job.outputs == "full":
            return kernel
        return jnp.diagonal(kernel, 0, 1, 2) if job.outputs == "diagonal" else jnp.trace(kernel, 0, 1, 2)

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
