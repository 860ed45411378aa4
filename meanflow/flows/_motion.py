"""How neurons move while the residual is frozen: what the sliding solver asks of a model with kinks.

The velocity of a network with a piecewise linear activation jumps where a neuron meets a sample. With the residual
covector frozen, neurons no longer see each other and each moves on its own through its kinks, by the Filippov rule. A
model supplies that motion; the solver composes such sub-steps into a method of higher order.
"""

import abc
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from meanflow.flows._losses import Loss
from meanflow.flows._problem import Problem
from meanflow.measures._dataset import Dataset

Particles: TypeAlias = PyTree[jax.Array]
# what must be remembered beside the particles: a NamedTuple with the totals of ``kinks.passage`` as its ``counts``
MotionState: TypeAlias = Any
Samples: TypeAlias = Float[Array, " n"]
Scalar: TypeAlias = Float[Array, ""]
Cap: TypeAlias = int | None  # the most events of one neuron; None for a number that is never needed


class FrozenMotion(eqx.Module):
    """Motion of single neurons in the field of a frozen residual covector, in the coordinates of the model's chart.

    A ``MotionState`` is what must be remembered from sub-step to sub-step beside the particles, for instance on which
    side of each sample a neuron is. It is never inferred again from the particles, which rounding may have moved.

    Attributes:
        y, weights: (n,) targets and weights of the samples, in the order in which the motion keeps these.
        loss: the loss of a prediction.
        offset: (n,) what a centered flow subtracts from its predictions, else 0.
        shares: (m,) what a neuron counts in the prediction, p_i times the output scale.
        force_scale: factor of the force: the clock and the output scale.
    """

    y: Samples
    weights: Samples
    loss: Loss
    offset: Samples
    shares: Float[Array, " m"]
    force_scale: Scalar

    def __init__(self, problem: Problem, data: Dataset, output_scale: Scalar, force_scale: Scalar) -> None:
        flow = problem.chart.flow
        self.y, self.weights, self.loss = data.y, data.weights, flow.loss
        self.offset = jnp.zeros_like(data.y) if flow.offset is None else flow.offset(data.x)
        self.shares = problem.chart.base.weights * output_scale
        self.force_scale = force_scale

    @abc.abstractmethod
    def begin(self, particles: Particles) -> MotionState:
        """Return the state of neurons that have not moved yet; a neuron exactly on a kink is decided there."""

    @abc.abstractmethod
    def predict(self, particles: Particles, state: MotionState) -> Samples:
        """Return the predictions f_j."""

    def residual(self, particles: Particles, state: MotionState) -> Samples:
        """Return the residual covector q_j l'(f_j), with clock and scale included."""
        return self.force_scale * self.weights * self.loss.slope(self.predict(particles, state), self.y)

    def risk(self, particles: Particles, state: MotionState) -> Scalar:
        """Return the risk sum_j q_j l(f_j, y_j), by which the solver notices that a run has become unstable."""
        return self.weights @ self.loss(self.predict(particles, state), self.y)

    @abc.abstractmethod
    def move(
        self, particles: PyTree, state: MotionState, covector: Samples, time: Scalar, cap: Cap, forward: bool
    ) -> tuple[Particles, MotionState]:
        """Move every neuron for ``time`` in the field of ``covector``, through all its kinks.

        Args:
            particles, state: where the neurons are.
            covector: the frozen residual, as ``residual`` returns it.
            time: how long they move.
            cap: the most events of one neuron.
            forward: whether the program is differentiated in forward mode; see ``kinks.passage``.
        """

    def unfold(self, particles: Particles, state: MotionState) -> MotionState:
        """Return the state at the start of a step, with what is derived from the particles; the same by default."""
        return state

    def fold(self, state: MotionState) -> MotionState:
        """Return the state at the end of a step, without what ``unfold`` adds."""
        return state

    @abc.abstractmethod
    def counts(self, state: MotionState) -> dict[str, jax.Array]:
        """Return how many events of each kind there have been so far, by name."""
