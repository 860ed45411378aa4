"""A batch goes through a random deep network, layer by layer, in one compiled scan.

One layer is z = x W, then any of recenter, rescale and a nonlinearity. A batch is an array ``(n, features)`` as in
flax, so W is (fan_in, fan_out); "BN decomposed" writes the transpose. Moments are population moments over the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Annotated, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Key, PyTree, Shaped

from meanflow import _boundary, activations
from meanflow._boundary import Count, array, checked, choice, either, function, instance, prng_keys
from meanflow._numerics import magnitude
from meanflow._observable import FunctionOfState, Observable, Values
from meanflow._reuse import canonical, compiled
from meanflow.activations import AnyActivation
from meanflow.depth._gram import LayerRecord
from meanflow.layers import functional
from meanflow.layers._standardize import Initializer

VARIANCE = {"gaussian": 1.0, "he": 2.0}
"""fan_in times the variance of the entries, for the laws with independent Gaussian entries."""

WEIGHTS: dict[str, Initializer] = {
    "gaussian": jax.nn.initializers.variance_scaling(VARIANCE["gaussian"], "fan_in", "normal"),
    "he": jax.nn.initializers.variance_scaling(VARIANCE["he"], "fan_in", "normal"),
    "orthogonal": jax.nn.initializers.orthogonal(),
    "uniform": jax.nn.initializers.variance_scaling(1.0 / 3.0, "fan_in", "uniform"),  # +-1/sqrt(fan_in)
}
"""The laws of the weights that are known by name."""


@checked
class Layer(eqx.Module):
    """One random layer of a deep network: weights, recenter, rescale, nonlinearity. Batch norm is ``rescale="std"``.

    Attributes:
        recenter: whether to subtract the mean over the batch.
        rescale: None for no rescaling; ``"std"`` divides each feature by its deviation from the mean, equation (2) of
            "BN decomposed"; ``"rms"`` by its deviation from zero. The two agree after recentering; without it, only
            ``"rms"`` gives the published 60 degrees.
        activation: a name in ``meanflow.activations`` or a function.
        weights: ``"he"`` N(0, 2/fan_in), ``"gaussian"`` N(0, 1/fan_in), ``"orthogonal"``, ``"uniform"``
            (+-1/sqrt(fan_in)), or any initializer (key, (fan_in, fan_out), dtype) -> array. Batches of fewer samples
            than neurons go through the first two by the exact law of x W, without weights, which is cheaper, but
            has no derivative in x where the batch loses rank; an initializer always draws weights.

    >>> import meanflow as mf
    >>> mf.depth.Layer(rescale="std").recenter          # recenter + rescale + ReLU with He weights
    True
    """

    recenter: bool = eqx.field(static=True, default=True)
    rescale: Annotated[str, choice("std", "rms")] | None = eqx.field(static=True, default=None)
    activation: AnyActivation = eqx.field(static=True, default="relu")
    weights: Annotated[str | Initializer, either(choice(*WEIGHTS), function)] = eqx.field(
        static=True, default="he"
    )


RECENTERED = Layer()
"""Recenter + ReLU with He weights, the layer that "BN decomposed" is about."""

_boundary.declare(Layer, instance(Layer, hint="for instance depth.Layer(rescale='std')"))


def activated(layer: Layer, z: Float[Array, "n d"]) -> Float[Array, "n d"]:
    """Turn the pre-activations z of a layer into the next batch."""
    if layer.recenter:
        z = functional.recenter(z)
    if layer.rescale is not None:
        # a factor of a feature has no say, but its square could be out of range
        z = functional.rescale(z / magnitude(z, 0, keepdims=True), 0, layer.rescale)
    return activations.resolve(layer.activation)(z)


def drawn_by_law(
    key: Key[Array, ""], x: Float[Array, "n fan_in"], width: int, variance: float
) -> Float[Array, "n {width}"]:
    """Draw z = x W, where W has independent N(0, variance / fan_in) entries, without drawing W.

    Let x' = Q R. Then z = R' (Q' W), and Q' W again has independent N(0, variance / fan_in) entries. So z has exactly
    the law of x W, given x, but needs only min(n, fan_in) rows of normal numbers instead of fan_in rows. That takes
    O(n^2 (fan_in + width)) operations instead of O(n fan_in width), and no rank is lost, because no Gram matrix is
    formed.
    """
    fan_in = x.shape[1]
    # x' is (fan_in, n): its factor R is (n, n) for wide inputs; narrow ones are small enough as they are
    factor = jnp.linalg.qr(x.T, mode="r") if fan_in > x.shape[0] else x.T
    normal = jax.random.normal(key, (factor.shape[0], width), x.dtype)
    return (factor.T @ normal) * jnp.sqrt(variance / fan_in).astype(x.dtype)


class Propagation(eqx.Module):
    """What ``propagate`` recorded. With several networks, every array has a leading axis of that length.

    Attributes:
        layers: the observations, stacked along an axis of length depth + 1; row 0 is the input. This is a
            ``LayerRecord`` (``gram``, ``pair_angles``, ``rank`` and so on) unless ``observe`` was given.
        log_scale: logarithm of the factor that has been divided out up to each layer: the true batch is
            exp(log_scale) times the observed one. All 0 unless ``renormalize`` was set.
        final: the last batch.
    """

    layers: PyTree[Array]
    log_scale: Float[Array, "*networks layers"]
    final: Float[Array, "*networks n width"]


class _Network(NamedTuple):
    """The arguments of ``propagate`` that are compiled into its program; hashable."""

    widths: tuple[int, ...]
    layer: Layer
    by_law: bool
    renormalize: bool

    def preactivations(self, key: jax.Array, x: jax.Array, width: int) -> jax.Array:
        """Draw z = x W for the next layer."""
        weights = self.layer.weights
        if self.by_law:
            return drawn_by_law(key, x, width, VARIANCE[weights])  # type: ignore[index]
        shape = (x.shape[1], width)
        drawn = (WEIGHTS[weights] if isinstance(weights, str) else weights)(key, shape, x.dtype)
        _boundary.shape("what layer.weights returns", drawn, shape)
        return x @ drawn

    def scaled(self, x: jax.Array, log_scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Divide a batch by the root mean square length of its samples, if the network renormalizes."""
        if not self.renormalize:
            return x, log_scale
        top = magnitude(x)
        size = jnp.sqrt(jnp.mean(jnp.sum(jnp.square(x / top), axis=1)))
        size = jnp.where(size > 0, size, 1.0)
        return x / top / size, log_scale + jnp.log(top) + jnp.log(size)


def _one(network: _Network, observe: Observable, key: jax.Array, x: jax.Array) -> Propagation:
    """Send one batch through one network."""
    carry = network.scaled(x, jnp.zeros((), x.dtype))
    memory = observe.begin(None, carry[0])
    seen = lambda carry: (observe.measure(None, carry[0], memory), carry[1])

    def layer(width: int, carry: tuple, key: jax.Array) -> tuple[tuple, tuple]:
        x, log_scale = carry
        z = network.preactivations(key, x, width)
        carry = network.scaled(activated(network.layer, z), log_scale)
        return carry, seen(carry)

    keys = jax.random.split(key, len(network.widths))
    records = [jax.tree.map(lambda v: v[None], seen(carry))]
    start = 0
    # one scan for each run of equal widths; the first layer of a run stands alone, since it changes the shape
    for width, run in groupby(network.widths):
        stop = start + len(list(run))
        carry, record = layer(width, carry, keys[start])
        records.append(jax.tree.map(lambda v: v[None], record))
        if stop > start + 1:
            carry, block = jax.lax.scan(partial(layer, width), carry, keys[start + 1 : stop])
            records.append(block)
        start = stop
    shapes = {str(jax.tree.map(lambda v: v.shape[1:], record)) for record in records}
    if len(shapes) > 1:
        raise ValueError(f"observe must return shapes that do not depend on the width, got {sorted(shapes)}")
    layers, log_scale = jax.tree.map(lambda *parts: jnp.concatenate(parts), *records)
    return Propagation(layers, log_scale, carry[0])


@compiled
def _many(
    keys: jax.Array, x: jax.Array, network: _Network, observe: Observable, chunk: int | None
) -> Propagation:
    """Run one network, or one for each key."""
    one = partial(_one, network, observe)
    if keys.ndim == 0:
        return one(keys, x)
    run = (lambda key: one(key, x)) if x.ndim == 2 else (lambda pair: one(*pair))
    return jax.lax.map(run, keys if x.ndim == 2 else (keys, x), batch_size=chunk)


def need_variation(
    name: str, layer: Layer, deviations: np.ndarray | None, lengths: np.ndarray | None
) -> None:
    """Refuse a batch of which a layer that recenters or rescales leaves nothing; None for batches that are traced."""
    if deviations is not None and (layer.recenter or layer.rescale == "std") and not deviations.any(-1).all():
        raise ValueError(
            f"{name} must hold samples that differ, as {layer} subtracts or divides by their mean, got none"
        )
    if lengths is not None and layer.rescale is not None and not lengths.any(-1).all():
        raise ValueError(
            f"{name} must hold a sample that is not zero, as {layer} divides by their size, got none"
        )


@checked
def propagate(
    key: Annotated[Key[Array, "*networks"], prng_keys],
    x: Annotated[Shaped[ArrayLike, "*batches n k"], array((None, None), (None, None, None), least=1)],
    widths: Sequence[Count],
    layer: Layer = RECENTERED,
    *,
    renormalize: bool = False,
    observe: Observable | Callable[[jax.Array], Values] = LayerRecord,
    chunk: Count | None = None,
) -> Propagation:
    """Send a batch through a random network and record what it looks like at every layer.

    Args:
        key: one PRNG key, or an array of keys (s,) for s independent networks.
        x: batch (n, k), which all networks share; or (s, n, k) with a batch for each network.
        widths: width of every layer; its length is the depth. Equal neighbors share one scan, so the compile time
            grows with the number of *changes* of the width only.
        layer: what every layer does, a ``Layer``; by default recenter + ReLU with He weights.
        renormalize: divide the batch by the root mean square length of its samples after each layer, and record the
            logarithm. Without rescaling, lengths decay geometrically. The angles of a positively homogeneous network
            are not affected.
        observe: function of a batch (n, d) that returns an array, or a pytree of arrays, whose shapes do not depend on
            d; or an ``Observable``, whose states are batches. It is called on the input and after each layer.
        chunk: number of networks that run side by side (vmap); the others follow one chunk after the other, so memory
            is O(chunk (n width + width^2)), or O(chunk n width) without weights. None runs one network at a time.

    Returns:
        A ``Propagation``: the observations of all layers, scales and the last batch. There is one compiled program
        for each set of static arguments and shapes.

    >>> import jax, meanflow as mf
    >>> x = jax.random.normal(jax.random.key(0), (10, 50))
    >>> run = mf.depth.propagate(jax.random.key(1), x, [512] * 30, mf.depth.Layer(rescale="std"))
    >>> bool(abs(run.layers.pair_angles[-1].mean() - 74.65) < 2)      # degrees, not 90
    True
    """
    batch = jnp.asarray(x)
    if batch.ndim == 3 and batch.shape[:1] != key.shape:
        raise ValueError(
            f"x must be (n, k), or (s, n, k) with s keys; got {batch.shape} and keys {key.shape}"
        )
    if 0 in batch.shape[-2:]:
        raise ValueError(f"x must hold at least one sample and one feature, got shape {batch.shape}")
    known = _boundary.concrete(batch)
    if known is not None:
        flat = known.reshape(*known.shape[:-2], -1)
        need_variation("x", layer, (known != known[..., :1, :]).reshape(flat.shape), flat)
    if not isinstance(observe, Observable):
        observe = FunctionOfState(canonical(observe))
    by_law = layer.weights in tuple(VARIANCE) and batch.shape[-2] < max(widths)
    return _many(key, batch, _Network(tuple(widths), layer, by_law, renormalize), observe, chunk)
