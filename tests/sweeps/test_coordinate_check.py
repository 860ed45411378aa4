"""The coordinate check: exponents of mean field and of NTK scaling."""

import numpy as np
import pytest

import meanflow as mf

X = np.random.default_rng(0).normal(size=(16, 4))
DATA = mf.Dataset(X, np.sin(X[:, 0]) + 0.5 * X[:, 1])
SETTINGS = {"t1": 2.0, "step": 0.25, "seeds": 8}


@pytest.mark.parametrize(
    ("alpha", "slopes"), [("sqrt", (0, 0, -0.5)), pytest.param("m", (-0.5, 0, 0), marks=pytest.mark.slow)]
)
def test_slopes_in_the_width(alpha, slopes):
    found = mf.sweeps.coordinate_check(
        mf.vanilla("tanh", alpha=alpha), DATA, widths=[64, 256, 1024], **SETTINGS
    )
    for name, slope in zip(("output", "change", "preactivation"), slopes, strict=True):
        assert abs(found.slopes[name] - slope) < 0.12, found


def test_bad_requests_are_refused():
    with pytest.raises(ValueError, match="at least two different widths"):
        mf.sweeps.coordinate_check(mf.vanilla("tanh"), DATA, widths=[8, 8])
    with pytest.raises(ValueError, match="must be a vanilla two-layer flow"):
        mf.sweeps.coordinate_check(mf.canonical(), mf.Dataset([0.0, 1.0], [0.0, 1.0]), widths=[8, 16])
