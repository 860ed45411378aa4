"""What a sweep must know about models: input rank, labels and amplitude of each. The models themselves will say it."""

from meanflow.flows.features import BatchNormed, TwoLayer
from meanflow.flows.flow import Flow
from meanflow.flows.univariate.models import Univariate
from meanflow.geometry.balance import Lifted
from meanflow.measures.cloud import Affine, Neurons, Polar
from meanflow.measures.dataset import Dataset

AMPLITUDE = {Polar: "r", Neurons: "a", Affine: "c"}  # the coordinate in which a neuron is linear


def check_inputs(flow: Flow, data: Dataset) -> None:
    """Raise ValueError if the model takes inputs of another rank than those of the data."""
    univariate = isinstance(flow.feature, Univariate)
    if (univariate and data.x.ndim != 1) or (
        isinstance(flow.feature, TwoLayer | BatchNormed) and data.x.ndim != 2
    ):
        raise ValueError(
            f"data.x must have shape {'(n,)' if univariate else '(n, d)'} for this flow, got {data.x.shape}"
        )


def has_balances(flow: Flow) -> bool:
    """Say whether the labels of this model are balances that a user chooses."""
    return isinstance(flow.space, Lifted) and flow.space.limit is None


def amplitude(flow: Flow) -> str | None:
    """Return the name of the coordinate in which a neuron of this model is linear, or None."""
    return AMPLITUDE.get(flow.feature.record)
