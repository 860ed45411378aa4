"""The grid of a sweep: named axes, groups of widths that share one compiled shape, chunks of cells."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Value: TypeAlias = Any  # of an axis: a number, a name, or any object that a model, law or solver takes


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
    """Cut each group into chunks of its given length."""
    return tuple(
        Chunk(number, group.cells[k : k + length], length, f"{number:03d}-{k // length:05d}")
        for number, (group, length) in enumerate(zip(groups, lengths, strict=True))
        for k in range(0, len(group.cells), length)
    )


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
        if any(plain[i] == plain[j] for i in range(len(plain)) for j in range(i)):
            raise ValueError(f"{name} must hold distinct values, got {plain}")
        checked[str(name)] = plain
    return checked


def is_numeric(values: Sequence[Value]) -> bool:
    """Say whether an axis holds numbers only."""
    return all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple
