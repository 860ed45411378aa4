"""The page of errata names tests and entries that exist, and quotes what is printed."""

import ast
import re
from pathlib import Path

import pytest
from quoted import is_printed

from meanflow_papers.catalogue import CATALOGUE
from meanflow_papers.entry import PAPERS, VERDICTS

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


def cells(line):
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def rows_of_errata():
    """Every row of a table of errata with its paper: (paper, where, printed)."""
    papers = {"Riemannian": "001", "Gradient": "004", "NTK": "000", "Batch": "002", "Internal": "003"}
    papers |= {"Univariate": "004", "Coordinate": "000", "Decomposed": "002", "Unitizing": "003"}
    paper = ""
    for line in PAGE.splitlines():
        if line.startswith("## "):
            paper = papers.get(line.split()[1], "")
        if not line.startswith("|") or line.startswith("|---") or "| printed |" in line:
            continue
        row = cells(line)
        if len(row) == 5 and paper:
            yield paper, row[0], row[1]
        elif len(row) == 6:
            yield papers[row[0].split()[0]], row[1], row[2]


def test_what_is_printed_is_quoted_or_said_not_to_be_printed():
    rows = list(rows_of_errata())
    assert len(rows) > 100
    assert [row for row in rows if not re.search("“[^”]+”", row[2]) and row[2] != "(not printed)"] == []


@pytest.mark.parametrize("paper", sorted(PAPERS))
def test_quotes_of_the_errata_are_printed(paper):
    quotes = [
        quote
        for name, _, cell in rows_of_errata()
        if name == paper
        for quote in re.findall("“([^”]+)”", cell)
    ]
    assert quotes and [quote for quote in quotes if not is_printed(paper, quote)] == []


def test_the_page_defines_the_words_of_verdicts():
    assert all(f"| {word} | {meaning} |" in PAGE for word, meaning in VERDICTS.items())
