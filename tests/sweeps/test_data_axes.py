"""Sweeps over data: numbers of samples, noise, teachers; labels that clash; gradients in the axes of a sweep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meanflow as mf
from meanflow.measures import laws

TEACHERS = {"linear": lambda x: x[:, 0], "product": lambda x: x[:, 0] * x[:, 1]}


def planar(key, samples, noise, teacher):
    """Samples in the plane; those of a smaller number are the first of those of a larger one."""
    x = jax.random.normal(key, (20, 2))[:samples]
    return mf.Dataset(x, TEACHERS[teacher](x) + noise * jnp.sin(9.0 * x[:, 1]))


def test_cells_with_their_own_data_equal_single_runs():
    """Padded data of four sizes, names as values and defaults of all observables, in one program; against descend."""
    axes = {"samples": (6, 9, 14), "noise": (0.0, 0.5), "teacher": ("linear", "product")}
    settings = {"steps": 6, "every": 3, "step": 0.05}
    names = ["kernel_drift", "dissipation", "displacement", "predictions"]
    plan = mf.sweep(
        mf.batchnorm("tanh"),
        planar,
        widths=(4, 5),
        axes=axes,
        key=3,
        observe=names,
        compute=False,
        **settings,
    )
    assert len(plan.groups) == 1
    assert plan.room == 14
    runs = plan.run()
    assert dict(runs.energy.sizes) == {
        "width": 2,
        "samples": 3,
        "noise": 2,
        "teacher": 2,
        "seed": 1,
        "step": 3,
    }
    cell = {"samples": 9, "noise": 0.5, "teacher": "product"}
    data = planar(jax.random.split(jax.random.key(3))[1], **cell)
    flow = mf.batchnorm("tanh").bind(data)
    alone = mf.descend(
        flow, plan.cloud(width=5, **cell), data, 6, every=3, step=0.05, clock="lazy", observe=names
    )
    found = runs.sel(width=5, **cell).isel(seed=0)
    np.testing.assert_allclose(found.energy, alone.energy, rtol=1e-12)
    for name in names[:3]:
        np.testing.assert_allclose(found[name], alone.observed[name], rtol=1e-11, atol=1e-14)
    np.testing.assert_allclose(found.predictions[:, :9], alone.observed["predictions"], rtol=1e-11)
    np.testing.assert_allclose(plan.single(width=5, **cell).energy, alone.energy, rtol=1e-12)


def test_minibatches_and_univariate_observables_ignore_padding():
    def line(key, samples):
        x = jnp.linspace(-1.0, 1.0, samples)
        return mf.Dataset(x, jnp.sin(4 * x), weights="sum")

    names = ("on_sample_share", "dead_share", "concentration", "kernel_drift")
    settings = {"axes": {"samples": (4, 7)}, "steps": 4, "step": 0.01, "observe": names}
    plan = mf.sweep(
        mf.canonical(), line, widths=(5,), batches=mf.solvers.Batches(2), compute=False, **settings
    )
    runs, alone = plan.run().sel(samples=4), plan.single(samples=4)
    np.testing.assert_allclose(runs.energy[0, 0], alone.energy, rtol=1e-12)
    for name in names:
        np.testing.assert_allclose(runs[name][0, 0], alone.observed[name], rtol=1e-11, atol=1e-14)
    with pytest.raises(ValueError, match="at most the size of the data, 4 samples, got 5"):
        mf.sweep(mf.canonical(), line, widths=(5,), batches=mf.solvers.Batches(5), compute=False, **settings)


def test_gradients_in_every_numeric_axis_against_differences():
    """Labels, amplitudes, settings of the solver, the model, the law of the start, and the data, in one program."""
    x = jnp.linspace(-1.0, 1.0, 5)

    def data(key, noise):
        return mf.Dataset(x, jnp.sin(3 * x) + noise * jnp.cos(5 * x))

    def flow(strength):
        return mf.lifted(penalty=strength)

    def init(key, width, spread):
        return mf.lifted().init(key, width, r=lambda u: spread * (u - 0.3))

    values = {
        "delta": (0.4, -0.3),
        "scale": (0.7,),
        "step": (0.05,),
        "strength": (0.1,),
        "spread": (1.2,),
        "noise": (0.1,),
    }
    axes = {name: values[name] for name in ("scale", "step", "strength", "spread", "noise")}
    grid = {"deltas": values["delta"], "axes": axes}
    plan = mf.sweep(flow, data, widths=(4,), init=init, steps=4, observe=(), compute=False, **grid)
    end = jax.jit(lambda u: jnp.sum(plan.values(**u)["energy"][..., -1]))
    here, h = jax.tree.map(jnp.asarray, {name: jnp.array(u) for name, u in values.items()}), 1e-5
    np.testing.assert_allclose(end(here), jnp.sum(plan.values()["energy"][..., -1]), rtol=1e-13)
    slopes = jax.jit(jax.grad(end))(here)
    for name, slope in slopes.items():
        for k in range(slope.size):
            ahead, behind = (end(here | {name: here[name].at[k].add(s * h)}) for s in (1, -1))
            np.testing.assert_allclose(slope[k], (ahead - behind) / (2 * h), rtol=1e-6, err_msg=name)
            assert abs(slope[k]) > 1e-6


LINE = mf.Dataset(jnp.linspace(-1.0, 1.0, 4), jnp.array([1.0, -1.0, 1.0, 0.0]))
LABELLED = lambda key, width: mf.lifted().init(key, width, labels=0.5)
BAD = [
    ({"deltas": (0.0, 1.0), "init": LABELLED}, "deltas would overwrite the labels that init returns"),
    ({"data": lambda key: 3, "deltas": (0.0,)}, "data must return a Dataset, got int"),
    (
        {"data": lambda key, k: LINE, "axes": {"j": (1, 2)}, "deltas": (0.0,)},
        "flow, data, init and settings do not",
    ),
]


@pytest.mark.bad_input
@pytest.mark.parametrize(("settings", "words"), BAD, ids=[words for _, words in BAD])
def test_what_does_not_fit_is_refused(settings, words):
    data = settings.pop("data", LINE)
    with pytest.raises(ValueError, match=words):
        mf.sweep(mf.lifted(), data, widths=(4,), steps=2, step=0.1, observe=(), **settings)


@pytest.mark.bad_input
def test_values_refuses_what_cannot_be_changed():
    plan = mf.sweep(
        mf.lifted(),
        LINE,
        widths=(4,),
        deltas=(0.0,),
        steps=2,
        step=0.1,
        observe=(),
        axes={"clock": ("lazy",)},
        compute=False,
    )
    for name in ("width", "clock", "bogus"):
        with pytest.raises(ValueError, match=f"among the numeric ones of .*, got '{name}'"):
            plan.values(**{name: jnp.array([1.0])})
    with pytest.raises(ValueError, match="delta must have shape"):
        plan.values(delta=jnp.zeros(2))


def test_each_initial_law_of_an_axis_is_used():
    """Two laws of one class have the same text: arrays inside are not written out."""
    by_text = [Law(jnp.full(2, s)) for s in (1.0, 3.0)]
    assert str(by_text[0]) == str(by_text[1])
    own = [laws.normal(s) for s in (1.0, 3.0)]
    for axis in (by_text, own):
        plan = mf.sweep(
            mf.canonical(),
            LINE,
            widths=(3,),
            init=draw,
            steps=1,
            step=0.1,
            observe=(),
            axes={"law": axis},
            compute=False,
        )
        for law in axis:
            expected = draw(jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 0), 3), 3, law)
            np.testing.assert_array_equal(plan.cloud(law=law).particles.r, expected.particles.r)
        start = plan.run().energy.isel(step=0)
        assert len(np.unique(start)) == 2


class Law:
    """An initial law whose text does not show its parameter."""

    def __init__(self, size):
        self.size = size

    def __repr__(self):
        return "Law"

    def __call__(self, u):
        return self.size[0] * u[:, 0]


def draw(key, width, law):
    return mf.Cloud(mf.Polar(law(jax.random.uniform(key, (width, 1))), jnp.linspace(0.0, 3.0, width)))
