"""A planned grid of runs, and how it is run: one program a group of cells, chunk by chunk, stored as it goes.

A plan computes nothing itself. A ``Runner`` goes through its chunks on the devices at hand. With a store it takes the
chunks that nobody else has claimed, so that any number of runners, started by whatever means, share the work.
"""

from __future__ import annotations

import abc
import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import pathlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.stages import Compiled
from jaxtyping import Array, Key, PyTree, Shaped

from meanflow import _boundary
from meanflow._boundary import Count, checked, either, function, instance, number, optional
from meanflow._identity import Json, json_digest, source_digest
from meanflow._lazy import optional as import_optional
from meanflow.files import versions
from meanflow.sweeps import _devices as devices
from meanflow.sweeps import _grid as grids
from meanflow.sweeps import _store as stores
from meanflow.sweeps._devices import PARTICLES, SWEEP, Arrays, Cell, Results, is_lead, share, together
from meanflow.sweeps._grid import Chunk, Grid, Group
from meanflow.sweeps._store import Store, StoreError

if TYPE_CHECKING:  # slow to import
    import xarray

# True, False, a function (cells done, cells in all), or None: a bar if the error output is a terminal
Progress: TypeAlias = Annotated[
    bool | Callable[[int, int], object] | None, optional(either(_boundary.flag, function))
]
DONE, WAIT = -1, -2  # no chunk to begin: all are finished, or others are at work on them
QUICK = 2.0  # seconds; longer chunks are not claimed ahead, since another worker may have time for them
PAUSE = 1.0  # most seconds between two looks at what others do
TRIES = 3  # workers that a chunk may lose


def submits(name: str, value: Any) -> Any:
    """Accept an executor; those of submitit and of some schedulers do not derive from that of Python."""
    if not callable(getattr(value, "submit", None)):
        raise ValueError(
            f"{name} must be an executor such as those of concurrent.futures, got {_boundary.show(value)}"
        )
    return value


def flatten(tree: Mapping[str, PyTree], prefix: str = "", what: str = "observe") -> Results:
    """Return nested dicts of arrays as one dict whose names are joined by underscores; ``what`` made them.

    >>> list(flatten({"end": {"square": jnp.ones(2)}}))
    ['end_square']
    """
    flat: Results = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}_", what)
        elif hasattr(value, "shape"):
            flat[prefix + name] = value
        else:
            raise ValueError(
                f"{what}[{prefix + name!r}] must return an array or a dict of arrays, got {_boundary.show(value)}"
            )
    return flat


@checked
@dataclass(frozen=True)
class Execution:
    """How a sweep is run; nothing of it changes the results beyond rounding.

    Attributes:
        chunk: most cells that run at once and are stored together; None for about 2^15 particles for each CPU device
            and 2^20 for each accelerator (1024 cells of ``sweep_function``).
        waste: allowed share of padding among stored particles: widths that differ by less share a program.
        mesh: how many devices there are along the cells (None: all that are left) and along the particles of each
            cloud, for instance ``(None, 4)``; or a ``jax.sharding.Mesh`` with axes ``sweep`` and ``particles``. By
            default all devices lie along the cells.
        progress: True, False, a function (cells done, cells in all), or None: a bar if the error output is a terminal.
        executor: has the chunks computed by its workers, in other processes or on other hosts: any executor in the
            sense of ``concurrent.futures``, such as ``distributed.Client(...).get_executor()``,
            ``submitit.AutoExecutor`` or a pool of spawned processes. It needs a store that its workers can reach.
            Chunks of a lost worker are submitted again.

    >>> Execution(chunk=64).waste
    0.15
    """

    chunk: Count | None = None
    waste: Annotated[float, number(low=0.0, below=1.0)] = 0.15
    mesh: Annotated[Mesh | tuple[int | None, int], devices.mesh_shape] | None = None
    progress: Progress = None
    executor: Annotated[concurrent.futures.Executor | None, optional(submits)] = None


_boundary.declare(Execution, instance(Execution, hint="for instance sweeps.Execution(chunk=64)"))


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan(abc.ABC):
    """Cells, how they are grouped, and how they are run. A plan never changes, and computes nothing before ``run``.

    Attributes:
        grid: the named axes.
        shared: pytree that every cell gets.
        execution: how it is run.
        request: the configuration tables this plan was built from, kept in the store for ``meanflow resume``.
    """

    grid: Grid
    shared: PyTree
    execution: Execution
    request: Json | None = None

    @property
    @abc.abstractmethod
    def groups(self) -> tuple[Group, ...]:
        """Cells that share a compiled program."""

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Cells that are run and stored together, on the devices of this process; the largest networks come first."""
        return grids.cut(self.groups, self.lengths)

    @property
    def lengths(self) -> list[int]:
        """How many cells of each group run at once, on the devices of this process."""
        # enough particles to hide the cost of a step, few enough to store often
        particles = 2**15 if jax.default_backend() == "cpu" else 2**20
        return grids.lengths(self.groups, self.execution.chunk, particles, jax.device_count())

    @abc.abstractmethod
    def cell(self, group: Group) -> Cell:
        """Return the program of one cell of a group."""

    @abc.abstractmethod
    def inputs(self, group: Group, cells: Sequence[int], multiple: int = 1) -> PyTree[np.ndarray]:
        """Return what the program takes for some cells, as host arrays with a leading axis.

        Args:
            group: the group of the cells.
            cells: numbers of the cells.
            multiple: clouds are filled up to a multiple of this size, the number of devices that share a cloud.
        """

    def batched(self, group: Group, shared: PyTree, inputs: PyTree, mesh: Mesh | None = None) -> Results:
        """Return the results of the cells of a group for these inputs, as a pure function of arrays."""
        return devices.batched(self.cell(group), shared, inputs, mesh)

    def shapes(self, group: Group) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes of the results of one cell of a group, without computing."""
        one = jax.tree.map(
            lambda u: jax.ShapeDtypeStruct(u.shape[1:], u.dtype), self.inputs(group, group.cells[:1])
        )
        return eqx.filter_eval_shape(self.cell(group), self.shared, one)

    @abc.abstractmethod
    def identity(self) -> Json:
        """Return a JSON-ready description of everything that decides the numbers, and of nothing else."""

    @abc.abstractmethod
    def variables(self) -> Json:
        """Return a JSON-ready description of what is recorded: ``along``, ``variables``, ``coords`` of a layout."""

    @abc.abstractmethod
    def check(self) -> None:
        """Raise ValueError for what can be seen to be wrong before anything is compiled."""

    def config(self) -> Json:
        """Return the content of ``config.json``: identity of the run, versions, and layout.

        The cells of every group are part of the identity: a chunk is stored by its place in its group, so its
        numbers would be taken for those of other cells if the groups changed.
        """
        groups, widths = {}, np.asarray(self.grid.axes.get("width", [0]))
        for k, group in enumerate(self.groups):
            cells = {"cells": f"{len(group.cells)}:{json_digest(group.cells)}"}
            if group.size:
                places = self.grid.places(np.array(group.cells))["width"]
                cells = {"size": group.size, "widths": np.unique(widths[places]).tolist()} | cells
            groups[f"{k:03d}"] = cells
        layout = {
            "axes": {name: grids.axis_labels(values) for name, values in self.grid.axes.items()},
            "chunks": {c.name: {"group": c.group, "length": c.length, "cells": c.cells} for c in self.chunks},
        }
        config = {
            "run": self.identity() | {"groups": groups},
            "versions": versions(),
            "source": source_digest(),
            "layout": layout | self.variables(),
        }
        return config if self.request is None else config | {"request": self.request}

    def run(self, *, store: str | pathlib.Path | None = None) -> "xarray.Dataset":
        """Run what is not in the store yet and return the labelled data set.

        Any number of processes may do this with one store at the same time, and share the work. The processes of a team
        (``jax.distributed``) call it with the same arguments and act as one; process 0 alone opens the store.

        Args:
            store: run directory, or None to keep nothing.
        """
        executor = self.execution.executor
        if executor is not None and store is None:
            raise ValueError(
                "store must be a run directory where chunks are computed by an executor, got None"
            )
        with devices.INTERRUPTS.held(), Runner(self, store) as runner:
            if executor is None or store is None:
                runner.through(list(runner.chunks))
            else:
                _distribute(runner, executor, os.path.abspath(store))
            return grids.assemble(self.grid, list(runner.chunks.values()), runner.arrays(), runner.config)

    def work(
        self,
        store: str | pathlib.Path,
        *,
        shard: tuple[int, int] = (0, 1),
        stop: Callable[[], bool] | None = None,
    ) -> bool:
        """Take part in a sweep until all its chunks are finished, by whomever; say whether they are.

        Args:
            store: run directory.
            shard: (k, n) for every n-th chunk, beginning with number k, and no others.
            stop: function that says whether to end before that. It is asked several times a second; claims are given
                back then, and the chunk that is being computed is lost.
        """
        with Runner(self, store, stop=stop, keep=False) as runner:
            names = list(runner.chunks)[shard[0] :: shard[1]]
            with contextlib.suppress(Stopped):
                runner.through(names)
            return set(names) <= stores.finished_chunks(store)

    def begin(self, store: str | pathlib.Path, *, timed: bool = False) -> Json:
        """Write the plan into a store and return {"cells", "chunks", "bytes", "seconds"}: what the sweep will take.

        Args:
            store: run directory.
            timed: whether to compute one chunk and to judge by it how many seconds all take on these devices, None
                otherwise; the chunk is kept.
        """
        size, work, seconds = 0, 0, None
        for group in self.groups:
            shapes = self.shapes(group)
            size += len(group.cells) * sum(s.size * s.dtype.itemsize for s in shapes.values())
            work += len(group.cells) * max(group.size, 1)
        with Runner(self, store, keep=False) as runner:
            if timed:
                first = next(iter(runner.chunks.values()))
                runner._prepare(first)  # to compile takes its time only once
                start = time.perf_counter()
                runner.through([first.name])
                part = max(self.groups[first.group].size, 1) * len(first.cells)
                seconds = (time.perf_counter() - start) * work / part
            count = len(runner.chunks)
            return {"cells": self.grid.size, "chunks": count, "bytes": size, "seconds": seconds}


class Stopped(Exception):
    """A runner was told to stop."""


class Runner:
    """Goes through the chunks of a plan, on the devices of this process or, with others, of a team.

    Args:
        plan: what to run.
        store: run directory, or None.
        stop: function that says whether to end at once.
        keep: whether the results are to stay in memory.
    """

    def __init__(
        self,
        plan: Plan,
        store: str | pathlib.Path | None,
        stop: Callable[[], bool] | None = None,
        keep: bool = True,
    ) -> None:
        self.plan, self.stop, self.keep = plan, stop, keep
        self.programs: dict[tuple[int, int], tuple[Compiled, Cell]] = {}
        self.results: dict[str, Arrays] = {}
        self.store: Store | None = None
        self.done, self.bar = 0, contextlib.ExitStack()
        self.tell: Callable[[int, int], object] | None = None
        self.last, self.quick = 0.0, store is None
        lengths = share(together(functools.partial(self._open, store)))
        # the chunks of an earlier run are kept, whatever this platform would choose
        self.chunks = {chunk.name: chunk for chunk in grids.cut(plan.groups, lengths.tolist())}

    def _open(self, store: str | pathlib.Path | None) -> np.ndarray:
        """Check the plan, open the store on process 0, and return the cells per chunk of each group."""
        plan = self.plan
        plan.check()
        self.mesh, self.config = devices.find_mesh(plan.execution.mesh), plan.config()
        self.shared = devices.replicate(plan.shared, self.mesh)
        lengths = np.array(plan.lengths)
        if store is None or not is_lead():
            return lengths
        if not stores.has_plan(store):
            stores.check_place(pathlib.Path(store))
            self._prepare(plan.chunks[0])  # what does not fit into memory is refused before a plan is written
        self.store = Store(store, self.config)
        self.config = self.store.config
        for planned in self.config["layout"]["chunks"].values():
            lengths[planned["group"]] = planned["length"]
        _compare_chunks(plan, self.store, lengths)
        return lengths

    def __enter__(self) -> Runner:
        """Begin to report; what is in the store counts as done."""
        there, progress = self._finished(), self.plan.execution.progress
        self.done = sum([len(chunk.cells) for chunk in self.chunks.values() if chunk.name in there])
        if is_lead() and callable(progress):
            self.tell = progress
        elif is_lead() and (sys.stderr.isatty() if progress is None else progress):
            self.tell = self.bar.enter_context(_bar(self.done, self.plan.grid.size))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.close()
        if self.store is not None:
            self.store.close()
            if kind is None:
                self.store.tidy()

    def report(self, name: str) -> None:
        """Count the cells of a chunk that was finished just now, here or elsewhere."""
        self.done += len(self.chunks[name].cells)
        if self.tell is not None:
            self.tell(self.done, self.plan.grid.size)

    def _finished(self) -> set[str]:
        return set() if self.store is None else stores.finished_chunks(self.store.path)

    def through(self, names: Iterable[str]) -> None:
        """Compute and store the named chunks, as far as nobody else does; return when all are finished."""
        there, order = self._finished(), list(self.chunks.values())
        left = [name for name in names if name not in there]
        ahead: list[tuple[Chunk, Results]] = []
        self.last, pause = time.monotonic(), 0.01
        try:
            while True:
                # process 0 decides for all
                number, most = share(together(functools.partial(self._next, left)))
                if number >= 0:
                    # one chunk ahead: the devices go on while the host writes, reports and prepares
                    program, arrays = together(functools.partial(self._prepare, order[number]))
                    ahead.append((order[number], program(arrays)))
                    pause = 0.01
                if ahead and (number < 0 or len(ahead) > most):
                    self._keep(*ahead.pop(0))
                elif number == DONE:
                    return
                elif number == WAIT:
                    time.sleep(pause)
                    pause = min(1.5 * pause, PAUSE)
        except BaseException as problem:
            # what runs is kept, whatever happened to the next
            while ahead and not isinstance(problem, Stopped):
                self._keep(*ahead.pop(0))
            raise
        finally:
            if self.store is not None:
                self.store.give_back()

    def _next(self, left: list[str]) -> np.ndarray:
        """Return the number of a chunk to begin, or DONE or WAIT, and how many may wait for the devices meanwhile."""
        self._listen()
        found = DONE
        for name in list(left):
            if self.store is None or self.store.claim(name):
                left.remove(name)
                found = list(self.chunks).index(name)
                break
            if self.store.is_finished(name):  # by somebody else
                left.remove(name)
                self.report(name)
            else:
                found = WAIT
        return np.array([found, self.quick])

    def _listen(self) -> None:
        if self.stop is not None and self.stop():
            raise Stopped

    def _prepare(self, chunk: Chunk) -> tuple[Compiled, PyTree]:
        """Return the program of a chunk and the arrays that it takes, on the devices."""
        group, shape = self.plan.groups[chunk.group], {} if self.mesh is None else self.mesh.shape
        # the last chunk is filled up with its first cell to the length that the program is compiled for
        filling = grids.round_up(chunk.length, shape.get(SWEEP, 1)) - len(chunk.cells)
        cells = [*chunk.cells, *[chunk.cells[0]] * filling]
        inputs = devices.place(self.plan.inputs(group, cells, shape.get(PARTICLES, 1)), self.mesh)
        known = chunk.group, chunk.length
        if known not in self.programs:
            cell = devices.replicate(self.plan.cell(group), self.mesh)
            compiled = devices.compile_batched(cell, self.shared, inputs, self.mesh)
            devices.check_memory(compiled, chunk.length, group.size, self.mesh)
            self.programs[known] = compiled, cell
        compiled, cell = self.programs[known]
        return compiled, eqx.filter((cell, self.shared, inputs), eqx.is_array)

    def _keep(self, chunk: Chunk, running: Results) -> None:
        """Wait for the results of a chunk, store and report them."""
        if self.stop is not None:  # compiled code hears no signals: another thread waits for it
            waiting = threading.Thread(target=jax.block_until_ready, args=(running,), daemon=True)
            waiting.start()
            while waiting.is_alive():
                self._listen()
                waiting.join(0.05)
        out = {name: u[: len(chunk.cells)] for name, u in devices.gather(running).items()}
        if self.keep:
            self.results[chunk.name] = out
        together(functools.partial(self._write, chunk.name, out))

    def _write(self, name: str, out: Arrays) -> None:
        if self.store is not None:
            self.store.write(name, out)
            self.quick = time.monotonic() - self.last < QUICK
            self.last = time.monotonic()
        self.report(name)

    def arrays(self) -> dict[str, Arrays]:
        """Return the results of all chunks, those that others have computed from the store."""
        for name in self.chunks:
            if name not in self.results:
                self.results[name] = share(together(functools.partial(self._reread, self.chunks[name])))
        return self.results

    def _reread(self, chunk: Chunk) -> Arrays:
        """Return the stored results of a chunk."""
        if self.store is not None:
            return self.store.read(chunk.name)
        # process 0 reads them for its team; JAX wants to know the shapes of what it sends
        shapes = self.plan.shapes(self.plan.groups[chunk.group])
        return {name: np.zeros((len(chunk.cells), *s.shape), s.dtype) for name, s in shapes.items()}


def _compare_chunks(plan: Plan, store: Store, lengths: np.ndarray) -> None:
    """Refuse a store whose chunks do not hold the cells that they have in the plan."""
    there = {name: planned["cells"] for name, planned in store.config["layout"]["chunks"].items()}
    expected = {chunk.name: list(chunk.cells) for chunk in grids.cut(plan.groups, lengths.tolist())}
    if there != expected:
        strange = next(name for name in {**there, **expected} if there.get(name) != expected.get(name))
        raise StoreError(
            f"store {store.path} divides the grid into other chunks; use another directory. The first that differs: "
            f"{strange}: {there.get(strange)} in the store, {expected.get(strange)} now"
        )
    if plan.execution.chunk is not None and lengths.tolist() != plan.lengths:
        raise StoreError(
            f"store {store.path} is planned in chunks of {np.unique(lengths).tolist()} cells; "
            f"leave chunk out to go on with them, got chunk={plan.execution.chunk}"
        )


@contextlib.contextmanager
def _bar(before: int, total: int) -> Iterator[Callable[[int, int], object]]:
    """Show a bar, and yield the function (cells done, cells in all) that moves it."""
    from rich import progress as rich
    from rich.console import Console

    columns = ("sweep", rich.BarColumn(), rich.MofNCompleteColumn(), "{task.fields[rate]}")
    start = time.perf_counter()
    # standard output is for results
    with rich.Progress(*columns, rich.TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("sweep", total=total, completed=before, rate="compiling")

        def tell(done: int, total: int) -> None:
            rate = (done - before) / (time.perf_counter() - start)
            bar.update(task, completed=done, rate=f"{rate:.3g} cells/s")

        yield tell


def _distribute(runner: Runner, executor: concurrent.futures.Executor, store: str) -> None:
    """Have the chunks of a store computed by the workers of an executor."""
    pickler = import_optional("cloudpickle", "clusters", "Execution(executor=)")
    # functions of the user travel by name where the worker can import them, else as they are
    quiet = dataclasses.replace(runner.plan.execution, executor=None, progress=False)
    job = pickler.dumps(dataclasses.replace(runner.plan, execution=quiet))  # type: ignore[type-var]
    double = jnp.result_type(float) == np.float64
    there = stores.finished_chunks(store)
    pending: dict[str, Any] = {}  # futures, which need not be those of Python
    lost: Counter[str] = Counter()

    def submit(name: str) -> None:
        pending[name] = executor.submit(compute_chunk, job, double, store, name)

    try:
        for name in runner.chunks:
            if name not in there:
                submit(name)
        while pending:
            ended = [name for name, future in pending.items() if future.done()]
            for name in ended:
                try:
                    said = pending.pop(name).result()
                except Exception as problem:
                    lost[name] += 1
                    if lost[name] == TRIES or isinstance(problem, concurrent.futures.BrokenExecutor):
                        raise RuntimeError(
                            f"chunk {name} was lost with its worker ({type(problem).__name__}: {problem}); finished "
                            f"chunks are kept in {store}, and the same call with a new executor goes on"
                        ) from problem
                    submit(name)
                    continue
                if said is not None:
                    raise devices.ERRORS.get(said[0], RuntimeError)(f"chunk {name}: {said[1]}")
                runner.report(name)
            if not ended:
                time.sleep(0.02)
    except BaseException:
        for future in pending.values():
            future.cancel()
        raise


_FORKED: list[bool] = []  # holds something in a process that was forked after this module was imported
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=functools.partial(_FORKED.append, True))
_AT_WORK = threading.Lock()
_RUNNERS: dict[tuple[bytes, str], Runner] = {}  # the last one of this worker


def compute_chunk(job: bytes, double: bool, store: str, name: str) -> tuple[str, str] | None:
    """Compute a chunk of a store in a worker of an executor; return kind and text of an error, or None.

    Args:
        job: the plan, as cloudpickle writes it.
        double: whether it is computed in float64, whatever the worker's own precision is.
        store: run directory.
        name: name of the chunk.
    """
    try:
        if _FORKED:
            raise ValueError(
                "workers must not be forks of a process that uses JAX, which may stand still for ever: for a pool of "
                'processes pass mp_context=multiprocessing.get_context("spawn")'
            )
        # threads of one worker take turns: a program uses all of its devices anyway
        with _AT_WORK, jax.enable_x64(double):
            if (job, store) not in _RUNNERS:
                for old in _RUNNERS.values():
                    old.__exit__(None, None, None)
                _RUNNERS.clear()
                plan = import_optional("cloudpickle", "clusters", "Execution(executor=)").loads(job)
                _RUNNERS[job, store] = Runner(plan, store, keep=False)
            _RUNNERS[job, store].through([name])
    except Exception as problem:
        kind = next((n for n, one in devices.ERRORS.items() if isinstance(problem, one)), "")
        return kind, f"{type(problem).__name__}: {problem}"
    return None


def numbers(values: Sequence[float]) -> Shaped[np.ndarray, "cells"]:
    """Return axis values as an array of JAX's default float or integer type."""
    array = np.asarray(values)
    return array.astype(jnp.result_type(float) if array.dtype.kind == "f" else jnp.result_type(int))


def any_key(name: str, value: object) -> Key[Array, ""]:
    """Accept a PRNG key, an integer, or the raw numbers of a key; return the key."""
    try:
        if isinstance(value, int | np.integer) and not isinstance(value, bool):
            return jax.random.key(int(value))
        if isinstance(value, jax.Array | np.ndarray) and value.dtype == np.uint32:
            return jax.random.wrap_key_data(jnp.asarray(value))
        return _boundary.prng_key(name, value)  # type: ignore[return-value]
    except (TypeError, OverflowError) as problem:
        raise ValueError(f"{name} must be an integer or a PRNG key, got {_boundary.show(value)}") from problem


SEEDS = _boundary.either(_boundary.count(1, 2**24), _boundary.sequence(_boundary.count(0, 2**32 - 1)))
Seeds = Annotated[int | Sequence[int], SEEDS]
AXES = _boundary.mapping(_boundary.sequence(_boundary.unchecked("what takes the axis checks its values")))


def seed_list(seeds: int | Sequence[int] | Array | np.ndarray) -> tuple[int, ...]:
    """Return the list of seeds: 0, 1, ... if their number is given."""
    listed = range(seeds) if isinstance(seeds, int | np.integer) else np.asarray(seeds).tolist()
    return tuple(listed)
