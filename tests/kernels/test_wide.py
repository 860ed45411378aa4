"""Infinitely wide layers: against each other, against scipy-free algebra, and against wide finite networks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meanflow import kernels
from meanflow._numerics import loglog_slope

KEY, RNG = jax.random.key(11), np.random.default_rng(11)
POINTS, LINE, IMAGE = (jnp.asarray(RNG.normal(size=shape)) for shape in ((3, 5), (3, 6, 2), (3, 4, 4, 2)))


class Network:
    """A finite network written like a ``WideLayer``: weights sqrt(variance / fan-in) w, in the order of calls."""

    def __init__(self, h, width, key, params, used=None):
        self.h, self.width, self.key, self.params, self.used = h, width, key, params, used or [0]

    def _next(self, shape):
        i = self.used[0]
        self.used[0] += 1
        if i == len(self.params):
            self.params.append(jax.random.normal(jax.random.fold_in(self.key, i), shape))
        return self.params[i]

    def _with(self, h):
        return Network(h, self.width, self.key, self.params, self.used)

    def dense(self, weight_variance=2.0, bias_variance=0.0, out=None):
        out = self.width if out is None else out
        w, b = self._next((self.h.shape[-1], out)), self._next((out,))
        scaled = jnp.sqrt(weight_variance / self.h.shape[-1]) * (self.h @ w)
        return self._with(scaled + jnp.sqrt(bias_variance) * b.reshape((1,) * (scaled.ndim - 1) + (-1,)))

    def conv(self, window, stride=1, padding="SAME", weight_variance=2.0, bias_variance=0.0):
        h, rank = self.h, len(window)
        w, b = self._next((*window, h.shape[-1], self.width)), self._next((self.width,))
        if padding == "CIRCULAR":
            h = jnp.pad(
                h, [(0, 0)] + [((n - 1) // 2, n - 1 - (n - 1) // 2) for n in window] + [(0, 0)], mode="wrap"
            )
            padding = "VALID"
        names = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC")}[rank]
        out = jax.lax.conv_general_dilated(h, w, (stride,) * rank, padding, dimension_numbers=names)
        scaled = jnp.sqrt(weight_variance / (np.prod(window) * h.shape[-1])) * out
        return self._with(scaled + jnp.sqrt(bias_variance) * b.reshape((1,) * (rank + 1) + (-1,)))

    def activation(self, phi):
        return self._with({"relu": jax.nn.relu, "tanh": jnp.tanh, "erf": jax.scipy.special.erf}[phi](self.h))

    def flatten(self):
        return self._with(self.h.reshape(self.h.shape[0], -1))

    def pool(self):
        return self._with(jnp.mean(self.h, axis=tuple(range(1, self.h.ndim - 1))))

    def layer_norm(self):
        centered = self.h - jnp.mean(self.h, -1, keepdims=True)
        return self._with(centered / jnp.sqrt(jnp.mean(centered**2, -1, keepdims=True)))

    def batch_norm(self):
        axes = tuple(range(self.h.ndim - 1))
        centered = self.h - jnp.mean(self.h, axes, keepdims=True)
        return self._with(centered / jnp.sqrt(jnp.mean(centered**2, axes, keepdims=True)))

    def __add__(self, other):
        return self._with(self.h + other.h)


def dense(h):
    return h.dense(1.5, 0.1).activation("tanh").dense(1.2, 0.2).activation("erf")


def flattened(h):
    h = h.conv((3,), bias_variance=0.1).activation("relu")
    return h.conv((3,), stride=2).activation("relu").flatten()


def pooled(h):
    h = h.conv((3, 2), padding="CIRCULAR").activation("relu")
    return h.conv((2, 2), padding="VALID", weight_variance=1.5).activation("erf").pool()


def residual(h):
    h = h.dense()
    for _ in range(2):
        h = h + h.layer_norm().activation("relu").dense(1.0)
    return h.activation("relu")


def everything(h):
    h = h.conv((3,))
    h = h + h.layer_norm().activation("relu").conv((3,), bias_variance=0.2)
    return h.activation("relu").pool()


CASES = {
    "dense": (dense, POINTS),
    "flattened": (flattened, LINE),
    "pooled": (pooled, IMAGE),
    "residual": (residual, POINTS),
    "everything": (everything, LINE),
}


def finite(build, width):
    """(key, x) -> parameters, and (parameters, x) -> (outputs, last features)."""

    def init(key, x):
        params = []
        build(Network(x, width, key, params)).dense(out=1)
        return params

    def features(params, x):
        return build(Network(x, width, None, list(params)))

    return init, features


def gaps(build, x, width, count):
    """Root mean square over networks of the relative error of NTK and NNGP."""
    wide = build(kernels.wide_inputs(x, pairs=x.ndim > 2 and build is not flattened)).dense()
    init, features = finite(build, width)
    output = lambda p, x: features(p, x).dense(out=1).h[:, 0]

    def one(key):
        params = init(key, x)
        last = features(params, x).h
        ntk = kernels.empirical_ntk(output, params, x)
        return ntk, 2 * last @ last.T / last.shape[-1]

    ntk, nngp = jax.jit(lambda keys: jax.lax.map(one, keys))(jax.random.split(jax.random.key(width), count))
    error = lambda a, b: float(jnp.sqrt(jnp.mean((a - b[None]) ** 2)) / jnp.linalg.norm(b) * b.shape[0])
    return error(ntk, wide.ntk), error(nngp, wide.nngp)


@pytest.mark.parametrize(
    "name", [n if n == "everything" else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_finite_networks_approach_at_one_over_root_width(name):
    build, x = CASES[name]
    widths = (16, 64, 256) if name != "everything" else (16, 128)
    found = np.array([gaps(build, x, width, 24) for width in widths])
    assert np.all(found[-1] < 3 / np.sqrt(widths[-1]))
    for column in found.T:
        assert -0.7 < loglog_slope(widths, column) < -0.35


def wide(build, *inputs, pairs=False):
    """NNGP and NTK of an infinitely wide network, in one compiled program."""

    def run(*inputs):
        h = build(kernels.wide_inputs(*inputs, pairs=pairs))
        return h.nngp, h.ntk

    return jax.jit(run)(*inputs)


def test_dense_layers_are_those_of_the_order_parameters():
    options = {"depth": 3, "weight_variance": 1.7, "bias_variance": 0.3, "activation": "relu"}
    layers = lambda h: h.dense(1.7, 0.3).activation("relu").dense(1.7, 0.3).activation("relu").dense(1.7, 0.3)
    nngp, ntk = wide(layers, POINTS, POINTS[:2])
    np.testing.assert_allclose(ntk, kernels.infinite_ntk(POINTS, POINTS[:2], **options), rtol=1e-10)
    order = kernels.order_parameters(POINTS @ POINTS.T / POINTS.shape[1], **options)
    np.testing.assert_allclose(nngp, order.r[-1][:, :2], rtol=1e-10)


def test_convolutions_by_hand():
    """A linear convolution has kernels that can be written down; positions with and without pairs agree."""
    nngp, ntk = wide(lambda h: h.conv((3,), weight_variance=1.0), LINE, LINE[:2], pairs=True)
    padded = np.pad(LINE, ((0, 0), (1, 1), (0, 0)))
    # (T, P, window x channels)
    patches = np.stack([padded[:, p : p + 3].reshape(3, -1) for p in range(6)], 1)
    exact = np.einsum("tpi,sqi->tspq", patches, patches[:2]) / 6
    np.testing.assert_allclose(nngp, exact, rtol=1e-10)
    np.testing.assert_allclose(ntk, exact, rtol=1e-10)
    # one window over the whole image is a dense layer on all pixels
    once = lambda h: h.conv((4, 4), padding="VALID").activation("relu").flatten().dense()
    flat = IMAGE.reshape(3, -1)
    np.testing.assert_allclose(wide(once, IMAGE)[1], kernels.infinite_ntk(flat, depth=2), rtol=1e-10)
    lean, whole = (wide(flattened, LINE, LINE[:2], pairs=p) for p in (False, True))
    np.testing.assert_allclose(lean, whole, rtol=1e-10)
    # shifted images are the same image to a circular network that is pooled
    circular = lambda h: h.conv((3, 3), padding="CIRCULAR").activation("relu").pool().dense()
    rolled = [wide(circular, IMAGE, jnp.roll(IMAGE, n, axis=2), pairs=True) for n in (0, 2)]
    np.testing.assert_allclose(*rolled, rtol=1e-10)


def test_what_does_not_add_is_refused():
    h = kernels.wide_inputs(POINTS).dense()
    active = h.activation("relu")
    np.testing.assert_allclose((active + h.dense()).nngp, active.nngp + h.dense().nngp)
    with pytest.raises(ValueError, match="correlated"):
        active + h
    with pytest.raises(ValueError, match="correlated"):
        h + h
    with pytest.raises(ValueError, match="Gaussian"):
        active.activation("relu")
    with pytest.raises(ValueError, match="pairs=True"):
        kernels.wide_inputs(LINE).conv((3,)).pool()
    with pytest.raises(ValueError, match="leave z out"):
        kernels.wide_inputs(POINTS, POINTS).dense().batch_norm()
    with pytest.raises(ValueError, match="one length for each"):
        kernels.wide_inputs(LINE).conv((3, 3))


def products(build, x, v, width, count):
    """K v of ``count`` random networks whose samples are coupled by batch norm."""
    init, features = finite(build, width)
    output = lambda p, x: features(p, x).dense(out=1).h[:, 0]
    product = lambda key: kernels.ntk_operator(output, init(key, x), x, stats="batch") @ v
    return jax.jit(lambda keys: jax.lax.map(product, keys))(jax.random.split(jax.random.key(width), count))


@pytest.mark.slow
def test_batch_norm_of_wide_networks_on_large_batches():
    """Products K v of coupled networks: 1/root(width) on a large batch, and in the mean 1/samples at a large width."""

    def build(h):
        return h.dense().batch_norm().activation("relu").dense().batch_norm().activation("erf")

    def gap(width, samples, count):
        x = jax.random.normal(KEY, (samples, 2 * samples))
        v = jax.random.normal(jax.random.key(5), (samples, 4)) + 1.0
        exact = wide(lambda h: build(h).dense(), x)[1] @ v
        found = products(build, x, v, width, count) - exact[None]
        size = lambda a: float(jnp.sqrt(jnp.mean(a**2) / jnp.mean(exact**2)))
        return size(found), size(jnp.mean(found, axis=0))

    widths, samples = (16, 64, 256), (8, 16, 32, 64)
    assert -0.7 < loglog_slope(widths, [gap(w, 256, 12)[0] for w in widths]) < -0.35
    assert -1.4 < loglog_slope(samples, [gap(2048, n, 16)[1] for n in samples]) < -0.7


def normalized_convolutions(h, layers=1):
    for _ in range(layers):
        h = h.conv((3,), padding="CIRCULAR").batch_norm().activation("relu")
    return h.flatten()


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
    return np.einsum("tpsp->ts", kernel.reshape(samples, places, samples, places)) / places


def test_batch_norm_on_positions_is_that_of_many_directions():
    """The NTK is that of the batch as it is up to 2 / D, where D counts directions, not rows.

    1 / s^2 has the mean (1 + 2 / D) / sigma^2 to first order; the gradient through s takes some of that away. So 2 / D
    bounds the gap. Draws add noise of about 1 / root(draws) of the largest entries.
    """
    rng, found = np.random.default_rng(3), {}
    for samples, channels in ((8, 16), (32, 64), (32, 2)):
        x = rng.normal(size=(samples, 4, channels))
        h = jax.jit(lambda x: normalized_convolutions(kernels.wide_inputs(x, pairs=True)).dense())(x)
        exact = limit_of_this_batch(x, 40_000, rng)
        gap = np.linalg.norm(h.ntk - exact) / np.linalg.norm(exact)
        assert gap < 2 / h.directions + 3 / np.sqrt(40_000)
        found[samples, channels] = float(h.directions), gap
    # four times the samples on as many channels: four times the directions, a quarter of the gap
    (few, wider), (many, closer) = found[8, 16], found[32, 64]
    assert -1.4 < np.log(closer / wider) / np.log(many / few) < -0.7
    # two channels: 128 rows, but no more than window x channels = 6 directions, and a gap to match
    directions, gap = found[32, 2]
    assert directions < 6
    assert gap > 3 * closer


@pytest.mark.slow
@pytest.mark.parametrize("channels", [2, 32])
def test_batch_norm_on_positions_of_wide_networks(channels):
    """Finite networks approach at 1 / root(width) if there are many directions, and settle beside it if there are few.

    The mean over networks is judged by its own standard error; it must lie within 3 of them. With two channels there
    are fewer than 6 directions, a gap of order 2 / 6 at any width, and the mean must lie outside.
    """
    x = jax.random.normal(KEY, (64, 4, channels))
    v = jax.random.normal(jax.random.key(5), (64, 4)) + 1.0
    build = lambda h: normalized_convolutions(h, layers=2)
    h = jax.jit(lambda x: build(kernels.wide_inputs(x, pairs=True)).dense())(x)
    exact = h.ntk @ v
    size = lambda a: float(jnp.sqrt(jnp.mean(a**2) / jnp.mean(exact**2)))
    spread, offset = [], []
    widths, count = (16, 64, 256), 16
    for width in widths:
        found = products(build, x, v, width, count)
        spread.append(size(found - jnp.mean(found, axis=0, keepdims=True)))
        offset.append(size(jnp.mean(found, axis=0) - exact))
    assert -0.7 < loglog_slope(widths, spread) < -0.35
    errors = offset[-1] / (spread[-1] / np.sqrt(count))
    assert errors < 3 if channels == 32 else errors > 3
    assert (h.directions > 40) == (channels == 32)
