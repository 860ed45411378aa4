"""A small sweep in several chunks and groups, for the tests of run directories."""

import jax.numpy as jnp
import numpy as np

import meanflow as mf

DATA = mf.Dataset(jnp.linspace(-1.0, 1.0, 4), jnp.array([1.0, -0.5, 0.2, 0.8]), "sum")
SETTINGS = {"widths": (2, 3, 9), "deltas": (0.0, np.inf), "steps": 4, "every": 2, "step": 0.05}
SETTINGS |= {"observe": ("predictions",), "chunk": 2}


def run(store=None, **change):
    """Run it with changed settings; those of ``Execution`` are passed on as one."""
    given = SETTINGS | change
    how = {name: given.pop(name) for name in ("chunk", "waste", "mesh", "progress") if name in given}
    flow, data = given.pop("flow", mf.lifted(alpha="sqrt")), given.pop("data", DATA)
    return mf.sweep(flow, data, store=store, execution=mf.sweeps.Execution(**how), **given)


class Interrupted(Exception):
    """What ends a run in the middle."""


def interrupt_after(count):
    """Return a progress function that dies once ``count`` cells are done."""

    def tell(done, total):
        if done >= count:
            raise Interrupted

    return tell
