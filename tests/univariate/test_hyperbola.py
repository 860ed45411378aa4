"""Lifted neurons in raw coordinates against the same neurons in (r, theta)."""

import jax
import jax.numpy as jnp
import numpy as np

import meanflow as mf
from meanflow import flows
from meanflow.measures._cloud import Affine
from meanflow.univariate._hyperbola import Hyperbola, fold, unfold
from meanflow.univariate.balance import balance

X = jnp.linspace(-1.0, 1.0, 6)
DATA = mf.Dataset(X, jnp.array([1.0, -0.5, 0.2, 0.8, -1.0, 0.3]), "sum")
DELTAS = jnp.array([-jnp.inf, -30.0, -1.0, 0.0, 1.0, 30.0, jnp.inf, -1.0, 1.0, jnp.inf])


def neurons():
    """Every kind of balance; the last three have r = 0, where n or c vanishes."""
    r = jnp.array([1.5, -0.7, 0.4, -1.2, 0.9, -2.0, 1.1, 0.0, 0.0, 0.0])
    return mf.Cloud(mf.Polar(r, jnp.linspace(-3.0, 3.0, 10)), labels=DELTAS)


def test_there_and_back():
    cloud = neurons()
    raw = unfold(cloud, cloud.labels, jnp.sqrt(10.0))
    there = fold(cloud, raw, raw, jnp.sqrt(10.0))
    np.testing.assert_array_equal(there.theta, cloud.particles.theta)
    np.testing.assert_array_equal(there.r, cloud.particles.r)
    finite = np.isfinite(DELTAS)
    np.testing.assert_allclose(balance(raw)[finite], DELTAS[finite], atol=1e-13)
    # not the remembered angle but the one of (a, -b), also for neurons of length 0
    elsewhere = fold(cloud, jax.tree.map(lambda u: u + 9.0, raw), raw, jnp.sqrt(10.0))
    np.testing.assert_allclose(elsewhere.theta, cloud.particles.theta, atol=1e-14)
    np.testing.assert_allclose(elsewhere.r, cloud.particles.r, atol=1e-14)


def test_a_step_stays_on_the_hyperbola_to_fourth_order():
    cloud = neurons()
    space = Hyperbola(mf.lifted().space)
    raw = cloud.at(unfold(cloud, cloud.labels, jnp.asarray(1.0)))
    kept = np.isfinite(DELTAS) & (np.asarray(cloud.particles.r) != 0)
    a, b, c = raw.particles
    errors, misses = [], []
    for h in (0.02, 0.01):
        # a step of the flow: p' = -c G, c' = -<G, p> conserves the balance to first order
        moved = space.retract(raw, Affine(-h * c * 0.7, h * c * 0.4, -h * (0.7 * a - 0.4 * b)))
        straight = Affine(a - h * c * 0.7, b + h * c * 0.4, c - h * (0.7 * a - 0.4 * b))
        errors.append(np.abs(balance(moved) - DELTAS)[kept].max())
        misses.append(np.abs(balance(straight) - DELTAS)[kept].max())
        q, p = straight.c * jnp.hypot(straight.a, straight.b), moved.c * jnp.hypot(moved.a, moved.b)
        np.testing.assert_allclose(p[kept], q[kept], rtol=1e-6)
    assert 1.9 < np.log2(misses[0] / misses[1]) < 2.1
    assert np.log2(errors[0] / errors[1]) > 3.8


def test_descent_does_not_depend_on_the_coordinates():
    """An optimiser of the user's own works in (r, theta); plain descent must make the same steps."""
    cloud = neurons()
    cloud = mf.Cloud(mf.Polar(cloud.particles.r[:7], cloud.particles.theta[:7]), labels=DELTAS[:7])
    flow = mf.lifted(alpha="sqrt")
    own = flows.make_flow(flow.feature, flow.space, alpha="sqrt")  # the same flow without a chart of its own
    gaps = []
    for h in (0.02, 0.01):
        raw = mf.descend(flow, cloud, DATA, 40, step=h, clock="lazy", every=20)
        polar = mf.descend(own, cloud, DATA, 40, step=h, clock="lazy", every=20)
        assert float(raw.energy[-1]) < 0.95 * float(raw.energy[0])
        gaps.append(float(jnp.max(jnp.abs(raw.energy - polar.energy))))
        np.testing.assert_array_equal(raw.final.particles.theta[0], cloud.particles.theta[0])  # delta = -inf
    # one correction a step is off by O(h^4), forty of them by as much
    assert gaps[0] < 1e-5 and gaps[1] < gaps[0] / 8
