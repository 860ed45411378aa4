"""What is solved: a flow in the coordinates in which it is stepped, with its data and its clock."""

from typing import TYPE_CHECKING

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from meanflow.flows import equation
from meanflow.measures.cloud import Cloud
from meanflow.measures.dataset import Dataset

if TYPE_CHECKING:
    from meanflow.flows.flow import Flow


class Chart(eqx.Module):
    """Coordinates in which a flow is stepped. This class is the identity: the model's own coordinates.

    Some models have coordinates in which steps are cheaper or better behaved than in their own. Such a model names a
    subclass (``make_flow(..., chart=...)``) whose ``__init__(model, start)`` sets ``flow`` and ``base`` and whose
    ``cloud`` maps back. Every solver steps in the chart; users, observers and saved clouds see the model's coordinates.

    Attributes:
        model: the flow as the user gave it.
        start: the cloud from which it starts, in the coordinates of ``model``.
        flow: a flow with the same predictions, kernels and velocities, in the coordinates of this chart.
        base: ``start`` in the coordinates of this chart.
    """

    model: "Flow"
    start: Cloud
    flow: "Flow"
    base: Cloud

    def __init__(self, model: "Flow", start: Cloud) -> None:
        self.model = self.flow = model
        self.start = self.base = start

    def cloud(self, y: PyTree[jax.Array]) -> Cloud:
        """Map particles ``y`` of this chart to the cloud of the model, with the weights and labels of the start."""
        return self.start.at(y)


class Problem(eqx.Module):
    """What a vector field, step rule, event or observer receives beside time and state.

    Attributes:
        chart: the flow and its start, in the coordinates that are stepped. The flow is bound to its statistics.
        data: training data.
        speed: d t_mean_field / dt of the clock of the run, a scalar.
        memory: what observers computed at the start of the run; see ``Observable.begin``.
    """

    chart: Chart
    data: Dataset
    speed: jax.Array
    memory: PyTree = None

    @property
    def flow(self) -> "Flow":
        """The model, in its own coordinates."""
        return self.chart.model

    @property
    def start(self) -> Cloud:
        """The cloud from which the run starts, in the coordinates of the model."""
        return self.chart.start

    def cloud(self, y: PyTree[jax.Array]) -> Cloud:
        """Return the cloud of the model at the integrated state ``y``."""
        return self.chart.cloud(y)

    def field(self, t: float | jax.Array | np.ndarray, y: PyTree[jax.Array]) -> PyTree[jax.Array]:
        """Return dy/dt on the clock of the run, at the state ``y`` in the coordinates of the chart."""
        v = equation.velocity(self.chart.flow, self.chart.base.at(y), self.data)
        return jax.tree.map(lambda u: self.speed * u, v)
