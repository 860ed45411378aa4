"""Kernel dynamics against ODE solves, explicit steps and real networks."""

import functools

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meanflow as mf
from meanflow import kernels
from meanflow._numerics import iterate
from meanflow.kernels._batchnorm import normalize
from meanflow.kernels._drift import alignment, drift_observer
from meanflow.kernels._regime import kernel_regression, linearized_batchnorm


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
    np.testing.assert_allclose(kernel_regression(kernel, y, cross), limit, rtol=1e-9)
    ridge = kernel_regression(kernel, y, ridge=0.7)
    np.testing.assert_allclose(ridge, kernel @ np.linalg.solve(kernel + 0.7 * np.eye(8), y), rtol=1e-10)


def test_descent_is_explicit_euler(key):
    kernel, start, y, k = problem(key)
    run = kernels.kernel_flow(kernel, start, y, weights=1.0, learning_rate=0.3)
    step = jnp.eye(8) - 0.3 * kernel
    for n in (5, 10, 15, 20):
        np.testing.assert_allclose(run(n) - y, jnp.linalg.matrix_power(step, n) @ (start - y), rtol=1e-10)
    with pytest.raises(ValueError, match="multiple of every"):
        linearized_batchnorm(kernel, start, y, learning_rate=0.3, steps=20, every=3)


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
    assert one(0.5).shape == (8,) and one(jnp.ones((2, 3))).shape == (2, 3, 8)
    assert one.loss(jnp.ones((2, 3))).shape == (2, 3)


def test_batch_norm_descent_is_exact_for_a_linear_network(key):
    """f = X w has a constant kernel X X' before batch norm, so the BN form must be exact gradient descent."""
    k = jax.random.split(key, 4)
    x, z = jax.random.normal(k[0], (10, 4)), jax.random.normal(k[1], (3, 4))
    y, w0 = jax.random.normal(k[2], (10,)), jax.random.normal(k[3], (4,))
    loss = lambda w: 0.5 * jnp.mean((normalize(x @ w, 0.01) - y) ** 2)
    w, gradient = w0, jax.jit(jax.grad(loss))
    for _ in range(30):
        w = w - 0.2 * gradient(w)
    run = linearized_batchnorm(
        x @ x.T, x @ w0, y, learning_rate=0.2, steps=30, every=30, epsilon=0.01, cross=z @ x.T, at=z @ w0
    )
    np.testing.assert_allclose(run.train[0], normalize(x @ w, 0.01), rtol=1e-9)
    np.testing.assert_allclose(run.test[0], normalize(z @ w, 0.01, x @ w), rtol=1e-9)
    # the frozen kernel after batch norm is not: B moves with the outputs
    after, start = kernels.batchnorm_ntk(x @ x.T, x @ w0, epsilon=0.01), normalize(x @ w0, 0.01)
    frozen = kernels.kernel_flow(after, start, y, learning_rate=0.2)
    assert float(jnp.linalg.norm(frozen(30) - run.train[0])) > 0.03


def test_alignment(key):
    y = jax.random.normal(key, (6,))
    np.testing.assert_allclose(alignment(3.0 * y[:, None] * y[None], y), 1.0, rtol=1e-12)
    np.testing.assert_allclose(alignment(jnp.eye(6), y), 1 / np.sqrt(6), rtol=1e-12)
    shifted = alignment(y[:, None] * y[None] + 100.0, y, centered=True)
    np.testing.assert_allclose(shifted, 1.0, rtol=1e-9)


def test_drift_along_a_run(key):
    """The observer inside ``solve`` and ``descend`` against kernels of the saved clouds."""
    x = jax.random.normal(key, (5, 2))
    data = mf.Dataset(x, jnp.sin(x[:, 0]))
    flow = mf.batchnorm("tanh").bind(data)
    cloud = flow.init(key, 6, dim=2)
    start = mf.tangent_kernel(flow, cloud, x)
    observe = drift_observer(lambda flow, cloud, data: mf.tangent_kernel(flow, cloud, data.x), start)
    both = {"seen": observe, "cloud": lambda flow, cloud, data: cloud}
    optimizer = optax.sgd(0.1)
    for run in (
        mf.solve(flow, cloud, data, 3.0, ts=3, observe=both),
        mf.descend(flow, cloud, data, 4, optimizer=optimizer, every=2, observe=both),
    ):
        seen = run.observed["seen"]
        clouds = run.observed["cloud"]
        stack = jax.vmap(lambda c: mf.tangent_kernel(flow, c, x))(clouds)
        np.testing.assert_allclose(seen["drift"], kernels.kernel_drift(stack, start), rtol=1e-10, atol=1e-13)
        by_hand = np.linalg.norm(np.asarray(stack[-1] - start)) / np.linalg.norm(np.asarray(start))
        np.testing.assert_allclose(seen["drift"][-1], by_hand, rtol=1e-10)
        np.testing.assert_allclose(seen["trace"], np.trace(stack, axis1=1, axis2=2), rtol=1e-10)
        assert by_hand > 1e-3 and 0 < float(seen["kernel cosine"][-1]) < 1
    np.testing.assert_allclose(kernels.kernel_drift(stack)[0], 0.0, atol=1e-15)


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
