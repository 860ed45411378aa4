import json
import pathlib
import re
import signal
import subprocess
import sys
import time
import tomllib

import jax
import numpy as np
import pytest
from click.testing import CliRunner

import meanflow as mf
from meanflow._identity import describe
from meanflow.cli import _commands, main
from meanflow.sweeps._request import FLOWS, build, check_request

CONFIG = """
[flow]
name = "lifted"
alpha = "sqrt"
[data]
name = "sine"
points = 6
[grid]
widths = [3, 4]
deltas = [-inf, 0, inf]
seeds = 2
[run]
steps = 4
every = 2
step = {kernel = 0.2, every = 2}
observe = ["angle_displacement"]
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "regimes.toml"
    path.write_text(CONFIG)
    return path


def call(*arguments, code=0):
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    if result.exit_code != code:
        raise AssertionError(f"exit code {result.exit_code}: {result.output}{result.exception!r}")
    return result.output


def test_sweep_show_and_resume(config, tmp_path):
    store = tmp_path / "run"
    summary = json.loads(call("sweep", config, "--store", store, "--json").splitlines()[-1])
    assert summary["cells"] == 12 and summary["failed"] == 0 and summary["programs"] == 1
    stored = mf.sweeps.load(store)
    x = np.linspace(-1, 1, 6)
    direct = mf.sweep(
        mf.lifted(alpha="sqrt"),
        mf.Dataset(x, np.sin(2 * np.pi * x), "sum"),
        widths=(3, 4),
        deltas=(-np.inf, 0.0, np.inf),
        seeds=2,
        steps=4,
        every=2,
        step=mf.KernelStep(0.2, 2),
        observe=("angle_displacement",),
    )
    np.testing.assert_array_equal(stored.energy, direct.energy)
    table = call("show", store, "--variable", "angle_displacement")
    assert "delta -inf" in table and "median over seeds" in table
    numbers = json.loads(call("show", store, "--json"))
    assert numbers["energy"]["dims"] == ["width", "delta"]
    call("show", store, "--figure", tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 1000
    chunk = next((store / "chunks").glob("*.npz"))
    chunk.unlink()
    assert "12 runs" in call("resume", store)
    np.testing.assert_array_equal(mf.sweeps.load(store).energy, direct.energy)
    # another configuration in the same directory
    assert "settings" in call("sweep", config, "--store", store, "--set", "run.clock='gradient'", code=3)


def test_dynamics_batches_and_tolerances_from_the_command_line(tmp_path):
    """The numbers are those of the call in Python with the same key; another key gives other noise."""
    x = np.linspace(-1, 1, 6)
    data, solvers = mf.Dataset(x, np.sin(2 * np.pi * x), "sum"), mf.solvers
    base = (
        "sweep",
        "--flow",
        "canonical",
        "--set",
        "data={name='sine', points=6}",
        "--widths",
        "4",
        "--seeds",
        "2",
    )
    base = (*base, "--set", "run.observe=[]")
    steps, energies = ("--steps", "4", "--step", "0.01"), {}
    for name, flags, settings in (
        ("noise", ("--temperature", "0.1", "--key", "3"), {"dynamics": solvers.Noise(0.1), "key": 3}),
        ("other", ("--temperature", "0.1", "--key", "4"), {"dynamics": solvers.Noise(0.1), "key": 4}),
        (
            "reaction",
            ("--set", "run.dynamics={reaction=2.0, conserve=false}"),
            {"dynamics": solvers.Reaction(2.0, conserve=False)},
        ),
        (
            "batches",
            ("--set", "run.batches={size=3, replace=true}"),
            {"batches": solvers.Batches(3, replace=True)},
        ),
        (
            "tolerance",
            ("--set", "run={t1=0.1, step={rtol=1e-3}, observe=[]}"),
            {"steps": None, "t1": 0.1, "step": solvers.Adaptive(1e-3)},
        ),
    ):
        call(*base, *(() if name == "tolerance" else steps), *flags, "--store", tmp_path / name)
        energies[name] = mf.sweeps.load(tmp_path / name).energy.values
        given = {"steps": 4, "step": 0.01} | settings
        alone = mf.sweep(mf.canonical(), data, widths=(4,), seeds=2, observe=(), **given)
        np.testing.assert_array_equal(energies[name], alone.energy)
    assert not np.array_equal(energies["noise"][..., -1], energies["other"][..., -1])
    for flags, message in (
        (("--temperature", "0.1", "--reaction", "1.0"), "one of temperature and reaction"),
        (("--temperature", "-1"), "temperature"),
        (("--set", "run.dynamics={temperature='hot'}"), "temperature"),
        (("--set", "run.dynamics={reaction=1.0, conserve=3}"), "conserve"),
        (("--set", "run.batches={size=7}"), "at most the size of the data"),
    ):
        assert message in call(*base, *steps, *flags, code=2)
    assert "step must be" in call(*base, "--t1", "0.1", "--temperature", "0.1", code=2)


@pytest.mark.parametrize("axes", ["{}", "{clock = ['lazy', 'gradient']}"])
def test_figures_of_one_axis_and_of_names(config, tmp_path, axes):
    change = ("--set", f"grid={{widths = [3, 4], deltas = [0.0], seeds = 2, axes = {axes}}}")
    call("sweep", config, "--store", tmp_path / "run", *change)
    call("show", tmp_path / "run", "--figure", tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_flags_alone_and_failed_cells():
    base = (
        "sweep",
        "--flow",
        "radial",
        "--data",
        "square",
        "--widths",
        "3",
        "--seeds",
        "1",
        "--steps",
        "200",
    )
    assert "1 runs" in call(*base, "--step", "0.01")
    assert json.loads(call(*base, "--step", "1e9", "--json", code=1).splitlines()[-1])["failed"] == 1


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("flow.name='lifte'", "did you mean 'lifted'"),
        ("grid.width=[3]", "did you mean 'widths'"),
        ("run.clok='lazy'", "did you mean 'clock'"),
        ("data.name='cosine'", "data.name must be one of"),
        ("run.precision='float16'", "run.precision must be one of"),
        ("run.step={kappa=0.1}", "no key 'kappa'"),
        ("grid.widths=[3,3]", "distinct"),
        ("run.every=3", "every must divide steps"),
        ("sweeep.x=1", "no key 'sweeep'"),
        ("nonsense", "TABLE.KEY=VALUE"),
        ("grid.deltas=3", "grid.deltas must be a list of numbers, got 3"),
        ("grid.deltas=abc", "grid.deltas must be a list of numbers, got 'abc'"),
        ("grid.scales=['a']", "grid.scales must be a list of numbers"),
        ("run.step='abc'", "step must be a number or a StepRule, got 'abc'"),
        ("run.step={kernel='abc'}", "kappa must be a number, got 'abc'"),
        ("run.solver='sliding'", "got 'solver' (it belongs to runs with t1)"),
        ("run.key='abc'", "key must be an integer"),
        ("run.observe=['neuron']", "observe must name observables among"),
        ("data.points=0", "data.points must be an integer >= 1, got 0"),
        ("data={x=[1.0]}", "needs y beside x"),
        ("data={name='ridge'}", "data.x must have shape (n,)"),
        ("flow={name='vanilla'}", "data.x must have shape (n, d)"),
        ("mesh.sweep=64", "a mesh of 64 x 1 devices"),
        ("store=3", "store must be the name of a directory, got 3"),
        ("grid=3", "--set needs TABLE.KEY=VALUE"),
    ],
)
def test_bad_configurations_are_explained(config, change, message):
    assert message in call("sweep", config, "--set", change, code=2)


WRONG_TYPES = """
run.steps=['a', 1.5, -1, [1]]             run.step=[-1, nan, [0.1]]                        run.every=['a', 0]
run.observe=[3, [1]]                      run.chunk=['a', 0]                          run.waste=['a', 2]
run.precision=[3]                         run.clock=['bogus', 3]                      run.t1=['a']
grid.widths=['a', 3, [1.5], ['a'], [], [[1]], [10000000000000]]                       grid.deltas=[['a'], [nan]]
grid.seeds=['a', -1, 1.5, [4294967296], 1000000000000]                                flow.name=[3]
flow.alpha=[[1], 'bogus', -1]             data.x=['a', [1, 'a', 2]]                   data.weights=[3, 'bogus']
"""


@pytest.mark.bad_input
def test_values_of_the_wrong_type_end_with_the_key_and_code_2(config):
    pairs = [pair.split("=", 1) for pair in re.split(r"\s{2,}|\n", WRONG_TYPES) if pair]
    cases = [(key, value) for key, listed in pairs for value in tomllib.loads(f"v = {listed}")["v"]]
    assert len(cases) >= 36
    for key, value in cases:
        change = {"data.x": "data={x=%s, y=[1.0, 2.0, 3.0]}"}.get(key, key + "=%s") % _toml(value)
        said = call("sweep", config, "--set", change, code=2)
        assert "Error: " in said and key.split(".")[1] in said, (key, value, said)


def _toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return f"'{value}'" if isinstance(value, str) else str(value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--alpha", "cube"), "--alpha must be m, sqrt, one or a number, got 'cube'"),
        (("--widths", "3,x"), "--widths must be comma-separated numbers"),
        (("--scales", "1,x"), "--scales must be comma-separated numbers"),
        (("--observe", "energies"), "observe must name observables among"),
    ],
)
def test_bad_flags_are_explained(config, flags, message):
    assert message in call("sweep", config, *flags, code=2)


def test_what_the_report_animates_can_be_asked_for(config, tmp_path):
    store = tmp_path / "run"
    call(
        "sweep",
        config,
        "--observe",
        "predictions,neurons",
        "--every",
        "1",
        "--scales",
        "0.5,2",
        "--store",
        store,
    )
    assert mf.sweeps.load(store).neurons_r.dims == ("width", "delta", "scale", "seed", "step", "particle")
    where = json.loads(call("report", store, "--json"))["report"]
    page = re.search(r'<script id="data"[^>]*>(.*?)</script>', pathlib.Path(where).read_text(), re.DOTALL)
    shown = json.loads(page.group(1))
    assert np.shape(shown["neurons"]["u"]) == (2, 3, 5, 4) and np.shape(shown["function"]["values"]) == (
        2,
        3,
        5,
        1,
        101,
    )
    assert shown["summary"].endswith("0 failed. Pictures at scale = 0.5.")


def test_json_is_strict(config, tmp_path):
    """Infinite balances and failed runs, for parsers that know neither Infinity nor NaN."""

    def refuse(constant):
        raise AssertionError(constant)

    store = tmp_path / "run"
    change = "run={steps = 400, step = 1e9, observe = []}"
    call("sweep", config, "--store", store, "--set", change, "--json", code=1)
    shown = json.loads(call("show", store, "--json"), parse_constant=refuse)
    assert shown["energy"]["coords"]["delta"]["data"] == ["-inf", 0.0, "inf"]
    assert None in shown["energy"]["data"][0]


def test_directories_without_results_and_files_that_cannot_be_written(config, tmp_path, monkeypatch):
    store = tmp_path / "run"
    monkeypatch.setattr("meanflow.sweeps._devices.free_memory", lambda device: 1000)
    assert "GiB are free" in call("sweep", config, "--store", store, code=2)
    monkeypatch.undo()
    call("plan", config, "--store", store)
    for command in ("show", "report"):
        assert "no finished chunk yet; meanflow resume" in call(command, store, code=3)
    call("resume", store)
    (tmp_path / "file").write_text("")
    assert "Error: " in call("show", store, "--figure", tmp_path / "none" / "map.png", code=2)
    assert "Error: " in call("report", store, "--output", tmp_path / "file" / "page.html", code=2)
    mf.sweeps.sweep_function(lambda key, s: 2 * s, axes={"s": (1.0, 2.0)}, store=tmp_path / "function")
    assert "s 2.0" in call("show", tmp_path / "function", "--variable", "value")
    assert "sweep of networks" in call("report", tmp_path / "function", code=2)
    assert "a store runs no code" in call("resume", tmp_path / "function", code=3)


def test_an_interrupted_run_says_how_to_go_on(config, tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("meanflow.sweeps._store.Store.write", interrupted)
    assert "meanflow resume" in call("sweep", config, "--store", tmp_path / "run", code=130)


@pytest.mark.parametrize(
    ("problem", "code"), [(KeyboardInterrupt, 130), (MemoryError, 70), (RecursionError, 70), (OSError, 2)]
)
def test_exit_codes_tell_what_happened(monkeypatch, problem, code):
    """Nothing unforeseen shares the code 1 of failed cells."""

    def fail():
        raise problem("told")

    monkeypatch.setattr(jax, "devices", fail)
    assert "Error" in call("info", code=code) or code in (70, 130)


SMALL = ("--set", "run.chunk=2", "--set", "run.observe=[]")


def test_a_plan_is_worked_off_by_several_workers(config, tmp_path, monkeypatch):
    """The bits of one process; each worker says by its exit code whether the whole is done."""
    store, direct = tmp_path / "run", tmp_path / "direct"
    call("sweep", config, *SMALL, "--store", direct)
    found = json.loads(call("plan", config, *SMALL, "--store", store, "--json"))
    assert (found["cells"], found["chunks"], found["seconds"]) == (12, 6, None)
    size = 0
    for file in (direct / "chunks").iterdir():
        with np.load(file) as one:
            size += sum(one[name].nbytes for name in one.files if name != "header")
    assert found["bytes"] == size
    assert "0 of 12 cells are done, 0 claimed" in call("show", store, code=3)
    assert "about" in call("plan", config, *SMALL, "--store", store, "--timed")
    shown = call("show", store)
    assert "2 of 12 cells are done" in shown and "not run" in shown and "nan" not in shown
    (store / "claims" / "000-00003.0").mkdir()
    (store / "claims" / "000-00003.0" / "holder.json").write_text('{"pid": 7, "host": "elsewhere"}')
    assert "at work  process 7 on elsewhere, chunk 000-00003" in call("show", store)
    (store / "claims" / "000-00003.0" / "holder.json").unlink()
    (store / "claims" / "000-00003.0").rmdir()
    assert "not run" not in call("sweep", config, *SMALL, "--store", tmp_path / "whole")
    with monkeypatch.context() as ending:
        ending.setattr("atexit.register", lambda leave, code: None)
        assert not json.loads(call("work", store, "--for", "0s", "--json", code=4))["whole"]
    call("work", store, "--shard", "1/2")
    assert mf.sweeps.load(store).result.values.min() == -1
    assert mf.sweeps.work(store)
    assert json.loads(call("work", store, "--json")) == {
        "store": str(store),
        "whole": True,
        "done": 12,
        "cells": 12,
    }
    assert {f.name: f.read_bytes() for f in (store / "chunks").iterdir()} == {
        f.name: f.read_bytes() for f in (direct / "chunks").iterdir()
    }


def test_a_worker_that_is_told_to_stop_gives_its_claim_back(config, tmp_path):
    """In the middle of a chunk that would take for ever, as a job does whose time is over."""
    long = "run={steps = 1000000000, step = 0.001, observe = [], chunk = 2}"
    call("plan", config, "--set", long, "--store", tmp_path / "run")
    workers = [
        (
            told,
            subprocess.Popen(
                [sys.executable, "-m", "meanflow", "work", tmp_path / "run"], stdout=subprocess.PIPE
            ),
        )
        for told in (signal.SIGTERM, signal.SIGUSR1)
    ]
    until = time.monotonic() + 200
    while len(list((tmp_path / "run" / "claims").glob("0*"))) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(1.0)
    for told, worker in workers:
        worker.send_signal(told)
    for _, worker in workers:
        assert b"0 of 12 cells are done" in worker.communicate(timeout=60)[0]
        assert worker.returncode == 4
    assert not list((tmp_path / "run" / "claims").iterdir())


def test_slurm_scripts(config, tmp_path, monkeypatch):
    """A script that a person can read; what sbatch says is passed on."""
    store, script = tmp_path / "my run", tmp_path / "my run.sbatch"
    assert "no plan/config.json" in call("submit", store, code=3)
    call("plan", config, "--store", store)
    options = ("--array", "4", "--time", "1h30m", "--gres", "gpu:1", "--partition=requeue")
    text = call("submit", store, *options, "--dry-run")
    assert not script.exists()
    for line in (
        "--array=0-3",
        "--time=90",
        "--gres gpu:1",
        "--partition=requeue",
        "--requeue",
        "--signal=USR1@60",
    ):
        assert f"#SBATCH {line}\n" in text
    assert f"-m meanflow work '{store}'\n" in text
    assert "must name its run directory" in call("submit", config, code=2)
    config.write_text(f"store = '{tmp_path / 'other'}'\n{CONFIG}")
    assert f"work {tmp_path / 'other'}\n" in call("submit", config, "--dry-run")
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert "sbatch was not found" in call("submit", store, *options, code=2) and script.read_text() == text
    (tmp_path / "bin").mkdir()
    for code, said in ((0, "Submitted batch job 7"), (1, "invalid partition")):
        (tmp_path / "bin" / "sbatch").write_text(
            f"#!/bin/sh\necho '{said}' | /usr/bin/tee /dev/stderr\nexit {code}\n"
        )
        (tmp_path / "bin" / "sbatch").chmod(0o755)
        assert said in call("submit", store, *options, code=2 * code)


@pytest.mark.bad_input
def test_workers_that_do_not_fit_are_refused(config, tmp_path, monkeypatch):
    store = tmp_path / "run"
    call("plan", config, *SMALL, "--store", store)
    assert "no plan/config.json" in call("work", tmp_path / "none", code=3)
    for flags, text in ((("--shard", "2/2"), "K/N"), (("--for", "soon"), "3h55m")):
        assert text in call("work", store, *flags, code=2)
    # another precision, other code
    assert "precision" in call(
        "sweep", config, *SMALL, "--set", "run.precision='float32'", "--store", store, code=3
    )
    jax.config.update("jax_enable_x64", True)
    with monkeypatch.context() as later:
        later.setattr("meanflow.sweeps._plan.versions", lambda: {"jax": "0.0.1"})
        with pytest.warns(UserWarning, match="other versions.*jax.*0.0.1"):
            assert mf.sweeps.work(store, shard=(0, 6))
    mf.sweeps.sweep_function(lambda key, s: 2 * s, axes={"s": (1.0, 2.0)}, store=tmp_path / "function")
    assert "a store runs no code" in call("work", tmp_path / "function", code=3)
    assert "give the run directory" in call("plan", config, code=2)


@pytest.mark.parametrize("name", list(FLOWS))
def test_flow_options_are_those_of_the_constructor(config, tmp_path, name):
    """A scale, a centered flow, a bias: whatever the constructor takes."""
    make = FLOWS[name]
    options = {"centered": True} | ({} if name == "canonical" else {"alpha": 2.0})
    options |= {"bias": True} if name == "vanilla" else {"affine": True} if "batch" in name else {}
    line = name in ("canonical", "lifted", "planar", "radial", "full")
    data = {"name": "sine" if line else "ridge", "points": 6}
    grid = {"widths": [3]} | ({"deltas": [0.0]} if name == "lifted" else {})
    request = {"flow": {"name": name} | options, "data": data, "grid": grid, "run": {"steps": 1, "step": 0.1}}
    assert build(check_request(request)).flow.centered
    assert describe(build(check_request(request)).flow) == describe(make(**options))


def test_data_files_are_found_from_elsewhere(config, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    np.savez("points.npz", x=[-1.0, 0.0, 1.0], y=[1.0, 0.0, 1.0])
    call("sweep", config, "--data", "points.npz", "--store", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert "12 runs" in call("resume", tmp_path / "run")


def test_unreadable_files_and_stores(tmp_path):
    assert "cannot be read" in call("sweep", tmp_path / "none.toml", code=2)
    (tmp_path / "bad.toml").write_text("[flow")
    assert "not valid TOML" in call("sweep", tmp_path / "bad.toml", code=2)
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe = [")
    assert "not valid TOML" in call("sweep", tmp_path / "bad.toml", code=2)
    (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04junk")
    flags = ("--flow", "lifted", "--widths", "2", "--deltas", "0", "--steps", "2", "--step", "0.1")
    said = call("sweep", *flags, "--data", tmp_path / "bad.npz", code=2)
    assert "bad.npz cannot be read as .npz: BadZipFile" in said
    assert "no plan/config.json" in call("show", tmp_path, code=3)
    assert "no plan/config.json" in call("resume", tmp_path, code=3)
    assert "give a CONFIG file" in call("sweep", code=2)


def test_info_and_help():
    found = json.loads(call("info", "--json"))
    assert found["versions"]["jax"] == jax.__version__ and len(found["devices"]) == jax.device_count()
    for command in ("sweep", "resume", "plan", "work", "show", "report", "reproduce", "info"):
        text = call(command, "--help")
        assert "Usage" in text and "Example" in text and f"  meanflow {command}" in text and "--json" in text
    assert "meanflow resume" in call("--help")


def test_bad_releases_of_jax_are_named(monkeypatch):
    monkeypatch.setitem(_commands.BAD_JAX, jax.__version__, "wrong on Mondays")
    assert f"warning: jax {jax.__version__} is known to be bad: wrong on Mondays" in call("info")
    assert json.loads(call("info", "--json"))["warning"] == "wrong on Mondays"
