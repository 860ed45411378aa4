"""The command ``meanflow``, and what other distributions need to add commands to it.

A distribution adds a command by an entry point in the group ``meanflow.commands`` that names a click command. In its
``pyproject.toml``::

    [project.entry-points."meanflow.commands"]
    bench = "meanflow_benchmarks.command:bench"

The command is imported when it is called, so that ``meanflow --help`` stays fast and a distribution that cannot be
imported does no harm to the other commands.

Exit codes: 0 success, 1 some cells failed, 2 bad usage or configuration, 3 a run directory that cannot be used, 4 a
worker stopped before the sweep was whole, 70 an error that nobody has foreseen, 130 interrupted.
"""

from meanflow.cli._commands import main as main
from meanflow.cli._extension import guard as guard
from meanflow.cli._extension import parse_setting as parse_setting
from meanflow.cli._extension import print_json as print_json
