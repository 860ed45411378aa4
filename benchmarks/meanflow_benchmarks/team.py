"""One process of a team that runs a sweep together; started by ``bench.sweeps.two_processes``."""

import os
import sys
import time


def main(number: int, count: int, port: int, core: int, width: int, cells: int, steps: int) -> None:
    """Pins itself to ``core``, joins the team, runs the sweep twice and prints the seconds of the second run."""
    os.sched_setaffinity(0, {core})
    import jax

    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=count, process_id=number)
    import numpy as np

    import meanflow as mf

    x = np.linspace(-1, 1, 20)
    data = mf.Dataset(x, np.sin(2 * np.pi * x), "sum")
    plan = mf.sweeps.prepare(
        mf.lifted(alpha="sqrt"),
        data,
        widths=[width],
        deltas=[0.0],
        seeds=cells,
        steps=steps,
        step=1e-3,
        observe=(),
    )
    plan.run()
    start = time.perf_counter()
    plan.run()
    sys.stdout.write(f"{time.perf_counter() - start}\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
