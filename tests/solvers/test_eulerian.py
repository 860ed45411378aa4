"""Finite volumes on the cylinder: conservation, positivity, and the same limit as the particles."""

import dataclasses
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ring, ring_problem
from scipy.stats import wasserstein_distance

import meanflow as mf
from meanflow import univariate
from meanflow.measures import laws, quadrature
from meanflow.solvers import eulerian
from meanflow.solvers.eulerian import evolve, uniform_density
from meanflow.univariate._features import Reduced


def test_conservative_positive_and_convergent_to_the_particle_limit():
    """Errors against a quadrature cloud fall as in the reference computation: 4.1e-3, 1.3e-3 on 40x32, 80x64 cells."""
    flow, data = ring_problem()
    laws_ = {"a": laws.uniform(), "b": laws.sphere(2)}
    cloud = flow.space.from_raw(quadrature((24, 64), mf.Neurons, laws_, rule=("gauss", "midpoint")))
    reference = mf.solve(flow, cloud, data, 5.0, step=0.125)
    f = mf.predict(flow, reference.final, data.x)
    errors = []
    for rows, columns in ((40, 32), (80, 64)):
        run = evolve(flow, uniform_density(rows, columns, 4.0), data, 5.0)
        assert float(jnp.min(run.final.mass)) >= 0
        np.testing.assert_allclose(jnp.sum(run.final.mass), 1, rtol=1e-13)
        # nothing has reached the walls
        assert float(run.final.mass[0].sum() + run.final.mass[-1].sum()) < 1e-3
        other = mf.predict(flow, run.final.cloud(flow.space), data.x)
        errors.append(float(jnp.sqrt(jnp.mean((other - f) ** 2))))
        np.testing.assert_allclose(run.energy[-1], reference.energy[-1], atol=0.02)
    assert errors[0] < 6e-3
    assert errors[1] < 0.55 * errors[0]


def test_marginals_move_as_the_continuity_equation_says():
    """Over a short time d/dt mean(a^2) = -2 mean(a F) and d/dt mean(cos) = mean(a F' sin), from the particle side."""
    flow, data = ring_problem()
    density = uniform_density(160, 128, 1.5)
    cloud = density.cloud(flow.space)
    v = mf.velocity(flow, cloud, data)
    a, b = cloud.particles
    s = mf.geometry.normalize(b)
    turn = jnp.sum((v.b - s * jnp.sum(s * v.b, 1, keepdims=True)) * jnp.stack([-s[:, 1], s[:, 0]], 1), 1)
    turn = turn / jnp.linalg.norm(b, axis=1)
    run = evolve(flow, density, data, 1e-3)
    centres, angles = density.centres()
    moved = run.final.mass - density.mass
    rate_a = float(jnp.sum(moved * centres[:, None] ** 2)) / 1e-3
    rate_cos = float(jnp.sum(moved * jnp.cos(angles)[None, :])) / 1e-3
    np.testing.assert_allclose(rate_a, cloud.weights @ (2 * a * v.a), atol=2e-2)
    np.testing.assert_allclose(rate_cos, cloud.weights @ (-s[:, 1] * turn), atol=2e-2)


class Bent(Reduced):
    """A feature that is not linear in r."""

    def outer_weight(self, cloud):
        return cloud.particles.r**3


def canonical_problem():
    x = jnp.linspace(-1, 1, 5)
    return univariate.canonical(), mf.Dataset(x, x**2, weights="sum")


@cache
def canonical_runs():
    """The canonical univariate flow to time 2: a quadrature cloud in small Heun steps, and grids of two sizes."""
    flow, data = canonical_problem()
    polar = {"r": laws.uniform(), "theta": laws.angle()}
    cloud = quadrature((24, 128), mf.measures.Polar, polar, rule=("gauss", "midpoint"))
    particles = mf.solve(flow, cloud, data, 2.0, step=0.005)
    grids = [evolve(flow, uniform_density(n, n, 4.0), data, 2.0, [0.01, 0.02, 0.03, 2.0]) for n in (40, 80)]
    return flow, data, particles, grids


def test_the_univariate_continuity_equation_has_the_particles_as_limit():
    """(11) on (r, theta): function and measure approach those of the particles at first order, as kinks allow."""
    flow, _, particles, grids = canonical_runs()
    z = jnp.linspace(-1, 1, 41)
    f = mf.predict(flow, particles.final, z)
    # distances of images under 1-Lipschitz functions of (r, cos, sin) bound W1 of the measures from below
    sides = lambda r, th: [np.asarray(u) for u in (r, jnp.cos(th), jnp.sin(th), jnp.abs(r))]
    there = sides(*particles.final.particles)
    gaps, distances = [], []
    for run in grids:
        cloud = run.final.cloud(flow.space)
        gaps.append(float(jnp.sqrt(jnp.mean((mf.predict(flow, cloud, z) - f) ** 2))))
        here = sides(*cloud.particles)
        weights = (np.asarray(particles.final.weights), np.asarray(cloud.weights))
        distances.append(max(wasserstein_distance(a, b, *weights) for a, b in zip(there, here, strict=True)))
    for errors in (gaps, distances):
        assert errors[1] < 0.65 * errors[0]
    assert gaps[1] < 0.01 and distances[1] < 0.05  # half a cell of the finer grid in r


def test_the_univariate_grid_conserves_mass_and_dissipates_energy():
    """Mass to rounding, nothing at the walls, and -dE/dt equal to int rho |grad V|^2 with forces of particles.

    The rate is compared at the start: mass that has gathered at a kink does not move, and dissipates less than that.
    """
    flow, data, _, grids = canonical_runs()
    run = grids[1]
    assert float(jnp.min(run.mass)) >= 0
    np.testing.assert_allclose(jnp.sum(run.mass, axis=(1, 2)), 1, rtol=1e-13)
    assert float(run.final.mass[0].sum() + run.final.mass[-1].sum()) < 1e-6
    energy = np.asarray(run.energy)
    assert np.all(np.diff(energy) < 0)
    cells = run.final.at(run.mass[1]).cloud(flow.space)
    fall = (energy[0] - energy[2]) / 0.02
    np.testing.assert_allclose(fall, mf.dissipation(flow, cells, data), rtol=0.03)


def nothing(f, y):
    """A loss without forces."""
    return 0.0 * f


def test_fisher_information_of_the_heat_flow():
    """No forces: N(0, s + 2 tau t) in a, 1 + e exp(-tau t) cos in the angle, whose Fisher informations are known."""
    tau, spread, tilt, rows, columns = 0.3, 0.25, 0.6, 110, 40
    data = mf.Dataset(ring(8), jnp.ones(8))
    flow = mf.batchnorm_manifold("tanh", nothing)
    grid = uniform_density(rows, columns, 5.0)
    a, th = grid.centres()
    mass = jnp.exp(-(a**2) / (2 * spread))[:, None] * (1 + tilt * jnp.cos(th))[None, :]
    run = evolve(flow, grid.at(mass / jnp.sum(mass)), data, 0.5, 26, temperature=tau)
    ts = np.asarray(run.ts)
    fading = tilt * np.exp(-tau * ts)
    closed = 1 / (spread + 2 * tau * ts) + 1 - np.sqrt(1 - fading**2)
    np.testing.assert_allclose(run.fisher, closed, rtol=4e-3)
    # de Bruijn: the entropy falls by tau times the Fisher information, so F = tau int rho log rho by tau^2 of it
    entropy = -0.5 * np.log(2 * np.pi * np.e * (spread + 2 * tau * ts))
    turn = 2 * np.pi * np.arange(4096) / 4096
    around = 1 + fading[:, None] * np.cos(turn)
    entropy += np.mean(around * np.log(around / (2 * np.pi)), axis=1)
    np.testing.assert_allclose(run.free_energy, tau * entropy, atol=1e-3 * tau)
    fall = -np.gradient(np.asarray(run.free_energy), ts, edge_order=2)
    np.testing.assert_allclose(fall[1:-1], tau**2 * np.asarray(run.fisher)[1:-1], rtol=2e-3)


def test_free_energy_falls_by_its_dissipation():
    """-dF/dt = int rho |grad(V + tau log rho)|^2, with forces from the particle side and differences of log rho."""
    flow, data = ring_problem()
    flow = mf.batchnorm_manifold("tanh", penalty=(lambda w: 0.5 * w.a**2, 0.5)).bind(data)
    tau = 0.3
    times = np.array([0.29, 0.3, 0.31])
    run = evolve(flow, uniform_density(64, 56, 3.5), data, times[-1], times, temperature=tau)
    free = np.asarray(run.free_energy)
    assert np.all(np.diff(free) < 0)
    here = run.final.at(run.mass[1])
    cloud = here.cloud(flow.space)
    v = mf.velocity(flow, cloud, data)
    s = mf.geometry.normalize(cloud.particles.b)
    across = jnp.stack([-s[:, 1], s[:, 0]], axis=1)
    turn = jnp.sum(v.b * across, axis=1) / jnp.linalg.norm(cloud.particles.b, axis=1)
    log = np.log(here.mass)
    da, dth = (float(u) for u in here.spacing)
    score_a = np.gradient(log, da, axis=0)
    score_th = (np.roll(log, -1, 1) - np.roll(log, 1, 1)) / (2 * dth)
    speed_a = np.reshape(v.a, log.shape) - tau * score_a
    speed_th = np.reshape(turn, log.shape) - tau * score_th
    mass = np.asarray(here.mass)
    np.testing.assert_allclose(
        (free[0] - free[2]) / 0.02, np.sum(mass * (speed_a**2 + speed_th**2)), rtol=0.02
    )
    # its part without forces is Fisher's
    np.testing.assert_allclose(run.fisher[1], np.sum(mass * (score_a**2 + score_th**2)), rtol=0.02)
    compact = evolve(flow, uniform_density(20, 16, 5.0), data, 0.01, 2)
    assert np.isinf(compact.fisher[0])  # a jump of the density


@pytest.mark.bad_input
def test_bad_input_is_refused():
    flow, data = ring_problem()
    with pytest.raises(ValueError, match="flow must live on a flat cylinder"):
        evolve(mf.vanilla("tanh"), uniform_density(8, 8, 2.0), data, 1.0)
    solid = mf.Dataset(np.random.default_rng(0).normal(size=(6, 3)), np.ones(6))
    with pytest.raises(ValueError, match=r"x must have shape \(n, 2\)"):
        evolve(mf.batchnorm_manifold("tanh"), uniform_density(8, 8, 2.0), solid, 1.0)
    univariate_flow, samples = canonical_problem()
    bent = dataclasses.replace(univariate_flow, feature=Bent("dense"))
    with pytest.raises(ValueError, match="linear in the height"):
        evolve(bent, uniform_density(8, 8, 2.0), samples, 1.0)
    with pytest.raises(ValueError, match="half_width must lie in"):
        uniform_density(8, 8, 0.5)
    assert ring(8).shape == (8, 2)


def test_a_run_without_end_is_refused(monkeypatch):
    """Courant steps shrink with the speeds: 1e60 used to take for ever, infinity too."""
    data = mf.Dataset(jnp.array([[1.0, 0.0], [0.0, 1.0], [-1.0, -0.5]]), jnp.array([1.0, 2.0, 3.0]))
    flow, density = mf.batchnorm_manifold("tanh"), eulerian.uniform_density(6, 8, 3.0)
    with pytest.raises(ValueError, match="t1 must be finite"):
        eulerian.evolve(flow, density, data, np.inf)
    for large in (1e60, 1e300):
        with pytest.raises(ValueError, match="t1 must be reached in at most 1000000 steps"):
            eulerian.evolve(flow, density, mf.Dataset(data.x, large * data.y), 0.5)
    with pytest.raises(ValueError, match="ts must be "):
        eulerian.evolve(flow, density, data, 0.5, ts=[0.1, np.nan])
    # speeds may grow after the start: the budget of steps holds then
    monkeypatch.setattr(eulerian, "MAX_STEPS", 7)
    problem = eulerian._DensityProblem(flow.bind(data), density, data)
    bounded = eulerian._evolve(problem, jnp.asarray(5.0), None)
    assert not bounded.reached and int(bounded.steps) == 7
