"""Geometries of a cloud: what a solver may ask of the space its particles live in.

A ``Space`` is an inverse metric C and the maps that go with it. Its methods take a cloud as base point (labels
and width may enter the metric) and records of the same type as its particles as vectors. Solvers use this
interface only, so they never know which geometry they run on.
"""

from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from meanflow import _checks
from meanflow._numerics import safe_norm, wrap_angle
from meanflow.geometry import lifts, omega
from meanflow.geometry.lifts import norms
from meanflow.measures.cloud import Cloud, Neurons, Polar
from meanflow.measures.dataset import Dataset


def _rows(u: jax.Array) -> jax.Array:
    """Sum over all axes but the first: one number per particle."""
    return jnp.sum(u.reshape(u.shape[0], -1), axis=1)


class Space(eqx.Module):
    """Flat space: C = identity. Other geometries override what differs."""

    def bind(self, data: Dataset) -> Self:
        """Fixes what the metric takes from the data (the covariance, under batch norm)."""
        return self

    def check(self, cloud: Cloud) -> None:
        """Raises ValueError if the cloud's labels or particles do not fit this space."""

    def settle(self, cloud: Cloud) -> Cloud:
        """Brings freshly drawn raw particles into the coordinates of this space."""
        return cloud

    def cometric(self, cloud: Cloud, covector: Any) -> Any:
        """C(w) g: turns differentials into gradients of the metric."""
        return covector

    def inner(self, cloud: Cloud, u: Any, v: Any) -> jax.Array:
        """<u, v> in the metric C^-1 for tangent vectors, one number per particle (m,)."""
        return jnp.sum(jnp.stack(jax.tree.leaves(jax.tree.map(lambda p, q: _rows(p * q), u, v))), axis=0)

    def retract(self, cloud: Cloud, v: Any) -> Any:
        """A point reached by moving along ``v`` that stays in the space; agrees with exp to second order."""
        return self.exp(cloud, v)

    def exp(self, cloud: Cloud, v: Any) -> Any:
        """Endpoints of the geodesics with initial velocities ``v``."""
        return jax.tree.map(jnp.add, cloud.particles, v)

    def log(self, cloud: Cloud, particles: Any) -> Any:
        """Tangent vectors that ``exp`` maps to ``particles``."""
        return jax.tree.map(jnp.subtract, particles, cloud.particles)

    def distance(self, cloud: Cloud, particles: Any) -> jax.Array:
        """Geodesic distance of each particle to its partner in ``particles`` (m,)."""
        v = self.log(cloud, particles)
        return jnp.sqrt(self.inner(cloud, v, v))


class Cylinder(Space):
    """R x circle with coordinates (r, theta) and the flat metric dr^2 + dtheta^2."""

    def log(self, cloud: Cloud, particles: Polar) -> Polar:
        """Shortest way round the circle."""
        r, theta = cloud.particles
        return Polar(particles.r - r, wrap_angle(particles.theta - theta))


class BatchNormManifold(Space):
    """R x Omega with da^2 + c^2 G: the geometry that batch norm gives to neurons of raw norm c (the labels).

    Attributes:
        sigma: (d, d) covariance of the inputs, or None until ``bind``.
    """

    sigma: Any = None

    def bind(self, data: Dataset) -> Self:
        """Takes the covariance of the data unless one was given."""
        if self.sigma is not None:
            return self
        return eqx.tree_at(lambda s: s.sigma, self, data.moments()[1], is_leaf=lambda x: x is None)

    def check(self, cloud: Cloud) -> None:
        """Labels must be positive norms and the particles must lie on Omega."""
        if cloud.labels is not None:
            _checks.at_least("labels (the norms c = |b|)", cloud.labels, 0.0, strict=True)
        if self.sigma is None:
            return
        length = _checks.concrete(omega.sigma_norm(cloud.particles.b, self.sigma))
        if length is not None and np.max(np.abs(length - 1)) > 1e-3:
            raise ValueError(
                f"particles.b must lie on Omega (b' S b = 1), got |b|_S from {length.min():.3g} to {length.max():.3g}; "
                "meanflow.geometry.project maps raw neurons there"
            )

    def settle(self, cloud: Cloud) -> Cloud:
        """Raw (a, b) to (a, T(b)); the labels are |b| unless given."""
        if self.sigma is None:
            raise ValueError("Omega needs a covariance; call flow.bind(data) first or pass covariance=")
        moved = lifts.project(cloud, self.sigma)
        return (
            moved
            if cloud.labels is None
            else Cloud(moved.particles, moved.weights, cloud.labels, width=cloud.width)
        )

    def cometric(self, cloud: Cloud, covector: Neurons) -> Neurons:
        """(g_a, G^-1 g_b / c^2)."""
        b = omega.cometric_apply(cloud.particles.b, covector.b, self.sigma)
        return Neurons(covector.a, b / norms(cloud)[:, None] ** 2)

    def inner(self, cloud: Cloud, u: Neurons, v: Neurons) -> jax.Array:
        """u_a v_a + c^2 <u_b, v_b>_G."""
        return u.a * v.a + norms(cloud) ** 2 * omega.inner(cloud.particles.b, u.b, v.b)

    def retract(self, cloud: Cloud, v: Neurons) -> Neurons:
        """A raw gradient step followed by renormalisation to |b| = c."""
        a, b = cloud.particles
        return Neurons(a + v.a, omega.retract(b, v.b, self.sigma))

    def exp(self, cloud: Cloud, v: Neurons) -> Neurons:
        """Straight in a, great circle in the direction of b."""
        a, b = cloud.particles
        return Neurons(a + v.a, omega.exp(b, v.b, self.sigma))

    def log(self, cloud: Cloud, particles: Neurons) -> Neurons:
        """Inverse of ``exp``."""
        a, b = cloud.particles
        return Neurons(particles.a - a, omega.log(b, particles.b, self.sigma))

    def distance(self, cloud: Cloud, particles: Neurons) -> jax.Array:
        """sqrt(|a - a'|^2 + c^2 angle^2); independent of the covariance."""
        a, b = cloud.particles
        turn = norms(cloud) * omega.distance(b, particles.b)
        return safe_norm(jnp.stack([particles.a - a, turn], axis=-1))
