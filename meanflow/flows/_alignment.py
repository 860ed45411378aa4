"""How far a student has found the directions of its teacher."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from meanflow._boundary import checked
from meanflow._numerics import safe_divide
from meanflow.flows import _equation as equation
from meanflow.flows._features import TwoLayer
from meanflow.flows._flow import Flow
from meanflow.measures._cloud import Cloud
from meanflow.measures._dataset import Dataset


@checked
def alignment(
    directions: Float[ArrayLike, "k d"],
) -> Callable[[Flow, Cloud, Dataset], dict[str, Float[Array, "..."]]]:
    """Return an observable: the alignment of two-layer neurons with ``directions``, and of a network with its targets.

    With weights proportional to p_i |a_i| (the norm of the row, for several outputs) and b^ = b/|b| without bias, it
    records ``subspace``, the mean of |U b^|^2, which is k/d for random neurons and 1 for those that have found the
    span; ``direction`` (k,), the mean of (u_j . b^)^2 for each row of U; and ``target``, the correlation of f and y
    over the samples, <f, y> / (|f| |y|).

    Args:
        directions: U (k, d), orthonormal rows, for instance ``Teacher.directions``.

    >>> import jax, meanflow as mf
    >>> teacher = mf.measures.teachers.single_index(8, "hermite3")
    >>> data = teacher.draw(jax.random.key(0), 32)
    >>> flow = mf.vanilla("tanh")
    >>> run = mf.descend(flow, flow.init(jax.random.key(1), 16, dim=8), data, 2, step=0.1,
    ...                  observe=mf.flows.alignment(teacher.directions))
    >>> run.observed["subspace"].shape, run.observed["direction"].shape
    ((2,), (2, 1))
    """
    rows = jnp.asarray(directions)

    def measure(flow: Flow, cloud: Cloud, data: Dataset) -> dict[str, jax.Array]:
        if not isinstance(flow.feature, TwoLayer):
            raise ValueError(
                f"alignment needs a two-layer flow, got the feature {type(flow.feature).__name__}"
            )
        a, b = cloud.particles.a, cloud.particles.b[:, : rows.shape[1]]
        if b.shape[1] < rows.shape[1]:
            raise ValueError(
                f"directions must have at most {b.shape[1]} columns, like the inner weights, got {rows.shape[1]}"
            )
        size = jnp.abs(a) if a.ndim == 1 else jnp.linalg.norm(a, axis=1)
        share = safe_divide(cloud.weights * size, jnp.sum(cloud.weights * size))
        each = safe_divide((b @ rows.T.astype(b.dtype)) ** 2, jnp.sum(b**2, axis=1)[:, None])
        found = {"subspace": share @ jnp.sum(each, axis=1), "direction": share @ each}
        f, y = equation.predict(flow, cloud, data.x), data.y
        # class numbers have no correlation with the k outputs that tell them apart
        if f.shape != y.shape:
            return found
        weights = data.weights if f.ndim == 1 else data.weights[:, None]
        product = lambda u, v: jnp.sum(weights * u * v)
        return found | {"target": safe_divide(product(f, y), jnp.sqrt(product(f, f) * product(y, y)))}

    return measure
