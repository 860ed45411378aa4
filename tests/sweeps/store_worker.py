"""Run by test_kill.py: writes numbered chunks to a store, in children that are killed.

For each line on standard input it forks a child that opens the store, writes what is missing below that number and says
"ready" after its first chunk; then it waits for the child's end and prints how that came.
"""

import os
import sys

import numpy as np

from meanflow.sweeps._store import Store


def content(number):
    """Arrays of chunk ``number``, large enough that a write takes a while."""
    rng = np.random.default_rng(number)
    return {
        "energy": rng.normal(size=(4, 300)),
        "result": np.full(4, number, np.int32),
        "f": rng.normal(size=(4, 9, 50)),
    }


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def write(path, count):
    store = Store(path, {"run": {"kind": "test"}, "versions": {}})
    done = store.finished()
    missing = [n for n in range(count) if f"{n:05d}" not in done]
    for k, number in enumerate(missing):
        store.write(f"{number:05d}", content(number))
        if k == 0:  # from here on a kill lands in or between writes
            say("ready")


def main(path):
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            write(path, int(line))
            os._exit(0)
        say(child)
        say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


if __name__ == "__main__":
    main(*sys.argv[1:])
