"""Convolutions with their channels last, in whatever order a program has them.

On CPUs, XLA multiplies fast only where a convolution's axes are (samples, space, channels) and its weights' are (space,
inputs, outputs). It brings them into that order by itself, but not inside of loops: the gradient of a convolution, in
which inputs and outputs have changed places, is there slower by a factor of thirty.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun
from jaxtyping import Array, PyTree

from meanflow.kernels._empirical.visit import called, equations, execute, walk


def channels_last(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Return the same function, whose convolutions have their channels last; those inside of its loops stay.

    >>> convolve = lambda x: jax.lax.conv(x, jnp.ones((1, 2, 1)), (1,), "SAME")  # channels before space
    >>> channels_last(convolve)(jnp.ones((1, 2, 3))).tolist()
    [[[2.0, 2.0, 2.0]]]
    """

    def same(*args: PyTree) -> PyTree:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        run = _evaluate if _convolves(closed) else lambda closed, leaves: jaxpr_as_fun(closed)(*leaves)
        return jax.tree.unflatten(jax.tree.structure(shape), run(closed, jax.tree.leaves(args)))

    return same


def _convolves(closed: ClosedJaxpr) -> bool:
    return any(e.primitive.name == "conv_general_dilated" for e in equations(closed, calls_only=True))


def _evaluate(closed: ClosedJaxpr, args: Sequence[Array]) -> list[Array]:
    def step(_: int, equation: JaxprEqn, operands: list[Array]) -> list[Array]:
        inner = called(equation)
        if equation.primitive.name == "conv_general_dilated":
            return [_convolve(equation, *operands)]
        if inner is not None and _convolves(inner):
            return _evaluate(inner, operands)
        return execute(closed.jaxpr, equation, operands)

    return walk(closed, args, step, lambda value: value)


def _convolve(equation: JaxprEqn, x: Array, weight: Array) -> Array:
    """Evaluate a convolution with its channels last, and bring the result into the axes that were asked for."""
    numbers = equation.params["dimension_numbers"]
    (batch, channels, *space), (outs, ins, *window) = numbers.lhs_spec, numbers.rhs_spec
    images, weights = (
        (0, len(space) + 1, *range(1, len(space) + 1)),
        (len(space) + 1, len(space), *range(len(space))),
    )
    result = equation.primitive.bind(
        jnp.transpose(x, (batch, *space, channels)),
        jnp.transpose(weight, (*window, ins, outs)),
        **{**equation.params, "dimension_numbers": jax.lax.ConvDimensionNumbers(images, weights, images)},
    )
    batch, channels, *space = numbers.out_spec
    return jnp.transpose(result, np.argsort((batch, *space, channels)).tolist())
