"""Neurons in the plane (u, v) = |r| d(theta), eq. (6) of "univariate ReLU"."""

import jax.numpy as jnp


def to_plane(particles):
    """Return (u, v) of each ``Polar`` neuron, (m, 2). The sign of r is lost."""
    r, theta = particles
    return jnp.abs(r)[:, None] * jnp.stack([jnp.cos(theta), jnp.sin(theta)], axis=-1)
