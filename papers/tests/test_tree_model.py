"""The tree model: against its explicit 2^t rows, and the statements about it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meanflow_papers.decomposed.tree_model import tree, tree_start, tree_step


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
        record = tree(x, 14)
        for t, rows in enumerate(explicit(x, 14)):
            gram = rows.T @ rows
            ours = record.gram[t] * np.exp(2 * record.log_scale[t])
            assert np.abs(ours - gram).max() <= 1e-13 * max(gram.max(), 1e-300)
            if t < 10:  # counting clusters of 2^14 rows is slow
                count = clusters(rows)
                assert record.max_clusters[t, 0] == count.max()
                assert record.multi_rows[t, 0] == np.sum(count > 2)
                assert np.sum(np.maximum(count - 2, 0)) <= n - 2  # the conservation law


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_the_size_of_the_input_goes_into_the_scale(size):
    x = np.array([0.0, 1.0, 2.0, 4.0, 9.0])
    plain, scaled = tree(x, 10), tree(size * x, 10)
    np.testing.assert_allclose(scaled.gram, plain.gram, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(scaled.log_scale, plain.log_scale + np.log(size), rtol=1e-12)


def test_several_features_grow_separate_trees():
    x = np.random.default_rng(0).normal(size=(6, 3)) * np.array([1.0, 1e-3, 0.0])
    record = tree(x, 9)
    gram = sum(rows.T @ rows for rows in (explicit(x[:, j], 9)[-1] for j in range(3)))
    np.testing.assert_allclose(record.gram[-1] * np.exp(2 * record.log_scale[-1]), gram, rtol=1e-12)


def test_escaped_samples():
    x = np.stack([np.array([9.0, 0.0, 1.0, 2.0]), np.array([0.0, 1.0, 2.0, -9.0]), np.arange(4.0)], axis=1)
    found = tree(x, 200, every=199).escaped()
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
    np.testing.assert_array_equal(tree(x, 20).gram[:, 0, -1], 0.0)


@pytest.mark.parametrize("n", [4, 20])
def test_merge_rate(n):
    x = np.random.default_rng(n).normal(size=n)
    layers = 60 * n
    weight = tree(x, layers).weight[:, 0]
    share = jnp.sum(weight[:, 1:-1], axis=1) / jnp.sum(weight, axis=1)  # what separates interior samples
    np.testing.assert_allclose(share[-1] / share[-2], ((n - 2) ** 2 + 4) / ((n - 1) ** 2 + 1), rtol=1e-4)


def test_two_cluster_rows_follow_their_recursion():
    # heights (38), sum (40): S' = lambda_s S from any two-cluster row
    n, s = 9, 3
    record = tree(np.where(np.arange(n) < s, 0.0, 1.0), 30)
    total = record.weight[:, 0, s - 1] * jnp.exp(2 * record.log_scale)
    np.testing.assert_allclose(total, ((s**2 + (n - s) ** 2) / n**2) ** np.arange(1, 31), rtol=1e-12)
    assert not np.any(np.delete(np.asarray(record.weight[:, 0]), s - 1, axis=1))


def test_three_cluster_rows_have_at_most_one_such_child():
    tie = tree(np.array([0.0, 1.0, 1.0, 2.0]), 60)  # the middle value is the mean
    assert tie.multi_rows[0, 0] == 0
    generic = tree(np.array([0.0, 1.0, 1.0, 2.2]), 60)
    assert np.all(np.asarray(generic.multi_rows[:12, 0]) == 1)


def test_layers_to_stability_grow_with_the_smallest_gap():
    # Theorem 10: some t_0 for each input; no bound in n alone
    first = []
    for gap in (1e-1, 1e-3, 1e-5, 1e-7, 1e-9):
        x = np.array([0.0, 1.0, 1.0 + gap, 2.7])
        most = np.asarray(tree(x, 60).max_clusters[:, 0])
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
    low = tree(jnp.asarray(x, jnp.float32), 400, every=399)
    high = tree(x, 400, every=399)
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
    one = jax.vmap(lambda x: tree(x, 7).gram[-1])(jnp.array([[0.0, 1.0, 4.0], [4.0, 1.0, 0.0]]))
    np.testing.assert_allclose(one[0], one[1][::-1, ::-1], rtol=1e-14)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.ones(2), 3), "at least 3"),
        ((np.ones(4), 0), "depth"),
        ((np.ones((2, 2, 2)), 3), "shape"),
    ],
)
@pytest.mark.bad_input
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        tree(*arguments)


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
