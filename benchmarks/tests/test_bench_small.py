"""Every other benchmark at a small size: it runs, and what does not depend on the clock is right."""

import math

import jax
import jax.numpy as jnp
import pytest

from meanflow_benchmarks import depth, flows, kernels, layers, memory, solvers, sweeps, timing, univariate


def test_velocities():
    out = flows.velocity_speed(width=20, points=10, dim=3, repeats=1)
    assert out["ratio_vanilla"] == pytest.approx(out["vanilla"] / out["products"])


def test_random_networks():
    out = depth.propagation(seeds=2, layers=2, width=200, batch=6, chunk=2)
    assert out["mean_angle"] == pytest.approx(out["infinite_width_angle"], abs=10)
    assert {f"{way}_seconds_per_layer" for way in ("numpy", "law", "weights")} == set(
        depth.propagation_peer(layers=1, width=10, batch=4)
    )


def test_distances_agree_with_their_peers():
    out = layers.distances(line=50, cloud=20, uneven=(5, 7), dimension=3, repeats=1)
    assert all(out[f"{job}_gap"] < 1e-6 for job in ("line", "equal", "uneven"))


def test_batch_norm_is_as_exact_as_two_passes():
    out = layers.batch_norm(batch=8, features=4, images=(2, 3, 3, 4), repeats=1)
    assert out["ours_error"] <= out["flax_two_pass_error"] + 1e-9


def test_forces():
    out = univariate.force_cost(width=20, samples=(3, 5), widths=(20, 40), fixed=4)
    assert math.isfinite(out["slope_samples"]) and math.isfinite(out["slope_widths"])
    out = univariate.against_dense(width=20, samples=4)
    assert out["speedup_over_autodiff"] == pytest.approx(out["autodiff"] / out["fast"])
    assert len(univariate.crossover(width=20, samples=(3, 5))["dense"]) == 2


def test_jobs_by_hand_compute_what_the_library_does():
    assert univariate.by_hand(width=20, samples=6, steps=5, repeats=1)["gap"] < 1e-5
    assert flows.tangent_kernel(points=5, width=7, dim=3, repeats=1)["gap"] < 1e-5
    assert flows.growth(widths=(4, 8), points=(5, 6), dim=2, repeats=1)["m8_n5_ms"] > 0
    assert solvers.kernel_steps(width=5, points=6, dim=2, steps=20, repeats=1)["kernel_step_ms"] > 0


def test_operator():
    out = kernels.operator(width=4, samples=5)
    assert out["passes"] == pytest.approx(out["product"] / out["forward"])


def test_regression():
    out = kernels.regression(samples=20, width=8, top=3, large=30)
    assert out["residual"] <= 2e-4 and out["large: residual"] <= 2e-4
    assert out["difference"] <= 1e-3


def test_times_and_memory():
    calls = []
    first, best = timing.best_time(calls.append, 1, repeats=3)
    assert len(calls) == 4 and best >= 0 and first >= 0
    assert timing.timed(divmod, 7, 2)[0] == (3, 1)
    assert memory.peak_bytes() > 10 * memory.MEGABYTE


def test_descent():
    out = solvers.minibatches(points=20, dim=2, width=3, batch=5, steps=8, repeats=1)
    assert out["ratio_epochs"] == pytest.approx(out["epochs_us"] / out["epochs_by_hand_us"])
    assert out["ratio_replace_bare"] == pytest.approx(out["replace_us"] / out["replace_bare_us"])
    out = solvers.gradients(width=3, points=4, dim=2, steps=8, repeats=1)
    assert out["ratio_full"] == pytest.approx(out["full_ms"] / out["by_hand_ms"])


def test_fixed_steps_and_blocks():
    out = solvers.fixed_steps(width=3, points=4, dim=2, steps=4, repeats=1)
    assert out["open_loops_solve"] > 0
    assert out["ratio_solve"] == pytest.approx(out["solve_us"] / out["scan_us"])
    out = flows.blocks(widths=(10, 20), points=5, dim=2, steps=2, repeats=1)
    assert out["ratio_20"] == pytest.approx(out["blocks_20_ms"] / out["whole_20_ms"])


def test_overlaps():
    out = solvers.overlaps(size=1, end=0.5, repeats=1)
    assert out["ratio"] == pytest.approx(out["solve_ms"] / out["scipy_ms"])
    assert out["error_solve"] < 1e-3 and out["error_scipy"] < 1e-3


def test_programs_by_hand_descend_alike():
    x = jnp.linspace(-1.0, 1.0, 5)
    start = tuple(jax.random.normal(key, (7,)) for key in jax.random.split(jax.random.key(0), 3))
    ends = [sweeps._descent(g, x, jnp.sin(x), 30, start) for g in (sweeps._by_grad, sweeps._by_masks)]
    assert ends[0] == pytest.approx(float(ends[1]), rel=1e-6)
    out = sweeps.by_hand(widths=(4, 5), deltas=3, seeds=1, steps=2, samples=3, repeats=1)
    assert out["ratio_grad"] == pytest.approx(out["sweep"] / out["grad"])
