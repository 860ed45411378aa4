"""Pre-activation ResNets: published sizes, shapes, shortcuts, forward and backward on CIFAR-shaped data."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from meanflow.layers import BatchNorm, UnitizedBatchNorm
from meanflow.training import ResNet, count_parameters
from meanflow.training.resnet import Block

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


@pytest.mark.parametrize(("depth", "published"), [(20, 0.27), (110, 1.7), (164, 1.7)])
def test_published_sizes(depth, published):
    make = lambda: ResNet(depth, 10, BatchNorm, kernel_init=zeros, rngs=nnx.Rngs(0))
    count = count_parameters(make)
    assert count == by_hand(depth, depth == 164)
    assert round(count / 1e6, 2 if published < 1 else 1) == published


def test_unitization_adds_one_alpha_a_channel():
    make = lambda norm: count_parameters(lambda: ResNet(20, 10, norm, kernel_init=zeros, rngs=nnx.Rngs(0)))
    # gamma, beta and alpha instead of gamma and beta
    channels = sum(2 * 3 * w for w in (16, 32, 64)) - 16 - 32 + 16 + 32 - 64 + 64 + 64 - 16 - 32
    norms = 6 * 16 + (16 + 5 * 32) + (32 + 5 * 64) + 64
    assert make(UnitizedBatchNorm) - make(BatchNorm) == norms
    assert channels > 0


@pytest.mark.parametrize("bottleneck", [False, True])
def test_blocks_with_zero_convolutions_are_shortcuts(bottleneck):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 6, 4)), "float32")
    same = Block(4, 1 if bottleneck else 4, 1, bottleneck, BatchNorm, zeros, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(same(x), x)
    wider = Block(4, 2 if bottleneck else 8, 2, bottleneck, BatchNorm, zeros, rngs=nnx.Rngs(0))
    out = wider(x)
    assert out.shape == (2, 3, 3, 8)
    if bottleneck:
        np.testing.assert_array_equal(out, 0)  # the projection is a convolution, zero here
    else:
        np.testing.assert_array_equal(out[..., :4], x[:, ::2, ::2])
        np.testing.assert_array_equal(out[..., 4:], 0)


def step(depth, norm, classes=10):
    """Loss and gradients of one minibatch of two CIFAR-shaped images."""
    model = ResNet(depth, classes, norm, rngs=nnx.Rngs(0))
    graph, params, stats = nnx.split(model, nnx.Param, ...)
    x = jnp.asarray(np.random.default_rng(0).random((2, 32, 32, 3)), "float32")

    @jax.jit
    def grad(params, stats):
        def loss(params):
            logits = nnx.merge(graph, params, stats, copy=True)(x)
            return jnp.mean(
                optax.softmax_cross_entropy_with_integer_labels(logits, jnp.array([1, 3]))
            ), logits

        return jax.value_and_grad(loss, has_aux=True)(params)

    (value, logits), grads = grad(params, stats)
    assert logits.shape == (2, classes)
    assert np.isfinite(value)
    norms = [float(jnp.linalg.norm(g)) for g in jax.tree.leaves(grads)]
    assert np.all(np.isfinite(norms))
    return norms


@pytest.mark.parametrize("norm", [BatchNorm, partial(nnx.GroupNorm, num_groups=4)])
def test_any_norm_layer(norm):
    assert np.mean(np.array(step(8, norm)) > 0) > 0.9


def test_resnet_20_runs_on_cifar_shapes():
    norms = step(20, partial(UnitizedBatchNorm, momentum=0.9), classes=100)
    assert np.mean(np.array(norms) > 0) > 0.9


def test_bad_depth():
    with pytest.raises(ValueError, match="6 k"):
        ResNet(21, 10, BatchNorm, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="9 k"):
        ResNet(166, 10, BatchNorm, rngs=nnx.Rngs(0))
