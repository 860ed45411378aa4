"""Each correction to the printed formulas: the printed form fails here, ours holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plane import to_plane
from scipy.integrate import solve_ivp

import meanflow as mf
from meanflow import univariate as uni
from meanflow.measures import Affine, Cloud, Dataset, Polar
from meanflow.univariate import _forces as forces
from meanflow.univariate import balance
from meanflow.univariate._angles import unit
from meanflow.univariate.balance import _to_polar

X = np.array([-0.8, -0.1, 0.4, 1.0])
DATA = Dataset(X, [0.3, -0.7, 0.2, 0.9], weights="sum")
RAW = Cloud(
    Affine(
        jnp.array([-1.2, -0.4, -0.9, -0.3, -1.1, -0.6, 0.8]),
        jnp.array([0.3, -0.5, 0.1, 0.7, -0.2, 0.4, -0.6]),
        jnp.array([0.5, -1.0, 0.8, 0.3, -0.4, 1.1, -0.9]),
    )
)


def plain_loss(w, alpha, x=X, y=DATA.y):
    z = w.c[None, :] * jax.nn.relu(w.a[None, :] * x[:, None] - w.b[None, :])
    return 0.5 * jnp.sum((z.sum(1) / alpha - y) ** 2)


def test_5_angle_needs_atan2():
    a, b, _ = RAW.particles
    polar = balance.project(RAW).particles
    f = mf.predict(uni.full(), RAW, X)
    ours = mf.predict(uni.canonical(), Cloud(polar), X)
    printed = mf.predict(uni.canonical(), Cloud(Polar(polar.r, jnp.arctan(-b / a))), X)
    assert np.max(np.abs(ours - f)) < 1e-15
    np.testing.assert_allclose(np.max(np.abs(printed - f)), 0.384, atol=1e-3)


def test_2_3_knot_sign():
    a, b, _ = RAW.particles
    u, v = to_plane(balance.project(RAW).particles).T
    np.testing.assert_allclose(b / a, -v / u, rtol=1e-12)
    assert np.max(np.abs(b / a - v / u)) > 0.1


def test_3_1_sample_angles_and_number_of_regions():
    table = uni.classify_rays(jnp.array([0.0, 0.5]), jnp.ones(2))
    for theta, j in zip(table.theta, table.sample, strict=True):
        assert abs([0.0, 0.5][int(j)] * np.cos(theta) + np.sin(theta)) < 1e-15
    printed = np.arctan(0.0) + np.pi / 2
    assert abs(0.0 * np.cos(printed) + np.sin(printed)) == 1.0
    s = 5
    theta = jnp.linspace(-np.pi, np.pi, 20001)
    patterns = {tuple(u) for u in np.asarray(forces.is_active(unit(theta), jnp.linspace(-1, 1, s)).T)}
    assert len(patterns) == 2 * s != 2 * s - 1


def test_3_1_gradient_of_the_potential():
    """m grad L~ = grad V (printed: m/2), and neurons follow -grad V."""
    polar = Cloud(balance.project(RAW).particles)
    m = polar.size
    loss = lambda w: mf.energy(uni.canonical(), polar.at(w), DATA)
    gradient = jax.grad(loss)(polar.particles)
    v = mf.velocity(uni.canonical(), polar, DATA)
    np.testing.assert_allclose(v.r, -m * gradient.r, rtol=1e-12)
    alive = gradient.theta != 0
    ratio = -v.theta[alive] / gradient.theta[alive]
    np.testing.assert_allclose(ratio, 7.0, rtol=1e-9)
    assert not np.allclose(ratio, m / 2)
    grad_v = jax.vmap(
        lambda r, t: jax.grad(
            lambda w: mf.first_variation(uni.canonical(), polar, DATA, Polar(w[:1], w[1:]))[0]
        )(jnp.stack([r, t]))
    )(*polar.particles)
    np.testing.assert_allclose(v.r, -grad_v[:, 0], rtol=1e-12)
    np.testing.assert_allclose(v.theta, -grad_v[:, 1], rtol=1e-12)


def test_3_1_field_is_constant_only_in_the_plane():
    """Printed: piecewise linear on the cylinder. True: constant per region in (u, v) of the planar flow only."""
    x = jnp.asarray(X)
    theta = jnp.linspace(0.12, 0.6, 7)  # equally spaced, in one region: all but the left sample are active
    assert len(set(forces.find_regions(unit(theta), x).tolist())) == 1
    cloud = Cloud(Polar(jnp.linspace(0.5, 2.0, 7), theta))
    v = mf.velocity(uni.planar(), cloud, DATA)
    _, plane = jax.jvp(to_plane, (cloud.particles,), (v,))
    np.testing.assert_allclose(plane, jnp.broadcast_to(plane[:1], plane.shape), rtol=1e-12)
    rho = mf.predict(uni.planar(), cloud, x) - DATA.y
    np.testing.assert_allclose(plane[0], -jnp.array([rho[1:] @ x[1:], jnp.sum(rho[1:])]), rtol=1e-12)
    # on the cylinder the turning speed at fixed r is a sinusoid of theta: its second differences do not vanish
    same = Cloud(Polar(jnp.ones(7), theta))
    turning = mf.velocity(uni.canonical(), same, DATA).theta
    bend = turning[2:] - 2 * turning[1:-1] + turning[:-2]
    assert np.min(np.abs(bend)) > 1e-3 * np.max(np.abs(turning))
    np.testing.assert_allclose(bend, -2 * (1 - np.cos(0.08)) * turning[1:-1], rtol=1e-9)


def test_3_1_sign_of_the_jump_depends_on_which_side_has_the_sample():
    """grad V_k - grad V_{k+1} = +rho x~ only where the sample is active in the region of smaller theta."""
    x, rho = jnp.asarray(X), jnp.array([0.4, -0.9, 0.3, 0.8])
    table, sample = forces.region_forces(rho, x), uni.classify_rays(x, rho).sample
    jump = table - jnp.roll(table, -1, axis=0)  # ray b separates the regions b and b + 1
    printed = rho[sample][:, None] * jnp.stack([x[sample], jnp.ones(8)], axis=1)
    leaves = jnp.arange(8) >= 4  # a left-facing ray: its sample is active in the region b before it
    np.testing.assert_allclose(jump, jnp.where(leaves[:, None], printed, -printed), atol=1e-15)
    assert np.sum(np.max(np.abs(jump - printed), axis=1) > 0.1) == 4  # wrong on every right-facing ray


def test_45_and_21_need_alpha_over_m():
    """c^2 from r and delta: q = alpha r/m in place of r; tangential entry (m/alpha)^2 c^2. alpha = sqrt 7, m = 7."""
    polar = balance.project(RAW, "sqrt")
    a, b, c = RAW.particles
    r, delta = polar.particles.r, polar.labels
    got, _ = balance.split(r / np.sqrt(7), delta)
    np.testing.assert_allclose(got**2, c**2, rtol=1e-12)
    printed = (delta + np.sqrt(delta**2 + 4 * r**2)) / 2
    np.testing.assert_allclose([c[0] ** 2, printed[0]], [0.25, 1.117], atol=1e-3)
    assert np.min(np.abs(printed - c**2)) > 0.1
    # proof of Lemma 7, printed: r^2 in the place of q^2 = c^2 n^2
    n2 = a**2 + b**2
    np.testing.assert_allclose(c**2 * n2, (r / np.sqrt(7)) ** 2, rtol=1e-12)
    assert np.min(np.abs(c**2 * n2 / r**2 - 1)) > 0.8
    radial, turning = uni.lifted(alpha="sqrt").space.mobility(polar)
    np.testing.assert_allclose(turning * r**2, 7 * c**2, rtol=1e-12)  # printed: c^2
    np.testing.assert_allclose(radial, 7 * (a**2 + b**2 + c**2), rtol=1e-12)
    np.testing.assert_allclose(radial, r**2 / c**2 + 7 * c**2, rtol=1e-12)
    np.testing.assert_allclose((turning * r**2)[0], 1.75, rtol=1e-12)  # printed: 0.25
    assert np.min(np.abs(turning * r**2 - c**2)) > 0.1


def test_jacobian_of_the_projection():
    """d theta = (b, -a)/n^2 in (a, b); printed with the opposite sign. P = J J'."""
    a, b, c = RAW.particles
    jacobian = jax.vmap(
        jax.jacobian(lambda w: jnp.stack(_to_polar(jnp.stack([w[0], -w[1]]), w[2], jnp.sqrt(7.0))))
    )(jnp.stack(RAW.particles, -1))
    n2 = a**2 + b**2
    np.testing.assert_allclose(jacobian[:, 1], jnp.stack([b / n2, -a / n2, 0 * c], -1), atol=1e-12)
    assert np.max(np.abs(jacobian[:, 1] - jnp.stack([-b / n2, a / n2, 0 * c], -1))) > 0.1
    radial, turning = uni.lifted(alpha="sqrt").space.mobility(balance.project(RAW, "sqrt"))
    product = jnp.einsum("mij,mkj->mik", jacobian, jacobian)
    np.testing.assert_allclose(product[:, 0, 0], radial, rtol=1e-12)
    np.testing.assert_allclose(product[:, 1, 1], turning, rtol=1e-12)
    np.testing.assert_allclose(product[:, 0, 1], 0, atol=1e-12)


def test_46_gradients_have_one_over_alpha_and_a_sign():
    alpha = np.sqrt(7)
    w = RAW.particles
    gradient = jax.grad(lambda u: plain_loss(u, alpha))(w)
    active = w.a[None, :] * X[:, None] - w.b[None, :] > 0
    rho = mf.predict(uni.full(alpha="sqrt"), RAW, X) - DATA.y
    ours = -w.c / alpha * (rho @ active)
    np.testing.assert_allclose(gradient.b, ours, rtol=1e-12, atol=1e-14)
    printed = w.c * (rho @ active)
    np.testing.assert_allclose((gradient.b / printed)[jnp.any(active, 0)], -0.378, atol=1e-3)
    # with the printed sign delta would move
    rate = lambda gb: 2 * (-w.c * gradient.c + w.a * gradient.a + w.b * gb)
    np.testing.assert_allclose(rate(gradient.b), 0, atol=1e-14)
    assert np.max(np.abs(rate(-gradient.b))) > 0.01


def test_19_sign_of_the_reduced_flow():
    polar = balance.project(RAW, "sqrt")
    gradient = jax.grad(lambda w: mf.energy(uni.lifted(alpha="sqrt"), polar.at(w), DATA))(polar.particles)
    radial, turning = uni.lifted(alpha="sqrt").space.mobility(polar)
    v = mf.velocity(uni.full(alpha="sqrt"), RAW, DATA)
    _, true = jax.jvp(lambda w: balance.project(RAW.at(w), "sqrt").particles, (RAW.particles,), (v,))
    np.testing.assert_allclose(true.r / 7, -radial * gradient.r, rtol=1e-10)  # mean-field time is t/m
    np.testing.assert_allclose(true.theta / 7, -turning * gradient.theta, rtol=1e-10, atol=1e-14)
    assert np.max(np.abs(true.r / 7 - radial * gradient.r)) > 0.1  # printed: +


def test_lemma_7_under_gradient_descent():
    """Descent changes delta by eta^2 (g_c^2 - g_a^2 - g_b^2) a step, not by zero."""
    eta = 0.05
    g = jax.grad(lambda u: plain_loss(u, np.sqrt(7)))(RAW.particles)
    one = mf.descend(uni.full(alpha="sqrt"), RAW, DATA, 1, step=eta, clock="gradient").final.particles
    change = balance.balance(one) - balance.balance(RAW.particles)
    np.testing.assert_allclose(change, eta**2 * (g.c**2 - g.a**2 - g.b**2), atol=2e-15)
    assert np.max(np.abs(change)) > 1e-5


def test_47_velocity_in_the_plane():
    r, theta = jnp.array([-1.7, 2.0]), jnp.array([0.8, 2.5])
    rate = Polar(jnp.array([0.3, 0.3]), jnp.array([-0.4, -0.4]))
    _, true = jax.jvp(to_plane, (Polar(r, theta),), (rate,))
    d = unit(theta)
    t = jnp.stack([-d[:, 1], d[:, 0]], -1)
    ours = (jnp.sign(r) * rate.r)[:, None] * d + (jnp.abs(r) * rate.theta)[:, None] * t
    np.testing.assert_allclose(true, ours, rtol=1e-12)
    np.testing.assert_allclose(true[0], [0.279, -0.689], atol=1e-3)  # printed: (0.3, -0.4)
    # Dpi Dpi' of the map (r, theta) -> (u, v), printed as the identity
    jacobian = jax.vmap(jax.jacobian(lambda w: to_plane(Polar(*w[:, None]))[0]))(jnp.stack([r, theta], -1))
    product = jnp.einsum("mij,mkj->mik", jacobian, jacobian)
    outer = lambda v: v[:, :, None] * v[:, None, :]
    np.testing.assert_allclose(product, outer(d) + (r**2)[:, None, None] * outer(t), rtol=1e-12)
    assert np.max(np.abs(product - jnp.eye(2)[None])) > 1


def test_after_21_large_delta_is_planar_not_canonical():
    """Initial dr/dtheta at r = 2: the lifted flow at large delta has the planar ratio, not the one of (7)."""
    cloud = Cloud(Polar(jnp.array([2.0]), jnp.array([0.4])), labels=1e6)
    bare = Cloud(cloud.particles)
    ratio = lambda v: float(v.r[0] / v.theta[0])
    big = ratio(mf.velocity(uni.lifted(), cloud, DATA))
    np.testing.assert_allclose(big, ratio(mf.velocity(uni.planar(), bare, DATA)), rtol=1e-5)
    np.testing.assert_allclose(big / ratio(mf.velocity(uni.canonical(), bare, DATA)), 4.0, rtol=1e-5)


def test_after_21_full_flow_approaches_the_planar_flow_as_delta_to_the_minus_two():
    """Both flows by scipy, a few neurons that cross no kink: after the time 0.1/delta in the plane (u, v)."""
    start = np.array([[0.5, 1.2], [0.8, 1.4], [-0.6, 1.5]])  # (u, v), all samples active, r > 0
    x, y = np.stack([X, np.ones(4)], 1), np.asarray(DATA.y)

    def pull(total):
        return (x @ total / 3 - y) @ x  # G: every sample is active

    def planar(t, w):
        return -np.tile(pull(w.reshape(3, 2).sum(0)), 3)

    def full(t, z):
        p, c = z[:6].reshape(3, 2), z[6:]
        force = pull((c[:, None] * p).sum(0))
        return np.concatenate([(-c[:, None] * force).ravel(), -p @ force])

    options = {"rtol": 1e-12, "atol": 1e-13, "method": "DOP853"}
    limit = solve_ivp(planar, (0, 0.1), start.ravel(), **options).y[:, -1].reshape(3, 2)
    assert np.all(limit @ x.T > 0.1) and np.max(np.abs(limit - start)) > 0.1
    errors, deltas = [], (1e1, 1e2, 1e4)
    for delta in deltas:
        c, n = balance.split(jnp.linalg.norm(start, axis=1), jnp.full(3, delta))
        p = start / np.linalg.norm(start, axis=1, keepdims=True) * np.asarray(n)[:, None]
        end = solve_ivp(full, (0, 0.1 / delta), np.concatenate([p.ravel(), c]), **options).y[:, -1]
        errors.append(np.max(np.abs(end[6:, None] * end[:6].reshape(3, 2) - limit)))
    np.testing.assert_allclose(errors, [1.195e-2, 1.240e-4, 1.240e-8], rtol=0.01)


def test_after_21_alpha_does_not_choose_a_direction():
    ratios = []
    for alpha in ("m", "sqrt", "one"):
        polar = balance.project(RAW, alpha)
        radial, turning = uni.lifted(alpha=alpha).space.mobility(polar)
        ratios.append(turning * polar.particles.r**2 / radial)
    np.testing.assert_allclose(ratios[0], ratios[1], rtol=1e-12)
    np.testing.assert_allclose(ratios[0], ratios[2], rtol=1e-12)
    a, b, c = RAW.particles
    np.testing.assert_allclose(ratios[0], c**2 / (a**2 + b**2 + c**2), rtol=1e-12)


def test_section_4_the_kernel_regime_is_set_by_q_not_by_r():
    """Turning share at alpha = 1, m = 100, r = 10: q = 0.1. Printed -delta << r^2, true -delta >> 2 |q| = 0.2."""
    cloud = lambda delta: Cloud(Polar(jnp.full(100, 10.0), jnp.zeros(100)), labels=delta)

    def share(delta):
        radial, turning = uni.lifted(alpha="one").space.mobility(cloud(delta))
        return float((turning * 100.0 / radial)[0])

    assert share(-1e-3) == pytest.approx(0.4975, abs=1e-4)  # far below r^2 = 100, and not frozen at all
    assert share(-20.0) < 1e-4  # far above 0.2, although below r^2: frozen
    assert share(20.0) > 1 - 1e-4


def test_16_the_signed_measure_carries_r():
    """mean |r| bounds the variation of int r mu(dr, .), with equality only without cancellation at equal theta."""
    from meanflow.univariate._models import total_variation

    polar = Polar(jnp.array([1.0, -1.0, 2.0]), jnp.array([0.3, 0.3, 1.0]))
    penalty = float(jnp.mean(total_variation(polar)))
    merged = (abs(1.0 - 1.0) + 2.0) / 3
    assert penalty == 4 / 3 > merged == 2 / 3
    f = mf.predict(uni.canonical(), Cloud(polar), X)
    alone = mf.predict(uni.canonical(), Cloud(Polar(jnp.array([2.0 / 3]), jnp.array([1.0]))), X)
    np.testing.assert_allclose(f, alone, rtol=1e-12)  # the function sees the signed measure only
