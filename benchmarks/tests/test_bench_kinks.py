"""The benchmarks of kinks in any dimension: what they claim beside seconds."""

import pytest

from meanflow_benchmarks import kinks as bench


@pytest.mark.slow
def test_ordinary_solvers_need_a_hundred_times_the_evaluations():
    """200 neurons, 100 samples, d = 10: at an error of 1e-4, or the others do not get there at all."""
    found = bench.work_precision(sliding=(2, 4), euler=(1000, 10_000), tolerances=(1e-5,), max_steps=8000)
    ours = found["sliding_evaluations_at_target"]
    for name in ("euler", "heun", "tsit5", "dopri8"):
        assert found[f"{name}_evaluations_at_target"] > 100 * ours, (name, found)


@pytest.mark.slow
def test_many_neurons_in_single_precision():
    """A tenth of the neurons, few steps: finishes, learns as descent does, and stays far below 4 GB."""
    found = bench.scale(width=5000, samples=200, dim=20, steps=10)
    assert found["ok"] == 1 and found["crossings"] > 0 and found["peak_gigabytes"] < 4
    assert abs(found["energy"] - found["euler_energy"]) < 1e-3
