"""The balance of a univariate ReLU neuron: lifts between (r, theta) and (a, b, c), and the metrics they induce.

A neuron c relu(a x - b) with p = (a, -b), n = |p| has the reduced coordinates r = (m/alpha) c n, theta = atan2(-b, a).
Gradient flow conserves the balance delta = c^2 - n^2, so (r, theta) with the frozen label delta determine (a, b, c):
with q = c n = alpha r / m and h = hypot(delta, 2 q) = c^2 + n^2,

    big = (|delta| + h)/2,   small = q^2/big,   (c^2, n^2) = (big, small) if delta >= 0, else (small, big).

No term cancels ("univariate ReLU", eq. 45 with r replaced by q; the textbook form loses c^2 at delta << 0). Which of
the layers move is written as two factors (kp, kc): (1, 1) for finite delta, (1, 0) for delta = +inf (c frozen at
+-1), (0, 1) for delta = -inf (p frozen at length 1). The flow p' = -kp k c G, c' = -kc k <G, p>, k = m/alpha, then has

    P_rr = k^2 (kp c^2 + kc n^2),    P_theta theta = kp / n^2          (eq. 20)
"""

import abc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meanflow import _checks
from meanflow._numerics import safe_divide, safe_norm, safe_sqrt, wrap_angle
from meanflow.geometry.space import Space
from meanflow.measures.cloud import Affine, Cloud, Polar
from meanflow.measures.scaling import Scaling


def angle_of(p: jax.Array) -> jax.Array:
    """atan2(p_2, p_1) of vectors (..., 2), in (-pi, pi]; 0 with derivative 0 at the origin."""
    good = jnp.any(p != 0, axis=-1)
    return jnp.where(good, jnp.arctan2(p[..., 1], jnp.where(good, p[..., 0], 1.0)), 0.0)


def unit(theta: jax.Array) -> jax.Array:
    """d(theta) = (cos theta, sin theta), shape (..., 2)."""
    return jnp.stack([jnp.cos(theta), jnp.sin(theta)], axis=-1)


def factors(delta: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(kp, kc): which layers move. delta = +inf freezes c, delta = -inf freezes (a, b)."""
    one = jnp.ones_like(delta)
    return jnp.where(jnp.isneginf(delta), 0.0, one), jnp.where(jnp.isposinf(delta), 0.0, one)


def split(q: jax.Array, delta: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(c, n) with c n = q, n >= 0 and c^2 - n^2 = delta, accurate for any delta; sign c = sign q.

    The sign of c is not determined by q = 0, delta > 0 (then n = 0); + is returned. For delta = +inf the
    convention is |c| = 1, for -inf it is n = 1.

    >>> c, n = split(jnp.array(1e-3), jnp.array(-1e12))
    >>> bool(jnp.abs(c * n - 1e-3) < 1e-18), float(n)
    (True, 1000000.0)
    """
    endless = jnp.isinf(delta)
    finite = jnp.where(endless, 0.0, delta)
    big = (jnp.abs(finite) + _hypot(finite, 2 * q)) / 2
    root = jnp.where(endless, 1.0, safe_sqrt(big))
    other = safe_divide(q, root)
    sign = jnp.where(q < 0, -1.0, jnp.ones_like(q))
    outer = delta >= 0
    return jnp.where(outer, sign * root, other), jnp.where(outer, jnp.abs(other), root)


def _hypot(u: jax.Array, v: jax.Array) -> jax.Array:
    scale = jnp.maximum(jnp.abs(u), jnp.abs(v))
    return scale * safe_sqrt(safe_divide(u, scale) ** 2 + safe_divide(v, scale) ** 2)


def balance(particles: Affine) -> jax.Array:
    """delta = c^2 - a^2 - b^2, conserved by the gradient flow (Lemma 3); shape (m,)."""
    a, b, c = particles
    n = jnp.hypot(a, b)
    return (c - n) * (c + n)


def tangential_fraction(delta: Any, q: Any) -> jax.Array:
    """c^2/(c^2 + n^2) of neurons with balance delta and c n = q: the share of the mobility that turns them.

    0 is the kernel regime (delta -> -inf), 1 the adaptive one (delta -> +inf). Equals (1 + k/sqrt(1 + k^2))/2 with
    k = delta/(2 |q|), q = alpha r/m, but without its cancellation; 1/2 at delta = q = 0.

    >>> [float(tangential_fraction(d, 1.0)) for d in (-jnp.inf, 0.0, jnp.inf)]
    [0.0, 0.5, 1.0]
    """
    delta, q = jnp.broadcast_arrays(*(jnp.asarray(u, jnp.result_type(delta, q, float)) for u in (delta, q)))
    endless = jnp.isinf(delta)
    finite = jnp.where(endless, 0.0, delta)
    c, _ = split(q, finite)
    whole = _hypot(finite, 2 * q)
    fraction = jnp.where(whole > 0, safe_divide(c**2, whole), 0.5)
    return jnp.where(endless, (delta > 0).astype(fraction.dtype), fraction)


def to_plane(particles: Polar) -> jax.Array:
    """(u, v) = |r| d(theta), eq. (6); shape (m, 2). The sign of r is lost."""
    return jnp.abs(particles.r)[:, None] * unit(particles.theta)


def to_polar(p: jax.Array, c: jax.Array, ratio: jax.Array) -> Polar:
    """(r, theta) = ((m/alpha) c |p|, atan2(p_2, p_1)) of p = (a, -b), eq. (5) with atan2."""
    return Polar(ratio * c * safe_norm(p), angle_of(p))


def to_raw(particles: Polar, delta: jax.Array, ratio: jax.Array) -> tuple[jax.Array, jax.Array]:
    """p = (a, -b) of shape (m, 2) and c (m,) of the neurons with coordinates (r, theta) and balance delta."""
    c, n = split(particles.r / ratio, delta)
    return n[:, None] * unit(particles.theta), c


def lift(cloud: Cloud, alpha: Any = "m") -> Cloud:
    """A cloud of ``Polar`` neurons with labels delta as ``Affine`` neurons of the network with scale alpha.

    The lift exists for every r and delta and is unique except at r = 0, delta > 0.

    >>> cloud = Cloud(Polar(jnp.array([3.0]), jnp.array([0.0])), labels=0.0)
    >>> [round(float(u[0]), 6) for u in lift(cloud).particles]
    [1.732051, -0.0, 1.732051]
    """
    if cloud.labels is None:
        raise ValueError("lift needs a cloud with labels (the balances delta), got labels=None")
    p, c = to_raw(cloud.particles, cloud.labels, Scaling(alpha).ratio(cloud))
    return Cloud(Affine(p[:, 0], -p[:, 1], c), cloud.weights, width=cloud.width)


def project(cloud: Cloud, alpha: Any = "m") -> Cloud:
    """``Affine`` neurons as ``Polar`` ones, labelled with their balance delta = c^2 - a^2 - b^2."""
    a, b, c = cloud.particles
    polar = to_polar(jnp.stack([a, -b], axis=-1), c, Scaling(alpha).ratio(cloud))
    return Cloud(polar, cloud.weights, balance(cloud.particles), width=cloud.width)


class Lifted(Space):
    """(r, theta) with the metric that gradient flow in (a, b, c) induces; labels are the balances delta.

    Attributes:
        scaling: alpha(m).
        limit: delta of every neuron where the space fixes it: +inf (planar: dr^2 + r^2 dtheta^2), -inf (radial:
            theta frozen); None means that the labels give it.
    """

    scaling: Scaling
    limit: float | None = None

    @property
    def label_name(self) -> str | None:
        """The labels are the balances delta, unless the space fixes them."""
        return "delta" if self.limit is None else None

    def delta(self, cloud: Cloud) -> jax.Array:
        """Balance of each neuron (m,), from the limit or the labels."""
        if self.limit is not None:
            return jnp.full_like(cloud.weights, self.limit)
        if cloud.labels is None:
            raise ValueError("a lifted flow needs cloud.labels (the balances delta, +-inf allowed), got None")
        return cloud.labels

    def check(self, cloud: Cloud) -> None:
        """Labels must be given and must not be NaN."""
        known = _checks.concrete(self.delta(cloud))
        if known is not None and np.any(np.isnan(known)):
            raise ValueError("labels (the balances delta) must be numbers or +-inf, got NaN")

    def mobility(self, cloud: Cloud) -> tuple[jax.Array, jax.Array]:
        """P_rr and P_theta theta of eq. (20), each (m,); the second is 0 where n = 0 (its true value is infinite)."""
        delta, ratio = self.delta(cloud), self.scaling.ratio(cloud)
        kp, kc = factors(delta)
        c, n = split(cloud.particles.r / ratio, delta)
        return ratio**2 * (kp * c**2 + kc * n**2), safe_divide(kp, n**2)

    def cometric(self, cloud: Cloud, covector: Polar) -> Polar:
        """(P_rr g_r, P_tt g_theta)."""
        radial, turning = self.mobility(cloud)
        return Polar(radial * covector.r, turning * covector.theta)

    def inner(self, cloud: Cloud, u: Polar, v: Polar) -> jax.Array:
        """u_r v_r / P_rr + u_theta v_theta / P_tt; frozen directions count as 0."""
        radial, turning = self.mobility(cloud)
        return safe_divide(u.r * v.r, radial) + safe_divide(u.theta * v.theta, turning)

    def retract(self, cloud: Cloud, v: Polar) -> Polar:
        """The straight step of the raw neuron (p, c) that has velocity v, back in (r, theta).

        For delta = +-inf this is the exponential map (the metric is flat).
        """
        delta, ratio = self.delta(cloud), self.scaling.ratio(cloud)
        kp, kc = factors(delta)
        p, c = to_raw(cloud.particles, delta, ratio)
        _, n = split(cloud.particles.r / ratio, delta)
        d = unit(cloud.particles.theta)
        t = jnp.stack([-d[:, 1], d[:, 0]], axis=-1)
        pace = safe_divide(v.r / ratio, kp * c**2 + kc * n**2)
        step = (kp * c * pace)[:, None] * d + (kp * n * v.theta)[:, None] * t
        moved = to_polar(p + step, c + kc * n * pace, ratio)
        # a step does not change the angle of a neuron that has none (p = 0), nor of a frozen one
        still = (kp == 0) | jnp.all(p + step == 0, axis=-1)
        return Polar(moved.r, jnp.where(still, cloud.particles.theta, moved.theta))

    def exp(self, cloud: Cloud, v: Polar) -> Polar:
        """Same as ``retract``: geodesics of the hyperboloid c^2 - n^2 = delta have no elementary form."""
        return self.retract(cloud, v)

    def log(self, cloud: Cloud, particles: Polar) -> Polar:
        """Coordinate difference, the shortest way round in theta."""
        r, theta = cloud.particles
        return Polar(particles.r - r, wrap_angle(particles.theta - theta))


class RawSpace(Space):
    """Raw neurons (a, b, c) of which each layer learns at its own rate: C = diag(kp, kp, kc)."""

    @abc.abstractmethod
    def rates(self, cloud: Cloud) -> tuple[jax.Array, jax.Array]:
        """Return (kp, kc), the rates of the inner layer (a, b) and of the outer one c, (m,) each; 0 if frozen."""

    def cometric(self, cloud: Cloud, covector: Affine) -> Affine:
        """Return (kp g_a, kp g_b, kc g_c)."""
        kp, kc = self.rates(cloud)
        return Affine(kp * covector.a, kp * covector.b, kc * covector.c)


class Layers(RawSpace):
    """Flat (a, b, c) in which either layer may be frozen.

    Attributes:
        inner_moves: kp, 1 if (a, b) are trained, else 0.
        outer_moves: kc, 1 if c is trained, else 0. Both may be arrays of shape () or (m,), and traced.
    """

    inner_moves: jax.Array
    outer_moves: jax.Array

    def rates(self, cloud: Cloud) -> tuple[jax.Array, jax.Array]:
        """Return (kp, kc), broadcast to one number per neuron."""
        one = jnp.ones_like(cloud.weights)
        return self.inner_moves.astype(one.dtype) * one, self.outer_moves.astype(one.dtype) * one
