"""Learning curves of kernel regression, against regression itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meanflow import kernels

POWERS = np.arange(1, 601.0)
EIGENVALUES, COEFFICIENTS = POWERS**-1.5, POWERS**-0.8


@pytest.mark.parametrize(("n", "ridge", "noise"), [(100, 0.0, 0.1), (200, 0.05, 0.0), (300, 0.2, 0.3)])
def test_ridge_regression_with_gaussian_features(n, ridge, noise):
    rng = np.random.default_rng(n)
    tests, trains = [], []
    for _ in range(40):
        x = rng.normal(size=(n, POWERS.size))
        y = x @ COEFFICIENTS + np.sqrt(noise) * rng.normal(size=n)
        dual = np.linalg.solve((x * EIGENVALUES) @ x.T + ridge * np.eye(n), y)
        found = EIGENVALUES * (x.T @ dual)
        tests.append(np.sum((found - COEFFICIENTS) ** 2))
        trains.append(np.mean((x @ found - y) ** 2))
    curve = kernels.learning_curve(EIGENVALUES, COEFFICIENTS, n, ridge=ridge, noise=noise)
    for seen, predicted in ((tests, curve.test), (trains, curve.train)):
        assert abs(np.mean(seen) - float(predicted)) < 4 * np.std(seen, ddof=1) / np.sqrt(len(seen)) + 1e-12
    total = float(jnp.sum(curve.learnability)) + ridge / float(curve.regularization)
    assert total == pytest.approx(n, rel=1e-12)


def test_equal_modes_have_a_closed_form():
    # p modes of eigenvalue 1, no ridge: L = n/p, and beyond n = p least squares, whose noise is p / (n - p)
    p, v = 50, np.linspace(1.0, 2.0, 50)
    curve = kernels.learning_curve(np.ones(p), v, np.array([10.0, 25.0, 100.0]), noise=0.3)
    below = np.array([10.0, 25.0]) / p
    missed = (np.sum(v**2) * (1 - below) ** 2 + 0.3) / (1 - below) - 0.3
    np.testing.assert_allclose(curve.test, [*missed, 0.3 * p / 50], rtol=1e-12)
    np.testing.assert_allclose(curve.train, [0, 0, 0.3 * (1 - p / 100)], atol=1e-12)
    np.testing.assert_allclose(curve.regularization, [*(1 / below - 1), 0], rtol=1e-12)


def test_points_with_probabilities_are_a_law():
    rng = np.random.default_rng(0)
    x, weights = rng.normal(size=(6, 3)), np.array([0.1, 0.3, 0.1, 0.2, 0.2, 0.1])
    kernel, y = np.exp(x @ x.T / 3), rng.normal(size=(6, 2))
    curve = kernels.learning_curve(kernel, y, 3.0, ridge=0.1, noise=0.2, weights=weights)
    # a point of probability 3/10 is three points of probability 1/10
    copies = np.repeat(np.arange(6), np.round(10 * weights).astype(int))
    same = kernels.learning_curve(kernel[np.ix_(copies, copies)], y[copies], 3.0, ridge=0.1, noise=0.2)
    np.testing.assert_allclose(curve.test, same.test, rtol=1e-10)
    np.testing.assert_allclose(curve.learnability, same.learnability[:6], rtol=1e-8, atol=1e-10)
    each = [
        kernels.learning_curve(kernel, y[:, k], 3.0, ridge=0.1, noise=0.2, weights=weights) for k in (0, 1)
    ]
    assert float(curve.test) == pytest.approx(sum(float(one.test) for one in each))


def test_curves_are_differentiable_in_everything():
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(8, 3)), rng.normal(size=8)
    kernel = np.exp(x @ x.T / 3)
    start = {"kernel": kernel, "target": y, "samples": 4.0, "ridge": 0.1, "noise": 0.2}
    way = {"kernel": (x @ x.T), "target": y**2, "samples": 0.7, "ridge": 0.3, "noise": 0.4}

    def error(s):
        given = {name: jnp.asarray(start[name]) + s * jnp.asarray(way[name]) for name in start}
        curve = kernels.learning_curve(
            given.pop("kernel"), given.pop("target"), given.pop("samples"), **given
        )
        return curve.test + curve.train

    h = 1e-4
    slope = (error(h) - error(-h)) / (2 * h)
    assert float(jax.grad(error)(0.0)) == pytest.approx(float(slope), rel=1e-6)
    # eigenvalues alone have second derivatives too
    curved = lambda ridge: kernels.learning_curve(EIGENVALUES[:20], COEFFICIENTS[:20], 9.0, ridge=ridge).test
    bend = (curved(0.1 + h) + curved(0.1 - h) - 2 * curved(0.1)) / h**2
    assert float(jax.grad(jax.grad(curved))(0.1)) == pytest.approx(float(bend), rel=1e-5)


SIZES = (20, 50, 100, 200, 500, 1000)


def digits():
    """Return the infinite-width kernel of a ReLU network on all digits, and centered classes."""
    data = pytest.importorskip("sklearn.datasets").load_digits()
    x = data.data / 16 - np.mean(data.data / 16, axis=0)
    x = 8 * x / np.linalg.norm(x, axis=1, keepdims=True)
    network = lambda p, x: jax.nn.relu(x @ p[0]) @ p[1]
    shapes = (jnp.ones((x.shape[1], 8)), jnp.ones(8))
    found = kernels.infinite_width(network, shapes, jnp.asarray(x), variances=(2.0, 2.0))
    return np.asarray(found.ntk), np.eye(10)[data.target] - 0.1


def regression_on(kernel, y, ridge, repeats):
    """Return mean squared errors over all points after regression on n independent draws of them, for each size."""
    rng, found = np.random.default_rng(0), []
    for n in SIZES:
        errors = []
        for _ in range(repeats(n)):
            rows = rng.choice(len(y), n)
            dual = np.linalg.solve(kernel[np.ix_(rows, rows)] + ridge * np.eye(n), y[rows])
            errors.append(np.mean(np.sum((kernel[:, rows] @ dual - y) ** 2, axis=1)))
        found.append(np.mean(errors))
    return np.array(found)


@pytest.mark.slow
def test_digits_with_an_infinitely_wide_network():
    kernel, y = digits()
    ridge = float(np.mean(np.diag(kernel)))
    seen = regression_on(kernel, y, ridge, lambda n: max(5, 3000 // n))
    curve = kernels.learning_curve(kernel, y, np.array(SIZES, float), ridge=ridge)
    np.testing.assert_allclose(seen, curve.test, rtol=0.05)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="target must have shape"):
        kernels.learning_curve(np.ones(3), np.ones(4), 2.0)
    with pytest.raises(ValueError, match="weights must be None"):
        kernels.learning_curve(np.ones(3), np.ones(3), 2.0, weights=np.ones(3))
    with pytest.raises(ValueError, match="samples"):
        kernels.learning_curve(np.ones(3), np.ones(3), [0.0])
