"""The sliding solver: flows of networks with kinks, as a diffrax solver.

The field of a ReLU network jumps where a neuron meets a sample; ordinary solvers chatter or stall there. Here the
residual is frozen for a sub-step and the model moves each neuron through its kinks on its own (``FrozenMotion``). The
frozen field is linear in the residual, so sub-steps with mixtures of residuals can be composed as in Lie-group
methods (``STAGES``): third order where no neuron meets a kink. An event bends the residual as a function of time, which
costs O(h^2) each, so through kinks the order is 2, with a small constant.
"""

import abc
from typing import ClassVar, NamedTuple

import diffrax
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from meanflow import _checks
from meanflow.flows.motion import FrozenMotion, MotionState
from meanflow.flows.problem import Problem
from meanflow.solvers.solution import RESULTS
from meanflow.solvers.step import RealScalarLike


class FlowSolver(diffrax.AbstractSolver):
    """A diffrax solver that knows it solves a flow: its ``args`` are the ``Problem``, its ``y`` is in the chart.

    Attributes:
        lands_on_saves: whether steps must end exactly at the save times, because there is no interpolation.
        term_structure, interpolation_cls: what diffrax asks for: one term, and a line between the ends of a step.
    """

    lands_on_saves: ClassVar[bool] = False
    term_structure: ClassVar = diffrax.AbstractTerm
    interpolation_cls: ClassVar = diffrax.LocalLinearInterpolation

    def func(
        self, terms: diffrax.AbstractTerm, t0: RealScalarLike, y0: PyTree[jax.Array], args: Problem
    ) -> PyTree:
        """Return the velocity (diffrax's interface)."""
        return terms.vf(t0, y0, args)

    def prepared(self, adjoint: diffrax.AbstractAdjoint) -> "FlowSolver":
        """Return the solver for a run that is differentiated by ``adjoint``; itself by default."""
        return self

    @abc.abstractmethod
    def report(self, problem: Problem, solver_state: PyTree[jax.Array]) -> dict[str, jax.Array]:
        """Return counts for ``Solution.stats``, by name."""

    @abc.abstractmethod
    def result(self, problem: Problem, solver_state: PyTree[jax.Array], result: RESULTS) -> RESULTS:
        """Return the result code of a finished run, given the one found so far."""


class Stage(NamedTuple):
    """One sub-step of the composition.

    Attributes:
        start_weight: weight of the covector at the start of the step in the one that is frozen.
        own_weight: weight of the covector at the point the last stage has reached.
        length: length of the sub-step, in steps.
        keep_end: 1 if the end of this stage is kept.
        from_kept: 1 if the stage starts from the kept point, 0 if from the start of the step.
    """

    start_weight: float
    own_weight: float
    length: float
    keep_end: int
    from_kept: int


LARGE = 1 << 20  # numbers in particles and state beyond which time to run counts more than time to compile

# The commutator-free method of order 3 with 3 stages and 2 sub-steps of Celledoni, Marthinsen and Owren (2003). Stages
# 1 and 3, of lengths 1/3 and 2/3, make up the step; the second only feeds the third.
STAGES = (
    Stage(0.0, 1.0, 1 / 3, 1, 0),
    Stage(0.0, 1.0, 2 / 3, 0, 0),
    Stage(-1 / 8, 9 / 8, 2 / 3, 0, 1),
)


@_checks.constructor(max_events=_checks.optional(_checks.count(1)), forward=_checks.flag)
class Sliding(FlowSolver):
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

    max_events: int | None = None
    forward: bool = False

    lands_on_saves: ClassVar[bool] = True

    def order(self, terms: PyTree) -> int:
        """Return 2, the order through crossings, captures and releases."""
        return 2

    def prepared(self, adjoint: diffrax.AbstractAdjoint) -> "Sliding":
        """Return a solver whose loops forward mode can pass, if that is what ``adjoint`` is."""
        return Sliding(self.max_events, isinstance(adjoint, diffrax.ForwardMode))

    def report(self, problem: Problem, solver_state: MotionState) -> dict[str, jax.Array]:
        """Return totals of crossings, captures, releases, deaths and non-unique events of real neurons."""
        return self._motion(problem).counts(solver_state)

    def result(self, problem: Problem, solver_state: MotionState, result: RESULTS) -> RESULTS:
        """Return ``event_overflow`` if in some step a neuron had time left after the last allowed event."""
        overflow = self._motion(problem).overflow(solver_state)
        return RESULTS.where(overflow, RESULTS.event_overflow, result)

    def init(
        self, terms: PyTree, t0: RealScalarLike, t1: RealScalarLike, y0: PyTree[jax.Array], args: Problem
    ) -> MotionState:
        """Return the state of neurons that have not moved yet."""
        return self._motion(args).begin(y0)

    def step(
        self,
        terms: PyTree,
        t0: RealScalarLike,
        t1: RealScalarLike,
        y0: PyTree[jax.Array],
        args: Problem,
        solver_state: MotionState,
        made_jump: object,
    ) -> tuple[PyTree, None, dict[str, PyTree], MotionState, diffrax.RESULTS]:
        """Take one step: three stages, two of which make up the way; see ``STAGES``."""
        motion = self._motion(args)
        time = jnp.asarray(t1 - t0, args.chart.base.weights.dtype)
        opened = motion.unfold(y0, solver_state)

        def choose(first: jax.Array | int, u: PyTree, v: PyTree) -> PyTree:
            if isinstance(first, int):
                return u if first else v
            return jax.tree.map(lambda p, q: jnp.where(first > 0, p, q), u, v)

        def stage(carry: tuple, row: jax.Array | Stage) -> tuple[tuple, None]:
            (y, state), kept, opening = carry
            now = Stage(*row)
            g = motion.residual(y, state)
            opening = choose(now.keep_end, g, opening)
            start, held = choose(now.from_kept, kept, (y0, opened))
            covector = now.start_weight * opening + now.own_weight * g
            y, end = motion.move(start, held, covector, now.length * time, self.max_events, self.forward)
            here = (y, motion.with_overflow(end, motion.overflow(state)))
            kept = choose(now.keep_end, here, kept)
            return (here, kept, opening), None

        here = (y0, opened)
        carry = (here, here, jnp.zeros(args.data.y.shape, time.dtype))
        if sum(u.size for u in jax.tree.leaves(here)) < LARGE:
            # one program for all stages: the events are what takes long to compile
            carry, _ = jax.lax.scan(stage, carry, jnp.asarray(STAGES, time.dtype))
        else:
            # three programs, in which nothing large is copied from stage to stage
            for row in STAGES:
                carry, _ = stage(carry, row)
        (y1, final), _, _ = carry
        return y1, None, {"y0": y0, "y1": y1}, motion.fold(final), diffrax.RESULTS.successful  # type: ignore[return-value]

    def _motion(self, problem: Problem) -> FrozenMotion:
        return problem.chart.flow.feature.motion(problem)
