"""Two-layer features under batch norm: phi = a s(scale bb . (x - mean) + shift) with bb = b / |b|_S."""

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from meanflow import _boundary
from meanflow._reuse import compiled_if_large
from meanflow.flows._features import TwoLayer
from meanflow.geometry import _omega as omega
from meanflow.geometry._space import BatchNormManifold, Invariant, Space, conserved, norms
from meanflow.geometry._sphere import dot
from meanflow.measures._cloud import BatchNormNeurons, Cloud, Neurons
from meanflow.measures._dataset import Dataset

if TYPE_CHECKING:
    from meanflow.flows._features import Pull
    from meanflow.flows._motion import FrozenMotion
    from meanflow.flows._problem import Problem


class BatchNormed(TwoLayer):
    """phi = (m/alpha) a s(bb . (x - mean)) with bb = b/|b|_S (raw neurons) or bb = b (neurons on the manifold).

    With a trainable scale g and shift h, phi = (m/alpha) a s(g bb . (x - mean) + h). Neither changes the geometry of b:
    phi does not depend on the norm of b, which raw neurons therefore conserve; (g, h) are flat coordinates like a. With
    ReLU, phi is also homogeneous in a and in (g, h), so that |a|^2 - g^2 - h^2 is conserved.

    The covariance S may be singular. Samples then lie in mean + range(S), gradients in b lie in range(S), and the null
    part of a raw b never moves; a raw b needs |b|_S > 0 only. On the manifold bb lies in range(S).

    Attributes:
        mean: (d,), covariance: (d, d): statistics of the inputs, or None until ``bind`` freezes those of the data.
        raw: whether b is normalized here.
        affine: whether neurons have a scale and a shift (``BatchNormNeurons``).
    """

    mean: jax.Array | None = None
    covariance: jax.Array | None = None
    raw: bool = eqx.field(static=True, default=True)
    affine: bool = eqx.field(static=True, default=False)
    scale_free: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Choose the type of the particles."""
        self.record = BatchNormNeurons if self.affine else Neurons

    def bind(self, data: Dataset) -> "BatchNormed":
        """Take mean and covariance (1/N) of the data where they were not given."""
        if self.mean is not None and self.covariance is not None:
            return self
        if data.x.ndim != 2:
            raise ValueError(f"x must have shape (n, d) under batch norm, got {data.x.shape}")
        mean, covariance = data.moments()
        mean = mean if self.mean is None else self.mean
        covariance = covariance if self.covariance is None else self.covariance
        return dataclasses.replace(self, mean=mean, covariance=covariance)

    def check(self, cloud: Cloud, x: jax.Array) -> None:
        """Raise ValueError without bound statistics of the right shape, d >= 2 and |b|_S > 0."""
        TwoLayer.check(self, cloud, x)
        if self.mean is None or self.covariance is None:
            raise ValueError(
                "this batch-norm flow has no statistics yet; call flow.bind(data) first or pass mean= and covariance="
            )
        d = x.shape[1]
        if d < 2:
            raise ValueError(
                "batch norm needs inputs of dimension d >= 2 (for d = 1 Omega is two points), got d = 1"
            )
        _boundary.shape("mean", self.mean, (d,))
        _boundary.shape("covariance", self.covariance, (d, d))
        _boundary.finite("mean", self.mean)
        _boundary.finite("covariance", self.covariance)
        if self.affine:
            for name in ("scale", "shift"):
                _boundary.shape(f"particles.{name}", getattr(cloud.particles, name), (cloud.size,))
        # on the manifold the space asks for |b|_S = 1
        still = _boundary.concrete(_count_still(cloud.particles.b, self.covariance)) if self.raw else None
        if still:
            zero = int(np.sum(np.all(np.asarray(cloud.particles.b) == 0, axis=-1)))
            if zero:
                raise ValueError(f"particles.b must be nonzero under batch norm, got {zero} zero vectors")
            raise ValueError(
                "particles.b must have |b|_S > 0 under batch norm: the inputs do not vary along "
                f"{still} of the {cloud.size} vectors b"
            )

    def statistics(self) -> tuple[jax.Array, jax.Array]:
        """Return mean and covariance, which are bound before anything is computed."""
        assert self.mean is not None and self.covariance is not None
        return self.mean, self.covariance

    def inputs(self, x: jax.Array) -> jax.Array:
        """Return x - mean."""
        return x - self.statistics()[0][None, :]

    def unit_inputs(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return white inputs S^(-1/2) (x - mean), in the range of S, and the map from unit vectors to Omega."""
        if self.affine:
            raise ValueError("batch norm must have no scale and shift here, got affine=True")
        covariance = self.statistics()[1]
        null = omega.null_projector(covariance)
        values, vectors = jnp.linalg.eigh(covariance)
        kept = slice(0 if null is None else round(float(jnp.trace(null))), None)
        back = (vectors[:, kept] / jnp.sqrt(values[kept])[None, :]).T
        return self.inputs(x) @ back.T, back

    def directions(self, cloud: Cloud) -> jax.Array:
        """Return bb."""
        b = cloud.particles.b
        return omega.normalize(b, self.statistics()[1]) if self.raw else b

    def shifted(self, cloud: Cloud, products: jax.Array) -> jax.Array:
        """Return scale t + shift for t = bb . (x - mean)."""
        if not self.affine:
            return products
        return cloud.particles.scale[None, :] * products + cloud.particles.shift[None, :]

    def linearize(self, cloud: Cloud, x: jax.Array) -> tuple[jax.Array, "Pull"]:
        """Return predictions and covectors: those of neurons on the manifold, taken back by T(b) = b / |b|_S."""
        if not self.raw:
            return TwoLayer.linearize(self, cloud, x)
        # dT = (I - bb u') / |b|_S with u = S bb, in a smaller program than reverse mode makes of it
        length = omega.sigma_norm(cloud.particles.b, self.statistics()[1])
        bb = cloud.particles.b / length
        u = bb @ self.statistics()[1]
        there = cloud.at(cloud.particles._replace(b=bb))
        f, pull = TwoLayer.linearize(dataclasses.replace(self, raw=False), there, x)

        def back(g: jax.Array) -> PyTree[jax.Array]:
            covector = pull(g)
            return covector._replace(b=(covector.b - u * dot(bb, covector.b)) / length)

        return f, back

    def centering(self) -> float | jax.Array:
        """Return 1; raise ValueError for neurons with a shift and for a mean that is not 0 (NaN while it is traced)."""
        if self.affine:
            raise ValueError(
                "a Gaussian population needs batch norm without scale and shift, got affine=True"
            )
        mean = _boundary.concrete(self.mean)
        if mean is not None and np.any(mean != 0):
            raise ValueError(f"a Gaussian population needs batch norm with mean 0, got mean = {mean}")
        return 1.0 if mean is not None else jnp.where(jnp.all(self.statistics()[0] == 0), 1.0, jnp.nan)

    def kernel(
        self, cloud: Cloud, x: jax.Array, z: jax.Array, space: Space, outputs: str = "full"
    ) -> jax.Array | None:
        """Return sum_i p_i (m/alpha)^2 [s s I + a a' s' s' g^2 <x - t u, z - t' u> / |b|_S^2], t = bb . x, u = S bb.

        Inputs are centered. Raw neurons and those on the manifold have the same kernel, |bb|^2/c^2 = 1/|b|_S^2.
        Trainable scales and shifts add a a' s' s' (t t' + 1).
        """
        b, covariance = cloud.particles.b, self.statistics()[1]
        if type(space) is not (Space if self.raw else BatchNormManifold):
            return None
        of_manifold = lambda: jnp.sum(b**2, axis=-1) / norms(cloud) ** 2
        rate = omega.sigma_norm(b, covariance)[:, 0] ** -2 if self.raw else of_manifold()
        if self.affine:
            rate = rate * cloud.particles.scale**2
        bb, x, z = self.directions(cloud), self.inputs(x), self.inputs(z)
        normal = bb @ covariance
        pre_x, pre_z = x @ bb.T, z @ bb.T
        (value_x, slope_x), (value_z, slope_z) = (
            self._activate(self.shifted(cloud, u)) for u in (pre_x, pre_z)
        )
        normal_x, normal_z, square, gram = x @ normal.T, z @ normal.T, jnp.sum(normal**2, axis=-1), x @ z.T

        def inner(weight: jax.Array) -> jax.Array:
            left, right = slope_x * (weight * rate)[None, :], slope_z
            # <x - t u, z - t' u> written out: sums over neurons of products of (n, m) arrays, never (n, n, m)
            cross = (left * pre_x) @ (right * normal_z).T + (left * normal_x) @ (right * pre_z).T
            turned = (left @ right.T) * gram - cross + (left * pre_x * square[None, :]) @ (right * pre_z).T
            if not self.affine:
                return turned
            plain = slope_x * weight[None, :]
            return turned + (plain * pre_x) @ (right * pre_z).T + plain @ right.T

        return self._join(cloud, (value_x, value_z), inner, outputs)

    def motion(self, problem: "Problem") -> "FrozenMotion":
        """Return the motion by local integration between the hyperplanes of the centered samples, for one output."""
        if self.affine:
            raise ValueError(
                "solver='sliding' needs neurons (a, b): with a scale and a shift of their own kinks are no planes, got "
                "affine=True; use a diffrax solver, or fixed steps such as KernelStep"
            )
        self.check_motion(problem)
        from meanflow.flows._kinks.two_layer import NormalizedMotion

        return NormalizedMotion(problem, self)

    def invariant(self, space: Space) -> Invariant | None:
        """Return |b|^2, which raw neurons conserve because their scale does not matter; on Omega the space knows."""
        return conserved(lambda cloud: jnp.sum(cloud.particles.b**2, axis=-1)) if self.raw else None


@compiled_if_large
def _count_still(xp: Any, b: jax.Array, covariance: jax.Array) -> jax.Array:
    """Return along how many of the vectors b (m, d) the inputs do not vary, beyond rounding; zero vectors count.

    ``xp`` is numpy or jax.numpy. Large networks are looked at on the device: one number comes to the host.
    """
    variance = (b * (b @ covariance)).sum(axis=-1)
    # entries of S are right to eps sqrt(S_jj S_kk), whatever the units of the inputs, and so b'Sb to eps (|b| . sd)^2
    terms = xp.abs(b) @ xp.sqrt(covariance.diagonal())
    return (variance <= np.finfo(covariance.dtype).eps * b.shape[-1] * terms * terms).sum()
