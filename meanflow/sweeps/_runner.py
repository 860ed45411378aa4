"""Runs a plan: compile once per group, plan memory, store what is finished, report progress.

Several processes act as one: every process runs the same program on its own devices, JAX's distributed runtime moves
the arrays, and process 0 alone opens the store, writes and reports. What a process does alone (preparing, compiling,
writing) it does in ``together``, after which all processes know of each other's errors: one that failed would otherwise
leave the others waiting for it.
"""

import contextlib
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh
from jax.stages import Compiled
from jaxtyping import PyTree

from meanflow._identity import difference
from meanflow.sweeps import _grid as grids
from meanflow.sweeps import _program as program
from meanflow.sweeps._grid import Chunk, Group
from meanflow.sweeps._program import Results
from meanflow.sweeps._store import Store, StoreError

if TYPE_CHECKING:
    from meanflow.sweeps._plan import Plan

MEMORY_SHARE = 0.9  # of the free memory that a chunk may take
# True, False, a function (cells done, cells in all), or None: a bar if the error output is a terminal
Progress: TypeAlias = bool | Callable[[int, int], object] | None
Arrays: TypeAlias = dict[str, np.ndarray]
Tree = TypeVar("Tree")


def is_lead() -> bool:
    """Say whether this process is the one that writes and reports."""
    return jax.process_index() == 0


def gather(tree: Results) -> Arrays:
    """Return arrays that are spread over the devices of all processes in full on each host."""
    if jax.process_count() == 1:
        return jax.tree.map(np.asarray, tree)
    from jax.experimental import multihost_utils

    return jax.tree.map(np.asarray, multihost_utils.process_allgather(tree, tiled=True))


def share(value: Tree) -> Tree:
    """Return what process 0 holds on every process: a pytree of arrays of the same shapes everywhere."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    return jax.tree.map(np.asarray, multihost_utils.broadcast_one_to_all(value))


class _Interrupts:
    """Ctrl-C on one of several processes: heard at once in its own work, and after a collective that all take part in.

    A process that left a collective, or did not come to it, would leave the others waiting there. A second Ctrl-C is
    not held back.
    """

    def __init__(self) -> None:
        self.alone, self.waiting = False, False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold interrupts back, except in ``together``, while the block runs."""
        if jax.process_count() == 1 or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, self._hear)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
            self.alone, self.waiting = False, False

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.alone or self.waiting:
            raise KeyboardInterrupt
        self.waiting = True

    def listen(self) -> None:
        """Begin a stretch of work that this process does alone."""
        self.alone = True
        if self.waiting:
            self.waiting = False
            raise KeyboardInterrupt


_INTERRUPTS = _Interrupts()
ERRORS: dict[str, type[BaseException]] = {
    kind.__name__: kind for kind in (StoreError, ValueError, TypeError, MemoryError, KeyboardInterrupt)
}
LENGTH = 4000  # bytes of a message between processes


def together(work: Callable[[], Tree]) -> Tree:
    """Do what each process does alone, and go on only if all have succeeded.

    Args:
        work: function of no arguments that waits for no other process.

    Returns:
        What ``work`` returned on this process.

    Raises:
        BaseException: what ``work`` raised here; or, if it failed on other processes only, an error of the same
            sort with their message. All processes raise then.
    """
    problem: BaseException | None = None
    try:
        _INTERRUPTS.listen()
        value = work()
        _INTERRUPTS.alone = False
    except BaseException as caught:  # interrupts too: the others are to hear of them
        _INTERRUPTS.alone = False
        problem = caught
    if jax.process_count() > 1:
        _tell(problem)
    if problem is not None:
        raise problem
    return value


def _tell(problem: BaseException | None) -> None:
    """Exchange messages with all processes; raise if this one has succeeded and another has not."""
    from jax.experimental import multihost_utils

    name = (
        "" if problem is None else next(n for n in (*ERRORS, "") if not n or isinstance(problem, ERRORS[n]))
    )
    text = "" if problem is None else f"{name}|{type(problem).__name__}: {problem}"
    padded = np.frombuffer(text.encode()[:LENGTH].ljust(LENGTH, b"\0"), np.uint8)
    heard = np.asarray(multihost_utils.process_allgather(padded)).reshape(-1, LENGTH)
    for process, row in enumerate(heard):
        said = bytes(row).rstrip(b"\0").decode(errors="replace")
        if said and problem is None:
            name, _, message = said.partition("|")
            raise ERRORS.get(name, RuntimeError)(f"on process {process}: {message}")


def run_plan(
    plan: "Plan", *, store: str | pathlib.Path | None, mesh: Mesh | None, progress: Progress = None
) -> tuple[Sequence[Chunk], Mapping[str, Arrays]]:
    """Run the chunks of a plan that are not in the store yet.

    Every process calls this with the same arguments; the store is opened by process 0 alone.

    Args:
        plan: what to run.
        store: run directory, or None to keep nothing.
        mesh: devices; None for all.
        progress: whom to tell.

    Returns:
        The chunks, and the arrays of each by name.
    """
    with _INTERRUPTS.held():
        mesh, _ = together(lambda: (program.check_mesh(mesh), plan.check()))
        if store is None:
            return plan.chunks, together(lambda: _Run(plan, plan.chunks, None, mesh)).all_chunks(progress)
        opened, chunks = _open(plan, store)
        try:
            return chunks, together(lambda: _Run(plan, chunks, opened, mesh)).all_chunks(progress)
        finally:
            if opened is not None:
                opened.close()


def _open(plan: "Plan", path: str | pathlib.Path) -> tuple[Store | None, Sequence[Chunk]]:
    """Open the store on process 0; the chunks of an earlier run are kept, whatever this platform would choose."""
    opened: list[Store] = []

    def work() -> np.ndarray:
        if not is_lead():
            return np.zeros(len(plan.groups), np.int64)
        opened.append(Store(path, plan.config()))
        return _lengths(plan, opened[0])

    try:
        lengths = together(work)
        return (opened[0] if opened else None), grids.cut(plan.groups, share(lengths).tolist())
    except BaseException:
        for store in opened:
            store.close()
        raise


def _lengths(plan: "Plan", store: Store) -> np.ndarray:
    """Return the cells per chunk of each group: as stored, but ``chunk`` decides where nothing is finished yet."""
    old = store.config["layout"]["chunks"]
    lengths, wanted = np.zeros((2, len(plan.groups)), np.int64)
    for planned in old.values():
        lengths[planned["group"]] = planned["length"]
    done = store.finished()
    _check_cells(plan, store, lengths)
    if plan.chunk is None:
        return lengths
    for chunk in plan.chunks:
        wanted[chunk.group] = chunk.length
    begun = np.isin(np.arange(len(lengths)), [old[name]["group"] for name in done if name in old])
    if begun.all() and not np.array_equal(lengths, wanted):
        raise StoreError(
            f"store {store.path} was written in chunks of {sorted(set(lengths.tolist()))} cells; "
            f"leave chunk out to go on with them, got chunk={plan.chunk}"
        )
    new = np.where(begun, lengths, wanted)
    if not np.array_equal(lengths, new):
        store.set_layout(plan.layout(grids.cut(plan.groups, new.tolist())))
    return new


def _check_cells(plan: "Plan", store: Store, lengths: np.ndarray) -> None:
    """Refuse a store whose chunks hold other cells than this plan would put there."""
    old = {name: planned["cells"] for name, planned in store.config["layout"]["chunks"].items()}
    new = {c.name: list(c.cells) for c in grids.cut(plan.groups, np.maximum(lengths, 1).tolist())}
    found = difference(old, new)
    if found:
        raise StoreError(
            f"store {store.path} divides the grid into other chunks; use another directory. Cells of the first that "
            f"differs: {found[0]}"
        )


class _Run:
    """One pass over the chunks of a plan.

    Args:
        plan: what to run.
        chunks: its division into chunks.
        store: where finished chunks are, on process 0.
        mesh: the devices.
    """

    def __init__(self, plan: "Plan", chunks: Sequence[Chunk], store: Store | None, mesh: Mesh | None) -> None:
        self.plan, self.chunks, self.store, self.mesh = plan, chunks, store, mesh
        self.shared = program.replicate(plan.shared, mesh)
        self.compiled: dict[int, Compiled] = {}
        self.results: dict[str, Arrays] = {}

    def all_chunks(self, progress: Progress) -> dict[str, Arrays]:
        """Read the chunks that are in the store, compute and store the others; return their arrays by name."""
        there = together(lambda: set() if self.store is None else self.store.finished())
        finished = share(np.array([c.name in there for c in self.chunks], bool))
        total = self.plan.grid.size
        left = sum(len(c.cells) for c, done in zip(self.chunks, finished, strict=True) if not done)
        ahead: list[tuple[Chunk, Results]] = []
        with _reporter(progress, total, total - left) as report:
            try:
                for chunk, done in zip(self.chunks, finished, strict=True):
                    if done:
                        self.results[chunk.name] = self._reread(chunk)
                        continue
                    # one chunk ahead: the devices go on while the host writes, reports and prepares
                    ahead.append((chunk, self._start(chunk)))
                    if len(ahead) > 1:
                        self._keep(*ahead.pop(0), report)
                while ahead:
                    self._keep(*ahead.pop(0), report)
            except BaseException:
                while ahead:  # what runs is kept, whatever happened to the next
                    self._keep(*ahead.pop(0))
                raise
        return self.results

    def _start(self, chunk: Chunk) -> Results:
        """Start a chunk on the devices and return its results, which need not be there yet."""
        compiled, arrays = together(lambda: self._prepare(chunk))
        return compiled(arrays)

    def _prepare(self, chunk: Chunk) -> tuple[Compiled, PyTree]:
        """Return the program of a chunk and the arrays that it takes, on the devices."""
        group = self.plan.groups[chunk.group]
        multiple = 1 if self.mesh is None else self.mesh.shape[program.PARTICLES]
        cell = program.replicate(self.plan.cell(group), self.mesh)
        filled = _fill(chunk, self.mesh)
        inputs = program.place(self.plan.inputs(group, filled, multiple), self.mesh)
        if chunk.group not in self.compiled:
            compiled = program.compile_batched(cell, self.shared, inputs, self.mesh)
            _check_memory(compiled, group, chunk, self.mesh)
            self.compiled[chunk.group] = compiled
        arrays, _ = eqx.partition((cell, self.shared, inputs), eqx.is_array)
        return self.compiled[chunk.group], arrays

    def _keep(self, chunk: Chunk, running: Results, report: Callable[[int], None] | None = None) -> None:
        """Wait for the results of a chunk, store and report them."""
        out = gather(running)
        self.results[chunk.name] = {name: u[: len(chunk.cells)] for name, u in out.items()}

        def work() -> None:
            if self.store is not None:
                self.store.write(chunk.name, self.results[chunk.name])
            if report is not None:
                report(len(chunk.cells))

        together(work)

    def _reread(self, chunk: Chunk) -> Arrays:
        """Return the stored results of a chunk, on every process."""

        def work() -> Arrays:
            if self.store is not None:
                return self.store.read(chunk.name)
            group = self.plan.groups[chunk.group]
            one = self.plan.inputs(group, chunk.cells[:1])
            shapes = program.output_shapes(self.plan.cell(group), self.plan.shared, one)
            return {name: np.zeros((len(chunk.cells), *s.shape), s.dtype) for name, s in shapes.items()}

        return share(together(work))


def _fill(chunk: Chunk, mesh: Mesh | None) -> list[int]:
    """Return the cells of a chunk with the first one repeated up to the length its group is compiled for."""
    devices = 1 if mesh is None else mesh.shape[program.SWEEP]
    length = -(-chunk.length // devices) * devices
    return [*chunk.cells, *[chunk.cells[0]] * (length - len(chunk.cells))]


def free_memory(device: jax.Device) -> int | None:
    """Return the bytes that a program may still take on a device, or None where the platform does not say."""
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


def _check_memory(compiled: Compiled, group: Group, chunk: Chunk, mesh: Mesh | None) -> None:
    """Refuse a chunk whose compiled program needs more memory than there is, before it runs."""
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
    """Raise ValueError with a chunk size that fits, if ``needed`` bytes exceed the allowed share of ``free`` bytes."""
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
def _reporter(progress: Progress, total: int, done: int) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the number of cells just finished: it moves a bar, calls back, or does nothing."""
    if callable(progress):
        tell, seen = progress, [done]

        def pass_on(count: int) -> None:
            seen[0] += count
            if is_lead():
                tell(seen[0], total)

        yield pass_on
        return
    wanted = sys.stderr.isatty() if progress is None else bool(progress)
    if not wanted or not is_lead():
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
