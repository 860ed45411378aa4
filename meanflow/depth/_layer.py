"""One random layer: z = x W, then any of recenter, rescale and a nonlinearity.

A batch is an array ``(n, features)`` as in flax, so W is (fan_in, fan_out); "BN decomposed" writes the transpose.
Moments are population moments over the batch.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from meanflow import _checks, activations
from meanflow._checks import choice, either, flag, function, optional
from meanflow.activations import ACTIVATION, Activation
from meanflow.layers import functional
from meanflow.layers._initializers import Initializer

VARIANCE = {"gaussian": 1.0, "he": 2.0}
"""fan_in times the variance of the entries, for the laws with independent Gaussian entries."""

WEIGHTS: dict[str, Initializer] = {
    "gaussian": jax.nn.initializers.variance_scaling(VARIANCE["gaussian"], "fan_in", "normal"),
    "he": jax.nn.initializers.variance_scaling(VARIANCE["he"], "fan_in", "normal"),
    "orthogonal": jax.nn.initializers.orthogonal(),
    "uniform": jax.nn.initializers.variance_scaling(1.0 / 3.0, "fan_in", "uniform"),  # +-1/sqrt(fan_in)
}
"""The laws of the weights that are known by name."""


@_checks.constructor(
    recenter=flag,
    rescale=optional(choice("std", "rms")),
    activation=ACTIVATION,
    weights=either(choice(*WEIGHTS), function),
)
class Layer(eqx.Module):
    """One random layer of a deep network: weights, recenter, rescale, nonlinearity. Batch norm is ``rescale="std"``.

    Attributes:
        recenter: whether to subtract the mean over the batch.
        rescale: None for no rescaling; ``"std"`` divides each feature by its deviation from the mean, equation (2) of
            "BN decomposed"; ``"rms"`` by its deviation from zero. The two agree after recentering; without it, only
            ``"rms"`` gives the published 60 degrees.
        activation: a name in ``meanflow.activations`` or a function.
        weights: ``"he"`` N(0, 2/fan_in), ``"gaussian"`` N(0, 1/fan_in), ``"orthogonal"``, ``"uniform"``
            (+-1/sqrt(fan_in)), or any initializer (key, (fan_in, fan_out), dtype) -> array.

    >>> import meanflow as mf
    >>> mf.depth.Layer(rescale="std").recenter          # recenter + rescale + ReLU with He weights
    True
    """

    recenter: bool = eqx.field(static=True, default=True)
    rescale: str | None = eqx.field(static=True, default=None)
    activation: str | Activation = eqx.field(static=True, default="relu")
    weights: str | Initializer = eqx.field(static=True, default="he")


RECENTERED = Layer()
"""Recenter + ReLU with He weights, the layer that "BN decomposed" is about."""

LAYER = _checks.instance(Layer, hint="for instance depth.Layer(rescale='std')")


def activated(layer: Layer, z: Float[Array, "n d"]) -> Float[Array, "n d"]:
    """Turn the pre-activations z of a layer into the next batch."""
    if layer.recenter:
        z = functional.recenter(z)
    if layer.rescale is not None:
        z = functional.rescale(z, 0, layer.rescale)
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
