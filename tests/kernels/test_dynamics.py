"""Kernel dynamics against ODE solves, explicit steps and real networks."""

import functools

import chex
import diffrax
import jax
import jax.numpy as jnp
import numpy as np

from meanflow import kernels
from meanflow._loops import iterate


def problem(key, size=8):
    root = jax.random.normal(key, (size, size))
    k = jax.random.split(key, 4)
    return root @ root.T / size, jax.random.normal(k[0], (size,)), jax.random.normal(k[1], (size,)), k[2]


def test_flow_against_ode_solver(key):
    kernel, start, y, k = problem(key)
    cross, there = jax.random.normal(k, (3, 8)), jnp.arange(3.0)
    times = jnp.array([0.0, 0.5, 2.0, 6.0])

    def field(t, state, size):
        f, g = state
        return -kernel @ (size * (f - y)), -cross @ (size * (f - y))

    @jax.jit
    def reference(size):
        return diffrax.diffeqsolve(
            diffrax.ODETerm(field),
            diffrax.Dopri8(),
            0.0,
            6.0,
            0.01,
            (start, there),
            size,
            saveat=diffrax.SaveAt(ts=times),
            stepsize_controller=diffrax.PIDController(rtol=1e-12, atol=1e-13),
            max_steps=10_000,
        ).ys

    for weights in (None, jnp.linspace(0.1, 1.0, 8)):
        size = jnp.full(8, 1 / 8) if weights is None else weights
        ours, test = reference(size)
        flow = kernels.kernel_flow(kernel, start, y, weights=weights)
        np.testing.assert_allclose(flow(times), ours, atol=1e-9)
        np.testing.assert_allclose(flow.at(cross, there, times), test, atol=1e-9)
        loss = 0.5 * jnp.sum(size[None] * (ours - y[None]) ** 2, axis=1)
        np.testing.assert_allclose(flow.loss(times), loss, atol=1e-9)


def test_flow_with_null_modes(key):
    kernel = jnp.diag(jnp.array([2.0, 0.0]))
    flow = kernels.kernel_flow(kernel, jnp.zeros(2), jnp.ones(2), weights=1.0)
    np.testing.assert_allclose(flow(50.0), [1.0, 0.0], atol=1e-12)
    np.testing.assert_allclose(flow.at(jnp.array([[0.0, 3.0]]), jnp.zeros(1), 2.0), [6.0], atol=1e-12)


def test_regression_is_the_limit_of_the_flow(key):
    kernel, _, y, k = problem(key)
    kernel = kernel + 0.5 * jnp.eye(8)
    cross = jax.random.normal(k, (3, 8))
    flow = kernels.kernel_flow(kernel, jnp.zeros(8), y)
    limit = flow.at(cross, jnp.zeros(3), 1e4)
    np.testing.assert_allclose(cross @ np.linalg.solve(kernel, y), limit, rtol=1e-9)


def test_descent_is_explicit_euler(key):
    kernel, start, y, k = problem(key)
    run = kernels.kernel_flow(kernel, start, y, weights=1.0, learning_rate=0.3)
    step = jnp.eye(8) - 0.3 * kernel
    for n in (5, 10, 15, 20):
        np.testing.assert_allclose(run(n) - y, jnp.linalg.matrix_power(step, n) @ (start - y), rtol=1e-10)


def test_closed_form_of_descent_against_the_loop_with_weights_and_test_points(key):
    kernel, start, y, k = problem(key)
    cross, there, q = jax.random.normal(k, (3, 8)), jnp.arange(3.0), jnp.linspace(0.1, 1.0, 8)
    flow = kernels.kernel_flow(kernel, start, y, weights=q, learning_rate=0.3)

    def step(state, _):
        f, g = state
        force = 0.3 * q * (f - y)
        return f - kernel @ force, g - cross @ force

    _, (train, test) = iterate(step, (start, there), None, 20, 5, lambda s: s)
    counts = jnp.arange(5, 21, 5)
    np.testing.assert_allclose(flow(counts), train, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(flow.at(cross, there, counts), test, rtol=1e-10, atol=1e-12)
    loss = 0.5 * jnp.sum(q[None] * (train - y[None]) ** 2, axis=1)
    np.testing.assert_allclose(flow.loss(counts), loss, rtol=1e-10)
    one = kernels.kernel_flow(kernel, start, y, weights=q)
    times = jnp.ones((2, 3))
    chex.assert_shape([one(0.5), one(times), one.loss(times)], [(8,), (2, 3, 8), (2, 3)])


def test_train_statistics_predict_a_trained_batch_norm_network(key):
    """Summing rate K(z, x) residual along training, stats="train", gives the trained outputs at z.

    It holds step by step to first order in the rate, so halving the rate halves the gap; with frozen
    statistics, which leave out their gradients, the gap stays.
    """
    k = jax.random.split(key, 5)
    params = (jax.random.normal(k[0], (2, 40)), jax.random.normal(k[1], (40, 1)) / 6)
    x, z = jax.random.normal(k[2], (10, 2)), jax.random.normal(k[3], (4, 2))
    y = jax.random.normal(k[4], (10,))

    def moments(p, x):
        first = x @ p[0]
        one = (jnp.mean(first, 0), jnp.std(first, 0))
        last = (jnp.tanh((first - one[0][None]) / one[1][None]) @ p[1])[:, 0]
        return one, (jnp.mean(last), jnp.std(last))

    def apply(p, x, s):
        h = jnp.tanh((x @ p[0] - s[0][0][None]) / s[0][1][None])
        return ((h @ p[1])[:, 0] - s[1][0]) / s[1][1]

    net = kernels.Normalized(apply, moments)
    at = lambda p: apply(p, z, moments(p, x))

    @functools.partial(jax.jit, static_argnums=2)
    def run(rate, steps, stats):
        def step(_, state):
            p, predicted = state
            outputs, pull = jax.vjp(lambda p: net(p, x), p)
            residual = outputs - y
            cross = kernels.empirical_ntk(net, p, x, z, stats=stats, method="jacobian")
            p = jax.tree.map(lambda a, g: a - rate * g, p, pull(residual)[0])
            return p, predicted - rate * residual @ cross

        p, predicted = jax.lax.fori_loop(0, steps, step, (params, at(params)))
        return jnp.linalg.norm(predicted - at(p)), jnp.linalg.norm(at(p) - at(params))

    coarse, moved = run(1e-4, 300, "train")
    fine, _ = run(5e-5, 600, "train")
    frozen, _ = run(5e-5, 600, "frozen")
    assert moved > 0.5
    assert fine < 0.05 * moved and 1.6 < coarse / fine < 2.5
    assert frozen > 5 * fine
