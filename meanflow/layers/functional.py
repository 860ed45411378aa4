"""Normalization of a batch as pure functions of arrays: recenter, rescale, unitize.

A batch is an array ``(n, ..., features)`` as in flax. The argument ``axis`` lists the axes that are *averaged over*, by
default the batch axis 0. All moments are population moments (divided by n). The variance is computed in two passes,
first the mean and then the deviations from it: in one pass, E x^2 - (E x)^2 loses all digits of float32 data whose mean
is much larger than their standard deviation.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from meanflow import _checks
from meanflow._numerics import safe_divide, safe_sqrt

Axes = int | tuple[int, ...]


def recenter(x: Float[ArrayLike, "*shape"], axis: Axes = 0) -> Float[Array, "*shape"]:
    """Subtract from x its mean over ``axis``.

    >>> print(recenter(jnp.array([[1.0, 2.0], [3.0, 6.0]])))
    [[-1. -2.]
     [ 1.  2.]]
    """
    x = jnp.asarray(x)
    return x - jnp.mean(x, axis=axis, keepdims=True)


def batch_scale(
    x: Float[ArrayLike, "..."], axis: Axes = 0, mode: str = "std", epsilon: float | Float[Array, ""] = 0.0
) -> Float[Array, "..."]:
    """Return the scale of x over ``axis``: its standard deviation or its root mean square.

    Args:
        x: batch.
        axis: axes averaged over; they remain in the result with length 1.
        mode: ``"std"`` for the deviation from the mean, ``"rms"`` for the deviation from zero. The two agree on a
            batch that has been recentered.
        epsilon: added to the second moment before the root is taken.

    >>> print(batch_scale(jnp.array([3.0, 5.0])), batch_scale(jnp.array([1.0, 7.0]), mode="rms"))
    [1.] [5.]
    """
    _checks.one_of("mode", mode, ("std", "rms"))
    x = jnp.asarray(x)
    centered = recenter(x, axis) if mode == "std" else x
    return jnp.sqrt(jnp.mean(jnp.square(centered), axis=axis, keepdims=True) + epsilon)


def rescale(
    x: Float[ArrayLike, "*shape"], axis: Axes = 0, mode: str = "std", epsilon: float | Float[Array, ""] = 0.0
) -> Float[Array, "*shape"]:
    """Divide x by its ``batch_scale`` over ``axis``; the arguments are those of ``batch_scale``.

    >>> print(rescale(jnp.array([3.0, 5.0])))
    [3. 5.]
    """
    return jnp.asarray(x) / batch_scale(x, axis, mode, epsilon)


def batch_moments(
    x: Float[ArrayLike, "..."],
    axis: Axes = 0,
    axis_name: str | None = None,
    *,
    about: Float[ArrayLike, "..."] | None = None,
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Return the mean and the second moment of x over ``axis``, on one device or over several.

    Args:
        x: batch.
        axis: axes averaged over; they remain in the results with length 1.
        axis_name: name of a mesh or vmap axis along which the batch is split into equal shards. The moments are then
            those of the whole batch, at the price of two all-reduces of the size of the features. None for a single
            device, and for arrays that jit shards by itself.
        about: the point about which the second moment is taken. By default it is the mean, which gives the
            variance; zeros give the mean square.

    Returns:
        The mean E x and the second moment E (x - about)^2.

    >>> mean, variance = batch_moments(jnp.array([[1.0], [3.0]]))
    >>> print(mean, variance)
    [[2.]] [[1.]]
    """
    x = jnp.asarray(x)

    def average(u: jax.Array) -> jax.Array:
        local = jnp.mean(u, axis=axis, keepdims=True)
        return local if axis_name is None else jax.lax.pmean(local, axis_name)

    mean = average(x)
    return mean, average(jnp.square(x - (mean if about is None else about)))


def sample_square(x: Float[ArrayLike, "..."], axis: Axes = -1, n: float = 1.0) -> Float[Array, "..."]:
    """Return the squared norm of each sample, divided by ``n``.

    Args:
        x: batch.
        axis: the axes that make up one sample; they remain in the result with length 1.
        n: divisor.

    >>> print(sample_square(jnp.array([[3.0, 4.0]])))
    [[25.]]
    """
    return jnp.sum(jnp.square(x), axis=axis, keepdims=True) / n


def unitize(
    x: Float[ArrayLike, "*shape"],
    alpha: Float[ArrayLike, "..."] | float = 1.0,
    axis: Axes = -1,
    *,
    interpolation: str = "linear",
    epsilon: float | Float[Array, ""] = 0.0,
    n: float = 1.0,
) -> Float[Array, "*shape"]:
    """Interpolate between a batch (alpha = 0) and its samples scaled to unit norm (alpha = 1).

    Let s be the sum of squares of a sample divided by n, and r = sqrt(s + epsilon). Then feature i becomes

        linear    x_i (alpha_i / r + 1 - alpha_i)        (10) of the unitization paper, which its algorithm runs
        harmonic  x_i / (alpha_i r + 1 - alpha_i)        (9), which its Theorem 3.3 is about

    The two agree at alpha = 0, at alpha = 1 and where r = 1; elsewhere the linear result is larger. For alpha > 0 the
    harmonic outputs have norm at most 1/min(alpha) (with n = 1), whereas the linear ones are unbounded. A sample that
    is zero stays zero, and neither its value nor its gradient is NaN.

    Args:
        x: batch (..., features).
        alpha: a number; or one number for each feature of the last axis; or an array of the rank of x that
            broadcasts against x. The harmonic form has a pole at a negative alpha.
        axis: the axes that make up one sample.
        interpolation: ``"linear"`` or ``"harmonic"``.
        epsilon: added to s.
        n: divisor of the squared norm. Algorithm 2 of the paper divides by n times the number of pixels.

    >>> print(unitize(jnp.array([[3.0, 4.0]]), 1.0))
    [[0.6 0.8]]
    >>> print(unitize(jnp.array([[3.0, 4.0]]), 0.5))
    [[1.8 2.4]]
    """
    _checks.one_of("interpolation", interpolation, ("linear", "harmonic"))
    x = jnp.asarray(x)
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


def along(vector: Float[ArrayLike, "features"], ndim: int, axis: int) -> Float[Array, "..."]:
    """Reshape a vector to rank ``ndim`` such that it lies along ``axis`` and broadcasts over the other axes.

    >>> along(jnp.ones(3), 4, -1).shape
    (1, 1, 1, 3)
    """
    shape = [1] * ndim
    shape[axis] = -1
    return jnp.reshape(jnp.asarray(vector), shape)
