"""Two-layer models: vanilla, batch norm in raw coordinates, batch norm on its manifold."""

from collections.abc import Callable
from typing import Any

from meanflow import activations
from meanflow.flows.features import BatchNormed, TwoLayer
from meanflow.flows.flow import Flow, make_flow
from meanflow.geometry.space import BatchNormManifold, Space
from meanflow.measures import laws
from meanflow.measures.cloud import floating


def _two_layer_laws(dim: int | None) -> dict[str, laws.Law]:
    if dim is None:
        raise ValueError("init of a two-layer flow needs dim=, the input dimension, got None")
    return {"a": laws.uniform(), "b": laws.sphere(dim)}


def vanilla(activation: str | Callable = "relu", loss: Any = "squared", **regularisation: Any) -> Flow:
    """f(x) = sum_i p_i a_i s(b_i . x), gradient flow in flat (a, b).

    Args:
        activation: a name in ``meanflow.activations.NAMED`` or an elementwise callable.
        loss: ``"squared"``, ``"logistic"``, ``"huber"`` or an elementwise callable (f, y) -> loss.
        regularisation: ``regulariser=`` (particles -> (m,)) and ``strength=``.
    """
    feature = TwoLayer(activations.resolve(activation))
    return make_flow(feature, Space(), loss, laws=_two_layer_laws, **regularisation)


def batchnorm(
    activation: str | Callable = "relu",
    loss: Any = "squared",
    mean: Any = None,
    covariance: Any = None,
    **regularisation: Any,
) -> Flow:
    """f(x) = sum_i p_i a_i s(b_i . (x - mean) / |b_i|_S), gradient flow in flat raw (a, b); |b_i| is conserved.

    ``mean`` and ``covariance`` are population statistics; where None, those of the data (1/N) are frozen by
    ``flow.bind(data)``, and ``energy``, ``velocity`` and the solvers bind implicitly.
    """
    feature = BatchNormed(activations.resolve(activation), _given(mean), _given(covariance), raw=True)
    return make_flow(feature, Space(), loss, laws=_two_layer_laws, **regularisation)


def batchnorm_manifold(
    activation: str | Callable = "relu",
    loss: Any = "squared",
    mean: Any = None,
    covariance: Any = None,
    **regularisation: Any,
) -> Flow:
    """The same learning in reduced coordinates: (a, bb) on R x Omega with labels c = |b| (default 1).

    f(x) = sum_i p_i a_i s(bb_i . (x - mean)), a' = -g_a, bb' = -G^-1 g_b / c^2. ``geometry.project`` and
    ``geometry.lift`` go from raw clouds to these and back. Needs the covariance before clouds can be drawn on
    Omega: ``flow.bind(data).init(key, width, dim=d)``.
    """
    mean, covariance = _given(mean), _given(covariance)
    feature = BatchNormed(activations.resolve(activation), mean, covariance, raw=False)
    return make_flow(feature, BatchNormManifold(covariance), loss, laws=_two_layer_laws, **regularisation)


def _given(statistic: Any) -> Any:
    return None if statistic is None else floating(statistic)
