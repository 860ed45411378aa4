"""The odd point: recenter + ReLU sends one sample away from all the others.

At infinite width the layer K <- J(HKH) is bistable from n = 7 samples on. Besides the symmetric state, in which all
pairwise cosines are kappa(-1/(n-1)), it has a state with one long sample that is nearly orthogonal to a cluster of the
others. The cluster does not collapse to a point, as the invariant representation of "BN decomposed" (Definition 12)
has it: its angles tend to about 540/n degrees.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Shaped

from meanflow import _checks
from meanflow._checks import number, optional
from meanflow._matrices import grams
from meanflow.depth import _observables as observables
from meanflow.kernels._infinite.dual import dual_activation


class OddPoint(NamedTuple):
    """How far the longest sample of a batch is from all the others.

    Attributes:
        sample: index of the longest sample.
        norm_ratio: its length over that of the second longest.
        odd_angle: mean angle in degrees between it and the others.
        cluster_angle: mean angle in degrees among the others.
        escaped: whether norm_ratio is above the threshold.
    """

    sample: Int[Array, "*lead"]
    norm_ratio: Float[Array, "*lead"]
    odd_angle: Float[Array, "*lead"]
    cluster_angle: Float[Array, "*lead"]
    escaped: Bool[Array, "*lead"]


@_checks.arguments(gram=grams(3), threshold=optional(number(above=0)))
def odd_point(gram: Float[ArrayLike, "*lead n n"], threshold: float | None = None) -> OddPoint:
    """Find the sample that has escaped from the others, and measure how far.

    Args:
        gram: Gram matrix of n >= 3 samples; leading axes such as (seeds, layers) are kept.
        threshold: the norm ratio that counts as an escape. The default sqrt(n - 1) is the geometric mean of 1, the
            ratio of the symmetric state, and n - 1, the ratio of Definition 12.

    >>> import jax.numpy as jnp, meanflow as mf
    >>> batch = mf.depth.invariant_representation(20)
    >>> odd = mf.depth.odd_point(batch @ batch.T)
    >>> int(odd.sample), round(float(odd.norm_ratio), 3), float(odd.odd_angle)
    (0, 19.0, 90.0)
    """
    gram = jnp.asarray(gram)
    n = gram.shape[-1]
    length = observables.norms(gram)
    known = _checks.concrete(length)
    if known is not None and not np.all(np.sum(known > 0, axis=-1) >= 2):
        raise ValueError("gram must have at least two samples that are not zero, got fewer")
    top, index = jax.lax.top_k(length, 2)
    ratio = top[..., 0] / top[..., 1]
    odd = jax.nn.one_hot(index[..., 0], n, dtype=gram.dtype)
    rest = 1 - odd
    angle = observables.angles(gram)
    across = jnp.sum(angle * odd[..., :, None] * rest[..., None, :], axis=(-1, -2)) / (n - 1)
    itself = jnp.broadcast_to(jnp.eye(n, dtype=gram.dtype), gram.shape)
    pairs = rest[..., :, None] * rest[..., None, :] * (1 - itself)
    within = jnp.sum(angle * pairs, axis=(-1, -2)) / ((n - 1) * (n - 2))
    limit = jnp.sqrt(n - 1.0) if threshold is None else threshold
    return OddPoint(index[..., 0], ratio, across, within, ratio > limit)


class Blocks(NamedTuple):
    """The Gram matrix of a batch that consists of groups of exchangeable samples.

    Attributes:
        sizes: number of samples in each group, as floats.
        square: squared length of each sample of a group.
        inner: inner product of two *different* samples, one of each group. The diagonal entry of a group with a
            single sample is not used.
    """

    sizes: Float[Array, "groups"]
    square: Float[Array, "groups"]
    inner: Float[Array, "groups groups"]

    def expand(self) -> Float[Array, "n n"]:
        """Return the Gram matrix of all samples. The sizes must be known outside of compilation."""
        label = jnp.repeat(jnp.arange(len(self.sizes)), self.sizes.astype(int))
        full = self.inner[label[:, None], label[None, :]]
        return full.at[jnp.diag_indices(full.shape[0])].set(self.square[label])


def block_layer(blocks: Blocks) -> Blocks:
    """Apply one infinitely wide layer of recenter + ReLU, J(HKH), and scale to mean squared length 1.

    The cost is O(groups^2), whatever the number of samples.
    """
    sizes, square, inner = blocks
    n = jnp.sum(sizes)
    with_mean = (square - jnp.diagonal(inner) + inner @ sizes) / n  # <x_b, mean>
    mean = jnp.sum(sizes * with_mean) / n  # |mean|^2
    shape = inner.shape
    square = square - 2 * with_mean + mean
    inner = inner - with_mean[:, None] - with_mean[None, :] + mean
    first, second = (jnp.broadcast_to(v, shape) for v in (square[:, None], square[None, :]))
    inner = 2 * dual_activation("relu")(first, second, inner).value
    scale = n / jnp.sum(sizes * square)
    return Blocks(sizes, square * scale, inner * scale)


class OddState(NamedTuple):
    """The state that a batch with one outlier reaches at infinite width.

    Attributes:
        norm_ratio: length of the odd sample over that of a sample in the cluster. It is 1 in the symmetric state and
            n - 1 in Definition 12.
        odd_angle: angle in degrees between the odd sample and one in the cluster.
        cluster_angle: angle in degrees between two samples in the cluster.
        residual: largest change of an entry in the last layer.
        blocks: the state itself, with groups of 1 and of n - 1 samples.
    """

    norm_ratio: Float[Array, ""]
    odd_angle: Float[Array, ""]
    cluster_angle: Float[Array, ""]
    residual: Float[Array, ""]
    blocks: Blocks


@partial(jax.jit, static_argnames=("max_steps",))
def _outlier_limit(n: jax.Array, scale: jax.Array, tolerance: ArrayLike, max_steps: int) -> OddState:
    dtype = jnp.result_type(scale, float)
    sizes = jnp.stack([jnp.ones((), dtype), n.astype(dtype) - 1])
    square = jnp.stack([jnp.square(scale).astype(dtype), jnp.ones((), dtype)])
    start = Blocks(sizes, square, jnp.zeros((2, 2), dtype))

    def step(state: tuple) -> tuple:
        blocks, _, count = state
        image = block_layer(blocks)
        change = jnp.maximum(
            jnp.max(jnp.abs(image.square - blocks.square)), jnp.max(jnp.abs(image.inner - blocks.inner))
        )
        return image, change, count + 1

    going = lambda state: (state[1] > tolerance) & (state[2] < max_steps)
    blocks, residual, _ = jax.lax.while_loop(going, step, (start, jnp.asarray(jnp.inf, dtype), 0))
    (one, rest), inner = blocks.square, blocks.inner
    angle = lambda c: jnp.degrees(jnp.arccos(jnp.clip(c, -1, 1)))
    return OddState(
        jnp.sqrt(one / rest),
        angle(inner[0, 1] / jnp.sqrt(one * rest)),
        angle(inner[1, 1] / rest),
        residual,
        blocks,
    )


def odd_state(
    n: Shaped[ArrayLike, ""],
    scale: Shaped[ArrayLike, ""] = 20.0,
    *,
    tolerance: float = 1e-13,
    max_steps: int = 200_000,
) -> OddState:
    """Return the limit of recenter + ReLU at infinite width, starting from orthonormal samples and one outlier.

    Exchangeable samples stay exchangeable, so a layer costs O(1) whatever n is. The function works under vmap over n
    and scale.

    Args:
        n: number of samples, at least 3.
        scale: length of the outlier; all other samples have length 1.
        tolerance: stop when no entry of the Gram matrix moves by more than this in a layer.
        max_steps: stop after so many layers in any case.

    >>> state = odd_state(10)
    >>> round(float(state.norm_ratio), 2), round(float(state.cluster_angle), 1)
    (7.41, 45.2)
    """
    _checks.at_least("n", n, 3)
    _checks.at_least("scale", scale, 0.0, strict=True)
    return _outlier_limit(jnp.asarray(n), jnp.asarray(scale, float), tolerance, max_steps)


def critical_scale(n: Shaped[ArrayLike, ""], high: float = 20.0, steps: int = 50) -> Float[Array, ""]:
    """Return the length of the outlier above which ``odd_state`` reaches the odd point, by bisection.

    Args:
        n: number of samples, at least 3.
        high: the bisection runs on [1, high].
        steps: number of halvings.

    Returns:
        The critical length, or NaN when even an outlier of length ``high`` ends in the symmetric state (n <= 6).

    >>> round(float(critical_scale(10)), 3)
    1.227
    """
    _checks.at_least("n", n, 3)
    size = jnp.asarray(n)

    def odd(scale: jax.Array) -> jax.Array:
        return _outlier_limit(size, scale, 1e-10, 20_000).norm_ratio > jnp.sqrt(size - 1.0)

    def halve(_: object, ends: tuple) -> tuple:
        low, top = ends
        middle = (low + top) / 2
        escaped = odd(middle)
        return jnp.where(escaped, low, middle), jnp.where(escaped, middle, top)

    top = jnp.asarray(high, float)
    ends = jax.lax.fori_loop(0, steps, halve, (jnp.ones_like(top), top))
    return jnp.where(odd(top), (ends[0] + ends[1]) / 2, jnp.nan)
