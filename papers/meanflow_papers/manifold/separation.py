"""The separation condition of Theorem 5: every curve from one end of [-r, r] x Omega to the other meets the support."""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from scipy.sparse.csgraph import connected_components

from meanflow.geometry import distance, normalize
from meanflow.measures import Cloud, Neurons, laws, sample


def separates(
    cloud: Cloud, radius: float, *, tolerance: float, levels: int = 33, directions: int = 256
) -> bool:
    """Whether the cloud separates {-radius} x Omega from {radius} x Omega, seen at a resolution.

    A finite set never separates; a quadrature cloud stands for its limit, so each particle blocks a ball of size
    ``tolerance`` (in sqrt(da^2 + angle^2)). The checker walks a graph of ``levels`` values of a times
    ``directions`` spread over the sphere and looks for an open path. Host-side, O(levels directions m).

    Args:
        cloud: particles (a, b) with one output; only the direction of b matters.
        radius: the r of Theorem 5; the support must lie in |a| <= r.
        tolerance: more than the spacing of the particles and of the graph.
        levels: number of values of a.
        directions: number of directions.
    """
    if cloud.particles.a.ndim != 1:
        raise ValueError("separates is about networks with one output, a (m,)")
    dim = cloud.particles.b.shape[1]
    if dim == 2:
        turn = 2 * np.pi * np.arange(directions) / directions
        units = np.stack([np.cos(turn), np.sin(turn)], axis=1)
        reach = 1.01 * 2 * np.pi / directions
    else:
        spread = {"a": laws.constant(), "b": laws.sphere(dim)}
        units = np.asarray(sample(None, directions, Neurons, spread, quasi=True).particles.b)
        nearest = np.sort(_angles(units, units), axis=1)
        reach = float(nearest[:, min(2 * dim, directions - 1)].max())  # joins every node to its neighbours
    steps = np.linspace(-radius, radius, levels)
    real = np.asarray(cloud.weights) > 0
    a = np.asarray(cloud.particles.a)[real]
    turn_to = _angles(units, normalize(cloud.particles.b)[real])
    gap = steps[:, None, None] - a[None, None, :]
    blocked = np.any(gap**2 + turn_to[None] ** 2 <= tolerance**2, axis=2)

    index = np.arange(levels * directions).reshape(levels, directions)
    left, right = np.nonzero(np.triu(_angles(units, units) <= reach, 1))
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


def _angles(p: np.ndarray | jax.Array, q: np.ndarray | jax.Array) -> np.ndarray:
    return np.asarray(distance(jnp.asarray(p)[:, None, :], jnp.asarray(q)[None, :, :]))
