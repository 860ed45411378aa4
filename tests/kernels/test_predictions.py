"""Linearized networks, their training in closed form, ensembles, Gaussian processes: against descent and ODEs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import integrate

from meanflow import kernels
from meanflow._loops import iterate


def normal(seed, *shape):
    """Gaussian numbers of numpy, which compiles nothing when the tests are collected."""
    return jnp.asarray(np.random.default_rng(70 + seed).normal(size=shape))


X, Z = normal(0, 6, 3), normal(1, 4, 3)
PARAMS = {
    "w": normal(2, 3, 5),
    "v": normal(3, 5, 2) / 2,
    "steps": jnp.arange(2),
}


def net(p, x):
    return jnp.tanh(x @ p["w"]) @ p["v"] + p["steps"][1]


def moved(scale):
    noise = {"w": normal(4, 3, 5), "v": normal(5, 5, 2)}
    return {**PARAMS, **{k: PARAMS[k] + scale * noise[k] for k in noise}}


def linearized(p, x):
    """The network to first order in its parameters."""
    free = {name: PARAMS[name] for name in ("w", "v")}
    line = lambda q: net({**PARAMS, **q}, x)
    return sum(jax.jvp(line, (free,), ({name: p[name] - value for name, value in free.items()},)))


def infinitely_wide(x, phi=jax.nn.relu, variances=(2.0, 2.0, 0.0, 0.0)):
    """Kernels of an infinitely wide layer."""
    shapes = tuple(jax.ShapeDtypeStruct(s, float) for s in ((3, 8), (8, 1), (8,), (1,)))
    apply = lambda p, x: phi(x @ p[0] + p[2][None]) @ p[1] + p[3][None]
    return kernels.infinite_width(apply, shapes, x, variances=variances)


def test_kernel_of_the_linearized_network_is_constant():
    here = kernels.empirical_ntk(net, PARAMS, X)
    np.testing.assert_allclose(kernels.empirical_ntk(linearized, moved(0.5), X), here, rtol=1e-10, atol=1e-12)


def test_descent_of_the_linearized_network_with_two_outputs():
    """Real gradient descent on the parameters of the linearized network, at training and at other points."""
    linear, y = linearized, normal(6, 6, 2)
    free = {k: PARAMS[k] for k in ("w", "v")}
    whole = lambda p: {**PARAMS, **p}
    loss = lambda p: 0.5 * jnp.mean(jnp.sum((linear(whole(p), X) - y) ** 2, axis=1))
    step = lambda p, _: jax.tree.map(lambda a, g: a - 0.3 * g, p, jax.grad(loss)(p))
    see = lambda p: (linear(whole(p), X), linear(whole(p), Z), loss(p))
    _, (train, test, losses) = jax.jit(lambda p: iterate(step, p, None, 40, 20, see))(free)
    kernel, cross = kernels.empirical_ntk(net, PARAMS, X), kernels.empirical_ntk(net, PARAMS, Z, X)
    flow = kernels.kernel_flow(kernel, net(PARAMS, X), y, learning_rate=0.3)
    counts = jnp.array([20, 40])
    np.testing.assert_allclose(flow(counts), train, rtol=1e-9)
    np.testing.assert_allclose(flow.at(cross, net(PARAMS, Z), counts), test, rtol=1e-9)
    np.testing.assert_allclose(flow.loss(counts), losses, rtol=1e-9)


def test_momentum():
    """optax's descent with momentum on a linear network that has a null mode, also where two eigenvalues coincide."""
    features, y = normal(0, 6, 4), normal(6, 6)
    kernel, other = features @ features.T, normal(1, 3, 4)
    top = jnp.linalg.eigvalsh(kernel)[-1] / 6
    # the second damps the top mode best
    for momentum, rate in (
        (0.9, 0.1),
        (0.5, float((1 - 0.5**0.5) ** 2 / top)),
    ):
        optimizer = optax.sgd(rate, momentum=momentum)
        loss = lambda w: 0.5 * jnp.mean((features @ w - y) ** 2)
        w, seen = jnp.zeros(4), []
        state = optimizer.init(w)
        for _ in range(13):
            seen.append(w)
            updates, state = optimizer.update(jax.grad(loss)(w), state)
            w = optax.apply_updates(w, updates)
        path = jnp.stack(seen)
        flow = kernels.kernel_flow(kernel, jnp.zeros(6), y, learning_rate=rate, momentum=momentum)
        np.testing.assert_allclose(flow(jnp.arange(13)), path @ features.T, rtol=1e-9, atol=1e-12)
        found = flow.at(other @ features.T, jnp.zeros(3), jnp.arange(13))
        np.testing.assert_allclose(found, path @ other.T, rtol=1e-9, atol=1e-12)
    plain = kernels.kernel_flow(kernel, jnp.zeros(6), y, learning_rate=0.1)
    np.testing.assert_allclose(flow(jnp.inf), plain(jnp.inf), rtol=1e-9)
    with pytest.raises(ValueError, match="momentum needs"):
        kernels.kernel_flow(kernel, jnp.zeros(6), y, momentum=0.5)


def test_outputs_that_share_a_kernel():
    """k outputs with the kernel (n, n) are k separate flows, and the kernel K x I."""
    gram, y = X @ X.T + jnp.eye(6), normal(6, 6, 2)
    weights = jnp.linspace(0.5, 1.5, 6)
    flow = kernels.kernel_flow(gram, jnp.zeros((6, 2)), y, weights=weights)
    times, cross = jnp.array([0.3, 2.0, jnp.inf]), Z @ X.T
    apart = [kernels.kernel_flow(gram, jnp.zeros(6), y[:, c], weights=weights) for c in (0, 1)]
    np.testing.assert_allclose(flow(times), jnp.stack([f(times) for f in apart], -1), rtol=1e-12)
    blocks = jnp.einsum("ts,cd->tscd", gram, jnp.eye(2))
    wide = kernels.kernel_flow(blocks, jnp.zeros((6, 2)), y, weights=weights)
    ours = flow.at(cross, jnp.ones((4, 2)), times)
    np.testing.assert_allclose(
        wide.at(jnp.einsum("ts,cd->tscd", cross, jnp.eye(2)), jnp.ones((4, 2)), times), ours, rtol=1e-9
    )
    np.testing.assert_allclose(wide.loss(times[:2]), flow.loss(times[:2]), rtol=1e-10)
    # the end of training interpolates, as kernel regression
    np.testing.assert_allclose(flow(jnp.inf), y, atol=1e-12)
    np.testing.assert_allclose(ours[2] - 1, cross @ np.linalg.solve(gram, y), rtol=1e-8)
    with pytest.raises(ValueError, match="kernel"):
        kernels.kernel_flow(blocks, jnp.zeros(6), y[:, 0])


def test_ensemble_against_sampled_starts():
    """Mean and covariance over starts drawn from the prior, each trained on its own: exact up to sampling."""
    both = jnp.concatenate([X, Z])
    prior, theta, _ = infinitely_wide(both)
    y = jnp.sin(X[:, 0])
    blocks = prior[:6, :6], prior[6:, :6], prior[6:, 6:]
    times = jnp.array([1.0, 10.0])
    flow = kernels.kernel_flow(theta[:6, :6], jnp.zeros(6), y)
    ours = flow.ensemble(theta[6:, :6], blocks, times)
    root = np.linalg.cholesky(prior + 1e-10 * np.eye(10))
    starts = root @ np.random.default_rng(0).normal(size=(10, 20000))
    operator = lambda t: (
        -theta[6:, :6]
        @ np.linalg.inv(theta[:6, :6])
        @ (np.eye(6) - jax.scipy.linalg.expm(-t / 6 * theta[:6, :6]))
    )
    for k, t in enumerate(times):
        ends = starts[6:] + operator(t) @ (starts[:6] - y[:, None])
        error = np.sqrt(np.var(ends, axis=1) / 20000)
        assert np.all(np.abs(ends.mean(1) - ours.mean[k]) < 5 * error)
        scale = np.sqrt(np.outer(np.diag(np.cov(ends)), np.diag(np.cov(ends))))
        assert np.max(np.abs(np.cov(ends) - ours.covariance[k]) / scale) < 0.05
    # two outputs with the kernel between them: the same twice
    eye = jnp.eye(2)
    wide = kernels.kernel_flow(
        jnp.einsum("ts,cd->tscd", theta[:6, :6], eye), jnp.zeros((6, 2)), jnp.stack([y, y], -1)
    ).ensemble(jnp.einsum("ts,cd->tscd", theta[6:, :6], eye), blocks, 1.0)
    np.testing.assert_allclose(wide.mean[:, 1], ours.mean[0], rtol=1e-8)
    np.testing.assert_allclose(wide.covariance[::2, ::2], ours.covariance[0], rtol=1e-7, atol=1e-10)


def test_posterior_by_conditioning():
    """Bayesian inference is training to the end under prior and noise: against the inverse of the joint covariance."""
    erf = jax.scipy.special.erf
    joint = np.asarray(infinitely_wide(jnp.concatenate([X, Z]), erf, (2.0, 2.0, 0.1, 0.1)).nngp)
    noisy = joint + np.diag([0.3] * 6 + [0.0] * 4)
    precision = np.linalg.inv(noisy)
    y = jnp.cos(X[:, :2])
    flow = kernels.kernel_flow(noisy[:6, :6], 0 * y, y)
    ours = flow.ensemble(joint[6:, :6], (noisy[:6, :6], joint[6:, :6], joint[6:, 6:]), jnp.inf)
    np.testing.assert_allclose(ours.covariance, np.linalg.inv(precision[6:, 6:]), rtol=1e-6, atol=1e-10)
    mean = -np.linalg.solve(precision[6:, 6:], precision[6:, :6] @ y)
    np.testing.assert_allclose(ours.mean, mean, rtol=1e-7)
    with pytest.raises(ValueError, match="prior must be one covariance"):
        flow.ensemble(joint[6:, :6], (noisy[:6, :6], 50 + joint[6:, :6], joint[6:, 6:]), jnp.inf)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda k, f: f.at(jnp.ones((2, 5)), jnp.ones(2), 1.0), "cross must have shape"),
        (lambda k, f: f.at(jnp.ones((2, 6)), jnp.ones(3), 1.0), "start must have shape"),
        (lambda k, f: f.ensemble(k[:2], (k, jnp.ones((3, 6)), jnp.eye(2)), 1.0), "prior.1. must have shape"),
        (
            lambda k, f: kernels.kernel_flow(k, 1.0 + X[:, 0], X[:, 0]).ensemble(k, (k, k, k), 1.0),
            "start must be 0",
        ),
        (
            lambda k, f: kernels.kernel_flow(k, X[:, 0], X[:, 0], learning_rate=0.1)(1.5),
            "times must be whole",
        ),
        (
            lambda k, f: kernels.kernel_flow(k, X[:, 0], X[:, 0], learning_rate=0.1)(3e9),
            "times must be whole",
        ),
        (lambda k, f: kernels.kernel_flow(k, 0 * X, 7 + X, loss="cross_entropy"), "y must be probabilities"),
        (lambda k, f: kernels.kernel_flow(k, 0 * X, X, loss=lambda f, y: f), "loss must return one number"),
        (
            lambda k, f: kernels.kernel_flow(k, 0 * X, X, loss=lambda f, y: jnp.sum((f - y) ** 2))(jnp.inf),
            "times of",
        ),
        (
            lambda k, f: kernels.kernel_flow(
                [[1, 0.9, -0.9], [0.9, 1, 0.9], [-0.9, 0.9, 1]], np.zeros(3), np.ones(3)
            ),
            "kernel must be positive semi-definite",
        ),
    ],
)
def test_flows_that_do_not_fit_are_refused(call, words):
    kernel = X @ X.T + jnp.eye(6)
    with pytest.raises(ValueError, match=words):
        call(kernel, kernels.kernel_flow(kernel, jnp.zeros(6), X[:, 0]))


def test_cross_entropy_is_gradient_flow_of_the_linearized_network():
    """The parameters of the linearized network by scipy's solver; and any other loss."""
    labels = jax.nn.one_hot(jnp.array([0, 1, 1, 0, 1, 0]), 2)
    free = {k: PARAMS[k] for k in ("w", "v")}
    flat, build = jax.flatten_util.ravel_pytree(free)
    outputs = jax.jit(lambda p, x: linearized({**PARAMS, **build(p)}, x))
    loss = lambda p: jnp.mean(optax.softmax_cross_entropy(outputs(p, X), labels))
    slope = jax.jit(jax.grad(loss))
    path = integrate.solve_ivp(
        lambda t, p: -np.asarray(slope(p)), (0, 8.0), flat, rtol=1e-10, atol=1e-12, t_eval=[2.0, 8.0]
    ).y.T
    kernel, cross = kernels.empirical_ntk(net, PARAMS, X), kernels.empirical_ntk(net, PARAMS, Z, X)
    flow = kernels.kernel_flow(kernel, net(PARAMS, X), labels, loss="cross_entropy")
    times = jnp.array([8.0, 2.0, 0.0])  # in any order
    np.testing.assert_allclose(flow(times)[:2], [outputs(p, X) for p in path[::-1]], rtol=1e-6)
    np.testing.assert_allclose(flow(times)[2], net(PARAMS, X), rtol=1e-12)
    np.testing.assert_allclose(
        flow.at(cross, net(PARAMS, Z), times)[:2], [outputs(p, Z) for p in path[::-1]], rtol=1e-6
    )
    np.testing.assert_allclose(flow.loss(times)[:2], [loss(p) for p in path[::-1]], rtol=1e-6)
    square = lambda f, y: 0.5 * jnp.sum((f - y) ** 2)
    general = kernels.kernel_flow(kernel, net(PARAMS, X), labels, loss=square)
    closed = kernels.kernel_flow(kernel, net(PARAMS, X), labels)
    np.testing.assert_allclose(general(times), closed(times), rtol=1e-6, atol=1e-8)
    with pytest.raises(ValueError, match="learning_rate"):
        kernels.kernel_flow(kernel, net(PARAMS, X), labels, loss="cross_entropy", learning_rate=0.1)
