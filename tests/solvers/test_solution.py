"""Solutions: settings that stack, files that keep apart, states that refuse another run, failures that are noticed."""

import collections
import functools
import json
import pathlib
import pickle
import zipfile
from typing import NamedTuple

import chex
import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import largest_gap, problem

import meanflow as mf
from meanflow import flows, geometry, solvers
from meanflow.measures import laws


def test_settings_stack_and_a_function_of_a_solution_compiles_once():
    flow, cloud, data = problem("vanilla")
    runs = [mf.solve(flow, cloud, data, t1, step=0.25) for t1 in (0.5, 1.0)]
    stacked = jax.tree.map(lambda *u: jnp.stack(u), *runs)
    assert stacked.settings.numbers["t1"].tolist() == [0.5, 1.0]

    @eqx.filter_jit
    @chex.assert_max_traces(n=1)
    def last(sol):
        return sol.energy[-1]

    for run in runs:
        last(run)
    inside = jax.vmap(lambda t: mf.solve(flow, cloud, data, t, step=0.25).settings.numbers["t1"])
    assert inside(jnp.array([0.5, 1.0])).tolist() == [0.5, 1.0]  # numbers, not the text of a tracer


def test_damaged_and_foreign_files_are_refused_by_name(tmp_path):
    """Cut, flipped, empty, of text, of pickled objects, with names that point elsewhere: a message or the same run."""
    flow, cloud, data = problem("vanilla")
    run = mf.descend(flow, cloud, data, 2, step=0.1)
    whole = run.save(tmp_path / "whole").read_bytes()
    broken = tmp_path / "inside" / "broken.npz"
    broken.parent.mkdir()

    def refused(content):
        broken.write_bytes(content)
        with pytest.raises(ValueError, match="broken.npz"):
            mf.Solution.load(broken)

    for share in range(20):
        refused(whole[: len(whole) * share // 20])
    refused(b"\0" * 500)
    refused(pickle.dumps({"ts": [0.0]}))
    rng = np.random.default_rng(0)
    intact = 0
    for _ in range(60):
        flipped = bytearray(whole)
        flipped[rng.integers(len(whole))] ^= int(rng.integers(1, 256))
        broken.write_bytes(bytes(flipped))
        try:
            again = mf.Solution.load(broken)
        except ValueError as words:
            assert "broken.npz" in str(words)
        else:  # dates of the archive, for instance
            intact += 1
            assert largest_gap(again.final, run.final) == 0 and again.energy.tolist() == run.energy.tolist()
    assert intact < 30

    class Trap:
        def __reduce__(self):
            return pathlib.Path.touch, (tmp_path / "sprung",)

    for members in (
        {},
        {"readme.txt": b"text"},
        {"../../escaped.npy": b"text", "header.npy": b"text"},
        {"header.npy": pickle.dumps(Trap())},
    ):
        with zipfile.ZipFile(broken, "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        refused(broken.read_bytes())
    np.savez(broken, header=np.array([Trap()], dtype=object), allow_pickle=True)
    refused(broken.read_bytes())
    np.savez(broken, x=np.ones(3))
    refused(broken.read_bytes())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["inside", "whole.npz"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The file of a small run whose observable is a tuple of a list and a dict."""
    flow, cloud, data = problem("vanilla")
    seen = lambda f, c, d: ([mf.energy(f, c, d), c.weights], {3: c.width, 1: None})
    run = mf.descend(flow, cloud, data, 2, step=0.1, observe=seen)
    return run.save(tmp_path_factory.mktemp("saved") / "run")


def edited(saved, folder, change):
    """A copy of the file whose header went through ``change``, which edits it or returns another one."""
    with np.load(saved) as file:
        arrays = dict(file)
    header = json.loads(arrays["header"].tobytes().decode())
    header = change(header) or header
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    np.savez(folder / "edited.npz", **arrays | {"header": np.frombuffer(text, np.uint8)})
    return folder / "edited.npz"


SPRUNG = []


class Spring:
    """A class of an imported module that a file must not be able to call, with or without the fields of a record."""

    def __new__(cls, *parts):
        SPRUNG.append(parts)


class Imported(NamedTuple):
    a: jax.Array
    b: jax.Array


class FieldedSpring(Spring):
    _fields = ("a", "b")


@pytest.mark.parametrize("name", ["Spring", "FieldedSpring", "Imported"])
def test_a_file_cannot_choose_what_is_called(saved, tmp_path, name):
    """Nothing is known to a file but the package's particles and what the caller gives."""
    fields = list(getattr(globals()[name], "_fields", ()))

    def change(header):
        particles = header["layout"]["final"]["cloud"]
        values = ["final.weights" for _ in fields]
        node = {"record": f"{__name__}.{name}", "fields": fields, "values": values}
        particles[0 if isinstance(particles, list) else "particles"] = node

    with pytest.raises(ValueError, match=rf"edited.npz holds a record .*\.{name} .*records=\["):
        mf.Solution.load(edited(saved, tmp_path, change))
    assert SPRUNG == []


@pytest.mark.bad_input
@pytest.mark.parametrize("given", [tuple, dict, Spring, Imported(jnp.ones(1), jnp.ones(1))])
def test_records_must_be_named_tuples(saved, given):
    with pytest.raises(TypeError, match=r"records\[0\] must be a NamedTuple"):
        mf.Solution.load(saved, records=[given])


def test_a_record_that_is_not_given_is_asked_for(tmp_path):
    flow, cloud, data = user_problem()
    path = mf.descend(flow, cloud, data, 1, step=0.1).save(tmp_path / "waves")
    with pytest.raises(ValueError, match=r"waves.npz holds a record .*Waves with fields .*records=\["):
        mf.Solution.load(path)
    assert isinstance(mf.Solution.load(path, records=[Waves]).final.particles, Waves)


def test_what_was_observed_keeps_its_structure(saved, tmp_path):
    flow, cloud, data = problem("vanilla")

    def seen(f, c, d):
        energy = mf.energy(f, c, d)
        nested = {"a.b": energy, "a": {"b": 2 * energy, "/": 3 * energy}, "": [energy], "no\0thing": -energy}
        return ([energy, (c.weights,)], {10: energy, 2: nested}, Imported(c.width, energy > 0))

    run = mf.descend(flow, cloud, data, 2, step=0.1, observe=seen)
    back = mf.Solution.load(run.save(tmp_path / "run"), records=[Imported])
    chex.assert_trees_all_equal(run, back)
    assert type(mf.Solution.load(saved).observed[0]) is list
    assert list(mf.Solution.load(saved).observed[1]) == [1, 3]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "part",
    [
        {1.5: jnp.ones(2)},
        {(0, 1): jnp.ones(2)},
        {True: jnp.ones(2)},
        collections.OrderedDict(a=jnp.ones(2)),
        diffrax.Euler(),
        jnp.ones(2, jnp.bfloat16),
        jax.random.key(0),
        "text",
    ],
    ids=lambda part: type(part).__name__,
)
def test_what_would_not_come_back_is_not_saved(saved, tmp_path, part):
    run = eqx.tree_at(lambda s: s.observed, mf.Solution.load(saved), {"part": part})
    with pytest.raises(ValueError, match=r"observed.part must be .* cannot be saved"):
        run.save(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


DAMAGES = {
    "header of text": lambda h: b"no JSON",
    "header is a list": lambda h: [h],
    "header is a number": lambda h: b"3",
    "no format": lambda h: h.pop("format") and None,
    "format of text": lambda h: h.update(format=str(h["format"])),
    "later format": lambda h: h.update(format=h["format"] + 1),
    "no layout": lambda h: h.pop("layout") and None,
    "layout is a list": lambda h: h.update(layout=[h["layout"]]),
    "layout is nothing": lambda h: h.update(layout=None),
    **{
        f"no {part}": lambda h, part=part: h["layout"].pop(part) and None for part in ("ts", "state", "final")
    },
    **{
        f"{part} is {value}": lambda h, part=part, value=value: h["layout"].update({part: value})
        for part in ("ts", "final", "state", "stats", "settings")
        for value in (None, 3, "absent", "energy", [], {}, {"dict": []}, {"odd": []})
    },
    "clouds are an array": lambda h: h["layout"].update(clouds="ts"),
    "clouds of nothing": lambda h: h["layout"].update(clouds={"cloud": [None, None, None, None]}),
    "arrays exchanged": lambda h: h["layout"].update(ts="energy", energy="ts"),
    "one more part": lambda h: h["layout"].update(more=None),
    "state lacks a part": lambda h: h["layout"]["state"]["state"].pop() and None,
    "state has one more": lambda h: h["layout"]["state"]["state"].append(None),
    "state has a part of nothing": lambda h: h["layout"]["state"]["state"].__setitem__(0, None),
    "state is a dict": lambda h: h["layout"]["state"].update(state={"t": "state.t"}),
    "field of a record missing": lambda h: h["layout"]["state"]["state"][1]["fields"].pop() and None,
    "value of a record missing": lambda h: h["layout"]["state"]["state"][1]["values"].pop() and None,
    "fields of a record are a number": lambda h: h["layout"]["state"]["state"][1].update(fields=2),
    "name of a record is a list": lambda h: h["layout"]["state"]["state"][1].update(record=["a"]),
    "no names of settings": lambda h: h["layout"]["settings"].pop("names") and None,
    "names of settings without values": lambda h: h["layout"]["settings"]["names"].append(["clock"]),
    "names of settings are texts": lambda h: h["layout"]["settings"]["names"].append("ab"),
    "names of settings are numbers": lambda h: h["layout"]["settings"]["names"].append([1, 2]),
    "numbers of settings are nothing": lambda h: h["layout"]["settings"].update(settings=None),
    "no result": lambda h: h["layout"].pop("result") and None,
    **{
        f"result is {value}": lambda h, value=value: h["layout"].update(result=value)
        for value in (None, 7, "odd", {}, [], ["successful"], [["successful"], []])
    },
    "observed is a loop of lists": lambda h: (
        json.dumps(h).replace('"observed.0.0"', "[" * 500 + "]" * 500).encode()
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_headers_are_named(saved, tmp_path, damage):
    with pytest.raises(ValueError, match=r"edited\.npz"):
        mf.Solution.load(edited(saved, tmp_path, DAMAGES[damage]))


def test_names_with_dots_are_kept_apart(tmp_path):
    flow, cloud, data = problem("vanilla")
    runs = {name: mf.solve(flow, cloud, data, t) for name, t in (("run_0.1", 0.1), ("run_0.2", 0.2))}
    for name, run in runs.items():
        assert run.save(tmp_path / name) == tmp_path / f"{name}.npz"
    for name, run in runs.items():
        assert float(mf.Solution.load(tmp_path / name).energy[-1]) == float(run.energy[-1])


def test_files_hold_the_name_of_the_result_and_the_versions(tmp_path):
    flow, cloud, data = problem("vanilla")
    run = mf.solve(flow, cloud, data, 10.0, step=mf.Adaptive(max_steps=3), throw=False)
    with np.load(run.save(tmp_path / "short.npz")) as file:
        header = json.loads(file["header"].tobytes().decode())
    assert header["layout"]["result"] == "max_steps_reached"
    assert header["versions"]["jax"] == jax.__version__
    assert bool(mf.Solution.load(tmp_path / "short").result == mf.RESULTS.max_steps_reached)


@pytest.mark.bad_input
def test_other_files_are_refused(tmp_path):
    (tmp_path / "text.npz").write_text("no archive")
    np.savez(tmp_path / "other.npz", a=np.zeros(2))
    for name in ("text", "other"):
        with pytest.raises(ValueError, match="written by Solution.save"):
            mf.Solution.load(tmp_path / name)
    with pytest.raises(ValueError, match="does not exist"):
        mf.Solution.load(tmp_path / "absent")


@pytest.mark.parametrize("way", ["solve", "descend"])
def test_a_resumed_run_honours_a_new_step(way):
    flow, cloud, data = problem("vanilla")

    def run(start, end, step, state=None):
        if way == "solve":
            return mf.solve(flow, start, data, end, solver=diffrax.Euler(), step=step, state=state)
        count = round((end - (0.0 if state is None else float(state.t))) / step)
        return mf.descend(flow, start, data, count, step=step, state=state)

    half = run(cloud, 0.5, 0.1)
    fine = run(half.final, 1.0, 0.01, half.state)
    assert int(fine.state.steps) == 5 + 50
    fresh = mf.descend(flow, half.final, data, 50, step=0.01)
    assert largest_gap(fine.final.particles, fresh.final.particles) < 1e-12


def test_a_state_refuses_other_data_and_other_optimizers():
    flow, cloud, data = problem("vanilla")
    half = mf.descend(flow, cloud, data, 2, optimizer=optax.adam(0.1))
    again = mf.descend(flow, cloud, data, 2, optimizer=optax.adam(0.1), state=half.state)
    assert int(again.state.steps) == 4
    with pytest.raises(ValueError, match="optimizer: .* before"):
        mf.descend(flow, cloud, data, 2, optimizer=optax.adam(0.2), state=half.state)
    moved = mf.Dataset(data.x, data.y.at[3].add(0.1), data.weights)
    with pytest.raises(ValueError, match="other data than before"):
        mf.descend(flow, cloud, moved, 2, optimizer=optax.adam(0.1), state=half.state)
    samples = mf.Dataset(data.x[::-1], data.y[::-1], data.weights[::-1])
    coordinates = mf.Dataset(data.x[:, ::-1], data.y, data.weights)
    for swapped in (samples, coordinates):
        with pytest.raises(ValueError, match="other data than before"):
            mf.descend(flow, cloud, swapped, 2, optimizer=optax.adam(0.1), state=half.state)


class Halving(solvers.StepRule):
    """Steps of 1/2, 1/4, ... a new one after each two steps; a rule that a user might write."""

    every: int = 2

    def size_at(self, problem, y):
        gone = jnp.sum(problem.cloud(y).weights)  # 1: the rule gets the cloud of the model
        return 0.25 * gone * jnp.exp(-mf.energy(problem.flow, problem.cloud(y), problem.data))


def test_a_step_rule_of_the_user(key):
    flow, cloud, data = problem("batchnorm")
    run = mf.descend(flow, cloud, data, 4, step=Halving(), every=1)
    sizes = np.diff(run.ts)
    expected = [0.25 * np.exp(-float(run.energy[k])) for k in (0, 0, 2, 2)]
    np.testing.assert_allclose(sizes, expected, rtol=1e-12)
    euler = mf.solve(flow, cloud, data, float(run.ts[-1]), solver=diffrax.Euler(), step=Halving())
    assert largest_gap(euler.final.particles, run.final.particles) < 1e-12


class Waves(NamedTuple):
    a: jax.Array
    b: jax.Array
    t: jax.Array


class Ridge(flows.Feature):
    """a cos(b . x + t), the model of the page "How to add a model"."""

    input_ndim, amplitude, angles = 2, "a", ("t",)

    def __call__(self, cloud, x):
        a, b, t = cloud.particles
        return a[None, :] * jnp.cos(x @ b.T + t[None, :])


def user_problem():
    def wave_laws(dim):
        return {"a": laws.uniform(), "b": laws.normal(1.0, dim), "t": laws.angle()}

    flow = flows.make_flow(Ridge(Waves), geometry.Space(), laws=wave_laws)
    x = jax.random.normal(jax.random.key(1), (20, 2))
    return flow, flow.init(jax.random.key(0), 6, dim=2), mf.Dataset(x, jnp.cos(2 * x[:, 0]))


def test_a_model_of_the_user_is_saved_and_resumed(tmp_path):
    flow, cloud, data = user_problem()
    whole = mf.solve(flow, cloud, data, 1.0, ts=[0.5, 1.0], step=1 / 16)
    half = mf.solve(flow, cloud, data, 0.5, step=1 / 16)
    back = mf.Solution.load(half.save(tmp_path / "half"), records=[Waves])
    assert isinstance(back.final.particles, Waves)
    rest = mf.solve(flow, back.final, data, 1.0, step=1 / 16, state=back.state)
    assert largest_gap(rest.final.particles, whole.final.particles) == 0
    run = mf.descend(flow, cloud, data, 4, step=0.1, observe=["displacement", "kernel_drift", "neurons"])
    assert run.observed["neurons"]["b_1"].shape == (2, 6)
    assert float(run.observed["kernel_drift"][0]) == 0 < float(run.observed["kernel_drift"][1])


def test_a_model_of_the_user_is_swept_stored_and_reported(tmp_path):
    from meanflow.report import write_report

    flow, _, data = user_problem()
    grid = {"widths": [3, 5], "axes": {"scale": [0.5, 1.0]}, "seeds": 2, "steps": 4, "every": 2, "step": 0.1}
    runs = mf.sweep(flow, data, store=tmp_path / "runs", **grid)
    again = mf.sweep(flow, data, store=tmp_path / "runs", **grid)
    np.testing.assert_array_equal(runs.energy, again.energy)
    alone = mf.sweep(flow, data, compute=False, **grid).single(width=5, scale=0.5, seed=1)
    np.testing.assert_allclose(runs.energy.sel(width=5, scale=0.5, seed=1), alone.energy, rtol=1e-12)
    assert write_report(runs, tmp_path / "page.html").exists()


def test_clouds_of_a_run_are_indexed_and_iterated():
    flow, cloud, data = problem("vanilla")
    run = mf.descend(flow, cloud, data, 4, step=0.1, every=2)
    assert len(run.clouds) == 3
    assert largest_gap(run.clouds[-1].particles, run.final.particles) == 0
    energies = [float(mf.energy(flow, one, data)) for one in run.clouds]
    np.testing.assert_allclose(energies, run.energy, rtol=1e-13)
    assert run.clouds[1:].weights.shape == (2, cloud.size)
    with pytest.raises(IndexError, match="from -3 to 2, got 3"):
        run.clouds[3]
    with pytest.raises(TypeError, match="only stacked clouds"):
        cloud[0]


def test_a_resumed_run_observes_from_the_first_start():
    flow, cloud, data = problem("vanilla")
    observe = functools.partial(mf.descend, flow, data=data, step=0.125, observe=["displacement"])
    whole, half = (observe(cloud=cloud, steps=k) for k in (4, 2))
    rest = observe(cloud=half.final, steps=2, state=half.state)
    np.testing.assert_array_equal(rest.observed["displacement"], whole.observed["displacement"][-1:])


@pytest.mark.parametrize("part", ["weights", "labels"])
def test_a_resumed_run_refuses_weights_and_labels_that_are_not_its_own(part):
    flow, cloud, data = problem("vanilla")
    cloud = mf.Cloud(cloud.particles, cloud.weights, labels=jnp.ones(cloud.size))
    half = mf.descend(flow, cloud, data, 2, step=0.125)
    other = {"weights": cloud.weights, "labels": cloud.labels} | {
        part: getattr(cloud, part)[::-1] * (1 + jnp.eye(7)[0])
    }
    changed = mf.Cloud(cloud.particles, **other, total=None)
    with pytest.raises(ValueError, match=f"cloud must have the {part} of the run behind state"):
        mf.descend(flow, changed, data, 2, step=0.125, state=half.state)


def test_a_file_of_another_format_says_who_wrote_it(tmp_path):
    flow, cloud, data = problem("vanilla")
    path = mf.descend(flow, cloud, data, 1, step=0.1).save(tmp_path / "old")
    with np.load(path) as file:
        arrays = dict(file)
    header = json.loads(arrays["header"].tobytes())
    header |= {"format": 2, "versions": header["versions"] | {"meanflow": "0.0.7"}}
    np.savez(path, **arrays | {"header": np.frombuffer(json.dumps(header).encode(), np.uint8)})
    with pytest.raises(
        ValueError, match=r"has format 2, written by meanflow 0\.0\.7; this version reads format 4"
    ):
        mf.Solution.load(path)


def test_labelled_weights_are_those_of_each_save():
    """Where the potential does not depend on the measure, p_i(t) is proportional to p_i(0) exp(-beta V_i t)."""
    values = np.array([1.0, 0.0, -0.5, 0.1])
    cloud = mf.Cloud(mf.Neurons(values, np.ones((4, 2))), labels=np.arange(4.0))
    flow = mf.vanilla("tanh", inner=0.0, outer=0.0, penalty=(lambda w: w.a, 1.0))
    nothing = mf.Dataset(jnp.zeros((1, 2)), jnp.zeros(1))
    run = mf.solve(flow, cloud, nothing, 2.0, ts=3, dynamics=mf.Reaction(1.0), step=mf.Adaptive(1e-10, 1e-12))
    found = run.to_xarray()
    grown = np.exp(-np.array([0.0, 1.0, 2.0])[:, None] * values)
    assert found.weights.dims == found.labels.dims == ("time", "particle")
    np.testing.assert_allclose(found.weights, grown / grown.sum(1, keepdims=True), rtol=1e-8)
    np.testing.assert_array_equal(found.labels.isel(time=-1), cloud.labels)


def test_no_variable_of_labelled_data_replaces_another():
    flow, cloud, data = problem("vanilla")
    run = functools.partial(mf.descend, flow, cloud, data, 2, step=0.1)
    one, two = (lambda *args, k=k: jnp.full(3, k) for k in (1.0, 2.0))
    with pytest.raises(ValueError, match="observe must not use the name 'energy'"):
        run(observe={"energy": one})
    for observe, words in (
        (lambda *args: {"energy": one()}, r"'energy' for energy and for observed\['energy'\]"),
        ({"time": one}, r"'time' for ts and for observed\['time'\]"),
        (
            {"a": lambda *args: {"b": one()}, "a_b": two},
            r"'a_b' for observed\['a'\]\['b'\] and for observed\['a_b'\]",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            run(observe=observe).to_xarray()
    # an observable whose name begins with that of another has no part in its axes
    near = run(observe={"neurons": "neurons", "neurons_seen": one}).to_xarray()
    assert near.neurons_seen.dims == ("time", "neurons_seen_0") and near.neurons_a.dims == (
        "time",
        "particle",
    )


def test_runs_as_labelled_data():
    flow, cloud, data = problem("vanilla")
    run = mf.descend(flow, cloud, data, 4, step=0.1, every=2)
    found = run.to_xarray()
    assert found.b.dims == ("time", "particle", "b_0")
    np.testing.assert_array_equal(found.b[-1], run.final.particles.b)
    np.testing.assert_array_equal(found.time, run.ts)
    assert json.loads(found.attrs["numbers"])["step"] == 0.1
    assert found.attrs["ok"] == 1
    named = mf.descend(
        flow, cloud, data, 4, step=0.1, every=2, observe=["dissipation", "predictions", "neurons"]
    ).to_xarray()
    assert dict(named.predictions.sizes) == {"time": 3, "sample": data.size}
    assert dict(named.neurons_b_0.sizes) == {"time": 3, "particle": cloud.size}
    np.testing.assert_allclose(named.dissipation[0], mf.dissipation(flow, cloud, data), rtol=1e-13)
    alone = mf.descend(flow, cloud, data, 2, step=0.1, observe=mf.dissipation).to_xarray()
    assert alone.observed.dims == ("time",)
    with pytest.raises(ValueError, match="a single run"):
        jax.tree.map(lambda u: jnp.stack([u, u]), run).to_xarray()
