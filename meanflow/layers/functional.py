"""Normalisation of a batch as pure functions of arrays: recenter, rescale.

Batches are (n, ..., features) arrays as in flax; ``axis`` lists the axes that are *averaged over*
(the batch axis by default). Moments are population moments (1/n) and the variance is computed in two
passes, so that float32 data of large mean keep their spread.
"""

import jax
import jax.numpy as jnp

from meanflow import _checks

Axes = int | tuple[int, ...]


def recenter(x: jax.Array, axis: Axes = 0) -> jax.Array:
    """x minus its mean over ``axis``."""
    return x - jnp.mean(x, axis=axis, keepdims=True)


def spread(x: jax.Array, axis: Axes = 0, mode: str = "std", epsilon: float = 0.0) -> jax.Array:
    """sqrt(second moment + epsilon) over ``axis``, kept as axes of length 1.

    ``mode="std"`` takes the moment about the mean, ``"rms"`` about zero. They agree on recentred batches.
    """
    _checks.one_of("mode", mode, ("std", "rms"))
    centred = recenter(x, axis) if mode == "std" else x
    return jnp.sqrt(jnp.mean(jnp.square(centred), axis=axis, keepdims=True) + epsilon)


def rescale(x: jax.Array, axis: Axes = 0, mode: str = "std", epsilon: float = 0.0) -> jax.Array:
    """x divided by its ``spread`` over ``axis``."""
    return x / spread(x, axis, mode, epsilon)
