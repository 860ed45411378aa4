"""Argument checks: each raises ValueError before anything is compiled.

Every message names the argument, what was given and what is allowed. Values that are being traced
(inside jit, grad or vmap) cannot be looked at and pass unchecked.
"""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np


def concrete(value: Any) -> np.ndarray | None:
    """The value as a numpy array, or None while it is being traced."""
    try:
        return np.asarray(value)
    except jax.errors.TracerArrayConversionError:
        return None


def numeric(name: str, value: Any) -> None:
    """Refuses what is not a number or an array of numbers."""
    array = concrete(value)
    if array is not None and not (array.dtype == bool or jax.dtypes.issubdtype(array.dtype, np.number)):
        raise ValueError(f"{name} must be a number, got {value!r}")


def finite(name: str, value: Any) -> None:
    """Refuses NaN and infinity."""
    array = concrete(value)
    if array is None:
        return
    numeric(name, value)
    if not np.all(np.isfinite(array)):
        bad = int(np.size(array) - np.count_nonzero(np.isfinite(array)))
        raise ValueError(f"{name} must be finite, got {bad} NaN or infinite entries out of {array.size}")


def at_least(name: str, value: Any, low: float, *, strict: bool = False) -> None:
    """Refuses entries below ``low`` (or equal to it, if strict) and NaN."""
    array = concrete(value)
    if array is None:
        return
    numeric(name, value)
    good = array > low if strict else array >= low
    if not np.all(good):
        raise ValueError(f"{name} must be {'>' if strict else '>='} {low}, got {array[~good].flat[0]}")


def one_of(name: str, value: Any, allowed: Iterable[Any]) -> None:
    """Refuses a name that is not in ``allowed``."""
    options = list(allowed)
    if value not in options:
        raise ValueError(f"{name} must be one of {options}, got {value!r}")


def shape(name: str, value: Any, expected: tuple[int | None, ...]) -> None:
    """Refuses any shape but ``expected`` (None stands for any length)."""
    given = np.shape(value)
    if len(given) != len(expected) or any(
        e is not None and g != e for g, e in zip(given, expected, strict=True)
    ):
        wanted = "(" + ", ".join("any" if e is None else str(e) for e in expected) + ")"
        raise ValueError(f"{name} must have shape {wanted}, got {given}")


def whole(name: str, value: Any, low: int) -> int:
    """Refuses anything but an integer >= ``low``; returns it as int."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"{name} must be an integer >= {low}, got {value!r}")
    if value < low:
        raise ValueError(f"{name} must be an integer >= {low}, got {value}")
    return int(value)
