"""Two-layer models: vanilla, batch norm in raw coordinates, batch norm on its manifold."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import ArrayLike, Float, Shaped

from meanflow import _boundary, activations
from meanflow._boundary import array, checked, choice, either, unchecked
from meanflow._matrices import matrix
from meanflow.activations import AnyActivation
from meanflow.flows._features import TwoLayer
from meanflow.flows._flow import Flow, make_flow, penalty_pair
from meanflow.flows._losses import AnyLoss
from meanflow.flows._normalized import BatchNormed
from meanflow.geometry._neurons import LayerRates, SignedSphere
from meanflow.geometry._space import BatchNormManifold, Space
from meanflow.measures import laws
from meanflow.measures._cloud import Neurons
from meanflow.measures._scaling import Alpha, Scaling

# a function of the particles, and the strength lam that multiplies it
PenaltyPair = Annotated[tuple[Callable[[Neurons], jax.Array], float | jax.Array], penalty_pair]


def _two_layer_laws(dim: int | None) -> dict[str, laws.Law]:
    if dim is None:
        raise ValueError("init of a two-layer flow needs dim=, the input dimension, got None")
    return {"a": laws.uniform(), "b": laws.sphere(dim)}


def _biased_laws(dim: int | None) -> dict[str, laws.Law]:
    return _two_layer_laws(None if dim is None else dim + 1)


Options = Annotated[Any, unchecked("by their names, as those of the constructor that they are passed on to")]
# 0 for a frozen layer, 1 for one that learns; one number, or one per neuron
RATE = array((), (None,), low=0.0)
LayerRate = Annotated[bool | float | Shaped[ArrayLike, "*m"], RATE]
InnerRate = Annotated[bool | float | Float[ArrayLike, "*m"] | str, either(choice("sphere"), RATE)]


@checked
def vanilla(
    activation: AnyActivation = "relu",
    loss: AnyLoss = "squared",
    *,
    alpha: Alpha = "m",
    bias: bool = False,
    inner: InnerRate = True,
    outer: LayerRate = True,
    centered: bool = False,
    penalty: PenaltyPair | None = None,
) -> Flow:
    """Build the flow of f(x) = (1/alpha) sum_i a_i s(b_i . x): gradient flow in flat (a, b).

    By default ``init`` draws a uniform on (-1, 1) and b uniform on the unit sphere of R^d (of R^(d+1) with a bias);
    ``init(..., a=law, b=law)`` draws from other laws.

    With ``inner="sphere"`` neurons are signs a_i that stand still and directions |b_i| = 1 that move on the round
    sphere, b' = -(I - b b') grad V. For a positively homogeneous s, such as ReLU, the gradient flow of a balanced
    network (|a_i| = |b_i|) is this flow together with reaction at rate 2 and free mass: ``flow.space.from_raw(cloud)``
    projects the network, ``Reaction(2.0, conserve=False)`` moves its mass. Weight decay lam (a^2 + |b|^2)/2 becomes a
    penalty of lam per unit of mass.

    Args:
        activation: a name in ``meanflow.activations.NAMED`` or an elementwise callable.
        loss: ``"squared"``, ``"logistic"``, ``"huber"``, ``"softmax"`` or a callable (f, y) -> loss: elementwise for
            one output, of rows f (k,) for k outputs.
        alpha: the output scale, ``"m"`` (mean field), ``"sqrt"`` (NTK), ``"one"`` or a number.
        bias: whether neurons have a bias: s(b . (x, 1)), with b (m, d + 1) and the bias in its last column.
        inner, outer: whether b and a are trained; also rates >= 0 at which they learn, one number or one per neuron.
            ``inner="sphere"`` keeps b on the unit sphere and a at its sign, see above.
        centered: learn with f - f_0, where f_0 is the prediction at the start of the run.
        penalty: a pair (function, lam), particles -> (m,) and lam >= 0: the penalty lam sum_i p_i function(w)_i.

    >>> import jax, meanflow as mf
    >>> flow = mf.vanilla("tanh")
    >>> flow.init(jax.random.key(0), 8, dim=3).particles.b.shape
    (8, 3)
    >>> wide = flow.init(jax.random.key(0), 8, dim=3, b=mf.measures.laws.normal(2.0, dim=3))
    >>> on_sphere = mf.vanilla("relu", inner="sphere")
    >>> abs(on_sphere.init(jax.random.key(0), 4, dim=3).particles.a).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    if isinstance(inner, str):
        if outer is not True:
            raise ValueError("outer must not be given with inner='sphere', where the signs a stand still")
        space: Space = SignedSphere()
    elif inner is True and outer is True:
        space = Space()
    else:
        space = LayerRates(*(jnp.asarray(u, jnp.result_type(float)) for u in (inner, outer)))
    return make_flow(
        TwoLayer(activations.resolve(activation), Scaling(alpha), bias=bias),
        space,
        loss,
        alpha=alpha,
        centered=centered,
        penalty=penalty,
        laws=_biased_laws if bias else _two_layer_laws,
    )


def _affine_laws(dim: int | None) -> dict[str, laws.Law]:
    return _two_layer_laws(dim) | {"scale": laws.constant(1.0), "shift": laws.constant(0.0)}


Covariance = Annotated[Float[ArrayLike, "d d"], matrix()]


@checked
def batchnorm(
    activation: AnyActivation = "relu",
    loss: AnyLoss = "squared",
    mean: Float[ArrayLike, " d"] | None = None,
    covariance: Covariance | None = None,
    *,
    affine: bool = False,
    alpha: Alpha = "m",
    centered: bool = False,
    penalty: PenaltyPair | None = None,
) -> Flow:
    """Build the flow of f(x) = (1/alpha) sum_i a_i s(b_i . (x - mean) / |b_i|_S) in flat raw (a, b).

    Gradients do not change the norm of b: |b_i| is conserved. By default ``init`` draws a uniform on (-1, 1) and b
    uniform on the unit sphere of R^d, and scale = 1, shift = 0 with ``affine``; ``init(..., a=law, b=law)`` draws from
    other laws.

    Args:
        activation, loss, alpha, centered, penalty: as in ``vanilla``.
        mean: (d,) population mean, or None: that of the data.
        covariance: (d, d) population covariance S, or None: that of the data (1/N). It may be singular (constant
            inputs, fewer samples than dimensions); then the part of b in its null space stands still.
        affine: neurons (a, b, scale, shift), made by ``flow.feature.record``, with a trainable scale and shift of the
            normalized preactivation, as in a layer: a s(scale t + shift). |b_i| is still conserved, and with ReLU
            so is |a|^2 - scale^2 - shift^2.

    Statistics of the data are frozen by ``flow.bind(data)``; ``energy``, ``velocity`` and the solvers bind implicitly.

    >>> import meanflow as mf
    >>> mf.batchnorm("tanh").feature.raw
    True
    """
    if mean is not None and covariance is not None:
        _boundary.shape("mean", mean, jnp.shape(covariance)[:1])
    # None stays None: ``bind`` puts the statistics of the data there
    mean, covariance = (None if u is None else jnp.asarray(u) for u in (mean, covariance))
    return make_flow(
        BatchNormed(activations.resolve(activation), Scaling(alpha), mean, covariance, affine=affine),
        Space(),
        loss,
        alpha=alpha,
        centered=centered,
        penalty=penalty,
        laws=_affine_laws if affine else _two_layer_laws,
    )


@checked
def batchnorm_manifold(
    activation: AnyActivation = "relu",
    loss: AnyLoss = "squared",
    mean: Float[ArrayLike, " d"] | None = None,
    covariance: Covariance | None = None,
    **options: Options,
) -> Flow:
    """Build the same flow in reduced coordinates: (a, bb) on R x Omega with labels c = |b| (default 1).

    f(x) = (1/alpha) sum_i a_i s(bb_i . (x - mean)), a' = -g_a, bb' = -G^-1 g_b / c^2. ``geometry.project`` and
    ``geometry.lift`` go from raw clouds to these and back. It needs the covariance before clouds can be drawn on
    Omega: ``flow.bind(data).init(key, width, dim=d)`` draws raw neurons, by default as ``batchnorm`` does, and projects
    them.

    With ``affine`` the metric is da^2 + c^2 G + dscale^2 + dshift^2. If the covariance S is singular, Omega lies in the
    range of S and c = |P b| with P the projector on it, which the flow conserves too. Off the plane mean + range(S) the
    network is the raw one without the null part of b.

    Args:
        activation, loss, mean, covariance: as in ``batchnorm``.
        **options: affine, alpha, centered and penalty, as in ``batchnorm``.

    >>> import jax, jax.numpy as jnp, meanflow as mf
    >>> flow = mf.batchnorm_manifold("tanh", mean=jnp.zeros(2), covariance=jnp.eye(2))
    >>> flow.init(jax.random.key(0), 4, dim=2).labels.round(6).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    flow = batchnorm(activation, loss, mean, covariance, **options)
    feature = cast(BatchNormed, flow.feature)
    space = BatchNormManifold(feature.covariance)
    # there b is normalized already
    return dataclasses.replace(flow, feature=dataclasses.replace(feature, raw=False), space=space)
