"""Executes notebooks from top to bottom and stores what they print and draw.

    scripts/notebooks                    refreshes the outputs of all notebooks
    scripts/notebooks 3 5                only of those whose number is given
    scripts/notebooks --check PATH       runs one and changes nothing (the tests do this)

A light stand-in for a Jupyter kernel (no server, no sockets): cells run in one namespace, the value of a last
expression is shown, open figures become PNG outputs. Each notebook gets a fresh process, so that its first cell can
still configure JAX.
"""

import ast
import base64
import contextlib
import hashlib
import io
import json
import pathlib
import subprocess
import sys
import time
from typing import Any

FOLDER = pathlib.Path(__file__).parent.parent / "notebooks"


def source(cell: dict[str, Any]) -> str:
    """The text of a cell."""
    return cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])


def fingerprint(notebook: dict[str, Any]) -> str:
    """A digest of the code cells, stored with the outputs: it tells whether they belong together."""
    code = [source(cell) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return hashlib.sha256("\n\n".join(code).encode()).hexdigest()[:16]


def run_cell(code: str, space: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs a cell and returns its outputs: text printed, value of a last expression, figures."""
    import matplotlib.pyplot as plt

    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    text, outputs, value = io.StringIO(), [], None
    with contextlib.redirect_stdout(text):
        exec(compile(tree, "<cell>", "exec"), space)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), space)
    if text.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": text.getvalue().splitlines(True)})
    if value is not None and not code.rstrip().endswith(";"):
        data = {"text/plain": repr(value).splitlines(True)}
        outputs.append(
            {"output_type": "execute_result", "data": data, "metadata": {}, "execution_count": None}
        )
    for number in plt.get_fignums():
        picture = io.BytesIO()
        plt.figure(number).savefig(picture, format="png", dpi=72, bbox_inches="tight")
        data = {"image/png": base64.b64encode(picture.getvalue()).decode(), "text/plain": ["<Figure>"]}
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    plt.close("all")
    return outputs


def execute(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with fresh outputs."""
    import matplotlib

    matplotlib.use("Agg")
    space: dict[str, Any] = {"__name__": "__main__"}
    count = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            cell["outputs"] = run_cell(source(cell), space)
            cell["execution_count"] = count
            for output in cell["outputs"]:
                if "execution_count" in output:
                    output["execution_count"] = count
    notebook["metadata"]["meanflow"] = {"code": fingerprint(notebook)}
    return notebook


def main(arguments: list[str]) -> None:
    """The command line."""
    if arguments and arguments[0] in ("--check", "--store"):
        path = pathlib.Path(arguments[1])
        notebook = execute(json.loads(path.read_text()))
        if arguments[0] == "--store":
            path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
        return
    for path in sorted(FOLDER.glob("*.ipynb")):
        if not arguments or path.stem.split("_")[0] in arguments:
            start = time.perf_counter()
            subprocess.run([sys.executable, __file__, "--store", str(path)], check=True)
            print(f"{path.name}: {time.perf_counter() - start:.0f} s, {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
