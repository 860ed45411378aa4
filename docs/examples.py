"""Run the examples of pages: refresh what they print and the figures they save.

A block marked ``python`` is followed by what it prints, in a block marked ``text``, if it prints anything. A figure
that it saves as ``name.png`` is kept as ``docs/images/name.png``, and the page shows it. The tests run the same
examples and compare; this program writes what they printed and drew into the sources.

Usage: python docs/examples.py PAGE...
"""

import contextlib
import io
import os
import pathlib
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

IMAGES = pathlib.Path(__file__).parent / "images"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```\n?", re.DOTALL | re.MULTILINE)
SAVED = re.compile(r"savefig\(\"(\w+\.png)\"")


def blocks(text: str) -> Iterator[tuple[re.Match[str], re.Match[str] | None]]:
    """Python blocks, each with the block of output right below it, or None."""
    found = list(BLOCK.finditer(text))
    for block, follows in zip(found, [*found[1:], None], strict=False):
        if block[1] == "python":
            below = follows and follows[1] == "text" and not text[block.end() : follows.start()].strip()
            yield block, follows if below else None


def run(page: pathlib.Path) -> Iterator[tuple[re.Match[str], re.Match[str] | None, str]]:
    """Run the blocks of a page one after the other, in one namespace and the current folder, with what they print."""
    space: dict[str, Any] = {"__name__": page.stem}
    text = page.read_text()
    for block, shown in blocks(text):
        out = io.StringIO()
        code = "\n" * text.count("\n", 0, block.start(2)) + block[2]  # errors name the line of the page
        with contextlib.redirect_stdout(out):
            exec(compile(code, str(page), "exec"), space)
        yield block, shown, out.getvalue()


def refresh(page: pathlib.Path) -> None:
    """Write what the examples of a page print into it, and keep the figures they save."""
    text, parts, done = page.read_text(), [], 0
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for block, shown, printed in run(page):
            lines = "\n".join(line.rstrip() for line in printed.splitlines())
            parts += [text[done : block.end()], f"```text\n{lines}\n```\n" if lines else ""]
            done = shown.end() if shown else block.end()
        for name in SAVED.findall(text):
            if os.path.exists(name):
                shutil.copy(name, IMAGES / name)
    page.write_text("".join(parts) + text[done:])


if __name__ == "__main__":
    for given in sys.argv[1:]:
        refresh(pathlib.Path(given).resolve())
