"""The largest |F| over the unit sphere, F(u) = sum_j r_j s(z_j . u), with an upper bound; on the host, in float64.

For s(t) = plus t or minus t by the sign of t, such as ReLU, the hyperplanes z_j . u = 0 cut space into cells, on
which F(u) = <g, u>: a maximum lies at g/|g| for the g of its cell, or on a hyperplane, where the same holds in one
dimension less. ``stationary`` walks all these faces, O(n^(d-1)) of them. ``cover`` bounds F for any s on boxes that
cover the sphere: by value, slope and curvature at the middle, and by how far samples are from their kinks.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Function = Callable[[np.ndarray], np.ndarray]
CLOSE = 1e-12  # the sine of angles that count as none: far above rounding, far below what samples differ by
CHUNK = 2**21  # numbers of an array over boxes and samples


class Slopes(NamedTuple):
    """Slopes of a positively homogeneous activation for positive and for negative numbers."""

    plus: float
    minus: float

    def at(self, z: np.ndarray) -> np.ndarray:
        """Return the slope at each number."""
        return np.where(z > 0, self.plus, self.minus)


class Maximum(NamedTuple):
    """What is known of max |F|.

    Attributes:
        directions: (k, d) unit vectors, of which the first is the best one found.
        values: (k,) |F| there.
        bound: |F| is nowhere larger.
    """

    directions: np.ndarray
    values: np.ndarray
    bound: float


class _Search:
    """Collects the points at which F is stationary along the face that they lie on."""

    def __init__(self, z: np.ndarray, r: np.ndarray, slopes: Slopes, above: float | None) -> None:
        self.z, self.r, self.slopes, self.above = z, r, slopes, above
        self.found: list[tuple[np.ndarray, np.ndarray]] = []
        self.best = -np.inf

    def look(self, u: np.ndarray, expected: np.ndarray) -> None:
        """Look at the directions u (k, d), at which |F| is ``expected`` if they lie in the closure of their face."""
        # pruned: |F| <= |g| in a cell; what is below the best one, or the limit, is not looked at
        worth = expected > (self.best if self.above is None else self.above) * (1 - CLOSE)
        for part in np.array_split(np.flatnonzero(worth), 1 + int(worth.sum()) * len(self.z) // CHUNK):
            t = u[part] @ self.z.T
            value = np.abs((t * self.slopes.at(t)) @ self.r)
            inside = value >= expected[part] * (1 - 1e-9)
            if inside.any():
                self.found.append((u[part][inside], value[inside]))
                self.best = max(self.best, float(value[inside].max()))

    def cells(self, w: np.ndarray, frame: np.ndarray) -> np.ndarray:
        """Go through all faces of the arrangement of w (n, e) in the space of ``frame`` (d, e); return signs of cells.

        Signs are (cells, n): on which side of each hyperplane a cell lies, and 0 for samples that are zero here.
        """
        size = np.linalg.norm(w, axis=1)
        live = np.flatnonzero(size > 0)
        if w.shape[1] == 1 or not len(live):
            side = np.sign(w[:, :1].T)
            signs = np.concatenate([side, -side])
        elif w.shape[1] == 2:
            unit = w[live] / size[live, None]
            rays = np.stack([-unit[:, 1], unit[:, 0]], axis=1)
            self._gradients(np.concatenate([rays, -rays]), w, frame, rays_of=True)
            across, along = rays @ w.T, np.sign(unit @ w.T)
            on = np.abs(across) <= CLOSE * size
            # every cell once: the one that begins at a ray, counter-clockwise
            signs = np.concatenate([np.where(on, -s * along, s * np.sign(across)) for s in (1.0, -1.0)])
        else:
            parts, done = [], np.zeros(len(w), dtype=bool)
            for j in live:
                if done[j]:  # parallel to one before
                    continue
                null = np.linalg.svd(w[j : j + 1])[2][1:].T
                below = w @ null
                on = np.linalg.norm(below, axis=1) <= CLOSE * size
                done |= on
                below[on] = 0.0
                inner, along = self.cells(below, frame @ null), np.sign(w @ w[j])
                parts += [np.where(on, s * along, inner) for s in (1.0, -1.0)]
            signs = np.concatenate(parts).astype(np.int8)
        self._gradients(signs, w, frame)
        return signs

    def _gradients(self, signs: np.ndarray, w: np.ndarray, frame: np.ndarray, rays_of: bool = False) -> None:
        """Look at the points +-g/|g| of cells, or at rays themselves."""
        if rays_of:
            t = signs @ w.T
            self.look(signs @ frame.T, np.abs((t * self.slopes.at(t)) @ self.r))
            return
        for part in np.array_split(signs, 1 + signs.size // CHUNK):
            g = (self.slopes.at(part) * self.r) @ w
            size = np.linalg.norm(g, axis=1)
            u = g[size > 0] / size[size > 0, None] @ frame.T
            for sign in (1.0, -1.0):
                self.look(sign * u, size[size > 0])


def stationary(z: np.ndarray, r: np.ndarray, slopes: Slopes, above: float | None = None) -> Maximum:
    """Return all directions at which |F| is stationary, or above which it need not be known, exactly.

    Args:
        z: (n, d) samples.
        r: (n,) weighted residual.
        slopes: of the activation.
        above: keep the stationary points with |F| above this; None: only the best one.

    >>> found = stationary(np.eye(2), np.ones(2), Slopes(1.0, 0.0))
    >>> found.directions[0].round(6).tolist(), round(found.bound, 6)
    ([0.707107, 0.707107], 1.414214)
    """
    search = _Search(z, r, slopes, above)
    length = np.linalg.norm(z, axis=1)
    search.cells(np.where(length[:, None] > CLOSE * length.max(), z, 0.0), np.eye(z.shape[1]))
    # a cell thinner than ``CLOSE`` may be missed: F differs there by no more than this from what was seen beside it
    slack = CLOSE * max(map(abs, slopes)) * float(np.abs(r) @ length)
    if not search.found:
        axis = np.eye(1, z.shape[1])
        return Maximum(axis, np.zeros(1), max(slack, above or 0.0))
    directions, values = (np.concatenate(u) for u in zip(*search.found, strict=True))
    order = np.argsort(-values)[: 1 if above is None else None]
    return Maximum(directions[order], values[order], float(values[order[0]]) + slack)


class Shape(NamedTuple):
    """An activation as ``cover`` needs it: s, s', a bound of |s''| away from kinks, and how far s' jumps at 0."""

    value: Function
    slope: Function
    curvature: float
    jump: float


def cover(
    z: np.ndarray, r: np.ndarray, shape: Shape, start: np.ndarray, budget: int, tolerance: float
) -> Maximum:
    """Bound |F| by branch and bound over boxes on the surface of a cube.

    Args:
        z: (n, d) samples.
        r: (n, k) weighted residuals of k outputs.
        shape: of the activation.
        start: (l, d) directions to look at first.
        budget: the most boxes that are looked at.
        tolerance: boxes whose bound is within this part of the best value are left alone.
    """
    d, length = z.shape[1], np.linalg.norm(z, axis=1)
    weight = np.linalg.norm(r, axis=1)
    bend = 0.5 * shape.curvature * np.linalg.norm((np.sqrt(weight)[:, None] * z), 2) ** 2
    values = np.linalg.norm(shape.value(start @ z.T) @ r, axis=1)
    best, where = float(values.max()), start[np.argmax(values)]

    def bounds(middle: np.ndarray, half: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return directions of boxes, |F| there, and what it is at most on the boxes."""
        u = middle / np.linalg.norm(middle, axis=1, keepdims=True)
        # boxes lie outside of the ball, onto which to project makes no distance larger
        reach = np.linalg.norm(half, axis=1)
        t = u @ z.T
        force = shape.value(t) @ r
        value = np.linalg.norm(force, axis=1)
        slope = np.einsum("bj,jk,jd->bkd", shape.slope(t), r, z, optimize=True)
        radial = np.einsum("bkd,bd->bk", slope, u)
        slope -= radial[:, :, None] * u[:, None, :]
        # to first order |F| changes by the part of the slope along F; what is across counts at second order
        ahead = np.einsum("bkd,bk->bd", slope, force / np.maximum(value, np.finfo(float).tiny)[:, None])
        steep = np.linalg.norm(ahead, axis=1)
        across = np.maximum(np.sum(slope**2, axis=(1, 2)) - steep**2, 0.0) if r.shape[1] > 1 else 0.0
        # from u to another unit vector at distance h it is h^2/2 back along u
        most = np.sqrt((value + steep * reach) ** 2 + across * reach**2)
        most += (0.5 * np.linalg.norm(radial, axis=1) + bend) * reach**2
        if shape.jump:
            most += shape.jump * (np.maximum(reach[:, None] * length - np.abs(t), 0.0) @ weight)
        return u, value, most

    middle = np.concatenate([np.eye(d), -np.eye(d)])
    half = np.tile(1.0 - np.eye(d), (2, 1))
    u, value, most = bounds(middle, half)
    looked, batch = len(u), max(16, CHUNK // (z.size + 1))
    while True:
        if value.max(initial=-np.inf) > best:
            best, where = float(value.max()), u[np.argmax(value)]
        open_ = most > best * (1 + tolerance)
        middle, half, most = middle[open_], half[open_], most[open_]
        if not len(most) or looked >= budget:
            break
        order = np.argsort(-most)
        now, rest = order[:batch], order[batch:]
        # halve the longest side
        axis = np.argmax(half[now], axis=1)
        step = np.zeros_like(half[now])
        step[np.arange(len(now)), axis] = half[now, axis] / 2
        fresh, narrow = (
            np.concatenate([middle[now] + step, middle[now] - step]),
            np.tile(half[now] - step, (2, 1)),
        )
        u, value, bound = bounds(fresh, narrow)
        # a part is bounded by the whole, too
        bound = np.minimum(bound, np.tile(most[now], 2))
        looked += len(u)
        middle, half = np.concatenate([middle[rest], fresh]), np.concatenate([half[rest], narrow])
        most = np.concatenate([most[rest], bound])
    return Maximum(where[None], np.array([best]), max(best * (1 + tolerance), float(most.max(initial=0.0))))
