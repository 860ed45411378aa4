"""Training data as a measure: points with targets and weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import ArrayLike, Real

from meanflow import _boundary
from meanflow._module import Module
from meanflow._reuse import compiled_if_large

ANY_ARRAY = _boundary.array()  # real numbers of any shape, without NaN


class Dataset(Module):
    """Points x_j with targets y_j and weights q_j in E = sum_j q_j loss(f(x_j), y_j).

    Attributes:
        x: (n,) for univariate models or (n, d).
        y: (n,), or (n, k) for networks with k outputs. Class numbers are stored as floats of the precision of x.
        weights: (n,) q_j >= 0; default 1/n each (an average), ``"sum"`` means ones (a plain sum).
        is_sorted: whether x is known to be in ascending order; only what ``sorted`` returns is.

    Raises:
        ValueError: for NaN or infinite entries, unequal lengths, negative weights, no points.

    >>> import jax.numpy as jnp
    >>> Dataset(jnp.array([0.0, 1.0]), jnp.array([1.0, 2.0]), weights="sum").weights.tolist()
    [1.0, 1.0]
    """

    x: jax.Array
    y: jax.Array
    weights: jax.Array
    is_sorted: ClassVar[bool] = False

    def __init__(
        self,
        x: Real[ArrayLike, "n *d"] | Sequence,
        y: Real[ArrayLike, "n *k"] | Sequence,
        weights: Real[ArrayLike, " n"] | Sequence | str | None = None,
    ) -> None:
        inputs, targets = ANY_ARRAY("x", x), ANY_ARRAY("y", y)
        if not jnp.issubdtype(jnp.asarray(y).dtype, jnp.floating):
            # whole numbers, such as classes, have no precision of their own
            targets = targets.astype(inputs.dtype)
        if inputs.ndim not in (1, 2) or inputs.shape[0] < 1:
            raise ValueError(f"x must have shape (n,) or (n, d) with n >= 1, got {inputs.shape}")
        count = inputs.shape[0]
        _boundary.shape("y", targets, (count,), (count, None))
        dtype = jnp.result_type(inputs, targets)
        if weights is None:
            shares = jnp.full((count,), 1.0 / count, dtype)
        elif isinstance(weights, str):
            _boundary.one_of("weights", weights, ("sum",))
            shares = jnp.ones((count,), dtype)
        else:
            shares = _boundary.array((count,), low=0.0)("weights", weights).astype(dtype)
            known = _boundary.concrete(shares)
            if known is not None and not known.any():
                raise ValueError("weights must not all be zero: nothing would be learned")
        self.x, self.y, self.weights = inputs, targets, shares

    @property
    def size(self) -> int:
        """The number of points n."""
        return self.y.shape[0]

    @property
    def real(self) -> jax.Array:
        """The number of points up to the last one of positive weight; what stands behind is padding."""
        return self.size - jnp.argmax(self.weights[::-1] > 0)

    def sorted(self) -> Dataset:
        """Return the same points with scalar inputs x in ascending order, so that fast forces need not sort them.

        Solvers do this once for a run. Do it yourself before a loop of your own that calls ``velocity``.

        >>> Dataset([2.0, 1.0], [0.0, 1.0]).sorted().y.tolist()
        [1.0, 0.0]
        """
        if self.is_sorted:
            return self
        if self.x.ndim != 1:
            raise ValueError(f"only scalar inputs x (n,) can be sorted, got x of shape {self.x.shape}")
        # a type of its own, not a flag among the arrays: programs are compiled for the one or the other
        order = jnp.argsort(self.x)
        return SortedDataset(self.x[order], self.y[order], self.weights[order])

    def pad(self, size: int) -> Dataset:
        """Append copies of the last point with weight zero until there are ``size``; they change no energy or flow.

        >>> Dataset([1.0, 2.0], [0.0, 1.0]).pad(3).weights.tolist()
        [0.5, 0.5, 0.0]
        """
        if not self.size:
            raise ValueError(
                "pad needs samples, of which the last one is repeated, got a population without any"
            )
        extra = _boundary.whole("size", size, self.size, _boundary.MOST) - self.size
        grow = lambda u: jnp.concatenate([u, jnp.broadcast_to(u[-1:], (extra, *u.shape[1:]))])
        weights = jnp.concatenate([self.weights, jnp.zeros((extra,), self.weights.dtype)])
        return Dataset(grow(self.x), grow(self.y), weights)

    def moments(self) -> tuple[jax.Array, jax.Array]:
        """Return the mean (d,) and covariance (d, d) of x under the normalised weights (1/N, not 1/(N-1)).

        A column whose entries of positive weight are all equal has variance 0 exactly.
        """
        _boundary.shape("x", self.x, (None, None))
        return jax.device_put(_moments(self.x, self.weights))

    def take(self, index: jax.Array) -> Dataset:
        """Return the minibatch x[index], reweighted to keep the total weight: q_j * (sum q) / (sum of chosen q)."""
        index = _boundary.indices("index", index, self.size)
        # the loss of a batch is then as large as that of all samples, and so is the step it allows
        chosen = self.weights[index]
        scale = jnp.sum(self.weights) / jnp.sum(chosen)
        return Dataset(self.x[index], self.y[index], chosen * scale)


@compiled_if_large
def _moments(xp: Any, x: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return mean and covariance; ``xp`` is numpy or jax.numpy."""
    share = (weights / weights.sum()).astype(x.dtype)
    mean = x[xp.argmax(weights > 0)]
    # Relative to a sample constant columns are 0, and others lose no digits to a mean that is much larger than the
    # deviation. A sum of many terms has few digits itself, so that the mean is corrected by the mean of what is left.
    centred = x - mean[None, :]
    for _ in range(3):
        error = share @ centred
        mean, centred = mean + error, centred - error[None, :]
    return mean, centred.T @ (share[:, None] * centred)


class SortedDataset(Dataset):
    """Points with scalar inputs in ascending order, as ``Dataset.sorted`` returns them."""

    is_sorted: ClassVar[bool] = True


DATA = _boundary.declare(Dataset, _boundary.instance(Dataset, hint="build one with meanflow.Dataset(x, y)"))
