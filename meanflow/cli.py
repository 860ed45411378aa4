"""The command ``meanflow``: sweeps from configuration files, run directories, benchmarks, information.

Exit codes: 0 success, 1 some cells failed, 2 bad usage or configuration, 3 a run directory that cannot be used, 130
interrupted.
"""

import contextlib
import functools
import importlib
import inspect
import json
import math
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
FAILED_CELLS, INTERRUPTED = 1, 130


class _Failure(click.ClickException):
    """An error shown without a traceback; exit code 2."""

    exit_code = 2


class _BadStore(_Failure):
    """A run directory that cannot be used."""

    exit_code = 3


def _guard(function: Any) -> Any:
    """Turns ValueError and OSError into a message with exit code 2, and store errors into one with 3."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (ValueError, OSError) as problem:
            store = type(problem).__name__ == "StoreError"
            raise (_BadStore if store else _Failure)(str(problem)) from None
        except KeyboardInterrupt:
            click.echo(
                "interrupted; finished chunks of a run with --store are kept, see meanflow resume", err=True
            )
            sys.exit(INTERRUPTED)

    return guarded


def _print_json(value: Any) -> None:
    """One line of JSON that every parser takes: NaN becomes null, infinities the texts "inf" and "-inf"."""

    def strict(u: Any) -> Any:
        if isinstance(u, dict):
            return {str(k): strict(v) for k, v in u.items()}
        if isinstance(u, list | tuple):
            return [strict(v) for v in u]
        if isinstance(u, float) and not math.isfinite(u):
            return None if math.isnan(u) else str(u)
        return u if u is None or isinstance(u, bool | int | float | str) else strict(_plain(u))

    click.echo(json.dumps(strict(value), allow_nan=False))


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy and jax as Python's own; anything else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="meanflow")
def main() -> None:
    """How two-layer networks learn: sweeps over width, balance and seed.

    \b
    Examples:
      meanflow sweep regimes.toml
      meanflow sweep regimes.toml --store runs/a --set run.steps=500 --set grid.seeds=2
      meanflow sweep --flow lifted --alpha sqrt --data sine --widths 50,200 --deltas -inf,0,inf \\
                     --steps 2000 --every 50 --kernel-step 0.2 --observe default,neurons --store runs/b
      meanflow resume runs/b
      meanflow show runs/b --variable angle_displacement
      meanflow report runs/b
      meanflow info
    """


_DISTRIBUTED = click.option(
    "--distributed",
    is_flag=True,
    help="One of several processes (Slurm, TPU pods, ...): start the same command once per process.",
)


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


def _execute(request: dict[str, Any], store: str | None, as_json: bool, distributed: bool) -> None:
    if distributed:
        import jax

        jax.distributed.initialize()
    from meanflow.sweeps import hosts, make_mesh, summary
    from meanflow.sweeps.request import build

    _precision(request)
    plan = build(request)
    plan.request = request
    mesh = make_mesh(**request["mesh"]) if request.get("mesh") else None
    data = plan.run(store=store, mesh=mesh)
    failed = int(summary.failed(data).sum())
    numbers = {
        "store": store,
        "cells": plan.grid.size,
        "failed": failed,
        "programs": len(plan.groups),
        "waste": round(plan.waste, 4),
    }
    if as_json and hosts.is_lead():
        _print_json(numbers)
    elif hosts.is_lead():
        summary.print_table(data, "energy")
        where = f", stored in {store}" if store else " (not stored; pass --store DIR to keep them)"
        click.echo(f"{plan.grid.size} runs in {len(plan.groups)} compiled programs, {failed} failed{where}")
    if failed:
        sys.exit(FAILED_CELLS)


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
@click.option("--scales", help="Comma-separated factors of the initial amplitudes.")
@click.option("--seeds", type=int, help="Number of seeds.")
@click.option("--steps", type=int, help="Steps of descent.")
@click.option("--every", type=int, help="Steps between saves; default start and end only.")
@click.option("--t1", type=float, help="End time, instead of --steps.")
@click.option("--step", type=float, help="Step size.")
@click.option("--kernel-step", type=float, help="Step size as a fraction of 1/lambda_max of the kernel.")
@click.option(
    "--observe",
    help="Comma-separated observables; default stands for the usual ones, neurons for what the report animates.",
)
@_DISTRIBUTED
@click.option("--json", "as_json", is_flag=True, help="One line of JSON on standard output.")
@_guard
def sweep(
    config: str | None,
    changes: tuple[str, ...],
    store: str | None,
    distributed: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Run a sweep from CONFIG (TOML) or from flags; flags override the file.

    \b
    Examples:
      meanflow sweep regimes.toml --set run.steps=500
      meanflow sweep --flow batchnorm --data ridge --widths 50,100 --t1 20 --store runs/a --json
      srun --ntasks-per-node=4 --gpus-per-node=4 meanflow sweep regimes.toml --distributed

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
      observe = ["default", "neurons"]
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
        if dot:
            tables.setdefault(table, {})[key] = parsed
        elif isinstance(parsed, dict) or table == "store":
            tables[table] = parsed
        else:
            raise click.UsageError(
                f"--set needs TABLE.KEY=VALUE or TABLE={{KEY = VALUE, ...}}, got {change!r}"
            )
    request = requests.check_request(tables)
    if "file" in request["data"]:  # so that the run can be resumed from elsewhere
        request["data"]["file"] = str(pathlib.Path(request["data"]["file"]).resolve())
    _execute(request, store or request.get("store"), as_json, distributed)


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
    put("flow", "alpha", _alpha(flags["alpha"]))
    if flags["data"] is not None:
        tables["data"] = {"file" if flags["data"].endswith(".npz") else "name": flags["data"]}
    put("grid", "widths", listed("widths", int))
    put("grid", "deltas", listed("deltas", float))
    put("grid", "scales", listed("scales", float))
    put("grid", "seeds", flags["seeds"])
    put("run", "observe", listed("observe", str))
    for name in ("steps", "every", "t1", "step"):
        put("run", name, flags[name])
    if flags["kernel_step"] is not None:
        tables["run"]["step"] = {"kernel": flags["kernel_step"]}


def _alpha(text: str | None) -> Any:
    """A name as it is, anything else as a number."""
    if text is None or text in ("m", "sqrt", "one"):
        return text
    try:
        return float(text)
    except ValueError:
        raise click.UsageError(f"--alpha must be m, sqrt, one or a number, got {text!r}") from None


@main.command()
@click.argument("directory", type=click.Path(file_okay=False))
@_DISTRIBUTED
@click.option("--json", "as_json", is_flag=True, help="One line of JSON on standard output.")
@_guard
def resume(directory: str, distributed: bool, as_json: bool) -> None:
    """Continue the sweep of a run DIRECTORY where it stopped.

    \b
    Examples:
      meanflow resume runs/a
      meanflow resume runs/a --json
    """
    from meanflow.sweeps.request import check_request
    from meanflow.sweeps.store import StoreError, read_config

    request = read_config(directory).get("request")
    if request is None:
        raise StoreError(
            f"store {directory} was not written by meanflow sweep; continue it by calling meanflow.sweep again"
        )
    _execute(check_request(request), directory, as_json, distributed)


def _load(directory: str) -> Any:
    """The finished part of a run directory."""
    from meanflow.sweeps import StoreError, load

    data = load(directory)
    if not data.data_vars:
        raise StoreError(
            f"store {directory} has no finished chunk yet; meanflow resume {directory} goes on with it"
        )
    return data


@main.command()
@click.argument("directory", type=click.Path(file_okay=False))
@click.option("--variable", default="energy", show_default=True, help="Which observable.")
@click.option("--figure", type=click.Path(dir_okay=False), help="Also draw it into this file.")
@click.option("--json", "as_json", is_flag=True, help="All scalar observables as JSON.")
@_guard
def show(directory: str, variable: str, figure: str | None, as_json: bool) -> None:
    """Final values of a run DIRECTORY: medians over seeds, as a table, a figure or JSON.

    \b
    Examples:
      meanflow show runs/a
      meanflow show runs/a --variable angle_displacement --figure map.png
      meanflow show runs/a --json
    """
    from meanflow.sweeps import summary

    data = _load(directory)
    if variable not in data:
        raise ValueError(f"--variable must be one of {sorted(data.data_vars)}, got {variable!r}")
    if as_json:
        scalars = {n: summary.medians(data, n) for n in data.data_vars if summary.is_scalar(data, n)}
        _print_json({name: table.to_dict() for name, table in scalars.items()})
    else:
        summary.print_table(data, variable)
    if figure is not None:
        _draw(data, variable).figure.savefig(figure, dpi=150)
        click.echo(f"figure in {figure}", err=as_json)


def _draw(data: Any, variable: str) -> Any:
    """Final values as a map over two axes, or as a curve over one with the range of the seeds."""
    from meanflow import plots
    from meanflow.sweeps import summary

    last = summary.final(data, variable)
    long = [d for d in last.dims if d != "seed" and last.sizes[d] > 1]
    if len(long) == 2:
        return plots.heat_map(summary.medians(data, variable))
    if len(long) != 1:
        raise ValueError(f"--figure needs one or two axes longer than 1 beside seed, got {long}")
    values = last.squeeze([d for d in last.dims if d not in (*long, "seed")], drop=True).transpose(
        "seed", *long
    )
    return plots.traces(last[long[0]].values, {variable: values.values}, xlabel=long[0], ylabel=variable)


@main.command()
@click.argument("directory", type=click.Path(file_okay=False))
@click.option("--output", type=click.Path(dir_okay=False), help="HTML file; default DIRECTORY/report.html.")
@click.option("--title", help="Heading of the page.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON on standard output.")
@_guard
def report(directory: str, output: str | None, title: str | None, as_json: bool) -> None:
    """One self-contained HTML page about a run DIRECTORY: losses, regimes, animation, provenance.

    The neurons move on the page if the sweep has recorded them (--observe default,neurons).

    \b
    Examples:
      meanflow report runs/a
      meanflow report runs/a --output regimes.html --title "Kernel to adaptive"
    """
    from meanflow.report import write_report
    from meanflow.sweeps.store import read_config

    data = _load(directory)
    if "energy" not in data:
        raise ValueError(f"report needs the run directory of a sweep of networks, got {directory}")
    samples = read_config(directory)["layout"].get("samples")
    pair = (samples["x"], samples["y"]) if samples else None
    where = output or str(pathlib.Path(directory) / "report.html")
    name = pathlib.Path(directory).resolve().name
    write_report(data, where, title=title or f"Sweep {name}", samples=pair)
    if as_json:
        _print_json({"report": where})
    else:
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
        _print_json(results)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def info(as_json: bool) -> None:
    """Devices and versions, with a warning for releases of jax that are known to be wrong.

    \b
    Examples:
      meanflow info
      meanflow info --json
    """
    import jax

    from meanflow.sweeps.plan import all_versions

    found = all_versions()
    warning = BAD_JAX.get(found["jax"])
    devices = [f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices()]
    if as_json:
        _print_json({"versions": found, "devices": devices, "warning": warning})
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
