"""A sweep equals the loop it replaces."""

import itertools
import logging

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import xarray

import meanflow as mf
from meanflow.solvers._sliding import Sliding
from meanflow.sweeps import _networks as networks

X = jnp.linspace(-1.0, 1.0, 6)
LINE = mf.Dataset(X, jnp.array([1.0, -0.5, 0.2, 0.8, -1.0, 0.3]), "sum")
PLANE = mf.Dataset(jax.random.normal(jax.random.key(3), (12, 2)) + 0.5, jnp.sin(jnp.arange(12.0)))
ENDS = (-np.inf, -3.0, 0.0, 2.0, np.inf)
TOLERANCE = 1e-12


def draw(flow, data, width, seed, key=0, **labels):
    """The default initial cloud, by the documented rule."""
    folded = jax.random.fold_in(jax.random.fold_in(jax.random.key(key), seed), width)
    dim = data.x.shape[1] if data.x.ndim == 2 else None
    return flow.bind(data).init(folded, width, dim=dim, **labels)


STEPS = {"steps": 40, "every": 20, "step": 0.05}
SHORT = STEPS | {"step": 0.02}
TIMES = {"t1": 1.0, "ts": 3, "solver": "sliding", "step": 0.05}
CASES = {
    "vanilla": (mf.vanilla("tanh"), PLANE, None, STEPS),
    "vanilla sliding": (mf.vanilla("relu", alpha="sqrt"), PLANE, None, TIMES),
    "batchnorm": (mf.batchnorm("tanh"), PLANE, None, {"t1": 2.0, "ts": 3}),
    "batchnorm relu": (mf.batchnorm("relu"), PLANE, None, STEPS),
    "manifold": (mf.batchnorm_manifold("tanh"), PLANE, None, STEPS),
    "canonical": (mf.canonical(), LINE, None, SHORT),
    "canonical sliding": (mf.canonical(), LINE, None, TIMES | {"solver": Sliding()}),
    "planar": (mf.planar(alpha="sqrt"), LINE, None, SHORT),
    "radial": (mf.radial(), LINE, None, {"t1": 1.0, "ts": 3, "step": mf.solvers.Adaptive(rtol=1e-6)}),
    "lifted": (mf.lifted(alpha="sqrt"), LINE, ENDS, STEPS | {"step": mf.KernelStep(0.3, 5)}),
    "lifted sliding": (mf.lifted(alpha="one"), LINE, ENDS, TIMES),
    "full": (mf.full(alpha="sqrt"), LINE, None, SHORT),
}


# these compile for long; the sliding solver itself is covered by "lifted sliding"
SLOW = ("canonical sliding", "vanilla sliding")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES])
def test_sweep_equals_loop_of_single_runs(name):
    flow, data, deltas, settings = CASES[name]
    widths, seeds = (5, 6), (0, 4)
    ds = mf.sweep(
        flow,
        data,
        widths=widths,
        deltas=deltas,
        seeds=seeds,
        observe=("predictions",),
        execution=mf.sweeps.Execution(chunk=7),
        **settings,
    )
    settings = dict(settings)
    solver = mf.descend if "steps" in settings else mf.solve
    end = settings.pop("steps", None) or settings.pop("t1")
    points = ds.x.values if "x" in ds.dims else data.x
    for width in widths if deltas else widths[:1]:  # the padded width; each alone is a compilation
        for seed in seeds:
            for delta in (None,) if deltas is None else deltas:
                labels = {} if delta is None else {"labels": delta}
                cloud = draw(flow, data, width, seed, **labels)
                alone = solver(flow, cloud, data, end, clock="lazy", **settings)
                cell = ds.sel(width=width, seed=seed, **({} if delta is None else {"delta": delta}))
                assert int(cell.result) == 0 and bool(alone.ok)
                np.testing.assert_allclose(cell.energy, alone.energy, rtol=TOLERANCE, atol=TOLERANCE)
                np.testing.assert_allclose(cell.t, alone.ts, rtol=TOLERANCE)
                f = mf.predict(flow.bind(data), alone.final, jnp.asarray(points))
                np.testing.assert_allclose(cell.predictions[-1], f, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.fixture(scope="module")
def plain():
    """A small sweep that the tests below vary: settings, and its result."""
    settings = {
        "widths": (3, 5, 11),
        "deltas": (-np.inf, 0.0, np.inf),
        "seeds": (0, 1),
        "steps": 10,
        "every": 5,
        "step": 0.02,
        "observe": ("predictions", "angle_displacement"),
    }
    return settings, mf.sweep(mf.lifted(alpha="sqrt"), LINE, **settings)


def close(one, two):
    assert set(one.data_vars) == set(two.data_vars)
    for name in one.data_vars:
        np.testing.assert_allclose(one[name], two[name], rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


@pytest.mark.parametrize("change", [{"chunk": 1}, {"chunk": 4, "waste": 0.9}])
def test_chunks_and_padding_do_not_matter(plain, change):
    settings, result = plain
    close(
        mf.sweep(mf.lifted(alpha="sqrt"), LINE, execution=mf.sweeps.Execution(**change), **settings), result
    )


def test_order_of_the_grid_does_not_matter(plain):
    settings, result = plain
    shuffled = {"widths": (11, 3, 5), "deltas": (0.0, np.inf, -np.inf), "seeds": (1, 0)}
    other = mf.sweep(mf.lifted(alpha="sqrt"), LINE, **settings | shuffled)
    close(other.sortby(["width", "delta", "seed"]), result)
    # a cell is the same network whatever else is in the grid
    part = mf.sweep(mf.lifted(alpha="sqrt"), LINE, **settings | {"widths": (5,), "seeds": (1,)})
    close(part, result.sel(width=[5], seed=[1]))


def test_values_are_those_of_the_run(plain):
    """The pure function of the data covers several width groups, in the order of the grid."""
    settings, result = plain
    plan = mf.sweep(mf.lifted(alpha="sqrt"), LINE, compute=False, **settings)
    assert len(plan.groups) == 2
    values = jax.jit(plan.values)(LINE)
    for name in ("energy", "angle_displacement", "predictions"):
        np.testing.assert_allclose(values[name], result[name], rtol=TOLERANCE, atol=TOLERANCE)


def test_one_compilation_per_width_group(plain, caplog):
    settings, _ = plain
    data = mf.Dataset(X, jnp.cos(X), "sum")
    flow = mf.lifted(alpha="sqrt")
    changed = settings | {"steps": 15, "execution": mf.sweeps.Execution(chunk=2), "observe": ()}
    plan = mf.sweep(flow, data, compute=False, **changed)
    assert len(plan.groups) == 2 and len(plan.chunks) > 4 and plan.waste <= 0.15

    def programs():
        """How many programs of sweeps the compiler says to have finished."""
        told = [record.getMessage() for record in caplog.records]
        return sum(text.startswith("Finished XLA compilation of jit(run)") for text in told)

    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        plan.run()
        assert programs() == len(plan.groups)
        # other numbers in the same shapes, even in a new sweep, use the same programs
        mf.sweep(flow, LINE, **changed | {"deltas": (-1.0, 1.0, 7.0), "key": 9, "step": 0.02})
        assert programs() == len(plan.groups)


def test_lazy_clock_compares_widths_at_one_stage():
    """With alpha = m^(1/4), taken from the width inside the program, f moves at a speed that hardly depends on m."""
    x = jnp.linspace(-1.0, 1.0, 5)
    data = mf.Dataset(x, jnp.sin(2.5 * x), "sum")

    def paired(key, width):
        half = mf.canonical().init(key, width // 2)
        theta = jnp.tile(half.particles.theta, 2)
        ratio = width**0.75
        return mf.Cloud(mf.Polar(ratio * jnp.repeat(jnp.array([1.0, -1.0]), width // 2), theta), labels=0.0)

    ds = mf.sweep(
        lambda width: mf.lifted(alpha=width**0.25),
        data,
        widths=(64, 1024),
        seeds=3,
        init=paired,
        steps=100,
        step=0.01,
        observe=("angle_displacement",),
    )
    decay = (ds.energy.isel(step=-1) / ds.energy.isel(step=0)).mean("seed")
    assert np.all(ds.energy.isel(step=0) > 0) and np.all(decay < 0.5)
    assert abs(float(decay[0] / decay[1]) - 1) < 0.3
    # and the turn of the neurons falls like alpha/m = m^(-3/4), theory section 4
    turn = ds.angle_displacement.isel(step=-1).mean("seed")
    slope = float(np.log(turn[1] / turn[0]) / np.log(16))
    assert abs(slope + 0.75) < 0.1


def test_init_may_make_narrow_networks_prefixes_of_wide_ones():
    """It gets the seed if it asks for it, and need not use the key, which differs between widths."""

    def nested(key, width, seed):
        wide = mf.lifted().init(jax.random.key(seed), 9)
        return mf.Cloud(jax.tree.map(lambda u: u[:width], wide.particles))

    settings = {
        "widths": (4, 9),
        "deltas": (1.0,),
        "seeds": 2,
        "init": nested,
        "steps": 1,
        "step": 0.1,
        "observe": (),
    }
    plan = mf.sweep(mf.lifted(), LINE, compute=False, **settings)
    small, large = plan.cloud(width=4, seed=1), plan.cloud(width=9, seed=1)
    np.testing.assert_array_equal(small.particles.r, large.particles.r[:4])
    assert float(small.particles.r[0]) != float(plan.cloud(width=4, seed=0).particles.r[0])
    again = mf.descend(mf.lifted(), small, LINE, 1, step=0.1)
    np.testing.assert_allclose(
        plan.run().energy.sel(width=4, delta=1.0, seed=1), again.energy, rtol=TOLERANCE
    )


def test_scales_axes_of_the_solver_and_of_the_model():
    def model(strength):
        return mf.canonical(penalty=strength)

    ds = mf.sweep(
        model,
        LINE,
        widths=(4,),
        steps=3,
        observe=(),
        axes={
            "scale": (0.5, 2.0),
            "strength": (0.0, 0.1),
            "step": (0.01, 0.02),
            "clock": ("mean_field", "gradient"),
        },
    )
    assert ds.energy.dims == ("width", "scale", "strength", "step_size", "clock", "seed", "step")
    for scale in (0.5, 2.0):
        for clock in ("mean_field", "gradient"):
            cloud = draw(mf.canonical(), LINE, 4, 0)
            cloud = cloud.at(cloud.particles._replace(r=scale * cloud.particles.r))
            alone = mf.descend(model(0.1), cloud, LINE, 3, step=0.02, clock=clock)
            cell = ds.sel(scale=scale, strength=0.1, step_size=0.02, clock=clock)
            np.testing.assert_allclose(np.ravel(cell.energy), alone.energy, rtol=TOLERANCE)


def test_dissipation_follows_the_clock_of_the_cell():
    clocks = ("mean_field", "gradient", "lazy")
    settings = {"widths": (4,), "deltas": (1.0,), "steps": 2, "observe": ("dissipation",)}
    ds = mf.sweep(mf.lifted(alpha="sqrt"), LINE, axes={"clock": clocks}, step=0.01, **settings)
    for clock in clocks:
        alone = mf.sweep(mf.lifted(alpha="sqrt"), LINE, clock=clock, step=0.01, **settings)
        np.testing.assert_allclose(ds.dissipation.sel(clock=clock), alone.dissipation, rtol=TOLERANCE)
    start = ds.dissipation.isel(step=0, width=0, seed=0, delta=0)
    np.testing.assert_allclose(start / start.sel(clock="mean_field"), [1.0, 1 / 4, 1 / 4], rtol=TOLERANCE)


def test_minibatches_differ_between_cells_and_repeat():
    settings = {
        "widths": (4,),
        "seeds": 2,
        "steps": 4,
        "step": 0.02,
        "batches": mf.solvers.Batches(3),
        "observe": (),
    }
    one, two = (mf.sweep(mf.canonical(), LINE, **settings) for _ in range(2))
    np.testing.assert_array_equal(one.energy, two.energy)
    whole = mf.sweep(mf.canonical(), LINE, **{k: v for k, v in settings.items() if k != "batches"})
    assert np.all(one.energy.isel(step=-1) != whole.energy.isel(step=-1))


def test_a_failed_cell_loses_nothing_else():
    settings = {"widths": (4,), "seeds": 2, "steps": 60, "every": 20, "observe": ("predictions",)}
    flow = mf.vanilla("linear")
    good = mf.sweep(flow, PLANE, axes={"step": (0.05, 0.1)}, **settings)
    mixed = mf.sweep(flow, PLANE, axes={"step": (0.05, 1e9, 0.1)}, **settings)
    code = {
        name: value
        for value, name in zip(mixed.result.flag_values, mixed.result.flag_meanings.split(), strict=True)
    }
    assert np.all(mixed.result.sel(step_size=1e9) == code["non_finite"])
    assert np.all(mixed.result.sel(step_size=[0.05, 0.1]) == code["successful"])
    close(mixed.sel(step_size=[0.05, 0.1]), good)
    # step limit: the tight tolerance runs out of steps, the loose one does not notice
    limits = {"widths": (4,), "t1": 3.0, "ts": 4, "observe": ()}
    limited = lambda rtol: mf.solvers.Adaptive(rtol, 1e-12, max_steps=12)
    tight = mf.sweep(mf.vanilla("tanh"), PLANE, axes={"rtol": (1e-2, 1e-12)}, step=limited, **limits)
    assert int(tight.result.sel(rtol=1e-2)[0, 0]) == code["successful"]
    assert int(tight.result.sel(rtol=1e-12)[0, 0]) == code["max_steps_reached"]
    assert np.isfinite(tight.energy.sel(rtol=1e-2)).all()
    assert np.isnan(tight.energy.sel(rtol=1e-12)).any()


def test_a_network_that_has_died_stands_still():
    """With all neurons dead on the samples the kernel is zero: no failure, and no infinite kernel step."""

    def dead(key, width):
        return mf.Cloud(mf.Polar(jnp.ones(width), jnp.full(width, -jnp.pi / 2)))  # relu(-1) at every x

    for horizon in ({"steps": 4, "every": 2}, {"t1": 1.0, "ts": 3}):
        ds = mf.sweep(
            mf.canonical(),
            LINE,
            widths=(3,),
            init=dead,
            step=mf.KernelStep(0.2, 2),
            observe=("dead_share",),
            **horizon,
        )
        assert int(ds.result[0, 0]) == 0 and np.all(ds.dead_share == 1)
        np.testing.assert_array_equal(ds.energy[0, 0], np.full(3, 0.5 * np.sum(np.asarray(LINE.y) ** 2)))


def test_gradient_of_all_final_losses_with_respect_to_the_data():
    flow = mf.lifted(alpha="sqrt")
    plan = mf.sweep(
        flow,
        LINE,
        widths=(5, 6),
        deltas=(-1.0, np.inf),
        steps=8,
        every=4,
        step=0.02,
        seeds=2,
        observe=("predictions",),
        compute=False,
    )

    @jax.jit
    def total(y):
        return plan.values(mf.Dataset(LINE.x, y, "sum"))["energy"][..., -1].sum()

    value, slope = jax.jit(jax.value_and_grad(total))(LINE.y)
    assert float(value) == pytest.approx(float(total(LINE.y)), rel=1e-12)
    for direction in np.eye(6)[[0, 3]]:
        h = 1e-5
        difference = (total(LINE.y + h * direction) - total(LINE.y - h * direction)) / (2 * h)
        assert float(slope @ direction) == pytest.approx(float(difference), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"widths": ()}, "widths must hold at least 1"),
        ({"widths": (3, 3)}, "distinct"),
        ({"widths": 3}, "widths must be a sequence"),
        ({"deltas": (np.nan,)}, "NaN"),
        ({"steps": None}, "exactly one of t1 and steps"),
        ({"t1": 1.0}, "exactly one of t1 and steps"),
        ({"every": 3}, "every must divide steps"),
        ({"ts": 3}, "ts belongs to t1"),
        ({"axes": {"depth": (1, 2)}}, "reaches nothing"),
        ({"axes": {"width": (1, 2)}}, "taken"),
        ({"observe": ("spectrum",)}, "observables among"),
        ({"seeds": (-1,)}, ">= 0"),
        ({"init": lambda key, width: 3}, "must return a Cloud"),
        ({"init": lambda key, width: mf.canonical().init(key, 2)}, "cloud of the width"),
        ({"execution": 3}, "execution must be a Execution"),
        ({"chunk": 2}, "settings of descend must be among .* got 'chunk'"),
        ({"compute": False, "store": "runs/a"}, "store must be None with compute=False"),
        ({"axes": {"h": (0.1, -0.1)}, "step": lambda h: h}, "step must be > 0"),
        (
            {"axes": {"tau": (0.1, -0.1)}, "dynamics": lambda tau: mf.solvers.Noise(tau)},
            "temperature must be",
        ),
        ({"axes": {"step": (0.1, 0.2)}}, "step is given both as an axis and as a setting"),
        (
            {"batches": mf.solvers.Batches(7)},
            "batches must have at most the size of the data, 6 samples, got 7",
        ),
        ({"stpe": 0.1}, "settings of descend must be among .* got 'stpe'"),
        ({"steady": 1e-3}, "got 'steady' .it belongs to runs with t1"),
        ({"axes": {"steady": (1e-3, 1e-4)}}, "got 'steady' .it belongs to runs with t1"),
        ({"steps": None, "t1": 1.0, "batches": mf.solvers.Batches(2)}, "it belongs to runs with steps"),
        ({"step": "small"}, "step must be a number.*, got 'small'"),
        ({"key": "abc"}, "key must be an integer or a PRNG key"),
        ({"observe": {"delta": mf.dissipation}}, "need different names, got 'delta'"),
        ({"observe": {"accepted_steps": mf.dissipation}}, "must not use the name 'accepted_steps'"),
        ({"axes": {"step_size": (1, 2)}}, "taken"),
    ],
)
@pytest.mark.bad_input
def test_bad_arguments(change, message):
    settings = {"widths": (3,), "deltas": (0.0,), "steps": 4, "step": 0.1} | change
    with pytest.raises((TypeError, ValueError), match=message):
        mf.sweep(mf.lifted(), LINE, **settings)


@pytest.mark.parametrize("name", ["t", "energy", "result", "predictions", "x"])
def test_axes_are_not_called_like_what_is_recorded(name):
    def model(**given):
        return mf.canonical(penalty=given[name])

    with pytest.raises(ValueError, match=f"need different names, got '{name}'"):
        mf.sweep(model, LINE, widths=(3,), axes={name: (0.1, 0.2)}, steps=1, step=0.1)


def test_settings_that_are_objects_have_readable_distinct_labels(tmp_path):
    settings = {"widths": (3,), "observe": ()}
    steps = {"step": (mf.KernelStep(0.1), mf.KernelStep(0.2, 5))}
    ds = mf.sweep(mf.canonical(), LINE, axes=steps, steps=2, store=tmp_path / "run", **settings)
    expected = ["KernelStep(kappa=0.1)", "KernelStep(kappa=0.2, every=5)"]
    assert ds.step_size.values.tolist() == expected
    xarray.testing.assert_identical(mf.sweeps.load(tmp_path / "run"), ds)
    rules = {"optimizer": (optax.sgd(0.1), optax.adam(0.1))}
    plan = mf.sweep(mf.canonical(), LINE, axes=rules, steps=2, compute=False, **settings)
    labels = plan.config()["layout"]["axes"]["optimizer"]
    assert len(set(labels)) == 2 and not any("0x" in text for text in labels)


SOLVERS = mf.solvers
FUNCTIONS = {  # settings, values along the axis, and the number of programs
    "temperature": (
        {"steps": 4, "step": 0.1, "dynamics": lambda temperature: SOLVERS.Noise(temperature)},
        (0.05, 0.2),
        1,
    ),
    "rate": ({"steps": 4, "step": 0.1, "dynamics": lambda rate: SOLVERS.Reaction(rate)}, (0.5, 2.0), 1),
    "dynamics": (STEPS, tuple(SOLVERS.Noise(0.1, jax.random.key(k)) for k in (1, 2)), 1),
    "kappa": ({"steps": 4, "step": lambda kappa: mf.KernelStep(kappa, 2)}, (0.1, 0.3), 1),
    "step": ({"t1": 1.0, "solver": diffrax.Heun()}, (0.05, 0.2), 1),
    "rtol": ({"t1": 8.0, "step": lambda rtol: SOLVERS.Adaptive(rtol)}, (1e-3, 1e-7), 1),
    "size": ({"steps": 4, "step": 0.1, "batches": lambda size: SOLVERS.Batches(size)}, (3, 5), 2),
    "rate_of_adam": ({"steps": 4, "optimizer": lambda rate_of_adam: optax.adam(rate_of_adam)}, (0.1, 0.2), 2),
}


@pytest.mark.parametrize("axis", FUNCTIONS)
def test_settings_may_depend_on_axes(axis):
    """A cell runs as it does alone; numbers that enter as arrays share a program, padded widths too."""
    settings, values, programs = FUNCTIONS[axis]
    grid = {"widths": (3, 5), "seeds": 2, "axes": {axis: values}, "observe": ("predictions",), "key": 4}
    grid |= {"execution": mf.sweeps.Execution(waste=0.9), "compute": False}
    plan = mf.sweep(mf.vanilla("tanh"), PLANE, **grid, **settings)
    assert len(plan.groups) == programs
    found = plan.run().predictions.values
    for i, j, k in ((0, 1, 1), (1, 0, 0)):  # places along width, the axis and seed
        alone = plan.single(**{"width": (3, 5)[i], axis: values[j], "seed": k})
        np.testing.assert_allclose(found[i, j, k], alone.observed["predictions"], rtol=1e-10, atol=1e-12)
    assert len(np.unique(found[..., -1, 0])) == 8


def test_deltas_need_labels():
    with pytest.raises(ValueError, match="deltas need a flow"):
        mf.sweep(mf.canonical(), LINE, widths=(3,), deltas=(0.0,), steps=1, step=0.1)


def test_all_widths_are_drawn_by_one_program_and_kept_at_their_size(monkeypatch):
    drawn, draw = [], networks._draw
    monkeypatch.setattr(
        networks, "_draw", lambda f, k, number, *a: drawn.append(number) or draw(f, k, number, *a)
    )
    settings = {"seeds": 2, "steps": 1, "step": 0.1, "observe": (), "compute": False}
    plan = mf.sweep(mf.canonical(), LINE, widths=[3, 40], **settings)
    assert len(plan.groups) == 2
    small, large = (plan.cloud(width=width, seed=1) for width in (3, 40))
    assert small.size == 3 and large.size == 40 and set(drawn) == {40}
    kept = next(cloud for cloud in plan.drawn.values() if isinstance(cloud, mf.Cloud) and cloud.size == 3)
    assert all(u.base is None for u in kept.particles)  # no view that keeps the others in memory
    # what would take long to draw is drawn for its own group
    assert networks.room([10**6, 10**9], 3) == 10**6


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_clouds_do_not_depend_on_the_widths_beside_them(impl):
    x = jax.random.normal(jax.random.key(0), (6, 3))
    data, flow, key = mf.Dataset(x, x[:, 0]), mf.vanilla("tanh"), jax.random.key(5, impl=impl)
    settings = {"steps": 1, "step": 0.1, "key": key, "observe": (), "compute": False}
    settings["execution"] = mf.sweeps.Execution(waste=0.5)
    alone = mf.sweep(flow, data, widths=[5], **settings).cloud(width=5, seed=0)
    beside = mf.sweep(flow, data, widths=[5, 7], **settings)
    assert len(beside.groups) == 1
    together = beside.cloud(width=5, seed=0)
    plain = flow.init(jax.random.fold_in(jax.random.fold_in(key, 0), 5), 5, dim=3)
    for one, two, three in zip(*(jax.tree.leaves(u) for u in (alone, together, plain)), strict=True):
        np.testing.assert_array_equal(one, two)
        np.testing.assert_allclose(one, three, rtol=1e-12)


def test_an_axis_without_end_is_refused():
    with pytest.raises(ValueError, match=r"axes\['s'\] must hold at most"):
        mf.sweeps.sweep_function(lambda key, s: s, axes={"s": itertools.count()})


def test_named_output_scales_are_numbers_and_share_a_program():
    """The numbers of each name alone, in one program; the names stay the labels."""
    x = np.linspace(-1.0, 1.0, 4)
    data = mf.Dataset(x, x**2, "sum")
    settings = {"widths": (4, 5), "deltas": (0.0,), "seeds": 2, "steps": 5, "step": 0.05, "observe": ()}
    names = ["m", "sqrt", "one"]
    flow = lambda alpha: mf.lifted(alpha=alpha)
    plan = mf.sweep(flow, data, axes={"alpha": names}, compute=False, **settings)
    assert len(plan.groups) == 1
    found = plan.run()
    assert found.alpha.values.tolist() == names
    for name in names:
        alone = mf.sweep(mf.lifted(alpha=name), data, **settings)
        np.testing.assert_allclose(found.energy.sel(alpha=name), alone.energy, rtol=1e-13)
