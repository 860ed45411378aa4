"""What ``solve`` does when solver and step are left to it: by the model, and with an error that is measured."""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meanflow as mf
from meanflow import activations
from meanflow.flows._observables import displacement
from meanflow.solvers import _defaults as defaults

X = jnp.linspace(-1.0, 1.0, 6)
LINE = mf.Dataset(X, jnp.sin(5 * X), weights="sum")
PLANE = mf.Dataset(np.random.default_rng(0).normal(size=(12, 2)), np.sin(np.arange(12.0)))


def test_the_model_decides():
    line, plane = mf.canonical().init(jax.random.key(0), 4), mf.vanilla().init(jax.random.key(0), 4, dim=2)

    def chosen(flow, cloud, data, solver=None, step=None):
        method = defaults.choose(flow.bind(data), cloud, data, solver, step)
        return type(method.stepper).__name__, type(method.rule).__name__, method.order

    assert chosen(mf.vanilla("tanh"), plane, PLANE) == ("Tsit5", "Adaptive", None)
    assert chosen(mf.canonical(), line, LINE) == ("Sliding", "KernelStep", 2)
    assert chosen(mf.vanilla(), plane, PLANE) == ("Sliding", "KernelStep", 2)
    single = jax.tree.map(lambda u: u.astype("float32"), (plane, PLANE))
    assert chosen(mf.vanilla(), *single) == ("Sliding", "KernelStep", 2)
    assert chosen(mf.canonical(), line, LINE, step=0.1) == ("Sliding", "ConstantStep", None)
    assert chosen(mf.canonical(), line, LINE, step=mf.Adaptive()) == ("Tsit5", "Adaptive", None)
    rough = mf.vanilla(lambda z: jnp.maximum(z, 0) ** 2 + jnp.minimum(z, 0))  # a kink that no motion knows
    assert chosen(rough, plane, PLANE) == ("RungeKutta", "KernelStep", 1)


@pytest.mark.parametrize("name", sorted(activations.NAMED))
def test_kinks_are_seen(name):
    assert activations.has_kink(activations.NAMED[name]) == (name in ("relu", "leaky_relu", "abs"))


def test_the_measured_error_is_the_error():
    """Against steps fifty times shorter; half the measured error to twice that, far from 0."""
    flow = mf.canonical()
    cloud = flow.init(jax.random.key(0), 20)
    run = mf.solve(flow, cloud, LINE, 5.0, ts=3)
    truth = mf.solve(flow, cloud, LINE, 5.0, ts=3, solver="sliding", step=mf.KernelStep(0.005))
    error = float(displacement(flow, run.final, LINE, truth.final))
    assert 1e-6 < error < 2e-3
    assert 0.5 < float(run.stats["error"]) / error < 2
    quiet = mf.solve(flow, cloud, LINE, 5.0, ts=3, step=mf.KernelStep(0.25))
    assert "error" not in quiet.stats
    np.testing.assert_array_equal(quiet.energy, run.energy)


def test_a_run_by_default_is_resumed_and_compiled():
    flow = mf.vanilla(lambda z: jnp.maximum(z, 0) ** 2 + jnp.minimum(z, 0))
    cloud = flow.init(jax.random.key(0), 4, dim=2)
    half = mf.solve(flow, cloud, PLANE, 1.0)
    rest = mf.solve(flow, half.final, PLANE, 1.5, state=half.state)
    assert "error" in half.stats
    assert "error" not in rest.stats
    assert float(rest.energy[-1]) < float(half.energy[-1])
    inside = jax.jit(lambda cloud: mf.solve(flow, cloud, PLANE, 1.0))(cloud)
    assert "error" not in inside.stats
    np.testing.assert_allclose(inside.energy, half.energy, rtol=1e-9)


def test_a_default_that_runs_out_of_events_takes_the_rougher_method(monkeypatch):
    monkeypatch.setattr(defaults, "SLIDING", mf.solvers.Sliding(max_events=1))
    flow = mf.canonical()
    cloud = flow.init(jax.random.key(0), 20)
    run = mf.solve(flow, cloud, LINE, 5.0)
    assert bool(run.ok)
    assert dict(run.settings.names)["solver"] == "Heun"


def test_a_run_that_chatters_says_so():
    """Kinks away from 0 are not seen beforehand; rejected steps tell, and the advice leads to the same energy."""
    flow = mf.vanilla(lambda z: jnp.clip(z, -1.0, 1.0))
    cloud = flow.init(jax.random.key(1), 16, dim=2, b=mf.measures.laws.normal(2.0, dim=2))
    with pytest.warns(UserWarning, match=r"adaptive steps were rejected.*solver=diffrax.Heun\(\), step=0.01"):
        rough = mf.solve(flow, cloud, PLANE, 2.0)
    assert int(rough.stats["num_rejected_steps"]) > 100
    fixed = mf.solve(
        flow, cloud, PLANE, 2.0, solver=diffrax.Heun(), step=0.01
    )  # a warning would be an error here
    np.testing.assert_allclose(fixed.energy, rough.energy, rtol=1e-3)
    smooth = mf.solve(mf.vanilla("tanh"), cloud, PLANE, 2.0)
    assert int(smooth.stats["num_rejected_steps"]) < 10


@pytest.mark.parametrize("make", [mf.batchnorm, mf.batchnorm_manifold])
def test_a_scale_and_shift_of_each_neuron_bend_the_kinks(make):
    """Such networks take Heun's steps, and end where gradient descent in short steps does."""
    flow = make("relu", affine=True).bind(PLANE)
    cloud = flow.init(jax.random.key(0), 4, dim=2)
    found = mf.solve(flow, cloud, PLANE, 1.0)
    assert dict(found.settings.names)["solver"] == "Heun" and found.stats["error"] < 0.01
    short = mf.descend(flow, cloud, PLANE, 2000, step=5e-4)
    assert abs(found.energy[-1] - short.energy[-1]) < 1e-3
    with pytest.raises(ValueError, match="kinks are no planes"):
        mf.solve(flow, cloud, PLANE, 1.0, solver="sliding", step=0.1)
