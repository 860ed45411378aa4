"""The invariant representation of recenter + ReLU: Definition 12 and Theorems 13 and 14 of "BN decomposed", corrected.

In Definition 12, |x_1| = 1, all other samples equal nu, |nu| = 1/(n-1) and x_1 . nu = 0. A Gaussian layer with width
times variance = 2 alpha reproduces the expected *Gram matrix* of this batch. (Theorem 13 says the expected batch, but
that one has parallel columns; and the norms of Theorem 14 are expected *squared* norms.)

Theorem 14 as printed is vacuous: Definition 12 forces R^2 = |x_1 - nu|^2 = 1 + 1/(n-1)^2 < (n/(n-1))^2. Without the
hypothesis of invariance it holds for one layer, because R > n/(n-1) makes alpha < 1; after that layer, R is the one of
Definition 12. There alpha = n^2/(n^2-2n+2) > 1, and small distances inside the cluster *grow* by that factor: the
representation is invariant but repels.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float

from meanflow import _checks
from meanflow._checks import count, optional, precision
from meanflow.depth._expected import recentered, relu_map
from meanflow.depth._observables import gram as gram_of


@_checks.arguments(n=count(3), features=count(2), dtype=optional(precision))
def invariant_representation(
    n: int, features: int = 2, dtype: DTypeLike | None = None
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


def invariance_defect(gram: Float[ArrayLike, "n n"]) -> Float[Array, ""]:
    """Return the largest deviation of a Gram matrix from the one of Definition 12 whose odd sample is sample 0."""
    gram = jnp.asarray(gram)
    n = gram.shape[-1]
    x = invariant_representation(n, dtype=gram.dtype)
    return jnp.max(jnp.abs(gram - gram_of(x)))


def invariant_gain(n: int) -> float:
    """Return the alpha of Theorem 13, n^2 / (n^2 - 2n + 2), which is above 1 for n > 1."""
    return n**2 / (n**2 - 2 * n + 2)


class OneLayer(NamedTuple):
    """Exact expectations after one layer relu(recenter(x W)), where W has variance 2 alpha / width.

    Below, nu is the mean of all samples but the first, and nu^ is the image of nu under the layer (not the mean of the
    images). Matrices list the n samples and then nu.

    Attributes:
        alpha: the gain that was used.
        radius: R = |x_1 - nu| before the layer.
        odd_square: E |x_1'|^2 = alpha ((n-1)/n)^2 R^2.
        center_square: E |nu^|^2 = alpha R^2 / n^2.
        gram: expected Gram matrix after the layer.
        distances: squared distances before the layer.
        expected_distances: expected squared distances after the layer.
    """

    alpha: Float[Array, ""]
    radius: Float[Array, ""]
    odd_square: Float[Array, ""]
    center_square: Float[Array, ""]
    gram: Float[Array, "n+1 n+1"]
    distances: Float[Array, "n+1 n+1"]
    expected_distances: Float[Array, "n+1 n+1"]


def _distances(gram: jax.Array) -> jax.Array:
    """Return the squared distances between samples, from their Gram matrix."""
    square = jnp.diagonal(gram)
    return square[:, None] + square[None, :] - 2 * gram


def one_layer(x: Float[ArrayLike, "n k"], alpha: Float[ArrayLike, ""] | None = None) -> OneLayer:
    """Return what one layer of recenter + ReLU does to a batch on average, in closed form (Theorems 13 and 14).

    The distances of pairs obey E |x_i' - x_j'|^2 = alpha (|x_i - x_j|^2 - 2 |y_i| |y_j| g(theta)), where y are the
    recentered samples, theta is their angle and g = (sin theta - theta cos theta) / pi >= 0 (``pair_distance``). So a
    layer certainly contracts only if alpha <= 1, and the distances of close pairs grow by alpha.

    Args:
        x: batch; sample 0 is the odd one.
        alpha: gain. The default is n^2 / ((n-1)^2 R^2) of Theorem 14, which makes E |x_1'|^2 = 1. At the scale of
            Definition 12 it is the alpha of Theorem 13.

    >>> image = one_layer(invariant_representation(10))
    >>> round(float(image.odd_square), 6), round(float(image.center_square) ** 0.5 * 9, 6)
    (1.0, 1.0)
    """
    x = jnp.asarray(x)
    n = x.shape[0]
    center = jnp.mean(x[1:], axis=0, keepdims=True)
    radius = jnp.sqrt(jnp.sum(jnp.square(x[:1] - center)))
    gain = n**2 / ((n - 1) ** 2 * radius**2) if alpha is None else jnp.asarray(alpha, x.dtype)
    extended = jnp.concatenate([x, center])
    shifted = extended - jnp.mean(x, axis=0, keepdims=True)
    gram = gain * relu_map(gram_of(shifted))
    return OneLayer(
        alpha=gain,
        radius=radius,
        odd_square=gain * ((n - 1) / n) ** 2 * radius**2,
        center_square=gain * radius**2 / n**2,
        gram=gram,
        distances=_distances(gram_of(extended)),
        expected_distances=_distances(gram),
    )


def pair_distance(
    u: Float[ArrayLike, "k"], v: Float[ArrayLike, "k"], alpha: Float[ArrayLike, ""]
) -> Float[Array, ""]:
    """Return the expected squared distance of two recentered samples u, v after one layer of gain alpha.

    It is alpha (|u-v|^2 - 2 |u| |v| (sin t - t cos t) / pi), with t the angle between u and v.
    """
    u, v = jnp.asarray(u), jnp.asarray(v)
    uu, vv, uv = jnp.sum(u * u), jnp.sum(v * v), jnp.sum(u * v)
    length = jnp.sqrt(uu * vv)
    t = jnp.arctan2(jnp.sqrt(jnp.maximum(uu * vv - uv**2, 0)), uv)
    shrinkage = 2 * length * (jnp.sin(t) - t * jnp.cos(t)) / jnp.pi
    return (jnp.sum(jnp.square(u - v)) - shrinkage) * alpha


def two_cluster_gram(n: int, m: int) -> Float[Array, "{n} {n}"]:
    """Return the Gram matrix of two collapsed orthogonal clusters, which recenter + ReLU keeps up to scale.

    Once recentered, the clusters are opposite with lengths in the ratio (n-m) : m, so ReLU makes them orthogonal with
    the same ratio. Definition 12 is m = 1.

    Args:
        n: number of samples.
        m: number of samples in the first cluster, below n.
    """
    n = _checks.whole("n", n, 2)
    m = _checks.whole("m", m, 1)
    if m >= n:
        raise ValueError(f"m must be below n = {n}, got {m}")
    first = jnp.arange(n) < m
    same = first[:, None] == first[None, :]
    square = (
        jnp.where(first, ((n - m) / m) ** 2, 1.0) if m <= n - m else jnp.where(first, 1.0, (m / (n - m)) ** 2)
    )
    return jnp.where(same, square[:, None] * jnp.ones((1, n)), 0.0)


def expected_batch_gram(x: Float[ArrayLike, "n k"], alpha: float) -> Float[Array, "n n"]:
    """Return the Gram matrix of the expected batch E[x'] after one layer, which Theorem 13 as printed calls invariant.

    Each neuron has E relu(w . y) = s |y| / sqrt(2 pi) with s^2 = 2 alpha / width, the same for all neurons: the
    expected samples are all parallel, with squared lengths alpha |y|^2 / pi.
    """
    length = jnp.sqrt(jnp.diagonal(recentered(gram_of(x))))
    return alpha / jnp.pi * length[:, None] * length[None, :]
