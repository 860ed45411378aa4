"""Kill -9 at random moments: no half-written chunk is ever read, and the store ends as if nobody had been killed."""

import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent


@pytest.mark.parametrize(
    ("kind", "workers", "rounds"),
    [
        ("chunks", 12, 1),
        pytest.param("chunks", 12, 20, marks=pytest.mark.slow),
        pytest.param("sweep", 12, 20, marks=pytest.mark.slow),
    ],
)
def test_workers_killed_until_the_store_is_whole(tmp_path, kind, workers, rounds):
    """Twelve workers, one of them killed at a time; the same bytes as those of one process."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(HERE / "crew.py"),
        kind,
        str(tmp_path),
        str(workers),
        str(rounds),
    ]
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1]), "JAX_PLATFORMS": "cpu"} | cache
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    *told, last = done.stdout.splitlines()
    killed, left = (sum(int(line.split()[k]) for line in told) for k in (0, 1))
    assert last.startswith("equal ") and len(told) == rounds
    assert killed > rounds and left > 0  # kills did land in the middle of work
