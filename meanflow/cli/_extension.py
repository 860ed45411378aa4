"""What the commands share, and the group of commands that finds those of other distributions."""

import functools
import json
import math
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import NamedTuple, ParamSpec, TypeVar

import click
import jax
import numpy as np

GROUP = "meanflow.commands"
FAILED_CELLS, INTERRUPTED = 1, 130

P = ParamSpec("P")
R = TypeVar("R")


class OptionalCommand(NamedTuple):
    """A command that a distribution of this project brings along, known here so that its absence can be explained.

    Attributes:
        distribution: what to install.
        summary: one line for ``meanflow --help``.
    """

    distribution: str
    summary: str


OPTIONAL = {
    "bench": OptionalCommand("meanflow-benchmarks", "Run benchmarks beside their peers."),
    "reproduce": OptionalCommand("meanflow-papers", "Run figures and tables of the papers."),
}


class Failure(click.ClickException):
    """An error that the command line shows without a traceback; exit code 2."""

    exit_code = 2


class BadStore(Failure):
    """A run directory that cannot be used; exit code 3."""

    exit_code = 3


def guard(function: Callable[P, R]) -> Callable[P, R]:
    """Turn ValueError, TypeError and OSError of a command into a message with exit code 2, store errors with 3."""

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (ValueError, TypeError, OSError) as problem:
            # by name: importing the class would import the whole of sweeps for every command
            store = type(problem).__name__ == "StoreError"
            raise (BadStore if store else Failure)(str(problem)) from None
        except KeyboardInterrupt:
            click.echo(
                "interrupted; finished chunks of a run with --store are kept, see meanflow resume", err=True
            )
            sys.exit(INTERRUPTED)

    return guarded


def print_json(value: object) -> None:
    """Print one line of JSON that every parser takes: NaN becomes null, infinities the texts "inf" and "-inf".

    Example:
        >>> print_json({"loss": float("nan"), "delta": float("-inf")})
        {"loss": null, "delta": "-inf"}
    """

    def strict(u: object) -> object:
        if isinstance(u, dict):
            return {str(k): strict(v) for k, v in u.items()}
        if isinstance(u, list | tuple):
            return [strict(v) for v in u]
        if isinstance(u, float) and not math.isfinite(u):
            return None if math.isnan(u) else str(u)
        return u if u is None or isinstance(u, bool | int | float | str) else strict(_plain(u))

    click.echo(json.dumps(strict(value), allow_nan=False))


def _plain(value: object) -> object:
    """Return numbers and arrays of numpy and jax as Python's own, and anything else as text."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray | jax.Array) else str(value)


def parse_setting(change: str) -> tuple[str, object]:
    """Split the text KEY=VALUE of an option ``--set``; the value is read as TOML, or else taken as text.

    Example:
        >>> parse_setting("grid.widths=[10, 20]")
        ('grid.widths', [10, 20])
        >>> parse_setting("data.name=sine")
        ('data.name', 'sine')
    """
    key, equals, value = change.partition("=")
    if not equals:
        raise click.UsageError(f"--set needs TABLE.KEY=VALUE, got {change!r}")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


class Commands(click.Group):
    """A group of commands that also holds those registered as entry points, found by name and imported on call."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the group's own commands, the registered ones and the optional ones."""
        return sorted({*super().list_commands(ctx), *registered(), *OPTIONAL})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command ``cmd_name``: the group's own, a registered one, or one that says what to install."""
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        entry = registered().get(cmd_name)
        if entry is not None:
            return _load(entry)
        if cmd_name in OPTIONAL:
            name = OPTIONAL[cmd_name].distribution
            return _failing(
                cmd_name, f"meanflow {cmd_name} is part of the distribution {name}: pip install {name}"
            )
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands for ``--help`` without importing the registered ones."""
        own = {name: super(Commands, self).get_command(ctx, name) for name in super().list_commands(ctx)}
        width = formatter.width - 6 - max(map(len, self.list_commands(ctx)))
        rows = [
            (name, command.get_short_help_str(width))
            for name, command in own.items()
            if command is not None and not command.hidden
        ]
        found = registered()
        others = [
            (name, _summary(name, found.get(name))) for name in self.list_commands(ctx) if name not in own
        ]
        for title, part in (("Commands", rows), ("Commands of other distributions", others)):
            if part:
                with formatter.section(title):
                    formatter.write_dl(part)


def registered() -> dict[str, EntryPoint]:
    """Return the entry points of the group ``meanflow.commands`` by name; nothing is imported."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _summary(name: str, entry: EntryPoint | None) -> str:
    """Describe a command of another distribution in the list of ``--help``."""
    if entry is None:
        missing = OPTIONAL[name]
        return f"{missing.summary} Not installed: pip install {missing.distribution}"
    source = entry.dist.name if entry.dist is not None else entry.module
    return f"{OPTIONAL[name].summary} From {source}." if name in OPTIONAL else f"From {source}."


def _load(entry: EntryPoint) -> click.Command:
    """Import a registered command; one that cannot be imported becomes a command that says why."""
    source = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value
    try:
        command = entry.load()
    except (
        Exception
    ) as problem:  # whatever goes wrong in code that is not ours, the user needs to know whose it is
        reason = f"{type(problem).__name__}: {problem}"
    else:
        if isinstance(command, click.Command):
            return command
        reason = f"{entry.value} is no click command"
    return _failing(entry.name, f"meanflow {entry.name}, registered by {source}, cannot be loaded: {reason}")


def _failing(name: str, message: str) -> click.Command:
    """Return a command that takes any arguments, even ``--help``, and ends with the message and exit code 2."""

    def fail() -> None:
        raise Failure(message)

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(name, callback=fail, add_help_option=False, context_settings=settings)
