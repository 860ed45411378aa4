"""The figures and theorems of "BN decomposed" meet their criteria."""

import pytest
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
