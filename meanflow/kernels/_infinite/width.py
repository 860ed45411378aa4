"""The kernels of a network at infinite width, from the trace of the function that computes it.

The trace is that of one sample. ``rules.Reader`` follows it for a pair of samples; JAX maps that over all pairs, so
that what depends on one of them alone is computed once for it. Samples that batch norm couples are traced together.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array, ArrayLike, Float, PyTree, Shaped

from meanflow._boundary import Count, checked, choice, unchecked
from meanflow._reuse import compiled, kept_by_shape
from meanflow.kernels._empirical import visit
from meanflow.kernels._empirical.adapters import LinenFunction
from meanflow.kernels._empirical.contraction import by_pieces, fitting
from meanflow.kernels._empirical.coupling import is_coupled
from meanflow.kernels._empirical.modules import Normalized, Params, as_arrays, batches
from meanflow.kernels._empirical.plan import AnyApply
from meanflow.kernels._infinite.fields import Constant, Field, Weight
from meanflow.kernels._infinite.laws import Law, drawn_laws, given_laws
from meanflow.kernels._infinite.rules import Reader

SCALINGS = ("ntk", "standard")
LARGE = 2**27  # numbers in the largest table of a piece of the kernel


class InfiniteWidth(NamedTuple):
    """The kernels of a network at infinite width.

    Attributes:
        nngp: covariance of an output over random parameters, (T, S); (T, S, P, P) if outputs have positions; (T, ...)
            if only the diagonal was asked for.
        ntk: the tangent kernel of an output, of the same shape.
        error: a bound or estimate of the largest relative error of the expectations that were taken numerically; 0 if
            all of them have closed forms.
    """

    nngp: Float[Array, "T ..."]
    ntk: Float[Array, "T ..."]
    error: Float[Array, ""]


class Job(NamedTuple):
    """What is known before the trace, but for the numbers."""

    apply: Any
    params: PyTree  # shapes
    numbers: tuple[float | None, ...]
    held: tuple[bool, ...]
    with_fan: tuple[bool, ...]
    scaling: str
    diagonal: bool
    coupled: bool
    rows: int | None


@checked
def infinite_width(
    apply: AnyApply,
    params: Annotated[Params, unchecked("only shapes matter, and the values of what has no variance")],
    x: Annotated[PyTree[Shaped[ArrayLike, "T ..."]], batches],
    z: Annotated[PyTree[Shaped[ArrayLike, "S ..."]], batches] | None = None,
    *,
    variances: Annotated[Any, unchecked("a pytree or a function, checked against params")] = None,
    scaling: Annotated[str, choice(*SCALINGS)] = "ntk",
    diagonal: bool = False,
    rows: Count | None = None,
) -> InfiniteWidth:
    """Return the kernels that a network has at initialization when all its layers are infinitely wide.

    Args:
        apply: (params, batch) -> outputs (T, ...): any JAX function, or what ``from_module`` makes of a module.
        params: a pytree with the shapes of a finite network, of any width; arrays or ``jax.ShapeDtypeStruct``.
        x: batch (T, ...), or a pytree of such arrays.
        z: second batch (S, ...), or None for x.
        variances: a pytree like ``params``: the variance of an entry times fan-in (the entries that a sum of products
            runs over) for weights, the variance itself for biases and tables. A parameter of variance 0 keeps its
            value, as scales that are 1 and biases that are 0. Or the function that draws the parameters from a key,
            from which variances are read; None reads them from the initializers of a linen module.
        scaling: "ntk" differentiates in parameters of variance 1, w = sqrt(variance) omega; "standard" in the
            parameters themselves: the kernel is then that of a network of the given widths to leading order (scales
            that are 1 at the start are not trained here).
        diagonal: return the kernels of each sample of x with that of z in its place only, (T,).
        rows: samples of x at a time; by default as many as take 2^27 numbers in the largest table.

    Returns:
        ``InfiniteWidth``: nngp, ntk, error. They can be differentiated in variances and in x.

    Raises:
        ValueError: for a network that cannot be followed, with the operation, its place in the source, and a way out.

    >>> net = lambda p, x: jax.nn.relu(x @ p[0]) @ p[1]
    >>> params = (jnp.ones((2, 64)), jnp.ones(64))
    >>> x = jnp.array([[1.0, 0.0], [1.0, 1.0]])
    >>> infinite_width(net, params, x, variances=(2.0, 2.0)).ntk.round(4).tolist()
    [[2.0, 1.8183], [1.8183, 4.0]]
    """
    laws = _laws(apply, params, x, variances)
    apply, x, z = as_arrays(apply, x, z)
    some = jax.tree.map(
        lambda a: jnp.zeros(a.shape, a.dtype) if isinstance(a, jax.ShapeDtypeStruct) else a, params
    )
    coupled = isinstance(apply, Normalized) or _is_coupled(apply, some, x[:2])
    if coupled and (z is not None or diagonal):
        raise ValueError(
            "z and diagonal must be left out for a network that couples the samples of its batch"
        )
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a)), params)
    numbers, held, fans = (
        tuple(part) for part in zip(*((u.number, u.held, u.with_fan) for u in laws), strict=True)
    )
    job = Job(apply, shapes, numbers, held, fans, scaling, diagonal, coupled, rows)
    kept = [a if law.held else None for a, law in zip(jax.tree.leaves(params), laws, strict=True)]
    dtype = jnp.result_type(
        *(u.dtype for u in (x, *jax.tree.leaves(params)) if jnp.issubdtype(u.dtype, jnp.floating))
    )
    variances = [jnp.asarray(law.variance, dtype) for law in laws]
    return _kernels(job, kept, variances, x, x if z is None else z)


def _laws(apply: Any, params: Params, x: Any, variances: Any) -> list[Law]:
    if callable(variances):
        return drawn_laws(variances, params)
    if variances is not None:
        return given_laws(params, variances)
    function = apply.apply if isinstance(apply, Normalized) else apply
    if isinstance(function, LinenFunction):
        module, options = function.module.value, function.evaluate
        one = jax.tree.map(lambda a: a[:1], x)
        return drawn_laws(lambda key: module.init(key, one, **options)["params"], params)
    raise ValueError(
        "variances must be given: a pytree like params, or the function that draws params from a key, such as "
        "lambda key: nnx.state(Model(rngs=nnx.Rngs(key)), nnx.Param)"
    )


@compiled
def _kernels(job: Job, kept: list, variances: list, x: Array, z: Array) -> InfiniteWidth:
    """Return the kernels of all pairs, rows of x at a time."""
    one = lambda a, b: _pair(job, kept, variances, a[None], b[None])
    if job.coupled:
        found = _pair(job, kept, variances, x, x)
    elif job.diagonal:
        found = jax.vmap(one)(x, z)
    else:
        # followed once, for the size of its tables and for all pairs
        trace = jax.make_jaxpr(one)(x[0], z[0])
        largest = max(math.prod(visit.shape_of(v)) for e in visit.equations(trace) for v in e.outvars)
        rows = job.rows or fitting(x.shape[0], LARGE, z.shape[0] * largest)
        pair = jaxpr_as_fun(trace)
        found = by_pieces(jax.vmap(lambda a: jax.vmap(lambda b: pair(a, b))(z)), x, rows)
    return InfiniteWidth(found[0], found[1], jnp.max(found[2]))


# whether a function couples samples is asked once for all parameters and samples of one shape
_is_coupled = kept_by_shape(is_coupled)


def _pair(job: Job, kept: list, variances: list, a: Array, b: Array) -> tuple[Array, Array, Array]:
    """Return the kernels of one pair of samples, or of a whole batch."""
    leaves, tree = jax.tree.flatten(job.params)
    trace = jax.make_jaxpr(lambda p, batch: job.apply(jax.tree.unflatten(tree, p), batch))(leaves, a)
    tangent = None if job.scaling == "ntk" else 1.0
    laws = [(v, fan, tangent) for v, fan in zip(variances, job.with_fan, strict=True)]
    reader = Reader(laws, [leaf.shape for leaf in leaves], a.shape[0] if job.coupled else 0)
    given: list[Any] = []
    for k, leaf in enumerate(leaves):
        number = job.numbers[k]
        if number is not None and not (tangent is not None and number == 0):
            given.append(Constant(leaf.shape, number))
        elif kept[k] is not None:
            given.append(reader.array_of(kept[k], kept[k]))
        else:
            given.append(Weight(k, (), tuple(range(len(leaf.shape))), leaf.shape))
    # arrays of fields are broadcast against numbers and each other throughout
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return _followed(job, reader, trace, given, a, b)


def _followed(
    job: Job, reader: Reader, trace: ClosedJaxpr, given: list, a: Array, b: Array
) -> tuple[Array, Array, Array]:
    """Return the kernels and their error from the trace."""
    (out,) = visit.walk(trace, [*given, reader.array_of(a, b)], reader.step, reader.constant)
    if not isinstance(out, Field):
        raise ValueError("apply must depend on parameters that have a variance")
    reader.check_last(out)
    tables, rank = reader.tables, len(out.shape)
    # outputs side by side have the same kernel: the first one is taken, and the only sample of a trace of one
    index = [slice(None) if k in reader.places(out) or (k == 0 and job.coupled) else 0 for k in range(rank)]

    def tidy(table: Array | None) -> Array:
        dtype = visit.dtype_of(trace.jaxpr.outvars[0])
        whole = jnp.zeros(out.shape * 2, dtype) if table is None else table.astype(dtype)
        found = whole[tuple(index * 2)]
        return jnp.moveaxis(found, found.ndim // 2, 1) if job.coupled else found

    # tables ask for those before them: from the first layer to the last, no chain of such calls gets long
    for atom in reader.made:
        for i, j in ((0, 0), (1, 1), (0, 1)) if math.prod(atom.shape) == 1 else ():
            tables.get("second", atom, atom, i, j, False)
            tables.get("tangent", atom, atom, i, j, False)
    nngp, ntk = tidy(tables.moment(out, out, 0, 1, True)), tidy(tables.theta(out, out, True))
    errors = [jnp.asarray(e, float) for e in tables.errors]
    return nngp, ntk, jnp.max(jnp.stack(errors)) if errors else jnp.zeros(())
