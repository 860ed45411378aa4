"""The command ``meanflow``: sweeps from configuration files, run directories, benchmarks, information.

Exit codes: 0 success, 1 some cells failed, 2 bad usage or configuration, 3 a run directory that cannot be used.
"""

import contextlib
import importlib
import inspect
import json
import pathlib
import pkgutil
import sys
from typing import Any

import click

from meanflow import reproduce

BAD_JAX = {
    "0.10.2": "wrong numbers on CPU (jit of a vmapped product followed by a sum)",
    "0.11.0": "crashes on CPU",
    "0.11.1": "crashes on CPU, breaks flax",
}
FAILED_CELLS = 1


class _Failure(click.ClickException):
    """An error shown without a traceback; exit code 2."""

    exit_code = 2


class _BadStore(_Failure):
    """A run directory that cannot be used."""

    exit_code = 3


def _guard(function: Any) -> Any:
    """Turns ValueError into a message with exit code 2, and store errors into one with 3."""
    import functools

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ValueError as problem:
            store = type(problem).__name__ == "StoreError"
            raise (_BadStore if store else _Failure)(str(problem)) from None

    return guarded


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="meanflow")
def main() -> None:
    """How two-layer networks learn: sweeps over width, balance and seed.

    \b
    Examples:
      meanflow sweep regimes.toml
      meanflow sweep regimes.toml --store runs/a --set run.steps=500 --set grid.seeds=2
      meanflow sweep --flow lifted --alpha sqrt --data sine --widths 50,200 --deltas -inf,0,inf \\
                     --steps 2000 --kernel-step 0.2 --store runs/b
      meanflow resume runs/b
      meanflow show runs/b --variable angle_displacement
      meanflow report runs/b
      meanflow info
    """


def _precision(request: dict[str, Any]) -> None:
    import jax

    jax.config.update("jax_enable_x64", request["run"].get("precision", "float64") == "float64")


def _use_all_cores() -> None:
    """One CPU device per core, over which cells are spread; a no-op where devices were chosen or are in use already."""
    import os

    import jax

    flags = os.environ.get("XLA_FLAGS", "") + os.environ.get("JAX_NUM_CPU_DEVICES", "")
    if flags or not hasattr(os, "sched_getaffinity"):
        return
    with contextlib.suppress(RuntimeError):  # too late: jax has started
        jax.config.update("jax_num_cpu_devices", len(os.sched_getaffinity(0)))


def _execute(request: dict[str, Any], store: str | None, as_json: bool) -> None:
    from meanflow.sweeps import make_mesh
    from meanflow.sweeps.request import build

    _precision(request)
    plan = build(request)
    plan.request = request
    mesh = make_mesh(**request["mesh"]) if request.get("mesh") else None
    data = plan.run(store=store, mesh=mesh)
    failed = int((data.result != 0).sum()) - int((data.result == _code(data, "event_occurred")).sum())
    summary = {
        "store": store,
        "cells": plan.grid.size,
        "failed": failed,
        "programs": len(plan.groups),
        "waste": round(plan.waste, 4),
    }
    if as_json:
        click.echo(json.dumps(summary))
    else:
        _table(data, "energy")
        where = f", stored in {store}" if store else " (not stored; pass --store DIR to keep them)"
        click.echo(f"{plan.grid.size} runs in {len(plan.groups)} compiled programs, {failed} failed{where}")
    if failed:
        sys.exit(FAILED_CELLS)


def _code(data: Any, name: str) -> int:
    flags = dict(zip(data.result.flag_meanings.split(), data.result.flag_values, strict=True))
    return int(flags[name])


@main.command()
@click.argument("config", required=False, type=click.Path(dir_okay=False))
@click.option(
    "--set", "changes", multiple=True, metavar="TABLE.KEY=VALUE", help="Change one value (TOML syntax)."
)
@click.option("--store", type=click.Path(), help="Run directory; a killed run continues there.")
@click.option("--flow", help="Model, for instance lifted or batchnorm.")
@click.option("--alpha", help="Output scale: m, sqrt, one or a number.")
@click.option("--data", help="Named data: sine, square, ridge; or an .npz file.")
@click.option("--widths", help="Comma-separated widths.")
@click.option("--deltas", help="Comma-separated balances; -inf and inf allowed.")
@click.option("--seeds", type=int, help="Number of seeds.")
@click.option("--steps", type=int, help="Steps of descent.")
@click.option("--t1", type=float, help="End time, instead of --steps.")
@click.option("--step", type=float, help="Step size.")
@click.option("--kernel-step", type=float, help="Step size as a fraction of 1/lambda_max of the kernel.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON on standard output.")
@_guard
def sweep(
    config: str | None, changes: tuple[str, ...], store: str | None, as_json: bool, **flags: Any
) -> None:
    """Run a sweep from CONFIG (TOML) or from flags; flags override the file.

    \b
    Example configuration:
      store = "runs/regimes"
      [flow]
      name = "lifted"
      alpha = "sqrt"
      [data]
      name = "sine"
      [grid]
      widths = [50, 100, 200]
      deltas = [-inf, -10, 0, 10, inf]
      seeds = 4
      [run]
      steps = 2000
      every = 200
      step = {kernel = 0.2}
    """
    from meanflow.sweeps import request as requests

    tables: dict[str, Any] = {"flow": {}, "data": {}, "grid": {}, "run": {}}
    if config is not None:
        tables |= requests.read_request(config)
    elif not any(v is not None for v in flags.values()):
        raise click.UsageError("give a CONFIG file or flags; see meanflow sweep --help")
    _apply_flags(tables, flags)
    for change in changes:
        place, parsed = _setting(change)
        table, dot, key = place.partition(".")
        if not dot:
            raise click.UsageError(f"--set needs TABLE.KEY=VALUE, got {change!r}")
        tables.setdefault(table, {})[key] = parsed
    request = requests.check_request(tables)
    _execute(request, store or request.get("store"), as_json)


def _setting(change: str) -> tuple[str, Any]:
    """KEY=VALUE with the value in TOML syntax, or else as text."""
    import tomllib

    key, equals, value = change.partition("=")
    if not equals:
        raise click.UsageError(f"--set needs TABLE.KEY=VALUE, got {change!r}")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def _apply_flags(tables: dict[str, Any], flags: dict[str, Any]) -> None:
    def put(table: str, key: str, value: Any) -> None:
        if value is not None:
            tables[table][key] = value

    def listed(name: str, kind: Any) -> Any:
        if flags[name] is None:
            return None
        try:
            return [kind(part) for part in flags[name].split(",")]
        except ValueError:
            raise click.UsageError(f"--{name} must be comma-separated numbers, got {flags[name]!r}") from None

    put("flow", "name", flags["flow"])
    alpha = flags["alpha"]
    put("flow", "alpha", alpha if alpha is None or alpha in ("m", "sqrt", "one") else float(alpha))
    if flags["data"] is not None:
        tables["data"] = {"file" if flags["data"].endswith(".npz") else "name": flags["data"]}
    put("grid", "widths", listed("widths", int))
    put("grid", "deltas", listed("deltas", float))
    put("grid", "seeds", flags["seeds"])
    for name in ("steps", "t1", "step"):
        put("run", name, flags[name])
    if flags["kernel_step"] is not None:
        tables["run"]["step"] = {"kernel": flags["kernel_step"]}


@main.command()
@click.argument("directory", type=click.Path(file_okay=False))
@click.option("--json", "as_json", is_flag=True, help="One line of JSON on standard output.")
@_guard
def resume(directory: str, as_json: bool) -> None:
    """Continue the sweep of a run DIRECTORY where it stopped."""
    from meanflow.sweeps.request import check_request
    from meanflow.sweeps.store import StoreError, read_config

    request = read_config(directory).get("request")
    if request is None:
        raise StoreError(
            f"store {directory} was not written by meanflow sweep; continue it by calling meanflow.sweep again"
        )
    _execute(check_request(request), directory, as_json)


@main.command()
@click.argument("directory", type=click.Path(file_okay=False))
@click.option("--variable", default="energy", show_default=True, help="Which observable.")
@click.option("--figure", type=click.Path(dir_okay=False), help="Also write a heat map to this file.")
@click.option("--json", "as_json", is_flag=True, help="All scalar observables as JSON.")
@_guard
def show(directory: str, variable: str, figure: str | None, as_json: bool) -> None:
    """Final values of a run DIRECTORY: medians over seeds, as a table, a figure or JSON."""
    from meanflow.sweeps import load

    data = load(directory)
    if variable not in data:
        raise ValueError(f"--variable must be one of {sorted(data.data_vars)}, got {variable!r}")
    if as_json:
        scalars = {n: _medians(data, n) for n in data.data_vars if _is_scalar(data, n)}
        click.echo(json.dumps({name: table.to_dict() for name, table in scalars.items()}, default=str))
    else:
        _table(data, variable)
    if figure is not None:
        from meanflow import plots

        plots.heat_map(_medians(data, variable)).figure.savefig(figure, dpi=150)
        click.echo(f"figure in {figure}")


def _is_scalar(data: Any, name: str) -> bool:
    return set(data[name].dims) <= {"width", "seed", "time", "step"} | _grid_axes(data)


def _grid_axes(data: Any) -> set[str]:
    return set(data.result.dims)


def _medians(data: Any, name: str) -> Any:
    """Final values, median over seeds."""
    value = data[name]
    for along in ("time", "step"):
        if along in value.dims:
            value = value.isel({along: -1}, drop=True)
    return value.median("seed", skipna=True) if "seed" in value.dims else value


def _table(data: Any, name: str) -> None:
    from rich.console import Console
    from rich.table import Table

    if not _is_scalar(data, name):
        raise ValueError(f"--variable must be a scalar observable, got {name!r} with axes {data[name].dims}")
    value = _medians(data, name)
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


@main.command()
@click.argument("directory", type=click.Path(file_okay=False))
@click.option("--output", type=click.Path(dir_okay=False), help="HTML file; default DIRECTORY/report.html.")
@click.option("--title", help="Heading of the page.")
@_guard
def report(directory: str, output: str | None, title: str | None) -> None:
    """One self-contained HTML page about a run DIRECTORY: losses, regimes, animation, provenance."""
    from meanflow.report import write_report
    from meanflow.sweeps import load
    from meanflow.sweeps.store import read_config

    samples = read_config(directory)["layout"].get("samples")
    pair = (samples["x"], samples["y"]) if samples else None
    where = output or str(pathlib.Path(directory) / "report.html")
    write_report(load(directory), where, title=title or f"Sweep {pathlib.Path(directory).name}", samples=pair)
    click.echo(f"report in {where}")


@main.command()
@click.argument("names", nargs=-1)
@click.option("--list", "listing", is_flag=True, help="Only list the benchmarks.")
@click.option(
    "--set", "changes", multiple=True, metavar="KEY=VALUE", help="An argument of the benchmarks (TOML)."
)
@click.option("--torch", type=click.Path(exists=True, dir_okay=False), help="Interpreter that has PyTorch.")
@click.option("--precision", type=click.Choice(["float32", "float64"]), default="float32", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Numbers as JSON.")
@_guard
def bench(
    names: tuple[str, ...],
    listing: bool,
    changes: tuple[str, ...],
    torch: str | None,
    precision: str,
    as_json: bool,
) -> None:
    """Run benchmarks by NAME (for instance sweeps.grid_speed, or sweeps for all of a room); default all.

    \b
    Examples:
      meanflow bench sweeps --torch ~/torch-env/bin/python
      meanflow bench sweeps.grid_speed --set steps=200 --set seeds=2
    """
    from meanflow import bench as rooms

    wanted = dict(_setting(change) for change in changes) | ({} if torch is None else {"torch": torch})

    found = {}
    for module in pkgutil.iter_modules(rooms.__path__):
        if module.name in ("timing", "team", "eager"):
            continue
        loaded = importlib.import_module(f"meanflow.bench.{module.name}")
        for name, function in inspect.getmembers(loaded, inspect.isfunction):
            if function.__module__ == loaded.__name__ and not name.startswith("_"):
                found[f"{module.name}.{name}"] = function
    if listing:
        for name, function in found.items():
            click.echo(f"{name}: {(inspect.getdoc(function) or '').splitlines()[0]}")
        return
    chosen = [n for n in found if not names or n in names or n.split(".")[0] in names]
    unknown = [n for n in names if n not in found and not any(f.startswith(f"{n}.") for f in found)]
    if unknown:
        raise ValueError(f"NAME must be one of {sorted(found)}, got {unknown[0]!r}")
    taken = {name: set(inspect.signature(found[name]).parameters) for name in chosen}
    stray = set(wanted) - {"torch"} - set().union(*taken.values())
    if stray:
        raise ValueError(f"--set must name an argument of a chosen benchmark, got {sorted(stray)[0]!r}")
    _precision({"run": {"precision": precision}})
    if all(name.startswith("sweeps.") for name in chosen):  # the others are about one device
        _use_all_cores()
    results = {}
    for name in chosen:
        results[name] = found[name](**{k: v for k, v in wanted.items() if k in taken[name]})
        if not as_json:
            click.echo(name)
            for key, value in results[name].items():
                click.echo(
                    f"  {key} = {value:.4g}" if isinstance(value, int | float) else f"  {key} = {value}"
                )
    if as_json:
        click.echo(json.dumps(results, default=str))


@main.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def info(as_json: bool) -> None:
    """Devices and versions, with a warning for releases of jax that are known to be wrong."""
    import jax

    from meanflow.sweeps.plan import all_versions

    found = all_versions()
    warning = BAD_JAX.get(found["jax"])
    devices = [f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices()]
    if as_json:
        click.echo(json.dumps({"versions": found, "devices": devices, "warning": warning}))
        return
    for name, version in found.items():
        click.echo(f"{name:<10} {version}")
    for device in devices:
        click.echo(f"device     {device}")
    if warning:
        click.echo(f"warning: jax {found['jax']} is known to be bad: {warning}", err=True)


main.add_command(reproduce.command, "reproduce")

if __name__ == "__main__":
    main()
