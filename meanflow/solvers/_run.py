"""One run: what ``solve`` and ``descend`` share once their arguments are checked.

Both step by the loops of ``_numerics``, ``descend`` a number of times and ``solve`` until a time, with the same
steppers, step rules, observers and states. Only steps that adapt their length are left to diffrax.
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from meanflow import _observable
from meanflow._loops import iterate, iterate_until, land
from meanflow._reuse import compiled
from meanflow.flows import _equation as equation
from meanflow.flows._flow import Flow
from meanflow.flows._problem import Problem
from meanflow.measures import _scaling as scaling
from meanflow.measures._cloud import Cloud
from meanflow.measures._dataset import Dataset
from meanflow.solvers._adaptive import integrate
from meanflow.solvers._batches import Batches
from meanflow.solvers._dynamics import Dynamics
from meanflow.solvers._labelled import axis_names
from meanflow.solvers._solution import RESULTS, Settings, Solution, State, fingerprint
from meanflow.solvers._step import Adaptive, ConstantStep, Scalar, StepRule, all_finite, as_number
from meanflow.solvers._stepper import Descent, Stepper, StepperState

# plain descent: the updates are minus the gradient; one object, so that programs are shared
PLAIN = optax.sgd(1.0)
# how derivatives pass through a loop whose number of steps is found out as it runs
LOOPS: dict[type, Literal["lax", "checkpointed", "bounded"]] = {
    diffrax.RecursiveCheckpointAdjoint: "checkpointed",
    diffrax.DirectAdjoint: "bounded",
    diffrax.ForwardMode: "lax",
}


class Times(NamedTuple):
    """A run until a time.

    Attributes:
        start, end: on the clock of the run.
        saves: (k,) save times, or None for the end alone.
        whole: whether the last save is known to be the end.
        steady: the speed below which the run has come to rest, or None.
    """

    start: Scalar
    end: Scalar
    saves: jax.Array | None
    whole: bool
    steady: Scalar | None


class Counts(NamedTuple):
    """A run of a number of ``steps``, saved after each ``every`` of them."""

    steps: int
    every: int


class Options(NamedTuple):
    """The arguments of a run beside flow, cloud and data, in the form the compiled program takes.

    A tuple, which is made in no time; texts and integers in it are fixed in the program, as all that is no array.

    Attributes:
        horizon: when it ends and what is saved on the way.
        method: a stepper; an optimizer; or a solver of diffrax, for adaptive steps.
        rule: how long its steps are.
        adjoint: how derivatives pass.
        limit: the most steps between two saves where time counts.
        clock: the name of the clock.
        observe: what is saved instead of clouds, or None.
        dynamics: noise or reaction, or None.
        batches: minibatches, or None.
        settings: what a resumed run must share.
        ends: whether ``stats`` are to hold where the adaptive steps ended, under ``"ends"``.
    """

    horizon: Times | Counts
    method: Stepper | optax.GradientTransformation | diffrax.AbstractSolver
    rule: StepRule | Adaptive
    adjoint: diffrax.AbstractAdjoint
    limit: int
    clock: str
    observe: _observable.Observables | None
    dynamics: Dynamics | None
    batches: Batches | None
    settings: Settings
    ends: bool = False


def settings_of(names: dict[str, str], rule: StepRule | Adaptive, dynamics: Dynamics | None) -> Settings:
    """Return the settings that a resumed run must share; a constant step and tolerances may change."""
    numbers = rule.numbers()
    if dynamics is not None:
        names, numbers = names | dynamics.names(), numbers | dynamics.numbers()
    return Settings(numbers, tuple(names.items()))


class Progress(NamedTuple):
    """Where a run of fixed steps stands.

    Attributes:
        t: time on the clock of the run.
        y: the state of the flow, in the coordinates of the chart.
        steps: number of steps taken, also by the runs before this one.
        inner: what the stepper remembers.
        size: length of the last step.
        excess: by how much rounding has made ``t`` larger than the sum of the steps.
        over: whether a run until a time ends early: it has come to rest, or is no longer finite.
    """

    t: Float[Array, ""]
    y: PyTree[Array]
    steps: Int[Array, ""]
    inner: StepperState
    size: Float[Array, ""]
    excess: Float[Array, ""]
    over: Bool[Array, ""]


class End(NamedTuple):
    """What the loops return: the end of a run, the arrays its next step needs, the saves, counts and the result."""

    t: Float[Array, ""]
    y: PyTree[Array]
    steps: Int[Array, ""]
    leaves: tuple[Array, ...]
    saved: tuple[Array, Array, PyTree]
    stats: dict[str, Array]
    result: RESULTS


def traced_run(flow: Flow, cloud: Cloud, data: Dataset, options: Options, state: State | None) -> Solution:
    """Run from ``cloud``, or go on from ``state``.

    Args:
        flow: the model; unbound if its statistics are those of each batch.
        cloud: where the first run of all began.
        data: training data.
        options: everything else.
        state: of the run that is resumed, or None.
    """
    problem = problem_of(flow, cloud, data, options)
    observe = options.observe

    def look(t: Array, y: PyTree[Array], problem: Problem = problem) -> tuple[Array, Array, PyTree]:
        here = problem.seen(y)
        # clouds are made of the states afterwards: weights and labels need no place in the loop
        seen = y if observe is None else _observable.measure(observe, problem, here, problem.memory)
        return t, equation.energy(problem.flow, here, data), seen

    if isinstance(options.rule, Adaptive):
        end = _adaptive(problem, options, look, state)
    else:
        end = _fixed(problem, flow, options, look, state)
    times, energies, seen = end.saved
    if observe is None:
        seen = jax.vmap(problem.cloud)(seen)
    if isinstance(options.horizon, Times) and options.horizon.saves is not None:
        energies, seen = _blanked(times, (energies, seen))
    return Solution(
        ts=times,
        energy=energies,
        clouds=seen if observe is None else None,
        observed=None if observe is None else seen,
        final=problem.cloud(end.y),
        state=State(
            t=end.t,
            y=end.y,
            steps=end.steps,
            leaves=end.leaves,
            settings=options.settings,
            data=fingerprint(data),
            start=problem.start,
            offset=None if flow.offset is None else flow.offset.cloud,
        ),
        result=RESULTS.where(all_finite(end.y), end.result, RESULTS.non_finite),
        stats=end.stats,
        settings=Settings(
            options.settings.numbers | _numbers(options), options.settings.names + axis_names(observe)
        ),
    )


run = compiled(traced_run)


def _blanked(times: Array, saved: PyTree[Array]) -> PyTree[Array]:
    """Return what was saved with infinite numbers at the times that were not reached, which are infinite."""
    missed = jnp.isinf(times)

    def blank(u: Array) -> Array:
        if not jnp.issubdtype(u.dtype, jnp.floating):
            return u
        return jnp.where(missed.reshape(-1, *[1] * (u.ndim - 1)), jnp.inf, u)

    return jax.tree.map(blank, saved)


def problem_of(flow: Flow, cloud: Cloud, data: Dataset, options: Options) -> Problem:
    """Return flow, data and clock in the form that steppers and observers take."""
    chart = flow.bind(data).chart(cloud)
    arranged, offset = chart.flow.feature.arrange(chart.base, data), chart.flow.offset
    problem = Problem(
        chart,
        data,
        scaling.speed(options.clock, flow.scaling, cloud),
        normalized=options.clock == "normalized",
        arranged=None if arranged is data else arranged,
        offset=None if offset is None or isinstance(data, equation.Population) else offset(arranged.x),
        **({} if options.dynamics is None else options.dynamics.terms(cloud.weights.dtype)),
    )
    memory = _observable.begin(options.observe, problem, problem.start)
    return eqx.tree_at(lambda p: p.memory, problem, memory, is_leaf=lambda u: u is None)


def _numbers(options: Options) -> dict[str, Scalar]:
    """Return the numbers of the settings that a resumed run may change."""
    horizon, rule = options.horizon, options.rule
    found: dict[str, float | Scalar] = {}
    if isinstance(horizon, Counts):
        found |= horizon._asdict()
    else:
        found |= {"t0": horizon.start, "t1": horizon.end}
    if isinstance(rule, Adaptive):
        found |= {"rtol": rule.rtol, "atol": rule.atol}
    if isinstance(rule, ConstantStep):
        found["step"] = rule.size
    return {name: as_number(value) for name, value in found.items()}


def _stepper(problem: Problem, flow: Flow, options: Options) -> Stepper:
    """Return the stepper of a run of fixed steps."""
    if isinstance(options.method, Stepper):
        return options.method.prepared(isinstance(options.adjoint, diffrax.ForwardMode))
    assert isinstance(options.method, optax.GradientTransformation)
    batch = None if options.batches is None else options.batches.of(problem.data)
    return Descent(options.method, flow.chart(problem.start).flow, batch)


def _fixed(
    problem: Problem,
    flow: Flow,
    options: Options,
    look: Callable[[Array, PyTree[Array], Problem], tuple[Array, Array, PyTree]],
    state: State | None,
) -> End:
    """Run with steps whose length a rule sets."""
    stepper, rule, horizon = _stepper(problem, flow, options), options.rule, options.horizon
    assert isinstance(rule, StepRule)
    see = lambda now: look(now.t, now.y, stepper.sight(problem, now.y, now.inner))
    start = _begin(problem, stepper, options, state)

    def advance(
        now: Progress, running: Bool[Array, ""] | bool, stop: Array | None, stepper: Stepper = stepper
    ) -> Progress:
        size = rule.next_size(now.steps, now.size, problem, now.y, running)
        # in single precision a million small steps, added up as they are, are a percent off
        exact = size - now.excess
        t, way = (now.t + exact, exact) if stop is None else land(now.t, exact, stop)
        y, inner = stepper.step(problem, now.y, now.inner, now.steps, size + (way - exact))
        over = now.over
        if isinstance(horizon, Times):
            over = ~all_finite(y)  # a run that blew up ends instead of stepping NaN to the end
            if horizon.steady is not None:
                over |= stepper.sight(problem, y, inner).dissipation(problem.cloud(y)) < horizon.steady**2
        return Progress(t, y, now.steps + 1, inner, size, (t - now.t) - way, over)

    if isinstance(horizon, Counts):
        end, saved = iterate(
            lambda now, _: advance(now, True, None),
            start,
            None,
            horizon.steps,
            horizon.every,
            see,
            checkpoint=not isinstance(options.adjoint, diffrax.DirectAdjoint),
            first=state is None,
            apart=options.observe is None,
        )
        result: RESULTS = RESULTS.successful  # type: ignore[assignment]
    else:
        again = functools.partial(advance, stepper=stepper.compact())
        end, saved = _until(horizon, options, start, (advance, again), see)
        stopped = RESULTS.where(end.over, RESULTS.event_occurred, RESULTS.max_steps_reached)
        result = RESULTS.where(end.t >= horizon.end, RESULTS.successful, stopped)
    return End(
        t=end.t,
        y=end.y,
        steps=end.steps,
        leaves=tuple(jax.tree.leaves((end.inner, end.size, end.excess))),
        saved=saved,
        stats={"num_steps": end.steps - start.steps} | stepper.report(problem, end.inner),
        result=stepper.result(problem, end.inner, result),
    )


def _begin(problem: Problem, stepper: Stepper, options: Options, state: State | None) -> Progress:
    """Return where the run stands before its first step."""
    rule, horizon, base = options.rule, options.horizon, problem.chart.base
    assert isinstance(rule, StepRule)
    dtype, y = base.weights.dtype, problem.initial() if state is None else state.y
    # a rule that is refreshed sets the size at step 0, so that this one is never used
    size = jnp.zeros((), dtype) if rule.every is not None else rule.size_at(problem, y).astype(dtype)
    over = jnp.asarray(False)
    if state is None:
        t = jnp.zeros((), dtype) if isinstance(horizon, Counts) else jnp.asarray(horizon.start)
        none = jnp.zeros_like(size)
        return Progress(t, y, jnp.asarray(0, jnp.int32), stepper.init(problem, y), size, none, over)
    fresh = eqx.filter_eval_shape(stepper.init, problem, problem.initial())
    inner, kept, excess = unpack((fresh, size, size), state)
    size = size if isinstance(rule, ConstantStep) else kept
    return Progress(state.t, y, state.steps, inner, size, excess, over)


def unpack(like: PyTree, state: State) -> PyTree[Array]:
    """Return the arrays that a state keeps for the next step, in the structure of ``like``."""
    needed, structure = jax.tree.flatten(like)
    if len(needed) != len(state.leaves):
        raise ValueError(
            "state must come from a run with the same solver, optimizer and step settings; "
            f"it holds {len(state.leaves)} arrays, these settings need {len(needed)}"
        )
    return jax.tree.unflatten(structure, state.leaves)


def _until(
    horizon: Times,
    options: Options,
    start: Progress,
    advance: tuple[Callable[[Progress, Bool[Array, ""], Array], Progress], ...],
    see: Callable[[Progress], tuple[Array, Array, PyTree]],
) -> tuple[Progress, tuple[Array, Array, PyTree]]:
    """Step until the end of the run, and save on the way; ``advance`` takes a step, and takes it again."""
    end = jnp.asarray(horizon.end, start.t.dtype)
    if horizon.saves is None:
        stops = end[None]
    else:  # a run goes on to its end after the last save
        stops = horizon.saves if horizon.whole else jnp.concatenate([horizon.saves, end[None]])
    limit = start.steps + options.limit

    def more(now: Progress, stop: Array) -> Array:
        return (now.t < stop) & ~now.over & (now.steps < limit)

    def observe(now: Progress, stop: Array) -> tuple[Array, Array, PyTree]:
        time, *seen = see(now)
        # without save times the only one is where the run ends, also if that is early
        return time if horizon.saves is None else jnp.where(now.t >= stop, time, jnp.inf), *seen

    adjoint = options.adjoint
    final, saved = iterate_until(
        lambda now, stop: advance[0](now, more(now, stop), stop),
        start,
        more,
        stops,
        observe,
        limit=options.limit,
        kind=LOOPS[type(adjoint)],
        checkpoints=adjoint.checkpoints if isinstance(adjoint, diffrax.RecursiveCheckpointAdjoint) else None,
        again=lambda now, stop: advance[1](now, more(now, stop), stop),
    )
    if horizon.saves is None or horizon.whole:
        return final, saved
    # the stop at the end is no save time: it was only stepped to
    return final, jax.tree.map(lambda u: u[:-1], saved)


def _adaptive(
    problem: Problem,
    options: Options,
    look: Callable[[Array, PyTree[Array]], tuple[Array, Array, PyTree]],
    state: State | None,
) -> End:
    """Run with steps whose length diffrax adapts."""
    assert isinstance(options.horizon, Times) and isinstance(options.rule, Adaptive)
    assert isinstance(options.method, diffrax.AbstractSolver)
    horizon, rule = options.horizon, options.rule
    kept = None if state is None else (lambda like: unpack(like, state))
    raw = integrate(
        problem,
        options.method,
        rule,
        (horizon.start, horizon.end, horizon.saves, horizon.steady),
        look,
        options.adjoint,
        problem.initial() if state is None else state.y,
        kept,
        options.ends,
    )
    assert raw.ys is not None and raw.ts is not None
    stats = {name: jnp.asarray(u) for name, u in raw.stats.items() if name.startswith("num")}
    return End(
        t=raw.ts["end"][-1],
        y=jax.tree.map(lambda u: u[-1], raw.ys["end"]),
        steps=stats["num_steps"] + (0 if state is None else state.steps),
        leaves=tuple(jax.tree.leaves((raw.solver_state, raw.controller_state, raw.made_jump))),
        saved=raw.ys["series"],
        stats=stats | ({"ends": raw.ts["ends"]} if options.ends else {}),
        result=RESULTS.promote(raw.result),
    )
