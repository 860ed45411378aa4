"""Global optimality of a two-layer flow: the certificate max |F| and the separation condition of Theorem 5.

For features linear in a, V(a, b) = a F(b); with a convex loss a measure is a global minimiser exactly when F = 0
everywhere. The batch-norm manifold paper shows that a flow that converges from a *separating* initial measure
reaches such a point: every curve in [-r, r] x Omega from one end to the other must meet its support.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meanflow import _checks
from meanflow._checks import number
from meanflow._numerics import safe_norm
from meanflow.flows._flow import FLOW, Flow, first_variation
from meanflow.geometry import _omega as omega
from meanflow.geometry import _sphere as sphere
from meanflow.measures import laws
from meanflow.measures._cloud import CLOUD, Cloud, Neurons
from meanflow.measures._dataset import DATA, Dataset
from meanflow.measures._sampling import sample


class Certificate(NamedTuple):
    """Largest |F| found, and the unit vector where it is attained; 0 certifies a global minimum."""

    value: jax.Array
    direction: jax.Array


def two_layer(name: str, value: object) -> object:
    """Accept a cloud of neurons (a, b)."""
    CLOUD(name, value)
    if not isinstance(value.particles, Neurons):  # type: ignore[attr-defined]
        kind = type(value.particles).__name__  # type: ignore[attr-defined]
        raise TypeError(f"{name} must hold Neurons(a, b), got {kind}")
    return value


@_checks.arguments(flow=FLOW, cloud=two_layer, data=DATA, count=_checks.count(1))
def certificate(flow: Flow, cloud: Cloud, data: Dataset, count: int = 4096) -> Certificate:
    """max |F(b)| over ``count`` well-spread directions, F(b) = sum_j q_j l'(f_j, y_j) phi((1, b); x_j).

    With k outputs F(b) is a vector, V(a, b) = <a, F(b)>, and |F| its Euclidean norm. The maximum over finitely many
    directions is a lower bound of the true one. Cost O(count n d).
    """
    flow = flow.bind(data)
    dim = cloud.particles.b.shape[1]
    dtype = cloud.weights.dtype
    directions = _spread(count, dim).astype(dtype)
    probes = flow.space.from_raw(Cloud(Neurons(jnp.ones(count, dtype), directions))).particles
    if cloud.particles.a.ndim == 2:
        outputs = cloud.particles.a.shape[1]
        units = jnp.broadcast_to(jnp.eye(outputs, dtype=dtype)[:, None, :], (outputs, count, outputs))
        size = safe_norm(
            jnp.stack([first_variation(flow, cloud, data, probes._replace(a=a)) for a in units], axis=-1)
        )
    else:
        size = jnp.abs(first_variation(flow, cloud, data, probes))
    best = jnp.argmax(size)
    return Certificate(size[best], directions[best])


@_checks.arguments(
    cloud=two_layer,
    radius=number(above=0, high=1e100, static=True),
    tolerance=number(above=0, high=1e100, static=True),
    levels=_checks.count(2),
    directions=_checks.count(3),
)
def separates(
    cloud: Cloud, radius: float, *, tolerance: float, levels: int = 33, directions: int = 256
) -> bool:
    """Whether the cloud separates {-radius} x Omega from {radius} x Omega, seen at a resolution.

    A finite set never separates; a quadrature cloud stands for its limit, so each particle blocks a ball of size
    ``tolerance`` (in sqrt(da^2 + angle^2)). The checker walks a graph of ``levels`` values of a times
    ``directions`` spread over the sphere and looks for an open path. Host-side, O(levels directions m).

    Args:
        cloud: particles (a, b); only the direction of b matters.
        radius: the r of Theorem 5; the support must lie in |a| <= r.
        tolerance: more than the spacing of the particles and of the graph.
    """
    if cloud.particles.a.ndim != 1:
        raise ValueError("separates is about networks with one output, a (m,)")
    import scipy.sparse
    from scipy.sparse.csgraph import connected_components

    dim = cloud.particles.b.shape[1]
    if dim == 2:
        turn = 2 * np.pi * np.arange(directions) / directions
        units = np.stack([np.cos(turn), np.sin(turn)], axis=1)
        reach = 1.01 * 2 * np.pi / directions
    else:
        units = np.asarray(_spread(directions, dim))
        nearest = np.sort(np.asarray(_angles(units, units)), axis=1)
        reach = float(nearest[:, min(2 * dim, directions - 1)].max())  # joins every node to its neighbours
    steps = np.linspace(-radius, radius, levels)
    real = np.asarray(cloud.weights) > 0
    a = np.asarray(cloud.particles.a)[real]
    turn_to = np.asarray(_angles(units, omega.direction(cloud.particles.b)[real]))
    gap = steps[:, None, None] - a[None, None, :]
    blocked = np.any(gap**2 + turn_to[None] ** 2 <= tolerance**2, axis=2)

    index = np.arange(levels * directions).reshape(levels, directions)
    left, right = np.nonzero(np.triu(np.asarray(_angles(units, units)) <= reach, 1))
    edges = [(index[:-1].ravel(), index[1:].ravel())]
    edges += [(index[level, left], index[level, right]) for level in range(levels)]
    rows, columns = (np.concatenate(part) for part in zip(*edges, strict=True))
    open_ = ~blocked.ravel()
    keep = open_[rows] & open_[columns]
    graph = scipy.sparse.coo_matrix(
        (np.ones(keep.sum()), (rows[keep], columns[keep])), shape=(index.size, index.size)
    )
    component = connected_components(graph, directed=False)[1].reshape(levels, directions)
    low, high = component[0][~blocked[0]], component[-1][~blocked[-1]]
    return not bool(np.intersect1d(low, high).size)


def _spread(count: int, dim: int) -> jax.Array:
    """``count`` well-spread unit vectors of R^dim."""
    spread = {"a": laws.constant(), "b": laws.sphere(dim)}
    return sample(None, count, Neurons, spread, quasi=True).particles.b


def _angles(p: Any, q: Any) -> jax.Array:
    return sphere.angle(jnp.asarray(p)[:, None, :], jnp.asarray(q)[None, :, :])
