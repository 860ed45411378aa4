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
from collections.abc import Callable, Iterable, Sequence
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
    """Refuse what is not a real number or an array of real numbers."""
    array = concrete(value)
    if array is None:
        return
    real = array.dtype == bool or jax.dtypes.issubdtype(array.dtype, np.number)
    if not real or np.iscomplexobj(array):
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
    if not np.all(good):
        raise ValueError(f"{name} must be {'>' if strict else '>='} {low}, got {array[~good].flat[0]}")


def one_of(name: str, value: object, allowed: Iterable[object]) -> None:
    """Refuse a name that is not in ``allowed``."""
    options = list(allowed)
    # an array would answer the comparison with an array, and the truth of that is an error of its own
    if not isinstance(value, str | int | float | None) or value not in options:
        raise ValueError(f"{name} must be one of {options}, got {show(value)}")


def shape(name: str, value: object, expected: tuple[int | None, ...]) -> None:
    """Refuse any shape but ``expected`` (None stands for any length)."""
    given = np.shape(value)  # type: ignore[call-overload]
    if len(given) != len(expected) or any(
        e is not None and g != e for g, e in zip(given, expected, strict=True)
    ):
        wanted = "(" + ", ".join("any" if e is None else str(e) for e in expected) + ")"
        raise ValueError(f"{name} must have shape {wanted}, got {given}")


def whole(name: str, value: object, low: int) -> int:
    """Refuse anything but an integer >= ``low``; return it as an int."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < low:
        raise ValueError(f"{name} must be an integer >= {low}, got {show(value)}")
    return int(value)


def floating(value: object) -> jax.Array:
    """Return the value as an array of floats; float32 and float64 are kept as they are."""
    array = jnp.asarray(value)
    return array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(jnp.result_type(float))


# Kinds of arguments.


def anything(name: str, value: object) -> object:
    """Accept every value: the function itself says what it does with it (a pytree of the user's, for instance)."""
    return value


def count(low: int) -> Kind:
    """Make the kind of integers >= ``low``."""
    return lambda name, value: whole(name, value, low)


def number(*, above: float | None = None, low: float | None = None, infinite: bool = False) -> Kind:
    """Make the kind of single real numbers, greater than ``above`` or at least ``low``; may be traced.

    Args:
        above: open lower bound, or None.
        low: closed lower bound, or None.
        infinite: whether plus and minus infinity are allowed. NaN never is.
    """

    def check(name: str, value: object) -> object:
        # the usual case, without a way through numpy: a call of a small program takes microseconds
        if isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value):
            within = (above is None or value > above) and (low is None or value >= low)
            if within:
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
        return value

    return check


def choice(*allowed: str) -> Kind:
    """Make the kind of names among ``allowed``."""

    def check(name: str, value: object) -> object:
        one_of(name, value, allowed)
        return value

    return check


def array(
    *shapes: tuple[int | None, ...], infinite: bool = False, low: float | None = None
) -> Callable[[str, object], jax.Array]:
    """Make the kind of real arrays of one of the given ``shapes`` (None: any length); returns floats.

    Args:
        shapes: allowed shapes; without any, every shape is allowed.
        infinite: whether infinite entries are allowed. NaN never is.
        low: least allowed entry, or None.
    """

    def check(name: str, value: object) -> jax.Array:
        if value is None or isinstance(value, str | dict):
            raise ValueError(f"{name} must be an array, got {show(value)}")
        try:
            numeric(name, value)
            converted = floating(value)
        except (TypeError, ValueError) as problem:
            raise ValueError(f"{name} must be an array of real numbers, got {show(value)}") from problem
        if shapes and not any(_fits(converted.shape, wanted) for wanted in shapes):
            listed = " or ".join(str(wanted).replace("None", "any") for wanted in shapes)
            raise ValueError(f"{name} must have shape {listed}, got {converted.shape}")
        if not infinite:
            finite(name, converted)
        at_least(name, converted, -np.inf if low is None else low)
        return converted

    return check


def _fits(given: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(given) == len(wanted) and all(w is None or g == w for g, w in zip(given, wanted, strict=True))


def instance(*types: type, hint: str = "") -> Kind:
    """Make the kind of objects of the given ``types``; ``hint`` says how to get one."""
    names = " or ".join(kind.__name__ for kind in types)

    def check(name: str, value: object) -> object:
        if not isinstance(value, types):
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
        names = tuple(inspect.signature(function).parameters)
        unknown = set(kinds) - set(names)
        if unknown:
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
