"""Pre-activation residual networks for 32 x 32 images: ResNet-20 and -110 (basic), ResNet-164 (bottleneck).

They follow section 4.2 of the unitization paper: each branch is normalization, ReLU, convolution, repeated. There are
three stages of 16, 32 and 64 channels (4 times as many at the outputs of bottlenecks) with strides 1, 2, 2. Any
normalization layer can be used. ``released=True`` builds the networks of the training code that the paper's authors
published, which differ from these in several details.
"""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from meanflow import _boundary
from meanflow._boundary import Count, checked, count
from meanflow.layers._standardize import Initializer
from meanflow.training._networks import (
    BATCH,
    MakeNorm,
    NormMaker,
    Plain,
    affine_part,
    he_normal,
    normalized,
)


def _conv(
    m: int, n: int, size: int, stride: int, init: Initializer, rngs: nnx.Rngs, bias: bool = False
) -> nnx.Conv:
    """Build a convolution from m to n channels."""
    return nnx.Conv(m, n, (size, size), stride, use_bias=bias, kernel_init=init, rngs=rngs)


class Block(nnx.Module):
    """One full pre-activation residual block.

    A basic block is norm, ReLU, 3 x 3 convolution, twice, plus the identity. Where the shape changes, the identity is
    subsampled and padded with zero channels. A bottleneck is norm, ReLU and a convolution of size 1, then 3, then 1.
    Where the shape changes, its shortcut is a 1 x 1 convolution of the first ReLU's output.

    Args:
        m: channels of the input.
        width: channels inside the block; the output has as many, or 4 times as many for a bottleneck.
        stride: of the first 3 x 3 convolution.
        bottleneck: which of the two kinds.
        norm: function (features, rngs=...) -> normalization layer.
        init: initializer of the convolutions.
        released: build the block of the authors' code: convolutions with biases, the stride in the first of them, and
            a 1 x 1 convolution of the block's input as shortcut wherever the shape changes.
        rngs: keys.
    """

    def __init__(
        self,
        m: int,
        width: int,
        stride: int,
        bottleneck: bool,
        norm: MakeNorm,
        init: Initializer,
        released: bool = False,
        *,
        rngs: nnx.Rngs,
    ):
        # (channels in, channels out, size, stride) of each convolution of the branch
        n = 4 * width if bottleneck else width
        if bottleneck:
            first, second = (stride, 1) if released else (1, stride)
            sizes = [(m, width, 1, first), (width, width, 3, second), (width, n, 1, 1)]
        else:
            sizes = [(m, width, 3, stride), (width, width, 3, 1)]
        self.norms = nnx.List([norm(a, rngs=rngs) for a, *_ in sizes])
        self.convs = nnx.List([_conv(a, b, size, s, init, rngs, released) for a, b, size, s in sizes])
        projects = (bottleneck or released) and (stride != 1 or m != n)
        self.project = _conv(m, n, 1, stride, init, rngs, released) if projects else nnx.data(None)
        self.stride, self.extra, self.released = stride, n - m, released

    @checked
    def __call__(
        self, x: Annotated[Float[Array, "n h w channels"], BATCH]
    ) -> Float[Array, "n h2 w2 channels2"]:
        """Apply the block; height and width are divided by the stride."""
        h = jax.nn.relu(self.norms[0](x))
        if self.project is not None:
            shortcut = self.project(x if self.released else h)
        else:
            # the identity without parameters: every other pixel, and zero channels for the new ones
            shortcut = x[:, :: self.stride, :: self.stride]
            shortcut = jnp.pad(shortcut, ((0, 0), (0, 0), (0, 0), (0, self.extra)))
        h = self.convs[0](h)
        for norm, conv in zip(self.norms[1:], self.convs[1:], strict=True):
            h = conv(jax.nn.relu(norm(h)))
        return shortcut + h


class ResNet(nnx.Module):
    """A pre-activation residual network for CIFAR images.

    Args:
        depth: number of layers, 6 k + 2 with basic blocks (20, 110, ...) or 9 k + 2 with bottlenecks (164, ...).
        classes: number of logits.
        norm: function (features, rngs=...) -> normalization layer, for instance ``partial(BatchNorm, momentum=0.9)``.
            None for none.
        bottleneck: whether to use bottlenecks; by default from depth 164 on.
        in_channels: channels of the images (N, H, W, channels): 3 as in CIFAR unless given, 1 for gray ones.
        kernel_init: initializer of the convolutions and the read-out.
        released: build the network of the authors' published training code: biases in all convolutions, a
            normalization and a ReLU after the stem too, 1 x 1 convolutions of the block's input as shortcuts wherever
            the shape changes, and the stride of a bottleneck in its first convolution.
        rngs: keys for the weights.

    >>> from meanflow.layers import BatchNorm
    >>> network = nnx.eval_shape(lambda: ResNet(20, 10, norm=BatchNorm, rngs=nnx.Rngs(0)))  # shapes alone
    >>> sum(u.size for u in jax.tree.leaves(nnx.state(network, nnx.Param)))
    269722
    """

    @checked
    def __init__(
        self,
        depth: Annotated[int, count(8)],
        classes: Count,
        norm: NormMaker | None,
        *,
        bottleneck: bool | None = None,
        in_channels: Count = 3,
        kernel_init: Initializer = he_normal,
        released: bool = False,
        rngs: nnx.Rngs,
    ):
        bottleneck = depth >= 164 if bottleneck is None else bottleneck
        # three stages of k blocks with 3 or 2 convolutions each, plus stem and read-out
        a = 9 if bottleneck else 6
        if _boundary.whole("depth", depth, a + 2) % a != 2:
            raise ValueError(f"depth must be {a} k + 2 with bottleneck={bottleneck}, got {depth}")
        norm = norm or Plain
        self.stem = _conv(in_channels, 16, 3, 1, kernel_init, rngs, released)
        self.stem_norm = norm(16, rngs=rngs) if released else nnx.data(None)
        blocks, m = [], 16
        for stage, width in enumerate((16, 32, 64)):
            for k in range((depth - 2) // a):
                # the first block of the later stages halves the image
                stride = 2 if stage and not k else 1
                blocks.append(Block(m, width, stride, bottleneck, norm, kernel_init, released, rngs=rngs))
                m = 4 * width if bottleneck else width
        self.blocks = nnx.List(blocks)
        self.norm = norm(m, rngs=rngs)
        self.head = nnx.Linear(m, classes, kernel_init=kernel_init, rngs=rngs)

    def __call__(self, x: Float[Array, "n h w channels"]) -> Float[Array, "n classes"]:
        """Return the logits of a batch of images."""
        return self.upper(self.lower(x))

    def lower(self, x: Float[Array, "n h w channels"], layer: int = -1) -> Float[Array, "n h2 w2 features"]:
        """Return the outputs of the last normalization layer, the only one that no shortcut passes by.

        Args:
            x: images (N, H, W, channels).
            layer: -1.
        """
        if layer != -1:
            raise ValueError(f"layer must be -1, the last normalization layer of a ResNet, got {layer}")
        return normalized(self.norm, self.states(x)[-1])

    @checked
    def states(
        self, x: Annotated[Float[Array, "n h w channels"], BATCH]
    ) -> list[Float[Array, "n h2 w2 features"]]:
        """Return what each block receives, and last what the last normalization layer receives.

        Args:
            x: images (N, H, W, channels).
        """
        _boundary.shape("x", x, (None, None, None, self.stem.in_features))
        h = self.stem(x)
        if self.stem_norm is not None:
            h = jax.nn.relu(self.stem_norm(h))
        found = [h]
        for block in self.blocks:
            found.append(block(found[-1]))
        return found

    def upper(self, h: Float[Array, "n h2 w2 features"], layer: int = -1) -> Float[Array, "n classes"]:
        """Return the logits, given the outputs that ``lower`` returns.

        Args:
            h: what ``lower`` returned.
            layer: -1.
        """
        return self.head(jnp.mean(jax.nn.relu(affine_part(self.norm, h)), axis=(1, 2)))
