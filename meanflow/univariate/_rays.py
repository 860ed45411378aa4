"""Sample rays: where a univariate ReLU neuron switches a sample on or off, and which directions attract neurons.

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
    """Where neurons of either sign turn to.

    Attributes:
        theta: (2s,) angle of the ray in (-pi, pi]; right-facing rays first.
        sample: (2s,) index into the samples as they were given.
        positive, negative: (2s,) for neurons with r > 0 and r < 0: 1 attractor, -1 repulsor, 0 passed through.
        inside_positive, inside_negative: (2s,) for each region, in the order of ``forces``, the angle inside of it that
            attracts neurons of that sign, along which |r| grows; NaN where the region has none.
    """

    theta: Float[Array, " rays"]
    sample: Int[Array, " rays"]
    positive: Int[Array, " rays"]
    negative: Int[Array, " rays"]
    inside_positive: Float[Array, " regions"]
    inside_negative: Float[Array, " regions"]


@checked
def classify_rays(x: Float[ArrayLike, " s"], residual: Float[ArrayLike, " s"]) -> RayTable:
    """Find which sample rays attract neurons, repel them or let them pass, and the directions between that attract.

    Ray k attracts neurons of sign e iff -g_k^2 |x~_k|^2 < g_k S_k < 0 and e g_k > 0, with S_k the sum of
    g_i <x~_i, x~_k> over the samples that stay active across the ray; the same interval with e g_k < 0 repels.
    (Lemma 2 of the "univariate ReLU" paper has only one of the two inequalities.) The edges of the dead arc, where
    S_k = 0, are neither. Inside region R neurons of sign e are attracted by the angle of -e G_R, if it lies in R.
    O(s log s).

    Args:
        x: samples, in any order.
        residual: g_j = q_j l'(f_j) at the samples; f - y for the squared loss with weights 1.

    >>> table = classify_rays(jnp.array([-1.0, 0.0, 1.0]), jnp.array([-0.5, 1.0, -0.6]))
    >>> table.positive.tolist()
    [0, 1, 0, -1, 1, 0]
    >>> table = classify_rays(jnp.array([-1.0, 1.0]), jnp.array([-1.0, -1.0]))
    >>> (table.inside_positive / jnp.pi).tolist()  # one direction in each region that sees a sample
    [nan, 0.25, 0.5, 0.75]
    """
    points, values = jnp.asarray(x), jnp.asarray(residual)
    _boundary.shape("residual", values, points.shape)
    order = jnp.argsort(points)
    points, values = points[order], values[order]
    # On a ray F has a kink: its slopes on the two sides are, up to a factor, the normal forces <x~_k, G> without and
    # with the ray's own sample. A minimum of F attracts positive neurons and repels negative ones; a maximum does the
    # reverse.
    u, v, _, without, with_own = events.freeze(points, values)[1].rays.T
    attracts = (without < 0) & (with_own > 0)
    repels = (without > 0) & (with_own < 0)
    kind = attracts.astype(jnp.int32) - repels.astype(jnp.int32)
    # e F = <e G, d> is least in its region at d = -e G / |G|, if that direction lies inside; region 0 is dead
    table, regions = forces.region_forces(values, points), jnp.arange(kind.size)
    alive = jnp.any(table != 0, axis=-1) & (regions > 0)
    inside = (
        jnp.where((forces.find_regions(towards, points) == regions) & alive, angle_of(towards), jnp.nan)
        for towards in (-table, table)
    )
    # right-facing rays from the last sample to the first, then left-facing ones
    sample = jnp.tile(order[::-1], 2)
    return RayTable(angle_of(jnp.stack([u, v], axis=-1)), sample, kind, -kind, *inside)
