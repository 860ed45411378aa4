"""A finished sweep as a table on the terminal: final values, median over seeds."""

import sys
from typing import TYPE_CHECKING

import numpy as np

from meanflow._identity import Json
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


def duration(seconds: float) -> str:
    """Return a time in words.

    >>> duration(14100)
    '3 h 55 min'
    """
    if seconds < 90:
        return f"{seconds:.2g} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def progress_text(told: Json, lost: int) -> str:
    """Return how far a run directory is, how many of its cells failed, and who is at work there."""
    lines = [f"{told['done']} of {told['cells']} cells are done, {told['claimed']} claimed, {lost} failed"]
    if told["rate"] is not None:
        lines[0] += f"; {told['rate']:.3g} cells/s, about {duration(told['left'])} left"
    for worker in told["workers"]:
        who = (
            f"process {worker['pid']} on {worker['host']}" if "pid" in worker else "a process without a name"
        )
        lines.append(f"  {'at work' if worker['alive'] else 'silent '}  {who}, chunk {worker['chunk']}")
    return "\n".join(lines)


def print_table(data: "xarray.Dataset", name: str) -> None:
    """Print the final values of a scalar observable, median over seeds, one row a width."""
    from rich.console import Console
    from rich.table import Table

    if not is_scalar(data, name):
        raise ValueError(f"--variable must be a scalar observable, got {name!r} with axes {data[name].dims}")
    value = medians(data, name)
    texts = value.copy(data=np.vectorize("{:.4g}".format, otypes=[object])(value.values))
    if "result" in data:  # what has not been run is NaN, like what has failed
        run = (data.result != -1).any([d for d in data.result.dims if d not in value.dims])
        texts = texts.where(run, "not run")
    last = [d for d in value.dims if d != "width"][-1:]  # columns
    rows = [d for d in value.dims if d not in last]
    title = f"{name}: {value.attrs.get('long_name', '')} (final, median over seeds)"
    table = Table(*map(str, rows), title=title)
    for column in [f"{d} {c}" for d in last for c in value[d].values] or [name]:
        table.add_column(column, justify="right")
    # rich prints rows only: the axes that are no columns become one axis
    for row in (texts.stack(row=rows) if rows else texts.expand_dims("row")).transpose("row", ...):
        table.add_row(*(str(row[d].item()) for d in rows), *np.atleast_1d(row.values))
    Console(width=None if sys.stdout.isatty() else 160).print(table)
