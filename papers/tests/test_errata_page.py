"""The page of errata names tests and entries that exist."""

import ast
import re
from pathlib import Path

from meanflow_papers.catalogue import CATALOGUE

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "errata.md").read_text()


def has(path, names):
    """Whether the file defines the test, which may stand in a class."""
    node = ast.parse((ROOT / path).read_text())
    for name in names:
        node = next((part for part in node.body if getattr(part, "name", None) == name), None)
        if node is None:
            return False
    return True


def test_every_named_test_exists():
    found = re.findall(r"`((?:papers/)?tests/[\w/]+\.py)((?:::\w+)*)`", PAGE)
    assert len(found) > 100
    assert [pair for pair in found if not has(pair[0], pair[1].split("::")[1:])] == []


def test_every_named_entry_exists():
    found = re.findall(r"`(00\d/[\w.-]+)`", PAGE)
    assert found and set(found) <= set(CATALOGUE)
