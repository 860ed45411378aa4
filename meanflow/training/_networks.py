"""Small normalized classifiers that can be cut at a layer: ``upper(lower(x, l), l) == network(x)``.

A normalization layer is given as a function ``(features, rngs=...) -> layer``, for instance
``functools.partial(BatchNorm, momentum=0.9)`` or ``partial(nnx.GroupNorm, num_groups=4)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from meanflow import _boundary
from meanflow._boundary import Count, checked, count, instance
from meanflow.layers._normalization import Normalization


@runtime_checkable
class Layer(Protocol):
    """A part of a network: batch -> batch."""

    def __call__(self, x: jax.Array, /) -> jax.Array:
        """Apply the layer to a batch."""


@runtime_checkable
class MakeNorm(Protocol):
    """A function that builds a normalization layer: ``(features, rngs=...) -> layer``."""

    def __call__(self, features: int, /, *, rngs: nnx.Rngs) -> Layer:
        """Build the layer for a number of features."""


@runtime_checkable
class Network(Protocol):
    """What the trainer needs of a network: predictions, and a switch between training and inference.

    Every flax NNX module that maps a batch to logits has these methods.
    """

    def __call__(self, x: jax.Array, /) -> jax.Array:
        """Return the logits of a batch."""

    def train(self) -> None:
        """Switch to training: normalize by the moments of the batch."""

    def eval(self) -> None:
        """Switch to inference: normalize by the running moments."""


@runtime_checkable
class Cuttable(Network, Protocol):
    """A network that can be cut at a normalization layer: ``upper(lower(x, l), l) == network(x)``."""

    def lower(self, x: jax.Array, layer: int = -1) -> jax.Array:
        """Return the outputs of the layer, before its gamma and beta."""

    def upper(self, h: jax.Array, layer: int = -1) -> jax.Array:
        """Return the logits, given what ``lower`` returned."""


he_normal = nnx.initializers.variance_scaling(2.0, "fan_in", "normal")


def normalized(norm: Layer, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return the output of a normalization layer before its gamma and beta.

    A layer that is not one of ``meanflow.layers`` cannot be taken apart: its whole output is returned.
    """
    return norm.normalized(x) if isinstance(norm, Normalization) else norm(x)


def affine_part(norm: Layer, h: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Apply gamma and beta of a normalization layer to its ``normalized`` output."""
    return norm.affine(h) if isinstance(norm, Normalization) else h


BATCH = _boundary.array(rank=2, half=True, nan=True, infinite=True)  # layers say what they do with NaN
Batch = Annotated[Float[Array, "n ..."], BATCH]
LayerNumber = Annotated[int, count(-_boundary.MOST)]


_boundary.declare(nnx.Rngs, instance(nnx.Rngs, hint="such as nnx.Rngs(0)"))


class Plain(nnx.Module):
    """The layer of a network without normalization: it returns what it gets."""

    def __init__(self, features: int, *, rngs: nnx.Rngs):
        pass

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the batch."""
        return x


def make_norm(name: str, value: object) -> object:
    """Accept a function, or the class of a layer, that is called as ``norm(features, rngs=...)``."""
    # the class of a layer makes layers too; a layer itself in its place is the usual mistake
    other = isinstance(value, type) and not issubclass(value, nnx.Module)
    if not callable(value) or isinstance(value, nnx.Module) or other:
        raise TypeError(
            f"{name} must be a function (features, rngs=...) -> layer, such as layers.BatchNorm, "
            f"got {_boundary.show(value)}"
        )
    return value


NormMaker = Annotated[MakeNorm, make_norm]


class Stack(nnx.Module):
    """A classifier without shortcuts: affine map, normalization and ReLU, repeated; then a linear read-out.

    The affine maps are dense, for inputs (N, features); or with ``strides`` 3 x 3 convolutions, for images
    (N, H, W, channels), whose last feature map is averaged over the pixels.

    Args:
        in_features: length of an input row, or channels of an image.
        widths: widths, or numbers of channels, of the hidden layers.
        classes: number of logits.
        norm: function (features, rngs=...) -> normalization layer; it is called with each width. None for none.
        strides: stride of each convolution; None for dense layers.
        rngs: keys for the weights, which are He-normal. Biases of dense layers are 0; convolutions have none.

    >>> from meanflow.layers import BatchNorm
    >>> network = Stack(4, (8, 8), 3, norm=BatchNorm, rngs=nnx.Rngs(0))
    >>> network(jnp.ones((5, 4))).shape
    (5, 3)
    >>> network = Stack(1, (4, 4), 10, norm=BatchNorm, strides=(1, 2), rngs=nnx.Rngs(0))
    >>> network(jnp.ones((5, 8, 8, 1))).shape
    (5, 10)
    """

    @checked
    def __init__(
        self,
        in_features: Count,
        widths: Sequence[Count],
        classes: Count,
        norm: NormMaker | None,
        *,
        strides: Sequence[Count] | None = None,
        rngs: nnx.Rngs,
    ):
        if strides is not None and len(strides) != len(widths):
            raise ValueError(f"widths and strides must be equally many, got {widths} and {strides}")
        sizes = [in_features, *widths]
        pairs = list(zip(sizes[:-1], sizes[1:], strict=True))
        maps: list[nnx.Linear | nnx.Conv]
        if strides is None:
            maps = [nnx.Linear(m, n, kernel_init=he_normal, rngs=rngs) for m, n in pairs]
        else:
            conv = partial(nnx.Conv, kernel_size=(3, 3), use_bias=False, kernel_init=he_normal, rngs=rngs)
            maps = [conv(m, n, strides=s) for (m, n), s in zip(pairs, strides, strict=True)]
        self.maps = nnx.List(maps)
        self.norms = nnx.List([(norm or Plain)(n, rngs=rngs) for n in widths])
        self.head = nnx.Linear(sizes[-1], classes, kernel_init=he_normal, rngs=rngs)

    @checked
    def __call__(self, x: Batch) -> Float[Array, "n classes"]:
        """Return the logits of a batch."""
        return self.upper(self.lower(x))

    @checked
    def lower(self, x: Batch, layer: LayerNumber = -1) -> Float[Array, "n ..."]:
        """Return the outputs of one normalization layer, without its gamma and beta.

        Args:
            x: batch.
            layer: index of the normalization layer; -1 is the last one.
        """
        index = self._index(layer)
        first = self.maps[0]
        fits = x.ndim == 4 if isinstance(first, nnx.Conv) else x.ndim >= 2
        if not fits or x.shape[-1] != first.in_features:
            kind = "images (n, h, w, channels)" if isinstance(first, nnx.Conv) else "rows"
            raise ValueError(
                f"x must be {kind} with {first.in_features} features in the last axis, got {x.shape}"
            )
        # the layers below act whole; of the cut layer only the part before gamma and beta
        for affine, norm in zip(self.maps[:index], self.norms[:index], strict=True):
            x = jax.nn.relu(norm(affine(x)))
        return normalized(self.norms[index], self.maps[index](x))

    @checked
    def upper(self, h: Batch, layer: LayerNumber = -1) -> Float[Array, "n classes"]:
        """Return the logits, given the outputs that ``lower`` returns for the same ``layer``.

        Args:
            h: what ``lower`` returned.
            layer: index of the normalization layer, as for ``lower``.
        """
        index = self._index(layer)
        h = jax.nn.relu(affine_part(self.norms[index], h))
        for affine, norm in zip(self.maps[index + 1 :], self.norms[index + 1 :], strict=True):
            h = jax.nn.relu(norm(affine(h)))
        # rows are one vector a sample already; of images the mean over the pixels is taken
        return self.head(jnp.mean(h, axis=tuple(range(1, h.ndim - 1))))

    def _index(self, layer: int) -> int:
        """Return the number of a normalization layer, counted from 0."""
        # negative numbers count from the end, as in Python
        depth = len(self.maps)
        if not -depth <= layer < depth:
            raise ValueError(f"layer must be from {-depth} to {depth - 1}, got {layer}")
        return layer % depth
