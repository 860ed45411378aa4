"""Geometries of a cloud: what a solver may ask of the space its particles live in.

A ``Space`` is an inverse metric C and the maps that go with it. Its methods take a cloud as base point (labels
and width may enter the metric) and records of the same type as its particles as vectors. Solvers use this
interface only, so they never know which geometry they run on.
"""

from collections.abc import Callable
from typing import Any, Self, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from meanflow import _boundary
from meanflow._matrices import grams
from meanflow._module import Module
from meanflow._numerics import safe_norm
from meanflow._reuse import compiled_if_large
from meanflow.geometry import _omega as omega
from meanflow.measures._cloud import Cloud, Neurons
from meanflow.measures._dataset import Dataset

# A conservation law: maps a cloud to what each neuron conserves and the scale it is measured on, both (m,).
Invariant = Callable[[Cloud], tuple[jax.Array, jax.Array]]


def conserved(square: Callable[[Cloud], jax.Array]) -> Invariant:
    """Return the law that each neuron keeps a square (m,), measured on the scale of the square itself."""
    return lambda cloud: (square(cloud),) * 2


Record: TypeAlias = PyTree[
    jax.Array
]  # particles, tangent vectors and covectors: one array per coordinate, leading axis m


def norms(cloud: Cloud) -> jax.Array:
    """Return the labels c = |b| of a cloud on the batch-norm manifold; 1 if it has none."""
    return jnp.ones_like(cloud.weights) if cloud.labels is None else cloud.labels


def _rows(u: jax.Array) -> jax.Array:
    """Sum over all axes but the first: one number per particle."""
    return jnp.sum(u.reshape(u.shape[0], -1), axis=1)


class Space(Module):
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

    def noise(self, cloud: Cloud, normal: Record) -> Record:
        """Return the tangent vectors S xi with S S' = C, for independent standard normal numbers xi.

        Noise at temperature tau moves a particle by sqrt(2 tau dt) S xi + tau dt ``noise_drift``. S must be linear in
        xi. A space with an inverse metric of its own defines it, or its flows run without noise.
        """
        self._need_flat("temperature needs a space that defines noise(cloud, normal)")
        return normal

    def log_volume(self, cloud: Cloud) -> jax.Array:
        """Return the logarithm of the Riemannian volume per coordinate volume, -1/2 log det C, (m,).

        ``noise_drift`` asks for it where steps are additions of coordinates and C is not constant.
        """
        self._need_flat("temperature needs a space that defines log_volume(cloud)")
        return jnp.zeros_like(cloud.weights)

    def noise_drift(self, cloud: Cloud) -> Record:
        """Return div C - 1/2 C grad log det C, what a noisy step in these coordinates needs beside the noise.

        Without it the stationary law would not be exp(-V/tau) times the Riemannian volume. Noisy steps follow ``exp``,
        and geodesics have it built in (as has whatever agrees with them to second order): the default is zero where a
        space has an ``exp`` of its own, and found by differentiating ``cometric`` and ``log_volume`` where steps are
        additions.
        """
        # geodesics have the drift built in: a step that follows them must not add it again
        if self._is_flat() or type(self).exp is not Space.exp:
            return jax.tree.map(jnp.zeros_like, cloud.particles)
        return ito_drift(self, cloud)

    def check_noise(self, cloud: Cloud) -> None:
        """Raise ValueError if noise cannot run from this cloud: it is not defined here, or C is not smooth."""
        eqx.filter_eval_shape(lambda: (self.noise(cloud, cloud.particles), self.noise_drift(cloud)))

    def dimension(self, cloud: Cloud) -> int:
        """Return the number of coordinates in which a particle can move freely."""
        return sum(u[0].size for u in jax.tree.leaves(cloud.particles))

    def embedding(self, cloud: Cloud) -> jax.Array:
        """Return the particles in a flat space, (m, k): distances of close particles are those of the metric."""
        self._need_flat("an entropy needs a space that defines embedding(cloud)")
        return jnp.concatenate([u.reshape(cloud.size, -1) for u in jax.tree.leaves(cloud.particles)], axis=1)

    def _is_flat(self) -> bool:
        return type(self).cometric is Space.cometric

    def _need_flat(self, wanted: str) -> None:
        if not self._is_flat():
            raise ValueError(f"{wanted}, got {type(self).__name__}")

    def cylinder(self, height: jax.Array, angle: jax.Array) -> Record:
        """Return the particles at the points (height, angle) of the cylinder R x circle, both (k,).

        A space of two dimensions may define it, if the map is an isometry of dh^2 + dangle^2: finite volumes
        (``solvers.eulerian``) then solve the continuity equation of its flows on a grid of heights and angles.
        """
        raise ValueError(
            "flow must live on a flat cylinder for finite volumes (batch norm in the plane, the canonical univariate "
            f"flow), got one on {type(self).__name__}"
        )

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


def ito_drift(space: Space, cloud: Cloud) -> Record:
    """Return div C + C grad log_volume at each particle, by differentiating along every coordinate."""
    leaves, structure = jax.tree.flatten(cloud.particles)
    zeros = [jnp.zeros_like(u) for u in leaves]
    # particles do not meet in C: the gradient of the sum is that of each particle
    total = space.cometric(cloud, jax.grad(lambda w: jnp.sum(space.log_volume(cloud.at(w))))(cloud.particles))
    for k, leaf in enumerate(leaves):
        for column in np.ndindex(leaf.shape[1:]):
            # one column for all particles at once
            unit = list(zeros)
            unit[k] = zeros[k].at[(slice(None), *column)].set(1.0)
            e = jax.tree.unflatten(structure, unit)
            # sum over coordinates j of d_j (C e_j): the divergence, since C is symmetric
            slope = jax.jvp(lambda w, e=e: space.cometric(cloud.at(w), e), (cloud.particles,), (e,))[1]
            total = jax.tree.map(jnp.add, total, slope)
    return total


COVARIANCE = grams()


class BatchNormManifold(Space):
    """R x Omega with da^2 + c^2 G: the geometry that batch norm gives to neurons of raw norm c (the labels).

    Coordinates other than b, such as a and the trainable scale and shift of a layer, are flat. If the covariance is
    singular, ``from_raw`` maps to its range, with c = |P b| the norm of the part of b there. (All formulas are those of
    raw neurons b = c bb/|bb| for any bb, so that nothing else depends on the rank.)

    Attributes:
        covariance: (d, d) covariance of the inputs, or None until ``bind``.
        null: (d, d) projector on the null space of the covariance; None if that is regular, or not known yet.
    """

    covariance: jax.Array | None
    null: jax.Array | None

    def __init__(self, covariance: jax.Array | None = None) -> None:
        self.covariance = None if covariance is None else COVARIANCE("covariance", covariance)
        if self.covariance is not None:
            _boundary.shape("covariance", self.covariance, (None, None))
        self.null = None if self.covariance is None else omega.null_projector(self.covariance)

    def bind(self, data: Dataset) -> Self:
        """Take the covariance of the data unless one was given."""
        if self.covariance is not None:
            return self
        return type(self)(data.moments()[1])

    def check(self, cloud: Cloud) -> None:
        """Raise ValueError unless labels are positive norms and the particles lie on Omega."""
        if cloud.labels is not None:
            _boundary.bounds("labels (the norms c = |b|)", cloud.labels, above=0.0)
        if self.covariance is None:
            return
        hint = "meanflow.geometry.project maps raw neurons there"
        found = _boundary.concrete(_length_range(cloud.particles.b, self.covariance))
        if found is not None and not np.max(np.abs(found - 1)) <= 1e-3:  # NaN too
            raise ValueError(
                "particles.b must lie on Omega (b' S b = 1), "
                f"got |b|_S from {found[0]:.3g} to {found[1]:.3g}; {hint}"
            )

    @property
    def label_name(self) -> str | None:
        """The labels are the norms c = |b| of the raw neurons."""
        return "norm"

    def invariant(self) -> Invariant | None:
        """Return b'Sb, which is 1 on Omega."""
        return conserved(lambda cloud: omega.sigma_norm(cloud.particles.b, self._covariance())[:, 0] ** 2)

    def _covariance(self) -> jax.Array:
        if self.covariance is None:
            raise ValueError("Omega needs a covariance; call flow.bind(data) first or pass covariance=")
        return self.covariance

    def from_raw(self, cloud: Cloud) -> Cloud:
        """Map raw (a, b) to (a, T(P b)); the labels are |P b| unless given."""
        b = cloud.particles.b
        # the flow never moves the part of b in the null space, and no prediction depends on it
        b = b if self.null is None else b - b @ self.null
        particles = cloud.particles._replace(b=omega.normalize(b, self._covariance()))
        labels = jnp.linalg.norm(b, axis=-1) if cloud.labels is None else cloud.labels
        return Cloud(particles, cloud.weights, labels, width=cloud.width)

    def cometric(self, cloud: Cloud, covector: Record) -> Record:
        """Return G^-1 g_b / c^2, and the other coordinates of g as they are."""
        b = omega.cometric_apply(cloud.particles.b, covector.b, self._covariance())
        return covector._replace(b=b / norms(cloud)[:, None] ** 2)

    def inner(self, cloud: Cloud, u: Record, v: Record) -> jax.Array:
        """Return <u_a, v_a> + c^2 <u_b, v_b>_G, and the like for further flat coordinates."""
        flat = sum(_rows(p * q) for p, q in zip(_flat(u), _flat(v), strict=True))
        return flat + norms(cloud) ** 2 * omega.inner(cloud.particles.b, u.b, v.b)

    def cylinder(self, height: jax.Array, angle: jax.Array) -> Neurons:
        """Return a = height and b = T(cos, sin), for inputs in the plane and neurons of raw norm 1."""
        covariance = self._covariance()
        if covariance.shape != (2, 2):
            raise ValueError(
                f"x must have shape (n, 2) for finite volumes, got inputs of {len(covariance)} dimensions"
            )
        direction = jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=-1)
        return Neurons(height, omega.normalize(direction, covariance))

    def retract(self, cloud: Cloud, v: Record) -> Record:
        """Return the end of a raw gradient step followed by renormalisation to |b| = c."""
        moved = Space.exp(self, cloud, v)
        return moved._replace(b=omega.retract(cloud.particles.b, v.b, self._covariance()))

    def noise(self, cloud: Cloud, normal: Record) -> Record:
        """Return (xi_a, |bb| (I - bb u') xi_b / c): white noise on flat coordinates and on a sphere of radius c."""
        b = cloud.particles.b
        # projecting along bb keeps S S' = G^-1, as (I - bb u') stands on both sides of it
        turn = safe_norm(b, keepdims=True) * omega.project(b, normal.b, self._covariance())
        return normal._replace(b=turn / norms(cloud)[:, None])

    def check_noise(self, cloud: Cloud) -> None:
        """Refuse a singular covariance, whose Omega is smaller than its coordinates."""
        if omega.null_projector(self._covariance()) is not None:
            raise ValueError("temperature needs a regular covariance on the manifold, got a singular one")

    def embedding(self, cloud: Cloud) -> jax.Array:
        """Return (a, c b/|b|): the line and a sphere of radius c."""
        turn = norms(cloud)[:, None] * omega.direction(cloud.particles.b)
        flat = [u.reshape(cloud.size, -1) for u in _flat(cloud.particles)]
        return jnp.concatenate([*flat, turn], axis=1)

    def dimension(self, cloud: Cloud) -> int:
        """Return 1 for a and d - 1 for the direction."""
        return super().dimension(cloud) - 1

    def exp(self, cloud: Cloud, v: Record) -> Record:
        """Return the endpoint of a geodesic: straight in a, a great circle in the direction of b."""
        moved = Space.exp(self, cloud, v)
        return moved._replace(b=omega.exp(cloud.particles.b, v.b, self._covariance()))

    def log(self, cloud: Cloud, particles: Record) -> Record:
        """Return the tangent vector of the geodesic to ``particles``, the inverse of ``exp``."""
        apart = Space.log(self, cloud, particles)
        return apart._replace(b=omega.log(cloud.particles.b, particles.b, self._covariance()))

    def distance(self, cloud: Cloud, particles: Record) -> jax.Array:
        """Return sqrt(|a - a'|^2 + c^2 angle^2), which does not depend on the covariance."""
        turn = norms(cloud) * omega.distance(cloud.particles.b, particles.b)
        apart = _flat(Space.log(self, cloud, particles))
        return safe_norm(jnp.concatenate([u.reshape(cloud.size, -1) for u in (*apart, turn)], axis=-1))


@compiled_if_large
def _length_range(xp: Any, b: jax.Array, covariance: jax.Array) -> jax.Array:
    """Return the least and the largest |b|_S; ``xp`` is numpy or jax.numpy."""
    square = xp.sum(b * (b @ covariance), axis=-1)
    return xp.sqrt(xp.stack([xp.min(square), xp.max(square)]))


def _flat(record: Record) -> list[jax.Array]:
    """Return the coordinates of neurons on the manifold that are flat: all but b."""
    return [value for name, value in record._asdict().items() if name != "b"]
