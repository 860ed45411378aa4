"""The Sinkhorn divergence, by ott-jax. It is not a Wasserstein distance and is not called one."""

from __future__ import annotations

import warnings
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float

from meanflow._boundary import Count, Positive, checked
from meanflow._lazy import optional
from meanflow.transport._exact import PointWeights, check_weights, euclidean


class SinkhornDivergence(NamedTuple):
    """Outcome of ``sinkhorn_divergence``.

    Attributes:
        value: the divergence.
        converged: whether all three solves converged.
        epsilon: the regularization that was used.
    """

    value: Float[Array, ""]
    converged: Bool[Array, ""]
    epsilon: Float[Array, ""]


@checked
def sinkhorn_divergence(
    x: Float[ArrayLike, "n d"],
    y: Float[ArrayLike, "m d"],
    *,
    relative_epsilon: Positive = 0.05,
    weights_x: PointWeights | None = None,
    weights_y: PointWeights | None = None,
    max_iterations: Count = 2000,
) -> SinkhornDivergence:
    """Return the debiased entropic cost S = OT_e(x, y) - (OT_e(x, x) + OT_e(y, y)) / 2 with ground cost |x - y|.

    S is smooth, zero for equal measures, and below W_1: a unit shift of 300 Gaussian points in the plane scores about
    0.9 when the regularization is 5 % of the mean cost, and 0.5 at 20 %. The function is pure JAX and differentiable;
    memory and time of an iteration are O(N M).

    Args:
        x: points (N, d).
        y: points (M, d).
        relative_epsilon: regularization as a fraction of the mean cost between x and y.
        weights_x: weights of the points of x, which are scaled to sum 1; uniform by default.
        weights_y: weights of the points of y.
        max_iterations: of each of the three solves.

    >>> x = jax.random.normal(jax.random.key(0), (30, 2))
    >>> found = sinkhorn_divergence(x, x + 1.0)
    >>> bool(found.converged), bool(0.5 < found.value < 2**0.5)
    (True, True)
    """
    if jnp.shape(x)[1] != jnp.shape(y)[1]:
        raise ValueError(f"x and y must have shapes (N, d) and (M, d), got {jnp.shape(x)} and {jnp.shape(y)}")
    check_weights("weights_x", weights_x, jnp.shape(x)[0])
    check_weights("weights_y", weights_y, jnp.shape(y)[0])
    dtype = jnp.result_type(x, y)  # ott takes one precision alone
    weights = [jnp.ones(jnp.shape(u)[0]) if w is None else w for u, w in ((x, weights_x), (y, weights_y))]
    weights = [jnp.asarray(w, dtype) / jnp.sum(jnp.asarray(w, dtype)) for w in weights]
    return _divergence(
        jnp.asarray(x, dtype), jnp.asarray(y, dtype), relative_epsilon, *weights, max_iterations
    )


@partial(jax.jit, static_argnames="max_iterations")
def _divergence(
    x: jax.Array,
    y: jax.Array,
    relative_epsilon: ArrayLike,
    weights_x: jax.Array,
    weights_y: jax.Array,
    max_iterations: int,
) -> SinkhornDivergence:
    """Run the three solves of ott, compiled."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # ott imports the retired jaxopt
        costs, pointcloud, ott_divergence = (
            optional(f"ott.{name}", "transport", "transport.sinkhorn_divergence")
            for name in ("geometry.costs", "geometry.pointcloud", "tools.sinkhorn_divergence")
        )
    # In units of the mean cost, a constant of the derivative: the divergence scales with the points, whose size may be
    # far from 1. Where all points are one there is no unit, and nothing to move.
    unit = jax.lax.stop_gradient(jnp.mean(euclidean(x, y)))
    unit = jnp.where(unit > 0, unit, 1.0)
    with jax.numpy_rank_promotion("allow"):  # ott broadcasts ranks
        value, output = ott_divergence.sinkhorn_divergence(
            pointcloud.PointCloud,
            x / unit,
            y / unit,
            a=weights_x,
            b=weights_y,
            cost_fn=costs.Euclidean(),
            epsilon=jnp.asarray(relative_epsilon, x.dtype),
            solve_kwargs={"max_iterations": max_iterations, "threshold": 1e-4},
        )
    return SinkhornDivergence(unit * value, jnp.all(jnp.asarray(output.converged)), unit * relative_epsilon)
