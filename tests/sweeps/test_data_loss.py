"""What a store must never do: mix runs, take one chunk for another, or let two processes write at once."""

import contextlib
import dataclasses
import fcntl
import functools
import importlib
import io
import json
import os
import pathlib
import resource
import shutil
import signal
import socket
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray
from click.testing import CliRunner
from store_worker import content

import meanflow as mf
from meanflow import _identity as identity
from meanflow._identity import describe
from meanflow.cli import main
from meanflow.measures import laws
from meanflow.sweeps import StoreError, load, sweep_function
from meanflow.sweeps._store import Store, _seal, finished_chunks, read_chunk

HERE = pathlib.Path(__file__).parent
DATA = mf.Dataset(jnp.linspace(-1.0, 1.0, 4), jnp.array([1.0, -0.5, 0.2, 0.8]), "sum")
SETTINGS = {"widths": (2, 5, 8, 11), "deltas": (0.0,), "steps": 2, "step": 0.05, "observe": (), "chunk": 2}


def run(store=None, **change):
    return mf.sweep(mf.lifted(alpha="sqrt"), DATA, store=store, **SETTINGS | change)


class Interrupted(Exception):
    pass


def interrupt(done, total):
    raise Interrupted


def edit(path, change):
    """Changes a JSON file in place."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


# layout


def test_another_waste_does_not_mix_widths(tmp_path):
    """The groups, and so the cells of every chunk, follow from waste."""
    truth = run(waste=0.0)
    with pytest.raises(Interrupted):
        run(tmp_path / "run", waste=0.19, progress=interrupt)
    with pytest.raises(StoreError, match=r"(?s)groups.*widths.*waste"):
        run(tmp_path / "run", waste=0.0)
    resumed = run(tmp_path / "run", waste=0.19)
    xarray.testing.assert_allclose(resumed.drop_attrs(), truth.drop_attrs(), rtol=1e-12)
    # another waste that groups the widths alike is the same run
    xarray.testing.assert_identical(run(tmp_path / "run", waste=0.191), resumed)


def test_the_command_line_refuses_another_waste(tmp_path):
    base = ["sweep", "--flow", "lifted", "--data", "square", "--widths", "2,5,8,11", "--deltas", "0"]
    base += ["--steps", "2", "--step", "0.05", "--observe", "energy", "--store", str(tmp_path / "run")]
    base += ["--set", "run.chunk=2", "--set", "run.observe=[]"]
    assert CliRunner().invoke(main, [*base, "--set", "run.waste=0.19"]).exit_code == 0
    told = CliRunner().invoke(main, [*base, "--set", "run.waste=0.0"])
    assert told.exit_code == 3 and "waste" in told.output


def test_a_chunk_in_anothers_place_is_noticed(tmp_path):
    run(tmp_path / "run", waste=0.0, chunk=1)
    one, two, *_ = sorted((tmp_path / "run" / "chunks").glob("*.zarr"))
    shutil.rmtree(two)
    shutil.copytree(one, two)
    for use in (load, functools.partial(run, waste=0.0, chunk=1)):
        with pytest.raises(StoreError, match=r"another's: it records chunk '000-00000'.*remove .*001-00000"):
            use(tmp_path / "run")
    shutil.rmtree(two)
    xarray.testing.assert_identical(run(tmp_path / "run", waste=0.0, chunk=1), load(tmp_path / "run"))


def test_a_chunk_of_another_run_is_noticed(tmp_path):
    for name, step in (("run", 0.05), ("other", 0.06)):
        run(tmp_path / name, step=step)
    chunk = "chunks/000-00000.zarr"
    shutil.rmtree(tmp_path / "run" / chunk)
    shutil.copytree(tmp_path / "other" / chunk, tmp_path / "run" / chunk)
    with pytest.raises(StoreError, match="another's: it records run .* computed again"):
        load(tmp_path / "run")


def test_a_changed_record_of_a_chunk_is_noticed(tmp_path):
    run(tmp_path / "run")
    folder = tmp_path / "run" / "chunks" / "000-00000.zarr"
    edit(folder / "zarr.json", lambda file: file["attributes"]["record"].update(cells=[1, 0]))
    with pytest.raises(StoreError, match="damaged: its record was changed.*computed again"):
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
    run(tmp_path / "run")
    edit(tmp_path / "run" / "config.json", change)
    for use in (load, run):
        with pytest.raises(StoreError, match="damaged config.json.*restore it from a copy"):
            use(tmp_path / "run")


def test_chunks_with_other_cells_are_refused(tmp_path):
    """Even if the configuration is whole: the cells of a chunk are compared with those the run would put there."""
    run(tmp_path / "run", seeds=4)
    shutil.rmtree(tmp_path / "run" / "chunks")

    def swap(config):
        chunks = config["layout"]["chunks"]
        one, two = list(chunks)[:2]
        chunks[one]["cells"], chunks[two]["cells"] = chunks[two]["cells"], chunks[one]["cells"]
        config["digest"] = _seal(config)

    edit(tmp_path / "run" / "config.json", swap)
    with pytest.raises(StoreError, match="other chunks.*000-00000: .* in the store"):
        run(tmp_path / "run", seeds=4)


def test_a_plan_does_not_change():
    """What is run, stored and compared is one thing: a plan is made once, and running it leaves it as it is."""
    plan = mf.sweeps.prepare(mf.lifted(), DATA, **SETTINGS)
    before = json.dumps(plan.config())
    plan.run()
    assert json.dumps(plan.config()) == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.chunk = 3


# draws


def test_each_initial_law_of_an_axis_is_used():
    """Two laws of one class have the same text: arrays inside are not written out."""
    by_text = [Law(jnp.full(2, s)) for s in (1.0, 3.0)]
    assert str(by_text[0]) == str(by_text[1])
    own = [laws.normal(s) for s in (1.0, 3.0)]
    assert str(own[0]) == str(own[1])
    for axis in (by_text, own):
        plan = mf.sweeps.prepare(
            mf.canonical(), DATA, widths=(3,), axes={"law": axis}, init=draw, steps=1, step=0.1, observe=()
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


# locks


def start(path, count):
    command = [sys.executable, "-W", "ignore", str(HERE / "lock_worker.py"), str(path), str(count)]
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1]), "JAX_PLATFORMS": "cpu"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, text=True, bufsize=1, **pipes)


def open_store(path):
    return Store(path, {"run": {"kind": "test"}, "versions": {}})


def test_another_process_leaves_the_chunks_of_a_writer_alone(tmp_path):
    count, refused = 35, 0
    with start(tmp_path / "run", count) as writer:
        assert writer.stdout.readline() == "ready\n"
        while len(finished_chunks(tmp_path / "run")) < count and writer.poll() is None:
            with pytest.raises(
                StoreError, match=f"written by process {writer.pid} on {socket.gethostname()}"
            ):
                open_store(tmp_path / "run")
            refused += 1
        assert writer.stdout.readline() == "done\n" and refused > 5
        # reading needs no lock
        for number in range(count):
            found = read_chunk(tmp_path / "run", f"{number:05d}")
            np.testing.assert_array_equal(found["energy"], content(number)["energy"])
        writer.stdin.write("end\n")
        writer.stdin.close()
    assert writer.returncode == 0
    assert not (tmp_path / "run" / ".lock").exists()
    open_store(tmp_path / "run").close()


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path):
    with start(tmp_path / "run", 1) as writer:
        assert [writer.stdout.readline() for _ in range(2)] == ["ready\n", "done\n"]
        writer.send_signal(signal.SIGKILL)
    assert json.loads((tmp_path / "run" / ".lock").read_text())["pid"] == writer.pid
    part = tmp_path / "run" / "chunks" / ".part-00001-left"
    part.mkdir()
    with open_store(tmp_path / "run") as store:
        assert json.loads((tmp_path / "run" / ".lock").read_text())["pid"] == os.getpid()
        assert not part.exists()
        with pytest.raises(StoreError, match=f"written by process {os.getpid()}"):
            open_store(tmp_path / "run")  # not twice in one process either
        store.write("00001", content(1))
    assert sorted(f.name for f in (tmp_path / "run").iterdir()) == ["chunks", "config.json"]


def test_a_lock_left_on_another_host_is_taken_over_with_a_warning(tmp_path):
    open_store(tmp_path / "run").close()
    (tmp_path / "run" / ".lock").write_text('{"pid": 1, "host": "elsewhere"}')
    with pytest.warns(UserWarning, match="left by process 1 on elsewhere"):
        open_store(tmp_path / "run").close()


def test_file_systems_without_locks(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match="no file locks.*no other process"):
        store = open_store(tmp_path / "run")
    # the note in the file is all there is: this process lives, a dead one does not count
    with pytest.raises(StoreError, match="written by process"):
        open_store(tmp_path / "run")
    store.close()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (tmp_path / "run" / ".lock").write_text(json.dumps({"pid": ended.pid, "host": socket.gethostname()}))
    with pytest.warns(UserWarning, match="no file locks"):
        open_store(tmp_path / "run").close()
    (tmp_path / "run" / ".lock").write_text('{"pid": 1, "host": "elsewhere"}')
    with pytest.raises(StoreError, match="process 1 on elsewhere.*remove .*lock"):
        open_store(tmp_path / "run")


def test_a_failed_or_refused_run_leaves_no_lock(tmp_path):
    with pytest.raises(Interrupted):
        run(tmp_path / "run", progress=interrupt)
    assert not (tmp_path / "run" / ".lock").exists()
    with pytest.raises(StoreError, match="step"):
        run(tmp_path / "run", step=0.07)
    with pytest.raises(StoreError, match="in chunks of"):
        run(tmp_path / "run")
        run(tmp_path / "run", chunk=1)
    assert not (tmp_path / "run" / ".lock").exists()


@pytest.mark.parametrize("kind", ["link", "dangling link", "hard link", "folder", "pipe"])
def test_a_lock_that_leads_elsewhere_is_refused(tmp_path, kind):
    """A store from a stranger must not have files of the user emptied or made."""
    open_store(tmp_path / "run").close()
    lock, target = tmp_path / "run" / ".lock", tmp_path / "thesis"
    if kind != "dangling link":
        target.write_text("years of work")
    make = {"hard link": lambda: os.link(target, lock), "folder": lock.mkdir, "pipe": lambda: os.mkfifo(lock)}
    make.get(kind, lambda: lock.symlink_to(target))()
    with pytest.raises(StoreError, match=r"\.lock must be a regular file"):
        open_store(tmp_path / "run")
    assert target.read_text() == "years of work" if target.exists() else kind == "dangling link"


@contextlib.contextmanager
def no_room():
    """Let no file grow: the system itself refuses to write, whichever call is used."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_lock_that_cannot_be_written_is_given_up(tmp_path):
    open_store(tmp_path / "run").close()
    descriptors = len(os.listdir("/dev/fd"))
    with no_room(), pytest.raises(StoreError, match="cannot be used") as caught:
        open_store(tmp_path / "run")
    assert caught.value is not None  # holds the frames, and what they opened
    assert len(os.listdir("/dev/fd")) == descriptors and not (tmp_path / "run" / ".lock").exists()
    open_store(tmp_path / "run").close()


def test_a_lock_that_is_written_in_part_is_given_up(tmp_path, monkeypatch):
    class AlmostFull(io.FileIO):
        def write(self, text):
            return super().write(text[:3])

    with monkeypatch.context() as full:
        full.setattr(io, "FileIO", AlmostFull)
        with pytest.raises(StoreError, match="No space left|could not be written"):
            open_store(tmp_path / "run")
    open_store(tmp_path / "run").close()


def test_nothing_is_written_through_a_link(tmp_path):
    """Links to the files of another store are read; what is written takes their place, or is refused."""
    layout = {"chunks": {"00001": {"cells": [1]}}}
    with open_store(tmp_path / "other") as store:
        store.set_layout(layout)
        store.write("00001", content(1))
    open_store(tmp_path / "run").close()
    config, chunk = (tmp_path / "run" / name for name in ("config.json", "chunks/00001.zarr"))
    config.unlink()
    for path in (config, chunk):
        path.symlink_to(tmp_path / "other" / path.relative_to(tmp_path / "run"))
    before = {f: f.read_bytes() for f in (tmp_path / "other").rglob("*") if f.is_file()}
    with open_store(tmp_path / "run") as store:
        np.testing.assert_array_equal(store.read("00001")["energy"], content(1)["energy"])
        store.set_layout({"chunks": {}})
        assert not config.is_symlink()
        with pytest.raises(StoreError, match="could not be written"):
            store.write("00001", content(2))
    shutil.rmtree(tmp_path / "run" / "chunks")
    (tmp_path / "run" / "chunks").symlink_to(tmp_path / "other" / "chunks")
    with pytest.raises(StoreError, match="must hold its chunks itself"):
        open_store(tmp_path / "run")
    assert {f: f.read_bytes() for f in (tmp_path / "other").rglob("*") if f.is_file()} == before


# code

MODULES = {
    "laws": """
        import helper_module
        from helper_module import imported
        from constant_module import SIZE
        import constant_module

        TABLE = {"size": 1.0}
        NUMBERS = [1.0, 2.0]

        class Callable:
            FACTOR = 1.0

            def __init__(self, size):
                self.size = size

            def __call__(self, key, sigma):
                return self.size * self.FACTOR * sigma

        class Child(Callable):
            pass

        class Record:
            def value(self):
                return 1.0

        RECORD = Record()

        def by_import(key, sigma):
            return imported(sigma)

        def by_module(key, sigma):
            return helper_module.inner(sigma)

        def by_constant(key, sigma):
            return SIZE * sigma

        def by_module_constant(key, sigma):
            return constant_module.OTHER * sigma

        def by_table(key, sigma):
            return TABLE["size"] * sigma

        def by_list(key, sigma):
            return NUMBERS[0] * sigma

        def by_class(key, sigma):
            return Callable(1.0)(key, sigma)

        def by_object(key, sigma):
            return RECORD.value() * sigma

        def by_default(key, sigma, size=2.0):
            return size * sigma

        called = Callable(1.0)
        child = Child(1.0)
    """,
    "helper_module": """
        def inner(sigma):
            return 1.0 * sigma

        def imported(sigma):
            return inner(sigma)
    """,
    "constant_module": "SIZE = OTHER = 1.0",
}
KINDS = {
    "by_import": ("helper_module", "1.0 * sigma", "2.0 * sigma"),
    "by_module": ("helper_module", "1.0 * sigma", "2.0 * sigma"),
    "by_constant": ("constant_module", "1.0", "2.0"),
    "by_module_constant": ("constant_module", "1.0", "2.0"),
    "by_table": ("laws", '{"size": 1.0}', '{"size": 2.0}'),
    "by_list": ("laws", "[1.0, 2.0]", "[2.0, 2.0]"),
    "by_class": ("laws", "self.size * self", "2 * self.size * self"),
    "by_object": ("laws", "return 1.0", "return 2.0"),
    "by_default": ("laws", "size=2.0", "size=3.0"),
    "called": ("laws", "self.size * self", "2 * self.size * self"),
    "child": ("laws", "FACTOR = 1.0", "FACTOR = 2.0"),
}


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Three modules of a user, and a function that loads them after a change of one."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def fresh(changed=None, old="", new=""):
        for name, text in MODULES.items():
            text = textwrap.dedent(text)
            assert name != changed or old in text
            (tmp_path / f"{name}.py").write_text(text.replace(old, new) if name == changed else text)
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        identity.is_library.cache_clear()
        return importlib.import_module("laws")

    yield fresh
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("kind", KINDS)
def test_changed_code_is_refused(modules, tmp_path, kind):
    axes = {"axes": {"sigma": (1.0, 2.0)}, "store": tmp_path / "run"}
    sweep_function(getattr(modules(), kind), **axes)
    sweep_function(getattr(modules(), kind), **axes)  # the same code, loaded again
    with pytest.raises(StoreError, match="function"):
        sweep_function(getattr(modules(*KINDS[kind]), kind), **axes)


def test_a_change_that_a_function_does_not_reach_does_not_matter(modules):
    before = describe(modules().by_table)
    assert describe(modules("laws", "self.size * self", "2 * self.size * self").by_table) == before
    assert describe(modules("helper_module", "1.0 * sigma", "2.0 * sigma").by_table) == before


def test_rules_of_derivatives_and_decorators_belong_to_a_function():
    def rule(factor):
        @jax.custom_jvp
        def f(x):
            return x

        f.defjvp(lambda primals, tangents: (primals[0], factor * tangents[0]))
        return f

    def decorated(factor):
        def inner(x):
            return x

        @functools.wraps(inner)
        def outer(x):
            return factor * inner(x)

        return outer

    for make in (rule, decorated, lambda c: jax.jit(lambda x: c * x), lambda c: functools.partial(pow, c)):
        assert describe(make(2.0)) == describe(make(2.0)) != describe(make(3.0))


def test_libraries_are_described_by_name_and_by_what_they_hold():
    import optax

    assert describe(optax.sgd(0.1)) == describe(optax.sgd(0.1)) != describe(optax.sgd(0.2))
    assert describe(jnp.sin) == describe(jnp.sin) != describe(jnp.cos)
    assert describe(mf.Cloud) == "meanflow.measures._cloud.Cloud"


def test_another_source_of_this_package_is_said(tmp_path, monkeypatch):
    run(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["source"] == identity.source_digest()
    monkeypatch.setattr("meanflow.sweeps._plan.source_digest", lambda: "another")
    with pytest.warns(
        UserWarning, match=f"another source code of meanflow .digest {identity.source_digest()}, now"
    ):
        run(tmp_path / "run")


def test_the_digest_of_the_source_follows_the_files(tmp_path, monkeypatch):
    (tmp_path / "meanflow").mkdir()
    monkeypatch.setattr(identity, "__file__", str(tmp_path / "meanflow" / "_identity.py"))
    seen = set()
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b.py", ""), ("note.txt", "not code")):
        (tmp_path / "meanflow" / name).write_text(text)
        seen.add(identity.source_digest.__wrapped__())
    assert len(seen) == 3
