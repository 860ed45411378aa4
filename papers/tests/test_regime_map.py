"""The sweep over balances meets its criteria."""

import pytest

from meanflow_papers.univariate.figure_5_map import regime_map


@pytest.mark.slow
def test_regimes_lie_in_the_order_of_the_claim():
    outcome = regime_map()
    assert outcome.passed, str(outcome)
