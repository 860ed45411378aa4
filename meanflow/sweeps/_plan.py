"""A planned grid of runs, and how it is run: one program a group of cells, chunk by chunk, stored as it goes.

A plan gives each group of cells a ``Cell``, a pure function cell(shared, inputs) -> dict of arrays. ``batched`` maps it
over the leading axis of ``inputs``; over a mesh, the axis ``sweep`` is split by shard_map (cells never wait for each
other's steps) and the axis ``particles`` by the compiler, which sums over devices where a prediction sums over neurons.
"""

from __future__ import annotations

import abc
import contextlib
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jax.stages import Compiled
from jaxtyping import Array, Key, PyTree, Shaped

from meanflow import _boundary
from meanflow._boundary import Count, FilePath, checked, either, function, instance, number, optional
from meanflow._identity import Json, json_digest, source_digest
from meanflow._reuse import kept_by_shape
from meanflow.files import versions
from meanflow.sweeps import _devices as devices
from meanflow.sweeps import _grid as grids
from meanflow.sweeps import _results as results
from meanflow.sweeps._devices import PARTICLES, SWEEP, Arrays, is_lead, share, together
from meanflow.sweeps._grid import Chunk, Grid, Group
from meanflow.sweeps._store import Store, StoreError, finished_chunks, read_chunk, read_config

if TYPE_CHECKING:  # slow to import
    import xarray

MEMORY_SHARE = 0.9  # of the free memory that a chunk may take
Results: TypeAlias = dict[str, Array]
# True, False, a function (cells done, cells in all), or None: a bar if the error output is a terminal
Progress: TypeAlias = Annotated[
    bool | Callable[[int, int], object] | None, optional(either(_boundary.flag, function))
]


class Cell(eqx.Module):
    """The program of one cell: a pure function of what all cells share and of the cell's own inputs."""

    @abc.abstractmethod
    def __call__(self, shared: PyTree, inputs: Mapping[str, PyTree]) -> Results:
        """Return the results of the cell as arrays by name."""


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


def batched(
    cell: Cell, shared: PyTree, inputs: PyTree, mesh: Mesh | None = None, *, one_by_one: bool = False
) -> Results:
    """Map ``cell`` over the leading axis of ``inputs``; pure, so it can be jitted, differentiated and exported.

    Args:
        cell: the program of one cell.
        shared: what all cells share.
        inputs: the inputs of the cells, along the leading axis.
        mesh: devices; None for one.
        one_by_one: each device runs its cells one after the other instead of all at once.
    """
    # closures would hide the arrays of the cell from shard_map
    arrays, rest = eqx.partition((cell, shared), eqx.is_array)

    def run(arrays: PyTree, inputs: PyTree) -> Results:
        cell, shared = eqx.combine(arrays, rest)
        if one_by_one:
            return jax.lax.map(lambda own: cell(shared, own), inputs)
        return jax.vmap(cell, in_axes=(None, 0))(shared, inputs)

    if mesh is not None:
        along = PartitionSpec(SWEEP)
        run = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(PartitionSpec(), along),
            out_specs=along,
            axis_names={SWEEP},
            check_vma=False,
        )
    return run(arrays, inputs)


def compile_batched(cell: Cell, shared: PyTree, inputs: PyTree, mesh: Mesh | None) -> Compiled:
    """Return the compiled program for inputs of these shapes, as a function of the arrays of (cell, shared, inputs).

    It is compiled ahead of time and can run on these shapes only, so a group of cells costs one compilation. Programs
    are kept, and a later sweep with the same settings and shapes uses them again.
    """
    arrays, rest = eqx.partition((cell, shared, inputs), eqx.is_array)
    shapes = jax.tree.map(lambda u: jax.ShapeDtypeStruct(u.shape, u.dtype, sharding=u.sharding), arrays)
    return _compile(rest, shapes, mesh)


@kept_by_shape
def _compile(rest: PyTree, shapes: PyTree, mesh: Mesh | None) -> Compiled:
    """Compile the program for the given static parts and shapes."""

    def run(arrays: PyTree, one_by_one: bool) -> Results:
        cell, shared, inputs = eqx.combine(arrays, rest)
        return batched(cell, shared, inputs, mesh, one_by_one=one_by_one)

    program = jax.jit(run, static_argnums=1)
    lowered = program.lower(shapes, False)
    first, *others = jax.devices()[:1] if mesh is None else mesh.devices.ravel()
    # On the CPU, LAPACK hands many matrices to the pool of threads that it is called from, and waits. When all threads
    # of the pool wait like that, as happens with several calls or several devices, the program stands still for ever
    # (jax 0.10). Cells that run one after the other hand over one matrix at a time, and nobody waits.
    if first.platform == "cpu" and lowered.as_text().count("@lapack_") > (not others):
        lowered = program.lower(shapes, True)
    return lowered.compile()


def output_shapes(cell: Cell, shared: PyTree, inputs: PyTree) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of one cell's results, without computing."""
    one = jax.tree.map(lambda u: jax.ShapeDtypeStruct(u.shape[1:], u.dtype), inputs)
    return eqx.filter_eval_shape(cell, shared, one)


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

    >>> Execution(chunk=64).waste
    0.15
    """

    chunk: Count | None = None
    waste: Annotated[float, number(low=0.0, below=1.0)] = 0.15
    mesh: Annotated[Mesh | tuple[int | None, int], devices.mesh_shape] | None = None
    progress: Progress = None


_boundary.declare(Execution, instance(Execution, hint="for instance sweeps.Execution(chunk=64)"))


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan(abc.ABC):
    """Cells, how they are grouped, and how they are run. A plan never changes, and computes nothing before ``run``.

    Attributes:
        grid: the named axes.
        groups: cells that share a compiled program.
        shared: pytree that every cell gets.
        execution: how it is run.
        request: the configuration tables this plan was built from, kept in the store for ``meanflow resume``.
    """

    grid: Grid
    groups: tuple[Group, ...]
    shared: PyTree
    execution: Execution
    request: Json | None = None

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Cells that are run and stored together, on the devices of this process."""
        # enough particles to hide the cost of a step, few enough to store often
        particles = 2**15 if jax.default_backend() == "cpu" else 2**20
        lengths = grids.lengths(self.groups, self.execution.chunk, particles, jax.device_count())
        return grids.cut(self.groups, lengths)

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
        return batched(self.cell(group), shared, inputs, mesh)

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
        groups = {f"{number:03d}": _describe_group(self.grid, g) for number, g in enumerate(self.groups)}
        layout = {
            "axes": {name: results.axis_labels(values) for name, values in self.grid.axes.items()},
            "chunks": _listed(self.chunks),
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

        Every process calls this with the same arguments; the store is opened by process 0 alone.

        Args:
            store: run directory, or None to keep nothing.
        """
        with devices.INTERRUPTS.held(), contextlib.ExitStack() as stack:
            mesh, config = together(lambda: (devices.find_mesh(self.execution.mesh), self._checked_config()))
            opened: list[Store] = []

            def begin() -> np.ndarray:
                if store is None or not is_lead():
                    return np.array([piece.length for piece in _firsts(self.chunks)])
                opened.append(stack.enter_context(Store(store, config)))
                return _stored_lengths(self, opened[0])

            # the chunks of an earlier run are kept, whatever this platform would choose
            chunks = grids.cut(self.groups, share(together(begin)).tolist())
            kept = opened[0] if opened else None
            arrays = together(lambda: _Pass(self, chunks, kept, mesh)).all_chunks()
        return results.assemble(self.grid, chunks, arrays, config)

    def _checked_config(self) -> Json:
        self.check()
        return self.config()


def _firsts(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return the first chunk of each group."""
    return list({chunk.group: chunk for chunk in reversed(chunks)}.values())[::-1]


def _listed(chunks: Sequence[Chunk]) -> Json:
    return {c.name: {"group": c.group, "length": c.length, "cells": list(c.cells)} for c in chunks}


def _stored_lengths(plan: Plan, store: Store) -> np.ndarray:
    """Return the cells per chunk of each group: as stored, but ``chunk`` decides where nothing is finished yet."""
    old = store.config["layout"]["chunks"]
    lengths = np.zeros(len(plan.groups), np.int64)
    for planned in old.values():
        lengths[planned["group"]] = planned["length"]
    there = {name: planned["cells"] for name, planned in old.items()}
    expected = {c.name: list(c.cells) for c in grids.cut(plan.groups, np.maximum(lengths, 1).tolist())}
    strange = next((name for name in {**there, **expected} if there.get(name) != expected.get(name)), None)
    if strange is not None:
        raise StoreError(
            f"store {store.path} divides the grid into other chunks; use another directory. The first that differs: "
            f"{strange}: {there.get(strange)} in the store, {expected.get(strange)} now"
        )
    if plan.execution.chunk is None:
        return lengths
    wanted = np.array([piece.length for piece in _firsts(plan.chunks)])
    begun = np.isin(np.arange(len(lengths)), [old[name]["group"] for name in store.finished() if name in old])
    if begun.all() and not np.array_equal(lengths, wanted):
        raise StoreError(
            f"store {store.path} was written in chunks of {sorted(set(lengths.tolist()))} cells; "
            f"leave chunk out to go on with them, got chunk={plan.execution.chunk}"
        )
    new = np.where(begun, lengths, wanted)
    if not np.array_equal(lengths, new):
        chunks = _listed(grids.cut(plan.groups, new.tolist()))
        store.set_layout(store.config["layout"] | {"chunks": chunks})
    return new


class _Pass:
    """One pass over the chunks of a plan.

    Args:
        plan: what to run.
        chunks: its division into chunks.
        store: where finished chunks are, on process 0.
        mesh: the devices.
    """

    def __init__(self, plan: Plan, chunks: Sequence[Chunk], store: Store | None, mesh: Mesh | None) -> None:
        self.plan, self.chunks, self.store, self.mesh = plan, chunks, store, mesh
        self.shared = devices.replicate(plan.shared, mesh)
        self.programs: dict[int, tuple[Compiled, Cell]] = {}
        self.results: dict[str, Arrays] = {}

    def all_chunks(self) -> dict[str, Arrays]:
        """Read the chunks that are in the store, compute and store the others; return their arrays by name."""
        there = together(lambda: set() if self.store is None else self.store.finished())
        finished = share(np.array([c.name in there for c in self.chunks], bool))
        total = self.plan.grid.size
        left = sum(len(c.cells) for c, done in zip(self.chunks, finished, strict=True) if not done)
        ahead: list[tuple[Chunk, Results]] = []
        with _reporter(self.plan.execution.progress, total, total - left) as report:
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
        program, arrays = together(lambda: self._prepare(chunk))
        return program(arrays)

    def _prepare(self, chunk: Chunk) -> tuple[Compiled, PyTree]:
        """Return the program of a chunk and the arrays that it takes, on the devices."""
        group, shape = self.plan.groups[chunk.group], {} if self.mesh is None else self.mesh.shape
        # the last chunk is filled up with its first cell to the length that the program is compiled for
        filling = grids.round_up(chunk.length, shape.get(SWEEP, 1)) - len(chunk.cells)
        cells = [*chunk.cells, *[chunk.cells[0]] * filling]
        inputs = devices.place(self.plan.inputs(group, cells, shape.get(PARTICLES, 1)), self.mesh)
        if chunk.group not in self.programs:
            cell = devices.replicate(self.plan.cell(group), self.mesh)
            compiled = compile_batched(cell, self.shared, inputs, self.mesh)
            _check_memory(compiled, group, chunk, self.mesh)
            self.programs[chunk.group] = compiled, cell
        compiled, cell = self.programs[chunk.group]
        return compiled, eqx.filter((cell, self.shared, inputs), eqx.is_array)

    def _keep(self, chunk: Chunk, running: Results, report: Callable[[int], None] | None = None) -> None:
        """Wait for the results of a chunk, store and report them."""
        out = devices.gather(running)
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
            # another process reads them; JAX wants to know the shapes of what it sends
            group = self.plan.groups[chunk.group]
            one = self.plan.inputs(group, chunk.cells[:1])
            shapes = output_shapes(self.plan.cell(group), self.plan.shared, one)
            return {name: np.zeros((len(chunk.cells), *s.shape), s.dtype) for name, s in shapes.items()}

        return share(together(work))


def _check_memory(compiled: Compiled, group: Group, chunk: Chunk, mesh: Mesh | None) -> None:
    """Refuse a chunk whose compiled program needs more memory than there is, before it runs."""
    usage = compiled.memory_analysis()
    if usage is None:
        return
    # one chunk runs while another waits or is collected
    held = 2 * (usage.argument_size_in_bytes + usage.output_size_in_bytes)
    here = jax.local_devices()[:1] if mesh is None else mesh.local_devices
    # simulated devices of one host share its memory
    sharing = len(here) if here[0].platform == "cpu" else 1
    check_fit((usage.temp_size_in_bytes + held) * sharing, devices.free_memory(here[0]), group, chunk)


def check_fit(needed: int, free: int | None, group: Group, chunk: Chunk) -> None:
    """Raise ValueError with a chunk size that fits, if ``needed`` bytes exceed the allowed share of ``free`` bytes."""
    if free is None or needed <= MEMORY_SHARE * free:
        return
    fits = int(chunk.length * MEMORY_SHARE * free / needed)
    advice = f"pass chunk={fits}" if fits else "one cell is too large for this device; spread it over a mesh"
    raise ValueError(
        f"a chunk of {chunk.length} cells with {group.size} particles each needs {needed / 2**30:.3g} GiB, "
        f"{free / 2**30:.3g} GiB are free; {advice}"
    )


@contextlib.contextmanager
def _reporter(progress: Progress, total: int, done: int) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the number of cells just finished: it moves a bar, calls back, or does nothing."""
    wanted = sys.stderr.isatty() if progress is None else bool(progress)
    if not wanted or not is_lead():
        yield lambda count: None
        return
    finished, start = [done], time.perf_counter()
    if callable(progress):

        def tell(count: int) -> None:
            finished.append(finished[-1] + count)
            progress(finished[-1], total)

        yield tell
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

        def advance(count: int) -> None:
            finished.append(finished[-1] + count)
            rate = (finished[-1] - done) / (time.perf_counter() - start)
            bar.update(task, advance=count, rate=f"{rate:.3g} cells/s")

        yield advance


@checked
def load(store: FilePath) -> "xarray.Dataset":
    """Return the data set of a run directory, as far as it is finished; missing cells are NaN (-1 for integers).

    Reading needs no lock: a directory can be loaded while a sweep writes there.

    Args:
        store: the run directory.

    Raises:
        ValueError: if this is no run directory, or one that is damaged; the message says what to do.
    """
    config = read_config(store)
    try:
        layout = config["layout"]
        grid = Grid({name: tuple(values) for name, values in layout["axes"].items()})
        chunks = [
            Chunk(planned["group"], tuple(planned["cells"]), planned["length"], name)
            for name, planned in layout["chunks"].items()
        ]
        there = finished_chunks(store)
        arrays = {c.name: read_chunk(store, c.name, config) for c in chunks if c.name in there}
        return results.assemble(grid, chunks, arrays, config)
    except (KeyError, TypeError, AttributeError, IndexError) as problem:
        raise StoreError(
            f"store {store} has a config.json that this package did not write: {type(problem).__name__}: {problem}"
        ) from problem


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


def _describe_group(grid: Grid, group: Group) -> Json:
    """Return size, widths and cells of a group in a form that shows a reader what differs."""
    cells = {"cells": f"{len(group.cells)}:{json_digest(group.cells)}"}
    if "width" not in grid.axes:
        return cells
    return {"size": group.size, "widths": sorted({grid.at(cell)["width"] for cell in group.cells})} | cells
