"""Changes of coordinates between raw and reduced neurons under batch norm."""

import jax
import jax.numpy as jnp

from meanflow.geometry import omega
from meanflow.measures.cloud import Cloud, Neurons


def norms(cloud: Cloud) -> jax.Array:
    """Return the labels c = |b| of a cloud on the batch-norm manifold; 1 if it has none."""
    return jnp.ones_like(cloud.weights) if cloud.labels is None else cloud.labels


def project(cloud: Cloud, sigma: jax.Array) -> Cloud:
    """Map raw neurons (a, b) to the batch-norm manifold: (a, T(b)) with label c = |b|, which the flow conserves."""
    a, b = cloud.particles
    length = jnp.linalg.norm(b, axis=-1)
    return Cloud(Neurons(a, omega.normalize(b, sigma)), cloud.weights, length, width=cloud.width)


def lift(cloud: Cloud) -> Cloud:
    """Invert ``project``: map (a, bb) with labels c (m,) to (a, b), b = c bb/|bb| (m, d)."""
    a, bb = cloud.particles
    raw = norms(cloud)[:, None] * omega.direction(bb)
    return Cloud(Neurons(a, raw), cloud.weights, width=cloud.width)
