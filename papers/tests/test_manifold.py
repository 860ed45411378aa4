"""Figures and theorems of the batch-norm manifold paper meet the criteria of the theory."""

import pytest
from meanflow.experiments import batchnorm


@pytest.mark.parametrize("name", ["figure_2", "figure_3"])
def test_quick_experiments(name):
    outcome = getattr(batchnorm, name)()
    assert outcome.passed, str(outcome)


def test_equivalence_on_a_short_horizon():
    outcome = batchnorm.equivalence(width=6, points=60, t1=2.0)
    assert outcome.passed, str(outcome)
    assert outcome.data["c in 0.2..5"]["gap"] < 1e-9  # with the factor 1/c^2
    assert outcome.data["c in 0.2..5"]["printed"] == pytest.approx(0.25, abs=0.01)  # without it


def test_bounds_of_theorem_4():
    outcome = batchnorm.theorem_4_bounds(width=64)
    assert outcome.passed, str(outcome)
    speed = next(c.value for c in outcome.criteria if c.name == "largest |a'| / bound")
    assert speed == pytest.approx(0.67, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["figure_1", "learning_rates", "equivalence", "theorem_4", "theorem_5"])
def test_long_experiments(name):
    outcome = getattr(batchnorm, name)()
    assert outcome.passed, str(outcome)
    if name == "figure_1":  # the numbers of the errata
        values = {c.name: c.value for c in outcome.criteria}
        assert values["probe anisotropy of BN"] == pytest.approx(7.1, rel=0.05)
        assert values["probe anisotropy of vanilla"] == pytest.approx(1.4, rel=0.05)
        ratio = outcome.data["peak_ratio_at_equal_loss"]
        assert 0.15 < ratio.min() < ratio.max() < 0.75
