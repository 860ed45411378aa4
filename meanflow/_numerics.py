"""Numerics that several rooms share: safe roots and quotients, angles, slopes of power laws, Gram matrices.

The functions named ``safe_*`` are ordinary formulas that also have a finite derivative where the textbook form
has none. ``jnp.where(u > 0, jnp.sqrt(u), 0)`` is not enough: reverse mode differentiates the branch that was
not taken as well and multiplies its infinite derivative by zero, which gives NaN. So the argument is replaced
before the root is taken, and the result afterwards.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Real


def safe_sqrt(u: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return sqrt(u), and 0 with derivative 0 where u <= 0 (elementwise); NaN stays NaN.

    >>> float(jax.grad(safe_sqrt)(0.0)), float(safe_sqrt(jnp.array(4.0)))
    (0.0, 2.0)
    """
    zero = u <= 0  # not "u > 0": NaN must not become 0
    return jnp.where(zero, 0.0, jnp.sqrt(jnp.where(zero, 1.0, u)))


def safe_root(u: Float[Array, "..."], order: float) -> Float[Array, "..."]:
    """Return u^(1/order), and 0 with derivative 0 where u <= 0 (elementwise); order 1 returns u itself. NaN stays NaN.

    >>> round(float(safe_root(jnp.array(8.0), 3.0)), 6)
    2.0
    """
    if order == 1:
        return u
    zero = u <= 0
    return jnp.where(zero, 0.0, jnp.where(zero, 1.0, u) ** (1 / order))


def safe_divide(u: Float[Array, "..."], v: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return u / v, and 0 with derivative 0 where v = 0 (elementwise).

    >>> safe_divide(jnp.array([1.0, 1.0]), jnp.array([2.0, 0.0])).tolist()
    [0.5, 0.0]
    """
    nonzero = v != 0
    return jnp.where(nonzero, u / jnp.where(nonzero, v, 1.0), 0.0)


def safe_norm(
    v: Float[Array, "..."], axis: int | tuple[int, ...] | None = -1, *, keepdims: bool = False
) -> Float[Array, "..."]:
    """Return the Euclidean norm of ``v`` over ``axis``; its derivative at the zero vector is 0.

    ``axis=None`` takes the norm of all entries; ``keepdims`` keeps the reduced axes with length 1.

    >>> float(safe_norm(jnp.array([3.0, 4.0]))), jax.grad(safe_norm)(jnp.zeros(2)).tolist()
    (5.0, [0.0, 0.0])
    """
    return safe_sqrt(jnp.sum(v * v, axis=axis, keepdims=keepdims))


def magnitude(
    u: Float[Array, "..."], axis: int | tuple[int, ...] | None = None, *, keepdims: bool = False
) -> Float[Array, "..."]:
    """Return the largest |u| over ``axis``, 1 where that is 0, as a constant of differentiation.

    Powers overflow and underflow long before the numbers themselves do, in float32 at 1e19 and 1e-19 for squares. What
    is homogeneous, f(c u) = c f(u), is therefore computed as c f(u / c) with this c, which changes no derivative.

    >>> float(magnitude(jnp.array([-3.0, 2.0]))), float(magnitude(jnp.zeros(2)))
    (3.0, 1.0)
    """
    top = jax.lax.stop_gradient(jnp.max(jnp.abs(u), axis=axis, keepdims=keepdims))
    return jnp.where(top == 0, 1.0, top)


def scaled_norm(v: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return ``safe_norm`` of ``v`` over its last axis, without overflow and underflow of the squares.

    >>> float(scaled_norm(jnp.array([3e-30, 4e-30], jnp.float32)) / jnp.float32(5e-30)).__round__(6)
    1.0
    """
    scale = magnitude(v, -1, keepdims=True)
    return scale[..., 0] * safe_norm(v / scale)


def power_mean(
    u: Float[Array, " k"], order: float, weights: Float[Array, " k"] | None = None
) -> Float[Array, ""]:
    """Return (sum_i w_i u_i^order)^(1/order) for u >= 0, without overflow and underflow of the powers; w_i = 1/k.

    >>> round(float(power_mean(jnp.array([1.0, 7.0]), 2)), 6)
    5.0
    """
    mean = lambda v: jnp.mean(v) if weights is None else jnp.sum(weights * v)
    if order == 1:
        return mean(u)
    scale = magnitude(u)
    return scale * safe_root(mean((u / scale) ** order), order)


def wrap_angle(turn: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return the angle in [-pi, pi] that equals ``turn`` up to whole turns (radians, elementwise).

    >>> round(float(wrap_angle(jnp.array(1.5 * jnp.pi))), 4)
    -1.5708
    """
    return jnp.arctan2(jnp.sin(turn), jnp.cos(turn))


def loglog_slope(
    sizes: Real[ArrayLike, " k"] | Sequence[float], values: Real[ArrayLike, " k"] | Sequence[float]
) -> float:
    """Return the exponent p of the power law values = C sizes^p that fits best, on the host.

    The fit is by least squares of log(values) against log(sizes). Both must be positive.

    >>> round(loglog_slope([1.0, 2.0, 4.0], [3.0, 12.0, 48.0]), 12)
    2.0
    """
    return float(np.polyfit(np.log(np.asarray(sizes, float)), np.log(np.asarray(values, float)), 1)[0])


def weighted_gram(
    u: Float[Array, "n m"], v: Float[Array, "k m"], weights: Float[Array, " m"]
) -> Float[Array, "n k"]:
    """Return u diag(weights) v' with weights >= 0; the same array for u and v makes one pass over it less.

    >>> u = jnp.array([[1.0, 2.0]])
    >>> float(weighted_gram(u, u, jnp.array([4.0, 1.0]))[0, 0])
    8.0
    """
    return _own_gram(u, weights) if u is v else (u * weights[None, :]) @ v.T


@jax.custom_jvp
def _own_gram(u: Float[Array, "n m"], weights: Float[Array, " m"]) -> Float[Array, "n n"]:
    # one array instead of u and u * weights: beside the product, time goes into writing such arrays
    scaled = u * jnp.sqrt(weights)[None, :]
    return scaled @ scaled.T


@_own_gram.defjvp
def _own_gram_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    # by the other form, as the root has no derivative at the weight 0 of padding
    plain = lambda u, weights: (u * weights[None, :]) @ u.T
    return _own_gram(*primals), jax.jvp(plain, primals, tangents)[1]


_SQUARINGS = 24


def dominant_vector(matrix: Float[Array, "n n"]) -> Float[Array, " n"]:
    """Return the unit top eigenvector of a matrix with eigenvalues >= 0, by squaring it 24 times.

    M^(2^k), rescaled, tends to the projector on the top eigenspace. M is positive semi-definite, or a product of two
    such matrices. The Rayleigh quotient of the result is the top
    eigenvalue to a relative 1/(2^25 e) = 1e-8 for any spectrum. Unlike an eigendecomposition this is products only:
    fast under vmap and on accelerators, and without LAPACK, whose batched call deadlocks when several CPU devices
    share a process. A zero matrix gives a zero vector.

    >>> dominant_vector(jnp.diag(jnp.array([1.0, 3.0]))).tolist()
    [0.0, 1.0]
    """

    def scaled(m: jax.Array) -> jax.Array:
        size = jnp.trace(m)
        return m / jnp.where(size > 0, size, 1.0)

    def square(_: int | jax.Array, m: jax.Array) -> jax.Array:
        return scaled(jnp.matmul(m, m, precision=jax.lax.Precision.HIGHEST))

    power = jax.lax.fori_loop(0, _SQUARINGS, square, scaled(matrix))
    column = power[:, jnp.argmax(jnp.diagonal(power))]
    length = jnp.linalg.norm(column)
    return column / jnp.where(length > 0, length, 1.0)
