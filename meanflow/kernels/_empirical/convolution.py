"""Convolutions with their channels last, in whatever order a program has them.

On CPUs, XLA multiplies fast only where a convolution's axes are (samples, space, channels) and its weights' are (space,
inputs, outputs). It brings them into that order by itself, but not inside of loops: the gradient of a convolution, in
which inputs and outputs have changed places, is there slower by a factor of thirty.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jaxtyping import Array, PyTree

from meanflow.kernels._empirical.sites import CALLS, execute, inner_jaxpr


def channels_last(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Return the same function, whose convolutions have their channels last; those inside of its loops stay.

    >>> convolve = lambda x: jax.lax.conv(x, jnp.ones((1, 2, 1)), (1,), "SAME")  # channels before space
    >>> channels_last(convolve)(jnp.ones((1, 2, 3))).tolist()
    [[[2.0, 2.0, 2.0]]]
    """

    def same(*args: PyTree) -> PyTree:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        run = _evaluate if _has_convolution(closed.jaxpr) else _evaluate_as_is
        return jax.tree.unflatten(jax.tree.structure(shape), run(closed, jax.tree.leaves(args)))

    return same


def _has_convolution(jaxpr: Jaxpr) -> bool:
    names = (e.primitive.name for e in jaxpr.eqns)
    return "conv_general_dilated" in names or any(
        _has_convolution(inner_jaxpr(e).jaxpr) for e in jaxpr.eqns if e.primitive.name in CALLS
    )


def _evaluate_as_is(closed: ClosedJaxpr, args: Sequence[Array]) -> list[Array]:
    return jaxpr_as_fun(closed)(*args)


def _evaluate(closed: ClosedJaxpr, args: Sequence[Array]) -> list[Array]:
    jaxpr = closed.jaxpr
    values: dict[Var, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))
    read = lambda v: v.val if isinstance(v, Literal) else values[v]
    for equation in jaxpr.eqns:
        operands = [read(v) for v in equation.invars]
        name = equation.primitive.name
        if name == "conv_general_dilated":
            outs = [_convolve(equation, *operands)]
        elif name in CALLS and _has_convolution(inner_jaxpr(equation).jaxpr):
            outs = _evaluate(inner_jaxpr(equation), operands)
        else:
            outs = execute(jaxpr, equation, operands)
        values.update(zip(equation.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


_OPTIONS = (
    "window_strides",
    "padding",
    "lhs_dilation",
    "rhs_dilation",
    "feature_group_count",
    "batch_group_count",
    "precision",
    "preferred_element_type",
)


def _convolve(equation: JaxprEqn, x: Array, weight: Array) -> Array:
    """Evaluate a convolution with its channels last, and bring the result into the axes that were asked for."""
    numbers = equation.params["dimension_numbers"]
    (batch, channels, *space), (outs, ins, *window) = numbers.lhs_spec, numbers.rhs_spec
    rank = len(space)
    last = jax.lax.ConvDimensionNumbers(
        (0, rank + 1, *range(1, rank + 1)),
        (rank + 1, rank, *range(rank)),
        (0, rank + 1, *range(1, rank + 1)),
    )
    result = jax.lax.conv_general_dilated(
        jnp.transpose(x, (batch, *space, channels)),
        jnp.transpose(weight, (*window, ins, outs)),
        dimension_numbers=last,
        **{name: equation.params[name] for name in _OPTIONS},
    )
    batch, channels, *space = numbers.out_spec
    return jnp.transpose(result, np.argsort((batch, *space, channels)).tolist())
