"""Networks as piecewise linear functions, and the knot statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meanflow.univariate.knots import (
    concentration,
    dead_share,
    on_sample_share,
    piecewise_linear,
    total_variation,
)


def _network(key, m=60):
    a, b, c = jax.random.normal(key, (3, m))
    a = a.at[:4].set(0.0)  # constants, two of them dead
    b = b.at[:4].set(jnp.array([1.0, 2.0, -1.0, -0.3]))
    a, b = a.at[10].set(2.0), b.at[10].set(0.6)
    a, b = a.at[11].set(-1.0), b.at[11].set(-0.3)  # same knot, other facing
    a = a.at[12].set(1e-9)  # a knot very far away
    weights = jnp.where(jnp.arange(m) % 7 == 0, 0.0, jnp.linspace(0.5, 1.5, m))
    return a, b, c, weights


def test_same_function_as_the_network_everywhere(key):
    a, b, c, weights = _network(key)
    f = jax.jit(lambda *p: piecewise_linear(*p[:3], weights=p[3], scale=1.7))(a, b, c, weights)
    x = jnp.concatenate([jnp.linspace(-50, 50, 1001), f.knots[jnp.isfinite(f.knots)][:-1]])
    dense = 1.7 * jax.nn.relu(x[:, None] * a[None, :] - b[None, :]) @ (weights * c)
    np.testing.assert_allclose(f(x), dense, atol=2e-12)
    assert jnp.all(jnp.diff(f.knots[jnp.isfinite(f.knots)]) >= 0)
    slope = jax.vmap(jax.grad(lambda x: 1.7 * jax.nn.relu(x * a - b) @ (weights * c)))
    np.testing.assert_allclose(f.derivative(x[:1001] + 1e-3), slope(x[:1001] + 1e-3), atol=1e-13)


def test_merging_keeps_the_function_and_the_shapes(key):
    a, b, c, weights = _network(key)
    f = piecewise_linear(a, b, c, weights=weights)
    merged = f.merged()
    x = jnp.linspace(-3, 3, 301)
    np.testing.assert_allclose(merged(x), f(x), atol=1e-13)
    assert merged.knots.shape == f.knots.shape
    used = jnp.isfinite(merged.knots)
    assert jnp.sum(used) == len(np.unique(np.array(f.knots[jnp.isfinite(f.knots)])))
    assert jnp.all(merged.jumps[~used] == 0)
    assert jnp.sum(merged.jumps) == pytest.approx(float(jnp.sum(f.jumps)), rel=1e-12)


def test_new_points_compile_nothing(key):
    f = piecewise_linear(*jax.random.normal(key, (3, 8)))
    f(0.1), f.merged()
    with jax.no_tracing():
        f(0.2), f.merged()


def test_single_precision_vmap_and_gradient(key):
    a, b, c = jax.random.normal(key, (3, 5, 30))
    values = jax.vmap(lambda *p: piecewise_linear(*p)(0.3))(a, b, c)
    np.testing.assert_allclose(values, jnp.mean(c * jax.nn.relu(0.3 * a - b), axis=1), atol=1e-14)
    single = piecewise_linear(*(v[0].astype(jnp.float32) for v in (a, b, c)))
    assert single(jnp.float32(0.3)).dtype == jnp.float32
    slope = jax.grad(lambda c: piecewise_linear(a[0], b[0], c)(0.3))(c[0])
    np.testing.assert_allclose(slope, jax.nn.relu(0.3 * a[0] - b[0]) / 30, atol=1e-14)


def test_total_variation_is_that_of_the_sampled_slope(key):
    a, b, c, weights = _network(key)
    f = piecewise_linear(a, b, c, weights=weights)
    inner = f.knots[jnp.abs(f.knots) < 1e6]
    cuts = jnp.unique(inner)
    sides = jnp.concatenate([cuts[:1] - 1, (cuts[1:] + cuts[:-1]) / 2, cuts[-1:] + 1])
    dense = jax.vmap(jax.grad(lambda x: jax.nn.relu(x * a - b) @ (weights * c)))(sides)
    far = 1e-9 * abs(float(c[12] * weights[12]))  # the jump of the far knot
    assert total_variation(f) == pytest.approx(float(jnp.sum(jnp.abs(jnp.diff(dense)))) + far, rel=1e-10)


def test_17_the_charge_weighs_each_jump_with_its_bias(key):
    a, b, c = jax.random.normal(key, (3, 40))
    charge = jnp.mean(jnp.abs(c) * jnp.hypot(a, b))  # (1/m) sum |r|, all knots distinct
    f = piecewise_linear(a, b, c)
    assert total_variation(f, count_bias=True) == pytest.approx(float(charge), rel=1e-12)
    weighted = jnp.sum(jnp.abs(f.jumps) * jnp.sqrt(1 + f.knots**2))
    assert weighted == pytest.approx(float(charge), rel=1e-12)
    assert total_variation(f) < 0.8 * charge  # the printed penalty
    slope = jax.grad(lambda c: total_variation(piecewise_linear(a, b, c), count_bias=True))(c)
    np.testing.assert_allclose(slope, jnp.sign(c) * jnp.hypot(a, b) / 40, rtol=1e-12)


def test_opposite_jumps_at_one_knot_cancel():
    a, b = jnp.array([1.0, -2.0]), jnp.array([0.5, -1.0])
    f = piecewise_linear(a, b, jnp.array([2.0, -1.0]), weights=jnp.ones(2))  # 2 relu(x-.5) - relu(1-2x)
    assert total_variation(f) == 0.0
    assert f(3.0) == pytest.approx(5.0)
    assert f(-3.0) == pytest.approx(-7.0)


def test_on_sample_share_by_hand():
    x = jnp.linspace(0, 1, 6)  # h = 0.2, radius 0.01
    knots = jnp.array([0.0, 0.205, 0.215, -0.09, -0.11, 1.1, jnp.inf, jnp.nan])
    # in the window: 0, .205, .215, -.09, 1.1 (edge); on samples: 0 and .205
    assert on_sample_share(knots, x) == pytest.approx(2 / 5)
    assert on_sample_share(knots, x[::-1]) == pytest.approx(2 / 5)
    mass = jnp.array([1.0, 2, 3, 4, 100, 0, 1, 1])
    assert on_sample_share(knots, x, mass=mass) == pytest.approx(3 / 10)
    uniform = jnp.linspace(-0.1, 1.1, 100_001)
    assert on_sample_share(uniform, x) == pytest.approx(0.1, abs=1e-3)


def test_concentration_against_numpy(key):
    knots = jax.random.normal(key, (500,))
    mass = jnp.abs(jax.random.normal(jax.random.fold_in(key, 1), (500,)))
    counts, _ = np.histogram(np.array(knots), 110, (-1.1, 1.1), weights=np.array(mass))
    expected = np.sort(counts)[-6:].sum() / counts.sum()
    assert jax.jit(lambda e, w: concentration(e, w, 6))(knots, mass) == pytest.approx(expected, rel=1e-12)
    # a knot outside the window does not count
    assert concentration(jnp.array([0.3, 0.3, 5.0, 0.9]), jnp.array([1.0, 2.0, 7.0, 1.0]), 1) == 0.75
    with pytest.raises(ValueError, match="k must be an integer"):
        concentration(knots, mass, 0)


def test_dead_share_against_brute_force(key):
    a, b = jax.random.uniform(key, (2, 4000), minval=-1, maxval=1)
    a = a.at[:5].set(0.0)
    x = jnp.linspace(-1, 1, 10)
    dead = 1.0 - jnp.any(x[:, None] * a[None, :] - b[None, :] > 0, axis=0).astype(float)
    assert dead_share(a, b, x) == pytest.approx(float(jnp.mean(dead)), abs=1e-15)
    weights = (jnp.arange(4000) % 3 > 0).astype(float)
    kept = float(jnp.mean(dead[weights > 0]))
    assert dead_share(a, b, x, weights=weights) == pytest.approx(kept, abs=1e-12)
    # uniform angles: the dead arc is pi - (arctan x_s - arctan x_1) = a quarter of the circle
    angle = 2 * jnp.pi * (jnp.arange(100_000) + 0.5) / 100_000
    assert dead_share(jnp.cos(angle), -jnp.sin(angle), x) == pytest.approx(0.25, abs=1e-4)
    # a network without neurons has no dead ones
    assert dead_share(a, b, x, weights=jnp.zeros(4000)) == 0


def test_23_the_knot_is_minus_v_over_u(key):
    r, theta = jax.random.normal(key, (2, 20))
    u, v = jnp.abs(r) * jnp.cos(theta), jnp.abs(r) * jnp.sin(theta)
    f = piecewise_linear(jnp.cos(theta), -jnp.sin(theta), r)
    np.testing.assert_allclose(f.knots, jnp.sort(-v / u), rtol=1e-12)
    assert jnp.max(jnp.abs(f.knots - jnp.sort(v / u))) > 0.1
