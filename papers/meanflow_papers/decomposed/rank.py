"""ReLU raises the rank of a batch: gamma(X) of "BN decomposed".

The hyperplanes {w : w . x_i = 0} of the samples cut the space of neurons w into cells, and gamma(X) is the least volume
of a cell (``cells``). Each further neuron raises the rank with probability at least gamma, *given the
past*, so that d neurons miss rank n with probability at most P(Binomial(d, gamma) < n).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import ArrayLike, Shaped

from meanflow_papers.decomposed.cells import cells, distinct_lines, general_position_count


class Gamma(NamedTuple):
    """The least positive volume of a cell, as ``gamma`` finds it.

    Attributes:
        value: the exact volume; or under Monte Carlo the least observed frequency, which bounds nothing, because cells
            may have been missed.
        low: lower end of the confidence interval, 0 while cells may have been missed. Equal to ``value`` if exact.
        high: upper end of the confidence interval. Equal to ``value`` if exact.
        cells: number of cells that were found.
        total: sum of their volumes, which is 1 if the enumeration missed none.
    """

    value: float
    low: float
    high: float
    cells: int
    total: float


def gamma(
    x: Shaped[ArrayLike, "n k"],
    *,
    recenter: bool = False,
    method: Literal["exact", "monte_carlo"] = "exact",
    key: jax.Array | None = None,
    samples: int = 100_000,
    confidence: float = 0.95,
) -> Gamma:
    """Return gamma(X) of Definition 1 of "BN decomposed", the least probability of a sign pattern of the batch.

    A random neuron w ~ N(0, I) sees the signs of w . x_i. Each pattern of signs that can occur is a cell, and gamma is
    the least probability among them. The function runs on the host.

    Args:
        x: batch.
        recenter: subtract the mean of the batch first, as in Corollary 4.
        method: ``"exact"`` enumerates the cells, for any n in the plane and otherwise up to rank r = 6 and
            C(n, r-1) 2^r = 200 000. ``"monte_carlo"`` counts the sign patterns of random neurons.
        key: PRNG key for Monte Carlo.
        samples: number of neurons drawn by Monte Carlo.
        confidence: level of the Monte Carlo interval. It is an interval for gamma itself: Clopper-Pearson for each
            cell, with a union bound over the largest possible number of cells.

    >>> import jax.numpy as jnp
    >>> angle = 2 * jnp.pi * jnp.arange(5) / 5
    >>> pentagon = jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)
    >>> found = gamma(pentagon)
    >>> found.cells, round(found.value, 6)                    # 2n cells and 1/(2n), not n and 1/n
    (10, 0.1)
    """
    batch = np.asarray(x, float)
    batch = batch / (
        np.abs(batch).max() or 1.0
    )  # only directions count, and squares must not leave the range
    if recenter:
        batch = batch - batch.mean(0)
    if method == "exact":
        found = cells(batch)
        value = float(found.volumes.min())
        return Gamma(value, value, value, len(found.volumes), float(found.volumes.sum()))
    if method != "monte_carlo" or key is None:
        raise ValueError(f"method must be 'exact', or 'monte_carlo' with a key, got {method!r} and key {key}")
    from scipy.stats import beta

    lines = distinct_lines(batch)
    draws = np.asarray(jax.random.normal(key, (samples, lines.shape[1])))
    # a sign pattern becomes a row of bytes, of which numpy finds the distinct ones
    packed = np.packbits(draws @ lines.T > 0, axis=1)
    count = np.unique(packed, axis=0, return_counts=True)[1]
    possible = general_position_count(len(lines), int(np.linalg.matrix_rank(lines))) if len(lines) else 1
    # all two-sided Clopper-Pearson intervals hold at once with this share of the error for each end
    tail = (1 - confidence) / (2 * possible)
    # a cell that was never hit may be arbitrarily small: there is a lower end only once all cells have been seen
    low = float(beta.ppf(tail, count, samples - count + 1).min()) if len(count) == possible else 0.0
    over = np.where(count < samples, beta.ppf(1 - tail, count + 1, np.maximum(samples - count, 1)), 1.0)
    return Gamma(float(np.min(count)) / samples, low, float(over.min()), len(count), 1.0)
