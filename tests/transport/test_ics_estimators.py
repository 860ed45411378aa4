"""Sliced and marginal distances, Sinkhorn, the critic, and the ICS sandwich."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from meanflow.transport import _critic as critic
from meanflow.transport import (
    critic_distance,
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


CASES = {"shift .3": (1.0, 0.3), "shift 1": (1.0, 1.0), "scale 1.5": (1.5, 0.0), "scale 3": (3.0, 0.0)}


HALVES = (slice(0, 300), slice(300, 600))  # trained on, evaluated on


def gaussian_case(d, scale, shift, n=600):
    z = np.random.default_rng(d).normal(size=(n, d))
    # W_1 of z and scale z + shift: E|(scale - 1) z + shift 1|, both couplings being monotone
    w = (
        shift * np.sqrt(d)
        if scale == 1
        else (scale - 1)
        * np.sqrt(2)
        * np.exp(scipy.special.gammaln((d + 1) / 2) - scipy.special.gammaln(d / 2))
    )
    return jnp.asarray(scale * z + shift), jnp.asarray(z), w


@pytest.mark.parametrize("d", [2, 10, 50])
def test_critic_against_the_exact_distance(d):
    x, y, w = (np.stack(part) for part in zip(*(gaussian_case(d, *c) for c in CASES.values()), strict=True))
    key = jax.random.key(0)
    out = jax.jit(jax.vmap(lambda x, y: critic_distance(x, y, key=key)))(jnp.asarray(x), jnp.asarray(y))
    fitted, held_out = ([float(wasserstein(a[h], b[h])) for a, b in zip(x, y, strict=True)] for h in HALVES)
    np.testing.assert_allclose(fitted, w, rtol=0.2)  # same inputs
    assert np.all(out.lower_bound <= np.array(held_out) * (1 + 1e-9))
    assert np.all(out.lipschitz_estimate <= out.lipschitz_bound * (1 + 1e-9))
    assert np.all(np.abs(out.value) <= np.asarray(out.lipschitz_bound) * held_out * (1 + 1e-9))
    # the bias: the critic sees less than two percent of the distance, by a factor that is not constant
    ratio = np.asarray(out.value) / w
    assert np.all((ratio > 0) & (ratio < 0.02))
    assert ratio.max() / ratio.min() > 1.5


def test_convolutional_critic_is_a_lower_bound(key):
    """Shifted images, exact distance by assignment; the Lipschitz bound against gradients and a dense matrix."""
    y = jax.random.normal(key, (60, 4, 4, 2))
    options = {"hidden": (), "filters": ((3, 2), (3, 1)), "steps": 40, "batch": 16}
    out = critic_distance(y + 0.5, y, key=key, **options)
    exact = float(wasserstein(*((u[30:]).reshape(30, -1) for u in (y + 0.5, y))))
    assert 0 < float(out.lower_bound) <= exact * (1 + 1e-9)
    assert float(out.lipschitz_estimate) <= float(out.lipschitz_bound)
    kernel = jax.random.normal(jax.random.key(5), (3, 3, 2, 3))
    centre = jnp.zeros_like(kernel).at[1, 1].set(kernel[1, 1])
    for weight in (kernel, centre):
        matrix = jax.jacobian(lambda u, w=weight: critic._convolve(u[None], w, 1)[0].ravel())(y[0])
        dense = np.linalg.norm(np.asarray(matrix).reshape(len(matrix), -1), 2)
        bound = float(critic._spectral_norm(weight))
        assert dense <= bound * (1 + 1e-9)
        if weight is centre:  # one matrix at every pixel: equal
            assert dense == pytest.approx(bound, rel=1e-9)


@pytest.mark.bad_input
def test_critic_bad_input(key):
    with pytest.raises(ValueError, match="x must be images"):
        critic_distance(jnp.ones((4, 2)), jnp.ones((4, 2)), key=key, filters=((3, 1),))
    with pytest.raises(ValueError, match=r"filters\[0\] must be a pair \(channels, stride\)"):
        critic_distance(jnp.ones((4, 2)), jnp.ones((4, 2)), key=key, filters=((3,),))
    with pytest.raises(ValueError, match="N >= 2"):
        critic_distance(jnp.ones((4, 2)), jnp.ones((3, 2)), key=key)


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
