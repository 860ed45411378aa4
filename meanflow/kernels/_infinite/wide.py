"""Infinitely wide networks, layer by layer: the pair (NNGP, NTK) carried through dense layers, convolutions and norms.

A layer of infinitely many features, identically distributed over random weights, is known by the covariance of one
feature between samples, the NNGP kernel K(x, z), and by the tangent kernel T(x, z) of one feature:

    dense                 K <- sw2 K + sb2,                       T <- K + sw2 T    (the new K)
    activation            K <- E[phi(u) phi(v)],                  T <- T E[phi'(u) phi'(v)]
    convolution           as dense, of the mean of K over the window, moved alike at both positions
    flatten, pool         mean of K and T over equal positions; over all pairs of positions
    sum of branches       K + K',  T + T'                         if the last weights of one are not in the other
    layer norm            K / (s s'),  T / (s s')                 s^2 = K(x, x)
    batch norm            P K P / s^2,  P T P / s^2               P removes the batch's mean, s^2 = mean diag P K P

Weights are sqrt(sw2 / fan-in) w with w ~ N(0, 1) trained, biases sqrt(sb2) b likewise. A finite network differs by
O(1 / sqrt(width)).

Batch norm is that of an infinite batch: every feature is divided by the same s, which a finite batch replaces by the
feature's own one. Its relative fluctuation is 2 / D with D = tr(P K P)^2 / tr((P K P)^2), the number of directions over
which P K P is spread, and so the kernels of a finite batch differ by O(1 / D). D is not the number of samples:
convolutions on few channels give many positions but at most window x channels directions, and 256 rows of a batch are
then as good as 6. ``WideLayer.directions`` tells. Pooled networks with zero padding are the worst case that was met:
0.24 from the limit at width 256, beyond the 3 / sqrt(width) that holds for every other layer here.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from meanflow import _boundary
from meanflow._boundary import Count, Rate, checked, choice
from meanflow._numerics import safe_divide
from meanflow.activations import AnyActivation
from meanflow.kernels._infinite.dual import dual_activation

PADDING = ("SAME", "VALID", "CIRCULAR")
INPUTS = _boundary.array(rank=2, squares=True)
_tokens = itertools.count()


class WideLayer(eqx.Module):
    """The outputs of an infinitely wide layer at x and z; ``wide_inputs`` makes the first one.

    Every method is a layer and returns a new ``WideLayer``; ``+`` joins two branches.

    Attributes:
        nngp: K (T, S); with r axes of positions (T, S, P_1 .. P_r), or with pairs of positions (T, S, P_1 .. P_r,
            P_1 .. P_r), positions of x first.
        ntk: the tangent kernel, of the same shape.
        own: K(x, x) and K(z, z) for each sample with itself, (T, positions) and (S, positions).
        pairs: whether covariances between different positions are kept.
        square: whether z is x.
        gaussian: whether the features are Gaussian, as activations and norms need it.
        weights: the weight layers that are in this layer.
        last: those it ends in, with nothing but sums, norms and pooling after them; None if it ends otherwise.
        directions: the fewest directions D over which any batch norm so far has found its batch spread, infinity if
            there was none. The kernels of this batch at infinite width differ from ``nngp`` and ``ntk`` by O(1 / D).
    """

    nngp: Float[Array, "T S ..."]
    ntk: Float[Array, "T S ..."]
    own: tuple[Float[Array, "_ ..."], ...]
    pairs: bool = eqx.field(static=True)
    square: bool = eqx.field(static=True)
    gaussian: bool = eqx.field(static=True)
    weights: frozenset[int] = eqx.field(static=True)
    last: frozenset[int] | None = eqx.field(static=True)
    directions: Float[Array, ""]

    @property
    def rank(self) -> int:
        """Number of axes of positions."""
        return (self.nngp.ndim - 2) // (2 if self.pairs else 1)

    def _map(self, change: Callable[[Array, int], Array], **flags: Any) -> "WideLayer":
        """Apply ``change(kernel, leading axes)`` to K, T and the samples' own K."""
        one, two = (change(k, 1) for k in self.own)
        return dataclasses.replace(
            self, nngp=change(self.nngp, 2), ntk=change(self.ntk, 2), own=(one, two), **flags
        )

    def _weighted(
        self,
        average: Callable[[Array, int], Array],
        weight_variance: float | jax.Array,
        bias_variance: float | jax.Array,
    ) -> "WideLayer":
        """Apply a layer of weights: a linear average over what each output sees, fresh weights and biases."""
        # every layer of weights is known by a number, so that branches that share weights are not added
        token = frozenset([next(_tokens)])
        grown = self._map(lambda k, lead: weight_variance * average(k, lead))
        nngp = grown.nngp + bias_variance
        return dataclasses.replace(
            grown,
            nngp=nngp,
            ntk=nngp + grown.ntk,
            own=tuple(k + bias_variance for k in grown.own),
            gaussian=True,
            weights=self.weights | token,
            last=token,
        )

    @checked
    def dense(self, weight_variance: Rate = 2.0, bias_variance: Rate = 0.0) -> "WideLayer":
        """Apply a dense layer, at every position the same.

        Args:
            weight_variance: sw2; weights have variance sw2 / fan-in.
            bias_variance: sb2.
        """
        return self._weighted(lambda k, lead: k, weight_variance, bias_variance)

    @checked
    def conv(
        self,
        window: tuple[Count, ...],
        *,
        stride: Count = 1,
        padding: Annotated[str, choice(*PADDING)] = "SAME",
        weight_variance: Rate = 2.0,
        bias_variance: Rate = 0.0,
    ) -> "WideLayer":
        """Apply a convolution.

        Args:
            window: its length along each axis of positions.
            stride: steps between outputs, along every axis.
            padding: "SAME" (with zeros), "VALID" or "CIRCULAR".
            weight_variance: sw2; weights have variance sw2 / (window x channels).
            bias_variance: sb2.
        """
        if len(window) != self.rank:
            raise ValueError(f"window must have one length for each of {self.rank} axes, got {window}")

        def average(kernel: Array, lead: int) -> Array:
            for axis, length in enumerate(window):
                # a window is a product of windows along each axis: means one after the other
                axes = [lead + axis] + ([lead + axis + self.rank] if self.pairs else [])
                kernel = _window_mean(kernel, axes, length, stride, padding)
            return kernel

        return self._weighted(average, weight_variance, bias_variance)

    @checked
    def activation(self, activation: AnyActivation) -> "WideLayer":
        """Apply an activation, by its closed form or by quadrature (``dual_activation``)."""
        self._need_gaussian("activation")
        dual = dual_activation(activation)
        # E[phi(u) phi(v)] needs the variances of u and v, and their covariance, at every pair of positions
        one, two = (self._variances(k) for k in self.own)
        first, second = self._aligned(one, two)
        pair = dual(first, second, self.nngp)
        own = tuple(dual(*self._within(v, k), k).value for k, v in zip(self.own, (one, two), strict=True))
        return dataclasses.replace(
            self, nngp=pair.value, ntk=self.ntk * pair.slope, own=own, gaussian=False, last=None
        )

    def flatten(self) -> "WideLayer":
        """Take all positions and features as the features of one layer, for a dense layer after it."""
        return self._map(lambda k, lead: _mean(self._diagonal(k, lead), lead), pairs=False, gaussian=False)

    def pool(self) -> "WideLayer":
        """Average over all positions; needs ``pairs=True``."""
        if not self.pairs:
            raise ValueError("pool needs covariances between positions: wide_inputs(..., pairs=True)")
        return self._map(_mean, pairs=False)

    @checked
    def layer_norm(self, epsilon: Rate = 0.0) -> "WideLayer":
        """Normalize the features of each sample, at each position; scale and shift are not trained."""
        self._need_gaussian("layer_norm")
        squares = [self._variances(k) + epsilon for k in self.own]
        for square in squares:
            _boundary.bounds("the variance of each sample, by which layer_norm divides,", square, above=0.0)
        one, two = (1 / jnp.sqrt(square) for square in squares)
        first, second = self._aligned(one, two)
        own = tuple(k * math.prod(self._within(v, k)) for k, v in zip(self.own, (one, two), strict=True))
        scale = first * second
        return dataclasses.replace(self, nngp=self.nngp * scale, ntk=self.ntk * scale, own=own)

    @checked
    def batch_norm(self, epsilon: Rate = 0.0) -> "WideLayer":
        """Normalize each feature over the batch x (and its positions), which is taken as infinite; z must be x.

        The batch is infinite if K, without its mean over the batch, is spread over many directions: mean and variance
        of a feature are then the same for all features but for O(1 / directions). The attribute ``directions`` of the
        result says how many there are; with fewer than about 20 the kernels are a rough guide. Scale and shift are not
        trained.
        """
        self._need_gaussian("batch_norm")
        if not self.square:
            raise ValueError("batch_norm needs the kernel of the batch with itself: leave z out")
        if self.rank and not self.pairs:
            raise ValueError("batch_norm needs covariances between positions: wide_inputs(..., pairs=True)")
        # the batch are all samples at all positions: axes of x on the left, of z = x on the right
        left = (0, *range(2, 2 + self.rank))
        right = (1, *range(2 + self.rank, 2 + 2 * self.rank))
        # P K P, with P = I - 11'/n over the axes of the batch
        centered = lambda k, axes: k - jnp.mean(k, axes, keepdims=True)
        nngp, ntk = (centered(centered(k, left), right) for k in (self.nngp, self.ntk))
        own = jnp.moveaxis(jnp.diagonal(nngp), -1, 0)
        variances = self._variances(own)
        # what is below this is the rounding of samples that are all the same
        rounding = 8 * float(jnp.finfo(own.dtype).eps) * jnp.mean(self._variances(self.own[0]))
        square = jnp.where(jnp.mean(variances) > rounding, jnp.mean(variances), 0.0) + epsilon
        _boundary.bounds("the variance over the batch, by which batch_norm divides,", square, above=0.0)
        factor = 1 / square
        # D = tr(P K P)^2 / tr((P K P)^2)
        spread = safe_divide(jnp.sum(variances) ** 2, jnp.sum(nngp**2))
        return dataclasses.replace(
            self,
            nngp=factor * nngp,
            ntk=factor * ntk,
            own=(factor * own, factor * own),
            directions=jnp.minimum(self.directions, spread),
        )

    def __add__(self, other: "WideLayer") -> "WideLayer":
        """Add the outputs of two branches, one of which ends in weights that the other does not contain."""
        if (
            not isinstance(other, WideLayer)
            or self.nngp.shape != other.nngp.shape
            or self.pairs != other.pairs
        ):
            raise ValueError("only layers at the same samples and positions can be added")
        # fresh last weights of mean zero make a branch uncorrelated with the other, whatever both have before
        free = lambda a, b: a.last is not None and a.last.isdisjoint(b.weights)
        if not (free(self, other) or free(other, self)):
            raise ValueError(
                "one of the branches must end in a dense layer or a convolution of its own: otherwise they are "
                "correlated, and their kernels do not add"
            )
        both = self.last | other.last if self.last is not None and other.last is not None else None
        return dataclasses.replace(
            self,
            nngp=self.nngp + other.nngp,
            ntk=self.ntk + other.ntk,
            own=tuple(a + b for a, b in zip(self.own, other.own, strict=True)),
            gaussian=self.gaussian and other.gaussian,
            weights=self.weights | other.weights,
            last=both,
            directions=jnp.minimum(self.directions, other.directions),
        )

    def _need_gaussian(self, layer: str) -> None:
        if not self.gaussian:
            raise ValueError(
                f"{layer} needs Gaussian features: it must follow a dense layer or a convolution"
            )

    def _diagonal(self, kernel: Array, lead: int) -> Array:
        """Return the entries at equal positions of x and z, (leading axes, positions)."""
        for _ in range(self.rank if self.pairs else 0):
            # The first axis of positions of x with that of z. The diagonal goes last, so that after d of them there are
            # rank - d axes of x, as many of z, and d diagonals: the next axis of z stays in one place from the end.
            kernel = jnp.diagonal(kernel, axis1=lead, axis2=kernel.ndim - self.rank)
        return kernel

    def _variances(self, own: Array) -> Array:
        """Return the variance at each position, (samples, positions)."""
        return self._diagonal(own, 1)

    def _aligned(self, one: Array, two: Array) -> tuple[Array, Array]:
        """Return values at (samples, positions) of x and z, broadcast to the shape of K."""
        shape = self.nngp.shape
        if self.pairs:
            first = one.reshape(one.shape[:1] + (1,) + one.shape[1:] + (1,) * self.rank)
            second = two.reshape((1,) + two.shape[:1] + (1,) * self.rank + two.shape[1:])
        else:
            first, second = one[:, None], two[None]
        return jnp.broadcast_to(first, shape), jnp.broadcast_to(second, shape)

    def _within(self, values: Array, own: Array) -> tuple[Array, Array]:
        """Return values at (samples, positions) at both positions of a sample's pairs with itself."""
        if not (self.pairs and self.rank):
            return values, values
        left = values.reshape(values.shape + (1,) * self.rank)
        right = values.reshape(values.shape[:1] + (1,) * self.rank + values.shape[1:])
        return jnp.broadcast_to(left, own.shape), jnp.broadcast_to(right, own.shape)


def _window_mean(kernel: Array, axes: list[int], length: int, stride: int, padding: str) -> Array:
    """Return the mean over a window that moves along all ``axes`` together; outside there are zeros."""
    size = kernel.shape[axes[0]]
    if padding == "VALID" and length > size:
        raise ValueError(f"window must not be longer than the {size} positions, got {length}")
    # as many zeros as a network with this padding has; "CIRCULAR" has entries from the other end in their place
    kind = "VALID" if padding == "VALID" else "SAME"
    (ends,) = jax.lax.padtype_to_pads((size,), (length,), (stride,), kind)
    edges = [ends if axis in axes else (0, 0) for axis in range(kernel.ndim)]
    parts = [jnp.pad(kernel, edges, mode="wrap" if padding == "CIRCULAR" else "constant")] * length
    reach = parts[0].shape[axes[0]] - length + 1
    for axis in axes:
        parts = [jax.lax.slice_in_dim(u, i, i + reach, stride, axis) for i, u in enumerate(parts)]
    return sum(parts[1:], parts[0]) / length


def _mean(kernel: Array, lead: int) -> Array:
    """Return the mean over all axes behind the leading ones."""
    return jnp.mean(kernel, axis=tuple(range(lead, kernel.ndim)))


@checked
def wide_inputs(
    x: Annotated[Float[ArrayLike, "T ... d"], INPUTS],
    z: Annotated[Float[ArrayLike, "S ... d"], INPUTS] | None = None,
    *,
    pairs: bool = False,
) -> WideLayer:
    """Return the inputs of an infinitely wide network as a ``WideLayer``, whose methods are the layers.

    ``dense``, ``conv``, ``activation``, ``flatten``, ``pool``, ``layer_norm``, ``batch_norm``, and ``+`` for residual
    branches. The attributes ``nngp`` and ``ntk`` of the last one are the kernels of the network.

    Args:
        x: inputs (T, d); or with positions, such as pixels, (T, P_1, .., channels).
        z: second inputs, or None for x.
        pairs: whether covariances between different positions are kept, as ``pool`` and ``batch_norm`` need it. Memory
            is T S positions^2 then, else T S positions.

    >>> import jax.numpy as jnp
    >>> x = jnp.array([[1.0, 0.0], [1.0, 1.0]])
    >>> two_layers = wide_inputs(x).dense().activation("relu").dense()
    >>> two_layers.ntk.round(4).tolist()
    [[2.0, 1.8183], [1.8183, 4.0]]
    >>> image = jnp.ones((1, 8, 8, 3))
    >>> h = wide_inputs(image, pairs=True).conv((3, 3))
    >>> h = h + h.activation("relu").conv((3, 3))
    >>> h.activation("relu").pool().dense().ntk.shape
    (1, 1)
    """
    first = jnp.asarray(x)
    second = first if z is None else jnp.asarray(z)
    if first.shape[1:] != second.shape[1:]:
        raise ValueError(f"z must have samples of shape {first.shape[1:]}, as x, got {second.shape[1:]}")
    rank, channels = first.ndim - 2, first.shape[-1]
    flat = lambda a: a.reshape(a.shape[0], math.prod(a.shape[1:-1]), channels)
    one, two, places = flat(first), flat(second), first.shape[1:-1]
    both = places + places
    if pairs:
        nngp = jnp.einsum("tpc,sqc->tspq", one, two)
        own = [jnp.einsum("tpc,tqc->tpq", a, a).reshape((-1, *both)) for a in (one, two)]
    else:
        nngp = jnp.einsum("tpc,spc->tsp", one, two)
        own = [jnp.sum(a**2, -1).reshape((-1, *places)) for a in (one, two)]
    nngp = nngp.reshape(nngp.shape[:2] + (both if pairs else places)) / channels
    return WideLayer(
        nngp=nngp,
        ntk=jnp.zeros_like(nngp),
        own=(own[0] / channels, own[1] / channels),
        pairs=pairs and rank > 0,
        square=z is None,
        gaussian=False,
        weights=frozenset(),
        last=None,
        directions=jnp.asarray(jnp.inf, nngp.dtype),
    )
