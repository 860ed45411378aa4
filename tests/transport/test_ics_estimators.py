"""Sliced and marginal distances, Sinkhorn, and the ICS sandwich."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from meanflow.transport import (
    ics,
    sinkhorn_divergence,
    sliced_wasserstein,
    wasserstein,
)
from meanflow.transport._sliced import marginal_wasserstein, sliced_distances, slicing_constant


def clouds(seed, n=40, d=5):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)) * rng.uniform(0.5, 2, d)
    return jnp.asarray(x), jnp.asarray(rng.standard_t(3, size=(n, d)) + rng.normal(size=d))


@pytest.mark.parametrize("d", [1, 2, 7, 30])
def test_slicing_constant_is_one_over_the_mean_cosine(d):
    if d == 1:
        assert slicing_constant(1) == pytest.approx(1.0)
        return
    # |<u, e>| has density proportional to (1 - t^2)^((d-3)/2)
    t, w = scipy.special.roots_gegenbauer(200, (d - 2) / 2) if d > 2 else scipy.special.roots_chebyt(2000)
    assert slicing_constant(d) == pytest.approx(w.sum() / (w @ np.abs(t)), rel=1e-3)


def test_sliced_of_a_translation(key):
    x, _ = clouds(0)
    shift = np.array([1.0, -2.0, 0.5, 0.0, 1.0])
    slices = sliced_distances(x, x + shift[None], 1, key, 4000)
    mean, error = float(jnp.mean(slices)), float(jnp.std(slices)) / np.sqrt(4000)
    assert abs(mean * slicing_constant(5) - np.linalg.norm(shift)) < 5 * error * slicing_constant(5)
    assert float(jnp.max(slices)) <= np.linalg.norm(shift) * (1 + 1e-12)
    scaled = sliced_wasserstein(x, x + shift[None], key=key, directions=4000, scaled=True)
    assert float(scaled) == pytest.approx(mean * slicing_constant(5))


@pytest.mark.parametrize("seed", range(10))
def test_projections_are_below_the_distance(seed):
    x, y = clouds(seed)
    w = float(wasserstein(x, y))
    slices = sliced_distances(x, y, 1, jax.random.key(seed), 500)
    assert float(jnp.max(slices)) <= w * (1 + 1e-12)
    error = float(jnp.std(slices)) / np.sqrt(500) * slicing_constant(5)
    assert float(jnp.mean(slices)) * slicing_constant(5) <= w + 5 * error
    assert float(marginal_wasserstein(x, y)) <= w * (1 + 1e-12)
    basis = np.linalg.qr(np.random.default_rng(seed).normal(size=(5, 5)))[0]
    assert float(marginal_wasserstein(x @ basis, y @ basis)) <= w * (1 + 1e-12)


def test_marginal_bound_is_exact_for_translations():
    x, _ = clouds(1)
    shift = np.array([[1.0, -2.0, 0.5, 0.0, 1.0]])
    assert float(marginal_wasserstein(x, x + shift)) == pytest.approx(np.linalg.norm(shift), rel=1e-12)


def test_sliced_gradient(key):
    x, y = clouds(2, n=6, d=3)
    f = jax.jit(lambda x: sliced_wasserstein(x, y, 2, key=key, directions=16))
    h = jnp.zeros_like(x).at[1, 2].set(1e-6)
    slope = jax.jit(jax.grad(lambda x, y: sliced_wasserstein(x, y, 2, key=key, directions=16)))
    np.testing.assert_allclose(slope(x, y)[1, 2], (f(x + h) - f(x - h)) / 2e-6, rtol=1e-5)
    assert np.all(np.isfinite(slope(x, x)))


def test_sinkhorn_divergence_is_biased_low():
    rng = np.random.default_rng(0)
    x, y = jnp.asarray(rng.normal(size=(300, 2))), jnp.asarray(rng.normal(size=(300, 2)) + [1.0, 0.0])
    w = float(wasserstein(x, y))
    small, large = (sinkhorn_divergence(x, y, relative_epsilon=e) for e in (0.05, 0.2))
    assert bool(small.converged) and bool(large.converged)
    assert float(large.value) < float(small.value) < w
    assert float(small.value) == pytest.approx(0.88, abs=0.12)
    assert float(large.value) == pytest.approx(0.53, abs=0.12)
    same = sinkhorn_divergence(x, x)
    assert abs(float(same.value)) < 1e-6


def test_sinkhorn_divergence_of_points_that_are_one_and_of_points_of_any_size():
    one = jnp.ones((4, 2))
    same = sinkhorn_divergence(one, one[:1])
    assert abs(float(same.value)) < 1e-15 and bool(same.converged)
    with jax.numpy_rank_promotion("allow"):  # ott broadcasts ranks, in its derivative too
        assert np.all(np.isfinite(jax.grad(lambda x: sinkhorn_divergence(x, one).value)(one)))
    x, y = (jnp.asarray(u, jnp.float32) for u in clouds(4, n=8, d=2))
    unit = float(sinkhorn_divergence(x, y).value)
    for size in (1e-25, 1e25):
        assert float(sinkhorn_divergence(size * x, size * y).value) / size == pytest.approx(unit, rel=1e-5)


def test_sinkhorn_weights_are_shares():
    x, y = clouds(5, n=8, d=2)
    weights = np.arange(1.0, 9.0)
    found = [float(sinkhorn_divergence(x, y, weights_x=s * weights).value) for s in (1.0, 3.0, 1 / 36)]
    np.testing.assert_allclose(found, found[2], rtol=1e-9)
    alone = sinkhorn_divergence(x, y[:1], weights_x=(np.arange(8) == 2.0).astype(float))
    assert float(alone.value) == pytest.approx(float(jnp.linalg.norm(x[2] - y[0])), rel=1e-6)


@pytest.mark.parametrize("seed", range(25))
def test_sandwich(seed):
    x, y = clouds(seed, n=25, d=4)
    out = ics(x, y)
    assert out.lower <= out.exact * (1 + 1e-12) <= out.upper * (1 + 1e-11)
    drift = ics(x, x + 0.1 * y)
    assert drift.lower <= drift.exact * (1 + 1e-12) <= drift.upper * (1 + 1e-11)
    assert drift.upper <= drift.pieces["paired"] * (1 + 1e-12)
    assert np.isnan(ics(x, y, max_exact=10).exact)


def test_pairing_is_optimal_for_small_drifts():
    x, y = clouds(5, n=60, d=4)
    small = ics(x, x + 0.01 * y)
    assert small.upper == pytest.approx(small.exact, rel=1e-12)
    twice = ics(x + 0.01 * y, x + 0.03 * y)
    np.testing.assert_allclose(twice.exact, 2 * small.exact, rtol=1e-12)


def test_independent_samples_mislead():
    """Identical Gaussians in 32 dimensions look 5.6 to 6.2 apart; the same inputs give 0."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 300, 32))
    assert 5.5 < float(wasserstein(x, y)) < 6.3
    assert ics(x, x).exact == 0.0


@pytest.mark.parametrize("size", [1e-30, 1e30, 1e37])
def test_distances_of_single_precision_scale_with_the_points(size, key):
    x, y = (jnp.asarray(u, jnp.float32) for u in clouds(3, n=12, d=3))
    plain, scaled = ics(x, y), ics(size * x, size * y)
    for name, value in plain.pieces.items():
        assert scaled.pieces[name] / size == pytest.approx(value, rel=1e-5), name
    assert scaled.lower <= scaled.exact * (1 + 1e-6) <= scaled.upper * (1 + 2e-6)
    for p in (1, 2):
        near, far = (sliced_wasserstein(s * x, s * y, p, key=key, directions=64) for s in (1.0, size))
        assert float(far) / size == pytest.approx(float(near), rel=1e-5)
