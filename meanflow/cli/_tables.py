"""A finished sweep as a table on the terminal: final values, median over seeds."""

import sys
from typing import TYPE_CHECKING

from meanflow.sweeps._results import final

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
    table = Table(title=f"{name}: {value.attrs.get('long_name', '')} (final, median over seeds)")
    for d in rows:
        table.add_column(str(d))
    columns = value[last[0]].values if last else [""]
    for c in columns:
        table.add_column(f"{last[0]} {c}" if last else name, justify="right")
    flat = value.stack(row=rows) if rows else value.expand_dims("row")
    for k in range(flat.sizes["row"]):
        row = flat.isel(row=k)
        place = [str(row[d].item()) for d in rows]
        table.add_row(*place, *(f"{v:.4g}" for v in (row.values.ravel() if last else [row.item()])))
    Console(width=None if sys.stdout.isatty() else 160).print(table)
