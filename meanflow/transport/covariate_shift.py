"""Internal covariate shift: how far a layer's outputs move, and what that does to the loss above.

The outputs at two training times are compared on the *same inputs*. Independent samples would be useless: for
identical Gaussians in 32 dimensions the plug-in W_1 of 1000 points is already 5.6. The distance comes as a
sandwich: best lower bound, exact value where feasible, best upper bound.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meanflow.transport import bounds
from meanflow.transport.exact import MAX_ASSIGNMENT, wasserstein
from meanflow.transport.sliced import marginal_wasserstein


class Sandwich(NamedTuple):
    """Lower bound <= W_1 <= upper bound.

    Attributes:
        lower: the best lower bound.
        exact: W_1 of the samples, NaN where it was not computed.
        upper: the best upper bound.
        pieces: each bound by name: ``mean`` |dmu|, ``power`` (Theorem 2 at its best), ``marginal`` (by
            sorting each feature); ``moment`` (corrected Theorem 1), ``paired`` (mean distance of
            same-input pairs).
    """

    lower: float
    exact: float
    upper: float
    pieces: dict[str, float]


@jax.jit
def paired_distance(x: jax.Array, y: jax.Array) -> jax.Array:
    """mean_i |x_i - y_i| for (N, d): the cost of pairing equal inputs, at least W_1, equal for small drifts."""
    return jnp.mean(jnp.linalg.norm(x - y, axis=1))


@jax.jit
def _pieces(x: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
    shift = jnp.mean(x, axis=0) - jnp.mean(y, axis=0)
    return {
        "mean": jnp.linalg.norm(shift),
        "power": bounds.best_power_bound(x, y),
        "marginal": marginal_wasserstein(x, y),
        "moment": bounds.moment_bound(x, y),
    }


def sandwich(x: Any, y: Any, *, paired: bool = False, max_exact: int = 2000) -> Sandwich:
    """Bounds W_1 between two samples from both sides, and computes it where feasible.

    Args:
        x: samples (N, ...), flattened to (N, d).
        y: samples (M, ...).
        paired: row i of both came from the same input, so that the pairing bounds W_1 from above.
        max_exact: largest N for the exact distance (about 0.15 s at 1000 points); 0 switches it off. Only for
            N = M.

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


def ics(before: Any, after: Any, *, max_exact: int = 2000) -> Sandwich:
    """The internal covariate shift W_1(p^(t + dt), p^(t)) of a layer, (2) of the unitization paper.

    Args:
        before: the layer's outputs at time t, (N, ...).
        after: its outputs at t + dt on the same inputs.
        max_exact: see ``sandwich``.
    """
    return sandwich(after, before, paired=True, max_exact=max_exact)


def ics_trace(outputs: Any, *, max_exact: int = 2000) -> dict[str, np.ndarray]:
    """``ics`` between consecutive snapshots (T, N, ...); lower, exact and upper, each (T - 1,)."""
    steps = [ics(outputs[t], outputs[t + 1], max_exact=max_exact) for t in range(len(outputs) - 1)]
    return {name: np.array([getattr(s, name) for s in steps]) for name in ("lower", "exact", "upper")}


def loss_shift(
    upper: Callable[[Any], Any],
    before: Any,
    after: Any,
    targets: Any,
    loss: Callable[[Any, Any], jax.Array],
) -> jax.Array:
    """What the shift does to the layers above: (1) at new inputs and old weights, minus (1) at the old
    inputs.

    L(Theta_{l+1:L}; p^(t+1)) - L(Theta_{l+1:L}; p^(t)), both with the weights of time t. Pure JAX when its
    arguments are.

    Args:
        upper: the layers above at their old weights, features -> predictions.
        before: layer outputs at time t, (N, ...).
        after: layer outputs at time t + 1 on the same inputs.
        targets: labels of these inputs.
        loss: (predictions, targets) -> scalar mean loss.
    """
    return loss(upper(after), targets) - loss(upper(before), targets)
