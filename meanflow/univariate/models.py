"""Models of a univariate ReLU network: one feature in two coordinates, five inverse metrics."""

import jax
import jax.numpy as jnp

from meanflow import _checks
from meanflow._checks import choice, number, optional
from meanflow.flows.flow import Flow, make_flow
from meanflow.flows.losses import Loss, LossFunction
from meanflow.flows.problem import Chart
from meanflow.geometry.space import Space
from meanflow.measures import laws
from meanflow.measures.scaling import Alpha, Scaling
from meanflow.univariate.balance import Layers, Lifted
from meanflow.univariate.cylinder import Cylinder
from meanflow.univariate.features import FORCES, Raw, Reduced, total_variation, weight_decay
from meanflow.univariate.hyperbola import HyperbolaChart

AnyLoss = str | LossFunction | Loss
Number = float | jax.Array
PENALTY = optional(number(low=0))


def _polar_laws(dim: int | None) -> dict[str, laws.Law]:
    return {"r": laws.uniform(), "theta": laws.angle()}


def _affine_laws(dim: int | None) -> dict[str, laws.Law]:
    return {"a": laws.uniform(), "b": laws.uniform(), "c": laws.uniform()}


def _reduced(
    space: Space, loss: AnyLoss, alpha: Alpha, penalty: Number | None, forces: str, chart: type[Chart] = Chart
) -> Flow:
    feature = Reduced(forces)
    if penalty is None:
        return make_flow(feature, space, loss, alpha=alpha, laws=_polar_laws, chart=chart)
    # the penalty is a function of r, so a penalised flow is stepped in (r, theta)
    return make_flow(
        feature, space, loss, alpha=alpha, laws=_polar_laws, regularizer=total_variation, strength=penalty
    )


@_checks.arguments(variation=PENALTY, forces=choice(*FORCES))
def canonical(loss: AnyLoss = "squared", *, variation: Number | None = None, forces: str = "auto") -> Flow:
    """f = mean_i r_i relu(<(x, 1), d(theta_i)>) on the cylinder dr^2 + dtheta^2, eqs. (4), (7), (11).

    In mean-field time r' = -<G, d>, theta' = -r <G, t>.

    Args:
        loss: ``"squared"``, ``"logistic"``, ``"huber"`` or an elementwise callable (f, y) -> loss.
        variation: strength lam >= 0 of the penalty lam * mean |r_i| of eq. (16), or None.
        forces: ``"auto"``, ``"dense"`` or ``"fast"``.

    >>> import jax, meanflow as mf
    >>> flow = canonical()
    >>> cloud = flow.init(jax.random.key(0), 50)
    >>> flow.feature.predict(cloud, jnp.linspace(-1, 1, 5)).shape
    (5,)
    """
    return _reduced(Cylinder(), loss, "m", variation, forces)


@_checks.arguments(variation=PENALTY, forces=choice(*FORCES))
def lifted(
    alpha: Alpha = "m",
    loss: AnyLoss = "squared",
    *,
    variation: Number | None = None,
    forces: str = "auto",
) -> Flow:
    """The flow of (a, b, c) seen in (r, theta), with labels delta = c^2 - n^2 (+-inf allowed), Proposition 4.

    r' = -P_rr <G, d>, theta' = -P_tt r <G, t>, with ``meanflow.univariate.balance.Lifted``. delta -> -inf is the kernel
    regime (only r moves), delta -> +inf the adaptive one (the planar flow).
    """
    return _reduced(Lifted(Scaling(alpha)), loss, alpha, variation, forces, HyperbolaChart)


@_checks.arguments(variation=PENALTY, forces=choice(*FORCES))
def planar(
    alpha: Alpha = "m",
    loss: AnyLoss = "squared",
    *,
    variation: Number | None = None,
    forces: str = "auto",
) -> Flow:
    """The limit delta = +inf: |c| = 1, only (a, b) learn. (u, v)' = -(m/alpha)^2 sign(r) G, constant in a region."""
    space = Lifted(Scaling(alpha), float("inf"))
    return _reduced(space, loss, alpha, variation, forces, HyperbolaChart)


@_checks.arguments(variation=PENALTY, forces=choice(*FORCES))
def radial(
    alpha: Alpha = "m",
    loss: AnyLoss = "squared",
    *,
    variation: Number | None = None,
    forces: str = "auto",
) -> Flow:
    """The limit delta = -inf: n = 1, only c learns. r' = -(m/alpha)^2 <G, d>, theta' = 0: a linear ODE."""
    space = Lifted(Scaling(alpha), float("-inf"))
    return _reduced(space, loss, alpha, variation, forces, HyperbolaChart)


@_checks.arguments(decay=PENALTY, forces=choice(*FORCES))
def full(
    alpha: Alpha = "m",
    loss: AnyLoss = "squared",
    *,
    inner: bool | float | jax.Array = True,
    outer: bool | float | jax.Array = True,
    decay: Number | None = None,
    forces: str = "auto",
) -> Flow:
    """f = (1/alpha) sum_i c_i relu(a_i x - b_i) with plain gradient flow in (a, b, c), eqs. (1), (2).

    Args:
        alpha: ``"m"``, ``"sqrt"``, ``"one"`` or a number.
        loss: as in ``canonical``.
        inner, outer: whether (a, b) and c are trained; (True, False) is planar, (False, True) radial. May be
            arrays of 0 and 1, one per neuron or traced, so that one compiled program covers all three.
        decay: strength lam of weight decay lam * mean (a^2 + b^2 + c^2)/2; then delta' = -2 lam delta.
        forces: as in ``canonical``.
    """
    space = Layers(*(jnp.asarray(u, jnp.result_type(float)) for u in (inner, outer)))
    feature = Raw(forces, Scaling(alpha))
    if decay is None:
        return make_flow(feature, space, loss, alpha=alpha, laws=_affine_laws)
    return make_flow(
        feature, space, loss, alpha=alpha, laws=_affine_laws, regularizer=weight_decay, strength=decay
    )
