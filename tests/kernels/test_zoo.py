"""A zoo of networks: the structured kernel against the Gram matrix of an explicit Jacobian.

Every network, kept outputs (full, trace, diagonal), one batch or two, whole or in chunks; both contractions where a
parameter allows them.
"""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from meanflow import kernels
from meanflow.kernels._empirical import contraction, cost, forms, layout, structured
from meanflow.kernels._empirical.coupling import is_coupled

ROWS, COLUMNS = 5, 3


def draw(number, *shape):
    fan = np.prod(shape[:-1]) if len(shape) > 1 else 1.0
    return jnp.asarray(np.random.default_rng(number).normal(size=shape) / np.sqrt(fan))


def images(*shape):
    return draw(90, ROWS, *shape), draw(91, COLUMNS, *shape)


def tokens(length, count):
    rng = np.random.default_rng(92)
    return jnp.asarray(rng.integers(0, count, (ROWS, length))), jnp.asarray(
        rng.integers(0, count, (COLUMNS, length))
    )


def add(x, b):
    return x + b.reshape((1,) * (x.ndim - 1) + (-1,))


def convolve(x, w, **options):
    space = "WHD"[: x.ndim - 2]
    options = {"window_strides": (1,) * len(space), "padding": "SAME"} | options
    numbers = ("N" + space + "C", space + "IO", "N" + space + "C")
    return jax.lax.conv_general_dilated(x, w, dimension_numbers=numbers, **options)


def pooled(x, v):
    return jnp.mean(x, axis=tuple(range(1, x.ndim - 1))) @ v


def conv_net(window, shape, inputs=None, **options):
    """One convolution with a bias, tanh, mean over space, a dense layer."""
    params = {"w": draw(1, *window), "b": draw(2, window[-1]), "v": draw(3, window[-1], 2)}
    apply = lambda p, x: pooled(jnp.tanh(add(convolve(x, p["w"], **options), p["b"])), p["v"])
    return apply, params, *images(*shape)


def dense():
    params = [(draw(i, m, n), draw(9 + i, n)) for i, (m, n) in enumerate([(3, 6), (6, 5), (5, 2)])]

    def apply(p, x):
        for w, b in p[:-1]:
            x = jnp.tanh(add(x @ w / jnp.sqrt(3.0), b))
        return add(x @ p[-1][0], p[-1][1])

    return apply, params, *images(3)


def conv_two_layers():
    params = {"a": draw(1, 3, 3, 2, 4), "b": draw(2, 3, 3, 4, 3), "v": draw(3, 3, 2)}
    apply = lambda p, x: pooled(jax.nn.relu(convolve(jnp.tanh(convolve(x, p["a"])), p["b"])), p["v"])
    return apply, params, *images(5, 4, 2)


def pooling():
    params = {"w": draw(1, 3, 3, 2, 4), "v": draw(2, 4, 2)}
    window = dict(window_dimensions=(1, 2, 2, 1), window_strides=(1, 2, 2, 1), padding="VALID")

    def apply(p, x):
        h = jax.lax.reduce_window(convolve(x, p["w"]), -jnp.inf, jax.lax.max, **window)
        return pooled(jnp.tanh(h), p["v"])

    return apply, params, *images(6, 6, 2)


def residual_block():
    params = {"a": draw(1, 3, 3, 3, 3), "b": draw(2, 3, 3, 3, 3), "s": draw(3, 3), "v": draw(4, 3, 2)}

    def apply(p, x):
        h = convolve(jnp.tanh(convolve(x, p["a"])), p["b"]) * p["s"].reshape(1, 1, 1, -1)
        return pooled(jax.nn.relu(x + h), p["v"])

    return apply, params, *images(4, 4, 3)


def normalized(axes):
    """Convolution, a normalization over ``axes`` with scale and shift, mean over space."""

    def apply(p, x):
        h = convolve(x, p["w"])
        split = h.reshape((*h.shape[:-1], 2, 2))
        mean = jnp.mean(split, axes, keepdims=True)
        square = jnp.mean((split - mean) ** 2, axes, keepdims=True)
        h = ((split - mean) / jnp.sqrt(square + 1e-3)).reshape(h.shape)
        return pooled(jnp.tanh(add(h * p["g"].reshape(1, 1, 1, -1), p["b"])), p["v"])

    params = {"w": draw(1, 3, 3, 2, 4), "g": draw(2, 4), "b": draw(3, 4), "v": draw(4, 4, 2)}
    return apply, params, *images(4, 4, 2)


def batch_norm(convolutional):
    def norm(h, scale):
        axes = tuple(range(h.ndim - 1))
        mean = jnp.mean(h, axes, keepdims=True)
        h = (h - mean) / jnp.sqrt(jnp.mean((h - mean) ** 2, axes, keepdims=True) + 1e-3)
        return h * scale.reshape((1,) * (h.ndim - 1) + (-1,))

    def apply(p, x):
        one = (lambda x, w: convolve(x, w)) if convolutional else (lambda x, w: x @ w)
        h = jnp.tanh(norm(one(x, p["a"]), p["g"]))
        h = jnp.tanh(add(one(h, p["c"]), p["b"]))
        return pooled(h, p["v"]) if convolutional else h @ p["v"]

    window = (3, 3) if convolutional else ()
    params = {
        "a": draw(1, *window, 3, 4),
        "g": draw(2, 4),
        "c": draw(3, *window, 4, 4),
        "b": draw(4, 4),
        "v": draw(5, 4, 2),
    }
    return apply, params, *images(*((3, 3, 3) if convolutional else (3,)))


def attention():
    params = {n: draw(i, 4, 2, 3) for i, n in enumerate("qkv")} | {"o": draw(5, 2, 3, 4), "h": draw(6, 4, 2)}

    def apply(p, x):
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[n]) for n in "qkv")
        weight = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k), -1)
        h = x + jnp.einsum("bthk,hkd->btd", jnp.einsum("bhts,bshk->bthk", weight, v), p["o"])
        return jnp.tanh(h).mean(1) @ p["h"]

    return apply, params, *images(3, 4)


def embedding():
    params = {"e": draw(1, 7, 4), "place": draw(2, 5, 4), "w": draw(3, 4, 4), "v": draw(4, 4, 2)}

    def apply(p, x):
        h = p["e"][x] + p["place"][None]
        return jax.checkpoint(lambda h: jnp.tanh(h @ p["w"]))(h).mean(1) @ p["v"]

    return apply, params, *tokens(5, 7)


def tied_embedding():
    params = {"e": draw(1, 7, 4), "w": draw(2, 4, 4)}
    return (lambda p, x: jnp.tanh(p["e"][x] @ p["w"]).mean(1) @ p["e"].T), params, *tokens(5, 7)


def recurrent_scan():
    params = {"u": draw(1, 3, 4), "w": draw(2, 4, 4), "b": draw(3, 4), "v": draw(4, 4, 2)}

    def apply(p, x):
        def step(h, now):
            return jnp.tanh(add(now @ p["u"] + h @ p["w"], p["b"])), None

        h, _ = jax.lax.scan(step, jnp.zeros((x.shape[0], 4), x.dtype), jnp.moveaxis(x, 1, 0))
        return h @ p["v"]

    return apply, params, *images(5, 3)


def recurrent_loop():
    params = {"u": draw(1, 3, 4), "w": draw(2, 4, 4), "v": draw(4, 4, 2)}

    def apply(p, x):
        h = jnp.zeros((x.shape[0], 4))
        for i in range(x.shape[1]):
            h = jnp.tanh(x[:, i] @ p["u"] + h @ p["w"])
        return h @ p["v"]

    return apply, params, *images(4, 3)


def scan_over_layers():
    params = {"w": draw(1, 3, 4, 4), "b": draw(2, 3, 4), "k": draw(3, 3, 2, 4), "v": draw(4, 4, 2)}

    def apply(p, x):
        def layer(h, q):
            return h + jnp.tanh(add(h @ q[0].T, q[1])), None

        h, _ = jax.lax.scan(layer, x, (p["w"], p["b"]), reverse=True)
        return h @ p["v"]

    return apply, {n: params[n] for n in "wbv"}, *images(4)


def weight_sharing():
    params = {"s": draw(1, 4, 4), "t": draw(2, 4, 4), "v": draw(3, 4, 2)}

    def apply(p, x):
        h = jnp.tanh(jnp.tanh(x @ p["s"]) @ p["s"])  # the same order twice
        h = jnp.tanh(jnp.tanh(h @ p["t"]) @ p["t"].T)  # and transposed
        return h @ p["v"]

    return apply, params, *images(4)


def branches():
    params = {"a": draw(1, 3, 3, 2, 3), "b": draw(2, 1, 1, 2, 2), "w": draw(3, 5, 2), "unused": draw(4, 3)}

    def apply(p, x):
        h = jnp.concatenate([jnp.tanh(convolve(x, p["a"])), jnp.sin(convolve(x, p["b"]))], -1)
        return pooled(h, p["w"])

    return apply, params, *images(4, 4, 2)


def functions_of_weights():
    params = {
        "v": draw(1, 3, 3, 2, 4),
        "g": draw(2, 4),
        "a": draw(3, 4, 2),
        "b": draw(4, 2, 4),
        "c": draw(5, 4, 6),
    }

    def apply(p, x):
        w = p["v"] / jnp.sqrt(jnp.sum(p["v"] ** 2, (0, 1, 2), keepdims=True)) * p["g"].reshape(1, 1, 1, -1)
        h = jnp.tanh(convolve(x, w)).mean((1, 2))
        h = jnp.tanh(h @ (jnp.eye(4) + p["a"] @ p["b"]))
        return h @ p["c"][:, 1:3] + p["c"][0, :2][None]

    return apply, params, *images(4, 4, 2)


def custom_derivative():
    @jax.custom_vjp
    def halved(w, x):
        return x @ w

    halved.defvjp(lambda w, x: (x @ w, (w, x)), lambda r, d: (0.5 * r[1].T @ d, d @ r[0].T))
    params = {"w": draw(1, 3, 4), "v": draw(2, 4, 2)}
    return (lambda p, x: jnp.tanh(halved(p["w"], x)) @ p["v"]), params, *images(3)


def bilinear():
    params = {"m": draw(1, 3, 3, 2), "s": draw(2, 3)}
    return (lambda p, x: jnp.einsum("bi,bj,ijo->bo", x * p["s"][None], x, p["m"])), params, *images(3)


def squeezed():
    return (lambda p, x: jnp.squeeze(jnp.tanh(x @ p[0]) @ p[1])), (draw(1, 3, 4), draw(2, 4, 1)), *images(3)


def from_nnx():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(2, 4, (3, 3), strides=2, rngs=rngs, param_dtype=jnp.float64)
            self.norm = nnx.GroupNorm(4, 2, rngs=rngs, param_dtype=jnp.float64)
            self.head = nnx.Linear(4, 2, rngs=rngs, param_dtype=jnp.float64)

        def __call__(self, x):
            return self.head(jnp.mean(nnx.gelu(self.norm(self.conv(x))), axis=(1, 2)))

    return *kernels.from_module(Net(nnx.Rngs(0))), *images(5, 5, 2)


def from_linen():
    x, z = images(3, 4)
    net = nn.Sequential(
        [
            nn.MultiHeadDotProductAttention(2, param_dtype=jnp.float64),
            nn.LayerNorm(param_dtype=jnp.float64),
            lambda h: jnp.mean(h, 1),
            nn.Dense(2, param_dtype=jnp.float64),
        ]
    )
    return *kernels.from_module(net, net.init(jax.random.key(0), x)), x, z


def from_equinox():
    keys = jax.random.split(jax.random.key(0), 2)
    net = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(2, 4, 3, key=keys[0], dtype=jnp.float64),
            eqx.nn.Lambda(jnp.tanh),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(16, 2, key=keys[1], dtype=jnp.float64),
        ]
    )
    return *kernels.from_module(net), *images(2, 4, 4)


ZOO = {
    "dense": dense,
    "conv, 1-D, strided": lambda: conv_net((3, 2, 4), (7, 2), window_strides=(2,), padding=[(2, 1)]),
    "conv, 2-D": conv_two_layers,
    "conv, 2-D, dilated": lambda: conv_net((3, 2, 2, 4), (6, 5, 2), rhs_dilation=(2, 1)),
    "conv, 2-D, groups": lambda: conv_net((3, 3, 2, 6), (4, 4, 4), feature_group_count=2),
    "conv, 2-D, depthwise": lambda: conv_net((3, 3, 1, 4), (4, 4, 4), feature_group_count=4),
    "conv, 2-D, transposed": lambda: conv_net(
        (3, 3, 2, 4), (3, 4, 2), lhs_dilation=(2, 2), padding=[(1, 2), (2, 1)]
    ),
    "conv, 2-D, cropped": lambda: conv_net((2, 2, 2, 4), (5, 5, 2), padding=[(-1, 0), (0, -1)]),
    "conv, 3-D": lambda: conv_net((2, 2, 2, 2, 3), (3, 3, 4, 2), window_strides=(1, 2, 1)),
    "pooling": pooling,
    "residual block": residual_block,
    "layer norm": lambda: normalized((1, 2, 3, 4)),
    "group norm": lambda: normalized((1, 2, 4)),
    "instance norm": lambda: normalized((1, 2)),
    "batch norm, dense": lambda: batch_norm(False),
    "batch norm, conv": lambda: batch_norm(True),
    "attention": attention,
    "embedding": embedding,
    "tied embedding": tied_embedding,
    "recurrent scan": recurrent_scan,
    "recurrent loop": recurrent_loop,
    "scan over layers": scan_over_layers,
    "weight sharing": weight_sharing,
    "branches": branches,
    "functions of weights": functions_of_weights,
    "custom derivative": custom_derivative,
    "bilinear": bilinear,
    "squeezed": squeezed,
    "nnx": from_nnx,
    "linen": from_linen,
    "equinox": from_equinox,
}
# one of each kind of use for the fast suite
FAST = ["conv, 2-D, groups", "embedding", "recurrent scan", "functions of weights", "batch norm, conv"]


@functools.cache
def oracle(name):
    """The network with K(x, x) and K(x, z) of its explicit Jacobians."""
    apply, params, x, z = ZOO[name]()

    def jacobian(batch):
        rows = lambda p: apply(p, batch).reshape(batch.shape[0], -1)
        # by reverse mode: forward mode does not know the derivatives that a custom_vjp declares
        leaves = jax.tree.leaves(jax.jit(jax.jacrev(rows))(params))
        return np.concatenate([np.asarray(j).reshape(*j.shape[:2], -1) for j in leaves], -1)

    one, two = jacobian(x), jacobian(z)
    gram = lambda a, b: np.einsum("tcm,sdm->tscd", a, b)
    return apply, params, x, z, gram(one, one), gram(one, two)


KEPT = {"full": "tscd->tscd", "trace": "tscc->ts", "diagonal": "tscc->tsc"}


def agree(name, outputs, second, chunk):
    apply, params, x, z, same, cross = oracle(name)
    stats = "batch" if name.startswith("batch norm") else None
    exact = np.einsum(KEPT[outputs], cross if second else same)
    ours = kernels.empirical_ntk(
        apply,
        params,
        x,
        z if second else None,
        outputs=outputs,
        stats=stats,
        method=kernels.Method("structured", chunk=chunk),
    )
    ours = np.asarray(ours).reshape(exact.shape)
    np.testing.assert_allclose(ours, exact, rtol=1e-10, atol=1e-10 * np.abs(exact).max())


@pytest.mark.parametrize("name", FAST)
def test_one_network_of_each_kind(name):
    agree(name, "full", True, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("outputs", KEPT)
def test_zoo(name, outputs):
    for second in (False, True):
        for chunk in (None, 2):
            agree(name, outputs, second, chunk)


def agree_in_all_contractions(name, monkeypatch, ways):
    """Contract each parameter by ways that need not be the cheapest, on networks so small that nothing is sliced."""
    monkeypatch.setattr(contraction, "WHOLE", 0)
    monkeypatch.setattr(contraction, "_SLICE", 200)
    monkeypatch.setattr(contraction, "is_halved", lambda *_: True)
    is_window = lambda site, *_: float(site.kind == "conv_general_dilated" and not site.lengths)
    apply, params, x, _, same, _ = oracle(name)
    leaves, structure = jax.tree.flatten(params)
    one = lambda some, sample: apply(jax.tree.unflatten(structure, some), jnp.stack([sample] * 2))[0].reshape(
        -1
    )
    traced = structured.trace(one, leaves, x[0])
    for way in ways:
        monkeypatch.setattr(forms, "_compared", is_window if way == "windows" else lambda *_: 0.0)
        mode = "gram" if way == "windows" else way
        plan = structured.shares(traced, lambda _, mode=mode: mode)
        found = structured.factors(traced, plan, leaves, x, piece=2)
        if way == "windows" and name in WINDOWED:
            assert any(
                isinstance(f.activation, forms.Windowed) for f in found if isinstance(f, contraction.Gram)
            )
        for outputs, pattern in KEPT.items():
            exact = np.einsum(pattern, same)
            ours = contraction.contract(found, found, outputs)
            np.testing.assert_allclose(ours, exact, rtol=1e-10, atol=1e-10 * np.abs(exact).max())


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in ZOO if not n.startswith("batch norm")])
def test_all_contractions(name, monkeypatch):
    """Each parameter in parameter space, at once and in slices, and in sample space, whatever is cheaper."""
    agree_in_all_contractions(name, monkeypatch, ("jacobian", "slices", "gram"))


WINDOWED = [n for n in ZOO if n.startswith("conv")]


@pytest.mark.parametrize(
    "name", [n if n == "conv, 2-D, groups" else pytest.param(n, marks=pytest.mark.slow) for n in WINDOWED]
)
def test_windows_of_convolutions(name, monkeypatch):
    """Patches are compared by adding up products of channels: strides, dilations, groups, any padding."""
    agree_in_all_contractions(name, monkeypatch, ("windows",))


def test_windows_are_added_up_where_patches_are_long():
    """The sizes of a convolution tell; a kernel with two batches, in single rows and pieces of them."""
    apply, params, x, z = convolution_of_many_channels()
    leaves, structure = jax.tree.flatten(params)
    traced = structured.trace(
        lambda some, sample: apply(jax.tree.unflatten(structure, some), sample[None])[0], leaves, x[0]
    )
    assert [forms.sizes(s).compared > 0 for s in traced.sites.values()] == [False, True, False]
    for outputs in KEPT:
        ask = lambda method, outputs=outputs: kernels.empirical_ntk(
            apply, params, x, z, outputs=outputs, stats="frozen", method=kernels.Method(method, chunk=2)
        )
        np.testing.assert_allclose(ask("structured"), ask("jacobian"), rtol=1e-9, atol=1e-9)


def convolution_of_many_channels():
    """Return two convolutions, of which the second has patches of 9 x 128 numbers at 9 positions, and batches."""
    params = {"a": draw(0, 3, 3, 1, 128), "b": draw(1, 3, 3, 128, 4) / 34, "head": draw(2, 4, 3)}

    def apply(p, x):
        for name in "ab":
            x = jnp.tanh(
                jax.lax.conv_general_dilated(
                    x, p[name], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
            )
        return x.mean((1, 2)) @ p["head"]

    return apply, params, draw(3, 3, 3, 3, 1), draw(4, 2, 3, 3, 1)


DIFFERENTIATED = ["attention", "recurrent scan", "functions of weights", "tied embedding", "batch norm, conv"]


@pytest.mark.parametrize(
    "name", ["conv, 2-D, groups", *(pytest.param(n, marks=pytest.mark.slow) for n in DIFFERENTIATED)]
)
def test_the_kernel_can_be_differentiated(name):
    """Forward and backward along a random direction, against central differences of explicit Jacobians."""
    apply, params, x, *_ = ZOO[name]()
    direction = jax.tree.map(lambda a: draw(7, *a.shape), params)
    moved = lambda step: jax.tree.map(lambda a, v: a + step * v, params, direction)

    @jax.jit
    def explicit(p):
        leaves = jax.tree.leaves(jax.jacrev(lambda p: apply(p, x).reshape(ROWS, -1))(p))
        return sum(jnp.einsum("tcm,scm->ts", j, j) for j in (j.reshape(*j.shape[:2], -1) for j in leaves))

    stats = "batch" if name.startswith("batch norm") else "frozen"
    ours = lambda p: kernels.empirical_ntk(apply, p, x, outputs="trace", stats=stats, method="structured")
    exact = (explicit(moved(1e-5)) - explicit(moved(-1e-5))) / 2e-5
    _, forward = jax.jvp(ours, (params,), (direction,))
    np.testing.assert_allclose(forward, exact, rtol=1e-6, atol=1e-7 * np.abs(exact).max())
    weights = draw(8, ROWS, ROWS)
    slopes = jax.grad(lambda p: jnp.sum(weights * ours(p)))(params)
    along = sum(jnp.vdot(a, b) for a, b in zip(*map(jax.tree.leaves, (slopes, direction)), strict=True))
    np.testing.assert_allclose(along, np.sum(weights * exact), rtol=1e-6, atol=1e-7 * np.abs(exact).max())


def test_blocks_when_factors_do_not_fit():
    apply, params, x, z, same, cross = oracle("conv, 2-D, groups")
    for other, exact in ((None, same), (z, cross)):
        tight = kernels.empirical_ntk(
            apply, params, x, other, method=kernels.Method("structured", limit=5_000)
        )
        np.testing.assert_allclose(tight, exact, rtol=1e-10, atol=1e-12)


def test_samples_are_differentiated_in_pieces_where_that_takes_less_memory(monkeypatch):
    """Networks of this size run whole; with less room J is formed sample by sample, and the kernel is the same."""
    name = "conv, 2-D"
    apply, params, x, *_ = ZOO[name]()
    leaves, structure = jax.tree.flatten(params)
    one = lambda some, sample: apply(jax.tree.unflatten(structure, some), sample[None])[0]
    traced = structured.trace(one, leaves, x[0])
    block = cost.Block(ROWS, ROWS, 2, "trace", True)
    passes = cost.passes(traced.analysis.scope.closed, len(leaves))
    find = lambda **options: layout.free_layout(traced, passes, block, None, 2**30, **options)
    whole = find()
    assert whole.piece == ROWS
    monkeypatch.setattr(layout, "_PIECE", 1)
    monkeypatch.setattr(layout, "_HELD", 0)
    assert find().piece == 1
    assert find().bytes < whole.bytes
    assert find(cpu=False) == whole
    # another limit: the kernels of the other tests are compiled for layouts of their own
    apply, params, x, z, same, cross = oracle(name)
    for other, exact in ((None, same), (z, cross)):
        ours = kernels.empirical_ntk(
            apply, params, x, other, outputs="trace", method=kernels.Method("structured", limit=2**30)
        )
        np.testing.assert_allclose(ours, np.einsum("tscc->ts", exact), rtol=1e-10, atol=1e-12)
    # the loop over samples is for CPUs: a program that is lowered for an accelerator starts its kernels once
    method = kernels.Method("structured", limit=2**30)
    program = lambda p: kernels.empirical_ntk(apply, p, x, outputs="trace", stats="frozen", method=method)
    traced = jax.jit(program).trace(params)
    loops = {p: traced.lower(lowering_platforms=(p,)).as_text().count("while") for p in ("cpu", "cuda")}
    assert loops["cpu"] > 0 and loops["cuda"] == 0


@pytest.mark.parametrize("outputs", ["full", "diagonal", "trace"])
def test_a_quarter_of_a_wide_symmetric_kernel_is_a_copy(monkeypatch, outputs):
    """Networks of this size are too narrow; by force their kernels are taken by half, for J formed early and late."""
    calls = []
    monkeypatch.setattr(contraction, "is_halved", lambda *sizes: calls.append(sizes) or True)
    apply, params, x, _, same, _ = oracle("conv, 2-D")
    leaves, structure = jax.tree.flatten(params)
    one = lambda some, sample: apply(jax.tree.unflatten(structure, some), sample[None])[0]
    traced = structured.trace(one, leaves, x[0])
    for mode in ("jacobian", "slices"):
        plan = structured.shares(traced, lambda _, mode=mode: mode)
        found = structured.factors(traced, plan, leaves, x, piece=2)
        ours = contraction.contract(found, found, outputs).reshape(np.einsum(KEPT[outputs], same).shape)
        np.testing.assert_allclose(ours, np.einsum(KEPT[outputs], same), rtol=1e-10, atol=1e-12)
    assert calls


def test_uses_are_understood():
    """Convolutions, shared weights and scans are products; only biases, scales and opaque uses are left to backward."""
    expected = {
        "conv, 2-D, groups": {"b"},
        "weight sharing": set(),
        "recurrent scan": {"b"},
        "attention": set(),
        "embedding": {"place"},
        "scan over layers": {"b"},
        "custom derivative": {"w"},
    }
    for name, direct in expected.items():
        apply, params, x, *_ = ZOO[name]()
        leaves, structure = jax.tree.flatten(params)
        one = lambda some, sample, s=structure, f=apply: f(jax.tree.unflatten(s, some), sample[None])[0]
        found = structured.trace(one, leaves, x[0]).analysis.direct
        assert {sorted(params)[i] for i in found} == direct, name


@pytest.mark.parametrize("name", ["conv, 2-D, groups", "recurrent scan", "attention", "batch norm, conv"])
def test_programs_for_accelerators(name):
    """In single precision nothing is computed in double precision, and nothing calls back to the host."""
    apply, params, x, *_ = ZOO[name]()
    single = lambda tree: jax.tree.map(
        lambda a: jnp.asarray(a, jnp.float32) if jnp.issubdtype(jnp.result_type(a), jnp.floating) else a, tree
    )
    params, x = single(params), single(x)
    kernel = lambda p: kernels.empirical_ntk(
        apply, p, x, stats="batch" if name.startswith("batch norm") else "frozen", method="structured"
    )
    text = jax.jit(kernel).lower(params).as_text()
    assert "f32" in text
    assert "f64" not in text
    assert "callback" not in text


def test_costs_follow_the_trace():
    """Counts of the traced program against hand counts."""
    params = {"w": jnp.ones((3, 3, 2, 4)), "v": jnp.ones((4, 2))}
    apply = lambda some, x: pooled(jnp.tanh(convolve(x[None], some[1])), some[0])[0]
    traced = structured.trace(apply, [params["v"], params["w"]], jnp.ones((6, 5, 2)))
    counted = cost.passes(traced.analysis.scope.closed, 2)
    assert counted.forward.flops == 2 * (30 * 9 * 2 * 4 + 4 * 2)
    assert counted.backward.flops == 2 * 4 * 2  # the input of the network needs no gradient
    assert counted.convolved == 2 * 30 * 9 * 2 * 4


class TestBadInput:
    def kernel(self, apply, params=None, x=None, **options):
        params = jnp.ones(3) if params is None else params
        return kernels.empirical_ntk(apply, params, jnp.ones((12, 3)) if x is None else x, **options)

    def test_coupling_of_large_batches_only(self, key):
        late = lambda w, x: x @ w - (jnp.mean(x @ w) if x.shape[0] > 8 else 0.0)
        x = jax.random.normal(key, (12, 3))
        with pytest.raises(ValueError, match="couples the samples"):
            self.kernel(late, x=x)
        with pytest.raises(ValueError, match="couples the samples"):
            self.kernel(late, x=x[:4], z=x)
        assert self.kernel(late, x=x[:4]).shape == (4, 4)

    def test_coupling_of_later_rows(self, key):
        # every second sample looks at its neighbor, the first one at nothing
        pairs = lambda w, x: (x + x[jnp.arange(len(x)) // 2 * 2]) @ w
        with pytest.raises(ValueError, match="couples the samples"):
            self.kernel(pairs, x=jax.random.normal(key, (12, 3)))

    def test_outputs(self):
        with pytest.raises(ValueError, match="one array"):
            self.kernel(lambda w, x: {"a": x @ w})
        with pytest.raises(ValueError, match="one row for each of the 12 samples"):
            self.kernel(lambda w, x: jnp.sum(x @ w))
        with pytest.raises(ValueError, match="floating point"):
            self.kernel(lambda w, x: jnp.argmax(x * w[None], -1))

    def test_empty_batch(self):
        with pytest.raises(ValueError, match="x must hold at least one sample"):
            self.kernel(lambda w, x: x @ w, x=jnp.zeros((0, 3)))
        with pytest.raises(ValueError, match="z must hold at least one sample"):
            self.kernel(lambda w, x: x @ w, z=jnp.zeros((0, 3)))

    def test_not_a_number(self, key):
        with pytest.raises(ValueError, match="nothing but NaN"):
            self.kernel(lambda w, x: jnp.log(-1.0 - (x @ w) ** 2))
        # a function whose domain excludes random batches is probed at its own arguments
        x = 1.0 + jax.random.uniform(key, (6, 3))
        ours = self.kernel(lambda w, x: jnp.sum(jnp.log(x - 1.0), -1) * w[0], x=x)
        rows = jnp.sum(jnp.log(x - 1.0), -1)
        np.testing.assert_allclose(ours, rows[:, None] * rows[None], rtol=1e-10)

    def test_random_function(self):
        rng = np.random.default_rng(0)
        with pytest.raises(ValueError, match="apply is random"):
            self.kernel(lambda w, x: x @ w * rng.normal())

    def test_integers_and_unused_parameters(self):
        x = jnp.arange(12).reshape(4, 3)
        ours = self.kernel(lambda p, x: x @ p["w"], {"w": jnp.ones(3), "other": jnp.ones(5)}, x)
        np.testing.assert_allclose(ours, x @ x.T)
        with pytest.raises(ValueError, match="do not depend on params"):
            self.kernel(lambda p, x: jnp.sum(x, -1) * 1.0, x=x)
        with pytest.raises(ValueError, match="params must hold"):
            self.kernel(lambda p, x: jnp.sum(x, -1) * 1.0, jnp.arange(3), x)


def test_coupling_in_half_precision():
    w, x = jnp.ones((3, 2), jnp.bfloat16), jax.random.normal(jax.random.key(0), (8, 3), jnp.bfloat16)
    plain = lambda w, x: jnp.tanh(x @ w)
    assert not is_coupled(plain, w, x)
    assert is_coupled(lambda w, x: plain(w, x) - jnp.mean(plain(w, x), 0, keepdims=True), w, x)


def test_coupling_where_precision_rises_on_the_way():
    """Outputs in double precision of what was computed in single or half precision carry its rounding."""
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 4), (5, 3)))

    def rounded_by_size(x):  # as products are, whose order of summation depends on the number of rows
        return x / jnp.asarray(len(x), x.dtype) * jnp.asarray(len(x), x.dtype)

    def single(w, x):
        return jnp.tanh(rounded_by_size(x @ w).astype(jnp.float64))

    def half(w, x):
        return single(w.astype(jnp.bfloat16), x.astype(jnp.bfloat16))

    for function in (single, half):
        assert not is_coupled(function, w, x)
        assert is_coupled(lambda w, x, f=function: f(w, x) - jnp.mean(f(w, x), 0, keepdims=True), w, x)
    # a difference of 10^-6 is rounding there, but coupling in a function that is double all the way
    slight = lambda w, x: x @ w + 1e-6 * jnp.mean(x)
    assert is_coupled(slight, jnp.asarray(w, jnp.float64), jnp.asarray(x, jnp.float64))
