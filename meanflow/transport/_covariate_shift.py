"""Internal covariate shift: how far the outputs of a layer move, and what that does to the loss above.

The outputs at two training times are compared on the *same inputs*. Independent samples would be useless: for identical
Gaussians in 32 dimensions the W_1 between two samples of 1000 points is already 5.6. The distance comes as a sandwich:
the best lower bound, the exact value where that is feasible, and the best upper bound.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PyTree

from meanflow import _checks
from meanflow._checks import array, count, flag
from meanflow.transport import bounds
from meanflow.transport._exact import MAX_ASSIGNMENT, wasserstein
from meanflow.transport._sliced import marginal_wasserstein

Predictions = TypeVar("Predictions")
Targets = TypeVar("Targets")


OUTPUTS = array(rank=1, least=1)


class Sandwich(NamedTuple):
    """Bounds around W_1: lower <= exact <= upper.

    Attributes:
        lower: the best lower bound.
        exact: W_1 between the samples; NaN where it was not computed.
        upper: the best upper bound.
        pieces: each bound by name. Lower bounds: ``mean`` (distance of the means), ``power`` (Theorem 2 of the
            unitization paper at its best) and ``marginal`` (each feature sorted). Upper bounds: ``moment`` (Theorem 1,
            corrected) and ``paired`` (mean distance between the outputs of the same input).
    """

    lower: float
    exact: float
    upper: float
    pieces: dict[str, float]


@jax.jit
def paired_distance(x: Float[ArrayLike, "n d"], y: Float[ArrayLike, "n d"]) -> Float[Array, ""]:
    """Return mean_i |x_i - y_i|, the cost of pairing the outputs of equal inputs.

    It is an upper bound on W_1, and equal to W_1 for small drifts.

    >>> print(paired_distance(jnp.zeros((2, 2)), jnp.array([[3.0, 4.0], [0.0, 1.0]])))
    3.0
    """
    x, y = jnp.asarray(x), jnp.asarray(y)
    return jnp.mean(jnp.linalg.norm(x - y, axis=1))


@jax.jit
def _pieces(x: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
    """Return the bounds that hold without a pairing, compiled together."""
    shift = jnp.mean(x, axis=0) - jnp.mean(y, axis=0)
    return {
        "mean": jnp.linalg.norm(shift),
        "power": bounds.best_power_bound(x, y),
        "marginal": marginal_wasserstein(x, y),
        "moment": bounds.moment_bound(x, y),
    }


@_checks.arguments(x=OUTPUTS, y=OUTPUTS, paired=flag, max_exact=count(0))
def sandwich(
    x: Float[ArrayLike, "n ..."],
    y: Float[ArrayLike, "m ..."],
    *,
    paired: bool = False,
    max_exact: int = 2000,
) -> Sandwich:
    """Bound W_1 between two samples from both sides, and compute it where that is feasible.

    Args:
        x: samples (N, ...), flattened to (N, d).
        y: samples (M, ...).
        paired: row i of both came from the same input, so that this pairing bounds W_1 from above.
        max_exact: largest N for which the exact distance is computed, which takes about 0.15 s at 1000 points; 0
            switches it off. It also needs N = M, except for a single feature.

    >>> out = sandwich(jnp.zeros((4, 2)), jnp.ones((4, 2)), paired=True)
    >>> print(round(out.lower, 6), round(out.exact, 6), round(out.upper, 6))
    1.414214 1.414214 1.414214
    """
    x, y = (jnp.asarray(u).reshape(jnp.shape(u)[0], -1) for u in (x, y))
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"x and y must have equally many features, got {x.shape[1]} and {y.shape[1]}")
    if paired and x.shape != y.shape:
        raise ValueError(f"paired samples must have equal shapes, got {x.shape} and {y.shape}")
    pieces = {name: float(value) for name, value in _pieces(x, y).items()}
    lower = max(pieces["mean"], pieces["power"], pieces["marginal"])
    upper = pieces["moment"]
    if paired:
        pieces["paired"] = float(paired_distance(x, y))
        upper = min(upper, pieces["paired"])
    feasible = x.shape[0] == y.shape[0] and x.shape[0] <= min(max_exact, MAX_ASSIGNMENT)
    exact = float(wasserstein(x, y)) if feasible or x.shape[1] == 1 else float("nan")
    return Sandwich(lower, exact, upper, pieces)


@_checks.arguments(before=OUTPUTS, after=OUTPUTS, max_exact=count(0))
def ics(
    before: Float[ArrayLike, "n ..."], after: Float[ArrayLike, "n ..."], *, max_exact: int = 2000
) -> Sandwich:
    """Return the internal covariate shift of a layer: W_1 between its outputs at two times, with bounds.

    This is W_1(p^(t + dt), p^(t)), equation (2) of the unitization paper.

    Args:
        before: outputs of the layer at time t, (N, ...).
        after: its outputs at time t + dt on the same inputs.
        max_exact: largest N for which the exact distance is computed; 0 switches it off.

    Returns:
        A ``Sandwich`` with lower bound, exact distance (NaN if it was not computed), upper bound, and each bound by
        name in ``pieces``.

    >>> found = ics(jnp.zeros((4, 2)), jnp.ones((4, 2)))
    >>> round(found.lower, 6), round(found.exact, 6), round(found.upper, 6)
    (1.414214, 1.414214, 1.414214)
    """
    if jnp.shape(before) != jnp.shape(after):
        raise ValueError(
            f"before and after must have equal shapes, got {jnp.shape(before)} and {jnp.shape(after)}"
        )
    return sandwich(after, before, paired=True, max_exact=max_exact)


def ics_trace(
    outputs: Sequence[Float[ArrayLike, "n ..."]] | Float[Array, "times n ..."], *, max_exact: int = 2000
) -> dict[str, Float[np.ndarray, "steps"]]:
    """Return ``ics`` between consecutive snapshots of a layer's outputs.

    Args:
        outputs: snapshots (T, N, ...) on the same inputs.
        max_exact: as in ``ics``.

    Returns:
        ``lower``, ``exact`` and ``upper``, each with T - 1 entries.
    """
    steps = [ics(outputs[t], outputs[t + 1], max_exact=max_exact) for t in range(len(outputs) - 1)]
    return {name: np.array([getattr(s, name) for s in steps]) for name in ("lower", "exact", "upper")}


def loss_shift(
    upper: Callable[[PyTree[Array]], Predictions],
    before: PyTree[Array],
    after: PyTree[Array],
    targets: Targets,
    loss: Callable[[Predictions, Targets], Float[Array, ""]],
) -> Float[Array, ""]:
    """Return how much the loss changes when only the layers below have moved.

    This is L(Theta_{l+1:L}; p^(t+1)) - L(Theta_{l+1:L}; p^(t)): the loss (1) of the unitization paper at the new inputs
    of the layers above minus that at the old ones, both with the weights of time t. It is pure JAX when its arguments
    are.

    Args:
        upper: the layers above at their old weights, features -> predictions.
        before: outputs of the layer at time t, (N, ...).
        after: its outputs at time t + 1 on the same inputs.
        targets: labels of these inputs.
        loss: (predictions, targets) -> scalar mean loss.

    >>> mean_square = lambda f, y: jnp.mean((f - y) ** 2)
    >>> print(loss_shift(lambda h: 2 * h, jnp.zeros(3), jnp.ones(3), jnp.zeros(3), mean_square))
    4.0
    """
    return loss(upper(after), targets) - loss(upper(before), targets)
