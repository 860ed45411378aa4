"""Changes of coordinates between raw and reduced neurons under batch norm."""

import jax
import jax.numpy as jnp

from meanflow.geometry import _omega as omega
from meanflow.measures._cloud import Cloud


def norms(cloud: Cloud) -> jax.Array:
    """Return the labels c = |b| of a cloud on the batch-norm manifold; 1 if it has none."""
    return jnp.ones_like(cloud.weights) if cloud.labels is None else cloud.labels


def project(cloud: Cloud, covariance: jax.Array, null: jax.Array | None = None) -> Cloud:
    """Map raw neurons (a, b) to the batch-norm manifold: (a, T(P b)) with label c = |P b|, which the flow conserves.

    ``null`` is the projector I - P on the null space of ``covariance``; None stands for P = I.
    """
    b = cloud.particles.b
    b = b if null is None else b - b @ null
    particles = cloud.particles._replace(b=omega.normalize(b, covariance))
    return Cloud(particles, cloud.weights, jnp.linalg.norm(b, axis=-1), width=cloud.width)


def lift(cloud: Cloud) -> Cloud:
    """Invert ``project``: map (a, bb) with labels c (m,) to (a, b), b = c bb/|bb| (m, d)."""
    raw = norms(cloud)[:, None] * omega.direction(cloud.particles.b)
    return Cloud(cloud.particles._replace(b=raw), cloud.weights, width=cloud.width)
