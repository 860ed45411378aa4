"""Two-layer models: vanilla, batch norm in raw coordinates, batch norm on its manifold."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import ArrayLike, Float

from meanflow import _checks, activations
from meanflow._checks import array, flag, function, number, optional
from meanflow._matrices import matrix
from meanflow.activations import ACTIVATION, Activation
from meanflow.flows.features import BatchNormed, TwoLayer
from meanflow.flows.flow import ALPHA, Flow, make_flow
from meanflow.flows.losses import LOSS, Loss, LossFunction
from meanflow.geometry.space import BatchNormManifold, Layers, Space
from meanflow.measures import laws
from meanflow.measures.cloud import Neurons
from meanflow.measures.scaling import Alpha, Scaling

Penalty = Callable[[Neurons], jax.Array]


def _two_layer_laws(dim: int | None) -> dict[str, laws.Law]:
    if dim is None:
        raise ValueError("init of a two-layer flow needs dim=, the input dimension, got None")
    return {"a": laws.uniform(), "b": laws.sphere(dim)}


def _biased_laws(dim: int | None) -> dict[str, laws.Law]:
    return _two_layer_laws(None if dim is None else dim + 1)


MODEL = {
    "activation": ACTIVATION,
    "loss": LOSS,
    "alpha": ALPHA,
    "regularizer": optional(function),
    "strength": number(low=0),
    "centered": flag,
}


@_checks.arguments(**MODEL, bias=flag, inner=flag, outer=flag)
def vanilla(
    activation: str | Activation = "relu",
    loss: str | LossFunction | Loss = "squared",
    *,
    alpha: Alpha = "m",
    bias: bool = False,
    inner: bool = True,
    outer: bool = True,
    centered: bool = False,
    regularizer: Penalty | None = None,
    strength: float | jax.Array = 0.0,
) -> Flow:
    """Build the flow of f(x) = (1/alpha) sum_i a_i s(b_i . x): gradient flow in flat (a, b).

    Args:
        activation: a name in ``meanflow.activations.NAMED`` or an elementwise callable.
        loss: ``"squared"``, ``"logistic"``, ``"huber"``, ``"softmax"`` or a callable (f, y) -> loss: elementwise for
            one output, of rows f (k,) for k outputs.
        alpha: the output scale, ``"m"`` (mean field), ``"sqrt"`` (NTK), ``"one"`` or a number.
        bias: whether neurons have a bias: s(b . (x, 1)), with b (m, d + 1) and the bias in its last column.
        inner, outer: whether b and a are trained.
        centered: learn with f - f_0, where f_0 is the prediction at the start of the run.
        regularizer: a penalty, particles -> (m,), weighted by ``strength``.
        strength: lam >= 0.

    >>> import jax, meanflow as mf
    >>> mf.vanilla("tanh").init(jax.random.key(0), 8, dim=3).particles.b.shape
    (8, 3)
    """
    feature = TwoLayer(activations.resolve(activation), Scaling(alpha), bias=bias)
    return make_flow(
        feature,
        Space() if inner and outer else Layers(float(inner), float(outer)),
        loss,
        alpha=alpha,
        centered=centered,
        regularizer=regularizer,
        strength=strength,
        laws=_biased_laws if bias else _two_layer_laws,
    )


STATISTICS = {"mean": optional(array((None,))), "covariance": optional(matrix(definite=True))}


@_checks.arguments(**MODEL, **STATISTICS)
def batchnorm(
    activation: str | Activation = "relu",
    loss: str | LossFunction | Loss = "squared",
    mean: Float[ArrayLike, " d"] | None = None,
    covariance: Float[ArrayLike, "d d"] | None = None,
    *,
    alpha: Alpha = "m",
    centered: bool = False,
    regularizer: Penalty | None = None,
    strength: float | jax.Array = 0.0,
) -> Flow:
    """Build the flow of f(x) = (1/alpha) sum_i a_i s(b_i . (x - mean) / |b_i|_S) in flat raw (a, b).

    Gradients do not change the norm of b: |b_i| is conserved.

    Args:
        activation, loss, alpha, centered, regularizer, strength: as in ``vanilla``.
        mean: (d,) population mean, or None: that of the data.
        covariance: (d, d) population covariance S, or None: that of the data (1/N).

    Statistics of the data are frozen by ``flow.bind(data)``; ``energy``, ``velocity`` and the solvers bind implicitly.

    >>> import meanflow as mf
    >>> mf.batchnorm("tanh").feature.raw
    True
    """
    statistics = _arrays(mean, covariance)
    feature = BatchNormed(activations.resolve(activation), *statistics, raw=True, scaling=Scaling(alpha))
    return make_flow(
        feature,
        Space(),
        loss,
        alpha=alpha,
        centered=centered,
        regularizer=regularizer,
        strength=strength,
        laws=_two_layer_laws,
    )


@_checks.arguments(**MODEL, **STATISTICS)
def batchnorm_manifold(
    activation: str | Activation = "relu",
    loss: str | LossFunction | Loss = "squared",
    mean: Float[ArrayLike, " d"] | None = None,
    covariance: Float[ArrayLike, "d d"] | None = None,
    *,
    alpha: Alpha = "m",
    centered: bool = False,
    regularizer: Penalty | None = None,
    strength: float | jax.Array = 0.0,
) -> Flow:
    """Build the same flow in reduced coordinates: (a, bb) on R x Omega with labels c = |b| (default 1).

    f(x) = (1/alpha) sum_i a_i s(bb_i . (x - mean)), a' = -g_a, bb' = -G^-1 g_b / c^2. ``geometry.project`` and
    ``geometry.lift`` go from raw clouds to these and back. It needs the covariance before clouds can be drawn on
    Omega: ``flow.bind(data).init(key, width, dim=d)``. Arguments are those of ``batchnorm``.

    >>> import jax, jax.numpy as jnp, meanflow as mf
    >>> flow = mf.batchnorm_manifold("tanh", mean=jnp.zeros(2), covariance=jnp.eye(2))
    >>> flow.init(jax.random.key(0), 4, dim=2).labels.round(6).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    statistics = _arrays(mean, covariance)
    feature = BatchNormed(activations.resolve(activation), *statistics, raw=False, scaling=Scaling(alpha))
    space = BatchNormManifold(statistics[1])
    return make_flow(
        feature,
        space,
        loss,
        alpha=alpha,
        centered=centered,
        regularizer=regularizer,
        strength=strength,
        laws=_two_layer_laws,
    )


def _arrays(
    mean: Float[ArrayLike, " d"] | None, covariance: Float[ArrayLike, "d d"] | None
) -> tuple[jax.Array | None, jax.Array | None]:
    return None if mean is None else jnp.asarray(mean), None if covariance is None else jnp.asarray(
        covariance
    )
