"""Recenter + ReLU at infinite width: groups of samples against full matrices, the odd state, where it exists."""

import jax
import jax.numpy as jnp
import numpy as np

from meanflow import depth
from meanflow_papers.decomposed.fixed_points import stability, unit_layer
from meanflow_papers.decomposed.odd_states import Blocks, block_layer, critical_scale, odd_state


def test_blocks_are_the_full_recursion():
    blocks = Blocks(
        jnp.array([1.0, 2.0, 4.0]),
        jnp.array([2.0, 1.0, 0.5]),
        jnp.array([[0.0, 0.1, -0.2], [0.1, 0.3, 0.05], [-0.2, 0.05, 0.2]]),
    )
    full = unit_layer(blocks.expand(), depth.Layer())
    np.testing.assert_allclose(block_layer(blocks).expand(), full, atol=1e-14)


def test_odd_state_is_a_stable_fixed_point_and_the_cluster_keeps_an_angle():
    state = odd_state(10)
    np.testing.assert_allclose(
        [state.norm_ratio, state.odd_angle, state.cluster_angle], [7.412, 88.71, 45.20], atol=6e-3
    )
    gram = state.blocks.expand()
    np.testing.assert_allclose(unit_layer(gram, depth.Layer()), gram, atol=1e-11)
    assert abs(stability(gram, depth.Layer())[0]) < 1
    odd = depth.Gram(gram).odd_point()
    np.testing.assert_allclose(odd.norm_ratio, state.norm_ratio, rtol=1e-10)
    np.testing.assert_allclose(odd.odd_angle, state.odd_angle, rtol=1e-8)
    np.testing.assert_allclose(odd.cluster_angle, state.cluster_angle, rtol=1e-8)
    for n in (50, 100, 400):  # balance alpha (1 - 2 theta / 3 pi) = 1
        assert abs(float(odd_state(n).cluster_angle) / (540 / n) - 1) < 2.5 / n


def test_no_odd_state_below_seven():
    for n in (3, 4, 5, 6):
        for scale in (1.5, 5.0, 20.0):
            np.testing.assert_allclose(odd_state(n, scale).norm_ratio, 1.0, atol=1e-6)
    assert bool(jnp.isnan(critical_scale(6, steps=5)))
    assert odd_state(7).norm_ratio > 3.8


def test_bistability_around_the_critical_scale():
    critical = critical_scale(10)
    assert abs(critical - 1.227) < 5e-4
    assert odd_state(10, critical + 1e-3).norm_ratio > 7
    assert odd_state(10, critical - 1e-3).norm_ratio < 1.001


def test_two_equal_outliers_are_a_saddle():
    n = 10
    square = jnp.array([25.0, 1.0])
    run = Blocks(jnp.array([2.0, n - 2.0]), square, jnp.zeros((2, 2)))
    run = jax.lax.fori_loop(0, 3000, lambda _, b: block_layer(b), run)
    assert jnp.sqrt(run.square[0] / run.square[1]) > 2
    assert abs(stability(run.expand(), depth.Layer())[0]) > 1
    # any inequality resolves it to one odd point
    pair = Blocks(jnp.array([1.0, 1.0, n - 2.0]), jnp.array([25.1, 25.0, 1.0]), jnp.zeros((3, 3)))
    pair = jax.lax.fori_loop(0, 3000, lambda _, b: block_layer(b), pair)
    np.testing.assert_allclose(jnp.sqrt(pair.square[0] / pair.square[2]), 7.412, atol=1e-3)
    np.testing.assert_allclose(pair.square[1], pair.square[2], rtol=1e-6)
