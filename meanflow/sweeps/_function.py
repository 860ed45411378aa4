"""``sweep_function``: any function of a key over a grid, on the machinery of ``sweep``."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Key, PyTree, UInt32

from meanflow._boundary import FilePath, checked, mapping, sequence, text
from meanflow._identity import Json, describe
from meanflow.sweeps import _grid as grids
from meanflow.sweeps import _plan as plans
from meanflow.sweeps._grid import Grid, Group, Value
from meanflow.sweeps._plan import AXES, Cell, Execution, Plan, Results, Seeds, any_key

if TYPE_CHECKING:  # slow to import
    import xarray


class FunctionCell(Cell):
    """A user's function of a key and named values, as a cell.

    Attributes:
        function: (key, **values) -> array, or dict of arrays.
        fixed: values of the axes that are not traced.
    """

    function: Callable[..., PyTree]
    fixed: dict[str, Value]

    def __call__(self, shared: None, inputs: Mapping[str, PyTree]) -> Results:
        """Return the function's arrays by name; a single array is called ``value``."""
        out = self.function(jax.random.wrap_key_data(inputs["key"]), **self.fixed, **inputs["axes"])
        named = out if isinstance(out, dict) else {"value": out}
        plain = {n: jnp.asarray(u) if isinstance(u, bool | int | float) else u for n, u in named.items()}
        return plans.flatten(plain, what="function")


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

    def cell(self, group: Group) -> FunctionCell:
        """Return the function with the values of the axes that are not traced."""
        values = self.grid.at(group.cells[0])
        return FunctionCell(self.function, {n: v for n, v in values.items() if self._is_fixed(n)})

    def inputs(self, group: Group, cells: Sequence[int], multiple: int = 1) -> PyTree[np.ndarray]:
        """Return keys and axis values of some cells, with a leading axis; there are no clouds to fill up."""
        values = [self.grid.at(cell) for cell in cells]
        traced = [name for name in self.grid.axes if name != "seed" and not self._is_fixed(name)]
        keys = [jax.random.fold_in(self.key, v["seed"]) for v in values]
        return {
            "axes": {name: plans.numbers([v[name] for v in values]) for name in traced},
            "key": np.stack([np.asarray(jax.random.key_data(k)) for k in keys]),
        }

    def _is_fixed(self, name: str) -> bool:
        return not grids.is_numeric(self.grid.axes[name])

    def identity(self) -> Json:
        """Return a description of function, axes and key."""
        return {
            "kind": "function",
            "function": describe(self.function),
            "axes": {name: describe(list(values)) for name, values in self.grid.axes.items()},
            "key": jax.random.key_data(self.key).tolist(),
            "precision": str(jnp.result_type(float)),
        }

    def variables(self) -> Json:
        """Return the names that the user gave to the axes of the results."""
        about = {name: {"dims": dims, "series": False} for name, dims in self.dims.items()}
        return {"along": None, "variables": about, "coords": {}}

    def check(self) -> None:
        """Refuse results that are called like axes, and wrong names for their own axes, before computing."""
        known: set[str] = set()
        for group in self.groups:
            one = self.inputs(group, group.cells[:1])
            for name, value in plans.output_shapes(self.cell(group), None, one).items():
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


@checked
def sweep_function(
    function: Callable[..., PyTree],
    *,
    axes: Annotated[Mapping[str, Iterable[Value]], AXES] | None = None,
    seeds: Seeds = 1,
    dims: Annotated[Mapping[str, Sequence[str]], mapping(sequence(text, least=0))] | None = None,
    key: Annotated[int | Key[Array, ""] | UInt32[ArrayLike, "words"], any_key] = 0,
    store: FilePath | None = None,
    execution: Execution | None = None,
) -> "xarray.Dataset":
    """Run any function of a PRNG key and named values over a grid: vmapped, chunked, sharded, stored and labelled.

    Args:
        function: (key, **axes) -> array or dict of arrays; it is traced. The key of seed s is the same in all cells.
        axes: values by name; numbers share one program, other values get one program each.
        seeds: number of seeds, or their list.
        dims: names of the axes of each result (``"value"`` for a function that returns one array).
        key: integer or PRNG key that all random numbers come from.
        store: run directory, as in ``sweep``.
        execution: ``sweeps.Execution``: size of chunks (by default 1024 cells), devices, progress.

    >>> import jax
    >>> noise = lambda key, sigma: sigma * jax.random.normal(key, (3,))
    >>> ds = sweep_function(noise, axes={"sigma": [1.0, 2.0]}, seeds=4)
    >>> dict(ds.value.sizes)
    {'sigma': 2, 'seed': 4, 'value_0': 3}
    """
    grid = Grid(grids.axis_values(dict(axes or {}) | {"seed": plans.seed_list(seeds)}))
    parameters = inspect.signature(function).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    missing = [name for name in grid.axes if name != "seed" and name not in parameters and not anything]
    if missing:
        raise ValueError(f"function must take every axis by name, got one that does not take {missing}")
    execution = execution or Execution()
    fixed = [name for name, values in grid.axes.items() if not grids.is_numeric(values)]
    return FunctionSweep(
        grid=grid,
        groups=grids.make_groups(grid, grid.one_each(fixed)[1].tolist()),
        shared=None,
        execution=dataclasses.replace(execution, chunk=execution.chunk or 1024),
        function=function,
        key=any_key("key", key),
        dims={name: list(some) for name, some in (dims or {}).items()},
    ).run(store=store)
