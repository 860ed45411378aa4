"""How one step is taken: the contract of steppers, Runge-Kutta methods, any solver of diffrax, and descent.

A stepper knows nothing of the loop around it: ``solve`` steps until a time is reached and ``descend`` a number of
times, by the same loop (``solvers._run``).
"""

import abc
import functools
from collections.abc import Callable
from typing import Any, TypeAlias, TypeGuard, TypeVar

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PyTree

from meanflow._reuse import compiled
from meanflow.flows._flow import Flow
from meanflow.flows._problem import Problem, Weighted
from meanflow.measures._dataset import Dataset
from meanflow.solvers._solution import RESULTS

Particles: TypeAlias = PyTree[jax.Array]  # the state of a flow, in the coordinates of the chart
StepperState = Any  # a pytree of arrays, or None
Seen = TypeVar("Seen")


class Stepper(eqx.Module):
    """One step of a flow. Pass an instance as ``solver=`` to ``solve``; ``Sliding`` is one.

    The state ``y`` of the flow is in the coordinates of the chart; ``problem.here(y)`` is the cloud there and
    ``problem.field(0.0, y)`` its velocity, on the clock of the run.
    """

    def prepared(self, forward: bool) -> "Stepper":
        """Return the stepper for a run that is differentiated in forward mode, or not; itself by default."""
        return self

    def compact(self) -> "Stepper":
        """Return a stepper that does the same by a smaller program, for a derivative; itself by default."""
        return self

    def init(self, problem: Problem, y: Particles) -> StepperState:
        """Return what the stepper remembers from step to step; nothing by default."""
        return None

    @abc.abstractmethod
    def step(
        self, problem: Problem, y: Particles, state: StepperState, number: Array, size: Array
    ) -> tuple[Particles, StepperState]:
        """Return the state of the flow after one step, and what is remembered for the next.

        Args:
            problem: flow, data and clock.
            y: where the step starts.
            state: what ``init`` or the step before returned.
            number: () integer 0, 1, ..., counted from the start of the first run.
            size: () length of the step on the clock of the run.
        """

    def sight(self, problem: Problem, y: Particles, state: StepperState) -> Problem:
        """Return the problem as observers see it behind a step; itself by default."""
        return problem

    def report(self, problem: Problem, state: StepperState) -> dict[str, jax.Array]:
        """Return counts for ``Solution.stats``, by name; none by default."""
        return {}

    def result(self, problem: Problem, state: StepperState, result: RESULTS) -> RESULTS:
        """Return the result code of a finished run, given the one found so far; that one by default."""
        return result


class RungeKutta(Stepper):
    """An explicit Runge-Kutta method with its stages written out.

    diffrax goes through the stages in a loop whose length the device finds out as it runs, which takes four times as
    long to compile. The predictions of the first stage also give the energy, by which an unstable run is noticed.

    Attributes:
        method: a method of diffrax, whose table of coefficients a, b is used.
        looped: whether the stages are a loop.

    >>> RungeKutta(diffrax.Heun()).method
    Heun()
    """

    method: diffrax.AbstractERK | diffrax.Euler
    looped: bool = eqx.field(static=True, default=False)

    def compact(self) -> "RungeKutta":
        """Return the method with its stages as a loop."""
        return RungeKutta(self.method, looped=True)

    def init(self, problem: Problem, y: Particles) -> Array:
        """Return the record of energies of which none is known."""
        return unwatched(problem)

    def step(
        self, problem: Problem, y: Particles, state: Array, number: Array, size: Array
    ) -> tuple[Particles, Array]:
        """Take one step."""
        field = functools.partial(_field_and_energy, problem)
        moved, energy = runge_kutta(self.method, field, y, size, self.looped)
        return moved, watch(state, energy)

    def result(self, problem: Problem, state: Array, result: RESULTS) -> RESULTS:
        """Return ``energy_rose`` where a step was beyond what is stable."""
        return unstable(state, result)


@compiled
def _field_and_energy(problem: Problem, y: Particles) -> tuple[Particles, Array]:
    return problem.field_and_energy(y)


RISE = 0.1  # the energy may rise by this part of its size before a run counts as unstable


def unwatched(problem: Problem) -> Float[Array, "4"]:
    """Return the record of the energy of a run that has not started; see ``watch``."""
    y = problem.data.y
    # what rounding of the predictions makes of the energy of a network that fits its data
    noise = (100 * jnp.finfo(y.dtype).eps) ** 2 * (
        problem.data.weights @ jnp.sum(y**2, axis=tuple(range(1, y.ndim)))
    )
    return jnp.stack([jnp.nan, jnp.inf, -jnp.inf, noise]).astype(problem.speed.dtype)


def watch(record: Float[Array, "4"], now: Float[Array, ""]) -> Float[Array, "4"]:
    """Return the record of the energy with the one that is reached ``now``.

    It holds the energy at the start of the run (NaN until it is known), the lowest one so far, how far it has risen at
    most above the lowest one before, beyond what is allowed, and what rounding alone makes of it.
    """
    start, lowest, worst, noise = record
    start = jnp.where(jnp.isnan(start), now, start)
    beyond = now - lowest - RISE * (jnp.abs(start) + jnp.abs(lowest)) - noise
    return jnp.stack([start, jnp.minimum(lowest, now), jnp.maximum(worst, beyond), noise])


def unstable(record: Float[Array, "4"], result: RESULTS) -> RESULTS:
    """Return ``energy_rose`` for a run that ended well although its energy has risen.

    Along a flow the energy falls. So the run has been unstable, also if it has calmed down since (after a burst of
    energy neurons may all be dead).
    """
    ended = (result == RESULTS.successful) | (result == RESULTS.event_occurred)
    return RESULTS.where(ended & (record[2] > 0), RESULTS.energy_rose, result)


def runge_kutta(
    method: diffrax.AbstractERK | diffrax.Euler,
    field: Callable[[Particles], tuple[Particles, Seen]],
    y: Particles,
    size: jax.Array,
    looped: bool = False,
) -> tuple[Particles, Seen]:
    """Return y + size sum_i b_i k_i with the stages k_i, ... = field(y + size sum_(j < i) a_ij k_j).

    Beside it return what the field says at ``y`` beside its value. Stages behind the last b_i != 0 are left out: they
    serve error estimates and interpolation only. With ``looped`` the stages are a loop, which is a smaller program and
    takes a tenth more time to run.

    >>> float(runge_kutta(diffrax.Midpoint(), lambda y: (y, None), jnp.array(8.0), jnp.array(0.5))[0])
    13.0
    """
    inner: tuple[np.ndarray, ...]
    if isinstance(method, diffrax.Euler):
        inner, last = (), np.ones(1)
    else:
        assert isinstance(method.tableau, diffrax.ButcherTableau)  # has_table
        inner, last = method.tableau.a_lower, method.tableau.b_sol
    used = int(np.flatnonzero(last)[-1]) + 1
    if looped:
        # row by row what leads from the stages so far to where the next one is, and in the end to the result
        rows = np.zeros((used, used))
        for k, row in enumerate((*inner[: used - 1], last[:used])):
            rows[k, : len(row)] = row

        def stage(carry: tuple[Particles, Particles], item: tuple[Array, Array]) -> tuple[tuple, Seen]:
            (point, slopes), (number, shares) = carry, item
            put = lambda u, k: jax.lax.dynamic_update_index_in_dim(u, k, number, 0)
            slope, seen = field(point)
            slopes = jax.tree.map(put, slopes, slope)
            along = lambda k: jnp.tensordot(shares, k, 1, precision=jax.lax.Precision.HIGHEST)
            return (jax.tree.map(lambda u, k: u + size * along(k), y, slopes), slopes), seen

        room = jax.tree.map(lambda u: jnp.zeros((used, *u.shape), u.dtype), y)
        numbered = jnp.arange(used), jnp.asarray(rows, size.dtype)
        (end, _), seen = jax.lax.scan(stage, (y, room), numbered)
        return end, jax.tree.map(lambda u: u[0], seen)
    stages: list[Particles] = []
    said: list[Seen] = []

    def moved(shares: np.ndarray) -> Particles:
        terms = [(float(share), k) for share, k in zip(shares, stages, strict=True) if share != 0]
        slopes = [jax.tree.map(lambda u, share=share: share * u, k) for share, k in terms]
        if not slopes:
            return y
        return jax.tree.map(lambda u, *ks: u + size * sum(ks[1:], ks[0]), y, *slopes)

    for row in (np.zeros(0), *inner)[:used]:
        slope, other = field(moved(row))
        stages.append(slope)
        said.append(other)
    return moved(last[:used]), said[0]


def has_table(solver: diffrax.AbstractSolver) -> TypeGuard[diffrax.AbstractERK | diffrax.Euler]:
    """Say whether a solver of diffrax is an explicit Runge-Kutta method with one table of coefficients, or Euler's."""
    if isinstance(solver, diffrax.AbstractERK):
        return isinstance(solver.tableau, diffrax.ButcherTableau)
    return isinstance(solver, diffrax.Euler)


class DiffraxStep(Stepper):
    """A step of any other solver of diffrax, for instance an implicit one.

    Attributes:
        solver: the solver.
    """

    solver: diffrax.AbstractSolver

    def init(self, problem: Problem, y: Particles) -> StepperState:
        """Return the solver's state, the worst result of its steps so far, and the record of energies."""
        zero = jnp.zeros((), problem.speed.dtype)
        inner = self.solver.init(_TERMS, zero, zero + 1, y, problem)
        return inner, diffrax.RESULTS.successful, unwatched(problem)

    def step(
        self, problem: Problem, y: Particles, state: StepperState, number: Array, size: Array
    ) -> tuple[Particles, StepperState]:
        """Take one step; the flow does not depend on time, so every step starts at 0."""
        (inner, worst, energies), zero = state, jnp.zeros_like(size)
        moved, _, _, inner, found = self.solver.step(
            _TERMS, zero, size, y, problem, inner, jnp.asarray(False)
        )
        worst = diffrax.RESULTS.where(worst == diffrax.RESULTS.successful, found, worst)
        return moved, (inner, worst, watch(energies, _field_and_energy(problem, y)[1]))

    def result(self, problem: Problem, state: StepperState, result: RESULTS) -> RESULTS:
        """Return what went wrong in a step, for instance an implicit equation without a solution."""
        worst = RESULTS.promote(state[1])
        return RESULTS.where(worst == RESULTS.successful, unstable(state[2], result), worst)


def field(t: Any, y: Particles, problem: Problem) -> Particles:
    """Return the velocity, with the arguments in diffrax's order."""
    return problem.field(t, y)


_TERMS = diffrax.ODETerm(field)


class Descent(Stepper):
    """w <- retract(w, size * optimizer(gradient) + noise), the gradient being minus the velocity on the clock.

    Attributes:
        optimizer: any optimizer of optax. Plain descent makes Euler steps, and with a temperature Euler-Maruyama ones.
        model: the flow in the coordinates of the chart; unbound if it takes its statistics from each batch.
        batch: the map from the number of a step to the samples that it looks at; None for all.
    """

    optimizer: optax.GradientTransformation = eqx.field(static=True)
    model: Flow
    batch: Callable[[Int[Array, ""]], Dataset] | None = eqx.field(static=True)

    def init(self, problem: Problem, y: Particles) -> StepperState:
        """Return the state of the optimizer."""
        return self.optimizer.init(problem.chart.base.particles)

    def step(
        self, problem: Problem, y: Particles, state: StepperState, number: Array, size: Array
    ) -> tuple[Particles, StepperState]:
        """Take one step."""
        here = problem.here(y)
        batch = problem.samples if self.batch is None else self.batch(number)
        model = self.model.bind(batch)
        rates = problem.rates(here, batch, model)
        velocity = rates.particles if isinstance(rates, Weighted) else rates
        gradient = jax.tree.map(jnp.negative, velocity)
        updates, state = self.optimizer.update(gradient, state, here.particles)
        by = jax.tree.map(lambda u: size * u, updates)
        if problem.temperature is not None:
            by = jax.tree.map(jnp.add, by, problem.noise(here, number, size, model))
        if isinstance(rates, Weighted):
            by = Weighted(by, size * rates.log_growth)
        return problem.move(here, y, by, model), state
