"""Training data as a measure: points with targets and weights."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from meanflow import _checks
from meanflow._checks import floating


class Dataset(eqx.Module):
    """Points x_j with targets y_j and weights q_j in E = sum_j q_j loss(f(x_j), y_j).

    Attributes:
        x: (n,) for univariate models or (n, d).
        y: (n,).
        weights: (n,) q_j >= 0; default 1/n each (an average), ``"sum"`` means ones (a plain sum).

    Raises:
        ValueError: for NaN or infinite entries, unequal lengths, negative weights, no points.

    >>> import jax.numpy as jnp
    >>> Dataset(jnp.array([0.0, 1.0]), jnp.array([1.0, 2.0]), weights="sum").weights.tolist()
    [1.0, 1.0]
    """

    x: jax.Array
    y: jax.Array
    weights: jax.Array

    def __init__(self, x: Any, y: Any, weights: Any = None) -> None:
        x, y = floating(x), floating(y)
        if x.ndim not in (1, 2) or x.shape[0] < 1:
            raise ValueError(f"x must have shape (n,) or (n, d) with n >= 1, got {x.shape}")
        _checks.shape("y", y, (x.shape[0],))
        _checks.finite("x", x)
        _checks.finite("y", y)
        dtype = jnp.result_type(x, y)
        if weights is None:
            weights = jnp.full(y.shape, 1.0 / y.shape[0], dtype)
        elif isinstance(weights, str):
            _checks.one_of("weights", weights, ("sum",))
            weights = jnp.ones(y.shape, dtype)
        weights = jnp.asarray(weights, dtype)
        _checks.shape("weights", weights, y.shape)
        _checks.finite("weights", weights)
        _checks.at_least("weights", weights, 0.0)
        self.x, self.y, self.weights = x, y, weights

    @property
    def size(self) -> int:
        """Number of points n."""
        return self.y.shape[0]

    @eqx.filter_jit
    def moments(self) -> tuple[jax.Array, jax.Array]:
        """Mean (d,) and covariance (d, d) of x under the normalised weights (1/N, not 1/(N-1))."""
        share = self.weights / jnp.sum(self.weights)
        mean = share @ self.x
        centred = self.x - mean[None, :]
        return mean, centred.T @ (share[:, None] * centred)

    def take(self, index: jax.Array) -> "Dataset":
        """The minibatch x[index], reweighted to keep the total weight: q_j * (sum q) / (sum of chosen q)."""
        chosen = self.weights[index]
        scale = jnp.sum(self.weights) / jnp.sum(chosen)
        return Dataset(self.x[index], self.y[index], chosen * scale)


DATA = _checks.instance(Dataset, hint="build one with meanflow.Dataset(x, y)")
