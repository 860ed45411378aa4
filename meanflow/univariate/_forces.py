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

Three ways lead to the same forces, and which one is fastest depends on the device. A ``Way`` holds the parts of one;
``linearization`` takes one for each platform, and the compiler sees the one of its platform alone.
"""

import abc
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PyTree

Result = TypeVar("Result")
Regions: TypeAlias = Int[Array, " m"]  # of each neuron
Pairs: TypeAlias = Float[Array, "m 2"]  # a direction or a slope of each neuron
OfSamples: TypeAlias = Float[Array, " s"]
OfNeurons: TypeAlias = Float[Array, " m"]

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
    # the number of samples before the first one that is active (a >= 0) or inactive (a < 0), from its highest bit to
    # its lowest: written out, the steps are one pass over the neurons, where a loop would be one pass for each
    first = jnp.zeros(a.shape, jnp.int32)
    for bit in reversed(range(s.bit_length())):
        last = first + (2**bit - 1)
        beyond = ((a * x[jnp.minimum(last, s - 1)] > b) != left) | (last >= s)
        first = jnp.where(beyond, first, first + 2**bit)
    return jnp.where(left, (2 * s - first) % (2 * s), s - first)


def region_forces(g: Float[Array, " s"], x: Float[Array, " s"]) -> Float[Array, "regions 2"]:
    """Return the force sum_{j active in R} g_j (x_j, 1) in each of the 2s regions R, for sorted x. O(s)."""
    moments = jnp.stack([g * x, g], axis=-1)
    # one cumulative sum of four columns: each is several kernels, and as many to differentiate
    sums = jnp.cumsum(jnp.concatenate([moments, moments[::-1]], axis=-1), axis=0)
    prefix, suffix = sums[:, :2], sums[:, 2:]
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
    left = jnp.concatenate([jnp.zeros_like(table[:1]), table[s + 1 :]])
    sums = jnp.cumsum(jnp.concatenate([table[1 : s + 1][::-1], left], axis=-1), axis=0)
    line = sums[:, :2] + sums[::-1, 2:]
    return x * line[:, 0] + line[:, 1]


class Samples(NamedTuple):
    """The samples of a data set, and how to sort them.

    Attributes:
        x: samples, in any order.
        order: the places that sort them, or None where they are sorted already.
    """

    x: Float[Array, " s"]
    order: Int[Array, " s"] | None

    def sort(self, u: Float[Array, " s"]) -> Float[Array, " s"]:
        """Return numbers of the samples in the order of ascending x."""
        return u if self.order is None else u[self.order]

    def unsort(self, u: Float[Array, " s"]) -> Float[Array, " s"]:
        """Return numbers given in the order of ascending x in the order of the samples."""
        return u if self.order is None else jnp.zeros_like(u).at[self.order].set(u)


class Way(abc.ABC):
    """One way to sum over the pattern of activations. All ways have the same results, up to rounding."""

    def find(self, p: Float[Array, "m 2"], samples: Samples) -> Int[Array, " m"]:
        """Return the regions of the directions, (m,); zeros where this way needs none."""
        return jnp.zeros(p.shape[:1], jnp.int32)

    @abc.abstractmethod
    def predict(self, regions: Regions, p: Pairs, slopes: Pairs, samples: Samples) -> OfSamples:
        """Return f at the samples, for slope vectors that include the weights of the neurons."""

    @abc.abstractmethod
    def gather(
        self, regions: Regions, p: Pairs, g: OfSamples, samples: Samples
    ) -> tuple[OfNeurons, OfNeurons]:
        """Return the two components of the force of a covector g on each neuron."""


class ByRegions(Way):
    """O(m log s + s): the table of regions."""

    def find(self, p: Float[Array, "m 2"], samples: Samples) -> Int[Array, " m"]:
        """Return the regions of the directions."""
        return find_regions(p, samples.sort(samples.x))

    def predict(self, regions: Regions, p: Pairs, slopes: Pairs, samples: Samples) -> OfSamples:
        """Return f from sums of the slopes by region."""
        return samples.unsort(region_predictions(regions, slopes, samples.sort(samples.x)))

    def gather(
        self, regions: Regions, p: Pairs, g: OfSamples, samples: Samples
    ) -> tuple[OfNeurons, OfNeurons]:
        """Return the entries of the table."""
        table = region_forces(samples.sort(g), samples.sort(samples.x))
        # a column at a time: on a TPU rows of two numbers are padded to 128
        return table[:, 0][regions], table[:, 1][regions]


class ByProducts(Way):
    """O(m s), by products with the s x m array of activations, which processors are fast at. The oracle of the tests.

    Under differentiation the array is formed again: to compare is cheaper than to keep s x m numbers.
    """

    @functools.partial(jax.checkpoint, static_argnums=0)
    def predict(self, regions: Regions, p: Pairs, slopes: Pairs, samples: Samples) -> OfSamples:
        """Return two products."""
        active = is_active(p, samples.x).astype(slopes.dtype)
        return samples.x * (active @ slopes[:, 0]) + active @ slopes[:, 1]

    @functools.partial(jax.checkpoint, static_argnums=0)
    def gather(
        self, regions: Regions, p: Pairs, g: OfSamples, samples: Samples
    ) -> tuple[OfNeurons, OfNeurons]:
        """Return two products."""
        active = is_active(p, samples.x).astype(g.dtype)
        return (g * samples.x) @ active, g @ active


class BySums(Way):
    """O(m s), by sums that compilers for accelerators fuse with the comparison, so that no s x m array is stored.

    Unlike products these are not rounded to the formats of matrix units, such as bfloat16.
    """

    @functools.partial(jax.checkpoint, static_argnums=0)
    def predict(self, regions: Regions, p: Pairs, slopes: Pairs, samples: Samples) -> OfSamples:
        """Return the sums of the lines that are active."""
        lines = samples.x[None, :] * slopes[:, :1] + slopes[:, 1:]
        return jnp.sum(_active_samples(p, samples.x, lines.dtype) * lines, axis=0)

    @functools.partial(jax.checkpoint, static_argnums=0)
    def gather(
        self, regions: Regions, p: Pairs, g: OfSamples, samples: Samples
    ) -> tuple[OfNeurons, OfNeurons]:
        """Return the sums over the samples that are active."""
        # Behind a barrier the compiler does not know that it compares the same numbers again. If it knew, it would
        # store the pattern, which takes longer to write and read than to compute.
        apart = jax.lax.optimization_barrier(jax.lax.stop_gradient((samples.x, samples.x)))
        tilt, shift = (
            jnp.sum(_active_samples(p, again, u.dtype) * u[None, :], axis=1)
            for again, u in zip(apart, (g * samples.x, g), strict=True)
        )
        return tilt, shift


def _active_samples(p: Float[Array, "m 2"], x: Float[Array, " s"], dtype: DTypeLike) -> Float[Array, "m s"]:
    """Return the pattern as numbers, with neurons along the first axis: compilers fuse that with sums both ways."""
    return (p[:, :1] * x[None, :] > -p[:, 1:]).astype(dtype)


REGIONS, PRODUCTS, SUMS = ByRegions(), ByProducts(), BySums()


def linearization(
    p: Float[Array, "m 2"],
    slopes: Float[Array, "m 2"],
    x: Float[Array, " s"],
    ways: Mapping[str, Way],
    *,
    is_sorted: bool = False,
) -> tuple[Float[Array, " s"], Gather]:
    """Return the predictions and the map from a covector g to the forces G.

    Args:
        p: direction (a, -b) of each neuron.
        slopes: slope vector of each neuron, its weight included.
        x: samples, in any order.
        ways: how it is done on each platform; the compiler sees the way of its own platform alone.
        is_sorted: whether the samples are known to be in ascending order.
    """
    searches = not is_sorted and REGIONS in ways.values()
    samples = Samples(x, jnp.argsort(x) if searches else None)

    def on_platform(part: Callable[[Way], Callable[..., Result]], *arguments: PyTree) -> Result:
        parts = {platform: part(way) for platform, way in ways.items()}
        if len(set(ways.values())) == 1:
            return next(iter(parts.values()))(*arguments)
        return jax.lax.platform_dependent(*arguments, **parts)

    regions = on_platform(lambda way: way.find, p, samples)
    f = on_platform(lambda way: way.predict, regions, p, slopes, samples)
    return f, lambda g: jnp.stack(on_platform(lambda way: way.gather, regions, p, g, samples), axis=-1)
