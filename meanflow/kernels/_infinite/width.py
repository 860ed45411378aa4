"""The kernels of a network at infinite width, from the trace of the function that computes it.

The trace is that of one sample. ``rules.Reader`` follows it for a pair of samples; JAX maps that over all pairs, so that
what depends on one of them alone is computed once for it. Variances come from the caller, or from the trace of the
function that draws the parameters: its random bits are replaced by the nodes of a quadrature.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jaxtyping import Array, ArrayLike, Float, PyTree, Shaped

from meanflow import _boundary
from meanflow._boundary import Count, checked, choice, unchecked
from meanflow._reuse import compiled
from meanflow.kernels._empirical import visit
from meanflow.kernels._empirical.modules import Normalized, Params, as_arrays, batches
from meanflow.kernels._empirical.plan import AnyApply
from meanflow.kernels._infinite.fields import Constant, Field, Weight, full_shape
from meanflow.kernels._infinite.rules import NARROW, Reader


class InfiniteWidth(NamedTuple):
    """The kernels of a network at infinite width.

    Attributes:
        nngp: covariance of an output at initialization over random parameters, (T, S); with positions of outputs
            (T, S, P, .., P, ..); (T,) and so on if only the diagonal was asked for.
        ntk: the tangent kernel, of the same shape.
        error: the largest relative error of the expectations that were taken numerically, an estimate by refinement;
            0 if all had closed forms.
    """

    nngp: Float[Array, "T ..."]
    ntk: Float[Array, "T ..."]
    error: Float[Array, ""]


class Law(NamedTuple):
    """What is known of the entries of a parameter: their variance, or the number that they all are."""

    variance: Any
    with_fan: bool = False
    number: Any = None


@checked
def infinite_width(
    apply: AnyApply,
    params: Annotated[Params, unchecked("shapes are enough")],
    x: Annotated[PyTree[Shaped[ArrayLike, "T ..."]], batches],
    z: Annotated[PyTree[Shaped[ArrayLike, "S ..."]], batches] | None = None,
    *,
    variances: Annotated[Any, unchecked("a pytree like params, or a function")] = None,
    scaling: Annotated[str, choice("ntk", "standard")] = "ntk",
    diagonal: bool = False,
    rows: Count | None = None,
) -> InfiniteWidth:
    """Return NNGP and tangent kernel.

    >>> net = lambda p, x: jax.nn.relu(x @ p[0]) @ p[1]
    >>> params = (jnp.ones((2, 64)), jnp.ones(64))
    >>> x = jnp.array([[1.0, 0.0], [1.0, 1.0]])
    >>> infinite_width(net, params, x, variances=(2.0, 2.0)).ntk.round(4).tolist()
    [[2.0, 1.8183], [1.8183, 4.0]]
    """
    apply, x, z = as_arrays(apply, x, z)
    laws = _laws(apply, params, x, variances)
    fixed = tuple(law.number for law in laws)
    values = [law.variance for law in laws]
    fans = tuple(law.with_fan for law in laws)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(np.shape(a), jnp.result_type(a)), params)
    arrays = [a if number is None and fan is None else None for a, number, fan in zip(jax.tree.leaves(params), fixed, fans)]
    pairs = functools.partial(_pairs, apply, shapes, fans=fans, fixed=fixed, scaling=scaling, diagonal=diagonal)
    nngp, ntk, error = jax.jit(pairs)(arrays, values, x, x if z is None else z)
    return InfiniteWidth(nngp, ntk, jnp.max(error))


def _pairs(apply, shapes, arrays, values, x, z, *, fans, fixed, scaling, diagonal):
    """Return the kernels of all pairs."""
    one = lambda a, b: _pair(apply, shapes, arrays, values, a[None], b[None], fans=fans, fixed=fixed, scaling=scaling)
    if diagonal:
        return jax.vmap(one)(x, z)
    return jax.vmap(lambda a: jax.vmap(lambda b: one(a, b))(z))(x)


def _pair(apply, shapes, arrays, values, a, b, *, fans, fixed, scaling):
    """Return the kernels of one pair of samples."""
    leaves, tree = jax.tree.flatten(shapes)
    if jnp.issubdtype(a.dtype, jnp.floating):
        leaves = [jax.ShapeDtypeStruct(u.shape, a.dtype) if jnp.issubdtype(u.dtype, jnp.floating) else u for u in leaves]
    trace = jax.make_jaxpr(lambda p, x: apply(jax.tree.unflatten(tree, p), x))(leaves, a)
    laws = [
        (v, fan, None if scaling == "ntk" else 1.0) for v, fan in zip(values, fans, strict=True)
    ]
    reader = Reader(2, laws)
    given = []
    for k, leaf in enumerate(leaves):
        if fixed[k] is not None:
            given.append(Constant(leaf.shape, fixed[k]))
        elif arrays[k] is not None:
            axes = frozenset(i for i, size in enumerate(leaf.shape) if size != 1)
            given.append(Constant(leaf.shape, None, (arrays[k],) * 2, axes))
        else:
            given.append(Weight(k, (), tuple(range(len(leaf.shape))), leaf.shape))
    axes = frozenset(i for i, size in enumerate(a.shape) if size != 1)
    (out,) = visit.walk(trace, [*given, Constant(a.shape, None, (a, b), axes)], reader.step, reader.constant)
    if not isinstance(out, Field):
        reader.refuse("the outputs do not depend on a parameter")
    tables = reader.tables
    nngp, ntk = tables.moment(out, out, 0, 1, True), tables.theta(out, out, True)
    zero = jnp.zeros(out.shape * 2, a.dtype)
    rank = len(out.shape)
    kept = [n for n in out.shape[1:]]
    shape = [n for n in out.shape if n != 1] * 2
    tidy = lambda t: (zero if t is None else t).reshape(shape)
    error = jnp.max(jnp.stack([jnp.asarray(e, float) for e in tables.errors])) if tables.errors else jnp.zeros(())
    return tidy(nngp), tidy(ntk), error


def _laws(apply: Any, params: Params, x: Any, variances: Any) -> list[Law]:
    """Return the law of each parameter."""
    leaves = jax.tree.leaves(params)
    given = jax.tree.leaves(variances)
    found = []
    for leaf, v in zip(leaves, given, strict=True):
        v_ = _boundary.concrete(v)
        if v_ is not None and np.all(v_ == 0):
            flat = np.ravel(leaf)
            found.append(Law(0.0, False, flat[0]))
        else:
            found.append(Law(v, np.ndim(leaf) > 1 or True))
    return found
