"""Minibatches: epochs visit every sample once, orders look random, padding is never drawn, gradients pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import problem
from scipy import stats

import meanflow as mf
from meanflow.solvers._batches import shuffle


@pytest.mark.parametrize("count", [1, 2, 7, 100, 1000])
def test_shuffle_is_a_permutation(count):
    keys = jax.random.split(jax.random.key(count), 20)
    orders = jax.vmap(lambda key: shuffle(key, jnp.arange(count, dtype=jnp.uint32), jnp.uint32(count)))(keys)
    np.testing.assert_array_equal(np.sort(orders, axis=1), np.tile(np.arange(count), (20, 1)))


def test_orders_are_uniform_to_the_noise_of_their_number():
    """Where a sample lands, where two samples land together, and all 24 orders of four: chi-square tests."""
    keys = jax.random.split(jax.random.key(0), 24_000)
    order = lambda count: jax.vmap(
        lambda key: shuffle(key, jnp.arange(count, dtype=jnp.uint32), jnp.uint32(count))
    )
    four = np.asarray(order(4)(keys)).astype(int) @ np.array([64, 16, 4, 1])
    counts = np.unique(four, return_counts=True)[1]
    assert counts.size == 24
    assert stats.chisquare(counts).pvalue > 1e-3
    thirty = np.asarray(order(30)(keys)).astype(int)
    for place in (0, 13):
        assert stats.chisquare(np.bincount(thirty[:, place], minlength=30)).pvalue > 1e-3
    pairs = np.bincount(thirty[:, 4] * 30 + thirty[:, 5], minlength=900).reshape(30, 30)
    assert stats.chisquare(pairs[~np.eye(30, dtype=bool)]).pvalue > 1e-3
    assert np.trace(pairs) == 0


def test_epochs_see_every_sample_once_and_padding_never():
    weights = jnp.concatenate([jnp.full(12, 1 / 12), jnp.zeros(5)])
    data = mf.Dataset(jnp.arange(17.0), jnp.arange(17.0), weights)
    at = mf.Batches(3, jax.random.key(0)).of(data)
    drawn = jax.vmap(lambda step: at(step).y)(jnp.arange(8)).astype(int)
    for epoch in (drawn[:4], drawn[4:]):
        np.testing.assert_array_equal(np.sort(epoch.ravel()), np.arange(12))
    assert np.any(drawn[:4] != drawn[4:])
    batch = at(jnp.asarray(2))
    np.testing.assert_allclose(batch.weights, 1 / 3)
    np.testing.assert_array_equal(batch.x, np.asarray(drawn[2], float))
    at = mf.Batches(3, jax.random.key(0), replace=True).of(data)
    replaced = jax.vmap(lambda step: at(step).y)(jnp.arange(2000)).astype(int)
    assert int(jnp.max(replaced)) == 11
    assert stats.chisquare(np.bincount(replaced.ravel())).pvalue > 1e-3


def test_an_epoch_of_descent_against_plain_jax_and_its_gradient_against_differences():
    flow, cloud, data = problem("vanilla", points=12, width=4)
    key = jax.random.key(3)
    w = cloud.particles
    loss = lambda w, x, y: 0.5 * jnp.mean((jnp.mean(w.a[None] * jnp.tanh(x @ w.b.T), axis=1) - y) ** 2)
    plain = mf.Dataset(data.x, data.y)
    for k in range(4):
        rows = mf.Batches(5, key).of(plain)(jnp.asarray(k))
        slope = jax.grad(loss)(w, rows.x, rows.y)
        w = jax.tree.map(lambda u, g: u - 0.1 * 4 * g, w, slope)
    run = lambda y, data: (
        mf.descend(
            flow, cloud, mf.Dataset(data.x, y, data.weights), 4, step=0.1, batches=mf.Batches(5, key)
        ).final.particles
    )
    np.testing.assert_allclose(run(data.y, plain).b, w.b, rtol=1e-13)
    end = lambda y: jnp.sum(run(y, plain).a ** 2)
    slope, h = jax.grad(end)(data.y), 1e-5
    direction = jnp.cos(jnp.arange(12.0))
    quotient = (end(data.y + h * direction) - end(data.y - h * direction)) / (2 * h)
    np.testing.assert_allclose(slope @ direction, quotient, rtol=1e-7)
