"""Theorems 13 and 14: what holds, in closed form and by Monte Carlo, and what does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meanflow import depth
from meanflow_papers.decomposed.theorems_13_14 import invariant_representation, one_layer

ROWS = 100_000


def invariant_gain(n):
    """The alpha of Theorem 13, which is above 1 for n > 1."""
    return n**2 / (n**2 - 2 * n + 2)


def invariance_defect(gram):
    """The largest deviation of a Gram matrix from the one of Definition 12 whose odd sample is sample 0."""
    x = invariant_representation(gram.shape[0])
    return jnp.max(jnp.abs(gram - x @ x.T))


@pytest.mark.parametrize("n", [3, 10, 50])
def test_definition_12(n):
    x = invariant_representation(n, 5)
    centre = x[1:].mean(0)
    np.testing.assert_allclose(x[0] @ x[0], 1.0, rtol=1e-15)
    np.testing.assert_allclose(centre @ centre, 1 / (n - 1) ** 2, rtol=1e-14)
    assert x[0] @ centre == 0 and bool(jnp.all(x[1:] == x[1:2]))


def pair_distance(u, v, alpha):
    """Expected squared distance of two recentered samples after one layer of gain alpha.

    It is alpha (|u-v|^2 - 2 |u| |v| (sin t - t cos t) / pi), with t the angle between u and v.
    """
    uu, vv, uv = jnp.sum(u * u), jnp.sum(v * v), jnp.sum(u * v)
    t = jnp.arctan2(jnp.sqrt(jnp.maximum(uu * vv - uv**2, 0)), uv)
    shrinkage = 2 * jnp.sqrt(uu * vv) * (jnp.sin(t) - t * jnp.cos(t)) / jnp.pi
    return (jnp.sum(jnp.square(u - v)) - shrinkage) * alpha


def two_cluster_gram(n, m):
    """Gram matrix of two collapsed orthogonal clusters of m and n - m samples; Definition 12 is m = 1, up to scale.

    Once recentered, the clusters are opposite with lengths in the ratio (n-m) : m, so ReLU makes them orthogonal with
    the same ratio.
    """
    first = jnp.arange(n) < m
    length = jnp.where(first, n - m, m) / min(m, n - m)
    return jnp.where(first[:, None] == first[None, :], length[:, None] * length[None, :], 0.0)


def expected_batch_gram(x, alpha):
    """Gram matrix of the expected batch E[x'] after one layer, which Theorem 13 as printed calls invariant.

    Each neuron has E relu(w . y) = s |y| / sqrt(2 pi) with s^2 = 2 alpha / width, the same for all neurons: the
    expected samples are all parallel, with squared lengths alpha |y|^2 / pi.
    """
    length = jnp.linalg.norm(x - x.mean(0, keepdims=True), axis=1)
    return alpha / jnp.pi * length[:, None] * length[None, :]


def images(key, x, alpha, width=ROWS):
    """One Gaussian layer of recenter + ReLU applied to x and, with the same mean, to the cluster centre."""
    w = jax.random.normal(key, (x.shape[1], width)) * jnp.sqrt(2 * alpha / width)
    mean = x.mean(0, keepdims=True)
    centre = x[1:].mean(0, keepdims=True)
    return jax.nn.relu((jnp.concatenate([x, centre]) - mean) @ w)


@pytest.mark.parametrize("n", [3, 10, 50])
def test_theorem_13_holds_for_the_expected_gram_matrix(n):
    x = invariant_representation(n)
    layer = one_layer(x)
    np.testing.assert_allclose(layer.alpha, invariant_gain(n), rtol=1e-13)
    assert invariance_defect(layer.gram[:n, :n]) < 1e-12
    np.testing.assert_allclose(layer.gram[-1, -1], 1 / (n - 1) ** 2, rtol=1e-12)


def test_theorem_13_fails_for_the_expected_batch(key):
    n = 10
    x = invariant_representation(n)
    alpha = invariant_gain(n)
    literal = expected_batch_gram(x, alpha)
    np.testing.assert_allclose(literal[0, 0], 1 / np.pi, rtol=1e-12)
    np.testing.assert_allclose(literal[0, 1], np.sqrt(literal[0, 0] * literal[1, 1]), rtol=1e-12)  # parallel
    assert invariance_defect(literal) > 0.5
    # the mean over many small layers is that batch
    small = jax.vmap(lambda k: images(k, x, alpha, 4))(jax.random.split(key, 20_000)).mean(0)[:n]
    np.testing.assert_allclose(small @ small.T, literal, atol=0.02)


def test_theorem_13_to_monte_carlo_error(key):
    n = 10
    x = invariant_representation(n, 6)
    y = images(key, x, invariant_gain(n))
    gram = y @ y.T
    # one product has mean m / ROWS and standard deviation at most sqrt(5) m / ROWS
    error = np.sqrt(5 / ROWS)
    assert abs(gram[0, 0] - 1) < 5 * error
    assert abs(gram[-1, -1] * (n - 1) ** 2 - 1) < 5 * error
    assert bool(jnp.all(y[0] * y[-1] == 0))  # x_1 . nu = 0 for any weights


def test_theorem_14_norms_are_expected_squares(key):
    n = 10
    x = invariant_representation(n, 4)
    alpha = invariant_gain(n)
    for width, mean_norm in {4: 0.835, 32: 0.980}.items():
        y = jax.vmap(lambda k, width=width: images(k, x, alpha, width)[0])(jax.random.split(key, 20_000))
        square = jnp.sum(y**2, axis=1)
        assert abs(square.mean() - 1) < 5 * float(square.std()) / np.sqrt(20_000)
        assert abs(jnp.sqrt(square).mean() - mean_norm) < 0.01  # Jensen: not 1, as printed


def perturbed(key, n, size, scale=1.0):
    x = invariant_representation(n, 6)
    noise = jax.random.normal(key, (n - 1, 6))
    noise = size * noise / jnp.linalg.norm(noise, axis=1, keepdims=True)
    return x.at[0].multiply(scale).at[1:].add(noise)


def test_closed_forms_for_any_batch(key):
    x = jax.random.normal(key, (7, 5))
    layer = one_layer(x, alpha=1.3)
    np.testing.assert_allclose(layer.gram[0, 0], layer.odd_square, rtol=1e-12)
    np.testing.assert_allclose(layer.gram[-1, -1], layer.center_square, rtol=1e-12)
    np.testing.assert_allclose(layer.gram[0, -1], 0.0, atol=1e-12)
    mean = x.mean(0)
    for i, j in [(1, 2), (3, 6), (0, 4)]:
        pair = pair_distance(x[i] - mean, x[j] - mean, 1.3)
        np.testing.assert_allclose(layer.expected_distances[i, j], pair, rtol=1e-11)
    y = images(key, x, 1.3)
    measured = jnp.sum(jnp.square(y[:, None, :] - y[None, :, :]), axis=2)
    np.testing.assert_allclose(measured, layer.expected_distances, atol=0.1, rtol=0.05)


def test_hypotheses_of_theorem_14_are_incompatible():
    for n in (3, 10, 100):
        radius = one_layer(invariant_representation(n)).radius
        np.testing.assert_allclose(radius**2, 1 + 1 / (n - 1) ** 2, rtol=1e-12)
        assert radius < n / (n - 1)


def test_without_invariance_one_layer_contracts(key):
    n = 10
    x = perturbed(key, n, 0.5 / n**2, scale=1.5)
    layer = one_layer(x)
    assert abs(layer.radius - 1.504) < 0.01 and layer.radius > n / (n - 1)
    np.testing.assert_allclose(layer.odd_square, 1.0, rtol=1e-12)
    i, j = np.triu_indices(n - 1, 1)
    factor = (layer.expected_distances / layer.distances)[1:n, 1:n][i, j]
    assert jnp.max(factor) < 1 and abs(float(factor.mean()) - 0.54) < 0.02
    measured = images(jax.random.fold_in(key, 1), x, layer.alpha)
    assert abs(jnp.sum(measured[0] ** 2) - 1) < 5 * np.sqrt(5 / ROWS)
    close = jnp.sum(jnp.square(measured[1] - measured[2]))
    np.testing.assert_allclose(close, layer.expected_distances[1, 2], rtol=0.05)
    # it cannot happen again: the next radius is the invariant one
    nxt = layer.gram[0, 0] + layer.gram[-1, -1] - 2 * layer.gram[0, -1]
    np.testing.assert_allclose(nxt, (n**2 - 2 * n + 2) / (n - 1) ** 2, rtol=1e-12)


@pytest.mark.parametrize("size, factor", [(1e-6, 1.2195), (0.005, 1.200)])
def test_at_the_invariant_scale_small_distances_grow(key, size, factor):
    n = 10
    x = perturbed(key, n, size)
    alpha = invariant_gain(n)
    np.testing.assert_allclose(alpha, 100 / 82, rtol=1e-14)
    mean = x.mean(0)
    pairs = [(i, j) for i in range(1, n) for j in range(i + 1, n)]
    growth = [
        float(pair_distance(x[i] - mean, x[j] - mean, alpha) / jnp.sum(jnp.square(x[i] - x[j])))
        for i, j in pairs[:12]
    ]
    assert min(growth) > 1  # item 4 of Theorem 14 is false here
    assert abs(np.mean(growth) - factor) < 0.005
    y = images(jax.random.fold_in(key, 2), x, alpha)
    measured = jnp.sum(jnp.square(y[1] - y[2])) / jnp.sum(jnp.square(x[1] - x[2]))
    assert abs(measured - growth[0]) < 0.05


@pytest.mark.parametrize("n, m", [(7, 1), (8, 3), (9, 6)])
def test_every_two_cluster_geometry_is_invariant_and_repels(n, m):
    gram = two_cluster_gram(n, m)
    image = depth.expected_gram(gram, 1)[1]
    np.testing.assert_allclose(image / jnp.trace(image), gram / jnp.trace(gram), atol=1e-14)
    if m == 1:
        definition = invariant_representation(n)
        np.testing.assert_allclose(gram / gram[0, 0], definition @ definition.T, atol=1e-14)
    spread = lambda g: 1 - g[-1, -2] / jnp.sqrt(g[-1, -1] * g[-2, -2])
    opened = gram + 1e-8 * jnp.eye(n)  # every sample moves 1e-4 in a direction of its own
    run = depth.expected_gram(opened, 3)
    assert spread(run[2]) > spread(run[1])  # a slightly opened cluster opens further
