"""The examples in the docstrings of all distributions run and print what they say."""

import doctest
import importlib
import importlib.util
import pkgutil

import pytest

PACKAGES = ("meanflow", "meanflow_benchmarks", "meanflow_papers")


def modules():
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is not None:
            yield from (m.name for m in pkgutil.walk_packages(spec.submodule_search_locations, f"{package}."))


@pytest.mark.parametrize("name", list(modules()))
def test_examples(name):
    module = importlib.import_module(name)
    found = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert found.failed == 0
