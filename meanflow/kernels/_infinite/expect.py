"""Expectations over jointly Gaussian values: closed forms, Hermite series, and points of low discrepancy.

For one Gaussian on either side, E[F(u) G(v)] is sum_k F_k G_k rho^k with the Hermite coefficients of each function and
the correlation rho: a quadrature in one dimension for each side, and a polynomial for each pair. What the coefficients
that are left out can amount to is known from E[F^2]. Functions of several Gaussians are averaged over points.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy import special, stats

from meanflow._numerics import safe_sqrt
from meanflow.kernels._infinite import dual

TERMS = 64
# E[.] of one standard normal: a trapezoid rule, exact to rounding for functions that are analytic near the axis; no
# node at 0, where functions with a kink have no slope
NODES = np.linspace(-10.0, 10.0, 200)
MASS = np.exp(-0.5 * NODES**2) * (NODES[1] - NODES[0]) / math.sqrt(2 * math.pi)
POINTS, AT_ONCE = 4096, 64
Function: TypeAlias = Callable[..., Array]
Pair: TypeAlias = tuple[Array, list[list[Array]]]  # E[F G], and E[dF/du_a dG/dv_b] for all a and b


def _hermite() -> np.ndarray:
    """Return the orthonormal Hermite polynomials at the nodes times the mass there, (terms, nodes)."""
    rows = [np.ones_like(NODES), NODES]
    for k in range(1, TERMS - 1):
        rows.append((NODES * rows[-1] - math.sqrt(k) * rows[-2]) / math.sqrt(k + 1))
    return np.stack(rows) * MASS


HERMITE = _hermite()


class Kinked(NamedTuple):
    """The function that is ``above`` times u for u > 0 and ``below`` times u for u < 0; or these numbers themselves."""

    above: float
    below: float
    step: bool


def kinked(function: Callable[[np.ndarray], np.ndarray]) -> Kinked | None:
    """Recognise a function that is linear, or constant, on either side of 0; by its values on many scales.

    >>> kinked(lambda u: np.where(u > 0, u, 0.1 * u))
    Kinked(above=1.0, below=0.1, step=False)
    """
    sizes = np.array([1e-2, 0.0731, 0.317, 1.0, 2.39, 5.77, 9.13, 31.7, 1e3])
    above, below = function(sizes), function(-sizes)
    if not (np.all(np.isfinite(above)) and np.all(np.isfinite(below))):
        return None
    close = lambda a, b: np.allclose(a, b, rtol=2e-6, atol=0)
    if close(above, above[3] * sizes) and close(below, below[3] * sizes):
        return Kinked(float(above[3]), float(-below[3]), False)
    if close(above, above[3]) and close(below, below[3]):
        return Kinked(float(above[3]), float(below[3]), True)
    return None


def kinked_pair(f: Kinked, g: Kinked, v: Array, w: Array, x: Array) -> Pair:
    """Return the moments of two kinked functions, by the angle between u and v."""
    if f.step != g.step:
        raise ValueError("both functions must be of one kind")
    relu = dual.dual_activation("relu")(v, w, x)
    # F = below + (above - below) H in the functions' own slopes or values, H the step: E[H H'] is relu's slope
    first, second = f.above - f.below, g.above - g.below
    rest = f.below * g.below + (f.below * second + first * g.below) / 2
    steps = rest + first * second * relu.slope
    if f.step:
        return steps, [[jnp.zeros_like(steps)]]
    return rest * x + first * second * relu.value, [[steps]]


def wave_pair(
    f: str, g: str, shift: tuple[Array | float, Array | float], v: Array, w: Array, x: Array
) -> Pair:
    """Return the moments of F(u + a) and G(v + b), each sin, cos or exp."""
    a, b = shift
    if f == g == "exp":
        value = jnp.exp((v + w) / 2 + x + a + b)
        return value, [[value]]
    # sin u = cos(u - pi / 2)
    a, b = (s - math.pi / 2 if name == "sin" else s for s, name in ((a, f), (b, g)))
    far = jnp.exp(-(v + w) / 2 - x) * jnp.cos(a + b)
    close = jnp.exp(-(v + w) / 2 + x) * jnp.cos(a - b)
    return (far + close) / 2, [[(close - far) / 2]]


def erf_pair(v: Array, w: Array, x: Array) -> Pair:
    """Return the moments of the error function."""
    found = dual.dual_activation("erf")(v, w, x)
    return found.value, [[found.slope]]


class Series(NamedTuple):
    """Hermite coefficients of F(u) and of F'(u), terms first, and the root of what is left of E[F^2] and E[F'^2]."""

    value: Float[Array, "k ..."]
    slope: Float[Array, "k ..."]
    tails: tuple[Array, Array]
    mean_slope: Array
    error: Array


def series(function: Function, variance: Array) -> Series:
    """Return the coefficients of a function of one Gaussian of this variance, elementwise."""
    nodes, mass, basis = (jnp.asarray(a, variance.dtype) for a in (NODES, MASS, HERMITE))
    column = (-1,) + (1,) * variance.ndim
    u = safe_sqrt(variance) * nodes.reshape(column)
    values, slopes = jax.jvp(function, (u,), (jnp.ones_like(u),))
    tails, found, error = [], [], jnp.asarray(0.0)
    for g in (values, slopes):
        g = jnp.broadcast_to(g, u.shape).astype(variance.dtype)
        found.append(jnp.tensordot(basis, g, 1, precision="highest"))
        square = jnp.tensordot(mass, g**2, 1, precision="highest")
        left = jnp.maximum(square - jnp.sum(found[-1] ** 2, 0), 0.0)
        # rounding is no tail
        left = jnp.where(left > 100 * float(jnp.finfo(left.dtype).eps) * square, left, 0.0)
        tails.append(safe_sqrt(left))
        # a kernel lies between the series with and without its tail; a coarser rule sees how fine the nodes are
        rough = 2 * jnp.tensordot(mass[::2], g[::2] ** 2, 1, precision="highest")
        size = jnp.where(square > 0, square, 1.0)
        error = jnp.maximum(error, jnp.max((left + jnp.abs(rough - square)) / size))
    return Series(found[0], found[1], (tails[0], tails[1]), found[1][0], error)


def series_pair(f: Series, g: Series, v: Array, w: Array, x: Array) -> Pair:
    """Return the moments of two functions from their series, whose tails are taken as those of equal functions."""
    size = safe_sqrt(v) * safe_sqrt(w)
    rho = jnp.where(size > 0, x / jnp.where(size > 0, size, 1.0), 0.0)
    # beyond +-1 by rounding only
    rho = jnp.clip(rho, -1.0, 1.0)

    def total(one: Array, two: Array, tails: tuple[Array, Array]) -> Array:
        step = lambda sum_, pair: (sum_ * rho + pair[0] * pair[1], None)
        start = jnp.broadcast_to(tails[0] * tails[1], rho.shape)
        return jax.lax.scan(step, start, (one[::-1], two[::-1]), unroll=16)[0]

    value = total(f.value, g.value, (f.tails[0], g.tails[0]))
    return value, [[total(f.slope, g.slope, (f.tails[1], g.tails[1]))]]


@functools.cache
def _points(dimension: int) -> np.ndarray:
    """Return standard normal points (blocks, at once, dimension), with the opposite of each."""
    engine = stats.qmc.Sobol(dimension, seed=0)
    points = special.ndtri(np.clip(engine.random(POINTS // 2), 1e-12, 1 - 1e-12))
    both = np.stack([points, -points], 1).reshape(-1, dimension)
    return both.reshape(-1, AT_ONCE, dimension)


def _roots(covariance: Sequence[Sequence[Array]]) -> list[list[Array]]:
    """Return the Cholesky factor, elementwise; directions without variance get none."""
    rows: list[list[Array]] = []
    for i, row in enumerate(covariance):
        mine: list[Array] = []
        for j in range(i):
            rest = row[j] - sum(mine[k] * rows[j][k] for k in range(j))
            pivot = rows[j][j]
            mine.append(jnp.where(pivot > 0, rest / jnp.where(pivot > 0, pivot, 1.0), 0.0))
        left = row[i] - sum(r**2 for r in mine)
        tiny = 1e3 * float(jnp.finfo(left.dtype).eps) * row[i]
        rows.append([*mine, safe_sqrt(jnp.where(left > tiny, left, 0.0))])
    return rows


def sampled_pair(
    f: Function, g: Function, first: int, second: int, covariance: Sequence[Sequence[Array]]
) -> tuple[Array, list[list[Array]], Array]:
    """Return the moments of functions of several Gaussians, and their relative error.

    Args:
        f, g: functions of arrays, one for each Gaussian, with an axis of points in front.
        first, second: how many Gaussians each takes; one that takes none is left out.
        covariance: lower triangle, of those of F first.
    """
    roots = _roots(covariance)
    shape = jnp.broadcast_shapes(*(r.shape for row in covariance for r in row))
    count = first + second

    def block(total: tuple, z: Array) -> tuple[tuple, Array]:
        column = (-1,) + (1,) * len(shape)
        u: list[Any] = [sum(r * z[:, k].reshape(column) for k, r in enumerate(row)) for row in roots]
        mean = lambda a: jnp.broadcast_to(jnp.mean(a, 0), shape)
        one, two = _with_slopes(f, u[:first]), _with_slopes(g, u[first:])
        value = mean(one[0] * two[0])
        # without a second function, the slopes of the first
        moments = [[mean(s * t) for t in (two[1] if second else (1.0,))] for s in one[1]]
        return jax.tree.map(jnp.add, total, (value, moments, mean(one[0] ** 2), mean(two[0] ** 2))), value

    dtype = roots[0][0].dtype
    points = jnp.asarray(_points(count), dtype)
    zero = jnp.zeros(shape, dtype)
    start = (zero, [[zero] * max(second, 1) for _ in range(first)], zero, zero)
    total, values = jax.lax.scan(block, start, points)
    value, moments, *squares = jax.tree.map(lambda a: a / len(points), total)
    gap = jnp.abs(jnp.mean(values[::2], 0) - jnp.mean(values[1::2], 0)) / 2
    size = jnp.sqrt(squares[0] * squares[1])
    return value, moments, jnp.max(gap / jnp.where(size > 0, size, 1.0))


def _with_slopes(function: Function, u: Sequence[Array]) -> tuple[Array, Sequence[Array]]:
    """Return the values of a function and its derivative in each argument."""
    if not u:
        return jnp.ones(1), ()
    wide = jnp.broadcast_arrays(*u)
    value, pull = jax.vjp(function, *wide)
    return value, pull(jnp.ones_like(value))
