"""Internal covariate shift: how far the outputs of a layer move.

The outputs at two training times are compared on the *same inputs*. Independent samples would be useless: for identical
Gaussians in 32 dimensions the W_1 between two samples of 1000 points is already 5.6. The distance comes as a sandwich:
the best lower bound, the exact value where that is feasible, and the best upper bound.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from meanflow import _boundary
from meanflow._boundary import Natural, array, checked
from meanflow._numerics import magnitude, scaled_norm
from meanflow.transport._exact import MAX_ASSIGNMENT, wasserstein
from meanflow.transport._sliced import marginal_wasserstein

Samples: TypeAlias = Float[Array, "n d"]
Outputs = Annotated[Float[ArrayLike, "n ..."], array(rank=1)]


class Sandwich(NamedTuple):
    """Bounds around W_1: lower <= exact <= upper, as floats (as arrays where the outputs are traced).

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


def moment_bound(x: Samples, y: Samples) -> Float[Array, ""]:
    """Return the upper bound sqrt(sum var + sum var' + |dmu|^2) from two moments (Theorem 1, corrected).

    Here var and var' are the variances of the features of x and y, and dmu is the difference of their means. The bound
    is E|x - y|^2 of the independent coupling, with W_1 <= W_2, and it is sharp.
    """
    spread = jnp.concatenate([jnp.std(x, axis=0), jnp.std(y, axis=0)])
    return scaled_norm(jnp.concatenate([spread, jnp.mean(x, axis=0) - jnp.mean(y, axis=0)]))


def power_bound(x: Samples, y: Samples) -> Float[Array, ""]:
    """Return the largest |E f_{p,C}(x) - E f_{p,C}(y)| for p = 1 .. 4 and nine values of C (Theorem 2), a lower bound.

    f_{p,C}(x) = sum_i clip(x_i, -C, C)^p / (p C^(p-1) sqrt(d)) is 1-Lipschitz; the paper asks for p >= 2, but p = 1 is
    valid too. The values of C run from 1/16 to 1 times the largest entry of the samples.
    """
    top = magnitude(jnp.concatenate([x, y]))

    def gaps(c: Float[Array, ""]) -> Float[Array, " 4"]:
        # scaled first: C^p overflows float32 early
        x_c, y_c = (jnp.clip(u / c, -1, 1) for u in (x, y))
        mean = lambda u, p: jnp.mean(jnp.sum(u**p, axis=-1)) / p
        return c * jnp.abs(jnp.stack([mean(x_c, p) - mean(y_c, p) for p in (1, 2, 3, 4)]))

    return jnp.max(jax.vmap(gaps)(top * jnp.geomspace(1 / 16, 1, 9, dtype=top.dtype))) / x.shape[1] ** 0.5


@jax.jit
def _pieces(x: Samples, y: Samples) -> dict[str, Float[Array, ""]]:
    """Return all bounds by name, compiled together; in units of the largest entry, whose sums may not be numbers."""
    size = magnitude(jnp.concatenate([x, y]))
    x, y = x / size, y / size
    found = {
        "mean": scaled_norm(jnp.mean(x, axis=0) - jnp.mean(y, axis=0)),
        "power": power_bound(x, y),
        "marginal": marginal_wasserstein(x, y),
        "moment": moment_bound(x, y),
        "paired": jnp.mean(scaled_norm(x - y)),
    }
    return {name: size * value for name, value in found.items()}


@checked
def ics(before: Outputs, after: Outputs, *, max_exact: Natural = 2000) -> Sandwich:
    """Return the internal covariate shift of a layer: W_1 between its outputs at two times, with bounds.

    This is W_1(p^(t + dt), p^(t)), equation (2) of the unitization paper. Under jit and vmap it gives the bounds.

    Args:
        before: outputs of the layer at time t, (N, ...), flattened to (N, d).
        after: its outputs at time t + dt on the same inputs.
        max_exact: largest N for which the exact distance is computed, which takes about 0.15 s at 1000 points; 0
            switches it off, except for a single feature, where it is a sort.

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
    # one row a sample, whatever the shape of the layer's outputs, in one precision
    x, y = (jnp.asarray(u, jnp.result_type(before, after)) for u in (after, before))
    x, y = (u.reshape(u.shape[0], -1) for u in (x, y))
    pieces = {name: _known(value) for name, value in _pieces(x, y).items()}
    lower = jnp.stack([jnp.asarray(pieces[name]) for name in ("mean", "power", "marginal")]).max()
    upper = jnp.minimum(pieces["moment"], pieces["paired"])
    # one feature is sorted, several need an assignment of O(N^3) operations
    feasible = x.shape[0] <= min(max_exact, MAX_ASSIGNMENT) or x.shape[1] == 1
    exact = _known(wasserstein(x, y)) if feasible else float("nan")
    return Sandwich(_known(lower), exact, _known(upper), pieces)


def _known(value: Any) -> Any:
    """Return a number as a float, unless it is traced."""
    return value if _boundary.concrete(value) is None else float(value)
