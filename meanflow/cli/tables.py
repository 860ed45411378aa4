"""A finished sweep in few numbers: final values, failures, a table."""

import sys
from typing import Any

import numpy as np

from meanflow.sweeps.labels import result_codes

(STEADY,) = (
    code for code, name in result_codes().items() if name == "event_occurred"
)  # asked to stop, and did


def final(runs: Any, name: str) -> Any:
    """Last save of a variable of a sweep; for a run that stopped early in a steady state, the last before the stop."""
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


def failed(runs: Any) -> Any:
    """Whether each run of a sweep ended in a failure; those that have not been run count as neither."""
    return (runs.result != 0) & (runs.result != STEADY) & (runs.result != -1)


def is_scalar(data: Any, name: str) -> bool:
    """Whether a variable is one number per run and time."""
    grid = set.intersection(*(set(data[n].dims) for n in data.data_vars))
    return set(data[name].dims) <= grid | {"time", "step"}


def medians(data: Any, name: str) -> Any:
    """Final values, median over seeds."""
    value = final(data, name)
    return value.median("seed", skipna=True, keep_attrs=True) if "seed" in value.dims else value


def print_table(data: Any, name: str) -> None:
    """Medians over seeds of a scalar observable at the end, one row a width, on standard output."""
    from rich.console import Console
    from rich.table import Table

    if not is_scalar(data, name):
        raise ValueError(f"--variable must be a scalar observable, got {name!r} with axes {data[name].dims}")
    value = medians(data, name)
    last = [d for d in value.dims if d != "width"][-1:]  # columns
    rows = [d for d in value.dims if d not in last]
    table = Table(title=f"{name}: {value.attrs.get('long_name', '')} (final, median over seeds)")
    for d in rows:
        table.add_column(d)
    columns = value[last[0]].values if last else [""]
    for c in columns:
        table.add_column(f"{last[0]} {c}" if last else name, justify="right")
    flat = value.stack(row=rows) if rows else value.expand_dims("row")
    for k in range(flat.sizes["row"]):
        row = flat.isel(row=k)
        place = [str(row[d].item()) for d in rows]
        table.add_row(*place, *(f"{v:.4g}" for v in (row.values.ravel() if last else [row.item()])))
    Console(width=None if sys.stdout.isatty() else 160).print(table)
