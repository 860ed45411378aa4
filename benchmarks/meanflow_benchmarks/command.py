"""The command ``meanflow bench``."""

import contextlib
import datetime
import importlib
import inspect
import json
import os
import pathlib
import platform
import subprocess
from collections.abc import Callable, Mapping

import click
import jax

from meanflow import files
from meanflow.cli import guard, parse_setting, print_json

ROOMS = (
    "accelerators",
    "depth",
    "first_call",
    "flows",
    "kernels",
    "kinks",
    "layers",
    "solvers",
    "sweeps",
    "univariate",
)

Numbers = Mapping[str, object]  # what a benchmark returns: seconds, ratios, sizes, versions by name


@click.command()
@click.argument("names", nargs=-1)
@click.option("--list", "listing", is_flag=True, help="Only list the benchmarks.")
@click.option(
    "--set", "changes", multiple=True, metavar="KEY=VALUE", help="An argument of the benchmarks (TOML)."
)
@click.option("--precision", type=click.Choice(["float32", "float64"]), default="float32", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Numbers as JSON.")
@click.option(
    "--store",
    type=click.Path(file_okay=False, path_type=pathlib.Path),
    help="A folder for the numbers, one JSON file a benchmark, with versions, commit and processor.",
)
@guard
def bench(
    names: tuple[str, ...],
    listing: bool,
    changes: tuple[str, ...],
    precision: str,
    as_json: bool,
    store: pathlib.Path | None,
) -> None:
    """Run benchmarks by NAME (for instance sweeps.grid_speed, or sweeps for all of a room); default all.

    \b
    Examples:
      meanflow bench sweeps.grid_speed --set steps=200 --set seeds=2
      meanflow bench kernels --set 'peers=[]'
      meanflow bench flows --json
      meanflow bench --store benchmarks/results    (what the page on performance shows)

    Peers that need an environment of their own, PyTorch and neural-tangents, are installed by scripts/peers; those that
    are not are named as left out.
    """
    found = benchmarks()
    if listing:
        for name, function in found.items():
            click.echo(f"{name}: {(inspect.getdoc(function) or '').splitlines()[0]}")
        return
    chosen = _choose(found, names)
    wanted = dict(parse_setting(change) for change in changes)
    taken = {name: set(inspect.signature(found[name]).parameters) for name in chosen}
    stray = set(wanted) - set().union(*taken.values())
    if stray:
        raise ValueError(f"--set must name an argument of a chosen benchmark, got {sorted(stray)[0]!r}")
    jax.config.update("jax_enable_x64", precision == "float64")
    if all(name.startswith("sweeps.") for name in chosen):  # the others are about one device
        _use_all_cores()
    results: dict[str, Numbers] = {}
    for name in chosen:
        settings = {k: v for k, v in wanted.items() if k in taken[name]}
        results[name] = found[name](**settings)
        if store is not None:
            _store(store, name, {"settings": settings, "precision": precision, "numbers": results[name]})
        if not as_json:
            _print_numbers(name, results[name])
    if as_json:
        print_json(results)


def benchmarks() -> dict[str, Callable[..., Numbers]]:
    """Return every benchmark as a function by the name ``room.function``: the public functions of the rooms.

    Example:
        >>> "flows.velocity_speed" in benchmarks()
        True
    """
    found: dict[str, Callable[..., Numbers]] = {}
    for room in ROOMS:
        module = importlib.import_module(f"meanflow_benchmarks.{room}")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            # a module also holds functions that it has imported
            if function.__module__ == module.__name__ and not name.startswith("_"):
                found[f"{room}.{name}"] = function
    return found


def _choose(found: Mapping[str, Callable[..., Numbers]], names: tuple[str, ...]) -> list[str]:
    """Return the names of the benchmarks that ``names`` asks for, each a benchmark or a room; none means all."""
    unknown = [n for n in names if n not in found and n not in ROOMS]
    if unknown:
        raise ValueError(f"NAME must be one of {sorted(found)}, got {unknown[0]!r}")
    return [n for n in found if not names or n in names or n.split(".")[0] in names]


def _store(folder: pathlib.Path, name: str, result: Mapping[str, object]) -> None:
    """Write what a benchmark found, and where and by what it was found, to ``folder/NAME.json``."""
    here = pathlib.Path(__file__).parent
    asked = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=False
    )
    about = {
        "benchmark": name,
        "day": datetime.date.today().isoformat(),
        "commit": asked.stdout.strip() or "not in a repository",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": files.versions(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    with files.atomic_write(folder / f"{name}.json") as part:
        part.write_text(json.dumps(about | dict(result), indent=1, default=float) + "\n")


def _processor() -> str:
    """Return the name of the processor, as far as the system tells it."""
    with contextlib.suppress(OSError, IndexError):
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        return [line for line in lines if line.startswith("model name")][0].partition(": ")[2]
    return platform.processor() or platform.machine()


def _print_numbers(name: str, numbers: Numbers) -> None:
    click.echo(name)
    for key, value in numbers.items():
        click.echo(f"  {key} = {value:.4g}" if isinstance(value, int | float) else f"  {key} = {value}")


def _use_all_cores() -> None:
    """Make one CPU device per core, over which a sweep spreads its cells; keep devices that the user chose."""
    flags = os.environ.get("XLA_FLAGS", "") + os.environ.get("JAX_NUM_CPU_DEVICES", "")
    if flags or not hasattr(os, "sched_getaffinity"):  # macOS has no such call
        return
    with contextlib.suppress(RuntimeError):  # too late: jax has started
        jax.config.update("jax_num_cpu_devices", len(os.sched_getaffinity(0)))
