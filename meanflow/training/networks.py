"""Small normalised classifiers that can be cut at a layer: ``upper(lower(x, l), l) == network(x)``.

A normalisation layer is given as a function (features, rngs=...) -> module, for instance
``functools.partial(BatchNorm, momentum=0.9)`` or ``partial(nnx.GroupNorm, num_groups=4)``.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from meanflow import _checks

Norm = Callable[..., Any]
he_normal = nnx.initializers.variance_scaling(2.0, "fan_in", "normal")


def normalized(norm: Any, x: jax.Array) -> jax.Array:
    """Output of a normalisation layer before its gamma and beta, where it has any such output."""
    return norm.normalized(x) if hasattr(norm, "normalized") else norm(x)


def affine_part(norm: Any, h: jax.Array) -> jax.Array:
    """What the layer makes of its ``normalized`` output."""
    return norm.affine(h) if hasattr(norm, "affine") else h


class Stack(nnx.Module):
    """Affine map, normalisation and relu, repeated; then a linear read-out of ``classes`` logits."""

    maps: Any
    norms: Any
    head: nnx.Linear

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits (N, classes)."""
        return self.upper(self.lower(x))

    def lower(self, x: jax.Array, layer: int = -1) -> jax.Array:
        """Outputs of one normalisation layer, ``normalized``."""
        index = range(len(self.maps))[layer]
        for affine, norm in zip(self.maps[:index], self.norms[:index], strict=True):
            x = jax.nn.relu(norm(affine(x)))
        return normalized(self.norms[index], self.maps[index](x))

    def upper(self, h: jax.Array, layer: int = -1) -> jax.Array:
        """What the network makes of the outputs ``lower`` gives."""
        index = range(len(self.maps))[layer]
        h = jax.nn.relu(affine_part(self.norms[index], h))
        for affine, norm in zip(self.maps[index + 1 :], self.norms[index + 1 :], strict=True):
            h = jax.nn.relu(norm(affine(h)))
        return self.head(self.pool(h))

    def pool(self, h: jax.Array) -> jax.Array:
        """From the last feature map to (N, features)."""
        return h


class MLP(Stack):
    """Dense layers: in_features - widths - classes, each hidden one Linear, norm, relu.

    Args:
        in_features: length of an input row.
        widths: hidden widths.
        classes: number of logits.
        norm: see the module; called with each width.
        rngs: keys; weights are He-normal, biases 0.
    """

    def __init__(self, in_features: int, widths: Sequence[int], classes: int, norm: Norm, *, rngs: nnx.Rngs):
        sizes = [
            _checks.whole("in_features", in_features, 1),
            *(_checks.whole("widths", w, 1) for w in widths),
        ]
        if len(sizes) < 2:
            raise ValueError("widths must name at least one hidden layer, got none")
        self.maps = nnx.List(
            [
                nnx.Linear(m, n, kernel_init=he_normal, rngs=rngs)
                for m, n in zip(sizes, sizes[1:], strict=False)
            ]
        )
        self.norms = nnx.List([norm(n, rngs=rngs) for n in sizes[1:]])
        self.head = nnx.Linear(sizes[-1], classes, kernel_init=he_normal, rngs=rngs)


class CNN(Stack):
    """3 x 3 convolutions with same padding, each with norm and relu, then the mean over pixels.

    Args:
        in_channels: channels of the images (N, H, W, channels).
        channels: of each convolution.
        classes: number of logits.
        norm: see the module; called with each number of channels.
        strides: of each convolution; 1 by default.
        rngs: keys; weights are He-normal, no convolution biases.
    """

    def __init__(
        self,
        in_channels: int,
        channels: Sequence[int],
        classes: int,
        norm: Norm,
        *,
        strides: Sequence[int] | None = None,
        rngs: nnx.Rngs,
    ):
        sizes = [
            _checks.whole("in_channels", in_channels, 1),
            *(_checks.whole("channels", c, 1) for c in channels),
        ]
        strides = [1] * len(channels) if strides is None else strides
        if len(sizes) < 2 or len(strides) != len(channels):
            raise ValueError(
                f"channels and strides must be equally many and at least one, got {channels} and {strides}"
            )
        conv = partial(nnx.Conv, kernel_size=(3, 3), use_bias=False, kernel_init=he_normal, rngs=rngs)
        self.maps = nnx.List(
            [conv(m, n, strides=s) for m, n, s in zip(sizes, sizes[1:], strides, strict=False)]
        )
        self.norms = nnx.List([norm(n, rngs=rngs) for n in sizes[1:]])
        self.head = nnx.Linear(sizes[-1], classes, kernel_init=he_normal, rngs=rngs)

    def pool(self, h: jax.Array) -> jax.Array:
        """Mean over pixels."""
        return jnp.mean(h, axis=(1, 2))
