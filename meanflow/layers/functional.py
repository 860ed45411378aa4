"""Normalization of a batch as pure functions of arrays: recenter, rescale, unitize.

A batch is an array ``(n, ..., features)`` as in flax. The argument ``axis`` lists the axes that are *averaged over*, by
default the batch axis 0. All moments are population moments (divided by n). The variance is computed in two passes,
first the mean and then the deviations from it: in one pass, E x^2 - (E x)^2 loses all digits of float32 data whose mean
is much larger than their standard deviation. Half-precision data are summed in float32 and the result is rounded back:
float16 ends at 65504, and bfloat16 has three digits.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from meanflow import _checks
from meanflow._numerics import safe_divide, safe_sqrt

Axes = int | tuple[int, ...]


def _axes(name: str, value: object) -> object:
    """Accept an axis or a tuple of axes."""
    whole = lambda name, entry: _checks.whole(name, entry, -(2**31))
    return whole(name, value) if isinstance(value, int) else _checks.sequence(whole)(name, value)


def _check_axes(x: jax.Array, axis: Axes) -> None:
    """Refuse axes that x does not have."""
    given = axis if isinstance(axis, tuple) else (axis,)
    if any(not -x.ndim <= i < x.ndim for i in given) or len({i % x.ndim for i in given}) < len(given):
        raise ValueError(f"axis must be among the {x.ndim} axes of x, each at most once, got {axis}")


def _fits(name: str, part: ArrayLike, x: jax.Array) -> None:
    """Refuse a part whose shape does not broadcast against that of x."""
    given = jnp.shape(part)
    if len(given) > x.ndim or any(a not in (1, b) for a, b in zip(given[::-1], x.shape[::-1], strict=False)):
        raise ValueError(f"{name} must broadcast against x {x.shape}, got shape {given}")


X = _checks.array(rank=1, half=True)
# of a larger computation, which judges the numbers
PART = _checks.array(infinite=True, nan=True, least=0, half=True)
LENGTH = _checks.number(low=0)
MODE = _checks.choice("std", "rms")
Groups = tuple[tuple[int, ...], ...]


@_checks.arguments(x=PART)
def widen(x: Float[ArrayLike, "*shape"]) -> Float[Array, "*shape"]:
    """Return x as an array of at least single precision.

    >>> widen(jnp.ones(2, jnp.bfloat16)).dtype.name
    'float32'
    """
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


@_checks.arguments(x=X, axis=_axes)
def recenter(x: Float[ArrayLike, "*shape"], axis: Axes = 0) -> Float[Array, "*shape"]:
    """Subtract from x its mean over ``axis``.

    >>> print(recenter(jnp.array([[1.0, 2.0], [3.0, 6.0]])))
    [[-1. -2.]
     [ 1.  2.]]
    """
    x, full = jnp.asarray(x), widen(x)
    _check_axes(x, axis)
    return (full - jnp.mean(full, axis=axis, keepdims=True)).astype(_result(x))


@_checks.arguments(x=X, axis=_axes, mode=MODE, epsilon=LENGTH)
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
    _check_axes(jnp.asarray(x), axis)
    return _batch_scale(widen(x), axis, mode, epsilon).astype(_result(jnp.asarray(x)))


def _batch_scale(
    x: jax.Array, axis: Axes, mode: str, epsilon: float | Float[Array, ""]
) -> Float[Array, "..."]:
    centered = recenter(x, axis) if mode == "std" else x
    return jnp.sqrt(jnp.mean(jnp.square(centered), axis=axis, keepdims=True) + epsilon)


def _result(x: jax.Array) -> jnp.dtype:
    """Return the type of results for input x: its own, or the default float for integers."""
    return x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.result_type(float)


@_checks.arguments(x=X, axis=_axes, mode=MODE, epsilon=LENGTH)
def rescale(
    x: Float[ArrayLike, "*shape"], axis: Axes = 0, mode: str = "std", epsilon: float | Float[Array, ""] = 0.0
) -> Float[Array, "*shape"]:
    """Divide x by its ``batch_scale`` over ``axis``; the arguments are those of ``batch_scale``.

    >>> print(rescale(jnp.array([3.0, 5.0])))
    [3. 5.]
    """
    full = widen(x)
    _check_axes(full, axis)
    scale = _batch_scale(full, axis, mode, epsilon)
    known = _checks.concrete(scale)
    if known is not None and not known.all():
        raise ValueError("x must not be constant along axis where epsilon = 0, got features whose scale is 0")
    return (full / scale).astype(_result(jnp.asarray(x)))


@_checks.arguments(
    x=X, axis=_axes, axis_name=_checks.optional(_checks.text), about=_checks.optional(_checks.array())
)
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
    x = widen(x)
    _check_axes(x, axis)
    mean = average(x, axis, axis_name=axis_name)
    if about is not None:
        _fits("about", about, x)
    deviation = x - (mean if about is None else jnp.asarray(about))
    return mean, average(jnp.square(deviation), axis, axis_name=axis_name)


@_checks.arguments(
    x=PART,
    axis=_axes,
    mask=_checks.optional(PART),
    axis_name=_checks.optional(_checks.text),
    axis_index_groups=_checks.unchecked("jax says which groups it knows"),
)
def average(
    x: Float[Array, "..."],
    axis: Axes = 0,
    mask: Float[Array, "..."] | None = None,
    *,
    axis_name: str | None = None,
    axis_index_groups: Groups | None = None,
) -> Float[Array, "..."]:
    """Return the mean of x over ``axis``, over the entries where ``mask`` is 1, and over all devices of ``axis_name``.

    Args:
        x: batch.
        axis: axes averaged over; they remain in the result with length 1.
        mask: zeros and ones that broadcast against x; where all are zero the mean is 0.
        axis_name: name of a mesh or vmap axis along which the batch is split.
        axis_index_groups: groups of devices along that axis which average among themselves.

    >>> print(average(jnp.array([[1.0], [3.0], [9.0]]), mask=jnp.array([[1.0], [1.0], [0.0]])))
    [[2.]]
    """
    _check_axes(x, axis)
    among = {} if axis_index_groups is None else {"axis_index_groups": axis_index_groups}
    if mask is None:
        local = jnp.mean(x, axis=axis, keepdims=True)
        return local if axis_name is None else jax.lax.pmean(local, axis_name, **among)
    _fits("mask", mask, x)
    total = jnp.sum(jnp.where(mask > 0, x, 0), axis=axis, keepdims=True)
    count = jnp.sum(jnp.broadcast_to(mask, x.shape), axis=axis, keepdims=True)
    if axis_name is not None:
        total, count = jax.lax.psum((total, count), axis_name, **among)
    return total / jnp.maximum(count, 1)


@partial(jax.custom_jvp, nondiff_argnums=(4, 5, 6, 7, 8, 9))
def standardize(
    x: Float[Array, "*shape"],
    gamma: Float[Array, "..."] | None,
    beta: Float[Array, "..."] | None,
    mask: Float[Array, "..."] | None,
    axes: tuple[int, ...],
    epsilon: float,
    center: bool = True,
    moment: str | None = "std",
    axis_name: str | None = None,
    axis_index_groups: Groups | None = None,
) -> tuple[Float[Array, "*shape"], Float[Array, "..."], Float[Array, "..."]]:
    """Return the normalized batch gamma u + beta, with the mean m and the second moment of x.

        u = (x - m)/s,   m = E x,   s = sqrt(E (x - m)^2 + epsilon)

    The derivative is written out. What is constant along the batch stands outside of the means, so that the gradient
    takes two sums over the batch, which those of gamma and beta share:

        y' = (gamma/s) x' + (beta' - (gamma/s) E x') + u (gamma' - (gamma/s) E[u x'])

    Args:
        x: batch, in at least single precision.
        gamma: factor that broadcasts against x and is constant along ``axes``, or None for 1.
        beta: summand likewise, or None for 0.
        mask: entries that count, as in ``average``, or None.
        axes: axes averaged over.
        epsilon: added to the second moment.
        center: whether the mean is subtracted.
        moment: ``"std"`` divides by the root of the second moment about the mean, ``"rms"`` about zero; None does not
            divide.
        axis_name: as in ``average``.
        axis_index_groups: as in ``average``.

    >>> y, mean, variance = standardize(jnp.array([[1.0], [5.0]]), None, None, None, (0,), 0.0)
    >>> print(y.ravel(), mean.ravel(), variance.ravel())
    [-1.  1.] [3.] [4.]
    """
    over = partial(average, axis=axes, mask=mask, axis_name=axis_name, axis_index_groups=axis_index_groups)
    mean = over(x)
    second = over(jnp.square(x if moment == "rms" else x - mean))
    u = x - mean if center else x
    if moment is not None:
        u = u / jnp.sqrt(second + epsilon)
    return affine(u, gamma, beta), mean, second


@_checks.arguments(x=PART, gamma=_checks.optional(PART), beta=_checks.optional(PART))
def affine(
    x: Float[Array, "*shape"], gamma: Float[Array, "..."] | None, beta: Float[Array, "..."] | None
) -> Float[Array, "*shape"]:
    """Return gamma x + beta; None stands for 1 and 0.

    >>> print(affine(jnp.array([1.0, 2.0]), jnp.array([3.0]), None))
    [3. 6.]
    """
    for name, part in (("gamma", gamma), ("beta", beta)):
        if part is not None:
            _fits(name, part, x)
    x = x if gamma is None else x * gamma
    return x if beta is None else x + beta


@standardize.defjvp
def _standardize_jvp(
    axes: tuple[int, ...],
    epsilon: float,
    center: bool,
    moment: str | None,
    axis_name: str | None,
    axis_index_groups: Groups | None,
    primals: tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None],
    tangents: tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None],
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]:
    (x, gamma, beta, mask), (dx, d_gamma, d_beta, _) = primals, tangents
    how = (axes, epsilon, center, moment, axis_name, axis_index_groups)
    u, mean, second = standardize(x, None, None, mask, *how)
    over = partial(average, axis=axes, mask=mask, axis_name=axis_name, axis_index_groups=axis_index_groups)
    scale = jnp.ones_like(mean) if moment is None else jnp.sqrt(second + epsilon)
    rate = scale**-1 if gamma is None else gamma / scale
    d_mean = over(dx)
    # u is then the deviation, of which the second moment is taken, over the scale
    same = center == (moment != "rms")
    deviation = u if same else (x if moment == "rms" else x - mean) / scale
    d_scale = over(deviation * dx)  # E[(x - m) (x' - m')] = E[(x - m) x']
    shift = -rate * d_mean if center else None
    turn = None if moment is None else -rate * d_scale
    if d_beta is not None:
        shift = d_beta if shift is None else shift + d_beta
    if d_gamma is not None:
        turn = d_gamma if turn is None else turn + d_gamma
    dy = rate * dx if shift is None else rate * dx + shift
    dy = dy if turn is None else dy + u * turn
    return (affine(u, gamma, beta), mean, second), (dy, d_mean, 2 * scale * d_scale)


@_checks.arguments(x=PART, axis=_axes, n=_checks.number(above=0))
def sample_square(x: Float[ArrayLike, "..."], axis: Axes = -1, n: float = 1.0) -> Float[Array, "..."]:
    """Return the squared norm of each sample, divided by ``n``.

    Args:
        x: batch.
        axis: the axes that make up one sample; they remain in the result with length 1.
        n: divisor.

    >>> print(sample_square(jnp.array([[3.0, 4.0]])))
    [[25.]]
    """
    _check_axes(jnp.asarray(x), axis)
    return jnp.sum(jnp.square(widen(x)) / n, axis=axis, keepdims=True)


@_checks.arguments(
    x=X,
    alpha=_checks.array(),
    axis=_axes,
    interpolation=_checks.choice("linear", "harmonic"),
    epsilon=LENGTH,
    n=_checks.number(above=0),
)
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
    given, x = jnp.asarray(x), widen(x)
    _check_axes(x, axis)
    alpha = jnp.asarray(alpha, x.dtype)
    if alpha.ndim not in (0, 1, x.ndim):
        raise ValueError(
            f"alpha must be a number, (features,) or of the rank of x, got shape {alpha.shape} "
            f"for x {x.shape}"
        )
    _fits("alpha", alpha, x)
    if alpha.ndim == 1:
        alpha = along(alpha, x.ndim, -1)
    norm = safe_sqrt(sample_square(x, axis, n) + epsilon)
    if interpolation == "linear":
        out = x * (safe_divide(alpha, norm) + 1 - alpha)
    else:
        scale = alpha * norm + 1 - alpha
        out = x / jnp.where(scale == 0, 1, scale)  # 0 only for a vanishing sample at alpha = 1
    return out.astype(_result(given))


@_checks.arguments(
    vector=_checks.array((None,), nan=True, infinite=True, half=True), ndim=_checks.count(1), axis=_axes
)
def along(vector: Float[ArrayLike, "features"], ndim: int, axis: int) -> Float[Array, "..."]:
    """Reshape a vector to rank ``ndim`` such that it lies along ``axis`` and broadcasts over the other axes.

    >>> along(jnp.ones(3), 4, -1).shape
    (1, 1, 1, 3)
    """
    if not isinstance(axis, int) or not -ndim <= axis < ndim:
        raise ValueError(f"axis must be one of {ndim} axes, got {axis}")
    shape = [1] * ndim
    shape[axis] = -1
    return jnp.reshape(jnp.asarray(vector), shape)
