"""The theorems of paper 003 on thousands of random pairs: as printed and as corrected."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from random_pairs import SLACK, exact, over_pairs, pairs

from meanflow.layers.functional import recenter, rescale, unitize
from meanflow.transport import wasserstein
from meanflow_papers.unitization import bounds as printed
from meanflow_papers.unitization import corrected as corrected_bounds

moment_bound = partial(printed.best_bound, piece="moment")


def test_moment_bound():
    x, y = pairs(0, 3000)
    w = exact(x, y)
    stated = over_pairs(lambda x, y: printed.printed_moment_bound(x, y), x, y)
    corrected = over_pairs(moment_bound, x, y)
    assert np.all(w <= corrected * (1 + SLACK))
    assert np.all(corrected <= stated)
    assert np.max(w / stated) < 1  # never attained: it is at least 2 (sd + sd') + |dmu|
    sd = np.sqrt(x.var(1).sum(1)) + np.sqrt(y.var(1).sum(1))
    assert np.all(stated >= (2 * sd + np.linalg.norm(x.mean(1) - y.mean(1), axis=1)) * (1 - SLACK))
    # scale-equivariant, unlike the printed one
    np.testing.assert_allclose(over_pairs(moment_bound, 7 * x, 7 * y), 7 * corrected, rtol=1e-12)
    rescaled = over_pairs(lambda x, y: printed.printed_moment_bound(x, y), 7 * x, 7 * y)
    assert not np.allclose(rescaled, 7 * stated, rtol=0.1)


def test_moment_bound_is_sharp():
    out = printed.theorem1(jnp.array([[-2.0], [2.0]]), jnp.zeros((2, 1)))
    assert (float(out.printed), float(out.corrected), float(out.distance)) == (6.0, 2.0, 2.0)
    shifted = printed.theorem1(jnp.ones((3, 4)) * 5, jnp.zeros((3, 4)))  # Diracs: both are exact up to the 2
    assert float(shifted.corrected) == pytest.approx(float(shifted.distance)) == pytest.approx(10.0)
    assert float(shifted.printed) == pytest.approx(12.0)


def test_standardized_bound():
    x, y = np.random.default_rng(1).normal(size=(2, 2000, 8, 3)) ** 3
    standard = [over_pairs(lambda u: rescale(recenter(u)), u) for u in (x, y)]
    assert np.all(exact(*standard) <= corrected_bounds.standardized_bound(3) * (1 + SLACK))
    rng = np.random.default_rng(2)
    out = printed.equation4(jnp.asarray(rng.normal(size=(200, 64))), jnp.asarray(rng.normal(size=(200, 64))))
    assert float(out.corrected) == pytest.approx(np.sqrt(128))
    assert float(out.printed) == 130.0
    # the corrected bound is within 1.5, the printed 15 times too large
    assert float(out.distance) == pytest.approx(9.33, abs=0.01)


def test_theorem2_reports_the_best():
    rng = np.random.default_rng(5)
    out = printed.theorem2(jnp.asarray(rng.normal(size=(20, 2)) + 1), jnp.asarray(rng.normal(size=(20, 2))))
    assert float(out.printed) <= float(out.corrected) <= float(out.distance)
    with pytest.raises(ValueError, match="p = 1"):
        printed.theorem2(jnp.zeros((2, 2)), jnp.ones((2, 2)), p=1)


def test_unbounded_example():
    grid = (np.arange(4000) + 0.5) / 4000
    for scale in (1.0, 1e3):
        stated, shift = printed.unbounded_example(scale, 1)
        w = float(wasserstein(scale * (0.5 + 0.5 * grid), scale * 0.25 * grid))
        assert w == pytest.approx(shift, rel=1e-12)
        assert shift / stated == pytest.approx(6.67, abs=0.01)
    assert printed.unbounded_example(1.0, 9)[1] == pytest.approx(15 / 8)


def test_unit_vectors_are_at_most_two_apart():
    x, y = pairs(6, 2000)
    images = [over_pairs(lambda u: unitize(u, 1.0), u) for u in (x, y)]
    assert np.all(exact(*images) <= 2 * (1 + SLACK))
    out = printed.theorem31(jnp.array([[3.0, 4.0]]), jnp.array([[-6.0, -8.0]]))
    assert float(out.distance) == pytest.approx(2.0) == pytest.approx(float(out.printed))


def test_scalar_alpha():
    x, y = pairs(100, 3000)
    alpha = np.resize([0.0, 0.05, 0.5, 1.0], 3000)
    w = exact(*(over_pairs(lambda u, a: unitize(u, a, interpolation="harmonic"), u, alpha) for u in (x, y)))
    half = lambda u, a: corrected_bounds.harmonic_norm(jnp.mean(jnp.linalg.norm(u, axis=1)), a)  # h(E r)
    corrected = over_pairs(lambda x, y, a: half(x, a) + half(y, a), x, y, alpha)
    stated = over_pairs(printed.printed_unitized_bound, x, y, alpha)
    assert np.all(w <= corrected * (1 + SLACK) + SLACK)
    assert np.all(corrected <= stated * (1 + SLACK))
    inner = (alpha > 0) & (alpha < 1)  # at alpha = 1 both are 2
    assert np.all(corrected[inner] < stated[inner])
    out = printed.theorem32(jnp.asarray(x[2]), jnp.asarray(y[2]), 0.5)
    np.testing.assert_allclose(out, [stated[2], corrected[2], w[2]], rtol=1e-12)
    far = jnp.array([[1e9, 0.0]])
    out = printed.theorem32(far, -far, 0.25)  # a supremum: reached as R grows
    assert float(out.distance) == pytest.approx(8.0, rel=1e-6)


@pytest.mark.parametrize("interpolation", ["harmonic", "linear"])
def test_vector_alpha(interpolation):
    x, y = pairs(7, 3000)
    rng = np.random.default_rng(8)
    alpha = rng.random((3000, 4)) ** 2
    alpha[::7] = rng.random((429, 1))  # all equal
    alpha[::11, 0] = 0.0
    images = [over_pairs(lambda u, a: unitize(u, a, interpolation=interpolation), u, alpha) for u in (x, y)]
    w = exact(*images)
    corrected = over_pairs(
        lambda x, y, a: corrected_bounds.unitized_bound(x, y, a, interpolation=interpolation), x, y, alpha
    )
    stated = over_pairs(printed.printed_unitized_bound, x, y, alpha)
    assert np.all(w <= corrected * (1 + SLACK) + SLACK)
    if interpolation == "harmonic":
        assert np.all(w <= stated * (1 + SLACK))
        assert np.all(corrected <= stated * (1 + SLACK))
    else:
        violated = w > stated
        assert np.mean(violated) > 0.1  # Theorem 3.3 does not cover the form the paper trains
        assert np.max(w / stated) > 3


def test_theorem33_fails_for_the_practical_form():
    alpha = jnp.array([0.9, 0.3, 0.7])
    far = 1e5 * jnp.eye(3)[1:2]
    harmonic = printed.theorem33(far, -far, alpha, interpolation="harmonic")
    linear = printed.theorem33(far, -far, alpha, interpolation="linear")
    assert float(harmonic.printed) == pytest.approx(6.6667, abs=1e-4)
    assert float(harmonic.distance) == pytest.approx(6.6665, abs=1e-4)
    assert float(linear.distance) == pytest.approx(140000.6, abs=0.1)
    assert float(linear.distance) > 2e4 * float(linear.printed)  # the printed bound, violated
    assert float(linear.distance) == pytest.approx(float(linear.corrected), rel=1e-12)  # ours, attained


def test_practical_bound_is_attained():
    far = 50.0 * jnp.eye(3)[1:2]
    out = printed.theorem33(far, -far, jnp.array([0.9, 0.3, 0.7]), interpolation="linear")
    assert float(out.distance) == pytest.approx(70.6) == pytest.approx(float(out.corrected))


@pytest.mark.parametrize("d", [2, 8])
def test_practical_bound_after_standardisation(d):
    rng = np.random.default_rng(d)
    x, y = rng.standard_t(2, size=(2, 1000, 12, d))
    standard = [over_pairs(lambda u: rescale(recenter(u)), u) for u in (x, y)]
    for low in (0.0, 0.5, 1.0):
        alpha = low + (1 - low) * rng.random((1000, d))
        alpha[:, 0] = low
        images = [over_pairs(unitize, u, alpha) for u in standard]
        assert np.all(exact(*images) <= corrected_bounds.unitized_standardized_bound(d, low) * (1 + SLACK))
    # alpha = 1
    both = printed.standardized_layer(jnp.asarray(x[0]), jnp.asarray(y[0]), jnp.asarray(alpha[0]))
    assert float(both.distance) <= float(both.corrected) == 2.0 == float(both.printed)
    assert corrected_bounds.unitized_standardized_bound(8, 0.5) == pytest.approx(3.83, abs=0.01)
    assert corrected_bounds.unitized_standardized_bound(8, 0.0) == pytest.approx(5.66, abs=0.01)
    assert corrected_bounds.unitized_standardized_bound(8, 1.0) == 2.0


def test_moving_alpha():
    far = 1e9 * jnp.eye(2)[:1]
    kwargs = {"interpolation": "harmonic", "alpha_y": jnp.full(2, 0.25)}
    stated = printed.printed_unitized_bound(far, -far, jnp.full(2, 0.5), kwargs["alpha_y"])
    images = [unitize(s * far, a, interpolation="harmonic") for s, a in ((1, 0.5), (-1, 0.25))]
    assert float(stated) == 6.0
    assert float(wasserstein(*images)) == pytest.approx(6.0, rel=1e-6)
    assert float(wasserstein(*images)) > 2 / 0.5  # the bound with one of the two alphas would be false
    assert float(corrected_bounds.unitized_bound(far, -far, jnp.full(2, 0.5), **kwargs)) == pytest.approx(
        6.0, rel=1e-6
    )


def test_output_bound():
    x, y = pairs(11, 2000)
    images = [over_pairs(lambda u: unitize(u, 1.0), u) for u in (x, y)]
    rng = np.random.default_rng(12)
    gamma, gamma_y, beta, beta_y = rng.normal(size=(4, 2000, 1, 4)) * 3
    w = exact(gamma * images[0] + beta, gamma_y * images[1] + beta_y)
    bound = over_pairs(
        lambda x, y, g, b, h, c: corrected_bounds.output_bound(x, y, g[0], b[0], h[0], c[0]),
        *images,
        gamma,
        beta,
        gamma_y,
        beta_y,
    )
    assert np.all(w <= bound * (1 + SLACK))
    out = printed.layer_output(*(jnp.asarray(u) for u in (x[0], y[0], gamma[0, 0], beta[0, 0])))
    assert float(out.printed) == 2.0 < np.max(w)  # Theorem 3.1 does not survive gamma and beta
    assert float(out.distance) <= float(out.corrected) * (1 + SLACK)
    moved = printed.layer_output(
        jnp.eye(2), jnp.eye(2), jnp.ones(2), jnp.zeros(2), beta_y=jnp.array([3.0, 4.0])
    )
    assert float(moved.distance) == pytest.approx(5.0)


def test_standardized_bound_on_two_point_laws():
    # mass q at sqrt((1-q)/q), the rest at -sqrt(q/(1-q)), against its mirror image
    best = 0.0
    for q in np.linspace(0.01, 0.5, 491):
        points, mass = np.array([np.sqrt((1 - q) / q), -np.sqrt(q / (1 - q))]), np.array([q, 1 - q])
        np.testing.assert_allclose([mass @ points, mass @ points**2], [0, 1], atol=1e-12)
        best = max(best, float(wasserstein(points, -points, weights_x=mass, weights_y=mass)))
    assert best == pytest.approx(1.2011, abs=2e-3)
    assert best < corrected_bounds.standardized_bound(1)


def test_noise_bound_is_an_identity():
    rng = np.random.default_rng(4)
    for _ in range(20):
        x, y = rng.uniform(-3, 3, size=(2, 30, 5))
        np.testing.assert_allclose(
            corrected_bounds.noise_bound(jnp.asarray(x), jnp.asarray(y), 3.0),
            corrected_bounds.power_bound(jnp.asarray(x), jnp.asarray(y), 2, 3.0),
            rtol=1e-9,
            atol=1e-14,
        )


def test_practical_bound_for_any_alpha():
    x, y = pairs(9, 2000)
    alpha = np.random.default_rng(10).normal(size=(2000, 4)) * 2  # what unconstrained training produces
    images = [over_pairs(unitize, u, alpha) for u in (x, y)]
    assert np.all(exact(*images) <= over_pairs(corrected_bounds.unitized_bound, x, y, alpha) * (1 + SLACK))


def test_unitized_bounds_are_above():
    x, y = pairs(0, 500)
    alpha = np.random.default_rng(8).random((500, 4)) ** 2
    for form in ("harmonic", "linear"):
        images = [over_pairs(lambda u, a, f=form: unitize(u, a, interpolation=f), u, alpha) for u in (x, y)]
        bound = lambda x, y, a, f=form: corrected_bounds.unitized_bound(x, y, a, interpolation=f)
        assert np.all(exact(*images) <= over_pairs(bound, x, y, alpha) * (1 + SLACK) + SLACK)


def test_an_alpha_outside_the_unit_interval_is_refused():
    with pytest.raises(ValueError, match="alpha_min"):
        corrected_bounds.unitized_standardized_bound(8, 1.5)


def test_a_shift_by_one_number_moves_all_features():
    """The bound on the outputs of a layer counted a scalar beta once, not once for each feature."""
    zeros = np.zeros((3, 4))
    scalar = corrected_bounds.output_bound(zeros, zeros, 1.0, 2.0, beta_y=0.0)
    vector = corrected_bounds.output_bound(zeros, zeros, 1.0, np.full(4, 2.0), beta_y=np.zeros(4))
    np.testing.assert_allclose([scalar, vector], 4.0)
    assert float(wasserstein(zeros + 2.0, zeros)) <= float(scalar) * (1 + 1e-12)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_truncated_power_is_one_lipschitz(p):
    rng = np.random.default_rng(p)
    x = rng.normal(size=(2000, 5)) * 10 ** rng.uniform(-1, 1, size=(2000, 1))
    y = x + rng.normal(size=(2000, 5)) * 10 ** rng.uniform(-3, 1, size=(2000, 1))
    for c in (0.3, 1.0, 4.0):
        values = [corrected_bounds.truncated_power(jnp.asarray(u), p, c) for u in (x, y)]
        assert np.max(np.abs(values[0] - values[1]) / np.linalg.norm(x - y, axis=1)) <= 1 + 1e-9


def test_truncated_power_is_the_printed_function():
    rng = np.random.default_rng(0)
    x, p, c = rng.normal(size=(9, 4)) * 2, 3, 1.3
    printed = []
    for row in x:
        inner = sum(v**p for v in row if abs(v) <= c)
        outer = sum((-c) ** p for v in row if v < -c) + sum(c**p for v in row if v > c)
        printed.append((inner + outer) / (p * c ** (p - 1) * 2))
    np.testing.assert_allclose(corrected_bounds.truncated_power(jnp.asarray(x), p, c), printed, rtol=1e-12)


def test_power_one_is_exact_for_shifts_and_power_two_is_not():
    a, b = jnp.zeros((2, 4)), jnp.full((2, 4), 0.5)
    assert float(corrected_bounds.power_bound(a, b, 1, 1.0)) == pytest.approx(float(wasserstein(a, b)))
    assert float(corrected_bounds.power_bound(a, b, 2, 1.0)) < 0.3 * float(wasserstein(a, b))


def test_power_bound_is_tight_in_the_limit():
    c, h = 1.0, 5e-4
    a, b = jnp.full((1, 3), c), jnp.full((1, 3), c - h)
    ratio = float(corrected_bounds.power_bound(a, b, 2, c) / wasserstein(a, b))
    assert ratio == pytest.approx(0.99975, abs=1e-6)
