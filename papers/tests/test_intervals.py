"""Intervals over seeds against scipy's tests and against their own coverage."""

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from meanflow_papers.intervals import bootstrap, difference, equivalence, mean, ratio, told

VALUES, BASE = np.array([0.95, 0.97, 0.96, 0.93]), np.array([0.96, 0.95, 0.97, 0.95])


def test_means_and_ratios_against_scipy():
    inside = ttest_1samp(VALUES, 0.0).confidence_interval(0.95)
    np.testing.assert_allclose(mean(VALUES), [VALUES.mean(), inside.low, inside.high], rtol=1e-12)
    logs = ttest_1samp(np.log(VALUES / BASE), 0.0).confidence_interval(0.95)
    expected = [np.prod(VALUES / BASE) ** 0.25, np.exp(logs.low), np.exp(logs.high)]
    np.testing.assert_allclose(ratio(VALUES, BASE), expected, rtol=1e-12)
    np.testing.assert_array_equal(np.isnan(mean(VALUES[:1])), [False, True, True])
    assert told(mean(VALUES)) == "0.95 [0.93, 0.98]"


def test_equivalence_bound_against_two_one_sided_tests():
    """Two one-sided t tests at the reported bound have the larger p-value 0.05 exactly."""
    values, base = VALUES, BASE
    bound = equivalence(values, base)
    upper = ttest_1samp(values - base, bound, alternative="less").pvalue
    lower = ttest_1samp(values - base, -bound, alternative="greater").pvalue
    assert max(upper, lower) == pytest.approx(0.05, rel=1e-9)
    gap, half = difference(values, base)
    inside = ttest_1samp(values - base, 0.0).confidence_interval(0.95)
    np.testing.assert_allclose([gap - half, gap + half], [inside.low, inside.high], rtol=1e-12)


def test_bootstrap_covers_the_truth_about_as_often_as_it_says():
    """The median of 20 normal values: 0 lies inside nineteen times in twenty, up to what 60 trials can tell."""
    rng = np.random.default_rng(1)
    rows = [bootstrap(np.median, rng.normal(size=20), draws=400) for _ in range(60)]
    assert 0.85 <= np.mean([low <= 0 <= high for _, low, high in rows]) <= 1.0
    same = rng.normal(size=20)
    np.testing.assert_array_equal(bootstrap(np.median, same), bootstrap(np.median, same))
