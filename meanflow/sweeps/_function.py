"""``sweep_function``: any function of a key over a grid, on the machinery of ``sweep``."""

import inspect
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, ArrayLike, Key, PyTree, UInt32

from meanflow import _checks
from meanflow._identity import Json, describe
from meanflow.sweeps import _grid as grids
from meanflow.sweeps import _program as program
from meanflow.sweeps._grid import Chunk, Grid, Group, Value
from meanflow.sweeps._plan import AXES, RUN, SEEDS, Plan, any_key, as_key, as_seeds, numbers
from meanflow.sweeps._runner import Progress

if TYPE_CHECKING:  # slow to import
    import xarray


@dataclass(frozen=True, kw_only=True, eq=False)
class FunctionSweep(Plan):
    """A planned sweep of a user's function.

    Attributes:
        function: the function.
        key: key that the key of every seed is made from.
        dims: names of the axes of each result.
    """

    function: Callable[..., PyTree]
    key: Key[Array, ""]
    dims: dict[str, list[str]]

    def cell(self, group: Group) -> program.FunctionCell:
        """Return the function with the values of the axes that are not traced."""
        return program.FunctionCell(self.function, dict(group.fixed))

    def inputs(self, group: Group, cells: Sequence[int], multiple: int = 1) -> PyTree[np.ndarray]:
        """Return keys and axis values of some cells, with a leading axis; there are no clouds to fill up."""
        values = [self.grid.at(cell) for cell in cells]
        fixed = dict(group.fixed)
        traced = [name for name in self.grid.axes if name not in fixed and name != "seed"]
        keys = [jax.random.fold_in(self.key, v["seed"]) for v in values]
        return {
            "axes": {name: numbers([v[name] for v in values]) for name in traced},
            "key": np.stack([np.asarray(jax.random.key_data(k)) for k in keys]),
        }

    def identity(self) -> Json:
        """Return a description of function, axes and key."""
        return {
            "kind": "function",
            "function": describe(self.function),
            "axes": {name: describe(list(values)) for name, values in self.grid.axes.items()},
            "key": jax.random.key_data(self.key).tolist(),
            "precision": str(numbers([0.5]).dtype),
        }

    def check(self) -> None:
        """Refuse results that are called like axes, and wrong names for their own axes, before computing."""
        known: set[str] = set()
        for group in self.groups:
            one = self.inputs(group, group.cells[:1])
            for name, value in program.output_shapes(self.cell(group), None, one).items():
                known.add(name)
                dims = self.dims.get(name, [])
                if name in self.grid.axes or set(dims) & set(self.grid.axes):
                    raise ValueError(
                        f"results and their axes must not be called like an axis of the grid, got {name!r} {dims}"
                    )
                if name in self.dims and len(dims) != len(value.shape):
                    raise ValueError(f"dims[{name!r}] must name {len(value.shape)} axes, got {dims}")
        stray = sorted(set(self.dims) - known)
        if stray:
            raise ValueError(f"dims must name results among {sorted(known)}, got {stray[0]!r}")

    def layout(self, chunks: Sequence[Chunk] | None = None) -> Json:
        """Return axes, chunks, and the names the user gave to the axes of the results."""
        variables = {name: {"dims": dims, "series": False} for name, dims in self.dims.items()}
        return super().layout(chunks) | {"variables": variables}


@_checks.arguments(
    function=_checks.function,
    axes=_checks.optional(AXES),
    seeds=SEEDS,
    dims=_checks.optional(_checks.mapping(_checks.sequence(_checks.text, least=0))),
    key=any_key,
    chunk=_checks.optional(_checks.count(1)),
    **RUN,
)
def sweep_function(
    function: Callable[..., PyTree],
    *,
    axes: Mapping[str, Iterable[Value]] | None = None,
    seeds: int | Sequence[int] = 1,
    dims: Mapping[str, Sequence[str]] | None = None,
    key: int | Key[Array, ""] | UInt32[ArrayLike, "words"] = 0,
    chunk: int | None = None,
    store: str | pathlib.Path | None = None,
    mesh: Mesh | None = None,
    progress: Progress = None,
) -> "xarray.Dataset":
    """Run any function of a PRNG key and named values over a grid: vmapped, chunked, sharded, stored and labelled.

    Args:
        function: (key, **axes) -> array or dict of arrays; it is traced. The key of seed s is the same in all cells.
        axes: values by name; numbers share one program, other values get one program each.
        seeds: number of seeds, or their list.
        dims: names of the axes of each result (``"value"`` for a function that returns one array).
        key, chunk, store, mesh, progress: as in ``sweep``; chunk is 1024 cells by default.

    >>> import jax
    >>> noise = lambda key, sigma: sigma * jax.random.normal(key, (3,))
    >>> ds = sweep_function(noise, axes={"sigma": [1.0, 2.0]}, seeds=4)
    >>> dict(ds.value.sizes)
    {'sigma': 2, 'seed': 4, 'value_0': 3}
    """
    checked = grids.axis_values(dict(axes or {}) | {"seed": as_seeds(seeds)})
    checked["seed"] = tuple(_checks.whole("seeds", s, 0) for s in checked["seed"])
    missing = _missing(function, [name for name in checked if name != "seed"])
    if missing:
        raise ValueError(f"function must take every axis by name, got one that does not take {missing}")
    grid = Grid(checked)
    static = [name for name, values in checked.items() if not grids.is_traceable(values)]
    return FunctionSweep(
        grid=grid,
        groups=grids.make_groups(grid, static, 0.0, 1, [n for n in checked if n not in static]),
        shared=None,
        chunk=1024 if chunk is None else chunk,
        function=function,
        key=as_key(key),
        dims={name: list(some) for name, some in (dims or {}).items()},
    ).run(store=store, mesh=mesh, progress=progress)


def _missing(function: Callable[..., PyTree], names: Sequence[str]) -> list[str]:
    """Return the names that ``function`` has no argument for."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return []
    return [name for name in names if name not in parameters]
