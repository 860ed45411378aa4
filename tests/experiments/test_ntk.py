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
    """Two of the four E1 bounds hold in every draw; those on the plain network do not, see the finding."""
    by_name = {c.name: c for c in ntk.spectral_bias_line(seeds=3).criteria}
    assert by_name["steps to error 0.2 at k = 8, BN over plain"].passed
    assert by_name["final error at k = 16, BN"].passed
