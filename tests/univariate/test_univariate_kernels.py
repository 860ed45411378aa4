"""Closed-form kernels of univariate ReLU features against quadrature, sampling and autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate

from meanflow.univariate._kernels import indicator, random_feature, univariate_ntk
from meanflow.univariate._weight_laws import Finite, FixedSlope, Radial, Signs, Uniform, resolve_law

LAWS = {
    "interval": FixedSlope(-1.5, -0.4, 0.7),
    "signs": Signs(0.8),
    "uniform": Uniform(1.3, 0.9),
    "radial": Radial(3.0),
}
PAIRS = [(0.3, -0.2), (0.5, 0.5), (-0.7, 0.4), (1.9, 0.1), (1.9, -2.4), (-3.0, -1.1), (0.0, 0.0)]


def _relu(t):
    return max(t, 0.0)


def _quadrature(law, kind, x, z):
    """E g(ax-b) g(az-b) by adaptive quadrature over the law, kinks given as break points."""
    g = _relu if kind == "feature" else (lambda t: float(t > 0))

    def over_b(a, low, high):
        points = sorted({min(max(a * v, low), high) for v in (x, z)})
        edges = [low, *points, high]
        value = sum(
            integrate.quad(lambda b: g(a * x - b) * g(a * z - b), lo, hi, epsabs=1e-13)[0]
            for lo, hi in zip(edges[:-1], edges[1:], strict=True)
            if hi > lo
        )
        return value / (high - low)

    if isinstance(law, FixedSlope):
        return over_b(law.slope, law.low, law.high)
    if isinstance(law, Signs):
        return (over_b(1.0, -law.bound, law.bound) + over_b(-1.0, -law.bound, law.bound)) / 2
    if isinstance(law, Uniform):
        breaks = {0.0} | {s * min(law.slope, law.bound / abs(v)) for v in (x, z) if v for s in (-1, 1)}
        edges = sorted(breaks | {-law.slope, law.slope})
        total = sum(
            integrate.quad(lambda a: over_b(a, -law.bound, law.bound), lo, hi, epsabs=1e-12)[0]
            for lo, hi in zip(edges[:-1], edges[1:], strict=True)
        )
        return total / (2 * law.slope)
    radius2 = law.second_moment if kind == "feature" else 1.0
    ring = lambda t: g(np.cos(t) * x - np.sin(t)) * g(np.cos(t) * z - np.sin(t))
    # kinks of cos(t) x - sin(t) lie at t = arctan x (mod pi)
    rays = {np.mod(np.arctan(v) + k * np.pi, 2 * np.pi) for v in (x, z) for k in (0, 1)}
    edges = sorted(rays | {0.0, 2 * np.pi})
    total = sum(
        integrate.quad(ring, lo, hi, epsabs=1e-13)[0] for lo, hi in zip(edges[:-1], edges[1:], strict=True)
    )
    return radius2 * total / (2 * np.pi)


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("pair", PAIRS)
def test_closed_forms_against_quadrature_inside_and_outside_the_support(name, pair):
    law = LAWS[name]
    assert random_feature(*pair, law=law) == pytest.approx(_quadrature(law, "feature", *pair), abs=2e-11)
    assert indicator(*pair, law=law) == pytest.approx(_quadrature(law, "gate", *pair), abs=2e-11)


def test_the_inside_formulas():
    x, z = jnp.linspace(-0.7, 0.7, 9), jnp.linspace(-0.65, 0.6, 7)
    product, gap = x[:, None] * z[None, :], jnp.abs(x[:, None] - z[None, :])
    b, a = 0.9, 1.2
    np.testing.assert_allclose(
        random_feature(x, z, law=Signs(b)), b**2 / 6 + product / 2 + gap**3 / (24 * b), atol=1e-15
    )
    np.testing.assert_allclose(indicator(x, z, law=Signs(b)), 0.5 - gap / (4 * b), atol=1e-15)
    uniform = Uniform(a, b)  # a |x| <= 0.84 < b
    expected = b**2 / 6 + a**2 * product / 6 + a**3 * gap**3 / (96 * b)
    np.testing.assert_allclose(random_feature(x, z, law=uniform), expected, atol=1e-15)
    np.testing.assert_allclose(indicator(x, z, law=uniform), 0.5 - a * gap / (8 * b), atol=1e-15)
    for law in (Signs(b), uniform):
        k0, k1, k3 = law.cubic()
        np.testing.assert_allclose(random_feature(x, z, law=law), k0 + k1 * product + k3 * gap**3, atol=1e-15)


@pytest.mark.parametrize("name", LAWS)
def test_kernels_are_positive_semidefinite_on_both_sides_of_the_support(name):
    x = jnp.linspace(-3, 3, 25)
    for kernel in (random_feature, indicator, univariate_ntk):
        values = jnp.linalg.eigvalsh(kernel(x, law=LAWS[name]))
        assert values[0] > -1e-13 * values[-1]


@pytest.mark.parametrize("name", LAWS)
def test_shapes_dtypes_jit_and_gradients(name):
    law = LAWS[name]
    x, z = jnp.linspace(-2, 2, 6).reshape(2, 3), jnp.array([0.3, -1.7, 0.1, 0.9])
    gram = jax.jit(lambda x, z, law: univariate_ntk(x, z, law=law, c2=0.3))(x, z, law)
    assert gram.shape == (2, 3, 4)
    np.testing.assert_allclose(gram[1, 2, 3], univariate_ntk(x[1, 2], z[3], law=law, c2=0.3), rtol=1e-14)
    single = univariate_ntk(x.astype(jnp.float32), z.astype(jnp.float32), law=law, c2=0.3)
    assert single.dtype == jnp.float32
    np.testing.assert_allclose(single, gram, atol=2e-6)
    h = 1e-6
    for kernel in (random_feature, indicator):
        slope = jax.jit(jax.vmap(jax.grad(lambda u, kernel=kernel: kernel(u, 0.31, law=law))))(x.ravel())
        numeric = (kernel(x.ravel() + h, 0.31, law=law) - kernel(x.ravel() - h, 0.31, law=law)) / (2 * h)
        np.testing.assert_allclose(slope, numeric, atol=1e-8)
    slope = jax.jit(jax.vmap(jax.grad(lambda u: univariate_ntk(u, 0.3, law=law))))
    assert jnp.all(jnp.isfinite(slope(jnp.array([0.3, 0.0]))))  # on the kink, and where bound/|x| is infinite


def test_gradient_in_the_law_parameters():
    slope = jax.grad(lambda b: random_feature(0.4, 1.3, law=Uniform(1.1, b)))(0.8)
    h = 1e-6
    upper, lower = (random_feature(0.4, 1.3, law=Uniform(1.1, 0.8 + s * h)) for s in (1, -1))
    assert slope == pytest.approx(float(upper - lower) / (2 * h), abs=1e-8)


@pytest.mark.parametrize("name", [n for n in LAWS])
def test_sampled_clouds_approach_the_closed_form(name, key):
    law, m = LAWS[name], 100_000
    cloud = Finite(*law.sample(key, m))
    x = jnp.array([-1.2, 0.1, 0.5, 2.0])
    # 5 standard errors of the mean, measured on the same draws
    spread = jnp.std(cloud.features(x)[:, None] * cloud.features(x)[None] * m, axis=-1) / jnp.sqrt(m)
    assert jnp.all(jnp.abs(random_feature(x, law=cloud) - random_feature(x, law=law)) < 5 * spread + 1e-12)
    assert jnp.all(jnp.abs(indicator(x, law=cloud) - indicator(x, law=law)) < 5 * 0.5 / jnp.sqrt(m))


def test_stratified_clouds_converge_like_the_inverse_square_of_the_width():
    x = jnp.array([-0.77, 0.13, 0.52])
    widths = [40, 80, 160, 320, 640]
    errors = [
        jnp.max(
            jnp.abs(
                random_feature(x, law=Finite(*Signs(1.0).midpoints(m))) - random_feature(x, law=Signs(1.0))
            )
        )
        for m in widths
    ]
    order = -np.polyfit(np.log(widths), np.log(np.array(errors)), 1)[0]
    assert 1.7 < order < 2.3


@pytest.mark.bad_input
def test_bad_arguments():
    with pytest.raises(ValueError, match="law must be one of"):
        random_feature(0.1, law="gauss")
    with pytest.raises(ValueError, match="even"):
        Signs().midpoints(5)
    with pytest.raises(ValueError, match="Finite"):
        univariate_ntk(0.1, law="signs", c2=jnp.ones(3))
    assert isinstance(resolve_law("radial"), Radial)


# ---- errata: the printed formula fails, ours holds


def test_27_is_the_jacobian_gram_only_after_the_factor_m_over_alpha_squared(key):
    m, alpha = 30, 4.0
    a, b, c = jax.random.normal(key, (3, m))
    x = jnp.linspace(-1.5, 1.5, 5)

    def predict(params, x):
        a, b, c = params
        return jax.nn.relu(x * a - b) @ c / alpha

    rows = jax.vmap(lambda x: jnp.concatenate(jax.grad(predict)((a, b, c), x)))(x)
    truth = rows @ rows.T
    printed = univariate_ntk(x, law=Finite(a, b), c2=c**2)
    ours = univariate_ntk(x, law=Finite(a, b), c2=c**2, scale=m / alpha**2)
    np.testing.assert_allclose(ours, truth, rtol=1e-13)
    np.testing.assert_allclose(printed * (m / alpha**2), truth, rtol=1e-13)
    assert jnp.max(jnp.abs(printed - truth)) > 0.5


def _printed_26(x, z, second_moment=2.0):
    middle = (z / (1 + z**2) - x / (1 + x**2)) * (x * z - 1)
    last = (x + z) * (z**2 / (1 + z**2) - x**2 / (1 + x**2))
    angle = np.pi - np.arctan(z) + np.arctan(x)
    return second_moment / (4 * np.pi) * (angle * (x * z + 1) + middle + last)


def test_26_and_40_the_radial_kernel():
    truth = _quadrature(Radial(2.0), "feature", -0.7, 0.4)
    assert truth == pytest.approx(0.421484, abs=1e-6)
    assert random_feature(-0.7, 0.4, law="radial") == pytest.approx(truth, abs=1e-12)
    assert random_feature(0.4, -0.7, law="radial") == pytest.approx(truth, abs=1e-12)
    assert _printed_26(-0.7, 0.4) == pytest.approx(0.0896, abs=1e-4)
    assert _printed_26(0.4, -0.7) == pytest.approx(0.6304, abs=1e-4)  # not even symmetric


@pytest.mark.parametrize("name", ["signs", "uniform", "radial"])
def test_theorem_5_the_curvature_density_is_nu_3(name):
    law, x0 = LAWS[name], 0.15
    u = jnp.array([-0.75, -0.4, 0.1, 0.33, 0.71])
    curvature = jax.jit(jax.vmap(jax.grad(jax.grad(lambda u: random_feature(u, x0, law=law)))))(u)
    np.testing.assert_allclose(curvature, law.nu_3(u) * jnp.abs(u - x0) / 2, rtol=1e-10)
    if name != "signs":  # with a = +-1 the two densities coincide
        assert jnp.max(jnp.abs(curvature / (law.nu_1(u) * jnp.abs(u - x0) / 2) - 1)) > 0.1


def test_densities_are_those_of_sampled_knots(key):
    edges = jnp.linspace(-2, 2, 9)
    fine = edges[:-1, None] + (edges[1:] - edges[:-1])[:, None] * ((jnp.arange(4000) + 0.5) / 4000)[None, :]
    for name, law in LAWS.items():
        a, b = law.sample(jax.random.fold_in(key, len(name)), 400_000)
        for weights, density in ((jnp.ones_like(a), law.nu_1), (a * a, law.nu_3)):
            counts, _ = jnp.histogram(b / a, edges, weights=weights / a.shape[0])
            mass = jnp.mean(density(fine), axis=1) * (edges[1] - edges[0])
            np.testing.assert_allclose(counts, mass, atol=8e-3 * float(jnp.mean(weights)))
        np.testing.assert_allclose(
            law.moments(), jnp.stack([a, b]) @ jnp.stack([a, b]).T / a.shape[0], atol=0.02
        )


def test_independent_uniforms_give_cubics_only_inside():
    h, stencil = 0.05, jnp.array([1.0, -4.0, 6.0, -4.0, 1.0])  # exact for cubics
    fourth = lambda u: stencil @ random_feature(u + h * jnp.arange(-2, 3), 0.2, law=Uniform(1.0, 1.0)) / h**4
    assert fourth(0.6) == pytest.approx(0.0, abs=1e-9)
    assert fourth(1.5) == pytest.approx(0.077, abs=1e-3)


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


@pytest.mark.parametrize(
    ("name", "jump"),
    [
        ("signs", lambda law, x0: -(x0**2 + 1) / (2 * law.bound)),
        ("uniform", lambda law, x0: -law.slope * (x0**2 + 1) / (4 * law.bound)),
        ("radial", lambda law, x0: -1 / np.pi),
    ],
)
def test_corollary_6_the_tangent_kernel_is_only_continuous(name, jump):
    law, x0, c2 = LAWS[name], 0.35, 0.6
    slope = jax.grad(lambda u: univariate_ntk(u, x0, law=law, c2=c2))
    assert slope(x0 + 1e-9) - slope(x0 - 1e-9) == pytest.approx(c2 * jump(law, x0), abs=1e-7)
    smooth = jax.grad(lambda u: random_feature(u, x0, law=law))
    assert smooth(x0 + 1e-9) - smooth(x0 - 1e-9) == pytest.approx(0.0, abs=1e-8)
