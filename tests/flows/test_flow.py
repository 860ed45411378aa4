"""The flow equation against autodiff of the loss, finite differences, explicit Jacobians and its symmetries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ACTIVATIONS, MODELS, largest_gap, problem

import meanflow as mf
from meanflow import geometry
from meanflow.measures import laws


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a if isinstance(a, str) else "callable")
def test_velocity_is_minus_m_times_the_gradient(model, activation):
    flow, cloud, data = problem(model, activation=activation)
    gradient = jax.grad(lambda w: mf.energy(flow, cloud.at(w), data))(cloud.particles)
    expected = jax.tree.map(lambda g: -cloud.width * g, flow.space.cometric(cloud, gradient))
    velocity = mf.velocity(flow, cloud, data)
    assert largest_gap(velocity, expected) < 1e-13 * (
        1 + largest_gap(expected, jax.tree.map(jnp.zeros_like, expected))
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "loss",
    ["squared", "logistic", "huber", lambda f, y: jnp.cosh(f - y)],
    ids=lambda u: u if isinstance(u, str) else "callable",
)
def test_dissipation_is_minus_the_rate_of_energy(model, loss):
    flow, cloud, data = problem(model, loss=loss)
    v = mf.velocity(flow, cloud, data)
    rate = jax.jvp(lambda w: mf.energy(flow, cloud.at(w), data), (cloud.particles,), (v,))[1]
    dissipation = mf.dissipation(flow, cloud, data)
    np.testing.assert_allclose(dissipation, -rate, rtol=1e-10)
    # and the metric norm of the velocity: metric and inverse metric belong together
    np.testing.assert_allclose(cloud.weights @ flow.space.inner(cloud, v, v), dissipation, rtol=1e-10)


@pytest.mark.parametrize("model", MODELS)
def test_gradient_by_finite_differences(model):
    """No autodiff in the reference: complex-free central differences of a plain numpy network."""
    flow, cloud, data = problem(model, width=3, points=12)
    a, b = (np.asarray(u) for u in cloud.particles)
    x, y, q = (np.asarray(u) for u in (data.x, data.y, data.weights))
    mean = np.average(x, axis=0, weights=q)
    sigma = np.cov(x.T, aweights=q, ddof=0)

    def loss(a, b):
        if model == "vanilla":
            z = x @ b.T
        elif model == "batchnorm":
            z = (x - mean) @ (b / np.sqrt(np.sum(b @ sigma * b, axis=1))[:, None]).T
        else:
            z = (x - mean) @ b.T
        return 0.5 * q @ ((np.tanh(z) * a).mean(axis=1) - y) ** 2

    np.testing.assert_allclose(mf.energy(flow, cloud, data), loss(a, b), rtol=1e-13)
    h = 1e-6
    da, db = np.zeros_like(a), np.zeros_like(b)
    for i in range(3):
        e = np.eye(3)[i]
        da[i] = (loss(a + h * e, b) - loss(a - h * e, b)) / (2 * h)
        for k in range(3):
            step = h * np.outer(e, np.eye(3)[k])
            db[i, k] = (loss(a, b + step) - loss(a, b - step)) / (2 * h)
    expected = flow.space.cometric(cloud, mf.Neurons(jnp.asarray(-3 * da), jnp.asarray(-3 * db)))
    assert largest_gap(mf.velocity(flow, cloud, data), expected) < 2e-8


@pytest.mark.parametrize("model", MODELS)
def test_tangent_kernel_is_the_jacobian_gram(model):
    flow, cloud, data = problem(model)
    z = data.x[:5] + 0.1
    kernel = mf.tangent_kernel(flow, cloud, data.x, z, chunk=2)

    def jacobian(x):
        return jax.jacrev(lambda w: flow.feature.predict(cloud.at(w), x))(cloud.particles)

    at_z = jacobian(z)
    expected = np.zeros((30, 5))
    for j in range(5):
        covector = jax.tree.map(lambda u, j=j: u[j] * cloud.width, at_z)
        tangent = flow.space.cometric(cloud, covector)
        pairs = jax.tree.map(lambda g, v: g.reshape(30, -1) @ v.ravel(), jacobian(data.x), tangent)
        expected[:, j] = sum(jax.tree.leaves(pairs))
    np.testing.assert_allclose(kernel, expected, atol=1e-12 * np.abs(expected).max())
    square = np.asarray(mf.tangent_kernel(flow, cloud, data.x))
    np.testing.assert_allclose(square, square.T, atol=1e-12 * square.max())
    assert np.linalg.eigvalsh(square)[0] > -1e-12 * square.max()


@pytest.mark.parametrize("model", MODELS)
def test_predictions_obey_the_kernel_equation(model):
    """f' = -K (q l'), the equation behind KernelStep and kernel regression."""
    flow, cloud, data = problem(model)
    v = mf.velocity(flow, cloud, data)
    rate = jax.jvp(lambda w: mf.predict(flow, cloud.at(w), data.x), (cloud.particles,), (v,))[1]
    f = mf.predict(flow, cloud, data.x)
    expected = -mf.tangent_kernel(flow, cloud, data.x) @ (data.weights * (f - data.y))
    np.testing.assert_allclose(rate, expected, rtol=1e-10)


def test_first_variation_is_the_derivative_of_the_energy_in_the_measure():
    """dE(mu + s (delta_w - mu))/ds = V(w) - int V dmu, here by adding a particle of small weight."""
    flow, cloud, data = problem("batchnorm_manifold")
    probe = flow.init(jax.random.key(9), 2, dim=3)
    potential = mf.first_variation(flow, cloud, data, probe)
    inside = cloud.weights @ mf.first_variation(flow, cloud, data, cloud.particles)

    def mixed(s):
        w = jax.tree.map(lambda u, v: jnp.concatenate([u, v[:1]]), cloud.particles, probe.particles)
        weights = jnp.concatenate([(1 - s) * cloud.weights, s[None]])
        labels = jnp.concatenate([cloud.labels, probe.labels[:1]])
        return mf.energy(flow, mf.Cloud(w, weights, labels), data)

    slope = jax.jacfwd(mixed)(jnp.asarray(0.0))
    np.testing.assert_allclose(slope, potential[0] - inside, rtol=1e-10)


@pytest.mark.parametrize("model", MODELS)
def test_penalty_enters_energy_and_velocity(model):
    flow, cloud, data = problem(model)
    extra = getattr(mf, model)("tanh", penalty=(lambda w: w.a**2, 0.3)).bind(data)
    np.testing.assert_allclose(
        mf.energy(extra, cloud, data) - mf.energy(flow, cloud, data),
        0.3 * np.mean(cloud.particles.a**2),
        rtol=1e-10,
    )
    gap = mf.velocity(extra, cloud, data).a - mf.velocity(flow, cloud, data).a
    np.testing.assert_allclose(gap, -0.6 * cloud.particles.a, rtol=1e-10)
    probe = mf.first_variation(extra, cloud, data, cloud.particles)
    plain = mf.first_variation(flow, cloud, data, cloud.particles)
    np.testing.assert_allclose(probe - plain, 0.3 * cloud.particles.a**2, rtol=1e-10)


# ---- symmetries --------------------------------------------------------------------------------------------------


def test_scaling_and_shifting_the_inputs_changes_nothing():
    flow, cloud, data = problem("batchnorm")
    for moved in (7.0 * data.x, data.x + jnp.array([[3.0, -2.0, 0.5]])):
        other = mf.Dataset(moved, data.y, data.weights)
        assert (
            largest_gap(mf.velocity(mf.batchnorm("tanh"), cloud, other), mf.velocity(flow, cloud, data))
            < 1e-13
        )


def test_rotation_equivariance_and_its_limits():
    flow, cloud, data = problem("batchnorm")
    rng = np.random.default_rng(5)
    turn = jnp.asarray(np.linalg.qr(rng.normal(size=(3, 3)))[0])
    for matrix, holds in ((turn, True), (jnp.diag(jnp.array([1.0, 2.0, 3.0])), False)):
        inverse = jnp.linalg.inv(matrix).T
        moved = mf.Dataset(data.x @ matrix.T, data.y, data.weights)
        there = mf.Cloud(mf.Neurons(cloud.particles.a, cloud.particles.b @ inverse.T))
        v = mf.velocity(mf.batchnorm("tanh"), there, moved)
        expected = mf.velocity(flow, cloud, data)
        gap = largest_gap(v, mf.Neurons(expected.a, expected.b @ inverse.T))
        assert (gap < 1e-12) == holds


@pytest.mark.parametrize("model", MODELS)
def test_duplicated_and_permuted_particles(model):
    flow, cloud, data = problem(model)
    twice = jax.tree.map(lambda u: jnp.concatenate([u, u]), (cloud.particles, cloud.labels))
    double = mf.Cloud(twice[0], labels=twice[1])
    v = mf.velocity(flow, cloud, data)
    moved = mf.velocity(flow, double, data)
    assert largest_gap(jax.tree.map(lambda u: u[:7], moved), v) < 1e-14
    assert largest_gap(jax.tree.map(lambda u: u[7:], moved), v) < 1e-14
    order = jnp.array([3, 1, 6, 0, 2, 5, 4])
    shuffled = jax.tree.map(lambda u: u[order], (cloud.particles, cloud.labels))
    there = mf.velocity(flow, mf.Cloud(shuffled[0], labels=shuffled[1]), data)
    assert largest_gap(there, jax.tree.map(lambda u: u[order], v)) < 1e-14


@pytest.mark.parametrize("model", MODELS)
def test_padding_is_invisible(model):
    flow, cloud, data = problem(model)
    padded = cloud.pad(11)
    for function in (mf.energy, mf.dissipation):
        np.testing.assert_allclose(function(flow, padded, data), function(flow, cloud, data), rtol=1e-14)
    np.testing.assert_allclose(
        mf.tangent_kernel(flow, padded, data.x),
        mf.tangent_kernel(flow, cloud, data.x),
        rtol=1e-12,
        atol=1e-14,
    )
    v = jax.tree.map(lambda u: u[:7], mf.velocity(flow, padded, data))
    assert largest_gap(v, mf.velocity(flow, cloud, data)) < 1e-14


def test_statistics_given_or_taken_from_the_data():
    _, cloud, data = problem("batchnorm")
    mean, sigma = data.moments()
    given = mf.batchnorm("tanh", mean=mean, covariance=sigma)
    assert largest_gap(mf.velocity(given, cloud, data), mf.velocity(mf.batchnorm("tanh"), cloud, data)) == 0
    frozen = given.bind(mf.Dataset(2 * data.x, data.y))  # given statistics are never overwritten
    np.testing.assert_array_equal(frozen.feature.covariance, sigma)


@pytest.mark.parametrize("model", MODELS)
def test_float32_agrees_with_float64(model):
    flow, cloud, data = problem(model)
    small = jax.tree.map(lambda u: u.astype(jnp.float32), (cloud, data))
    v = mf.velocity(getattr(mf, model)("tanh"), *small)
    assert {u.dtype for u in jax.tree.leaves(v)} == {jnp.dtype("float32")}
    scale = max(float(jnp.max(jnp.abs(u))) for u in jax.tree.leaves(v))
    assert largest_gap(v, mf.velocity(flow, cloud, data)) < 1e-5 * scale


def test_projection_and_lift_are_inverse():
    flow, cloud, data = problem("batchnorm")
    sigma = flow.feature.covariance
    there = geometry.project(cloud, sigma)
    assert largest_gap(geometry.lift(there).particles, cloud.particles) < 1e-14
    manifold = mf.batchnorm_manifold("tanh").bind(data)
    np.testing.assert_allclose(
        mf.predict(manifold, there, data.x), mf.predict(flow, cloud, data.x), rtol=1e-12
    )
    # the manifold velocity is the push-forward of the raw one
    raw = mf.velocity(flow, cloud, data)
    pushed = jax.jvp(lambda b: geometry.normalize(b, sigma), (cloud.particles.b,), (raw.b,))[1]
    reduced = mf.velocity(manifold, there, data)
    assert largest_gap(reduced, mf.Neurons(raw.a, pushed)) < 1e-12
    np.testing.assert_allclose(jnp.sum(raw.b * cloud.particles.b, axis=1), 0, atol=1e-14)  # |b| is conserved


def bad_calls():
    flow, cloud, data = problem("batchnorm")
    one_d = mf.Dataset(data.x[:, :1], data.y)
    flat = mf.Dataset(data.x * jnp.array([[1.0, 1.0, 0.0]]), data.y)
    along = mf.Cloud(mf.Neurons(jnp.ones(2), jnp.array([[1.0, 0, 0], [0, 0, 1.0]])))
    thin = mf.Cloud(mf.Neurons(jnp.ones(2), jnp.ones((2, 1))))
    zero = mf.Cloud(mf.Neurons(jnp.ones(2), jnp.array([[1.0, 0, 0], [0, 0, 0]])))
    plane = mf.Cloud(mf.Neurons(jnp.ones(2), jnp.ones((2, 2))))
    polar = mf.Cloud(mf.Polar(jnp.ones(2), jnp.ones(2)))
    manifold = mf.batchnorm_manifold()
    return [
        (lambda: mf.vanilla("swish"), "activation must be one of"),
        (lambda: mf.vanilla(loss="l2"), "loss must be one of"),
        (lambda: mf.predict(mf.batchnorm(), cloud, data.x), "no statistics yet; call flow.bind"),
        (lambda: mf.tangent_kernel(mf.batchnorm(), cloud, data.x), "no statistics yet"),
        (lambda: mf.velocity(mf.batchnorm(), thin, one_d), "dimension d >= 2"),
        (lambda: mf.velocity(mf.batchnorm(), along, flat), "do not vary along 1 of the 2 vectors"),
        (lambda: geometry.project(along, np.diag([1.0, 1.0, 0.0])), "a part in the range of the covariance"),
        (
            lambda: mf.velocity(mf.batchnorm(covariance=jnp.eye(2)), cloud, data),
            r"covariance must have shape \(3, 3\)",
        ),
        (lambda: mf.velocity(mf.batchnorm(), zero, data), "particles.b must be nonzero"),
        (lambda: mf.velocity(mf.vanilla(), plane, data), "particles.b must have as many columns as x"),
        (lambda: mf.velocity(mf.vanilla(), polar, data), "cloud.particles must be Neurons, got Polar"),
        (lambda: mf.velocity(manifold, cloud, data), "must lie on Omega"),
        (lambda: manifold.init(jax.random.key(0), 3, dim=3), "Omega needs a covariance"),
        (lambda: flow.init(jax.random.key(0), 0, dim=3), "width must be an integer >= 1, got 0"),
        (lambda: flow.init(jax.random.key(0), 3), "needs dim="),
        (lambda: mf.vanilla(penalty=(lambda w: w.a, -1.0)), r"penalty\[1\] must be >= 0"),
    ]


@pytest.mark.bad_input
@pytest.mark.parametrize("index", range(16))
def test_bad_input_is_refused(index):
    call, words = bad_calls()[index]
    with pytest.raises(ValueError, match=words):
        call()
    assert len(bad_calls()) == 16


@pytest.mark.bad_input
def test_labels_and_penalties_that_do_not_fit_are_refused():
    x, key = jnp.eye(3), jax.random.key(0)
    flow = mf.vanilla("tanh", "logistic")
    cloud = flow.init(key, 4, dim=3)
    with pytest.raises(ValueError, match=r"y must be -1 or 1 for loss='logistic', got 0; 2 \* y - 1"):
        mf.energy(flow, cloud, mf.Dataset(x, jnp.array([0.0, 1.0, 1.0])))
    data = mf.Dataset(x, jnp.array([-1.0, 1.0, 1.0]))
    for penalty in (lambda w: jnp.sum(w.a**2), lambda w: w.b**2, lambda w: None):
        wrong = mf.vanilla("tanh", penalty=(penalty, 0.1))
        with pytest.raises(
            ValueError, match=r"penalty must return one value for each particle, shape \(4,\)"
        ):
            mf.solve(wrong, cloud, data, 1.0)


def test_default_laws_are_those_that_help_states():
    """Means of |a|, |b| and the range, over many neurons; other laws by name; vectors of one number too."""
    cloud = mf.vanilla("tanh").init(jax.random.key(0), 4000, dim=3)
    a, b = (np.asarray(u) for u in cloud.particles)
    assert np.abs(a).max() < 1 and abs(np.mean(a**2) - 1 / 3) < 0.02
    np.testing.assert_allclose(np.linalg.norm(b, axis=1), 1.0, rtol=1e-12)
    np.testing.assert_allclose(b.T @ b / 4000, np.eye(3) / 3, atol=0.02)
    ends = mf.vanilla("tanh").init(jax.random.key(0), 400, dim=1).particles.b
    assert ends.shape == (400, 1) and set(np.unique(ends)) == {-1.0, 1.0} and abs(np.mean(ends)) < 0.2
    # a dimension is not asked for where all coordinates have laws
    normal = laws.normal(2.0, dim=5)
    drawn = mf.vanilla("tanh").init(jax.random.key(0), 4000, a=laws.signs(), b=normal).particles
    assert set(np.unique(drawn.a)) == {-1.0, 1.0} and abs(np.std(drawn.b) - 2) < 0.05
    assert "a uniform on (-1, 1), b uniform on the unit sphere" in mf.Flow.init.__doc__


def test_signed_directions_are_a_choice_of_the_inner_layer():
    flow = mf.vanilla("relu", inner="sphere")
    cloud = flow.init(jax.random.key(0), 6, dim=3)
    raw = mf.vanilla("relu").init(jax.random.key(0), 6, dim=3)
    x = np.random.default_rng(0).normal(size=(5, 3))
    np.testing.assert_allclose(mf.predict(flow, cloud, x), mf.predict(mf.vanilla("relu"), raw, x), rtol=1e-12)
    for inner, outer, words in (("sphere", 0.5, "outer must not be given"), ("ball", True, "'sphere'")):
        with pytest.raises(ValueError, match=words):
            mf.vanilla("relu", inner=inner, outer=outer)
