"""The grid of a sweep and its results: named axes, groups of cells, chunks; and the labelled data set over the grid."""

import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import equinox as eqx
import jax
import numpy as np

from meanflow._identity import Json, digest
from meanflow.solvers._solution import code_numbers

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
        return tuple(len(values) for values in self.axes.values())

    @property
    def size(self) -> int:
        """The number of cells."""
        return int(np.prod(self.shape, dtype=np.int64))

    def places(self, cell: int) -> dict[str, int]:
        """Return the position of a cell along each axis.

        >>> Grid({"width": (64, 128), "seed": (0, 1, 2)}).places(4)
        {'width': 1, 'seed': 1}
        """
        return {name: int(k) for name, k in zip(self.axes, np.unravel_index(cell, self.shape), strict=True)}

    def at(self, cell: int) -> dict[str, Value]:
        """Return the value of each axis at a cell."""
        return {name: self.axes[name][k] for name, k in self.places(cell).items()}

    def one_each(self, names: Iterable[str]) -> tuple[list[int], np.ndarray]:
        """Return one cell for each combination of values along some axes, and the number of its one for every cell.

        >>> Grid({"width": (64, 128), "seed": (0, 1)}).one_each(["seed"])
        ([0, 1], array([0, 1, 0, 1]))
        """
        along = dict(zip(self.axes, np.unravel_index(np.arange(self.size), self.shape), strict=True))
        table = np.stack([np.zeros(self.size, int), *(along[name] for name in names)])
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


def padding_waste(groups: Sequence[Group], grid: Grid) -> float:
    """Return (padded - real)/padded over all cells, with padded the stored and real the true number of particles."""
    padded = sum(group.size * len(group.cells) for group in groups)
    real = sum(grid.at(cell)["width"] for group in groups for cell in group.cells)
    return (padded - real) / padded


def make_groups(grid: Grid, kinds: Sequence[int], waste: float = 0.15) -> tuple[Group, ...]:
    """Divide the cells by width group and by the program that they need.

    Args:
        grid: the grid.
        kinds: for each cell the number of the kind of program that runs it.
        waste: allowed share of padding, as in ``group_widths``.
    """
    sizes = (
        {w: max(some) for some in group_widths(grid.axes["width"], waste) for w in some}
        if "width" in grid.axes
        else {}
    )
    # neighbouring cells share draws
    order = sorted(grid.axes, key=lambda name: name not in ("width", "seed"))
    found: dict[tuple[int, int], list[tuple[list[int], int]]] = {}
    for cell in range(grid.size):
        places = grid.places(cell)
        size = sizes[grid.axes["width"][places["width"]]] if sizes else 0
        found.setdefault((size, kinds[cell]), []).append(([places[name] for name in order], cell))
    return tuple(
        Group(size, tuple(cell for _, cell in sorted(cells))) for (size, _), cells in sorted(found.items())
    )


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


def lengths_of(chunks: Iterable[Chunk]) -> np.ndarray:
    """Return the length of the chunks of each group, in the order of the groups."""
    found = {chunk.group: chunk.length for chunk in chunks}
    return np.array([found[number] for number in sorted(found)])


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
    """
    import xarray

    layout, run = config["layout"], config["run"]
    along, labelled = layout["along"], dict(layout["coords"])
    outer = [SHOWN.get(name, name) for name in grid.axes]
    coords = dict(zip(outer, map(axis_labels, grid.axes.values()), strict=True))
    there = [c for c in chunks if c.name in results]
    variables = {}
    for name in dict.fromkeys(name for c in there for name in results[c.name]):
        whole = _join(grid, [(c, results[c.name][name]) for c in there])
        about = _described(name, layout["variables"])
        dims = [*outer, *_dims(name, whole.ndim - len(outer), along, about)]
        variables[name] = (dims, whole, _attributes(name, about))
        labelled |= {along["name"]: along["values"]} if along else {}
        coords |= {d: labelled[d] for d in dims if d in labelled}
    found = xarray.Dataset(variables, coords)
    for name in coords:
        found[name].attrs = {"long_name": AXES.get(name, name), "units": "1"}
    if along and along["name"] in coords:
        found[along["name"]].attrs["units"] = along["units"]
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


def _attributes(name: str, about: Json) -> Json:
    """Return units and description of a variable."""
    if name not in PLAIN:
        return {"units": about.get("units", "1"), "long_name": about.get("about") or name}
    attributes: Json = {"long_name": PLAIN[name], "units": "1"}
    if name == "result":
        codes = code_numbers()
        attributes |= {"flag_values": list(codes.values()), "flag_meanings": " ".join(codes)}
    return attributes


def _described(name: str, variables: Mapping[str, Json]) -> Json:
    """Return the description of a variable; the parts of an observable that is a dict share its description."""
    parent = next((known for known in variables if name == known or name.startswith(f"{known}_")), name)
    return variables.get(name, variables.get(parent, {}))


def _dims(name: str, extra: int, along: Json | None, about: Json) -> list[str]:
    """Return the names of the axes behind those of the grid: the save axis first, then the observable's own."""
    lead = [along["name"]] if extra and along and about.get("series", True) else []
    rest, given = extra - len(lead), about.get("dims", [])
    # the last names stand for axes that not every model has, such as the outputs of a network
    return lead + (given[:rest] if len(given) >= rest else [f"{name}_{k}" for k in range(rest)])


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
