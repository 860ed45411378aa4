"""One neuron for every sample: the initialization proposed at the end of "BN decomposed", for flax."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import ArrayLike, Float

from meanflow import _checks
from meanflow.layers._initializers import Initializer


def one_neuron_per_sample(
    samples: Float[ArrayLike, "n k"], *, margin: float = 1e-6, relax: float = 0.0
) -> tuple[Initializer, Initializer]:
    """Return initializers for kernel and bias of a ReLU layer whose neuron i fires for sample i only.

    With t_i = max_{j != i} x_i . x_j and s_i = 1 / (1 - t_i), neuron i has weights s_i x_i and bias -s_i t_i. It
    answers 1 to its own sample and 0 to every other one, so the outputs of the samples are orthonormal. On new
    inputs such neurons are mostly silent.

    Args:
        samples: distinct samples of unit length; otherwise x_i . x_i need not be the largest product.
        margin: raises each threshold t_i by this share of 1 - t_i, so that rounding errors cannot reach it.
        relax: moves each threshold by this share from the largest product t_i towards the median product. Values from
            0.25 to 0.5 keep the outputs within a few degrees of orthogonal, and most new inputs activate something.

    Returns:
        Initializers ``kernel_init`` and ``bias_init`` for a layer with kernel (k, n) and bias (n,). They raise
        ValueError for any other shape.

    >>> import jax
    >>> from flax import nnx
    >>> x = jax.random.normal(jax.random.key(0), (5, 3))
    >>> x = x / jax.numpy.linalg.norm(x, axis=1, keepdims=True)
    >>> kernel_init, bias_init = one_neuron_per_sample(x)
    >>> layer = nnx.Linear(3, 5, kernel_init=kernel_init, bias_init=bias_init, rngs=nnx.Rngs(0))
    >>> jax.numpy.abs(nnx.relu(layer(x)) - jax.numpy.eye(5)).max() < 1e-4
    Array(True, dtype=bool)
    """
    _checks.shape("samples", samples, (None, None))
    _checks.finite("samples", samples)
    _checks.at_least("margin", margin, 0.0)
    _checks.at_least("relax", relax, 0.0)
    x = np.asarray(samples, float)
    n, k = x.shape
    if n < 2:
        raise ValueError(f"samples must hold at least 2 rows, got {n}")
    length = np.linalg.norm(x, axis=1)
    if np.max(np.abs(length - 1)) > 1e-4:
        raise ValueError(f"samples must have unit length, got lengths from {length.min()} to {length.max()}")
    products = x @ x.T
    off = products[~np.eye(n, dtype=bool)].reshape(n, n - 1)
    top = off.max(1)
    if np.any(top > 1 - 1e-6):
        raise ValueError(f"samples must be distinct, got a pair with product {top.max()}")
    slope = 1 / (1 - top)
    threshold = top + margin * (1 - top) + relax * (np.median(off, axis=1) - top)
    return _constant((slope[:, None] * x).T), _constant(-slope * threshold)


def _constant(values: np.ndarray) -> Initializer:
    """Return an initializer that ignores its key and gives these values."""

    def init(
        key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32, **_: object
    ) -> jax.Array:
        if tuple(shape) != values.shape:
            raise ValueError(f"shape must be {values.shape} for these samples, got {tuple(shape)}")
        return jnp.asarray(values, dtype)

    return init
