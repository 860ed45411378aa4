"""Moments up to order 4 of a layer's outputs, and bootstrap intervals for any statistic of two samples."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meanflow import _checks
from meanflow._numerics import safe_divide, safe_sqrt


class Moments(NamedTuple):
    """Mean, variance, skewness and excess kurtosis, one entry a feature: (d,) for x (N, d)."""

    mean: jax.Array
    variance: jax.Array
    skewness: jax.Array
    kurtosis: jax.Array


def moments(x: jax.Array, axis: int | tuple[int, ...] = 0) -> Moments:
    """Population moments over ``axis``: E x, s^2 = E c^2, E c^3 / s^3, E c^4 / s^4 - 3, where c = x - E x.

    Shape measures of a constant feature are 0. Pure JAX.

    >>> print(moments(jnp.array([-1.0, 1.0])).kurtosis)
    -2.0
    """
    mean = jnp.mean(x, axis=axis, keepdims=True)
    centred = x - mean
    variance = jnp.mean(jnp.square(centred), axis=axis, keepdims=True)
    varies = variance > 0
    standard = safe_divide(centred, safe_sqrt(variance))
    skewness = jnp.mean(standard**3, axis=axis)
    kurtosis = jnp.where(varies.reshape(skewness.shape), jnp.mean(standard**4, axis=axis) - 3, 0)
    return Moments(mean.reshape(skewness.shape), variance.reshape(skewness.shape), skewness, kurtosis)


class Interval(NamedTuple):
    """A statistic with its bootstrap standard error and percentile interval."""

    value: float
    standard_error: float
    low: float
    high: float


def bootstrap(
    statistic: Callable[[Any, Any], Any],
    x: Any,
    y: Any,
    *,
    key: jax.Array,
    repeats: int = 200,
    level: float = 0.95,
    paired: bool = True,
    compiled: bool = False,
) -> Interval:
    """Bootstrap uncertainty of a scalar statistic of two samples.

    Distances between samples are biased upwards, and the resampled ones more so: read the standard error
    as the size of the noise and use ``sandwich`` for bounds.

    Args:
        statistic: (x, y) -> scalar.
        x: samples (N, ...).
        y: samples (M, ...).
        key: PRNG key.
        repeats: resamples.
        level: coverage of the percentile interval.
        paired: draw the same rows of both (the same inputs through two networks); needs N = M.
        compiled: the statistic is pure JAX: all resamples run in one vmapped program. Otherwise a host loop.

    >>> x = jnp.arange(10.0)
    >>> out = bootstrap(lambda x, y: jnp.mean(y - x), x, x + 2, key=jax.random.key(0))
    >>> print(out.value, out.standard_error)
    2.0 0.0
    """
    _checks.whole("repeats", repeats, 2)
    if not 0 < level < 1:
        raise ValueError(f"level must lie in (0, 1), got {level}")
    x, y = jnp.asarray(x), jnp.asarray(y)
    if paired and x.shape[0] != y.shape[0]:
        raise ValueError(
            f"paired resampling needs x and y of equal length, got {x.shape[0]} and {y.shape[0]}"
        )

    def rows(key: jax.Array, size: int) -> jax.Array:
        drawn = jax.random.randint(key, (repeats, size), 0, size)
        return jnp.concatenate([jnp.arange(size, dtype=drawn.dtype)[None], drawn])  # first the sample itself

    key_x, key_y = jax.random.split(key)
    rows_x = rows(key_x, x.shape[0])
    rows_y = rows_x if paired else rows(key_y, y.shape[0])
    if compiled:
        values = np.asarray(jax.jit(jax.vmap(lambda i, j: statistic(x[i], y[j])))(rows_x, rows_y))
    else:
        host_x, host_y = np.asarray(x), np.asarray(y)
        pairs = zip(np.asarray(rows_x), np.asarray(rows_y), strict=True)
        values = np.array([float(statistic(host_x[i], host_y[j])) for i, j in pairs])
    draws = values[1:]
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(values[0]), float(draws.std(ddof=1)), float(low), float(high))
