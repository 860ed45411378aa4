"""The examples in the docstrings of all distributions run and print what they say: one case a folder."""

import doctest
import importlib
import importlib.util
import pathlib
import pkgutil

import pytest

PACKAGES = ("meanflow", "meanflow_benchmarks", "meanflow_papers")
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def rooms():
    """The first two parts of the names of all modules with an example, such as meanflow.depth, and their modules."""
    found: dict[str, list[str]] = {}
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        places = [] if spec is None else spec.submodule_search_locations
        for module in pkgutil.walk_packages(places, f"{package}."):
            # looked for in the text: to import every module takes a while, and most have no example
            if ">>>" in pathlib.Path(module.module_finder.find_spec(module.name).origin).read_text():
                found.setdefault(".".join(module.name.split(".")[:2]), []).append(module.name)
    return found


ROOMS = rooms()


@pytest.mark.parametrize("room", ROOMS)
def test_examples(room):
    for name in ROOMS[room]:
        assert doctest.testmod(importlib.import_module(name), optionflags=FLAGS).failed == 0, name
