"""README and documentation: code blocks run and print what is shown, links and quoted tests exist."""

import ast
import contextlib
import doctest
import functools
import io
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CHECKER = doctest.OutputChecker()
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```\n?", re.DOTALL | re.MULTILINE)


def blocks(text):
    """Python blocks with the output shown right below them (a ``text`` block), or None."""
    found = list(BLOCK.finditer(text))
    for k, block in enumerate(found):
        if block.group(1) == "python":
            follows = found[k + 1] if k + 1 < len(found) else None
            adjacent = (
                follows and follows.group(1) == "text" and not text[block.end() : follows.start()].strip()
            )
            yield block.group(2), follows.group(2) if adjacent else None


def name_of(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in PAGES if "```python" in p.read_text()], ids=name_of)
def test_code_blocks_run_and_print_what_they_show(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    space: dict = {"__name__": page.stem}
    for code, shown in blocks(page.read_text()):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, str(page), "exec"), space)
        if shown is not None:
            assert CHECKER.check_output(shown, out.getvalue(), FLAGS), (
                f"shown:\n{shown}\nprinted:\n{out.getvalue()}"
            )


def anchors(text):
    """Anchors of a page's headings, as GitHub and mkdocs make them."""
    titles = re.findall(r"^#+ (.*)$", BLOCK.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve(page):
    text = BLOCK.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", text):
        link = "".join(target)
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        place = page.parent / path if path else page
        assert place.exists(), f"{link} in {page.name}"
        if anchor:
            assert anchor in anchors(place.read_text()), f"{link} in {page.name}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_rows_of_tables_are_complete(page):
    """As many cells as the head has; a bar inside a formula would cut it in two."""
    width = 0
    for line in BLOCK.sub("", page.read_text()).splitlines():
        if not line.startswith("|"):
            width = 0
            continue
        width = width or line.count("|")
        assert line.count("|") == width and line.endswith("|"), line


@functools.cache
def names_in(path):
    """Names of the functions and classes of a file."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, kinds)}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_quoted_tests_exist(page):
    for path, name in re.findall(r"`((?:papers/)?tests/[\w/]+\.py)(?:::([\w:]+))?", page.read_text()):
        assert set(filter(None, name.split("::"))) <= names_in(path), f"{path}::{name}"
