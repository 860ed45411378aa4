"""Weights that move: replicator dynamics, the projection of balanced ReLU networks, the energy identity."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import largest_gap, problem, ring

import meanflow as mf
from meanflow import activations
from meanflow.flows import _equation as equation
from meanflow.flows import certificate
from meanflow.flows._problem import Problem

NOTHING = mf.Dataset(jnp.zeros((1, 2)), jnp.zeros(1))


@pytest.mark.parametrize(
    ("decay", "alpha"),
    [(0.3, "sqrt"), *(pytest.param(*c, marks=pytest.mark.slow) for c in ((0.0, "m"), (0.3, "m")))],
)
def test_a_balanced_relu_network_is_a_flow_of_free_mass_on_the_sphere(decay, alpha):
    """Path by path: direction b/|b|, mass p |a| |b|; V includes the output scale, reaction has rate 2."""
    rng = np.random.default_rng(3)
    m, d, n = 6, 3, 5
    b = rng.normal(size=(m, d))
    a = np.linalg.norm(b, axis=1) * np.where(np.arange(m) % 2, 1.0, -1.0)
    data = mf.Dataset(rng.normal(size=(n, d)), rng.normal(size=n))
    weights = rng.uniform(0.5, 1.5, m)
    raw_cloud = mf.Cloud(mf.Neurons(a, b), weights / weights.sum())
    half = lambda w: 0.5 * (w.a**2 + jnp.sum(w.b**2, axis=1))
    raw = mf.vanilla("relu", alpha=alpha, penalty=(half, decay))
    flow = mf.vanilla("relu", inner="sphere", alpha=alpha, penalty=(lambda w: jnp.ones_like(w.a), decay))
    settings = {"step": mf.Adaptive(1e-11, 1e-13)}
    one = mf.solve(raw, raw_cloud, data, 0.12, **settings).final
    two = mf.solve(
        flow,
        flow.space.from_raw(raw_cloud),
        data,
        0.12,
        dynamics=mf.Reaction(2.0, conserve=False),
        **settings,
    ).final
    moved = flow.space.from_raw(one)
    assert largest_gap(moved.particles, two.particles) < 1e-10
    assert largest_gap(moved.weights, two.weights) < 1e-10
    np.testing.assert_allclose(mf.energy(raw, one, data), mf.energy(flow, two, data), rtol=1e-9)
    assert abs(float(two.total) - float(flow.space.from_raw(raw_cloud).total)) > 1e-2
    assert largest_gap(two.particles.b, flow.space.from_raw(raw_cloud).particles.b) > 1e-2


def test_reaction_alone_is_replicator_dynamics():
    """With a potential that does not depend on the measure, p_i(t) is proportional to p_i(0) exp(-beta V_i t)."""
    values = jnp.array([0.0, 0.5, -1.0, 2.0])
    start = mf.Cloud(mf.Neurons(values, jnp.ones((4, 2))), [0.1, 0.2, 0.3, 0.4]).pad(6)
    flow = mf.vanilla("tanh", inner=0.0, outer=0.0, penalty=(lambda w: w.a, 0.7))
    grown = np.asarray(start.weights[:4]) * np.exp(-3.0 * 0.7 * np.asarray(values) * 2.0)
    for run in (
        mf.solve(flow, start, NOTHING, 2.0, dynamics=mf.Reaction(3.0), step=mf.Adaptive(1e-10, 1e-12)),
        mf.descend(
            flow, start, NOTHING, 20, step=0.1, dynamics=mf.Reaction(3.0)
        ),  # exact at any step: V is frozen
    ):
        np.testing.assert_allclose(run.final.weights[:4], grown / grown.sum(), rtol=1e-9)
        assert abs(float(run.final.total) - 1) < 4e-16 and float(run.final.weights[4:].max()) == 0
        assert largest_gap(run.final.particles, start.particles) == 0
    free = mf.solve(
        flow, start, NOTHING, 2.0, dynamics=mf.Reaction(3.0, conserve=False), step=mf.Adaptive(1e-10, 1e-12)
    )
    np.testing.assert_allclose(free.final.weights[:4], grown, rtol=1e-8)
    np.testing.assert_allclose(free.final.total, grown.sum(), rtol=1e-8)
    # a potential of a thousand neither overflows nor loses the probability
    steep = mf.descend(flow, start, NOTHING, 1, step=1e3, dynamics=mf.Reaction(3.0))
    np.testing.assert_allclose(steep.final.weights[:4], [0, 0, 1, 0], atol=1e-12)


@pytest.mark.parametrize("conserve", [True, False])
def test_energy_falls_by_transport_and_reaction(conserve):
    flow, cloud, data = problem("batchnorm_manifold", loss="logistic")
    beta = 1.7
    stepped = Problem(flow.chart(cloud), data, jnp.ones(()), reaction=jnp.asarray(beta), conserve=conserve)
    y = stepped.initial()
    y = y._replace(log_growth=jnp.linspace(-1.0, 1.0, 7))
    slope = jax.jvp(lambda y: equation.energy(flow, stepped.cloud(y), data), (y,), (stepped.field(0.0, y),))[
        1
    ]
    here = stepped.cloud(y)
    rate = mf.dissipation(flow, here, data, reaction=beta, conserve=conserve)
    np.testing.assert_allclose(-slope, rate, rtol=1e-12)
    assert float(rate) > 1.01 * float(mf.dissipation(flow, here, data)) > 0


@pytest.mark.slow
def test_transport_alone_is_stuck_on_an_arc_and_reaction_gets_out():
    """The arc of Theorem 5 holds 99 % of the mass; a fine grid of directions with the rest is enough for reaction."""
    x = ring(32)
    student = mf.batchnorm_manifold(
        activations.softplus(4.0), covariance=np.diag([5.0, 1.0]), mean=np.zeros(2)
    )
    circle = lambda turn: jnp.stack([jnp.cos(turn), jnp.sin(turn)], axis=1)
    teacher = mf.Neurons(3.0 * jnp.array([1.0, -1.0, 1.5]), circle(jnp.array([0.4, 1.9, 4.0])))
    data = mf.Dataset(x, mf.predict(student, student.space.from_raw(mf.Cloud(teacher)), x))
    arc, grid = jnp.linspace(0.0, 0.5, 32), 2 * jnp.pi * jnp.arange(48) / 48
    alone = student.space.from_raw(mf.Cloud(mf.Neurons(jnp.zeros(32), circle(arc))))
    stuck = mf.solve(student, alone, data, 200.0, step=mf.Adaptive(1e-6, 1e-8))
    assert float(stuck.energy[-1]) > 0.1 and float(certificate(student, stuck.final, data).value) > 0.2
    both = mf.Neurons(
        jnp.concatenate([jnp.zeros(32), jnp.full(48, 0.1), jnp.full(48, -0.1)]),
        circle(jnp.concatenate([arc, grid, grid])),
    )
    weights = np.concatenate([np.full(32, 0.99 / 32), np.full(96, 0.01 / 96)])
    start = student.space.from_raw(mf.Cloud(both, weights))
    free = mf.solve(student, start, data, 200.0, dynamics=mf.Reaction(1.0), step=mf.Adaptive(1e-6, 1e-8))
    assert float(free.energy[-1]) < 1e-4 and float(certificate(student, free.final, data).value) < 2e-2
    np.testing.assert_allclose(free.final.total, 1.0, rtol=1e-14)


@pytest.mark.parametrize("conserve", [True, False])
@pytest.mark.parametrize(
    ("solver", "first", "rest", "total", "settings", "gap"),
    [
        (mf.solve, 0.5, 1.0, 1.0, {"step": 0.125}, 0.0),
        (mf.solve, 0.5, 1.0, 1.0, {"step": mf.Adaptive(1e-9, 1e-11)}, 1e-9),
        (mf.descend, 4, 4, 8, {"step": 0.125}, 0.0),
    ],
)
def test_runs_with_reaction_resume_from_any_cloud_of_theirs(
    solver, first, rest, total, settings, gap, conserve, tmp_path
):
    """Weights grow from those of the start: taking those of the end for them would apply the growth twice."""
    flow, cloud, data = problem("vanilla")
    settings = settings | {"dynamics": mf.Reaction(0.8, conserve=conserve)}
    whole = solver(flow, cloud, data, total, **settings)
    half = solver(flow, cloud, data, first, **settings)
    loaded = mf.Solution.load(half.save(tmp_path / "half"))
    for here, state in ((cloud, half.state), (half.final, half.state), (loaded.final, loaded.state)):
        resumed = solver(flow, here, data, rest, state=state, **settings)
        assert largest_gap(resumed.final, whole.final) <= gap
    assert largest_gap(whole.final.weights, half.final.weights) > 1e-3


def test_a_run_with_reaction_does_not_go_on_without():
    flow, cloud, data = problem("vanilla")
    half = mf.solve(flow, cloud, data, 0.5, step=0.125, dynamics=mf.Reaction(0.8))
    with pytest.raises(ValueError, match="dynamics: 'reaction' before"):
        mf.solve(flow, cloud, data, 1.0, state=half.state, step=0.125)


def test_resampling_keeps_the_measure(key):
    weights = jnp.array([0.5, 0.05, 0.45, 0.0])
    cloud = mf.Cloud(mf.Polar(jnp.arange(4.0), jnp.zeros(4)), 3 * weights, labels=jnp.arange(4.0), total=None)
    keys = jax.random.split(key, 200)
    copies = jax.vmap(lambda k: cloud.resample(k, 10).particles.r)(keys)
    counts = jnp.sum(copies[:, :, None] == jnp.arange(4.0)[None, None, :], axis=1)
    assert bool(jnp.all(jnp.abs(counts - 10 * weights[None, :]) < 1))  # floor or ceil of the expected number
    np.testing.assert_allclose(counts.mean(0), 10 * weights, atol=0.15)
    one = cloud.resample(key)
    assert one.size == 4 and float(one.width) == 4 and float(one.labels.max()) < 3
    np.testing.assert_allclose(one.total, 3.0)
