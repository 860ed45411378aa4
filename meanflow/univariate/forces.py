"""Exact forces and predictions of univariate ReLU neurons in O(m log s + s), by activation regions.

The samples x_1 < ... < x_s cut the circle of directions p = (a, -b) into 2 s arcs. Counter-clockwise, region

    R = 0          no sample is active (dead)
    R = 1 .. s     the R rightmost samples are active  (a > 0)
    R = s .. 2s-1  the 2s - R leftmost samples are     (a < 0)

A neuron feels only the force G = sum_{j active} g_j (x_j, 1), which is a function of R alone; so a table of 2 s suffix
and prefix sums replaces the m x s array. Predictions are sums of neurons by region. Sums over right-facing and
left-facing neurons are kept apart and never subtracted, since the difference would lose digits. A sample is active when
a x > b strictly, with the product rounded: a compiler cannot contract a comparison to a fused multiply-add, so every
path finds the same pattern, also with knots on samples.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Gather = Callable[
    [Float[Array, " s"]], Float[Array, "m 2"]
]  # a covector g on the samples -> force on each neuron


def is_active(p: Float[Array, "m 2"], x: Float[Array, " s"]) -> Bool[Array, "s m"]:
    """Return whether a x > b, for each point x and each direction p = (a, -b)."""
    return x[:, None] * p[None, :, 0] > -p[None, :, 1]


def find_regions(p: Float[Array, "m 2"], x: Float[Array, " s"]) -> Int[Array, " m"]:
    """Return the region of each direction p = (a, -b) among *sorted* samples x; equal samples are allowed.

    This is a bisection on the same rounded comparison as ``is_active``, which is monotone along x: it finds the pattern
    of the dense path, bit for bit, without repair. O(m log s).
    """
    s = x.shape[0]
    a, b = jax.lax.stop_gradient((p[:, 0], -p[:, 1]))
    x = jax.lax.stop_gradient(x)
    left = a < 0

    def halve(_: int | jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high) // 2
        # the first sample that is active (a >= 0) or inactive (a < 0) is at or before the middle
        here = (a * x[jnp.minimum(middle, s - 1)] > b) != left
        return jnp.where(here | (low >= high), low, middle + 1), jnp.where(here, middle, high)

    low = jnp.zeros(a.shape, jnp.int32)
    first, _ = jax.lax.fori_loop(0, s.bit_length(), halve, (low, jnp.full_like(low, s)))
    return jnp.where(left, (2 * s - first) % (2 * s), s - first)


def region_forces(g: Float[Array, " s"], x: Float[Array, " s"]) -> Float[Array, "regions 2"]:
    """Return the force sum_{j active in R} g_j (x_j, 1) in each of the 2s regions R, for sorted x. O(s)."""
    moments = jnp.stack([g * x, g], axis=-1)
    prefix = jnp.cumsum(moments, axis=0)
    suffix = jnp.cumsum(moments[::-1], axis=0)
    return jnp.concatenate([jnp.zeros_like(moments[:1]), suffix, prefix[:-1][::-1]])


def region_predictions(
    regions: Int[Array, " m"], slopes: Float[Array, "m 2"], x: Float[Array, " s"]
) -> Float[Array, " s"]:
    """Return f(x_j) = <(x_j, 1), sum of the slopes of the neurons active at x_j>, for sorted x. O(m + s).

    Args:
        regions: region of each neuron.
        slopes: slope vector of each neuron, its weight included.
        x: sorted samples.
    """
    s = x.shape[0]
    # sums by region; a column at a time keeps the scatter one-dimensional
    table = jnp.stack([jax.ops.segment_sum(slopes[:, i], regions, 2 * s) for i in range(2)], axis=-1)
    # x_j is active in the regions s - j .. s (right-facing) and s + 1 .. 2s - 1 - j (left-facing), j = 0 .. s-1
    right = jnp.cumsum(table[1 : s + 1][::-1], axis=0)
    left = jnp.cumsum(jnp.concatenate([jnp.zeros_like(table[:1]), table[s + 1 :]]), axis=0)[::-1]
    line = right + left
    return x * line[:, 0] + line[:, 1]


def sorted_linearization(
    p: Float[Array, "m 2"], slopes: Float[Array, "m 2"], x: Float[Array, " s"]
) -> tuple[Float[Array, " s"], Gather]:
    """Return the predictions and the map from a covector g to the forces G, in O(m log s + s).

    Args:
        p: direction (a, -b) of each neuron.
        slopes: slope vector of each neuron, its weight included.
        x: samples, in any order.
    """
    order = jnp.argsort(x)
    ordered = x[order]
    regions = find_regions(p, ordered)
    f = jnp.zeros_like(x, slopes.dtype).at[order].set(region_predictions(regions, slopes, ordered))
    return f, lambda g: region_forces(g[order], ordered)[regions]


def dense_linearization(
    p: Float[Array, "m 2"], slopes: Float[Array, "m 2"], x: Float[Array, " s"]
) -> tuple[Float[Array, " s"], Gather]:
    """Return the same as ``sorted_linearization`` in O(m s), through the s x m array of activations.

    This is the oracle of the tests, and it is faster for few samples.
    """
    active = is_active(p, x).astype(slopes.dtype)
    f = x * (active @ slopes[:, 0]) + active @ slopes[:, 1]
    return f, lambda g: jnp.stack([(g * x) @ active, g @ active], axis=-1)
