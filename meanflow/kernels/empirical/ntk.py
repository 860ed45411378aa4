"""The tangent kernel K(x, z) = J(x) J(z)' of any JAX function, right under batch normalisation.

J = df/dparams is taken at the given parameters. When samples are coupled (batch norm, attention over the
batch) the Jacobian of one sample needs the whole batch, and a kernel computed sample by sample or chunk by
chunk is silently wrong; such functions are found by a probe and refused until ``stats`` says which
statistics are meant.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from meanflow import _checks
from meanflow.kernels.empirical import structured
from meanflow.kernels.empirical.modules import Apply, Normalised, Params

METHODS = ("auto", "jacobian", "products", "structured")
STATS = ("batch", "train", "frozen")
OUTPUTS = ("full", "trace", "diagonal")
LIMIT = 4 * 2**30  # bytes


class Plan(NamedTuple):
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


class Maps(NamedTuple):
    """Maps params -> outputs at x (``left``) and z (``right``); ``single``: per sample, if uncoupled."""

    left: Callable[[Params], jax.Array]
    right: Callable[[Params], jax.Array]
    single: Apply | None


class Unprobed(ValueError):
    """The function closes over traced values and cannot be evaluated while tracing."""


@eqx.filter_jit  # so that a function is compiled for the probe once, not at every call
def _first_row(apply: Apply, params: Params, batch: Any) -> jax.Array:
    return apply(params, batch)[0]


def is_coupled(apply: Apply, params: Params, x: Any) -> bool:
    """Whether the output at one sample depends on the other samples of the batch.

    Eight rows at most are evaluated twice, with the companions of the first row exchanged, at parameters
    moved off the given ones (a batch norm whose scale starts at 0 hides its coupling at the given ones).
    Inside jit the probe runs at trace time with random numbers in place of traced values.

    >>> import jax.numpy as jnp
    >>> is_coupled(lambda w, x: x @ w, jnp.ones(2), jnp.ones((3, 2)))
    False
    >>> is_coupled(lambda w, x: x @ w - jnp.mean(x @ w), jnp.ones(2), jnp.ones((3, 2)))
    True

    Raises:
        ValueError: if the function closes over traced values, so that it cannot be evaluated now.
    """
    rng = np.random.default_rng(0)
    rows = min(max(np.shape(x)[0], 2), 8)

    def move(leaf: Any) -> Any:
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            return leaf
        given, shape = _checks.concrete(leaf), np.shape(leaf)
        noise = rng.normal(size=shape)
        if given is None:
            moved = noise / math.sqrt(max(shape, default=1))
        else:
            moved = given + 0.1 * noise * (np.sqrt(np.mean(np.square(given))) + 0.1)
        return jnp.asarray(moved, jnp.result_type(leaf))

    def companions() -> Any:
        dtype, shape = jnp.result_type(x), np.shape(x)[1:]
        given = _checks.concrete(x)
        if not jnp.issubdtype(dtype, jnp.inexact):
            whole = np.zeros((1, *shape), int) if given is None else given
            return rng.choice(whole, rows)
        centre, width = (0.0, 1.0) if given is None else (np.mean(given), np.std(given) + 1e-3)
        return centre + width * rng.normal(size=(rows, *shape))

    with jax.ensure_compile_time_eval():
        moved = jax.tree.map(move, params)
        first, second = companions(), companions()
        second[0] = first[0]
        dtype = jnp.result_type(x)
        try:
            a = np.asarray(_first_row(apply, moved, jnp.asarray(first, dtype)))
            b = np.asarray(_first_row(apply, moved, jnp.asarray(second, dtype)))
        except jax.errors.TracerArrayConversionError as error:
            raise Unprobed(
                "apply closes over traced values, so whether it couples samples cannot be probed; "
                f"pass stats= one of {STATS}"
            ) from error
    scale = np.max(np.abs(a), initial=0.0) + np.max(np.abs(b), initial=0.0)
    tolerance = 1e4 * float(jnp.finfo(a.dtype).eps)
    # NaN or infinity decide nothing: such a function has to be declared
    return not bool(np.all(np.abs(a - b) <= tolerance * scale))


def _probe(apply: Apply, params: Params, x: Any, declared: bool) -> bool:
    try:
        return is_coupled(apply, params, x)
    except Unprobed:
        if declared:  # nothing to check the caller's word against
            return False
        raise


def resolve(apply: Apply, params: Params, x: Any, z: Any, stats: str | None) -> Maps:
    """The two maps whose Jacobians make the kernel, under the statistics asked for."""
    if stats is not None:
        _checks.one_of("stats", stats, STATS)
    other = x if z is None else z
    if isinstance(apply, Normalised):
        if stats is None:
            raise ValueError(f"apply normalises over the batch: stats must be one of {STATS}, got None")
        if stats == "batch":
            return Maps(lambda p: apply(p, x), lambda p: apply(p, other), None)
        if stats == "train":
            return Maps(lambda p: apply(p, x), lambda p: apply.apply(p, other, apply.statistics(p, x)), None)
        constants = eqx.filter_jit(apply.statistics)(params, x)
        fixed = lambda p, batch: apply.apply(p, batch, constants)
        return Maps(lambda p: fixed(p, x), lambda p: fixed(p, other), fixed)
    if stats == "batch" or (stats == "train" and z is None):
        return Maps(lambda p: apply(p, x), lambda p: apply(p, other), None)
    if stats == "train" or _probe(apply, params, x, declared=stats == "frozen"):
        needs = "the statistics of apply cannot be taken out of it: " if stats else ""
        raise ValueError(
            f"apply couples the samples of a batch and stats is {stats!r}; {needs}"
            'pass stats="batch" (statistics of the batch itself), or wrap apply as '
            'kernels.Normalised(apply, statistics) for "train" (statistics of x, their gradients included) '
            'or "frozen" (statistics of x, held fixed)'
        )
    return Maps(lambda p: apply(p, x), lambda p: apply(p, other), apply)


def _sizes(maps: Maps, params: Params) -> tuple[int, int, int, int, int]:
    """T, S, outputs C, parameters P, bytes of a number; checks the outputs' shapes."""
    left, right = jax.eval_shape(maps.left, params), jax.eval_shape(maps.right, params)
    for name, out in (("x", left), ("z", right)):
        if not hasattr(out, "shape") or out.ndim < 1:
            raise ValueError(f"apply must return one array (samples, ...), got {out} at {name}")
    leaves = jax.tree.leaves(params)
    count = sum(math.prod(np.shape(a)) for a in leaves)
    return left.shape[0], right.shape[0], math.prod(left.shape[1:]), count, left.dtype.itemsize


def ntk_plan(
    apply: Apply, params: Params, x: Any, z: Any = None, *, stats: str | None = None, **options: Any
) -> Plan:
    """The method, chunk and cost that ``empirical_ntk`` with these arguments and options would use.

    >>> import jax.numpy as jnp
    >>> apply = lambda p, x: jnp.tanh(jnp.tanh(x @ p[0]) @ p[1]) @ p[2]
    >>> params = (jnp.ones((2, 100)), jnp.ones((100, 100)), jnp.ones(100))
    >>> ntk_plan(apply, params, jnp.ones((300, 2))).method
    'structured'
    """
    return _plan(resolve(apply, params, x, z, stats), params, x, **options)


def _plan(
    maps: Maps,
    params: Params,
    x: Any,
    outputs: str = "full",
    chunk: int | None = None,
    method: str = "auto",
    limit: int = LIMIT,
) -> Plan:
    _checks.one_of("method", method, METHODS)
    _checks.one_of("outputs", outputs, OUTPUTS)
    rows, columns, size, count, item = _sizes(maps, params)
    result = item * rows * columns * (size**2 if outputs == "full" else size if outputs == "diagonal" else 1)
    if result > limit:
        raise ValueError(
            f"the kernel alone takes {result:.3g} bytes, above limit={limit:.3g}; "
            "kernels.ntk_operator multiplies by it without forming it"
        )
    coupled = maps.single is None
    forward = 2.0 * count  # of one sample, for dense layers
    pulls = rows * size * (rows if coupled else 1) * 2 * forward
    flops = {
        "jacobian": pulls + 2.0 * rows * columns * size**2 * count,
        "products": pulls + 2.0 * rows * columns * size * forward,
    }
    memory = {"jacobian": 2.0 * item * columns * size * count + result, "products": 0.0}
    if maps.single is not None:
        leaves, treedef = jax.tree.flatten(params)
        _, found = structured.analyse(maps.single, leaves, treedef, x)
        covered = found.structured()
        widths = sum(max(np.shape(leaves[i]), default=1) for i in covered)
        rest = sum(
            math.prod(np.shape(a)) for i, a in enumerate(leaves) if i not in covered and i in found.uses
        )
        flops["structured"] = (
            (rows + columns) * forward * (1 + size)
            + 2.0 * rows * columns * widths * (1 + size**2)
            + rest * 2.0 * rows * columns * size**2
        )
        memory["structured"] = item * ((rows + columns) * (widths * (1 + size) + rest * size)) + 2.0 * result
    block = chunk if chunk is not None else _block(rows, size, count, columns, item, limit, coupled)
    memory["products"] = float(2 * item * block * size * count + result)
    if method == "structured" and "structured" not in flops:
        raise ValueError(
            'method="structured" needs samples that do not depend on each other; use "jacobian", "products", '
            "or kernels.batchnorm_ntk for batch norm on the output"
        )
    fitting = {m: f for m, f in flops.items() if memory[m] <= limit}
    if method == "auto":
        chosen = min(fitting, key=lambda m: fitting[m]) if fitting else "products"
        reason = f"{chosen}: fewest operations ({flops[chosen]:.2g}) among methods within {limit:.2g} bytes"
    else:
        chosen, reason = method, f"{method}: asked for"
        if method == "jacobian" and memory["jacobian"] > limit:
            raise ValueError(
                f"the Jacobian takes {memory['jacobian']:.3g} bytes, above limit={limit:.3g}; use "
                'method="products" with chunk=, or kernels.ntk_operator'
            )
    if chunk is not None:
        rows_at_a_time = _checks.whole("chunk", chunk, 1)
    elif chosen == "structured":  # temporaries of a block stay below a quarter of the limit
        rows_at_a_time = max(1, min(rows, int(limit / 4 / max(3 * item * columns * size**2, 1))))
    else:
        rows_at_a_time = block
    return Plan(chosen, rows_at_a_time, coupled, flops, memory, reason)


def _block(rows: int, size: int, count: int, columns: int, item: int, limit: int, coupled: bool) -> int:
    """Rows whose gradients, and the activations that carry them, fit in an eighth of the limit."""
    one = item * size * (count + columns * size + (rows if coupled else 1) * math.isqrt(count + 1))
    return max(1, min(rows, int(limit / 8 / one)))


def empirical_ntk(
    apply: Apply,
    params: Params,
    x: Any,
    z: Any = None,
    *,
    stats: str | None = None,
    outputs: str = "full",
    chunk: int | None = None,
    method: str = "auto",
    limit: int = LIMIT,
) -> jax.Array:
    """K(x, z)[t, s, c, d] = <df_c(x_t)/dparams, df_d(z_s)/dparams>, with no normalising factor anywhere.

    Args:
        apply: (params, batch) -> outputs (T, ...); a plain function, or a ``Normalised`` one. See
            ``from_nnx``, ``from_linen`` and ``from_equinox`` for modules.
        params: pytree; integer leaves are constants.
        x: batch (T, ...).
        z: second batch (S, ...), or None for x.
        stats: which statistics normalise the samples; required as soon as the function couples samples.
            "batch": each of x and z by its own, the gradients through them included. "train": x and z both by
            those of x, gradients included; K(x, z) then says how a step on the training batch x moves the
            prediction at z. "frozen": those of x (x and z), without gradient; a function that is free of
            coupling may be declared frozen too.
        outputs: "full": T x S x C x C, shape (T, S) + O + O for outputs of shape (T,) + O. "trace": sum over
            c of K_cc (T, S), not divided by C. "diagonal": K_cc, (T, S) + O.
        chunk: rows t computed at a time (any number; the result does not depend on it, since coupled
            functions are always linearised on the whole batch). Chosen from ``limit`` by default.
        method: "jacobian" forms both Jacobians; "products" one vector-Jacobian and one Jacobian-vector
            product a row; "structured" Gram matrices of dense layers, with Jacobians only for other
            parameters, samples uncoupled; "auto" the cheapest that fits (``ntk_plan`` says which and why).
        limit: bytes; see below.

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
    maps = resolve(apply, params, x, z, stats)
    plan = _plan(maps, params, x, outputs, chunk, method, limit)
    return _evaluate(apply, params, x, z, stats, outputs, plan.method, plan.chunk)


@eqx.filter_jit
def _evaluate(
    apply: Any, params: Any, x: Any, z: Any, stats: str | None, outputs: str, method: str, chunk: int
) -> jax.Array:
    # stats was checked by the caller; a function that passed the probe is declared frozen
    free = stats in (None, "frozen") and not isinstance(apply, Normalised)
    other = x if z is None else z
    if free:
        maps = Maps(lambda p: apply(p, x), lambda p: apply(p, other), apply)
    else:
        maps = resolve(apply, params, x, z, stats)
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
        assert single is not None
        kernel = _structured(single, moving, x, z, chunk, diagonal)
    else:
        kernel = _rows(left, right, single, moving, x, other, method, chunk, diagonal)
    if outputs == "trace":
        return jnp.sum(kernel, axis=2)
    return kernel.reshape(kernel.shape[:2] + (shape if diagonal else shape + shape))


def _structured(single: Apply, params: Params, x: Any, z: Any, chunk: int, diagonal: bool) -> jax.Array:
    mine, rest = structured.factors(single, params, x)
    theirs = mine if z is None else structured.factors(single, params, z)[0]
    kernel: Any = structured.contract(mine, theirs, chunk, diagonal) if mine else 0.0
    if not rest:
        return kernel
    leaves, treedef = jax.tree.flatten(params)

    def partial(some: list[Any], batch: Any) -> jax.Array:
        full = list(leaves)
        for i, a in zip(rest, some, strict=True):
            full[i] = a
        return single(jax.tree.unflatten(treedef, full), batch)

    some = [leaves[i] for i in rest]
    other = x if z is None else z
    left, right = (lambda p: partial(p, x)), (lambda p: partial(p, other))
    return kernel + _rows(left, right, partial, some, x, other, "jacobian", chunk, diagonal)


def _flat(outputs: jax.Array) -> jax.Array:
    return outputs.reshape(outputs.shape[0], -1)


def _jacobian(function: Callable[[Params], jax.Array], single: Apply | None, params: Params, x: Any) -> Any:
    """Pytree of (T, C, parameter size) Jacobians."""
    if single is None:
        jacobian = jax.jacrev(lambda p: _flat(function(p)))(params)
    else:
        one = lambda p, sample: _flat(single(p, sample[None]))[0]
        jacobian = jax.vmap(jax.jacrev(one), in_axes=(None, 0))(params, x)
    return jax.tree.map(lambda j: j.reshape(j.shape[:2] + (-1,)), jacobian)


def _rows(
    left: Callable[[Params], jax.Array],
    right: Callable[[Params], jax.Array],
    single: Apply | None,
    params: Params,
    x: Any,
    z: Any,
    method: str,
    chunk: int,
    diagonal: bool,
) -> jax.Array:
    """K row by row: pull one sample's outputs back to the parameters, then contract with every column."""
    high = jax.lax.Precision.HIGHEST
    rows, size = jax.eval_shape(lambda p: _flat(left(p)), params).shape
    if single is None:
        outputs, pull = jax.vjp(lambda p: _flat(left(p)), params)

        def gradients(item: Any) -> Any:
            onehot = (jnp.arange(rows) == item).astype(outputs.dtype)
            basis = onehot[None, :, None] * jnp.eye(size, dtype=outputs.dtype)[:, None, :]
            return jax.vmap(lambda c: pull(c)[0])(basis)

        items: Any = jnp.arange(rows)
    else:

        def gradients(item: Any) -> Any:
            return jax.jacrev(lambda p: _flat(single(p, item[None]))[0])(params)

        items = jnp.asarray(x)

    if method == "products":
        _, push = jax.linearize(lambda p: _flat(right(p)), params)

        def row(item: Any) -> jax.Array:
            kernel = jnp.moveaxis(jax.vmap(push)(gradients(item)), 0, 1)  # (S, C, C)
            return jnp.diagonal(kernel, axis1=1, axis2=2) if diagonal else kernel

    else:
        others = _jacobian(right, single, params, z)
        pattern = "cp,scp->sc" if diagonal else "cp,sdp->scd"

        def row(item: Any) -> jax.Array:
            mine = jax.tree.map(lambda g: g.reshape(g.shape[0], -1), gradients(item))
            terms = jax.tree.map(lambda a, b: jnp.einsum(pattern, a, b, precision=high), mine, others)
            return jax.tree.reduce(jnp.add, terms)

    return jax.vmap(row)(items) if chunk >= rows else jax.lax.map(row, items, batch_size=chunk)
