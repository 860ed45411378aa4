"""Kill -9 at random moments: no half-written chunk is ever read, and the run ends as if it had not been killed."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import xarray
from store_worker import content

from meanflow.sweeps import load
from meanflow.sweeps._store import finished_chunks, read_chunk

HERE = pathlib.Path(__file__).parent
ENVIRONMENT = os.environ | {"PYTHONPATH": str(HERE.parents[1]), "JAX_PLATFORMS": "cpu"}


def start(worker, *arguments, **environment):
    command = [sys.executable, "-W", "ignore", str(HERE / worker), *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, env=ENVIRONMENT | environment, text=True, bufsize=1, **pipes)


def whole(path, names):
    """Every listed chunk reads back completely."""
    for name in names:
        expected = content(int(name))
        found = read_chunk(path, name)
        assert set(found) == set(expected)
        for key, value in expected.items():
            np.testing.assert_array_equal(found[key], value)


def test_a_killed_writer_leaves_whole_chunks_only(tmp_path):
    rng = np.random.default_rng(0)
    seen, halves = 0, 0
    with start("store_worker.py", tmp_path / "run") as worker:
        for _ in range(10):
            worker.stdin.write("10000\n")
            child = int(worker.stdout.readline())
            assert worker.stdout.readline() == "ready\n"
            time.sleep(rng.uniform(0.0, 0.1))
            os.kill(child, signal.SIGKILL)
            assert int(worker.stdout.readline()) == -signal.SIGKILL
            names = finished_chunks(tmp_path / "run")
            assert len(names) >= seen
            seen = len(names)
            halves += len(list((tmp_path / "run" / "chunks").glob(".part-*")))
            whole(tmp_path / "run", names)
        assert seen > 0 and halves > 0  # kills did land inside writes
        worker.stdin.write(f"{seen + 3}\n")
        worker.stdout.readline()
        assert [worker.stdout.readline() for _ in range(2)] == ["ready\n", "0\n"]
        worker.stdin.close()
    assert len(finished_chunks(tmp_path / "run")) == seen + 3
    assert not list((tmp_path / "run" / "chunks").glob(".part-*"))


@pytest.mark.slow
def test_a_sweep_killed_ten_times_ends_with_the_same_bits(tmp_path):
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    undisturbed = start("sweep_worker.py", tmp_path / "whole", **cache)
    undisturbed.communicate()
    assert undisturbed.returncode == 0
    expected = load(tmp_path / "whole")
    rng = np.random.default_rng(1)
    run = tmp_path / "run"
    for kill in range(10):
        before = len(finished_chunks(run))
        worker = start("sweep_worker.py", run, **cache)
        # past imports and compilation; the first kill comes as soon as there is a directory
        while worker.poll() is None and (
            not run.exists() if kill == 0 else len(finished_chunks(run)) == before
        ):
            time.sleep(0.001)
        time.sleep(0.0 if kill == 0 else rng.uniform(0.0, 0.05))
        worker.send_signal(signal.SIGKILL)
        worker.communicate()
        assert worker.returncode == -signal.SIGKILL
    assert len(finished_chunks(run)) < expected.result.size  # every kill came before the end
    final = start("sweep_worker.py", run, **cache)
    final.communicate()
    assert final.returncode == 0
    xarray.testing.assert_identical(load(run), expected)
