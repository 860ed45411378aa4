"""Derivatives through whole runs against central finite differences, and the memory they take."""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import problem

import meanflow as mf

STEPS = 200


def solve_loss(adjoint):
    def loss(cloud, x, sigma, horizon):
        flow = mf.batchnorm("tanh", mean=jnp.zeros(3), covariance=sigma)
        data = mf.Dataset(x, jnp.sin(x[:, 0]))
        settings = {"solver": diffrax.Heun(), "step": 0.02, "adjoint": adjoint}
        return mf.solve(flow, cloud, data, horizon, **settings).energy[-1]

    return loss


def descend_loss(adjoint):
    def loss(cloud, x, sigma, horizon):
        flow = mf.batchnorm("tanh", mean=jnp.zeros(3), covariance=sigma)
        data = mf.Dataset(x, jnp.sin(x[:, 0]))
        return mf.descend(flow, cloud, data, STEPS, step=horizon / STEPS, adjoint=adjoint).energy[-1]

    return loss


@pytest.mark.parametrize(
    ("make", "adjoint"),
    [(solve_loss, "checkpoint"), (solve_loss, "full"), (descend_loss, "checkpoint"), (descend_loss, "full")],
)
def test_reverse_mode_matches_finite_differences(make, adjoint):
    """Directional derivatives in the initial particles, the data, the covariance and the horizon, one by one."""
    _, cloud, data = problem("batchnorm", width=5, points=12)
    sigma = data.moments()[1]
    point = (cloud, data.x, sigma, jnp.asarray(3.99))  # 200 steps of 0.02, the last one cut short
    loss = jax.jit(make(adjoint))
    gradients = jax.jit(jax.grad(make(adjoint), argnums=(0, 1, 2, 3)))(*point)
    rng = np.random.default_rng(0)
    h = 1e-5
    for k in range(4):
        shift = jax.tree.map(lambda u: jnp.asarray(rng.normal(size=u.shape)), point[k])
        if k == 0:  # only the particles are varied, not weights or width
            shift = jax.tree.map(jnp.zeros_like, cloud).at(shift.particles)
        if k == 2:
            shift = shift + shift.T
        ends = []
        for sign in (1, -1):
            moved = jax.tree.map(lambda u, s, sign=sign: u + sign * h * s, point[k], shift)
            ends.append(float(loss(*point[:k], moved, *point[k + 1 :])))
        finite = (ends[0] - ends[1]) / (2 * h)
        exact = sum(jax.tree.leaves(jax.tree.map(lambda g, s: float(jnp.sum(g * s)), gradients[k], shift)))
        np.testing.assert_allclose(exact, finite, rtol=1e-5)


def test_forward_mode_and_horizon():
    """dE(t1)/dt1 is minus the dissipation at t1, in forward mode too."""
    flow, cloud, data = problem("batchnorm", width=5, points=12)

    def end(t1):
        return mf.solve(flow, cloud, data, t1, step=mf.Adaptive(1e-9, 1e-11), adjoint="forward").energy[-1]

    value, slope = jax.jvp(end, (2.0,), (1.0,))
    final = mf.solve(flow, cloud, data, 2.0, step=mf.Adaptive(1e-9, 1e-11))
    np.testing.assert_allclose(value, final.energy[-1], rtol=1e-9)
    np.testing.assert_allclose(slope, -mf.dissipation(flow, final.final, data), rtol=1e-6)


def _temporary_bytes(function, *args):
    return jax.jit(function).lower(*args).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("kind", ["solve", "descend"])
def test_checkpointed_memory_grows_slower_than_the_steps(kind):
    """16 times the steps: the checkpointed adjoints need about 4 times the memory or less."""
    flow, cloud, data = problem("vanilla", width=64, points=16)

    def loss(particles, steps, adjoint):
        if kind == "descend":
            return mf.descend(flow, cloud.at(particles), data, steps, step=0.01, adjoint=adjoint).energy[-1]
        settings = {"solver": diffrax.Euler(), "step": 2.0**-6, "adjoint": adjoint}
        return mf.solve(flow, cloud.at(particles), data, steps * 2.0**-6, **settings).energy[-1]

    def use(adjoint, steps):
        return _temporary_bytes(jax.grad(lambda w: loss(w, steps, adjoint)), cloud.particles)

    if kind == "solve":  # room is made for 4096, 65536, ... steps
        assert use("checkpoint", 65_000) / use("checkpoint", 4000) < 6
        return
    few, many, full = use("checkpoint", 64), use("checkpoint", 1024), use("full", 1024)
    assert many / few < 6
    assert many < 0.25 * full
    assert full / use("full", 64) > 8  # storing every step
