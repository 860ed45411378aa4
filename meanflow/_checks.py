"""The boundary of the package: what public functions accept, checked once, before anything is compiled.

A public function declares the *kind* of each argument,

    @arguments(width=count(1), key=KEY, scale=optional(number(above=0)))
    def draw(key, width, scale=None): ...

and the decorator checks every argument that is given and hands the function what the kind returns (an ``int`` for a
count, an array for an array). Every message names the argument, what was given and what is allowed. Rooms that define
a type also define the kind of arguments of that type (``instance(Cloud, ...)``), so that a new function gets its
checks by naming kinds. Values that are being traced (inside jit, grad or vmap) cannot be looked at; whatever needs
them is skipped then.

The plain functions below (``finite``, ``shape``, ...) check one property of one value. Kinds are made of them; classes
use them in their constructors.
"""

import functools
import inspect
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Kind = Callable[
    [str, object], object
]  # (name of the argument, value) -> value to pass on; raises if it is refused


# One property of one value.


def concrete(value: object) -> np.ndarray | None:
    """Return the value as a numpy array, or None while it is being traced."""
    try:
        return np.asarray(value)
    except jax.errors.TracerArrayConversionError:
        return None


def is_real(dtype: np.dtype) -> bool:
    """Say whether numbers of this type are real: booleans, integers and floats of any width, but not complex."""
    number = jax.dtypes.issubdtype(dtype, np.bool_) or jax.dtypes.issubdtype(dtype, np.number)
    return bool(number and not jax.dtypes.issubdtype(dtype, np.complexfloating))


def show(value: object) -> str:
    """Describe a given value in at most one line: arrays by type and shape, long texts cut."""
    if isinstance(value, np.ndarray | jax.Array):
        return f"an array of type {value.dtype} and shape {value.shape}"
    if inspect.isfunction(value) or inspect.isclass(value):
        return f"the {'function' if inspect.isfunction(value) else 'class'} {value.__name__}"
    try:
        text = repr(value)
    except Exception:  # an object whose own description fails is still to be refused by name
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def numeric(name: str, value: object) -> None:
    """Refuse what is not a real number or an array of real numbers; the type is known even while it is traced."""
    try:
        array = concrete(value)
        dtype = (
            value.dtype if isinstance(value, jax.Array) else np.dtype(float) if array is None else array.dtype
        )
    except (TypeError, ValueError):  # ragged lists, PRNG keys, objects that numpy cannot read
        dtype = np.dtype(object)
    if not is_real(dtype):
        raise ValueError(f"{name} must be a number or an array of real numbers, got {show(value)}")


def finite(name: str, value: object) -> None:
    """Refuse NaN and infinity."""
    array = concrete(value)
    if array is None:
        return
    numeric(name, value)
    if not np.all(np.isfinite(array)):
        bad = int(np.size(array) - np.count_nonzero(np.isfinite(array)))
        raise ValueError(f"{name} must be finite, got {bad} NaN or infinite entries out of {array.size}")


def at_least(name: str, value: object, low: float, *, strict: bool = False) -> None:
    """Refuse entries below ``low`` (or equal to it, if ``strict``) and NaN."""
    array = concrete(value)
    if array is None:
        return
    numeric(name, value)
    good = array > low if strict else array >= low
    if low == -np.inf and not strict and not np.all(good):
        raise ValueError(f"{name} must not be NaN, got {show(value)}")
    if not np.all(good):
        raise ValueError(f"{name} must be {'>' if strict else '>='} {low}, got {array[~good].flat[0]}")


def at_most(name: str, value: object, high: float, *, strict: bool = False) -> None:
    """Refuse entries above ``high`` (or equal to it, if ``strict``) and NaN."""
    array = concrete(value)
    if array is None:
        return
    numeric(name, value)
    good = array < high if strict else array <= high
    if not np.all(good):
        raise ValueError(f"{name} must be {'<' if strict else '<='} {high}, got {array[~good].flat[0]}")


def increasing(name: str, value: object) -> None:
    """Refuse sequences (k,) that do not increase strictly."""
    array = concrete(value)
    if array is not None and np.any(np.diff(array) <= 0):
        raise ValueError(f"{name} must increase strictly, got {show(array.tolist())}")


def one_of(name: str, value: object, allowed: Iterable[object]) -> None:
    """Refuse a name that is not in ``allowed``."""
    options = list(allowed)
    # an array would answer the comparison with an array, and the truth of that is an error of its own
    if not isinstance(value, str | int | float | None) or value not in options:
        raise ValueError(f"{name} must be one of {options}, got {show(value)}")


def shape(name: str, value: object, *allowed: tuple[int | None, ...]) -> None:
    """Refuse any shape but those ``allowed`` (None stands for any length)."""
    given = np.shape(value)  # type: ignore[call-overload]
    if not any(_fits(given, wanted) for wanted in allowed):
        listed = " or ".join(str(wanted).replace("None", "any") for wanted in allowed)
        raise ValueError(f"{name} must have shape {listed}, got {given}")


def whole(name: str, value: object, low: int, high: int | None = None) -> int:
    """Refuse anything but an integer >= ``low`` (and at most ``high``); return it as an int."""
    integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not integer or value < low or (high is not None and value > high):  # type: ignore[operator]
        most = "" if high is None or not integer or value < low else f" and <= {high}"  # type: ignore[operator]
        raise ValueError(f"{name} must be an integer >= {low}{most}, got {show(value)}")
    return int(value)  # type: ignore[call-overload]


def floating(value: object) -> jax.Array:
    """Return the value as an array of floats; float32 and float64 are kept as they are.

    Raises:
        ValueError: for complex numbers, whose imaginary parts would be lost.
    """
    array = jnp.asarray(value)
    if jnp.issubdtype(array.dtype, jnp.floating):
        return array
    if not is_real(array.dtype):
        raise ValueError(f"values must be real numbers, got {show(array)}")
    return array.astype(jnp.result_type(float))


# Kinds of arguments.


def anything(name: str, value: object) -> object:
    """Accept every value: the function itself says what it does with it (a pytree of the user's, for instance)."""
    return value


def unchecked(reason: str) -> Kind:
    """Make a kind that accepts every value, for the ``reason`` given: who checks it instead, or why nobody can."""

    def check(name: str, value: object) -> object:
        return value

    check.reason = reason  # type: ignore[attr-defined]  # read by the tests
    return check


MOST = 2**31 - 1  # the largest count: more could be neither stored nor counted by 32-bit integers


def count(low: int, high: int = MOST) -> Kind:
    """Make the kind of integers from ``low`` to ``high``."""
    return lambda name, value: whole(name, value, low, high)


def number(
    *,
    above: float | None = None,
    low: float | None = None,
    below: float | None = None,
    high: float | None = None,
    infinite: bool = False,
    static: bool = False,
) -> Kind:
    """Make the kind of single real numbers between bounds; may be traced unless ``static``.

    Args:
        above: open lower bound, or None.
        low: closed lower bound, or None.
        below: open upper bound, or None.
        high: closed upper bound, or None.
        infinite: whether plus and minus infinity are allowed. NaN never is.
        static: whether the number decides what is compiled; it is returned as a Python number then.
    """

    def check(name: str, value: object) -> object:
        # the usual case, without a way through numpy: a call of a small program takes microseconds
        if isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value):
            within = (above is None or value > above) and (low is None or value >= low)
            if within and (below is None or value < below) and (high is None or value <= high):
                return value
        if value is None or isinstance(value, str | bool | Sequence | dict):
            raise ValueError(f"{name} must be a number, got {show(value)}")
        numeric(name, value)
        shape(name, value, ())
        if not infinite:
            finite(name, value)
        if above is not None:
            at_least(name, value, above, strict=True)
        at_least(name, value, -np.inf if low is None else low)  # refuses NaN in any case
        if below is not None:
            at_most(name, value, below, strict=True)
        if high is not None:
            at_most(name, value, high)
        if not static:
            return value
        known = concrete(value)
        if known is None:
            raise TypeError(f"{name} must be known when the program is compiled, got a traced value")
        return known.item()

    return check


def choice(*allowed: str) -> Kind:
    """Make the kind of names among ``allowed``."""

    def check(name: str, value: object) -> object:
        one_of(name, value, allowed)
        return value

    return check


def array(
    *shapes: tuple[int | None, ...],
    infinite: bool = False,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    least: int = 1,
    rank: int = 0,
) -> Callable[[str, object], jax.Array]:
    """Make the kind of real arrays of one of the given ``shapes`` (None: any length); returns floats.

    Args:
        shapes: allowed shapes; without any, every shape is allowed.
        infinite: whether infinite entries are allowed. NaN never is.
        low: least allowed entry, or None.
        above: open lower bound of the entries, or None.
        high: largest allowed entry, or None.
        least: least length of the first axis; 0 allows empty arrays.
        rank: least number of axes.
    """

    def check(name: str, value: object) -> jax.Array:
        _readable(name, value)
        known = concrete(value)
        # all is looked at on the host first: the conversion of integers is compiled
        _check_shape(name, np.shape(value if known is None else known), shapes, least, rank)  # type: ignore[call-overload]
        if known is not None:
            if not infinite:
                finite(name, known)
            at_least(name, known, -np.inf if low is None else low)
            if above is not None:
                at_least(name, known, above, strict=True)
            if high is not None:
                at_most(name, known, high)
        converted = floating(value)
        if known is not None and not infinite and converted.dtype.itemsize < known.dtype.itemsize:
            finite(name, converted)  # too large for the working precision
        return converted

    return check


def host_array(
    *shapes: tuple[int | None, ...], nan: bool = False, least: int = 0, rank: int = 0
) -> Callable[[str, object], np.ndarray]:
    """Make the kind of real arrays that are used on the host; returns a numpy array in the precision given.

    Args:
        shapes: allowed shapes; without any, every shape is allowed.
        nan: whether NaN and infinite entries are allowed, as in plots, where they leave gaps.
        least: least length of the first axis.
        rank: least number of axes.
    """

    def check(name: str, value: object) -> np.ndarray:
        _readable(name, value)
        known = concrete(value)
        if known is None:
            raise TypeError(f"{name} must be known: it is used on the host, got a traced value")
        _check_shape(name, known.shape, shapes, least, rank)
        if not nan:
            finite(name, known)
        return known

    return check


def _readable(name: str, value: object) -> None:
    """Refuse what cannot be read as an array of real numbers."""
    if value is None or isinstance(value, str | dict):
        raise ValueError(f"{name} must be an array, got {show(value)}")
    try:
        numeric(name, value)
        np.shape(value)  # type: ignore[call-overload]
    except (TypeError, ValueError) as problem:
        raise ValueError(f"{name} must be an array of real numbers, got {show(value)}") from problem


def _check_shape(
    name: str, given: tuple[int, ...], shapes: tuple[tuple[int | None, ...], ...], least: int, rank: int
) -> None:
    if shapes and not any(_fits(given, wanted) for wanted in shapes):
        listed = " or ".join(str(wanted).replace("None", "any") for wanted in shapes)
        raise ValueError(f"{name} must have shape {listed}, got {given}")
    if len(given) < rank:
        raise ValueError(f"{name} must have at least {rank} axes, got shape {given}")
    if least and 0 in given:
        raise ValueError(f"{name} must not be empty, got shape {given}")
    if least > 1 and (not given or given[0] < least):
        raise ValueError(f"{name} must hold at least {least} entries along its first axis, got shape {given}")


def times(name: str, value: object) -> jax.Array:
    """Accept finite numbers (k,), k >= 1, that increase strictly."""
    converted = array((None,), least=1)(name, value)
    increasing(name, converted)
    return converted


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
        entries: list[object]
        try:
            if isinstance(value, jax.Array | np.ndarray):
                shape(name, value, (None,))
                entries = np.asarray(value).tolist()
            else:
                entries = list(value)
        except TypeError as problem:  # arrays that are traced or hold keys, iterators that fail
            raise ValueError(f"{name} must be a sequence of known values, got {show(value)}") from problem
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


def subclass(parent: type, *, hint: str = "") -> Kind:
    """Make the kind of classes below ``parent``, the class itself and not one of its instances."""

    def check(name: str, value: object) -> object:
        if not (inspect.isclass(value) and issubclass(value, parent)):
            advice = f"; {hint}" if hint else ""
            raise TypeError(f"{name} must be a subclass of {parent.__name__}, got {show(value)}{advice}")
        return value

    return check


def _fits(given: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(given) == len(wanted) and all(w is None or g == w for g, w in zip(given, wanted, strict=True))


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


def optional(kind: Kind) -> Kind:
    """Make a kind that allows None as well."""
    return lambda name, value: None if value is None else kind(name, value)


def either(*kinds: Kind) -> Kind:
    """Make the kind of values that one of ``kinds`` accepts; if none does, the messages of all are joined."""

    def check(name: str, value: object) -> object:
        problems = []
        for kind in kinds:
            try:
                return kind(name, value)
            except (TypeError, ValueError) as problem:
                problems.append(str(problem))
        raise ValueError(f"{name} must be one of several kinds, and is none of them: {'; '.join(problems)}")

    return check


def prng_key(name: str, value: object) -> object:
    """Accept one typed PRNG key."""
    single = isinstance(value, jax.Array) and value.shape == ()
    if not single or not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):  # type: ignore[attr-defined]
        raise TypeError(f"{name} must be a single PRNG key such as jax.random.key(0), got {show(value)}")
    return value


def path(name: str, value: object) -> pathlib.Path:
    """Accept the path of a file or directory; returns it as a ``pathlib.Path``."""
    if not isinstance(value, str | os.PathLike) or str(value) == "":
        raise TypeError(f"{name} must be a path, got {show(value)}")
    return pathlib.Path(value)


def flag(name: str, value: object) -> object:
    """Accept True and False."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {show(value)}")
    return bool(value)


def arguments(**kinds: Kind) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Check the arguments of a public function by their declared kinds; see the text of this module.

    Arguments that are left out are not checked: a default is the function's own business.

    >>> @arguments(width=count(1))
    ... def double(width):
    ...     return 2 * width
    >>> double(3)
    6
    >>> double(width=0)
    Traceback (most recent call last):
    ValueError: width must be an integer >= 1, got 0
    """

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        parameters = inspect.signature(function).parameters
        names = tuple(parameters)
        unknown = set(kinds) - set(names)
        # a function with **options may declare the kinds of the options too
        if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            raise TypeError(f"{function.__qualname__} has no arguments {sorted(unknown)}")

        @functools.wraps(function)
        def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            # no Signature.bind here: it alone takes longer than a small compiled program
            passed = [
                kinds[name](name, value) if name in kinds else value
                for name, value in zip(names, args, strict=False)
            ]
            passed += args[len(passed) :]  # one too many: the call below says so in Python's own words
            named = {
                name: kinds[name](name, value) if name in kinds else value for name, value in kwargs.items()
            }
            return function(*passed, **named)  # type: ignore[arg-type]

        checked.kinds = kinds  # type: ignore[attr-defined]  # read by the tests, which draw bad values from them
        return checked

    return decorate
