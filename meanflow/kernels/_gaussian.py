"""Gaussian processes: what infinitely wide networks are before training, and after it.

A wide network at random initialization is a Gaussian process whose covariance is the NNGP kernel. Bayesian inference
with it as the prior has a closed form, ``gp_posterior``; training by gradient descent has another one,
``KernelFlow.ensemble``.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from meanflow import _boundary
from meanflow._boundary import Rate, array, checked
from meanflow._matrices import kernel as kernel_kind

MATRIX = _boundary.array((None, None), (None, None, None, None))


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


@checked
def gp_posterior(
    kernel: Annotated[Float[ArrayLike, "n n ..."], kernel_kind],
    y: Annotated[Float[ArrayLike, "n ..."], array((None,), (None, None))],
    cross: Annotated[Float[ArrayLike, "S n ..."], MATRIX],
    test: Annotated[Float[ArrayLike, "S S ..."], kernel_kind],
    *,
    noise: Rate = 0.0,
) -> Gaussian:
    """Return the posterior of a Gaussian process of mean zero given y = f(x) + sqrt(noise) g.

    mean = K(z, x) (K + noise I)^-1 y,   covariance = K(z, z) - K(z, x) (K + noise I)^-1 K(x, z).

    Args:
        kernel: K(x, x), (n, n), or (n, n, k, k) for outputs that are correlated; ``nngp`` for an infinitely wide
            network of which only the last layer is trained, or ``infinite_ntk`` for kernel regression with error bars.
        y: targets (n,) or (n, k).
        cross: K(z, x), (S, n) or (S, n, k, k).
        test: K(z, z), (S, S) or (S, S, k, k).
        noise: variance of the noise. 0 needs a kernel that is not singular.

    Returns:
        ``Gaussian``, mean and covariance.

    >>> import jax.numpy as jnp
    >>> x, z = jnp.array([0.0]), jnp.array([0.0, 9.0])
    >>> k = lambda a, b: jnp.exp(-((a[:, None] - b[None, :]) ** 2))
    >>> mean, covariance = gp_posterior(k(x, x), jnp.ones(1), k(z, x), k(z, z))
    >>> mean.round(6).tolist(), jnp.diagonal(covariance).round(6).tolist()
    ([1.0, 0.0], [0.0, 1.0])
    """
    whole, target = jnp.asarray(kernel), jnp.asarray(y)
    check_shapes(whole, target)
    matrix, between, there = (as_matrix(jnp.asarray(u)) for u in (whole, cross, test))
    _boundary.shape("cross", between, (there.shape[0], matrix.shape[0]))
    columns = target.reshape(matrix.shape[0], -1)
    factor = jax.scipy.linalg.cho_factor(
        matrix + noise * jnp.eye(matrix.shape[0], dtype=matrix.dtype), lower=True
    )
    if (known := _boundary.concrete(factor[0])) is not None and not jnp.isfinite(known).all():
        raise ValueError(f"kernel + noise must be positive definite; noise = {noise} is too small")
    mean = between @ jax.scipy.linalg.cho_solve(factor, columns)
    shape = (jnp.shape(test)[0], *target.shape[1:])
    return Gaussian(mean.reshape(shape), there - between @ jax.scipy.linalg.cho_solve(factor, between.T))
