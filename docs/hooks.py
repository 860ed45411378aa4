"""Steps of the documentation's build that Markdown alone cannot take.

* ``<!-- reference: meanflow.room -->`` becomes one entry of the reference per public name of the room.
* Blocks marked ``math`` become MathML, which browsers draw by themselves: no script, no network.
* README.md becomes the first page and each notebook a page, with links adjusted.
"""

import base64
import importlib.util
import json
import pathlib
import re
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

DOCS = pathlib.Path(__file__).parent
ROOT = DOCS.parent


def _names() -> Any:
    spec = importlib.util.spec_from_file_location("names", DOCS / "names.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


names = _names()


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


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Expands reference entries and equations."""
    markdown = re.sub(r"<!-- reference: ([\w.]+)( modules)? -->", _reference, markdown)
    markdown = re.sub(r"^```math\n(.*?)^```", _math, markdown, flags=re.DOTALL | re.MULTILINE)
    # a page below docs/learn or docs/reference finds the notebooks' pages where the sources have the notebooks
    return re.sub(r"\]\(\.\./\.\./notebooks/(\w+)\.ipynb\)", r"](../notebooks/\1.md)", markdown)


def _front_page() -> str:
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"\]\(docs/", "](", text)
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


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are made from README.md and from the notebooks."""
    files.append(File.generated(config, "index.md", content=_front_page()))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        text, pictures = _notebook(path)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        for name, data in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=data))
    return files
