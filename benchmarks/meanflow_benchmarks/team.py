"""One process of a team that runs a sweep together; ``sweeps.two_processes`` starts it."""

import os
import sys
import time


def main(number: int, count: int, port: int, core: int, width: int, cells: int, steps: int) -> None:
    """Pin this process to one core, join the team, run the sweep twice and print the seconds of the second run.

    Args:
        number, count: which process this is, and how many there are.
        port: of process 0, where the team meets.
        core: the core to run on.
        width, cells, steps: the sweep, of ``cells`` seeds of a network of ``width`` neurons.
    """
    os.sched_setaffinity(0, {core})  # before jax starts its threads, which inherit it
    import jax

    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=count, process_id=number)
    import numpy as np

    import meanflow as mf

    x = np.linspace(-1, 1, 20)
    data = mf.Dataset(x, np.sin(2 * np.pi * x), "sum")
    plan = mf.sweep(
        mf.lifted(alpha="sqrt"),
        data,
        widths=[width],
        deltas=[0.0],
        seeds=cells,
        steps=steps,
        step=1e-3,
        observe=(),
        compute=False,
    )
    plan.run()  # compiles
    start = time.perf_counter()
    plan.run()
    sys.stdout.write(f"{time.perf_counter() - start}\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
