"""A planned grid of runs: what is common to sweeps of flows and of users' functions."""

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from meanflow.solvers.solution import versions
from meanflow.sweeps import grid as grids
from meanflow.sweeps import hosts, labels, program, runner
from meanflow.sweeps.grid import Chunk, Grid, Group
from meanflow.sweeps.store import Store, StoreError, finished_chunks, read_chunk, read_config


@dataclass(kw_only=True)
class Plan:
    """Cells, how they are grouped and chunked, and how they are run. Nothing is computed before ``run``.

    Attributes:
        grid: the named axes.
        groups: cells that share a compiled program.
        chunks: cells that are run and stored together.
        shared: pytree that every cell gets.
        chunk: the most cells in a chunk, or None.
        request: the configuration tables this plan was built from, kept in the store for ``meanflow resume``.
        multiple: stored clouds are filled up to a multiple of this (devices along ``particles``).
    """

    grid: Grid
    groups: list[Group]
    shared: Any
    chunk: int | None
    request: dict[str, Any] | None = None
    multiple: int = 1
    chunks: list[Chunk] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chunks = grids.make_chunks(self.groups, self.chunk, _particle_budget(), jax.device_count())

    def cell(self, group: Group) -> Any:
        """The program of one cell of a group."""
        raise NotImplementedError

    def inputs(self, group: Group, cells: Sequence[int]) -> dict[str, Any]:
        """What the program takes for some cells, as host arrays with a leading axis."""
        raise NotImplementedError

    def identity(self) -> dict[str, Any]:
        """JSON-ready description of everything that decides the result."""
        raise NotImplementedError

    def layout(self) -> dict[str, Any]:
        """JSON-ready description of axes, chunks and variables."""
        return {
            "axes": {name: labels.axis_labels(values) for name, values in self.grid.axes.items()},
            "chunks": [[c.name, c.group, c.length, list(c.cells)] for c in self.chunks],
            "along": None,
            "variables": {},
            "coords": {},
        }

    def check(self) -> None:
        """Raises ValueError for what can be seen to be wrong before anything is compiled."""

    def config(self) -> dict[str, Any]:
        """Identity of the run, versions, and layout: the content of ``config.json``."""
        config = {"run": self.identity(), "versions": all_versions(), "layout": self.layout()}
        return config if self.request is None else config | {"request": self.request}

    def run(
        self, *, store: str | pathlib.Path | None = None, mesh: Mesh | None = None, progress: Any = None
    ) -> Any:
        """Runs what is not in the store yet and returns the labelled data set; see ``sweep``."""
        mesh = program.check_mesh(mesh)
        self.multiple = 1 if mesh is None else mesh.shape[program.PARTICLES]
        self.check()
        opened = None if store is None else self._open(store)
        results = runner.run_chunks(
            self, store=opened, stored=store is not None, mesh=mesh, progress=progress
        )
        config = self.config()
        return labels.assemble(self.grid, self.chunks, results, config["layout"], labels.provenance(config))

    def _open(self, store: str | pathlib.Path) -> Store | None:
        """The store on process 0; the chunks of an earlier run are kept, whatever this platform would choose."""
        opened, problem = None, ""
        lengths = np.zeros(len(self.groups), np.int64)
        if hosts.is_lead():
            try:
                opened = Store(store, self.config())
                lengths = self._lengths(opened)
            except StoreError as error:
                problem = str(error)
        problem = hosts.agree(problem)
        if problem:
            raise StoreError(problem)
        self.chunks = grids.cut(self.groups, hosts.share(lengths).tolist())
        return opened

    def _lengths(self, store: Store) -> np.ndarray:
        """Cells per chunk of each group: as stored, but ``chunk`` decides where nothing is finished yet."""
        old = read_config(store.path)["layout"]
        lengths, wanted = np.zeros((2, len(self.groups)), np.int64)
        for _, number, length, _ in old["chunks"]:
            lengths[number] = length
        if self.chunk is None:
            return lengths
        for chunk in self.chunks:
            wanted[chunk.group] = chunk.length
        done = store.finished()
        begun = np.isin(
            np.arange(len(lengths)), [number for name, number, *_ in old["chunks"] if name in done]
        )
        if begun.all() and not np.array_equal(lengths, wanted):
            raise StoreError(
                f"store {store.path} was written in chunks of {sorted(set(lengths.tolist()))} cells; "
                f"leave chunk out to go on with them, got chunk={self.chunk}"
            )
        new = np.where(begun, lengths, wanted)
        if not np.array_equal(lengths, new):
            self.chunks = grids.cut(self.groups, new.tolist())
            store.set_layout(self.layout())
        return new


def load(store: str | pathlib.Path) -> Any:
    """The data set of a run directory, as far as it is finished; missing cells are NaN (result -1)."""
    config = read_config(store)
    layout = config["layout"]
    grid = Grid({name: tuple(values) for name, values in layout["axes"].items()})
    chunks = [Chunk(number, tuple(cells), length, name) for name, number, length, cells in layout["chunks"]]
    there = finished_chunks(store)
    results = {c.name: read_chunk(store, c.name) for c in chunks if c.name in there}
    return labels.assemble(grid, chunks, results, layout, labels.provenance(config))


def all_versions() -> dict[str, str]:
    """Versions of the packages that decide the numbers and the format."""
    import xarray
    import zarr

    return versions() | {"xarray": xarray.__version__, "zarr": zarr.__version__}


def numbers(values: Sequence[Any]) -> np.ndarray:
    """Axis values as an array of the default float or integer type."""
    array = np.asarray(values)
    return array.astype(jnp.result_type(float) if array.dtype.kind == "f" else jnp.result_type(int))


def as_key(key: Any) -> jax.Array:
    """A PRNG key from an integer, a key, or the raw numbers of one."""
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        return jax.random.key(key)
    if isinstance(key, jax.Array) and jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    if isinstance(key, jax.Array | np.ndarray) and key.dtype == np.uint32:
        return jax.random.wrap_key_data(jnp.asarray(key))
    raise ValueError(f"key must be an integer or a PRNG key, got {key!r}")


def _particle_budget() -> int:
    """Particles of a chunk on each device: enough to hide the cost of a step, few enough to store often."""
    return 2**15 if jax.default_backend() == "cpu" else 2**20
