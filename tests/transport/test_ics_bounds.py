"""Bounds on the Wasserstein distance hold on thousands of random pairs, and some are attained."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_pairs import SLACK, exact, over_pairs, pairs

from meanflow.transport import bounds, wasserstein


def test_moment_bound_is_above():
    x, y = pairs(0, 500)
    assert np.all(exact(x, y) <= over_pairs(bounds.moment_bound, x, y) * (1 + SLACK))


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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bounds.power_bound(jnp.ones((2, 1)), jnp.ones((2, 1)), 0, 1.0), "p must be an integer"),
        (lambda: bounds.power_bound(jnp.ones((2, 1)), jnp.ones((2, 1)), 2, 0.0), "c must be > 0"),
    ],
)
@pytest.mark.bad_input
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
