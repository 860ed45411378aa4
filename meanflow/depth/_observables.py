"""What can be measured of a batch at one layer: Gram matrix, angles, ranks.

A batch is an array ``(n, features)``. All functions accept further leading axes, so the record of a whole network,
``(layers, n, n)``, is read by the same functions as one Gram matrix.

**The odd point.** Recenter + ReLU sends one sample away from all the others. At infinite width the layer K <- J(HKH) of
``_expected`` is bistable from n = 7 samples on. Besides the symmetric state, in which all pairwise cosines are
kappa(-1/(n-1)), it has a state with one long sample that is nearly orthogonal to a cluster of the others. The cluster
does not collapse to a point, as the invariant representation of "BN decomposed" (Definition 12) has it: its angles tend
to about 540/n degrees.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from meanflow import _boundary
from meanflow._boundary import Positive, checked, count, precision
from meanflow._matrices import grams
from meanflow._numerics import safe_divide


def gram(x: Float[ArrayLike, "*lead n k"]) -> Float[Array, "*lead n n"]:
    """Return the inner products of the samples of a batch, x x'.

    >>> print(gram(jnp.array([[1.0, 0.0], [1.0, 2.0]])))
    [[1. 1.]
     [1. 5.]]
    """
    x = jnp.asarray(x)
    return x @ jnp.swapaxes(x, -1, -2)


def norms(gram: Float[ArrayLike, "*lead n n"]) -> Float[Array, "*lead n"]:
    """Return the lengths of the samples, the roots of the diagonal of their Gram matrix."""
    return jnp.sqrt(jnp.maximum(jnp.diagonal(jnp.asarray(gram), axis1=-2, axis2=-1), 0.0))


def angles(gram: Float[ArrayLike, "*lead n n"]) -> Float[Array, "*lead n n"]:
    """Return the angles between the samples in degrees; 90 wherever one of the two samples is zero.

    >>> angles(jnp.array([[1.0, 0.0], [0.0, 4.0]]))[0, 1].item()
    90.0
    """
    gram, length = jnp.asarray(gram), norms(gram)
    # safe_divide is 0 at a zero sample, a right angle; NaN stays NaN
    cosine = safe_divide(gram, length[..., :, None] * length[..., None, :])
    return jnp.degrees(jnp.arccos(jnp.clip(cosine, -1.0, 1.0)))


@checked
def pair_angles(gram: Annotated[Float[ArrayLike, "*lead n n"], grams(2)]) -> Float[Array, "*lead pairs"]:
    """Return the angles in degrees of the n(n-1)/2 pairs of distinct samples, from their Gram matrix.

    Args:
        gram: inner products of the samples; leading axes such as (seeds, layers) are kept.

    Returns:
        One angle for each pair i < j, in the order (0, 1), (0, 2), ..., (1, 2), ... An angle is 90 degrees wherever
        one of the two samples is zero.

    >>> pair_angles(jnp.eye(3)).tolist()
    [90.0, 90.0, 90.0]
    """
    return _pair_angles(jnp.asarray(gram))


def _pair_angles(gram: jax.Array) -> jax.Array:
    """Return ``pair_angles`` of any matrix; those of a network that failed are NaN."""
    i, j = jnp.triu_indices(gram.shape[-1], 1)
    return angles(gram)[..., i, j]


class LayerRecord(eqx.Module):
    """What ``propagate`` records of a batch at every layer; all arrays share the leading axes (seeds, layers).

    Attributes:
        gram: inner products of the samples.
        singular_values: of the batch itself, not of its Gram matrix, hence at full precision; padded with zeros where
            the width is below n.
    """

    gram: Float[Array, "*lead n n"]
    singular_values: Float[Array, "*lead n"]

    @property
    def angles(self) -> Float[Array, "*lead n n"]:
        """Angles between all samples in degrees."""
        return angles(self.gram)

    @property
    def pair_angles(self) -> Float[Array, "*lead pairs"]:
        """Angles of the n(n-1)/2 distinct pairs in degrees."""
        return _pair_angles(self.gram)

    @property
    def stable_rank(self) -> Float[Array, "*lead"]:
        """The soft rank |x|_F^2 / |x|_2^2: the squared singular values over the largest one; 0 for a zero batch."""
        squares = jnp.square(self.singular_values)
        return safe_divide(jnp.sum(squares, axis=-1), jnp.max(squares, axis=-1))

    def rank(self, rtol: float) -> Int[Array, "*lead"]:
        """Count the singular values that exceed ``rtol`` times the largest one.

        The tolerance has no default on purpose. ReLU layers make batches of full rank whose smallest singular values
        are near single precision: 8e-5 of the largest one for 20 samples in the plane and 200 neurons.
        """
        values = self.singular_values
        return jnp.sum(values > rtol * jnp.max(values, axis=-1, keepdims=True), axis=-1)


def summary(x: Float[ArrayLike, "n d"]) -> LayerRecord:
    """Return the record of one batch. It costs O(n^2 d) and keeps O(n^2) numbers, not the activations.

    >>> record = summary(jnp.array([[1.0, 0.0], [0.0, 2.0]]))
    >>> record.singular_values.tolist(), record.stable_rank.item()
    ([2.0, 1.0], 1.25)
    """
    x = jnp.asarray(x)
    n, width = x.shape
    factor = jnp.linalg.qr(x.T, mode="r") if width > n else x  # same singular values, far smaller
    values = jnp.linalg.svd(factor, compute_uv=False)
    return LayerRecord(gram(x), jnp.pad(values, (0, n - values.shape[0])))


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


@checked
def odd_point(
    gram: Annotated[Float[ArrayLike, "*lead n n"], grams(3)], threshold: Positive | None = None
) -> OddPoint:
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
    length = norms(gram)
    known = _boundary.concrete(length)
    if known is not None and not np.all(np.sum(known > 0, axis=-1) >= 2):
        raise ValueError("gram must have at least two samples that are not zero, got fewer")
    top, index = jax.lax.top_k(length, 2)
    ratio = top[..., 0] / top[..., 1]
    odd = jax.nn.one_hot(index[..., 0], n, dtype=gram.dtype)
    rest = 1 - odd
    angle = angles(gram)
    # means of angles over pairs (odd, other) and over ordered pairs of two others, picked out by weights 0 and 1, so
    # that the index of the odd sample may differ along the leading axes
    across = jnp.sum(angle * odd[..., :, None] * rest[..., None, :], axis=(-1, -2)) / (n - 1)
    itself = jnp.broadcast_to(jnp.eye(n, dtype=gram.dtype), gram.shape)
    pairs = rest[..., :, None] * rest[..., None, :] * (1 - itself)
    within = jnp.sum(angle * pairs, axis=(-1, -2)) / ((n - 1) * (n - 2))
    limit = jnp.sqrt(n - 1.0) if threshold is None else threshold
    return OddPoint(index[..., 0], ratio, across, within, ratio > limit)


@checked
def invariant_representation(
    n: Annotated[int, count(3)],
    features: Annotated[int, count(2)] = 2,
    dtype: Annotated[DTypeLike, precision] | None = None,
) -> Float[Array, "{n} {features}"]:
    """Return a batch whose expected Gram matrix recenter + ReLU reproduces (Definition 12 of "BN decomposed").

    Sample 0 has length 1 and lies on the first axis; all others coincide at distance 1/(n-1) on the second axis.

    Args:
        n: number of samples, at least 3.
        features: number of features, at least 2.
        dtype: of the batch; by default the default float.

    >>> import meanflow as mf
    >>> mf.depth.invariant_representation(3).tolist()
    [[1.0, 0.0], [0.0, 0.5], [0.0, 0.5]]
    """
    x = jnp.zeros((n, features), dtype or jnp.result_type(float))
    return x.at[0, 0].set(1.0).at[1:, 1].set(1.0 / (n - 1))
