"""Bounds on W_1 between a layer's outputs at two times: the theorems of the unitization paper, corrected.

Formulas take samples x (after) and y (before), (N, d) and (M, d), use population moments, hold for the
empirical measures themselves and are pure JAX. r denotes |x|, a = min alpha. What the paper printed stands
beside these bounds in ``meanflow_papers.unitization.bounds``.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from meanflow import _checks


@jax.jit
def moment_bound(x: jax.Array, y: jax.Array) -> jax.Array:
    """Upper bound sqrt(sum var + sum var' + |dmu|^2) from two moments (Theorem 1, corrected).

    It follows from the independent coupling and W_1 <= W_2, and it is sharp:

    >>> dirac, pair = jnp.zeros((2, 1)), jnp.array([[-2.0], [2.0]])
    >>> print(moment_bound(pair, dirac), wasserstein(pair, dirac))
    2.0 2.0
    """
    spread = jnp.sum(jnp.var(x, axis=0)) + jnp.sum(jnp.var(y, axis=0))
    shift = jnp.sum(jnp.square(jnp.mean(x, axis=0) - jnp.mean(y, axis=0)))
    return jnp.sqrt(spread + shift)


def standardized_bound(dimension: int) -> float:
    """Upper bound sqrt(2d) for d features of mean 0 and variance 1 ((4), corrected)."""
    return (2.0 * dimension) ** 0.5


def truncated_power(x: jax.Array, p: int, c: float | jax.Array) -> jax.Array:
    """f_{p,C}(x) = sum_i clip(x_i, -C, C)^p / (p C^(p-1) sqrt(d)), a 1-Lipschitz function; (N, d) -> (N,)."""
    p = _checks.whole("p", p, 1)
    _checks.at_least("c", c, 0.0, strict=True)
    ratio = jnp.clip(x / c, -1, 1)  # scaled first: C^p overflows float32 early
    return c * jnp.sum(ratio**p, axis=-1) / (p * x.shape[-1] ** 0.5)


def power_bound(x: jax.Array, y: jax.Array, p: int, c: float | jax.Array) -> jax.Array:
    """Lower bound |E f_{p,C}(x) - E f_{p,C}(y)| (Theorem 2; the paper asks p >= 2, p = 1 is valid too)."""
    return jnp.abs(jnp.mean(truncated_power(x, p, c)) - jnp.mean(truncated_power(y, p, c)))


def noise_bound(x: jax.Array, y: jax.Array, c: float) -> jax.Array:
    """Lower bound (5): the p = 2 bound written with the errors of mean and variance of standardised outputs.

    | sum_i (mu_i')^2 + (var_i' - 1) - mu_i^2 - (var_i - 1) | / (2 C sqrt(d)), for supports in [-C, C]^d.
    """
    noise = [jnp.sum(jnp.square(jnp.mean(u, axis=0)) + jnp.var(u, axis=0) - 1) for u in (x, y)]
    return jnp.abs(noise[0] - noise[1]) / (2 * c * x.shape[1] ** 0.5)


@partial(jax.jit, static_argnames="orders")
def best_power_bound(x: jax.Array, y: jax.Array, orders: tuple[int, ...] = (1, 2, 3, 4)) -> jax.Array:
    """The largest ``power_bound`` over orders and a grid of C from 1/16 to 1 times the largest entry."""
    top = jnp.maximum(jnp.max(jnp.abs(x)), jnp.max(jnp.abs(y)))
    top = jnp.where(top > 0, top, 1)
    scales = top * jnp.geomspace(1 / 16, 1, 9, dtype=top.dtype)
    return jnp.max(jnp.stack([jax.vmap(lambda c, p=p: power_bound(x, y, p, c))(scales) for p in orders]))


def harmonic_norm(r: jax.Array, alpha: jax.Array) -> jax.Array:
    """The largest norm (9) gives a vector of norm r: r/(1+a(r-1)), a = min alpha if r >= 1, else the max."""
    low, high = jnp.min(alpha), jnp.max(alpha)
    alpha = jnp.where(r >= 1, low, high)
    scale = 1 + alpha * (r - 1)
    return jnp.where(scale > 0, r / jnp.where(scale > 0, scale, 1), 0)


@partial(jax.jit, static_argnames="interpolation")
def unitized_bound(
    x: jax.Array,
    y: jax.Array,
    alpha: Any,
    *,
    interpolation: str = "linear",
    alpha_y: Any = None,
) -> jax.Array:
    """Upper bound on W_1 between unitize(x, alpha) and unitize(y, alpha), from the norms r = |x| and |y|.

        harmonic   E h(r) + E h(r') with h = ``harmonic_norm``; always <= 2 / a
        linear     2 + (1 - a) (E(r - 1)_+ + E(r' - 1)_+) for alpha in [0, 1]; sharp
                   2 max|alpha| + max|1 - alpha| (E r + E r') for any alpha

    The bound 2 / a of Theorem 3.3 is true of the harmonic form (9) only; the linear form (10), which the paper
    runs, violates it without limit.

    Args:
        x: inputs of the map after, (N, d).
        y: inputs of the map before, (M, d).
        alpha: number or (d,).
        interpolation: ``"linear"`` or ``"harmonic"``.
        alpha_y: alpha before, where it has moved.
    """
    _checks.one_of("interpolation", interpolation, ("linear", "harmonic"))
    after, before = jnp.asarray(alpha, x.dtype), jnp.asarray(alpha if alpha_y is None else alpha_y, x.dtype)
    sides = [(jnp.linalg.norm(x, axis=1), after), (jnp.linalg.norm(y, axis=1), before)]
    half = _harmonic_half if interpolation == "harmonic" else _linear_half
    return half(*sides[0]) + half(*sides[1])


def _harmonic_half(r: jax.Array, alpha: jax.Array) -> jax.Array:
    return jnp.mean(harmonic_norm(r, alpha))


def _linear_half(r: jax.Array, alpha: jax.Array) -> jax.Array:
    inside = jnp.all((alpha >= 0) & (alpha <= 1))
    tight = 1 + (1 - jnp.min(alpha)) * jnp.mean(jnp.maximum(r - 1, 0))
    loose = jnp.max(jnp.abs(alpha)) + jnp.max(jnp.abs(1 - alpha)) * jnp.mean(r)
    return jnp.where(inside, tight, loose)


def unitized_standardized_bound(dimension: int, alpha_min: float) -> float:
    """Upper bound for the practical form (10) after exact standardisation, alpha in [0, 1]^d, a its minimum.

    2 (a + (1 - a) sqrt(d)) for d >= 4 and 2 + (1 - a) d / 2 below; at a = 0 the smaller sqrt(2d) holds
    only if all alpha are 0.
    """
    if not 0 <= alpha_min <= 1:
        raise ValueError(f"alpha_min must lie in [0, 1], got {alpha_min}")
    if dimension >= 4:
        return 2 * (alpha_min + (1 - alpha_min) * dimension**0.5)
    return 2 + (1 - alpha_min) * dimension / 2


def output_bound(
    x: jax.Array, y: jax.Array, gamma: Any, beta: Any, gamma_y: Any = None, beta_y: Any = None
) -> jax.Array:
    """Upper bound on the layer outputs gamma x + beta and gamma' y + beta' after the affine map.

    |beta - beta'| + max|gamma| E|x| + max|gamma'| E|y|, with x, y the unaffined outputs: no constant bound
    survives a trained gamma and beta.
    """
    gamma_y, beta_y = (gamma if gamma_y is None else gamma_y), (beta if beta_y is None else beta_y)
    halves = [
        jnp.max(jnp.abs(jnp.asarray(g))) * jnp.mean(jnp.linalg.norm(u, axis=1))
        for g, u in ((gamma, x), (gamma_y, y))
    ]
    return jnp.linalg.norm(jnp.asarray(beta) - jnp.asarray(beta_y)) + halves[0] + halves[1]
