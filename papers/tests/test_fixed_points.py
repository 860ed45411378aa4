"""Fixed points of infinitely wide layers: published angles, stability, and the limit of infinite batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from meanflow import depth
from meanflow_papers.decomposed.fixed_points import batchnorm_cosine, fixed_point, stability, unit_layer
from meanflow_papers.decomposed.setup import BATCH_NORM, RMS_ONLY


def degrees(cosine):
    return float(np.degrees(np.arccos(cosine)))


def rescaled_cosine_limit(nodes=200, steps=200):
    """The cosine between any two samples at the fixed point of rms rescaling + ReLU, for infinite batches.

    Samples are z_i = sqrt(c) g + sqrt(1-c) e_i with one common normal g, so the root mean square of the batch is
    sqrt(c g^2 + 1 - c). The cosine obeys c = 2 E_g[h(g)^2 / (c g^2 + 1 - c)] with h(g) = E[relu(z_i) | g].
    """
    t, w = np.polynomial.legendre.leggauss(nodes)
    g, law = 10 * t, 10 * w * stats.norm.pdf(10 * t)
    c = 0.5
    for _ in range(steps):
        mean, deviation = np.sqrt(c) * g, np.sqrt(1 - c)
        h = mean * stats.norm.cdf(mean / deviation) + deviation * stats.norm.pdf(mean / deviation)
        c = 2 * np.sum(law * h**2 / (c * g**2 + 1 - c))
    return c


def test_batchnorm_angles():
    table = {5: 78.27, 10: 74.65, 32: 72.40, 64: 71.92, np.inf: 71.44}
    for n, angle in table.items():
        assert abs(degrees(batchnorm_cosine(n)) - angle) < 0.005
    start = jnp.eye(10) + 0.3 * jnp.outer(jnp.arange(10.0), jnp.arange(10.0)) / 45
    found = fixed_point(start, BATCH_NORM)
    np.testing.assert_allclose(depth.Gram(found).pair_angles, degrees(batchnorm_cosine(10)), atol=1e-6)
    assert jnp.max(jnp.abs(unit_layer(found, BATCH_NORM) - found)) < 1e-12


def test_rescaled_angles():
    for n, angle in {5: 60.86, 10: 59.84, 64: 58.93}.items():
        start = 0.5 * jnp.eye(n) + 0.5
        nodes = 100 if n < 64 else 40
        found = fixed_point(start, RMS_ONLY, nodes=nodes, tolerance=1e-6)
        assert abs(float(depth.Gram(found).pair_angles[0]) - angle) < 0.005
    assert abs(degrees(rescaled_cosine_limit()) - 58.75) < 0.005


@pytest.mark.parametrize("n, top", [(3, 0.781), (10, 0.967), (20, 0.985)])
def test_symmetric_state_is_stable(n, top):
    c = batchnorm_cosine(n)
    gram = c + (1 - c) * jnp.eye(n)
    values = stability(gram, depth.Layer())
    assert abs(abs(values[0]) - top) < 5e-4
    if n == 10:
        # the eigenvalue is the rate at which a generic perturbation dies
        noise = 1e-5 * jax.random.normal(jax.random.key(0), (n, n))
        run = depth.expected_gram(gram + noise + noise.T, 300, renormalize=True)
        off = jnp.sqrt(jnp.sum(jnp.square(run - gram[None]), axis=(1, 2)))
        np.testing.assert_allclose(off[250] / off[249], abs(values[0]), rtol=1e-3)


def test_rescaled_state_has_a_fast_and_a_slow_direction():
    # the slope .39 is that of exchangeable perturbations; generic ones decay more slowly
    n = 10
    gram = fixed_point(0.5 * jnp.eye(n) + 0.5, RMS_ONLY)
    values = stability(gram, RMS_ONLY)
    step = lambda c: unit_layer(c + (1 - c) * jnp.eye(n), RMS_ONLY)
    cosine = lambda c: step(c)[0, 1] / step(c)[0, 0]
    slope = jax.jit(jax.grad(cosine))(gram[0, 1])
    assert abs(slope - 0.39) < 0.005
    assert np.min(np.abs(values - slope)) < 1e-8
    np.testing.assert_allclose(np.abs(values[0]), 0.8615, atol=1e-4)


def test_linear_rescaling_contracts_by_n_over_n_plus_2():
    for n in (4, 10):
        values = stability(jnp.eye(n), depth.Layer(False, "rms", "linear"))
        np.testing.assert_allclose(np.abs(values[:-1]), n / (n + 2), atol=1e-10)
        assert abs(values[-1]) < 1e-10  # the scale
