"""What can be measured of a batch at one layer: lengths, angles, ranks, and the sample that has left the others.

All arrays may have further leading axes, so that the record of a whole network is read like that of one batch.

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
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from meanflow import _boundary
from meanflow._boundary import Positive, array, checked
from meanflow._matrices import grams
from meanflow._numerics import magnitude, safe_divide, scaled_norm


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


class Gram(eqx.Module):
    """Lengths and angles of the samples of a batch, from their Gram matrix.

    Args:
        gram: inner products of the samples (..., n, n); leading axes such as (seeds, layers) are kept.

    Attributes:
        norms: lengths of the samples.
        cosines: cosines of the angles between them. Lengths are kept apart because their squares, in which a Gram
            matrix has them, are out of range long before they are: in float64 from 1e-154 and 1e154 on.

    >>> import jax.numpy as jnp
    >>> samples = Gram(jnp.array([[1.0, 0.0], [0.0, 4.0]]))
    >>> samples.norms.tolist(), samples.pair_angles.tolist()
    ([1.0, 2.0], [90.0])
    """

    norms: Float[Array, "*lead n"]
    cosines: Float[Array, "*lead n n"]

    @checked
    def __init__(self, gram: Annotated[Float[ArrayLike, "*lead n n"], grams()]):
        matrix = jnp.asarray(gram)
        self.norms = jnp.sqrt(jnp.maximum(jnp.diagonal(matrix, axis1=-2, axis2=-1), 0.0))
        # one length after the other, whose product may be out of range; 0 where a sample is zero, and NaN stays NaN
        cosines = safe_divide(matrix, self.norms[..., :, None])
        self.cosines = safe_divide(cosines, self.norms[..., None, :])

    @property
    def gram(self) -> Float[Array, "*lead n n"]:
        """Inner products of the samples."""
        return self.cosines * self.norms[..., :, None] * self.norms[..., None, :]

    @property
    def angles(self) -> Float[Array, "*lead n n"]:
        """Angles between all samples in degrees; 90 wherever one of the two is zero, NaN if all samples are."""
        lost = jnp.all(self.norms == 0, axis=-1)[..., None, None]
        return jnp.degrees(jnp.arccos(jnp.where(lost, jnp.nan, jnp.clip(self.cosines, -1.0, 1.0))))

    @property
    def pair_angles(self) -> Float[Array, "*lead pairs"]:
        """Angles in degrees of the n(n-1)/2 pairs i < j, in the order (0, 1), (0, 2), ..., (1, 2), ..."""
        i, j = jnp.triu_indices(self.norms.shape[-1], 1)
        return self.angles[..., i, j]

    @checked
    def odd_point(self, threshold: Positive | None = None) -> OddPoint:
        """Find the sample that has escaped from the others, of at least three, and measure how far.

        Args:
            threshold: the norm ratio that counts as an escape. The default sqrt(n - 1) is the geometric mean of 1, the
                ratio of the symmetric state, and n - 1, the ratio of Definition 12.

        >>> import jax.numpy as jnp
        >>> odd = Gram(jnp.diag(jnp.array([1.0, 1.0, 9.0]))).odd_point()
        >>> int(odd.sample), float(odd.norm_ratio), float(odd.odd_angle)
        (2, 3.0, 90.0)
        """
        n = self.norms.shape[-1]
        known = _boundary.concrete(self.norms)
        if n < 3 or (known is not None and not np.all(np.sum(known > 0, axis=-1) >= 2)):
            raise ValueError("odd_point needs at least 3 samples, of which 2 are not zero, got fewer")
        top, index = jax.lax.top_k(self.norms, 2)
        ratio = top[..., 0] / top[..., 1]
        odd = jax.nn.one_hot(index[..., 0], n, dtype=self.norms.dtype)
        rest = 1 - odd
        angle = self.angles
        # means of angles over pairs (odd, other) and over ordered pairs of two others, picked out by weights 0 and 1,
        # so that the index of the odd sample may differ along the leading axes
        across = jnp.sum(angle * odd[..., :, None] * rest[..., None, :], axis=(-1, -2)) / (n - 1)
        other = jnp.broadcast_to(1 - jnp.eye(n, dtype=angle.dtype), angle.shape)
        pairs = rest[..., :, None] * rest[..., None, :] * other
        within = jnp.sum(angle * pairs, axis=(-1, -2)) / ((n - 1) * (n - 2))
        limit = jnp.sqrt(n - 1.0) if threshold is None else threshold
        return OddPoint(index[..., 0], ratio, across, within, ratio > limit)


class LayerRecord(Gram):
    """What ``propagate`` records of a batch at every layer; all arrays share the leading axes (seeds, layers).

    Making one costs O(n^2 d), and it keeps O(n^2) numbers, not the activations.

    Args:
        x: one batch (n, d).

    Attributes:
        singular_values: of the batch itself, not of its Gram matrix, hence at full precision; padded with zeros where
            the width is below n.

    >>> record = LayerRecord(jnp.array([[1.0, 0.0], [0.0, 2.0]]))
    >>> record.gram.tolist(), record.singular_values.tolist(), record.stable_rank.item()
    ([[1.0, 0.0], [0.0, 4.0]], [2.0, 1.0], 1.25)
    """

    singular_values: Float[Array, "*lead n"]

    @checked
    def __init__(self, x: Annotated[Float[ArrayLike, "n d"], array((None, None), nan=True, infinite=True)]):
        x = jnp.asarray(x)
        n, width = x.shape
        self.norms = scaled_norm(x)
        unit = safe_divide(x, self.norms[:, None])
        self.cosines = unit @ unit.T
        factor = jnp.linalg.qr(x.T, mode="r") if width > n else x  # same singular values, far smaller
        values = jnp.linalg.svd(factor, compute_uv=False)
        self.singular_values = jnp.pad(values, (0, n - values.shape[0]))

    @property
    def stable_rank(self) -> Float[Array, "*lead"]:
        """The soft rank |x|_F^2 / |x|_2^2: the squared singular values over the largest one; 0 for a zero batch."""
        values = self.singular_values
        return jnp.sum(jnp.square(values / magnitude(values, -1, keepdims=True)), axis=-1)

    def rank(self, rtol: float) -> Int[Array, "*lead"]:
        """Count the singular values that exceed ``rtol`` times the largest one.

        The tolerance has no default on purpose. ReLU layers make batches of full rank whose smallest singular values
        are near single precision: 8e-5 of the largest one for 20 samples in the plane and 200 neurons.
        """
        values = self.singular_values
        return jnp.sum(values > rtol * jnp.max(values, axis=-1, keepdims=True), axis=-1)
