"""What makes two runs the same run: readable, comparable text for models, functions, arrays and settings."""

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


def describe(value: Any) -> Any:
    """JSON-ready description that is equal for equal values, also in another process.

    Functions are described by name and by their code with everything it closes over, so that editing a function
    changes its description and moving it to another line does not.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return repr(value)  # JSON has no infinity
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return array_text(value)
    if isinstance(value, Mapping):
        return {str(k): describe(v) for k, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = zip(value._fields, value, strict=True)
        return {type(value).__name__: {k: describe(v) for k, v in fields}}
    if isinstance(value, list | tuple | set | frozenset):
        items = [describe(v) for v in value]
        return items if isinstance(value, list | tuple) else sorted(items, key=str)
    if isinstance(value, functools.partial):
        return {"partial": [describe(value.func), describe(value.args), describe(value.keywords)]}
    if isinstance(value, types.FunctionType):
        return f"{value.__module__}.{value.__qualname__}:{digest(_code(value, frozenset()).encode())}"
    if isinstance(value, type | types.BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, eqx.Module):
        parts = {name: describe(getattr(value, name, None)) for name in value.__dataclass_fields__}
        return {type(value).__name__: parts}
    wrapped = getattr(value, "__wrapped__", None)  # jitted and custom-derivative functions
    if wrapped is not None:
        return describe(wrapped)
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _code(function: Any, seen: frozenset[int]) -> str:
    """Byte code, constants, defaults and closed-over values of a function, recursively."""
    if id(function) in seen:
        return "recursive"
    seen = seen | {id(function)}
    cells = [c.cell_contents for c in function.__closure__ or ()]
    inside = [_code(v, seen) if isinstance(v, types.FunctionType) else str(describe(v)) for v in cells]
    defaults = str(describe([*(function.__defaults__ or ()), function.__kwdefaults__ or {}]))
    return "|".join([_bytecode(function.__code__), defaults, *inside])


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
