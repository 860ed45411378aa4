"""The weak form of the continuity equation, with the boundary terms that theorem 4 leaves out."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import meanflow as mf


class WeakForm(NamedTuple):
    """Both sides: ``interior`` = int int (d_t phi + <grad phi, v>) d rho dt, ``boundary`` = [int phi d rho]."""

    interior: jax.Array
    boundary: jax.Array


def weak_form(
    flow: mf.Flow,
    cloud: mf.Cloud,
    data: mf.Dataset,
    test: Callable[[jax.Array, Any], jax.Array],
    t1: float,
    *,
    nodes: int = 32,
    **settings: Any,
) -> WeakForm:
    """Both sides of the weak form on [0, t1] for a C^1 test function ``test(t, particles) -> (m,)``.

    They are equal along the flow; the interior vanishes only if ``test`` does at both ends. Time integrals use
    ``nodes`` Gauss-Legendre points; ``settings`` go to ``solve``.
    """
    flow = flow.bind(data)
    points, weights = np.polynomial.legendre.leggauss(nodes)
    sol = mf.solve(flow, cloud, data, t1, ts=t1 * (points + 1) / 2, **settings)

    assert sol.clouds is not None  # nothing was observed instead

    def mean(t: jax.Array, particles: Any) -> jax.Array:
        return cloud.weights @ test(t, particles)

    def rate(t: jax.Array, here: mf.Cloud) -> jax.Array:
        v = mf.velocity(flow, here, data)
        return jax.jvp(mean, (t, here.particles), (jnp.ones_like(t), v))[1]

    interior = jnp.asarray(weights * t1 / 2) @ jax.vmap(rate)(sol.ts, sol.clouds)
    start, end = jnp.zeros_like(sol.ts[0]), jnp.asarray(t1, sol.ts.dtype)
    return WeakForm(interior, mean(end, sol.final.particles) - mean(start, cloud.particles))
