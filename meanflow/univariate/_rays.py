"""Sample rays: where a univariate ReLU neuron switches a sample on or off, and which rays attract neurons.

Sample j is switched on or off on two rays of the plane of directions: theta = -arctan x_j (right-facing, a > 0) and
theta = pi - arctan x_j (left-facing). Ray b = 0 .. 2s-1 separates region b from region b + 1 (mod 2s) in the order of
``forces``, counter-clockwise. A neuron of sign e descends e F along the circle, in every flow, with
F(theta) = sum_j g_j relu(<x~_j, d(theta)>), x~ = (x, 1), g_j = q_j l'(f_j): so its attracting directions are the
local minima of e F and depend neither on the metric nor on alpha.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

from meanflow import _checks
from meanflow._checks import array
from meanflow.univariate import _forces as forces
from meanflow.univariate._angles import angle_of

SAMPLES = array((None,))


class SampleRays(NamedTuple):
    """The 2s rays of s sorted samples.

    Attributes:
        sample: index of the sample of each ray.
        normal: its x~ = (x, 1).
        direction: unit vector of the ray.
        idle, busy: the adjacent regions in which the sample is inactive and active.
    """

    sample: Int[Array, " rays"]
    normal: Float[Array, "rays 2"]
    direction: Float[Array, "rays 2"]
    idle: Int[Array, " rays"]
    busy: Int[Array, " rays"]

    @property
    def theta(self) -> Float[Array, " rays"]:
        """Return the angles of the rays in (-pi, pi]."""
        return angle_of(self.direction)


def sample_rays(x: Float[Array, " s"]) -> SampleRays:
    """Return the rays of sorted samples x, in counter-clockwise order of the regions they separate."""
    s = x.shape[0]
    ray = jnp.arange(2 * s, dtype=jnp.int32)
    sample = (-1 - ray) % s
    right = ray < s
    after = (ray + 1) % (2 * s)
    normal = jnp.stack([x[sample], jnp.ones_like(x)[sample]], axis=-1)
    along = jnp.where(right, 1.0, -1.0).astype(x.dtype) / jnp.hypot(1.0, x[sample]).astype(x.dtype)
    direction = jnp.stack([along, -along * x[sample]], axis=-1)
    return SampleRays(sample, normal, direction, jnp.where(right, ray, after), jnp.where(right, after, ray))


def normal_forces(
    rays: SampleRays, table: Float[Array, "rays 2"]
) -> tuple[Float[Array, " rays"], Float[Array, " rays"]]:
    """Return <x~_k, G> on the inactive and on the active side of each ray, from the table of ``region_forces``.

    A neuron at the ray has z = <x~_k, p> = 0, and z' is -(amplitude) times these numbers: S_k on the inactive side and
    S_k + g_k |x~_k|^2 on the active one, where its own sample counts too.
    """
    return (
        jnp.sum(rays.normal * table[rays.idle], axis=-1),
        jnp.sum(rays.normal * table[rays.busy], axis=-1),
    )


class RayTable(NamedTuple):
    """What each ray does to neurons of either sign.

    Attributes:
        theta: (2s,) angle of the ray in (-pi, pi]; right-facing rays first.
        sample: (2s,) index into the samples as they were given.
        positive, negative: (2s,) for neurons with r > 0 and r < 0: 1 attractor, -1 repulsor, 0 passed through.
    """

    theta: Float[Array, " rays"]
    sample: Int[Array, " rays"]
    positive: Int[Array, " rays"]
    negative: Int[Array, " rays"]


def _sorted_samples(
    x: Float[ArrayLike, " s"], residual: Float[ArrayLike, " s"]
) -> tuple[Int[Array, " s"], Float[Array, " s"], Float[Array, " s"]]:
    """Return the order that sorts the samples, and both arrays in that order."""
    points, values = jnp.asarray(x), jnp.asarray(residual)
    _checks.shape("residual", values, points.shape)
    order = jnp.argsort(points)
    return order, points[order], values[order]


@_checks.arguments(x=SAMPLES, residual=SAMPLES)
def classify_rays(x: Float[ArrayLike, " s"], residual: Float[ArrayLike, " s"]) -> RayTable:
    """Find which sample rays attract neurons, repel them or let them pass. O(s log s).

    Ray k attracts neurons of sign e iff -g_k^2 |x~_k|^2 < g_k S_k < 0 and e g_k > 0, with S_k the sum of
    g_i <x~_i, x~_k> over the samples that stay active across the ray; the same interval with e g_k < 0 repels.
    (Lemma 2 of the "univariate ReLU" paper has only one of the two inequalities.) The edges of the dead arc, where
    S_k = 0, are neither.

    Args:
        x: samples, in any order.
        residual: g_j = q_j l'(f_j) at the samples; f - y for the squared loss with weights 1.

    >>> table = classify_rays(jnp.array([-1.0, 0.0, 1.0]), jnp.array([-0.5, 1.0, -0.6]))
    >>> table.positive.tolist()
    [0, 1, 0, -1, 1, 0]
    """
    order, points, values = _sorted_samples(x, residual)
    rays = sample_rays(points)
    # On a ray F has a kink: its slopes on the two sides are, up to a factor, the normal forces without and with the
    # ray's own sample. A minimum of F attracts positive neurons and repels negative ones; a maximum does the reverse.
    without, with_own = normal_forces(rays, forces.region_forces(values, points))
    attracts = (without < 0) & (with_own > 0)
    repels = (without > 0) & (with_own < 0)
    kind = attracts.astype(jnp.int32) - repels.astype(jnp.int32)
    return RayTable(rays.theta, order[rays.sample], kind, -kind)


@_checks.arguments(x=SAMPLES, residual=SAMPLES)
def attracting_angles(
    x: Float[ArrayLike, " s"], residual: Float[ArrayLike, " s"]
) -> tuple[Float[Array, " regions"], Float[Array, " regions"]]:
    """Find the attracting directions inside the activation regions, along which |r| grows.

    Neurons of sign e in region R are attracted by the angle of -e G_R, if it lies inside R.

    Args:
        x, residual: samples and residuals as for ``classify_rays``.

    Returns:
        Two arrays of shape (2s,), for e = +1 and e = -1: the angle in each region, NaN where the region has none.

    >>> up, down = attracting_angles(jnp.array([-1.0, 1.0]), jnp.array([-1.0, -1.0]))
    >>> [round(float(t / jnp.pi), 3) for t in up]  # one direction in each region that sees a sample
    [nan, 0.25, 0.5, 0.75]
    """
    _, points, values = _sorted_samples(x, residual)
    table = forces.region_forces(values, points)
    inside = []
    for sign in (1.0, -1.0):
        # e F = <e G, d> is least in its region at d = -e G / |G|, if that direction lies inside
        towards = -sign * table
        home = forces.find_regions(towards, points) == jnp.arange(2 * points.shape[0])
        alive = jnp.any(table != 0, axis=-1) & (jnp.arange(2 * points.shape[0]) > 0)
        inside.append(jnp.where(home & alive, angle_of(towards), jnp.nan))
    return inside[0], inside[1]
