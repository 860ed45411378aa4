"""The figures and tables of the unitization paper, with criteria set before they were run."""

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from meanflow_papers.unitization.algorithm_3 import algorithm_3
from meanflow_papers.unitization.figure_2 import figure_2
from meanflow_papers.unitization.figure_3 import figure_3
from meanflow_papers.unitization.table_4 import difference, equivalence, table_4
from meanflow_papers.unitization.tables_1_2 import resnet_sizes
from meanflow_papers.unitization.theorems import theorems


@pytest.mark.parametrize("experiment", [theorems, algorithm_3, resnet_sizes])
def test_quick(experiment):
    outcome = experiment()
    assert outcome.passed, str(outcome)
    if experiment is algorithm_3:  # the factor K of Algorithm 3 is not a constant
        ratios = [outcome.data[case]["ratio"] for case in ("shift 0.3", "shift 1", "scale 1.5", "scale 3")]
        assert max(ratios) / min(ratios) == pytest.approx(5.7, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", [figure_2, figure_3])
def test_on_digits(experiment):
    """The numbers in the errata are those asserted here; float32 training, so they are not exact."""
    outcome = experiment()
    assert outcome.passed, str(outcome)
    if experiment is figure_2:
        alpha = outcome.data["runs"]["(10) from 0"][
            "alpha"
        ]  # (seeds, 8): all of the small layer, in every seed
        assert alpha.shape == (4, 8) and np.all(alpha < 0)
        np.testing.assert_allclose([alpha.max(), alpha.min()], [-0.20, -0.46], atol=0.1)
        ratios = outcome.data["ratios"]  # from epochs 4, 21 and 31 on
        np.testing.assert_allclose(ratios["alpha = 1"]["kurtosis"], [0.46, 0.65, 0.68], rtol=0.25)
        np.testing.assert_allclose(ratios["(10) from 0"]["kurtosis"], [1.04, 1.02, 1.02], rtol=0.25)


@pytest.mark.slow
def test_running_moments_hide_the_later_drops():
    outcome = figure_3(moments="running", variants=("BN",))
    assert outcome.passed, str(outcome)
    assert np.all(outcome.data["BN"]["ratios"][0] > 1.5)


def test_equivalence_bound_against_two_one_sided_tests():
    """Two one-sided t tests at the reported bound have the larger p-value 0.05 exactly."""
    values, base = np.array([0.95, 0.97, 0.96, 0.93]), np.array([0.96, 0.95, 0.97, 0.95])
    bound = equivalence(values, base)
    upper = ttest_1samp(values - base, bound, alternative="less").pvalue
    lower = ttest_1samp(values - base, -bound, alternative="greater").pvalue
    assert max(upper, lower) == pytest.approx(0.05, rel=1e-9)
    gap, half = difference(values, base)
    inside = ttest_1samp(values - base, 0.0).confidence_interval(0.95)
    np.testing.assert_allclose([gap - half, gap + half], [inside.low, inside.high], rtol=1e-12)


@pytest.mark.slow
def test_micro_batches():
    outcome = table_4()
    assert outcome.passed, str(outcome)
