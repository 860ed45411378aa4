"""Closed-form kernels of univariate ReLU features against quadrature, sampling and autodiff."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate

import meanflow as mf
from meanflow.measures import laws
from meanflow.univariate import wide_kernel
from meanflow.univariate._kernels import RadialLaw, SignsLaw, UniformLaw

random_feature, indicator = (partial(wide_kernel, kind=kind) for kind in ("feature", "gate"))

LAWS = {
    "signs": SignsLaw(0.8),
    "uniform": UniformLaw(1.3, 0.9),
    "radial": RadialLaw(3.0),
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

    if isinstance(law, SignsLaw):
        return (over_b(1.0, -law.bound, law.bound) + over_b(-1.0, -law.bound, law.bound)) / 2
    if isinstance(law, UniformLaw):
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
        random_feature(x, z, law=SignsLaw(b)), b**2 / 6 + product / 2 + gap**3 / (24 * b), atol=1e-15
    )
    np.testing.assert_allclose(indicator(x, z, law=SignsLaw(b)), 0.5 - gap / (4 * b), atol=1e-15)
    uniform = UniformLaw(a, b)  # a |x| <= 0.84 < b
    expected = b**2 / 6 + a**2 * product / 6 + a**3 * gap**3 / (96 * b)
    np.testing.assert_allclose(random_feature(x, z, law=uniform), expected, atol=1e-15)
    np.testing.assert_allclose(indicator(x, z, law=uniform), 0.5 - a * gap / (8 * b), atol=1e-15)
    for law in (SignsLaw(b), uniform):
        k0, k1, k3 = law.cubic()
        np.testing.assert_allclose(random_feature(x, z, law=law), k0 + k1 * product + k3 * gap**3, atol=1e-15)


@pytest.mark.parametrize("name", LAWS)
def test_kernels_are_positive_semidefinite_on_both_sides_of_the_support(name):
    x = jnp.linspace(-3, 3, 25)
    for kernel in (random_feature, indicator, wide_kernel):
        values = jnp.linalg.eigvalsh(kernel(x, law=LAWS[name]))
        assert values[0] > -1e-13 * values[-1]


@pytest.mark.parametrize("name", LAWS)
def test_shapes_dtypes_jit_and_gradients(name):
    law = LAWS[name]
    x, z = jnp.linspace(-2, 2, 6).reshape(2, 3), jnp.array([0.3, -1.7, 0.1, 0.9])
    gram = jax.jit(lambda x, z, law: wide_kernel(x, z, law=law, c2=0.3))(x, z, law)
    assert gram.shape == (2, 3, 4)
    np.testing.assert_allclose(gram[1, 2, 3], wide_kernel(x[1, 2], z[3], law=law, c2=0.3), rtol=1e-14)
    single = wide_kernel(x.astype(jnp.float32), z.astype(jnp.float32), law=law, c2=0.3)
    assert single.dtype == jnp.float32
    np.testing.assert_allclose(single, gram, atol=2e-6)
    h = 1e-6
    for kernel in (random_feature, indicator):
        slope = jax.jit(jax.vmap(jax.grad(lambda u, kernel=kernel: kernel(u, 0.31, law=law))))(x.ravel())
        numeric = (kernel(x.ravel() + h, 0.31, law=law) - kernel(x.ravel() - h, 0.31, law=law)) / (2 * h)
        np.testing.assert_allclose(slope, numeric, atol=1e-8)
    slope = jax.jit(jax.vmap(jax.grad(lambda u: wide_kernel(u, 0.3, law=law))))
    assert jnp.all(jnp.isfinite(slope(jnp.array([0.3, 0.0]))))  # on the kink, and where bound/|x| is infinite


def test_gradient_in_the_law_parameters():
    slope = jax.grad(lambda b: random_feature(0.4, 1.3, law=UniformLaw(1.1, b)))(0.8)
    h = 1e-6
    upper, lower = (random_feature(0.4, 1.3, law=UniformLaw(1.1, 0.8 + s * h)) for s in (1, -1))
    assert slope == pytest.approx(float(upper - lower) / (2 * h), abs=1e-8)


def test_stratified_clouds_converge_like_the_inverse_square_of_the_width():
    x = jnp.array([-0.77, 0.13, 0.52])
    widths = [40, 80, 160, 320, 640]

    def stratified(m):
        """The kernel of a = 1 and a = -1 with the biases at the midpoints of m/2 equal cells of (-1, 1)."""
        b = 2 * (jnp.arange(m // 2) + 0.5) / (m // 2) - 1
        features = jnp.concatenate([jax.nn.relu(s * x[:, None] - b[None, :]) for s in (1, -1)], axis=1)
        return features @ features.T / m

    errors = [jnp.max(jnp.abs(stratified(m) - random_feature(x, law=SignsLaw(1.0)))) for m in widths]
    order = -np.polyfit(np.log(widths), np.log(np.array(errors)), 1)[0]
    assert 1.7 < order < 2.3


@pytest.mark.bad_input
def test_bad_arguments():
    with pytest.raises(ValueError, match="law must be one of"):
        random_feature(0.1, law="gauss")


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
    z = x[:, None] * a[None, :] - b[None, :]
    feature, active = jax.nn.relu(z), (z > 0).astype(z.dtype)
    # means over the neurons in the place of the expectations of (27)
    printed = (feature @ feature.T + (jnp.outer(x, x) + 1) * ((active * c[None, :] ** 2) @ active.T)) / m
    np.testing.assert_allclose(printed * (m / alpha**2), truth, rtol=1e-13)
    ours = mf.tangent_kernel(mf.full(alpha=alpha), mf.Cloud(mf.Affine(a, b, c)), x) / m
    np.testing.assert_allclose(ours, truth, rtol=1e-13)
    assert jnp.max(jnp.abs(printed - truth)) > 0.5


def _printed_26(x, z, second_moment=2.0):
    middle = (z / (1 + z**2) - x / (1 + x**2)) * (x * z - 1)
    last = (x + z) * (z**2 / (1 + z**2) - x**2 / (1 + x**2))
    angle = np.pi - np.arctan(z) + np.arctan(x)
    return second_moment / (4 * np.pi) * (angle * (x * z + 1) + middle + last)


def test_26_and_40_the_radial_kernel():
    truth = _quadrature(RadialLaw(2.0), "feature", -0.7, 0.4)
    assert truth == pytest.approx(0.421484, abs=1e-6)
    assert random_feature(-0.7, 0.4, law="radial") == pytest.approx(truth, abs=1e-12)
    assert random_feature(0.4, -0.7, law="radial") == pytest.approx(truth, abs=1e-12)
    assert _printed_26(-0.7, 0.4) == pytest.approx(0.0896, abs=1e-4)
    assert _printed_26(0.4, -0.7) == pytest.approx(0.6304, abs=1e-4)  # not even symmetric


def test_independent_uniforms_give_cubics_only_inside():
    h, stencil = 0.05, jnp.array([1.0, -4.0, 6.0, -4.0, 1.0])  # exact for cubics
    fourth = lambda u: (
        stencil @ random_feature(u + h * jnp.arange(-2, 3), 0.2, law=UniformLaw(1.0, 1.0)) / h**4
    )
    assert fourth(0.6) == pytest.approx(0.0, abs=1e-9)
    assert fourth(1.5) == pytest.approx(0.077, abs=1e-3)


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
    slope = jax.grad(lambda u: wide_kernel(u, x0, law=law, c2=c2))
    assert slope(x0 + 1e-9) - slope(x0 - 1e-9) == pytest.approx(c2 * jump(law, x0), abs=1e-7)
    smooth = jax.grad(lambda u: random_feature(u, x0, law=law))
    assert smooth(x0 + 1e-9) - smooth(x0 - 1e-9) == pytest.approx(0.0, abs=1e-8)


@pytest.mark.parametrize(
    ("given", "closed"),
    [
        ({"a": laws.signs(), "b": laws.uniform(-0.8, 0.8)}, LAWS["signs"]),
        ({"a": laws.uniform(-1.3, 1.3), "b": laws.uniform(-0.9, 0.9)}, LAWS["uniform"]),
        ({"a": laws.normal(1.5**0.5), "b": laws.normal(1.5**0.5)}, LAWS["radial"]),
    ],
    ids=LAWS,
)
def test_kernels_take_the_laws_that_neurons_are_drawn_from(given, closed):
    x = jnp.linspace(-2.0, 2.0, 7)
    np.testing.assert_allclose(random_feature(x, law=given), random_feature(x, law=closed), rtol=1e-12)
    # the same laws draw neurons, whose mean is the kernel within five standard errors
    a, b, _ = mf.full().init(jax.random.key(0), 40_000, **given).particles
    each = jax.nn.relu(a * 0.7 - b) * jax.nn.relu(-a * 0.3 - b)
    error = float(jnp.std(each)) / 200
    assert abs(float(jnp.mean(each) - random_feature(0.7, -0.3, law=given))) < 5 * error


@pytest.mark.parametrize(
    "given",
    [
        {"a": laws.signs(2.0), "b": laws.uniform()},
        {"a": laws.signs(), "b": laws.uniform(0.0, 1.0)},
        {"a": laws.normal(1.0), "b": laws.normal(2.0)},
        {"a": laws.normal(1.0), "b": laws.uniform()},
    ],
)
def test_laws_without_a_closed_form_are_refused(given):
    with pytest.raises(ValueError, match="closed form"):
        random_feature(0.5, law=given)
    with pytest.raises(ValueError, match="'a' and 'b'"):
        random_feature(0.5, law={"a": laws.signs()})


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "given",
    [
        {"a": laws.signs(), "b": laws.uniform(0.0, 0.0)},
        {"a": laws.uniform(0.0, 0.0), "b": laws.uniform()},
    ],
)
def test_uniform_laws_of_one_number_are_refused(given):
    with pytest.raises(ValueError, match="interval of length 0"):
        random_feature(0.5, law=given)
