"""Write the pages of the documentation site into a folder, from which a site generator builds it (scripts/docs).

The sources are readable as they are; this step does what Markdown alone cannot:

* ``<!-- reference: meanflow.room -->`` becomes one entry of the reference per public name of the room.
* Blocks marked ``math``, and what stands between dollar signs, become MathML, which browsers draw by
  themselves: no script, no network.
* ``<!-- file: name.py -->`` becomes the program of that name.
* README.md becomes the first page and each notebook a page, with links adjusted.

It is a program of its own and no plug-in of the site generator, so that the generator can be exchanged.
Usage: python docs/pages.py FOLDER
"""

import base64
import json
import pathlib
import re
import shutil
import sys
from typing import Any

import names
from latex2mathml.converter import convert

DOCS = pathlib.Path(__file__).parent
ROOT = DOCS.parent


def _entry(path: str, heading: str) -> str:
    return f"::: {path}\n    options:\n        heading: {heading}\n        toc_label: {heading}\n"


def _reference(match: re.Match[str]) -> str:
    """Entries for a package, or for the modules of one that exports none of them by name."""
    package = match.group(1)
    if match.group(2):
        below = sorted(p.stem for p in names.source(package).parent.glob("*.py") if p.stem != "__init__")
        listed = [names.Name(name, f"{package}.{name}", True) for name in below]
    else:
        listed = names.exported(package)
    parts = [_entry(n.path, n.name) for n in listed if not n.is_module]
    for n in (n for n in listed if n.is_module):
        parts.append(f"## {package.split('.', 1)[-1]}.{n.name}\n")
        options = "        show_root_heading: false\n        show_root_toc_entry: false\n"
        parts.append(f"::: {n.path}\n    options:\n{options}")
    return "\n".join(parts)


def _math(match: re.Match[str]) -> str:
    lines = [line for line in match.group(1).splitlines() if line.strip()]
    return "".join(f'<div class="math">{convert(line, display="block")}</div>\n' for line in lines)


CODE = re.compile(r"(^```.*?^```|``.+?``|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
DISPLAY = re.compile(r"^\$\$(.+?)\$\$$", re.DOTALL | re.MULTILINE)  # as notebooks write them
INLINE = re.compile(r"(?<![\w$\\])\$(?=\S)([^$]+?)(?<=\S)\$(?!\w)")


def _span(match: re.Match[str]) -> str:
    # in a span: an element that Markdown does not know would end the paragraph where it begins a line
    return f"<span>{convert(match[1].replace(chr(10), ' '))}</span>"


def _inline(markdown: str) -> str:
    """Equations between dollar signs; code keeps its own."""
    parts = CODE.split(markdown)
    return "".join(
        part if k % 2 else INLINE.sub(_span, DISPLAY.sub(_math, part)) for k, part in enumerate(parts)
    )


def expand(markdown: str) -> str:
    """Expand reference entries and equations, and lead links to notebooks to their pages."""
    markdown = re.sub(r"<!-- reference: ([\w.]+)( modules)? -->", _reference, markdown)
    markdown = re.sub(
        r"<!-- file: (\w+\.py) -->", lambda m: f"```python\n{(DOCS / m[1]).read_text()}```", markdown
    )
    markdown = re.sub(r"^```math\n(.*?)^```", _math, markdown, flags=re.DOTALL | re.MULTILINE)
    markdown = _inline(markdown)
    # a page below docs/learn or docs/reference finds the notebooks' pages where the sources have the notebooks
    return re.sub(r"\]\(\.\./\.\./notebooks/(\w+)\.ipynb\)", r"](../notebooks/\1.md)", markdown)


def _front_page() -> str:
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"\]\(docs/", "](", text).replace("](plain_jax.py)", "](plain.md)")
    text = re.sub(r"\]\(notebooks/(\w+)\.ipynb\)", r"](notebooks/\1.md)", text)
    return text.replace('src="docs/', 'src="')


def _lines(value: Any) -> str:
    return value if isinstance(value, str) else "".join(value)


def _notebook(path: pathlib.Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its pictures by file name."""
    parts, pictures = [], {}
    for cell in json.loads(path.read_text())["cells"]:
        text = _lines(cell["source"])
        if cell["cell_type"] == "markdown":
            text = re.sub(r"\]\((\w+)\.ipynb\)", r"](\1.md)", text)
            parts.append(re.sub(r"\]\(\.\./docs/", "](../", text))
            continue
        parts.append(f"```python\n{text}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                name = f"{path.stem}_{len(pictures)}.png"
                pictures[name] = base64.b64decode(_lines(data["image/png"]))
                parts.append(f"![Figure of the cell above]({name})")
            elif _lines(data["text/plain"]).strip():
                parts.append(f"``` {{ .text .output }}\n{_lines(data['text/plain']).rstrip()}\n```")
    return "\n\n".join(parts), pictures


def write(folder: pathlib.Path) -> None:
    """Write all pages and pictures of the site; what the folder held before is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(DOCS, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (folder / "index.md").write_text(_front_page())
    (folder / "notebooks").mkdir()
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        text, pictures = _notebook(path)
        (folder / "notebooks" / f"{path.stem}.md").write_text(text)
        for name, data in pictures.items():
            (folder / "notebooks" / name).write_bytes(data)
    for page in folder.rglob("*.md"):
        page.write_text(expand(page.read_text()))


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))
