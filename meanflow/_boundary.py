"""The boundary of the package: what public functions accept, checked once, before anything is compiled.

The annotation of an argument says of what *kind* it is, and ``checked`` reads it:

    @checked
    def draw(key: PRNGKey, width: Count, names: Sequence[str] = (), law: Annotated[str, choice("a", "b")] = "a"): ...

Every argument that is given is checked, and the function gets what its kind returns (an ``int`` for a count, an array
for an array). Every message names the argument, what was given and what is allowed. A kind stands in ``Annotated``, or
follows from the type (``kind_of``): classes are kinds themselves, and arrays have the shape of their annotation. Kinds
that recur have names, at the end of this module. Values that are being traced (inside jit, grad or vmap) cannot be
looked at; whatever needs them is skipped then.

The plain functions of ``meanflow._properties`` (``finite``, ``shape``, ...), of which kinds are made, are here too.
"""

import functools
import inspect
import itertools
import math
import operator
import os
import pathlib
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import AbstractArray

from meanflow._properties import bounds as bounds
from meanflow._properties import concrete as concrete
from meanflow._properties import finite as finite
from meanflow._properties import floating as floating
from meanflow._properties import is_real as is_real
from meanflow._properties import numeric as numeric
from meanflow._properties import one_of as one_of
from meanflow._properties import shape as shape
from meanflow._properties import show as show
from meanflow._properties import unmasked as unmasked
from meanflow._properties import whole as whole

# (name of the argument, value) -> value to pass on; raises if it is refused
Kind = Callable[[str, object], object]


def unchecked(reason: str) -> Kind:
    """Make a kind that accepts every value, for the ``reason`` given: who checks it instead, or why nobody can."""

    def check(name: str, value: object) -> object:
        return value

    check.reason = reason  # type: ignore[attr-defined]  # read by the tests
    return check


MANY = 10**6  # the longest sequence
MOST = 2**31 - 1  # the largest count: more could be neither stored nor counted by 32-bit integers


def count(low: int, high: int = MOST) -> Kind:
    """Make the kind of integers from ``low`` to ``high``."""
    return lambda name, value: whole(name, value, low, high)


def number(*, infinite: bool = False, static: bool = False, **limits: float) -> Kind:
    """Make the kind of single real numbers; may be traced unless ``static``.

    Args:
        infinite: whether plus and minus infinity are allowed. NaN never is.
        static: whether the number decides what is compiled; it is returned as a Python number then.
        limits: what it must be above, below, and at least (``low``) or at most (``high``), as in ``bounds``.
    """

    def check(name: str, value: object) -> object:
        if value is None or isinstance(value, str | bool | Sequence | dict):
            raise ValueError(f"{name} must be a number, got {show(value)}")
        # the usual case, without a way through numpy: a call of a small program takes microseconds
        if isinstance(value, float | int):
            fits = True
            for side, at in limits.items():
                fits = fits and _HOLDS[side](value, at)
            if fits and (value == 0 or 1 / _USUAL < abs(value) < _USUAL):
                return value
            if fits and not static:
                _check_precision(name, value)
        numeric(name, value)
        shape(name, value, ())
        if not infinite:
            finite(name, value)
        bounds(name, value, **limits)
        if not static and not isinstance(value, np.generic | np.ndarray):
            return value
        known = concrete(value)
        if known is None:
            raise TypeError(f"{name} must be known when the program is compiled, got a traced value")
        return known.item()

    return check


_HOLDS: dict[str, Callable[[float, float], bool]] = {
    "above": operator.gt,
    "low": operator.ge,
    "below": operator.lt,
    "high": operator.le,
}
_USUAL = 1e37  # numbers between 1 / 1e37 and 1e37 are the same in every precision, to rounding


def _check_precision(name: str, value: float) -> None:
    """Refuse a number that computations in the working precision would take for 0 or infinity."""
    limits = jnp.finfo(jnp.result_type(float))
    low, high = float(limits.tiny), float(limits.max)
    if math.inf > abs(value) > high or abs(value) < low:
        raise ValueError(
            f"{name} must be 0 or from {low:.1g} to {high:.1g} in size, the numbers of type {limits.dtype.name}, "
            f"got {show(value)}"
        )


def choice(*allowed: str) -> Kind:
    """Make the kind of names among ``allowed``."""

    def check(name: str, value: object) -> object:
        one_of(name, value, allowed)
        return value

    return check


def array(
    *shapes: tuple[int | None, ...],
    infinite: bool = False,
    nan: bool = False,
    least: int = 1,
    rank: int = 0,
    squares: bool = False,
    half: bool = False,
    **limits: float,
) -> Callable[[str, object], jax.Array]:
    """Make the kind of real arrays of one of the given ``shapes`` (None: any length); returns floats.

    Half-precision numbers become float32 unless ``half`` is set: there is no linear algebra in less.

    Args:
        shapes: allowed shapes; without any, every shape is allowed.
        infinite: whether infinite entries are allowed.
        nan: whether NaN is allowed, for functions that pass it on to whoever judges the result.
        least: least length of the first axis; 0 allows empty arrays.
        rank: least number of axes.
        squares: whether the squares of entries must be numbers too: not infinite, and 0 for entries 0 alone.
        half: whether half-precision numbers stay what they are.
        limits: what entries must be above, below, and at least (``low``) or at most (``high``), as in ``bounds``.
    """

    def check(name: str, value: object) -> jax.Array:
        known = _read(name, value, shapes, least, rank)
        # all is looked at on the host first: the conversion of integers is compiled
        if known is not None:
            if not infinite:
                finite(name, known)
            # what is finite is no NaN: another pass over a large array is for bounds alone
            if not nan and (infinite or limits):
                bounds(name, known, **limits)
        converted = floating(value)
        if not half and converted.dtype.itemsize < 4:
            converted = converted.astype(jnp.float32)
        if known is not None and not infinite and converted.dtype.itemsize < known.dtype.itemsize:
            finite(name, converted)  # too large for the working precision
        if squares and known is not None:
            _check_squares(name, known, converted.dtype)
        return converted

    return check


def _check_squares(name: str, known: np.ndarray, dtype: np.dtype) -> None:
    """Refuse entries whose squares, times the number of entries, are out of the range of the working precision."""
    limits = jnp.finfo(dtype)
    size = np.abs(known if known.dtype.kind == "f" else known.astype(np.float64))
    top, least = float(size.max(initial=0)), float(size.min(initial=np.inf, where=size != 0))
    low, high = float(limits.tiny) ** 0.5, (float(limits.max) / max(known.size, 1)) ** 0.5
    if top > high or least < low:
        worst = top if top > high else least
        raise ValueError(
            f"{name} must have entries that are 0 or from {low:.1g} to {high:.1g} in size, so that squares are numbers "
            f"of type {np.dtype(dtype).name}, got {worst:.3g}"
        )


def host_array(
    *shapes: tuple[int | None, ...], nan: bool = False, least: int = 0, rank: int = 0
) -> Callable[[str, object], np.ndarray]:
    """Make the kind of real arrays that are used on the host; returns a numpy array in the precision given.

    Args:
        shapes, least, rank: as in ``array``.
        nan: whether NaN and infinite entries are allowed, as in plots, where they leave gaps.
    """

    def check(name: str, value: object) -> np.ndarray:
        known = _read(name, value, shapes, least, rank)
        if known is None:
            raise TypeError(f"{name} must be known: it is used on the host, got a traced value")
        if not nan:
            finite(name, known)
        return known

    return check


def _read(
    name: str, value: object, shapes: tuple[tuple[int | None, ...], ...], least: int, rank: int
) -> np.ndarray | None:
    """Return an array of real numbers of an allowed shape as numpy array, None while it is traced."""
    if value is None or isinstance(value, str | dict):
        raise ValueError(f"{name} must be an array, got {show(value)}")
    unmasked(name, value)
    try:
        numeric(name, value)
        known = concrete(value)
        given = np.shape(value if known is None else known)  # type: ignore[call-overload]
    except (TypeError, ValueError) as problem:
        raise ValueError(f"{name} must be an array of real numbers, got {show(value)}") from problem
    if shapes:
        shape(name, value if known is None else known, *shapes)
    if len(given) < rank:
        raise ValueError(f"{name} must have at least {rank} axes, got shape {given}")
    if least and 0 in given:
        raise ValueError(f"{name} must not be empty, got shape {given}")
    if least > 1 and (not given or given[0] < least):
        raise ValueError(f"{name} must hold at least {least} entries along its first axis, got shape {given}")
    return known


def indices(name: str, value: object, size: int) -> jax.Array:
    """Refuse anything but integers (k,), k >= 1, from -size to size - 1; return them as an array."""
    try:
        given = jnp.asarray(value)
        fine = given.ndim == 1 and given.size > 0 and jnp.issubdtype(given.dtype, jnp.integer)
    except (TypeError, ValueError):
        fine = False
    if not fine:
        raise ValueError(f"{name} must be an array of at least one integer, got {show(value)}")
    bounds(name, given, low=-size, high=size - 1)
    return given


def sequence(kind: Kind, *, least: int = 1) -> Callable[[str, object], tuple[object, ...]]:
    """Make the kind of sequences (no text) of at least ``least`` values of one ``kind``; returns a tuple.

    An array counts as the sequence of its entries.
    """

    def check(name: str, value: object) -> tuple[object, ...]:
        if (
            isinstance(value, str | bytes | dict | set | frozenset)
            or not isinstance(value, Iterable)
            or inspect.isclass(value)
        ):
            raise ValueError(f"{name} must be a sequence of values, got {show(value)}")
        try:
            array = isinstance(value, jax.Array | np.ndarray)
            if array:
                shape(name, value, (None,))
            entries = np.asarray(value).tolist() if array else list(itertools.islice(value, MANY + 1))
        except TypeError as problem:  # arrays that are traced or hold keys, iterators that fail
            raise ValueError(f"{name} must be a sequence of known values, got {show(value)}") from problem
        if len(entries) > MANY:  # iterators may have no end
            raise ValueError(f"{name} must hold at most {MANY} values, got more")
        listed = tuple(kind(f"{name}[{k}]", entry) for k, entry in enumerate(entries))
        if len(listed) < least:
            raise ValueError(f"{name} must hold at least {least} values, got {show(listed)}")
        return listed

    return check


def mapping(kind: Kind, *, least: int = 0) -> Callable[[str, object], dict[str, object]]:
    """Make the kind of mappings from names to values of one ``kind``; returns a dict."""

    def check(name: str, value: object) -> dict[str, object]:
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} must be a mapping from names to values, got {show(value)}")
        if len(value) < least:
            raise ValueError(f"{name} must hold at least {least} entries, got {show(value)}")
        return {text(f"keys of {name}", key): kind(f"{name}[{key!r}]", entry) for key, entry in value.items()}

    return check


def text(name: str, value: object) -> str:
    """Accept a string."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {show(value)}")
    return value


def precision(name: str, value: object) -> object:
    """Accept a type of real floating-point numbers, such as jnp.float32 or its name."""
    try:
        named = isinstance(value, str | type | np.dtype | jnp.dtype) or hasattr(value, "dtype")
        # an array would pass for its type
        good = named and not isinstance(value, jax.Array | np.ndarray | np.generic)
        good = good and jnp.issubdtype(jnp.dtype(value), jnp.floating)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        good = False
    if not good:
        raise ValueError(
            f"{name} must be a type of floating-point numbers such as 'float32', got {show(value)}"
        )
    return value


def subclass(parent: type, *, hint: str = "") -> Kind:
    """Make the kind of classes below ``parent``, the class itself and not one of its instances."""

    def check(name: str, value: object) -> object:
        if not (inspect.isclass(value) and issubclass(value, parent)):
            advice = f"; {hint}" if hint else ""
            raise TypeError(f"{name} must be a subclass of {parent.__name__}, got {show(value)}{advice}")
        return value

    return check


def record(name: str, value: object) -> object:
    """Accept a NamedTuple, the class itself and not one of its instances."""
    if not (inspect.isclass(value) and issubclass(value, tuple) and hasattr(value, "_fields")):
        raise TypeError(f"{name} must be a NamedTuple, the class itself, got {show(value)}")
    return value


def instance(*types: type, hint: str = "") -> Kind:
    """Make the kind of objects of the given ``types``; ``hint`` says how to get one."""
    names = " or ".join(kind.__name__ for kind in types)

    def check(name: str, value: object) -> object:
        if not isinstance(value, types) or inspect.isclass(value):  # a class may look like its own instances
            advice = f"; {hint}" if hint else ""
            raise TypeError(f"{name} must be a {names}, got {show(value)}{advice}")
        return value

    return check


def function(name: str, value: object) -> object:
    """Accept anything that can be called, but no class."""
    if not callable(value) or inspect.isclass(value):
        raise TypeError(f"{name} must be a function, got {show(value)}")
    return value


def taking(count: int) -> Kind:
    """Make the kind of functions that can be called with ``count`` arguments, by position."""

    def check(name: str, value: object) -> object:
        function(name, value)
        try:
            signature = inspect.signature(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):  # some functions written in C do not tell
            return value
        try:
            signature.bind(*range(count))
        except TypeError:
            few = f"{count} argument{'s' if count > 1 else ''}"
            raise TypeError(f"{name} must be a function of {few}, got {show(value)}{signature}") from None
        return value

    return check


def optional(kind: Kind) -> Kind:
    """Make a kind that allows None as well."""
    return lambda name, value: None if value is None else kind(name, value)


def either(*kinds: Kind) -> Kind:
    """Make the kind of values that one of ``kinds`` accepts; if none does, one message says what they ask for."""

    def check(name: str, value: object) -> object:
        problems = []
        for kind in kinds:
            try:
                return kind(name, value)
            except (TypeError, ValueError) as problem:
                problems.append(str(problem))
        # of a sequence the entry that is wrong; else "u must be A, got C" and "u must be B, got C" in one sentence
        for said in problems:
            if said.startswith(f"{name}["):
                raise ValueError(said)
        wanted = [said.partition(", got ")[0].removeprefix(f"{name} must be ") for said in problems]
        joined = " or ".join(dict.fromkeys(one.removeprefix(f"{name} must ") for one in wanted))
        raise ValueError(f"{name} must be {joined}, got {show(value)}")

    return check


def prng_key(name: str, value: object, *, axes: int = 0) -> object:
    """Accept one typed PRNG key, or an array of them with so many ``axes`` at most."""
    typed = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    if not typed or value.ndim > axes or value.size == 0:  # type: ignore[attr-defined]
        wanted = "one PRNG key or an array (s,) of keys" if axes else "a single PRNG key"
        raise (ValueError if axes else TypeError)(
            f"{name} must be {wanted} such as jax.random.key(0), got {show(value)}"
        )
    return value


prng_keys = functools.partial(prng_key, axes=1)


def path(name: str, value: object) -> pathlib.Path:
    """Accept the path of a file or directory; returns it as a ``pathlib.Path``."""
    if not isinstance(value, str | os.PathLike) or str(value) == "" or "\0" in str(value):
        raise TypeError(f"{name} must be a path, got {show(value)}")
    return pathlib.Path(value)


def flag(name: str, value: object) -> object:
    """Accept True and False."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {show(value)}")
    return bool(value)


_OF_CLASS: dict[type, Kind] = {bool: flag, str: text}


def declare(cls: type, kind: Kind) -> Kind:
    """Make ``kind`` that of arguments annotated with ``cls``, which is ``instance(cls)`` otherwise; return it."""
    _OF_CLASS[cls] = kind
    return kind


def kind_of(hint: object) -> Kind:
    """Return the kind that an annotation stands for.

    ``Annotated[T, kind]`` is that kind and ``T | None`` an optional T; other unions are kinds of which one must fit.
    ``bool`` and ``str`` are what they say, and so are ``Callable[[A, B], T]``, ``Sequence[T]``, ``tuple[T, ...]`` and
    ``Mapping[str, T]``. ``Float[ArrayLike, "n d"]`` is an array of two axes, one with dims ``""`` a number. Another
    class has the kind that was declared for it, or means its instances.

    >>> from jaxtyping import ArrayLike, Float
    >>> kind_of(Float[ArrayLike, "n d"])("x", [1.0, 2.0])
    Traceback (most recent call last):
    ValueError: x must have 2 axes, got shape (2,)
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return inner[1]
    if origin in (typing.Union, types.UnionType):
        return _kind_of_union(inner)
    if origin is Callable:
        return function if inner[0] is Ellipsis else taking(len(inner[0]))
    if origin is Sequence or (origin is tuple and inner[1:] == (Ellipsis,)):
        return sequence(kind_of(inner[0]))
    if origin is Mapping:
        return mapping(kind_of(inner[1]))
    if inspect.isclass(hint) and issubclass(hint, AbstractArray):
        return _kind_of_dims(hint.dim_str)
    if inspect.isclass(hint) and origin is None and hint not in _SAY_TOO_LITTLE:
        return _OF_CLASS.get(hint) or instance(hint)
    raise TypeError(f"{hint} does not say what is allowed: write Annotated[..., kind]")


def _kind_of_union(members: tuple[object, ...]) -> Kind:
    """Return the kind of values that fit one of the members; arrays of one shape are written as several of them."""
    given = [one for one in members if one is not types.NoneType]
    dims = {one.dim_str for one in given if inspect.isclass(one) and issubclass(one, AbstractArray)}
    others = given
    if dims:  # an ArrayLike may be a plain number too
        others = [one for one in given if not (inspect.isclass(one) and issubclass(one, _PARTS_OF_ARRAYS))]
    kinds = [_kind_of_dims(one) for one in dims] + [kind_of(one) for one in others]
    kind = kinds[0] if len(kinds) == 1 else either(*kinds)
    return kind if len(given) == len(members) else optional(kind)


_SAY_TOO_LITTLE = (
    int,
    float,
    complex,
    object,
    Any,
    jax.Array,
    np.ndarray,
)  # numbers and arrays have bounds and shapes
_PARTS_OF_ARRAYS = (AbstractArray, bool, int, float, complex, np.generic)


def _kind_of_dims(dims: str) -> Kind:
    """Return the kind of arrays with dims in the notation of jaxtyping, such as ``"n d"`` or ``"*batch d"``."""
    axes = dims.split()
    if not axes:
        return number()
    fixed = [axis for axis in axes if axis != "..." and "*" not in axis]
    if len(fixed) < len(axes):
        return array(rank=len(fixed))
    return array(tuple(int(axis) if axis.isdigit() else None for axis in fixed))


class _Written(str):
    """An annotation as it is written, which ``help`` shows without quotes."""

    __repr__ = str.__str__


def _kinds(function: Callable[..., object], owners: Sequence[object]) -> dict[str, Kind]:
    """Return the kinds of the arguments of a function, by name.

    Args:
        function: the function.
        owners: what has the annotations: the function itself, or the classes whose fields it sets.
    """
    parameters = inspect.signature(function).parameters
    hints: dict[str, object] = {}
    for owner in owners:
        scope = owner.__globals__ if inspect.isfunction(owner) else vars(sys.modules[owner.__module__])
        written = inspect.get_annotations(owner)  # type: ignore[arg-type]
        hints |= {
            name: eval(hint, scope) if isinstance(hint, str) else hint
            for name, hint in written.items()
            if name in parameters
        }
    kinds: dict[str, Kind] = {}
    for place, name in enumerate(parameters):
        if name not in hints and place == 0 and name in ("self", "cls"):
            continue
        try:
            if (
                typing.get_origin(hints[name]) is typing.Unpack
            ):  # **options: a TypedDict has their names and types
                options = typing.get_type_hints(typing.get_args(hints[name])[0], include_extras=True)
                kinds |= {option: kind_of(hint) for option, hint in options.items()}
                kinds[name] = unchecked("each option has a kind of its own")
            else:
                kinds[name] = kind_of(hints[name])
        except (KeyError, TypeError) as problem:
            raise TypeError(f"{function.__qualname__} must annotate {name} by its kind: {problem}") from None
    return kinds


Checked = TypeVar("Checked", bound=Callable[..., Any])


def checked(target: Checked) -> Checked:
    """Check the arguments of a public function by the kinds in its annotations; see the text of this module.

    Arguments that are left out are not checked: a default is the function's own business. Above a class, the arguments
    of the constructor that its fields make are checked.

    >>> @checked
    ... def double(width: Count):
    ...     return 2 * width
    >>> double(3)
    6
    >>> double(width=0)
    Traceback (most recent call last):
    ValueError: width must be an integer >= 1, got 0
    """
    if inspect.isclass(target):
        target.__init__ = _check_calls(target.__init__, target.__mro__[::-1])  # type: ignore[method-assign]
        return target
    return _check_calls(target, [inspect.unwrap(target)])


def _check_calls(function: Callable[..., Any], owners: Sequence[object]) -> Any:
    plain: Any = inspect.unwrap(function)
    plain.__annotations__ = {
        name: _Written(hint) if isinstance(hint, str) else hint
        for name, hint in plain.__annotations__.items()
    }
    names = tuple(inspect.signature(function).parameters)
    # annotations may name what is defined further down: they are read when the function is first called
    kinds = functools.cache(lambda: _kinds(function, owners))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        known = kinds()
        # no Signature.bind here: it alone takes longer than a small compiled program
        passed = list(args)  # one too many is left: the call below says so in Python's own words
        for place, name in enumerate(names[: len(args)]):
            if name in known:
                passed[place] = known[name](name, args[place])
        for name in kwargs:
            if name in known:
                kwargs[name] = known[name](name, kwargs[name])
        return function(*passed, **kwargs)

    call.kinds = kinds  # type: ignore[attr-defined]  # sweeps check whole axes by them, tests draw bad values from them
    return call


# Kinds that recur, by name. A name never includes None: an argument that may be left out says so itself, Count | None.
Count = Annotated[int, count(1)]  # a number of things, at least one
Natural = Annotated[int, count(0)]  # a number of things, perhaps none
Number = Annotated[float | jax.Array, number()]  # a finite number
Rate = Annotated[float | jax.Array, number(low=0)]  # a number >= 0
Positive = Annotated[float | jax.Array, number(above=0)]  # a number > 0
Length = Annotated[
    float, number(above=0, static=True)
]  # a number > 0 that is known when programs are compiled
PRNGKey = Annotated[jax.Array, prng_key]  # one key, such as jax.random.key(0)
FilePath = Annotated[str | pathlib.Path, path]  # a file or folder
