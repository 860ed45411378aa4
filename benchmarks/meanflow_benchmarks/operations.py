"""Which part of a program's arithmetic is matrix products and convolutions?"""

import math
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

# these only move numbers
_MOVES = {
    "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "dynamic_slice", "dynamic_update_slice",
    "gather", "iota", "pad", "reshape", "rev", "scatter", "slice", "split", "squeeze", "stop_gradient", "transpose",
}  # fmt: skip


def share_of_products(closed: ClosedJaxpr) -> float:
    """Return the share of dot_general and convolutions in all operations; any other operation counts one a number.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> a = jnp.ones((10, 10))
        >>> share_of_products(jax.make_jaxpr(lambda a: a @ a + 1)(a))  # 2000 operations, and 100 more
        0.952...
    """
    products, others = _count(closed.jaxpr)
    return products / (products + others)


def _count(jaxpr: Jaxpr) -> tuple[float, float]:
    products = others = 0.0
    size = lambda v: math.prod(_shape(v))
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        outs = float(sum(map(size, equation.outvars)))
        inner = [j for value in equation.params.values() for j in _nested(value)]
        if inner:
            times = equation.params["length"] if name == "scan" else 1
            counted = [_count(j) for j in inner]
            products += times * sum(p for p, _ in counted)
            others += times * sum(o for _, o in counted)
        elif name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = _shape(equation.invars[0])
            products += 2.0 * outs * math.prod(shape[i] for i in contracted)
        elif name == "conv_general_dilated":
            outputs = _shape(equation.invars[1])[equation.params["dimension_numbers"].rhs_spec[0]]
            products += 2.0 * outs * size(equation.invars[1]) / outputs
        elif name.startswith("reduce") or name == "argmax":
            others += sum(map(size, equation.invars))
        elif name not in _MOVES:
            others += outs
    return products, others


def _shape(variable: Var | Literal) -> tuple[int, ...]:
    value: Any = variable.aval  # JAX does not type the shape of abstract values
    return tuple(value.shape)


def _nested(value: Any) -> list[Jaxpr]:
    """Return the programs among an equation's parameters."""
    if isinstance(value, list | tuple):
        return [j for v in value for j in _nested(v)]
    if isinstance(value, ClosedJaxpr):
        return [value.jaxpr]
    return [value] if isinstance(value, Jaxpr) else []
