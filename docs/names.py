"""What is public: the names that ``meanflow`` and its rooms export, found by reading their ``__init__`` files.

Used by the documentation's build (``pages.py``) and by the tests, so that the reference cannot forget a name.
Nothing is imported: the documentation can be built without JAX.
"""

import ast
import functools
import pathlib
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "meanflow"
PLACES = {"meanflow": PACKAGE, "meanflow_papers": ROOT / "papers" / "meanflow_papers"}
ROOMS = (
    "measures",
    "geometry",
    "layers",
    "kernels",
    "flows",
    "solvers",
    "transport",
    "depth",
    "training",
    "univariate",
    "sweeps",
    "plots",
    "report",
)


class Name(NamedTuple):
    """A public name, where it is defined, and whether it is a module."""

    name: str
    path: str
    is_module: bool


def source(module: str) -> pathlib.Path:
    """The file of a module, given by its dotted path below ``meanflow`` or ``meanflow_papers``."""
    package, *rest = module.split(".")
    place = PLACES[package].joinpath(*rest)
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


@functools.cache
def exported(module: str) -> list[Name]:
    """The public names of a package: imports of the form ``x as x`` and the keys of its table of lazy names."""
    found: dict[str, Name] = {}
    for node in ast.parse(source(module).read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("meanflow"):
            for alias in node.names:
                if alias.asname == alias.name:
                    path = f"{node.module}.{alias.name}"
                    found[alias.name] = Name(alias.name, path, source(path).exists())
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                if not (isinstance(key, ast.Constant) and isinstance(value, ast.Constant)):
                    continue
                home = f"{module}.{value.value}"
                if isinstance(value.value, str) and source(home).exists():
                    # a name that equals the last part of its module stands for the module itself (_lazy.attach)
                    whole = value.value.rpartition(".")[2] == key.value
                    found[key.value] = Name(key.value, home if whole else f"{home}.{key.value}", whole)
    return list(found.values())


def definitions(module: str) -> dict[str, str]:
    """Public functions and classes that a module defines itself, with their docstrings."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    nodes = [node for node in ast.parse(source(module).read_text()).body if isinstance(node, kinds)]
    return {node.name: ast.get_docstring(node) or "" for node in nodes if not node.name.startswith("_")}


@functools.cache
def members(module: str) -> set[str]:
    """Every name without an underscore that a module defines itself: functions, classes and values."""
    found = set(definitions(module))
    for node in ast.parse(source(module).read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {t.id for t in targets if isinstance(t, ast.Name) and not t.id.startswith("_")}
    return found


def is_public(path: str) -> bool:
    """Whether a dotted path below ``meanflow`` leads over exported names only; what is below an object does not count.

    ``meanflow.kernels.empirical_ntk`` and ``meanflow.measures.laws.uniform`` are, ``meanflow.flows._models`` is not.
    """
    here, *rest = path.split(".")
    for name in rest:
        packages = {*ROOMS, "cli"} if here == "meanflow" else set()
        found = {public.name: public for public in exported(here)}
        below = f"{here}.{name}"
        if name in packages or (name in found and found[name].is_module):
            here = below
        elif source(here).name == "__init__.py":
            return name in found or name == "__version__"
        else:
            return name in members(here)
    return True
