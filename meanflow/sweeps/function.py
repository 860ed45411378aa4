"""``sweep_function``: any function of a key over a grid, on the machinery of ``sweep``."""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from meanflow import _checks
from meanflow.sweeps import grid as grids
from meanflow.sweeps import program
from meanflow.sweeps.grid import Grid, Group
from meanflow.sweeps.identity import describe
from meanflow.sweeps.plan import Plan, numbers


@dataclass(kw_only=True)
class FunctionSweep(Plan):
    """A planned sweep of a user's function."""

    function: Callable[..., Any]
    key: jax.Array
    dims: dict[str, list[str]]

    def cell(self, group: Group) -> program.FunctionCell:
        """The function with the values of the axes that are not traced."""
        return program.FunctionCell(self.function, dict(group.fixed))

    def inputs(self, group: Group, cells: Sequence[int]) -> dict[str, Any]:
        """Keys and axis values."""
        values = [self.grid.at(cell) for cell in cells]
        fixed = dict(group.fixed)
        traced = [name for name in self.grid.axes if name not in fixed and name != "seed"]
        keys = [jax.random.fold_in(self.key, v["seed"]) for v in values]
        return {
            "axes": {name: numbers([v[name] for v in values]) for name in traced},
            "key": np.stack([np.asarray(jax.random.key_data(k)) for k in keys]),
        }

    def identity(self) -> dict[str, Any]:
        """Function, axes and key."""
        return {
            "kind": "function",
            "function": describe(self.function),
            "axes": {name: describe(list(values)) for name, values in self.grid.axes.items()},
            "key": describe(jax.random.key_data(self.key)),
            "precision": str(numbers([0.5]).dtype),
        }

    def layout(self) -> dict[str, Any]:
        """Axes, chunks, and the names the user gave to the axes of the results."""
        variables = {name: {"dims": dims, "series": False} for name, dims in self.dims.items()}
        return super().layout() | {"variables": variables}


def sweep_function(
    function: Callable[..., Any],
    *,
    axes: Mapping[str, Sequence[Any]] | None = None,
    seeds: int | Sequence[int] = 1,
    dims: Mapping[str, Sequence[str]] | None = None,
    key: Any = 0,
    chunk: int | None = None,
    store: str | pathlib.Path | None = None,
    mesh: Mesh | None = None,
    progress: Any = None,
) -> Any:
    """Any function of a PRNG key and named values over a grid: vmapped, chunked, sharded, stored and labelled.

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
    if not callable(function):
        raise ValueError(f"function must be callable, got {type(function).__name__}")
    count = isinstance(seeds, int | np.integer) and not isinstance(seeds, bool)
    named = dict(axes or {}) | {"seed": range(_checks.whole("seeds", seeds, 1)) if count else seeds}
    checked = grids.axis_values(named)
    checked["seed"] = tuple(_checks.whole("seeds", s, 0) for s in checked["seed"])
    grid = Grid(checked)
    static = [name for name, values in checked.items() if not grids.is_traceable(values)]
    key = jax.random.key(key) if isinstance(key, int | np.integer) else key
    return FunctionSweep(
        grid=grid,
        groups=grids.make_groups(grid, static, 0.0, 1, [n for n in checked if n not in static]),
        shared=None,
        chunk=1024 if chunk is None else _checks.whole("chunk", chunk, 1),
        function=function,
        key=key,
        dims={name: list(some) for name, some in (dims or {}).items()},
    ).run(store=store, mesh=mesh, progress=progress)
