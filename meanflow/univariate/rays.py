"""Sample rays, attractors and the residual equation of univariate ReLU networks.

Sample j is switched on or off on two rays of the plane of directions: theta = -arctan x_j (right-facing, a > 0) and
theta = pi - arctan x_j (left-facing). Ray b = 0 .. 2s-1 separates region b from region b + 1 (mod 2s) in the order of
``forces``, counter-clockwise. A neuron of sign e descends e F along the circle, in every flow, with
F(theta) = sum_j g_j relu(<x~_j, d(theta)>), x~ = (x, 1), g_j = q_j l'(f_j): so its attracting directions are the
local minima of e F and depend neither on the metric nor on alpha.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meanflow.flows.flow import Flow
from meanflow.measures.cloud import Cloud, floating
from meanflow.measures.dataset import Dataset
from meanflow.univariate import forces
from meanflow.univariate.balance import angle_of


class Rays(NamedTuple):
    """The 2s rays of sorted samples: all arrays have leading axis 2s.

    ``sample`` is the index of the sample, ``normal`` its x~ = (x, 1), ``direction`` the unit vector of the ray,
    ``idle`` and ``busy`` the adjacent regions in which the sample is inactive and active.
    """

    sample: jax.Array
    normal: jax.Array
    direction: jax.Array
    idle: jax.Array
    busy: jax.Array

    @property
    def theta(self) -> jax.Array:
        """Angles in (-pi, pi]."""
        return angle_of(self.direction)


def sample_rays(x: jax.Array) -> Rays:
    """The rays of sorted samples x (s,), in counter-clockwise order of the regions they separate."""
    s = x.shape[0]
    ray = jnp.arange(2 * s, dtype=jnp.int32)
    sample = (-1 - ray) % s
    right = ray < s
    after = (ray + 1) % (2 * s)
    normal = jnp.stack([x[sample], jnp.ones_like(x)[sample]], axis=-1)
    along = jnp.where(right, 1.0, -1.0).astype(x.dtype) / jnp.hypot(1.0, x[sample]).astype(x.dtype)
    direction = jnp.stack([along, -along * x[sample]], axis=-1)
    return Rays(sample, normal, direction, jnp.where(right, ray, after), jnp.where(right, after, ray))


def normal_forces(rays: Rays, table: jax.Array) -> tuple[jax.Array, jax.Array]:
    """<x~_k, G> on the inactive and on the active side of each ray, from the table of ``region_forces``.

    A neuron at the ray has z = <x~_k, p> = 0 and z' = -(amplitude) times these: S_k without, S_k + g_k |x~_k|^2 with
    its own sample.
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

    theta: jax.Array
    sample: jax.Array
    positive: jax.Array
    negative: jax.Array


def classify_rays(x: Any, residual: Any) -> RayTable:
    """Which sample rays attract, repel or let pass, for residuals g (s,) at the samples x (s,). O(s log s).

    Ray k attracts neurons of sign e iff -g_k^2 |x~_k|^2 < g_k S_k < 0 and e g_k > 0, with S_k the sum of
    g_i <x~_i, x~_k> over the samples that stay active across the ray; the same interval with e g_k < 0 repels.
    (Lemma 2 of the "univariate ReLU" paper has only one of the two inequalities.) The edges of the dead arc, where
    S_k = 0, are neither.

    >>> table = classify_rays(jnp.array([-1.0, 0.0, 1.0]), jnp.array([-0.5, 1.0, -0.6]))
    >>> table.positive.tolist()
    [0, 1, 0, -1, 1, 0]
    """
    x, residual = floating(x), floating(residual)
    order = jnp.argsort(x)
    rays = sample_rays(x[order])
    without, with_own = normal_forces(rays, forces.region_forces(residual[order], x[order]))
    attracts = (without < 0) & (with_own > 0)
    repels = (without > 0) & (with_own < 0)
    kind = attracts.astype(jnp.int32) - repels.astype(jnp.int32)
    return RayTable(rays.theta, order[rays.sample], kind, -kind)


def attracting_angles(x: Any, residual: Any) -> tuple[jax.Array, jax.Array]:
    """Interior attracting directions: theta* = angle(-e G_R) where it lies inside region R, along which |r| grows.

    Returns:
        Two arrays of shape (2s,), for e = +1 and e = -1: the angle per region, NaN where the region has none.
    """
    x, residual = floating(x), floating(residual)
    order = jnp.argsort(x)
    x, residual = x[order], residual[order]
    table = forces.region_forces(residual, x)
    inside = []
    for sign in (1.0, -1.0):
        towards = -sign * table
        home = forces.find_regions(towards, x) == jnp.arange(2 * x.shape[0])
        alive = jnp.any(table != 0, axis=-1) & (jnp.arange(2 * x.shape[0]) > 0)
        inside.append(jnp.where(home & alive, angle_of(towards), jnp.nan))
    return inside[0], inside[1]


def dead_arc(x: Any) -> jax.Array:
    """Length of the arc of directions that see no sample: pi - (arctan x_s - arctan x_1)."""
    x = floating(x)
    return jnp.pi - (jnp.arctan(jnp.max(x)) - jnp.arctan(jnp.min(x)))


def region_covariances(flow: Flow, cloud: Cloud, x: jax.Array) -> jax.Array:
    """Sigma_R = sum_{i in R} p_i J_q C J_q' (2s, 2, 2), for sorted x: the covariances of Proposition 1.

    On the cylinder J_q C J_q' = r^2 t t' + d d'; in general C is the inverse metric of the flow. O(m log s).
    """
    s = x.shape[0]
    feature: Any = flow.feature
    slopes, pullback = jax.vjp(lambda w: feature.slopes(cloud.at(w)), cloud.particles)

    def response(force: jax.Array) -> jax.Array:
        moved = flow.space.cometric(cloud, pullback(jnp.broadcast_to(force[None, :], slopes.shape))[0])
        return jax.jvp(lambda w: feature.slopes(cloud.at(w)), (cloud.particles,), (moved,))[1]

    columns = jax.vmap(response)(jnp.eye(2, dtype=slopes.dtype))  # (force axis, m, slope axis)
    mobility = jnp.moveaxis(columns, 0, -1) * cloud.weights[:, None, None]
    regions = forces.find_regions(feature.direction(cloud), x)
    return jax.ops.segment_sum(mobility, regions, 2 * s)


def residual_ode(flow: Flow, cloud: Cloud, data: Dataset) -> jax.Array:
    """f' at the samples (s,) by Proposition 1, eq. (13): -x~_j' sum_{R active at j} Sigma_R G_R, in mean-field time.

    Equals -K (q l'(f)) with K the tangent kernel, but in O(m log s + s): only 2s covariances of 2 x 2 enter.
    """
    flow.check(cloud, data.x)
    order = jnp.argsort(data.x)
    x = data.x[order]
    f, _ = flow.feature.linearize(cloud, data.x)
    slope = (data.weights * flow.loss.slope(f, data.y))[order]
    table = forces.region_forces(slope, x)
    flux = jnp.einsum("rij,rj->ri", region_covariances(flow, cloud, x), table)
    rate = -forces.region_predictions(jnp.arange(2 * x.shape[0]), flux, x)
    return jnp.zeros_like(rate).at[order].set(rate)
