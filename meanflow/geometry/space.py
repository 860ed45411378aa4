"""Geometries of a cloud: what a solver may ask of the space its particles live in.

A ``Space`` is an inverse metric C and the maps that go with it. Its methods take a cloud as base point (labels
and width may enter the metric) and records of the same type as its particles as vectors. Solvers use this
interface only, so they never know which geometry they run on.
"""

from collections.abc import Callable
from typing import Self, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from meanflow import _checks
from meanflow._numerics import safe_norm
from meanflow.geometry import lifts, omega
from meanflow.geometry.lifts import norms
from meanflow.measures.cloud import Cloud, Neurons
from meanflow.measures.dataset import Dataset

# A conservation law: maps a cloud to what each neuron conserves and the scale it is measured on, both (m,).
Invariant = Callable[[Cloud], tuple[jax.Array, jax.Array]]

Record: TypeAlias = PyTree[
    jax.Array
]  # particles, tangent vectors and covectors: one array per coordinate, leading axis m


def _rows(u: jax.Array) -> jax.Array:
    """Sum over all axes but the first: one number per particle."""
    return jnp.sum(u.reshape(u.shape[0], -1), axis=1)


class Space(eqx.Module):
    """Flat space: C = identity. Other geometries override what differs."""

    @property
    def label_name(self) -> str | None:
        """What the label of a particle stands for, a short name such as ``"delta"``; None without labels."""
        return None

    def bind(self, data: Dataset) -> Self:
        """Fix what the metric takes from the data (the covariance, under batch norm)."""
        return self

    def check(self, cloud: Cloud) -> None:
        """Raise ValueError if the cloud's labels or particles do not fit this space."""

    def from_raw(self, cloud: Cloud) -> Cloud:
        """Map raw neurons into this space's coordinates."""
        return cloud

    def invariant(self) -> Invariant | None:
        """Return what the points of this space obey at any time, whatever the flow; None if they are free."""
        return None

    def cometric(self, cloud: Cloud, covector: Record) -> Record:
        """Return C(w) g: the gradient in the metric from a differential g."""
        return covector

    def inner(self, cloud: Cloud, u: Record, v: Record) -> jax.Array:
        """Return <u, v> in the metric C^-1 for tangent vectors u and v, one number per particle (m,)."""
        return jnp.sum(jnp.stack(jax.tree.leaves(jax.tree.map(lambda p, q: _rows(p * q), u, v))), axis=0)

    def retract(self, cloud: Cloud, v: Record) -> Record:
        """Return a point reached by moving along ``v`` that stays in the space; agrees with exp to second order."""
        return self.exp(cloud, v)

    def exp(self, cloud: Cloud, v: Record) -> Record:
        """Return the endpoints of the geodesics with initial velocities ``v``."""
        return jax.tree.map(jnp.add, cloud.particles, v)

    def log(self, cloud: Cloud, particles: Record) -> Record:
        """Return the tangent vectors that ``exp`` maps to ``particles``."""
        return jax.tree.map(jnp.subtract, particles, cloud.particles)

    def distance(self, cloud: Cloud, particles: Record) -> jax.Array:
        """Return the geodesic distance of each particle to its partner in ``particles`` (m,)."""
        v = self.log(cloud, particles)
        return jnp.sqrt(self.inner(cloud, v, v))


class Layers(Space):
    """Flat space of two-layer neurons (a, b) whose layers learn at rates of their own: C = diag(outer, inner, ...).

    Attributes:
        inner_rate: of b; 0 where it is frozen.
        outer_rate: of a.
    """

    inner_rate: float
    outer_rate: float

    def cometric(self, cloud: Cloud, covector: Neurons) -> Neurons:
        """Return (outer g_a, inner g_b)."""
        return Neurons(self.outer_rate * covector.a, self.inner_rate * covector.b)


class BatchNormManifold(Space):
    """R x Omega with da^2 + c^2 G: the geometry that batch norm gives to neurons of raw norm c (the labels).

    Attributes:
        sigma: (d, d) covariance of the inputs, or None until ``bind``.
    """

    sigma: jax.Array | None = None

    def bind(self, data: Dataset) -> Self:
        """Take the covariance of the data unless one was given."""
        if self.sigma is not None:
            return self
        return eqx.tree_at(lambda s: s.sigma, self, data.moments()[1], is_leaf=lambda x: x is None)

    def check(self, cloud: Cloud) -> None:
        """Raise ValueError unless labels are positive norms and the particles lie on Omega."""
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

    @property
    def label_name(self) -> str | None:
        """The labels are the norms c = |b| of the raw neurons."""
        return "norm"

    def invariant(self) -> Invariant | None:
        """Return b'Sb, which is 1 on Omega."""

        def constraint(cloud: Cloud) -> tuple[jax.Array, jax.Array]:
            square = omega.sigma_norm(cloud.particles.b, self._covariance())[:, 0] ** 2
            return square, square

        return constraint

    def _covariance(self) -> jax.Array:
        if self.sigma is None:
            raise ValueError("Omega needs a covariance; call flow.bind(data) first or pass covariance=")
        return self.sigma

    def from_raw(self, cloud: Cloud) -> Cloud:
        """Map raw (a, b) to (a, T(b)); the labels are |b| unless given."""
        moved = lifts.project(cloud, self._covariance())
        return (
            moved
            if cloud.labels is None
            else Cloud(moved.particles, moved.weights, cloud.labels, width=cloud.width)
        )

    def cometric(self, cloud: Cloud, covector: Neurons) -> Neurons:
        """Return (g_a, G^-1 g_b / c^2)."""
        b = omega.cometric_apply(cloud.particles.b, covector.b, self._covariance())
        return covector._replace(b=b / norms(cloud)[:, None] ** 2)

    def inner(self, cloud: Cloud, u: Neurons, v: Neurons) -> jax.Array:
        """Return <u_a, v_a> + c^2 <u_b, v_b>_G."""
        return _rows(u.a * v.a) + norms(cloud) ** 2 * omega.inner(cloud.particles.b, u.b, v.b)

    def retract(self, cloud: Cloud, v: Neurons) -> Neurons:
        """Return the end of a raw gradient step followed by renormalisation to |b| = c."""
        a, b = cloud.particles
        return Neurons(a + v.a, omega.retract(b, v.b, self._covariance()))

    def exp(self, cloud: Cloud, v: Neurons) -> Neurons:
        """Return the endpoint of a geodesic: straight in a, a great circle in the direction of b."""
        a, b = cloud.particles
        return Neurons(a + v.a, omega.exp(b, v.b, self._covariance()))

    def log(self, cloud: Cloud, particles: Neurons) -> Neurons:
        """Return the tangent vector of the geodesic to ``particles``, the inverse of ``exp``."""
        a, b = cloud.particles
        return Neurons(particles.a - a, omega.log(b, particles.b, self._covariance()))

    def distance(self, cloud: Cloud, particles: Neurons) -> jax.Array:
        """Return sqrt(|a - a'|^2 + c^2 angle^2), which does not depend on the covariance."""
        a, b = cloud.particles
        turn = norms(cloud) * omega.distance(b, particles.b)
        return safe_norm(jnp.concatenate([(particles.a - a).reshape(cloud.size, -1), turn[:, None]], axis=-1))
