"""The tree model of "BN decomposed": its weights, its limits, the sharp and the printed bounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meanflow import depth
from meanflow_papers.decomposed.theorem_11 import tree_bounds, tree_limits
from meanflow_papers.decomposed.tree import split_identity
from meanflow_papers.decomposed.tree_model import tree


def test_width_two_to_the_t_plus_one_is_the_right_projection_set(key):
    # equation (9) stacks all of S_{2^t}, which has 2^(t+1) elements
    weight = split_identity(key, (8, 16), float)
    assert {tuple(row) for row in np.asarray(weight.T)} == {
        tuple(s * row) for row in np.eye(8) for s in (1, -1)
    }
    with pytest.raises(ValueError, match="fan_out = 2 fan_in"):
        split_identity(key, (8, 8))


def test_is_the_network_with_split_identity_weights():
    x = jnp.array([[0.3], [-1.0], [2.0], [0.9]])
    run = depth.propagate(
        jax.random.key(0),
        x,
        [2, 4, 8, 16, 32],
        depth.Layer(weights=split_identity),
        observe=lambda x: x @ x.T,
    )
    record = tree(x, 5)
    np.testing.assert_allclose(
        record.gram * jnp.exp(2 * record.log_scale)[:, None, None], run.layers[1:], rtol=1e-13, atol=1e-16
    )


def test_depth_10000_limits_and_sharp_bounds():
    for n in (5, 10, 50):
        rng = np.random.default_rng(n)
        bounds = tree_bounds(n)
        for x in (rng.normal(size=n), np.linspace(-1, 1, n)):
            record = tree(x, 10_000, every=9_999)
            order = np.asarray(record.order[0])
            gram = np.asarray(record.gram[-1])[np.ix_(order, order)]
            assert np.all(np.isfinite(gram)) and record.log_scale[-1] < -100
            length = np.sqrt(np.diag(gram))
            cosine = gram / np.outer(length, length)
            limits = tree_limits(n, record.rho[0])
            inner = slice(1, n - 1)
            np.testing.assert_allclose(length[inner] / length[0], limits.ratio_first, rtol=1e-12)
            np.testing.assert_allclose(length[inner] / length[-1], limits.ratio_last, rtol=1e-12)
            np.testing.assert_allclose(cosine[inner, 0], limits.cos_first, rtol=1e-11)
            np.testing.assert_allclose(cosine[inner, -1], limits.cos_last, rtol=1e-11)
            # item 2: interior samples merge
            np.testing.assert_allclose(cosine[inner, inner], 1.0, rtol=1e-12)
            assert cosine[0, -1] == 0  # item 1
            ratio = min(limits.ratio_first, limits.ratio_last)
            angle = np.arccos(min(limits.cos_first, limits.cos_last))
            assert ratio <= bounds.ratio * (1 + 1e-12) and angle >= bounds.angle - 1e-12
        # the symmetric input, tested last, attains both; both extreme samples escape
        np.testing.assert_allclose([ratio, angle], [bounds.ratio, bounds.angle], rtol=1e-12)
        np.testing.assert_allclose(record.rho, 1.0, rtol=1e-9)
        assert bounds.ratio < bounds.printed_ratio and bounds.angle > bounds.printed_angle


def test_printed_bound_proved_in_the_paper_is_not_sharp_and_empty_for_small_n():
    for n in (3, 4):
        assert tree_bounds(n).printed_angle < 0 < tree_bounds(n).angle
    for n in range(3, 60):
        bounds = tree_bounds(n)
        assert bounds.ratio < np.sqrt(8) / (n - 2) < bounds.printed_ratio


def test_sharp_bounds_hold_for_many_inputs():
    """540 random inputs; the symmetric one attains both bounds (above)."""
    for n, usual in {3: 1.0, 15: 0.807}.items():
        x = jax.random.normal(jax.random.key(n), (270, n))
        layers = 40 * n
        record = jax.vmap(lambda x, layers=layers: tree(x, layers, every=layers - 1))(x)
        rho = record.weight[:, -1, 0, -1] / record.weight[:, -1, 0, 0]
        limits, bounds = tree_limits(n, rho), tree_bounds(n)
        assert jnp.max(jnp.minimum(limits.ratio_first, limits.ratio_last)) <= bounds.ratio
        assert jnp.max(jnp.minimum(limits.cos_first, limits.cos_last)) <= jnp.cos(bounds.angle)
        # which sample escapes: usually, not always, the one farthest from the mean
        escaped = jnp.where(rho < 1, jnp.argmin(x, axis=1), jnp.argmax(x, axis=1))
        farthest = jnp.argmax(jnp.abs(x - x.mean(1, keepdims=True)), axis=1)
        assert float(jnp.mean(escaped == farthest)) == pytest.approx(usual, abs=0.01)


def test_formulas_62_and_92():
    # (62) bounds the sum (61) of T - 1 terms for n >= 4; at n = 3 its denominator 2n - 7 makes it negative
    def printed(n, depth):
        kept, left = ((n - 1) / n) ** 2, (2 / n) ** 2 + ((n - 2) / n) ** 2
        total = sum(kept**k * left ** (depth - 1 - k) for k in range(1, depth))
        return total, (n**2 - 2 * n + 1) / (2 * n - 7) * kept ** (depth - 1)

    for n in (4, 5, 10, 100):
        both = np.array([printed(n, depth) for depth in (3, 10, 100)])
        assert np.all(both[:, 0] <= both[:, 1])
        assert both[-1, 0] > 0.8 * both[-1, 1]  # and it is sharp for many layers
    assert printed(3, 10)[0] > 0 > printed(3, 10)[1]
    # (92) divides <x_2, x_n> by |x_2| |x_1|; the limit on its right needs |x_n|
    n, x = 6, np.random.default_rng(3).normal(size=6)
    record = tree(x, 2000, every=1999)
    order = np.asarray(record.order[0])
    gram = np.asarray(record.gram[-1])[np.ix_(order, order)]
    length = np.sqrt(np.diag(gram))
    right_side = float(tree_limits(n, record.rho[0]).cos_last)
    assert abs(gram[1, -1] / (length[1] * length[-1]) - right_side) < 1e-12
    assert abs(gram[1, -1] / (length[1] * length[0]) - right_side) > 1e-3
