"""The matrix-free path against dense linear algebra on the same kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meanflow import kernels
from meanflow.kernels.operator import lanczos


def network(key, samples=30):
    k = jax.random.split(key, 3)
    params = (jax.random.normal(k[0], (3, 40)), jax.random.normal(k[1], (40, 2)) / 6)
    x = jax.random.normal(k[2], (samples, 3))

    def apply(p, x):
        y = kernels.normalise(jax.nn.relu(x @ p[0]), 1e-3)
        return y @ p[1]

    return apply, params, x


def test_operator_is_the_kernel(key):
    apply, params, x = network(key)
    operator = kernels.ntk_operator(apply, params, x, stats="batch")
    full = kernels.empirical_ntk(apply, params, x, stats="batch")
    matrix = np.transpose(np.asarray(full), (0, 2, 1, 3)).reshape(60, 60)
    assert operator.shape == (60, 60)
    v = jax.random.normal(key, (60, 2))
    np.testing.assert_allclose(operator @ v, matrix @ v, rtol=1e-11, atol=1e-10)
    np.testing.assert_allclose(operator @ v[:, 0], matrix @ v[:, 0], rtol=1e-11, atol=1e-10)
    with pytest.raises(ValueError, match="couples"):
        kernels.ntk_operator(apply, params, x)
    # conjugate gradient through the same product
    shift = 10.0
    product = operator.matvec()
    solution, _ = jax.scipy.sparse.linalg.cg(lambda u: product(u) + shift * u, v[:, 0], tol=1e-12)
    np.testing.assert_allclose(solution, np.linalg.solve(matrix + shift * np.eye(60), v[:, 0]), atol=1e-9)


def spectrum_case(key, size=40):
    basis = jnp.linalg.qr(jax.random.normal(key, (size, size)))[0]
    values = jnp.concatenate([jnp.array([50.0, 20.0, 20.0]), jnp.linspace(5.0, 0.5, size - 3)])
    return (basis * values[None]) @ basis.T, values


def test_lanczos_finds_everything(key):
    matrix, values = spectrum_case(key)
    pairs = kernels.top_eigenpairs(matrix, 40, key=key, steps=40)
    np.testing.assert_allclose(pairs.values, values, rtol=1e-10)  # the double 20 included
    np.testing.assert_allclose(kernels.condition_number(matrix, key=key), 100.0, rtol=1e-9)
    few = kernels.top_eigenpairs(matrix, 2, key=key, steps=30)
    error = jnp.linalg.norm(matrix @ few.vectors - few.vectors * few.values[None], axis=0)
    np.testing.assert_allclose(few.values, values[:2], rtol=1e-8)
    assert np.all(np.asarray(error) <= np.asarray(few.residuals) + 1e-8)
    run = lanczos(lambda v: matrix @ v, jnp.ones(40), 40, key)
    np.testing.assert_allclose(run.basis @ run.basis.T, np.eye(40), atol=1e-12)


def test_lanczos_survives_exhaustion(key):
    # rank one plus identity: the Krylov space has dimension two
    matrix = jnp.eye(12) + 5.0 * jnp.ones((12, 12)) / 12
    pairs = kernels.top_eigenpairs(matrix, 12, key=key, steps=12)
    np.testing.assert_allclose(pairs.values, [6.0] + [1.0] * 11, rtol=1e-12)


def test_moments_and_density(key):
    matrix, values = spectrum_case(key, 200)
    estimate = kernels.moments(matrix, key=key, probes=40, deflate=4)
    m, s = float(jnp.mean(values)), float(jnp.mean(values**2))
    assert abs(float(estimate.m) - m) < 4 * float(estimate.m_error) + 1e-12
    assert abs(float(estimate.s) - s) < 4 * float(estimate.s_error) + 1e-12
    plain = kernels.moments(matrix, key=key, probes=40, deflate=0)
    assert float(estimate.s_error) < 0.5 * float(plain.s_error)  # what deflation is for
    # the variance from the same directions, with its own error: below those of m and s, and honest
    assert abs(float(estimate.v) - (s - m**2)) < 4 * float(estimate.v_error)
    assert float(estimate.v_error) < float(estimate.s_error)
    pairs = kernels.top_eigenpairs(matrix, 4, key=key, steps=30)
    known = kernels.moments(matrix, key=key, probes=40, deflate=pairs.vectors)
    assert abs(float(known.v) - (s - m**2)) < 4 * float(known.v_error)
    density = kernels.spectral_density(matrix, key=key, probes=20, steps=30)
    np.testing.assert_allclose(jnp.sum(density.weights), 1.0, rtol=1e-10)
    for cut in (1.5, 3.0, 10.0):
        exact = float(jnp.mean(values <= cut))
        assert abs(float(density.cumulative(jnp.array(cut))[0]) - exact) < 0.06
    grid = jnp.linspace(-5.0, 60.0, 3000)
    mass = jnp.sum(density.smooth(grid, 0.5)) * (grid[1] - grid[0])
    np.testing.assert_allclose(mass, 1.0, rtol=1e-3)


def test_spectrum_sandwich(key):
    apply, params, x = network(key)
    full = kernels.empirical_ntk(apply, params, x, stats="batch", outputs="trace")
    exact = kernels.spectrum(full)
    values = np.linalg.eigvalsh(full)
    np.testing.assert_allclose(exact.values, values[::-1], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose([exact.m, exact.v], [values.mean(), values.var()], rtol=1e-10)
    assert float(exact.lower) <= float(exact.values[0]) <= float(exact.upper)
    operator = kernels.ntk_operator(lambda p, x: apply(p, x)[:, 0], params, x, stats="batch")
    single = kernels.empirical_ntk(apply, params, x, stats="batch")[:, :, 0, 0]
    ours = kernels.spectrum(operator, key=key, top=2)
    np.testing.assert_allclose(ours.values, np.linalg.eigvalsh(single)[::-1][:2], rtol=1e-8)
    np.testing.assert_allclose(
        ours.values[0], np.linalg.eigvalsh(single)[-1], atol=float(ours.residuals[0]) + 1e-9
    )
    exact = kernels.spectrum(single, key=key, top=2)  # Lanczos on the matrix, moments exact
    np.testing.assert_allclose(exact.values, ours.values, rtol=1e-8)
    assert abs(float(ours.m - exact.m)) < 4 * float(ours.m_error) and float(exact.m_error) == 0.0
    assert abs(float(ours.v - exact.v)) < 4 * float(ours.v_error)
    assert float(exact.lower) <= float(ours.values[0]) <= float(exact.upper)
    with pytest.raises(ValueError, match="key must be given"):
        kernels.spectrum(operator)
    with pytest.raises(ValueError, match="square"):
        kernels.spectrum(jnp.ones((2, 3)))
