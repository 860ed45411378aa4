"""Observables against plain numpy, and blind to padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meanflow as mf
from meanflow.flows import _observables as obs
from meanflow.flows._problem import Chart, Problem
from meanflow.univariate import _observables as knots_of

X = jnp.linspace(-1.0, 1.0, 5)
LINE = mf.Dataset(X, jnp.sin(2 * X), "sum")
PLANE = mf.Dataset(np.random.default_rng(2).normal(size=(9, 3)), np.arange(9.0) / 9)


def pair(flow, data, width=6, shift=0.3, **labels):
    """A cloud and a moved one."""
    dim = data.x.shape[1] if data.x.ndim == 2 else None
    start = flow.bind(data).init(jax.random.key(0), width, dim=dim, **labels)
    moved = jax.tree.map(
        lambda u: u + shift * jnp.cos(jnp.arange(u.size, dtype=u.dtype)).reshape(u.shape), start.particles
    )
    return start, start.at(moved)


def see(observable, flow, cloud, data, start):
    """What an observable records at ``cloud`` in a run from ``start``."""
    problem = Problem(Chart(flow, start), data, jnp.ones(()))
    return observable.measure(problem, cloud, observable.begin(problem, start))


MODELS = {
    "vanilla": (mf.vanilla("relu"), PLANE, {}),
    "batchnorm": (mf.batchnorm("relu"), PLANE, {}),
    "manifold": (mf.batchnorm_manifold("relu"), PLANE, {}),
    "lifted": (mf.lifted(alpha="sqrt"), LINE, {"labels": 1.0}),
    "full": (mf.full(alpha="sqrt"), LINE, {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_padding_is_invisible(name):
    flow, data, labels = MODELS[name]
    flow = flow.bind(data)
    start, now = pair(flow, data, **labels)
    chosen = flow.observables(data)
    # neurons are as many as are stored, sharpness starts at random, and fluctuations are those of whole runs
    del chosen["neurons"], chosen["sharpness"], chosen["fluctuations"]

    @jax.jit
    def observe(now, start):
        return {key: see(one, flow, now, data, start) for key, one in chosen.items()}

    narrow, padded = observe(now, start), observe(now.pad(11), start.pad(11))
    assert set(narrow) == set(chosen)
    for key, value in narrow.items():
        np.testing.assert_allclose(value, padded[key], rtol=1e-12, atol=1e-14, err_msg=key)
        assert np.all(np.isfinite(value)), key


def test_displacements_are_root_mean_squares():
    flow, data, _ = MODELS["vanilla"]
    start, now = pair(flow, data)
    b0, b1 = np.asarray(start.particles.b), np.asarray(now.particles.b)
    cosine = np.sum(b0 * b1, 1) / np.linalg.norm(b0, axis=1) / np.linalg.norm(b1, axis=1)
    turn = obs.angle_displacement(flow, now, data, start)
    assert float(turn) == pytest.approx(np.sqrt(np.mean(np.arccos(cosine) ** 2)), rel=1e-9)
    squares = np.sum((b1 - b0) ** 2, 1) + np.asarray(now.particles.a - start.particles.a) ** 2
    assert float(obs.displacement(flow, now, data, start)) == pytest.approx(np.sqrt(squares.mean()))
    # a full turn is no displacement, and raw neurons turn as their polar images do
    polar, raw = mf.lifted(), mf.full()
    start, now = pair(polar, LINE, labels=1.0)
    around = start.at(start.particles._replace(theta=start.particles.theta + 2 * jnp.pi))
    assert float(obs.angle_displacement(polar, around, LINE, start)) < 1e-14
    lift = mf.univariate.balance.lift
    expected = obs.angle_displacement(polar, now, LINE, start)
    found = obs.angle_displacement(raw, lift(now), LINE, lift(start))
    assert float(found) == pytest.approx(float(expected))


def test_kernel_drift_is_relative():
    flow, data, _ = MODELS["vanilla"]
    start, now = pair(flow, data)
    k0, k1 = (np.asarray(mf.tangent_kernel(flow, c, data.x)) for c in (start, now))
    expected = np.linalg.norm(k1 - k0) / np.linalg.norm(k0)
    assert float(see(obs.KernelDrift(), flow, now, data, start)) == pytest.approx(expected)
    assert float(see(obs.KernelDrift(), flow, start, data, start)) == 0


def test_knot_statistics_by_counting():
    flow = mf.full()
    cloud = flow.init(jax.random.key(5), 200)
    a, b, c = (np.asarray(u) for u in cloud.particles)
    knots, x = b / a, np.asarray(X)
    inside = np.abs(knots) <= 1.25
    near = np.min(np.abs(knots[:, None] - x[None, :]), axis=1) < 0.05 * 0.5
    share = knots_of.on_sample_share(flow, cloud, LINE)
    assert float(share) == pytest.approx(np.sum(near & inside) / np.sum(inside))
    filled = np.histogram(knots, bins=110, range=(-1.1, 1.1), weights=np.abs(c * a))[0]
    expected = np.sort(filled)[-8:].sum() / filled.sum()  # of the mass inside the window
    assert float(knots_of.concentration(flow, cloud, LINE)) == pytest.approx(expected)
    active = (a[:, None] * x[None, :] - b[:, None] > 0).any(axis=1)
    assert float(knots_of.dead_share(flow, cloud, LINE)) == pytest.approx(np.mean(~active))
    grid = np.sort(np.concatenate([knots - 1e-7, knots + 1e-7, [-1e4, 1e4]]))
    f = np.asarray(mf.predict(flow, cloud, jnp.asarray(grid)))
    slopes = np.diff(f)[::2] / np.diff(grid)[::2]  # between neighbouring knots
    assert float(knots_of.slope_variation(flow, cloud, LINE)) == pytest.approx(
        np.abs(np.diff(slopes)).sum(), rel=1e-5
    )


@pytest.mark.parametrize("name", ["vanilla", "batchnorm", "full"])
def test_invariants_drift_with_the_step_of_descent(name):
    """What the flow conserves, descent changes in proportion to its step."""
    flow, data, labels = MODELS[name]
    start, _ = pair(flow, data, **labels)
    drift = []
    for steps in (20, 40):
        run = mf.descend(flow, start, data, steps, step=0.4 / steps)
        drift.append(float(obs.invariant_drift(flow.bind(data), run.final, data, start)))
    assert drift[0] > 1e-6
    assert drift[1] / drift[0] == pytest.approx(0.5, abs=0.1)


def test_flows_without_a_law_record_none():
    assert "invariant_drift" not in mf.canonical().observables(LINE)
    assert "invariant_drift" not in mf.vanilla("tanh").observables(PLANE)
    assert "invariant_drift" not in mf.full(penalty=0.1).observables(LINE)
    cloud = mf.canonical().init(jax.random.key(0), 3)
    with pytest.raises(ValueError, match="conserved"):
        obs.invariant_drift(mf.canonical(), cloud, LINE, cloud)


def test_particles_are_recorded_on_request_only():
    record = {"neurons": "neurons"}
    ds = mf.sweep(
        mf.canonical(),
        LINE,
        widths=(2, 5),
        steps=2,
        step=0.01,
        observe=record,
        execution=mf.sweeps.Execution(waste=0.0),
    )
    assert ds.neurons_r.dims == ("width", "seed", "step", "particle")
    assert ds.sizes["particle"] == 5
    assert int(np.isfinite(ds.neurons_theta.sel(width=2)).sum()) == 2 * 2
    plan = mf.sweep(mf.canonical(), LINE, widths=(2, 5), steps=2, step=0.01, compute=False)
    np.testing.assert_allclose(
        ds.neurons_r.sel(width=5, seed=0)[0], plan.cloud(width=5).particles.r, rtol=1e-15
    )


def test_a_name_may_stand_among_observables():
    flow, data, _ = MODELS["vanilla"]
    cloud = flow.init(jax.random.key(0), 6, dim=3)
    run = mf.descend(
        flow, cloud, data, 2, step=0.1, observe={"w": "neurons", "size": lambda f, c, d: c.width}
    )
    np.testing.assert_array_equal(run.observed["w"]["a"][-1], run.final.particles.a)
    with pytest.raises(ValueError, match="observe must name observables among"):
        mf.descend(flow, cloud, data, 2, step=0.1, observe={"w": "nothing"})


def test_all_observables_are_listed_and_no_others_have_names():
    """What the list offers can be recorded; margins are offered over the norm that what is trained maximizes."""
    signs = mf.Dataset(PLANE.x, np.where(np.arange(9) % 2, 1.0, -1.0))
    margins = {
        ("logistic", True, True): {"variation_margin"},
        ("logistic", False, True): {"kernel_margin"},
        ("logistic", True, False): set(),
        ("squared", True, True): set(),
    }
    for (loss, inner, outer), wanted in margins.items():
        flow = mf.vanilla("tanh", loss, inner=inner, outer=outer)
        listed = flow.observables(signs)
        assert {name for name in listed if name.endswith("margin")} == wanted
        assert {"neurons", "sharpness", "kernel_drift", "predictions"} <= set(listed)
        assert all(one.about for one in listed.values())
    flow = mf.vanilla("tanh", "logistic")
    cloud = flow.init(jax.random.key(0), 4, dim=3)
    listed = flow.observables(signs)
    run = mf.descend(flow, cloud, signs, 1, step=0.1, observe=list(listed))
    assert set(run.observed) == set(listed)
    with pytest.raises(ValueError, match=r"observe must name observables among .*got \['kernel_margin'\]"):
        mf.descend(flow, cloud, signs, 1, step=0.1, observe="kernel_margin")


@pytest.mark.parametrize("loss", ["squared", "softmax"])
def test_a_data_set_among_the_observables_stands_for_the_loss_on_it(loss):
    """Against predictions of the last cloud; batch norm keeps the statistics of the training data."""
    rng = np.random.default_rng(4)
    classes = loss == "softmax"
    make = lambda n: mf.Dataset(
        rng.normal(size=(n, 3)), rng.integers(0, 2, n) if classes else rng.normal(size=n)
    )
    train, test = make(12), make(5)
    flow = mf.batchnorm("tanh", loss)
    cloud = flow.init(jax.random.key(0), 6, dim=3, outputs=2 if classes else None)
    run = mf.descend(flow, cloud, train, 3, step=0.1, observe={"test": test, "moved": "displacement"})
    f = mf.predict(flow.bind(train), run.final, test.x)
    if classes:
        labels = np.asarray(test.y, int)
        expected = -np.mean(np.asarray(jax.nn.log_softmax(f))[np.arange(5), labels])
        np.testing.assert_allclose(run.observed["test"]["loss"][-1], expected, rtol=1e-12)
        right = np.mean(np.argmax(np.asarray(f), axis=1) == labels)
        np.testing.assert_allclose(run.observed["test"]["accuracy"][-1], right, rtol=1e-12)
    else:
        np.testing.assert_allclose(run.observed["test"][-1], np.mean((f - test.y) ** 2) / 2, rtol=1e-12)
    with pytest.raises(ValueError, match="as many columns as x"):
        wrong = mf.Dataset(np.ones((2, 2)), np.zeros(2))
        mf.descend(flow, cloud, train, 1, step=0.1, observe={"test": wrong})


def test_a_function_with_a_fourth_argument_sees_the_start():
    flow, data, _ = MODELS["vanilla"]
    cloud = flow.init(jax.random.key(0), 6, dim=3)
    moved = lambda flow, cloud, data, start: jnp.abs(cloud.particles.b - start.particles.b).max()
    run = mf.descend(flow, cloud, data, 2, step=0.1, observe=moved)
    expected = np.abs(run.final.particles.b - cloud.particles.b).max()
    assert float(run.observed[0]) == 0 < float(run.observed[-1]) == pytest.approx(float(expected))
    with pytest.raises(TypeError, match="function of 3 arguments"):
        mf.descend(flow, cloud, data, 2, step=0.1, observe=lambda flow: flow)
