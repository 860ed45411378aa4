"""Networks seen as functions: knots, slope jumps, variation of the slope, and statistics of the knots.

A univariate ReLU network f(x) = scale sum_i w_i c_i relu(a_i x - b_i) is continuous and piecewise linear,
with a knot at e_i = b_i / a_i where its slope jumps by scale w_i c_i abs(a_i). All functions here keep shapes
fixed (one knot for each neuron; a neuron without a knot or of weight 0 gets one at +inf with no jump), so that they
work under jit and vmap.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from meanflow import _boundary
from meanflow._boundary import Count, Number, array, checked
from meanflow._numerics import safe_norm

BINS = 110  # of ``concentration``, on [-1.1, 1.1]

Mass = Annotated[Float[ArrayLike, " m"], array((None,), low=0)]
# knots of neurons, finite or not: a neuron may have none
Knots = Annotated[Float[ArrayLike, " m"], array((None,), infinite=True, nan=True, least=0)]


class PiecewiseLinear(eqx.Module):
    """A continuous piecewise linear function, to be called on arrays of any shape; O(log m) for each point.

    To the left of every knot it is slope x + intercept.

    Attributes:
        knots: (m,) sorted; +inf for unused entries.
        jumps: (m,) change of slope at each knot.
        drops: (m,) change of intercept at each knot, equal to -jumps * knots but finite for knots far away.
        slope: slope at -infinity.
        intercept: intercept at -infinity.
    """

    knots: Float[Array, " m"]
    jumps: Float[Array, " m"]
    drops: Float[Array, " m"]
    slope: Float[Array, ""]
    intercept: Float[Array, ""]

    def _pieces(self) -> tuple[jax.Array, jax.Array]:
        """Return slope and intercept of each piece, (m + 1,) each, from left to right."""
        slopes = jnp.concatenate([self.slope[None], self.slope + jnp.cumsum(self.jumps)])
        return slopes, jnp.concatenate([self.intercept[None], self.intercept + jnp.cumsum(self.drops)])

    @checked
    @jax.jit
    def __call__(self, x: Annotated[Float[ArrayLike, "*x"], array(least=0)]) -> Float[Array, "*x"]:
        """Return the values at x."""
        piece = jnp.searchsorted(self.knots, x, side="right")
        slopes, intercepts = self._pieces()
        return slopes[piece] * x + intercepts[piece]

    @checked
    @jax.jit
    def derivative(self, x: Annotated[Float[ArrayLike, "*x"], array(least=0)]) -> Float[Array, "*x"]:
        """Return the slopes at x; on a knot the slope to its right."""
        return self._pieces()[0][jnp.searchsorted(self.knots, x, side="right")]

    @jax.jit
    def merged(self) -> "PiecewiseLinear":
        """Return the same function with one entry for each distinct knot; entries that are left over move to +inf."""
        # equal neighbors get one label, so that sums by label are sums over equal knots; unused entries, all at +inf
        # and last, are a group of their own, and labels that do not occur have the least knot +inf
        opens = jnp.concatenate([jnp.ones(1, bool), self.knots[1:] != self.knots[:-1]])
        label = jnp.cumsum(opens) - 1
        total, least = (
            partial(by_label, segment_ids=label, num_segments=label.shape[0], indices_are_sorted=True)
            for by_label in (jax.ops.segment_sum, jax.ops.segment_min)
        )
        return PiecewiseLinear(
            least(self.knots), total(self.jumps), total(self.drops), self.slope, self.intercept
        )


# a network without neurons is the function 0
Neurons = Annotated[Float[ArrayLike, " m"], array((None,), least=0)]


@checked
@jax.jit
def piecewise_linear(
    a: Neurons,
    b: Neurons,
    c: Neurons,
    *,
    weights: Neurons | None = None,
    scale: Number = 1.0,
) -> PiecewiseLinear:
    """Return the function of a network, as sorted knots and slope jumps.

    Args:
        a: (m,) slopes of c_i relu(a_i x - b_i); cos(theta) for polar neurons (r, theta).
        b: (m,) biases; -sin(theta) for polar neurons.
        c: (m,) outer weights; r for polar neurons.
        weights: (m,) weights w_i, default 1/m each; 0 for padding.
        scale: factor m / alpha in front of the weighted sum.

    Returns:
        The same function. O(m log m).

    >>> import jax.numpy as jnp
    >>> f = piecewise_linear(jnp.array([2.0, -1.0]), jnp.array([1.0, 0.5]), jnp.array([3.0, 1.0]), scale=2.0)
    >>> [float(k) for k in f.knots], [float(j) for j in f.jumps]
    ([-0.5, 0.5], [1.0, 6.0])
    >>> float(f(1.0)), float(f(-1.5))
    (3.0, 1.0)
    """
    a, b, c = jnp.asarray(a), jnp.asarray(b), jnp.asarray(c)
    # equal weights 1/m; none for a network without neurons
    share = jnp.full_like(a, 1 / max(a.shape[0], 1)) if weights is None else jnp.asarray(weights)
    for name, value in (("b", b), ("c", c), ("weights", share)):
        _boundary.shape(name, value, a.shape)
    mass = scale * share * c
    has_knot = (a != 0) & (mass != 0)
    knots = jnp.where(has_knot, b / jnp.where(has_knot, a, 1), jnp.inf)
    side = jnp.sign(a)
    # right-facing neurons switch on at their knot; left-facing ones are on from -infinity and switch off
    jumps, drops = mass * jnp.abs(a), -side * mass * b
    left = a < 0
    slope = jnp.sum(jnp.where(left, mass * a, 0))
    intercept = jnp.sum(jnp.where(left, -mass * b, jnp.where(a == 0, mass * jax.nn.relu(-b), 0)))
    order = jnp.argsort(knots)
    keep = lambda v: jnp.where(has_knot, v, 0)[order]
    return PiecewiseLinear(knots[order], keep(jumps), keep(drops), slope, intercept)


@checked
@partial(jax.jit, static_argnames="count_bias")
def total_variation(f: PiecewiseLinear, *, count_bias: bool = False) -> Float[Array, ""]:
    """Return the total variation of f', the sum of abs(jump) over distinct knots, equation (17).

    Args:
        f: piecewise linear function; coinciding knots are merged first, so opposite jumps cancel.
        count_bias: weigh each jump at e with sqrt(1 + e^2). This is what abs(r) measures, since r contains
            the bias; the unweighted form as published belongs to a penalty that leaves biases free.

    >>> f = piecewise_linear(jnp.array([1.0, 1.0]), jnp.array([0.0, 1.0]), jnp.array([2.0, -4.0]))
    >>> float(total_variation(f))  # the slope is 0, then 1, then -1
    3.0
    """
    merged = f.merged()
    if not count_bias:
        return jnp.sum(jnp.abs(merged.jumps))
    return jnp.sum(safe_norm(jnp.stack([merged.jumps, merged.drops]), axis=0))


@checked
@jax.jit
def on_sample_share(
    knots: Knots,
    x: Float[ArrayLike, " s"],
    *,
    mass: Mass | None = None,
) -> Float[Array, ""]:
    """Return the share of the knots in [x_1 - h/2, x_s + h/2] that lie within 0.05 h of a sample.

    h is the mean spacing of the samples. Uniformly spread knots and samples give 0.10.

    Args:
        knots: (m,); non-finite knots are left out.
        x: (s,) samples, in any order.
        mass: (m,) weight of each knot, default 1; 0 leaves a padded neuron out, abs(c a) weighs by the jump.

    Returns:
        The share, NaN if no knot lies in the window. O(m log s).

    >>> float(on_sample_share(jnp.array([0.01, 0.5, 1.0, 7.0]), jnp.array([0.0, 1.0, 2.0]))).__round__(6)
    0.666667
    """
    knots, x = jnp.asarray(knots), jnp.sort(jnp.asarray(x))
    _boundary.bounds("number of samples", x.shape[0], low=2)  # one sample has no spacing
    mass = jnp.ones_like(knots) if mass is None else jnp.asarray(mass)
    _boundary.shape("mass", mass, knots.shape)
    return _share_near(knots, x, mass, (x[-1] - x[0]) / (x.shape[0] - 1))


def _share_near(
    knots: Float[Array, " m"],
    x: Float[Array, " s"],
    mass: Float[Array, " m"],
    h: Float[Array, ""],
) -> Float[Array, ""]:
    """Return ``on_sample_share`` for samples of mean spacing ``h``, which may be repeated."""
    # the nearest sample is one of the two neighbors of the knot in sorted order
    near = jnp.clip(jnp.searchsorted(x, knots), 1, x.shape[0] - 1)
    gap = jnp.minimum(jnp.abs(knots - x[near - 1]), jnp.abs(knots - x[near]))
    inside = jnp.isfinite(knots) & (knots >= x[0] - h / 2) & (knots <= x[-1] + h / 2)
    weight = jnp.where(inside, mass, 0)
    return jnp.sum(jnp.where(gap < 0.05 * h, weight, 0)) / jnp.sum(weight)


@checked
@partial(jax.jit, static_argnames="k")
def concentration(
    knots: Knots,
    mass: Mass,
    k: Count,
) -> Float[Array, ""]:
    """Return the share of the mass in [-1.1, 1.1] that sits in the k fullest of 110 equal bins.

    Args:
        knots: (m,); knots outside the window do not count. (Dead neurons keep their slope jumps there, where no sample
            sees them.)
        mass: (m,) non-negative, abs(c a) for the papers' statistic.
        k: number of bins.

    Returns:
        The share, NaN if there is no mass in the window.

    >>> float(concentration(jnp.array([0.3, 0.3, 0.9, 5.0]), jnp.array([1.0, 2.0, 1.0, 7.0]), 1))
    0.75
    """
    knots, mass = jnp.asarray(knots), jnp.asarray(mass)
    _boundary.shape("mass", mass, knots.shape)
    inside = jnp.abs(knots) <= 1.1
    place = (jnp.where(inside, knots, 0.0) + 1.1) / 2.2 * BINS
    index = jnp.clip(place.astype(jnp.int32), 0, BINS - 1)
    filled = jax.ops.segment_sum(jnp.where(inside, mass, 0), index, num_segments=BINS)
    return jnp.sum(jax.lax.top_k(filled, min(k, BINS))[0]) / jnp.sum(filled)


@checked
@jax.jit
def dead_share(
    a: Float[ArrayLike, " m"],
    b: Float[ArrayLike, " m"],
    x: Float[ArrayLike, " s"],
    *,
    weights: Mass | None = None,
) -> Float[Array, ""]:
    """Return the share of the neurons that are active (a x - b > 0) on no sample; 0 where there are no neurons.

    Args:
        a: (m,) slopes of the inner maps.
        b: (m,) their biases.
        x: (s,) samples.
        weights: (m,); neurons of weight 0 are left out, all others count once.

    >>> float(dead_share(jnp.array([1.0, 1.0]), jnp.array([0.0, 5.0]), jnp.array([-1.0, 1.0])))
    0.5
    """
    a, b, x = jnp.asarray(a), jnp.asarray(b), jnp.asarray(x)
    _boundary.shape("b", b, a.shape)
    if weights is not None:
        _boundary.shape("weights", weights, a.shape)
    real = jnp.ones_like(a) if weights is None else (jnp.asarray(weights) > 0).astype(a.dtype)
    # a x - b is linear in x: its largest value over the samples is at one end
    top = jnp.maximum(a * jnp.max(x), a * jnp.min(x)) - b
    return jnp.sum(jnp.where(top > 0, 0, real)) / jnp.maximum(jnp.sum(real), 1)
