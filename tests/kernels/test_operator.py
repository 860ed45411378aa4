"""The matrix-free path against dense linear algebra on the same kernel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meanflow import kernels
from meanflow.kernels._batchnorm import normalize
from meanflow.kernels._empirical.spectra import spectral_moments, top_eigenpairs


def apply(p, x):
    y = normalize(jax.nn.relu(x @ p[0]), 1e-3)
    return y @ p[1]


@functools.cache
def network(samples=30):
    """(params, x, matrix): two outputs, and the whole kernel with the outputs of a sample side by side."""
    draw = np.random.default_rng(0).normal
    params = (jnp.asarray(draw(size=(3, 40))), jnp.asarray(draw(size=(40, 2)) / 6))
    x = jnp.asarray(draw(size=(samples, 3)))
    full = np.asarray(kernels.empirical_ntk(apply, params, x, stats="batch"))
    return params, x, np.transpose(full, (0, 2, 1, 3)).reshape(2 * samples, 2 * samples)


def test_operator_is_the_kernel(key):
    params, x, matrix = network()
    operator = kernels.ntk_operator(apply, params, x, stats="batch")
    assert operator.shape == (60, 60)
    v = jax.random.normal(key, (60, 2))
    np.testing.assert_allclose(operator @ v, matrix @ v, rtol=1e-11, atol=1e-10)
    with pytest.raises(ValueError, match="couples"):
        kernels.ntk_operator(apply, params, x)
    # conjugate gradient through the same product
    shift = 10.0
    product = operator.matvec()
    solution, _ = jax.scipy.sparse.linalg.cg(lambda u: product(u) + shift * u, v[:, 0], tol=1e-12)
    np.testing.assert_allclose(solution, np.linalg.solve(matrix + shift * np.eye(60), v[:, 0]), atol=1e-9)


def with_spectrum(values):
    size = len(values)
    basis = np.linalg.qr(np.random.default_rng(1).normal(size=(size, size)))[0]
    return jnp.asarray((basis * values) @ basis.T)


def test_lanczos_finds_everything(key):
    values = np.concatenate([[50.0, 20.0, 20.0], np.linspace(5.0, 0.5, 37)])
    matrix = with_spectrum(values)
    pairs = top_eigenpairs(matrix, 40, key=key, steps=40)
    np.testing.assert_allclose(pairs.values, values, rtol=1e-10)  # the double 20 included
    np.testing.assert_allclose(pairs.vectors.T @ pairs.vectors, np.eye(40), atol=1e-12)
    few = top_eigenpairs(matrix, 2, key=key, steps=30)
    error = np.linalg.norm(matrix @ few.vectors - few.vectors * few.values[None], axis=0)
    np.testing.assert_allclose(few.values, values[:2], rtol=1e-8)
    assert np.all(error <= np.asarray(few.residuals) + 1e-8)
    # rank one plus identity: the Krylov space is exhausted after two steps
    pairs = top_eigenpairs(jnp.asarray(np.eye(40) + 5.0 / 40), 40, key=key, steps=40)
    np.testing.assert_allclose(pairs.values, [6.0] + [1.0] * 39, rtol=1e-12)


def test_moments(key):
    values = np.concatenate([[50.0, 20.0, 20.0], np.linspace(5.0, 0.5, 197)])
    matrix, m, s, v = with_spectrum(values), np.mean(values), np.mean(values**2), np.var(values)
    leading = top_eigenpairs(matrix, 4, key=key, steps=30).vectors
    estimate = spectral_moments(matrix, key=key, probes=40, deflate=leading)
    assert abs(float(estimate.mean) - m) < 4 * float(estimate.mean_error)
    assert abs(float(estimate.mean_square) - s) < 4 * float(estimate.mean_square_error)
    # the variance comes from the same directions, so that part of the errors cancels
    assert abs(float(estimate.variance) - v) < 4 * float(estimate.variance_error)
    plain = spectral_moments(matrix, key=key, probes=40)
    assert abs(float(plain.variance) - v) < 4 * float(plain.variance_error)
    assert float(estimate.mean_square_error) < 0.5 * float(plain.mean_square_error)  # what deflation is for


def test_spectrum_sandwich(key):
    params, x, matrix = network()
    exact = kernels.spectrum(jnp.asarray(matrix))
    values = np.linalg.eigvalsh(matrix)
    np.testing.assert_allclose(exact.values, values[::-1], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose([exact.mean, exact.variance], [values.mean(), values.var()], rtol=1e-10)
    assert float(exact.lower) <= float(exact.values[0]) <= float(exact.upper)
    operator = kernels.ntk_operator(apply, params, x, stats="batch")
    ours = kernels.spectrum(operator, key=key, top=2)
    np.testing.assert_allclose(ours.values, values[::-1][:2], rtol=1e-8)
    assert abs(float(ours.values[0]) - values[-1]) <= float(ours.residuals[0]) + 1e-9
    assert abs(float(ours.mean - exact.mean)) < 4 * float(ours.mean_error)
    assert abs(float(ours.variance - exact.variance)) < 4 * float(ours.variance_error)
    mixed = kernels.spectrum(jnp.asarray(matrix), key=key, top=2)  # Lanczos, with exact moments
    np.testing.assert_allclose(mixed.values, ours.values, rtol=1e-8)
    assert float(mixed.mean) == float(exact.mean) and float(mixed.mean_error) == 0.0
    with pytest.raises(ValueError, match="key must be given"):
        kernels.spectrum(operator)
    with pytest.raises(ValueError, match="square"):
        kernels.spectrum(jnp.ones((2, 3)))


@pytest.mark.parametrize("columns", [(), (2,)])
@pytest.mark.parametrize("top", [None, 5])
def test_regression_by_conjugate_gradients_is_that_by_the_matrix(columns, top):
    params, x, matrix = network()
    y = np.random.default_rng(3).normal(size=(len(matrix), *columns))
    ridge = 1e-3 * np.trace(matrix) / len(matrix)
    operator = kernels.ntk_operator(apply, params, x, stats="batch")
    key = None if top is None else jax.random.key(0)
    found = operator.solve(y, ridge=ridge, tolerance=1e-10, top=top, key=key)
    exact = np.linalg.solve(matrix + ridge * np.eye(len(matrix)), y)
    np.testing.assert_allclose(found.values, exact, rtol=0, atol=1e-7 * np.abs(exact).max())
    assert found.residual <= 2e-10


def test_leading_eigenvectors_spare_most_products():
    """With nearly all of them taken out, fifteen steps reach what they do not reach without."""
    params, x, matrix = network()
    y = np.random.default_rng(4).normal(size=len(matrix))  # ones are a null vector under batch norm
    ridge = 1e-6 * np.trace(matrix)
    operator = kernels.ntk_operator(apply, params, x, stats="batch")
    options = {"ridge": ridge, "tolerance": 1e-8}
    with pytest.raises(ValueError, match="steps=15 leave a residual of"):
        operator.solve(y, steps=15, **options)
    found = operator.solve(y, steps=15, top=len(matrix) - 1, key=jax.random.key(1), **options)
    assert found.residual <= 2e-8


def test_systems_that_cannot_be_solved_are_refused():
    params, x, matrix = network()
    operator = kernels.ntk_operator(apply, params, x, stats="batch")
    for arguments, words in (
        ({"y": np.ones(3)}, "y must have shape"),
        ({"y": np.ones(len(matrix)), "ridge": -1.0}, "ridge must be"),
        ({"y": np.ones(len(matrix)), "top": 2}, "key must be given with top"),
    ):
        with pytest.raises(ValueError, match=words):
            operator.solve(**arguments)
    with pytest.raises(ValueError, match="symmetric kernel"):
        kernels.ntk_operator(apply, params, x, x[:4], stats="batch").solve(np.ones(8))
