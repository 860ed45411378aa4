"""RKHS norms: reproducing property, minimality, and the printed norms failing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meanflow.univariate._kernels import random_feature, univariate_ntk
from meanflow.univariate._norms import feature_norm, tangent_norm, tangent_parts
from meanflow.univariate._weight_laws import Finite, FixedSlope, Radial, Signs, Uniform

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
    return jax.vmap(section)(x0), jnp.diag(univariate_ntk(x0, law=law, c2=c2))


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
    law, nodes = Signs(1.0), jnp.linspace(-0.95, 0.95, 60)
    centres, alpha = jnp.array([-0.6, -0.1, 0.0, 0.25]), jnp.array([-0.5, 0.0, 0.0, 1.0])
    cloud = Finite(*law.midpoints(4000))
    target = random_feature(nodes, centres, law=law) @ alpha
    cost = jnp.sum(jnp.linalg.lstsq(cloud.features(nodes), target)[0] ** 2)
    assert combination(law, centres, alpha)[0].total == pytest.approx(float(cost), rel=2e-3)


def test_finite_clouds_have_no_density():
    with pytest.raises(ValueError, match="must have a knot density"):
        feature_norm(lambda u: u, law=Finite(jnp.ones(2), jnp.zeros(2)))


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
    truth = univariate_ntk(x0, x0, law=law, c2=c2)
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
        cloud = Finite(jnp.concatenate([a, -a]), jnp.concatenate([a * knots, -a * knots]))
        h, u = 0.02, jnp.array([-0.7, -0.3, 0.5, 0.8])
        f = lambda u: random_feature(u, x0, law=cloud)
        return (f(u + h) - 2 * f(u) + f(u - h)) / h**2 / (jnp.abs(u - x0) / 2), u

    flat, _ = section_curvature(2 * bound * cells - bound)
    # inverse of the distribution function (u + u^3/3) / (2 * 4/3) + 1/2 on (-1, 1)
    grid = jnp.linspace(-1, 1, 40_001)
    tilted, _ = section_curvature(jnp.interp(cells, (grid + grid**3 / 3) / (8 / 3) + 0.5, grid))
    _, u = section_curvature(grid)
    np.testing.assert_allclose(flat * (1 + u**2), 0.5, rtol=2e-3)  # nu_3 = 1/(2 bound (1+u^2))
    np.testing.assert_allclose(tilted, 3 / 8, rtol=2e-3)  # constant: cubic spline
