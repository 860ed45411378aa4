"""The figures and theorems of "BN decomposed" meet their criteria."""

import pytest

from meanflow.bench import depth as bench
from meanflow.experiments import decomposed as figures
from meanflow.experiments import decomposed_theorems as theorems


@pytest.mark.parametrize("experiment", [theorems.odd_states, figures.figure_4, figures.figures_7_8])
def test_short_experiments(experiment):
    outcome = experiment()
    assert outcome.passed, str(outcome)


@pytest.mark.slow
@pytest.mark.parametrize(
    "experiment",
    [
        figures.figure_2,
        figures.figure_3,
        figures.figure_3_no_outlier,
        figures.figure_3_digits,
        figures.figure_5,
        figures.figure_5_digits,
        figures.figure_6,
        theorems.theorem_3,
        theorems.theorem_11,
        theorems.theorems_13_14,
        theorems.linear_rescale,
        theorems.linear_recenter,
        theorems.one_neuron_per_sample,
    ],
)
def test_long_experiments(experiment):
    outcome = experiment()
    assert outcome.passed, str(outcome)


@pytest.mark.slow
def test_hundred_networks_in_one_program():
    # 100 seeds x depth 100 x width 1000 x batch 64; memory must not grow with the number of seeds
    result = bench.propagation()
    assert abs(result["mean_angle"] - result["infinite_width_angle"]) < 0.5
    assert (
        result["temporary_mb"] < 100
    )  # all 100 networks side by side would need 100 times one batch: 2.5 GB
    assert result["output_mb"] < 250
