"""Pre-activation ResNets: published sizes, shapes, shortcuts, forward and backward on CIFAR-shaped data."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from meanflow.layers import BatchNorm, Recenter, Rescale, Unitize, UnitizedBatchNorm
from meanflow.training import ResNet
from meanflow.training._resnet import Block

pytestmark = pytest.mark.usefixtures("quick_compilation")

zeros = nnx.initializers.zeros


def by_hand(depth, bottleneck, classes=10):
    """Weights of convolutions, gammas and betas, and the read-out, counted layer by layer."""
    k, total, m = (depth - 2) // (9 if bottleneck else 6), 3 * 16 * 9, 16
    for width in (16, 32, 64):
        for i in range(k):
            if bottleneck:
                n = 4 * width
                total += m * width + 9 * width * width + width * n + 2 * (m + 2 * width)
                total += m * n if i == 0 else 0
            else:
                n = width
                total += 9 * m * width + 9 * width * width + 2 * (m + width)
            m = n
    return total + 2 * m + m * classes + classes


def count(depth, norm=BatchNorm, **options):
    make = lambda: ResNet(depth, 10, norm, kernel_init=zeros, rngs=nnx.Rngs(0), **options)
    return sum(u.size for u in jax.tree.leaves(nnx.state(nnx.eval_shape(make), nnx.Param)))


def test_sizes_equal_the_count_by_hand():
    assert count(20) == by_hand(20, False)
    assert count(29, bottleneck=True) == by_hand(29, True)
    # the published sizes, 0.27 M, 1.7 M and 1.7 M, follow from the same formula
    sizes = [by_hand(depth, depth == 164) / 1e6 for depth in (20, 110, 164)]
    np.testing.assert_allclose(np.round(sizes, 2), [0.27, 1.73, 1.7])


def test_size_of_the_released_networks_by_hand():
    """Beyond ours: a norm after the stem, a bias a convolution, 1 x 1 shortcuts with biases in two (three) blocks."""
    biases = 16 + 6 * (16 + 32 + 64)
    assert count(20, released=True) - count(20) == 2 * 16 + biases + (16 * 32 + 32) + (32 * 64 + 64)
    biases = 16 + 3 * sum(width + width + 4 * width for width in (16, 32, 64))
    # both have a 1 x 1 shortcut in the first block of each stage; only the released one has biases there
    shortcuts = 4 * (16 + 32 + 64)
    assert (
        count(29, released=True, bottleneck=True) - count(29, bottleneck=True) == 2 * 16 + biases + shortcuts
    )


def test_released_blocks_project_their_input():
    """With zero convolutions inside, the output is the 1 x 1 convolution of the raw input, against numpy."""
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(2, 6, 6, 4)), "float32")
    block = Block(4, 8, 2, False, BatchNorm, zeros, True, rngs=nnx.Rngs(0))
    kernel, bias = rng.normal(size=(4, 8)).astype("float32"), rng.normal(size=8).astype("float32")
    block.project.kernel[...], block.project.bias[...] = jnp.asarray(kernel[None, None]), jnp.asarray(bias)
    np.testing.assert_allclose(block(x), np.asarray(x)[:, ::2, ::2] @ kernel + bias, rtol=1e-5, atol=1e-5)


def test_unitization_adds_one_alpha_a_channel():
    normalised = 2 * 16 + (16 + 32) + (32 + 64) + 64  # inputs of all norm layers of ResNet-8
    assert count(8, UnitizedBatchNorm) - count(8) == normalised


@pytest.mark.parametrize("bottleneck", [False, True])
def test_blocks_with_zero_convolutions_are_shortcuts(bottleneck):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 6, 4)), "float32")
    same = Block(4, 1 if bottleneck else 4, 1, bottleneck, BatchNorm, zeros, rngs=nnx.Rngs(0))
    wider = Block(4, 2 if bottleneck else 8, 2, bottleneck, BatchNorm, zeros, rngs=nnx.Rngs(0))
    alike, out = nnx.jit(lambda same, wider, x: (same(x), wider(x)))(same, wider, x)
    np.testing.assert_array_equal(alike, x)
    assert out.shape == (2, 3, 3, 8)
    if bottleneck:
        np.testing.assert_array_equal(out, 0)  # the projection is a convolution, zero here
    else:
        np.testing.assert_array_equal(out[..., :4], x[:, ::2, ::2])
        np.testing.assert_array_equal(out[..., 4:], 0)


@pytest.mark.parametrize(
    "norm",
    [
        BatchNorm,
        UnitizedBatchNorm,
        Unitize,
        Recenter,
        Rescale,
        partial(Rescale, mode="rms"),
        partial(Unitize, dtype=jnp.bfloat16),
        nnx.BatchNorm,
        partial(nnx.GroupNorm, num_groups=4),
    ],
)
def test_any_norm_layer_fits(norm):
    def logits():
        return ResNet(11, 10, norm, bottleneck=True, kernel_init=zeros, rngs=nnx.Rngs(0))(
            jnp.ones((2, 32, 32, 3), "float32")
        )

    assert jax.eval_shape(logits).shape == (2, 10)


norm = partial(UnitizedBatchNorm, momentum=0.9)
NETWORKS = {
    "block": (lambda: Block(3, 6, 2, False, norm, zeros, rngs=nnx.Rngs(0)), (2, 16, 16, 6)),
    "ResNet-20": (lambda: ResNet(20, 100, norm, kernel_init=zeros, rngs=nnx.Rngs(0)), (2, 100)),
}


@pytest.mark.parametrize("name", ["block", pytest.param("ResNet-20", marks=pytest.mark.slow)])
def test_runs_forward_and_backward_on_cifar_shapes(name):
    make, shape = NETWORKS[name]
    graph, params, stats = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
    rng = np.random.default_rng(0)
    draw = lambda s: (rng.normal(size=s.shape) * np.sqrt(2 / max(1, np.prod(s.shape[:-1])))).astype("float32")
    params = jax.tree.map(draw, params)
    stats = jax.tree.map(lambda s: np.ones(s.shape, s.dtype), stats)
    x = jnp.asarray(rng.random((2, 32, 32, 3)), "float32")

    @jax.jit
    def grad(params, stats, x):
        def loss(params):
            out = nnx.merge(graph, params, stats, copy=True)(x).reshape(-1, shape[-1])
            labels = jnp.arange(out.shape[0]) % shape[-1]
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(out, labels))

        return jax.value_and_grad(loss)(params)

    out = jax.eval_shape(lambda *state: nnx.merge(graph, *state, copy=True)(x), params, stats)
    assert out.shape == shape
    value, grads = jax.tree.map(np.asarray, grad(params, stats, x))
    assert np.isfinite(value)
    leaves, slopes = jax.tree.leaves(params), jax.tree.leaves(grads)
    assert all(np.all(np.isfinite(g)) for g in slopes)
    # backward against forward: the slope along the gradient itself
    norm2 = sum(float(np.sum(np.square(g, dtype="float64"))) for g in slopes)
    h = 1e-3 / np.sqrt(norm2)
    tree = jax.tree.structure(params)
    moved = lambda s: jax.tree.unflatten(tree, [p + s * h * g for p, g in zip(leaves, slopes, strict=True)])
    ends = [float(grad(jax.tree.map(lambda p: p.astype("float32"), moved(s)), stats, x)[0]) for s in (1, -1)]
    assert (ends[0] - ends[1]) / (2 * h) == pytest.approx(norm2, rel=0.05)


def test_the_last_norm_layer_can_be_watched():
    """It gives standardised channels, and what is above it is the read-out of relu(gamma h + beta)."""
    x = jnp.asarray(np.random.default_rng(0).random((4, 8, 8, 3)), "float32")
    network = ResNet(8, 10, BatchNorm, rngs=nnx.Rngs(0))
    h = np.asarray(nnx.jit(lambda net, x: net.lower(x))(network, x))
    np.testing.assert_allclose(h.mean((0, 1, 2)), 0, atol=1e-5)
    np.testing.assert_allclose(h.std((0, 1, 2)), 1, atol=1e-2)
    network.norm.bias[...] = jnp.full(64, 0.5)
    pooled = np.maximum(h + 0.5, 0).mean((1, 2))
    expected = pooled @ np.asarray(network.head.kernel[...]) + np.asarray(network.head.bias[...])
    np.testing.assert_allclose(network.upper(jnp.asarray(h)), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="last normalization layer"):
        network.lower(x, 0)


def test_bad_depth():
    with pytest.raises(ValueError, match="6 k"):
        ResNet(21, 10, BatchNorm, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="9 k"):
        ResNet(166, 10, BatchNorm, rngs=nnx.Rngs(0))
