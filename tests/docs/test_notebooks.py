"""The notebooks run from top to bottom in a fresh process, and their stored outputs belong to their code."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
RUNNER = ROOT / "scripts" / "notebooks.py"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

spec = importlib.util.spec_from_file_location("notebooks", RUNNER)
runner = importlib.util.module_from_spec(spec)
spec.loader.exec_module(runner)


def test_they_are_in_order():
    assert [path.name[0] for path in NOTEBOOKS] == list("12345678")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_stored_outputs_belong_to_the_code(path):
    notebook = json.loads(path.read_text())
    assert notebook["metadata"]["meanflow"]["code"] == runner.fingerprint(notebook), "run scripts/notebooks"
    figures = [
        o for cell in notebook["cells"] for o in cell.get("outputs", []) if "image/png" in o.get("data", {})
    ]
    assert figures
    assert not any(o["output_type"] == "error" for cell in notebook["cells"] for o in cell.get("outputs", []))
    assert path.stat().st_size < 400_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_runs_from_top_to_bottom(path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(RUNNER), "--check", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
