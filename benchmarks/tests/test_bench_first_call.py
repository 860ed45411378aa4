"""``first_call.rows``: fresh processes, parts that do not count a moment twice, and results that are stored."""

import json

import pytest
from click.testing import CliRunner

from meanflow.cli import main
from meanflow_benchmarks import first_call


def test_a_row_in_a_fresh_process_is_stored(tmp_path):
    row = "velocity: by hand"
    # the command sets the precision of its process, which here is that of the tests
    flags = [
        "--precision",
        "float64",
        "--set",
        f"names=['{row}']",
        "--set",
        "programs=true",
        "--store",
        str(tmp_path / "results"),
    ]
    result = CliRunner().invoke(main, ["bench", "first_call", "--json", *flags])
    assert result.exit_code == 0, result.output
    stored = json.loads((tmp_path / "results" / "first_call.rows.json").read_text())
    numbers = stored["numbers"]
    assert {"commit", "versions", "processor", "day"} <= set(stored)
    assert stored["settings"] == {"names": [row], "programs": True}
    # one small program was compiled, and the second call compiled nothing
    assert numbers[f"{row}: programs"] >= 1 and numbers[f"{row}: lines"] > numbers[f"{row}: fusions"]
    assert numbers[f"{row}: compiling"] > 0 and numbers[f"{row}: again"] < numbers[f"{row}: compiling"]


def test_times_of_inner_traces_count_once():
    assert first_call._covered([(0.0, 2.0), (1.0, 1.5), (1.0, 2.5), (3.0, 4.0)]) == pytest.approx(3.5)


def test_unknown_rows_are_refused():
    with pytest.raises(ValueError, match="names must be parts of"):
        first_call.rows(("nothing",))
