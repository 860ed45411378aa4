"""Rooms import one way: a module may import its own room and the rooms before it, never one behind it."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

import meanflow

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "meanflow"
FOUNDATION = (
    "_properties",
    "_checks",
    "_matrices",
    "_numerics",
    "_files",
    "_identity",
    "_lazy",
    "_reuse",
    "activations",
    "commands",
)
ROOMS = (
    *("measures", "geometry", "layers", "kernels", "flows", "solvers", "transport", "depth", "training"),
    *("univariate", "sweeps", "plots", "report", "cli"),
)
ORDER = {name: 0 for name in FOUNDATION} | {name: k + 1 for k, name in enumerate(ROOMS)}


def imported_rooms(path):
    """Rooms of this package that a file imports, wherever in the file; imports for the type checker count too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "meanflow":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("meanflow."):
            yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (a.name.split(".")[1] for a in node.names if a.name.startswith("meanflow."))


@pytest.mark.parametrize("room", [*FOUNDATION, *ROOMS])
def test_imports_go_one_way(room):
    files = [PACKAGE / f"{room}.py"] if room in FOUNDATION else sorted((PACKAGE / room).rglob("*.py"))
    assert files
    late = {
        (path.name, name)
        for path in files
        if path.exists()
        for name in imported_rooms(path)
        if name not in ORDER or ORDER[name] > ORDER[room]
    }
    assert not late


def test_every_folder_is_a_room():
    assert {p.parent.name for p in PACKAGE.glob("*/__init__.py")} == set(ROOMS)


def test_import_loads_no_heavy_package():
    """Half a second of every notebook's start: diffrax, flax and the like load when they are first used."""
    heavy = ("diffrax", "optax", "flax", "ott", "xarray", "zarr", "matplotlib", "sklearn", "optimistix")
    code = f"import sys, meanflow; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_version_is_that_of_the_distribution():
    assert meanflow.__version__ == re.search(
        r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M
    ).group(1)
    assert f"## {meanflow.__version__}" in (ROOT / "CHANGELOG.md").read_text()
