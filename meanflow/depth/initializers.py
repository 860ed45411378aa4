"""One neuron for every sample: the initialisation proposed at the end of "BN decomposed", for flax."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meanflow import _checks

Initializer = Callable[..., jax.Array]


def one_neuron_per_sample(
    samples: jax.Array, *, margin: float = 1e-6, relax: float = 0.0
) -> tuple[Initializer, Initializer]:
    """Kernel and bias initializers of a ReLU layer whose neuron i fires for sample i only.

    w_i = s_i x_i, b_i = -s_i max_{j != i} x_i . x_j, s_i = 1 / (1 - max): neuron i answers 1 to its sample
    and 0 to every other, so the codes of the samples are orthonormal. On new inputs such neurons are mostly
    silent.

    Args:
        samples: (n, k), of unit length (else x_i . x_i need not be the largest product) and distinct.
        margin: raises each threshold by this share of its gap, so that rounding cannot reach it.
        relax: moves each threshold by this share from the largest product towards the median one: 0.25 to 0.5
            keep the codes within a few degrees of orthogonal and let most new inputs activate something.

    Returns:
        (kernel_init, bias_init) for a layer with kernel (k, n) and bias (n,); any other shape raises
        ValueError.

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
    kernel, bias = (slope[:, None] * x).T, -slope * threshold

    def given(values: np.ndarray) -> Initializer:
        def init(key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32, **_: Any) -> jax.Array:
            if tuple(shape) != values.shape:
                raise ValueError(f"shape must be {values.shape} for these samples, got {tuple(shape)}")
            return jnp.asarray(values, dtype)

        return init

    return given(kernel), given(bias)
