"""The examples in the docstrings run and print what they say."""

import doctest
import importlib
import pkgutil

import pytest

import meanflow

MODULES = [name for _, name, _ in pkgutil.walk_packages(meanflow.__path__, "meanflow.")]


@pytest.mark.parametrize("name", [n for n in MODULES if not n.startswith("meanflow.bench")])
def test_examples(name):
    module = importlib.import_module(name)
    found = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert found.failed == 0
