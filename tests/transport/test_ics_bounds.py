"""Bounds on the Wasserstein distance hold on thousands of random pairs, and some are attained."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_pairs import SLACK, exact, over_pairs, pairs

from meanflow.transport import ics, wasserstein


def test_moment_bound_is_above():
    x, y = pairs(0, 500)
    assert np.all(
        exact(x, y) <= over_pairs(lambda x, y: ics(y, x, max_exact=0).pieces["moment"], x, y) * (1 + SLACK)
    )


def test_power_bounds_are_below():
    x, y = pairs(3, 2000)
    w = exact(x, y)
    best = over_pairs(lambda x, y: ics(y, x, max_exact=0).pieces["power"], x, y)
    assert np.all(best <= w * (1 + SLACK))
    # the largest of four powers and nine scales, one by one
    top = np.maximum(np.abs(x).max((1, 2)), np.abs(y).max((1, 2)))
    scales = [s * top for s in np.geomspace(1 / 16, 1, 9)]
    shape = lambda c: c[:, None, None]
    value = lambda u, p, c: (
        np.mean(np.sum(np.clip(u, -shape(c), shape(c)) ** p, -1), -1) / (p * c ** (p - 1) * 2)
    )
    gaps = [np.abs(value(x, p, c) - value(y, p, c)) for p in (1, 2, 3, 4) for c in scales]
    np.testing.assert_allclose(best, np.max(gaps, axis=0), rtol=1e-9, atol=1e-12 * w.max())
    # a pure shift: p = 1, which the paper excludes, is exact along (1, ..., 1)
    a, b = jnp.zeros((2, 4)), jnp.full((2, 4), 0.5)
    assert ics(a, b).pieces["power"] == pytest.approx(float(wasserstein(a, b)))


def test_shift_of_traced_outputs_has_the_same_bounds():
    x, y = (jnp.asarray(u[1]) for u in pairs(5, 2))
    plain, traced = ics(x, y, max_exact=0), jax.jit(lambda x, y: ics(x, y, max_exact=0))(x, y)
    assert isinstance(plain.lower, float) and np.isnan(traced.exact)
    np.testing.assert_allclose([traced.lower, traced.upper], [plain.lower, plain.upper], rtol=1e-12)
