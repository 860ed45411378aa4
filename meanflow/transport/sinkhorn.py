"""The Sinkhorn divergence, by ott-jax. It is not a Wasserstein distance and is not called one."""

import warnings
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meanflow import _checks
from meanflow.transport.exact import euclidean


class SinkhornDivergence(NamedTuple):
    """Value of the divergence, whether all three solves converged, and the regularisation used."""

    value: jax.Array
    converged: jax.Array
    epsilon: jax.Array


def sinkhorn_divergence(
    x: jax.Array,
    y: jax.Array,
    *,
    relative_epsilon: float = 0.05,
    weights_x: jax.Array | None = None,
    weights_y: jax.Array | None = None,
    max_iterations: int = 2000,
) -> SinkhornDivergence:
    """The debiased entropic cost S = OT_e(x, y) - (OT_e(x, x) + OT_e(y, y)) / 2, ground cost |x - y|.

    Smooth, zero for equal measures, and below W_1 when regularised: a unit shift of 300 Gaussian points
    in the plane scores about 0.9 at 5 % and 0.5 at 20 % of the mean cost. Differentiable; O(N M) memory
    and time an iteration; pure JAX.

    Args:
        x: points (N, d).
        y: points (M, d).
        relative_epsilon: regularisation as a fraction of the mean cost between x and y.
        weights_x: (N,), uniform by default.
        weights_y: (M,), uniform by default.
        max_iterations: of each of the three solves.
    """
    _checks.at_least("relative_epsilon", relative_epsilon, 0.0, strict=True)
    _checks.whole("max_iterations", max_iterations, 1)
    _checks.finite("x", x)
    _checks.finite("y", y)
    return _divergence(jnp.asarray(x), jnp.asarray(y), relative_epsilon, weights_x, weights_y, max_iterations)


@partial(jax.jit, static_argnames="max_iterations")
def _divergence(
    x: jax.Array,
    y: jax.Array,
    relative_epsilon: Any,
    weights_x: jax.Array | None,
    weights_y: jax.Array | None,
    max_iterations: int,
) -> SinkhornDivergence:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # ott imports the retired jaxopt
        from ott.geometry import costs, pointcloud
        from ott.tools import sinkhorn_divergence as ott_divergence
    epsilon = jax.lax.stop_gradient(relative_epsilon * jnp.mean(euclidean(x, y)))
    with jax.numpy_rank_promotion("allow"):  # ott broadcasts ranks
        value, output = ott_divergence.sinkhorn_divergence(
            pointcloud.PointCloud,
            x,
            y,
            a=weights_x,
            b=weights_y,
            cost_fn=costs.Euclidean(),
            epsilon=epsilon,
            solve_kwargs={"max_iterations": max_iterations, "threshold": 1e-4},
        )
    return SinkhornDivergence(value, jnp.all(jnp.asarray(output.converged)), epsilon)
