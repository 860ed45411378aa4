"""Exact Wasserstein distances between discrete measures mu = sum_i a_i delta(x_i) and nu = sum_j b_j delta(y_j).

    W_p(mu, nu) = ( min over couplings P of sum_ij P_ij c(x_i, y_j)^p )^(1/p),    P >= 0, P 1 = a, P' 1 = b,

for N points x_i and M points y_j. Results are always the distance itself: no p-th power, no entropy, no regularization.

On the line with c = |x - y| the best coupling keeps the order of the points, so that W_p is the L^p distance of the two
quantile functions, int_0^1 |F^-1(u) - G^-1(u)|^p du: a sort. It is done in JAX under jit, vmap and grad, and by numpy
where the points are known and on a CPU, which sorts several times faster. Anything else is solved on the host. Where
all masses are equal, some permutation is an optimal coupling (Birkhoff), which scipy's assignment solver finds;
otherwise P is the solution of a linear program with N M unknowns, which POT's network simplex method finds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize
import scipy.spatial.distance
from jaxtyping import Array, ArrayLike, Float, PyTree, Shaped

from meanflow import _boundary
from meanflow._boundary import array, checked, choice, either, number, taking
from meanflow._lazy import optional
from meanflow._numerics import power_mean, scaled_norm
from meanflow.geometry._public import nonzero
from meanflow.measures._cloud import CLOUD, BatchNormNeurons, Cloud, Neurons, Polar

MAX_ASSIGNMENT = 4096
"""Largest number N of points that are assigned exactly. The time grows like N^3 at worst: 0.15 s of one core for 1000
Gaussian points in space, 3.3 s for 4096, whose costs take 8 N^2 bytes, 134 MB."""

MAX_PROGRAM = MAX_ASSIGNMENT**2
"""Largest number N M of pairs of points whose masses are coupled: the same memory."""

Points: TypeAlias = PyTree[Shaped[ArrayLike, "..."]]
"""A cloud: an array whose leading axis counts the points, or a pytree of such arrays."""

Cost = Annotated[
    Callable[[Points, Points], Float[Array, "n m"]] | Literal["cylinder"],
    either(choice("cylinder"), taking(2)),
]
"""A pairwise ground distance, clouds of N and M points -> (N, M), or the name of one."""


Order = Annotated[float, number(low=1, static=True)]

_ARRAY = array(rank=1, least=1)
PointWeights = Annotated[Shaped[ArrayLike, "_"], array((None,), low=0.0, least=1)]


def points(name: str, value: object) -> object:
    """Accept points, finite numbers (N, ...) with N >= 1 or a pytree of such arrays, and a ``Cloud`` of neurons."""
    if isinstance(value, Cloud):
        return CLOUD(name, value)
    leaves = jax.tree.leaves(value)
    # nested lists of numbers are one array, though a pytree of numbers to jax
    if not leaves or all(isinstance(leaf, int | float) for leaf in leaves):
        return _ARRAY(name, value)
    for leaf in leaves:
        _ARRAY(name, leaf)
    return value


AnyPoints = Annotated[Points | Cloud, points]


@checked
def wasserstein(
    x: AnyPoints,
    y: AnyPoints,
    p: Order = 1,
    *,
    weights_x: PointWeights | None = None,
    weights_y: PointWeights | None = None,
    cost: Cost | None = None,
) -> Float[Array, ""]:
    """Return the exact p-Wasserstein distance between two weighted point clouds.

    On the line (d = 1 and no ``cost``) it costs O((N+M) log(N+M)) and is differentiable in points and weights.
    Otherwise it is computed on the host in float64: uniform clouds of equal size in O(N^3) operations at worst, up to
    N = ``MAX_ASSIGNMENT``; other clouds by the network simplex method with N M <= ``MAX_PROGRAM`` unknowns.

    Args:
        x: points (N,) or (N, d); a ``Cloud`` of neurons, which has its weights; with ``cost`` any pytree of arrays with
            leading axis N.
        y: points (M,) or (M, d), or a pytree or a cloud likewise.
        p: order, at least 1.
        weights_x: nonnegative weights of the points of x, which are scaled to sum 1; uniform by default. Points of
            weight zero do not count.
        weights_y: weights of the points of y.
        cost: pairwise ground distance (x, y) -> (N, M); Euclidean by default, in all coordinates of a neuron.
            ``"cylinder"`` is the geodesic distance sqrt(|a - a'|^2 + angle(b, b')^2) of R^k x S^(d-1), in radians:
            points are then pairs of a (N,) or (N, k) and unit vectors b (N, d). ``Polar`` neurons live there, for
            them it is the default, and so do neurons under batch norm, raw or on the manifold, of which it sees the
            direction of b alone. The mean-field theory takes p = 2.

    Returns:
        The distance (not its p-th power) in the dtype of the points.

    Raises:
        ModuleNotFoundError: if unequal weights or sizes off the line need POT, which is not installed.
        ValueError: on mismatched shapes, bad weights or order, and sizes above the limits; and when a cloud that needs
            the host is being traced. In that case call ``transport_plan`` outside and differentiate its cost.

    >>> print(wasserstein(jnp.array([0.0, 1.0]), jnp.array([2.0, 5.0])))
    3.0
    >>> print(wasserstein(jnp.array([[0.0, 0.0]]), jnp.array([[3.0, 4.0]]), p=2))
    5.0
    >>> neuron = lambda a, b: (jnp.array([a]), jnp.array([b]))
    >>> print(wasserstein(neuron(0.0, [1.0, 0.0]), neuron(3.0, [1.0, 0.0]), p=2, cost="cylinder"))
    3.0
    >>> turned = [Cloud(Polar(jnp.ones(2), jnp.full(2, angle))) for angle in (3.0, -3.0)]
    >>> print(wasserstein(*turned, p=2).round(4))  # the short way round
    0.2832
    """
    x, y, weights_x, weights_y, cost = _networks(x, y, weights_x, weights_y, cost)
    if cost is None:
        x, y = _clouds(x, y)
        if x.ndim == 1 or x.shape[1] == 1:
            check_weights("weights_x", weights_x, x.shape[0])
            check_weights("weights_y", weights_y, y.shape[0])
            return _on_the_line(x, y, weights_x, weights_y, p)
    costs, coupling = _solve(x, y, p, cost, weights_x, weights_y)
    used = costs[coupling.rows, coupling.columns].astype("float64")
    return jnp.asarray(costs.dtype.type(_power_mean(used, coupling.mass, p)))


def _power_mean(values: np.ndarray, mass: np.ndarray | None, p: float) -> float:
    """Return (sum mass values^p)^(1/p) of nonnegative values on the host; None for equal masses."""
    mean = lambda u: float(np.mean(u, dtype="float64") if mass is None else np.dot(mass, u))
    if p == 1:
        return mean(values)
    values = values.astype("float64")
    scale = float(values.max(initial=0.0)) or 1.0  # powers overflow and underflow long before the values do
    return scale * mean((values / scale) ** p) ** (1 / p)


@checked
def transport_plan(
    x: AnyPoints,
    y: AnyPoints,
    p: Order = 1,
    *,
    weights_x: PointWeights | None = None,
    weights_y: PointWeights | None = None,
    cost: Cost | None = None,
) -> Float[np.ndarray, "n m"]:
    """Return an optimal coupling of two clouds: entry (i, j) is the mass that moves from x_i to y_j.

    The computation always runs on the host. By the envelope theorem the gradient of W_p^p in the points is that of
    sum(P * cost(x, y)**p) with the coupling P held fixed.

    Args:
        x, y, p, weights_x, weights_y, cost: as for ``wasserstein``.

    >>> transport_plan(jnp.array([[0.0], [1.0]]), jnp.array([[1.1], [0.2]]))
    array([[0. , 0.5],
           [0.5, 0. ]])
    """
    x, y, weights_x, weights_y, cost = _networks(x, y, weights_x, weights_y, cost)
    if cost is None:
        x, y = (u.reshape(u.shape[0], -1) for u in _clouds(x, y))
    costs, coupling = _solve(x, y, p, cost, weights_x, weights_y)
    plan = np.zeros(costs.shape)
    plan[coupling.rows, coupling.columns] = coupling.mass
    return plan


def _networks(
    x: Points, y: Points, weights_x: ArrayLike | None, weights_y: ArrayLike | None, cost: Cost | None
) -> tuple[Points, Points, ArrayLike | None, ArrayLike | None, Cost | None]:
    """Return the neurons of two clouds as points, with their weights and the distance that is theirs."""
    if not isinstance(x, Cloud) and not isinstance(y, Cloud):
        return x, y, weights_x, weights_y, cost
    given = [type(u.particles).__name__ if isinstance(u, Cloud) else "no cloud" for u in (x, y)]
    if given[0] != given[1]:
        raise ValueError(f"x and y must be clouds of neurons of one kind, got {given[0]} and {given[1]}")
    if weights_x is not None or weights_y is not None:
        raise ValueError("weights_x and weights_y must be None for clouds, which have weights of their own")
    cost = "cylinder" if cost is None and isinstance(x.particles, Polar) else cost
    return _neurons(x, cost), _neurons(y, cost), x.weights, y.weights, cost


def _neurons(cloud: Cloud, cost: Cost | None) -> Points:
    """Return the neurons of a cloud as points of the space in which a cost measures."""
    w = cloud.particles
    columns = lambda parts: jnp.concatenate(
        [u.reshape(cloud.size, -1) for u in jax.tree.leaves(parts)], axis=1
    )
    if cost is None:
        return columns(w)
    if cost != "cylinder":
        return w
    if isinstance(w, Polar):
        return w.r, jnp.stack([jnp.cos(w.theta), jnp.sin(w.theta)], axis=-1)
    if not isinstance(w, Neurons | BatchNormNeurons):
        raise ValueError(f"cost='cylinder' needs Polar or two-layer neurons (a, b), got {type(w).__name__}")
    flat = {name: u for name, u in w._asdict().items() if name != "b"}
    return columns(flat), nonzero("particles.b", w.b) / scaled_norm(w.b)[:, None]


@jax.jit
def euclidean(x: Float[Array, "n d"], y: Float[Array, "m d"]) -> Float[Array, "n m"]:
    """Return the Euclidean distances between all points of x and y; at coincident points the gradient is 0.

    >>> print(euclidean(jnp.zeros((1, 2)), jnp.array([[3.0, 4.0], [0.0, 0.0]])))
    [[5. 0.]]
    """
    # compiled so that the (N, M, d) differences are reduced as they are formed
    return scaled_norm(x[:, None, :] - y[None, :, :])


def cylinder_distance(x: Points, y: Points) -> Float[Array, "n m"]:
    """Return the distances c((a, b), (a', b')) = sqrt(|a - a'|^2 + angle(b, b')^2) on R^k x S^(d-1).

    The angle 2 atan2(|b - b'|, |b + b'|) is accurate near 0 and near pi, where arccos loses half the digits.

    Args:
        x: pair of a (N,) or (N, k) and unit vectors b (N, d).
        y: pair of a' (M,) or (M, k) and unit vectors b' (M, d).
    """
    for name, pair in (("x", x), ("y", y)):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(f"{name} must be a pair (a, b) of arrays, got {_boundary.show(pair)}")
        _boundary.shape(f"a of {name}", pair[0], (None,), (None, None))
        _boundary.shape(f"b of {name}", pair[1], (jnp.shape(pair[0])[0], None))
        norms = _boundary.concrete(jnp.linalg.norm(jnp.asarray(pair[1]), axis=1))
        # single precision leaves errors of 1e-7 in a norm; 1e-4 is far beyond rounding and changes no angle visibly
        if norms is not None and not np.all(np.abs(norms - 1) <= 1e-4):
            worst = norms[np.argmax(np.abs(norms - 1))]
            raise ValueError(f"b of {name} must have unit rows, got a row of norm {worst}")
    (a, b), (a2, b2) = jax.tree.map(jnp.asarray, (tuple(x), tuple(y)))
    if a.shape[1:] != a2.shape[1:] or b.shape[1:] != b2.shape[1:]:
        raise ValueError(
            f"x and y must have points of the same shape, got a {a.shape} and {a2.shape}, b {b.shape} and {b2.shape}"
        )
    a, a2 = (u.reshape(u.shape[0], -1) for u in (a, a2))
    # |b - b'| = 2 sin(angle/2) and |b + b'| = 2 cos(angle/2) for unit vectors
    angle = 2 * jnp.arctan2(euclidean(b, b2), euclidean(b, -b2))
    return scaled_norm(jnp.stack([euclidean(a, a2), angle], axis=-1))


def _on_the_line(
    x: jax.Array, y: jax.Array, weights_x: ArrayLike | None, weights_y: ArrayLike | None, p: float
) -> jax.Array:
    """Return W_p on the line: by numpy where all is known and on the host, else by a compiled program."""
    if x.ndim > 1:
        x, y = x.reshape(-1), y.reshape(-1)
    weights = [None if w is None else jnp.asarray(w, x.dtype) for w in (weights_x, weights_y)]
    # values that are being traced have no concrete form
    host = [None if u is None else _boundary.concrete(u) for u in (x, y, *weights)]
    traced = any(u is not None and v is None for u, v in zip((x, y, *weights), host, strict=True))
    if traced or any(device.platform != "cpu" for u in (x, y) for device in u.devices()):
        return _line(x, y, *weights, p)
    # a numpy number of the right type: to convert another one on the device takes as long as to sort 10 000 points
    return jnp.asarray(x.dtype.type(_power_mean(*_quantile_gaps(np, *host), p)))


@partial(jax.jit, static_argnames="p")
def _line(
    x: jax.Array, y: jax.Array, weights_x: ArrayLike | None, weights_y: ArrayLike | None, p: float
) -> jax.Array:
    """Return W_p on the line, the L^p distance between the two quantile functions."""
    gaps, mass = _quantile_gaps(jnp, x, y, weights_x, weights_y)
    return power_mean(gaps, p, mass)


def _quantile_gaps(xp: Any, x: Any, y: Any, weights_x: Any, weights_y: Any) -> tuple[Any, Any]:
    """Return the distances of the quantile functions of two samples and their masses (None: equal).

    Args:
        xp: numpy, or jax.numpy.
        x: points (N,) of that library.
        y: points (M,).
        weights_x: their weights, or None for equal ones.
        weights_y: weights of y.
    """
    if weights_x is None and weights_y is None and x.size == y.size:
        gaps = xp.sort(x)
        gaps -= xp.sort(y)  # numpy subtracts in place: fresh memory takes longer than the arithmetic
        return (np.abs(gaps, out=gaps) if xp is np else xp.abs(gaps)), None
    # unequal masses: both quantile functions are steps, with the levels at which they jump
    quantiles, levels = [], []
    for points, weights in ((x, weights_x), (y, weights_y)):
        order = xp.argsort(points)
        level = xp.cumsum(xp.ones_like(points) if weights is None else weights[order])
        quantiles.append(points[order])
        levels.append(level / level[-1])
    # between two consecutive levels both quantile functions are constant
    cuts = xp.sort(xp.concatenate(levels))
    starts = xp.concatenate([xp.zeros(1, cuts.dtype), cuts[:-1]])
    middles = (starts + cuts) / 2  # only compared below, which has no derivative
    gaps = [
        q[xp.minimum(xp.searchsorted(level, middles), q.size - 1)]
        for q, level in zip(quantiles, levels, strict=True)
    ]
    return xp.abs(gaps[0] - gaps[1]), cuts - starts


class Coupling(NamedTuple):
    """The positive entries of a coupling: ``mass`` moves from points ``rows`` of x to points ``columns`` of y."""

    rows: np.ndarray
    columns: np.ndarray
    mass: np.ndarray


def _solve(
    x: Points,
    y: Points,
    p: float,
    cost: Cost | None,
    weights_x: ArrayLike | None,
    weights_y: ArrayLike | None,
) -> tuple[np.ndarray, Coupling]:
    """Return the pairwise costs (N, M) and an optimal coupling, on the host."""
    if any(_boundary.concrete(u) is None for u in jax.tree.leaves((x, y))):
        raise ValueError(
            "x and y must be concrete: exact transport off the line runs on the host. Call it outside jit "
            "and grad (transport_plan gives the coupling to differentiate), or use sliced_wasserstein"
        )
    n, m = (jax.tree.leaves(u)[0].shape[0] for u in (x, y))
    check_weights("weights_x", weights_x, n)
    check_weights("weights_y", weights_y, m)
    mass_x, mass_y = _mass(weights_x, n), _mass(weights_y, m)
    # points of weight zero do not count and would make the problem larger
    rows, columns = np.flatnonzero(mass_x), np.flatnonzero(mass_y)
    mass_x, mass_y = mass_x[rows], mass_y[columns]
    # equal masses on both sides: some permutation is optimal (Birkhoff), and the assignment solver is far faster
    matching = bool(rows.size == columns.size and np.ptp(mass_x) <= 1e-12 and np.ptp(mass_y) <= 1e-12)
    size, largest = (rows.size, MAX_ASSIGNMENT) if matching else (rows.size * columns.size, MAX_PROGRAM)
    if size > largest:
        what = "assignment takes at most {} points" if matching else "transport takes at most {} pairs"
        raise ValueError(f"exact {what.format(largest)}, got {size}; subsample or use sliced_wasserstein")
    distances = _distances if cost is None else cylinder_distance if cost == "cylinder" else cost
    costs = np.asarray(distances(x, y))
    _boundary.shape("cost(x, y)", costs, (n, m))
    _boundary.finite("cost(x, y)", costs)
    _boundary.bounds("cost(x, y)", costs, low=0.0)
    powers = costs if rows.size == n and columns.size == m else costs[np.ix_(rows, columns)]
    # the plan does not depend on the unit of length
    powers = powers.astype("float64") / (float(powers.max()) or 1.0)
    powers = powers if p == 1 else powers * powers if p == 2 else powers**p
    if matching:  # the best permutation matrix divided by n
        first, second = scipy.optimize.linear_sum_assignment(powers)
        mass = np.full(len(first), 1 / len(first))
    else:
        first, second, mass = _couple(powers, mass_x, mass_y)
    return costs, Coupling(rows[first], columns[second], mass)


def _distances(x: ArrayLike, y: ArrayLike) -> np.ndarray:
    """Return the Euclidean distances between all points, (N, M), in the type of the points."""
    # in units of the largest entry: squares of very large or very small numbers leave the range of floats
    host_x, host_y = np.asarray(x), np.asarray(y)
    scale = float(max(np.abs(host_x).max(), np.abs(host_y).max())) or 1.0
    scaled = (u.astype("float64") / scale for u in (host_x, host_y))
    return (scale * scipy.spatial.distance.cdist(*scaled)).astype(host_x.dtype)


def _couple(powers: np.ndarray, mass_x: np.ndarray, mass_y: np.ndarray) -> Coupling:
    """Return the coupling of least total cost between two positive mass vectors, by the network simplex method."""
    lp = optional("ot.lp", "transport", "the exact distance of clouds with unequal weights or sizes")
    # the bound on the iterations is against going round in circles, and never reached
    plan, log = lp.emd(mass_x, mass_y, np.ascontiguousarray(powers), numItermax=10**9, log=True)
    if log["warning"] is not None:
        raise RuntimeError(f"the network simplex method failed: {log['warning']}")
    rows, columns = np.nonzero(plan)
    return Coupling(rows, columns, plan[rows, columns])


def _mass(weights: ArrayLike | None, size: int) -> np.ndarray:
    """Return the weights scaled to sum 1, uniform if None."""
    if weights is None:
        return np.full(size, 1 / size)
    mass = np.asarray(weights, "float64")
    return mass / mass.sum()


def check_weights(name: str, weights: ArrayLike | None, size: int) -> None:
    """Refuse weights of another length, and a sum of zero where it can be looked at."""
    if weights is None:
        return
    _boundary.shape(name, weights, (size,))
    values = _boundary.concrete(weights)
    if values is not None and not values.sum() > 0:
        raise ValueError(f"{name} must have a positive sum, got {values.sum()}")
    if values is not None and not np.isfinite(np.square(values.sum(dtype=values.dtype))):
        raise ValueError(f"{name} must have a sum whose square is finite, got {values.sum():.3g}")


def _clouds(x: Points, y: Points) -> tuple[jax.Array, jax.Array]:
    """Return both clouds as floating-point arrays whose points have the same shape."""
    for name, cloud in (("x", x), ("y", y)):
        if not isinstance(cloud, jax.Array):
            _boundary.numeric(name, cloud)  # other pytrees need a cost
    x, y = (u if isinstance(u, jax.Array) else jnp.asarray(u) for u in (x, y))
    given = x.dtype if x.dtype == y.dtype else jnp.result_type(x, y)
    # integers and booleans are points of the default float type
    dtype = given if jnp.issubdtype(given, jnp.inexact) else jnp.result_type(float)
    for name, cloud in (("x", x), ("y", y)):
        if cloud.ndim not in (1, 2):
            raise ValueError(f"{name} must have shape (N,) or (N, d), got {cloud.shape}")
    if x.shape[1:] != y.shape[1:]:
        raise ValueError(f"x and y must have points of the same shape, got {x.shape[1:]} and {y.shape[1:]}")
    x, y = (u if u.dtype == dtype else u.astype(dtype) for u in (x, y))
    return x, y
