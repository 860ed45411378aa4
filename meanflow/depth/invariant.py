"""The invariant representation of recenter + ReLU: Definition 12 and Theorems 13, 14, corrected.

Definition 12: |x_1| = 1, the others all equal nu, |nu| = 1/(n-1), x_1 . nu = 0. What a Gaussian layer with
width * variance = 2 alpha reproduces is its expected *Gram matrix* (Theorem 13 says the expected batch,
which has parallel columns), and the norms of Theorem 14 are expected *squared* norms.

Theorem 14 as printed is vacuous: Definition 12 forces R^2 = |x_1 - nu|^2 = 1 + 1/(n-1)^2 < (n/(n-1))^2.
Without the invariance hypothesis it holds, for one layer, because R > n/(n-1) makes alpha < 1; afterwards
R' is that of Definition 12. There alpha = n^2/(n^2-2n+2) > 1, and small distances inside the cluster *grow*
by that factor: the representation is invariant but repels.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from meanflow import _checks
from meanflow.depth.expected import recentered, relu_map
from meanflow.depth.observables import gram as gram_of


def invariant_representation(n: int, features: int = 2, dtype: jnp.dtype | None = None) -> jax.Array:
    """The batch (n, features) of Definition 12: sample 0 on the first axis, the others at e_2 / (n-1).

    >>> import meanflow as mf
    >>> mf.depth.invariant_representation(3).tolist()
    [[1.0, 0.0], [0.0, 0.5], [0.0, 0.5]]
    """
    n = _checks.whole("n", n, 3)
    features = _checks.whole("features", features, 2)
    x = jnp.zeros((n, features), dtype or jnp.result_type(float))
    return x.at[0, 0].set(1.0).at[1:, 1].set(1.0 / (n - 1))


def invariance_defect(gram: jax.Array) -> jax.Array:
    """Largest deviation of a Gram matrix (n, n) from the one of Definition 12 with sample 0 odd."""
    n = gram.shape[-1]
    x = invariant_representation(n, dtype=gram.dtype)
    return jnp.max(jnp.abs(gram - gram_of(x)))


def invariant_gain(n: int) -> float:
    """alpha of Theorem 13: n^2 / (n^2 - 2n + 2), above 1 for n > 1."""
    return n**2 / (n**2 - 2 * n + 2)


class OneLayer(NamedTuple):
    """Exact expectations after one layer relu(recenter(x W)), W with variance 2 alpha / width.

    Attributes:
        alpha: the gain used.
        radius: R = |x_1 - nu| before the layer, nu the mean of the other samples.
        odd_square: E |x_1'|^2 = alpha ((n-1)/n)^2 R^2.
        center_square: E |nu^|^2 = alpha R^2 / n^2, nu^ the image of nu (not the mean of the images).
        gram: (n + 1, n + 1) expected Gram matrix of x_1', ..., x_n', nu^.
        distances: (n + 1, n + 1) squared distances before the layer, nu last.
        expected_distances: (n + 1, n + 1) expected squared distances after it.
    """

    alpha: jax.Array
    radius: jax.Array
    odd_square: jax.Array
    center_square: jax.Array
    gram: jax.Array
    distances: jax.Array
    expected_distances: jax.Array


def _distances(gram: jax.Array) -> jax.Array:
    square = jnp.diagonal(gram)
    return square[:, None] + square[None, :] - 2 * gram


def one_layer(x: jax.Array, alpha: float | jax.Array | None = None) -> OneLayer:
    """Theorems 13 and 14 for any batch (n, k) in closed form; sample 0 is the odd one.

    Args:
        x: batch (n, k).
        alpha: gain; by default n^2 / ((n-1)^2 R^2) of Theorem 14, which makes E |x_1'|^2 = 1. At the scale of
            Definition 12 this is the alpha of Theorem 13.

    The distances of pairs obey E |x_i' - x_j'|^2 = alpha (|x_i - x_j|^2 - 2 |y_i| |y_j| g(theta)), with y
    the recentred samples, theta their angle and g = (sin theta - theta cos theta) / pi >= 0
    (``pair_distance``). So a layer certainly contracts only if alpha <= 1, and close pairs grow by alpha.
    """
    n = x.shape[0]
    centre = jnp.mean(x[1:], axis=0, keepdims=True)
    radius = jnp.sqrt(jnp.sum(jnp.square(x[:1] - centre)))
    gain = n**2 / ((n - 1) ** 2 * radius**2) if alpha is None else jnp.asarray(alpha, x.dtype)
    extended = jnp.concatenate([x, centre])
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


def pair_distance(u: jax.Array, v: jax.Array, alpha: float | jax.Array) -> jax.Array:
    """alpha (|u-v|^2 - 2 |u| |v| (sin t - t cos t) / pi), t the angle of the recentred samples u, v (k,)."""
    uu, vv, uv = jnp.sum(u * u), jnp.sum(v * v), jnp.sum(u * v)
    length = jnp.sqrt(uu * vv)
    t = jnp.arctan2(jnp.sqrt(jnp.maximum(uu * vv - uv**2, 0)), uv)
    return alpha * (jnp.sum(jnp.square(u - v)) - 2 * length * (jnp.sin(t) - t * jnp.cos(t)) / jnp.pi)


def two_cluster_gram(n: int, m: int) -> jax.Array:
    """Gram matrix (n, n) of two collapsed orthogonal clusters, m and n-m samples, kept up to scale.

    Recentred, the clusters are opposite with lengths in the ratio (n-m) : m, so ReLU makes them orthogonal
    with the same ratio. Definition 12 is m = 1.
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


def expected_batch_gram(x: jax.Array, alpha: float) -> jax.Array:
    """Gram matrix of the expected batch E[x'], which Theorem 13 as printed calls invariant.

    Each neuron has E relu(w . y) = s |y| / sqrt(2 pi) with variance s^2 = 2 alpha / width, the same for all
    neurons: the expected samples are all parallel, with squared lengths alpha |y|^2 / pi.
    """
    length = jnp.sqrt(jnp.diagonal(recentered(gram_of(x))))
    return alpha / jnp.pi * length[:, None] * length[None, :]
