"""The laws of parameters at initialization: as given, or read from the function that draws them.

The trace of such a function is followed with one number in place of each array of independent entries: the random bits
are those of the nodes of a quadrature, from which mean and variance of the entries follow.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jaxtyping import PyTree
from scipy import special

from meanflow import _boundary
from meanflow.kernels._empirical import visit
from meanflow.kernels._infinite.expect import MASS, NODES
from meanflow.kernels._infinite.rules import ELEMENTWISE, MOVES, execute_on

BITWISE = frozenset(["shift_right_logical", "shift_left", "bitcast_convert_type"])


class Law(NamedTuple):
    """What is known of the entries of a parameter.

    Attributes:
        variance: of an entry.
        with_fan: whether it is given times fan-in.
        number: what all entries are, if that is one number without variance.
        held: whether the entries are those of the parameter that was given, without variance.
    """

    variance: Any
    with_fan: bool = False
    number: float | None = None
    held: bool = False


class _Entry(NamedTuple):
    """One entry of an array of independent ones, at the nodes."""

    values: jax.Array


_UNKNOWN = object()  # what parameters cannot be, such as outputs of the network


def given_laws(params: PyTree, variances: PyTree) -> list[Law]:
    """Return the laws that a pytree of variances says; a parameter of variance 0 keeps its value."""
    trees = [jax.tree.structure(tree) for tree in (params, variances)]
    if str(trees[0]) != str(trees[1]):
        raise ValueError(
            "variances must be a pytree like params, with a number for each parameter, got "
            f"{trees[1]} for {trees[0]}"
        )
    return [_given(*pair) for pair in zip(jax.tree.leaves(params), jax.tree.leaves(variances), strict=True)]


def _given(leaf: Any, variance: Any) -> Law:
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return Law(0.0, held=True)
    if np.shape(variance) != ():
        raise ValueError(f"variances must be numbers, got one of shape {np.shape(variance)}")
    known = _boundary.concrete(variance)
    if known is None or known > 0:
        return Law(variance, with_fan=True)
    if not known == 0:
        raise ValueError(f"variances must be finite and at least 0, got {known}")
    values = None if isinstance(leaf, jax.ShapeDtypeStruct) else _boundary.concrete(leaf)
    if values is None:
        return Law(0.0, number=0.0) if isinstance(leaf, jax.ShapeDtypeStruct) else Law(0.0, held=True)
    first = np.ravel(values)[0] if values.size else 0.0
    return Law(0.0, number=float(first)) if np.all(values == first) else Law(0.0, held=True)


def drawn_laws(init: Callable[[jax.Array], PyTree], params: PyTree) -> list[Law]:
    """Return the laws of what a function of a key draws."""
    trace = jax.make_jaxpr(init)(jax.random.key(0))
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(params)]
    if [visit.shape_of(v) for v in trace.jaxpr.outvars] != shapes:
        raise ValueError(f"variances must draw parameters of the shapes {shapes}, as params, from a key")
    with jax.ensure_compile_time_eval():
        outs = visit.walk(trace, [jax.random.key(0)], _step, lambda value: value)
        return [_law(out) for out in outs]


def _law(out: Any) -> Law:
    if out is _UNKNOWN:
        raise ValueError(
            "variances must draw entries that are independent and of one law; one parameter is drawn in another way: "
            "give a pytree of variances"
        )
    if not isinstance(out, _Entry):
        values = np.asarray(out)
        floats = np.issubdtype(values.dtype, np.floating) and values.size
        return (
            Law(0.0, number=float(values.flat[0]))
            if floats and np.all(values == values.flat[0])
            else Law(0.0, held=True)
        )
    values = np.broadcast_to(np.asarray(out.values, float), NODES.shape)
    mean = MASS @ values
    variance = float(MASS @ (values - mean) ** 2)
    if abs(mean) > 1e-3 * np.sqrt(variance):
        raise ValueError(
            f"variances must draw parameters without a mean, or without variance, got mean {mean}"
        )
    return Law(variance)


def _step(_: int, equation: JaxprEqn, values: list[Any]) -> list[Any]:
    name = equation.primitive.name
    if name == "random_bits":
        width = equation.params["bit_width"]
        places = np.floor(special.ndtr(NODES) * 2.0**width)
        bits = np.minimum(places, 2.0**width - 2.0 ** max(width - 53, 0)).astype(f"uint{width}")
        return [_Entry(jnp.asarray(bits))]
    inner = visit.inner_jaxprs(equation)
    if any(v is _UNKNOWN for v in values):
        return [_UNKNOWN] * len(equation.outvars)
    if not any(isinstance(v, _Entry) for v in values) and not (
        inner and name in (*visit.CALLS, "custom_jvp_call")
    ):
        return execute_on(equation, values)
    if inner and name in (*visit.CALLS, "custom_jvp_call"):
        return visit.walk(inner[0], values, _step, lambda value: value)
    if name in ELEMENTWISE or name in BITWISE:
        single = lambda v: v.values if isinstance(v, _Entry) else jnp.ravel(jnp.asarray(v))[0]
        same = all(isinstance(v, _Entry) or np.all(np.asarray(v) == np.ravel(v)[0]) for v in values)
        if same:
            arrays = jnp.broadcast_arrays(*map(single, values))
            return [_Entry(equation.primitive.bind(*arrays, **equation.params))]
    if name in MOVES and name != "pad":
        return [values[0]]
    return [_UNKNOWN] * len(equation.outvars)
