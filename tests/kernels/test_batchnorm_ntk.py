"""Batch-norm kernels against Jacobians of real batch-norm networks, and the printed forms that fail."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meanflow import kernels
from meanflow.kernels._batchnorm import jacobian_apply


def network(key, outputs=1, samples=7, activation=jnp.tanh):
    k = jax.random.split(key, 4)
    params = {
        "w": jax.random.normal(k[0], (3, 20)),
        "b": jax.random.normal(k[1], (20,)),
        "v": jax.random.normal(k[2], (20, outputs)) / np.sqrt(20),
    }
    x = jax.random.normal(k[3], (samples, 3))

    def before(p, x):
        return activation(x @ p["w"] + p["b"][None]) @ p["v"]

    return before, params, x


def after(before):
    def apply(p, x, epsilon):
        f = before(p["net"], x)
        h = f - jnp.mean(f, 0, keepdims=True)
        out = h / jnp.sqrt(jnp.mean(h**2, 0, keepdims=True) + epsilon)
        return out * p["gamma"][None] + p["beta"][None]

    return apply


def flat(jacobian):
    leaves = jax.tree.leaves(jacobian)
    return np.concatenate([np.reshape(a, (*a.shape[:2], -1)) for a in leaves], axis=2)


def test_against_jacobian_of_a_real_network(key):
    """With and without epsilon, with and without trained scale and shift, one output and several."""
    before, net, x = network(key, 2)
    jacobian = jax.jit(jax.jacfwd(lambda p, epsilon: after(before)(p, x, epsilon)))
    kernel, f = kernels.empirical_ntk(before, net, x), before(net, x)
    one, zero = jnp.ones(2), jnp.zeros(2)
    for epsilon in (0.0, 0.3):
        for scale, beta in ((None, zero), (jnp.array([0.5, 2.0]), jnp.array([-1.0, 1.0]))):
            rows = jacobian({"net": net, "gamma": one if scale is None else scale, "beta": beta}, epsilon)
            rows = flat(rows["net"] if scale is None else rows)
            exact = np.einsum("tcp,sdp->tscd", rows, rows)
            ours = kernels.batchnorm_ntk(kernel, f, epsilon=epsilon, scale=scale)
            np.testing.assert_allclose(ours, exact, rtol=1e-10, atol=1e-10)
            first = None if scale is None else scale[:1]
            single = kernels.batchnorm_ntk(kernel[:, :, 0, 0], f[:, 0], epsilon=epsilon, scale=first)
            np.testing.assert_allclose(single, exact[:, :, 0, 0], rtol=1e-10, atol=1e-10)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("f", "options", "words"),
    [
        (np.full(5, 0.1), {}, "outputs must vary"),
        (np.stack([np.arange(5.0), np.ones(5)], 1), {}, "outputs must vary"),
        (np.ones(1), {}, "outputs must vary"),
        (1e-200 * np.arange(5.0), {}, "outputs must have entries"),
        (np.arange(5.0), {"cross": np.ones((3, 2)), "at": np.ones(2)}, "cross must have shape"),
        (np.arange(5.0), {"cross": np.ones((5, 2)), "at": np.ones((2, 1))}, "at must have 1 axis"),
    ],
)
def test_outputs_without_a_batch_norm_are_refused(f, options, words):
    kernel = np.eye(len(f)) if f.ndim == 1 else np.einsum("ts,cd->tscd", np.eye(5), np.eye(2))
    with pytest.raises(ValueError, match=words):
        kernels.batchnorm_ntk(kernel, f, **options)
    if not options and np.abs(f).max() > 1e-100:
        assert np.all(np.isfinite(kernels.batchnorm_ntk(kernel, f, epsilon=1e-3)))


def test_test_points_use_the_training_statistics(key):
    before, net, x = network(key, 2)
    z = 1 + jax.random.normal(jax.random.fold_in(key, 7), (4, 3))
    gamma, beta = jnp.array([0.5, 2.0]), jnp.array([-1.0, 1.0])
    params = {"net": net, "gamma": gamma, "beta": beta}

    def moved(p):
        f, g = before(p["net"], x), before(p["net"], z)
        out = (g - jnp.mean(f, 0)[None]) / jnp.sqrt(jnp.var(f, axis=0) + 0.1)[None]
        return out * p["gamma"][None] + p["beta"][None]

    left, right = jax.jit(jax.jacfwd(lambda p: (after(before)(p, x, 0.1), moved(p))))(params)
    exact = np.einsum("tcp,sdp->tscd", flat(left), flat(right))
    ours = kernels.batchnorm_ntk(
        kernels.empirical_ntk(before, net, x),
        before(net, x),
        epsilon=0.1,
        scale=gamma,
        cross=kernels.empirical_ntk(before, net, x, z),
        at=before(net, z),
    )
    np.testing.assert_allclose(ours, exact, rtol=1e-10, atol=1e-10)


def test_null_vectors(key):
    before, net, x = network(key)
    kernel, f = kernels.empirical_ntk(before, net, x)[:, :, 0, 0], before(net, x)[:, 0]
    h = f - jnp.mean(f)
    exact = kernels.batchnorm_ntk(kernel, f)
    scale = float(jnp.max(jnp.abs(exact)))
    np.testing.assert_allclose(exact @ jnp.ones(7), 0, atol=1e-12 * scale)
    np.testing.assert_allclose(exact @ h, 0, atol=1e-12 * scale)
    assert np.linalg.matrix_rank(np.asarray(exact), tol=1e-10 * scale) == 5
    # with epsilon, B shrinks h by epsilon/s^2 (times 1/s) instead of removing it
    soft = kernels.batchnorm_ntk(kernel, f, epsilon=0.2)
    np.testing.assert_allclose(soft @ jnp.ones(7), 0, atol=1e-12 * scale)
    assert float(jnp.max(jnp.abs(soft @ h))) > 1e-3 * scale
    s2 = jnp.var(f) + 0.2
    np.testing.assert_allclose(
        jacobian_apply(f, h[:, None], 0.2)[:, 0], h * 0.2 / s2**1.5, rtol=1e-12, atol=1e-14
    )
    full = kernels.batchnorm_ntk(kernel, f, scale=1.0)
    assert np.linalg.matrix_rank(np.asarray(full), tol=1e-10 * scale) == 7


def test_kernel_is_symmetric_where_centering_cancels_most_of_it(key):
    """A kernel in single precision with a mean a thousand times its spread: the result is still a kernel."""
    one, two = jax.random.split(key)
    features = jax.random.normal(one, (64, 200), jnp.float32) / np.sqrt(200).astype(np.float32)
    result = kernels.batchnorm_ntk(features @ features.T + 1000, jax.random.normal(two, (64,), jnp.float32))
    np.testing.assert_array_equal(result, result.T)
    assert float(kernels.spectrum(result, key=key, top=1).values[0]) > 0


def test_bias_before_batch_norm_has_no_gradient(key):
    before, net, x = network(key)
    params = {"net": net, "gamma": jnp.ones(1), "beta": jnp.zeros(1)}
    shifted = lambda c: after(lambda p, x: before(p, x) + c)(params, x, 0.1)
    np.testing.assert_allclose(jax.jit(jax.jacfwd(shifted))(1.3), 0, atol=1e-14)


def test_sigma_is_a_standard_deviation(key):
    """The table calls it the variance. Outputs 3 f with kernel 9 K normalise to the same network."""
    before, net, x = network(key)
    kernel, f = kernels.empirical_ntk(before, net, x)[:, :, 0, 0], before(net, x)[:, 0]
    exact = kernels.batchnorm_ntk(kernel, f)
    np.testing.assert_allclose(kernels.batchnorm_ntk(9 * kernel, 3 * f), exact, rtol=1e-10, atol=1e-12)
    read_as_variance = lambda kernel, f: kernels.batchnorm_ntk(kernel, f) / jnp.var(f)
    ratio = read_as_variance(9 * kernel, 3 * f) / read_as_variance(kernel, f)
    np.testing.assert_allclose(ratio, 1 / 9, rtol=1e-8)


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="kernel must be"):
        kernels.batchnorm_ntk(jnp.eye(3), jnp.ones((3, 1)))
    with pytest.raises(ValueError, match="together"):
        kernels.batchnorm_ntk(jnp.eye(3), jnp.ones(3), cross=jnp.eye(3))
