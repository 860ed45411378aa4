import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray

import meanflow as mf
from meanflow.sweeps import fit_exponents
from meanflow.sweeps._exponents import collapse


def paired(key, width, alpha):
    """(a, b) uniform on the unit circle, c = +-1 in pairs: f_0 = 0, delta = 0 (theory of lazy training)."""
    theta = jnp.tile(jax.random.uniform(key, (width // 2,), minval=-jnp.pi, maxval=jnp.pi), 2)
    sign = jnp.repeat(jnp.array([1.0, -1.0]), width // 2)
    return mf.Cloud(mf.Polar(width ** (1 - alpha) * sign, theta))


X = jnp.linspace(-1.0, 1.0, 6)
LAZY = mf.Dataset(X, jnp.sin(2.5 * X) + 0.3 * X, "sum")


def test_neurons_turn_by_alpha_over_m():
    """Everything moves O(alpha/m), so the exponent is alpha - 1, if runs are compared at one loss.

    At one time they are not at one stage: for alpha = m^(1/2) the narrow networks take three times as long, and after
    300 steps the exponent is -0.41. Width 128 is too narrow for that alpha: alpha/m = 0.09 is not small. Start, steps
    and balance are the defaults.
    """
    alphas = (0.0, 0.25, 0.5)
    diagram = mf.phase_diagram(
        LAZY, widths=(512, 1024, 2048), alphas=alphas, level=1e-2, variables=("angle_displacement", "t")
    )
    found = diagram.isel(delta=0)
    assert np.isfinite(found.sweep_angle_displacement).all()  # every run got there
    np.testing.assert_allclose(found.exponent_angle_displacement, np.array(alphas) - 1, atol=0.04)
    assert np.all(found.error_angle_displacement < 0.04)


@pytest.mark.slow
def test_lazy_training_has_the_numbers_of_the_theory():
    """Slopes and rms turn * m/alpha at a loss of 1e-3: 2.8 (alpha = 1), 2.85 to 2.95 (sqrt m), 0.57 (m)."""
    found = mf.phase_diagram(
        LAZY,
        widths=(512, 1024, 2048, 4096),
        alphas=(0.0, 0.25, 0.5, 1.0),
        level=1e-3,
        seeds=4,
        init=paired,
        steps=2000,
        every=10,
        step=mf.KernelStep(0.5),
        variables=("angle_displacement",),
    ).isel(delta=0)
    np.testing.assert_allclose(found.exponent_angle_displacement, [-0.999, -0.754, -0.514, 0.0], atol=0.03)
    turn = found.sweep_angle_displacement.mean("seed")
    scaled = turn * turn.width ** (1 - turn.alpha)
    np.testing.assert_allclose(scaled.sel(alpha=0.0), 2.8, rtol=0.08)
    np.testing.assert_allclose(scaled.sel(alpha=0.5), 2.9, rtol=0.08)
    np.testing.assert_allclose(scaled.sel(alpha=1.0), 0.57, rtol=0.08)


@pytest.mark.slow
def test_defaults_show_the_phases():
    """Without any choice: neurons turn less with the width for alpha < 1, and not so at alpha = 1.

    Networks this narrow, compared at the end, are only near the exponents -1, -1/2 and 0 that the test above finds.
    """
    found = mf.phase_diagram(LAZY, widths=(32, 64, 128), seeds=2, variables=("angle_displacement",))
    lazy, ntk, rich = found.exponent_angle_displacement.isel(delta=0).values
    assert -1.1 < lazy < -0.75 < ntk < -0.25 < rich < 0.1
    assert found.delta.values.tolist() == [0.0]


def test_values_where_the_loss_reaches_a_level():
    """Against a run whose loss is exp(-t) and whose observable is t: the level e^-k is reached at t = k."""
    runs = synthetic(-0.7, 0.0)
    time = np.linspace(0.0, 5.0, 26)
    shape = (*runs.speed.shape, time.size)
    runs["energy"] = ((*runs.speed.dims, "step"), np.broadcast_to(3 * np.exp(-time), shape).copy())
    runs["age"] = ((*runs.speed.dims, "step"), np.broadcast_to(time, shape) * runs.speed.values[..., None])
    runs.energy[0, 0] = 3.0  # never gets there
    fitted = fit_exponents(runs, ["age"], level=np.exp(-2.5))
    assert float(fitted.exponent_age) == pytest.approx(-0.7, abs=1e-12)
    assert float(fitted.prefactor_age) == pytest.approx(2.5 * 3.0, rel=1e-10)
    with pytest.raises(ValueError, match="widths must be even"):
        mf.phase_diagram(LAZY, widths=(3, 4))
    with pytest.raises(ValueError, match="level"):
        mf.phase_diagram(LAZY, widths=(2, 4), level=0.0, steps=1, step=0.1)


def synthetic(exponent, noise, seeds=6, widths=(50, 100, 200, 400)):
    rng = np.random.default_rng(0)
    m = np.array(widths, float)
    value = 3 * m[:, None] ** exponent * np.exp(noise * rng.normal(size=(len(widths), seeds)))
    result = (
        ("width", "seed"),
        np.zeros((len(widths), seeds), int),
        {"flag_meanings": "ok event_occurred", "flag_values": [0, 3]},
    )
    return xarray.Dataset(
        {"speed": (("width", "seed"), value), "result": result},
        {"width": list(widths), "seed": np.arange(seeds)},
    )


def test_fit_recovers_a_power_law_with_an_honest_error():
    exact = fit_exponents(synthetic(-0.7, 0.0), ["speed"])
    assert float(exact.exponent_speed) == pytest.approx(-0.7, abs=1e-12)
    assert float(exact.prefactor_speed) == pytest.approx(3.0, rel=1e-10) and float(exact.error_speed) < 1e-12
    # the slope of log-noise s over n seeds has standard deviation s / sqrt(n sum (x - mean)^2)
    runs = synthetic(-0.7, 0.1, seeds=4000)
    x = np.log(runs.width.values)
    expected = 0.1 / np.sqrt(4000 * np.sum((x - x.mean()) ** 2))
    noisy = fit_exponents(runs, ["speed"])
    assert expected / 2 < float(noisy.error_speed) < 3 * expected
    assert abs(float(noisy.exponent_speed) + 0.7) < 5 * expected


def test_failed_runs_are_left_out_and_cells_without_a_fit_are_named():
    runs = synthetic(-0.5, 0.0)
    runs["result"][1, 2] = 7
    runs["speed"][1, 2] = 1e9
    found = fit_exponents(runs, ["speed"])
    assert float(found.exponent_speed) == pytest.approx(-0.5) and found.problem_speed.item() == ""
    with pytest.warns(
        UserWarning, match="1 of 1 exponents of speed are NaN:\n  all runs: .* of 24 runs 24 have a value"
    ):
        assert np.isnan(fit_exponents(runs * 0, ["speed"]).exponent_speed)
    both = xarray.concat([runs, runs], xarray.DataArray([0.0, 1.0], dims="delta", name="delta"))
    both["result"][1, 0, :] = 7
    with pytest.warns(
        UserWarning, match="1 of 2 exponents of speed are NaN:\n  delta = 1.0: no seed .* 7 failed"
    ):
        found = fit_exponents(both, ["speed"])
    assert np.isnan(found.exponent_speed[1]) and found.exponent_speed[0] == pytest.approx(-0.5)
    assert found.problem_speed[0].item() == "" and "of 24 runs 7 failed" in found.problem_speed[1].item()


def crossover(noise=0.0, seeds=1):
    """Curves of value * m^(1/4) that depend on delta * m^(-1/2) alone."""
    widths, deltas = (50, 100, 200, 400), np.array([-30.0, -10, -3, -1, 0, 1, 3, 10, 30])
    m = np.array(widths, float)[:, None]
    k = deltas[None, :] * m**-0.5
    value = (m**-0.25 * (1 + k / np.sqrt(1 + k**2)) / 2 + 1e-3 * m**-0.25)[:, :, None]
    value = value * np.exp(noise * np.random.default_rng(0).normal(size=(*value.shape[:2], seeds)))
    flags = {"flag_meanings": "ok event_occurred", "flag_values": [0, 3]}
    return xarray.Dataset(
        {
            "turn": (("width", "delta", "seed"), value),
            "result": (("width", "delta", "seed"), 0 * value, flags),
        },
        {"width": list(widths), "delta": deltas, "seed": range(seeds)},
    )


def test_collapse_finds_the_scaling_variable():
    found = collapse(crossover().turn).to_series()
    assert np.isnan(found.a_error) and np.isnan(found.b_error)  # one seed says nothing about scatter
    assert found.a == pytest.approx(-0.5, abs=0.05) and found.b == pytest.approx(0.25, abs=0.05)
    assert found.quality < 0.2 * found.raw


def test_errors_of_the_collapse_are_those_of_its_scatter():
    """Over many groups of seeds the jackknife error is the standard deviation of the exponents, within a factor 2."""
    runs = crossover(noise=0.1, seeds=80)
    groups = [collapse(runs.turn.isel(seed=slice(k, k + 8))).to_series() for k in range(0, 80, 8)]
    for name in ("a", "b"):
        scatter = np.std([g[name] for g in groups], ddof=1)
        claimed = np.sqrt(np.mean([g[f"{name}_error"] ** 2 for g in groups]))
        assert 0.5 < claimed / scatter < 2


def test_the_diagram_holds_the_collapse_of_every_alpha_and_scale():
    settings = {
        "widths": (8, 12, 16),
        "deltas": (-np.inf, -5.0, 0.0, 5.0),
        "seeds": 2,
        "steps": 40,
        "step": 0.02,
    }
    chosen = {
        "alphas": (0.5, 1.0),
        "axes": {"scale": (1.0, 2.0)},
        "variables": ("energy", "angle_displacement"),
    }
    with pytest.warns(
        UserWarning, match="4 of 16 exponents of angle_displacement"
    ):  # at delta = -inf nothing turns
        diagram = mf.phase_diagram(LAZY, init=lambda *given: mf.lifted().init(*given), **chosen, **settings)
    assert diagram.collapse_energy.sizes == {"scale": 2, "alpha": 2, "number": 6}
    runs = mf.sweep(
        lambda width: mf.lifted(alpha=width**0.5),
        LAZY,
        axes={"scale": (2.0,)},
        observe=("angle_displacement",),
        **settings,
    )
    alone = collapse(runs.angle_displacement.isel(step=-1, scale=0))
    there = diagram.collapse_angle_displacement.sel(alpha=0.5, scale=2.0)
    np.testing.assert_allclose(there, alone, atol=1e-3)
