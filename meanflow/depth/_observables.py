"""What can be measured of a batch at one layer: Gram matrix, angles, ranks, clusters.

A batch is an array ``(n, features)``. All functions accept further leading axes, so the record of a whole network,
``(layers, n, n)``, is read by the same functions as one Gram matrix.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

from meanflow import _checks
from meanflow._matrices import grams


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


def cosines(gram: Float[ArrayLike, "*lead n n"]) -> Float[Array, "*lead n n"]:
    """Return the cosines of the angles between the samples; 0 wherever one of the two samples is zero."""
    length = norms(gram)
    scale = length[..., :, None] * length[..., None, :]
    zero = scale == 0  # not "> 0": NaN stays NaN
    return jnp.where(zero, 0.0, jnp.clip(gram / jnp.where(zero, 1, scale), -1.0, 1.0))


def angles(gram: Float[ArrayLike, "*lead n n"]) -> Float[Array, "*lead n n"]:
    """Return the angles between the samples in degrees; 90 wherever one of the two samples is zero.

    >>> angles(jnp.array([[1.0, 0.0], [0.0, 4.0]]))[0, 1].item()
    90.0
    """
    return jnp.degrees(jnp.arccos(cosines(gram)))


@_checks.arguments(gram=grams(2))
def pair_angles(gram: Float[ArrayLike, "*lead n n"]) -> Float[Array, "*lead pairs"]:
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


def rank(singular_values: Float[ArrayLike, "*lead n"], rtol: float) -> Int[Array, "*lead"]:
    """Count the singular values that exceed ``rtol`` times the largest one.

    The tolerance has no default on purpose. ReLU layers make batches of full rank whose smallest singular values are
    near single precision: 8e-5 of the largest one for 20 samples in the plane and 200 neurons.

    >>> int(rank(jnp.array([1.0, 0.5, 1e-9]), rtol=1e-6))
    2
    """
    values = jnp.asarray(singular_values)
    return jnp.sum(values > rtol * jnp.max(values, axis=-1, keepdims=True), axis=-1)


def stable_rank(singular_values: Float[ArrayLike, "*lead n"]) -> Float[Array, "*lead"]:
    """Return |x|_F^2 / |x|_2^2, the sum of the squared singular values over the largest square; 0 for a zero batch.

    >>> float(stable_rank(jnp.array([2.0, 2.0, 0.0])))
    2.0
    """
    values = jnp.asarray(singular_values)
    top = jnp.max(values, axis=-1)
    total = jnp.sum(jnp.square(values), axis=-1)
    return jnp.where(top > 0, total / jnp.square(jnp.where(top > 0, top, 1)), 0.0)


def cluster_labels(gram: Float[ArrayLike, "*lead n n"], degrees: float) -> Int[Array, "*lead n"]:
    """Sort the samples into clusters of directions, by single linkage.

    Two samples are linked when their angle is at most ``degrees``, and a cluster is what can be reached along links.
    The cost is O(n^3 log n), because the reachability matrix is squared log n times.

    Returns:
        For each sample the least index of the samples in its cluster.

    >>> directions = jnp.array([[1.0, 0.0], [0.0, 1.0], [0.1, 1.0]])
    >>> cluster_labels(gram(directions), 10.0).tolist()
    [0, 1, 1]
    """
    gram = jnp.asarray(gram)
    n = gram.shape[-1]
    itself = jnp.broadcast_to(jnp.eye(n, dtype=bool), gram.shape)
    linked = (angles(gram) <= degrees) | itself

    def square(_: object, linked: jax.Array) -> jax.Array:
        count = linked.astype(gram.dtype)
        return count @ count > 0

    # k squarings reach along 2^k links, and no chain in n samples is longer than n - 1
    linked = jax.lax.fori_loop(0, max(1, (n - 1).bit_length()), square, linked)
    return jnp.argmax(linked, axis=-1)


def clusters(gram: Float[ArrayLike, "*lead n n"], degrees: float) -> Int[Array, "*lead"]:
    """Count the clusters of directions that ``cluster_labels`` finds."""
    labels = cluster_labels(gram, degrees)
    # the cluster's least member is the one whose label is its own index
    itself = jnp.arange(labels.shape[-1]).reshape((1,) * (labels.ndim - 1) + (-1,))
    return jnp.sum(labels == itself, axis=-1)


class LayerRecord(eqx.Module):
    """What ``propagate`` records of a batch at every layer; all arrays share the leading axes (seeds, layers).

    Attributes:
        gram: inner products of the samples.
        singular_values: of the batch itself, not of its Gram matrix, hence at full precision; padded with zeros where
            the width is below n.
        active: entry c counts the neurons that are positive on exactly c of the n samples.
    """

    gram: Float[Array, "*lead n n"]
    singular_values: Float[Array, "*lead n"]
    active: Int[Array, "*lead n+1"]

    @property
    def norms(self) -> Float[Array, "*lead n"]:
        """Lengths of the samples."""
        return norms(self.gram)

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
        """The soft rank |x|_F^2 / |x|_2^2 of the batch."""
        return stable_rank(self.singular_values)

    def rank(self, rtol: float) -> Int[Array, "*lead"]:
        """Count the singular values above ``rtol`` times the largest one."""
        return rank(self.singular_values, rtol)

    def clusters(self, degrees: float) -> Int[Array, "*lead"]:
        """Count the clusters of directions that are linked by angles of at most ``degrees``."""
        return clusters(self.gram, degrees)

    def active_share(self, low: float, high: float) -> Float[Array, "*lead"]:
        """Return the share of the neurons that are positive on a fraction of the batch in (low, high]."""
        n = self.active.shape[-1] - 1
        fraction = jnp.arange(n + 1) / n
        inside = ((fraction > low) & (fraction <= high)).astype(self.gram.dtype)
        return (self.active.astype(self.gram.dtype) @ inside) / jnp.sum(self.active, axis=-1)


def summary(x: Float[ArrayLike, "n d"]) -> LayerRecord:
    """Return the record of one batch. It costs O(n^2 d) and keeps O(n^2) numbers, not the activations.

    >>> record = summary(jnp.array([[1.0, 0.0], [0.0, 2.0]]))
    >>> record.norms.tolist(), record.active.tolist()
    ([1.0, 2.0], [0, 2, 0])
    """
    x = jnp.asarray(x)
    n, width = x.shape
    factor = jnp.linalg.qr(x.T, mode="r") if width > n else x  # same singular values, far smaller
    values = jnp.linalg.svd(factor, compute_uv=False)
    count = jnp.sum(x > 0, axis=0)
    return LayerRecord(
        gram=gram(x),
        singular_values=jnp.pad(values, (0, n - values.shape[0])),
        active=jnp.zeros(n + 1, jnp.int32).at[count].add(1),
    )
