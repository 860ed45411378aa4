"""The weak form of the continuity equation, with the boundary terms that the papers leave out."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meanflow.flows._flow import FLOW, Flow, velocity
from meanflow.measures._cloud import CLOUD, Cloud
from meanflow.measures._dataset import DATA, Dataset
from meanflow.solvers._continuous import solve


class WeakForm(NamedTuple):
    """Both sides: ``interior`` = int int (d_t phi + <grad phi, v>) d rho dt, ``boundary`` = [int phi d rho]."""

    interior: jax.Array
    boundary: jax.Array


@_checks.arguments(
    flow=FLOW,
    cloud=CLOUD,
    data=DATA,
    test=taking(2),
    t1=number(above=0),
    nodes=count(1),
    settings=unchecked("solve checks each of them"),
)
def weak_form(
    flow: Flow,
    cloud: Cloud,
    data: Dataset,
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
    for name in ("ts", "observe"):
        if name in settings:
            raise ValueError(f"settings must not hold {name}, which weak_form chooses itself")
    flow = flow.bind(data)
    values = jax.eval_shape(test, jnp.zeros(()), cloud.particles)
    if getattr(values, "shape", None) != cloud.weights.shape:
        raise ValueError(f"test must return one number for each of {cloud.size} particles, got {values}")
    points, weights = np.polynomial.legendre.leggauss(nodes)
    times = t1 * (points + 1) / 2
    sol = solve(flow, cloud, data, t1, ts=times, **settings)

    assert sol.clouds is not None  # nothing was observed instead

    def mean(t: jax.Array, particles: Any) -> jax.Array:
        return cloud.weights @ test(t, particles)

    def rate(t: jax.Array, here: Cloud) -> jax.Array:
        v = velocity(flow, here, data)
        return jax.jvp(mean, (t, here.particles), (jnp.ones_like(t), v))[1]

    interior = jnp.asarray(weights * t1 / 2) @ jax.vmap(rate)(sol.ts, sol.clouds)
    start, end = jnp.zeros_like(sol.ts[0]), sol.state.t
    return WeakForm(interior, mean(end, sol.final.particles) - mean(start, cloud.particles))
