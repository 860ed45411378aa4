"""One property of one value, such as being finite: plain functions that raise ValueError with the name of the argument.

Kinds of arguments (``meanflow._boundary``) are made of them, and constructors use them. Values that are being traced
(inside jit, grad or vmap) cannot be looked at; whatever needs them is skipped then.
"""

import inspect
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np


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


def unmasked(name: str, value: object) -> None:
    """Refuse masked arrays, and sequences of them."""
    parts = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(part, np.ma.MaskedArray) for part in parts):
        raise ValueError(
            f"{name} must not be masked: what is hidden would be taken for a number, got {show(value)}"
        )


def numeric(name: str, value: object) -> None:
    """Refuse what is not a real number or an array of real numbers; the type is known even while it is traced."""
    unmasked(name, value)
    try:
        array = concrete(value)
        dtype = (
            value.dtype if isinstance(value, jax.Array) else np.dtype(float) if array is None else array.dtype
        )
    except (
        TypeError,
        ValueError,
        RecursionError,
    ):  # ragged lists, lists that hold themselves, PRNG keys, objects that numpy cannot read
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


def bounds(
    name: str,
    value: object,
    *,
    above: float | None = None,
    low: float | None = None,
    below: float | None = None,
    high: float | None = None,
) -> None:
    """Refuse NaN and entries out of bounds, of which ``above`` and ``below`` are open, ``low`` and ``high`` closed."""
    array = concrete(value)
    if array is None:
        return
    numeric(name, value)
    wanted = ((">", np.greater, above), (">=", np.greater_equal, low), ("<", np.less, below))
    for sign, holds, bound in (*wanted, ("<=", np.less_equal, high)):
        # NaN compares false with every bound
        if bound is not None and not np.all(good := holds(array, bound)):
            raise ValueError(f"{name} must be {sign} {bound}, got {array[~good].flat[0]}")
    if np.any(np.isnan(array)):
        raise ValueError(f"{name} must not be NaN, got {show(value)}")


def one_of(name: str, value: object, allowed: Iterable[object]) -> None:
    """Refuse a name that is not in ``allowed``."""
    options = list(allowed)
    # an array would answer the comparison with an array, and the truth of that is an error of its own
    if not isinstance(value, str | int | float | None) or value not in options:
        raise ValueError(f"{name} must be one of {options}, got {show(value)}")


def shape(name: str, value: object, *allowed: tuple[int | None, ...]) -> None:
    """Refuse any shape but those ``allowed`` (None stands for any length)."""
    given = np.shape(value)  # type: ignore[call-overload]
    for wanted in allowed:
        # plain loops, since small calls check shapes
        fits = len(wanted) == len(given)
        for length, other in zip(given, wanted, strict=False):
            fits = fits and other in (None, length)
        if fits:
            return
    # shapes of which nothing is fixed are told by their number of axes
    free = [str(len(wanted)) for wanted in allowed if wanted and set(wanted) == {None}]
    fixed = [str(wanted).replace("None", "any length") for wanted in allowed if set(wanted) - {None}]
    said = ["be a single number"] if () in allowed else []
    said += [f"have {' or '.join(free)} {'axis' if free == ['1'] else 'axes'}"] if free else []
    said += [f"have shape {' or '.join(fixed)}"] if fixed else []
    raise ValueError(f"{name} must {' or '.join(said)}, got shape {given}")


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
