"""The regularised problem: sparse networks, their certificate, and weight decay.

Univariate ReLU, equations (16) and (17). Over signed measures nu on the circle of directions,

    min  1/2 sum_j q_j rho_j^2 + lam abs(nu)(S1),    f(x) = int <(x, 1), d(theta)>_+ nu(dtheta),  rho = f - y.

The first variation is F(theta) = sum_j q_j rho_j <(x_j, 1), d(theta)>_+. A measure is optimal if and only if
abs(F) <= lam everywhere and F = -lam sign on its support: the certificate. F is a sinusoid on each of 2s
arcs, so its supremum over the whole circle is found in closed form, not on a grid.

``count_bias=False`` charges a neuron abs(c a) instead of abs(c) sqrt(a^2 + b^2) and leaves the constant
free: this is the unweighted total variation of f' that (17) prints. Data weights q default to 1 ("sum").
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from meanflow import _checks
from meanflow.univariate.knots import PiecewiseLinear, piecewise_linear


def _data_weights(x: jax.Array, weights: jax.Array | None) -> jax.Array:
    return jnp.ones_like(x) if weights is None else jnp.asarray(weights)


def _features(theta: jax.Array, x: jax.Array) -> jax.Array:
    """<(x_j, 1), d(theta_k)>_+, shape (samples, angles)."""
    return jax.nn.relu(x[:, None] * jnp.cos(theta)[None, :] + jnp.sin(theta)[None, :])


@jax.jit
def angular_potential(
    theta: jax.Array, x: jax.Array, rho: jax.Array, *, weights: jax.Array | None = None
) -> jax.Array:
    """F(theta) = sum_j q_j rho_j <(x_j, 1), d(theta)>_+, shape of theta (k,)."""
    return (_data_weights(x, weights) * rho) @ _features(theta, x)


class Certificate(NamedTuple):
    """Stationary points of the first variation.

    Attributes:
        angles: candidate directions; the 2s sample rays, then +-G/abs(G) of each arc if it lies inside.
        values: F (over abs(cos theta) if biases are free) at the candidates; 0 where there is none.
        bound: sup over all directions of abs(values); the measure is optimal only if bound <= lam.
        imbalance: sum_j q_j rho_j; must vanish when the constant is free.
    """

    angles: jax.Array
    values: jax.Array
    bound: jax.Array
    imbalance: jax.Array


@partial(jax.jit, static_argnames="count_bias")
def certificate(
    x: jax.Array, rho: jax.Array, *, weights: jax.Array | None = None, count_bias: bool = True
) -> Certificate:
    """The exact supremum of abs(F) over all directions, and where it may be attained.

    Args:
        x: (s,) sorted, distinct samples.
        rho: (s,) residual f(x_j) - y_j.
        weights: (s,) data weights, default 1.
        count_bias: False divides F by abs(cos theta), the price of a neuron whose bias is free. With a
            balanced residual that quotient is linear between samples: only the sample rays matter.

    Returns:
        A ``Certificate``; O(s) by cumulative sums, jit and vmap.

    >>> import jax.numpy as jnp
    >>> float(certificate(jnp.array([0.0]), jnp.array([-2.0])).bound)      # a single sample: |rho| |(x, 1)|
    2.0
    """
    return _stationary(jnp, x, _data_weights(x, weights) * rho, count_bias)


def _stationary(xp: Any, x: Any, push: Any, count_bias: bool) -> Certificate:
    """``certificate`` in jax.numpy or, for the host's reference in double precision, in numpy."""
    lifted = xp.stack([push * x, push], axis=1)
    above = xp.cumsum(lifted[::-1], axis=0)  # row k: the k+1 largest samples, active past a right-facing ray
    below = xp.concatenate([xp.zeros_like(lifted[:1]), xp.cumsum(lifted, axis=0)[:-1]])[::-1]  # left-facing
    rays = xp.concatenate([-xp.arctan(x[::-1]), xp.pi - xp.arctan(x[::-1])])
    force = xp.concatenate([above, below])
    at_rays = force[:, 0] * xp.cos(rays) + force[:, 1] * xp.sin(rays)
    if not count_bias:
        values = at_rays * xp.sqrt(1 + xp.tile(x[::-1], 2) ** 2)
        return Certificate(rays, values, xp.max(xp.abs(values)), xp.sum(push))
    length = xp.mod(xp.roll(rays, -1) - rays, 2 * xp.pi)
    size = xp.sqrt(xp.sum(force**2, axis=1))
    ahead = xp.arctan2(force[:, 1], force[:, 0])
    angles, values = [rays], [at_rays]
    for sign in (1, -1):
        peak = ahead if sign == 1 else ahead + xp.pi
        inside = (size > 0) & (xp.mod(peak - rays, 2 * xp.pi) < length)
        angles.append(xp.where(inside, peak, rays))
        values.append(xp.where(inside, sign * size, 0))
    every = xp.concatenate(values)
    return Certificate(xp.concatenate(angles), every, xp.max(xp.abs(every)), xp.sum(push))


class Duality(NamedTuple):
    """Both sides of (16) for any network; the minimum lies between ``dual`` and ``primal``."""

    primal: jax.Array
    dual: jax.Array
    bound: jax.Array

    @property
    def gap(self) -> jax.Array:
        """primal - dual >= 0; 0 exactly at a minimiser."""
        return self.primal - self.dual


@jax.jit
def duality(
    r: jax.Array,
    theta: jax.Array,
    x: jax.Array,
    y: jax.Array,
    lam: ArrayLike,
    *,
    weights: jax.Array | None = None,
    particle_weights: jax.Array | None = None,
) -> Duality:
    """Objective of a network, a lower bound on the minimum over all networks, and the certificate's bound.

    Args:
        r, theta: (m,) polar neurons.
        x, y: (s,) sorted distinct samples and targets.
        lam: penalty on the charge sum_i p_i abs(r_i).
        weights: (s,) data weights, default 1.
        particle_weights: (m,) p_i, default 1/m.
    """
    p = jnp.full_like(r, 1 / r.shape[0]) if particle_weights is None else particle_weights
    q = _data_weights(x, weights)
    rho = _features(theta, x) @ (p * r) - y
    bound = certificate(x, rho, weights=weights).bound
    primal = jnp.sum(q * rho**2) / 2 + lam * jnp.sum(p * jnp.abs(r))
    # any residual, shrunk until abs(F) <= lam, is feasible for the dual problem
    shrunk = rho * jnp.minimum(1, lam / jnp.where(bound > 0, bound, 1))
    return Duality(primal, -jnp.sum(q * (shrunk * y + shrunk**2 / 2)), bound)


def charge(r: jax.Array, *, particle_weights: jax.Array | None = None) -> jax.Array:
    """The regularizer Gamma = sum_i p_i abs(r_i) of a cloud."""
    p = jnp.full_like(r, 1 / r.shape[0]) if particle_weights is None else particle_weights
    return jnp.sum(p * jnp.abs(r))


@jax.jit
def measure_variation(
    r: jax.Array, theta: jax.Array, *, particle_weights: jax.Array | None = None
) -> jax.Array:
    """Total variation of nu = int r mu(dr, .): equal angles are summed before taking absolute values.

    Never above ``charge``; equal to it unless neurons of opposite sign share a direction. (As printed,
    without the factor r, the measure is the law of the angles and its variation is always 1.)
    """
    p = jnp.full_like(r, 1 / r.shape[0]) if particle_weights is None else particle_weights
    order = jnp.argsort(theta)
    angle, mass = theta[order], (p * r)[order]
    label = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum((jnp.diff(angle) > 0).astype(jnp.int32))])
    return jnp.sum(
        jnp.abs(jax.ops.segment_sum(mass, label, num_segments=r.shape[0], indices_are_sorted=True))
    )


class SparseSolution(NamedTuple):
    """A minimiser of (16) as finitely many neurons, with its certificate; numpy arrays.

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
        """The minimiser as a piecewise linear function."""
        f = piecewise_linear(
            jnp.cos(self.theta),
            -jnp.sin(self.theta),
            jnp.asarray(self.charges),
            weights=jnp.ones(len(self.theta)),
        )
        return PiecewiseLinear(f.knots, f.jumps, f.drops, f.slope, f.intercept + self.constant)


def _columns(theta: np.ndarray, x: np.ndarray, count_bias: bool) -> np.ndarray:
    """Features divided by their price, (s, k)."""
    values = np.maximum(x[:, None] * np.cos(theta) + np.sin(theta), 0)
    return values if count_bias else values / np.abs(np.cos(theta))


def _least_squares(columns: np.ndarray, free: np.ndarray, y: np.ndarray, lam: float):
    """min 1/2 |A u + B v - y|^2 + lam |u|_1, exactly; returns u, v and the residual.

    The dual is the projection of y on a polytope, a least-distance problem, which nnls solves in finitely
    many steps; its multipliers are u and v.
    """
    from scipy.optimize import nnls

    rows = np.concatenate(
        [columns, -columns, free, -free], axis=1
    )  # +-a.p <= lam, +-b.p <= 0 for p = y - fit
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


def _interpolation(columns: np.ndarray, free: np.ndarray, y: np.ndarray):
    """min |u|_1 subject to A u + B v = y, a linear programme; returns u, v and minus the dual variables."""
    from scipy.optimize import linprog

    k, f = columns.shape[1], free.shape[1]
    result = linprog(
        np.concatenate([np.ones(2 * k), np.zeros(f)]),
        A_eq=np.concatenate([columns, -columns, free], axis=1),
        b_eq=y,
        bounds=[(0, None)] * (2 * k) + [(None, None)] * f,
        method="highs",
    )
    if not result.success:
        raise ValueError(
            f"the linear programme has no solution ({result.message}); are the samples distinct?"
        )
    return result.x[:k] - result.x[k : 2 * k], result.x[2 * k :], -np.asarray(result.eqlin.marginals)


def _merge(theta: np.ndarray, u: np.ndarray, rays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One neuron for all that share an open arc and a sign: same values on the samples, no more charge."""
    sorted_rays = np.sort(np.mod(rays, 2 * np.pi))
    turn = np.mod(theta, 2 * np.pi)
    apart = np.abs(turn[:, None] - sorted_rays[None, :]).min(axis=1)
    arc = np.searchsorted(sorted_rays, turn) % len(rays)
    label = np.where(apart < 1e-9, -1 - np.arange(len(theta)), 2 * arc + (u > 0))
    _, group = np.unique(label, return_inverse=True)
    sums = np.zeros((group.max(initial=-1) + 1, 2))
    np.add.at(sums, group, np.abs(u)[:, None] * np.stack([np.cos(theta), np.sin(theta)], axis=1))
    signs = np.zeros(len(sums))
    signs[group] = np.sign(u)
    return np.arctan2(sums[:, 1], sums[:, 0]), signs * np.hypot(sums[:, 0], sums[:, 1])


def sparse_minimiser(
    x: ArrayLike,
    y: ArrayLike,
    lam: float,
    *,
    weights: ArrayLike | None = None,
    count_bias: bool = True,
    grid: int = 256,
    rounds: int = 60,
    tolerance: float = 1e-10,
) -> SparseSolution:
    """Reference minimiser of (16) over all measures, on the host: exact solves plus exact new directions.

    Starts from all sample rays and ``grid`` equispaced angles, solves the finite problem exactly (a linear
    programme for lam = 0, interpolation of least charge; a least-distance problem for lam > 0), adds the
    directions at which the closed-form certificate is violated, and repeats.

    Args:
        x: (s,) distinct samples.
        y: (s,) targets.
        lam: penalty; 0 for the interpolant of least charge.
        weights: (s,) data weights, default 1 (unused for lam = 0).
        count_bias: whether the charge counts biases; see the module's text.
        grid: equispaced starting angles.
        rounds: largest number of rounds.
        tolerance: stop when sup abs(F) <= (1 + tolerance) lam.

    Returns:
        The minimiser with primal and dual value.
    """
    _checks.shape("x", x, (None,))
    _checks.shape("y", y, np.shape(x))
    order = np.argsort(np.asarray(x))
    x, y = np.asarray(x, float)[order], np.asarray(y, float)[order]
    _checks.finite("x", x)
    _checks.finite("y", y)
    _checks.at_least("gaps between samples", np.diff(x), 0.0, strict=True)
    _checks.at_least("lam", lam, 0.0)
    q = np.ones_like(x) if weights is None else np.asarray(weights, float)[order]
    _checks.at_least("weights", q, 0.0, strict=True)
    root = np.ones_like(x) if lam == 0 else np.sqrt(q)
    free = np.zeros((len(x), 0)) if count_bias else root[:, None]
    theta = rays = np.concatenate([-np.arctan(x), np.pi - np.arctan(x)])
    if count_bias:
        theta = np.concatenate([rays, 2 * np.pi * np.arange(grid) / grid])
    for _ in range(rounds):
        columns = root[:, None] * _columns(theta, x, count_bias)
        if lam == 0:
            u, v, rho = _interpolation(columns, free, y)
        else:
            u, v, residual = _least_squares(columns, free, root * y, lam)
            rho = residual / root
        found = _stationary(np, x, root**2 * rho, count_bias)
        bound = float(found.bound) / (lam if lam > 0 else 1.0)
        used = np.abs(u) > 1e-12 * max(np.abs(u).max(), 1e-300)
        if bound <= 1 + tolerance:
            break
        limit = (lam if lam > 0 else 1.0) * (1 + tolerance / 2)
        fresh = found.angles[np.abs(found.values) > limit]
        theta = np.unique(np.concatenate([rays, theta[used], fresh]))
    theta, u = theta[used], u[used]
    if count_bias:
        theta, u = _merge(theta, u, rays)
    total = np.abs(u).sum()
    charges = u if count_bias else u / np.abs(np.cos(theta))
    if lam == 0:
        primal, dual = total, -float(rho @ y) / max(bound, 1.0)
    else:
        primal = float(np.sum(q * rho**2) / 2 + lam * total)
        shrunk = rho / max(bound, 1.0)
        dual = -float(np.sum(q * (shrunk * y + shrunk**2 / 2)))
    return SparseSolution(theta, charges, float(v.sum()), rho, primal, dual, bound)


def decayed_balance(delta: jax.Array, rate: float | jax.Array, t: float | jax.Array) -> jax.Array:
    """The balance delta = c^2 - a^2 - b^2 under weight decay, a label that evolves: delta' = -2 rate delta.

    Weight decay adds (rate/2) sum_i (a_i^2 + b_i^2 + c_i^2) to the loss of the full network. Without it delta
    is conserved (Lemma 3); with it every network tends to balance, at a rate that knows nothing of the data.
    """
    return delta * jnp.exp(-2 * rate * t)


def decay_velocity(
    r: jax.Array, delta: jax.Array, rate: float | jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What weight decay adds to (r', theta', delta') in lifted coordinates: (-2 rate r, 0, -2 rate delta)."""
    return -2 * rate * r, jnp.zeros_like(r), -2 * rate * delta


def descended_balance(
    delta: jax.Array,
    gradients: tuple[jax.Array, jax.Array, jax.Array],
    lr: float | jax.Array,
    rate: float | jax.Array = 0.0,
) -> jax.Array:
    """delta after a gradient step, exactly: (1 - lr rate)^2 delta + lr^2 (g_c^2 - g_a^2 - g_b^2).

    Args:
        delta: (m,) balances before the step.
        gradients: (g_a, g_b, g_c), (m,) each, of the loss without the decay.
        lr: step size.
        rate: weight decay.
    """
    g_a, g_b, g_c = gradients
    return (1 - lr * rate) ** 2 * delta + lr**2 * (g_c**2 - g_a**2 - g_b**2)


def decay_to_charge(rate: float, alpha: float) -> float:
    """lam = rate * alpha: a balanced neuron pays (rate/2)(a^2 + b^2 + c^2) = lam abs(r)/m, others more."""
    return rate * alpha
