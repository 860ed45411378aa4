"""Infinite width from the trace: against closed recursions, kernels written by hand, algebra and drawn features.

Finite networks are compared in ``test_wide_zoo``, and neural-tangents in the benchmarks.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from scipy import integrate

from meanflow import kernels
from meanflow.activations import NAMED

RNG = np.random.default_rng(11)
POINTS, LINE, IMAGE = (jnp.asarray(RNG.normal(size=shape)) for shape in ((3, 5), (3, 6, 2), (3, 4, 4, 2)))
N = 8


def sizes(*shapes):
    """Shapes of parameters are enough."""
    return tuple(jax.ShapeDtypeStruct(s, float) for s in shapes)


def wide(net, shapes, x, z=None, variance=2.0, **options):
    """The kernels of a network whose parameters all have one variance, or the given ones."""
    variances = variance if isinstance(variance, tuple) else (variance,) * len(shapes)
    return kernels.infinite_width(net, sizes(*shapes), x, z, variances=variances, **options)


def conv(x, w, stride=1, padding="SAME"):
    rank = x.ndim - 2
    names = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC")}[rank]
    return jax.lax.conv_general_dilated(x, w, (stride,) * rank, padding, dimension_numbers=names)


def close(found, exact, rtol=1e-10):
    np.testing.assert_allclose(found, exact, rtol=rtol, atol=rtol * np.max(np.abs(exact)))


@pytest.mark.parametrize("name", ["relu", "erf", "tanh"])
def test_dense_layers_are_those_of_the_order_parameters(name):
    """Both parametrizations against sum_l r^l q^l and sum_l (N_{l-1} p^{l-1} + 1) q^l."""
    phi = NAMED[name]
    net = lambda p, x: phi(phi(x @ p[0] + p[3][None]) @ p[1] + p[4][None]) @ p[2] + p[5][None]
    shapes, variances = ((5, N), (N, N), (N, 1), (N,), (N,), (1,)), (1.7,) * 3 + (0.3,) * 3
    order = kernels.order_parameters(
        POINTS @ POINTS.T / 5, depth=3, activation=name, weight_variance=1.7, bias_variance=0.3
    )
    found = wide(net, shapes, POINTS, POINTS[:2], variances)
    close(found.ntk, jnp.sum(order.r * order.q, 0)[:, :2])
    close(found.nngp, order.r[-1][:, :2])
    standard = wide(net, shapes, POINTS, variance=variances, scaling="standard")
    widths = np.array([5, N, N])[:, None, None]
    close(standard.ntk, jnp.sum((widths * order.p + 1) * order.q, 0))
    close(
        wide(net, shapes, POINTS, variance=variances, diagonal=True).ntk,
        jnp.diagonal(found.ntk[:2]).tolist() + [jnp.sum(order.r * order.q, 0)[2, 2]],
    )
    close(wide(net, shapes, POINTS, POINTS[:2], variances, rows=2).ntk, found.ntk)


def test_convolutions_by_hand():
    """A linear convolution has kernels that can be written down; with pairs of positions and without."""
    both = wide(conv_only, ((3, 2, N),), LINE, LINE[:2], 1.0)
    padded = np.pad(LINE, ((0, 0), (1, 1), (0, 0)))
    # (T, P, window x channels)
    patches = np.stack([padded[:, p : p + 3].reshape(3, -1) for p in range(6)], 1)
    exact = np.einsum("tpi,sqi->tspq", patches, patches[:2]) / 6
    close(both.nngp, exact)
    close(both.ntk, exact)
    # one window over the whole image is a dense layer on all pixels
    once = lambda p, x: jax.nn.relu(conv(x, p[0], padding="VALID")).reshape(x.shape[0], -1) @ p[1]
    dense = lambda p, x: jax.nn.relu(x @ p[0]) @ p[1]
    flat = wide(dense, ((32, N), (N, 1)), IMAGE.reshape(3, -1))
    close(wide(once, ((4, 4, 2, N), (N, 1)), IMAGE).ntk, flat.ntk)
    # flattened (pairs of equal positions), or one position after another out of all pairs
    deep = lambda p, x: jax.nn.relu(conv(jax.nn.relu(conv(x, p[0])), p[1], 2))
    lean = wide(
        lambda p, x: deep(p, x).reshape(x.shape[0], -1) @ p[2], ((3, 2, N), (3, N, N), (3 * N, 1)), LINE
    )
    full = wide(lambda p, x: deep(p, x), ((3, 2, N), (3, N, N)), LINE)
    relu = lambda p, x: jnp.einsum("tpc,pc->t", deep(p, x), p[2])
    close(lean.ntk, wide(relu, ((3, 2, N), (3, N, N), (3, N)), LINE).ntk)
    assert full.ntk.shape == (3, 3, 3, 3)
    # shifted images are the same image to a circular network that is pooled
    around = lambda x, w: conv(jnp.concatenate([x[:, :, -1:], x, x[:, :, :1]], 2), w, padding="VALID")
    circular = lambda p, x: jnp.mean(jax.nn.relu(around(x, p[0])), (1, 2)) @ p[1]
    rolled = [wide(circular, ((1, 3, 2, N), (N, 1)), IMAGE, jnp.roll(IMAGE, n, axis=2)).ntk for n in (0, 2)]
    close(*rolled)


def conv_only(p, x):
    return conv(x, p[0])


def quadrature(f, g, v, w, x, count=80):
    """E[f(u) g(v)] by a product Gauss rule."""
    nodes, mass = np.polynomial.hermite_e.hermegauss(count)
    mass = mass / np.sqrt(2 * np.pi)
    a, rho = np.sqrt(v), x / np.sqrt(v * w)
    u, t = a * nodes[:, None], np.sqrt(w) * (rho * nodes[:, None] + np.sqrt(1 - rho**2) * nodes[None])
    return np.sum(mass[:, None] * mass[None] * np.asarray(f(u)) * np.asarray(g(t)))


SMOOTH = {
    "sin": lambda u: jnp.sin(1.5 * u + 0.3),
    "cos": jnp.cos,
    "exp": lambda u: jnp.exp(0.4 * u),
    "erf": jax.scipy.special.erf,
    "gelu": lambda u: jax.nn.gelu(u, approximate=False),
    "cubic": lambda u: u**3 - 2 * u + 1,
    "swish": jax.nn.silu,
    "sum of two": lambda u: jnp.sin(u) + jax.nn.sigmoid(u) * u,
    "shifted": lambda u: jnp.tanh(u + 0.5),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_functions_of_one_gaussian(name):
    """NNGP against a Gauss rule, and the tangent kernel through the derivative that JAX gives."""
    f = SMOOTH[name]
    net = lambda p, x: f(x @ p[0]) @ p[1]
    found = wide(net, ((5, N), (N, 1)), POINTS, variance=(0.7, 1.0))
    gram = 0.7 * np.asarray(POINTS @ POINTS.T) / 5
    slope = jax.vmap(jax.vmap(jax.grad(f)))
    for t, s in ((0, 0), (0, 1), (1, 2)):
        v, w, x = gram[t, t], gram[s, s], gram[t, s]
        value = quadrature(f, f, v, w, x)
        np.testing.assert_allclose(found.nngp[t, s], value, rtol=1e-8, atol=1e-12)
        np.testing.assert_allclose(found.ntk[t, s], value + x * quadrature(slope, slope, v, w, x), rtol=1e-8)
    assert found.error < 1e-6


def test_functions_with_kinks_state_their_error():
    """relu, leaky relu, |u| and steps have closed forms however they are written; others state a bound."""
    dense = lambda f: wide(lambda p, x: f(x @ p[0]) @ p[1], ((5, N), (N, 1)), POINTS)
    relu = dense(jax.nn.relu)
    for f in (lambda u: jnp.where(u > 0, u, 0.0), lambda u: (u + jnp.abs(u)) / 2, lambda u: u * (u > 0)):
        close(dense(f).ntk, relu.ntk)
    angle = jnp.arccos(jnp.clip(jnp.corrcoef(jnp.concatenate([POINTS, -POINTS], 1)), -1, 1))
    close(dense(jnp.sign).nngp, 2 * (1 - 2 * angle / np.pi), 1e-7)
    assert relu.error == 0
    clipped = dense(lambda u: jnp.clip(u, -1.0, 1.0))
    gram = 2 * np.asarray(POINTS @ POINTS.T) / 5
    density = lambda u, t, m: (
        np.exp(-0.5 * np.array([u, t]) @ np.linalg.solve(m, [u, t])) / (2 * np.pi * np.sqrt(np.linalg.det(m)))
    )
    matrix = gram[:2, :2]
    inner = lambda t, u: np.clip(u, -1, 1) * np.clip(t, -1, 1) * density(u, t, matrix)
    pieces = [
        integrate.dblquad(inner, a, b, c, d)[0]
        for a, b in ((-9, -1), (-1, 1), (1, 9))
        for c, d in ((-9, -1), (-1, 1), (1, 9))
    ]
    assert abs(clipped.nngp[0, 1] - 2 * sum(pieces)) < clipped.error * 2 * np.sqrt(
        clipped.nngp[0, 0] * clipped.nngp[1, 1]
    )
    assert clipped.error > 1e-4


def test_norms_and_gates_by_hand():
    """Layer norm divides by the standard deviation; products of independent fields, of their moments."""

    def normed(p, x):
        h = x @ p[0]
        h = (h - jnp.mean(h, -1, keepdims=True)) / jnp.sqrt(jnp.var(h, -1, keepdims=True) + 0.1)
        return h @ p[1]

    gram = np.asarray(2 * POINTS @ POINTS.T) / 5
    scale = 1 / np.sqrt(np.diag(gram) + 0.1)
    exact = gram * np.outer(scale, scale)
    found = wide(normed, ((5, N), (N, 1)), POINTS, variance=(2.0, 1.0))
    close(found.nngp, exact)
    close(found.ntk, 2 * exact)
    gated = lambda p, x: ((x @ p[0]) * jnp.sin(x @ p[1])) @ p[2]
    found = wide(gated, ((5, N), (5, N), (N, 1)), POINTS, variance=(2.0, 2.0, 1.0))
    square = np.diag(gram)[:, None] + np.diag(gram)[None]
    sines = (np.exp(gram - square / 2) - np.exp(-gram - square / 2)) / 2
    cosines = (np.exp(gram - square / 2) + np.exp(-gram - square / 2)) / 2
    close(found.nngp, gram * sines)
    close(found.ntk, 2 * gram * sines + gram * cosines * gram)


def test_shared_weights():
    """The same matrix twice: W relu(W x), and a step of a recurrent network that sees the same matrix again."""
    twice = lambda p, x: jax.nn.relu(jax.nn.relu(x @ p[0]) @ p[1]) @ p[1] @ p[2]
    apart = lambda p, x: jax.nn.relu(jax.nn.relu(x @ p[0]) @ p[1]) @ p[2] @ p[3]
    shared = wide(twice, ((5, N), (N, N), (N, 1)), POINTS)
    close(shared.ntk, wide(apart, ((5, N), (N, N), (N, N), (N, 1)), POINTS).ntk)
    # the sum of both layers sees that they are correlated: cov(W a, W b) = sw2 E[a b]
    total = lambda p, x: (jax.nn.relu(x @ p[0]) @ p[1] + (x @ p[0]) @ p[1]) @ p[2]
    leaky = lambda p, x: (jax.nn.relu(x @ p[0]) + x @ p[0]) @ p[1] @ p[2]
    one, two = (wide(net, ((5, N), (N, N), (N, 1)), POINTS) for net in (total, leaky))
    close(one.nngp, two.nngp)
    close(one.ntk, two.ntk)
    with pytest.raises(ValueError, match="used elsewhere"):
        wide(
            lambda p, x: jax.nn.relu(jax.nn.relu(x @ p[0]) @ p[1]) @ p[1], ((N, N), (N, N)), jnp.ones((2, N))
        )


def test_attention_by_hand():
    """Logits q q' / n are those of the covariance; the values are averaged with their softmax."""

    def net(p, x):
        h = x @ p[0]
        q = h @ p[1]
        weights = jax.nn.softmax(jnp.einsum("tpc,tqc->tpq", q, q) / N)
        return (jnp.einsum("tpq,tqc->tpc", weights, h @ p[2]) @ p[3])[:, 0]

    found = wide(net, ((2, N), (N, N), (N, N), (N, 1)), LINE)
    gram = np.einsum("tpi,sqi->tspq", LINE, LINE)  # sw2 / 2 = 1
    first = jax.nn.softmax(2 * np.einsum("ttpq->tpq", gram))[:, 0]
    exact = 4 * np.einsum("tp,sq,tspq->ts", first, first, gram)
    close(found.nngp, exact)
    close(found.ntk, 3 * exact)
    root = lambda p, x: (
        jnp.sum(jax.nn.softmax(jnp.einsum("tpc,tqc->tpq", x @ p[0], x @ p[1]) / N**0.5) @ (x @ p[2]), 1)
        @ p[3]
    )
    with pytest.raises(ValueError, match="root of the number of channels.*test_wide.py.*divide it"):
        wide(root, ((2, N), (2, N), (2, N), (N, 1)), LINE)


def test_laws_are_read_from_what_draws():
    """Initializers of linen, and functions of a key; variances of truncated and uniform laws are known."""

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.Dense(
                N, kernel_init=linen.initializers.he_uniform(), bias_init=linen.initializers.normal(0.5)
            )(x)
            return linen.Dense(1)(jax.nn.relu(linen.LayerNorm()(x)))

    module = Net()
    variables = module.init(jax.random.key(0), POINTS)
    found = kernels.infinite_width(*kernels.from_module(module, variables), POINTS)
    given = {
        "Dense_0": {"kernel": 2.0, "bias": 0.25},
        "LayerNorm_0": {"scale": 0.0, "bias": 0.0},
        "Dense_1": {"kernel": 1.0, "bias": 0.0},
    }
    exact = kernels.infinite_width(*kernels.from_module(module, variables), POINTS, variances=given)
    close(found.ntk, exact.ntk, 1e-5)
    draw = lambda key: (jax.random.normal(key, (5, N)), jax.random.uniform(key, (N, 1), minval=-1.0))
    net = lambda p, x: jax.nn.relu(x @ p[0]) @ p[1]
    drawn = kernels.infinite_width(net, draw(jax.random.key(0)), POINTS, variances=draw)
    close(drawn.ntk, wide(net, ((5, N), (N, 1)), POINTS, variance=(5.0, N / 3)).ntk, 1e-5)
    with pytest.raises(ValueError, match="variances must be given"):
        kernels.infinite_width(net, draw(jax.random.key(0)), POINTS)
    orthogonal = lambda key: (jax.nn.initializers.orthogonal()(key, (5, N)), jnp.ones((N, 1)))
    with pytest.raises(ValueError, match="drawn in another way"):
        kernels.infinite_width(net, draw(jax.random.key(0)), POINTS, variances=orthogonal)


def test_derivatives_and_precision():
    """In variances and inputs by finite differences; float32 agrees with float64."""
    net = lambda p, x: jnp.tanh(jax.nn.relu(x @ p[0]) @ p[1]) @ p[2]
    kernel = lambda v, x: wide(net, ((5, N), (N, N), (N, 1)), x, variance=(v, v, 1.0)).ntk[0, 1]
    by_jax = jax.grad(kernel, (0, 1))(1.3, POINTS)
    e = 1e-5
    np.testing.assert_allclose(
        by_jax[0], (kernel(1.3 + e, POINTS) - kernel(1.3 - e, POINTS)) / (2 * e), rtol=1e-6
    )
    step = e * jnp.zeros_like(POINTS).at[0, 2].set(1.0)
    difference = (kernel(1.3, POINTS + step) - kernel(1.3, POINTS - step)) / (2 * e)
    np.testing.assert_allclose(by_jax[1][0, 2], difference, rtol=1e-6)
    single = POINTS.astype(jnp.float32)
    shapes = tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((5, N), (N, N), (N, 1)))
    found = kernels.infinite_width(net, shapes, single, variances=(1.3, 1.3, 1.0)).ntk
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found[0, 1], kernel(1.3, POINTS), rtol=1e-5)


def relu(x):
    return jax.nn.relu(x)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("net", "words"),
    [
        (lambda p, x: jnp.max(x @ p[0], -1), "maximum over channels.*'reduce_max' at .*test_wide.py"),
        (lambda p, x: jnp.sort(x @ p[0]) @ p[1], "no rule for sort"),
        (lambda p, x: (x + p[2][None]) @ p[0] @ p[1], "combined with data, before a layer"),
        (
            lambda p, x: jnp.swapaxes(jnp.stack([x @ p[0]] * N, 1), 1, 2) @ p[3] @ p[1],
            "the same weights act on every channel",
        ),
        (
            lambda p, x: jax.lax.while_loop(lambda h: jnp.sum(h) < 1, lambda h: 2 * h, x @ p[0]) @ p[1],
            "no rule for while",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused(net, words):
    with pytest.raises(ValueError, match=words):
        wide(net, ((5, N), (N, 1), (5,), (N, N)), POINTS)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("variances", "words"),
    [
        ((1.0,), "variances must be a pytree like params"),
        ((1.0, -1.0), "finite and at least 0"),
        ((1.0, np.ones(2)), "must be numbers"),
    ],
)
def test_variances_are_checked(variances, words):
    with pytest.raises(ValueError, match=words):
        kernels.infinite_width(
            lambda p, x: x @ p[0] @ p[1], sizes((5, N), (N, 1)), POINTS, variances=variances
        )


def normalized(h):
    axes = tuple(range(h.ndim - 1))
    centered = h - jnp.mean(h, axes, keepdims=True)
    return centered / jnp.sqrt(jnp.mean(centered**2, axes, keepdims=True))


def normalized_convolutions(p, x):
    around = jnp.concatenate([x[:, -1:], x, x[:, :1]], 1)
    return jax.nn.relu(normalized(conv(around, p[0], padding="VALID"))).reshape(x.shape[0], -1) @ p[1]


def limit_of_this_batch(x, draws, rng):
    """The NTK of ``normalized_convolutions`` at infinite width for the batch as it is, by drawing features.

    At infinite width the features before batch norm are independent Gaussians over the N rows (samples x positions),
    of covariance K. Batch norm of one feature u and its derivative are exact here: with v = P u / s and
    B = (P - v v' / N) / s, the kernels after the activation are E[phi(v) phi(v)'] and, with d = phi'(v),
    E[d d' * (B T B)].
    """
    samples, places, channels = x.shape
    shifts = [np.roll(np.eye(places), offset, axis=1) for offset in (-1, 0, 1)]
    seen = np.stack([np.einsum("pq,tqc->tpc", shift, x) for shift in shifts], -1)
    rows = seen.reshape(samples * places, -1)
    covariance = 2 * rows @ rows.T / rows.shape[1]  # of the features, and their tangent kernel as well
    count = len(rows)
    center = np.eye(count) - 1 / count
    tangent = center @ covariance @ center
    directions = np.trace(tangent) ** 2 / np.sum(tangent**2)
    u = rng.normal(size=(draws, rows.shape[1])) @ rows.T * np.sqrt(2 / rows.shape[1])
    h = u @ center
    scale = np.sqrt(np.mean(h**2, 1, keepdims=True))
    v = h / scale
    slope = (v > 0) / scale
    shared = v @ tangent / count
    cross = (slope * v).T @ (slope * shared)
    size = np.sum(shared * v, 1, keepdims=True) / count
    moved = tangent * (slope.T @ slope) - cross - cross.T + (slope * v * size).T @ (slope * v)
    kernel = 2 * (np.maximum(v, 0).T @ np.maximum(v, 0) + moved) / draws
    return np.einsum("tpsp->ts", kernel.reshape(samples, places, samples, places)) / places, directions


def test_batch_norm_is_that_of_many_directions():
    """The NTK is that of the batch as it is up to 2 / D, where D = tr(PKP)^2 / tr((PKP)^2) counts directions, not rows.

    1 / s^2 has the mean (1 + 2 / D) / sigma^2 to first order; the gradient through s takes some of that away. So 2 / D
    bounds the gap. Draws add noise of about 1 / root(draws) of the largest entries.
    """
    rng, found = np.random.default_rng(3), {}
    for samples, channels in ((8, 16), (32, 64), (32, 2)):
        x = rng.normal(size=(samples, 4, channels))
        ours = wide(normalized_convolutions, ((3, channels, N), (4 * N, 1)), jnp.asarray(x)).ntk
        exact, directions = limit_of_this_batch(x, 40_000, rng)
        gap = np.linalg.norm(ours - exact) / np.linalg.norm(exact)
        assert gap < 2 / directions + 3 / np.sqrt(40_000)
        found[samples, channels] = directions, gap
    # four times the samples on as many channels: four times the directions, a quarter of the gap
    (few, wider), (many, closer) = found[8, 16], found[32, 64]
    assert -1.4 < np.log(closer / wider) / np.log(many / few) < -0.7
    # two channels: 128 rows, but no more than window x channels = 6 directions, and a gap to match
    directions, gap = found[32, 2]
    assert directions < 6
    assert gap > 3 * closer
