"""Compiled programs are found again: one object for functions of equal value, and a lean way to call programs.

JAX finds a compiled program by the functions that were compiled in. A lambda or ``optax.adam(0.1)`` made anew is
another object, although it computes the same, and would be compiled again. ``canonical`` returns the first one of the
same value. It never guesses: what it cannot look into counts as equal to itself only.
"""

import enum
import functools
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import equinox as eqx
import jax
import numpy as np

from meanflow._identity import is_library, names_used

Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")
KEPT = 512
LARGEST = 4096  # entries of arrays that are compared by value
_ARRAY = object()  # stands for an array among what decides a program
_KNOWN: OrderedDict[Any, Any] = OrderedDict()
_KEYS: dict[int, Any] = {}  # the key of each value that is kept, by its address


class _Unknown(Exception):
    """The value holds something that is being traced."""


def canonical(value: Value) -> Value:
    """Return the first value that was given so far and is equal to ``value``, if possible; else ``value`` itself.

    Functions are equal if their code, defaults, closed-over values and the globals that they name are.

    >>> scaled = lambda c: lambda z: c * z
    >>> canonical(scaled(2.0)) is canonical(scaled(2.0)), canonical(scaled(2.0)) is canonical(scaled(3.0))
    (True, False)
    """
    try:
        key = value_key(value)
        hash(key)
        if isinstance(key, _Same):
            return value
        found = _KNOWN.get(key, value)
        if found is not value and value_key(found) != key:
            found = value  # what that one names or holds has changed since
    except (_Unknown, TypeError):  # traced, or without a hash
        return value
    if found is value and _KEYS.get(id(value), key) != key:
        return value  # its meaning has changed since it was compiled: equals of its present meaning must not get it
    _KNOWN[key], _KEYS[id(found)] = found, key
    _KNOWN.move_to_end(key)
    if len(_KNOWN) > KEPT:
        _KEYS.pop(id(_KNOWN.popitem(last=False)[1]), None)
    return found


def value_key(value: object, seen: frozenset[int] = frozenset()) -> Any:
    """Return a key that is equal for values that do the same; unknown objects are told apart by identity.

    The key holds those objects themselves, so that none of them can vanish and leave its address to another.
    """
    if value is None or isinstance(value, bool | int | str | bytes | enum.Enum):
        return type(value), value
    if isinstance(value, float | complex):
        return type(value), repr(value)  # NaN equals itself here, and 0 differs from -0
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return _array_key(value)
    if id(value) in seen:
        return "recursive"
    seen = seen | {id(value)}
    inside = functools.partial(value_key, seen=seen)
    if isinstance(value, types.FunctionType):
        return _function_key(value, seen)
    if isinstance(value, types.MethodType):
        return "method", inside(value.__self__), inside(value.__func__)
    if isinstance(value, functools.partial):
        return "partial", inside(value.func), inside(value.args), inside(value.keywords)
    if type(value) in (tuple, list) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return type(value), tuple(inside(u) for u in value)  # type: ignore[attr-defined]
    if type(value) is dict:
        return "dict", tuple((inside(k), inside(v)) for k, v in value.items())
    if isinstance(value, eqx.Module):
        return type(value), tuple(inside(getattr(value, name, None)) for name in value.__dataclass_fields__)
    return _Same(value)


def _function_key(function: types.FunctionType, seen: frozenset[int]) -> Any:
    held = [function.__defaults__, function.__kwdefaults__]
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # a name that is assigned later
            return _Same(function)
    if not is_library(function.__module__ or ""):  # the globals of a library stay what they are
        held += [function.__globals__.get(name) for name in names_used(function.__code__)]
    return function.__code__, tuple(value_key(u, seen) for u in held)


def _array_key(value: Any) -> Any:
    if value.size > LARGEST:
        return _Same(value)
    try:
        array = np.asarray(value)
    except (jax.errors.TracerArrayConversionError, TypeError) as problem:  # traced, or a key
        raise _Unknown from problem
    return "array", type(value), array.dtype.str, array.shape, array.tobytes()


def compiled(function: Callable[Arguments, Value]) -> Callable[Arguments, Value]:
    """Compile a function of pytrees that returns arrays; what is no array in its arguments decides the program.

    This is ``equinox.filter_jit`` without donation and results that are no arrays, for programs that are called often:
    a call takes two thirds of the time.

    >>> power = compiled(lambda u, name: u**2 if name == "square" else u)
    >>> float(power(jax.numpy.asarray(3.0), "square"))
    9.0
    """

    def run(fixed: tuple[Any, tuple], arrays: list[Any]) -> Value:
        structure, others = fixed
        rest = iter(arrays)
        leaves = [next(rest) if other is _ARRAY else other for other in others]
        args, kwargs = jax.tree.unflatten(structure, leaves)
        return function(*args, **kwargs)

    run.__name__ = getattr(function, "__name__", "run")  # the name that profiles show
    program = jax.jit(run, static_argnums=0)

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Value:
        leaves, structure = jax.tree.flatten((args, kwargs))
        arrays, others = [], []
        for leaf in leaves:
            known = isinstance(leaf, jax.Array | np.ndarray | np.generic)
            others.append(_ARRAY if known else leaf)
            if known:
                arrays.append(leaf)
        return program((structure, tuple(others)), arrays)

    return call


class _Same:
    """An object that is equal to itself only, whatever its own idea of equality."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)
