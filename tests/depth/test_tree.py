"""The tree model: against its explicit 2^t rows, its limits, and the statements about it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meanflow import depth
from meanflow.depth._tree_model import tree_start, tree_step


def explicit(x, layers):
    """All rows, one row for each neuron; values within rounding of the mean become 0."""
    rows, out = np.atleast_2d(np.asarray(x, float)), []
    for _ in range(layers):
        centred = rows - rows.mean(1, keepdims=True)
        centred[np.abs(centred) < 1e-13 * np.abs(rows).max(1, keepdims=True)] = 0
        rows = np.concatenate([np.maximum(centred, 0), np.maximum(-centred, 0)])
        out.append(rows)
    return out


def clusters(rows):
    return np.array([len(np.unique(row)) for row in rows])


@pytest.mark.parametrize("n", [3, 5, 12])
def test_equals_the_explicit_tree_to_depth_14(n):
    rng = np.random.default_rng(n)
    inputs = {
        "random": rng.normal(size=n),
        "grid, with ties": np.arange(n, dtype=float),
        "repeated": rng.integers(0, 4, size=n).astype(float),
        "constant": np.ones(n),
    }
    for x in inputs.values():
        record = depth.tree(x, 14)
        for t, rows in enumerate(explicit(x, 14)):
            gram = rows.T @ rows
            ours = record.gram[t] * np.exp(2 * record.log_scale[t])
            assert np.abs(ours - gram).max() <= 1e-13 * max(gram.max(), 1e-300)
            if t < 10:  # counting clusters of 2^14 rows is slow
                count = clusters(rows)
                assert record.max_clusters[t, 0] == count.max()
                assert record.multi_rows[t, 0] == np.sum(count > 2)
                assert np.sum(np.maximum(count - 2, 0)) <= n - 2  # the conservation law


def test_is_the_network_with_split_identity_weights():
    x = jnp.array([[0.3], [-1.0], [2.0], [0.9]])
    run = depth.propagate(
        jax.random.key(0),
        x,
        [2, 4, 8, 16, 32],
        weights=depth._propagation.split_identity,
        observe=lambda x: x @ x.T,
    )
    record = depth.tree(x, 5)
    np.testing.assert_allclose(
        record.gram * jnp.exp(2 * record.log_scale)[:, None, None], run.layers[1:], rtol=1e-13, atol=1e-16
    )


def test_several_features_grow_separate_trees():
    x = np.random.default_rng(0).normal(size=(6, 3)) * np.array([1.0, 1e-3, 0.0])
    record = depth.tree(x, 9)
    gram = sum(rows.T @ rows for rows in (explicit(x[:, j], 9)[-1] for j in range(3)))
    np.testing.assert_allclose(record.gram[-1] * np.exp(2 * record.log_scale[-1]), gram, rtol=1e-12)


def test_depth_10000_limits_and_sharp_bounds():
    for n in (5, 10, 50):
        rng = np.random.default_rng(n)
        bounds = depth._tree_model.tree_bounds(n)
        for x in (rng.normal(size=n), np.linspace(-1, 1, n)):
            record = depth.tree(x, 10_000, every=9_999)
            order = np.asarray(record.order[0])
            gram = np.asarray(record.gram[-1])[np.ix_(order, order)]
            assert np.all(np.isfinite(gram)) and record.log_scale[-1] < -100
            length = np.sqrt(np.diag(gram))
            cosine = gram / np.outer(length, length)
            limits = depth._tree_model.tree_limits(n, record.rho[0])
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
        assert depth._tree_model.tree_bounds(n).printed_angle < 0 < depth._tree_model.tree_bounds(n).angle
    for n in range(3, 60):
        bounds = depth._tree_model.tree_bounds(n)
        assert bounds.ratio < np.sqrt(8) / (n - 2) < bounds.printed_ratio


def test_sharp_bounds_hold_for_many_inputs():
    """540 random inputs; the symmetric one attains both bounds (above)."""
    for n, usual in {3: 1.0, 15: 0.807}.items():
        x = jax.random.normal(jax.random.key(n), (270, n))
        layers = 40 * n
        record = jax.vmap(lambda x, layers=layers: depth.tree(x, layers, every=layers - 1))(x)
        rho = record.weight[:, -1, 0, -1] / record.weight[:, -1, 0, 0]
        limits, bounds = depth._tree_model.tree_limits(n, rho), depth._tree_model.tree_bounds(n)
        assert jnp.max(jnp.minimum(limits.ratio_first, limits.ratio_last)) <= bounds.ratio
        assert jnp.max(jnp.minimum(limits.cos_first, limits.cos_last)) <= jnp.cos(bounds.angle)
        # which sample escapes: usually, not always, the one farthest from the mean
        escaped = jnp.where(rho < 1, jnp.argmin(x, axis=1), jnp.argmax(x, axis=1))
        farthest = jnp.argmax(jnp.abs(x - x.mean(1, keepdims=True)), axis=1)
        assert float(jnp.mean(escaped == farthest)) == pytest.approx(usual, abs=0.01)


def test_escaped_samples():
    x = np.stack([np.array([9.0, 0.0, 1.0, 2.0]), np.array([0.0, 1.0, 2.0, -9.0]), np.arange(4.0)], axis=1)
    found = depth.tree(x, 200, every=199).escaped()
    np.testing.assert_array_equal(
        found, [[True, False, False, False], [False] * 3 + [True], [True, False, False, True]]
    )
    for j in range(2):
        length = np.linalg.norm(explicit(x[:, j], 14)[-1], axis=0)
        assert np.argmax(length) == np.argmax(np.asarray(found[j]))


def test_orthogonality_of_the_extremes_starts_at_layer_one():
    # Theorem 11.1 says all t; at t = 0 the angle is 0 or 180
    x = jnp.array([1.0, 2.0, 5.0])
    assert x[0] * x[-1] != 0
    np.testing.assert_array_equal(depth.tree(x, 20).gram[:, 0, -1], 0.0)


@pytest.mark.parametrize("n", [4, 20])
def test_merge_rate(n):
    x = np.random.default_rng(n).normal(size=n)
    layers = 60 * n
    share = depth.tree(x, layers).unmerged[:, 0]
    np.testing.assert_allclose(share[-1] / share[-2], depth._tree_model.merge_rate(n), rtol=1e-4)


def test_two_cluster_rows_follow_their_recursion():
    # heights (38), sum (40): S' = lambda_s S from any two-cluster row
    n, s = 9, 3
    record = depth.tree(np.where(np.arange(n) < s, 0.0, 1.0), 30)
    total = record.weight[:, 0, s - 1] * jnp.exp(2 * record.log_scale)
    np.testing.assert_allclose(total, ((s**2 + (n - s) ** 2) / n**2) ** np.arange(1, 31), rtol=1e-12)
    assert not np.any(np.delete(np.asarray(record.weight[:, 0]), s - 1, axis=1))


def test_three_cluster_rows_have_at_most_one_such_child():
    tie = depth.tree(np.array([0.0, 1.0, 1.0, 2.0]), 60)  # the middle value is the mean
    assert tie.multi_rows[0, 0] == 0
    generic = depth.tree(np.array([0.0, 1.0, 1.0, 2.2]), 60)
    assert np.all(np.asarray(generic.multi_rows[:12, 0]) == 1)


def test_layers_to_stability_grow_with_the_smallest_gap():
    # Theorem 10: some t_0 for each input; no bound in n alone
    first = []
    for gap in (1e-1, 1e-3, 1e-5, 1e-7, 1e-9):
        x = np.array([0.0, 1.0, 1.0 + gap, 2.7])
        most = np.asarray(depth.tree(x, 60).max_clusters[:, 0])
        assert most[-1] <= 3
        first.append(1 + int(np.argmax(most <= 3)))
    assert first == [3, 6, 12, 17, 19]


def test_cluster_is_zeroed_when_its_centre_is_below_the_mean():
    # the intuition in the paper's section III has the two cases swapped
    x = np.array([5.0, 0.1, -0.1, 0.2, -0.2])  # one far sample; the projection w = 1
    for w in (1.0, -1.0):
        z = w * x
        image = np.maximum(z - z.mean(), 0)
        centre_below = (z[1:].mean() - z.mean()) < 0
        assert centre_below == (np.count_nonzero(image[1:]) == 0)


def test_float32_follows_float64():
    x = np.random.default_rng(0).normal(size=10)
    low = depth.tree(jnp.asarray(x, jnp.float32), 400, every=399)
    high = depth.tree(x, 400, every=399)
    assert low.gram.dtype == jnp.float32
    np.testing.assert_allclose(
        low.gram[-1], high.gram[-1] * np.exp(2 * (high.log_scale[-1] - low.log_scale[-1])), atol=2e-3
    )


def test_a_layer_costs_n_squared():
    # operations counted by the compiler, not time
    count = []
    for n in (50, 200):
        start = jax.eval_shape(tree_start, jax.ShapeDtypeStruct((n,), float))
        compiled = jax.jit(tree_step).lower(start).compile()
        count.append(compiled.cost_analysis()["flops"])
    assert 1.5 < np.log(count[1] / count[0]) / np.log(4) < 2.2


def test_vmap_and_reflection():
    one = jax.vmap(lambda x: depth.tree(x, 7).gram[-1])(jnp.array([[0.0, 1.0, 4.0], [4.0, 1.0, 0.0]]))
    np.testing.assert_allclose(one[0], one[1][::-1, ::-1], rtol=1e-14)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.ones(2), 3), "at least 3"),
        ((np.ones(4), 0), "depth"),
        ((np.array([1.0, np.inf, 2.0]), 3), "finite"),
        ((np.ones((2, 2, 2)), 3), "shape"),
    ],
)
@pytest.mark.bad_input
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        depth.tree(*arguments)


def test_31_gap_and_count_change_under_negative_transformations():
    """(31) says that c_3 - c_2 and the number of positive entries stay; only the *least* middle gap does."""
    x = np.array([0.0, 1.0, 3.0, 3.5, *[10.0] * 40])
    middle_gaps = lambda row: np.diff(np.unique(row)[1:-1])
    gap = lambda row: np.unique(row)[2] - np.unique(row)[1]
    below = np.maximum(x.mean() - x, 0)
    assert len(np.unique(below)) == len(np.unique(x)) == 5  # not more clustered: the premise (29) holds
    assert (gap(x), np.sum(x > 0)) == (2.0, 43)
    assert gap(below) == pytest.approx(0.5, abs=1e-12) and np.sum(below > 0) == 4
    assert np.min(middle_gaps(below)) == pytest.approx(np.min(middle_gaps(x)), abs=1e-12)
    # what the proof needs holds for every step that merges nothing: the least middle gap does not shrink
    rng = np.random.default_rng(31)
    kept = 0
    for _ in range(2000):
        row = np.sort(rng.choice(30, size=rng.integers(5, 9), replace=False)).astype(float)
        row = np.repeat(row, rng.integers(1, 30, size=len(row)))
        sign = rng.choice([-1.0, 1.0])
        after = np.maximum(sign * (row - row.mean()), 0)
        if len(np.unique(np.round(after, 9))) == len(np.unique(row)):
            kept += 1
            assert np.min(middle_gaps(np.round(after, 9))) > np.min(middle_gaps(row)) - 1e-8
    assert kept > 20


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
    record = depth.tree(x, 2000, every=1999)
    order = np.asarray(record.order[0])
    gram = np.asarray(record.gram[-1])[np.ix_(order, order)]
    length = np.sqrt(np.diag(gram))
    right_side = float(depth._tree_model.tree_limits(n, record.rho[0]).cos_last)
    assert abs(gram[1, -1] / (length[1] * length[-1]) - right_side) < 1e-12
    assert abs(gram[1, -1] / (length[1] * length[0]) - right_side) > 1e-3
