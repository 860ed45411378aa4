"""Fluctuations over initializations: closed forms, differences of plain runs, and what carries them."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.integrate import solve_ivp

import meanflow as mf
from meanflow import plots

KEY = jax.random.key(0)


def hermite(count):
    """Return a tensor Gauss-Hermite cloud of standard normal a and b."""
    nodes, shares = np.polynomial.hermite_e.hermegauss(count)
    shares = shares / shares.sum()
    a, b = np.meshgrid(nodes, nodes, indexing="ij")
    weights = (shares[:, None] * shares[None, :]).ravel()
    return mf.Cloud(mf.Neurons(a.ravel(), b.ravel()[:, None]), weights, width=np.inf)


def test_a_linear_network_fluctuates_as_its_closed_form_says():
    # with x = y = 1 the products u = (a + b)/2 and v = (a - b)/2 grow and shrink like e^s and e^-s, where
    # s' = 1 - f: so f(s) = A e^2s - B e^-2s with A = <u^2>, B = <v^2>, and t(s) is an integral of 1/(1 - f).
    # The moments A and B of m neurons have variance 1/2 each over m, and no covariance: the delta method in (A, B)
    times = np.array([0.1, 0.25, 0.5, 1.0, 2.0])
    given = {
        "mean": [0.182212, 0.402277, 0.661864, 0.906588, 0.994228],
        "covariance": [0.71800, 0.50785, 0.28575, 0.05004, 0.00048],
        "bias": [-0.0447, -0.1855, -0.3665, -0.3022, -0.0473],
    }

    @functools.cache
    def f(a, b):
        # solution of f' = (1 - f) 2 (A e^2s + B e^-2s) = 2 (1 - f) sqrt(f^2 + 4 A B), f(0) = A - B
        rhs = lambda t, f: 2 * (1 - f) * np.sqrt(f**2 + 4 * a * b)
        return solve_ivp(rhs, (0, 2), [a - b], method="DOP853", rtol=1e-12, atol=1e-13, t_eval=times).y[0]

    h = 2e-3
    at = lambda i, j: f(0.5 + i * h, 0.5 + j * h)
    first = lambda i, j: (8 * (at(i, j) - at(-i, -j)) - at(2 * i, 2 * j) + at(-2 * i, -2 * j)) / (12 * h)
    second = lambda i, j: (
        (16 * (at(i, j) + at(-i, -j)) - at(2 * i, 2 * j) - at(-2 * i, -2 * j) - 30 * at(0, 0)) / (12 * h**2)
    )
    # u^2 of a neuron has mean 1/2 and variance 1/2, and so has v^2
    expected = {
        "mean": at(0, 0),
        "covariance": (first(1, 0) ** 2 + first(0, 1) ** 2) / 2,
        "bias": (second(1, 0) + second(0, 1)) / 4,
    }
    flow, data = mf.vanilla(lambda z: z), mf.Dataset(np.ones((1, 1)), np.ones(1))
    found = mf.fluctuations(flow, hermite(3), data, 2.0, np.ones((1, 1)), ts=times)
    for name, value in expected.items():
        np.testing.assert_allclose(np.ravel(getattr(found, name)), value, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(value, given[name], atol=6e-5 if name == "bias" else 6e-6)
    assert np.all(found.bias_error == 0)
    np.testing.assert_allclose(found.deviation(100)[:, 0], np.sqrt(expected["covariance"] / 100), atol=1e-6)
    # random directions see the same bias, within their own error
    some = mf.fluctuations(flow, hermite(3), data, 2.0, np.ones((1, 1)), directions=8, ts=times)
    assert np.all(np.abs(some.bias[:, 0] - expected["bias"]) < 4 * some.bias_error[:, 0])
    assert np.all(some.bias_error > 0)


X2 = jax.random.normal(jax.random.fold_in(KEY, 1), (7, 2))
PLANE = mf.Dataset(X2, jnp.sin(X2[:, 0]) + X2[:, 1])
LINE = mf.Dataset(jnp.linspace(-1, 1, 5), jnp.linspace(-1, 1, 5) ** 2, weights="sum")
POINTS = jax.random.normal(jax.random.fold_in(KEY, 2), (3, 2))
EXACT = {"step": mf.Adaptive(1e-10, 1e-12)}


def manifold():
    flow = mf.batchnorm_manifold("tanh").bind(PLANE)
    return flow, flow.init(KEY, 6, dim=2, labels=jnp.linspace(0.5, 2.0, 6)), PLANE, POINTS, EXACT


def vector():
    flow, data = mf.vanilla("tanh"), mf.Dataset(X2, jnp.stack([X2[:, 0], X2[:, 1] ** 2], 1))
    return flow, flow.init(KEY, 6, dim=2, outputs=2), data, POINTS, EXACT


def lifted():
    flow = mf.lifted()
    cloud = flow.init(KEY, 6, labels=jnp.linspace(-1.0, 1.0, 6))
    return flow, cloud, LINE, jnp.array([-0.3, 0.4]), {"solver": "sliding", "step": 0.02}


def planar():
    flow = mf.planar()
    return flow, flow.init(KEY, 6), LINE, jnp.array([-0.3, 0.4]), {"solver": "sliding", "step": 0.02}


def plane_relu():
    flow = mf.vanilla("relu")
    return flow, flow.init(KEY, 6, dim=2), PLANE, POINTS, {"solver": "sliding", "step": 0.05}


def padded():
    flow = mf.batchnorm("tanh")
    cloud = flow.init(KEY, 4, dim=2)
    return flow, mf.Cloud(cloud.particles, [0.4, 0.3, 0.2, 0.1]).pad(6), PLANE, None, EXACT


def centered():
    flow = mf.vanilla("tanh", alpha="sqrt", centered=True)
    return flow, flow.init(KEY, 6, dim=2), PLANE, POINTS, EXACT | {"clock": "lazy"}


def paired():
    flow = mf.vanilla("tanh")
    return flow, flow.init(KEY, 6, dim=2, paired=True), PLANE, POINTS, EXACT


def reaction():
    flow = mf.vanilla("tanh")
    return flow, flow.init(KEY, 6, dim=2), PLANE, POINTS, EXACT | {"dynamics": mf.Reaction(0.5)}


def noise():
    flow = mf.vanilla("tanh")
    settings = {"dynamics": mf.Noise(0.01, KEY), "step": 0.05}
    return flow, flow.init(KEY, 6, dim=2), PLANE, POINTS, settings


def test_error():
    flow = mf.vanilla("tanh")
    return flow, flow.init(KEY, 6, dim=2), PLANE, mf.Dataset(POINTS, POINTS[:, 0]), EXACT


test_error.__test__ = False


def steps():
    flow = mf.vanilla("tanh")
    settings = {"optimizer": optax.adam(0.02), "every": 5, "batches": mf.Batches(3, KEY), "run": mf.descend}
    return flow, flow.init(KEY, 6, dim=2), PLANE, POINTS, settings


CASES = (
    manifold,
    vector,
    lifted,
    planar,
    plane_relu,
    padded,
    centered,
    paired,
    reaction,
    noise,
    test_error,
    steps,
)


def by_hand(run, cloud, members, h):
    """Return m Cov and m bias from plain runs that start from mixtures of the cloud with one neuron, or pair.

    Args:
        run: weights -> (times, entries).
        cloud: the cloud.
        members: how many neurons are drawn together.
        h: the share that is mixed in.
    """
    p = np.asarray(cloud.weights)
    start, covariance, bias = run(p), 0.0, 0.0
    for first in range(0, len(p), members):
        mass = p[first : first + members].sum()
        if mass == 0:
            continue
        unit = np.where((np.arange(len(p)) // members) == first // members, p / mass, 0.0)
        near, far = ([run((1 - s * e) * p + s * e * unit) for s in (1, -1)] for e in (h, 2 * h))
        slope = (8 * (near[0] - near[1]) - (far[0] - far[1])) / (12 * h)
        bend = (16 * (near[0] + near[1]) - (far[0] + far[1]) - 30 * start) / (12 * h**2)
        covariance += members * mass * np.einsum("te,tf->tef", slope, slope)
        bias += members * mass * bend / 2
    return start, covariance, bias


QUICK = (paired, steps)


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_derivatives_are_differences_of_plain_runs(case):
    flow, cloud, data, x, settings = case()
    members = 2 if case is paired else 1
    descending = settings.pop("run", mf.solve) is mf.descend
    if descending:
        solver, end, horizon = mf.descend, 10, {}
    else:
        solver, end, horizon = mf.solve, 1.5, {"ts": jnp.array([0.5, 1.5])}
    given = settings | horizon
    if isinstance(x, mf.Dataset):
        observe = {"test": x}
        seen = lambda observed: observed["test"]
    else:
        points = data.x if x is None else x
        observe = lambda flow, cloud, data: mf.predict(flow, cloud, points)
        seen = lambda observed: observed

    @jax.jit
    def plain(weights):
        start = eqx.tree_at(lambda c: c.weights, cloud, weights)
        observed = solver(flow, start, data, end, observe=observe, throw=False, **given).observed
        return seen(observed).reshape(seen(observed).shape[0], -1)

    run = lambda weights: np.asarray(plain(jnp.asarray(weights)))
    smooth = not flow.feature.has_kinks()
    start, covariance, bias = by_hand(run, cloud, members, 1e-2 if smooth else 1e-4)
    how = given | ({"run": mf.descend} if descending else {}) | ({"paired": True} if members == 2 else {})
    directions = 6 if smooth else 0
    found = mf.fluctuations(flow, cloud, data, end, x, directions=directions, **how)
    size = start.shape[1]
    flat = np.asarray(found.covariance).reshape(len(start), size, size)
    np.testing.assert_allclose(np.asarray(found.mean).reshape(start.shape), start, atol=1e-7)
    scale = np.abs(covariance).max()
    np.testing.assert_allclose(flat, covariance, atol=(1e-6 if smooth else 1e-5) * scale)
    if smooth:
        scale = np.abs(bias).max()
        np.testing.assert_allclose(np.asarray(found.bias).reshape(start.shape), bias, atol=2e-5 * scale)
    # reverse mode sees what forward mode does: one number is fewer than the neurons, all of them are more
    if x is POINTS:
        one = mf.fluctuations(flow, cloud, data, end, x[:1], directions=0, chunk=1, **how)
        first = np.asarray(one.covariance).reshape(len(start), size // 3, size // 3)
        np.testing.assert_allclose(first, flat[:, : size // 3, : size // 3], atol=1e-9 * np.abs(flat).max())


FLOW = mf.vanilla("tanh")
CLOUD = FLOW.init(KEY, 6, dim=2)


def test_runs_carry_fluctuations_by_name():
    names = ["dissipation", "fluctuations"]
    run = mf.solve(FLOW, CLOUD, PLANE, 1.0, ts=jnp.array([0.5, 1.0]), observe=names)
    found = mf.fluctuations(FLOW, CLOUD, PLANE, 1.0, ts=jnp.array([0.5, 1.0]))
    plain = mf.solve(FLOW, CLOUD, PLANE, 1.0, ts=jnp.array([0.5, 1.0]), observe=["dissipation"])
    np.testing.assert_array_equal(run.observed["dissipation"], plain.observed["dissipation"])
    for name in ("mean", "covariance", "bias", "bias_error"):
        np.testing.assert_array_equal(run.observed["fluctuations"][name], getattr(found, name))
    table = run.to_xarray()
    np.testing.assert_array_equal(found.solution.to_xarray().fluctuations_mean, table.fluctuations_mean)
    assert table.fluctuations_covariance.shape == (2, 7, 7)
    assert table.fluctuations_mean.dims == ("time", "sample") and "ends" not in run.stats


def test_sweeps_record_fluctuations_of_padded_clouds():
    settings = {"step": 0.1, "clock": "mean_field"}
    plan = mf.sweep(FLOW, PLANE, widths=[4, 6], steps=3, observe=["fluctuations"], compute=False, **settings)
    runs, cloud = plan.run().isel(step=-1), plan.cloud(width=4, seed=0)
    found = mf.fluctuations(FLOW, cloud, PLANE, 3, run=mf.descend, **settings)
    for name, atol in (("covariance", 1e-9), ("bias", 1e-7)):
        seen = runs[f"fluctuations_{name}"].sel(width=4, seed=0)
        np.testing.assert_allclose(seen, getattr(found, name)[-1], atol=atol, err_msg=name)


def test_what_cannot_fluctuate_is_refused():
    state = mf.descend(FLOW, CLOUD, PLANE, 1, step=0.1).state
    with pytest.raises(ValueError, match="state must be None"):
        mf.fluctuations(FLOW, CLOUD, PLANE, 2, run=mf.descend, step=0.1, state=state)
    with pytest.raises(ValueError, match="steady must be None"):
        mf.fluctuations(FLOW, CLOUD, PLANE, 2.0, steady=1e-3)
    with pytest.raises(ValueError, match="run must be"):
        mf.fluctuations(FLOW, CLOUD, PLANE, 2.0, run=print)
    with pytest.raises(ValueError, match="even number"):
        mf.fluctuations(FLOW, FLOW.init(KEY, 5, dim=2), PLANE, 2, paired=True, run=mf.descend, step=0.1)
    with pytest.raises(ValueError, match="solve, descend and sweep record"):
        FLOW.observables(PLANE)["fluctuations"].measure(None, CLOUD, None)


def test_nothing_is_known_of_a_run_that_failed():
    found = mf.fluctuations(FLOW, CLOUD, PLANE, 3, run=mf.descend, step=1e200, throw=False, directions=0)
    assert not found.solution.ok and np.all(np.isnan(found.covariance)) and np.all(np.isnan(found.mean))
    with pytest.raises(ValueError, match="directions must be at least 1"):
        found.bias  # noqa: B018


def test_bands_are_drawn_around_their_functions():
    ax = plots.fit([0.0, 1.0], {"f": [1.0, 2.0], "g": [0.0, 0.0]}, None, bands={"f": [0.5, 0.25]})
    (band,) = ax.collections
    low, high = np.min(band.get_paths()[0].vertices[:, 1]), np.max(band.get_paths()[0].vertices[:, 1])
    assert (low, high) == (0.5, 2.25)
    with pytest.raises(ValueError, match="bands must have names among"):
        plots.fit([0.0, 1.0], {"f": [1.0, 2.0]}, None, bands={"h": [0.5, 0.25]})
