"""Lifted neurons in their raw coordinates (a, b, c): the same geometry, with steps that need no angle and no root.

A neuron (r, theta) with balance delta is the point p = (a, -b) = n d(theta), c with (m/alpha) c n = r of the surface

    c^2 - a^2 - b^2 = delta,

a hyperbola in the plane of c and n = |p|, turned about the axis of c. The metric of ``Lifted`` on (r, theta) is the
flat metric of (a, b, c) on that surface, so the flow is p' = -kp (m/alpha) c G, c' = -kc (m/alpha) <G, p>, polynomial
in the neuron: there is no square root as in (c, n) of (r, delta), and r = 0 is not singular.

A flow on ``Lifted`` names ``HyperbolaChart`` as its chart, so that solvers step the raw neurons; users see (r, theta).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanflow._numerics import safe_divide
from meanflow.flows._flow import Flow
from meanflow.flows._problem import Chart
from meanflow.geometry._neurons import RatedSpace
from meanflow.measures._cloud import Affine, Cloud, Polar
from meanflow.univariate._angles import angle_of
from meanflow.univariate._features import Raw, Reduced
from meanflow.univariate._spaces import Lifted, layer_rates
from meanflow.univariate.balance import _to_polar, _to_raw


class Hyperbola(RatedSpace):
    """Neurons (a, b, c) on the hyperbolas c^2 - a^2 - b^2 = delta.

    Attributes:
        lifted: the same neurons in (r, theta); it knows the balances delta.
    """

    lifted: Lifted

    def delta(self, cloud: Cloud) -> Float[Array, " m"]:
        """Return the balance of each neuron."""
        return self.lifted.delta(cloud)

    def rates(self, cloud: Cloud) -> tuple[Float[Array, " m"], Float[Array, " m"]]:
        """Return the rates of the two layers: delta = +inf freezes c, delta = -inf freezes (a, b)."""
        return layer_rates(self.delta(cloud))

    def inner(self, cloud: Cloud, u: Affine, v: Affine) -> Float[Array, " m"]:
        """Return the flat product; frozen directions count as 0."""
        inner_rate, outer_rate = self.rates(cloud)
        return inner_rate * (u.a * v.a + u.b * v.b) + outer_rate * u.c * v.c

    def noise(self, cloud: Cloud, normal: Affine) -> Affine:
        """Return the part of white noise that is tangent to the surface, so that the balance stays.

        The normal is (-a, -b, c): v loses its part <v, normal> normal / |normal|^2.
        """
        v = super().noise(cloud, normal)
        a, b, c = cloud.particles
        across = safe_divide(c * v.c - a * v.a - b * v.b, a * a + b * b + c * c)
        across = jnp.where(jnp.isfinite(self.delta(cloud)), across, 0.0)  # flat where a layer is frozen
        return Affine(v.a + across * a, v.b + across * b, v.c - across * c)

    def check_noise(self, cloud: Cloud) -> None:
        """Refuse delta = 0: a cone is not smooth at its tip."""
        unlike = Cloud(
            Polar(jnp.ones_like(cloud.weights), jnp.zeros_like(cloud.weights)), cloud.weights, cloud.labels
        )
        self.lifted.check_noise(unlike)

    def exp(self, cloud: Cloud, v: Affine) -> Affine:
        """Step straight ahead, then return to the hyperbola at fixed c |(a, b)| and direction: right to second order.

        The way back is one Newton step for the defect D(k) = c^2 (1 - k)^2 - (a^2 + b^2) (1 + k)^2 - delta: with
        D'(0) = -2 (a^2 + b^2 + c^2), it is k = (c^2 - a^2 - b^2 - delta) / 2 (a^2 + b^2 + c^2). A straight step misses
        the surface by O(step^2), so the balance is kept to O(step^4), and errors do not add up.
        """
        delta = self.delta(cloud)
        a, b, c = jax.tree.map(jnp.add, cloud.particles, v)
        inner, outer = a * a + b * b, c * c
        finite = jnp.isfinite(delta)  # one layer is frozen otherwise, and there is nothing to correct
        defect = jnp.where(finite, outer - inner - jnp.where(finite, delta, 0.0), 0.0)
        total = outer + inner
        # nothing is selected behind the quotient (at 0 it multiplies 0): a compiler that divides once for all three
        # coordinates would otherwise compute the steps of all three again in each of them, to know where to select
        k = 0.5 * defect / jnp.where(total > 0, total, 1.0)
        return Affine(a * (1 + k), b * (1 + k), c * (1 - k))


class HyperbolaChart(Chart):
    """Steps lifted flows in (a, b, c), which needs no sine, cosine or arctangent; r = 0 is not singular there."""

    def __init__(self, model: Flow, start: Cloud) -> None:
        feature, space = model.feature, model.space
        assert isinstance(feature, Reduced) and isinstance(space, Lifted)
        raw = Hyperbola(space)
        self.model, self.start = model, start
        twin = Raw(feature.forces, model.scaling)
        self.flow = Flow(twin, raw, model.loss, model.scaling, centered=model.centered, offset=model.offset)
        self.base = start.at(unfold(start, raw.delta(start), model.scaling.ratio(start)))

    def cloud(self, y: Affine) -> Cloud:
        """Return (r, theta) of the neurons (a, b, c)."""
        ratio = self.model.scaling.ratio(self.start)
        return self.start.at(fold(self.start, self.base.particles, y, ratio))


def unfold(cloud: Cloud, delta: Float[Array, " m"], ratio: Float[Array, ""]) -> Affine:
    """Return the ``Polar`` neurons of a cloud as (a, b, c), for balances ``delta`` and ``ratio`` = m/alpha.

    A neuron of length |(a, b)| = 0 would lose its direction: it gets a length whose square is 0 in floating point.
    """
    p, c = _to_raw(cloud.particles, delta, ratio)
    least = jnp.sqrt(jnp.finfo(p.dtype).tiny)
    theta = cloud.particles.theta
    lost = (p[:, 0] == 0) & (p[:, 1] == 0)
    a = jnp.where(lost, least * jnp.cos(theta), p[:, 0])
    b = jnp.where(lost, -least * jnp.sin(theta), -p[:, 1])
    return Affine(a, b, c)


def fold(cloud: Cloud, start: Affine, now: Affine, ratio: Float[Array, ""]) -> Polar:
    """Return the neurons ``now`` in (r, theta), the way back from ``unfold``.

    Neurons that did not move since ``start`` keep the coordinates they have in ``cloud``, to the last digit.
    """
    p = jnp.stack([now.a, -now.b], axis=-1)
    still = (now.a == start.a) & (now.b == start.b)
    untouched = still & (now.c == start.c)
    r = _to_polar(p, now.c, ratio).r
    r0, theta0 = cloud.particles
    return Polar(jnp.where(untouched, r0, r), jnp.where(still, theta0, angle_of(p)))
