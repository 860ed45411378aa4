"""Run by test_kill.py: workers on one store, each killed at random moments and started again until it is whole.

Arguments: "chunks" or "sweep", a folder, number of workers, number of rounds. Workers are forks of this process, which
uses no JAX itself, so that they start fast. For each round it prints how many were killed and how many parts and claims
they left, and at the end "equal" if all rounds have the bytes of the one that a single process made.
"""

import os
import pathlib
import random
import signal
import sys
import time

import jax
import numpy as np

import meanflow as mf
from meanflow.sweeps._store import Store, finished_chunks

COUNT = 60


def content(number):
    """Arrays of chunk ``number``, large enough that a write takes a while."""
    rng = np.random.default_rng(number)
    return {
        "energy": rng.normal(size=(4, 300)),
        "result": np.full(4, number, np.int32),
        "f": rng.normal(size=(4, 9, 1000)),
    }


def chunks(path):
    """Write numbered chunks until all are there, without computing anything."""
    store = Store(path, {"run": {"kind": "test"}, "versions": {}, "layout": {"chunks": {}}})
    while missing := [n for n in range(COUNT) if f"{n:05d}" not in finished_chunks(path)]:
        for number in missing:
            if store.claim(f"{number:05d}"):
                store.write(f"{number:05d}", content(number))
        time.sleep(0.001)


def sweep(path):
    """Run a sweep of many small chunks."""
    jax.config.update("jax_enable_x64", True)
    mf.sweep(
        mf.lifted(alpha="sqrt"),
        mf.Dataset(np.linspace(-1.0, 1.0, 5), np.array([1.0, -1.0, 1.0, 0.0, 1.0]), "sum"),
        widths=(5, 6),
        deltas=np.linspace(-5.0, 5.0, 61),
        seeds=2,
        steps=2000,
        every=500,
        step=0.01,
        observe=("predictions",),
        store=path,
        execution=mf.sweeps.Execution(chunk=1, progress=False),
    )


WORK = {"chunks": chunks, "sweep": sweep}


def start(kind, path):
    child = os.fork()
    if child == 0:
        try:
            WORK[kind](path)
            os._exit(0)
        except (
            BaseException
        ) as problem:  # said at once, since this process ends without the usual cleaning up
            sys.stderr.write(f"{type(problem).__name__}: {problem}\n")
            os._exit(1)
    return child


def one_round(kind, path, workers, pause, rng):
    """Kill and start again until one worker has seen the whole; return what the kills have left behind.

    Between two kills ``pause`` seconds pass on average.
    """
    crew, killed, left = [start(kind, path) for _ in range(workers)], 0, set()
    while True:
        time.sleep(rng.uniform(0, 2 * pause))
        ended = [(child, status) for child, status in (os.waitpid(c, os.WNOHANG) for c in crew) if child]
        assert all(status == 0 for _, status in ended), ended
        crew = [child for child in crew if child not in dict(ended)]
        if ended:
            break
        child = crew.pop(rng.randrange(len(crew)))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        killed += 1
        left |= {
            f.name for folder in ("chunks", "claims") for f in path.glob(f"{folder}/*") if f.suffix != ".npz"
        }
        left |= {f.name for f in path.glob("chunks/.part-*")}
        crew.append(start(kind, path))
    for child in crew:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return killed, len(left)


def all_bytes(path):
    return {name: (path / "chunks" / f"{name}.npz").read_bytes() for name in finished_chunks(path)}


def main(kind, folder, workers, rounds):
    folder, rng = pathlib.Path(folder), random.Random(0)
    begun = time.monotonic()
    assert os.waitpid(start(kind, folder / "alone"), 0)[1] == 0
    # each worker lives as long as it takes to do something, also where many share few processors
    pause = 0.002 if kind == "chunks" else (time.monotonic() - begun) / 4
    expected = all_bytes(folder / "alone")
    for number in range(int(rounds)):
        killed, left = one_round(kind, folder / str(number), int(workers), pause, rng)
        sys.stdout.write(f"{killed} {left}\n")
        sys.stdout.flush()
        assert all_bytes(folder / str(number)) == expected, number
    sys.stdout.write(f"equal {len(expected)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
