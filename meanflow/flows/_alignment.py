"""How far a student has found the directions of its teacher."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanflow import _checks
from meanflow._numerics import safe_divide
from meanflow.flows import _equation as equation
from meanflow.flows._observables import DESCRIPTION, Observable, Values
from meanflow.flows._problem import Problem
from meanflow.measures._cloud import Cloud


@_checks.constructor(directions=_checks.array((None, None)), **DESCRIPTION)
class Alignment(Observable):
    """Alignment of two-layer neurons with given directions, and of the network with its targets.

    With weights proportional to p_i |a_i| (the norm of the row, for several outputs) and b^ = b/|b| without bias, it
    records ``subspace``, the mean of |U b^|^2, which is k/d for random neurons and 1 for those that have found the
    span; ``direction`` (k,), the mean of (u_j . b^)^2 for each row of U; and ``target``, the correlation of f and y
    over the samples, <f, y> / (|f| |y|).

    Attributes:
        directions: U (k, d), orthonormal rows, for instance ``Teacher.directions``.

    >>> import jax, meanflow as mf
    >>> teacher = mf.measures.teachers.single_index(8, "hermite3")
    >>> data = teacher.draw(jax.random.key(0), 32)
    >>> flow = mf.vanilla("tanh")
    >>> run = mf.descend(flow, flow.init(jax.random.key(1), 16, dim=8), data, 2, step=0.1,
    ...                  observe=mf.flows.Alignment(teacher.directions))
    >>> run.observed["subspace"].shape, run.observed["direction"].shape
    ((2,), (2, 1))
    """

    directions: Float[Array, "k d"]

    def measure(self, problem: Problem, cloud: Cloud, memory: Values) -> dict[str, jax.Array]:
        """Return ``subspace``, ``direction`` and ``target``."""
        a, b = cloud.particles.a, cloud.particles.b[:, : self.directions.shape[1]]
        if b.shape[1] < self.directions.shape[1]:
            raise ValueError(
                f"directions must have at most {b.shape[1]} columns, like the inner weights, got "
                f"{self.directions.shape[1]}"
            )
        size = jnp.abs(a) if a.ndim == 1 else jnp.linalg.norm(a, axis=1)
        share = safe_divide(cloud.weights * size, jnp.sum(cloud.weights * size))
        square = jnp.sum(b**2, axis=1)
        each = safe_divide((b @ self.directions.T.astype(b.dtype)) ** 2, square[:, None])
        data = problem.data
        f, y = equation.predict(problem.flow, cloud, data.x), data.y
        weights = data.weights if f.ndim == 1 else data.weights[:, None]
        product = lambda u, v: jnp.sum(weights * u * v)
        scale = jnp.sqrt(product(f, f) * product(y, y))
        found = {"subspace": share @ jnp.sum(each, axis=1), "direction": share @ each}
        return found | ({"target": safe_divide(product(f, y), scale)} if f.shape == y.shape else {})
