"""The regularized problem of the univariate paper: the sparsest network, and the certificate that it is one.

This is "univariate ReLU", equations (16) and (17). Over signed measures nu on the circle of directions,

    min  1/2 sum_j q_j rho_j^2 + lam |nu|(S1),    f(x) = int <(x, 1), d(theta)>_+ nu(dtheta),  rho = f - y,

with d(theta) = (cos theta, sin theta) and data weights q_j, which are 1 by default. The first variation of the risk is
F(theta) = sum_j q_j rho_j <(x_j, 1), d(theta)>_+. The certificate: nu is optimal if and only if |F| <= lam on the whole
circle and F = -lam sign(nu) on the support of nu. The 2s angles at which a sample switches on or off (the sample rays)
cut the circle into arcs; on each of them F is a sinusoid, so sup |F| has a closed form and needs no grid.

``count_bias=False`` charges a neuron |c a| instead of |c| sqrt(a^2 + b^2) and leaves the constant free: this is the
unweighted total variation of f' that (17) prints.

``sparse_minimizer`` alternates two exact steps, in double precision on the host: ``_restricted`` solves the problem
over finitely many directions, and ``stationary_points`` finds the directions at which its certificate fails.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Float
from scipy.optimize import linprog, nnls

from meanflow.univariate.knots import PiecewiseLinear, piecewise_linear


class StationaryPoints(NamedTuple):
    """The stationary points of the first variation F on the circle of directions.

    Attributes:
        angles: candidate directions; the 2s sample rays, then +-G/abs(G) of each arc if it lies inside.
        values: F (over abs(cos theta) if biases are free) at the candidates; 0 where there is none.
    """

    angles: np.ndarray
    values: np.ndarray

    @property
    def bound(self) -> float:
        """Return the supremum of abs(F) over all directions; a measure is optimal only if it is <= lam."""
        return float(np.max(np.abs(self.values)))


def stationary_points(x: np.ndarray, push: np.ndarray, count_bias: bool = True) -> StationaryPoints:
    """Find all directions at which abs(F) may be largest, in O(s).

    Args:
        x: (s,) sorted, distinct samples.
        push: (s,) q_j rho_j, the weighted residual.
        count_bias: False divides F by abs(cos theta), the price of a neuron whose bias is free. With a
            balanced residual that quotient is linear between samples: only the sample rays matter.
    """
    # On the arc behind ray k (counter-clockwise) F = <G_k, d(theta)> with G_k = sum over active samples of push (x, 1).
    # Right-facing rays -arctan x switch samples on from the largest down; left-facing ones pi - arctan x off again.
    lifted = np.stack([push * x, push], axis=1)
    above = np.cumsum(lifted[::-1], axis=0)
    below = np.concatenate([np.zeros_like(lifted[:1]), np.cumsum(lifted, axis=0)[:-1]])[::-1]
    rays = np.concatenate([-np.arctan(x[::-1]), np.pi - np.arctan(x[::-1])])
    force = np.concatenate([above, below])
    at_rays = force[:, 0] * np.cos(rays) + force[:, 1] * np.sin(rays)
    if not count_bias:
        return StationaryPoints(rays, at_rays * np.sqrt(1 + np.tile(x[::-1], 2) ** 2))
    length = np.mod(np.roll(rays, -1) - rays, 2 * np.pi)
    size = np.sqrt(np.sum(force**2, axis=1))
    ahead = np.arctan2(force[:, 1], force[:, 0])
    angles, values = [rays], [at_rays]
    # inside an arc the sinusoid has its extrema +-|G| in the directions +-G, if these lie on the arc
    for sign, peak in ((1, ahead), (-1, ahead + np.pi)):
        inside = (size > 0) & (np.mod(peak - rays, 2 * np.pi) < length)
        angles.append(np.where(inside, peak, rays))
        values.append(np.where(inside, sign * size, 0))
    return StationaryPoints(np.concatenate(angles), np.concatenate(values))


class SparseSolution(NamedTuple):
    """A minimizer of (16) as finitely many neurons, with its certificate, in numpy arrays.

    Attributes:
        theta, charges: f(x) = constant + sum_k charges_k <(x, 1), d(theta_k)>_+, shape (k,) each.
        constant: the free constant (0 when biases count).
        rho: (s,) residual at the sorted samples; for interpolation the limit of rho / lam as lam -> 0.
        primal, dual: both sides; equal up to the tolerance.
        bound: sup over the circle of the certificate over its limit; optimal if <= 1.
    """

    theta: np.ndarray
    charges: np.ndarray
    constant: float
    rho: np.ndarray
    primal: float
    dual: float
    bound: float

    def function(self) -> PiecewiseLinear:
        """Return the minimizer as a piecewise linear function."""
        f = piecewise_linear(
            jnp.cos(self.theta),
            -jnp.sin(self.theta),
            jnp.asarray(self.charges),
            weights=jnp.ones(len(self.theta)),
        )
        return dataclasses.replace(f, intercept=f.intercept + self.constant)


def _columns(theta: np.ndarray, x: np.ndarray, count_bias: bool) -> np.ndarray:
    """Return the features divided by their price, shape (samples, angles)."""
    values = np.maximum(x[:, None] * np.cos(theta) + np.sin(theta), 0)
    return values if count_bias else values / np.abs(np.cos(theta))


def _least_squares(
    columns: np.ndarray, free: np.ndarray, y: np.ndarray, lam: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Minimize 1/2 |A u + B v - y|^2 + lam |u|_1 exactly; return u, v and the residual.

    The dual is the projection of y on a polytope, a least-distance problem, which nnls solves in finitely
    many steps; its multipliers are u and v.
    """
    # The dual: the p = y - fit nearest to y with +-a.p <= lam and +-b.p <= 0 for the columns a of A, b of B. With
    # d = p - y these are rows.d <= limits - rows.y, and the shortest such d comes from the nnls problem
    # min |stacked m - (0, 1)| over m >= 0 (Lawson and Hanson, chapter 23): m over 1 - stacked[-1] m are multipliers.
    rows = np.concatenate([columns, -columns, free, -free], axis=1)
    limits = np.concatenate([np.full(2 * columns.shape[1], lam), np.zeros(2 * free.shape[1])])
    stacked = np.concatenate([-rows, (rows.T @ y - limits)[None, :]])
    target = np.zeros(len(y) + 1)
    target[-1] = 1.0
    multipliers, _ = nnls(stacked, target, maxiter=50 * stacked.shape[1])
    multipliers = multipliers / (1 - stacked[-1] @ multipliers)
    k, f = columns.shape[1], free.shape[1]
    u = multipliers[:k] - multipliers[k : 2 * k]
    v = multipliers[2 * k : 2 * k + f] - multipliers[2 * k + f :]
    return u, v, columns @ u + free @ v - y


def _interpolation(
    columns: np.ndarray, free: np.ndarray, y: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Minimize |u|_1 subject to A u + B v = y, a linear program; return u, v and minus the dual variables."""
    k, f = columns.shape[1], free.shape[1]
    result = linprog(
        np.concatenate([np.ones(2 * k), np.zeros(f)]),
        A_eq=np.concatenate([columns, -columns, free], axis=1),
        b_eq=y,
        bounds=[(0, None)] * (2 * k) + [(None, None)] * f,
        method="highs",
    )
    if not result.success:
        raise ValueError(f"the linear program has no solution ({result.message}); are the samples distinct?")
    return result.x[:k] - result.x[k : 2 * k], result.x[2 * k :], -np.asarray(result.eqlin.marginals)


def _merge(theta: np.ndarray, u: np.ndarray, rays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Make one neuron of all that share an open arc and a sign: same values on the samples, no more charge."""
    # neurons of one arc and sign see the same samples, so their vectors u d(theta) add up; by the triangle inequality
    # the sum has no more charge. Neurons on a ray (label < 0) are left alone: beside it other samples are active.
    sorted_rays = np.sort(np.mod(rays, 2 * np.pi))
    turn = np.mod(theta, 2 * np.pi)
    apart = np.abs(turn[:, None] - sorted_rays[None, :]).min(axis=1)
    arc = np.searchsorted(sorted_rays, turn) % len(rays)
    # angles come from arctan2, right to 1e-16: 1e-9 is safely on the ray, and far below any gap between samples
    label = np.where(apart < 1e-9, -1 - np.arange(len(theta)), 2 * arc + (u > 0))
    _, group = np.unique(label, return_inverse=True)
    sums = np.zeros((int(np.max(group, initial=-1)) + 1, 2))
    np.add.at(sums, group, np.abs(u)[:, None] * np.stack([np.cos(theta), np.sin(theta)], axis=1))
    signs = np.zeros(len(sums))
    signs[group] = np.sign(u)
    return np.arctan2(sums[:, 1], sums[:, 0]), signs * np.hypot(sums[:, 0], sums[:, 1])


class _Problem(NamedTuple):
    """The data of ``sparse_minimizer``, sorted by x.

    ``root`` is the square root of the data weights q, by which rows are multiplied; 1 for interpolation, which does not
    depend on q. ``rays`` are the 2s angles of the sample rays.
    """

    x: np.ndarray
    y: np.ndarray
    q: np.ndarray
    root: np.ndarray
    rays: np.ndarray
    lam: float
    count_bias: bool


class _Candidate(NamedTuple):
    """The exact solution over finitely many directions: charges u of the used ones, and its certificate."""

    theta: np.ndarray
    u: np.ndarray
    constant: float
    rho: np.ndarray
    found: StationaryPoints
    bound: float


def _prepare(x: ArrayLike, y: ArrayLike, lam: float, weights: ArrayLike | None, count_bias: bool) -> _Problem:
    """Sort the samples, in double precision on the host; refuse arrays that do not fit and samples that coincide."""
    points, targets = np.asarray(x, float), np.asarray(y, float)
    q = np.ones_like(points) if weights is None else np.asarray(weights, float)
    for name, values in (("y", targets), ("weights", q)):
        if values.shape != points.shape:
            raise ValueError(f"{name} must have shape {points.shape} like x, got {values.shape}")
    order = np.argsort(points)
    points, targets, q = points[order], targets[order], q[order]
    positive = {"weights": q, "gaps between samples": np.diff(points)}
    for name, values in positive.items():
        if not np.all(values > 0):
            raise ValueError(f"{name} must be > 0, got {values.min()}")
    if not lam >= 0:
        raise ValueError(f"lam must be >= 0, got {lam}")
    root = np.ones_like(points) if lam == 0 else np.sqrt(q)
    rays = np.concatenate([-np.arctan(points), np.pi - np.arctan(points)])
    return _Problem(points, targets, q, root, rays, float(lam), count_bias)


def _restricted(problem: _Problem, theta: np.ndarray) -> _Candidate:
    """Solve the problem exactly over the directions ``theta``; directions without charge are dropped."""
    x, y, _, root, _, lam, count_bias = problem
    columns = root[:, None] * _columns(theta, x, count_bias)
    free = np.zeros((len(x), 0)) if count_bias else root[:, None]
    if lam == 0:
        u, v, rho = _interpolation(columns, free, y)
    else:
        u, v, residual = _least_squares(columns, free, root * y, lam)
        rho = residual / root
    found = stationary_points(x, root**2 * rho, count_bias)
    bound = found.bound / (lam if lam > 0 else 1.0)
    # charges below the accuracy of the solves are rounding; 1e-300 only guards against an empty network
    used = np.abs(u) > 1e-12 * max(np.abs(u).max(), 1e-300)
    return _Candidate(theta[used], u[used], float(v.sum()), rho, found, bound)


def _solution(problem: _Problem, best: _Candidate) -> SparseSolution:
    """Merge neurons that can be one, and compute both sides of (16)."""
    _, y, q, _, rays, lam, count_bias = problem
    theta, u = _merge(best.theta, best.u, rays) if count_bias else (best.theta, best.u)
    total = float(np.abs(u).sum())
    charges = u if count_bias else u / np.abs(np.cos(theta))
    # a residual whose certificate exceeds its limit is shrunk until it is feasible for the dual problem
    shrunk = best.rho / max(best.bound, 1.0)
    if lam == 0:
        primal, dual = total, -float(shrunk @ y)
    else:
        primal = float(np.sum(q * best.rho**2) / 2 + lam * total)
        dual = -float(np.sum(q * (shrunk * y + shrunk**2 / 2)))
    return SparseSolution(theta, charges, best.constant, best.rho, primal, dual, best.bound)


def sparse_minimizer(
    x: Float[ArrayLike, " s"],
    y: Float[ArrayLike, " s"],
    lam: float,
    *,
    weights: Float[ArrayLike, " s"] | None = None,
    count_bias: bool = True,
    grid: int = 256,
    rounds: int = 60,
    tolerance: float = 1e-10,
) -> SparseSolution:
    """Minimize (16) over all measures, on the host, by exact solves and exact new directions: a reference.

    The search starts from all sample rays and ``grid`` equispaced angles, solves the problem over these directions
    exactly (a linear program for lam = 0, interpolation of least charge; a least-distance problem for lam > 0), adds
    the directions at which the closed-form certificate is violated, and repeats.

    Args:
        x: distinct samples, in any order.
        y: targets.
        lam: penalty; 0 for the interpolant of least charge.
        weights: data weights > 0, default 1 (unused for lam = 0).
        count_bias: whether the charge counts biases; see the top of this module.
        grid: number of equispaced starting angles.
        rounds: largest number of rounds.
        tolerance: the search stops when sup abs(F) <= (1 + tolerance) lam.

    Returns:
        The minimizer, in numpy arrays: angles ``theta`` and ``charges`` of its neurons, (k,) each, the free
        ``constant``, the residual ``rho`` at the sorted samples, ``primal`` and ``dual`` value and the ``bound``
        sup abs(F)/lam; ``function()`` is the network as a function. If the rounds run out, it is the best of the last
        round: its ``bound`` is then above 1 + tolerance, and the minimum still lies between ``dual`` and ``primal``.

    >>> best = sparse_minimizer([-1.0, 0.0, 1.0], [1.0, 0.0, 1.0], 0.0, count_bias=False)
    >>> round(best.primal, 9)  # the slope of |x| changes by 2
    2.0
    """
    problem = _prepare(x, y, lam, weights, count_bias)
    # with free biases the sample rays suffice, see stationary_points
    theta = problem.rays
    if count_bias:
        theta = np.concatenate([theta, 2 * np.pi * np.arange(grid) / grid])
    best = _restricted(problem, theta)
    limit = (lam if lam > 0 else 1.0) * (1 + tolerance / 2)
    for _ in range(rounds - 1):
        if best.bound <= 1 + tolerance:
            break
        # keep what carries charge, add every direction at which the certificate fails
        fresh = best.found.angles[np.abs(best.found.values) > limit]
        best = _restricted(problem, np.unique(np.concatenate([problem.rays, best.theta, fresh])))
    return _solution(problem, best)
