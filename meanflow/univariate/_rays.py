"""Sample rays: where a univariate ReLU neuron switches a sample on or off, and which rays attract neurons.

Sample j is switched on or off on two rays of the plane of directions: theta = -arctan x_j (right-facing, a > 0) and
theta = pi - arctan x_j (left-facing). Ray b = 0 .. 2s-1 separates region b from region b + 1 (mod 2s) in the order of
``forces``, counter-clockwise. A neuron of sign e descends e F along the circle, in every flow, with
F(theta) = sum_j g_j relu(<x~_j, d(theta)>), x~ = (x, 1), g_j = q_j l'(f_j): so its attracting directions are the
local minima of e F and depend neither on the metric nor on alpha.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

from meanflow import _boundary
from meanflow._boundary import checked
from meanflow.univariate import _events as events
from meanflow.univariate import _forces as forces
from meanflow.univariate._angles import angle_of


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
    _boundary.shape("residual", values, points.shape)
    order = jnp.argsort(points)
    return order, points[order], values[order]


@checked
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
    # On a ray F has a kink: its slopes on the two sides are, up to a factor, the normal forces <x~_k, G> without and
    # with the ray's own sample. A minimum of F attracts positive neurons and repels negative ones; a maximum does the
    # reverse.
    u, v, _, without, with_own = events.freeze(points, values)[1].rays.T
    attracts = (without < 0) & (with_own > 0)
    repels = (without > 0) & (with_own < 0)
    kind = attracts.astype(jnp.int32) - repels.astype(jnp.int32)
    # right-facing rays from the last sample to the first, then left-facing ones
    sample = jnp.tile(order[::-1], 2)
    return RayTable(angle_of(jnp.stack([u, v], axis=-1)), sample, kind, -kind)


@checked
def attracting_angles(
    x: Float[ArrayLike, " s"], residual: Float[ArrayLike, " s"]
) -> tuple[Float[Array, " regions"], Float[Array, " regions"]]:
    """Find the attracting directions inside the activation regions, along which |r| grows.

    Neurons of sign e in region R are attracted by the angle of -e G_R, if it lies inside R.

    Args:
        x: samples, in any order.
        residual: g_j = q_j l'(f_j) at the samples, as for ``classify_rays``.

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
