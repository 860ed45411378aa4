"""Exact distances against scipy, POT and closed forms; the axioms of a metric; the stated limits."""

import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import scipy.spatial.distance
import scipy.stats

import meanflow as mf
from meanflow.transport import transport_plan, wasserstein
from meanflow.transport._exact import cylinder_distance, euclidean

module = importlib.import_module("meanflow.transport._exact")


def pot():
    """POT, which takes a second to import."""
    return importlib.import_module("ot")


def weights(rng, size):
    w = rng.random(size)
    w[rng.random(size) < 0.2] = 0.0  # padding
    w[0] += 0.1
    return w / w.sum()


@pytest.mark.parametrize("case", range(20))
def test_line_equals_scipy_and_pot(case):
    rng = np.random.default_rng(case)
    n, m = ((1, 23), (30, 30), (17, 5), (40, 1))[case % 4]
    x, y = rng.normal(size=n), rng.standard_t(3, size=m)
    if case % 3 == 0:
        y = np.round(y)  # ties
    a, b = weights(rng, n), weights(rng, m)
    np.testing.assert_allclose(
        wasserstein(x, y, weights_x=a, weights_y=b),
        scipy.stats.wasserstein_distance(x, y, a, b),
        rtol=1e-12,
        atol=1e-14,
    )
    np.testing.assert_allclose(wasserstein(x, y), scipy.stats.wasserstein_distance(x, y), rtol=1e-12)
    for p in (2, 3.5):
        oracle = pot().emd2(a, b, np.abs(x[:, None] - y[None, :]) ** p) ** (1 / p)
        np.testing.assert_allclose(
            wasserstein(x[:, None], y[:, None], p, weights_x=a, weights_y=b), oracle, rtol=1e-9
        )


@pytest.mark.parametrize("case", range(12))
@pytest.mark.parametrize("p", [1, 2])
def test_clouds_equal_pot(case, p):
    rng = np.random.default_rng(100 + case)
    n, m, d = ((30, 30, 8), (20, 35, 3), (1, 9, 2))[case % 3]
    x, y = rng.normal(size=(n, d)), rng.normal(size=(m, d)) * 1.5 + 0.2
    costs = pot().dist(x, y, metric="euclidean") ** p
    uniform = pot().emd2(np.full(n, 1 / n), np.full(m, 1 / m), costs) ** (1 / p)
    np.testing.assert_allclose(wasserstein(x, y, p), uniform, rtol=1e-9)
    a, b = weights(rng, n), weights(rng, m)
    weighted = pot().emd2(a, b, costs) ** (1 / p)
    np.testing.assert_allclose(wasserstein(x, y, p, weights_x=a, weights_y=3 * b), weighted, rtol=1e-9)


@pytest.mark.parametrize("p", [1, 2, 3.5])
def test_couplings_equal_a_linear_program(p):
    """The definition itself, solved by scipy: least cost under both marginals."""
    rng = np.random.default_rng(7)
    x, y = rng.normal(size=(9, 3)), rng.normal(size=(7, 3)) + 0.5
    a, b = weights(rng, 9), weights(rng, 7)
    costs = np.linalg.norm(x[:, None] - y[None], axis=-1) ** p
    marginals = np.concatenate([np.kron(np.eye(9), np.ones(7)), np.kron(np.ones(9), np.eye(7))])
    oracle = scipy.optimize.linprog(costs.ravel(), A_eq=marginals, b_eq=np.concatenate([a, b]))
    found = float(wasserstein(x, y, p, weights_x=a, weights_y=b))
    assert found**p == pytest.approx(oracle.fun, rel=1e-9)
    plan = transport_plan(x, y, p, weights_x=a, weights_y=b)
    np.testing.assert_allclose(marginals @ plan.ravel(), np.concatenate([a, b]), atol=1e-14)
    assert float(np.sum(plan * costs)) == pytest.approx(oracle.fun, rel=1e-9)
    with pytest.raises(ValueError, match=r"cost\(x, y\) must be >= 0"):
        wasserstein(x, y, cost=lambda x, y: np.full((9, 7), -1.0))


@pytest.mark.parametrize("sizes", [(40, 40), (17, 30)])
def test_the_line_on_the_host_equals_the_compiled_program(sizes):
    rng = np.random.default_rng(8)
    x, y = (jnp.asarray(rng.normal(size=n)) for n in sizes)
    a, b = (jnp.asarray(weights(rng, n)) for n in sizes)
    for p in (1, 2.5):
        compiled = jax.jit(lambda *u, p=p: wasserstein(u[0], u[1], p, weights_x=u[2], weights_y=u[3]))
        np.testing.assert_allclose(
            wasserstein(x, y, p, weights_x=a, weights_y=b), compiled(x, y, a, b), rtol=1e-12
        )
        np.testing.assert_allclose(
            wasserstein(x, y, p), jax.jit(lambda x, y, p=p: wasserstein(x, y, p))(x, y), rtol=1e-12
        )


def test_padding_does_not_matter():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(9, 3)), rng.normal(size=(7, 3))
    mask_x, mask_y = np.r_[np.ones(7), 0, 0], np.ones(7)
    np.testing.assert_allclose(
        wasserstein(x, y, weights_x=mask_x, weights_y=mask_y), wasserstein(x[:7], y), rtol=1e-12
    )


@pytest.mark.parametrize("case", range(30))
def test_metric_axioms(case):
    rng = np.random.default_rng(200 + case)
    d, p = (1, 4)[case % 2], (1, 2, 3)[case % 3]
    x, y, z = (rng.normal(size=(12, d)) * rng.uniform(0.5, 2) for _ in range(3))
    shuffled = x[rng.permutation(12)]
    assert float(wasserstein(x, shuffled, p)) == pytest.approx(0.0, abs=1e-12)
    xy, yx = float(wasserstein(x, y, p)), float(wasserstein(y, x, p))
    assert xy == pytest.approx(yx, rel=1e-12)
    assert xy <= float(wasserstein(x, z, p)) + float(wasserstein(z, y, p)) + 1e-12
    shift = rng.normal(size=d)
    assert float(wasserstein(x, x + shift, p)) == pytest.approx(np.linalg.norm(shift), rel=1e-9)
    assert float(wasserstein(3 * x, 3 * y, p)) == pytest.approx(3 * xy, rel=1e-9)


def test_line_gradients_equal_finite_differences():
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=6), rng.normal(size=9)
    a, b = rng.random(6) + 0.1, rng.random(9) + 0.1
    for p in (1, 2):
        f = jax.jit(
            lambda x, a, p=p: wasserstein(x, jnp.asarray(y), p, weights_x=a, weights_y=jnp.asarray(b))
        )
        grads = jax.grad(f, (0, 1))(jnp.asarray(x), jnp.asarray(a))
        for which in range(2):
            for i in range(6):
                h = np.zeros(6)
                h[i] = 1e-6
                args = [(x + s * h, a) if which == 0 else (x, a + s * h) for s in (1, -1)]
                slope = (f(*args[0]) - f(*args[1])) / 2e-6
                np.testing.assert_allclose(grads[which][i], slope, rtol=1e-6, atol=1e-8)


def test_gradient_at_coincidence_is_finite():
    x = jnp.arange(4.0)
    for p in (1, 2):
        assert np.all(np.isfinite(jax.grad(lambda x, p=p: wasserstein(x, jnp.arange(4.0), p))(x)))
    assert np.all(np.isfinite(jax.grad(lambda u: jnp.sum(euclidean(u, u)))(jnp.ones((3, 2)))))


def test_line_under_vmap_and_in_float32():
    rng = np.random.default_rng(4)
    x, y = rng.normal(size=(5, 8)), rng.normal(size=(5, 8))
    batched = jax.vmap(lambda u, v: wasserstein(u, v, 2))(jnp.asarray(x), jnp.asarray(y))
    np.testing.assert_allclose(batched, [wasserstein(u, v, 2) for u, v in zip(x, y, strict=True)], rtol=1e-12)
    small = wasserstein(jnp.asarray(x[0], "float32"), jnp.asarray(y[0], "float32"))
    assert small.dtype == jnp.float32
    np.testing.assert_allclose(small, wasserstein(x[0], y[0]), rtol=1e-5)
    cloud = wasserstein(jnp.asarray(x, "float32"), jnp.asarray(y, "float32"))
    assert cloud.dtype == jnp.float32
    np.testing.assert_allclose(cloud, wasserstein(x, y), rtol=1e-5)


def test_envelope_gradient_of_the_plan():
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(6, 3)), rng.normal(size=(8, 3))
    plan = transport_plan(x, y, 2)
    np.testing.assert_allclose(plan.sum(1), 1 / 6, atol=1e-12)
    np.testing.assert_allclose(plan.sum(0), 1 / 8, atol=1e-12)
    grad = jax.grad(lambda u: jnp.sum(plan * euclidean(u, jnp.asarray(y)) ** 2))(jnp.asarray(x))
    h = np.zeros_like(x)
    h[2, 1] = 1e-6
    slope = (wasserstein(x + h, y, 2) ** 2 - wasserstein(x - h, y, 2) ** 2) / 2e-6
    np.testing.assert_allclose(grad[2, 1], slope, rtol=1e-6)


def test_cylinder():
    rng = np.random.default_rng(6)
    unit = lambda n: (b := rng.normal(size=(n, 4))) / np.linalg.norm(b, axis=1, keepdims=True)
    x, y = (rng.normal(size=10), unit(10)), (rng.normal(size=7), unit(7))
    distances = cylinder_distance(x, y)
    arccos = np.arccos(np.clip(x[1] @ y[1].T, -1, 1))
    np.testing.assert_allclose(distances, np.hypot(x[0][:, None] - y[0][None], arccos), rtol=1e-7)
    oracle = pot().emd2(np.full(10, 0.1), np.full(7, 1 / 7), np.asarray(distances) ** 2) ** 0.5
    np.testing.assert_allclose(wasserstein(x, y, 2, cost="cylinder"), oracle, rtol=1e-9)
    assert float(wasserstein(x, y, 2, cost=cylinder_distance)) == float(wasserstein(x, y, 2, cost="cylinder"))
    # where arccos fails: an angle of 1e-9, and its distance from the antipode
    b = np.array([[1.0, 0.0]])
    c = np.array([[np.cos(1e-9), np.sin(1e-9)]])
    np.testing.assert_allclose(cylinder_distance((np.zeros(1), b), (np.zeros(1), c)), [[1e-9]], rtol=1e-6)
    far = cylinder_distance((np.zeros(1), b), (np.zeros(1), -c))
    np.testing.assert_allclose(np.pi - far, [[1e-9]], rtol=1e-6)
    with pytest.raises(ValueError, match="unit rows"):
        cylinder_distance((np.zeros(1), 2 * b), (np.zeros(1), b))


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((np.zeros((2, 3)), np.zeros((2, 4))), {}, "same shape"),
        ((np.zeros(2), np.zeros(2), 0.5), {}, "p must be"),
        ((np.zeros(2), np.zeros(2)), {"weights_x": np.array([-1.0, 2.0])}, "weights_x must be >="),
        ((np.zeros(2), np.zeros(2)), {"weights_y": np.zeros(2)}, "positive sum"),
        ((np.zeros(2), np.zeros(2)), {"weights_y": np.ones(3)}, "weights_y must have shape"),
        ((np.array([np.nan]), np.zeros(1)), {}, "x must be finite"),
        ((np.zeros((5000, 2)), np.zeros((5000, 2))), {}, "at most 4096 points, got 5000"),
        ((np.zeros((4097, 2)), np.zeros((4100, 2))), {}, "at most 16777216 pairs"),
    ],
)
@pytest.mark.bad_input
def test_bad_input(args, kwargs, message):
    with pytest.raises(ValueError, match=message):
        wasserstein(*args, **kwargs)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_points_that_are_not_finite_are_refused_wherever_they_stand(bad):
    """No place and no weight hides one, nor an equal one on the other side, where infinite gaps cancel."""
    for place in (0, 2, 4):
        x = np.arange(5.0)
        x[place] = bad
        without = np.where(np.arange(5) == place, 0.0, 1.0)
        for y in (np.arange(5.0), np.arange(3.0), x.copy()):
            for p, mass in itertools.product((1, 2), (None, without)):
                for distance in (wasserstein, transport_plan):
                    with pytest.raises(ValueError, match="x must be finite"):
                        distance(x, y, p, weights_x=mass)


def test_clouds_refuse_tracing():
    with pytest.raises(ValueError, match="runs on the host"):
        jax.jit(wasserstein)(jnp.zeros((3, 2)), jnp.zeros((3, 2)))


def test_integers_are_points_too():
    assert float(wasserstein([0, 1], [1, 4], 2)) == pytest.approx(np.sqrt(5))
    assert float(wasserstein([[0, 0]], [[3, 4]])) == 5.0


def matched(costs):
    """The cost of the best assignment."""
    return costs[scipy.optimize.linear_sum_assignment(costs)].mean()


def test_clouds_are_compared_in_the_metric_of_their_neurons():
    rng = np.random.default_rng(0)
    flat = [mf.Neurons(rng.normal(size=9), rng.normal(size=(9, 3))) for _ in range(2)]
    coordinates = [np.concatenate([w.a[:, None], w.b], axis=1) for w in flat]
    plain = wasserstein(*(mf.Cloud(w) for w in flat), p=2)
    assert float(plain) == pytest.approx(matched(scipy.spatial.distance.cdist(*coordinates) ** 2) ** 0.5)
    # under batch norm: amplitudes and angles, for raw neurons and on the manifold alike
    covariance = np.cov(rng.normal(size=(3, 50)))
    raw = [mf.Cloud(w) for w in flat]
    angle = np.stack([mf.geometry.distance(flat[0].b, b[None, :]) for b in flat[1].b], axis=1)
    expected = matched((flat[0].a[:, None] - flat[1].a[None, :]) ** 2 + angle**2) ** 0.5
    on_manifold = [mf.geometry.project(cloud, covariance) for cloud in raw]
    for pair in (raw, on_manifold):
        assert float(wasserstein(*pair, p=2, cost="cylinder")) == pytest.approx(expected)
    # univariate neurons live on the cylinder: theta goes the short way round
    polar = [mf.Polar(rng.normal(size=9), rng.uniform(-np.pi, np.pi, 9)) for _ in range(2)]
    turn = np.abs(polar[0].theta[:, None] - polar[1].theta[None, :])
    squares = (polar[0].r[:, None] - polar[1].r[None, :]) ** 2 + np.minimum(turn, 2 * np.pi - turn) ** 2
    first, second = (mf.Cloud(w) for w in polar)
    assert float(wasserstein(first, second, p=2)) == pytest.approx(matched(squares) ** 0.5)
    assert float(wasserstein(first.pad(12), second, p=2)) == pytest.approx(matched(squares) ** 0.5)
    assert transport_plan(first, second).shape == (9, 9)


def test_clouds_of_several_outputs_on_the_cylinder():
    rng = np.random.default_rng(1)
    w, v = (mf.Neurons(rng.normal(size=(5, 2)), rng.normal(size=(5, 3))) for _ in range(2))
    apart = np.sum((w.a[:, None] - v.a[None, :]) ** 2, axis=-1)
    angle = np.stack([mf.geometry.distance(w.b, b[None, :]) for b in v.b], axis=1)
    found = wasserstein(mf.Cloud(w), mf.Cloud(v), p=2, cost="cylinder")
    assert float(found) == pytest.approx(matched(apart + angle**2) ** 0.5)


@pytest.mark.bad_input
def test_clouds_that_cannot_be_compared():
    polar, plane = mf.Cloud(mf.Polar([1.0], [0.0])), mf.Cloud(mf.Neurons([1.0], [[1.0, 0.0]]))
    with pytest.raises(ValueError, match="clouds of neurons of one kind, got Polar and Neurons"):
        wasserstein(polar, plane)
    with pytest.raises(ValueError, match="clouds of neurons of one kind, got Polar and no cloud"):
        wasserstein(polar, [1.0])
    with pytest.raises(ValueError, match="weights_x and weights_y must be None for clouds"):
        wasserstein(polar, polar, weights_x=[1.0])
    with pytest.raises(ValueError, match="x and y must have points of the same shape"):
        wasserstein(plane, mf.Cloud(mf.Neurons([[1.0, 2.0]], [[1.0, 0.0]])), cost="cylinder")
    with pytest.raises(ValueError, match="x and y must have points of the same shape"):
        wasserstein(plane, mf.Cloud(mf.Neurons([1.0], [[1.0, 0.0, 0.0]])), cost="cylinder")
    with pytest.raises(ValueError, match="cost='cylinder' needs Polar or two-layer neurons"):
        wasserstein(*[mf.Cloud(mf.Affine([1.0], [1.0], [1.0]))] * 2, cost="cylinder")
