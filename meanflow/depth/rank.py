"""ReLU raises the rank of a batch: gamma(X), Theorem 3, Corollary 4, and the law of the neurons needed.

gamma(X) is the least volume of a cell (``meanflow.depth.cells``). Each further neuron raises the rank with
probability at least gamma, *given the past*: the waiting times y_1, ..., y_n are dominated by independent
geometric ones, though they are not independent themselves. Hence for d neurons and alpha = d gamma / n > 1

    P(rank < n) <= P(Binomial(d, gamma) < n) <= exp(-d KL(n/d || gamma))   (7a)
                <= exp(-n (alpha - 1 - log alpha))                         (7b)

and E[neurons to full rank] <= sum_t 1/gamma(X_t) <= n / gamma, X_t the first t samples.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meanflow import _checks
from meanflow.depth.cells import cells, distinct_lines, general_position_count


class Gamma(NamedTuple):
    """The least positive volume of a cell.

    Attributes:
        value: exact value, or the least observed frequency (which bounds nothing: cells may be missed).
        low: lower end of the confidence interval; 0 while cells may have been missed. Equal to value if
            exact.
        high: upper end; equal to value if exact.
        cells: number of cells found.
        total: sum of their volumes; a check that exact enumeration missed none.
    """

    value: float
    low: float
    high: float
    cells: int
    total: float


def gamma(
    x: jax.Array | np.ndarray,
    *,
    recenter: bool = False,
    method: str = "exact",
    key: jax.Array | None = None,
    samples: int = 100_000,
    confidence: float = 0.95,
) -> Gamma:
    """gamma(X) of Definition 1 for a batch x (n, k). On the host.

    Args:
        x: batch.
        recenter: of the batch minus its mean, as in Corollary 4.
        method: ``"exact"`` enumerates the cells (any n in the plane, C(n, r-1) 2^r up to 200 000 and rank r
            up to 6 otherwise); ``"monte_carlo"`` counts sign patterns of random neurons.
        key: for Monte Carlo.
        samples: neurons drawn.
        confidence: of the Monte Carlo interval; Clopper-Pearson for each cell, with a union bound over the
            largest possible number of cells. It is an interval for gamma itself.

    >>> import jax.numpy as jnp, meanflow as mf
    >>> angle = 2 * jnp.pi * jnp.arange(5) / 5
    >>> pentagon = jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)
    >>> found = mf.depth.gamma(pentagon)
    >>> found.cells, round(found.value, 6)                    # 2n cells and 1/(2n), not n and 1/n
    (10, 0.1)
    """
    _checks.one_of("method", method, ("exact", "monte_carlo"))
    batch = np.asarray(x, float)
    _checks.shape("x", batch, (None, None))
    _checks.finite("x", batch)
    if recenter:
        batch = batch - batch.mean(0)
    if method == "exact":
        found = cells(batch)
        value = float(found.volumes.min())
        return Gamma(value, value, value, len(found.volumes), float(found.volumes.sum()))
    if key is None:
        raise ValueError("key must be given for method='monte_carlo', got None")
    samples = _checks.whole("samples", samples, 1)
    from scipy.stats import beta

    lines, _ = distinct_lines(batch)
    draws = np.asarray(jax.random.normal(key, (samples, lines.shape[1])))
    packed = np.packbits(draws @ lines.T > 0, axis=1)
    count = np.unique(packed, axis=0, return_counts=True)[1]
    possible = general_position_count(len(lines), int(np.linalg.matrix_rank(lines))) if len(lines) else 1
    tail = (1 - confidence) / (2 * possible)
    low = float(beta.ppf(tail, count, samples - count + 1).min()) if len(count) == possible else 0.0
    over = np.where(count < samples, beta.ppf(1 - tail, count + 1, np.maximum(samples - count, 1)), 1.0)
    return Gamma(float(count.min()) / samples, low, float(over.min()), len(count), 1.0)


class RankBounds(NamedTuple):
    """Theorem 3: bounds of the probability that d neurons do not reach rank n, each implying the next.

    Attributes:
        expected: n / gamma >= E[neurons to full rank] (item 1).
        binomial: P(Binomial(d, gamma) < n), the exact dominating tail.
        chernoff: (7a); 1 where alpha <= 1.
        simple: (7b); 1 where alpha <= 1.
        alpha: d gamma / n.
    """

    expected: jax.Array
    binomial: jax.Array
    chernoff: jax.Array
    simple: jax.Array
    alpha: jax.Array


def rank_bounds(n: int, gamma: jax.Array | float, neurons: jax.Array | int) -> RankBounds:
    """The three tail bounds of Theorem 3 for n samples, no two collinear (elementwise in the rest).

    For Corollary 4 (recentring, batch norm) use gamma of the recentred batch; the recentred samples must be
    nonzero and not collinear. The paper asks for alpha > 2; alpha > 1 is enough, and below it (7a), (7b)
    are no bounds.

    >>> import meanflow as mf
    >>> bounds = mf.depth.rank_bounds(5, 0.1, 100)
    >>> bool(bounds.binomial <= bounds.chernoff <= bounds.simple < 1)
    True
    """
    n = _checks.whole("n", n, 1)
    _checks.at_least("gamma", gamma, 0.0, strict=True)
    _checks.at_least("neurons", neurons, 1)
    g, d = jnp.broadcast_arrays(jnp.asarray(gamma, float), jnp.asarray(neurons, float))
    alpha = d * g / n
    enough = d >= n
    binomial = jnp.where(
        enough, jax.scipy.special.betainc(jnp.where(enough, d - n + 1, 1.0), jnp.full_like(d, n), 1 - g), 1.0
    )
    far = alpha > 1
    a = jnp.where(far, alpha, 2.0)
    # (alpha/gamma - 1) log((alpha-gamma)/(1-gamma)) -> 0 as d -> n
    rest = jnp.where(d > n, (d / n - 1) * jnp.log(jnp.where(d > n, (a - g) / (1 - g), 1.0)), 0.0)
    return RankBounds(
        expected=n / g,
        binomial=binomial,
        chernoff=jnp.where(far, jnp.exp(-n * (-d / n * jnp.log(a) + rest)), 1.0),
        simple=jnp.where(far, jnp.exp(-n * (a - 1 - jnp.log(a))), 1.0),
        alpha=alpha,
    )


def expected_neurons_bound(x: jax.Array | np.ndarray, *, recenter: bool = False) -> float:
    """sum_t 1 / gamma(X_t) over the prefixes of a batch (n, k): sharper than n / gamma, same proof.

    With ``recenter`` the whole batch is recentred first (Corollary 4).
    """
    batch = np.asarray(x, float)
    batch = batch - batch.mean(0) if recenter else batch
    return float(sum(1 / gamma(batch[: t + 1]).value for t in range(len(batch))))


def limiting_rank(x: jax.Array | np.ndarray, *, recenter: bool = False, tolerance: float = 1e-9) -> int:
    """Rank of relu(W x) for sufficiently many Gaussian neurons, for any batch (n, k), exactly.

    The number of distinct lines spanned by nonzero samples, plus the rank of the directions of those lines
    that have samples on both sides: relu(t) and relu(-t) of one line span |t| and t, and the t's are linear.
    """
    batch = np.asarray(x, float)
    batch = batch - batch.mean(0) if recenter else batch
    lines, label = distinct_lines(batch, tolerance)
    both = [j for j in range(len(lines)) if (label == j + 1).any() and (label == -j - 1).any()]
    return len(lines) + (int(np.linalg.matrix_rank(lines[both], tol=tolerance)) if both else 0)


@partial(jax.jit, static_argnames=("target", "max_neurons"))
def _waiting(keys: jax.Array, x: jax.Array, target: int, max_neurons: int, rtol: float) -> jax.Array:
    n, k = x.shape

    def one(key: jax.Array) -> jax.Array:
        def add(state: tuple) -> tuple:
            basis, rank, d = state
            row = jax.nn.relu(x @ jax.random.normal(jax.random.fold_in(key, d), (k,), x.dtype))
            size = jnp.sqrt(jnp.sum(jnp.square(row)))
            row = row / jnp.where(size > 0, size, 1.0)
            rest = row - basis.T @ (basis @ row)
            rest = rest - basis.T @ (basis @ rest)  # once more: the first pass leaves rounding of the basis
            length = jnp.sqrt(jnp.sum(jnp.square(rest)))
            new = length > rtol
            basis = basis.at[rank].add(jnp.where(new, rest / jnp.where(new, length, 1.0), 0.0))
            return basis, rank + new, d + 1

        going = lambda state: (state[1] < target) & (state[2] < max_neurons)
        start = (jnp.zeros((n, n), x.dtype), jnp.zeros((), int), jnp.zeros((), int))
        _, rank, d = jax.lax.while_loop(going, add, start)
        return jnp.where(rank >= target, d, max_neurons + 1)

    return jax.vmap(one)(keys)


def neurons_to_full_rank(
    key: jax.Array,
    x: jax.Array,
    runs: int,
    *,
    recenter: bool = False,
    target: int | None = None,
    max_neurons: int = 10_000,
    rtol: float = 1e-9,
) -> jax.Array:
    """Sample of y, the number of random ReLU neurons that make the batch x (n, k) full rank.

    Args:
        key: PRNG key. Run j uses the same sequence of neurons whatever the batch: calling with x[:t] gives
            the times r_t of the proof of Theorem 3.
        x: batch.
        runs: sample size.
        recenter: recentre before ReLU (Corollary 4; rescaling changes no rank).
        target: rank to wait for, n by default.
        max_neurons: give up after so many and return max_neurons + 1.
        rtol: a neuron counts as new when its normalised outputs leave the span of the former by more than
            this.

    Returns:
        (runs,) integers. Cost O(n^2 + n k) a neuron.
    """
    x = jnp.asarray(x)
    _checks.shape("x", x, (None, None))
    _checks.finite("x", x)
    x = x - jnp.mean(x, axis=0, keepdims=True) if recenter else x
    target = x.shape[0] if target is None else _checks.whole("target", target, 1)
    return _waiting(jax.random.split(key, runs), x, target, max_neurons, rtol)
