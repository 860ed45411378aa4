"""What is solved: a flow in the coordinates in which it is stepped, with its data and its clock."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from meanflow._loops import KeyBits
from meanflow.flows import _equation as equation
from meanflow.measures._cloud import Cloud
from meanflow.measures._dataset import Dataset

if TYPE_CHECKING:
    from meanflow.flows._flow import Flow


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


class Weighted(NamedTuple):
    """The state of a run with reaction: particles, and the logarithm of what their weights have been multiplied by.

    Attributes:
        particles: in the coordinates of the chart.
        log_growth: (m,), log p_i(t)/p_i(0), up to a constant where probability is conserved. Padding has weight zero at
            any value, so that nothing here is infinite.
    """

    particles: PyTree[jax.Array]
    log_growth: jax.Array


class Problem(eqx.Module):
    """What a vector field, step rule, event or observer receives beside time and state.

    The state ``y`` of a run is the record of particles in the coordinates of the chart, or with reaction a
    ``Weighted``. Read it through ``cloud``.

    Attributes:
        chart: the flow and its start, in the coordinates that are stepped. The flow is bound to its statistics.
        data: training data, as the user gave them.
        speed: d t_mean_field / dt of the clock of the run, a scalar.
        memory: what observers computed at the start of the run; see ``Observable.begin``.
        temperature: tau of the noise, or None.
        key: PRNG key of the noise, or None.
        reaction: beta, the rate at which weights move, or None.
        conserve: whether reaction conserves the total mass.
        normalized: whether the clock is also divided by the total slope of the loss, sum_j q_j |l'(f_j, y_j)|.
        arranged: the data in the order in which velocities are computed fastest; None for the order of ``data``.
        offset: f_0 at ``samples``, which a centered flow subtracts in every step; None for other flows.
        falls: returns -dE/dt where a stepper knows more of the velocity than the particles tell: on kinks.
    """

    chart: Chart
    data: Dataset
    speed: jax.Array
    memory: PyTree = None
    temperature: jax.Array | None = None
    key: KeyBits | None = None
    reaction: jax.Array | None = None
    conserve: bool = eqx.field(static=True, default=True)
    normalized: bool = eqx.field(static=True, default=False)
    arranged: Dataset | None = None
    offset: jax.Array | None = None
    falls: Callable[[], jax.Array] | None = None

    @property
    def samples(self) -> Dataset:
        """The data that velocities are computed from: sums over all of them, so that their order is free."""
        return self.data if self.arranged is None else self.arranged

    @property
    def flow(self) -> "Flow":
        """The model, in its own coordinates."""
        return self.chart.model

    @property
    def start(self) -> Cloud:
        """The cloud from which the run starts, in the coordinates of the model."""
        return self.chart.start

    def initial(self) -> PyTree[jax.Array]:
        """Return the state from which the run starts."""
        base = self.chart.base
        if self.reaction is None:
            return base.particles
        return Weighted(base.particles, jnp.zeros_like(base.weights))

    def _reweighted(self, cloud: Cloud, log_growth: jax.Array) -> Cloud:
        weights = self.chart.base.weights
        if self.conserve:
            # the largest exponent is taken out, so that nothing overflows; padding has no say in it
            log_growth = log_growth - jnp.max(jnp.where(weights > 0, log_growth, -jnp.inf))
        grown = weights * jnp.exp(jnp.where(weights > 0, log_growth, 0.0))
        if self.conserve:
            grown = grown * (jnp.sum(weights) / jnp.sum(grown))
        return eqx.tree_at(lambda c: c.weights, cloud, grown)

    def cloud(self, y: PyTree[jax.Array]) -> Cloud:
        """Return the cloud of the model at the state ``y``."""
        if isinstance(y, Weighted):
            return self._reweighted(self.chart.cloud(y.particles), y.log_growth)
        return self.chart.cloud(y)

    def seen(self, y: PyTree[jax.Array]) -> Cloud:
        """Return the cloud of the model at the state ``y``, computed once for all who observe it.

        Without the barrier the compiler puts the map from the chart (angles of all neurons, say) into each of the
        observables again, which takes long to compile and to run.
        """
        return jax.lax.optimization_barrier(self.cloud(y))

    def here(self, y: PyTree[jax.Array]) -> Cloud:
        """Return the cloud at the state ``y`` in the coordinates of the chart."""
        if isinstance(y, Weighted):
            return self._reweighted(self.chart.base.at(y.particles), y.log_growth)
        return self.chart.base.at(y)

    def pace(self, cloud: Cloud, flow: "Flow | None" = None) -> jax.Array:
        """Return d t_mean_field / dt at a cloud in the coordinates of ``flow``, by default those of the chart."""
        if not self.normalized:
            return self.speed
        flow = self.chart.flow if flow is None else flow
        return self._normalize(flow, equation.differential(flow, cloud, self.samples)[1], self.samples)

    def _normalize(self, flow: "Flow", f: jax.Array | None, data: Dataset) -> jax.Array:
        """Return d t_mean_field / dt where the samples are predicted as f."""
        if not self.normalized:
            return self.speed
        if f is None:
            raise ValueError("clock='normalized' needs data with samples, got a population")
        # sum_j q_j |l'|, which decays like the loss where the loss decays exponentially
        slope = jnp.sum(jnp.abs(equation.residual(flow, f, data)))
        return self.speed / jnp.maximum(slope, jnp.finfo(slope.dtype).tiny)

    def dissipation(self, cloud: Cloud) -> jax.Array:
        """Return -dE/dt on the clock of the run at a cloud of the model."""
        if self.falls is not None:
            return self.falls()
        rate = equation.dissipation(self.flow, cloud, self.data, self.reaction, self.conserve)
        return self.pace(cloud, flow=self.flow) * rate

    def field(self, t: float | jax.Array | np.ndarray, y: PyTree[jax.Array]) -> PyTree[jax.Array]:
        """Return dy/dt on the clock of the run, at the state ``y`` in the coordinates of the chart."""
        return self.rates(self.here(y), self.samples, self.chart.flow)

    def rates(self, here: Cloud, data: Dataset, flow: "Flow") -> PyTree[jax.Array]:
        """Return dy/dt at a cloud of the chart, for the loss of ``data`` (all of it, or a batch)."""
        return self._rates_and_predictions(here, data, flow)[0]

    def field_and_energy(self, y: PyTree[jax.Array]) -> tuple[PyTree[jax.Array], jax.Array]:
        """Return dy/dt, and the energy from the same predictions, without derivatives; NaN for a population."""
        here, flow, data = self.here(y), self.chart.flow, self.samples
        rates, f = self._rates_and_predictions(here, data, flow)
        energy = (
            jnp.full((), jnp.nan, self.speed.dtype) if f is None else equation.energy(flow, here, data, f)
        )
        return rates, jax.lax.stop_gradient(energy)

    def _rates_and_predictions(
        self, here: Cloud, data: Dataset, flow: "Flow"
    ) -> tuple[PyTree[jax.Array], jax.Array | None]:
        offset = self.offset if data is self.samples else None
        velocity, f = equation.velocity_and_predictions(flow, here, data, offset)
        pace = self._normalize(flow, f, data)
        v = jax.tree.map(lambda u: pace * u, velocity)
        if self.reaction is None:
            return v, f
        grow = equation.growth(flow, here, data, conserve=self.conserve)
        return Weighted(v, pace * self.reaction * grow), f

    def noise(self, here: Cloud, step: jax.Array, size: jax.Array, flow: "Flow") -> PyTree[jax.Array]:
        """Return by how much the noise of step number ``step``, ``size`` long, moves the particles of the chart.

        It is tau dt (div C - 1/2 C grad log det C) + sqrt(2 tau dt) C^(1/2) xi, with dt in mean-field time. The numbers
        xi of a particle depend on the key, the step and the place of the particle alone: not on how many come behind
        it, nor on how they are split over devices.
        """
        assert self.temperature is not None and self.key is not None
        leaves, structure = jax.tree.flatten(here.particles)
        keys = jax.random.split(jax.random.fold_in(self.key.key, step), len(leaves))
        drawn = [jax.random.normal(k, u.shape, u.dtype) for k, u in zip(keys, leaves, strict=True)]
        spread = self.temperature * size * self.pace(here, flow=flow)
        shaken = flow.space.noise(here, jax.tree.unflatten(structure, drawn))
        root = jnp.sqrt(2 * spread)
        return jax.tree.map(lambda u, v: spread * u + root * v, flow.space.noise_drift(here), shaken)

    def move(
        self, here: Cloud, y: PyTree[jax.Array], by: PyTree[jax.Array], flow: "Flow"
    ) -> PyTree[jax.Array]:
        """Return the state a step ``by`` away from ``y``, whose cloud in the chart is ``here``.

        Noisy steps follow geodesics: their error in the law is several times smaller than that of a retraction.
        """
        if isinstance(y, Weighted):
            return Weighted(flow.space.retract(here, by.particles), y.log_growth + by.log_growth)
        return flow.space.retract(here, by) if self.temperature is None else flow.space.exp(here, by)
