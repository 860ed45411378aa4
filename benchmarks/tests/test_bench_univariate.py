"""The benchmarks of the univariate flows: what they claim beside seconds."""

import pytest

from meanflow_benchmarks import univariate as bench


@pytest.mark.slow
def test_tsit5_needs_many_more_evaluations():
    """200 coupled neurons: at least 100 times the force evaluations of the sliding solver at equal error or worse."""
    found = bench.against_tsit5()
    assert found["tsit5_reached_the_end"] and found["sliding_error"] <= found["tsit5_error"]
    assert found["tsit5_evaluations"] > 100 * found["sliding_evaluations"], found


@pytest.mark.slow
def test_many_neurons_in_single_precision():
    """A tenth of the million-neuron run, few steps: finishes, learns, and stays far below 4 GB."""
    found = bench.million(width=100_000, steps=20)
    assert found["ok"] == 1 and found["steps"] == 20
    assert found["energy"] < 0.98 * found["energy_before"] and found["peak_gigabytes"] < 4


@pytest.mark.slow
def test_sliding_runs_and_differentiates():
    found = bench.sliding(width=20, samples=5, steps=2, few=(6, 4, 3), repeats=1)
    assert found["ratio"] == pytest.approx(found["gradient_ms"] / found["run_ms"])
    assert found["neuron_steps_per_second"] > 0
