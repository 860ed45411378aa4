"""The pure functions: both interpolations, zero samples, moments, precision."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meanflow.layers._standardize import Standardization, standardize
from meanflow.layers.functional import recenter, rescale, unitize


def by_hand(x, alpha, kind, eps, n=1.0):
    out = np.zeros_like(x)
    for k in range(x.shape[0]):
        r = np.sqrt(sum(v * v for v in x[k]) / n + eps)
        for i in range(x.shape[1]):
            a = alpha[i]
            out[k, i] = x[k, i] * (a / r + 1 - a) if kind == "linear" else x[k, i] / (a * r + 1 - a)
    return out


@pytest.mark.parametrize("kind", ["linear", "harmonic"])
@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.3])
def test_equals_loops(kind, eps):
    rng = np.random.default_rng(0)
    x, alpha = rng.normal(size=(7, 4)) * 3, rng.random(4)
    np.testing.assert_allclose(
        unitize(jnp.asarray(x), alpha, interpolation=kind, epsilon=eps, n=2.0),
        by_hand(x, alpha, kind, eps, 2.0),
        rtol=1e-13,
    )


@pytest.mark.parametrize("case", range(10))
def test_the_two_forms(case):
    rng = np.random.default_rng(case)
    x = rng.normal(size=(50, 5)) * rng.uniform(0.1, 5)
    alpha = rng.random(5)
    linear, harmonic = (unitize(jnp.asarray(x), alpha, interpolation=k) for k in ("linear", "harmonic"))
    assert np.all(np.abs(linear) >= np.abs(harmonic) * (1 - 1e-14))  # arithmetic against harmonic mean
    unit = jnp.asarray(x / np.linalg.norm(x, axis=1, keepdims=True))
    np.testing.assert_allclose(
        unitize(unit, alpha), unitize(unit, alpha, interpolation="harmonic"), rtol=1e-14
    )
    for end in (0.0, 1.0):
        ends = [unitize(jnp.asarray(x), end, interpolation=k) for k in ("linear", "harmonic")]
        np.testing.assert_allclose(ends[0], ends[1], rtol=1e-14)
    eps = 1e-3
    r = np.linalg.norm(x, axis=1)
    norms = np.linalg.norm(unitize(jnp.asarray(x), 1.0, epsilon=eps), axis=1)
    np.testing.assert_allclose(norms, r / np.sqrt(r**2 + eps), rtol=1e-13)
    assert np.all(np.linalg.norm(harmonic, axis=1) <= 1 / alpha.min())


@pytest.mark.parametrize("kind", ["linear", "harmonic"])
def test_zero_samples_give_no_nan(kind):
    x = jnp.zeros((3, 4)).at[1].set(1.0)

    @jax.jit
    def call(alpha, eps):
        def f(x, a):
            out = unitize(x, a, interpolation=kind, epsilon=eps)
            return jnp.sum(jnp.sin(out + 1)), out

        return jax.value_and_grad(f, (0, 1), has_aux=True)(x, jnp.full(4, alpha))

    for alpha, eps in itertools.product((0.0, 0.4, 1.0), (0.0, 1e-5)):
        (value, out), grads = call(alpha, eps)
        assert np.isfinite(value)
        assert all(np.all(np.isfinite(g)) for g in grads)
        np.testing.assert_array_equal(out[0], 0)


@pytest.mark.parametrize("kind", ["linear", "harmonic"])
def test_gradient_equals_finite_differences(kind):
    rng = np.random.default_rng(1)
    x, alpha, w = rng.normal(size=(3, 4)), rng.random(4), rng.normal(size=(3, 4))
    f = jax.jit(lambda x, a: jnp.sum(w * unitize(x, a, interpolation=kind, epsilon=1e-5)))
    gx, ga = jax.jit(jax.grad(f, (0, 1)))(jnp.asarray(x), jnp.asarray(alpha))
    for index in np.ndindex(3, 4):
        h = np.zeros((3, 4))
        h[index] = 1e-6
        np.testing.assert_allclose(
            gx[index], (f(x + h, alpha) - f(x - h, alpha)) / 2e-6, rtol=1e-7, atol=1e-9
        )
    for i in range(4):
        h = np.eye(4)[i] * 1e-6
        np.testing.assert_allclose(ga[i], (f(x, alpha + h) - f(x, alpha - h)) / 2e-6, rtol=1e-7, atol=1e-9)


def test_slope_at_zero_of_the_practical_form():
    slope = jax.grad(lambda t: unitize(jnp.array([[0.0, 1.0]]) * t, 1.0, epsilon=1e-5)[0, 1])(0.0)
    np.testing.assert_allclose(slope, 1e-5**-0.5, rtol=1e-12)  # about 316


def test_batch_of_two_is_plus_minus_one():
    x = jnp.asarray(np.random.default_rng(2).normal(size=(2, 6)))
    standard = rescale(recenter(x))
    np.testing.assert_allclose(np.abs(standard), 1.0, rtol=1e-12)
    alpha = np.linspace(0, 1, 6)
    # all norms are sqrt(d): unitization is a constant factor a feature, which gamma absorbs
    factor = unitize(standard, alpha) / standard
    np.testing.assert_allclose(factor, np.tile(alpha / np.sqrt(6) + 1 - alpha, (2, 1)), rtol=1e-12)


def batch_moments(x, **options):
    return standardize(x, None, None, None, Standardization((0,), 0.0, **options))[1:]


def test_moments_are_exact_in_float32():
    rng = np.random.default_rng(3)
    x = (1e4 + 0.1 * rng.normal(size=(4096, 3))).astype("float32")
    mean, var = batch_moments(jnp.asarray(x))
    wide = x.astype("float64")
    np.testing.assert_allclose(var[0], wide.var(0), rtol=1e-4)
    np.testing.assert_allclose(mean[0], wide.mean(0), rtol=1e-7)
    np.testing.assert_allclose(np.std(rescale(recenter(jnp.asarray(x))), axis=0), 1.0, atol=1e-3)


def test_moments_synchronise_over_a_named_axis():
    x = jnp.asarray(np.random.default_rng(4).normal(size=(4, 5, 3)))
    mean, var = jax.vmap(lambda u: batch_moments(u, axis_name="shards"), axis_name="shards")(x)
    whole = batch_moments(x.reshape(20, 3))
    for k in range(4):
        np.testing.assert_allclose(mean[k], whole[0], rtol=1e-12)
        np.testing.assert_allclose(var[k], whole[1], rtol=1e-12)


@pytest.mark.bad_input
def test_bad_input():
    with pytest.raises(ValueError, match="interpolation must be one of"):
        unitize(jnp.ones((2, 2)), 1.0, interpolation="cubic")
    with pytest.raises(ValueError, match="alpha must be a number"):
        unitize(jnp.ones((2, 2, 2)), jnp.ones((2, 2)))


@pytest.mark.bad_input
def test_poles_and_squares_out_of_range_are_seen():
    with np.errstate(divide="ignore"):
        pole = unitize([[3.0, 4.0]], -0.25, interpolation="harmonic")  # alpha r + 1 - alpha = 0
    assert np.all(np.isinf(pole))
    huge = jnp.array([[3e30, 4e30], [1e30, 0.0]], jnp.float32)
    with pytest.raises(ValueError, match="norms of the samples of x must be finite"):
        unitize(huge)
    with pytest.raises(ValueError, match="its squares must be numbers"):
        rescale(huge)
