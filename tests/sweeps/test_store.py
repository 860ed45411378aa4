"""Run directories: resumed, refused, never half-read."""

import contextlib
import dataclasses
import functools
import io
import json
import os
import pickle
import re
import shutil
import sys
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray
from click.testing import CliRunner
from small_runs import DATA, Interrupted, interrupt_after, run

import meanflow as mf
from meanflow import _identity as identity
from meanflow.cli import main
from meanflow.sweeps import _devices as devices
from meanflow.sweeps import _grid as grids
from meanflow.sweeps import load
from meanflow.sweeps._store import Store, StoreError, _seal


def edit(path, change):
    """Changes a JSON file in place."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_an_interrupted_run_continues_to_the_same_bits(tmp_path):
    whole = run(tmp_path / "whole")
    assert np.all(whole.result == 0)
    with pytest.raises(Interrupted):
        run(tmp_path / "part", progress=interrupt_after(2))
    finished = sorted((tmp_path / "part" / "chunks").glob("*.npz"))
    assert len(finished) == 1
    stamps = {f: f.stat().st_mtime_ns for f in finished}
    # what is there so far can be looked at
    partial = load(tmp_path / "part")
    assert int((partial.result == 0).sum()) == 2 and int((partial.result == -1).sum()) == 4
    # a half-written chunk is ignored and cleared away
    junk = tmp_path / "part" / "chunks" / f".part-{32 * '0'}-000-00001.npz"
    junk.write_text("PK")
    told = []
    resumed = run(tmp_path / "part", progress=lambda done, total: told.append((done, total)), chunk=None)
    assert told == [(4, 6), (6, 6)]
    assert not junk.exists()
    assert {f: f.stat().st_mtime_ns for f in finished} == stamps
    xarray.testing.assert_identical(resumed, whole)
    xarray.testing.assert_identical(load(tmp_path / "part"), whole)
    xarray.testing.assert_identical(run(tmp_path / "part"), whole)


class Terminal(io.StringIO):
    def __init__(self, interactive):
        super().__init__()
        self.interactive = interactive

    def isatty(self):
        return self.interactive


def test_progress_has_a_rate_and_the_time_left_on_terminals_only(monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    silent, loud = Terminal(False), Terminal(True)
    monkeypatch.setattr(sys, "stderr", silent)
    run()
    assert silent.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", loud)
    run(progress=False)
    assert loud.getvalue() == ""
    run()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", loud.getvalue())
    assert "6/6" in plain and re.search(r"[0-9.]+ cells/s", plain) and re.search(r"\d:\d\d:\d\d", plain)
    assert capsys.readouterr().out == ""  # results only


def test_labels_units_and_provenance(tmp_path):
    ds = run(tmp_path / "run")
    assert ds.predictions.dims == ("width", "delta", "seed", "step", "x")
    assert list(ds.delta.values) == [0.0, np.inf]
    assert float(ds.x[0]) == pytest.approx(-1.2) and float(ds.x[-1]) == pytest.approx(1.2)
    assert all({"units", "long_name"} <= set(ds[name].attrs) for name in ds.variables)
    assert json.loads(ds.attrs["versions"])["jax"]
    settings = json.loads(ds.attrs["run"])
    assert settings["settings"] == {"step": "0.05", "clock": "lazy"} and ds.attrs["data_hash"]
    # the data set survives a round trip through a file of its own
    ds.to_netcdf(tmp_path / "copy.nc")
    with xarray.open_dataset(tmp_path / "copy.nc") as copy:
        xarray.testing.assert_equal(copy.load(), ds)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"deltas": (0.0, 1.0)}, "axes.delta"),
        ({"step": 0.06}, "settings.step"),
        ({"steps": 6}, "horizon.steps"),
        ({"key": 1}, "key"),
        ({"data": mf.Dataset(DATA.x, DATA.y + 1e-9, "sum")}, "data"),
        ({"flow": mf.lifted(alpha="one")}, "flow"),
        ({"observe": ()}, "observe.predictions"),
        ({"init": lambda key, width: mf.canonical().init(key, width)}, "init"),
        ({"chunk": 1}, "chunks of"),
    ],
)
def test_another_configuration_is_refused(tmp_path_factory, change, named):
    path = tmp_path_factory.getbasetemp() / "refused"
    if not path.exists():
        run(path)
    before = {f: f.read_bytes() for f in sorted(path.rglob("*")) if f.is_file()}
    with pytest.raises(StoreError, match=named):
        run(path, **change)
    assert {f: f.read_bytes() for f in sorted(path.rglob("*")) if f.is_file()} == before


def test_other_versions_are_said(tmp_path, monkeypatch):
    with monkeypatch.context() as earlier:
        earlier.setattr("meanflow.sweeps._plan.versions", lambda: {"jax": "0.0.1"})
        run(tmp_path / "run")
    with pytest.warns(UserWarning, match="0.0.1"):
        run(tmp_path / "run")


def test_foreign_and_damaged_directories_are_left_alone(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("text")
    with pytest.raises(StoreError, match="other files"):
        run(tmp_path / "thesis")
    assert [f.name for f in (tmp_path / "thesis").iterdir()] == ["chapter.tex"]
    (tmp_path / "file").write_text("text")
    with pytest.raises(StoreError):
        run(tmp_path / "file")
    with pytest.raises(StoreError, match="no plan/config.json"):
        load(tmp_path / "thesis")
    for text, message in (
        ("{", "unreadable"),
        ("{}", "did not write"),
        ('{"run": 1, "format": 99}', "format 99"),
    ):
        (tmp_path / "bad" / "plan").mkdir(parents=True, exist_ok=True)
        (tmp_path / "bad" / "plan" / "config.json").write_text(text)
        with pytest.raises(StoreError, match=message):
            load(tmp_path / "bad")
        with pytest.raises(StoreError, match=message):
            run(tmp_path / "bad")
        assert (tmp_path / "bad" / "plan" / "config.json").read_text() == text
    run(tmp_path / "run")
    damaged = next((tmp_path / "run" / "chunks").glob("*.npz"))
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with pytest.raises(StoreError, match="is damaged"):
        run(tmp_path / "run")


def test_a_full_disk_keeps_what_is_finished(tmp_path, monkeypatch):
    store = tmp_path / "run"
    calls = []

    def full(self, name, arrays, write=Store.write):
        calls.append(name)
        if len(calls) == 2:
            monkeypatch.setattr("meanflow.sweeps._store.write_arrays", no_space)
        write(self, name, arrays)

    def no_space(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Store, "write", full)
    with pytest.raises(StoreError, match="No space left.*can be resumed"):
        run(store)
    monkeypatch.undo()
    assert [f.stem for f in (store / "chunks").iterdir()] == [calls[0]]
    xarray.testing.assert_identical(run(store), run(tmp_path / "fresh"))


def test_a_directory_that_may_not_be_written_is_refused(tmp_path, monkeypatch):
    """As for any user, told by the system rather than by permissions, which bind no administrator."""
    run(tmp_path / "run")
    files = {f: f.read_bytes() for f in (tmp_path / "run").rglob("*") if f.is_file()}
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(StoreError, match="no permission to write"):
        run(tmp_path / "run")
    assert {f: f.read_bytes() for f in (tmp_path / "run").rglob("*") if f.is_file()} == files


def test_memory_is_planned(monkeypatch):
    program = jax.jit(lambda u: 2 * u).lower(jnp.ones(2**20)).compile()  # 8 MB in, 8 MB out, each held twice
    for free, words in ((None, None), (2**26, None), (2**24, "pass chunk=28"), (10, "one cell is too large")):
        monkeypatch.setattr(devices, "free_memory", lambda device, free=free: free)
        with contextlib.nullcontext() if words is None else pytest.raises(ValueError, match=words):
            devices.check_memory(program, 64, 1000, None)


def test_a_chunk_too_large_may_be_cut_after_the_refusal(tmp_path, monkeypatch):
    """A run that is refused leaves no plan, so that the advice of the error works in the same directory."""
    monkeypatch.setattr(devices, "free_memory", lambda device: 1000)
    with pytest.raises(ValueError, match="needs .* GiB"):
        run(tmp_path / "run", chunk=None)
    monkeypatch.undo()
    assert not (tmp_path / "run").exists()
    smaller = run(tmp_path / "run", chunk=1)
    assert len(list((tmp_path / "run" / "chunks").glob("*.npz"))) == smaller.result.size
    xarray.testing.assert_allclose(smaller, run(), rtol=1e-12)
    xarray.testing.assert_identical(load(tmp_path / "run"), smaller)


@pytest.mark.parametrize("left", [(), ("chunks/",), ("chunks/", ".part-0/")])
def test_a_run_killed_while_it_makes_its_store_can_be_started_again(tmp_path, left):
    (tmp_path / "run").mkdir()
    for name in left:
        (tmp_path / "run" / name).mkdir()
    assert np.all(run(tmp_path / "run").result == 0)
    assert sorted(f.name for f in (tmp_path / "run").iterdir()) == ["chunks", "claims", "plan"]


def test_a_disk_that_is_full_from_the_start(tmp_path, monkeypatch):
    def no_space(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", no_space)
    with pytest.raises(StoreError, match="No space left"):
        run(tmp_path / "run")
    monkeypatch.undo()
    assert np.all(run(tmp_path / "run").result == 0)


@pytest.fixture(scope="module")
def finished_store(tmp_path_factory):
    store = tmp_path_factory.mktemp("finished") / "run"
    run(store, widths=(2, 9), deltas=(0.0,), observe=())
    return store


def archive(path, **members):
    """Write an archive with these arrays and a header, packed so that it takes little room on disk."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)


def array_file(shape, kind="<f8", content=b""):
    """A file in the format of numpy that declares an array of any shape."""
    header = str({"descr": kind, "fortran_order": False, "shape": shape}).encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + content


@pytest.mark.parametrize(
    ("members", "named"),
    [
        ({"energy": array_file((8, 1000, 1000), content=bytes(64_000_000))}, "compressed"),
        ({"energy": array_file((10**13,))}, "compressed"),
    ],
    ids=["packed", "declared"],
)
def test_a_small_file_cannot_ask_for_much_memory(tmp_path, finished_store, members, named):
    store = tmp_path / "run"
    shutil.copytree(finished_store, store)
    chunk = next((store / "chunks").iterdir())
    archive(chunk, **members)
    assert chunk.stat().st_size < 100_000
    with pytest.raises(StoreError, match=named) as caught:
        load(store)
    assert f"chunk {chunk.stem}" in str(caught.value) and f"remove {chunk}" in str(caught.value)


def test_a_plan_cannot_ask_for_much_memory(tmp_path, finished_store):
    """More cells than chunks hold, or cells larger than the memory: sizes are checked before anything is filled."""
    store = tmp_path / "run"
    shutil.copytree(finished_store, store)

    def grow(config):
        config["layout"]["axes"]["seed"] = list(range(10**6))
        config["digest"] = _seal(config)

    edit(store / "plan" / "config.json", grow)
    with pytest.raises(StoreError, match="each of 2000000 cells in one chunk, got 2"):
        load(store)


def test_a_data_set_larger_than_the_memory_is_refused(finished_store, monkeypatch):
    monkeypatch.setattr(grids, "host_memory", lambda: 100)
    with pytest.raises(ValueError, match="the data set needs .* GiB, .* free"):
        load(finished_store)


def test_a_chunk_with_a_pickle_runs_no_code(tmp_path, finished_store):
    store, trace = tmp_path / "run", tmp_path / "it ran"
    shutil.copytree(finished_store, store)
    chunk = next((store / "chunks").iterdir())
    with zipfile.ZipFile(chunk, "w") as file:
        file.writestr("energy.npy", array_file((), "|O", pickle.dumps(Payload(trace))))
    with pytest.raises(StoreError, match="is damaged"):
        load(store)
    assert not trace.exists()


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_damaged_chunk_files_are_named(tmp_path, finished_store):
    """Chunks cut short, overwritten and with bytes changed: the same numbers, or the name of the file."""
    store = tmp_path / "run"
    shutil.copytree(finished_store, store)
    whole = load(store)
    chunk = sorted((store / "chunks").iterdir())[0]
    raw, rng, refused = chunk.read_bytes(), np.random.default_rng(0), 0
    changed = [bytearray(raw) for _ in range(60)]
    for one in changed:
        one[rng.integers(len(raw))] ^= int(rng.integers(1, 256))
    for broken in (raw[: len(raw) // 2], b"", b"\xff" * len(raw), b"{}", *map(bytes, changed)):
        chunk.write_bytes(broken)
        try:
            assert load(store).identical(whole)
        except StoreError as problem:
            refused += 1
            assert f"chunk {chunk.stem}" in str(problem) and f"remove {chunk}" in str(problem)
    assert refused > 35
    chunk.write_bytes(raw)
    assert load(store).identical(whole)


def test_another_source_of_this_package_is_said(tmp_path, monkeypatch):
    run(tmp_path / "run")
    assert (
        json.loads((tmp_path / "run" / "plan" / "config.json").read_text())["source"]
        == identity.source_digest()
    )
    monkeypatch.setattr("meanflow.sweeps._plan.source_digest", lambda: "another")
    with pytest.warns(
        UserWarning, match=f"another source code of meanflow .digest {identity.source_digest()}, now"
    ):
        run(tmp_path / "run")


GROUPED = {"widths": (2, 5, 8, 11), "deltas": (0.0,), "steps": 2, "every": 2, "observe": ()}


def grouped(store=None, **change):
    return run(store, **GROUPED | change)


def test_another_waste_does_not_mix_widths(tmp_path):
    """The groups, and so the cells of every chunk, follow from waste."""
    truth = grouped(waste=0.0)
    with pytest.raises(Interrupted):
        grouped(tmp_path / "run", waste=0.19, progress=interrupt_after(1))
    with pytest.raises(StoreError, match=r"(?s)groups.*widths.*waste"):
        grouped(tmp_path / "run", waste=0.0)
    resumed = grouped(tmp_path / "run", waste=0.19)
    xarray.testing.assert_allclose(resumed.drop_attrs(), truth.drop_attrs(), rtol=1e-12)
    # another waste that groups the widths alike is the same run
    xarray.testing.assert_identical(grouped(tmp_path / "run", waste=0.191), resumed)


def test_the_command_line_refuses_another_waste(tmp_path):
    base = ["sweep", "--flow", "lifted", "--data", "square", "--widths", "2,5,8,11", "--deltas", "0"]
    base += ["--steps", "2", "--step", "0.05", "--observe", "energy", "--store", str(tmp_path / "run")]
    base += ["--set", "run.chunk=2", "--set", "run.observe=[]"]
    assert CliRunner().invoke(main, [*base, "--set", "run.waste=0.19"]).exit_code == 0
    told = CliRunner().invoke(main, [*base, "--set", "run.waste=0.0"])
    assert told.exit_code == 3 and "waste" in told.output


def test_a_chunk_in_anothers_place_is_noticed(tmp_path):
    grouped(tmp_path / "run", waste=0.0, chunk=1)
    one, two, *_ = sorted((tmp_path / "run" / "chunks").glob("*.npz"))
    shutil.copy(one, two)
    for use in (load, functools.partial(grouped, waste=0.0, chunk=1)):
        with pytest.raises(StoreError, match=r"another's: it records chunk '00.-00000'.*remove .*00.-00000"):
            use(tmp_path / "run")
    two.unlink()
    xarray.testing.assert_identical(grouped(tmp_path / "run", waste=0.0, chunk=1), load(tmp_path / "run"))


def test_a_chunk_of_another_run_is_noticed(tmp_path):
    for name, step in (("run", 0.05), ("other", 0.06)):
        grouped(tmp_path / name, step=step)
    chunk = "chunks/000-00000.npz"
    shutil.copy(tmp_path / "other" / chunk, tmp_path / "run" / chunk)
    with pytest.raises(StoreError, match="another's: it records run .* computed again"):
        load(tmp_path / "run")


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config["layout"]["axes"]["width"].reverse(),
        lambda config: config["run"].update(key=[0, 1]),
        lambda config: config["layout"]["chunks"]["000-00000"]["cells"].append(1),
        lambda config: config.pop("digest"),
    ],
    ids=["axis label", "identity", "cells", "digest"],
)
def test_an_edited_configuration_is_noticed(tmp_path, change):
    grouped(tmp_path / "run")
    edit(tmp_path / "run" / "plan" / "config.json", change)
    for use in (load, grouped):
        with pytest.raises(StoreError, match="damaged config.json.*restore it from a copy"):
            use(tmp_path / "run")


def test_chunks_with_other_cells_are_refused(tmp_path):
    """Even if the configuration is whole: the cells of a chunk are compared with those the run would put there."""
    grouped(tmp_path / "run", seeds=4)
    shutil.rmtree(tmp_path / "run" / "chunks")

    def swap(config):
        chunks = config["layout"]["chunks"]
        one, two = list(chunks)[:2]
        chunks[one]["cells"], chunks[two]["cells"] = chunks[two]["cells"], chunks[one]["cells"]
        config["digest"] = _seal(config)

    edit(tmp_path / "run" / "plan" / "config.json", swap)
    with pytest.raises(StoreError, match="other chunks.*00.-00000: .* in the store"):
        grouped(tmp_path / "run", seeds=4)


def test_a_plan_does_not_change():
    """What is run, stored and compared is one thing: a plan is made once, and running it leaves it as it is."""
    plan = run(compute=False)
    before = json.dumps(plan.config())
    plan.run()
    assert json.dumps(plan.config()) == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.execution = 3
