"""Margins of classifiers: how far the flow of a logistic loss gets, and how far one can get at all.

While a logistic or softmax loss decays, predictions grow without bound; what converges is the margin over a norm. With
both layers trained the norm is the variation norm 1/2 sum_i p_i (a_i^2 + |b_i|^2), with the output layer alone it is
that of the kernel space, (sum_i p_i a_i^2)^(1/2). The best margins are a linear and a quadratic programme.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from meanflow import _boundary
from meanflow._boundary import checked
from meanflow._numerics import safe_norm
from meanflow._observable import Observable, Values
from meanflow.flows import _equation as equation
from meanflow.flows._features import TwoLayer
from meanflow.flows._flow import Flow
from meanflow.flows._problem import Problem
from meanflow.geometry._neurons import LayerRates
from meanflow.measures._cloud import Cloud, Neurons
from meanflow.measures._dataset import Dataset

NORMS = ("variation", "kernel")


def margins(f: jax.Array, y: jax.Array) -> jax.Array:
    """Return y f for labels -1 and 1, or the lead of the right class for k outputs: (n,)."""
    if f.ndim == 1:
        return y * f
    label = jnp.argmax(y, axis=1) if y.ndim == 2 else y.astype(jnp.int32)
    right = jnp.arange(f.shape[1])[None, :] == label[:, None]
    return jnp.sum(jnp.where(right, f, 0.0), axis=1) - jnp.max(jnp.where(right, -jnp.inf, f), axis=1)


def norm(flow: Flow, cloud: Cloud, kind: str) -> jax.Array:
    """Return the variation norm or the kernel norm of a two-layer network, a scalar; the output scale counts."""
    a, b = cloud.particles
    outer = jnp.sum(a.reshape(cloud.size, -1) ** 2, axis=1)
    ratio = flow.scaling.ratio(cloud)
    if kind == "kernel":
        return ratio * jnp.sqrt(cloud.weights @ outer)
    return ratio * 0.5 * (cloud.weights @ (outer + jnp.sum(b**2, axis=1)))


class Margin(Observable):
    """The smallest margin over the samples, divided by a norm of the network.

    Attributes:
        norm: ``"variation"`` (both layers are trained) or ``"kernel"`` (only the output layer is).
    """

    norm: str = eqx.field(static=True, default="variation")

    def measure(self, problem: Problem, cloud: Cloud, memory: Values) -> jax.Array:
        """Return a scalar."""
        if not isinstance(cloud.particles, Neurons):
            raise ValueError(f"{self.norm}_margin needs neurons (a, b), got {type(cloud.particles).__name__}")
        data = problem.data
        found = margins(equation.predict(problem.flow, cloud, data.x), data.y)
        least = jnp.min(jnp.where(data.weights > 0, found, jnp.inf))
        return least / norm(problem.flow, cloud, self.norm)


def trained_norms(flow: Flow) -> tuple[str, ...]:
    """Return the norms over which margins of a flow grow to the best ones: one, by what is trained; both if traced."""
    if not isinstance(flow.feature, TwoLayer):
        return ()
    if not isinstance(flow.space, LayerRates):
        return ("variation",)
    outer, inner = (_boundary.concrete(rate) for rate in (flow.space.outer_rate, flow.space.inner_rate))
    if outer is None or inner is None:
        return NORMS
    if np.any(outer == 0):
        return ()
    return ("variation",) if np.all(inner > 0) else () if np.any(inner > 0) else ("kernel",)


@checked
def max_margin(flow: Flow, cloud: Cloud, data: Dataset) -> float:
    """Return the largest min_j y_j f(x_j) of networks of norm 1 that use the inner weights of ``cloud``; on the host.

    The norm follows from what is trained. With both layers it is the variation norm, sum_i |u_i| for
    f = sum_i u_i s(b_i . x / |b_i|), and a linear programme is solved (HiGHS). With the output layer alone
    (``inner=False``) it is that of the kernel, (sum_i p_i a_i^2)^(1/2) for f = sum_i p_i a_i s(b_i . x), a quadratic
    programme.

    Args:
        flow: a two-layer flow with one output, whose output layer is trained.
        cloud: its inner weights b are the dictionary: their directions where both layers are trained (take a fine grid
            of them), else the vectors themselves with their weights.
        data: labels y = -1 or 1; the weights do not matter.

    Returns:
        The margin; not positive if these networks cannot separate the data.

    >>> import jax.numpy as jnp, meanflow as mf
    >>> data = mf.Dataset([[1.0], [-1.0]], [1.0, -1.0])
    >>> grid = mf.Cloud(mf.Neurons(jnp.ones(2), jnp.array([[1.0], [-1.0]])))
    >>> mf.flows.max_margin(mf.vanilla("relu", "logistic"), grid, data)
    0.5
    """
    if not isinstance(flow.feature, TwoLayer):
        raise ValueError(f"flow must be a two-layer flow, got the feature {type(flow.feature).__name__}")
    if not isinstance(cloud.particles, Neurons) or np.ndim(cloud.particles.a) != 1:
        raise ValueError("cloud must hold Neurons(a, b) with one output, a (m,), got other particles")
    _boundary.shape("y of data", data.y, (None,))
    if not np.all(np.abs(np.asarray(data.y)) == 1):
        raise ValueError("y of data must be labels -1 and 1, got other values")
    norms = trained_norms(flow)
    if len(norms) != 1:
        raise ValueError(
            "flow must train its output layer, alone or with all of the inner one, got another choice"
        )
    (norm,) = norms
    flow = flow.bind(data)
    b = cloud.particles.b
    if norm == "variation":
        b = b / safe_norm(b, keepdims=True)
    units = cloud.at(Neurons(jnp.ones_like(cloud.particles.a), b))
    flow.check(units, data.x)
    features = np.asarray(flow.feature(units, data.x) / flow.scaling.ratio(units), np.float64)
    signed = np.asarray(data.y, np.float64)[:, None] * features
    if norm == "variation":
        return _linear_programme(signed)
    return _quadratic_programme(signed * np.sqrt(np.asarray(cloud.weights, np.float64))[None, :])


def _linear_programme(signed: np.ndarray) -> float:
    """Return the largest min_j (signed u)_j over sum_i |u_i| <= 1.

    By duality it is the least t with |signed' c|_i <= t for all i, over c >= 0 with sum c = 1.
    """
    from scipy.optimize import linprog

    n, m = signed.shape
    bound = np.full((m, 1), -1.0)
    found = linprog(
        np.append(np.zeros(n), 1.0),
        A_ub=np.block([[signed.T, bound], [-signed.T, bound]]),
        b_ub=np.zeros(2 * m),
        A_eq=np.append(np.ones(n), 0.0)[None, :],
        b_eq=[1.0],
        method="highs",
    )
    if not found.success:
        raise RuntimeError(f"the linear programme of the margin failed: {found.message}")
    return float(found.fun)


def _quadratic_programme(signed: np.ndarray) -> float:
    """Maximize min_j signed_j . w over |w| <= 1.

    By duality it is the distance of the convex hull of the rows from the origin: least |signed' c| over c >= 0 with
    sum c = 1, found by nonnegative least squares of [signed'; 1'] c = [0; 1], whose solution is that c up to a factor.
    """
    from scipy.optimize import nnls

    scale = float(np.abs(signed).max()) or 1.0
    rows = np.concatenate([signed.T / scale, np.ones((1, signed.shape[0]))])
    target = np.zeros(rows.shape[0])
    target[-1] = 1.0
    c, _ = nnls(rows, target)
    c = c / c.sum()
    return float(np.linalg.norm(signed.T @ c))
