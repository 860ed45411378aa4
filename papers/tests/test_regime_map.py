"""The sweep over balances meets its criteria."""

import pytest

from meanflow_papers.univariate.figure_5_map import regime_map


@pytest.mark.slow
def test_regimes_have_the_numbers_of_the_theory():
    outcome = regime_map()
    assert outcome.passed, str(outcome)
