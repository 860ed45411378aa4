"""Continuous time: dissipation equality, resume, clocks, adjoints, padding, save and load, result codes."""

import chex
import diffrax
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
from helpers import MODELS, largest_gap, problem

import meanflow as mf
from meanflow.flows._problem import Problem
from meanflow.geometry import _omega as omega

TIGHT = {"step": mf.Adaptive(1e-10, 1e-12)}


@pytest.mark.parametrize("model", MODELS)
def test_against_scipy_with_energy_balance(model):
    """Same trajectory as DOP853, and E(0) - E(t) = integral of the dissipation (Gauss-Legendre in time)."""
    flow, cloud, data = problem(model, norms=(0.7, 1.5))
    nodes, weights = np.polynomial.legendre.leggauss(40)
    ts = (nodes + 1) / 2
    sol = mf.solve(flow, cloud, data, 1.0, ts=ts, observe={"rate": mf.dissipation}, **TIGHT)
    lost = mf.energy(flow, cloud, data) - mf.energy(flow, sol.final, data)
    np.testing.assert_allclose(weights / 2 @ sol.observed["rate"], lost, rtol=1e-8)

    flat, unravel = jax.flatten_util.ravel_pytree(cloud.particles)
    field = jax.jit(lambda y: jax.flatten_util.ravel_pytree(mf.velocity(flow, cloud.at(unravel(y)), data))[0])
    reference = scipy.integrate.solve_ivp(
        lambda t, y: np.asarray(field(y)), (0, 1.0), np.asarray(flat), "DOP853", rtol=1e-11, atol=1e-13
    )
    assert reference.success
    ours = jax.flatten_util.ravel_pytree(sol.final.particles)[0]
    np.testing.assert_allclose(ours, reference.y[:, -1], rtol=1e-8, atol=1e-9)
    assert bool(sol.ok)


def test_norms_and_omega_are_conserved():
    flow, cloud, data = problem("batchnorm")
    sol = mf.solve(flow, cloud, data, 5.0, **TIGHT)
    norms = [jnp.linalg.norm(c.particles.b, axis=1) for c in (cloud, sol.final)]
    np.testing.assert_allclose(norms[1], norms[0], rtol=1e-9)
    manifold = mf.batchnorm_manifold("tanh").bind(data)
    there = mf.solve(manifold, mf.geometry.project(cloud, flow.feature.covariance), data, 5.0, **TIGHT)
    np.testing.assert_allclose(
        omega.sigma_norm(there.final.particles.b, flow.feature.covariance), 1, rtol=1e-9
    )
    np.testing.assert_allclose(
        mf.predict(manifold, there.final, data.x), mf.predict(flow, sol.final, data.x), atol=1e-8
    )


@pytest.mark.parametrize("step", [1 / 64, mf.KernelStep(0.05, 4)], ids=["fixed", "kernel"])
@pytest.mark.parametrize("solver", [diffrax.Euler(), diffrax.Tsit5()], ids=["euler", "tsit5"])
def test_two_halves_equal_the_whole_bit_for_bit(step, solver):
    flow, cloud, data = problem("batchnorm")
    settings = {"solver": solver, "step": step}
    # steps are cut to land on save times: only on a dyadic grid does that change nothing
    whole = mf.solve(flow, cloud, data, 1.0, ts=[0.5, 1.0] if step == 1 / 64 else None, **settings)
    # the grid of a KernelStep is not dyadic: cut at a step of the full run
    cut = _step_times(flow, cloud, data, settings)[5] if isinstance(step, mf.KernelStep) else 0.5
    half = mf.solve(flow, cloud, data, cut, **settings)
    rest = mf.solve(flow, half.final, data, 1.0, state=half.state, **settings)
    assert largest_gap(rest.final.particles, whole.final.particles) == 0
    assert int(rest.state.steps) == int(whole.state.steps)


def _step_times(flow, cloud, data, settings):
    """Times after each step, found by stopping earlier and earlier runs of one step."""
    times, state, here = [], None, cloud
    settings = settings | {"step": mf.KernelStep(0.05, 4, max_steps=1)}
    for _ in range(6):
        one = mf.solve(flow, here, data, 1.0, state=state, throw=False, **settings)
        state, here = one.state, one.final
        times.append(float(one.state.t))
    return times


def test_adaptive_runs_resume_to_tolerance():
    flow, cloud, data = problem("vanilla")
    whole = mf.solve(flow, cloud, data, 2.0, **TIGHT)
    half = mf.solve(flow, cloud, data, 1.0, **TIGHT)
    rest = mf.solve(flow, cloud, data, 2.0, state=half.state, **TIGHT)
    assert largest_gap(rest.final.particles, whole.final.particles) < 1e-9


def test_state_of_another_solver_is_refused():
    flow, cloud, data = problem("vanilla")
    half = mf.solve(flow, cloud, data, 1.0, solver=diffrax.Euler(), step=0.5)
    with pytest.raises(ValueError, match="solver: 'Euler' before, 'Tsit5' now"):
        mf.solve(flow, cloud, data, 2.0, state=half.state)


@pytest.mark.parametrize("step", [1 / 32, None], ids=["fixed", "adaptive"])
def test_padded_and_stacked_clouds_follow_the_same_path(step):
    flow, cloud, data = problem("batchnorm")
    small = mf.Cloud(jax.tree.map(lambda u: u[:4], cloud.particles))
    alone = [mf.solve(flow, c, data, 1.0, step=step).final for c in (small, cloud)]
    both = jax.vmap(lambda c: mf.solve(flow, c, data, 1.0, step=step).final)(mf.Cloud.stack([small, cloud]))
    for k, single in enumerate(alone):
        row = jax.tree.map(lambda u, k=k, n=single.size: u[k, :n], both.particles)
        assert largest_gap(row, single.particles) < 1e-13


@pytest.mark.parametrize(("clock", "factor"), [("mean_field", 1.0), ("gradient", 7.0), ("lazy", 1.0)])
def test_clocks(clock, factor):
    flow, cloud, data = problem("batchnorm")
    reference = mf.solve(flow, cloud, data, 1.0, step=1 / 32)
    other = mf.solve(flow, cloud, data, factor, step=factor / 32, clock=clock)
    assert largest_gap(other.final.particles, reference.final.particles) < 1e-12


def test_save_times_and_observers():
    flow, cloud, data = problem("vanilla")
    sol = mf.solve(flow, cloud, data, 1.0, ts=5, **TIGHT)
    np.testing.assert_allclose(sol.ts, [0, 0.25, 0.5, 0.75, 1.0])
    assert largest_gap(jax.tree.map(lambda u: u[0], sol.clouds.particles), cloud.particles) == 0
    np.testing.assert_allclose(
        sol.energy, jax.vmap(lambda c: mf.energy(flow, c, data))(sol.clouds), rtol=1e-13
    )
    seen = mf.solve(
        flow, cloud, data, 1.0, ts=5, observe=lambda flow, cloud, data: cloud.particles.a, **TIGHT
    )
    assert seen.clouds is None
    np.testing.assert_allclose(seen.observed, sol.clouds.particles.a, rtol=1e-12)


def test_steady_state_stops():
    flow, cloud, data = problem("vanilla")
    sol = mf.solve(flow, cloud, data, 1e4, steady=0.02)
    assert bool(sol.result == mf.RESULTS.event_occurred)
    assert bool(sol.ok)
    assert float(sol.state.t) < 1e4
    assert 0.01 < float(jnp.sqrt(mf.dissipation(flow, sol.final, data))) < 0.02


def test_failures_are_codes_and_may_throw():
    flow, cloud, data = problem("vanilla", activation="relu")
    wild = mf.solve(flow, cloud, data, 1e4, solver=diffrax.Euler(), step=50.0, throw=False)
    assert bool(wild.result == mf.RESULTS.non_finite)
    with pytest.raises(RuntimeError, match="not finite") as failure:
        mf.solve(flow, cloud, data, 1e4, solver=diffrax.Euler(), step=50.0)
    assert bool(failure.value.solution.result == mf.RESULTS.non_finite)
    codes = jax.vmap(lambda t: mf.solve(flow, cloud, data, t, step=mf.Adaptive(max_steps=3)).ok)(
        jnp.array([1e-3, 10.0])
    )
    assert codes.tolist() == [True, False]  # under vmap nothing is raised
    short = mf.solve(flow, cloud, data, 10.0, step=mf.Adaptive(max_steps=3), throw=False)
    assert bool(short.result == mf.RESULTS.max_steps_reached)
    assert not bool(short.ok)


def test_saved_solutions_load_and_resume(tmp_path):
    flow, cloud, data = problem("batchnorm_manifold")
    settings = {"step": 1 / 16}
    half = mf.solve(
        flow, cloud, data, 0.5, ts=3, observe={"f": lambda f, c, d: mf.predict(f, c, d.x)}, **settings
    )
    loaded = mf.Solution.load(half.save(tmp_path / "half"))
    assert jax.tree.structure(loaded.final) == jax.tree.structure(half.final)
    np.testing.assert_array_equal(loaded.observed["f"], half.observed["f"])
    assert bool(loaded.result == half.result)
    assert dict(loaded.settings.names) == dict(half.settings.names)
    assert float(loaded.settings.numbers["step"]) == 1 / 16
    rest = [mf.solve(flow, s.final, data, 1.0, state=s.state, **settings) for s in (half, loaded)]
    assert largest_gap(rest[0].final.particles, rest[1].final.particles) == 0
    with pytest.raises(ValueError, match="does not exist"):
        mf.Solution.load(tmp_path / "nothing")
    np.savez(tmp_path / "foreign.npz", x=np.ones(2))
    with pytest.raises(ValueError, match=r"written by Solution.save"):
        mf.Solution.load(tmp_path / "foreign")


def test_a_second_call_compiles_nothing():
    flow, cloud, data = problem("vanilla")

    @chex.assert_max_traces(n=1)
    def watch(flow, cloud, data):
        return cloud.particles.a

    mf.solve(flow, cloud, data, 1.0, step=1 / 32, observe=watch)
    other = flow.init(jax.random.key(8), 7, dim=3)
    mf.solve(flow, other, data, 0.95, step=1 / 33, observe=watch)


def test_float32_run():
    flow, cloud, data = problem("batchnorm")
    small = jax.tree.map(lambda u: u.astype(jnp.float32), (cloud, data))
    sol = mf.solve(mf.batchnorm("tanh"), *small, 1.0, step=mf.Adaptive(1e-5, 1e-6))
    chex.assert_type([sol.final.particles.b, sol.energy], jnp.float32)
    exact = mf.solve(flow, cloud, data, 1.0, **TIGHT)
    assert largest_gap(sol.final.particles, exact.final.particles) < 1e-4


BAD = [
    ({"t1": -1.0}, "t1 must be greater than 0.0, where the run starts, got -1.0"),
    ({"t1": np.nan}, "t1 must be finite"),
    ({"t1": 1.0, "ts": [0.5, 2.0]}, "ts must increase within"),
    ({"t1": 1.0, "ts": [0.5, 0.2]}, "ts must increase within"),
    ({"t1": 1.0, "step": -0.1}, "step must be > 0"),
    ({"t1": 1.0, "clock": "wall"}, "clock must be one of"),
    ({"t1": 1.0, "solver": "euler"}, "solver must be one of"),
    ({"t1": 1.0, "adjoint": "none"}, "adjoint must be one of"),
    ({"t1": 1.0, "step": 0.1, "clock": "lazy", "steady": 0.0}, "steady must be > 0"),
    ({"t1": 1.0, "steady": 0.0}, "steady must be > 0"),
]


@pytest.mark.bad_input
@pytest.mark.parametrize(("settings", "words"), BAD, ids=[words for _, words in BAD])
def test_bad_input_is_refused(settings, words):
    flow, cloud, data = problem("vanilla")
    with pytest.raises(ValueError, match=words):
        mf.solve(flow, cloud, data, settings.pop("t1"), **settings)


def test_kernel_step_needs_positive_numbers():
    with pytest.raises(ValueError, match="kappa must be > 0"):
        mf.KernelStep(0.0)
    with pytest.raises(ValueError, match="every must be an integer >= 1"):
        mf.KernelStep(0.1, 0)


class _Counted(mf.KernelStep):
    """A kernel step that calls the host whenever the kernel is computed."""

    def size_at(self, problem, y):
        jax.debug.callback(lambda: KERNELS.append(1))
        return super().size_at(problem, y)


KERNELS: list[int] = []


def test_a_batch_of_runs_computes_the_kernel_once_per_refresh():
    """Also where the runs end after different numbers of steps, which a batch counts apart."""
    x = jnp.linspace(-1.0, 1.0, 5)
    data, flow = mf.Dataset(x, jnp.sin(2 * x)), mf.canonical()
    cloud = flow.init(jax.random.key(0), 6)
    ends = jnp.array([0.5, 1.0, 3.0, 8.0])

    def run(t1, rule):
        return mf.solve(flow, cloud, data, t1, step=rule, solver=diffrax.Heun())

    KERNELS.clear()
    many = jax.jit(jax.vmap(run, in_axes=(0, None)))(ends, _Counted(0.05, 7))
    jax.effects_barrier()
    steps = np.asarray(many.stats["num_steps"])
    assert len(set(steps.tolist())) == 4 and steps[-1] > 30
    # at the start, and once for each seven steps of the longest run: the ends of the others ask for nothing
    assert len(KERNELS) == 1 + (steps[-1] - 1) // 7
    for k, t1 in enumerate(ends):
        alone = run(t1, mf.KernelStep(0.05, 7))
        assert alone.stats["num_steps"] == steps[k]
        np.testing.assert_allclose(many.final.particles.r[k], alone.final.particles.r, rtol=1e-9)


@pytest.mark.slow
def test_the_kernel_step_of_a_batch_of_runs_is_differentiable():
    x = jnp.linspace(-1.0, 1.0, 5)
    data, flow = mf.Dataset(x, jnp.sin(2 * x)), mf.canonical()
    cloud, ends = flow.init(jax.random.key(0), 6), jnp.array([0.5, 1.0])

    def run(t1, rule):
        return mf.solve(flow, cloud, data, t1, step=rule, solver=diffrax.Heun())

    loss = lambda kappa: jnp.sum(jax.vmap(run, in_axes=(0, None))(ends, mf.KernelStep(kappa, 7)).energy)
    slope, small = jax.grad(loss)(0.05), 1e-6
    assert slope == pytest.approx(float(loss(0.05 + small) - loss(0.05 - small)) / (2 * small), rel=1e-4)


IMPLICIT = diffrax.ImplicitEuler(root_finder=diffrax.VeryChord(rtol=1e-9, atol=1e-9))


@pytest.mark.parametrize(
    ("method", "step"),
    [(diffrax.Heun(), 0.125), (diffrax.Tsit5(), 0.125), (diffrax.Dopri8(), 0.125), (IMPLICIT, 1 / 64)],
    ids=lambda m: type(m).__name__,
)
def test_fixed_steps_and_their_derivatives_are_those_of_diffrax(method, step):
    """Its loop, its stages and its adjoint against ours, with weights that move beside the particles."""
    flow, cloud, data = problem("batchnorm_manifold")
    chart = flow.bind(data).chart(cloud)
    terms = diffrax.ODETerm(lambda t, y, problem: problem.field(t, y))
    direct = diffrax.DirectAdjoint()

    def by_diffrax(y):
        moving = Problem(chart, mf.Dataset(data.x, y), jnp.ones(()), reaction=jnp.asarray(0.5))
        start = moving.initial()
        out = diffrax.diffeqsolve(terms, method, 0.0, 1.0, step, start, moving, max_steps=64, adjoint=direct)
        return moving.cloud(jax.tree.map(lambda u: u[-1], out.ys))

    def ours(y, **options):
        return mf.solve(
            flow,
            cloud,
            mf.Dataset(data.x, y),
            1.0,
            solver=method,
            step=step,
            dynamics=mf.Reaction(0.5),
            **options,
        ).final

    assert largest_gap(ours(data.y), by_diffrax(data.y)) < 1e-12
    size = lambda final: lambda y: jnp.sum(final(y).particles.a ** 2 * final(y).weights)
    expected = jax.grad(size(by_diffrax))(data.y)
    for adjoint in ("checkpoint", "full"):
        found = jax.grad(size(lambda y, adjoint=adjoint: ours(y, adjoint=adjoint)))(data.y)
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-14)


def test_fixed_steps_land_on_save_times_and_on_the_end():
    flow, cloud, data = problem("vanilla")
    times = [0.0, 0.06, 0.062, 0.18]
    run = mf.solve(flow, cloud, data, 0.21, ts=times, step=0.05)
    np.testing.assert_array_equal(run.ts, times)
    assert float(run.state.t) == 0.21
    # 0.05 0.06 | 0.062 | 0.112 0.162 0.18 | 0.21
    assert int(run.stats["num_steps"]) == 7
    exact = mf.solve(flow, cloud, data, 0.21, ts=times, **TIGHT)
    np.testing.assert_allclose(run.energy, exact.energy, rtol=1e-6)
    assert float(run.energy[0]) == float(mf.energy(flow, cloud, data))


def test_an_implicit_step_that_finds_no_solution_is_a_failure():
    flow, cloud, data = problem("vanilla")
    with pytest.raises(mf.solvers.FailedRun, match="(?i)nonlinear"):
        mf.solve(flow, cloud, data, 40.0, solver=IMPLICIT, step=4.0)


def test_adjoints_that_belong_to_adaptive_steps_are_refused():
    flow, cloud, data = problem("vanilla")
    with pytest.raises(ValueError, match="adjoint must be one of .* with fixed steps"):
        mf.solve(flow, cloud, data, 1.0, step=0.1, adjoint=diffrax.BacksolveAdjoint())


@pytest.mark.parametrize("method", [diffrax.Euler(), diffrax.Heun()])
def test_steps_beyond_stability_are_noticed(method):
    """At the start Euler's and Heun's steps are stable up to 2 / lambda of the tangent kernel."""
    x = jax.random.normal(jax.random.key(3), (10, 3))
    data = mf.Dataset(x, x[:, 0])
    flow = mf.vanilla("tanh")
    cloud = flow.init(jax.random.key(4), 16, dim=3)
    limit = 2 / float(jnp.linalg.eigvalsh(mf.tangent_kernel(flow, cloud, x))[-1] / 10)
    run = lambda step: mf.solve(
        flow, cloud, data, 20 * limit, solver=method, step=step, throw=False, observe={}
    )
    good, wild = run(0.25 * limit), run(2 * limit)
    assert good.result == mf.RESULTS.successful and good.energy[-1] < 0.1 * mf.energy(flow, cloud, data)
    assert bool(jnp.isfinite(wild.energy[-1])) and wild.result == mf.RESULTS.energy_rose and not bool(wild.ok)


def test_an_unstable_method_without_a_table_is_noticed():
    """The leapfrog method is unstable for every step where a flow decays."""
    flow, cloud, data = problem("vanilla")
    wild = mf.solve(flow, cloud, data, 400.0, solver=diffrax.LeapfrogMidpoint(), step=2.0, throw=False)
    assert wild.result != mf.RESULTS.successful and not bool(wild.ok)


def test_implicit_methods_need_a_tolerance_where_steps_are_fixed():
    flow, cloud, data = problem("vanilla")
    with pytest.raises(ValueError, match="solver must have a root finder with tolerances of its own"):
        mf.solve(flow, cloud, data, 1.0, solver=diffrax.ImplicitEuler(), step=0.1)


def test_a_step_of_no_length_is_refused():
    flow, cloud, data = problem("vanilla")
    with pytest.raises(ValueError, match="step must be at least 4.66e-10 for a run this long, got 1e-300"):
        mf.solve(flow, cloud, data, 1.0, step=1e-300)


def test_many_short_steps_in_single_precision_end_when_they_should():
    single = lambda tree: jax.tree.map(lambda u: u.astype("float32"), tree)
    flow = mf.vanilla("tanh")
    cloud, data = single((flow.init(jax.random.key(0), 2, dim=2), mf.Dataset(jnp.ones((1, 2)), jnp.ones(1))))
    sol = mf.solve(flow, cloud, data, 1000.0, solver=diffrax.Euler(), step=0.05)
    assert int(sol.stats["num_steps"]) == 20_000 and float(sol.ts[-1]) == 1000
    run = mf.descend(flow, cloud, data, 20_000, step=0.05)
    assert abs(float(run.ts[-1]) / 1000 - 1) < 1e-6
    # the rounding is remembered, so that two halves count as the whole does
    half = mf.descend(flow, cloud, data, 10_000, step=0.05)
    assert float(mf.descend(flow, cloud, data, 10_000, step=0.05, state=half.state).ts[-1]) == float(
        run.ts[-1]
    )


def test_the_limit_of_traced_steps_can_be_raised():
    flow, cloud, data = problem("vanilla")

    @jax.jit
    def run(t1, step):
        return mf.solve(flow, cloud, data, t1, solver=diffrax.Euler(), step=step).result

    rule = mf.solvers.ConstantStep
    assert run(1.0, rule(jnp.asarray(0.1), max_steps=9)) == mf.RESULTS.max_steps_reached
    assert run(1.0, rule(jnp.asarray(0.1), max_steps=10)) == mf.RESULTS.successful
    with pytest.raises(ValueError, match="size must be"):
        rule(0.0)
    with pytest.raises(ValueError, match="max_steps must be"):
        rule(0.1, max_steps=0)
