"""What makes two runs the same run: readable text for models, functions, arrays and settings that can be compared.

A store keeps the description of its run and refuses to go on with another one. What a description can reach is
compared exactly: values, arrays, and the code of the user's functions and classes with whatever they use of other
modules of the user. Installed libraries are described by name only, since their versions are recorded apart.
"""

import enum
import functools
import hashlib
import json
import pathlib
import sys
import sysconfig
import types
from collections.abc import Mapping
from typing import Any, TypeAlias

import equinox as eqx
import jax
import numpy as np
from jaxtyping import ArrayLike

Json: TypeAlias = dict[str, Any]  # an object as json.loads returns it
Seen: TypeAlias = frozenset[int]

PACKAGE = __name__.partition(".")[0]
PLAIN = (bool, int, float, complex, str, bytes, np.ndarray, np.generic, jax.Array)
# values of globals that decide what a function computes; open files, loggers and the like do not
DESCRIBED = (*PLAIN, type(None), enum.Enum, list, tuple, dict, set, frozenset, functools.partial, eqx.Module)


def digest(*parts: bytes) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of the parts.

    >>> digest(b"ab", b"c") == digest(b"a", b"bc")
    False
    """
    state = hashlib.sha256()
    for part in parts:
        # with its length, so that moving a byte from one part to the next changes the digest
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()[:16]


def json_digest(value: object) -> str:
    """Return the digest of a JSON-ready value; the order of keys does not matter."""
    return digest(json.dumps(value, sort_keys=True).encode())


@functools.cache
def source_digest() -> str:
    """Return the digest of this package's own source files, which is another one after any change of them."""
    root = pathlib.Path(__file__).parent
    files = sorted(path for path in root.rglob("*.py"))
    return digest(*(part for f in files for part in (str(f.relative_to(root)).encode(), f.read_bytes())))


def array_text(value: ArrayLike | np.generic) -> str:
    """Return type, shape and digest of an array as text; single numbers are written out.

    >>> array_text(np.float64(0.5))
    'float64:0.5'
    """
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return f"{jax.random.key_impl(value)}:{jax.random.key_data(value).tolist()}"
    array = np.asarray(value)
    if array.size == 1 and array.dtype.kind in "fiub":
        return f"{array.dtype}:{array.item()!r}"
    return f"{array.dtype}{list(array.shape)}:{digest(np.ascontiguousarray(array).tobytes())}"


def describe(value: object, seen: Seen = frozenset()) -> Any:
    """Return a JSON-ready description that is equal for equal values, also in another process.

    - Arrays are described by type, shape and digest.
    - Functions are described by name and by a digest of their code with everything it reaches: defaults, closed-over
      values, and the globals it names. Those are followed into every module of the user: editing a helper, a constant,
      or an imported function changes the description; moving it to another line does not.
    - Objects are described by their attributes, and by the code of their class if that is the user's.
    - Functions and classes of installed libraries, and of this package, are described by name and by the values they
      hold.

    Args:
        value: anything.
        seen: addresses of the objects that ``value`` is a part of.

    >>> describe({"step": 0.5, "clock": "lazy"})
    {'step': '0.5', 'clock': 'lazy'}
    """
    if isinstance(value, enum.Enum):
        return str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float | complex | bytes):
        return repr(value)  # JSON has no infinity
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return array_text(value)
    if isinstance(value, types.BuiltinFunctionType | types.ModuleType):
        return _name(value)
    if isinstance(value, type):
        return _name(value) + _class_code(value, seen)
    if id(value) in seen:
        return "recursive"
    return _describe_parts(value, seen | {id(value)})


def _describe_parts(value: object, seen: Seen) -> Any:
    """Describe a value that has parts; ``seen`` already holds its own address."""
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
        return f"{_name(value)}:{digest(_code([value], seen).encode())}"
    if isinstance(value, jax.custom_jvp):
        return {"custom_jvp": [inside(value.fun), inside(value.jvp)]}
    if isinstance(value, jax.custom_vjp):
        return {"custom_vjp": [inside(value.fun), inside(value.fwd), inside(value.bwd)]}
    if isinstance(value, eqx.Module):
        parts = {name: inside(getattr(value, name, None)) for name in value.__dataclass_fields__}
        return {type(value).__name__ + _class_code(type(value), seen): parts}
    wrapped = getattr(value, "__wrapped__", None)  # jitted functions
    if wrapped is not None:
        return inside(wrapped)
    name = _name(type(value)) + _class_code(type(value), seen)
    parts = {k: inside(v) for k, v in sorted(getattr(value, "__dict__", {}).items())}
    return {name: parts} if parts else name


def _name(value: Any) -> str:
    """Return module and name of a class, function or module."""
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}"


@functools.cache
def is_library(module: str) -> bool:
    """Say whether a module belongs to Python, to an installed distribution or to this package."""
    top = module.partition(".")[0]
    if top == "__main__":
        return False
    if top == PACKAGE or top in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return False
    path = pathlib.Path(file)
    return bool({"site-packages", "dist-packages"} & set(path.parts)) or path.is_relative_to(
        sysconfig.get_path("stdlib")
    )


def _class_code(kind: type, seen: Seen) -> str:
    """Return ":" and a digest of the code of a user's class and of its user's bases; "" for a library's class."""
    own = [base for base in kind.__mro__ if not is_library(base.__module__)]
    if not own:
        return ""
    if id(kind) in seen:  # a class whose methods name it
        return ":recursive"
    seen = seen | {id(kind)}
    parts = [part for base in own for part in _members(base)]
    functions = [part for part in parts if isinstance(part, types.FunctionType)]
    others = [str(describe(part, seen)) for part in parts if not isinstance(part, types.FunctionType)]
    return ":" + digest(_code(functions, seen).encode(), *(text.encode() for text in others))


def _members(kind: type) -> list[object]:
    """Return the functions and constants in the body of a class, in alphabetical order."""
    found: list[object] = []
    for name in sorted(vars(kind)):
        value = vars(kind)[name]
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        if isinstance(value, property):
            found += [f for f in (value.fget, value.fset) if f is not None]
        elif isinstance(value, types.FunctionType):
            # dataclasses write some methods themselves, into no file
            found += [value] if value.__code__.co_filename != "<string>" else []
        elif isinstance(value, DESCRIBED) and not name.startswith("_"):
            found.append((name, value))
        elif not isinstance(value, type) and getattr(value, "__wrapped__", None) is not None:
            found.append(value.__wrapped__)
    return found


def _code(functions: list[types.FunctionType], seen: Seen) -> str:
    """Return byte code, constants, defaults and closed-over values of functions and of all that they reach.

    Of a library's function only the values count, such as the learning rate inside an optimizer of optax.
    """
    parts: list[object] = []
    waiting = list(functions)
    done = {id(one) for one in waiting}
    while waiting:  # each helper once, however many functions call it
        one = waiting.pop(0)
        library = is_library(one.__module__ or "")
        values, helpers = ([], []) if library else _globals(one)
        new = [helper for helper in helpers if id(helper) not in done | seen]
        waiting += new
        done |= {id(helper) for helper in new}
        closed = [_content(cell) for cell in one.__closure__ or ()]
        parts.append(_name(one) if library else _bytecode(one.__code__))
        parts += [describe(v, seen | done) for v in (one.__defaults__, one.__kwdefaults__, *closed, *values)]
    return "|".join(map(str, parts))


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # a name that is assigned later, or never
        return "empty"


def _globals(function: types.FunctionType) -> tuple[list[object], list[types.FunctionType]]:
    """Return the values that a function names, and the functions whose code counts as part of its own."""
    names = names_used(function.__code__)
    named = [function.__globals__[n] for n in names if n in function.__globals__]
    for module in named:  # grows: module.name and package.module.name
        if isinstance(module, types.ModuleType) and not is_library(module.__name__):
            inner = [vars(module)[n] for n in names if n in vars(module)]
            named += [value for value in inner if not any(value is one for one in named)]
    values: list[object] = []
    helpers: list[types.FunctionType] = []
    for value in named:
        home = getattr(value, "__module__", None)
        ours = isinstance(home, str) and (home == function.__module__ or not is_library(home))
        if isinstance(value, types.FunctionType):
            helpers += [value] if ours else []
        elif isinstance(value, type):
            values += [value] if ours else []
        elif isinstance(value, DESCRIBED) or (ours and not isinstance(value, types.ModuleType)):
            values.append(value)
    return values, helpers


def names_used(code: types.CodeType) -> list[str]:
    """Return the names that a code object looks up, those of functions defined inside it included."""
    inside = [names_used(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return sorted({*code.co_names, *(name for names in inside for name in names)})


def _bytecode(code: types.CodeType) -> str:
    """Return instructions, names and constants of a code object as text."""
    constants = [
        # sets have no order of their own
        _bytecode(c)
        if isinstance(c, types.CodeType)
        else repr(sorted(c, key=repr) if isinstance(c, frozenset) else c)
        for c in code.co_consts
    ]
    return "|".join([code.co_code.hex(), str(code.co_names), *constants])


def difference(old: object, new: object, path: str = "") -> list[str]:
    """Return one line for each place in which two descriptions differ.

    >>> difference({"step": 1, "key": 0}, {"step": 2, "key": 0})
    ['step: 1 in the store, 2 now']
    """
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
