"""Dual activations, order parameters, infinite-width kernels: against other integrals and wide networks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, special

from meanflow import kernels
from meanflow.activations import NAMED, Stretched
from meanflow.kernels._infinite.dual import dual_activation, trapezoid


def gauss(phi, a, c, b, rule="legendre", nodes=260):
    """E[phi(u) phi(v)] by a Gauss rule, whose nodes have nothing to do with the trapezoid's."""
    if rule == "legendre":
        z, w = special.roots_legendre(nodes)
        z, w = 9 * z, 9 * w * np.exp(-0.5 * (9 * z) ** 2) / np.sqrt(2 * np.pi)
    else:
        z, w = special.roots_hermitenorm(nodes)
        w = w / np.sqrt(2 * np.pi)
    u = np.sqrt(a) * z[:, None] + 0 * z[None]
    v = b / np.sqrt(a) * z[:, None] + np.sqrt(max(c - b**2 / a, 0.0)) * z[None]
    return float(w @ (np.asarray(phi(u)) * np.asarray(phi(v))) @ w)


@functools.cache
def slope(phi):
    return jax.jit(jax.vmap(jax.vmap(jax.grad(phi))))


@pytest.mark.parametrize("name", ["linear", "erf", "sine", "gaussian", "tanh", "gelu", "softplus"])
def test_duals_of_smooth_activations(name):
    phi = NAMED[name]
    for a, c, b in ((1.0, 0.7, 0.3), (0.5, 1.2, -0.6)):
        ours = dual_activation(name)(*(jnp.asarray(v) for v in (a, c, b)))
        np.testing.assert_allclose(ours.value, gauss(phi, a, c, b), rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(ours.slope, gauss(slope(phi), a, c, b), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["relu", "leaky_relu"])
def test_duals_of_kinked_activations(name):
    # E over the angle of u, v = polar coordinates of a standard pair: one smooth integral a sector
    a, c, b = 1.3, 0.6, 0.4
    leak = 0.01 if name == "leaky_relu" else 0.0
    factor = np.linalg.cholesky(np.array([[a, b], [b, c]]))
    phi = lambda u: u if u > 0 else leak * u
    dphi = lambda u: 1.0 if u > 0 else leak
    ray = lambda t: factor @ np.array([np.cos(t), np.sin(t)])
    cuts = np.sort(
        np.mod(
            [np.pi / 2, 3 * np.pi / 2]
            + [np.arctan2(-factor[1, 0], factor[1, 1]) + k * np.pi for k in (0, 1)],
            2 * np.pi,
        )
    )
    both = lambda f, power: (
        sum(
            integrate.quad(lambda t: f(ray(t)[0]) * f(ray(t)[1]), lo, hi, epsabs=1e-13)[0]
            for lo, hi in zip([0, *cuts], [*cuts, 2 * np.pi], strict=True)
        )
        * power
        / (2 * np.pi)
    )
    ours = dual_activation(name)(*(jnp.asarray(v) for v in (a, c, b)))
    np.testing.assert_allclose(ours.value, both(phi, 2.0), rtol=1e-11)  # E r^2 = 2
    np.testing.assert_allclose(ours.slope, both(dphi, 1.0), rtol=1e-11)


def test_trapezoid_beats_gauss_hermite_on_tanh():
    a, b = 4.0, 0.3 * 4.0
    reference = integrate.dblquad(
        lambda y, x: np.tanh(2 * x) * np.tanh(2 * (0.3 * x + np.sqrt(0.91) * y)) * np.exp(-(x**2 + y**2) / 2),
        -9,
        9,
        -9,
        9,
        epsabs=1e-12,
        epsrel=1e-12,
    )[0] / (2 * np.pi)
    rule = dual_activation("tanh")
    ours = float(rule(jnp.asarray(a), jnp.asarray(a), jnp.asarray(b)).value)
    np.testing.assert_allclose(ours, reference, rtol=1e-10)
    assert abs(gauss(np.tanh, a, a, b, "hermite", 64) - reference) > 1e-7 * abs(reference)
    # and relu needs its closed form
    one, half = jnp.ones(()), jnp.asarray(0.5)
    rough = trapezoid("relu")(one, one, half).value
    exact = dual_activation("relu")(one, one, half).value
    assert 1e-5 < abs(float(rough - exact)) < 1e-2


def test_frequency_and_gradients():
    a, c, b = jnp.asarray(0.7), jnp.asarray(0.4), jnp.asarray(0.2)
    ours = dual_activation(Stretched("sine", 3.0))(a, c, b)
    stretched = trapezoid(lambda z: jnp.sin(3.0 * z))(a, c, b)
    np.testing.assert_allclose(ours, stretched, rtol=1e-10)
    # d value / d covariance = slope (Price), also at the edge where the angle has no derivative
    for name in ("relu", "erf", "gaussian", "tanh"):
        dual = dual_activation(name)
        for cov in (b, jnp.asarray(0.7)):
            var = a if cov is b else cov
            slope = jax.grad(lambda t, dual=dual, var=var: dual(var, var, t).value)(cov)
            if name == "tanh" and cov is not b:
                continue  # the quadrature's square root has no gradient at the edge
            np.testing.assert_allclose(slope, dual(var, var, cov).slope, rtol=1e-9)


@pytest.mark.parametrize("mode", [jax.jacfwd, jax.jacrev])
def test_relu_dual_has_finite_derivatives_everywhere(mode):
    """Parallel, opposite, zero and nearly parallel vectors: d/dcov = slope, d/dvar = sqrt(ac - b^2)/(4 pi a)."""
    dual = dual_activation("relu")
    a = jnp.array([1.0, 2.0, 0.0, 1.5, 1.0, 3.0])
    c = jnp.array([1.0, 0.5, 0.0, 0.0, 1.0, 3.0])
    b = jnp.array([1.0, -1.0, 0.0, 0.0, 1.0 - 1e-13, -2.0])
    derivative = mode(lambda a, c, b: dual(a, c, b).value, argnums=(0, 1, 2))(a, c, b)
    along = [np.diagonal(d) for d in derivative]
    root = np.sqrt(np.maximum(a * c - b**2, 0.0))
    share = lambda v: np.where(v > 0, root / (4 * np.pi * np.where(v > 0, v, 1.0)), 0.0)
    np.testing.assert_allclose(along[0], share(a), rtol=1e-7, atol=1e-12)
    np.testing.assert_allclose(along[1], share(c), rtol=1e-7, atol=1e-12)
    np.testing.assert_allclose(along[2], dual(a, c, b).slope, rtol=1e-12)
    np.testing.assert_allclose(dual(a, c, b).value[:4], [0.5, 0.0, 0.0, 0.0], atol=1e-15)
    gradient = mode(lambda b: dual(a, c, b).slope)(b)
    assert np.all(np.isfinite(gradient))


@pytest.mark.parametrize("activation", ["relu", "leaky_relu"])
def test_homogeneous_kernels_at_every_size_and_depth(activation):
    """K(2^k x) = 4^k K(x) to the last bit in float32, and at depth 12 it is the recursion of cosines in float64."""
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    plain = tangent_kernel(x, depth=3, activation=activation)
    for k in (-45, -34, 34, 45):
        scaled = tangent_kernel(x * np.float32(2.0**k), depth=3, activation=activation)
        np.testing.assert_array_equal(np.asarray(scaled) / 2.0**k / 2.0**k, plain)
    if activation == "relu":
        gram, depth = np.asarray(x, float) @ np.asarray(x, float).T / 3, 12
        length = np.sqrt(np.diagonal(gram))
        cosine, kernel = gram / np.outer(length, length), gram.copy()
        for layer in range(1, depth):  # with weight variance 1 a layer halves the squared length
            angle = np.arccos(np.clip(cosine, -1, 1))
            cosine = (np.sin(angle) + (np.pi - angle) * cosine) / np.pi
            kernel = kernel * (np.pi - angle) / (2 * np.pi) + np.outer(length, length) * cosine / 2.0**layer
        deep = tangent_kernel(x, depth=depth, weight_variance=1.0)
        np.testing.assert_allclose(deep, kernel, rtol=1e-4)


@pytest.mark.parametrize("size", [1e-12, 1e12])
def test_duals_of_tiny_and_huge_variances(size):
    """In float32, where the product of two variances does not exist; against limits of the closed forms."""
    a = jnp.asarray([size**2, size**2, 2 * size**2], jnp.float32)
    b = jnp.asarray([0.5 * size**2, size**2, -(size**2)], jnp.float32)
    cosine = np.array([0.5, 1.0, -0.5])
    erf, tanh = (dual_activation(name)(a, a, b) for name in ("erf", "tanh"))
    bell = dual_activation("gaussian")(a, a, b)
    if size < 1:  # linear at 0: erf(u) = 2 u / sqrt(pi), tanh(u) = u
        np.testing.assert_allclose(erf.value, 4 / np.pi * b, rtol=1e-6)
        np.testing.assert_allclose(tanh.value, b, rtol=1e-5)
        np.testing.assert_allclose(bell.value, 1.0, rtol=1e-6)
    else:  # the sign of u; a density at 0
        np.testing.assert_allclose(erf.value, 2 / np.pi * np.arcsin(cosine), rtol=1e-6)
        root = np.sqrt(1 + 2 * np.asarray(a, float) + np.asarray(a, float) ** 2 * (1 - cosine**2))
        np.testing.assert_allclose(bell.value, 1 / root, rtol=1e-5)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: kernels.order_parameters(x @ x.T, depth=3, weight_variance=1e300), "which follows from"),
        (lambda x: kernels.order_parameters(x @ x.T, depth=2, activation=jnp.log), "which follows from"),
        (
            lambda x: kernels.order_parameters(
                5 * np.ones((2, 3)), depth=2, variances=(np.ones(2), np.ones(3))
            ),
            "gram must be possible",
        ),
    ],
)
def test_what_has_no_kernel_is_refused(call, words):
    """Each of these was NaN, infinite or a wrong number without a word."""
    with pytest.raises(ValueError, match=words):
        call(np.random.default_rng(0).normal(size=(4, 3)))


PHI = [("relu", 2.0, 0.0), ("tanh", 1.5, 0.1), ("erf", 1.5, 0.2), ("sine", 1.5, 0.1), ("gaussian", 1.2, 0.3)]


@pytest.mark.parametrize(("name", "sw2", "sb2"), PHI)
def test_infinite_kernels_against_plain_recursion(name, sw2, sb2, key):
    """A textbook layer-by-layer recursion of (Sigma, Theta), pair by pair, with duals by Gauss-Legendre."""
    depth, x = 3, 0.8 * jax.random.normal(key, (3, 5))
    widths = (5, 64, 96)
    if name == "relu":

        def dual(a, c, b):
            t = np.arccos(np.clip(b / np.sqrt(a * c), -1, 1))
            value = np.sqrt(a * c) / (2 * np.pi) * (np.sin(t) + (np.pi - t) * np.cos(t))
            return value, (np.pi - t) / (2 * np.pi)
    else:
        phi = NAMED[name]

        def dual(a, c, b):
            return gauss(phi, a, c, b), gauss(slope(phi), a, c, b)

    gram = np.asarray(x @ x.T) / 5
    sigma = sw2 * gram + sb2
    theta = {"ntk": sigma.copy(), "standard": widths[0] * gram + 1}
    for layer in range(1, depth):
        value, slopes = np.zeros_like(sigma), np.zeros_like(sigma)
        for s in range(3):
            for t in range(s, 3):
                out = dual(sigma[s, s], sigma[t, t], sigma[s, t])
                (value[s, t], slopes[s, t]), (value[t, s], slopes[t, s]) = out, out
        sigma = sw2 * value + sb2
        for kind, more in (("ntk", sigma), ("standard", widths[layer] * value + 1)):
            theta[kind] = sw2 * slopes * theta[kind] + more
    setup = dict(depth=depth, activation=name, weight_variance=sw2, bias_variance=sb2)

    @jax.jit
    def ours(x):
        standard = tangent_kernel(x, widths=widths, **setup)
        return (
            kernels.order_parameters(x @ x.T / 5, **setup).r[-1],
            tangent_kernel(x, **setup),
            standard,
        )

    found = ours(x)
    accuracy = 1e-10 if name != "relu" else 1e-7  # arccos near 1
    np.testing.assert_allclose(found[0], sigma, rtol=1e-10)
    np.testing.assert_allclose(found[1], theta["ntk"], rtol=accuracy)
    np.testing.assert_allclose(found[2], theta["standard"], rtol=accuracy)
    if name == "erf":
        cross = tangent_kernel(x[:2], x[1:], **setup)
        np.testing.assert_allclose(cross, found[1][:2, 1:], rtol=1e-12)


def tangent_kernel(
    x, z=None, *, depth, activation="relu", weight_variance=2.0, bias_variance=0.0, widths=None
):
    """The kernel of a dense network from its trace, in the standard parametrization of the widths if there are any."""
    sizes, phi = (*(widths or (x.shape[1],) + (8,) * (depth - 1)), 1), NAMED[activation]
    shape = lambda *s: jax.ShapeDtypeStruct(s, x.dtype)
    params = [(shape(a, b), shape(b)) for a, b in zip(sizes, sizes[1:], strict=False)]

    def net(p, x):
        for w, b in p[:-1]:
            x = phi(x @ w + b[None])
        return x @ p[-1][0] + p[-1][1][None]

    variances = [(weight_variance, bias_variance)] * depth
    scaling = "ntk" if widths is None else "standard"
    return kernels.infinite_width(net, params, x, z, variances=variances, scaling=scaling).ntk


def random_network(key, widths, activation, sw2, sb2=0.0):
    phi = NAMED[activation]
    keys = jax.random.split(key, len(widths) - 1)
    params = [
        (
            jax.random.normal(k, (n, m)) * np.sqrt(sw2 / m),
            np.sqrt(sb2) * jax.random.normal(jax.random.fold_in(k, 1), (n,)),
        )
        for k, m, n in zip(keys, widths[:-1], widths[1:], strict=True)
    ]

    def apply(p, x):
        for w, b in p[:-1]:
            x = phi(x @ w.T + b[None])
        return (x @ p[-1][0].T + p[-1][1][None])[:, 0]

    return apply, params


def test_index_of_p_in_the_kernel(key):
    """A.11-A.14 print p^l for the Gram of H^{l-1}. tanh, L = 3: p^l gives 0.814, p^{l-1} 1.173."""
    width = 1024
    apply, params = random_network(key, (width, width, width, 1), "tanh", 1.5)
    x = np.sqrt(width) * jnp.eye(width)[:8]
    weights_only = lambda w, x: apply([(a, b) for a, (_, b) in zip(w, params, strict=True)], x)
    measured = (
        float(jnp.mean(jnp.diagonal(kernels.empirical_ntk(weights_only, [a for a, _ in params], x)))) / width
    )
    order = kernels.order_parameters(jnp.eye(2), depth=3, activation="tanh", weight_variance=1.5)
    ours = float(jnp.sum(order.p * order.q, axis=0)[0, 0])
    # a linear output layer has no p^3; the most favourable reading keeps p^2
    shifted = jnp.concatenate([order.p[1:, 0, 0], order.p[-1:, 0, 0]])
    printed = float(jnp.sum(shifted * order.q[:, 0, 0]))
    np.testing.assert_allclose([ours, printed], [1.1725, 0.814], atol=6e-4)
    assert abs(measured - ours) < 0.05 and abs(measured - printed) > 0.3


def test_bias_variance_enters(key):
    """A.6, A.9 leave sb2 out; a wide network with random biases needs it."""
    widths = (4, 2048, 2048, 1)
    x = jax.random.normal(key, (4, 4))
    exact = tangent_kernel(
        x,
        depth=3,
        activation="erf",
        weight_variance=1.5,
        bias_variance=0.5,
        widths=widths[:3],
    )
    without = tangent_kernel(x, depth=3, activation="erf", weight_variance=1.5, widths=widths[:3])
    apply, params = random_network(key, widths, "erf", 1.5, 0.5)
    measured = kernels.empirical_ntk(apply, params, x)
    error = lambda a: float(jnp.linalg.norm(measured - a) / jnp.linalg.norm(measured))
    assert error(exact) < 0.06
    assert error(without) == pytest.approx(0.71, abs=0.02)


def test_orthogonal_inputs_need_width(key):
    """p_st = 0 for all pairs needs T <= N_0: a Gram matrix of 1-D points has rank one."""
    x = jnp.linspace(-1.0, 1.0, 6)[:, None]
    assert np.linalg.matrix_rank(np.asarray(x @ x.T)) == 1


def normed(p, x):
    for w in p[:-1]:
        h = x @ w
        x = jax.nn.relu((h - jnp.mean(h, axis=0)[None]) / jnp.std(h, axis=0)[None])
    return (x @ p[-1])[:, 0]


def kernel_by_hand(network, width, seed):
    """K at T = N, L = 3, orthogonal inputs, weights only: back-propagation written out in numpy; and the weights."""
    rng = np.random.default_rng([width, seed])
    sw2 = 1.5 if network == "tanh" else 2.0
    one, two, readout = (rng.normal(size=s) * np.sqrt(sw2 / width) for s in [(width, width)] * 2 + [width])
    x = np.sqrt(width) * np.eye(width)  # rows are samples
    z1 = x @ one
    if network == "hidden":  # batch norm before both activations couples the samples
        s1 = z1.std(0)
        y1 = (z1 - z1.mean(0)) / s1
        h1 = np.maximum(y1, 0)
        z2 = h1 @ two
        s2 = z2.std(0)
        y2 = (z2 - z2.mean(0)) / s2
        h2 = np.maximum(y2, 0)
        back = lambda d, y, s: (d - d.mean(1, keepdims=True) - y * np.mean(d * y, axis=1, keepdims=True)) / s
        d2 = np.zeros((width,) * 3)  # (output t, sample, neuron)
        d2[np.arange(width), np.arange(width)] = readout * (y2 > 0)
        d2 = back(d2, y2, s2)
        d1 = back((d2 @ two.T) * (y1 > 0), y1, s1)
        pair = lambda d, gram: d.reshape(width, -1) @ np.einsum("sr,trn->tsn", gram, d).reshape(width, -1).T
        kernel = h2 @ h2.T + pair(d2, h1 @ h1.T) + width * pair(d1, np.eye(width))  # x x' = N I
    else:
        phi, slope = {
            "relu": (lambda z: np.maximum(z, 0), lambda z: 1.0 * (z > 0)),
            "tanh": (np.tanh, lambda z: 1 - np.tanh(z) ** 2),
        }[network]
        h1 = phi(z1)
        z2 = h1 @ two
        h2 = phi(z2)
        d2 = slope(z2) * readout
        d1 = slope(z1) * (d2 @ two.T)
        kernel = h2 @ h2.T + (d2 @ d2.T) * (h1 @ h1.T) + (d1 @ d1.T) * (x @ x.T)
    return kernel, (one, two, readout[:, None])


def test_kernel_by_hand_is_the_engine_s():
    kernel, weights = kernel_by_hand("hidden", 12, 0)
    ours = kernels.empirical_ntk(
        normed, [jnp.asarray(w) for w in weights], np.sqrt(12) * jnp.eye(12), stats="batch"
    )
    np.testing.assert_allclose(kernel, ours, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("network", "sizes", "exponents"),
    [
        ("relu", (128, 256, 512), (2.99, 1.99)),
        ("tanh", (128, 256, 512), (2.06, 1.06)),  # odd, no bias: kappa_2 = 0
        ("hidden", (32, 64, 128), (2.79, 1.93)),  # 2.92 and 1.95 from 64 to 192
    ],
)
def test_table_2_exponents_by_hand(network, sizes, exponents):
    """Of v and lambda_max. Printed: 3 and 2 for every plain network; 3/2 and at most 3/2 under batch norm."""
    spectra = [[np.linalg.eigvalsh(kernel_by_hand(network, n, k)[0]) for k in range(3)] for n in sizes]
    means = [np.mean([(s.var(), s[-1]) for s in runs], axis=0) for runs in spectra]
    slopes = np.polyfit(np.log(sizes), np.log(means), 1)[0]
    np.testing.assert_allclose(slopes, exponents, atol=0.02)
