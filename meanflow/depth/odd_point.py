"""The odd point: recenter + ReLU sends one sample away from all the others.

At infinite width the layer K <- J(HKH) is bistable from n = 7 on. Besides the symmetric state (all pairwise
cosines kappa(-1/(n-1))) it has a state with one long sample, nearly orthogonal to a cluster of the others.
The cluster does not collapse to a point, as the invariant representation of "BN decomposed" (Definition 12)
has it: its angles tend to about 540/n degrees.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from meanflow import _checks
from meanflow.depth import observables
from meanflow.kernels.infinite.dual import dual_activation


class OddPoint(NamedTuple):
    """Diagnostics of one batch (leading axes allowed).

    Attributes:
        sample: the longest one.
        norm_ratio: its length over that of the second longest.
        odd_angle: mean angle in degrees between it and the others.
        cluster_angle: mean angle in degrees among the others.
        escaped: norm_ratio above the threshold.
    """

    sample: jax.Array
    norm_ratio: jax.Array
    odd_angle: jax.Array
    cluster_angle: jax.Array
    escaped: jax.Array


def odd_point(gram: jax.Array, threshold: float | None = None) -> OddPoint:
    """Which sample has escaped, and how far.

    Args:
        gram: (..., n, n), n >= 3.
        threshold: norm ratio that counts as an escape. By default sqrt(n - 1), the geometric mean of the
            symmetric state's 1 and Definition 12's n - 1.

    >>> import jax.numpy as jnp, meanflow as mf
    >>> batch = mf.depth.invariant_representation(20)
    >>> odd = mf.depth.odd_point(batch @ batch.T)
    >>> int(odd.sample), round(float(odd.norm_ratio), 3), float(odd.odd_angle)
    (0, 19.0, 90.0)
    """
    n = gram.shape[-1]
    if n < 3:
        raise ValueError(f"gram must describe at least 3 samples, got {n}")
    length = observables.norms(gram)
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
    """Gram matrix of exchangeable groups of samples: B groups of sizes m_b, n = sum m_b.

    Attributes:
        sizes: (B,) samples in each group, as floats.
        square: (B,) squared length of each sample of a group.
        inner: (B, B) inner product of two *different* samples of groups b and c (unused on the diagonal where
            a group has one sample).
    """

    sizes: jax.Array
    square: jax.Array
    inner: jax.Array

    def expand(self) -> jax.Array:
        """The (n, n) Gram matrix. Sizes must be known outside of compilation."""
        label = jnp.repeat(jnp.arange(len(self.sizes)), self.sizes.astype(int))
        full = self.inner[label[:, None], label[None, :]]
        return full.at[jnp.diag_indices(full.shape[0])].set(self.square[label])


def block_layer(blocks: Blocks) -> Blocks:
    """One infinitely wide layer of recenter + ReLU, scaled to mean squared length 1: J(HKH) in O(B^2)."""
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
    """Where one outlier ends up at infinite width.

    Attributes:
        norm_ratio: odd sample over cluster sample (1 in the symmetric state; Definition 12: n - 1).
        odd_angle: degrees between them.
        cluster_angle: degrees between two cluster samples.
        residual: largest change of an entry in the last layer.
        blocks: the state itself, groups of 1 and n - 1.
    """

    norm_ratio: jax.Array
    odd_angle: jax.Array
    cluster_angle: jax.Array
    residual: jax.Array
    blocks: Blocks


@partial(jax.jit, static_argnames=("max_steps",))
def _outlier_limit(n: jax.Array, scale: jax.Array, tolerance: float, max_steps: int) -> OddState:
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


def odd_state(n: int, scale: float = 20.0, *, tolerance: float = 1e-13, max_steps: int = 200_000) -> OddState:
    """Limit of recenter + ReLU at infinite width: n orthonormal samples, one multiplied by ``scale``.

    Exchangeable samples stay exchangeable, so a layer costs O(1) whatever n. Works under vmap over n and
    scale.

    >>> import meanflow as mf
    >>> state = mf.depth.odd_state(10)
    >>> round(float(state.norm_ratio), 2), round(float(state.cluster_angle), 1)
    (7.41, 45.2)
    """
    _checks.at_least("n", n, 3)
    _checks.at_least("scale", scale, 0.0, strict=True)
    return _outlier_limit(jnp.asarray(n), jnp.asarray(scale, float), tolerance, max_steps)


def critical_scale(n: int, high: float = 20.0, steps: int = 50) -> jax.Array:
    """The outlier scale s* above which ``odd_state`` reaches the odd point, by bisection on [1, high].

    NaN when even ``high`` ends in the symmetric state (n <= 6).
    """
    _checks.at_least("n", n, 3)
    size = jnp.asarray(n)

    def odd(scale: jax.Array) -> jax.Array:
        return _outlier_limit(size, scale, 1e-10, 20_000).norm_ratio > jnp.sqrt(size - 1.0)

    def halve(_: int, ends: tuple) -> tuple:
        low, top = ends
        middle = (low + top) / 2
        escaped = odd(middle)
        return jnp.where(escaped, low, middle), jnp.where(escaped, middle, top)

    top = jnp.asarray(high, float)
    ends = jax.lax.fori_loop(0, steps, halve, (jnp.ones_like(top), top))
    return jnp.where(odd(top), (ends[0] + ends[1]) / 2, jnp.nan)
