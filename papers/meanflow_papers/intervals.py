"""Intervals over seeds: what a few runs can say about a mean, a difference or a ratio."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float
from scipy.stats import t


def mean(values: Float[np.ndarray, "seeds"]) -> Float[np.ndarray, "3"]:
    """Return (mean, low, high) of independent values: Student's 95 % interval; one value has the ends NaN.

    >>> [round(float(v), 2) for v in mean(np.array([1.0, 2.0, 3.0]))]
    [2.0, -0.48, 4.48]
    """
    if len(values) < 2:
        return np.array([values.mean(), np.nan, np.nan])
    half = t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return values.mean() + np.array([0.0, -half, half])


def ratio(values: Float[np.ndarray, "seeds"], base: Float[np.ndarray, "seeds"]) -> Float[np.ndarray, "3"]:
    """Return (geometric mean, low, high) of values over base, seeds as pairs: ``mean`` of the logarithms."""
    return np.exp(mean(np.log(values / base)))


def difference(values: Float[np.ndarray, "seeds"], base: Float[np.ndarray, "seeds"]) -> tuple[float, float]:
    """Return the mean difference of paired runs and half the width of its 95 % interval."""
    middle, _, high = mean(values - base)
    return float(middle), float(high - middle)


def equivalence(values: Float[np.ndarray, "seeds"], base: Float[np.ndarray, "seeds"]) -> float:
    """Return the least bound within which two paired methods are equal by two one-sided tests at 5 %."""
    gap = values - base
    half = t.ppf(0.95, len(gap) - 1) * gap.std(ddof=1) / np.sqrt(len(gap))
    return float(abs(gap.mean()) + half)


def bootstrap(
    statistic: Callable[..., float],
    *samples: Float[np.ndarray, "..."],
    draws: int = 4000,
    level: float = 0.95,
) -> Float[np.ndarray, "3"]:
    """Return (value, low, high): a statistic of independent samples, and its bootstrap interval of a level."""
    rng = np.random.default_rng(0)
    again = [rng.choice(s, (draws, len(s))) for s in samples]
    low, high = np.quantile(
        [statistic(*rows) for rows in zip(*again, strict=True)], ((1 - level) / 2, (1 + level) / 2)
    )
    return np.array([statistic(*samples), low, high])


def told(row: Float[np.ndarray, "3"], digits: int = 2) -> str:
    """Return a value with its interval as text.

    >>> told(np.array([0.5, 0.25, 1.0]))
    '0.50 [0.25, 1.00]'
    """
    middle, low, high = (f"{float(v):.{digits}f}" for v in row)
    return f"{middle} [{low}, {high}]"
