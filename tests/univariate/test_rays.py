"""Attractors, repulsors, regions and the residual equation, each against something independent."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meanflow as mf
from meanflow import univariate as uni
from meanflow.measures import Affine, Cloud, Dataset, Polar
from meanflow.univariate import _events as events
from meanflow.univariate import _forces as forces
from meanflow.univariate import balance
from meanflow.univariate._angles import unit
from meanflow.univariate._residual import region_covariances

classify = jax.jit(jax.vmap(uni.classify_rays))
attracting = jax.jit(jax.vmap(uni.attracting_angles))


@functools.cache
def draws(seed, count=1667, s=6):
    """Many samples and residuals (count, s), with the table of the 2 s rays of each: 20004 rays."""
    rng = np.random.default_rng(seed)
    x, rho = np.sort(rng.uniform(-2, 2, (count, s)), axis=1), rng.standard_normal((count, s))
    return x, rho, jax.tree.map(np.asarray, classify(x, rho))


def potential(theta, x, rho):
    z = x[..., :, None] * np.cos(theta)[..., None, :] + np.sin(theta)[..., None, :]
    return np.sum(rho[..., :, None] * np.maximum(z, 0), axis=-2)


def brute_kinds(theta, x, rho, sign, h=1e-7):
    """Local minima (1) and maxima (-1) of sign * F at the rays, by differences on both sides."""
    here, left, right = (sign * potential(theta + s, x, rho) for s in (0.0, -h, h))
    return np.where((left > here) & (right > here), 1, np.where((left < here) & (right < here), -1, 0))


def test_rule_equals_extrema_of_the_angular_potential():
    x, rho, table = draws(0)
    theta = np.concatenate([-np.arctan(x)[:, ::-1], np.pi - np.arctan(x)[:, ::-1]], axis=1)
    np.testing.assert_allclose(np.sin(table.theta - theta), 0, atol=1e-12)
    # at the edges of the dead arc F is flat on one side: no strict extremum, both rules say 0
    assert np.array_equal(table.positive, brute_kinds(theta, x, rho, 1))
    assert np.array_equal(table.negative, brute_kinds(theta, x, rho, -1))


def test_printed_lemma_has_false_positives_only():
    """Lemma 2 as printed keeps one of the two inequalities: never misses, but over-reports."""
    x, rho, table = draws(1)
    gram = rho[:, :, None] * rho[:, None, :] * (x[:, :, None] * x[:, None, :] + 1)
    own = np.einsum("nkk->nk", gram)
    below, above = np.triu(gram, 1).sum(1), np.tril(gram, -1).sum(1)
    printed = np.concatenate([above[:, ::-1] > -own[:, ::-1], below[:, ::-1] > -own[:, ::-1]], axis=1)
    true = table.positive != 0
    assert true.size == 20004 and not np.any(~printed & true)
    assert (np.sum(printed & ~true), np.sum(printed & true)) == (11602, 3786)


def test_jump_condition_holds_from_the_smaller_angle():
    """(14): |s_k| < |rho| |x~| and opposite signs, with s_k on the region at the smaller theta.

    Printed without an orientation: read from the larger theta it misses every attractor and repulsor.
    """
    x, rho, table = draws(2)
    before = table.theta - 1e-7
    seen = x[:, None, :] * np.cos(before)[:, :, None] + np.sin(before)[:, :, None] > 0  # (draw, ray, sample)
    force = np.stack([seen @ (rho * x)[:, :, None], seen @ rho[:, :, None]], -1)[:, :, 0]
    s_k = -force[..., 0] * np.sin(table.theta) + force[..., 1] * np.cos(table.theta)
    pick = lambda u: np.take_along_axis(u, table.sample, axis=1)
    # on either facing the component beyond the ray is s_k + rho |x~|
    own = pick(rho) * np.hypot(pick(x), 1)
    inside = np.abs(s_k) < np.abs(own) * (1 - 1e-9)  # equal at the edge of the dead arc
    found = (np.sign(s_k) == -np.sign(own)) & inside
    assert np.array_equal(found, table.positive != 0) and found.size == 20004 and found.sum() > 3000
    assert not np.any(np.sign(s_k + own)[found] == -np.sign(own)[found])


def test_frozen_flow_ends_at_the_predicted_set():
    """2000 neurons in a frozen residual: all end on an attracting ray, an interior direction, or dead."""
    x, rho = jnp.array([-1.0, -0.5, 0.1, 0.4, 1.0]), jnp.array([0.7, -1.0, 0.9, -0.8, 0.4])
    data = Dataset(x, rho, weights="sum")
    cloud = Cloud(Polar(jnp.tile(jnp.array([1.0, -1.0]), 1000), jnp.linspace(-3.14, 3.14, 2000)))
    flow = uni.planar(alpha="m", loss=lambda f, y: f * y)
    sol = mf.solve(flow, cloud, data, 2e4, solver="sliding", step=5e3)
    assert bool(sol.ok)
    table = uni.classify_rays(x, rho)
    inner = uni.attracting_angles(x, rho)
    r, theta = (np.asarray(u) for u in sol.final.particles)
    dead = np.asarray(forces.find_regions(unit(sol.final.particles.theta + 0.0), x)) == 0
    for sign, kind, interior in ((1, table.positive, inner[0]), (-1, table.negative, inner[1])):
        allowed = np.concatenate([table.theta[kind == 1], interior[np.isfinite(interior)]])
        mine = (np.sign(r) == sign) & ~dead
        gap = np.abs(np.sin((theta[mine][:, None] - allowed[None, :]) / 2)).min(1)
        edge = np.abs(np.sin((theta[mine][:, None] - np.asarray(table.theta)[None, [0, 9]]) / 2)).min(1)
        assert np.mean(np.minimum(gap, edge) < 5e-3) == 1.0
    assert 0.1 < dead.mean() < 0.6


def test_interior_directions_are_minima():
    x, rho, _ = draws(3, 300)
    for sign, angles in zip((1, -1), attracting(x, rho), strict=True):
        there = np.isfinite(angles)
        theta = np.where(there, angles, 0.0)
        here, left, right = (sign * potential(theta + s, x, rho)[there] for s in (0, -1e-4, 1e-4))
        assert np.all(here < left) and np.all(here < right) and np.all(here < 0)  # |r| grows: r' = -F
        assert there.sum() > 50


def test_regions_dead_arc_and_angles():
    x = jnp.array([-1.0, -0.2, 0.5, 1.0])
    direction = np.asarray(events.freeze(x, jnp.ones(4), forward=True).rays)[:, :2]
    table = uni.classify_rays(x, jnp.ones(4))
    normal = np.stack([x[table.sample], np.ones(8)], axis=1)
    np.testing.assert_allclose(np.sum(normal * direction, 1), 0, atol=1e-15)
    np.testing.assert_allclose(np.sum(direction**2, 1), 1, rtol=1e-15)
    np.testing.assert_allclose(unit(table.theta), direction, atol=1e-15)
    eps = 1e-9
    low = forces.find_regions(unit(table.theta - eps), x)
    high = forces.find_regions(unit(table.theta + eps), x)
    assert low.tolist() == list(range(8)) and high.tolist() == [1, 2, 3, 4, 5, 6, 7, 0]
    theta = jnp.linspace(-jnp.pi, jnp.pi, 100001)[1:]
    share = jnp.mean(forces.find_regions(unit(theta), x) == 0)
    arc = jnp.pi - (jnp.arctan(x[-1]) - jnp.arctan(x[0]))  # of the directions that see no sample
    np.testing.assert_allclose(share, arc / (2 * jnp.pi), atol=2e-5)
    np.testing.assert_allclose(arc / (2 * jnp.pi), 0.25)


@pytest.mark.parametrize("model", ["canonical", "lifted", "planar", "radial", "full"])
def test_proposition_1(model):
    """(13) with region covariances against the derivative of the predictions along the velocity, and -K rho."""
    rng = np.random.default_rng(4)
    x = np.array([0.3, -1.0, 0.9, -0.2])
    data = Dataset(x, rng.standard_normal(4), weights=jnp.array([1.0, 2.0, 0.5, 1.0]))
    if model == "full":
        cloud, flow = Cloud(Affine(*rng.standard_normal((3, 9)))), uni.full(alpha="sqrt")
    else:
        labels = jnp.linspace(-2, 2, 9) if model == "lifted" else None
        cloud, flow = Cloud(Polar(*rng.standard_normal((2, 9))), labels=labels), getattr(uni, model)()
    got = uni.residual_ode(flow, cloud, data)
    v = mf.velocity(flow, cloud, data)
    _, rate = jax.jvp(lambda w: mf.predict(flow, cloud.at(w), data.x), (cloud.particles,), (v,))
    np.testing.assert_allclose(got, rate, rtol=1e-12, atol=1e-13)
    kernel = mf.tangent_kernel(flow, cloud, data.x)
    rho = mf.predict(flow, cloud, data.x) - data.y
    np.testing.assert_allclose(got, -kernel @ (data.weights * rho), rtol=1e-12, atol=1e-13)
    if model == "canonical":
        sigma = region_covariances(flow, cloud, jnp.sort(data.x))
        d = np.asarray(unit(cloud.particles.theta))
        t = np.stack([-d[:, 1], d[:, 0]], 1)
        each = np.einsum("m,mi,mj->mij", np.asarray(cloud.particles.r) ** 2, t, t) + np.einsum(
            "mi,mj->mij", d, d
        )
        np.testing.assert_allclose(sigma.sum(0), each.mean(0), rtol=1e-12)


@pytest.mark.bad_input
@pytest.mark.parametrize("function", [uni.classify_rays, uni.attracting_angles])
def test_residuals_belong_to_samples(function):
    with pytest.raises(ValueError, match=r"residual must have shape \(3,\), got shape \(2,\)"):
        function(jnp.array([-1.0, 0.0, 1.0]), jnp.array([1.0, 2.0]))
    with pytest.raises(ValueError, match="x must be finite"):
        function(jnp.array([jnp.nan, 0.0]), jnp.array([1.0, 2.0]))
    with pytest.raises(ValueError, match="residual must be an array"):
        function(jnp.array([-1.0, 0.0]), None)


@pytest.mark.bad_input
def test_the_residual_equation_is_for_univariate_flows(key):
    data = Dataset(jnp.ones((4, 2)), jnp.ones(4))
    flow = mf.vanilla()
    with pytest.raises(ValueError, match="flow must be a flow of univariate ReLU neurons"):
        uni.residual_ode(flow, flow.init(key, 5, dim=2), data)


@pytest.mark.bad_input
def test_lifts_need_the_right_neurons():
    polar = Cloud(Polar(jnp.ones(2), jnp.ones(2)), labels=1.0)
    with pytest.raises(TypeError, match="cloud must hold Affine neurons, got particles of type Polar"):
        balance.project(polar)
    with pytest.raises(TypeError, match="cloud must hold Polar neurons, got particles of type Affine"):
        balance.lift(balance.lift(polar))
    with pytest.raises(TypeError, match="cloud must be a Cloud"):
        balance.lift(polar.particles)
