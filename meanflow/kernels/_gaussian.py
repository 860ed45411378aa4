"""Gaussian processes: what infinitely wide networks are before training, and after it by ``KernelFlow.ensemble``."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from meanflow import _boundary


class Gaussian(NamedTuple):
    """Mean and covariance of the outputs at test points.

    Attributes:
        mean: times.shape + (S,) or (S, k).
        covariance: times.shape + (S, S), the same for each of k outputs; between all S k of them, (S k, S k), if the
            kernel was (n, n, k, k).
    """

    mean: Float[Array, "..."]
    covariance: Float[Array, "..."]


def as_matrix(kernel: Float[Array, "T S ..."], outputs: int = 1) -> Float[Array, "Tk Sk"]:
    """Return a kernel (T, S), or (T, S, k, k), as a matrix; with ``outputs`` the first is repeated for each output."""
    if kernel.ndim == 2:
        return kernel if outputs == 1 else jnp.kron(kernel, jnp.eye(outputs, dtype=kernel.dtype))
    # outputs of sample 0 first, then those of sample 1: (T, S, k, k) to (T k, S k)
    rows, columns, size, _ = kernel.shape
    return jnp.transpose(kernel, (0, 2, 1, 3)).reshape(rows * size, columns * size)


def check_shapes(kernel: Array, y: Array) -> None:
    """Refuse a kernel that does not fit to the targets y, (n,) or (n, k)."""
    _boundary.shape("kernel", kernel, (y.shape[0],) * 2 + (y.shape[1:] * 2 if kernel.ndim == 4 else ()))
    if kernel.ndim == 4 and y.ndim != 2:
        raise ValueError(f"y must have shape (n, k) for a kernel (n, n, k, k), got {y.shape}")
