"""RKHS norms of the univariate kernels: reproducing property, minimality, the printed norms failing, and their laws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rkhs_norms import (
    FixedSlope,
    Radial,
    Signs,
    Uniform,
    feature_norm,
    indicator,
    random_feature,
    tangent_norm,
    tangent_parts,
)

from meanflow.univariate import spline_interpolant, wide_kernel

LAWS = [Signs(0.8), Signs(3.0), Uniform(1.3, 0.9), Uniform(0.5, 2.0), Radial(2.0), FixedSlope(2.0, -1.2, 1.0)]


# laws and points are arguments: one program a kind of law
@jax.jit
def section_norm(law, x0):
    """Norm of the section K(., x0)."""
    return feature_norm(lambda u: random_feature(u, x0, law=law), law=law, breaks=x0)


@jax.jit
def second_derivative(law, x0, u):
    return jax.vmap(jax.grad(jax.grad(lambda u: random_feature(u, x0, law=law))))(u)


@jax.jit
def combination(law, nodes, alpha):
    f = lambda u: random_feature(u, nodes, law=law) @ alpha
    quadratic = alpha @ random_feature(nodes, law=law) @ alpha
    return feature_norm(f, law=law, breaks=nodes), quadratic


@jax.jit
def tangent_sections(law, x0, c2):
    section = lambda x0: tangent_norm(tangent_parts(x0, law=law, c2=c2), law=law, c2=c2, breaks=x0).total
    return jax.vmap(section)(x0), jnp.diag(wide_kernel(x0, law=law, c2=c2))


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_norm_of_a_combination_of_sections_is_the_quadratic_form(law):
    norm, quadratic = combination(law, jnp.array([-0.45, 0.0, 0.2, 0.75]), jnp.array([1.0, -2.0, 0.7, 0.4]))
    assert norm.total == pytest.approx(float(quadratic), rel=1e-11)
    assert norm.curvature > 0


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_tangent_norm_of_a_section(law):
    norms, truth = tangent_sections(law, jnp.array([0.6, 0.15, -0.35]), 0.3)
    np.testing.assert_allclose(norms, truth, rtol=1e-10, atol=1e-13)


def test_other_decompositions_cost_more():
    law, x0 = Signs(1.0), 0.3

    @jax.jit
    def cost(c2, amount):
        f1, f2, f3 = tangent_parts(x0, law=law, c2=c2)
        bump = lambda x: amount * random_feature(x, x0, law=law)
        moved = (lambda x: f1(x) - bump(x), lambda x: f2(x) + bump(x), f3)
        return tangent_norm(moved, law=law, c2=c2, breaks=[x0]).total

    assert min(cost(0.5, 0.05), cost(0.5, -0.05)) > cost(0.5, 0.0) + 1e-4


def test_norm_is_the_least_cost_of_wide_networks():
    # |f|^2 = min sum c^2 over networks sum_i c_i sqrt(p_i) relu(..) equal to f: knows no kernel
    law, nodes, half = Signs(1.0), jnp.linspace(-0.95, 0.95, 60), 2000
    centres, alpha = jnp.array([-0.6, -0.1, 0.0, 0.25]), jnp.array([-0.5, 0.0, 0.0, 1.0])
    b = 2 * (jnp.arange(half) + 0.5) / half - 1  # midpoints of equal cells, for a = 1 and for a = -1
    features = jnp.concatenate([jax.nn.relu(s * nodes[:, None] - b[None, :]) for s in (1, -1)], axis=1)
    target = random_feature(nodes, centres, law=law) @ alpha
    q, r = jnp.linalg.qr(features.T / jnp.sqrt(2 * half))
    cost = jnp.sum(jax.scipy.linalg.solve_triangular(r, target, trans=1) ** 2)
    assert combination(law, centres, alpha)[0].total == pytest.approx(float(cost), rel=2e-3)


@pytest.mark.parametrize("law", [Signs(1.0), Signs(3.0), Uniform(1.0, 1.0), Uniform(0.7, 2.0)], ids=str)
def test_norm_of_the_spline_interpolant(law):
    x, y = jnp.linspace(-1, 1, 10), jnp.array([1.0, 1, 1, -1, -1, -1, 1, 1, 1, -1])
    alpha = jnp.linalg.solve(random_feature(x, law=law), y)
    np.testing.assert_allclose(spline_interpolant(x, y, law=law)(x), y, atol=1e-14)
    assert combination(law, x, alpha)[0].total == pytest.approx(float(alpha @ y), rel=1e-8)


# ---- the laws, their densities and their draws

OF_ONE_KIND = {
    "interval": FixedSlope(-1.5, -0.4, 0.7),
    "signs": Signs(0.8),
    "uniform": Uniform(1.3, 0.9),
    "radial": Radial(3.0),
}


@pytest.mark.parametrize("name", OF_ONE_KIND)
def test_sampled_clouds_approach_the_closed_form(name, key):
    law, m = OF_ONE_KIND[name], 100_000
    a, b = law.sample(key, m)
    x = jnp.array([-1.2, 0.1, 0.5, 2.0])
    z = x[:, None] * a[None, :] - b[None, :]
    products = jax.nn.relu(z)[:, None] * jax.nn.relu(z)[None]
    # 5 standard errors of the mean, measured on the same draws
    spread = jnp.std(products, axis=-1) / jnp.sqrt(m)
    assert jnp.all(jnp.abs(jnp.mean(products, axis=-1) - random_feature(x, law=law)) < 5 * spread + 1e-12)
    active = (z > 0).astype(z.dtype)
    assert jnp.all(jnp.abs(active @ active.T / m - indicator(x, law=law)) < 5 * 0.5 / jnp.sqrt(m))


@pytest.mark.parametrize("name", ["signs", "uniform", "radial"])
def test_theorem_5_the_curvature_density_is_nu_3(name):
    law, x0 = OF_ONE_KIND[name], 0.15
    u = jnp.array([-0.75, -0.4, 0.1, 0.33, 0.71])
    curvature = jax.jit(jax.vmap(jax.grad(jax.grad(lambda u: random_feature(u, x0, law=law)))))(u)
    np.testing.assert_allclose(curvature, law.nu_3(u) * jnp.abs(u - x0) / 2, rtol=1e-10)
    if name != "signs":  # with a = +-1 the two densities coincide
        assert jnp.max(jnp.abs(curvature / (law.nu_1(u) * jnp.abs(u - x0) / 2) - 1)) > 0.1


def test_densities_are_those_of_sampled_knots(key):
    edges = jnp.linspace(-2, 2, 9)
    fine = edges[:-1, None] + (edges[1:] - edges[:-1])[:, None] * ((jnp.arange(4000) + 0.5) / 4000)[None, :]
    for name, law in OF_ONE_KIND.items():
        a, b = law.sample(jax.random.fold_in(key, len(name)), 400_000)
        for weights, density in ((jnp.ones_like(a), law.nu_1), (a * a, law.nu_3)):
            counts, _ = jnp.histogram(b / a, edges, weights=weights / a.shape[0])
            mass = jnp.mean(density(fine), axis=1) * (edges[1] - edges[0])
            np.testing.assert_allclose(counts, mass, atol=8e-3 * float(jnp.mean(weights)))
        np.testing.assert_allclose(
            law.moments(), jnp.stack([a, b]) @ jnp.stack([a, b]).T / a.shape[0], atol=0.02
        )


# ---- errata: the printed formula fails, ours holds


def _integral(values, u, du):
    return float(jnp.sum(values * du))


def _grid(low, high, breaks, n=400):
    """Composite Gauss nodes, independent of the library's rule."""
    t, w = np.polynomial.legendre.leggauss(n)
    edges = np.array([low, *breaks, high])
    half = np.diff(edges)[:, None] / 2
    return jnp.asarray((edges[:-1, None] + half * (1 + t)).ravel()), jnp.asarray((half * w).ravel())


def test_33_each_slope_enters_with_its_third_power():
    law, x0 = FixedSlope(2.0, 0.0, 1.0), 0.4
    u, du = _grid(0.0, 0.5, [x0])
    second = second_derivative(law, x0, u)
    printed = _integral(second**2 / 2.0, u, du)  # 1/|a| int h''^2 / mu_a, mu_a = 1
    assert random_feature(x0, x0, law=law) == pytest.approx(0.170667, abs=1e-6)
    assert section_norm(law, x0).total == pytest.approx(0.170667, abs=1e-6)
    assert printed == pytest.approx(0.682667, abs=1e-6)


def test_25_has_an_affine_penalty():
    norm = section_norm(Radial(), 0.5)
    assert norm.curvature == pytest.approx(0.3125, abs=1e-12)
    assert norm.affine == pytest.approx(0.3125, abs=1e-12)
    assert norm.total == pytest.approx(float(random_feature(0.5, 0.5, law="radial")), abs=1e-12)
    # printed: int f''^2 / nu_1 alone, over the real line (u = tan t)
    t, dt = _grid(-np.pi / 2, np.pi / 2, [np.arctan(0.5)])
    u = jnp.tan(t)
    second = second_derivative(Radial(), 0.5, u)
    printed = _integral(second**2 * jnp.pi * (1 + u**2) * (1 + u**2), t, dt)
    assert printed == pytest.approx(0.219, abs=1e-3)


def test_25_the_affine_part_of_signs_in_terms_of_end_values():
    law, b = Signs(0.8), 0.8 * (1 - 1e-12)
    ends = jax.jit(jax.vmap(jax.value_and_grad(lambda u: random_feature(u, 0.3, law=law))))
    (low, high), (left, right) = ends(jnp.array([-b, b]))
    a, d = (right + left) / 2, (high + low - b * (right - left)) / 2
    expected = 4 * a**2 + 4 * d**2 / (0.8**2 / 3)
    assert section_norm(law, 0.3).affine == pytest.approx(float(expected), rel=1e-9)


def test_28_corollary_6():
    law, x0, c2 = FixedSlope(1.0, 0.0, 1.0), 0.6, 0.3
    f1, f2, f3 = tangent_parts(x0, law=law, c2=c2)
    truth = wide_kernel(x0, x0, law=law, c2=c2)
    assert truth == pytest.approx(0.3168, abs=1e-12)
    assert tangent_sections(law, jnp.full(3, x0), c2)[0][0] == pytest.approx(0.3168, abs=1e-12)
    u, du = _grid(0.0, 1.0, [x0])
    slopes = jax.jit(lambda u: ([jax.vmap(jax.grad(f))(u) for f in (f1, f2, f3)], jax.vmap(f3)(u)))
    (d1, d2, d3), values = slopes(u)
    ratio = (u * d3 - values) ** 2 / u**2
    printed = _integral(d1**2 + c2 * (d2**2 + ratio), u, du)  # nu = 1
    assert printed == pytest.approx(0.0402, abs=1e-3)


def test_a_common_balance_puts_the_features_on_a_circle():
    # same delta << 0 for all: a^2 + b^2 = 1, a^2 = 1/(1+u^2); a cubic spline needs knot density ~ 1 + u^2
    n, bound, x0 = 20_000, 1.0, 0.2
    cells = (jnp.arange(n) + 0.5) / n

    def section_curvature(knots):
        a = 1 / jnp.sqrt(1 + knots**2)
        slopes, biases = jnp.concatenate([a, -a]), jnp.concatenate([a * knots, -a * knots])
        h, u = 0.02, jnp.array([-0.7, -0.3, 0.5, 0.8])
        feature = lambda u: jax.nn.relu(u[:, None] * slopes[None, :] - biases[None, :])
        f = lambda u: feature(u) @ feature(jnp.array([x0]))[0] / slopes.shape[0]
        return (f(u + h) - 2 * f(u) + f(u - h)) / h**2 / (jnp.abs(u - x0) / 2), u

    flat, _ = section_curvature(2 * bound * cells - bound)
    # inverse of the distribution function (u + u^3/3) / (2 * 4/3) + 1/2 on (-1, 1)
    grid = jnp.linspace(-1, 1, 40_001)
    tilted, _ = section_curvature(jnp.interp(cells, (grid + grid**3 / 3) / (8 / 3) + 0.5, grid))
    _, u = section_curvature(grid)
    np.testing.assert_allclose(flat * (1 + u**2), 0.5, rtol=2e-3)  # nu_3 = 1/(2 bound (1+u^2))
    np.testing.assert_allclose(tilted, 3 / 8, rtol=2e-3)  # constant: cubic spline


def test_31_across_a_gap_of_the_biases_the_function_is_linear_not_constant():
    # b uniform on (0, 0.3) or (0.7, 1), a = 1: the kernel is the mixture, and so is its section
    section = lambda x: (
        (
            random_feature(x, 0.9, law=FixedSlope(1.0, 0.0, 0.3))
            + random_feature(x, 0.9, law=FixedSlope(1.0, 0.7, 1.0))
        )
        / 2
    )
    left, right, slope = section(0.3), section(0.7), jax.grad(section)
    assert slope(0.7) == pytest.approx(float(slope(0.3)), rel=1e-12)
    assert right == pytest.approx(float(left + 0.4 * slope(0.3)), rel=1e-12)
    np.testing.assert_allclose([left, right, slope(0.3)], [0.06, 0.21, 0.375], rtol=1e-12)  # printed: equal


def test_a1_for_negative_slopes_the_green_function_faces_left():
    law, x0 = FixedSlope(-1.5, -0.4, 0.7), -0.1
    section = lambda x: random_feature(x, x0, law=law)
    low, high = (float(v) for v in law.support())
    x = 0.05
    t, w = np.polynomial.legendre.leggauss(10)
    left = right = 0.0
    for lo, hi in ((low, x0), (x0, x), (x, high)):
        u = jnp.asarray(lo + (hi - lo) * (1 + t) / 2)
        mass = jax.vmap(jax.grad(jax.grad(section)))(u) * w * (hi - lo) / 2
        left += float(jnp.sum(mass * jnp.maximum(u - x, 0)))
        right += float(jnp.sum(mass * jnp.maximum(x - u, 0)))
    assert left == pytest.approx(float(section(x)), abs=1e-12)
    assert abs(right - float(section(x))) > 0.01
