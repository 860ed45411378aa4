"""Corrected bounds on W_1 between the outputs of layers, the true forms of what the unitization paper prints.

The functions take samples x (after) and y (before), (N, d) and (M, d), use population moments and hold for the
empirical measures themselves. In the formulas r is the norm of a sample and a is the least alpha. The best bounds that
need nothing but the outputs are in ``transport.ics(...).pieces``; what was printed stands beside all of them in
``bounds``.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Shaped


def standardized_bound(dimension: int) -> float:
    """Return the upper bound sqrt(2d) for d features of mean 0 and variance 1 (equation (4), corrected).

    >>> standardized_bound(8)
    4.0
    """
    return (2.0 * dimension) ** 0.5


def truncated_power(x: Float[ArrayLike, "*n d"], p: int, c: ArrayLike) -> Float[Array, "*n"]:
    """Return f_{p,C}(x) = sum_i clip(x_i, -C, C)^p / (p C^(p-1) sqrt(d)), a 1-Lipschitz function of each sample.

    >>> print(truncated_power(jnp.array([3.0]), 2, 1.0))
    0.5
    """
    x = jnp.asarray(x)
    return c * jnp.sum(jnp.clip(x / c, -1, 1) ** p, axis=-1) / (p * x.shape[-1] ** 0.5)


def power_bound(
    x: Float[ArrayLike, "n d"], y: Float[ArrayLike, "m d"], p: int, c: ArrayLike
) -> Float[Array, ""]:
    """Return the lower bound |E f_{p,C}(x) - E f_{p,C}(y)| (Theorem 2) with f = ``truncated_power``, for any p >= 1.

    >>> print(power_bound(jnp.zeros((2, 1)), jnp.ones((2, 1)), 1, 1.0))
    1.0
    """
    return jnp.abs(jnp.mean(truncated_power(x, p, c)) - jnp.mean(truncated_power(y, p, c)))


def noise_bound(x: Float[ArrayLike, "n d"], y: Float[ArrayLike, "m d"], c: float) -> Float[Array, ""]:
    """Return the lower bound (5): ``power_bound`` for p = 2, by the errors of mean and variance.

    | sum_i (mu_i')^2 + (var_i' - 1) - mu_i^2 - (var_i - 1) | / (2 C sqrt(d)), for standardized outputs that lie in
    [-C, C]^d.
    """
    x, y = jnp.asarray(x), jnp.asarray(y)
    # E x_i^2 - 1 = mu_i^2 + var_i - 1, which is 0 for a feature that is exactly standardized
    noise = [jnp.sum(jnp.square(jnp.mean(u, axis=0)) + jnp.var(u, axis=0) - 1) for u in (x, y)]
    return jnp.abs(noise[0] - noise[1]) / (2 * c * x.shape[1] ** 0.5)


def harmonic_norm(r: Float[ArrayLike, "*n"], alpha: Float[ArrayLike, "..."]) -> Float[Array, "*n"]:
    """Return the largest norm that the harmonic interpolation (9) can give a vector of norm r.

    It is r / (1 + a (r - 1)), where a is the least alpha if r >= 1 and the largest alpha otherwise.

    >>> print(harmonic_norm(jnp.array([1.0, 9.0]), jnp.array([0.5, 0.8])))
    [1.  1.8]
    """
    r = jnp.asarray(r)
    low, high = jnp.min(alpha), jnp.max(alpha)
    # r / (1 + a (r - 1)) falls in a for r > 1 and rises for r < 1
    extreme = jnp.where(r >= 1, low, high)
    scale = 1 + extreme * (r - 1)
    # the scale vanishes for r = 0 and alpha = 1 alone, where the output is 0 too
    return jnp.where(scale > 0, r / jnp.where(scale > 0, scale, 1), 0)


@partial(jax.jit, static_argnames="interpolation")
def unitized_bound(
    x: Float[ArrayLike, "n d"],
    y: Float[ArrayLike, "m d"],
    alpha: Shaped[ArrayLike, "*features"],
    *,
    interpolation: str = "linear",
    alpha_y: Shaped[ArrayLike, "*features"] | None = None,
) -> Float[Array, ""]:
    """Return an upper bound on W_1 between unitize(x, alpha) and unitize(y, alpha), from the norms r and r'.

        harmonic   E h(r) + E h(r') with h = ``harmonic_norm``; always <= 2 / a
        linear     2 + (1 - a) (E(r - 1)_+ + E(r' - 1)_+) for alpha in [0, 1]; sharp
                   2 max|alpha| + max|1 - alpha| (E r + E r') for any alpha

    The bound 2 / a of Theorem 3.3 is true of the harmonic form (9) only; the linear form (10), which the paper runs,
    violates it without limit.

    Args:
        x: inputs of the map after.
        y: inputs of the map before.
        alpha: a number, or one number a feature.
        interpolation: ``"linear"`` or ``"harmonic"``.
        alpha_y: the alpha before, if it has moved.

    >>> print(unitized_bound(jnp.ones((3, 4)), jnp.zeros((3, 4)), 0.5))   # norms 2 and 0
    2.5
    """
    x, y = jnp.asarray(x), jnp.asarray(y)
    after, before = jnp.asarray(alpha, x.dtype), jnp.asarray(alpha if alpha_y is None else alpha_y, x.dtype)
    # W_1 is at most the sum of the distances to the point mass at 0, which are mean norms
    sides = [(jnp.linalg.norm(x, axis=1), after), (jnp.linalg.norm(y, axis=1), before)]
    half = _harmonic_half if interpolation == "harmonic" else _linear_half
    return half(*sides[0]) + half(*sides[1])


def _harmonic_half(r: jax.Array, alpha: jax.Array) -> jax.Array:
    """Bound the mean norm of the harmonic outputs."""
    return jnp.mean(harmonic_norm(r, alpha))


def _linear_half(r: jax.Array, alpha: jax.Array) -> jax.Array:
    """Bound the mean norm of the linear outputs, sharply if alpha lies in [0, 1]."""
    inside = jnp.all((alpha >= 0) & (alpha <= 1))
    # the norm r becomes at most alpha + (1 - alpha) r <= 1 + (1 - a) (r - 1)_+
    tight = 1 + (1 - jnp.min(alpha)) * jnp.mean(jnp.maximum(r - 1, 0))
    loose = jnp.max(jnp.abs(alpha)) + jnp.max(jnp.abs(1 - alpha)) * jnp.mean(r)
    return jnp.where(inside, tight, loose)


def unitized_standardized_bound(dimension: int, alpha_min: float) -> float:
    """Return the upper bound for exact standardization followed by the linear form (10), for alpha in [0, 1]^d.

    It is 2 (a + (1 - a) sqrt(d)) for d >= 4 and 2 + (1 - a) d / 2 below. At a = 0 the smaller sqrt(2d) holds only
    if all alpha are 0.

    Args:
        dimension: number d of features.
        alpha_min: the least alpha, a.
    """
    if not 0 <= alpha_min <= 1:
        raise ValueError(f"alpha_min must lie in [0, 1], got {alpha_min}")
    if dimension >= 4:
        return 2 * (alpha_min + (1 - alpha_min) * dimension**0.5)
    return 2 + (1 - alpha_min) * dimension / 2


def output_bound(
    x: Float[ArrayLike, "n d"],
    y: Float[ArrayLike, "m d"],
    gamma: Shaped[ArrayLike, "..."],
    beta: Shaped[ArrayLike, "..."],
    gamma_y: Shaped[ArrayLike, "..."] | None = None,
    beta_y: Shaped[ArrayLike, "..."] | None = None,
) -> Float[Array, ""]:
    """Return an upper bound on W_1 between the outputs gamma x + beta and gamma' y + beta' of a layer.

    It is |beta - beta'| + max|gamma| E|x| + max|gamma'| E|y|. So no constant bound survives a trained gamma and beta.

    Args:
        x: outputs after, without gamma and beta.
        y: outputs before, without gamma and beta.
        gamma: gamma after.
        beta: beta after.
        gamma_y: gamma before, if it has moved.
        beta_y: beta before, if it has moved.
    """
    gamma_y, beta_y = (gamma if gamma_y is None else gamma_y), (beta if beta_y is None else beta_y)
    # each side costs its mean norm to be moved to its beta; then one beta moves to the other
    halves = [
        jnp.max(jnp.abs(jnp.asarray(g))) * jnp.mean(jnp.linalg.norm(jnp.asarray(u), axis=1))
        for g, u in ((gamma, x), (gamma_y, y))
    ]
    # one number moves all features
    shift = jnp.broadcast_to(jnp.asarray(beta) - jnp.asarray(beta_y), jnp.shape(x)[1:])
    return jnp.linalg.norm(shift) + halves[0] + halves[1]
