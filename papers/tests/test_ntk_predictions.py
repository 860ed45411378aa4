"""Predictions of paper 000 against networks: spectra from two numbers, batch norm linearized and at infinite width."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meanflow import kernels
from meanflow_papers.ntk.lazy import linearized_batchnorm
from meanflow_papers.ntk.networks import normalize
from meanflow_papers.ntk.predictions import (
    Kappas,
    hidden_batchnorm,
    kappas,
    predict_batchnorm_bulk,
    predict_spectrum,
)

# (activation, sw2, (L-1) kappa_1, (L-1) kappa_2) at L = 3, alpha_0 = 1
KAPPAS = [
    ("relu", 2.0, 3.0, 0.6857),
    ("tanh", 1.5, 1.1725, 0),
    ("erf", 1.5, 1.5947, 0),
    ("sine", 1.5, 1.5543, 0),
    ("linear", 1.0, 3.0, 0),
]


@pytest.mark.parametrize(("name", "sw2", "one", "two"), KAPPAS)
def test_kappas(name, sw2, one, two):
    kappa = kappas(depth=3, alpha_0=1.0, activation=name, weight_variance=sw2)
    np.testing.assert_allclose([2 * kappa.one, 2 * kappa.two], [one, two], atol=6e-5)


def test_coordinates_drop_the_first_layer():
    wide = kappas(depth=4, alpha_0=1.0)
    narrow = kappas(depth=4, alpha_0=0.0)
    np.testing.assert_allclose([wide.one, narrow.one], [4 / 3, 1.0], rtol=1e-12)
    # A.12, A.14 take N_0 = N; a network on the plane has the second value
    width = 1024
    widths = (2, width, width, width, 1)
    draws = zip(jax.random.split(jax.random.key(0), 4), widths[:-1], widths[1:], strict=True)
    weights = [jax.random.normal(k, (n, m)) * np.sqrt(2.0 / m) for k, m, n in draws]
    angle = 2 * np.pi * np.arange(16) / 16
    x = jnp.asarray(np.sqrt(2) * np.stack([np.cos(angle), np.sin(angle)], axis=1))

    def apply(w, x):
        for a in w[:-1]:
            x = jax.nn.relu(x @ a.T)
        return (x @ w[-1].T)[:, 0]

    kernel = kernels.empirical_ntk(apply, weights, x)
    measured = float(jnp.trace(kernel)) / 16 / (3 * width)
    assert abs(measured - 1.0) < 0.1


def test_predicted_spectrum_is_exact():
    kappa = Kappas(jnp.asarray(1.5), jnp.asarray(0.3))
    out = predict_spectrum(kappa, depth=3, width=10, samples=12)
    matrix = 20 * ((1.5 - 0.3) * np.eye(12) + 0.3)
    values = np.linalg.eigvalsh(matrix)
    np.testing.assert_allclose(
        [out.mean, out.variance, out.top, out.bulk], [values.mean(), values.var(), values[-1], values[0]]
    )
    # A.24 prints (T - 2)(N k2 + ...) without the square
    assert abs(float(out.variance) - 11 * (20 * 0.3)) > 1.0


def normed(p, x):
    for w in p[:-1]:
        x = jax.nn.relu(normalize(x @ w))
    return (x @ p[-1])[:, 0]


def test_batch_norm_before_every_activation():
    """ReLU, L = 3: K_tt/N = 1.7334 and K_st/N = 0.1592 whatever sw2 is, so A = 1.5743 in K ~ N (A I + 11'/2pi).

    1.7334, and 2.809 at L = 4, are the diagonal A + (E phi)^2, not A itself.
    """
    ours = hidden_batchnorm(depth=3)
    np.testing.assert_allclose(
        [sum(ours), *ours], [1.7334, 1.7334 - 1 / (2 * np.pi), 1 / (2 * np.pi)], atol=1e-4
    )
    deeper = hidden_batchnorm(depth=4)
    np.testing.assert_allclose([sum(deeper), deeper.diagonal], [2.809, 2.809 - 0.1592], atol=6e-4)
    width, samples = 192, 48
    x = np.sqrt(width) * jnp.eye(width)[:samples]
    sizes = [(width, width), (width, width), (width, 1)]
    measured = []
    for sw2 in (1.0, 2.0):
        for seed in range(2):
            k = jax.random.split(jax.random.key(seed), 3)
            params = [jax.random.normal(a, s) * np.sqrt(sw2 / width) for a, s in zip(k, sizes, strict=True)]
            kernel = np.asarray(kernels.empirical_ntk(normed, params, x, stats="batch")) / width
            off = (kernel.sum() - np.trace(kernel)) / samples / (samples - 1)
            measured.append((np.trace(kernel) / samples, off))
    np.testing.assert_allclose(measured[:2], measured[2:], rtol=1e-10)  # the same draws at both sw2
    diagonal, off = np.mean(measured, axis=0)
    # corrections of order 1/T, and fluctuations of order 1/sqrt(N)
    assert abs(diagonal - 1.7334) < 0.15 * 1.7334 and abs(off - 0.1592) < 0.06
    assert abs(diagonal - 1.7334) < abs(diagonal - 1.5743)
    assert abs(diagonal - off - 1.5743) < abs(diagonal - off - 1.7334)


def test_centred_mean_field_matrix_is_a_projector(key):
    """A.19-A.20: every off-diagonal of G M is (k2 - k1)/T, and B M B a scaled projector, not the identity."""
    size, one, two = 10, 1.7, 0.4
    matrix = (one - two) * jnp.eye(size) + two * jnp.ones((size, size))
    centre = jnp.eye(size) - 1.0 / size
    np.testing.assert_allclose(centre @ matrix @ centre, (one - two) * centre, atol=1e-14)
    off = np.asarray(centre @ matrix)[~np.eye(size, dtype=bool)]
    np.testing.assert_allclose(off, (two - one) / size, rtol=1e-13)  # A.19 prints some with the other sign
    f = jax.random.normal(key, (size,))
    h, variance = f - jnp.mean(f), jnp.var(f)
    projector = centre - h[:, None] * h[None, :] / (size * variance)
    ours = kernels.batchnorm_ntk(matrix, f)
    np.testing.assert_allclose(ours, (one - two) / variance * projector, atol=1e-13)
    kappa = Kappas(jnp.asarray(one), jnp.asarray(two))
    bulk = predict_batchnorm_bulk(kappa, depth=2, width=1, variance=variance)
    np.testing.assert_allclose(np.linalg.eigvalsh(ours)[2:], float(bulk), rtol=1e-12)
    # the cost of calling it the identity: sqrt(2/T) in Frobenius norm, everything in operator norm
    scaled = ours / bulk
    frobenius = jnp.linalg.norm(scaled - jnp.eye(size)) / jnp.linalg.norm(jnp.eye(size))
    np.testing.assert_allclose(frobenius, np.sqrt(2 / size), rtol=1e-12)
    np.testing.assert_allclose(jnp.linalg.norm(scaled - jnp.eye(size), 2), 1.0, rtol=1e-12)
    # the printed factor (1 - 1/T) on h h' is excluded
    printed = centre - (1 - 1 / size) * h[:, None] * h[None, :] / (size * variance)
    assert float(jnp.linalg.norm(printed @ h)) > 0.05 * float(jnp.linalg.norm(h))


def test_batch_norm_of_orthogonal_inputs_is_the_known_one():
    """For many orthogonal inputs the kernel is N (diagonal I + common 11') per unit of width ("BN NTK")."""
    size = 400
    shapes = [jnp.ones((size, 8)), jnp.ones((8, 8)), jnp.ones((8, 1))]

    def network(p, x):
        h = x @ p[0]
        for w in p[1:]:
            centered = h - jnp.mean(h, 0, keepdims=True)
            h = jax.nn.relu(centered / jnp.sqrt(jnp.mean(centered**2, 0, keepdims=True))) @ w
        return h

    h = kernels.infinite_width(network, shapes, jnp.sqrt(size) * jnp.eye(size), variances=[1.0] * 3)
    known = hidden_batchnorm(depth=3)
    np.testing.assert_allclose(h.ntk[0, 1], known.common, rtol=0.02)
    np.testing.assert_allclose(h.ntk[0, 0], known.diagonal + known.common, rtol=0.02)


def test_batch_norm_descent_is_exact_for_a_linear_network(key):
    """f = X w has a constant kernel X X' before batch norm, so the BN form must be exact gradient descent."""
    k = jax.random.split(key, 4)
    x, z = jax.random.normal(k[0], (10, 4)), jax.random.normal(k[1], (3, 4))
    y, w0 = jax.random.normal(k[2], (10,)), jax.random.normal(k[3], (4,))
    loss = lambda w: 0.5 * jnp.mean((normalize(x @ w, 0.01) - y) ** 2)
    w, gradient = w0, jax.jit(jax.grad(loss))
    for _ in range(30):
        w = w - 0.2 * gradient(w)
    train, test = linearized_batchnorm(
        x @ x.T, x @ w0, y, learning_rate=0.2 / 10, steps=30, epsilon=0.01, cross=z @ x.T, at=z @ w0
    )
    np.testing.assert_allclose(train, normalize(x @ w, 0.01), rtol=1e-9)
    np.testing.assert_allclose(test, normalize(z @ w, 0.01, x @ w), rtol=1e-9)
    # the frozen kernel after batch norm is not: B moves with the outputs
    after, start = kernels.batchnorm_ntk(x @ x.T, x @ w0, epsilon=0.01), normalize(x @ w0, 0.01)
    frozen = kernels.kernel_flow(after, start, y, learning_rate=0.2)
    assert float(jnp.linalg.norm(frozen(30) - train)) > 0.03
