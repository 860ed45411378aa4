"""Bad or extreme input that used to give a wrong number without a word."""

import itertools
import logging

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meanflow as mf
from meanflow import geometry, transport
from meanflow._numerics import safe_norm, safe_root, safe_sqrt
from meanflow.measures import laws
from meanflow.transport._exact import cylinder_distance, euclidean
from meanflow.transport._sliced import marginal_wasserstein

HOLE = jnp.array([[0.0, 1.0], [jnp.nan, 2.0], [3.0, 1.0]])
WHOLE = jnp.ones((3, 2))
HIDDEN = np.ma.masked_array([[1.0, 2.0]], mask=[[False, True]])
ENDLESS = []
ENDLESS.append(ENDLESS)  # a list that holds itself


@pytest.mark.parametrize(
    "distance",
    [
        lambda x: transport.wasserstein(x[:, 0], WHOLE[:, 0], 2),
        lambda x: transport.wasserstein(x[:, 0], WHOLE[:2, 0], 3),  # unequal numbers of points
        lambda x: transport.sliced_wasserstein(x, WHOLE, 2, key=jax.random.key(0), directions=3),
        lambda x: marginal_wasserstein(x, WHOLE),
        lambda x: jnp.max(euclidean(x, WHOLE)),
        lambda x: jnp.max(cylinder_distance((x[:, 0], jnp.eye(3)), (WHOLE[:, 0], jnp.eye(3)))),
    ],
)
def test_nan_is_no_distance_of_zero(distance):
    assert jnp.isnan(jax.jit(distance)(HOLE))  # traced values cannot be refused


def test_nan_passes_through_the_safe_functions():
    nan = jnp.array(jnp.nan)
    assert jnp.isnan(safe_sqrt(nan)) and jnp.isnan(safe_root(nan, 3)) and jnp.isnan(safe_norm(HOLE[1]))
    assert safe_sqrt(jnp.array(-1.0)) == 0


@pytest.mark.parametrize("unit", [1e-30, 1e30])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_distances_scale_with_the_unit_of_length(unit, order):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 6, 2))

    def all_of(x, y):
        key = jax.random.key(0)
        on_line = transport.wasserstein(x[:, 0], y[:, 0], order)
        return [
            on_line,
            transport.wasserstein(x[:, 0], y[:4, 0], order),
            transport.wasserstein(x, y, order),
            transport.wasserstein(x, y[:4], order),
            transport.sliced_wasserstein(x, y, order, key=key, directions=4),
            marginal_wasserstein(x, y),
            euclidean(x, y)[0, 0],
        ]

    in_units = lambda unit: all_of(jnp.asarray(unit * x, jnp.float32), jnp.asarray(unit * y, jnp.float32))
    plain, scaled = (np.array(in_units(u), float) for u in (1.0, unit))
    np.testing.assert_allclose(scaled / unit, plain, rtol=1e-5)


def test_gradients_of_scaled_distances_are_those_of_the_plain_formula():
    x, y = jnp.array([0.3, -1.0, 2.0]), jnp.array([0.5, 1.5, -0.2])
    plain = lambda x: jnp.sqrt(jnp.mean((jnp.sort(x) - jnp.sort(y)) ** 2))
    got = jax.grad(lambda x: transport.wasserstein(x, y, 2))(x)
    np.testing.assert_allclose(got, jax.grad(plain)(x), rtol=1e-12)
    assert not jnp.any(jnp.isnan(jax.grad(lambda x: transport.wasserstein(x, y, 2))(y)))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: mf.Cloud(mf.Neurons(np.ones(2) + 1j, np.eye(2))), "particles.a must be .*complex"),
        (lambda: mf.Cloud(mf.Neurons(np.ones(2), np.eye(2)), [0.5 + 1j, 0.5]), "weights must be .*real"),
        (lambda: mf.Cloud(mf.Neurons(np.ones(2), np.eye(2)), labels=1j), "labels must be .*real"),
        (lambda: mf.Cloud(mf.Neurons(np.ones(2), np.eye(2)), labels=np.nan), "labels must not be NaN"),
        (lambda: mf.Cloud(mf.Neurons(np.ones(2), np.eye(2)), width=-3), "width must be > 0"),
        (lambda: mf.Cloud(mf.Neurons(np.ones(2), np.eye(2)), width=np.nan), "width must be"),
        (lambda: mf.Cloud(mf.Neurons(np.ones(2), np.eye(2)), width="3"), "width must be a number"),
        (lambda: mf.Dataset(np.ones(3) + 1j, np.ones(3)), "x must be .*real"),
        (lambda: mf.Dataset(np.ones(3), np.ones(3) + 1j), "y must be .*real"),
        (lambda: jax.jit(lambda y: mf.Dataset(np.ones(3), y).y)(jnp.ones(3) + 1j), "y must be .*real"),
        (lambda: mf.batchnorm(covariance=[[1.0, 0.9], [0.1, 1.0]]), "covariance must be symmetric"),
        (lambda: mf.batchnorm_manifold(covariance=-np.eye(2)), "covariance must be positive semi-definite"),
        (lambda: mf.vanilla(penalty=0.1), r"penalty must be a pair \(function, strength\)"),
        (lambda: mf.depth.expected_gram([[1.0, 2.0], [2.0, 1.0]], 3), "gram must be positive semi-definite"),
        (lambda: mf.depth.Gram([[1.0, 2.0], [2.0, 1.0]]), "gram must be a Gram matrix"),
        (lambda: geometry.log([1.0, 0.0], [-2.0, 0.0], np.eye(2)), "other must not be opposite"),
        (lambda: geometry.normalize([[1.0, 0.0], [0.0, 0.0]]), "b must hold nonzero vectors"),
        (lambda: geometry.normalize(np.ones(3), np.eye(2)), r"covariance must have shape \(3, 3\)"),
        (lambda: geometry.exp(np.ones(2), np.ones(3), np.eye(2)), "v must have as many columns as bb"),
    ],
)
def test_is_refused(call, words):
    with pytest.raises((ValueError, TypeError), match=words):
        call()


def infinite():
    flow = mf.vanilla("tanh")
    cloud = mf.measures.quadrature((2, 8), mf.Neurons, {"a": laws.uniform(), "b": laws.sphere(2)})
    data = mf.Dataset(np.array([[1.0, 0.0], [0.5, 1.0], [0.0, 2.0]]), np.ones(3))
    return flow, cloud, data


def test_gradient_clock_needs_a_finite_width():
    flow, cloud, data = infinite()
    with pytest.raises(ValueError, match="clock='gradient' needs a finite cloud.width"):
        mf.solve(flow, cloud, data, 1.0, clock="gradient")
    with pytest.raises(ValueError, match="clock='gradient' needs a finite cloud.width"):
        mf.descend(flow, cloud, data, 2, optimizer=optax.sgd(0.1), clock="gradient")


def test_log_of_opposite_points_is_nan_while_traced():
    bb, sigma = jnp.array([0.6, 0.8]), jnp.eye(2)
    assert jnp.all(jnp.isnan(jax.jit(geometry.log)(bb, -bb, sigma)))
    nearly = jnp.array([-0.6 + 1e-9, -0.8])
    np.testing.assert_allclose(jnp.linalg.norm(geometry.log(bb, nearly, sigma)), jnp.pi, rtol=1e-6)


def sweep(**change):
    settings = {"widths": (2,), "steps": 2, "step": 0.1, "observe": (), **change}
    given = {name: value for name, value in settings.items() if value is not None}
    return mf.sweep(mf.canonical(), mf.Dataset([-1.0, 0.5], [1.0, -1.0]), **given)


def timed(**change):
    return sweep(**{"steps": None, "step": None, "t1": 0.1, **change})


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: sweep(step=None, axes={"step": [0.1, -0.1]}),
            "step must be .*> 0.*got -0.1",
        ),
        (lambda: sweep(step=-0.1), "step must be"),
        (lambda: sweep(step=None, axes={"step": [0.1, np.nan]}), "step must not hold NaN"),
        (lambda: timed(axes={"r": [1e-3, -1.0]}, step=lambda r: mf.solvers.Adaptive(r)), "rtol must be >= 0"),
        (
            lambda: timed(axes={"r": [1e-3, np.inf]}, step=lambda r: mf.solvers.Adaptive(r)),
            "rtol must be finite",
        ),
        (lambda: timed(axes={"clock": ["lazy", "bogus"]}), "clock must be one of"),
        (lambda: timed(axes={"solver": ["bogus"]}), "solver must be"),
    ],
)
def test_every_value_of_an_axis_is_checked_before_anything_compiles(call, words, caplog):
    with jax.log_compiles(), caplog.at_level(logging.WARNING), pytest.raises(ValueError, match=words):
        call()
    assert not [r for r in caplog.records if "Finished XLA compilation of jit(run)" in r.getMessage()]


@pytest.mark.bad_input
def test_every_value_of_an_axis_of_models_is_checked():
    with pytest.raises(ValueError, match="alpha"):
        mf.sweep(
            lambda alpha: mf.full(alpha=alpha),
            mf.Dataset([-1.0, 0.5], [1.0, -1.0]),
            widths=(2,),
            steps=2,
            step=0.1,
            axes={"alpha": [1.0, -1.0]},
        )


CLOUD = mf.Cloud(mf.Neurons(np.ones(3), np.ones((3, 2))))
PLANE = mf.Dataset(np.array([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]), np.array([1.0, -1.0, 1.0]))


POLAR = mf.Cloud(mf.Polar(np.ones(3), np.ones(3)))
LINE = mf.Dataset(np.array([-1.0, 1.0]), np.array([1.0, 0.0]))
POLAR_LAWS = {"r": laws.uniform(), "theta": laws.angle()}


def descend(**change):
    batches = mf.Batches(2, jax.random.key(0), **change)
    return mf.descend(mf.vanilla("tanh"), CLOUD, PLANE, 1, step=0.1, batches=batches)


def trained(labels=(0, 1) * 4, width=2, **settings):
    make = lambda rngs: mf.training.Stack(2, (3,), 2, norm=mf.layers.BatchNorm, rngs=rngs)
    x = np.random.default_rng(0).normal(size=(8, width)).astype("float32")
    data = mf.training.data.Data(x, np.array(labels), x, np.array(labels))
    return mf.training.Trainer(make, optax.sgd(0.1), batch_size=4, **settings).run(
        jax.random.key(0), data, 1, progress=False
    )


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: mf.solve(mf.vanilla("tanh"), PLANE, CLOUD, 1.0), "cloud must be a Cloud"),
        (lambda: mf.solve(mf.vanilla("tanh"), CLOUD.particles, PLANE, 1.0), "cloud must be a Cloud"),
        (lambda: mf.solve(mf.vanilla, CLOUD, PLANE, 1.0), "flow must be a Flow"),
        (lambda: mf.solve(mf.vanilla("tanh"), CLOUD, PLANE, 1.0, solver=diffrax.Tsit5), "solver must be"),
        (lambda: mf.solve(mf.vanilla("tanh"), CLOUD, PLANE, 1.0, solver="tsit5"), "solver must be"),
        (lambda: mf.solve(mf.vanilla("tanh"), CLOUD, PLANE, 1.0, solver=diffrax.Euler()), "step must be"),
        (lambda: mf.solve(mf.vanilla("relu"), CLOUD, PLANE, 1.0, solver="sliding"), "step must be"),
        (lambda: mf.solve(mf.canonical(), POLAR, LINE, 1.0, solver="sliding"), "step must be"),
        (
            lambda: mf.solve(mf.vanilla("relu"), CLOUD, PLANE, 1.0, solver=mf.solvers.Sliding()),
            "step must be",
        ),
        (lambda: mf.solvers.Sliding(forward=1), "forward must be True or False"),
        (
            lambda: mf.solve(mf.vanilla("tanh"), CLOUD, PLANE, 1.0, observe=lambda cloud: 1.0),
            "observe must be",
        ),
        (lambda: mf.vanilla(lambda z: jnp.sum(z)), "activation must .*same shape"),
        (lambda: mf.vanilla(lambda z, c: z), "activation must be .*a function of 1 argument"),
        (lambda: mf.vanilla(lambda z: 1j * z), "activation must .*map real arrays"),
        (lambda: mf.energy(mf.vanilla("tanh", lambda f, y: None), CLOUD, PLANE), "loss must return one real"),
        (
            lambda: mf.energy(mf.vanilla("tanh", lambda f, y: 1j * f), CLOUD, PLANE),
            "loss must return one real",
        ),
        (lambda: mf.velocity(mf.vanilla("tanh", inner=np.ones(9)), CLOUD, PLANE), "inner must .*have shape"),
        (lambda: mf.energy(mf.vanilla("tanh"), mf.Cloud.stack([CLOUD, CLOUD]), PLANE), "a single cloud"),
        (lambda: PLANE.take([7]), "index must be <= 2"),
        (lambda: mf.measures.laws.uniform(1.0, -1.0), "high must be at least low"),
        (
            lambda: mf.measures.quadrature((10**9,) * 2, mf.Polar, POLAR_LAWS),
            "counts must multiply to at most",
        ),
        (lambda: mf.solvers.eulerian.Density(np.ones((4, 4)), 2.0), "mass must sum to 1"),
        (lambda: descend(sampler=lambda k, n: (jnp.ones((n, 3)), jnp.ones(n))), "sampler must return inputs"),
        (lambda: descend(sampler=lambda k, n: jnp.ones((n, 2))), "sampler must return inputs"),
        (lambda: mf.Batches(2, replace=1), "replace must be True or False"),
        (lambda: mf.flows.max_margin(mf.vanilla(), CLOUD, mf.Dataset(PLANE.x, [0, 1, 1])), "labels -1 and 1"),
        (lambda: mf.kernels.kernel_flow(np.triu(np.ones((2, 2))), [0.0, 0.0], [1.0, 1.0]), "symmetric"),
        (
            lambda: mf.kernels.empirical_ntk(lambda p, x: x, {}, np.ones((2, 2)), groups=str),
            "params must hold",
        ),
        (lambda: trained(labels=np.full(8, 3)), "data.train_y must be <= 1"),
        (lambda: trained(labels=np.full(8, -1)), "data.train_y must be >= 0"),
        (lambda: trained(loss=lambda f, y: f), "loss must return one number"),
        (lambda: trained(augment=lambda key, x: x[:1]), "augment must return a batch"),
        (lambda: trained(width=5), "which the network does not take"),
        (lambda: mf.solve(mf.vanilla("tanh"), CLOUD, PLANE, "1"), "t1 must be a number"),
        (lambda: mf.solve(mf.vanilla("tanh"), CLOUD, PLANE, 1.0, step=1e-310), "step must be .*1e-310"),
        (lambda: mf.solve(mf.vanilla("tanh"), CLOUD, PLANE, 1.0, step=1e-12), "step must be at least"),
        (lambda: mf.solve(mf.vanilla("tanh"), CLOUD, PLANE, 10**400), "t1 must be 0 or from"),
        (
            lambda: mf.vanilla(alpha="foo"),
            r"alpha must be one of \['m', 'sqrt', 'one'\] or a number, got 'foo'",
        ),
        (lambda: mf.predict(mf.vanilla(), CLOUD, np.ones((2, 3, 4))), r"x must have 1 or 2 axes, got shape"),
        (lambda: mf.predict(mf.vanilla(), CLOUD, HIDDEN), "x must not be .*masked"),
        (lambda: mf.Dataset(HIDDEN, [1.0]), "x must not be .*masked"),
        (lambda: mf.Dataset([HIDDEN[0], HIDDEN[0]], [1.0, 2.0]), "x must not be .*masked"),
        (lambda: mf.predict(mf.vanilla(), CLOUD, ENDLESS), "x must be an array of real numbers"),
        (
            lambda: mf.sweep(mf.vanilla("tanh"), PLANE, widths=itertools.count(1), steps=1, step=0.1),
            "widths must hold at most 1000000 values",
        ),
        (lambda: mf.vanilla().begin(3), "cloud must be a Cloud"),
        (lambda: mf.vanilla().init(jax.random.key(0), 3, dim=2, a=lambda u: 1j * u), "must be real numbers"),
        (
            lambda: geometry.Space().inner(CLOUD, CLOUD.particles, mf.Neurons(np.ones(9), np.ones((9, 2)))),
            "tangent vectors must have the shapes",
        ),
        (lambda: geometry.lift(mf.Cloud(CLOUD.particles, labels=-1.0)), "labels .* must be > 0"),
        (lambda: mf.activations.softplus("a"), "sharpness must be a number"),
        (lambda: mf.activations.Stretched("tan", 1.0), "name must be one of"),
        (lambda: mf.solvers.Adaptive(rtol="a"), "rtol must be"),
        (lambda: mf.solve(mf.vanilla("tanh"), CLOUD, PLANE, 1.0, ts="a"), "ts must be"),
        (lambda: mf.descend(mf.vanilla("tanh"), CLOUD, PLANE, 2, optimizer="adam"), "optimizer must be"),
        (lambda: mf.descend(mf.vanilla("tanh"), CLOUD, PLANE, 2, optimizer=optax.adam), "optimizer must be"),
        (
            lambda: mf.descend(
                mf.vanilla("tanh"), CLOUD, PLANE, 1, step=0.1, observe={"n": lambda *run: None}
            ),
            "observe must hold functions that return",
        ),
        (lambda: mf.vanilla("tanh").init(0, 3), "key must be a single PRNG key"),
        (lambda: mf.vanilla("tanh").init(jax.random.split(jax.random.key(0), 2), 3), "key must be a single"),
        (lambda: sweep(seeds=[2**32]), "seeds"),
        (lambda: sweep(seeds=10**12), "seeds"),
        (lambda: sweep(widths=[10**13]), "widths"),
        (lambda: sweep(observe={"n": lambda *run: None}), "observe"),
        (lambda: mf.sweeps.sweep_function(lambda key: "text"), "function\\['value'\\] must return an array"),
        (lambda: mf.Cloud(mf.Neurons(None, np.ones((3, 2)))), "particles must have all their coordinates"),
        (lambda: mf.Dataset([1.0, 2.0], [1.0, 2.0], [0.0, 0.0]), "weights must not all be zero"),
        (lambda: mf.kernels.spectrum(np.array([[1.0, 2.0], [2.0, 1.0]])), "kernel must be a Gram matrix"),
        (lambda: mf.kernels.spectrum(np.array([[1.0, 0.9], [0.1, 1.0]])), "kernel must be symmetric"),
        (lambda: mf.geometry.BatchNormManifold(np.ones((2, 3))), "covariance must be a square matrix"),
        (
            lambda: mf.training.Stack(3, (2,), "a", norm=mf.layers.BatchNorm, rngs=nnx.Rngs(0)),
            "classes must be",
        ),
        (lambda: mf.training.Stack(3, (2,), 2, norm=mf.layers.BatchNorm, rngs=0), "rngs must be a Rngs"),
        (lambda: mf.measures.laws.uniform("a"), "low must be a number"),
        (lambda: mf.layers.functional.recenter(np.ones((2, 3)), axis=5), "axis must be among the 2 axes"),
    ],
)
def test_mistakes_of_new_users_are_named(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()


def test_a_state_of_another_width_is_refused():
    run = mf.descend(mf.vanilla("tanh"), CLOUD, PLANE, 1, step=0.1)
    wide = mf.Cloud(mf.Neurons(np.ones(5), np.ones((5, 2))))
    with pytest.raises(ValueError, match="state must come from a run of the same cloud"):
        mf.descend(mf.vanilla("tanh"), wide, PLANE, 1, step=0.1, state=run.state)


def test_plain_numbers_of_observers_and_numpy_numbers_are_fine():
    seen = {"three": lambda flow, cloud, data: 3, "half": lambda flow, cloud, data: 0.5}
    run = mf.solve(
        mf.vanilla("tanh"), CLOUD, PLANE, np.float64(0.1), ts=2, observe=seen, step=np.float32(0.05)
    )
    assert run.observed["three"].tolist() == [3, 3] and run.observed["half"].tolist() == [0.5, 0.5]
    mixed = transport.sinkhorn_divergence(np.ones((3, 2), np.float32), np.zeros((2, 2)))
    np.testing.assert_allclose(mixed.value, 2**0.5, rtol=1e-2)


@pytest.mark.bad_input
@pytest.mark.parametrize("name", ["rtol", "atol"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_tolerances_that_are_none(name, value):
    """They used to give ok=True with an energy that was wrong by thousands."""
    with pytest.raises(ValueError, match=f"{name} must be"):
        mf.solve(mf.vanilla("tanh"), CLOUD, PLANE, 1.0, step=mf.solvers.Adaptive(**{name: value}))


@pytest.mark.bad_input
def test_times_that_are_none():
    with pytest.raises(ValueError, match="ts must"):
        mf.solve(mf.vanilla("tanh"), CLOUD, PLANE, 1.0, ts=[0.1, np.nan])
    with pytest.raises(ValueError, match="residual must have"):
        mf.univariate.classify_rays([-1.0, 0.0, 1.0], [1.0, -1.0])


def test_sliding_saves_at_times_finer_than_its_steps():
    """Every save ends a step early, which the budget of steps has to know."""
    settings = {"solver": "sliding", "step": 0.25}
    often = mf.solve(mf.canonical(), POLAR, LINE, 1.0, ts=np.linspace(0.0, 1.0, 65), **settings)
    once = mf.solve(mf.canonical(), POLAR, LINE, 1.0, **(settings | {"step": 1 / 64}))
    assert bool(often.ok) and int(often.stats["num_steps"]) >= 64
    np.testing.assert_allclose(often.energy[-1], once.energy[-1], rtol=1e-12)


def test_samples_that_couple_only_in_large_batches_are_noticed():
    """A function that subtracts the mean of batches above 8 rows: refused, or its kernel is that of the Jacobian."""

    def apply(params, x):
        features = jnp.tanh(x @ params)
        return jnp.sum(features - (jnp.mean(features, axis=0) if x.shape[0] > 8 else 0.0), axis=1)

    rng = np.random.default_rng(0)
    params, x = jnp.asarray(rng.normal(size=(2, 3))), jnp.asarray(rng.normal(size=(10, 2)))
    with jax.numpy_rank_promotion("allow"):
        jacobian = jax.jacobian(apply)(params, x).reshape(10, -1)
        with pytest.raises(ValueError, match="couples the samples"):
            mf.kernels.empirical_ntk(apply, params, x)
        found = mf.kernels.empirical_ntk(apply, params, x, stats="batch")
    np.testing.assert_allclose(found, jacobian @ jacobian.T, rtol=1e-10)


def test_a_solution_in_double_precision_is_not_read_in_single(tmp_path):
    run = mf.descend(mf.vanilla("tanh"), CLOUD, PLANE, 1, step=0.1)
    path = run.save(tmp_path / "run")
    with (
        jax.enable_x64(False),
        pytest.raises(ValueError, match="was stored in float64, which is switched off"),
    ):
        mf.Solution.load(path)
