"""Normalisation of a batch as pure functions of arrays: recenter, rescale.

Batches are (n, ..., features) arrays as in flax; ``axis`` lists the axes that are *averaged over*
(the batch axis by default). Moments are population moments (1/n) and the variance is computed in two
passes, so that float32 data of large mean keep their spread.
"""

import jax
import jax.numpy as jnp

from meanflow import _checks
from meanflow._numerics import safe_divide, safe_sqrt

Axes = int | tuple[int, ...]


def recenter(x: jax.Array, axis: Axes = 0) -> jax.Array:
    """x minus its mean over ``axis``."""
    return x - jnp.mean(x, axis=axis, keepdims=True)


def spread(x: jax.Array, axis: Axes = 0, mode: str = "std", epsilon: float = 0.0) -> jax.Array:
    """sqrt(second moment + epsilon) over ``axis``, kept as axes of length 1.

    ``mode="std"`` takes the moment about the mean, ``"rms"`` about zero. They agree on recentred batches.
    """
    _checks.one_of("mode", mode, ("std", "rms"))
    centred = recenter(x, axis) if mode == "std" else x
    return jnp.sqrt(jnp.mean(jnp.square(centred), axis=axis, keepdims=True) + epsilon)


def rescale(x: jax.Array, axis: Axes = 0, mode: str = "std", epsilon: float = 0.0) -> jax.Array:
    """x divided by its ``spread`` over ``axis``."""
    return x / spread(x, axis, mode, epsilon)


def batch_moments(
    x: jax.Array, axis: Axes = 0, axis_name: str | None = None, *, about: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Mean and variance over ``axis``, in two passes, kept as axes of length 1.

    Args:
        x: batch.
        axis: axes averaged over.
        axis_name: mesh or vmap axis over which equal shards of the batch are synchronised (two all-reduces of
            the size of the features); None for one device or automatic sharding under jit.
        about: point the second moment is taken about; the mean by default, zeros give the mean square.

    Returns:
        mean E x and second moment E (x - about)^2, each with the averaged axes of length 1.
    """

    def average(u: jax.Array) -> jax.Array:
        local = jnp.mean(u, axis=axis, keepdims=True)
        return local if axis_name is None else jax.lax.pmean(local, axis_name)

    mean = average(x)
    return mean, average(jnp.square(x - (mean if about is None else about)))


def sample_square(x: jax.Array, axis: Axes = -1, n: float = 1.0) -> jax.Array:
    """s = sum of x^2 over ``axis`` divided by n, as axes of length 1: each sample's squared norm."""
    return jnp.sum(jnp.square(x), axis=axis, keepdims=True) / n


def unitize(
    x: jax.Array,
    alpha: jax.Array | float = 1.0,
    axis: Axes = -1,
    *,
    interpolation: str = "linear",
    epsilon: float = 0.0,
    n: float = 1.0,
) -> jax.Array:
    """Interpolates between the batch (alpha = 0) and its samples scaled to unit norm (alpha = 1).

    With s the sum of squares of a sample over n and r = sqrt(s + epsilon),

        linear    x_i (alpha_i / r + 1 - alpha_i)        the unitization paper's (10), what its code runs
        harmonic  x_i / (alpha_i r + 1 - alpha_i)        its (9), what its Theorem 3.3 is about

    The two agree at alpha 0 and 1 and at r = 1; otherwise the linear one is larger. For alpha > 0 the
    harmonic outputs have norm at most 1/min(alpha) (at n = 1), the linear ones are unbounded. Samples that
    vanish stay zero, without NaN in value or gradient.

    Args:
        x: batch (..., features).
        alpha: a number, (features,) on the last axis, or any array of x's rank that broadcasts. The harmonic
            form has a pole for alpha < 0.
        axis: the axes that make up one sample.
        interpolation: ``"linear"`` or ``"harmonic"``.
        epsilon: added to s.
        n: divisor of the squared norm (Algorithm 2 uses n times the number of pixels).

    >>> print(unitize(jnp.array([[3.0, 4.0]]), 1.0))
    [[0.6 0.8]]
    >>> print(unitize(jnp.array([[3.0, 4.0]]), 0.5))
    [[1.8 2.4]]
    """
    _checks.one_of("interpolation", interpolation, ("linear", "harmonic"))
    alpha = jnp.asarray(alpha, x.dtype)
    if alpha.ndim not in (0, 1, x.ndim):
        raise ValueError(
            f"alpha must be a number, (features,) or of the rank of x, got shape {alpha.shape} "
            f"for x {x.shape}"
        )
    if alpha.ndim == 1:
        alpha = along(alpha, x.ndim, -1)
    norm = safe_sqrt(sample_square(x, axis, n) + epsilon)
    if interpolation == "linear":
        return x * (safe_divide(alpha, norm) + 1 - alpha)
    scale = alpha * norm + 1 - alpha
    return x / jnp.where(scale == 0, 1, scale)  # 0 only for a vanishing sample at alpha = 1


def along(vector: jax.Array, ndim: int, axis: int) -> jax.Array:
    """A (features,) vector laid along one axis of an array of rank ``ndim``."""
    shape = [1] * ndim
    shape[axis] = -1
    return jnp.reshape(vector, shape)
