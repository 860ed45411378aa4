"""Run by test_data_loss.py: writes numbered chunks into a store and says "ready" once it has begun."""

import sys

from store_worker import content, say

from meanflow.sweeps._store import Store


def main(path, count):
    store = Store(path, {"run": {"kind": "test"}, "versions": {}})
    say("ready")
    for number in range(int(count)):
        store.write(f"{number:05d}", content(number))
    say("done")
    sys.stdin.readline()  # holds the store until it is told to end
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
