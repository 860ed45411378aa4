"""Clouds, data sets, laws and quadrature against moments computed by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meanflow as mf
from meanflow.measures import laws, quadrature, sample


def neurons(width, dim=2):
    return mf.Neurons(jnp.arange(1.0, width + 1), jnp.ones((width, dim)))


def test_weights_labels_and_width():
    cloud = mf.Cloud(neurons(4), labels=2.0)
    assert float(cloud.width) == 4
    np.testing.assert_array_equal(cloud.weights, np.full(4, 0.25))
    np.testing.assert_array_equal(cloud.labels, np.full(4, 2.0))
    padded = cloud.pad(6)
    assert padded.size == 6
    assert float(padded.width) == 4
    np.testing.assert_array_equal(padded.weights, [0.25] * 4 + [0.0] * 2)
    both = mf.Cloud.stack([cloud, mf.Cloud(neurons(6), labels=1.0)])
    np.testing.assert_array_equal(both.width, [4, 6])
    assert both.particles.b.shape == (2, 6, 2)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dtype_is_kept(dtype):
    cloud = mf.Cloud(jax.tree.map(lambda u: u.astype(dtype), neurons(3)))
    assert cloud.weights.dtype == cloud.width.dtype == jnp.dtype(dtype)
    data = mf.Dataset(np.ones((3, 2), dtype), np.ones(3, dtype))
    assert data.weights.dtype == jnp.dtype(dtype)


def test_moments_are_population_moments_under_weights():
    rng = np.random.default_rng(0)
    x, q = rng.normal(size=(20, 3)) + 5, rng.uniform(size=20)
    mean, sigma = mf.Dataset(x, x[:, 0], q).moments()
    np.testing.assert_allclose(mean, np.average(x, axis=0, weights=q), rtol=1e-14)
    np.testing.assert_allclose(sigma, np.cov(x.T, aweights=q, ddof=0), rtol=1e-12)


@pytest.mark.parametrize("n", [200, 100_000])
@pytest.mark.parametrize(("mean", "deviation"), [(0.0, 1.0), (1000.0, 1.0), (101325.3, 0.3)])
def test_moments_of_single_precision_are_those_of_the_same_numbers_in_double(n, mean, deviation):
    """A large mean costs no digits, and a column that is constant has no variance at all."""
    noise = np.random.default_rng(1).normal(size=(n, 2))
    x = np.concatenate([mean + deviation * noise, np.full((n, 1), 101325.3)], axis=1).astype(np.float32)
    found, sigma = mf.Dataset(x, x[:, 0]).moments()
    wide = x.astype(np.float64)
    np.testing.assert_allclose(found, wide.mean(axis=0), rtol=2e-7, atol=1e-6)
    np.testing.assert_allclose(np.diag(sigma), wide.var(axis=0), rtol=1e-3, atol=0)
    tenth = mf.Dataset(np.full((1000, 2), 0.1), np.zeros(1000)).moments()[1]
    np.testing.assert_array_equal(tenth, np.zeros((2, 2)))


def test_minibatch_keeps_the_total_weight():
    data = mf.Dataset(np.arange(10.0), np.arange(10.0), "sum")
    batch = data.take(jnp.array([1, 5, 7]))
    assert float(batch.weights.sum()) == pytest.approx(10.0)


# each law with its mean of g(value) in closed form
LAWS = {
    "uniform": (laws.uniform(-1, 3), lambda v: v**2, 7 / 3),
    "normal": (laws.normal(2.0), lambda v: v**2, 4.0),
    "normal vector": (laws.normal(1.0, dim=3), lambda v: jnp.sum(v**2, -1), 3.0),
    "signs": (laws.signs(2.0), lambda v: v**2 + v, 4.0),
    "constant": (laws.constant(1.5), lambda v: v, 1.5),
    "circle": (laws.sphere(2), lambda v: v[:, 0] ** 4, 3 / 8),
    "sphere": (laws.sphere(3), lambda v: v[:, 0] ** 4, 1 / 5),
    "mixed scales": (laws.mixed_scales(2, 0.1, 10.0), lambda v: jnp.log(jnp.sum(v**2, -1)), 0.0),
}


@pytest.mark.parametrize("name", LAWS)
def test_laws_have_their_moments_random_and_quasi_random(name, key):
    law, function, exact = LAWS[name]

    def coordinate(cloud):
        return float(cloud.weights @ function(cloud.particles.b))

    spec = {"a": laws.constant(), "b": law}
    count = 4096
    drawn = sample(key, count, mf.Neurons, spec)
    spread = float(jnp.std(function(drawn.particles.b)))
    assert abs(coordinate(drawn) - exact) < 5 * spread / np.sqrt(count) + 1e-12
    even = sample(None, count, mf.Neurons, spec, quasi=True)
    assert abs(coordinate(even) - exact) < 0.4 * spread / np.sqrt(count) + 1e-12


def test_quadrature_is_exact_where_it_should_be():
    spec = {"a": laws.uniform(-2, 2), "b": laws.sphere(2)}
    cloud = quadrature((5, 16), mf.Neurons, spec, rule=("gauss", "midpoint"))
    a, b = cloud.particles
    assert np.isinf(float(cloud.width))
    np.testing.assert_allclose(cloud.weights @ (a**8 * b[:, 0] ** 6), (2.0**8 / 9) * (5 / 16), rtol=1e-13)


def test_samples_are_nested_only_when_quasi_random():
    spec = {"r": laws.uniform(), "theta": laws.angle()}
    short, long = (sample(None, m, mf.Polar, spec, quasi=True) for m in (8, 20))
    np.testing.assert_array_equal(short.particles.r, long.particles.r[:8])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: mf.Cloud(neurons(3), weights=[0.5, 0.5, 0.5]), "weights must sum to 1, got a sum of 1.5"),
        (lambda: mf.Cloud(neurons(2), weights=[1.5, -0.5]), "weights must be >= 0"),
        (lambda: mf.Cloud(neurons(3), weights=[0.5, 0.5]), r"weights must have shape \(3,\)"),
        (lambda: mf.Cloud(mf.Neurons(jnp.ones(2), jnp.ones((3, 2)))), "share one leading axis"),
        (lambda: mf.Cloud(mf.Neurons(jnp.ones(0), jnp.ones((0, 2)))), "at least 1 neuron"),
        (
            lambda: mf.Cloud(mf.Neurons(jnp.array([1.0, jnp.nan]), jnp.ones((2, 2)))),
            "particles.a must be finite",
        ),
        (lambda: mf.Cloud(neurons(3), labels=[1.0, 2.0]), "labels must have shape"),
        (lambda: mf.Cloud(neurons(3)).pad(2), "size must be an integer >= 3"),
        (lambda: mf.Dataset([[1.0, np.nan]], [1.0]), "x must be finite, got 1 NaN"),
        (lambda: mf.Dataset([[1.0, 2.0]], [np.inf]), "y must be finite"),
        (
            lambda: mf.Dataset(np.ones((3, 2)), np.ones(2)),
            r"y must have shape \(3,\) or \(3, any length\), got shape \(2,\)",
        ),
        (lambda: mf.Dataset(np.ones((3, 2)), np.ones(3), "mean"), "weights must be one of"),
        (lambda: mf.Dataset(np.ones((3, 2)), np.ones(3), [-1.0, 1.0, 1.0]), "weights must be >= 0"),
        (lambda: mf.Dataset(np.ones((3, 2, 2)), np.ones(3)), "x must have shape"),
        (
            lambda: sample(jax.random.key(0), 0, mf.Polar, {"r": laws.uniform()}),
            "width must be an integer >= 1",
        ),
        (
            lambda: sample(jax.random.key(0), 3, mf.Polar, {"r": laws.uniform()}),
            "laws must name the coordinates",
        ),
        (
            lambda: quadrature((3,), mf.Polar, {"r": laws.uniform(), "theta": laws.angle()}),
            "counts must list 2",
        ),
        (lambda: laws.sphere(0), "dim must be an integer >= 1"),
    ],
)
@pytest.mark.bad_input
def test_bad_input_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_laws_may_be_numbers_and_functions():
    key = jax.random.key(0)
    flow = mf.vanilla("tanh")
    cloud = flow.init(key, 2000, dim=3, a=0.5, b=lambda u: -jnp.log(u))
    assert set(cloud.particles.a.tolist()) == {0.5}
    np.testing.assert_allclose(jnp.mean(cloud.particles.b, axis=0), 1.0, atol=0.1)  # exponential laws
    assert not np.any(flow.init(key, 4, dim=3, b=0.0).particles.b)
    drawn = sample(key, 2000, mf.Polar, {"r": 2, "theta": lambda u: u**2})
    np.testing.assert_allclose(jnp.mean(drawn.particles.theta), 1 / 3, atol=0.03)
    with pytest.raises(ValueError, match="values of b must have shape"):
        flow.init(key, 4, dim=3, b=lambda u: u[:, 0])


@pytest.mark.bad_input
def test_laws_are_no_names():
    with pytest.raises(ValueError, match="a must be a number"):
        mf.vanilla("tanh").init(jax.random.key(0), 4, dim=3, a="normal")
