"""What the commands share, and the group of commands that finds those of other distributions."""

import functools
import json
import math
import sys
import tomllib
import traceback
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple, ParamSpec, TypeVar

import click
import jax
import numpy as np

GROUP = "meanflow.commands"
FAILED_CELLS, UNFINISHED, UNEXPECTED, INTERRUPTED = 1, 4, 70, 130

P = ParamSpec("P")
R = TypeVar("R")


class OptionalCommand(NamedTuple):
    """A command that a distribution of this project brings along, known here so that its absence can be explained."""

    distribution: str
    advice: str  # how to install it: it is on no package index
    summary: str  # one line for ``meanflow --help``


_INSTALL = "pip install ./{} (from the repository)"
OPTIONAL = {
    "bench": OptionalCommand(
        "meanflow-benchmarks", _INSTALL.format("benchmarks"), "Run benchmarks beside their peers."
    ),
    "reproduce": OptionalCommand(
        "meanflow-papers", _INSTALL.format("papers"), "Run figures and tables of the papers."
    ),
}


class Failure(click.ClickException):
    """An error that the command line shows without a traceback; exit code 2."""

    exit_code = 2


class BadStore(Failure):
    """A run directory that cannot be used; exit code 3."""

    exit_code = 3


def guard(function: Callable[P, R]) -> Callable[P, R]:
    """Turn ValueError, TypeError and OSError of a command into a message with exit code 2, store errors with 3.

    What nobody has foreseen, such as too little memory, is shown with its traceback and ends with 70, which no other
    outcome does.
    """

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
                "interrupted; what is finished is kept: the same command goes on, and meanflow resume with a run that "
                "has a --store",
                err=True,
            )
            sys.exit(INTERRUPTED)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception:
            traceback.print_exc()
            sys.exit(UNEXPECTED)

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
        if u is None or isinstance(u, bool | int | float | str):
            return u
        return strict(u.tolist()) if isinstance(u, np.generic | np.ndarray | jax.Array) else str(u)

    click.echo(json.dumps(strict(value), allow_nan=False))


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
    # words need no quotes on a command line
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


class Elsewhere(click.Command):
    """A command of another distribution, which is imported when it is called and not before.

    One that is missing or cannot be imported ends with a message about it, whatever its arguments are.
    """

    def __init__(self, name: str, entry: EntryPoint | None) -> None:
        known, self.entry = OPTIONAL.get(name), entry
        summary = f"{known.summary} " if known else ""
        if entry is not None:
            summary += f"From {entry.dist.name if entry.dist is not None else entry.module}."
        elif known is not None:
            summary += f"Not installed: {known.advice}"
        super().__init__(name, short_help=summary)

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Import the command and hand over to it."""
        if self.entry is None:
            missing = OPTIONAL[str(self.name)]
            raise Failure(
                f"meanflow {self.name} is part of the distribution {missing.distribution}: {missing.advice}"
            )
        dist = self.entry.dist
        source = self.entry.value if dist is None else f"{dist.name} {dist.version}"
        try:
            command = self.entry.load()
            if not isinstance(command, click.Command):
                raise TypeError(f"{self.entry.value} is no click command")
        except Exception as problem:
            # whatever goes wrong in the code of others: the user needs to know whose it is
            reason = f"{type(problem).__name__}: {problem}"
            raise Failure(
                f"meanflow {self.name}, registered by {source}, cannot be loaded: {reason}"
            ) from problem
        return command.make_context(*args, **extra)


class Commands(click.Group):
    """A group of commands that also holds those registered as entry points."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the group's own commands, the registered ones and the optional ones."""
        return sorted({*super().list_commands(ctx), *registered(), *OPTIONAL})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command ``cmd_name`` of the group, or one that stands for that of another distribution."""
        # a distribution cannot replace a command of this one
        own, entry = super().get_command(ctx, cmd_name), registered().get(cmd_name)
        return own or (Elsewhere(cmd_name, entry) if entry or cmd_name in OPTIONAL else None)


def registered() -> dict[str, EntryPoint]:
    """Return the entry points of the group ``meanflow.commands`` by name; nothing is imported."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}
