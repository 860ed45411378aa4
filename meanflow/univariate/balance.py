"""The balance of a univariate ReLU neuron, and neurons in the coordinates (r, theta) and (a, b, c).

A neuron c relu(a x - b) with p = (a, -b), n = |p| has the reduced coordinates r = (m/alpha) c n, theta = atan2(-b, a).
Gradient flow conserves the balance delta = c^2 - n^2, so (r, theta) with the frozen label delta determine (a, b, c):
with q = c n = alpha r / m and h = hypot(delta, 2 q) = c^2 + n^2,

    big = (|delta| + h)/2,   small = q^2/big,   (c^2, n^2) = (big, small) if delta >= 0, else (small, big).

No term cancels ("univariate ReLU", eq. 45 with r replaced by q; the textbook form loses c^2 at delta << 0).
``lift`` and ``project`` go from one kind of coordinates to the other.
"""

from __future__ import annotations

from typing import Annotated

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from meanflow import _boundary
from meanflow._boundary import array, checked
from meanflow._numerics import safe_divide, safe_sqrt
from meanflow.measures._cloud import Affine, Cloud, Polar
from meanflow.measures._scaling import Alpha, Scaling
from meanflow.univariate._angles import angle_of, unit


def _of(record: type[Polar] | type[Affine], cloud: Cloud) -> None:
    """Refuse a cloud of neurons of another kind."""
    if not isinstance(cloud.particles, record):
        given = type(cloud.particles).__name__
        raise TypeError(f"cloud must hold {record.__name__} neurons, got particles of type {given}")


@checked
def split(
    q: Float[ArrayLike, "*m"], delta: Annotated[Float[ArrayLike, "*m"], array(infinite=True)]
) -> tuple[Float[Array, "*m"], Float[Array, "*m"]]:
    """Return (c, n) with c n = q, n >= 0 and c^2 - n^2 = delta, accurately for any balance delta.

    c has the sign of q. At q = 0, delta > 0 (then n = 0) the sign of c is free, and c > 0 is returned. For
    delta = +inf the convention is |c| = 1, for delta = -inf it is n = 1.

    Args:
        q: c n = alpha r / m of each neuron, any shape.
        delta: balance of each neuron, +-inf allowed, of the same shape, or one for all.

    >>> c, n = split(jnp.array(1e-3), jnp.array(-1e12))
    >>> bool(jnp.abs(c * n - 1e-3) < 1e-18), float(n)
    (True, 1000000.0)
    """
    # big = max(c^2, n^2), without cancellation; the other factor is q over its root
    q, delta = jnp.asarray(q), jnp.asarray(delta)
    _boundary.shape("delta", delta, q.shape, ())
    endless = jnp.isinf(delta)
    finite = jnp.where(endless, 0.0, delta)
    big = (jnp.abs(finite) + _hypot(finite, 2 * q)) / 2
    root = jnp.where(endless, 1.0, safe_sqrt(big))
    other = safe_divide(q, root)
    sign = jnp.where(q < 0, -1.0, jnp.ones_like(q))
    outer = delta >= 0
    return jnp.where(outer, sign * root, other), jnp.where(outer, jnp.abs(other), root)


def _hypot(u: Float[Array, "*m"], v: Float[Array, "*m"]) -> Float[Array, "*m"]:
    """Return sqrt(u^2 + v^2) without overflow, with derivative 0 at the origin (``jnp.hypot`` has NaN there)."""
    scale = jnp.maximum(jnp.abs(u), jnp.abs(v))
    return scale * safe_sqrt(safe_divide(u, scale) ** 2 + safe_divide(v, scale) ** 2)


@checked
def balance(particles: Affine) -> Float[Array, " m"]:
    """Return delta = c^2 - a^2 - b^2 of each neuron, (m,), which gradient flow conserves (Lemma 3).

    Args:
        particles: neurons (a, b, c), (m,) each.

    >>> balance(Affine(jnp.array([3.0]), jnp.array([4.0]), jnp.array([2.0]))).tolist()
    [-21.0]
    """
    a, b, c = (array()(f"particles.{name}", u) for name, u in particles._asdict().items())
    for name, u in (("b", b), ("c", c)):
        _boundary.shape(f"particles.{name}", u, a.shape)
    n = jnp.hypot(a, b)
    return (c - n) * (c + n)


def _to_polar(p: Float[Array, "*m 2"], c: Float[Array, "*m"], ratio: Float[Array, ""]) -> Polar:
    """Return (r, theta) = ((m/alpha) c |p|, atan2(p_2, p_1)), eq. (5) with atan2; ``ratio`` is m/alpha."""
    length = safe_sqrt(p[..., 0] ** 2 + p[..., 1] ** 2)
    return Polar(ratio * c * length, angle_of(p))


def _to_raw(
    particles: Polar, delta: Float[Array, " m"], ratio: Float[Array, ""]
) -> tuple[Float[Array, "m 2"], Float[Array, " m"]]:
    """Return p = (a, -b) and c of neurons (r, theta) with balance ``delta``; ``ratio`` is m/alpha."""
    c, n = split(particles.r / ratio, delta)
    return n[:, None] * unit(particles.theta), c


@checked
def lift(cloud: Cloud, alpha: Alpha = "m") -> Cloud:
    """Return ``Polar`` neurons, whose labels are the balances delta, as ``Affine`` neurons with the same function.

    The lift exists for every r and delta and is unique except at r = 0, delta > 0.

    Args:
        cloud: neurons (r, theta) with labels delta, which may be +-inf.
        alpha: output scale of the network: "m", "sqrt", "one" or a positive number.

    >>> cloud = Cloud(Polar(jnp.array([3.0]), jnp.array([0.0])), labels=0.0)
    >>> [round(float(u[0]), 6) for u in lift(cloud).particles]
    [1.732051, -0.0, 1.732051]
    """
    _of(Polar, cloud)
    if cloud.labels is None:
        raise ValueError("lift needs a cloud with labels (the balances delta), got labels=None")
    p, c = _to_raw(cloud.particles, cloud.labels, Scaling(alpha).ratio(cloud))
    return Cloud(Affine(p[:, 0], -p[:, 1], c), cloud.weights, width=cloud.width)


@checked
def project(cloud: Cloud, alpha: Alpha = "m") -> Cloud:
    """Return ``Affine`` neurons as ``Polar`` ones, labelled with their balance; the inverse of ``lift``.

    Args:
        cloud: neurons (a, b, c).
        alpha: output scale of the network, as for ``lift``.

    >>> cloud = Cloud(Affine(jnp.array([3.0]), jnp.array([4.0]), jnp.array([2.0])))
    >>> float(project(cloud).particles.r[0]), float(project(cloud).labels[0])
    (10.0, -21.0)
    """
    _of(Affine, cloud)
    a, b, c = cloud.particles
    polar = _to_polar(jnp.stack([a, -b], axis=-1), c, Scaling(alpha).ratio(cloud))
    return Cloud(polar, cloud.weights, balance(cloud.particles), width=cloud.width)
