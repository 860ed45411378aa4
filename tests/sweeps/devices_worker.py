"""Run by test_devices.py in processes of its own: one sweep over a mesh, saved to a file.

Arguments: output file, devices along sweep, devices along particles; with two more (process number, port) it joins a
team of two processes. A sixth argument names a store.
"""

import sys

import jax

jax.config.update("jax_enable_x64", True)


def main(out, across, along, process=None, port=None, store=None):
    if process is not None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=int(process))
    import jax.numpy as jnp
    import numpy as np

    import meanflow as mf

    x = jnp.linspace(-1.0, 1.0, 5)
    data = mf.Dataset(x, jnp.array([1.0, -1.0, 1.0, 0.0, 1.0]), "sum")
    ds = mf.sweep(
        mf.lifted("sqrt"),
        data,
        widths=(5, 6),
        deltas=(-np.inf, 0.0, np.inf),
        seeds=1,
        steps=6,
        every=3,
        step=mf.KernelStep(0.2, 3),
        chunk=3,
        observe=("predictions", "angle_displacement"),
        mesh=mf.sweeps.make_mesh(int(across), int(along)),
        store=store,
    )
    np.savez(
        f"{out}-{jax.process_index()}.npz",
        devices=jax.device_count(),
        **{n: ds[n].values for n in ds.data_vars},
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
