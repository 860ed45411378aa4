"""How neurons move while the residual is frozen: what the sliding solver asks of a model with kinks.

The velocity of a network with a piecewise linear activation jumps where a neuron meets a sample. With the residual
covector frozen, neurons no longer see each other and each moves on its own through its kinks, by the Filippov rule. A
model supplies that motion; the solver composes such sub-steps into a method of higher order.
"""

import abc
from typing import TypeAlias

import equinox as eqx
import jax
from jaxtyping import PyTree

MotionState: TypeAlias = PyTree[jax.Array]


class FrozenMotion(eqx.Module):
    """Motion of single neurons in the field of a frozen residual covector, in the coordinates of the model's chart.

    A ``MotionState`` is what must be remembered from sub-step to sub-step beside the particles, for instance on which
    side of each sample a neuron is. It is never inferred again from the particles, which rounding may have moved.
    """

    @abc.abstractmethod
    def begin(self, particles: PyTree[jax.Array]) -> MotionState:
        """Return the state of neurons that have not moved yet; a neuron exactly on a kink is decided there."""

    @abc.abstractmethod
    def residual(self, particles: PyTree[jax.Array], state: MotionState) -> jax.Array:
        """Return the residual covector at the particles, one number per sample, with clock and scale included."""

    @abc.abstractmethod
    def move(
        self,
        particles: PyTree[jax.Array],
        state: MotionState,
        covector: jax.Array,
        time: jax.Array,
        max_events: int | None,
        forward: bool,
    ) -> tuple[PyTree[jax.Array], MotionState]:
        """Move every neuron for ``time`` in the field of ``covector``, through all its kinks.

        Args:
            particles, state: where the neurons are.
            covector: the frozen residual, as ``residual`` returns it.
            time: how long they move.
            max_events: the most events of one neuron, or None for a number that is never needed.
            forward: whether the program is differentiated in forward mode; see ``kinks.passage``.
        """

    def risk(self, particles: PyTree[jax.Array], state: MotionState) -> jax.Array | None:
        """Return the risk sum_j q_j l(f_j, y_j), by which the solver notices that a run has become unstable.

        None, which is the default, if the motion does not tell; such a run is not watched.
        """
        return None

    def unfold(self, particles: PyTree[jax.Array], state: MotionState) -> MotionState:
        """Return the state at the start of a step, with what is derived from the particles; the same by default."""
        return state

    def fold(self, state: MotionState) -> MotionState:
        """Return the state at the end of a step, without what ``unfold`` adds."""
        return state

    @abc.abstractmethod
    def counts(self, state: MotionState) -> dict[str, jax.Array]:
        """Return how many events of each kind there have been so far, by name."""

    def overflow(self, state: MotionState) -> jax.Array:
        """Return whether a neuron has run out of events in some sub-step, a boolean scalar; by default ``overflow``."""
        return state.overflow

    def with_overflow(self, state: MotionState, overflow: jax.Array) -> MotionState:
        """Return the state with its overflow mark set where ``overflow`` is true, and kept where it was."""
        return state._replace(overflow=state.overflow | overflow)
