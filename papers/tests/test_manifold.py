"""Figures and theorems of the batch-norm manifold paper meet the criteria of the theory."""

import pytest

from meanflow_papers.manifold.figure_1 import figure_1
from meanflow_papers.manifold.figure_2 import figure_2
from meanflow_papers.manifold.figure_3 import figure_3
from meanflow_papers.manifold.learning_rates import learning_rates
from meanflow_papers.manifold.theorem_3 import theorem_3
from meanflow_papers.manifold.theorem_4 import theorem_4, theorem_4_bounds
from meanflow_papers.manifold.theorem_5 import theorem_5


@pytest.mark.parametrize("experiment", [figure_2, figure_3])
def test_quick_experiments(experiment):
    outcome = experiment()
    assert outcome.passed, str(outcome)


def test_equivalence_on_a_short_horizon():
    outcome = theorem_3(width=6, points=60, t1=2.0)
    assert outcome.passed, str(outcome)
    assert outcome.data["c in 0.2..5"]["gap"].max() < 1e-9  # with the factor 1/c^2
    assert outcome.data["c in 0.2..5"]["printed"].max() == pytest.approx(0.25, abs=0.01)  # without it


def test_bounds_of_theorem_4():
    outcome = theorem_4_bounds(width=64)
    assert outcome.passed, str(outcome)
    speed = next(c.value for c in outcome.criteria if c.name == "largest |a'| / sqrt(2 L(0))")
    assert speed == pytest.approx(0.67, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", [figure_1, learning_rates, theorem_3, theorem_4, theorem_5])
def test_long_experiments(experiment):
    outcome = experiment()
    assert outcome.passed, str(outcome)
    if experiment is figure_1:  # the numbers of the errata
        values = {c.name: c.value for c in outcome.criteria}
        assert values["Q of BN at 4000, narrow"] == pytest.approx(-0.86, abs=0.01)
        assert values["largest peak speed at equal loss, wide"] == pytest.approx(0.67, abs=0.01)
        assert values["largest peak speed at equal loss, narrow"] == pytest.approx(1.36, abs=0.02)
        assert values["least probe anisotropy of BN, unequal variances"] == pytest.approx(2.8, abs=0.1)
