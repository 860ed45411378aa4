"""The grid of a sweep and its results: named axes, groups of cells, chunks; and the labelled data set over the grid."""

import inspect
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import equinox as eqx
import jax
import numpy as np
from numpy.typing import ArrayLike

from meanflow._boundary import FilePath, checked
from meanflow._identity import Json, digest
from meanflow.solvers._solution import code_numbers
from meanflow.sweeps import _store as stores
from meanflow.sweeps._devices import host_memory
from meanflow.sweeps._store import StoreError

if TYPE_CHECKING:  # slow to import
    import xarray

Value: TypeAlias = Any  # of an axis: a number, a name, or any object that a model, law or solver takes

PLAIN = {  # what every sweep records
    "t": "time on the clock of the run",
    "energy": "loss plus penalty",
    "steps": "number of solver steps",
    "accepted_steps": "number of accepted steps",
    "rejected_steps": "number of rejected steps",
    "result": "result code; 0 is success",
}
AXES = {
    "width": "number of neurons",
    "delta": "balance of the neurons",
    "scale": "factor of the initial amplitudes",
    "seed": "number of the random draw",
    "step": "steps done",
    "step_size": "step size",
    "time": "time on the clock of the run",
    "sample": "input of the sample, or its number",
    "x": "input",
}
SHOWN = {"step": "step_size"}  # "step" is the axis of saves
STEADY = code_numbers()["event_occurred"]  # of a run that was asked to stop in a steady state, and did


@dataclass(frozen=True)
class Grid:
    """The product of named axes; a cell is an integer below ``size``, its values are ``at(cell)``.

    Attributes:
        axes: values of each axis in order, for instance ``{"width": (64, 128), "delta": (-1.0, 1.0), "seed": (0, 1)}``.

    >>> grid = Grid({"width": (64, 128), "seed": (0, 1, 2)})
    >>> grid.shape, grid.at(4)
    ((2, 3), {'width': 128, 'seed': 1})
    """

    axes: dict[str, tuple[Value, ...]]

    @property
    def shape(self) -> tuple[int, ...]:
        """The length of each axis."""
        return tuple(map(len, self.axes.values()))

    @property
    def size(self) -> int:
        """The number of cells."""
        return math.prod(self.shape)

    def places(self, cells: int | np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Return the positions of some cells along each axis; default of all cells.

        >>> Grid({"width": (64, 128), "seed": (0, 1, 2)}).places()["seed"]
        array([0, 1, 2, 0, 1, 2])
        """
        found = np.unravel_index(np.arange(self.size) if cells is None else cells, self.shape)
        return dict(zip(self.axes, found, strict=True))

    def at(self, cell: int) -> dict[str, Value]:
        """Return the value of each axis at a cell."""
        return {name: self.axes[name][k] for name, k in self.places(cell).items()}

    def one_each(self, names: Iterable[str]) -> tuple[list[int], np.ndarray]:
        """Return one cell for each combination of values along some axes, and the number of its one for every cell.

        >>> Grid({"width": (64, 128), "seed": (0, 1)}).one_each(["seed"])
        ([0, 1], array([0, 1, 0, 1]))
        """
        table = np.stack([np.zeros(self.size, int), *map(self.places().__getitem__, names)])
        _, first, which = np.unique(table, axis=1, return_index=True, return_inverse=True)
        return first.tolist(), which.ravel()

    def find(self, **values: Value) -> int:
        """Return the cell with these values; axes of length 1 may be left out."""
        unknown = set(values) - set(self.axes)
        if unknown:
            raise ValueError(f"cell must name axes among {list(self.axes)}, got {sorted(unknown)}")
        places = []
        for name, along in self.axes.items():
            if name not in values and len(along) == 1:
                places.append(0)
                continue
            if values.get(name) not in along:
                raise ValueError(f"{name} must be one of {list(along)}, got {values.get(name)!r}")
            places.append(along.index(values[name]))
        return int(np.ravel_multi_index(places, self.shape))


@dataclass(frozen=True)
class Group:
    """Cells that share one compiled program.

    Attributes:
        size: number of stored particles of each cloud, padding included (0 where there are no clouds).
        cells: the cells, in the order in which they are run.
    """

    size: int
    cells: tuple[int, ...]


@dataclass(frozen=True)
class Chunk:
    """Cells that run together.

    Attributes:
        group: number of their group.
        cells: the cells, in the order of the results.
        length: number of cells that the program of the group is compiled for; the last chunk may have fewer.
        name: name of the chunk's file in a store.
    """

    group: int
    cells: tuple[int, ...]
    length: int
    name: str


def group_widths(widths: Iterable[int], waste: float = 0.15) -> list[tuple[int, ...]]:
    """Split widths into the fewest groups whose padding stays below a share of the whole.

    Every cloud of a group is stored at the size of its widest. With padded the sum of stored and real the sum of true
    widths, (padded - real)/padded <= waste. Among partitions into the fewest groups the one with the least padding is
    taken. A dynamic programme, O(number of widths^3).

    Args:
        widths: distinct widths >= 1, in any order.
        waste: allowed share in [0, 1).

    >>> group_widths([64, 128, 256, 512, 1024, 2048, 4096, 8192])
    [(64, 128, 256, 512), (1024, 2048), (4096,), (8192,)]
    >>> group_widths([100, 101, 102], waste=0.0)
    [(100,), (101,), (102,)]
    """
    order = sorted(widths)
    count, real = len(order), sum(order)
    # least[k] = (stored particles, starts of groups) for the first k widths; one more group per round
    least: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    while True:
        longer: dict[int, tuple[int, tuple[int, ...]]] = {}
        for start, (stored, starts) in least.items():
            for end in range(start + 1, count + 1):
                option = (stored + order[end - 1] * (end - start), (*starts, start))
                longer[end] = min(longer.get(end, option), option)
        least = longer
        # one group for each width wastes nothing, so that this comes to an end
        padded, starts = least[count]
        if padded - real <= waste * padded:
            return [tuple(order[a:b]) for a, b in zip(starts, (*starts[1:], count), strict=True)]


def make_groups(grid: Grid, kinds: ArrayLike, waste: float = 0.15) -> tuple[Group, ...]:
    """Divide the cells by width group and by the program that they need.

    Args:
        grid: the grid.
        kinds: for each cell the number of the kind of program that runs it.
        waste: allowed share of padding, as in ``group_widths``.
    """
    places, kinds, sizes = grid.places(), np.asarray(kinds), np.zeros(grid.size, int)
    if "width" in grid.axes:
        stored = {w: max(some) for some in group_widths(grid.axes["width"], waste) for w in some}
        sizes = np.array([stored[w] for w in grid.axes["width"]])[places["width"]]
    # the last key decides first; widths and seeds come before other axes, since neighbouring cells share draws
    names = sorted(reversed(places), key=("width", "seed").__contains__)
    order = np.lexsort([*map(places.__getitem__, names), kinds, sizes])
    ends = np.flatnonzero((np.diff(sizes[order]) != 0) | (np.diff(kinds[order]) != 0)) + 1
    return tuple([Group(int(sizes[some[0]]), tuple(some.tolist())) for some in np.split(order, ends)])


def lengths(groups: Sequence[Group], chunk: int | None, particles: int, devices: int = 1) -> list[int]:
    """Return how many cells of each group run at once.

    Args:
        groups: the groups.
        chunk: the most cells of a chunk; None for about ``particles`` particles on each device, in a multiple of
            ``devices`` cells, so that none of them is idle.
        particles: particles of a chunk on each device.
        devices: number of devices.
    """
    found = []
    for group in groups:
        count = len(group.cells)
        if chunk is not None:
            found.append(-(-count // -(-count // chunk)))  # equal pieces: the last chunk has less filling
            continue
        most = devices * max(1, particles // max(group.size, 1))
        # the last chunk is filled up to the length of the others, and filling runs like any other cell
        options = range(round_up(most // 2 + 1, devices), most + 1, devices)
        found.append(count if count <= most else min(options, key=lambda k: (round_up(count, k), -k)))
    return found


def cut(groups: Sequence[Group], lengths: Sequence[int]) -> tuple[Chunk, ...]:
    """Cut each group into chunks of its given length.

    The largest networks come first: they need most memory, and workers that share the chunks end at about the same time
    if the long ones are not left to the end.
    """
    found = [
        Chunk(number, group.cells[k : k + length], length, f"{number:03d}-{k // length:05d}")
        for number, (group, length) in enumerate(zip(groups, lengths, strict=True))
        for k in range(0, len(group.cells), length)
    ]
    return tuple(sorted(found, key=lambda chunk: -groups[chunk.group].size))


def axis_values(axes: Mapping[str, Iterable[Value]]) -> dict[str, tuple[Value, ...]]:
    """Check named axes, each a non-empty sequence of distinct values, and return them with Python's own numbers."""
    checked = {}
    for name, values in axes.items():
        if not str(name).isidentifier():
            raise ValueError(f"axes must have names that are Python identifiers, got {name!r}")
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise ValueError(f"{name} must be a sequence of values, got {values!r}")
        plain = tuple(v.item() if isinstance(v, np.generic) or hasattr(v, "item") else v for v in values)
        if not plain:
            raise ValueError(f"{name} must hold at least one value, got none")
        if any(isinstance(v, float) and np.isnan(v) for v in plain):
            raise ValueError(f"{name} must not hold NaN, got {plain}")
        try:
            distinct = len(set(plain)) == len(plain)
        except TypeError:  # flows, laws and the like have no hash
            distinct = not any(plain[i] == plain[j] for i in range(len(plain)) for j in range(i))
        if not distinct:
            raise ValueError(f"{name} must hold distinct values, got {plain}")
        checked[str(name)] = plain
    return checked


def is_numeric(values: Sequence[Value]) -> bool:
    """Say whether an axis holds numbers only."""
    return all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def assemble(
    grid: Grid, chunks: Sequence[Chunk], results: Mapping[str, Mapping[str, np.ndarray]], config: Json
) -> "xarray.Dataset":
    """Return one data set with the results of all chunks that are there; missing cells are NaN (-1 for integers).

    Args:
        grid: the grid of the sweep.
        chunks: its chunks.
        results: arrays of each chunk by name.
        config: JSON-ready, as in a store. Its ``"layout"`` holds ``along`` (name, values, units of the save axis),
            ``variables`` (dims, units and description of each), ``coords`` (values along further axes).

    Raises:
        ValueError: if the data set does not fit into memory; a few small chunks may be all that is there yet.
    """
    import xarray

    layout, run = config["layout"], config["run"]
    along = layout["along"] or {}
    labels = layout["coords"] | ({along["name"]: along["values"]} if along else {})
    outer = [SHOWN.get(name, name) for name in grid.axes]
    coords = dict(zip(outer, map(axis_labels, grid.axes.values()), strict=True))
    parts: dict[str, list[tuple[Chunk, np.ndarray]]] = {}
    for chunk in chunks:
        for name, array in results.get(chunk.name, {}).items():
            parts.setdefault(name, []).append((chunk, array))
    needed, free = grid.size * sum([max([a[:1].nbytes for _, a in p]) for p in parts.values()]), host_memory()
    if free is not None and needed > free:
        raise ValueError(
            f"the data set needs {needed / 2**30:.3g} GiB, {free / 2**30:.3g} GiB are free; record less, or less often"
        )
    variables = {}
    for name, some in parts.items():
        whole = _join(grid, some)
        dims, attributes = _described(name, whole.ndim - len(outer), layout["variables"], along.get("name"))
        variables[name] = ([*outer, *dims], whole, attributes)
        coords |= {d: labels[d] for d in dims if d in labels}
    found = xarray.Dataset(variables, coords)
    for name in coords:
        units = along["units"] if name == along.get("name") else "1"
        found[name].attrs = {"long_name": AXES.get(name, name), "units": units}
    return found.assign_attrs(
        title="meanflow sweep",
        versions=json.dumps(config["versions"]),
        source=config["source"],
        run=json.dumps(run),
        data_hash=digest(json.dumps(run["data"]).encode()) if "data" in run else "",
        key=json.dumps(run.get("key")),
    )


def _join(grid: Grid, parts: Sequence[tuple[Chunk, np.ndarray]]) -> np.ndarray:
    """Return one variable over the whole grid from its values in some chunks."""
    tails = np.array([part.shape[1:] for _, part in parts])
    empty = {"f": np.nan, "b": False}.get(parts[0][1].dtype.kind, -1)
    full = np.full((grid.size, *tails.max(0).astype(int)), empty, parts[0][1].dtype)
    for chunk, part in parts:
        # narrower groups leave the rest empty
        window = full[(slice(None), *map(slice, part.shape[1:]))]
        window[np.array(chunk.cells)] = part
    return full.reshape(*grid.shape, *full.shape[1:])


def _described(
    name: str, extra: int, variables: Mapping[str, Json], along: str | None
) -> tuple[list[str], Json]:
    """Return the names of the axes of a variable behind those of the grid, and its units and description.

    The save axis comes first. The parts of an observable that is a dict share its description.
    """
    parent = next((known for known in variables if f"{name}_".startswith(f"{known}_")), name)
    about = variables.get(name, variables.get(parent, {}))
    lead = [along] if extra and along and about.get("series", True) else []
    rest, given = extra - len(lead), about.get("dims", [])
    # the last names stand for axes that not every model has, such as the outputs of a network
    dims = lead + (given[:rest] if len(given) >= rest else [f"{name}_{k}" for k in range(rest)])
    title = PLAIN.get(name) or about.get("about") or name
    attributes: Json = {"units": about.get("units", "1"), "long_name": title}
    if name == "result":
        codes = code_numbers()
        attributes |= {"flag_values": list(codes.values()), "flag_meanings": " ".join(codes)}
    return dims, attributes


@checked
def load(store: FilePath) -> "xarray.Dataset":
    """Return the data set of a run directory, as far as it is finished; missing cells are NaN (-1 for integers).

    Reading needs no claim: a directory can be loaded while others write there.

    Args:
        store: the run directory.

    Raises:
        ValueError: if this is no run directory, or one that is damaged; the message says what to do.
    """
    config = stores.read_config(store)
    try:
        layout, there = config["layout"], stores.finished_chunks(store)
        grid = Grid({name: tuple(values) for name, values in layout["axes"].items()})
        chunks = [
            Chunk(planned["group"], tuple(planned["cells"]), planned["length"], name)
            for name, planned in layout["chunks"].items()
        ]
        if sorted([cell for c in chunks for cell in c.cells]) != list(range(grid.size)):
            count = sum([len(c.cells) for c in chunks])
            raise StoreError(f"{store} must hold each of {grid.size} cells in one chunk, got {count} cells")
        arrays = {c.name: stores.read_chunk(store, c.name, config) for c in chunks if c.name in there}
        return assemble(grid, chunks, arrays, config)
    except (KeyError, TypeError, AttributeError, IndexError) as problem:
        raise StoreError(
            f"store {store} has a config.json that this package did not write: {type(problem).__name__}: {problem}"
        ) from problem


def axis_labels(values: Sequence[Value]) -> list[float | str]:
    """Return numbers as they are, anything else as short text that is the same in every process and always distinct.

    >>> axis_labels(["lazy", "gradient"])
    ['lazy', 'gradient']
    """
    if is_numeric(values):
        return list(values)
    texts = [_label(v) for v in values]
    return [t if texts.count(t) == 1 else f"{t}#{k}" for k, t in enumerate(texts)]


def _label(value: Value) -> str:
    """Return for instance ``KernelStep(kappa=0.1)``; without readable fields a name. Defaults are left out."""
    if isinstance(value, str | bool | int | float):
        return str(value)
    if isinstance(value, eqx.Module):
        usual = {n: p.default for n, p in inspect.signature(type(value)).parameters.items()}
        shown = {n: getattr(value, n, None) for n in value.__dataclass_fields__}
        plain = [
            f"{n}={np.asarray(v).item()}"
            for n, v in shown.items()
            # keys of random numbers are arrays too
            if (isinstance(v, int | float | str) or _is_number(v)) and usual.get(n) is not v
        ]
        return f"{type(value).__name__}({', '.join(plain)})"
    return str(getattr(value, "__qualname__", type(value).__name__))


def _is_number(value: object) -> bool:
    return isinstance(value, jax.Array) and value.size == 1 and isinstance(value.dtype, np.dtype)


def final(runs: "xarray.Dataset", name: str) -> "xarray.DataArray":
    """Return the last save of a variable of a sweep; of a run that stopped in a steady state, the last before it did.

    Args:
        runs: a data set of ``sweep``.
        name: the variable.
    """
    value = runs[name]
    along = next((d for d in ("time", "step") if d in value.dims), None)
    if along is None:
        return value
    last = value.isel({along: -1}, drop=True)
    if "result" not in runs or "t" not in runs or along not in runs.t.dims:
        return last
    saved = np.isfinite(runs.t).sum(along) - 1
    stopped = (runs.result == STEADY) & (saved >= 0)
    return value.isel({along: saved.clip(0)}, drop=True).where(stopped, last).assign_attrs(value.attrs)


def failed(runs: "xarray.Dataset") -> "xarray.DataArray":
    """Say of each run of a sweep whether it ended in a failure; those that have not been run did not."""
    return (runs.result != 0) & (runs.result != STEADY) & (runs.result != -1)
