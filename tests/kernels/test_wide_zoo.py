"""Networks as users write them, at any width: the mean of their tangent kernels is that at infinite width.

An entry of the zoo is (inputs, width -> (apply, init)), where ``init`` draws the parameters from a key. Inputs are
three samples, so that kernels are cheap. Kernels of finite networks are taken in parameters of variance 1.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from meanflow import kernels
from meanflow._numerics import loglog_slope
from meanflow.kernels._infinite.laws import drawn_laws

RNG = np.random.default_rng(5)
VECTORS, LINES, IMAGES = (jnp.asarray(RNG.normal(size=s)) for s in ((3, 6), (3, 5, 4), (3, 4, 4, 2)))
TOKENS = jnp.asarray(RNG.integers(0, 7, size=(3, 5)))
LECUN = linen.initializers.lecun_normal()
ZOO = {}


def entry(inputs):
    """Register a network: a function of the width that returns (apply, init)."""

    def register(make):
        ZOO[make.__name__] = (inputs, make)
        return make

    return register


def of_nnx(kind, *sizes):
    """Return (apply, init) of an NNX class."""
    apply, _ = kernels.from_module(kind(*sizes, rngs=nnx.Rngs(0)))
    return apply, lambda key: nnx.state(kind(*sizes, rngs=nnx.Rngs(key)), nnx.Param)


def of_linen(module, x):
    """Return (apply, init) of a linen module."""
    apply, _ = kernels.from_module(module, module.init(jax.random.key(0), x[:1]))
    return apply, lambda key: module.init(key, x[:1])["params"]


def of_equinox(make, **options):
    """Return (apply, init) of what makes an equinox module from a key."""
    apply, _ = kernels.from_module(make(jax.random.key(0)), **options)
    return apply, lambda key: eqx.filter(make(key), eqx.is_inexact_array)


class Perceptron(nnx.Module):
    def __init__(self, n, rngs):
        bias = jax.nn.initializers.normal(0.3)
        self.one, self.two = nnx.Linear(6, n, bias_init=bias, rngs=rngs), nnx.Linear(n, n, rngs=rngs)
        self.out = nnx.Linear(n, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.two(nnx.gelu(self.one(x)))))


@entry(VECTORS)
def perceptron(n):
    return of_nnx(Perceptron, n)


class Convolutions(nnx.Module):
    def __init__(self, n, rngs):
        self.one = nnx.Conv(2, n, (3, 3), rngs=rngs)
        self.two = nnx.Conv(n, n, (2, 2), strides=2, padding="VALID", rngs=rngs)
        self.out = nnx.Linear(4 * n, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.two(nnx.relu(self.one(x))))
        return self.out(x.reshape(x.shape[0], -1))


@entry(IMAGES)
def convolutions(n):
    return of_nnx(Convolutions, n)


class Residual(nnx.Module):
    def __init__(self, n, rngs):
        self.first = nnx.Conv(2, n, (3, 3), padding="CIRCULAR", rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(n, rngs=rngs) for _ in range(2)])
        self.convs = nnx.List([nnx.Conv(n, n, (3, 3), rngs=rngs) for _ in range(2)])
        self.out = nnx.Linear(n, 1, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = x + conv(nnx.relu(norm(x)))
        x = nnx.avg_pool(x, (2, 2), strides=(2, 2))
        return self.out(jnp.mean(x, axis=(1, 2)))


@entry(IMAGES)
def residual(n):
    return of_nnx(Residual, n)


class Gated(nnx.Module):
    """RMS norm, and a gated linear unit in the manner of large language models."""

    def __init__(self, n, rngs):
        line = lambda a, b: nnx.Linear(a, b, use_bias=False, rngs=rngs)
        self.first, self.gate, self.up, self.down, self.out = (
            line(6, n),
            line(n, n),
            line(n, n),
            line(n, n),
            line(n, 1),
        )
        self.norm, self.last = nnx.RMSNorm(n, rngs=rngs), nnx.RMSNorm(n, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        h = self.norm(x)
        x = x + self.down(nnx.silu(self.gate(h)) * self.up(h))
        return self.out(self.last(x))


@entry(VECTORS)
def gated(n):
    return of_nnx(Gated, n)


class Halves(nnx.Module):
    """A gated unit whose halves are cut out of one layer."""

    def __init__(self, n, rngs):
        self.one, self.out = nnx.Linear(6, 2 * n, rngs=rngs), nnx.Linear(n, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.glu(self.one(x)))


@entry(VECTORS)
def halves(n):
    return of_nnx(Halves, n)


class Attention(nnx.Module):
    """Attention with logits divided by the number of channels."""

    def __init__(self, n, heads, rngs):
        line = lambda: nnx.Linear(n, n, use_bias=False, rngs=rngs)
        self.heads, self.query, self.value, self.out = heads, line(), line(), line()

    def __call__(self, x):
        split = lambda u: u.reshape(*u.shape[:-1], self.heads, -1)
        q, v = split(self.query(x)), split(self.value(x))
        weights = nnx.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, q) / q.shape[-1])
        return self.out(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))


class Vision(nnx.Module):
    """A vision transformer: patches, class token, positions, attention, perceptron."""

    def __init__(self, n, rngs):
        self.patches = nnx.Conv(2, n, (2, 2), strides=2, padding="VALID", rngs=rngs)
        self.token = nnx.Param(jax.random.normal(rngs.params(), (1, 1, n)))
        self.places = nnx.Param(0.5 * jax.random.normal(rngs.params(), (1, 5, n)))
        self.attention = Attention(n, 2, rngs)
        self.norms = nnx.List([nnx.LayerNorm(n, rngs=rngs) for _ in range(3)])
        self.up, self.down = nnx.Linear(n, n, rngs=rngs), nnx.Linear(n, n, rngs=rngs)
        self.out = nnx.Linear(n, 1, rngs=rngs)

    def __call__(self, x):
        x = self.patches(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        token = jnp.broadcast_to(self.token[...], (x.shape[0], 1, x.shape[-1]))
        x = jnp.concatenate([token, x], axis=1) + self.places[...]
        x = x + self.attention(self.norms[0](x))
        x = x + self.down(nnx.gelu(self.up(self.norms[1](x))))
        return self.out(self.norms[2](x)[:, 0])


@entry(IMAGES)
def vision_transformer(n):
    return of_nnx(Vision, n)


class UNet(nnx.Module):
    """Down, up by a transposed convolution, and a skip by concatenation of channels."""

    def __init__(self, n, rngs):
        conv = lambda a, b, **kw: nnx.Conv(a, b, (3, 3), rngs=rngs, **kw)
        self.first, self.down, self.last = conv(2, n), conv(n, n, strides=2), conv(2 * n, n)
        self.up = nnx.ConvTranspose(n, n, (2, 2), strides=(2, 2), rngs=rngs)
        self.out = nnx.Conv(n, 1, (1, 1), rngs=rngs)

    def __call__(self, x):
        one = nnx.relu(self.first(x))
        up = nnx.relu(self.up(nnx.relu(self.down(one))))
        return self.out(nnx.relu(self.last(jnp.concatenate([one, up], axis=-1))))[:, 1, 2, 0]


@entry(IMAGES)
def u_net(n):
    return of_nnx(UNet, n)


class Squeeze(nnx.Module):
    """Squeeze and excitation: channels are scaled by gates that see the mean over the image."""

    def __init__(self, n, rngs):
        self.conv = nnx.Conv(2, n, (3, 3), rngs=rngs)
        self.one, self.two, self.out = (nnx.Linear(n, m, rngs=rngs) for m in (n, n, 1))

    def __call__(self, x):
        x = nnx.relu(self.conv(x))
        gate = nnx.sigmoid(self.two(nnx.relu(self.one(jnp.mean(x, axis=(1, 2))))))
        return self.out(jnp.mean(x * gate[:, None, None, :], axis=(1, 2)))


@entry(IMAGES)
def squeeze_and_excitation(n):
    return of_nnx(Squeeze, n)


class Depthwise(nnx.Module):
    """A block of ConvNeXt: depthwise convolution, layer norm, perceptron of channels."""

    def __init__(self, n, rngs):
        self.stem = nnx.Conv(2, n, (2, 2), padding="VALID", rngs=rngs)
        self.depth = nnx.Conv(n, n, (3, 3), feature_group_count=n, rngs=rngs)
        self.norm, self.up, self.down = (
            nnx.LayerNorm(n, rngs=rngs),
            nnx.Linear(n, n, rngs=rngs),
            nnx.Linear(n, n, rngs=rngs),
        )
        self.out = nnx.Linear(n, 1, rngs=rngs)

    def __call__(self, x):
        x = self.stem(x)
        x = x + self.down(nnx.gelu(self.up(self.norm(self.depth(x)))))
        return self.out(jnp.mean(x, axis=(1, 2)))


@entry(IMAGES)
def depthwise(n):
    return of_nnx(Depthwise, n)


class Grouped(linen.Module):
    """Convolutions with group norm, in linen."""

    n: int

    @linen.compact
    def __call__(self, x):
        x = linen.Conv(self.n, (3, 3))(x)
        x = linen.relu(linen.GroupNorm(num_groups=2)(x))
        x = linen.avg_pool(linen.Conv(self.n, (3, 3))(x), (2, 2), (2, 2), "SAME")
        return linen.Dense(1)(linen.tanh(x).reshape(x.shape[0], -1))


@entry(IMAGES)
def group_norm(n):
    return of_linen(Grouped(n), IMAGES)


class Recurrent(linen.Module):
    """A gated recurrent unit of linen, scanned over time."""

    n: int

    @linen.compact
    def __call__(self, x):
        h = linen.RNN(linen.GRUCell(self.n, recurrent_kernel_init=LECUN))(x[:, :2].astype(jnp.float32))
        return linen.Dense(1)(h[:, -1])


@entry(LINES)
def gru(n):
    return of_linen(Recurrent(n), LINES)


class Simple(linen.Module):
    """A plain recurrent network, and a mean over time."""

    n: int

    @linen.compact
    def __call__(self, x):
        h = linen.RNN(linen.SimpleCell(self.n, recurrent_kernel_init=LECUN))(x.astype(jnp.float32))
        return linen.Dense(1)(jnp.mean(h, axis=1))


@entry(LINES)
def recurrent(n):
    return of_linen(Simple(n), LINES)


class Words(linen.Module):
    """Tokens with embeddings and learned positions, one block with the same weights applied twice."""

    n: int

    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(7, self.n, embedding_init=linen.initializers.normal(1.0))(tokens)
        x = x + self.param("places", linen.initializers.normal(0.5), (tokens.shape[1], self.n))[None]
        block = linen.Dense(self.n)
        for _ in range(2):
            x = x + block(linen.relu(linen.LayerNorm()(x)))
        return linen.Dense(1)(jnp.mean(x, axis=1))


@entry(TOKENS)
def words_with_tied_blocks(n):
    return of_linen(Words(n), TOKENS)


@entry(VECTORS)
def equinox_perceptron(n):
    return of_equinox(lambda key: eqx.nn.MLP(6, 1, n, 2, jax.nn.softplus, key=key))


@entry(jnp.moveaxis(IMAGES, -1, 1))
def equinox_convolutions(n):
    def make(key):
        one, two, three = jax.random.split(key, 3)
        return eqx.nn.Sequential(
            [
                eqx.nn.Conv2d(2, n, 3, padding=1, key=one),
                eqx.nn.Lambda(jax.nn.relu),
                eqx.nn.AvgPool2d(2, 2),
                eqx.nn.Conv2d(n, n, 2, key=two),
                eqx.nn.Lambda(jax.nn.silu),
                eqx.nn.Lambda(jnp.ravel),
                eqx.nn.Linear(n, 1, key=three),
            ]
        )

    return of_equinox(make)


def plain(apply, **shapes):
    """Return (apply, init) of a function of a dict of normal parameters, of variance 1 / fan-in, biases of 0.1."""

    def init(key):
        draw = lambda k, s: jax.random.normal(k, s) * ((1 / np.prod(s[:-1])) if len(s) > 1 else 0.1) ** 0.5
        return {name: draw(jax.random.fold_in(key, i), s) for i, (name, s) in enumerate(shapes.items())}

    return apply, init


@entry(VECTORS)
def haiku_style(n):
    def apply(p, rng, x):
        return jnp.tanh(jax.nn.leaky_relu(x @ p["w"] + p["b"][None]) @ p["v"]) @ p["a"]

    _, init = plain(apply, w=(6, n), b=(n,), v=(n, n), a=(n, 1))
    return kernels.from_module(apply, init(jax.random.key(0)))[0], init


@entry(VECTORS)
def fourier_features(n):
    def apply(p, x):
        angles = 2.0 * x @ p["b"]
        h = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        return jax.nn.relu(h @ p["w"]) @ p["a"]

    return plain(apply, b=(6, n), w=(2 * n, n), a=(n, 1))


@entry(VECTORS)
def sines(n):
    return plain(
        lambda p, x: jnp.sin(3.0 * jnp.sin(x @ p["u"] + p["b"][None]) @ p["w"]) @ p["a"],
        u=(6, n),
        b=(n,),
        w=(n, n),
        a=(n, 1),
    )


@entry(VECTORS)
def two_experts(n):
    """A mixture of two experts with soft gates."""

    def apply(p, x):
        gates = jax.nn.softmax(jax.nn.relu(x @ p["g"]) @ p["h"])
        experts = [jax.nn.relu(x @ p[f"u{k}"]) @ p[f"a{k}"] for k in range(2)]
        return sum(gates[:, k : k + 1] * experts[k] for k in range(2))

    return plain(apply, g=(6, n), h=(n, 2), u0=(6, n), u1=(6, n), a0=(n, 1), a1=(n, 1))


@entry(LINES)
def deep_sets(n):
    def apply(p, x):
        h = jnp.mean(jax.nn.relu(x @ p["u"]), axis=1)
        return jnp.tanh(h @ p["w"] + p["b"][None]) @ p["a"]

    return plain(apply, u=(4, n), w=(n, n), b=(n,), a=(n, 1))


@entry(LINES)
def graph_convolutions(n):
    ring = 0.5 * jnp.eye(5) + 0.25 * (jnp.roll(jnp.eye(5), 1, 0) + jnp.roll(jnp.eye(5), -1, 0))

    def apply(p, x):
        h = jax.nn.relu(jnp.einsum("pq,bqc,cd->bpd", ring, x, p["u"]))
        h = jax.nn.elu(jnp.einsum("pq,bqc->bpc", ring, h) @ p["w"])
        return jnp.mean(h, axis=1) @ p["a"]

    return plain(apply, u=(4, n), w=(n, n), a=(n, 1))


@entry(VECTORS)
def stacked_layers(n):
    """A scan over layers whose weights are stacked, with a residual stream."""

    def apply(p, x):
        block = lambda h, w: (h + jax.nn.relu(h) @ w, None)
        return jax.lax.scan(block, x @ p["first"], p["w"])[0] @ p["a"]

    _, init = plain(apply, first=(6, n), a=(n, 1))
    stack = lambda key: jax.random.normal(jax.random.fold_in(key, 9), (3, n, n)) / n**0.5
    return apply, lambda key: {**init(key), "w": stack(key)}


@entry(VECTORS)
def post_activation(n):
    """A residual block with the activation after the sum."""

    def apply(p, x):
        h = jax.nn.relu(x @ p["u"])
        return jax.nn.relu(h + jax.nn.relu(h @ p["v"]) @ p["w"]) @ p["a"]

    return plain(apply, u=(6, n), v=(n, n), w=(n, n), a=(n, 1))


def infinite(name, width):
    """The limit with the variances of this width: equinox draws biases that are smaller in wider layers."""
    x, make = ZOO[name]
    apply, init = make(width)
    return kernels.infinite_width(apply, init(jax.random.key(0)), x, variances=init).ntk


def finite(name, width, count):
    """Tangent kernels of networks in parameters of variance 1, (count, T, T), of the first output."""
    x, make = ZOO[name]
    apply, init = make(width)
    leaves, tree = jax.tree.flatten(init(jax.random.key(0)))
    deviations = [law.variance**0.5 for law in drawn_laws(init, jax.tree.unflatten(tree, leaves))]
    x = x.astype(leaves[0].dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    @jax.jit
    def one(key):
        drawn = jax.tree.leaves(init(key))
        moving = [a / s for a, s in zip(drawn, deviations, strict=True) if s > 0]

        def network(p, batch):
            p = iter(p)
            whole = [next(p) * s if s > 0 else a for a, s in zip(drawn, deviations, strict=True)]
            return apply(jax.tree.unflatten(tree, whole), batch).reshape(batch.shape[0], -1)[:, 0]

        return kernels.empirical_ntk(network, moving, x, stats="frozen")

    return np.stack([one(key) for key in jax.random.split(jax.random.key(width), count)])


def gap(name, width, count):
    found, exact = finite(name, width, count).mean(0), infinite(name, width)
    return np.linalg.norm(found - exact) / np.linalg.norm(exact)


# 4 networks of width 128: their mean is within 3 / sqrt(128) of the limit
@pytest.mark.parametrize("name", ["gated", "vision_transformer", "u_net"])
def test_small_networks_are_near(name):
    assert gap(name, 128, 4) < 3 / np.sqrt(128)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_mean_of_wide_networks(name):
    assert gap(name, 512, 8) < 3 / np.sqrt(512)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gated", "fourier_features", "post_activation", "stacked_layers"])
def test_networks_approach_at_one_over_root_width(name):
    """Root mean square over networks of the distance to the limit."""
    widths = (64, 256, 1024)
    spread = [np.sqrt(np.mean((finite(name, n, 12) - infinite(name, n)) ** 2)) for n in widths]
    assert -0.7 < loglog_slope(widths, spread) < -0.35


def test_time_steps_share_weights():
    """A recurrent network has the same kernel as its loop written out."""
    n = 8
    x = LINES[:2, :3]
    draw = lambda key: {"u": jnp.ones((4, n)), "w": jnp.ones((n, n)), "a": jnp.ones((n, 1))}

    def scanned(p, x):
        step = lambda h, row: (jnp.tanh(row @ p["u"] + h @ p["w"]), None)
        return jax.lax.scan(step, jnp.zeros((x.shape[0], n)), jnp.moveaxis(x, 1, 0))[0] @ p["a"]

    def written(p, x):
        h = jnp.tanh(x[:, 0] @ p["u"])
        for k in (1, 2):
            h = jnp.tanh(x[:, k] @ p["u"] + h @ p["w"])
        return h @ p["a"]

    law = {"u": 1.5, "w": 0.9, "a": 1.0}
    one, two = (kernels.infinite_width(net, draw(None), x, variances=law) for net in (scanned, written))
    np.testing.assert_allclose(one.ntk, two.ntk, rtol=1e-10)
