"""Run by test_kill.py in a process that is killed: writes numbered chunks to a store until told to stop."""

import sys

import numpy as np

from meanflow.sweeps.store import Store


def content(number):
    """Arrays of chunk ``number``, large enough that a write takes a while."""
    rng = np.random.default_rng(number)
    return {
        "energy": rng.normal(size=(4, 300)),
        "result": np.full(4, number, np.int32),
        "f": rng.normal(size=(4, 9, 50)),
    }


def main(path, count):
    store = Store(path, {"run": {"kind": "test"}, "versions": {}})
    done = store.finished()
    missing = [n for n in range(int(count)) if f"{n:05d}" not in done]
    for k, number in enumerate(missing):
        store.write(f"{number:05d}", content(number))
        if k == 0:  # imports are over: from here on a kill lands in or between writes
            sys.stdout.write("ready\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
