"""Bounds on the Wasserstein distance hold on thousands of random pairs, and some are attained."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_pairs import SLACK, exact, over_pairs, pairs

from meanflow.layers.functional import unitize
from meanflow.transport import bounds, wasserstein


def test_upper_bounds_are_above():
    x, y = pairs(0, 500)
    assert np.all(exact(x, y) <= over_pairs(bounds.moment_bound, x, y) * (1 + SLACK))
    alpha = np.random.default_rng(8).random((500, 4)) ** 2
    for form in ("harmonic", "linear"):
        images = [over_pairs(lambda u, a, f=form: unitize(u, a, interpolation=f), u, alpha) for u in (x, y)]
        bound = lambda x, y, a, f=form: bounds.unitized_bound(x, y, a, interpolation=f)
        assert np.all(exact(*images) <= over_pairs(bound, x, y, alpha) * (1 + SLACK) + SLACK)


def test_standardized_bound_on_two_point_laws():
    # mass q at sqrt((1-q)/q), the rest at -sqrt(q/(1-q)), against its mirror image
    best = 0.0
    for q in np.linspace(0.01, 0.5, 491):
        points, mass = np.array([np.sqrt((1 - q) / q), -np.sqrt(q / (1 - q))]), np.array([q, 1 - q])
        np.testing.assert_allclose([mass @ points, mass @ points**2], [0, 1], atol=1e-12)
        best = max(best, float(wasserstein(points, -points, weights_x=mass, weights_y=mass)))
    assert best == pytest.approx(1.2011, abs=2e-3)
    assert best < bounds.standardized_bound(1)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_truncated_power_is_one_lipschitz(p):
    rng = np.random.default_rng(p)
    x = rng.normal(size=(2000, 5)) * 10 ** rng.uniform(-1, 1, size=(2000, 1))
    y = x + rng.normal(size=(2000, 5)) * 10 ** rng.uniform(-3, 1, size=(2000, 1))
    for c in (0.3, 1.0, 4.0):
        values = [bounds.truncated_power(jnp.asarray(u), p, c) for u in (x, y)]
        assert np.max(np.abs(values[0] - values[1]) / np.linalg.norm(x - y, axis=1)) <= 1 + 1e-9


def test_truncated_power_is_the_printed_function():
    rng = np.random.default_rng(0)
    x, p, c = rng.normal(size=(9, 4)) * 2, 3, 1.3
    printed = []
    for row in x:
        inner = sum(v**p for v in row if abs(v) <= c)
        outer = sum((-c) ** p for v in row if v < -c) + sum(c**p for v in row if v > c)
        printed.append((inner + outer) / (p * c ** (p - 1) * 2))
    np.testing.assert_allclose(bounds.truncated_power(jnp.asarray(x), p, c), printed, rtol=1e-12)


def test_power_bounds_are_below():
    x, y = pairs(3, 2000)
    w = exact(x, y)
    scales = jnp.array([0.1, 1.0, 30.0])
    each = lambda x, y, p: jax.vmap(lambda c: bounds.power_bound(x, y, p, c))(scales)
    found = over_pairs(lambda x, y: jnp.stack([each(x, y, p) for p in (1, 2, 3, 4)]), x, y)
    assert np.all(found <= w[:, None, None] * (1 + SLACK))
    best = over_pairs(bounds.best_power_bound, x, y)
    assert np.all(best <= w * (1 + SLACK))
    # a pure shift: p = 1, which the paper excludes, is exact along (1, ..., 1), p = 2 is not
    a, b = jnp.zeros((2, 4)), jnp.full((2, 4), 0.5)
    assert float(bounds.power_bound(a, b, 1, 1.0)) == pytest.approx(float(wasserstein(a, b)))
    assert float(bounds.power_bound(a, b, 2, 1.0)) < 0.3 * float(wasserstein(a, b))


def test_power_bound_is_tight_in_the_limit():
    c, h = 1.0, 5e-4
    a, b = jnp.full((1, 3), c), jnp.full((1, 3), c - h)
    ratio = float(bounds.power_bound(a, b, 2, c) / wasserstein(a, b))
    assert ratio == pytest.approx(0.99975, abs=1e-6)


def test_noise_bound_is_an_identity():
    rng = np.random.default_rng(4)
    for _ in range(20):
        x, y = rng.uniform(-3, 3, size=(2, 30, 5))
        np.testing.assert_allclose(
            bounds.noise_bound(jnp.asarray(x), jnp.asarray(y), 3.0),
            bounds.power_bound(jnp.asarray(x), jnp.asarray(y), 2, 3.0),
            rtol=1e-9,
            atol=1e-14,
        )


def test_practical_bound_for_any_alpha():
    x, y = pairs(9, 2000)
    alpha = np.random.default_rng(10).normal(size=(2000, 4)) * 2  # what unconstrained training produces
    images = [over_pairs(unitize, u, alpha) for u in (x, y)]
    assert np.all(exact(*images) <= over_pairs(bounds.unitized_bound, x, y, alpha) * (1 + SLACK))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bounds.power_bound(jnp.ones((2, 1)), jnp.ones((2, 1)), 0, 1.0), "p must be an integer"),
        (lambda: bounds.power_bound(jnp.ones((2, 1)), jnp.ones((2, 1)), 2, 0.0), "c must be > 0"),
        (lambda: bounds.unitized_standardized_bound(8, 1.5), "alpha_min"),
    ],
)
@pytest.mark.bad_input
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
