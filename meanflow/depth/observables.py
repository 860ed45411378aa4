"""What can be seen of a batch at one layer: Gram matrix, angles, ranks, clusters, neuron activity.

Batches are (n, features). Everything here accepts leading axes, so that the record of a whole network
(layers, n, n) is read by the same functions as one Gram matrix.
"""

import equinox as eqx
import jax
import jax.numpy as jnp


def gram(x: jax.Array) -> jax.Array:
    """Inner products of the samples: x (..., n, k) -> (..., n, n)."""
    return x @ jnp.swapaxes(x, -1, -2)


def norms(gram: jax.Array) -> jax.Array:
    """Lengths of the samples, (..., n), from their Gram matrix."""
    return jnp.sqrt(jnp.maximum(jnp.diagonal(gram, axis1=-2, axis2=-1), 0.0))


def cosines(gram: jax.Array) -> jax.Array:
    """Pairwise cosines (..., n, n) in [-1, 1]; 0 wherever one of the two samples is zero."""
    length = norms(gram)
    scale = length[..., :, None] * length[..., None, :]
    zero = scale == 0  # not "> 0": NaN stays NaN
    return jnp.where(zero, 0.0, jnp.clip(gram / jnp.where(zero, 1, scale), -1.0, 1.0))


def angles(gram: jax.Array) -> jax.Array:
    """Pairwise angles in degrees (..., n, n); 90 wherever one of the two samples is zero.

    >>> angles(jnp.array([[1.0, 0.0], [0.0, 4.0]]))[0, 1].item()
    90.0
    """
    return jnp.degrees(jnp.arccos(cosines(gram)))


def pair_angles(gram: jax.Array) -> jax.Array:
    """The n(n-1)/2 angles in degrees above the diagonal, (..., n(n-1)/2)."""
    i, j = jnp.triu_indices(gram.shape[-1], 1)
    return angles(gram)[..., i, j]


def rank(singular_values: jax.Array, rtol: float) -> jax.Array:
    """How many singular values exceed rtol times the largest one.

    The tolerance has no default: ReLU layers make full-rank batches whose smallest singular values are
    near single precision (8e-5 of the largest for 20 samples in the plane and 200 neurons).
    """
    return jnp.sum(singular_values > rtol * jnp.max(singular_values, axis=-1, keepdims=True), axis=-1)


def stable_rank(singular_values: jax.Array) -> jax.Array:
    """|x|_F^2 / |x|_2^2 = sum of squared singular values over the largest squared; 0 for a zero batch."""
    top = jnp.max(singular_values, axis=-1)
    total = jnp.sum(jnp.square(singular_values), axis=-1)
    return jnp.where(top > 0, total / jnp.square(jnp.where(top > 0, top, 1)), 0.0)


def orthogonality_gap(gram: jax.Array) -> jax.Array:
    """Frobenius distance of gram / trace from I / n, times n: 0 for orthogonal samples of equal length."""
    n = gram.shape[-1]
    trace = jnp.trace(gram, axis1=-2, axis2=-1)[..., None, None]
    gap = gram * (n / trace) - jnp.broadcast_to(jnp.eye(n, dtype=gram.dtype), gram.shape)
    return jnp.sqrt(jnp.sum(jnp.square(gap), axis=(-1, -2)))


def cluster_labels(gram: jax.Array, degrees: float) -> jax.Array:
    """Clusters of directions by single linkage: (..., n) labels, the least index of each cluster.

    Two samples are linked when their angle is at most ``degrees``; labels spread along chains of links.
    Cost O(n^3 log n), by squaring the reachability matrix.
    """
    n = gram.shape[-1]
    itself = jnp.broadcast_to(jnp.eye(n, dtype=bool), gram.shape)
    linked = (angles(gram) <= degrees) | itself

    def square(_: int, linked: jax.Array) -> jax.Array:
        count = linked.astype(gram.dtype)
        return count @ count > 0

    linked = jax.lax.fori_loop(0, max(1, (n - 1).bit_length()), square, linked)
    return jnp.argmax(linked, axis=-1)


def clusters(gram: jax.Array, degrees: float) -> jax.Array:
    """Number of clusters of directions (see ``cluster_labels``)."""
    labels = cluster_labels(gram, degrees)
    return jnp.sum(labels == jnp.arange(gram.shape[-1]).reshape((1,) * (labels.ndim - 1) + (-1,)), axis=-1)


def activity(x: jax.Array) -> jax.Array:
    """Share of the batch on which each neuron is positive: (..., n, d) -> (..., d)."""
    return jnp.mean((x > 0).astype(x.dtype), axis=-2)


class LayerRecord(eqx.Module):
    """Record of a batch, layer by layer; leading axes (seeds, layers) are shared by all arrays.

    Attributes:
        gram: (..., n, n) inner products of the samples.
        singular_values: (..., n) of the batch, not of its Gram matrix, hence at full precision; padded with
            zeros where the width is below n.
        active: (..., n + 1) integers; entry c counts the neurons positive on exactly c samples.
    """

    gram: jax.Array
    singular_values: jax.Array
    active: jax.Array

    @property
    def norms(self) -> jax.Array:
        """Lengths of the samples, (..., n)."""
        return norms(self.gram)

    @property
    def angles(self) -> jax.Array:
        """Pairwise angles in degrees, (..., n, n)."""
        return angles(self.gram)

    @property
    def pair_angles(self) -> jax.Array:
        """Angles of distinct pairs in degrees, (..., n(n-1)/2)."""
        return pair_angles(self.gram)

    @property
    def stable_rank(self) -> jax.Array:
        """Soft rank |x|_F^2 / |x|_2^2."""
        return stable_rank(self.singular_values)

    def rank(self, rtol: float) -> jax.Array:
        """Numerical rank: singular values above rtol times the largest."""
        return rank(self.singular_values, rtol)

    def clusters(self, degrees: float) -> jax.Array:
        """Number of clusters of directions linked by angles of at most ``degrees``."""
        return clusters(self.gram, degrees)

    def active_share(self, low: float, high: float) -> jax.Array:
        """Share of the neurons that are positive on a fraction of the batch in (low, high]."""
        n = self.active.shape[-1] - 1
        fraction = jnp.arange(n + 1) / n
        inside = ((fraction > low) & (fraction <= high)).astype(self.gram.dtype)
        return (self.active.astype(self.gram.dtype) @ inside) / jnp.sum(self.active, axis=-1)


def summary(x: jax.Array) -> LayerRecord:
    """The record of one batch x (n, d). Cost O(n^2 d), memory O(n^2): the activations are not kept."""
    n, width = x.shape
    factor = jnp.linalg.qr(x.T, mode="r") if width > n else x  # same singular values, far smaller
    values = jnp.linalg.svd(factor, compute_uv=False)
    count = jnp.sum(x > 0, axis=0)
    return LayerRecord(
        gram=gram(x),
        singular_values=jnp.pad(values, (0, n - values.shape[0])),
        active=jnp.zeros(n + 1, jnp.int32).at[count].add(1),
    )
