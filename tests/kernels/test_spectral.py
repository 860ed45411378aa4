"""Derivatives of training in its kernel, also where eigenvalues are equal: exponentials, explicit steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meanflow import kernels

RATE, MOMENTUM, COUNTS, TIMES = 0.4, 0.6, (0, 1, 6, 13), (0.0, 1e-3, 0.7, 9.0, 80.0)


@functools.cache
def kernels_with_equal_eigenvalues():
    rng = np.random.default_rng(3)
    root = rng.normal(size=(6, 6))
    generic = root @ root.T / 6
    points = rng.normal(size=(4, 3))[[0, 1, 2, 3, 0, 1]]
    return {
        "identity": np.eye(6),
        "zero": np.zeros((6, 6)),
        "several outputs": np.kron(generic[:3, :3], np.eye(2)),
        "batch norm": np.asarray(
            kernels.batchnorm_ntk(jnp.asarray(generic), jnp.asarray(rng.normal(size=6)))
        ),
        "duplicate samples": np.exp(-0.5 * ((points[:, None] - points[None]) ** 2).sum(-1)),
        "nearly equal": np.diag([1.0, 1.0 + 1e-15, 1.0 + 1e-11, 1.0 + 1e-7, 2.0, 1e-9]),
        "generic": generic,
    }


def kernel_of(case):
    return kernels_with_equal_eigenvalues()[case]


CASES = ("identity", "zero", "several outputs", "batch norm", "duplicate samples", "nearly equal", "generic")
START, Y = np.linspace(-1.0, 1.0, 6), np.array([0.3, -1.0, 0.2, 0.7, -0.4, 1.1])
EVEN, UNEVEN = np.full(6, 0.5), np.linspace(0.3, 1.0, 6)  # uneven weights would tell equal eigenvalues apart


def by_exponentials(kernel, weights, time):
    """Outputs and duals of gradient flow; exp of [[-K Q, I], [0, 0]] t holds exp(-K Q t) and its integral."""
    n = kernel.shape[0]
    zero, one = jnp.zeros((n, n), kernel.dtype), jnp.eye(n, dtype=kernel.dtype)
    whole = jnp.block([[-kernel * weights[None, :], one], [zero, zero]]) * time
    power = jax.scipy.linalg.expm(whole, max_squarings=48)
    first = (START - Y).astype(kernel.dtype)
    return Y + power[:n, :n] @ first, -weights * (power[:n, n:] @ first)


def by_steps(kernel, weights, count, momentum):
    """Outputs and dual coefficients after explicit steps of the heavy ball."""
    f, dual, v = jnp.asarray(START), jnp.zeros(6), jnp.zeros(6)
    for _ in range(count):
        v = momentum * v - RATE * weights * (f - Y)
        dual = dual + v
        f = START + kernel @ dual
    return f, dual


def jacobians(function, kernel):
    """Both modes, as functions of symmetric kernels."""
    for mode in (jax.jacfwd, jax.jacrev):
        both = jax.jit(mode(function))(jnp.asarray(kernel))
        yield [(u + jnp.swapaxes(u, -1, -2)) / 2 for u in both]


def close(ours, theirs, tolerance):
    for u, v in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(u, v, atol=tolerance * max(1.0, float(jnp.abs(v).max())))


def weights_of(case):
    return UNEVEN if case in ("generic", "duplicate samples") else EVEN


def outputs(kernel, times, weights=EVEN, **options):
    flow = kernels.kernel_flow(kernel, START, Y, weights=weights, **options)
    return flow(times), flow.dual(times), flow.loss(times)


def with_loss(found, weights):
    f, dual = found
    return f, dual, 0.5 * jnp.sum(weights * (f - Y) ** 2)


@pytest.mark.parametrize("case", CASES)
def test_derivatives_of_gradient_flow_in_the_kernel(case):
    q = weights_of(case)
    exact = lambda k: jax.tree.map(
        lambda *u: jnp.stack(u), *(with_loss(by_exponentials(k, q, t), q) for t in TIMES)
    )
    wanted = next(jacobians(exact, kernel_of(case)))
    for mode in jacobians(lambda k: outputs(k, jnp.array(TIMES), q), kernel_of(case)):
        close(mode, wanted, 1e-11)


@pytest.mark.parametrize("momentum", [None, MOMENTUM])
@pytest.mark.parametrize("case", ["identity", "duplicate samples", "batch norm", "generic"])
def test_derivatives_of_gradient_descent_in_the_kernel(case, momentum):
    q = weights_of(case)
    exact = lambda k: jax.tree.map(
        lambda *u: jnp.stack(u), *(with_loss(by_steps(k, q, n, momentum or 0.0), q) for n in COUNTS)
    )
    ours = lambda k: outputs(k, jnp.array(COUNTS), q, learning_rate=RATE, momentum=momentum)
    wanted = next(jacobians(exact, kernel_of(case)))
    for mode in jacobians(ours, kernel_of(case)):
        close(mode, wanted, 1e-11)


def test_derivatives_at_the_end_of_training():
    """Those of the pseudo-inverse, along changes of the features, which keep the rank."""
    features = jnp.asarray(np.random.default_rng(4).normal(size=(6, 4)))

    def limit(x):
        flow = kernels.kernel_flow(x @ x.T, START, Y)
        return flow(jnp.inf), flow.dual(jnp.inf)

    def exact(x):
        inverse = x @ jnp.linalg.inv(x.T @ x) @ jnp.linalg.inv(x.T @ x) @ x.T
        return START - x @ x.T @ inverse @ (START - Y), -inverse @ (START - Y)

    close(limit(features), exact(features), 1e-12)
    for mode in (jax.jacfwd, jax.jacrev):
        close(jax.jit(mode(limit))(features), jax.jit(mode(exact))(features), 1e-11)


def test_derivatives_in_a_kernel_between_outputs_and_of_an_ensemble():
    """A kernel (n, n, k, k) that is the same for each output, by finite differences of the values themselves."""
    generic, rng = kernel_of("generic")[:3, :3], np.random.default_rng(5)
    y, cross = rng.normal(size=(3, 2)), rng.normal(size=(2, 3, 2, 2))
    prior = (jnp.eye(3), jnp.zeros((2, 3)), jnp.eye(2))
    times = jnp.array([0.5, 4.0])
    whole = jnp.asarray(generic[:, :, None, None] * np.eye(2)[None, None])
    turn = rng.normal(size=whole.shape)
    turn = jnp.asarray(turn + turn.transpose(1, 0, 3, 2))

    def found(step):
        flow = kernels.kernel_flow(whole + step * turn, jnp.zeros((3, 2)), y)
        return (
            flow(times),
            flow.at(cross, jnp.zeros((2, 2)), times),
            flow.ensemble(cross, prior, times).covariance,
        )

    h = 1e-3
    ends = [jax.jit(found)(step) for step in (-2 * h, -h, h, 2 * h)]
    wanted = [(a - 8 * b + 8 * c - d) / (12 * h) for a, b, c, d in zip(*ends, strict=True)]
    close(jax.jit(jax.jacfwd(found))(0.0), wanted, 1e-8)
    close(jax.jit(jax.jacrev(found))(0.0), wanted, 1e-8)


@pytest.mark.parametrize("case", ["identity", "duplicate samples", "batch norm"])
def test_derivatives_in_single_precision_compiled_and_in_batches(case):
    kernel = jnp.asarray(kernel_of(case))
    scalar = lambda k, found: jnp.sum(found(k)[0] ** 2) + jnp.sum(found(k)[1] ** 2)
    exact = lambda k: by_exponentials(k, EVEN.astype(k.dtype), 0.7)
    ours = lambda k: outputs(k, 0.7)[:2]
    wanted = jax.jit(jax.grad(scalar), static_argnums=1)(kernel, exact)
    wanted = (wanted + wanted.T) / 2
    gradient = jax.jit(jax.vmap(jax.grad(lambda k: scalar(k, ours))))
    np.testing.assert_allclose(gradient(jnp.stack([kernel, kernel]))[1], wanted, atol=1e-12)

    def single(k):
        small = [u.astype(np.float32) for u in (START, Y, EVEN)]
        flow = kernels.kernel_flow(k, small[0], small[1], weights=small[2])
        return flow(jnp.float32(0.7)), flow.dual(jnp.float32(0.7))

    found = jax.jit(jax.grad(lambda k: scalar(k, single)))(kernel.astype(jnp.float32))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_mixed_derivatives_and_the_refusal_of_second_ones():
    """In the kernel and in time both orders agree with exponentials; twice in the kernel is refused, not wrong."""
    kernel, time = jnp.asarray(kernel_of("duplicate samples")), jnp.asarray(0.7)
    ours = lambda k, t: outputs(k, t)[:2]
    exact = lambda k, t: by_exponentials(k, EVEN, t)
    symmetric = lambda mixed: [(u + jnp.swapaxes(u, -1, -2)) / 2 for u in mixed]
    wanted = symmetric(jax.jit(jax.jacfwd(jax.jacfwd(exact, 0), 1))(kernel, time))
    close(symmetric(jax.jit(jax.jacfwd(jax.jacrev(ours, 0), 1))(kernel, time)), wanted, 1e-10)
    close(symmetric(jax.jit(jax.jacrev(jax.jacfwd(ours, 1), 0))(kernel, time)), wanted, 1e-10)
    for outer in (jax.jacfwd, jax.jacrev):
        with pytest.raises(ValueError, match="no second derivatives in its kernel"):
            outer(jax.jacrev(lambda k: ours(k, time)))(kernel)


def test_steps_that_are_not_whole_are_refused_or_have_no_derivative_where_they_are_traced():
    kernel = jnp.asarray(kernel_of("generic"))
    total = lambda k, step: jnp.sum(outputs(k, step, learning_rate=RATE)[0])
    with pytest.raises(ValueError, match="times must be whole"):
        total(kernel, 2.5)
    assert np.all(np.isnan(jax.jit(jax.grad(total))(kernel, 2.5)))


def test_rates_and_modes_have_finite_derivatives():
    """A simple eigenvalue moves as the quadratic form of its eigenvector, an equal one does not give NaN."""
    flow = lambda k: kernels.kernel_flow(k, START, Y, weights=1.0)
    for case in ("generic", "identity"):
        kernel = jnp.asarray(kernel_of(case))
        top = flow(kernel).modes[:, 0]
        np.testing.assert_allclose(
            jax.grad(lambda k: flow(k).rates[0])(kernel), jnp.outer(top, top), atol=1e-12
        )
        assert np.all(np.isfinite(jax.jacrev(lambda k: flow(k).modes)(kernel)))
