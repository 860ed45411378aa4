"""The batch-norm manifold against definitions: pseudo-inverse, pulled-back sphere, integration, round trips."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meanflow as mf
from meanflow.geometry import _omega as omega


def random_case(seed, dim, spread=3.0):
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.normal(size=(dim, dim)))[0]
    sigma = basis @ np.diag(np.exp(rng.uniform(-spread / 2, spread / 2, dim))) @ basis.T
    b = rng.normal(size=dim)
    bb = b / np.sqrt(b @ sigma @ b)
    u = sigma @ bb
    project = np.eye(dim) - np.outer(u, u) / (u @ u)
    return sigma, bb, project @ rng.normal(size=(dim, 2)), rng


def batch(dim, count):
    """Stacked cases: sigma (count, d, d), bb (count, d) on Omega, two tangent vectors (count, d) each."""
    cases = [random_case(seed, dim) for seed in range(count)]
    sigma, bb = (np.stack([case[k] for case in cases]) for k in (0, 1))
    tangents = np.stack([case[2] for case in cases])
    return sigma, bb, tangents[:, :, 0], tangents[:, :, 1]


def cometric_matrix(bb, sigma):
    """G^-1 = |bb|^2 (I - bb u')(I - u bb') with u = S bb, as the paper has it."""
    left = jnp.eye(bb.shape[-1]) - jnp.outer(bb, sigma @ bb)
    return (bb @ bb) * left @ left.T


@pytest.mark.parametrize("dim", range(2, 9))
def test_metric_is_the_paper_s_pseudo_inverse(dim):
    sigmas, points, _, _ = batch(dim, 20)
    metrics = np.asarray(jax.jit(jax.vmap(omega.metric))(points, sigmas))
    cometrics = np.asarray(jax.jit(jax.vmap(cometric_matrix))(points, sigmas))
    for sigma, bb, metric, cometric in zip(sigmas, points, metrics, cometrics, strict=True):
        u = sigma @ bb
        tangent = np.eye(dim) - np.outer(u, u) / (u @ u)
        left = np.eye(dim) - np.outer(bb, u)
        paper = np.linalg.pinv(left @ left.T, rcond=1e-10) @ tangent / (bb @ bb)
        np.testing.assert_allclose(metric, paper, atol=1e-9 * np.abs(paper).max())
        np.testing.assert_allclose(metric @ u, 0, atol=1e-12 * np.abs(paper).max() * np.linalg.norm(u))
        np.testing.assert_allclose(metric @ cometric, tangent, atol=1e-10)
        spectrum = np.linalg.eigvalsh(metric)[1:]
        expected = np.sort(np.r_[np.full(dim - 2, 1 / (bb @ bb)), 1 / ((bb @ bb) ** 2 * (u @ u))])
        np.testing.assert_allclose(spectrum, expected, rtol=1e-9)


@pytest.mark.parametrize("dim", range(2, 9))
def test_isometry_with_the_round_sphere(dim):
    """G on tangent vectors is the Euclidean inner product of their images under bb -> bb/|bb|."""
    sigmas, points, v, w = batch(dim, 40)
    push = np.asarray(jax.jit(jax.vmap(jax.jacfwd(omega.direction)))(points))
    left, right = (np.einsum("kij,kj->ki", push, t) for t in (v, w))
    round_ = np.sum(left * right, axis=1)
    scale = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    ours = np.asarray(omega.inner(points, v, w))
    metrics = np.asarray(jax.jit(jax.vmap(omega.metric))(points, sigmas))
    ambient = np.einsum("ki,kij,kj->k", v, metrics, w)
    assert np.max(np.abs(ours - round_) / scale) < 1e-12
    assert np.max(np.abs(ambient - round_) / scale) < 1e-12


def test_cometric_apply_equals_the_matrix():
    sigma, _, _, rng = random_case(0, 5)
    points = omega.normalize(jnp.asarray(rng.normal(size=(7, 5))), jnp.asarray(sigma))
    g = jnp.asarray(rng.normal(size=(7, 5)))
    dense = jnp.stack([cometric_matrix(p, jnp.asarray(sigma)) @ v for p, v in zip(points, g, strict=True)])
    np.testing.assert_allclose(omega.cometric_apply(points, g, jnp.asarray(sigma)), dense, rtol=1e-12)


@pytest.mark.parametrize("dim", [2, 3, 6])
def test_exp_and_log_are_inverse_and_stay_on_omega(dim):
    sigmas, points, v, _ = batch(dim, 20)
    v = v * (2.5 / np.sqrt(np.asarray(omega.inner(points, v, v))))[:, None]  # length 2.5 < pi

    @jax.jit
    @jax.vmap
    def walk(bb, v, sigma):
        end = omega.exp(bb, v, sigma)
        back = omega.log(bb, end, sigma)
        middle, speed = jax.jvp(lambda t: omega.exp(bb, t * v, sigma), (0.5,), (1.0,))
        return end, back, omega.distance(bb, end), omega.inner(middle, speed, speed)

    ends, back, distance, square = (np.asarray(u) for u in walk(points, v, sigmas))
    np.testing.assert_allclose(np.einsum("ki,kij,kj->k", ends, sigmas, ends), 1, rtol=1e-13)
    np.testing.assert_allclose(back, v, atol=1e-12 * np.linalg.norm(v, axis=1).max())
    np.testing.assert_allclose(distance, 2.5, rtol=1e-12)  # dist is the norm of log
    # log is tangent
    np.testing.assert_allclose(np.einsum("ki,kij,kj->k", points, sigmas, back), 0, atol=1e-10)
    np.testing.assert_allclose(square, 2.5**2, rtol=1e-10)  # constant speed along the geodesic


def test_distance_is_a_metric():
    sigma, _, _, rng = random_case(3, 4)
    points = omega.normalize(jnp.asarray(rng.normal(size=(12, 4))), jnp.asarray(sigma))
    d = np.asarray(omega.distance(points[:, None, :], points[None, :, :]))
    np.testing.assert_allclose(d, d.T, atol=1e-15)
    np.testing.assert_allclose(np.diag(d), 0, atol=1e-15)
    assert np.all(d[:, None, :] <= d[:, :, None] + d[None, :, :] + 1e-14)
    np.testing.assert_allclose(omega.distance(points[0], -points[0]), np.pi, rtol=1e-15)  # the diameter
    tiny = points[0] + 1e-9 * omega.project(points[0], points[1], jnp.asarray(sigma))
    moved = 1e-9 * jnp.sqrt(
        omega.inner(points[0], *(omega.project(points[0], points[1], jnp.asarray(sigma)),) * 2)
    )
    np.testing.assert_allclose(omega.distance(points[0], tiny), moved, rtol=1e-6)  # arccos would return 0


def test_geodesics_are_shortest_against_a_curve_in_the_ellipsoid():
    """The length in G of the straight chord, pulled back to Omega, is longer unless it is itself the geodesic."""
    sigma, bb, tangents, _ = random_case(5, 3)
    sigma, bb = jnp.asarray(sigma), jnp.asarray(bb)
    end = omega.exp(bb, jnp.asarray(tangents[:, 0]), sigma)
    bent = bb + jnp.asarray(tangents[:, 1])

    def length(curve):
        t = jnp.linspace(0.0, 1.0, 4001)
        p, v = jax.vmap(lambda s: jax.jvp(curve, (s,), (1.0,)))(t)
        return float(jnp.trapezoid(jnp.sqrt(omega.inner(p, v, v)), t))

    chord = length(lambda t: omega.normalize((1 - t) * bb + t * end, sigma))
    detour = length(lambda t: omega.normalize((1 - t) * bb + t * end + t * (1 - t) * bent, sigma))
    distance = float(omega.distance(bb, end))
    assert abs(chord - distance) < 1e-6  # plane sections through 0 are the geodesics
    assert detour > distance + 1e-3


def test_retraction_is_second_order_and_plain_renormalisation_is_not():
    sigma, bb, tangents, _ = random_case(7, 3)
    sigma, bb, v = jnp.asarray(sigma), jnp.asarray(bb), jnp.asarray(tangents[:, 0])
    v = v / jnp.sqrt(omega.inner(bb, v, v))
    steps = np.array([0.02, 0.04, 0.08])
    ours = [
        float(omega.distance(omega.retract(bb, h * v, sigma), omega.exp(bb, h * v, sigma))) for h in steps
    ]
    naive = [
        float(omega.distance(omega.normalize(bb + h * v, sigma), omega.exp(bb, h * v, sigma))) for h in steps
    ]
    assert abs(ours[0] / (steps[0] ** 3 / 3) - 1) < 0.002  # the constant 1/3
    assert 2.9 < np.polyfit(np.log(steps), np.log(ours), 1)[0] < 3.1
    assert 1.8 < np.polyfit(np.log(steps), np.log(naive), 1)[0] < 2.2


def test_volume_is_that_of_the_sphere():
    sigma, _, _, _ = random_case(11, 3)
    # integrate over Omega in the chart polar angle x azimuth, with the Euclidean area element of the ellipsoid
    nodes, weights = np.polynomial.legendre.leggauss(80)
    z, turn = np.meshgrid(nodes, 2 * np.pi * np.arange(160) / 160, indexing="ij")
    share = np.broadcast_to(weights[:, None] * 2 * np.pi / 160, z.shape)

    def point(z, t):
        r = jnp.sqrt(1 - z**2)
        return omega.normalize(jnp.array([r * jnp.cos(t), r * jnp.sin(t), z]), jnp.asarray(sigma))

    def density(bb):  # d vol_G / d(Euclidean area of Omega) = 1 / (|bb|^d |S bb|)
        return jnp.linalg.norm(bb) ** -3 / jnp.linalg.norm(jnp.asarray(sigma) @ bb)

    @jax.jit
    @jax.vmap
    def area(z, t):
        dz, dt = jax.jacfwd(point, (0, 1))(z, t)
        return jnp.linalg.norm(jnp.cross(dz, dt)) * density(point(z, t))

    total = float(np.sum(share.ravel() * np.asarray(area(z.ravel(), turn.ravel()))))
    np.testing.assert_allclose(total, 4 * np.pi, rtol=1e-10)


def test_batch_norm_is_not_whitening():
    """In d = 2 the angular speed is sqrt(det S)/|b|_S^2 times the whitened force, not 1/|b|_S."""
    sigma = jnp.diag(jnp.array([5.0, 1.0]))

    def force(psi):  # any function of the whitened angle
        return jnp.sin(psi) + 0.3 * jnp.cos(2 * psi)

    for th in (0.3, 1.1, 2.0):
        b = jnp.array([jnp.cos(th), jnp.sin(th)])

        def whitened(t):
            return jnp.arctan2(jnp.sin(t), jnp.sqrt(5.0) * jnp.cos(t))

        raw = jax.grad(lambda t: force(whitened(t)))(th)
        slope = jax.grad(force)(whitened(th))
        square = float(b @ sigma @ b)
        np.testing.assert_allclose(raw, np.sqrt(5.0) / square * slope, rtol=1e-13)
        assert abs(float(raw - np.sqrt(5.0) / np.sqrt(square) * slope)) > 1e-2


def test_the_metric_of_many_points_measures_tangent_vectors():
    """v' G w against the inner product of tangent vectors, which needs no covariance; u = S bb is its kernel."""
    rng = np.random.default_rng(3)
    sigma = np.cov(rng.normal(size=(3, 20)))
    points = mf.geometry.normalize(rng.normal(size=(7, 3)), sigma)
    v, w = (omega.project(points, jnp.asarray(rng.normal(size=(7, 3))), jnp.asarray(sigma)) for _ in range(2))
    metrics = mf.geometry.metric(points, sigma)
    products = np.einsum("id,ide,ie->i", v, metrics, w)
    np.testing.assert_allclose(products, omega.inner(points, v, w), rtol=1e-12)
    np.testing.assert_allclose(np.einsum("ide,ie->id", metrics, points @ sigma), 0.0, atol=1e-13)
