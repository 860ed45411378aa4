"""README and documentation: code blocks run and print what is shown, links and quoted tests exist."""

import ast
import doctest
import functools
import importlib
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent


# programs of the documentation's build, which find each other beside them
sys.path.insert(0, str(ROOT / "docs"))
check, examples = (importlib.import_module(name) for name in ("check", "examples"))
sys.path.remove(str(ROOT / "docs"))
PAGES = check.pages()
CHECKER = doctest.OutputChecker()
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def name_of(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in PAGES if "```python" in p.read_text()], ids=name_of)
def test_code_blocks_run_and_print_what_they_show(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _, shown, printed in examples.run(page):
        if shown is not None:
            assert CHECKER.check_output(shown[2], printed, FLAGS), f"shown:\n{shown[2]}\nprinted:\n{printed}"
    for name in examples.SAVED.findall(page.read_text()):
        assert pathlib.Path(name).stat().st_size > 1000, name


def test_no_link_is_broken_no_figure_missing_no_name_undocumented():
    assert check.problems() == []


@pytest.mark.parametrize(
    "text, found",
    [
        ("[a](nowhere.md)", "leads nowhere"),
        ("[a](#no-such-heading)", "names no heading"),
        ("![a](images/none.png)", "leads nowhere"),
        ('```python\nfigure.savefig("none.png")\n```', "not stored"),
        ('```python\nfigure.savefig("overview.png")\n```', "not shown"),
        ("```python\nprint(1)\n```", "shows no output"),
    ],
)
def test_what_is_wrong_with_a_page_is_said(text, found, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n\n{text}\n")
    said = [line for look in (check.links, check.figures, check.outputs) for line in look(page)]
    assert len(said) == 1 and found in said[0]


# outputs that are only True or False: numbers, shapes and figures say more; what they asserted belongs into a test
YET_TO_DO = {
    "README.md": 1,
    "docs/learn/balance.md": 1,
    "docs/learn/batchnorm.md": 8,
    "docs/learn/dynamics.md": 5,
    "docs/learn/kinks.md": 1,
    "docs/learn/new_model.md": 5,
    "docs/learn/shift.md": 2,
    "docs/learn/sweeps.md": 2,
    "docs/reference/depth.md": 1,
    "docs/reference/flows.md": 10,
    "docs/reference/geometry.md": 2,
    "docs/reference/kernels.md": 7,
    "docs/reference/layers.md": 3,
    "docs/reference/measures.md": 1,
    "docs/reference/papers.md": 2,
    "docs/reference/solvers.md": 1,
    "docs/reference/sweeps.md": 2,
    "docs/reference/transport.md": 4,
    "docs/reference/univariate.md": 2,
    "docstrings": 27,
}


def only_true_or_false(lines):
    return sum(bool(re.search(r"\b(True|False)\b", line)) and not re.search(r"\d", line) for line in lines)


def test_outputs_are_numbers_and_not_true_or_false():
    """Fewer is always right; a page that gets more of them, or one that is not listed, fails."""
    found = {name_of(page): 0 for page in PAGES}
    for page in PAGES:
        shown = (below[2].splitlines() for _, below in examples.blocks(page.read_text()) if below)
        found[name_of(page)] = sum(map(only_true_or_false, shown))
    sources = sorted((ROOT / "meanflow").rglob("*.py"))
    parser = doctest.DocTestParser()
    wants = [
        e.want.splitlines() for p in sources for text in docstrings(p) for e in parser.get_examples(text)
    ]
    found["docstrings"] = sum(map(only_true_or_false, wants))
    assert {name: many for name, many in found.items() if many > YET_TO_DO.get(name, 0)} == {}


def docstrings(path):
    kinds = (ast.FunctionDef, ast.ClassDef, ast.Module)
    return [
        ast.get_docstring(node) or ""
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, kinds)
    ]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_rows_of_tables_are_complete(page):
    """As many cells as the head has; a bar inside a formula would cut it in two."""
    width = 0
    for line in examples.BLOCK.sub("", page.read_text()).splitlines():
        if not line.startswith("|"):
            width = 0
            continue
        bars = line.replace("\\|", "").count("|")  # those of cells; others are escaped
        width = width or bars
        assert bars == width and line.endswith("|"), line


@functools.cache
def names_in(path):
    """Names of the functions and classes of a file."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, kinds)}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_quoted_tests_exist(page):
    for path, name in re.findall(r"`((?:papers/)?tests/[\w/]+\.py)(?:::([\w:]+))?", page.read_text()):
        assert set(filter(None, name.split("::"))) <= names_in(path), f"{path}::{name}"
