"""Walking through a trace (jaxpr): its equations one by one, and the jaxprs that lie inside of them.

All that reads traces does so by this module: ``walk`` gives a value to every variable of one jaxpr, ``inner_jaxprs``
says which jaxprs an equation runs, and ``equations`` lists those of all depths.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

V = TypeVar("V")
Value: TypeAlias = Any  # in a trace: an array, a tracer, or a literal number of one of JAX's own types

# calls that only run another jaxpr on the same operands; custom derivatives are not among them, since to enter those
# would change how they are differentiated
CALLS = ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint")


def shape_of(variable: Var | Literal) -> tuple[int, ...]:
    """Return the shape of a variable of a jaxpr."""
    value: Any = variable.aval  # JAX does not type the shape of abstract values
    return tuple(value.shape)


def dtype_of(variable: Var | Literal) -> np.dtype:
    """Return the kind of numbers of a variable of a jaxpr."""
    value: Any = variable.aval
    return value.dtype


def _held(option: Any) -> list[ClosedJaxpr]:
    """Return the jaxprs in an option of an equation; those without constants are closed."""
    if isinstance(option, list | tuple):
        return [closed for part in option for closed in _held(part)]
    if isinstance(option, Jaxpr):
        return [ClosedJaxpr(option, [])]
    return [option] if isinstance(option, ClosedJaxpr) else []


def inner_jaxprs(equation: JaxprEqn) -> list[ClosedJaxpr]:
    """Return the jaxprs that an equation runs on its operands: one of a call or scan, one a branch of a cond.

    The arguments of each are the equation's last operands: all of them, or all but the index of a cond. Other equations
    that hold jaxprs, such as while loops, return none.
    """
    names = ("jaxpr", "call_jaxpr", "fun_jaxpr", "branches")
    found = _held([equation.params[name] for name in names if name in equation.params])
    count = len(equation.invars)
    return found if all(len(c.jaxpr.invars) in (count, count - 1) for c in found) else []


def called(equation: JaxprEqn) -> ClosedJaxpr | None:
    """Return the jaxpr of a plain call, None for any other equation."""
    return inner_jaxprs(equation)[0] if equation.primitive.name in CALLS else None


def carried_arguments(equation: JaxprEqn) -> slice:
    """Return which arguments of a scan are carried; constants come before them, sequences after.

    Found by ranks, because releases of JAX differ in what a scan says of itself: the body sees sequences without their
    first axis, and what is not carried on leaves it without the axis along which its rounds are stacked.
    """
    (body,) = (c.jaxpr for c in inner_jaxprs(equation))
    ranks = lambda variables: [len(shape_of(v)) for v in variables]
    same = lambda outer, inner: sum(a == b for a, b in zip(ranks(outer), ranks(inner), strict=True))
    carried, first = same(equation.outvars, body.outvars), same(equation.invars, body.invars)
    return slice(first - carried, first)


def equations(closed: ClosedJaxpr, calls_only: bool = False) -> Iterator[JaxprEqn]:
    """Yield the equations of a jaxpr and of all that lie inside of it, or only of those inside of plain calls."""
    for equation in closed.jaxpr.eqns:
        yield equation
        if calls_only:
            inner = called(equation)
            nested = [] if inner is None else [inner]
        else:
            nested = _held(list(equation.params.values()))
        for one in nested:
            yield from equations(one, calls_only)


def walk(
    closed: ClosedJaxpr,
    arguments: Sequence[V],
    step: Callable[[int, JaxprEqn, list[V]], Sequence[V]],
    constant: Callable[[Value], V],
) -> list[V]:
    """Give a value to every variable of a jaxpr, in the order of its equations, and return those of its outputs.

    Args:
        closed: the jaxpr.
        arguments: the values of its inputs.
        step: (place of the equation, equation, values of its operands) -> values of its outputs.
        constant: number or array -> the value of such a literal or constant.
    """
    jaxpr = closed.jaxpr
    values: dict[Var, V] = {v: constant(a) for v, a in zip(jaxpr.constvars, closed.consts, strict=True)}
    values.update(zip(jaxpr.invars, arguments, strict=True))
    read = lambda v: constant(v.val) if isinstance(v, Literal) else values[v]
    for place, equation in enumerate(jaxpr.eqns):
        outs = step(place, equation, [read(v) for v in equation.invars])
        values.update(zip(equation.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def execute(jaxpr: Jaxpr, equation: JaxprEqn, operands: Sequence[Value]) -> list[Value]:
    """Return one equation's outputs."""
    if not _held(list(equation.params.values())):
        found = equation.primitive.bind(*operands, **equation.params)
        return list(found) if equation.primitive.multiple_results else [found]
    # one that holds jaxprs runs as a trace of its own: only JAX knows how such primitives are called
    inputs = {v: a for v, a in zip(equation.invars, operands, strict=True) if not isinstance(v, Literal)}
    alone = jaxpr.replace(
        constvars=[],
        invars=list(inputs),
        outvars=list(equation.outvars),
        eqns=[equation],
        debug_info=jaxpr.debug_info._replace(arg_names=None, result_paths=None),
    )
    return jaxpr_as_fun(ClosedJaxpr(alone, []))(*inputs.values())
