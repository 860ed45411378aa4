"""A planned grid of runs: what is common to sweeps of networks and of users' functions."""

import abc
import pathlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, ArrayLike, Key, PyTree, Shaped, UInt32

from meanflow import _checks
from meanflow._identity import Json, json_digest, source_digest
from meanflow.files import versions
from meanflow.sweeps import _grid as grids
from meanflow.sweeps import _results as results
from meanflow.sweeps import _runner as runner
from meanflow.sweeps._grid import Chunk, Grid, Group
from meanflow.sweeps._program import Cell
from meanflow.sweeps._store import StoreError, finished_chunks, read_chunk, read_config

if TYPE_CHECKING:  # slow to import
    import xarray


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan(abc.ABC):
    """Cells, how they are grouped, and how they are run. A plan never changes, and computes nothing before ``run``.

    Attributes:
        grid: the named axes.
        groups: cells that share a compiled program.
        shared: pytree that every cell gets.
        chunk: the most cells that run at once, or None for what suits the devices.
        request: the configuration tables this plan was built from, kept in the store for ``meanflow resume``.
    """

    grid: Grid
    groups: tuple[Group, ...]
    shared: PyTree
    chunk: int | None
    request: Json | None = None

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Cells that are run and stored together, on the devices of this process."""
        return grids.make_chunks(self.groups, self.chunk, _particle_budget(), jax.device_count())

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

    @abc.abstractmethod
    def identity(self) -> Json:
        """Return a JSON-ready description of everything that decides the numbers."""

    @abc.abstractmethod
    def check(self) -> None:
        """Raise ValueError for what can be seen to be wrong before anything is compiled."""

    def layout(self, chunks: Sequence[Chunk] | None = None) -> Json:
        """Return a JSON-ready description of axes, chunks and variables.

        Args:
            chunks: the division into chunks; default that of the plan.
        """
        chunks = self.chunks if chunks is None else chunks
        return {
            "axes": {name: results.axis_labels(values) for name, values in self.grid.axes.items()},
            "chunks": {
                c.name: {"group": c.group, "length": c.length, "cells": list(c.cells)} for c in chunks
            },
            "along": None,
            "variables": {},
            "coords": {},
        }

    def config(self, chunks: Sequence[Chunk] | None = None) -> Json:
        """Return the content of ``config.json``: identity of the run, versions, and layout.

        The cells of every group are part of the identity: a chunk is stored by its place in its group, so its
        numbers would be taken for those of other cells if the groups changed.
        """
        groups = {f"{number:03d}": _describe_group(self.grid, g) for number, g in enumerate(self.groups)}
        config = {
            "run": self.identity() | {"groups": groups},
            "versions": all_versions(),
            "source": source_digest(),
            "layout": self.layout(chunks),
        }
        return config if self.request is None else config | {"request": self.request}

    def run(
        self,
        *,
        store: str | pathlib.Path | None = None,
        mesh: Mesh | None = None,
        progress: runner.Progress = None,
    ) -> "xarray.Dataset":
        """Run what is not in the store yet and return the labelled data set.

        Args:
            store: run directory, or None to keep nothing.
            mesh: devices, axes ``sweep`` and ``particles``; default all devices along ``sweep``.
            progress: as in ``sweep``.
        """
        chunks, arrays = runner.run_plan(self, store=store, mesh=mesh, progress=progress)
        config = self.config(chunks)
        return results.assemble(self.grid, chunks, arrays, config["layout"], results.provenance(config))


@_checks.arguments(store=_checks.path)
def load(store: str | pathlib.Path) -> "xarray.Dataset":
    """Return the data set of a run directory, as far as it is finished; missing cells are NaN (-1 for integers).

    Reading needs no lock: a directory can be loaded while a sweep writes there.

    Args:
        store: the run directory.

    Raises:
        StoreError: if this is no run directory, or one that is damaged; the message says what to do.
    """
    config = read_config(store)
    try:
        return _load(store, config)
    except (KeyError, TypeError, AttributeError, IndexError) as problem:
        raise StoreError(
            f"store {store} has a config.json that this package did not write: {type(problem).__name__}: {problem}"
        ) from problem


def _load(store: str | pathlib.Path, config: Json) -> "xarray.Dataset":
    """Return the data set of a run directory with this configuration."""
    layout = config["layout"]
    grid = Grid({name: tuple(values) for name, values in layout["axes"].items()})
    chunks = [
        Chunk(planned["group"], tuple(planned["cells"]), planned["length"], name)
        for name, planned in layout["chunks"].items()
    ]
    there = finished_chunks(store)
    arrays = {c.name: read_chunk(store, c.name, config) for c in chunks if c.name in there}
    return results.assemble(grid, chunks, arrays, layout, results.provenance(config))


def all_versions() -> dict[str, str]:
    """Return the versions of the packages that decide the numbers and the format of a store."""
    import xarray
    import zarr

    return versions() | {"xarray": xarray.__version__, "zarr": zarr.__version__}


def numbers(values: Sequence[float]) -> Shaped[np.ndarray, "cells"]:
    """Return axis values as an array of JAX's default float or integer type."""
    array = np.asarray(values)
    return array.astype(jnp.result_type(float) if array.dtype.kind == "f" else jnp.result_type(int))


def as_key(key: int | Key[Array, ""] | UInt32[ArrayLike, "words"]) -> Key[Array, ""]:
    """Return a PRNG key from an integer, a key, or the raw numbers of one."""
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        return jax.random.key(key)
    if isinstance(key, jax.Array) and jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    if isinstance(key, jax.Array | np.ndarray) and key.dtype == np.uint32:
        return jax.random.wrap_key_data(jnp.asarray(key))
    raise ValueError(f"key must be an integer or a PRNG key, got {key!r}")


def any_key(name: str, value: object) -> Key[Array, ""]:
    """Accept a PRNG key, an integer, or the raw numbers of a key; return the key."""
    try:
        found = as_key(value)  # type: ignore[arg-type]
    except (TypeError, OverflowError) as problem:
        raise ValueError(f"{name} must be an integer or a PRNG key, got {_checks.show(value)}") from problem
    return _checks.prng_key(name, found)  # type: ignore[return-value]


MOST_SEEDS = 2**24
SEEDS = _checks.either(_checks.count(1, MOST_SEEDS), _checks.sequence(_checks.count(0, 2**32 - 1)))
FINITE = _checks.sequence(_checks.number(static=True))
NUMBERS = _checks.sequence(_checks.number(infinite=True, static=True))
AXES = _checks.mapping(_checks.sequence(_checks.unchecked("what takes the axis checks its values")))
RUN = {  # how a plan is run
    "store": _checks.optional(_checks.path),
    "mesh": _checks.optional(_checks.instance(Mesh, hint="see sweeps.make_mesh")),
    "progress": _checks.optional(_checks.either(_checks.flag, _checks.function)),
}


def as_seeds(seeds: int | Iterable[int] | jax.Array | np.ndarray) -> Iterable[int]:
    """Return the list of seeds: 0, 1, ... if their number is given."""
    if isinstance(seeds, int | np.integer):
        return list(range(_checks.whole("seeds", seeds, 1)))
    return list(np.asarray(seeds)) if isinstance(seeds, jax.Array | np.ndarray) else seeds


def _describe_group(grid: Grid, group: Group) -> Json:
    """Return size, widths and cells of a group in a form that shows a reader what differs."""
    cells = {"cells": f"{len(group.cells)}:{json_digest(group.cells)}"}
    if "width" not in grid.axes:
        return cells
    return {
        "size": group.size,
        "widths": sorted({grid.at(cell)["width"] for cell in group.cells}),  # type: ignore[type-var]
    } | cells


def _particle_budget() -> int:
    """Return the particles of a chunk on each device: enough to hide the cost of a step, few enough to store often."""
    return 2**15 if jax.default_backend() == "cpu" else 2**20
