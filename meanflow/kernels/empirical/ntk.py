"""The tangent kernel K(x, z) = J(x) J(z)' of any JAX function, right under batch normalization.

J = df/dparams is taken at the given parameters. ``coupling`` decides which functions are differentiated, ``plan`` by
which method; this module evaluates the kernel.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, PyTree, Shaped

from meanflow import _checks
from meanflow.kernels.empirical import structured
from meanflow.kernels.empirical.coupling import FIXED, kernel_maps, uncoupled_maps
from meanflow.kernels.empirical.modules import Apply, Batch, Normalized, Outputs, Params
from meanflow.kernels.empirical.plan import LIMIT, OPTIONS, plan_for


@_checks.arguments(**OPTIONS)
def empirical_ntk(
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
) -> Float[Array, "T S ..."]:
    """Return K(x, z)[t, s, c, d] = <df_c(x_t)/dparams, df_d(z_s)/dparams>, with no normalizing factor anywhere.

    Args:
        apply: (params, batch) -> outputs (T, ...); a plain function, or a ``Normalized`` one. ``from_nnx``,
            ``from_linen`` and ``from_equinox`` make one of a module.
        params: pytree; integer leaves are constants.
        x: batch (T, ...).
        z: second batch (S, ...), or None for x.
        stats: which statistics normalize the samples; required as soon as the function couples samples.
            "batch": each of x and z by its own, the gradients through them included. "train": x and z both by
            those of x, gradients included; K(x, z) then says how a step on the training batch x moves the
            prediction at z. "frozen": those of x (x and z), without gradient; this is not inference mode.
            "running": the averages that the model has gathered in training, which is inference mode, ``eval()``.
            A function that is free of coupling may be declared either of the last two.
        outputs: "full": T x S x C x C, shape (T, S) + O + O for outputs of shape (T,) + O. "trace": sum over
            c of K_cc (T, S), not divided by C. "diagonal": K_cc, (T, S) + O.
        chunk: rows t computed at a time (any number; the result does not depend on it, since coupled
            functions are always linearized on the whole batch). Chosen from ``limit`` by default.
        method: "jacobian" forms both Jacobians; "products" computes one vector-Jacobian and one Jacobian-vector
            product a row; "structured" multiplies Gram matrices of dense layers, with Jacobians only for other
            parameters, and needs uncoupled samples; "auto" takes the cheapest that fits (``ntk_plan`` says which and
            why).
        limit: the most bytes that the computation may take, 4 GiB by default.

    Returns:
        The kernel in the dtype of the outputs.

    Cost, P parameters, b bytes a number. Time: jacobian T S C^2 P; products T S C P (coupled: 3 T^2 C P
    each); structured (T + S) P + T S (sum of widths) C^2. Memory: the kernel b T S C^2; jacobian b S C P
    beside it; products b chunk C P; structured b (T + S) C (sum of widths).

    Raises:
        ValueError: for a coupled function without ``stats``, unknown names, or memory above ``limit``.

    >>> import jax.numpy as jnp
    >>> empirical_ntk(lambda w, x: x @ w, jnp.ones(2), jnp.array([[1.0, 0.0], [1.0, 1.0]])).tolist()
    [[1.0, 1.0], [1.0, 2.0]]
    """
    left, right = jnp.asarray(x), None if z is None else jnp.asarray(z)
    maps = kernel_maps(apply, params, left, right, stats)
    plan = plan_for(maps, params, left, outputs, chunk, method, limit)
    return _evaluate(apply, params, left, right, stats, outputs, plan.method, plan.chunk)


@eqx.filter_jit
def _evaluate(
    apply: Apply | Normalized,
    params: Params,
    x: Batch,
    z: Batch | None,
    stats: str | None,
    outputs: str,
    method: str,
    chunk: int,
) -> Float[Array, "T S ..."]:
    """Compute the kernel by ``method``, compiled once for every shape."""
    # The caller has probed the function outside of jit: here one that needs no statistics is known to be uncoupled.
    if stats in (None, *FIXED) and not isinstance(apply, Normalized):
        maps = uncoupled_maps(apply, x, z)
    else:
        maps = kernel_maps(apply, params, x, z, stats)
    # integer leaves are constants: they have no gradient
    moving, still = eqx.partition(params, eqx.is_inexact_array)
    whole = lambda p: eqx.combine(p, still)
    left = lambda p: maps.left(whole(p))
    right = lambda p: maps.right(whole(p))
    shape = jax.eval_shape(left, moving).shape[1:]
    single = None
    if maps.single is not None:
        per_sample = maps.single
        single = lambda p, batch: per_sample(whole(p), batch)
    diagonal = outputs != "full"
    if method == "structured":
        assert single is not None  # plan_for refuses the method otherwise
        kernel = _structured(single, moving, x, z, chunk, diagonal)
    else:
        other = x if z is None else z
        kernel = _rows(left, right, single, moving, x, other, method, chunk, diagonal)
    if outputs == "trace":
        return jnp.sum(kernel, axis=2)
    return kernel.reshape(kernel.shape[:2] + (shape if diagonal else shape + shape))


def _structured(
    single: Apply,
    params: Params,
    x: Batch,
    z: Batch | None,
    chunk: int,
    diagonal: bool,
) -> Float[Array, "T S ..."]:
    """Sum Gram products of the parameters that ``structured`` understands and Jacobian products of the rest."""
    mine, rest = structured.factors(single, params, x)
    theirs = mine if z is None else structured.factors(single, params, z)[0]
    if not rest:
        return structured.contract(mine, theirs, chunk, diagonal)
    leaves, treedef = jax.tree.flatten(params)

    def partial(some: list[Array], batch: Batch) -> Outputs:
        full = list(leaves)
        for i, a in zip(rest, some, strict=True):
            full[i] = a
        return single(jax.tree.unflatten(treedef, full), batch)

    some = [leaves[i] for i in rest]
    other = x if z is None else z
    left, right = (lambda p: partial(p, x)), (lambda p: partial(p, other))
    kernel = _rows(left, right, partial, some, x, other, "jacobian", chunk, diagonal)
    return structured.contract(mine, theirs, chunk, diagonal) + kernel if mine else kernel


def _flat(outputs: Outputs) -> Float[Array, "T C"]:
    """Flatten the outputs of each sample."""
    return outputs.reshape(outputs.shape[0], -1)


def _jacobian(
    function: Callable[[Params], Outputs],
    single: Apply | None,
    params: Params,
    x: Batch,
) -> PyTree[Float[Array, "T C _"]]:
    """Return a pytree of Jacobians (T, C, size of the parameter)."""
    if single is None:
        jacobian = jax.jacrev(lambda p: _flat(function(p)))(params)
    else:
        one = lambda p, sample: _flat(single(p, sample[None]))[0]
        jacobian = jax.vmap(jax.jacrev(one), in_axes=(None, 0))(params, x)
    return jax.tree.map(lambda j: j.reshape(j.shape[:2] + (-1,)), jacobian)


def _rows(
    left: Callable[[Params], Outputs],
    right: Callable[[Params], Outputs],
    single: Apply | None,
    params: Params,
    x: Batch,
    z: Batch,
    method: str,
    chunk: int,
    diagonal: bool,
) -> Float[Array, "T S ..."]:
    """Compute K row by row: pull one sample's outputs back to the parameters, then contract with every column."""
    high = jax.lax.Precision.HIGHEST
    rows, size = jax.eval_shape(lambda p: _flat(left(p)), params).shape
    if single is None:
        outputs, pull = jax.vjp(lambda p: _flat(left(p)), params)

        def gradients(item: Array) -> Params:
            onehot = (jnp.arange(rows) == item).astype(outputs.dtype)
            basis = onehot[None, :, None] * jnp.eye(size, dtype=outputs.dtype)[:, None, :]
            return jax.vmap(lambda c: pull(c)[0])(basis)

        items = jnp.arange(rows)
    else:

        def gradients(item: Array) -> Params:
            return jax.jacrev(lambda p: _flat(single(p, item[None]))[0])(params)

        items = jnp.asarray(x)

    if method == "products":
        _, push = jax.linearize(lambda p: _flat(right(p)), params)

        def row(item: Array) -> Array:
            kernel = jnp.moveaxis(jax.vmap(push)(gradients(item)), 0, 1)  # (S, C, C)
            return jnp.diagonal(kernel, axis1=1, axis2=2) if diagonal else kernel

    else:
        others = _jacobian(right, single, params, z)
        pattern = "cp,scp->sc" if diagonal else "cp,sdp->scd"

        def row(item: Array) -> Array:
            mine = jax.tree.map(lambda g: g.reshape(g.shape[0], -1), gradients(item))
            terms = jax.tree.map(lambda a, b: jnp.einsum(pattern, a, b, precision=high), mine, others)
            return jax.tree.reduce(jnp.add, terms)

    return jax.vmap(row)(items) if chunk >= rows else jax.lax.map(row, items, batch_size=chunk)
