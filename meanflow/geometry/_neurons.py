"""Spaces of two-layer neurons beside the flat one: layers with rates of their own; signed directions."""

import abc
from collections.abc import Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanflow import _boundary
from meanflow._numerics import safe_divide, safe_norm
from meanflow.geometry import _sphere as sphere
from meanflow.geometry._space import Invariant, Space, conserved
from meanflow.geometry._sphere import dot
from meanflow.measures._cloud import Affine, Cloud, Neurons

Record: TypeAlias = Any  # of one number or vector for each coordinate of the neurons


class RatedSpace(Space):
    """Flat neurons whose layers learn at rates of their own, C = diag(inner, outer); rate 0 freezes a layer.

    They are (a, b) with the outer weight a, or (a, b, c) with the outer weight c. A subclass says in ``rates`` how fast
    each layer learns; the sliding solver then knows its exact motion.
    """

    @abc.abstractmethod
    def rates(self, cloud: Cloud) -> tuple[Float[Array, " m"], Float[Array, " m"]]:
        """Return the rates of the inner and of the outer layer, one number for each neuron."""

    def cometric(self, cloud: Cloud, covector: Record) -> Record:
        """Return the covector times the rates."""
        return _scaled(covector, *self.rates(cloud))

    def inner(self, cloud: Cloud, u: Record, v: Record) -> jax.Array:
        """Return the products of the coordinates over the rates; frozen directions count as 0."""
        # the metric of a frozen layer is infinite; its tangent vectors are 0, and count as such
        return Space.inner(self, cloud, _scaled(u, *_inverse(self.rates(cloud))), v)

    def noise(self, cloud: Cloud, normal: Record) -> Record:
        """Return white noise times the roots of the rates; a layer that is frozen has none."""
        return _scaled(normal, *(jnp.sqrt(rate) for rate in self.rates(cloud)))

    def embedding(self, cloud: Cloud) -> jax.Array:
        """Return the coordinates, each over the root of its rate; a frozen layer stays at 0."""
        shares = (jnp.sqrt(share) for share in _inverse(self.rates(cloud)))
        return Space.embedding(Space(), cloud.at(_scaled(cloud.particles, *shares)))

    def noise_drift(self, cloud: Cloud) -> Record:
        """Return zero: the rates do not depend on the neuron's place."""
        return jax.tree.map(jnp.zeros_like, cloud.particles)


class LayerRates(RatedSpace):
    """Layers with given rates, >= 0: scalars, or one number per neuron (m,); they may be traced.

    Attributes:
        inner_rate, outer_rate: those of the two layers.
    """

    inner_rate: Float[Array, "*m"]
    outer_rate: Float[Array, "*m"]

    def check(self, cloud: Cloud) -> None:
        """Raise ValueError unless rates are single numbers, or one per neuron."""
        for name, rate in (("inner", self.inner_rate), ("outer", self.outer_rate)):
            _boundary.shape(name, rate, (), cloud.weights.shape)

    def rates(self, cloud: Cloud) -> tuple[Float[Array, " m"], Float[Array, " m"]]:
        """Return the rates, broadcast to one number for each neuron."""
        one = jnp.ones_like(cloud.weights)
        return self.inner_rate.astype(one.dtype) * one, self.outer_rate.astype(one.dtype) * one


def _inverse(rates: tuple[jax.Array, jax.Array]) -> Iterator[jax.Array]:
    return (safe_divide(jnp.ones_like(rate), rate) for rate in rates)


def _scaled(record: Record, inner: jax.Array, outer: jax.Array) -> Record:
    """Return the coordinates times the numbers (m,) of their layer."""
    last = "c" if isinstance(record, Affine) else "a"
    factors = {name: outer if name == last else inner for name in record._fields}
    return type(record)(
        *(u * factors[name].reshape((-1,) + (1,) * (u.ndim - 1)) for name, u in record._asdict().items())
    )


class SignedSphere(Space):
    """Signs a, which stand still, and directions b on the round unit sphere: C = (0, I - b b').

    It is the reduced geometry of positively homogeneous neurons (ReLU) whose layers are balanced, |a| = |b|: the
    direction b/|b| moves on the sphere, the product |a||b| is the mass of the particle and moves by reaction.
    """

    def check(self, cloud: Cloud) -> None:
        """Raise ValueError unless every b has length 1."""
        length = _boundary.concrete(safe_norm(cloud.particles.b))
        if length is not None and np.max(np.abs(length - 1)) > 1e-3:
            raise ValueError(
                f"particles.b must have length 1 on the sphere, got lengths from {length.min():.3g} "
                f"to {length.max():.3g}"
            )

    def from_raw(self, cloud: Cloud) -> Cloud:
        """Map raw neurons to sign(a), b/|b| with mass p |a| |b|: the same network for positively homogeneous s."""
        a, b = cloud.particles
        if a.ndim != 1:
            raise ValueError(
                f"particles.a must have shape (m,) on the sphere of signed directions, got {a.shape}"
            )
        length = safe_norm(b)
        # homogeneity moves both lengths out of the neuron; the mass need not be 1 any more
        mass = cloud.weights * jnp.abs(a) * length
        units = Neurons(jnp.sign(a), b / length[:, None])
        return Cloud(units, mass, cloud.labels, width=cloud.width, total=None)

    def invariant(self) -> Invariant | None:
        """Return |b|^2, which is 1."""
        return conserved(lambda cloud: jnp.sum(cloud.particles.b**2, axis=-1))

    def embedding(self, cloud: Cloud) -> jax.Array:
        """Return b."""
        return cloud.particles.b

    def dimension(self, cloud: Cloud) -> int:
        """Return d - 1."""
        return cloud.particles.b.shape[1] - 1

    def cometric(self, cloud: Cloud, covector: Neurons) -> Neurons:
        """Return (0, (I - b b') g_b)."""
        b = cloud.particles.b
        return Neurons(jnp.zeros_like(covector.a), covector.b - b * dot(b, covector.b))

    def noise(self, cloud: Cloud, normal: Neurons) -> Neurons:
        """Return the tangent part of white noise."""
        # I - b b' is its own root
        return self.cometric(cloud, normal)

    def inner(self, cloud: Cloud, u: Neurons, v: Neurons) -> jax.Array:
        """Return u_b . v_b."""
        return dot(u.b, v.b)[:, 0]

    def retract(self, cloud: Cloud, v: Neurons) -> Neurons:
        """Step along the tangent and return to the sphere."""
        a, b = cloud.particles
        # one division instead of a sine and a cosine, right to second order in the step
        moved = b + v.b
        return Neurons(a, moved / safe_norm(moved, keepdims=True))

    def exp(self, cloud: Cloud, v: Neurons) -> Neurons:
        """Follow great circles."""
        return Neurons(cloud.particles.a, sphere.exp(cloud.particles.b, v.b))

    def log(self, cloud: Cloud, particles: Neurons) -> Neurons:
        """Return the initial velocity of the great circle to ``particles``."""
        return Neurons(jnp.zeros_like(particles.a), sphere.log(cloud.particles.b, particles.b))
