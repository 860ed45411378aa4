"""Layers, inputs and the digits that the figures and theorems of paper 002 share."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from meanflow.depth import Layer
from meanflow.training.data import mnist

BATCH_NORM = Layer(recenter=True, rescale="std")
RMS_ONLY = Layer(recenter=False, rescale="rms")
STD_ONLY = Layer(recenter=False, rescale="std")


def digits() -> tuple[np.ndarray, np.ndarray]:
    """The 1797 handwritten digits of scikit-learn: images (1797, 64) in 0..16, and labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return data.data, data.target


def input_batches(
    source: str, key: jax.Array, seeds: int, n: int, folder: str | Path | None = None
) -> jax.Array:
    """(seeds, n, k): Gaussian inputs with k = 50, random digits, or random images of MNIST from a folder."""
    if source == "gaussian":
        return jax.random.normal(key, (seeds, n, 50))
    images = jnp.asarray(digits()[0] if folder is None else mnist(folder).flat().train_x, float)
    pick = jax.vmap(lambda k: jax.random.choice(k, len(images), (n,), replace=False))
    return images[pick(jax.random.split(key, seeds))]
