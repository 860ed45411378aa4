"""Moments up to order 4 of the outputs of a layer."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

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
    # central moments in two passes, as powers of the standardized deviations
    centered = x - mean
    variance = jnp.mean(jnp.square(centered), axis=axis, keepdims=True)
    varies = variance > 0
    standard = safe_divide(centered, safe_sqrt(variance))
    skewness = jnp.mean(standard**3, axis=axis)
    # 0 for a constant feature, where 0 - 3 would look like a distribution of two points
    kurtosis = jnp.where(varies.reshape(skewness.shape), jnp.mean(standard**4, axis=axis) - 3, 0)
    return FeatureMoments(mean.reshape(skewness.shape), variance.reshape(skewness.shape), skewness, kurtosis)
