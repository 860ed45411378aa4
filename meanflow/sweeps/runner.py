"""Runs the chunks of a grid: compile once per group, plan memory, store what is finished, report progress."""

import contextlib
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh

from meanflow.sweeps import hosts, program
from meanflow.sweeps.grid import Chunk, Grid, Group
from meanflow.sweeps.store import Store, StoreError

MEMORY_SHARE = 0.9  # of the free memory that a chunk may take
Progress = Callable[[int, int], None]


class Job(Protocol):
    """What the runner needs to know of a sweep."""

    grid: Grid
    groups: list[Group]
    chunks: list[Chunk]
    shared: Any

    def cell(self, group: Group) -> Any:
        """The cell program of a group."""

    def inputs(self, group: Group, cells: Sequence[int]) -> Any:
        """Host arrays with the leading axis ``cells``."""


def run_chunks(
    job: Job, *, store: Store | None, stored: bool, mesh: Mesh | None, progress: Any = None
) -> dict[str, dict[str, np.ndarray]]:
    """All chunks of a job by name; those in the store are read, the others computed and stored.

    Every process calls this with the same job and the same ``stored``, which says whether there is a store; the store
    itself is on process 0. Chunks that are stored there count as finished.
    """
    flags = np.array([store is not None and c.name in store.finished() for c in job.chunks], bool)
    finished = hosts.share(flags)
    results: dict[str, dict[str, np.ndarray]] = {}
    cells_left = sum(len(c.cells) for c, done in zip(job.chunks, finished, strict=True) if not done)
    with _reporter(progress, job.grid.size, job.grid.size - cells_left) as report:

        def keep(chunk: Chunk, running: Any) -> int:
            out = hosts.gather(running)
            results[chunk.name] = {name: u[: len(chunk.cells)] for name, u in out.items()}
            if stored:  # on every process: all must hear whether the write succeeded
                _save(store, chunk.name, results[chunk.name])
            return len(chunk.cells)

        compiled: dict[int, Any] = {}
        shared = program.spread(job.shared, mesh)
        ahead: list[tuple[Chunk, Any]] = []
        try:
            for chunk, done in zip(job.chunks, finished, strict=True):
                group = job.groups[chunk.group]
                if done:
                    results[chunk.name] = _reread(job, group, chunk, store)
                    continue
                filled = _fill(chunk, mesh)
                cell = program.spread(job.cell(group), mesh)
                inputs = program.place(job.inputs(group, filled), mesh)
                if chunk.group not in compiled:
                    run = program.compile_batched(cell, shared, inputs, mesh)
                    _check_memory(run, group, chunk, mesh)
                    compiled[chunk.group] = run
                arrays, _ = eqx.partition((cell, shared, inputs), eqx.is_array)
                # one chunk ahead: the devices go on while the host writes, reports and prepares
                ahead.append((chunk, compiled[chunk.group](arrays)))
                if len(ahead) > 1:
                    report(keep(*ahead.pop(0)))
            while ahead:
                report(keep(*ahead.pop(0)))
        except BaseException:
            while ahead:  # what runs is kept, whatever happened to the next
                keep(*ahead.pop(0))
            raise
    return results


def _fill(chunk: Chunk, mesh: Mesh | None) -> list[int]:
    """Cells of a chunk with the first one repeated up to the length its group is compiled for."""
    devices = 1 if mesh is None else mesh.shape[program.SWEEP]
    length = -(-chunk.length // devices) * devices
    return [*chunk.cells, *[chunk.cells[0]] * (length - len(chunk.cells))]


def _reread(job: Job, group: Group, chunk: Chunk, store: Store | None) -> dict[str, np.ndarray]:
    if jax.process_count() == 1:
        assert store is not None
        return store.read(chunk.name)
    shapes = program.output_shapes(job.cell(group), job.shared, job.inputs(group, chunk.cells[:1]))
    blank = {name: np.zeros((len(chunk.cells), *s.shape), s.dtype) for name, s in shapes.items()}
    return hosts.share(store.read(chunk.name) if store is not None else blank)


def _save(store: Store | None, name: str, arrays: dict[str, np.ndarray]) -> None:
    problem = ""
    if store is not None:
        try:
            store.write(name, arrays)
        except StoreError as error:
            problem = str(error)
    problem = hosts.agree(problem)
    if problem:
        raise StoreError(problem)


def free_memory(device: Any) -> int | None:
    """Bytes a program may still take on a device, or None where the platform does not say."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    info = pathlib.Path("/proc/meminfo")
    if device.platform == "cpu" and info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if device.platform == "cpu" and hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _check_memory(compiled: Any, group: Group, chunk: Chunk, mesh: Mesh | None) -> None:
    """Refuses a chunk whose compiled program needs more memory than there is, before it runs."""
    usage = compiled.memory_analysis()
    if usage is None:
        return
    # one chunk runs while another waits or is collected
    held = 2 * (usage.argument_size_in_bytes + usage.output_size_in_bytes)
    needed = usage.temp_size_in_bytes + held
    device = jax.local_devices()[0] if mesh is None else mesh.local_devices[0]
    # simulated devices of one host share its memory
    sharing = 1 if mesh is None or device.platform != "cpu" else len(mesh.local_devices)
    check_fit(needed * sharing, free_memory(device), group, chunk)


def check_fit(needed: int, free: int | None, group: Group, chunk: Chunk) -> None:
    """Raises ValueError with a chunk size that fits, if ``needed`` bytes exceed the allowed share of ``free``."""
    if free is None or needed <= MEMORY_SHARE * free:
        return
    fits = int(chunk.length * MEMORY_SHARE * free / needed)
    advice = (
        f"pass chunk={fits}" if fits >= 1 else "one cell is too large for this device; spread it over a mesh"
    )
    raise ValueError(
        f"a chunk of {chunk.length} cells with {group.size} particles each needs {needed / 2**30:.3g} GiB, "
        f"{free / 2**30:.3g} GiB are free; {advice}"
    )


@contextlib.contextmanager
def _reporter(progress: Any, total: int, done: int) -> Iterator[Callable[[int], None]]:
    """A function to call with the number of cells just finished: a bar, a callback, or nothing."""
    if callable(progress):
        seen = [done]

        def tell(count: int) -> None:
            seen[0] += count
            if hosts.is_lead():
                progress(seen[0], total)

        yield tell
        return
    wanted = sys.stderr.isatty() if progress is None else bool(progress)
    if not wanted or not hosts.is_lead():
        yield lambda count: None
        return
    from rich import progress as rich
    from rich.console import Console

    columns = (
        rich.TextColumn("sweep"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TextColumn("{task.fields[rate]}"),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=Console(stderr=True)) as bar:  # standard output is for results
        task = bar.add_task("sweep", total=total, completed=done, rate="compiling")
        start = time.perf_counter()
        count_now = [0]

        def advance(count: int) -> None:
            count_now[0] += count
            rate = count_now[0] / (time.perf_counter() - start)
            bar.update(task, advance=count, rate=f"{rate:.3g} cells/s")

        yield advance
