"""When two values are the same: one walk over a value, read as a key in memory or as text on disk.

The walk follows the parts of containers and records, and for functions of the user their code, defaults, closed-over
values and the globals that they name, through all modules of the user. ``value_key`` makes an exact key of it, by which
compiled programs are found again in this process. ``describe`` makes text of it, by which a store or a checkpoint knows
its run again in another process. Installed libraries count by name there, since their versions are recorded apart.
"""

import enum
import functools
import hashlib
import inspect
import json
import pathlib
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import equinox as eqx
import jax
import numpy as np
from jaxtyping import ArrayLike

Json: TypeAlias = dict[str, Any]  # an object as json.loads returns it

PACKAGE = __name__.partition(".")[0]
ARRAYS = (np.ndarray, np.generic, jax.Array)
PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum)
# values of globals that decide what a function computes; open files, loggers and the like do not
DESCRIBED = (*PLAIN, *ARRAYS, list, tuple, dict, set, frozenset, functools.partial, eqx.Module)
# as much of a large array would have to be copied into a key at every call: larger ones count by identity
LARGEST = 4096


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


class Unknown(Exception):
    """The value holds something that is being traced, or an array that cannot be compared."""


class _Same:
    """An object that is equal to itself only, whatever its own idea of equality; it cannot vanish meanwhile."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class _Walk:
    """Goes through a value and everything that decides what it does; a subclass says what becomes of the parts."""

    plain: Callable[[Any], Any]  # None, a number, a text or a member of an enumeration
    array: Callable[[Any], Any]
    function: Callable[[types.FunctionType], Any]  # its code, and what is ``held``
    join: Callable[[Any, Iterable[Any]], Any]  # the kind of a sequence, and its values
    record: Callable[[Any, Mapping[str, Any]], Any]  # a NamedTuple or a module of equinox, and its fields
    mapping: Callable[[Mapping[Any, Any]], Any]
    foreign: Callable[[Any], Any]  # a module, or what code finds by name in a library
    other: Callable[[Any], Any]

    def __init__(self) -> None:
        self.path: list[int] = []  # addresses of the objects that the present one is a part of
        self.numbers: dict[int, int] = {}  # functions and classes met so far, in the outermost of them

    def __call__(self, value: Any) -> Any:
        if isinstance(value, PLAIN):
            return self.plain(value)
        if isinstance(value, ARRAYS):
            return self.array(value)
        if isinstance(value, types.FunctionType):
            return self.once(value, self.function)
        if id(value) in self.path:
            return "recursive"
        self.path.append(id(value))
        try:
            return self.parts(value)
        finally:
            self.path.pop()

    def parts(self, value: Any) -> Any:
        if isinstance(value, types.MethodType):
            return self.join("method", (value.__self__, value.__func__))
        if isinstance(value, functools.partial):
            return self.join("partial", (value.func, value.args, value.keywords))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return self.record(value, dict(zip(value._fields, value, strict=True)))
        if isinstance(value, eqx.Module):
            return self.record(value, {n: getattr(value, n, None) for n in value.__dataclass_fields__})
        if type(value) in (tuple, list):
            return self.join(type(value), value)
        return self.mapping(value) if type(value) is dict else self.other(value)

    def once(self, value: Any, read: Callable[[Any], Any]) -> Any:
        """Read a function or class, and where it is met again say which one it was: helpers may call each other."""
        if id(value) in self.numbers:
            return f"again {self.numbers[id(value)]}"
        outermost = not self.numbers
        self.numbers[id(value)] = len(self.numbers)
        try:
            return read(value)
        finally:
            if outermost:  # what stands beside it is read as if it stood alone
                self.numbers = {}

    def held(self, function: types.FunctionType) -> list[Any]:
        """Return what decides beside its code what a function computes."""
        values = [function.__defaults__, function.__kwdefaults__, *map(_content, function.__closure__ or ())]
        found = [self(value) for value in values]
        if is_library(function.__module__ or ""):  # the globals of a library stay what they are
            return found
        return found + [(name, self.named(value, function)) for name, value in _named(function)]

    def named(self, value: Any, function: types.FunctionType) -> Any:
        """Read a value that a function finds by name."""
        home = getattr(value, "__module__", None)
        ours = isinstance(home, str) and (home == function.__module__ or not is_library(home))
        if isinstance(value, types.FunctionType | type):
            return self(value) if ours else self.foreign(value)
        if isinstance(value, DESCRIBED) or (ours and not isinstance(value, types.ModuleType)):
            return self(value)
        return self.foreign(value)


class _Key(_Walk):
    """Reads a value as a hashable key; what it cannot look into counts as equal to itself only."""

    foreign = other = staticmethod(_Same)

    def plain(self, value: Any) -> Any:
        # NaN equals itself in this way, and 0 differs from -0
        return type(value), repr(value) if isinstance(value, float | complex) else value

    def array(self, value: Any) -> Any:
        if value.size > LARGEST:
            return _Same(value)
        try:
            array = np.asarray(value)
        except (jax.errors.TracerArrayConversionError, TypeError) as problem:  # traced, or a PRNG key
            raise Unknown from problem
        return type(value), array.dtype.str, array.shape, array.tobytes()

    def function(self, value: types.FunctionType) -> Any:
        return value.__code__, tuple(self.held(value))

    def join(self, kind: Any, values: Iterable[Any]) -> Any:
        return kind, tuple(self(value) for value in values)

    def record(self, value: Any, fields: Mapping[str, Any]) -> Any:
        return self.join(type(value), fields.values())

    def mapping(self, value: Mapping[Any, Any]) -> Any:
        return dict, tuple((self(k), self(v)) for k, v in value.items())


class _Text(_Walk):
    """Reads a value as JSON-ready text, which is the same in another process."""

    def plain(self, value: Any) -> Any:
        if isinstance(value, enum.Enum):
            return str(value)
        return repr(value) if isinstance(value, float | complex | bytes) else value  # JSON has no infinity

    def array(self, value: Any) -> Any:
        return array_text(value)

    def function(self, value: types.FunctionType) -> Any:
        code = "" if is_library(value.__module__ or "") else _bytecode(value.__code__)
        return f"{_name(value)}:{digest(code.encode(), str(self.held(value)).encode())}"

    def join(self, kind: Any, values: Iterable[Any]) -> Any:
        found = [self(value) for value in values]
        return {kind: found} if isinstance(kind, str) else found

    def record(self, value: Any, fields: Mapping[str, Any]) -> Any:
        code = self.code(type(value)) if isinstance(value, eqx.Module) else ""
        return {type(value).__name__ + code: self.mapping(fields)}

    def mapping(self, value: Mapping[Any, Any]) -> Any:
        return {str(k): self(v) for k, v in value.items()}

    def foreign(self, value: Any) -> Any:
        return None

    def other(self, value: Any) -> Any:
        if isinstance(value, types.BuiltinFunctionType | types.ModuleType):
            return _name(value)
        if isinstance(value, type):
            return _name(value) + self.code(value)
        if isinstance(value, Mapping):
            return self.mapping(value)
        if isinstance(value, list | tuple):
            return self.join(None, value)
        if isinstance(value, set | frozenset):
            return sorted(self.join(None, value), key=str)
        if isinstance(value, jax.custom_jvp):
            return self.join("custom_jvp", (value.fun, value.jvp))
        if isinstance(value, jax.custom_vjp):
            return self.join("custom_vjp", (value.fun, value.fwd, value.bwd))
        wrapped = getattr(value, "__wrapped__", None)  # jitted functions
        if wrapped is not None:
            return self(wrapped)
        name = _name(type(value)) + self.code(type(value))
        parts = self.mapping(dict(sorted(getattr(value, "__dict__", {}).items())))
        return {name: parts} if parts else name

    def code(self, kind: type) -> str:
        """Return ":" and a digest of the code of a user's class and of its user's bases; "" for a library's class."""
        own = [base for base in kind.__mro__ if not is_library(base.__module__)]

        def read(_: type) -> str:
            return digest(str([self(part) for base in own for part in _members(base)]).encode())

        return ":" + self.once(kind, read) if own else ""


def value_key(value: object) -> Any:
    """Return a hashable key that is equal for values that do the same; unknown objects are told apart by identity.

    The key holds those objects themselves, so that none of them can vanish and leave its address to another.

    Raises:
        Unknown: if a part is being traced.
    """
    return _Key()(value)


def is_comparable(key: object) -> bool:
    """Say whether a key tells more than which object it was made of."""
    return not isinstance(key, _Same)


def describe(value: object) -> Any:
    """Return a JSON-ready description that is equal for equal values, also in another process.

    - Arrays are described by type, shape and digest.
    - Functions are described by name and by a digest of their code with everything it reaches: defaults, closed-over
      values, and the globals it names. Those are followed into every module of the user: editing a helper, a constant,
      or an imported function changes the description; moving it to another line does not.
    - Objects are described by their attributes, and by the code of their class if that is the user's.
    - Functions and classes of installed libraries, and of this package, are described by name and by the values they
      hold.

    >>> describe({"step": 0.5, "clock": "lazy"})
    {'step': '0.5', 'clock': 'lazy'}
    """
    return _Text()(value)


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
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    return bool(installed) or path.is_relative_to(sysconfig.get_path("stdlib"))


def _members(kind: type) -> list[object]:
    """Return the functions and constants in the body of a class, in alphabetical order."""
    found: list[object] = []
    for name, value in sorted(vars(kind).items()):
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


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # a name that is assigned later, or never
        return inspect.Parameter.empty


def _named(function: types.FunctionType) -> list[tuple[str, Any]]:
    """Return the globals that a function names, and the attributes of the user's modules among them, with names."""
    names = _names_used(function.__code__)
    found = [(n, function.__globals__[n]) for n in names if n in function.__globals__]
    for place, module in found:  # grows: module.name and package.module.name
        if isinstance(module, types.ModuleType) and not is_library(module.__name__):
            inner = [(f"{place}.{n}", vars(module)[n]) for n in names if n in vars(module)]
            found += [(n, value) for n, value in inner if not any(value is one for _, one in found)]
    return found


@functools.lru_cache(maxsize=1024)
def _names_used(code: types.CodeType) -> list[str]:
    """Return the names that a code object looks up, those of functions defined inside it included."""
    inside = [_names_used(c) for c in code.co_consts if isinstance(c, types.CodeType)]
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
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return [] if old == new else [f"{path}: {old!r} in the store, {new!r} now"]
    found = []
    for name in dict.fromkeys([*old, *new]):
        place = f"{path}.{name}" if path else str(name)
        if name in old and name in new:
            found += difference(old[name], new[name], place)
        else:
            was, now = (repr(one.get(name, "absent")) for one in (old, new))
            found.append(f"{place}: {was} in the store, {now} now")
    return found
