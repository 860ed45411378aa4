"""Moments up to order 4 of the outputs of a layer, and bootstrap intervals for any statistic of two samples."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Key, Shaped

from meanflow import _checks
from meanflow._numerics import safe_divide, safe_sqrt


class FeatureMoments(NamedTuple):
    """Mean, variance, skewness and excess kurtosis, one entry a feature."""

    mean: Float[Array, "*features"]
    variance: Float[Array, "*features"]
    skewness: Float[Array, "*features"]
    kurtosis: Float[Array, "*features"]


def moments(x: Float[ArrayLike, "..."], axis: int | tuple[int, ...] = 0) -> FeatureMoments:
    """Return the population moments of x over ``axis``.

    With c = x - E x they are E x, s^2 = E c^2, E c^3 / s^3 and E c^4 / s^4 - 3. The last two are 0 for a feature that
    is constant. The function is pure JAX.

    Args:
        x: samples (N, ...).
        axis: axes averaged over.

    >>> print(moments(jnp.array([-1.0, 1.0])).kurtosis)
    -2.0
    """
    x = jnp.asarray(x)
    mean = jnp.mean(x, axis=axis, keepdims=True)
    centered = x - mean
    variance = jnp.mean(jnp.square(centered), axis=axis, keepdims=True)
    varies = variance > 0
    standard = safe_divide(centered, safe_sqrt(variance))
    skewness = jnp.mean(standard**3, axis=axis)
    kurtosis = jnp.where(varies.reshape(skewness.shape), jnp.mean(standard**4, axis=axis) - 3, 0)
    return FeatureMoments(mean.reshape(skewness.shape), variance.reshape(skewness.shape), skewness, kurtosis)


class BootstrapInterval(NamedTuple):
    """A statistic with its bootstrap standard error and percentile interval.

    Attributes:
        value: the statistic of the samples themselves.
        standard_error: standard deviation over the resamples.
        low: lower end of the percentile interval.
        high: upper end of the percentile interval.
    """

    value: float
    standard_error: float
    low: float
    high: float


def bootstrap(
    statistic: Callable[[ArrayLike, ArrayLike], jax.Array | float],
    x: Shaped[ArrayLike, "n ..."],
    y: Shaped[ArrayLike, "m ..."],
    *,
    key: Key[Array, ""],
    repeats: int = 200,
    level: float = 0.95,
    paired: bool = True,
    compiled: bool = False,
) -> BootstrapInterval:
    """Estimate the uncertainty of a scalar statistic of two samples by resampling their rows.

    Distances between samples are biased upwards, and distances between resamples more so: read the standard error as
    the size of the noise, and use ``covariate_shift.sandwich`` for bounds.

    Args:
        statistic: (x, y) -> scalar.
        x: samples (N, ...).
        y: samples (M, ...).
        key: PRNG key.
        repeats: number of resamples.
        level: coverage of the percentile interval.
        paired: draw the same rows of both, as for the same inputs through two networks; this needs N = M.
        compiled: run all resamples in one vmapped program, which needs a statistic in pure JAX. Otherwise they run in
            a loop on the host.

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
    return BootstrapInterval(float(values[0]), float(draws.std(ddof=1)), float(low), float(high))
