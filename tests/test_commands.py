"""Commands of other distributions: found by entry points, imported on call, explained when missing or broken."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import click
import pytest
from click.testing import CliRunner

from meanflow import cli
from meanflow.cli import _extension as commands
from meanflow.cli._extension import OPTIONAL, Commands


@pytest.fixture
def install(monkeypatch):
    """Pretends that exactly these entry points are installed."""

    def pretend(**values):
        points = [EntryPoint(name, value, commands.GROUP) for name, value in values.items()]
        monkeypatch.setattr(commands, "entry_points", lambda group: [p for p in points if p.group == group])

    return pretend


def call(*arguments):
    """A command line that has one command of its own."""
    group = Commands("meanflow", commands={"own": click.Command("own", help="Stays at home.")})
    result = CliRunner().invoke(group, arguments)
    return result.exit_code, " ".join(result.output.split())


@click.command()
@click.argument("name")
def greet(name):
    """Say hello."""
    click.echo(f"hello {name}")


not_a_command = "text"


@pytest.mark.parametrize("arguments", [(), ("--help",), ("speed", "--set", "a=1")])
@pytest.mark.parametrize("name", OPTIONAL)
def test_a_missing_command_says_how_to_get_it(install, name, arguments):
    install()
    code, text = call(name, *arguments)
    folder = {"bench": "benchmarks", "reproduce": "papers"}[name]
    assert code == 2
    assert f"{name} is part of the distribution meanflow-{folder}: pip install ./{folder}" in text


def test_help_shows_missing_commands_as_optional(install):
    install()
    code, text = call("--help")
    assert code == 0 and "own Stays at home." in text
    for name, command in OPTIONAL.items():
        assert f"{name} {command.summary}" in text
        assert f"Not installed: {command.advice}" in text


def test_a_registered_command_is_found_and_runs(install):
    install(greet=f"{__name__}:greet", bench=f"{__name__}:greet")
    assert call("greet", "world") == (0, "hello world")
    assert call("bench", "mark") == (0, "hello mark")
    assert "Say hello" in call("greet", "--help")[1]
    assert "No such command" in call("neither")[1]


def test_help_imports_no_registered_command(install):
    install(broken="package_that_is_not_there:command")
    code, text = call("--help")
    assert code == 0 and "broken From package_that_is_not_there." in text


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("package_that_is_not_there:command", "ModuleNotFoundError: No module named"),
        (f"{__name__}:nobody", "AttributeError"),
        (f"{__name__}:not_a_command", "is no click command"),
    ],
)
def test_a_broken_command_gives_a_message_and_harms_no_other(install, value, reason):
    install(broken=value)
    code, text = call("broken", "--flag")
    assert code == 2 and "meanflow broken" in text and "cannot be loaded" in text and reason in text
    assert call("own")[0] == 0


def test_a_plain_install_in_a_process_of_its_own():
    """The whole command line with the entry points hidden: usable, with a message and no traceback."""
    start = (
        "from meanflow.cli import _extension as commands; commands.entry_points = lambda group: ();"
        "from meanflow.cli import main; main(['bench'], 'meanflow')"
    )
    done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True)
    assert done.returncode == 2 and "pip install ./benchmarks" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_package_runs_as_a_module_with_all_its_commands():
    done = subprocess.run([sys.executable, "-m", "meanflow", "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    listed = {line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ") and line.strip()}
    assert {"sweep", "resume", "show", "report", "info", "data"} <= listed
    assert "Usage: python -m meanflow" in done.stdout


def test_the_command_line_exports_what_other_distributions_call():
    assert {name for name in vars(cli) if not name.startswith("_")} == {
        *("main", "guard", "parse_setting", "print_json")
    }
