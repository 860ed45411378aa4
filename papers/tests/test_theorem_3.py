"""How many neurons give full rank: simulation against the bounds of Theorem 3, singular values and exact ranks."""

import jax
import jax.numpy as jnp
import numpy as np
from scipy import optimize, stats

from meanflow import depth
from meanflow_papers.decomposed import rank
from meanflow_papers.decomposed.cells import distinct_lines
from meanflow_papers.decomposed.theorem_3 import (
    expected_neurons_bound,
    neurons_to_full_rank,
    polygon,
    rank_bounds,
)


def limiting_rank(x):
    """The rank of relu(x W) for sufficiently many Gaussian neurons, exactly and for any batch.

    It is the number of distinct lines spanned by nonzero samples, plus the rank of the directions of those lines that
    have samples on both sides: relu(t) and relu(-t) of one line span |t| and t, and the t's are linear.
    """
    x = np.asarray(x, float)
    lines = distinct_lines(x)
    length = np.linalg.norm(x, axis=1, keepdims=True)
    cosine = x @ lines.T / np.where(length > 1e-9 * length.max(), length, np.inf)  # (n, lines)
    both = np.any(cosine > 1 - 1e-12, axis=0) & np.any(cosine < -1 + 1e-12, axis=0)
    return len(lines) + (int(np.linalg.matrix_rank(lines[both], tol=1e-9)) if both.any() else 0)


def test_law_of_the_neurons_to_full_rank(key):
    x = polygon(5)
    y = neurons_to_full_rank(key, x, 4000)
    assert abs(float(y.mean()) - 5.47) < 5 * float(y.std()) / np.sqrt(4000) + 0.02
    gamma = rank.gamma(x).value
    bounds = rank_bounds(5, gamma, np.arange(5, 60))
    failure = np.mean(np.asarray(y)[:, None] > np.arange(5, 60), axis=0)
    assert np.all(failure <= np.asarray(bounds.binomial) + 4 * np.sqrt(failure / 4000) + 1e-3)
    assert float(y.mean()) < expected_neurons_bound(x) <= float(bounds.expected[0]) * (1 + 1e-12)
    # rank of the same neurons by singular values, for a few runs
    for j in range(3):
        run_key = jax.random.split(key, 4000)[j]
        rows = jnp.stack([jax.random.normal(jax.random.fold_in(run_key, d), (2,)) for d in range(int(y[j]))])
        image = np.maximum(np.asarray(x @ rows.T), 0)
        assert np.linalg.matrix_rank(image, tol=1e-9) == 5
        assert np.linalg.matrix_rank(image[:, :-1], tol=1e-9) == 4


def test_rank_bounds_against_scipy_and_minimisation():
    n, gamma = 6, 0.07
    d = np.array([90, 120, 200, 400, 1000])
    bounds = rank_bounds(n, gamma, d)
    np.testing.assert_allclose(bounds.binomial, stats.binom.cdf(n - 1, d, gamma), rtol=1e-9)
    for j, neurons in enumerate(d):  # (28b): the Chernoff exponent, minimised numerically
        log_bound = lambda s, d=neurons: n * (np.log(gamma) + s - np.log1p(-(1 - gamma) * np.exp(s))) - s * d
        best = optimize.minimize_scalar(log_bound, bounds=(0, -np.log(1 - gamma) - 1e-12), method="bounded")
        np.testing.assert_allclose(bounds.chernoff[j], np.exp(best.fun), rtol=1e-6)
        p = n / neurons
        divergence = p * np.log(p / gamma) + (1 - p) * np.log((1 - p) / (1 - gamma))
        np.testing.assert_allclose(bounds.chernoff[j], np.exp(-neurons * divergence), rtol=1e-10)
    limit = rank_bounds(n, 1e-7, np.array([3 * n * 10**7]))
    # (7b) is the limit gamma -> 0 of (7a)
    np.testing.assert_allclose(limit.chernoff, limit.simple, rtol=1e-5)


def test_rank_bounds_are_ordered_for_every_alpha_above_one_and_trivial_below():
    gamma = jnp.array([1e-4, 1e-2, 0.1, 0.4])[:, None]
    alpha = jnp.linspace(1.01, 8, 40)[None, :]
    for n in (2, 5, 20):
        bounds = rank_bounds(n, gamma, jnp.ceil(alpha * n / gamma))
        assert bool(jnp.all(bounds.binomial <= bounds.chernoff * (1 + 1e-9)))
        assert bool(jnp.all(bounds.chernoff <= bounds.simple * (1 + 1e-9)))
    # at alpha = 1/2, 25 neurons, both formulas claim far less failure than the dominating binomial allows
    divergence = 0.2 * np.log(0.2 / 0.1) + 0.8 * np.log(0.8 / 0.9)
    formulas = np.exp([-25 * divergence, -5 * (0.5 - 1 - np.log(0.5))])  # (7a), (7b)
    np.testing.assert_allclose(formulas, [0.329, 0.381], atol=1e-3)
    np.testing.assert_allclose(stats.binom.cdf(4, 25, 0.1), 0.902, atol=1e-3)
    bounds = rank_bounds(5, 0.1, 25)
    assert bounds.simple == 1 and bounds.chernoff == 1


def test_one_sample_needs_two_neurons_on_average(key):
    y = neurons_to_full_rank(key, jnp.ones((1, 3)), 4000)
    assert abs(float(y.mean()) - 2.0) < 5 * np.sqrt(2 / 4000)  # the bound n / gamma = 2 is attained
    assert rank.gamma(np.ones((1, 3))).value == 0.5


def test_waiting_times_are_not_independent(key):
    x = jnp.eye(2)
    first = neurons_to_full_rank(key, x[:1], 20_000)
    both = neurons_to_full_rank(key, x, 20_000)
    y1, y2 = np.asarray(first), np.asarray(both - first)
    assert abs(np.corrcoef(y1, y2)[0, 1] + 0.42) < 0.04
    assert abs(np.mean(y2 == 0) - 1 / 3) < 0.02


def test_collinear_samples_never_reach_full_rank(key):
    for n, most in {6: 5, 8: 6, 10: 7}.items():
        assert limiting_rank(polygon(n)) == most
        if n == 8:
            continue  # one program less to compile
        y = neurons_to_full_rank(key, polygon(n), 50, target=most + 1, max_neurons=300)
        assert np.all(np.asarray(y) == 301)


def test_limiting_rank_of_degenerate_batches():
    rng = np.random.default_rng(0)
    for _ in range(200):
        n, k = rng.integers(2, 9), rng.integers(1, 4)
        x = rng.integers(-1, 2, size=(n, k)).astype(float)
        image = np.maximum(rng.normal(size=(400, k)) @ x.T, 0)
        assert limiting_rank(x) == np.linalg.matrix_rank(image, tol=1e-9 * max(image.max(), 1e-30))


def test_corollary_4_needs_the_hypothesis_on_centred_samples(key):
    x = np.random.default_rng(2).normal(size=(4, 3))
    x = np.concatenate([x, x.mean(0, keepdims=True)])  # the fifth sample is the mean
    assert limiting_rank(x) == 5 and limiting_rank(x - x.mean(0)) == 4
    run = depth.propagate(key, x, [500], depth.Layer(rescale="std"))
    assert run.layers.rank(1e-9)[-1] == 4
    free = depth.propagate(key, x, [500], depth.Layer(recenter=False))
    assert free.layers.rank(1e-9)[-1] == 5
    # and holds when it is satisfied
    good = x[:4] + np.array([[0.0, 0, 1], [0, 0, 0], [0, 0, 0], [0, 2, 0]])
    gamma = rank.gamma(good, recenter=True).value
    centred = good - good.mean(0)
    y = neurons_to_full_rank(key, jnp.asarray(centred), 1000)
    assert float(y.mean()) <= expected_neurons_bound(centred) <= 4 / gamma * (1 + 1e-9)
