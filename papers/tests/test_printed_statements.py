"""Statements of the papers that no figure shows: lemmas, remarks and facts, each run against something independent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.spatial.distance import cdist

from meanflow.layers import functional
from meanflow.transport import wasserstein
from meanflow_papers.decomposed import rank
from meanflow_papers.decomposed.theorem_11 import tree_bounds
from meanflow_papers.decomposed.tree_model import tree


@pytest.mark.parametrize(("k", "t"), [(2, 3), (2, 5), (3, 4)])
def test_decomposed_lemma_2_one_more_neuron_raises_the_rank(k, t):
    """From rank t on t samples a random neuron gives rank t + 1 on t + 1 samples with probability gamma at least."""
    rng = np.random.default_rng(10 * k + t)
    x = rng.normal(size=(t + 1, k))
    relu = lambda w, x: np.maximum(w @ x.T, 0)  # neurons are rows
    first = rng.normal(size=(1, k))
    while np.linalg.matrix_rank(relu(first, x[:t])) < t:
        first = np.concatenate([first, rng.normal(size=(1, k))])
    if np.linalg.matrix_rank(relu(first, x)) == t + 1:  # the hypothesis asks for rank t on the first t only
        first = first[:t]
    draws = 4000
    new = rng.normal(size=(draws, 1, k))
    both = np.concatenate([np.broadcast_to(relu(first, x), (draws, len(first), t + 1)), relu(new, x)], axis=1)
    hits = np.mean(np.linalg.matrix_rank(both) == t + 1)
    least = float(rank.gamma(x).value)
    assert 0 < least <= hits + 4 * np.sqrt(hits * (1 - hits) / draws)


def test_decomposed_remark_after_theorem_11_several_input_features():
    """With a largest and a smallest point in every feature the limits of Theorem 11 hold for d > 1 as well."""
    rng = np.random.default_rng(11)
    n, d = 8, 3
    x = rng.uniform(-1, 1, (n, d))
    x[0], x[-1] = -1.0 - rng.uniform(0.1, 2, d), 1.0 + rng.uniform(0.1, 2, d)
    bounds = tree_bounds(n)

    def ends(x):
        gram = np.asarray(tree(jnp.asarray(x), 3000, every=2999).gram[-1])
        norm = np.sqrt(np.diag(gram))
        inner = slice(1, n - 1)
        ratio = min(np.max(norm[inner] / norm[0]), np.max(norm[inner] / norm[-1]))
        cosine = min(
            np.max(gram[inner, 0] / (norm[inner] * norm[0])),
            np.max(gram[inner, -1] / (norm[inner] * norm[-1])),
        )
        return ratio, np.arccos(cosine), np.ptp(norm[inner]) / norm[1], gram[0, -1]

    ratio, angle, spread, product = ends(x)
    assert ratio <= float(bounds.ratio) * (1 + 1e-9) and angle >= float(bounds.angle) * (1 - 1e-9)
    assert spread < 1e-9 and product == 0  # interior points merge, the extreme ones are orthogonal
    # without the condition the extreme points of one feature are interior in another, and nothing of it holds
    shuffled = np.stack([rng.permutation(x[:, j]) for j in range(d)], axis=1)
    assert ends(shuffled)[2] > 0.1


def test_decomposed_equation_3_normalized_preactivations():
    """After (3) every neuron has mean 0 and variance 1 over the batch, against numpy."""
    z = np.random.default_rng(3).normal(size=(20, 7)) * np.arange(1, 8) + 5
    found = np.asarray(functional.rescale(functional.recenter(jnp.asarray(z))))
    np.testing.assert_allclose(found, (z - z.mean(0)) / z.std(0), rtol=1e-12)
    np.testing.assert_allclose(found.mean(0), 0, atol=1e-14)
    np.testing.assert_allclose(found.var(0), 1, rtol=1e-13)


def _best_critic(x, y):
    """Maximize E f(x) - E f(y) over 1-Lipschitz f on the points, a linear program; return the value and f."""
    points = np.concatenate([x, y])
    gain = np.concatenate([np.full(len(x), 1 / len(x)), np.full(len(y), -1 / len(y))])
    i, j = np.nonzero(~np.eye(len(points), dtype=bool))
    rows = np.zeros((len(i), len(points)))
    rows[np.arange(len(i)), i], rows[np.arange(len(i)), j] = 1, -1
    best = linprog(-gain, A_ub=rows, b_ub=cdist(points, points)[i, j], bounds=(-50, 50), method="highs")
    return -best.fun, best.x


@pytest.mark.parametrize("d", [1, 3])
def test_unitization_equation_3_and_facts_1_and_2(d):
    """(3): the best 1-Lipschitz critic attains W1. Fact 1: minus it in absolute value. Fact 2: also with f(0) = 0."""
    rng = np.random.default_rng(d)
    x, y = rng.normal(size=(9, d)) + 0.7, rng.normal(size=(7, d))
    distance = float(wasserstein(jnp.asarray(x), jnp.asarray(y)))
    value, f = _best_critic(x, y)
    assert value == pytest.approx(distance, rel=1e-9)
    difference = lambda f: f[: len(x)].mean() - f[len(x) :].mean()
    assert abs(difference(-f)) == pytest.approx(distance, rel=1e-9)  # Fact 1
    assert _best_critic(y, x)[0] == pytest.approx(distance, rel=1e-9)
    # Fact 2: the extension of f to the origin, min_i f(p_i) + |p_i|, is 1-Lipschitz, and f - f(0) is as good a critic
    points = np.concatenate([x, y])
    origin = np.min(f + np.linalg.norm(points, axis=1))
    assert np.all(np.abs(f - origin) <= np.linalg.norm(points, axis=1) * (1 + 1e-9) + 1e-9)
    assert difference(f - origin) == pytest.approx(distance, rel=1e-9)


def test_two_stacked_batches_have_the_gram_of_both():
    """The Gram matrix of several features is the sum over features: what the remark of Theorem 11 rests on."""
    x = jax.random.normal(jax.random.key(0), (5, 2))
    whole = tree(x, 6)
    parts = [tree(x[:, j], 6) for j in range(2)]
    gram = lambda record: record.gram * jnp.exp(2 * record.log_scale)[:, None, None]
    np.testing.assert_allclose(gram(whole), sum(gram(part) for part in parts), rtol=1e-12)


@pytest.mark.parametrize("interpolation", ["harmonic", "linear"])
def test_unitization_equations_6_and_8_at_the_origin(interpolation):
    """(6), (8) send 0 to a constant c, which no limit gives; ours is c = 0, inside the unit ball, so bounds hold."""
    origin = jnp.zeros((1, 3))
    assert np.all(np.asarray(functional.unitize(origin, 1.0, interpolation=interpolation)) == 0)
    towards = np.stack([np.asarray(functional.unitize(1e-8 * v[None], 1.0))[0] for v in jnp.eye(3)])
    np.testing.assert_allclose(towards, np.eye(3), atol=1e-12)  # every direction has its own limit
    # Theorem 3.1 with the point at the origin: unit vectors and 0 are at most 2, here 1, apart
    x = jax.random.normal(jax.random.key(1), (6, 3))
    images = functional.unitize(x, 1.0, interpolation=interpolation)
    assert float(wasserstein(images, jnp.zeros((6, 3)))) == pytest.approx(1.0, rel=1e-12)
