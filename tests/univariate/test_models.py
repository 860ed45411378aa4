"""Coordinates of a univariate neuron, the five metrics, and their agreement."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plane import to_plane

from meanflow import univariate as uni
from meanflow.flows import dissipation, energy, first_variation, predict, tangent_kernel, velocity
from meanflow.measures import Affine, Cloud, Dataset, Polar, quadrature
from meanflow.measures._scaling import Scaling, speed
from meanflow.measures.laws import angle, uniform
from meanflow.univariate import balance
from meanflow.univariate._angles import unit

DATA = Dataset(jnp.array([-1.0, -0.3, 0.2, 0.9]), jnp.array([0.5, -1.0, 0.3, 1.2]), weights="sum")


def affine(seed=0, m=7):
    rng = np.random.default_rng(seed)
    return Cloud(Affine(*rng.standard_normal((3, m))))


@pytest.mark.parametrize("alpha", ["m", "sqrt", "one", 2.5])
def test_projection_and_lift_are_inverse_and_keep_the_function(alpha):
    raw = affine()
    polar = balance.project(raw, alpha)
    again = balance.lift(polar, alpha)
    for u, v in zip(raw.particles, again.particles, strict=True):
        np.testing.assert_allclose(u, v, rtol=1e-13, atol=1e-14)
    x = jnp.linspace(-2, 2, 11)
    f = predict(uni.full(alpha=alpha), raw, x)
    np.testing.assert_allclose(predict(uni.lifted(alpha=alpha), polar, x), f, rtol=1e-13, atol=1e-13)
    a, b, c = raw.particles
    by_hand = sum(c[i] * np.maximum(a[i] * x - b[i], 0) for i in range(7))
    scale = {"m": 7, "sqrt": np.sqrt(7), "one": 1.0}.get(alpha, alpha)
    np.testing.assert_allclose(f, by_hand / scale, rtol=1e-13)


@pytest.mark.parametrize("delta", [-1e12, -1e3, -1.0, 0.0, 1.0, 1e3, 1e12])
def test_stable_split(delta):
    q = jnp.array([-3.0, -1e-6, 1e-3, 2.0, 1e5])
    c, n = balance.split(q, jnp.full_like(q, delta))
    np.testing.assert_allclose(c * n, q, rtol=5e-16)
    assert np.all(np.sign(c) == np.sign(q))
    np.testing.assert_allclose(c**2 + n**2, np.hypot(delta, 2 * q), rtol=1e-15)


def test_textbook_split_loses_c():
    q, delta = 1.0, -1e12
    assert (delta + np.sqrt(delta**2 + 4 * q**2)) / 2 == 0.0
    c, _ = balance.split(jnp.array(q), jnp.array(delta))
    np.testing.assert_allclose(c, 1e-6, rtol=1e-12)


def test_split_at_the_ends_and_at_zero():
    q = jnp.array([-2.0, 0.0, 3.0])
    c, n = balance.split(q, jnp.full(3, jnp.inf))
    assert c.tolist() == [-1, 1, 1] and n.tolist() == [2, 0, 3]
    c, n = balance.split(q, jnp.full(3, -jnp.inf))
    assert c.tolist() == [-2, 0, 3] and n.tolist() == [1, 1, 1]
    c, n = balance.split(jnp.zeros(3), jnp.array([-4.0, 0.0, 4.0]))
    assert c.tolist() == [0, 0, 2] and n.tolist() == [2, 0, 0]
    slope = jax.grad(lambda u: balance.split(u, jnp.array(-4.0))[0])(0.0)
    np.testing.assert_allclose(slope, 0.5)  # c = q / n
    assert np.isfinite(jax.grad(lambda u: balance.split(u, jnp.array(0.0))[0])(0.0))


@pytest.mark.parametrize("alpha", ["m", "sqrt", "one"])
def test_lifted_velocity_is_the_pushforward_of_the_full_one(alpha):
    raw = affine(1)
    polar = balance.project(raw, alpha)
    v = velocity(uni.full(alpha=alpha), raw, DATA)
    push = lambda w: balance.project(raw.at(w), alpha).particles
    _, expected = jax.jvp(push, (raw.particles,), (v,))
    got = velocity(uni.lifted(alpha=alpha), polar, DATA)
    np.testing.assert_allclose(got.r, expected.r, rtol=1e-12)
    np.testing.assert_allclose(got.theta, expected.theta, rtol=1e-12)
    np.testing.assert_allclose(
        dissipation(uni.lifted(alpha=alpha), polar, DATA), dissipation(uni.full(alpha=alpha), raw, DATA)
    )
    x = jnp.linspace(-1, 1, 5)
    np.testing.assert_allclose(
        tangent_kernel(uni.lifted(alpha=alpha), polar, x),
        tangent_kernel(uni.full(alpha=alpha), raw, x),
        rtol=1e-12,
    )


@pytest.mark.parametrize(("limit", "frozen"), [(np.inf, (True, False)), (-np.inf, (False, True))])
def test_infinite_balance_is_one_frozen_layer(limit, frozen):
    polar = Cloud(Polar(*np.random.default_rng(2).standard_normal((2, 6))), labels=limit)
    raw = balance.lift(polar, "sqrt")
    flow = uni.full(alpha="sqrt", inner=frozen[0], outer=frozen[1])
    v = velocity(flow, raw, DATA)
    _, expected = jax.jvp(lambda w: balance.project(raw.at(w), "sqrt").particles, (raw.particles,), (v,))
    named = (uni.planar if limit > 0 else uni.radial)(alpha="sqrt")
    for model in (uni.lifted(alpha="sqrt"), named):
        got = velocity(model, polar, DATA)
        np.testing.assert_allclose(got.r, expected.r, rtol=1e-12)
        np.testing.assert_allclose(got.theta, expected.theta, rtol=1e-12, atol=1e-14)


def test_planar_field_is_constant_in_the_plane():
    polar = Cloud(Polar(*np.random.default_rng(3).standard_normal((2, 9))))
    v = velocity(uni.planar(), polar, DATA)
    push = to_plane
    _, uv = jax.jvp(push, (polar.particles,), (v,))
    f = predict(uni.planar(), polar, DATA.x)
    d = unit(polar.particles.theta)
    active = (d @ jnp.stack([DATA.x, jnp.ones(4)])) > 0
    force = active.astype(float) @ ((f - DATA.y)[:, None] * jnp.stack([DATA.x, jnp.ones(4)], -1))
    np.testing.assert_allclose(uv, -jnp.sign(polar.particles.r)[:, None] * force, atol=1e-13)


def test_planar_retraction_is_a_straight_step():
    polar = Cloud(Polar(*np.random.default_rng(4).standard_normal((2, 9))))
    flow = uni.planar()
    v = velocity(flow, polar, DATA)
    moved = flow.space.retract(polar, v)
    _, uv = jax.jvp(to_plane, (polar.particles,), (v,))
    np.testing.assert_allclose(to_plane(moved), to_plane(polar.particles) + uv, atol=1e-13)


@pytest.mark.parametrize("model", ["canonical", "lifted", "planar", "radial", "full"])
def test_dissipation_is_the_energy_rate(model):
    flow = getattr(uni, model)()
    rng = np.random.default_rng(5)
    cloud = affine(5) if model == "full" else Cloud(Polar(*rng.standard_normal((2, 7))))
    if model == "lifted":
        cloud = Cloud(cloud.particles, labels=jnp.linspace(-2, 2, 7))
    v = velocity(flow, cloud, DATA)
    h = 1e-6
    at = lambda t: energy(flow, cloud.at(jax.tree.map(lambda w, u: w + t * u, cloud.particles, v)), DATA)
    np.testing.assert_allclose((at(-h) - at(h)) / (2 * h), dissipation(flow, cloud, DATA), rtol=1e-7)


def test_delta_and_weight_decay():
    raw = affine(6)
    for lam, rate in [(None, 0.0), (0.3, -0.6)]:
        v = velocity(uni.full(alpha="sqrt", penalty=lam), raw, DATA)
        _, slope = jax.jvp(balance.balance, (raw.particles,), (v,))
        np.testing.assert_allclose(slope, rate * balance.balance(raw.particles), atol=1e-13)


@pytest.mark.parametrize("clock", ["mean_field", "gradient", "lazy"])
@pytest.mark.parametrize("alpha", ["m", "sqrt", "one"])
def test_three_clocks(alpha, clock):
    """Velocity in each clock against the gradient of the plain loss: w' = -m grad L in mean-field time."""
    raw, flow, m = affine(8), uni.full(alpha=alpha), 7
    scale = {"m": m, "sqrt": np.sqrt(m), "one": 1.0}[alpha]

    def loss(w):
        z = w.c[None, :] * jax.nn.relu(w.a[None, :] * DATA.x[:, None] - w.b[None, :])
        return 0.5 * jnp.sum((z.sum(1) / scale - DATA.y) ** 2)

    per_gradient_time = {"mean_field": m, "gradient": 1.0, "lazy": scale**2 / m}[clock]
    pace = speed(clock, Scaling(alpha), raw)
    got = jax.tree.map(lambda u: pace * u, velocity(flow, raw, DATA))
    for u, g in zip(got, jax.grad(loss)(raw.particles), strict=True):
        np.testing.assert_allclose(u, -per_gradient_time * g, rtol=1e-12, atol=1e-14)


def test_padding_and_quadrature():
    raw, flow = affine(9), uni.full(alpha="sqrt")
    padded = raw.pad(12)
    np.testing.assert_allclose(energy(flow, padded, DATA), energy(flow, raw, DATA), rtol=1e-14)
    np.testing.assert_allclose(velocity(flow, padded, DATA).a[:7], velocity(flow, raw, DATA).a, rtol=1e-13)
    cloud = quadrature((4, 64), Polar, {"r": uniform(), "theta": angle()})
    assert np.isfinite(energy(uni.canonical(), cloud, DATA))
    with pytest.raises(ValueError, match="finite cloud.width"):
        velocity(uni.planar(alpha="sqrt"), cloud, DATA)


def test_first_variation_is_homogeneous():
    cloud = Cloud(Polar(*np.random.default_rng(1).standard_normal((2, 5))))
    probes = Polar(jnp.array([1.0, 2.0]), jnp.array([0.3, 0.3]))
    one, two = first_variation(uni.canonical(), cloud, DATA, probes)
    np.testing.assert_allclose(two, 2 * one)


def test_errors_name_what_is_wrong():
    polar = Cloud(Polar(jnp.ones(3), jnp.ones(3)))
    with pytest.raises(ValueError, match="labels"):
        velocity(uni.lifted(), polar, DATA)
    with pytest.raises(ValueError, match="NaN"):
        velocity(uni.lifted(), Cloud(polar.particles, labels=jnp.nan), DATA)
    with pytest.raises(ValueError, match="forces must be one of"):
        uni.canonical(forces="quick")
    with pytest.raises(ValueError, match="Affine"):
        velocity(uni.full(), polar, DATA)
    with pytest.raises(ValueError, match="x must have shape"):
        predict(uni.canonical(), polar, jnp.ones((3, 2)))
    with pytest.raises(ValueError, match="labels"):
        balance.lift(polar)


@pytest.mark.bad_input
def test_coordinates_of_unequal_lengths():
    ones = jnp.ones(2)
    with pytest.raises(ValueError, match=r"particles.b must have shape \(2,\), got shape \(3,\)"):
        balance.balance(Affine(ones, jnp.ones(3), ones))
    with pytest.raises(ValueError, match="particles.c must be finite"):
        balance.balance(Affine(ones, ones, jnp.nan * ones))
    with pytest.raises(ValueError, match="delta must be a single number or have shape"):
        balance.split(ones, jnp.ones(3))
    with pytest.raises(ValueError, match="inner must be a single number or have shape"):
        velocity(uni.full(inner=jnp.ones(3)), Cloud(Affine(ones, ones, ones)), DATA)
    with pytest.raises(TypeError, match=r"lifted\(\) got an unexpected keyword argument 'foo'"):
        uni.planar(foo=1)
