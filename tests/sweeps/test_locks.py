"""One process at a time writes in a run directory, and nothing is written outside of it."""

import contextlib
import fcntl
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

import numpy as np
import pytest
from small_runs import Interrupted, interrupt_after, run
from store_worker import content

from meanflow.sweeps._store import Store, StoreError, finished_chunks, read_chunk

HERE = pathlib.Path(__file__).parent


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
        run(tmp_path / "run", progress=interrupt_after(1))
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
