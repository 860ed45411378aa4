"""Numerics that several rooms share: safe roots and quotients, angles.

The functions named ``safe_*`` are ordinary formulas that also have a finite derivative where the textbook form
has none. ``jnp.where(u > 0, jnp.sqrt(u), 0)`` is not enough: reverse mode differentiates the branch that was
not taken as well and multiplies its infinite derivative by zero, which gives NaN. So the argument is replaced
before the root is taken, and the result afterwards.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float


def safe_sqrt(u: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return sqrt(u), and 0 with derivative 0 where u <= 0 (elementwise).

    >>> float(jax.grad(safe_sqrt)(0.0)), float(safe_sqrt(jnp.array(4.0)))
    (0.0, 2.0)
    """
    positive = u > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, u, 1.0)), 0.0)


def safe_divide(u: Float[Array, "..."], v: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return u / v, and 0 with derivative 0 where v = 0 (elementwise).

    >>> safe_divide(jnp.array([1.0, 1.0]), jnp.array([2.0, 0.0])).tolist()
    [0.5, 0.0]
    """
    nonzero = v != 0
    return jnp.where(nonzero, u / jnp.where(nonzero, v, 1.0), 0.0)


def wrap_angle(turn: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return the angle in [-pi, pi] that equals ``turn`` up to whole turns (radians, elementwise).

    >>> round(float(wrap_angle(jnp.array(1.5 * jnp.pi))), 4)
    -1.5708
    """
    return jnp.arctan2(jnp.sin(turn), jnp.cos(turn))
