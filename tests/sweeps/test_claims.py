"""Many processes write in one run directory: what they claim, take over and lose, without any lock."""

import contextlib
import fcntl
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import xarray
from crew import content
from small_runs import Interrupted, interrupt_after, run

from meanflow.sweeps import _store as stores
from meanflow.sweeps import load
from meanflow.sweeps._store import Store, StoreError

CONFIG = {"run": {"kind": "test"}, "versions": {}, "layout": {"axes": {}, "chunks": {}}}


def open_store(path):
    return contextlib.closing(Store(path, CONFIG))


def leave(path, name="00001", number=0, **holder):
    """A claim that another process has left."""
    claim = path / "claims" / f"{name}.{number}"
    claim.mkdir()
    (claim / "holder.json").write_text(json.dumps(holder))
    return claim


@pytest.fixture
def ended():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return {"pid": process.pid, "host": socket.gethostname()}


def claims(path):
    return sorted(f.name for f in (path / "claims").iterdir())


def test_a_claimed_chunk_is_left_to_its_holder_until_it_is_given_back(tmp_path):
    with open_store(tmp_path / "run") as one, open_store(tmp_path / "run") as two:
        assert one.claim("00001") and not two.claim("00001") and two.claim("00002")
        one.release("00001")
        assert two.claim("00001")
        two.write("00001", content(1))
        assert claims(tmp_path / "run") == ["00002.0"]
        assert not one.claim("00001")  # it is finished
    assert claims(tmp_path / "run") == []


def test_the_claim_of_a_dead_process_is_taken_over_once(tmp_path, ended):
    with open_store(tmp_path / "run") as one, open_store(tmp_path / "run") as two:
        leave(tmp_path / "run", **ended)
        assert one.claim("00001") and not two.claim("00001")
        one.give_back()
        assert claims(tmp_path / "run") == [] and two.claim("00001")


@pytest.mark.parametrize("hours", [-1, 0, 1])
def test_a_claim_elsewhere_is_void_when_it_stands_still_for_the_observer(tmp_path, monkeypatch, hours):
    """Whatever the clocks of two hosts say: only the observer's own watch counts."""
    now = [1000.0]
    monkeypatch.setattr(stores.time, "monotonic", lambda: now[0])
    with open_store(tmp_path / "run") as store:
        claim = leave(tmp_path / "run", pid=1, host="elsewhere")
        stamp = time.time() + 3600 * hours

        def beat():
            nonlocal stamp
            stamp += stores.BEAT
            os.utime(claim, (stamp, stamp))

        for _ in range(30):  # twice the lease and more, but it beats
            beat()
            assert not store.claim("00001")
            now[0] += stores.BEAT
        beat()
        assert not store.claim("00001")
        now[0] += stores.LEASE - 1
        assert not store.claim("00001")
        now[0] += 2
        assert store.claim("00001")


def test_holders_beat(tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "BEAT", 0.01)
    with open_store(tmp_path / "run") as store:
        store.claim("00001")
        path = tmp_path / "run" / "claims" / "00001.0"
        os.utime(path, (0, 0))
        until = time.monotonic() + 10
        while path.stat().st_mtime == 0 and time.monotonic() < until:
            time.sleep(0.01)
        assert path.stat().st_mtime > 0
        shutil.rmtree(path)  # taken over and finished by another: nothing to say
        time.sleep(0.05)
    for thread in threading.enumerate():
        if thread.name == "meanflow claims":  # ends with its store
            thread.join(10)
            assert not thread.is_alive()


def test_a_thousand_double_claims_end_in_the_same_bytes(tmp_path, monkeypatch):
    """Two processes that both hold a chunk: each finishes it, one file stays, and nobody is told of an error."""
    expected = {"energy": np.arange(3.0)}
    with open_store(tmp_path / "run") as one, open_store(tmp_path / "run") as two:
        monkeypatch.setattr(Store, "_is_void", lambda self, path: True)
        for number in range(1000):
            name = f"{number % 10:05d}"
            file = tmp_path / "run" / "chunks" / f"{name}.npz"
            before = file.read_bytes() if file.exists() else None
            file.unlink(missing_ok=True)
            assert one.claim(name) and two.claim(name)
            for writer in (one, two) if number % 3 else (two, one):
                writer.write(name, expected)
                assert before in (None, file.read_bytes())
                before = file.read_bytes()
        assert claims(tmp_path / "run") == []
        np.testing.assert_array_equal(one.read("00003")["energy"], expected["energy"])


def test_the_plan_is_written_once(tmp_path):
    """Of two processes that begin at the same moment one writes the plan; the other reads it, or is refused."""
    found, gate = [], threading.Barrier(8)

    def begin(number):
        gate.wait()
        try:
            with contextlib.closing(Store(tmp_path / "run", CONFIG | {"run": {"kind": number % 2}})) as store:
                found.append(store.config["run"]["kind"])
        except StoreError as problem:
            assert "holds a different run" in str(problem)

    threads = [threading.Thread(target=begin, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1
    assert sorted(f.name for f in (tmp_path / "run").iterdir() if f.is_dir()) == ["chunks", "claims", "plan"]


def test_no_locks_are_needed(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(37, "No locks available")

    for name in ("flock", "lockf", "fcntl"):
        monkeypatch.setattr(fcntl, name, refuse)
    monkeypatch.setattr(os, "link", refuse)
    xarray.testing.assert_identical(run(tmp_path / "run"), run())


def test_two_runs_at_the_same_time_share_the_chunks(tmp_path):
    """One in this process and one that holds a claim for a while: each computes some, both return everything."""
    whole, told = run(tmp_path / "whole", chunk=1), []
    run(tmp_path / "run", chunk=1)
    names = sorted(stores.finished_chunks(tmp_path / "run"))
    for name in names[::2]:
        (tmp_path / "run" / "chunks" / f"{name}.npz").unlink()
    with contextlib.closing(Store(tmp_path / "run", stores.read_config(tmp_path / "run"))) as other:
        assert other.claim(names[0])
        finish = threading.Timer(
            0.5, lambda: other.write(names[0], stores.read_chunk(tmp_path / "whole", names[0]))
        )
        finish.start()
        shared = run(tmp_path / "run", chunk=1, progress=lambda done, total: told.append(done))
        finish.join()
    assert told == [4, 5, 6]
    xarray.testing.assert_identical(shared, whole)


def test_a_failed_or_refused_run_leaves_no_claim(tmp_path):
    with pytest.raises(Interrupted):
        run(tmp_path / "run", progress=interrupt_after(1))
    with pytest.raises(StoreError, match="step"):
        run(tmp_path / "run", step=0.07)
    with pytest.raises(StoreError, match="in chunks of"):
        run(tmp_path / "run", chunk=1)
    assert claims(tmp_path / "run") == []


@pytest.mark.parametrize("kind", ["link", "dangling link", "file", "pipe"])
def test_a_claim_that_leads_elsewhere_is_refused(tmp_path, kind):
    """A store from a stranger must not have files of the user emptied, made or waited for."""
    Store(tmp_path / "run", CONFIG).close()
    claim, target = tmp_path / "run" / "claims" / "00001.0", tmp_path / "thesis"
    if kind != "dangling link":
        target.write_text("years of work")
    make = {"file": claim.touch, "pipe": lambda: os.mkfifo(claim)}
    make.get(kind, lambda: claim.symlink_to(target))()
    with open_store(tmp_path / "run") as store, pytest.raises(StoreError, match="must be a folder"):
        store.claim("00001")
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


def test_a_full_disk_for_one_worker_leaves_the_chunk_to_the_others(tmp_path):
    with open_store(tmp_path / "run") as full, open_store(tmp_path / "run") as other:
        assert full.claim("00001")
        with no_room(), pytest.raises(StoreError, match="chunk 00001 could not be written.*can be resumed"):
            full.write("00001", content(1))
        with no_room(), pytest.raises(StoreError, match="could not be written"):
            full.claim("00002")
        assert claims(tmp_path / "run") == ["00001.0"]
        full.give_back()
        assert other.claim("00001") and other.claim("00002")
        other.write("00001", content(1))
    assert [f.name for f in (tmp_path / "run" / "chunks").iterdir()] == ["00001.npz"]


def test_a_store_that_vanishes(tmp_path):
    store = Store(tmp_path / "run", CONFIG)
    assert store.claim("00001")
    shutil.rmtree(tmp_path / "run")
    for use in (lambda: store.claim("00002"), lambda: store.write("00001", content(1))):
        with pytest.raises(StoreError, match="could not be written"):
            use()
    store.close()
    assert not (tmp_path / "run").exists()
    with pytest.raises(StoreError, match="no plan"):
        load(tmp_path / "run")


@pytest.mark.parametrize("folder", ["plan", "chunks", "claims"])
def test_nothing_is_written_through_a_link(tmp_path, folder):
    """A store whose folders lead to those of another one is read, and not written."""
    for name in ("run", "other"):
        run(tmp_path / name)
    before = {f: f.read_bytes() for f in (tmp_path / "other").rglob("*") if f.is_file()}
    shutil.rmtree(tmp_path / "run" / folder)
    (tmp_path / "run" / folder).symlink_to(tmp_path / "other" / folder)
    assert load(tmp_path / "run").identical(load(tmp_path / "other"))
    with pytest.raises(StoreError, match="must hold its folders itself"):
        run(tmp_path / "run")
    assert {f: f.read_bytes() for f in (tmp_path / "other").rglob("*") if f.is_file()} == before
