"""Every figure and table of the unitization paper passes the criteria set before it was run."""

import numpy as np
import pytest

from meanflow.experiments import unitization


@pytest.mark.parametrize("name", ["theorems", "critic", "resnet_sizes"])
def test_quick(name):
    outcome = getattr(unitization, name)()
    assert outcome.passed, str(outcome)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["moments", "ics_trace", "micro_batches"])
def test_on_digits(name):
    outcome = getattr(unitization, name)()
    assert outcome.passed, str(outcome)


@pytest.mark.slow
def test_running_moments_hide_the_later_drops():
    outcome = unitization.ics_trace(moments="running", variants=("BN",))
    assert outcome.passed, str(outcome)
    assert np.all(outcome.data["BN"]["ratios"][0] > 1.5)
