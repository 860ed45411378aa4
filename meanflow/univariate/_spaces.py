"""Metrics of univariate neurons (r, theta): ``Cylinder`` and ``Lifted``.

Notation as in ``balance``: p = (a, -b), n = |p|, delta = c^2 - n^2. Which of the layers learn is written as two rates,
kp of the inner layer and kc of the outer one: (1, 1) for finite delta, (1, 0) for delta = +inf (c frozen at +-1),
(0, 1) for delta = -inf (p frozen at length 1). The flow p' = -kp k c G, c' = -kc k <G, p>, k = m/alpha, then has

    P_rr = k^2 (kp c^2 + kc n^2),    P_theta theta = kp / n^2          (eq. 20)
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanflow import _boundary
from meanflow._numerics import safe_divide, safe_sqrt, wrap_angle
from meanflow.geometry._space import Space
from meanflow.measures._cloud import Cloud, Polar
from meanflow.measures._scaling import Scaling
from meanflow.univariate._angles import unit
from meanflow.univariate.balance import _to_polar, _to_raw, split


def layer_rates(delta: Float[Array, "*m"]) -> tuple[Float[Array, "*m"], Float[Array, "*m"]]:
    """Return the rates (kp, kc) of the inner and the outer layer: 1, or 0 where the balance ``delta`` freezes it."""
    one = jnp.ones_like(delta)
    return jnp.where(jnp.isneginf(delta), 0.0, one), jnp.where(jnp.isposinf(delta), 0.0, one)


class PolarSpace(Space):
    """What the spaces of neurons (r, theta) share: theta is an angle."""

    def log(self, cloud: Cloud, particles: Polar) -> Polar:
        """Return the difference of coordinates from the cloud to ``particles``, the short way round the circle."""
        r, theta = cloud.particles
        return Polar(particles.r - r, wrap_angle(particles.theta - theta))


class Cylinder(PolarSpace):
    """The cylinder R x circle with the flat metric dr^2 + dtheta^2: the geometry of the canonical flow."""

    def cylinder(self, height: Float[Array, " m"], angle: Float[Array, " m"]) -> Polar:
        """Return the same coordinates, r = height and theta = angle."""
        return Polar(height, angle)


class Lifted(PolarSpace):
    """Neurons (r, theta) with the metric that gradient flow in (a, b, c) induces; labels are the balances delta.

    Attributes:
        scaling: alpha(m).
        limit: delta of every neuron where the space fixes it: +inf (planar: dr^2 + r^2 dtheta^2), -inf (radial:
            theta frozen); None means that the labels give it.
    """

    scaling: Scaling
    limit: float | None = None

    @property
    def label_name(self) -> str | None:
        """Return "delta", the name of the labels, or None if the space fixes the balance."""
        return "delta" if self.limit is None else None

    def delta(self, cloud: Cloud) -> Float[Array, " m"]:
        """Return the balance of each neuron, from the limit or the labels."""
        if self.limit is not None:
            return jnp.full_like(cloud.weights, self.limit)
        if cloud.labels is None:
            raise ValueError("a lifted flow needs cloud.labels (the balances delta, +-inf allowed), got None")
        return cloud.labels

    def check(self, cloud: Cloud) -> None:
        """Raise ValueError if labels are missing or NaN."""
        known = _boundary.concrete(self.delta(cloud))
        if known is not None and np.any(np.isnan(known)):
            raise ValueError("labels (the balances delta) must be numbers or +-inf, got NaN")

    def mobility(self, cloud: Cloud) -> tuple[Float[Array, " m"], Float[Array, " m"]]:
        """Return P_rr and P_theta theta of eq. (20); the second is 0 where n = 0 (its true value is infinite)."""
        delta, ratio = self.delta(cloud), self.scaling.ratio(cloud)
        inner_rate, outer_rate = layer_rates(delta)
        c, n = split(cloud.particles.r / ratio, delta)
        return ratio**2 * (inner_rate * c**2 + outer_rate * n**2), safe_divide(inner_rate, n**2)

    def cometric(self, cloud: Cloud, covector: Polar) -> Polar:
        """Return (P_rr g_r, P_tt g_theta) of a covector g."""
        radial, turning = self.mobility(cloud)
        return Polar(radial * covector.r, turning * covector.theta)

    def inner(self, cloud: Cloud, u: Polar, v: Polar) -> Float[Array, " m"]:
        """Return u_r v_r / P_rr + u_theta v_theta / P_tt; frozen directions count as 0."""
        radial, turning = self.mobility(cloud)
        return safe_divide(u.r * v.r, radial) + safe_divide(u.theta * v.theta, turning)

    def exp(self, cloud: Cloud, v: Polar) -> Polar:
        """Step the raw neuron (p, c) that has velocity v along a straight line, and return it in (r, theta).

        For delta = +-inf this is the exponential map (the metric is flat). Otherwise it is right to second order:
        geodesics of the hyperboloid c^2 - n^2 = delta have no elementary form.
        """
        delta, ratio = self.delta(cloud), self.scaling.ratio(cloud)
        inner_rate, outer_rate = layer_rates(delta)
        p, c = _to_raw(cloud.particles, delta, ratio)
        _, n = split(cloud.particles.r / ratio, delta)
        d = unit(cloud.particles.theta)
        t = jnp.stack([-d[:, 1], d[:, 0]], axis=-1)
        # The raw velocity with r' = v.r, theta' = v.theta that keeps the balance: p' = kp (c pace d + n v.theta t) and
        # c' = kc n pace, since (c n)' = pace (kp c^2 + kc n^2) = v.r / k.
        pace = safe_divide(v.r / ratio, inner_rate * c**2 + outer_rate * n**2)
        step = (inner_rate * c * pace)[:, None] * d + (inner_rate * n * v.theta)[:, None] * t
        moved = _to_polar(p + step, c + outer_rate * n * pace, ratio)
        # a step does not change the angle of a neuron that has none (p = 0), nor of a frozen one
        still = (inner_rate == 0) | jnp.all(p + step == 0, axis=-1)
        return Polar(moved.r, jnp.where(still, cloud.particles.theta, moved.theta))

    def noise(self, cloud: Cloud, normal: Polar) -> Polar:
        """Return (sqrt(P_rr) xi_r, sqrt(P_tt) xi_theta); ``exp`` follows the surface to second order."""
        radial, turning = self.mobility(cloud)
        return Polar(safe_sqrt(radial) * normal.r, safe_sqrt(turning) * normal.theta)

    def check_noise(self, cloud: Cloud) -> None:
        """Refuse delta = 0, where neurons live on a cone, and r = 0 at delta > 0, where theta has no meaning."""
        delta, r = _boundary.concrete(self.delta(cloud)), _boundary.concrete(cloud.particles.r)
        if delta is not None and np.any(delta == 0):
            raise ValueError(
                "temperature needs labels (the balances delta) other than 0: for delta = 0 neurons live on a cone, "
                "whose inverse metric is not smooth at the tip r = 0"
            )
        if delta is not None and r is not None and np.any((r == 0) & (delta > 0)):
            raise ValueError(
                "temperature needs particles.r other than 0 where delta > 0, got a neuron at r = 0"
            )
