"""``meanflow bench``: found by the command line, lists benchmarks, passes arguments, names what is wrong."""

import json

import pytest
from click.testing import CliRunner

from meanflow.cli import main
from meanflow.cli._extension import registered
from meanflow_benchmarks import peers


def call(*arguments, code=0):
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    if result.exit_code != code:
        raise AssertionError(f"exit code {result.exit_code}: {result.output}{result.exception!r}")
    return result.output


def test_registered_and_listed():
    assert registered()["bench"].dist.name == "meanflow-benchmarks"
    assert "From meanflow-benchmarks" in " ".join(call("--help").split())
    text = call("bench", "--help")
    assert "Usage" in text and "  meanflow bench" in text and "--json" in text
    lines = call("bench", "--list").splitlines()
    assert all(": " in line for line in lines)
    names = [line.split(":")[0] for line in lines]
    assert "sweeps.grid_speed" in names and "kernels.speed" in names
    assert not any("problem" in name for name in names)  # helpers are no benchmarks


def test_benchmarks_take_arguments():
    small = ("deltas=3", "seeds=1", "steps=2", "samples=3", "widths=[4, 5]", "peers=[]")
    flags = [part for setting in small for part in ("--set", setting)]
    text = call("bench", "sweeps.grid_speed", "--precision", "float64", "--json", *flags)
    numbers = json.loads(text)["sweeps.grid_speed"]
    assert numbers["programs"] == 1 and numbers["waste"] == pytest.approx(0.1)
    assert numbers["particle_steps"] * numbers["run"] == pytest.approx(9 * 3 * 2)
    assert numbers["speedup_loop"] == pytest.approx(numbers["loop"] / numbers["run"])
    assert "got 'lenght'" in call("bench", "sweeps", "--set", "lenght=3", code=2)
    assert "NAME must be one of" in call("bench", "sweep", code=2)


def test_peers_are_found_where_they_are_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    assert peers.interpreters(peers.NAMES) == {}
    assert "tangents, torch" in peers.left_out(peers.NAMES)["left out"]
    python = tmp_path / ".venv-torch" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert peers.interpreters(peers.NAMES) == {"torch": str(python)}
    assert "torch" not in peers.left_out(peers.NAMES)["left out"]
    assert peers.interpreters(peers.NAMES, known=("tangents",)) == {}
    assert peers.left_out(("torch",)) == peers.left_out(peers.NAMES, known=("torch",)) == {}
    with pytest.raises(ValueError, match="got 'jax'"):
        peers.interpreters(("jax",))
