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
        mf.lifted(alpha="sqrt"),
        data,
        widths=(5, 6),
        deltas=(-np.inf, 0.0, np.inf),
        seeds=1,
        steps=6,
        every=3,
        step=mf.KernelStep(0.2, 3),
        observe=("predictions", "angle_displacement"),
        store=store,
        execution=mf.sweeps.Execution(chunk=3, mesh=(int(across), int(along))),
    )
    np.savez(
        f"{out}-{jax.process_index()}.npz",
        devices=jax.device_count(),
        **{n: ds[n].values for n in ds.data_vars},
    )


def failing(out, how, process, port):
    """One of two processes whose sweep fails on one of them alone; writes what it heard and when it was over."""
    import os
    import signal
    import threading
    import time

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=int(process))
    import meanflow as mf
    from meanflow.sweeps import _devices as devices

    where, what = how.split("-")
    moment = [time.time()]

    def fail(*some):
        moment[0] = time.time()
        if what == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        elif what == "error":
            raise OSError("the disk is gone")

    tell = None
    if process == where and what == "memory":
        devices.free_memory = lambda device: 1
    elif process == where and what == "error":
        devices.place = fail
    elif process == where and what == "progress":
        tell = lambda done, total: 1 / 0 if done > 3 else None
    elif process == where:
        threading.Timer(12.0, fail).start()
    data = mf.Dataset([-1.0, 0.0, 1.0], [1.0, -1.0, 1.0], "sum")
    settings = {"widths": (4,), "steps": 200, "step": 0.01, "observe": (), "seeds": 4000}
    try:
        execution = mf.sweeps.Execution(chunk=2, progress=tell)
        mf.sweep(mf.canonical(), data, store=f"{out}-store", execution=execution, **settings)
        heard = "finished"
    except BaseException as problem:
        heard = f"{type(problem).__name__}: {problem}"
    with open(f"{out}-{process}.txt", "w") as file:
        file.write(f"{moment[0]} {time.time()} {heard}")


def spectra(out):
    """Sweeps whose cells factorize matrices, over all devices of this process."""
    import jax.numpy as jnp
    import numpy as np

    import meanflow as mf

    x = jnp.linspace(-1.0, 1.0, 5)
    data = mf.Dataset(x, jnp.array([1.0, -1.0, 1.0, 0.0, 1.0]), "sum")
    kernel = lambda flow, cloud, data: mf.tangent_kernel(flow, cloud, data.x)
    ds = mf.sweep(
        mf.lifted(alpha="sqrt"),
        data,
        widths=(5,),
        deltas=(0.0,),
        seeds=32,
        steps=6,
        every=3,
        step=0.01,
        observe={"kernel": kernel, "spectrum": lambda *run: jnp.linalg.eigvalsh(kernel(*run))},
    )
    points = jnp.asarray(np.random.default_rng(0).normal(size=(20, 3)))
    critic = mf.sweeps.sweep_function(
        lambda key, shift: (
            mf.transport.critic_distance(
                points, points + shift, key=key, critic=mf.transport.Critic(steps=5)
            ).value
        ),
        axes={"shift": [0.1, 0.2]},
        seeds=16,
    )
    gram = mf.sweeps.sweep_function(
        lambda key, scale: jax.tree.leaves(mf.depth.propagate(key, scale * points, [8, 8]))[0],
        axes={"scale": [1.0, 2.0]},
        seeds=16,
    )
    np.savez(
        f"{out}-spectra.npz",
        spectrum=ds.spectrum.values,
        expected=np.linalg.eigvalsh(ds.kernel.values),
        critic=critic.value.values,
        gram=gram.value.values,
    )


if __name__ == "__main__":
    if sys.argv[2] == "spectra":
        spectra(sys.argv[1])
    elif sys.argv[2] == "failing":
        failing(sys.argv[1], *sys.argv[3:])
    else:
        main(*sys.argv[1:])
