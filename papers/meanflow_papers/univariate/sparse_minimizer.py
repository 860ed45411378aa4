"""The regularized problem of the univariate paper: the sparsest network, and the certificate that it is one.

This is "univariate ReLU", equations (16) and (17). Over signed measures nu on the circle of directions,

    min  1/2 sum_j q_j rho_j^2 + lam |nu|(S1),    f(x) = int <(x, 1), d(theta)>_+ nu(dtheta),  rho = f - y,

with d(theta) = (cos theta, sin theta) and data weights q_j, which are 1 by default. The first variation of the risk is
F(theta) = sum_j q_j rho_j <(x_j, 1), d(theta)>_+. The certificate: nu is optimal if and only if |F| <= lam on the whole
circle and F = -lam sign(nu) on the support of nu. It is a ReLU network with a bias whose charge |a| |b| is penalized,
so that ``meanflow.flows.global_minimum`` solves it.

``count_bias=False`` charges a neuron |c a| instead of |c| sqrt(a^2 + b^2) and leaves the constant free: this is the
unweighted total variation of f' that (17) prints. On each arc between the sample rays F is a sinusoid, and with a
balanced residual F/|cos theta| is linear in the knot: only the sample rays, and the constant, are needed.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Float

import meanflow as mf
from meanflow.univariate.knots import PiecewiseLinear, piecewise_linear


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


def sparse_minimizer(
    x: Float[ArrayLike, " s"],
    y: Float[ArrayLike, " s"],
    lam: float,
    *,
    weights: Float[ArrayLike, " s"] | None = None,
    count_bias: bool = True,
    rounds: int = 60,
    tolerance: float = 1e-10,
) -> SparseSolution:
    """Minimize (16) over all measures, on the host, by exact solves and exact new directions: a reference.

    Args:
        x: distinct samples, in any order.
        y: targets.
        lam: penalty; 0 for the interpolant of least charge.
        weights: data weights > 0, default 1 (unused for lam = 0).
        count_bias: whether the charge counts biases; see the top of this module.
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
    points, targets = np.asarray(x, float), np.asarray(y, float)
    q = np.ones_like(points) if weights is None else np.asarray(weights, float)
    for name, values in (("y", targets), ("weights", q)):
        if values.shape != points.shape:
            raise ValueError(f"{name} must have shape {points.shape} like x, got {values.shape}")
    order = np.argsort(points)
    points, targets, q = points[order], targets[order], q[order]
    for name, values in (("weights", q), ("gaps between samples", np.diff(points))):
        if not np.all(values > 0):
            raise ValueError(f"{name} must be > 0, got {values.min()}")
    if not lam >= 0:
        raise ValueError(f"lam must be >= 0, got {lam}")
    price = lambda w: jnp.abs(w.a) * (jnp.linalg.norm(w.b, axis=1) if count_bias else jnp.abs(w.b[:, 0]))
    flow = mf.vanilla("relu", bias=True, penalty=(price, lam))
    data = mf.Dataset(points[:, None], targets, q)
    rays = None
    if not count_bias:
        facing = np.stack([np.ones_like(points), -points], axis=1)
        # the constant function is a neuron that all samples switch on, and costs nothing
        rays = np.concatenate([facing, -facing, [[0.0, 1.0]]])
    best = mf.flows.global_minimum(flow, data, directions=rays, tolerance=tolerance, rounds=rounds)
    a, b = (np.asarray(u, np.float64) for u in best.cloud.particles)
    charges, theta = (
        np.asarray(best.cloud.weights) * a * np.linalg.norm(b, axis=1),
        np.arctan2(b[:, 1], b[:, 0]),
    )
    free = np.zeros(len(a), bool) if count_bias else b[:, 0] == 0
    used = (charges != 0) & ~free
    rho = best.dual / (q if lam > 0 else 1.0)
    return SparseSolution(
        theta[used], charges[used], float(charges[free].sum()), rho, best.value, best.bound, best.force
    )
