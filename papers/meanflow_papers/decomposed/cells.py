"""Cells of the arrangement of hyperplanes {w : w . x_i = 0}, and their Gaussian volumes, on the host.

The m distinct lines through 0 that the samples span are the normals of m hyperplanes, which cut the space of neurons w
into cells. A cell is a sign vector (sign(w . x_1), ..., sign(w . x_m)) that some w has; its volume is the probability
that w ~ N(0, I) falls in it. Only the span of the samples matters, so all happens in R^r with r the rank of the batch.

1. A ray of the arrangement is a direction in which r - 1 independent hyperplanes meet: the null vector of r - 1
   samples (``_rays``). Every cell is a cone, spanned by the rays that it touches.
2. The cells that touch a ray differ only in the signs of the hyperplanes through the ray. These cut the r - 1
   dimensions across the ray like an arrangement of their own: a recursion (``_incidences``, ``_patterns``).
3. Each cell is cut into simplicial cones, of r rays each, along its faces (``_triangulate``).
4. A cone {sum_i u_i v_i, u >= 0} of unit vectors v_1, ..., v_r, the rows of R, has the volume

       P = |det R| Gamma(r/2) / (2 pi^(r/2)) int_simplex |u R|^-r du,

   to *relative* accuracy, because the least volume is what counts (``cone_volumes``).
"""

from collections.abc import Iterator
from itertools import combinations, product
from math import comb, gamma, pi
from typing import NamedTuple

import numpy as np
from jaxtyping import ArrayLike, Float, Int, Shaped

MAX_RANK = 6
"""Largest rank of a batch: cones are measured by quadrature with nodes ** (rank - 1) points."""

MAX_RAYS = 200_000
"""Largest C(n, r - 1) 2^r, the number of pairs of a ray and a cell that are enumerated. At this limit that takes 9 s
of one core at rank 3, and two minutes at rank 6."""

QUADRATURE = {4: (10, 50.0), 5: (6, 50.0), 6: (6, 80.0)}
"""For each rank: nodes for each dimension, and the edge in degrees above which a cone is halved first. They give
relative errors of about 1e-13, 1e-8 and 1e-5, within the time that the enumeration takes."""

TOLERANCE = 1e-9
"""Unit vectors closer than this are one line, and smaller inner products of unit vectors are 0: far above the rounding
of a null vector, 1e-16 over the least angle between samples, and far below the angles of ordinary batches."""


class Cells(NamedTuple):
    """All cells of positive volume.

    Attributes:
        signs: +1 or -1, the side of each distinct line (in the order of ``lines``) on which a cell lies.
        volumes: Gaussian volumes of the cells. Their sum should be 1, but is not forced to.
        lines: unit vectors, one for each line that is spanned by nonzero samples.
    """

    signs: Int[np.ndarray, "cells lines"]
    volumes: Float[np.ndarray, "cells"]
    lines: Float[np.ndarray, "lines k"]


def distinct_lines(x: Float[np.ndarray, "n k"]) -> Float[np.ndarray, "lines k"]:
    """Return a unit vector for each of the distinct lines through 0 that the nonzero rows of x span.

    >>> distinct_lines(np.array([[2.0, 0.0], [-1.0, 0.0], [0.0, 0.0]])).tolist()
    [[1.0, 0.0]]
    """
    length = np.linalg.norm(x, axis=1)
    zero = length <= TOLERANCE * max(length.max(initial=0.0), np.finfo(float).tiny)
    lines: list[np.ndarray] = []
    for unit in x[~zero] / length[~zero, None]:
        # a line has two unit vectors; compare with the one on the same side of 0
        if all(np.linalg.norm(unit - np.sign(unit @ line) * line) >= TOLERANCE for line in lines):
            lines.append(unit)
    return np.array(lines).reshape(len(lines), x.shape[1])


def general_position_count(m: int, r: int) -> int:
    """Return the number of cells that m hyperplanes through 0 in general position have in R^r.

    It is 2 sum_{i<r} C(m-1, i); hyperplanes that are not in general position have fewer cells.

    >>> general_position_count(5, 2)
    10
    """
    return 2 * sum(comb(m - 1, i) for i in range(r)) if m else 1


def _rays(normals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return all rays up to sign as unit vectors (q, r), and on which side of each hyperplane they lie (q, m).

    A side is +1 or -1, or 0 for a hyperplane that contains the ray.
    """
    m, r = normals.shape
    if r == 1:
        return np.ones((1, 1)), np.sign(normals.T).astype(np.int8)
    # a ray is where r - 1 hyperplanes meet: the last right singular vector of their normals, if these are independent
    subsets = np.array(list(combinations(range(m), r - 1)), int).reshape(-1, r - 1)
    _, values, vectors = np.linalg.svd(normals[subsets], full_matrices=True)
    rays = vectors[values[:, -1] > TOLERANCE, -1]
    dots = rays @ normals.T
    sides = np.where(np.abs(dots) > TOLERANCE, np.sign(dots), 0).astype(np.int8)
    # the same ray is found from several subsets when more than r - 1 hyperplanes meet in it
    first = np.unique(sides == 0, axis=0, return_index=True)[1]
    return rays[first], sides[first]


def _patterns(normals: np.ndarray) -> np.ndarray:
    """Return the sign vectors of all cells of hyperplanes (m, r) whose normals span R^r."""
    m, r = normals.shape
    if m == r:
        return np.array(list(product((1, -1), repeat=m)), np.int8)
    return np.array(sorted({signs for signs, _ in _incidences(normals)}), np.int8)


def _incidences(normals: np.ndarray) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """Yield every pair of a cell, given by its sign vector, and one of its rays."""
    # the cells around a ray are those of the hyperplanes through it, a problem of one dimension less, which
    # ``_patterns`` solves by recursion; all other hyperplanes have the ray on one side
    for ray, side in zip(*_rays(normals), strict=True):
        through = np.flatnonzero(side == 0)
        quotient = np.linalg.svd(ray[None])[2][1:]  # basis of the orthogonal complement of the ray
        local = _patterns(normals[through] @ quotient.T)
        for direction in (1, -1):
            cells = np.repeat((direction * side)[None], len(local), axis=0)
            cells[:, through] = local
            for signs in cells:
                yield tuple(int(s) for s in signs), direction * ray


def _triangulate(
    rays: list[int], facets: list[frozenset[int]], vectors: np.ndarray, dim: int
) -> list[list[int]]:
    """Cut the cone of some rays into simplicial cones, which all share its first ray.

    Args:
        rays: numbers of the rays of the cone.
        facets: for each hyperplane, the numbers of the rays on it. Hyperplanes that meet the cone in lower dimension
            are skipped.
        vectors: all rays.
        dim: dimension of the cone.

    Returns:
        Simplicial cones, each a list of ``dim`` rays.
    """
    if len(rays) == dim:
        return [rays]
    # the cone is the union of the cones from one ray to the facets that do not contain it
    apex, inside = rays[0], frozenset(rays)
    seen: set[frozenset[int]] = set()
    out: list[list[int]] = []
    for facet in facets:
        face = facet & inside
        if apex in face or len(face) < dim - 1 or face in seen:
            continue
        if np.linalg.matrix_rank(vectors[sorted(face)], tol=TOLERANCE) == dim - 1:
            seen.add(face)
            out += [[apex, *rest] for rest in _triangulate(sorted(face), facets, vectors, dim - 1)]
    return out


def _halved(cones: np.ndarray, owner: np.ndarray, widest: float) -> tuple[np.ndarray, np.ndarray]:
    """Bisect the edges of cones until none is wider than ``widest`` (radians); pieces keep their owner's number."""
    done, owners = [], []
    r = cones.shape[1]
    i, j = np.triu_indices(r, 1)
    while len(cones):
        cosine = np.einsum("sik,sjk->sij", cones, cones)[:, i, j]
        worst = np.argmin(cosine, axis=1)
        narrow = cosine[np.arange(len(cones)), worst] >= np.cos(widest)
        done.append(cones[narrow])
        owners.append(owner[narrow])
        cones, owner, worst = cones[~narrow], owner[~narrow], worst[~narrow]
        index = np.arange(len(cones))
        middle = cones[index, i[worst]] + cones[index, j[worst]]
        middle /= np.linalg.norm(middle, axis=1, keepdims=True)
        first, second = cones.copy(), cones.copy()
        first[index, i[worst]] = middle
        second[index, j[worst]] = middle
        cones, owner = np.concatenate([first, second]), np.concatenate([owner, owner])
    return np.concatenate(done), np.concatenate(owners)


def _simplex_rule(dim: int, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return barycentric points (q, dim + 1) and weights of a quadrature rule on the simplex.

    The rule is a product of Gauss-Legendre rules on the cube, which is collapsed to the simplex. The weights sum to
    the volume 1 / dim!.
    """
    t, w = np.polynomial.legendre.leggauss(nodes)
    t, w = (t + 1) / 2, w / 2
    grid = np.stack(np.meshgrid(*[t] * dim, indexing="ij"), -1).reshape(-1, dim)
    weight = np.prod(np.stack(np.meshgrid(*[w] * dim, indexing="ij"), -1).reshape(-1, dim), axis=1)
    points, left = [], np.ones(len(grid))
    # coordinate i takes the share t_i of what the former ones have left; the Jacobian is the product of what is left
    for axis in range(dim):
        points.append(left * grid[:, axis])
        weight = weight * left
        left = left * (1 - grid[:, axis])
    return np.stack([*points, left], axis=1), weight


def cone_volumes(cones: Float[np.ndarray, "s r r"]) -> Float[np.ndarray, "s"]:
    """Return the Gaussian volumes of simplicial cones, each given by r unit rays in R^r.

    There are closed forms for r = 2 and 3. Beyond, the integral over the simplex is done by Gauss-Legendre after wide
    edges have been halved, with the errors of ``QUADRATURE``.

    >>> cone_volumes(np.eye(3)[None]).tolist()                        # one of eight octants
    [0.125]
    """
    s, r, _ = cones.shape
    # in the plane the angle of the rays over 2 pi; in space the solid angle of van Oosterom and Strackee over 4 pi
    det = np.abs(np.linalg.det(cones))
    dots = np.einsum("sik,sjk->sij", cones, cones)
    if r == 1:
        return np.full(s, 0.5)
    if r == 2:
        return np.arctan2(det, dots[:, 0, 1]) / (2 * pi)
    if r == 3:
        return np.arctan2(det, 1 + dots[:, 0, 1] + dots[:, 0, 2] + dots[:, 1, 2]) / (2 * pi)
    nodes, widest = QUADRATURE[r]
    pieces, owner = _halved(cones, np.arange(s), np.radians(widest))
    points, weight = _simplex_rule(r - 1, nodes)
    total = np.zeros(s)
    block = max(1, 20_000_000 // (len(points) * r))
    for start in range(0, len(pieces), block):
        part = pieces[start : start + block]
        square = np.einsum("qi,sij,qj->sq", points, part @ part.transpose(0, 2, 1), points, optimize=True)
        value = np.abs(np.linalg.det(part)) * (square ** (-r / 2) @ weight)
        np.add.at(total, owner[start : start + block], value)
    return total * gamma(r / 2) / (2 * pi ** (r / 2))


def cells(x: Shaped[ArrayLike, "n k"]) -> Cells:
    """Enumerate the cells of a batch and measure their volumes.

    Args:
        x: batch. Zero samples are dropped, and samples on one line count once.

    Raises:
        ValueError: when the rank exceeds ``MAX_RANK`` or the enumeration, C(n, r-1) 2^r, exceeds ``MAX_RAYS``.

    >>> cells(np.eye(2)).volumes.tolist()
    [0.25, 0.25, 0.25, 0.25]
    """
    batch = np.asarray(x, float)
    if batch.ndim != 2 or not np.isfinite(batch).all():
        raise ValueError(f"x must be finite and of shape (n, k), got shape {batch.shape}")
    lines = distinct_lines(batch)
    m = len(lines)
    if m == 0:
        return Cells(np.ones((1, 0), np.int8), np.ones(1), lines)
    _, values, basis = np.linalg.svd(lines, full_matrices=False)
    r = int(np.sum(values > TOLERANCE * values[0]))
    if r > MAX_RANK or comb(m, r - 1) * 2**r > MAX_RAYS:
        raise ValueError(
            f"x must have rank at most {MAX_RANK} and C(lines, rank - 1) 2^rank at most {MAX_RAYS} for exact "
            f"cells, got {m} lines of rank {r}; use method='monte_carlo'"
        )
    normals = lines @ basis[:r].T  # the volume of a cell only depends on the span of the samples
    touching: dict[tuple[int, ...], list[np.ndarray]] = {}
    for signs, ray in _incidences(normals):
        touching.setdefault(signs, []).append(ray)
    half = sorted(signs for signs in touching if signs[0] > 0)  # -w gives the opposite cell, equally large
    cones, owner = [], []
    for number, signs in enumerate(half):
        rays = np.array(touching[signs])
        on = np.abs(rays @ normals.T) <= TOLERANCE
        facets = [frozenset(np.flatnonzero(column).tolist()) for column in on.T]
        for simplex in _triangulate(list(range(len(rays))), facets, rays, r):
            cones.append(rays[simplex])
            owner.append(number)
    volumes = np.bincount(owner, cone_volumes(np.array(cones)), len(half))
    sides = np.array(half, np.int8)
    return Cells(np.concatenate([sides, -sides]), np.concatenate([volumes, volumes]), lines)
