"""Programs compiled for accelerators that are not there: what they ask of the device, and what would bind them.

Nothing here is timed. The numbers are read from the final program of the compiler, and set against what the device can
do at best. The compilers come with ``pip install 'meanflow[accelerators]'``; without them there are no numbers.
"""

import meanflow as mf
from meanflow_benchmarks.programs import PROGRAMS, line, velocity
from meanflow_benchmarks.topologies import DEVICES, available, bounds, compile_for


def roofline(device: str = "h100", names: tuple[str, ...] = ()) -> dict[str, dict[str, float | str]]:
    """Kernels, bytes and operations of the main programs, a step where they have steps, and what binds them.

    Args:
        device: ``"h100"`` or ``"v5e"``.
        names: which programs, by parts of their names; default all.
    """
    if not all(available().values()):
        return {}
    chosen = [name for name in PROGRAMS if not names or any(part in name for part in names)]
    return {name: _row(device, name) for name in chosen}


def forces(
    width: int = 100_000, samples: tuple[int, ...] = (100, 1000, 10_000, 100_000)
) -> dict[str, dict[str, float]]:
    """Least microseconds of the fast and the dense univariate forces on each device, from which ``"auto"`` chooses.

    It is the largest of what ``roofline`` compares and, on a TPU, of the estimate of the compiler.

    Args:
        width: number of neurons.
        samples: the numbers of samples.
    """
    if not all(available().values()):
        return {}

    def least(device: str, kind: str, count: int) -> float:
        built = compile_for(device, velocity(mf.full(forces=kind)), *line(width, count))
        return 1e6 * max(*bounds(device, built.program.work).values(), built.estimate or 0.0)

    return {
        f"{device}, {count} samples": {kind: least(device, kind, count) for kind in ("fast", "dense")}
        for device in DEVICES
        for count in samples
    }


def _row(device: str, name: str) -> dict[str, float | str]:
    job = PROGRAMS[name]()
    built = compile_for(device, job.function, *job.arguments)
    work = job.unit(built.program)
    least = bounds(device, work)
    binds = max(least, key=lambda part: least[part])
    return {
        "kernels": work.kernels,
        "megabytes": round(work.traffic / 1e6, 3),
        "megaflop": round(work.flops / 1e6, 3),
        "share_in_products": round(work.products / max(work.flops, 1), 3),
        "binds": binds,
        "least_microseconds": round(1e6 * least[binds], 1),
        "temporary_megabytes": round(built.temporary / 1e6, 2),
        "compiler_seconds": round(built.seconds, 1),
    }
