"""Run by test_kill.py in a process that is killed: one sweep of many small chunks."""

import sys

import jax

jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import meanflow as mf  # noqa: E402


def run(store):
    x = jnp.linspace(-1.0, 1.0, 5)
    data = mf.Dataset(x, jnp.array([1.0, -1.0, 1.0, 0.0, 1.0]), "sum")
    return mf.sweep(
        mf.lifted(alpha="sqrt"),
        data,
        widths=(5, 6),
        deltas=np.linspace(-5.0, 5.0, 61),
        seeds=2,
        steps=200,
        every=50,
        step=0.01,
        observe=("predictions",),
        store=store,
        execution=mf.sweeps.Execution(chunk=1, progress=False),
    )


if __name__ == "__main__":
    run(sys.argv[1])
