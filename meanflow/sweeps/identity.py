"""What makes two runs the same run: readable, comparable text for models, functions, arrays and settings."""

import enum
import functools
import hashlib
import types
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import numpy as np


def digest(*parts: bytes) -> str:
    """First 16 hexadecimal digits of the SHA-256 of the parts."""
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()[:16]


def array_text(value: Any) -> str:
    """Type, shape and digest of an array; small numbers are written out."""
    array = np.asarray(value)
    if array.size == 1 and array.dtype.kind in "fiub":
        return f"{array.dtype}:{array.item()!r}"
    return f"{array.dtype}{list(array.shape)}:{digest(np.ascontiguousarray(array).tobytes())}"


def describe(value: Any, seen: frozenset[int] = frozenset()) -> Any:
    """JSON-ready description that is equal for equal values, also in another process.

    Functions are described by name and by their code with everything it closes over: local values, and the functions,
    numbers, texts and arrays of its own module that it names. So editing a function, a helper or a constant changes the
    description, and moving it to another line does not. Other objects are described by their attributes.

    Args:
        value: anything.
        seen: addresses of the objects that ``value`` is a part of.
    """
    if isinstance(value, enum.Enum):
        return str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return repr(value)  # JSON has no infinity
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return array_text(value)
    if isinstance(value, type | types.BuiltinFunctionType | types.ModuleType):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}"
    if id(value) in seen:
        return "recursive"
    seen = seen | {id(value)}
    inside = functools.partial(describe, seen=seen)
    if isinstance(value, Mapping):
        return {str(k): inside(v) for k, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = zip(value._fields, value, strict=True)
        return {type(value).__name__: {k: inside(v) for k, v in fields}}
    if isinstance(value, list | tuple | set | frozenset):
        items = [inside(v) for v in value]
        return items if isinstance(value, list | tuple) else sorted(items, key=str)
    if isinstance(value, functools.partial):
        return {"partial": [inside(value.func), inside(value.args), inside(value.keywords)]}
    if isinstance(value, types.MethodType):
        return {"method": [inside(value.__self__), inside(value.__func__)]}
    if isinstance(value, types.FunctionType):
        return f"{value.__module__}.{value.__qualname__}:{digest(_code(value, seen).encode())}"
    if isinstance(value, eqx.Module):
        parts = {name: inside(getattr(value, name, None)) for name in value.__dataclass_fields__}
        return {type(value).__name__: parts}
    wrapped = getattr(value, "__wrapped__", None)  # jitted and custom-derivative functions
    if wrapped is not None:
        return inside(wrapped)
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    parts = {k: inside(v) for k, v in sorted(getattr(value, "__dict__", {}).items())}
    return {name: parts} if parts else name


def _code(function: Any, seen: frozenset[int]) -> str:
    """Byte code, constants, defaults and closed-over values of a function and of the helpers in its module."""
    parts: list[Any] = []
    waiting, done = [function], {id(function)}
    while waiting:  # each helper once, however many functions call it
        one = waiting.pop(0)
        constants, helpers = _globals(one)
        new = [helper for helper in helpers if id(helper) not in done]
        waiting += new
        done |= {id(helper) for helper in new}
        closed = [c.cell_contents for c in one.__closure__ or ()]
        parts.append(_bytecode(one.__code__))
        parts += [
            describe(v, seen | done) for v in (one.__defaults__, one.__kwdefaults__, *closed, *constants)
        ]
    return "|".join(map(str, parts))


def _globals(function: Any) -> tuple[list[Any], list[Any]]:
    """Constants that a function names, and functions of its own module."""
    named = [function.__globals__[n] for n in _names(function.__code__) if n in function.__globals__]
    constant = (bool, int, float, str, tuple, np.ndarray, np.generic, jax.Array)
    plain = [value for value in named if isinstance(value, constant)]
    inner = [getattr(value, "__wrapped__", value) for value in named]
    own = [f for f in inner if isinstance(f, types.FunctionType) and f.__module__ == function.__module__]
    return plain, own


def _names(code: types.CodeType) -> list[str]:
    """Names a code object looks up, those of functions defined inside it included."""
    inside = [_names(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return sorted({*code.co_names, *(name for names in inside for name in names)})


def _bytecode(code: types.CodeType) -> str:
    constants = [
        _bytecode(c) if isinstance(c, types.CodeType) else repr(c)
        for c in code.co_consts
        if not isinstance(c, frozenset)  # sets have no order of their own
    ]
    return "|".join([code.co_code.hex(), str(code.co_names), *constants])


def difference(old: Any, new: Any, path: str = "") -> list[str]:
    """Human-readable list of the places in which two descriptions differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for name in [*old, *(k for k in new if k not in old)]:
            place = f"{path}.{name}" if path else str(name)
            if name not in old or name not in new:
                found.append(
                    f"{place}: {old.get(name, 'absent')!r} in the store, {new.get(name, 'absent')!r} now"
                )
            else:
                found += difference(old[name], new[name], place)
        return found
    return [] if old == new else [f"{path}: {old!r} in the store, {new!r} now"]
