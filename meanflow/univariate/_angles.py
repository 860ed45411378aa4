"""Directions of univariate neurons as angles and as vectors in the plane (a, -b)."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def angle_of(p: Float[Array, "*m 2"]) -> Float[Array, "*m"]:
    """Return the angle atan2(p_2, p_1) in (-pi, pi] of each vector; 0 with derivative 0 at the origin."""
    # by columns, which a compiler fuses; sums over pairs are loops of their own
    along, up = p[..., 0], p[..., 1]
    good = (along != 0) | (up != 0)
    return jnp.where(good, jnp.arctan2(up, jnp.where(good, along, 1.0)), 0.0)


def unit(theta: Float[Array, "*m"]) -> Float[Array, "*m 2"]:
    """Return the unit vector d(theta) = (cos theta, sin theta) of each angle."""
    return jnp.stack([jnp.cos(theta), jnp.sin(theta)], axis=-1)
