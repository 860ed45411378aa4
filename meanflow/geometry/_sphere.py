"""The round unit sphere of R^d: angle, exponential and logarithm. Vectors are (..., d)."""

import jax
import jax.numpy as jnp

from meanflow._numerics import safe_norm


def dot(u: jax.Array, v: jax.Array) -> jax.Array:
    """Return the inner product over the last axis, which is kept with length 1."""
    return jnp.sum(u * v, axis=-1, keepdims=True)


@jax.jit
def angle(p: jax.Array, q: jax.Array) -> jax.Array:
    """Return the geodesic distance of unit vectors, 2 atan2(|p-q|, |p+q|): accurate at 0 and at pi. Shape (...)."""
    # the arc cosine of p . q would lose half of the digits near 0 and pi
    return 2 * jnp.arctan2(safe_norm(p - q), safe_norm(p + q))


@jax.jit
def exp(p: jax.Array, v: jax.Array) -> jax.Array:
    """Return the endpoint of the geodesic from ``p`` with initial velocity ``v`` (tangent at p), after unit time."""
    length = safe_norm(v, keepdims=True)
    return jnp.cos(length) * p + jnp.sinc(length / jnp.pi) * v


@jax.jit
def log(p: jax.Array, q: jax.Array) -> jax.Array:
    """Return the tangent vector v at ``p`` with exp(p, v) = q; NaN for antipodal points, which many geodesics join."""
    turn = angle(p, q)[..., None]
    # rounding leaves a vector of no meaning (often zero) where p and q are antipodal
    antipodal = safe_norm(p + q, keepdims=True) <= 4 * jnp.finfo(turn.dtype).eps
    return jnp.where(antipodal, jnp.nan, (q - jnp.cos(turn) * p) / jnp.sinc(turn / jnp.pi))
