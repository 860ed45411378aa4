"""Models of a univariate ReLU network: one feature in two coordinates, five inverse metrics.

Each function joins a feature of ``_features`` with a space of ``_spaces`` to a ``Flow``. A new model of this kind is a
new function here; how its neurons move while the residual is frozen belongs in ``_motion``.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, TypedDict, Unpack

import jax.numpy as jnp

from meanflow._boundary import Rate, checked, choice
from meanflow.flows._flow import Flow, make_flow
from meanflow.flows._losses import AnyLoss
from meanflow.flows._models import LayerRate
from meanflow.flows._problem import Chart
from meanflow.geometry._neurons import LayerRates
from meanflow.measures import laws
from meanflow.measures._scaling import Alpha, Scaling
from meanflow.univariate._features import FORCES, Raw, Reduced, total_variation, weight_decay
from meanflow.univariate._hyperbola import HyperbolaChart
from meanflow.univariate._spaces import Cylinder, Lifted

Forces = Annotated[str, choice(*FORCES)]


def _polar_laws(dim: int | None) -> dict[str, laws.Law]:
    return {"r": laws.uniform(), "theta": laws.angle()}


def _affine_laws(dim: int | None) -> dict[str, laws.Law]:
    return {"a": laws.uniform(), "b": laws.uniform(), "c": laws.uniform()}


class Options(TypedDict, total=False):
    """What the limits of ``lifted`` take beside the loss."""

    alpha: Alpha
    penalty: Rate | None
    forces: Forces
    centered: bool


@checked
def canonical(
    loss: AnyLoss = "squared",
    *,
    penalty: Rate | None = None,
    forces: Forces = "auto",
    centered: bool = False,
) -> Flow:
    """Make the canonical flow of f = mean_i r_i relu(<(x, 1), d(theta_i)>), eqs. (4), (7), (11).

    Neurons (r, theta) move on the cylinder with metric dr^2 + dtheta^2: in mean-field time r' = -<G, d>,
    theta' = -r <G, t>, with the force G on the neuron, d = (cos theta, sin theta) and t = d'(theta).

    Args:
        loss, penalty, forces, centered: as in ``lifted``.

    >>> import jax, meanflow as mf
    >>> flow = canonical()
    >>> cloud = flow.init(jax.random.key(0), 50)
    >>> flow.feature.predict(cloud, jnp.linspace(-1, 1, 5)).shape
    (5,)
    """
    return make_flow(
        Reduced(forces),
        Cylinder(),
        loss,
        laws=_polar_laws,
        penalty=None if penalty is None else (total_variation, penalty),
        centered=centered,
    )


@checked
def lifted(
    loss: AnyLoss = "squared",
    *,
    alpha: Alpha = "m",
    penalty: Rate | None = None,
    forces: Forces = "auto",
    centered: bool = False,
) -> Flow:
    """Make the flow of (a, b, c) seen in (r, theta), for clouds labelled with their balances delta, Proposition 4.

    It is r' = -P_rr <G, d>, theta' = -P_tt r <G, t>, with the mobilities P of ``Lifted``.
    The balance is delta = c^2 - a^2 - b^2; +-inf is allowed. delta -> -inf is the kernel regime (only r moves),
    delta -> +inf the adaptive one (the planar flow).

    Args:
        alpha: output scale of the network: ``"m"``, ``"sqrt"``, ``"one"`` or a positive number.
        loss: ``"squared"``, ``"logistic"``, ``"huber"`` or an elementwise callable (f, y) -> loss.
        penalty: lam >= 0 of the penalty lam * mean |r_i| of eq. (16), or None.
        forces: how forces are summed, ``"auto"``, ``"dense"`` or ``"fast"``; the result is the same.
        centered: learn with f - f_0, where f_0 is the prediction at the start of the run.

    >>> flow = lifted(alpha="sqrt")
    >>> import jax, meanflow as mf
    >>> cloud = flow.init(jax.random.key(0), 50, labels=[-1.0] * 25 + [jnp.inf] * 25)
    >>> flow.space.mobility(cloud)[1].shape  # how fast each neuron turns
    (50,)
    """
    return make_flow(
        Reduced(forces),
        Lifted(Scaling(alpha)),
        loss,
        alpha=alpha,
        laws=_polar_laws,
        penalty=None if penalty is None else (total_variation, penalty),
        # a penalty is a function of r, so a penalized flow is stepped in (r, theta)
        chart=HyperbolaChart if penalty is None else Chart,
        centered=centered,
    )


def _limit(flow: Flow, delta: float) -> Flow:
    """Return a lifted flow whose neurons all have one infinite balance, without labels."""
    return dataclasses.replace(flow, space=Lifted(flow.scaling, delta))


@checked
def planar(loss: AnyLoss = "squared", **options: Unpack[Options]) -> Flow:
    """Make the limit delta = +inf of ``lifted``: |c| = 1, and only (a, b) learn.

    (u, v) = |r| d(theta) has the velocity -(m/alpha)^2 sign(r) G, which is constant in an activation region.

    Args:
        loss: as in ``lifted``.
        **options: alpha, penalty, forces and centered, as in ``lifted``.

    >>> import jax, meanflow as mf
    >>> cloud = mf.Cloud(mf.Polar(jnp.array([2.0]), jnp.array([0.0])))  # f(x) = 2 relu(x)
    >>> v = mf.velocity(planar(), cloud, mf.Dataset([1.0], [1.0]))  # r' = -<G, d>, theta' = -<G, t> / r
    >>> v.r.tolist(), v.theta.tolist()
    ([-1.0], [-0.5])
    """
    return _limit(lifted(loss, **options), float("inf"))


@checked
def radial(loss: AnyLoss = "squared", **options: Unpack[Options]) -> Flow:
    """Make the limit delta = -inf of ``lifted``: |(a, b)| = 1, and only c learns.

    r' = -(m/alpha)^2 <G, d> and theta' = 0: for the squared loss a linear ODE.

    Args:
        loss: as in ``lifted``.
        **options: alpha, penalty, forces and centered, as in ``lifted``.

    >>> import jax, meanflow as mf
    >>> cloud = radial().init(jax.random.key(0), 50)
    >>> float(abs(mf.velocity(radial(), cloud, mf.Dataset([0.0, 1.0], [1.0, 0.0])).theta).max())
    0.0
    """
    return _limit(lifted(loss, **options), float("-inf"))


@checked
def full(
    loss: AnyLoss = "squared",
    *,
    alpha: Alpha = "m",
    inner: LayerRate = True,
    outer: LayerRate = True,
    penalty: Rate | None = None,
    forces: Forces = "auto",
    centered: bool = False,
) -> Flow:
    """Make the plain gradient flow of f = (1/alpha) sum_i c_i relu(a_i x - b_i) in (a, b, c), eqs. (1), (2).

    Args:
        loss, alpha, forces, centered: as in ``lifted``.
        inner: whether (a, b) is trained. Like ``outer`` it may be an array of 0 and 1, one per neuron or traced, so
            that one compiled program covers this model, planar (outer=False) and radial (inner=False).
        outer: whether c is trained.
        penalty: lam >= 0 of weight decay lam * mean (a^2 + b^2 + c^2)/2, or None; then delta' = -2 lam delta.

    >>> import jax, meanflow as mf
    >>> flow = full(alpha="sqrt", outer=False)
    >>> cloud = flow.init(jax.random.key(0), 50)
    >>> float(abs(mf.velocity(flow, cloud, mf.Dataset([0.0, 1.0], [1.0, 0.0])).c).max())
    0.0
    """
    space = LayerRates(*(jnp.asarray(u, jnp.result_type(float)) for u in (inner, outer)))
    return make_flow(
        Raw(forces, Scaling(alpha)),
        space,
        loss,
        alpha=alpha,
        laws=_affine_laws,
        penalty=None if penalty is None else (weight_decay, penalty),
        centered=centered,
    )
