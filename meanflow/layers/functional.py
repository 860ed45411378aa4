"""Normalization of a batch as pure functions of arrays: recenter, rescale, unitize.

A batch is an array ``(n, ..., features)`` as in flax. The argument ``axis`` lists the axes that are *averaged over*, by
default the batch axis 0. All moments are population moments (divided by n). The variance is computed in two passes,
first the mean and then the deviations from it: in one pass, E x^2 - (E x)^2 loses all digits of float32 data whose mean
is much larger than their standard deviation. Half-precision data are summed in float32 and the result is rounded back:
float16 ends at 65504, and bfloat16 has three digits.
"""

from __future__ import annotations

from typing import Annotated

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from meanflow import _boundary
from meanflow._boundary import Positive, Rate, array, checked, choice
from meanflow._numerics import safe_divide, safe_sqrt
from meanflow.layers._standardize import Axes, Mode, axes_of, batch_scale, fits, result_type, widen


def _axes(name: str, value: object) -> object:
    """Accept an axis or a tuple of axes."""
    whole = lambda name, entry: _boundary.whole(name, entry, -(2**31))
    return whole(name, value) if isinstance(value, int) else _boundary.sequence(whole)(name, value)


SomeAxes = Annotated[Axes, _axes]


Batch = Annotated[Float[ArrayLike, "*shape"], array(rank=1, half=True)]


@checked
def recenter(x: Batch, axis: SomeAxes = 0) -> Float[Array, "*shape"]:
    """Subtract from x its mean over ``axis``.

    >>> print(recenter(jnp.array([[1.0, 2.0], [3.0, 6.0]])))
    [[-1. -2.]
     [ 1.  2.]]
    """
    x, full = jnp.asarray(x), widen(x)
    axes_of(x, axis)
    return (full - jnp.mean(full, axis=axis, keepdims=True)).astype(result_type(x))


@checked
def rescale(x: Batch, axis: SomeAxes = 0, mode: Mode = "std", epsilon: Rate = 0.0) -> Float[Array, "*shape"]:
    """Divide x by its scale over ``axis``: its standard deviation or its root mean square.

    Args:
        x: batch.
        axis: axes averaged over.
        mode: ``"std"`` for the deviation from the mean, ``"rms"`` for the deviation from zero. The two agree on a
            batch that has been recentered.
        epsilon: added to the second moment before the root is taken.

    >>> print(rescale(jnp.array([3.0, 5.0])))
    [3. 5.]
    """
    full = widen(x)
    axes_of(full, axis)
    scale = batch_scale(full, axis, mode, epsilon)
    # under jit the scale is not known yet: the result is then infinite or NaN, as a division by 0 is
    known = _boundary.concrete(scale)
    if known is not None and not (known.all() and np.isfinite(known).all()):
        raise ValueError(
            "x must not be constant along axis where epsilon = 0, and its squares must be numbers, got features whose "
            f"scale is from {known.min():.3g} to {known.max():.3g}"
        )
    return (full / scale).astype(result_type(x))


@checked
def unitize(
    x: Batch,
    alpha: Float[ArrayLike, "..."] | float = 1.0,
    axis: SomeAxes = -1,
    *,
    interpolation: Annotated[str, choice("linear", "harmonic")] = "linear",
    epsilon: Rate = 0.0,
    n: Positive = 1.0,
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
    given, x = jnp.asarray(x), widen(x)
    axes_of(x, axis)
    alpha = jnp.asarray(alpha, x.dtype)
    if alpha.ndim not in (0, 1, x.ndim):
        raise ValueError(
            f"alpha must be a number, (features,) or of the rank of x, got shape {alpha.shape} "
            f"for x {x.shape}"
        )
    fits("alpha", alpha, x)
    if alpha.ndim == 1:
        alpha = alpha.reshape((1,) * (x.ndim - 1) + (-1,))
    # r = sqrt(sum x_i^2 / n + epsilon), with slope 0 at 0: a zero sample stays zero and passes no NaN on
    norm = safe_sqrt(jnp.sum(jnp.square(x) / n, axis=axis, keepdims=True) + epsilon)
    _boundary.finite("norms of the samples of x", norm)
    if interpolation == "linear":
        out = x * (safe_divide(alpha, norm) + 1 - alpha)
    else:
        scale = alpha * norm + 1 - alpha
        out = x / jnp.where((scale == 0) & (norm == 0), 1, scale)  # a vanishing sample at alpha = 1
    return out.astype(result_type(given))
