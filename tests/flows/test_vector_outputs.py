"""Networks with k outputs: against plain JAX, the scalar case, a flax module, and the equalities of the flow."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import MODELS, largest_gap, problem

import meanflow as mf
from meanflow._numerics import loglog_slope
from meanflow.flows import certificate
from meanflow.measures import laws
from meanflow.report._page import contents, write_report
from meanflow.solvers._step import top_eigenvalue
from meanflow.training.data import digits


def vector_problem(model, outputs, loss="squared", activation="tanh", **options):
    """(bound flow, cloud, data) with k outputs: targets (n, k), or classes for softmax."""
    flow, _, plain = problem(model, activation=activation, **options)
    rng = np.random.default_rng(outputs)
    y = np.sin(np.asarray(plain.x) @ rng.normal(size=(3, outputs)))
    y = np.argmax(y, axis=1) if loss == "softmax" else y
    data = mf.Dataset(plain.x, y, plain.weights)
    flow = getattr(mf, model)(activation, loss, alpha="sqrt").bind(data)
    cloud = flow.init(jax.random.key(5), 7, dim=3, outputs=outputs, b=laws.mixed_scales(3, 0.3, 3.0))
    return flow, cloud, data


def plain_network(model, flow, cloud, x):
    """The network written out, (n, k), as a function of raw or manifold weights."""

    def f(w):
        b, inputs = w.b, x
        if model != "vanilla":
            inputs = x - flow.feature.mean[None]
            if model == "batchnorm":
                b = b / jnp.sqrt(jnp.einsum("id,de,ie->i", b, flow.feature.covariance, b))[:, None]
        return jnp.tanh(inputs @ b.T) @ w.a / cloud.size**0.5

    return f


@pytest.mark.parametrize("model", ["batchnorm_manifold", pytest.param("vanilla", marks=pytest.mark.slow)])
def test_one_output_with_an_axis_equals_none(model):
    flow, cloud, data = problem(model)
    columns = mf.Dataset(data.x, data.y[:, None], data.weights)
    wide = mf.Cloud(
        cloud.particles._replace(a=cloud.particles.a[:, None]), cloud.weights, cloud.labels, width=cloud.width
    )
    np.testing.assert_allclose(
        mf.predict(flow, wide, data.x)[:, 0], mf.predict(flow, cloud, data.x), rtol=1e-13
    )
    for function in (mf.energy, mf.dissipation):
        np.testing.assert_allclose(function(flow, wide, columns), function(flow, cloud, data), rtol=1e-12)
    full = mf.tangent_kernel(flow, wide, data.x)
    assert full.shape == (30, 30, 1, 1)
    np.testing.assert_allclose(
        full[:, :, 0, 0], mf.tangent_kernel(flow, cloud, data.x), rtol=1e-12, atol=1e-13
    )
    np.testing.assert_allclose(
        certificate(flow, wide, columns).value, certificate(flow, cloud, data).value, rtol=1e-12
    )
    np.testing.assert_allclose(
        top_eigenvalue(flow, wide, columns), top_eigenvalue(flow, cloud, data), rtol=1e-7
    )
    runs = [mf.solve(flow, c, d, 1.0, step=0.1) for c, d in ((wide, columns), (cloud, data))]
    np.testing.assert_allclose(runs[0].final.particles.a[:, 0], runs[1].final.particles.a, rtol=1e-12)
    np.testing.assert_allclose(runs[0].final.particles.b, runs[1].final.particles.b, rtol=1e-12)
    if flow.invariant() is not None:
        np.testing.assert_allclose(flow.invariant()(wide)[0], flow.invariant()(cloud)[0], rtol=1e-13)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("model", "outputs", "loss"),
    [
        ("vanilla", 10, "softmax"),
        pytest.param("vanilla", 3, "softmax", marks=SLOW),
        pytest.param("vanilla", 3, "squared", marks=SLOW),
        pytest.param("vanilla", 10, "squared", marks=SLOW),
        pytest.param("batchnorm", 3, "softmax", marks=SLOW),
        ("batchnorm", 3, "squared"),
        pytest.param("batchnorm", 10, "softmax", marks=SLOW),
    ],
)
def test_gradients_and_kernels_are_those_of_the_plain_network(model, outputs, loss):
    flow, cloud, data = vector_problem(model, outputs, loss)
    f = plain_network(model, flow, cloud, data.x)

    def energy(w):
        if loss == "squared":
            return jnp.sum(data.weights[:, None] * (f(w) - data.y) ** 2) / 2
        classes = data.y.astype(int)
        return data.weights @ optax.softmax_cross_entropy_with_integer_labels(f(w), classes)

    np.testing.assert_allclose(mf.predict(flow, cloud, data.x), f(cloud.particles), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(mf.energy(flow, cloud, data), energy(cloud.particles), rtol=1e-12)
    gradient = jax.grad(energy)(cloud.particles)
    velocity = mf.velocity(flow, cloud, data)
    assert largest_gap(jax.tree.map(lambda g: -cloud.size * g, gradient), velocity) < 1e-12
    jac = jax.jacobian(f)(cloud.particles)
    flat = [u.reshape(*u.shape[:2], -1) for u in jac]
    whole = sum(cloud.size * jnp.einsum("xcp,zep->xzce", u, u) for u in flat)
    np.testing.assert_allclose(mf.tangent_kernel(flow, cloud, data.x), whole, rtol=1e-10, atol=1e-12)
    diagonal = mf.tangent_kernel(flow, cloud, data.x, outputs="diagonal")
    np.testing.assert_allclose(diagonal, jnp.diagonal(whole, axis1=2, axis2=3), rtol=1e-10, atol=1e-12)
    trace = mf.tangent_kernel(flow, cloud, data.x, outputs="trace")
    np.testing.assert_allclose(trace, jnp.trace(whole, axis1=2, axis2=3), rtol=1e-10, atol=1e-12)
    # the step rule: eigenvalues of K H, with H the curvature of the loss, by LAPACK
    if loss == "squared":
        curvature = np.broadcast_to(np.eye(outputs), (data.size, outputs, outputs))
    else:
        p = np.asarray(jax.nn.softmax(f(cloud.particles)))
        curvature = p[:, :, None] * np.eye(outputs) - p[:, :, None] * p[:, None, :]
    bent = np.einsum("xzce,zeg->xczg", whole, np.asarray(data.weights)[:, None, None] * curvature)
    top = np.abs(np.linalg.eigvals(bent.reshape(data.size * outputs, -1))).max()
    # 300 entries take the power iteration, which stops at 48 products
    np.testing.assert_allclose(top_eigenvalue(flow, cloud, data), top, rtol=1e-7 if outputs == 3 else 1e-2)


def test_a_feature_without_a_kernel_of_its_own_is_differentiated():
    """On the manifold in flat space there is no closed form: the general path must agree with Jacobians."""
    flow, cloud, data = vector_problem("batchnorm_manifold", 3)
    bare = mf.flows.make_flow(flow.feature, mf.geometry.Space(), alpha="sqrt")
    assert flow.feature.kernel(cloud, data.x, data.x, bare.space) is None
    jac = jax.jacobian(plain_network("batchnorm_manifold", flow, cloud, data.x))(cloud.particles)
    flat = [u.reshape(*u.shape[:2], -1) for u in jac]
    whole = sum(
        cloud.size * jnp.einsum("xcp,zep->xzce", u, v)
        for u, v in zip(flat, (w[:9] for w in flat), strict=True)
    )
    for outputs, expected in (
        ("full", whole),
        ("diagonal", jnp.diagonal(whole, axis1=2, axis2=3)),
        ("trace", jnp.trace(whole, axis1=2, axis2=3)),
    ):
        kernel = mf.tangent_kernel(bare, cloud, data.x, data.x[:9], outputs=outputs)
        np.testing.assert_allclose(kernel, expected, rtol=1e-10, atol=1e-12)
    other = mf.kernels.empirical_ntk(
        lambda w, x: plain_network("batchnorm_manifold", flow, cloud, x)(w),
        cloud.particles,
        data.x,
        data.x[:9],
    )
    np.testing.assert_allclose(cloud.size * other, whole, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        ("vanilla", "softmax"),
        ("batchnorm_manifold", "squared"),
        *(pytest.param(model, loss, marks=SLOW) for model in MODELS for loss in ("squared", "softmax")),
    ],
)
def test_energy_dissipates_as_it_says(model, loss):
    """As a rate at one cloud, and integrated along a run."""
    flow, cloud, data = vector_problem(model, 3, loss)
    flow = getattr(mf, model)("tanh", loss, alpha="sqrt").bind(data)
    v = mf.velocity(flow, cloud, data)
    _, rate = jax.jvp(lambda w: mf.energy(flow, cloud.at(w), data), (cloud.particles,), (v,))
    np.testing.assert_allclose(rate, -mf.dissipation(flow, cloud, data), rtol=1e-11)
    np.testing.assert_allclose(cloud.weights @ flow.space.inner(cloud, v, v), -rate, rtol=1e-11)
    nodes, shares = np.polynomial.legendre.leggauss(12)
    ts = 0.1 * (nodes + 1)
    sol = mf.solve(
        flow,
        cloud,
        data,
        0.2,
        ts=jnp.asarray([0.0, *ts, 0.2]),
        observe=["dissipation"],
        step=mf.solvers.Adaptive(1e-11, 1e-13),
    )
    spent = 0.1 * shares @ np.asarray(sol.observed["dissipation"])[1:-1]
    np.testing.assert_allclose(sol.energy[0] - sol.energy[-1], spent, rtol=1e-6)


def test_relu_neurons_conserve_the_balance_of_rows():
    flow, cloud, data = vector_problem("vanilla", 4, activation="relu")
    gaps = []
    for steps in (200, 400):
        run = mf.descend(flow, cloud, data, steps, step=0.2 / steps, observe=["invariant_drift"])
        gaps.append(float(run.observed["invariant_drift"][-1]))
    assert gaps[0] < 1e-3
    assert 0.4 < gaps[1] / gaps[0] < 0.6  # Euler steps break it to first order


class Layers(nn.Module):
    width: int
    outputs: int

    @nn.compact
    def __call__(self, x):
        hidden = jnp.tanh(nn.Dense(self.width, param_dtype=x.dtype, name="first")(x))
        return nn.Dense(self.outputs, use_bias=False, param_dtype=x.dtype)(hidden)


def test_euler_steps_are_gradient_descent_of_a_flax_module(key):
    module, (_, _, data) = Layers(6, 3), vector_problem("vanilla", 3, "softmax")
    params = module.init(key, data.x)["params"]
    first, second = params["first"], params["Dense_0"]["kernel"]

    def loss(p):
        logits = module.apply({"params": p}, data.x)
        return data.weights @ optax.softmax_cross_entropy_with_integer_labels(logits, data.y.astype(int))

    cloud = mf.Cloud(mf.Neurons(second, jnp.concatenate([first["kernel"].T, first["bias"][:, None]], axis=1)))
    flow = mf.vanilla("tanh", "softmax", alpha="one", bias=True)
    run = mf.descend(flow, cloud, data, 10, step=0.3, clock="gradient")
    for _ in range(10):
        params = jax.tree.map(lambda u, g: u - 0.3 * g, params, jax.grad(loss)(params))
    np.testing.assert_allclose(run.final.particles.a, params["Dense_0"]["kernel"], rtol=1e-11)
    np.testing.assert_allclose(run.final.particles.b[:, :-1], params["first"]["kernel"].T, rtol=1e-11)
    np.testing.assert_allclose(run.final.particles.b[:, -1], params["first"]["bias"], rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(run.energy[-1], loss(params), rtol=1e-12)


def test_losses_of_rows():
    flow, cloud, data = vector_problem("vanilla", 3, "softmax")
    f = mf.predict(flow, cloud, data.x)
    hot = jax.nn.one_hot(data.y.astype(int), 3)
    rows = mf.Dataset(data.x, hot, data.weights)
    np.testing.assert_allclose(mf.energy(flow, cloud, rows), mf.energy(flow, cloud, data), rtol=1e-13)
    # label smoothing is a matter of the targets
    smooth = mf.Dataset(data.x, 0.8 * hot + 0.2 / 3, data.weights)
    expected = data.weights @ optax.softmax_cross_entropy(f, smooth.y)
    np.testing.assert_allclose(mf.energy(flow, cloud, smooth), expected, rtol=1e-12)
    # huber and logistic are sums over outputs; a callable sees rows, so that it may couple outputs
    for name in ("huber", "logistic"):
        targets = 2.0 * hot - 1.0
        own = mf.energy(
            mf.vanilla("tanh", name, alpha="sqrt"), cloud, mf.Dataset(data.x, targets, data.weights)
        )
        one = sum(data.weights @ mf.flows._losses.NAMED[name](f[:, c], targets[:, c]) for c in range(3))
        np.testing.assert_allclose(own, one, rtol=1e-12)
    margin = mf.vanilla("tanh", lambda g, y: jax.nn.logsumexp(g) - g[y.astype(int)], alpha="sqrt")
    for function in (mf.energy, mf.dissipation):
        np.testing.assert_allclose(function(margin, cloud, data), function(flow, cloud, data), rtol=1e-12)
    with pytest.raises(ValueError, match="one number for a row of 3 outputs"):
        mf.energy(mf.vanilla("tanh", optax.squared_error), cloud, rows)


def test_what_does_not_fit_is_refused(key):
    flow, cloud, data = vector_problem("vanilla", 3, "softmax")
    scalar = mf.Cloud(cloud.particles._replace(a=cloud.particles.a[:, 0]))
    with pytest.raises(ValueError, match="needs a network with k outputs"):
        mf.energy(flow, scalar, data)
    with pytest.raises(ValueError, match="classes 0 to 2"):
        mf.energy(flow, cloud, mf.Dataset(data.x, data.y + 1))
    with pytest.raises(ValueError, match="classes 0 to 2"):
        mf.energy(flow, cloud, mf.Dataset(data.x, data.y + 0.5))
    with pytest.raises(ValueError, match="rows of probabilities"):
        mf.energy(flow, cloud, mf.Dataset(data.x, jnp.ones((30, 3))))
    with pytest.raises(ValueError, match="one target for each of the 3 outputs"):
        mf.solve(mf.vanilla("tanh"), cloud, data, 1.0)
    with pytest.raises(ValueError, match=r"y must have shape \(30,\), got shape \(30, 3\)"):
        mf.energy(mf.vanilla("tanh"), scalar, mf.Dataset(data.x, jnp.zeros((30, 3))))
    with pytest.raises(ValueError, match="outputs must be None"):
        mf.canonical().init(key, 4, outputs=2)
    with pytest.raises(ValueError, match="law of single numbers"):
        flow.init(key, 4, dim=3, outputs=2, a=laws.normal(1.0, 2))


def test_the_certificate_is_the_largest_row_of_forces():
    flow, cloud, data = vector_problem("vanilla", 3)
    found = certificate(flow, cloud, data)
    residual = data.weights[:, None] * (mf.predict(flow, cloud, data.x) - data.y)
    force = jnp.sqrt(cloud.width) * residual.T @ jnp.tanh(data.x @ found.direction)
    np.testing.assert_allclose(found.value, jnp.linalg.norm(force), rtol=1e-12)


def test_runs_are_saved_resumed_and_swept(tmp_path):
    flow, cloud, data = vector_problem("batchnorm_manifold", 3, "softmax")
    whole = mf.solve(flow, cloud, data, 1.0, step=mf.KernelStep(0.5), ts=2)
    half = mf.solve(flow, cloud, data, 0.5, step=1 / 16)
    back = mf.Solution.load(half.save(tmp_path / "run"))
    assert largest_gap(back.final.particles, half.final.particles) == 0
    rest = mf.solve(flow, back.final, data, 1.0, step=1 / 16, state=back.state)
    straight = mf.solve(flow, cloud, data, 1.0, step=1 / 16)
    assert largest_gap(rest.final.particles, straight.final.particles) < 1e-14
    assert whole.energy[-1] < whole.energy[0]
    plan = mf.sweep(
        flow,
        data,
        widths=[4, 6],
        seeds=2,
        steps=4,
        every=2,
        step=0.1,
        observe=("default", "kernel_drift"),
        axes={"scale": [0.5, 1.0]},
        compute=False,
    )
    runs = plan.run()
    assert runs.predictions.dims == ("width", "scale", "seed", "step", "sample", "output")
    assert runs.predictions.shape[-2:] == (30, 3)
    alone = plan.single(width=4, scale=0.5, seed=1)
    np.testing.assert_allclose(runs.energy.sel(width=4, scale=0.5, seed=1), alone.energy, rtol=1e-12)
    start = plan.cloud(width=4, scale=0.5, seed=1)
    guess = jnp.argmax(mf.predict(flow, start, data.x), axis=1)
    share = jnp.sum(jnp.where(guess == data.y, data.weights, 0)) / jnp.sum(data.weights)
    np.testing.assert_allclose(runs.accuracy.sel(width=4, scale=0.5, seed=1).isel(step=0), share, rtol=1e-12)
    first, last = start.particles, alone.final.particles
    moved = jnp.sum((last.a - first.a) ** 2, axis=1) + jnp.sum((last.b - first.b) ** 2, axis=1)
    measured = runs.displacement.sel(width=4, scale=0.5, seed=1).isel(step=-1)
    np.testing.assert_allclose(measured, jnp.sqrt(jnp.mean(moved)), rtol=1e-10)
    assert float(runs.kernel_drift.isel(step=-1).min()) > 0
    assert "accuracy" in contents(runs)["maps"] and write_report(runs, tmp_path / "runs.html").exists()
    assert whole.to_xarray().a.dims == ("time", "particle", "a_0")


def test_samples_that_miss_a_class_get_networks_of_the_same_kind():
    x = np.random.default_rng(0).normal(size=(8, 2))
    data = lambda key, samples: mf.Dataset(x[:samples], np.arange(8)[:samples] // 2)
    plan = mf.sweep(
        mf.vanilla("tanh", "softmax"),
        data,
        widths=[3],
        steps=1,
        step=0.1,
        observe=["accuracy"],
        axes={"samples": [3, 8]},
        compute=False,
    )
    assert [plan.cloud(width=3, samples=n, seed=0).particles.a.shape for n in (3, 8)] == [(3, 4), (3, 4)]


def test_ten_digits_are_learned_by_adam_on_minibatches():
    rows = digits().flat()
    train = mf.Dataset(np.asarray(rows.train_x, float), rows.train_y)
    flow = mf.vanilla("relu", "softmax", alpha="sqrt", bias=True)
    cloud = flow.init(jax.random.key(0), 100, dim=64, outputs=10)
    run = mf.descend(
        flow,
        cloud,
        train,
        1000,
        optimizer=optax.adam(5e-3),
        batches=mf.Batches(64, jax.random.key(1)),
        observe=["accuracy"],
    )
    guess = jnp.argmax(mf.predict(flow, run.final, np.asarray(rows.test_x, float)), axis=1)
    found = float(jnp.mean(guess == rows.test_y))
    assert found > 0.95, found
    assert run.observed["accuracy"][-1] > 0.95


def test_width_does_not_change_the_limit():
    """Predictions of k outputs converge to those of the quadrature at the Monte Carlo rate."""
    flow = mf.vanilla("tanh")
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 2)))
    spread = []
    for width in (64, 4096):
        clouds = [flow.init(jax.random.key(s), width, dim=2, outputs=3) for s in range(8)]
        spread.append(float(jnp.std(jnp.stack([mf.predict(flow, c, x) for c in clouds]))))
    assert abs(loglog_slope((64, 4096), spread) + 0.5) < 0.1


def test_classes_take_the_precision_of_the_inputs():
    """Whole numbers have none of their own: float32 inputs and neurons with class numbers learn in float32."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(12, 3)), jnp.float32)
    data = mf.Dataset(x, np.arange(12) % 3)
    chex.assert_type([data.y, data.weights], jnp.float32)
    flow = mf.vanilla("tanh", loss="softmax")
    single = jax.tree.map(lambda u: u.astype(jnp.float32), flow.init(jax.random.key(0), 8, dim=3, outputs=3))
    run = mf.descend(flow, single, data, 5, step=0.1)
    chex.assert_type([run.energy, run.final.particles.b], jnp.float32)
    double, exact = jax.tree.map(lambda u: u.astype(jnp.float64), (single, data))
    np.testing.assert_allclose(run.energy, mf.descend(flow, double, exact, 5, step=0.1).energy, rtol=1e-5)
