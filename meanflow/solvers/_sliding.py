"""The sliding solver: how flows of networks with kinks are stepped.

The field of a ReLU network jumps where a neuron meets a sample; ordinary solvers chatter or stall there. Here the
residual is frozen for a sub-step and the model moves each neuron through its kinks on its own (``FrozenMotion``). The
frozen field is linear in the residual, so sub-steps with mixtures of residuals can be composed as in Lie-group
methods (``STAGES``): third order where no neuron meets a kink. An event bends the residual as a function of time, which
costs O(h^2) each, so through kinks the order is 2, with a small constant.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from meanflow._boundary import Count, checked
from meanflow.flows._kinks import passage
from meanflow.flows._motion import FrozenMotion, MotionState
from meanflow.flows._problem import Problem
from meanflow.solvers._solution import RESULTS
from meanflow.solvers._stepper import Particles, Stepper, unstable, unwatched, watch


class Stage(NamedTuple):
    """One sub-step of the composition.

    It starts where the sub-step before the last one ended (the first two start where the step does), in the field of
    the covector at the point the last one has reached, mixed with the one at the start of the step.

    Attributes:
        start_weight: weight of the covector at the start of the step in the one that is frozen.
        own_weight: weight of the covector at the point the last stage has reached.
        length: length of the sub-step, in steps.
    """

    start_weight: float
    own_weight: float
    length: float


LARGE = 1 << 20  # numbers in particles and state beyond which time to run counts more than time to compile

# The commutator-free method of order 3 with 3 stages and 2 sub-steps of Celledoni, Marthinsen and Owren (2003). Stages
# 1 and 3, of lengths 1/3 and 2/3, make up the step; the second only feeds the third.
STAGES = (
    Stage(0.0, 1.0, 1 / 3),
    Stage(0.0, 1.0, 2 / 3),
    Stage(-1 / 8, 9 / 8, 2 / 3),
)


class Watched(NamedTuple):
    """What is remembered from step to step.

    Attributes:
        motion: the state of the motion.
        covector: (n,) the residual covector at the particles.
        energy: (4,) the record of ``watch``.
    """

    motion: MotionState
    covector: Float[Array, " n"]
    energy: Float[Array, "4"]


@checked
class Sliding(Stepper):
    """Solver for flows with kinks that follows Filippov solutions exactly in each frozen field.

    Works with every model whose feature defines ``motion``: two-layer networks with relu, leaky_relu or abs in any
    dimension, also under batch norm, and the univariate ReLU flows. Order 3 without events (2 on the cylinder, with the
    penalty ``variation``, and with a decay of its own for each layer), 2 with. Three force evaluations a step and work
    in proportion to the events. What the flow conserves between kinks is conserved to rounding. Works with constant
    steps and with step rules; ``jax.grad`` goes through it, and forward mode with ``adjoint="forward"``.

    Attributes:
        max_events: the most events of one neuron in a sub-step; None for a number that is never needed. Running out of
            events gives the result code ``event_overflow``.
        forward: whether the program is differentiated in forward mode; ``solve`` sets it for ``adjoint="forward"``.

    >>> Sliding(max_events=8).max_events
    8
    """

    max_events: Count | None = None
    forward: bool = False

    def prepared(self, forward: bool) -> "Sliding":
        """Return a solver whose loops forward mode can pass, if that is asked for."""
        return Sliding(self.max_events, forward)

    def report(self, problem: Problem, state: Watched) -> dict[str, jax.Array]:
        """Return totals of crossings, captures, releases, deaths and non-unique events of real neurons."""
        return self._motion(problem).counts(state.motion)

    def result(self, problem: Problem, state: Watched, result: RESULTS) -> RESULTS:
        """Return ``event_overflow`` if in some step a neuron had time left after the last allowed event.

        Where the energy has risen it is ``energy_rose``.
        """
        result = unstable(state.energy, result)
        return RESULTS.where(state.motion.counts[passage.OVERFLOW] > 0, RESULTS.event_overflow, result)

    def init(self, problem: Problem, y: PyTree[jax.Array]) -> Watched:
        """Return the state of neurons that have not moved yet."""
        motion = self._motion(problem)
        state = motion.begin(y)
        opened = motion.unfold(y, state)
        start = watch(unwatched(problem), jax.lax.stop_gradient(_energy(motion, problem, y, opened)))
        return Watched(state, motion.residual(y, opened), start)

    def sight(self, problem: Problem, y: Particles, state: Watched) -> Problem:
        """Return the problem with the rate at which the energy falls along the Filippov solution."""
        falls = functools.partial(self._dissipation, problem, y, state)
        return eqx.tree_at(lambda p: p.falls, problem, falls, is_leaf=lambda u: u is None)

    def _dissipation(self, problem: Problem, y: Particles, state: Watched) -> Float[Array, ""]:
        """Return -dE/dt, where neurons on kinks have the velocity that the rule gives them.

        It is the derivative of the energy in the time of a sub-step that has hardly begun. As a function of the
        particles it jumps, so it has the derivatives of the gradient's dissipation, which are those between kinks.
        """
        motion = self._motion(problem)
        held = lambda u: jax.lax.stop_gradient(u) if eqx.is_array(u) else u
        here, plain = jax.tree.map(held, (motion, y, state)), problem.dissipation(problem.cloud(y))

        def energy(time: Array) -> Array:
            motion, y, state = here
            opened = motion.unfold(y, state.motion)
            end = motion.move(y, opened, state.covector, time, self.max_events, True)
            return _energy(motion, problem, *end)

        moment = jnp.finfo(plain.dtype).tiny * jnp.ones_like(plain)
        exact = -jax.jvp(energy, (moment,), (jnp.ones_like(plain),))[1]
        return plain + jax.lax.stop_gradient(exact - plain)

    def step(
        self, problem: Problem, y: Particles, state: Watched, number: Array, size: Array
    ) -> tuple[Particles, Watched]:
        """Take one step: three stages, two of which make up the way; see ``STAGES``."""
        motion = self._motion(problem)
        opened, opening = motion.unfold(y, state.motion), state.covector

        # in reverse mode a stage keeps where it started and where its events ended, and finds the rest again
        lean = functools.partial(jax.checkpoint, prevent_cse=False, policy=passage.KEEP_ENDS)

        def stage(carry: tuple, row: jax.Array | Stage) -> tuple[tuple, None]:
            (start, place), here, g, _ = carry
            now = Stage(*row)
            covector = now.start_weight * opening + now.own_weight * g
            y, end = motion.move(start, place, covector, now.length * size, self.max_events, self.forward)
            end = end._replace(counts=passage.marked(end.counts, here[1].counts[passage.OVERFLOW] > 0))
            # the energy is known with the covector: both come from the predictions
            energy = _energy(motion, problem, y, end)
            return (here, (y, end), motion.residual(y, end), jax.lax.stop_gradient(energy)), None

        here = (y, opened)
        carry = (here, here, opening, state.energy[0])
        if sum(u.size for u in jax.tree.leaves(here)) < LARGE:
            # one program for all stages: the events are what takes long to compile
            carry, _ = jax.lax.scan(lean(stage), carry, jnp.asarray(STAGES, size.dtype))
        else:
            # three programs, in which nothing large is copied from stage to stage
            for row in STAGES:
                carry, _ = stage(carry, row)
        _, (y, final), g, now = carry
        return y, Watched(motion.fold(final), g, watch(state.energy, now))

    def _motion(self, problem: Problem) -> FrozenMotion:
        return problem.chart.flow.feature.motion(problem)


def _energy(
    motion: FrozenMotion, problem: Problem, y: PyTree[jax.Array], state: MotionState
) -> Float[Array, ""]:
    """Return the energy."""
    risk = motion.risk(y, state)
    penalty = problem.chart.flow.penalty
    if penalty is not None:
        risk = risk + penalty.strength * (problem.chart.base.weights @ penalty.function(y))
    return risk
