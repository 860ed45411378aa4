"""Docstrings of this package as Markdown: examples become code blocks, angle brackets stay visible."""

import re
from typing import Any

import griffe


def _prose(line: str) -> str:
    """Escapes what Markdown would take for markup, outside of `code`."""
    parts = re.split(r"(``.*?``|`[^`]*`)", line)
    return "".join(p if k % 2 else p.replace("<", "&lt;").replace("*", r"\*") for k, p in enumerate(parts))


def to_markdown(text: str) -> str:
    """A docstring in which doctest blocks are fenced and formulas in running text are left as they are written."""
    out: list[str] = []
    fenced = formula = False
    for line in text.splitlines():
        if line.startswith(">>>") and not fenced:
            out += ["", "```pycon"]
            fenced = True
        if fenced and not line.strip():
            out.append("```")
            fenced = False
        # indented after an empty line is a formula; indented below "Args:" is the body of a section
        indented = line.startswith("    ")
        formula = indented and (formula or bool(out) and not out[-1].strip())
        out.append(line if fenced or formula else _prose(line))
    if fenced:
        out.append("```")
    return "\n".join(out)


class MarkdownDocstrings(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)
