"""Pre-activation residual networks for 32 x 32 images: ResNet-20, -110 (basic) and -164 (bottleneck).

As in the unitization paper's section 4.2: norm, relu, convolution in each branch; three stages of 16, 32
and 64 channels (times 4 at the bottlenecks' outputs) at strides 1, 2, 2; any normalisation layer.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from meanflow import _checks
from meanflow.training.networks import Norm, affine_part, he_normal, normalized


def _conv(m: int, n: int, size: int, stride: int, init: Any, rngs: nnx.Rngs) -> nnx.Conv:
    return nnx.Conv(m, n, (size, size), stride, use_bias=False, kernel_init=init, rngs=rngs)


class Block(nnx.Module):
    """One full pre-activation residual block.

    Basic: norm relu conv3 norm relu conv3 (+ identity, subsampled and padded with zero channels where
    the shape changes). Bottleneck: norm relu conv1 norm relu conv3 norm relu conv1, with a 1 x 1
    projection of the pre-activation where the shape changes.
    """

    def __init__(
        self, m: int, width: int, stride: int, bottleneck: bool, norm: Norm, init: Any, *, rngs: nnx.Rngs
    ):
        n = 4 * width if bottleneck else width
        sizes = [(m, width, 1, 1), (width, width, 3, stride), (width, n, 1, 1)]
        if not bottleneck:
            sizes = [(m, width, 3, stride), (width, width, 3, 1)]
        self.norms = nnx.List([norm(a, rngs=rngs) for a, *_ in sizes])
        self.convs = nnx.List([_conv(a, b, size, s, init, rngs) for a, b, size, s in sizes])
        changes = stride != 1 or m != n
        self.project = _conv(m, n, 1, stride, init, rngs) if bottleneck and changes else nnx.data(None)
        self.stride, self.extra = stride, n - m

    def __call__(self, x: jax.Array) -> jax.Array:
        """(N, H, W, m) -> (N, H / stride, W / stride, n)."""
        h = jax.nn.relu(self.norms[0](x))
        if self.project is not None:
            shortcut = self.project(h)
        else:
            shortcut = x[:, :: self.stride, :: self.stride]
            shortcut = jnp.pad(shortcut, ((0, 0), (0, 0), (0, 0), (0, self.extra)))
        h = self.convs[0](h)
        for norm, conv in zip(self.norms[1:], self.convs[1:], strict=True):
            h = conv(jax.nn.relu(norm(h)))
        return shortcut + h


class ResNet(nnx.Module):
    """A CIFAR residual network of the given depth.

    Args:
        depth: 6 k + 2 with basic blocks (20, 110, ...); 9 k + 2 with bottlenecks (164, ...).
        classes: number of logits.
        norm: (features, rngs=...) -> normalisation layer, for instance ``partial(BatchNorm, momentum=0.9)``.
        bottleneck: by default True from depth 164 on.
        in_channels: of the images (N, H, W, channels).
        kernel_init: initialiser of the convolutions and the read-out.
        rngs: keys.
    """

    def __init__(
        self,
        depth: int,
        classes: int,
        norm: Norm,
        *,
        bottleneck: bool | None = None,
        in_channels: int = 3,
        kernel_init: Any = he_normal,
        rngs: nnx.Rngs,
    ):
        bottleneck = depth >= 164 if bottleneck is None else bottleneck
        a = 9 if bottleneck else 6
        if _checks.whole("depth", depth, a + 2) % a != 2:
            raise ValueError(f"depth must be {a} k + 2 with bottleneck={bottleneck}, got {depth}")
        self.stem = _conv(in_channels, 16, 3, 1, kernel_init, rngs)
        blocks, m = [], 16
        for stage, width in enumerate((16, 32, 64)):
            for k in range((depth - 2) // a):
                stride = 2 if stage and not k else 1
                blocks.append(Block(m, width, stride, bottleneck, norm, kernel_init, rngs=rngs))
                m = 4 * width if bottleneck else width
        self.blocks = nnx.List(blocks)
        self.norm = norm(m, rngs=rngs)
        self.head = nnx.Linear(m, classes, kernel_init=kernel_init, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits (N, classes) of images (N, H, W, channels)."""
        return self.upper(self.lower(x))

    def lower(self, x: jax.Array, layer: int = -1) -> jax.Array:
        """Outputs of the last normalisation layer, the only one that no shortcut passes by."""
        if layer != -1:
            raise ValueError(f"layer must be -1, the last normalisation layer of a ResNet, got {layer}")
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        return normalized(self.norm, h)

    def upper(self, h: jax.Array, layer: int = -1) -> jax.Array:
        """What the network makes of the outputs ``lower`` gives."""
        return self.head(jnp.mean(jax.nn.relu(affine_part(self.norm, h)), axis=(1, 2)))


def count_parameters(make: Callable[[], Any]) -> int:
    """Number of trainable parameters of the network ``make()`` would build, without allocating it."""
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(nnx.eval_shape(make), nnx.Param)))
