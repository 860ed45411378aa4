"""A finished sweep as a table on the terminal: final values, median over seeds."""

import sys
from typing import TYPE_CHECKING

import numpy as np

from meanflow.sweeps._grid import final

if TYPE_CHECKING:
    import xarray


def is_scalar(data: "xarray.Dataset", name: str) -> bool:
    """Say whether a variable is one number per run and time."""
    grid = set.intersection(*(set(data[n].dims) for n in data.data_vars))
    return set(data[name].dims) <= grid | {"time", "step"}


def medians(data: "xarray.Dataset", name: str) -> "xarray.DataArray":
    """Return the final values of a variable, median over seeds."""
    value = final(data, name)
    return value.median("seed", skipna=True, keep_attrs=True) if "seed" in value.dims else value


def print_table(data: "xarray.Dataset", name: str) -> None:
    """Print the final values of a scalar observable, median over seeds, one row a width."""
    from rich.console import Console
    from rich.table import Table

    if not is_scalar(data, name):
        raise ValueError(f"--variable must be a scalar observable, got {name!r} with axes {data[name].dims}")
    value = medians(data, name)
    last = [d for d in value.dims if d != "width"][-1:]  # columns
    rows = [d for d in value.dims if d not in last]
    title = f"{name}: {value.attrs.get('long_name', '')} (final, median over seeds)"
    table = Table(*map(str, rows), title=title)
    for column in [f"{d} {c}" for d in last for c in value[d].values] or [name]:
        table.add_column(column, justify="right")
    # rich prints rows only: the axes that are no columns become one axis
    for row in (value.stack(row=rows) if rows else value.expand_dims("row")).transpose("row", ...):
        table.add_row(*(str(row[d].item()) for d in rows), *(f"{v:.4g}" for v in np.atleast_1d(row.values)))
    Console(width=None if sys.stdout.isatty() else 160).print(table)
