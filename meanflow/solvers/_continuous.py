"""Continuous time: the flow as an ODE, on diffrax."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, PyTree, Real

from meanflow import _checks
from meanflow._checks import (
    array,
    choice,
    count,
    either,
    flag,
    instance,
    number,
    optional,
    prng_key,
    unchecked,
)
from meanflow._reuse import compiled, inlined
from meanflow.flows import _equation as equation
from meanflow.flows import _observables as observables
from meanflow.flows._flow import FLOW, Flow, prepare
from meanflow.flows._observables import Observable, Observe
from meanflow.flows._problem import Problem
from meanflow.measures import _scaling as scaling
from meanflow.measures._cloud import CLOUD, Cloud
from meanflow.measures._dataset import DATA, Dataset
from meanflow.solvers._defaults import Method, choose, rougher
from meanflow.solvers._dynamics import Dynamics
from meanflow.solvers._labelled import axis_names
from meanflow.solvers._saving import SaveTimes, save_times
from meanflow.solvers._sliding import FlowSolver
from meanflow.solvers._solution import (
    RESULTS,
    Settings,
    Solution,
    State,
    begin,
    check_resumed,
    code_numbers,
    fingerprint,
    raise_on_failure,
)
from meanflow.solvers._step import (
    STEP,
    ConstantStep,
    KernelStep,
    RealScalarLike,
    Scalar,
    StepController,
    StepRule,
    all_finite,
    scalar,
)

ADJOINTS: dict[str, diffrax.AbstractAdjoint] = {
    "checkpoint": diffrax.RecursiveCheckpointAdjoint(),
    "full": diffrax.DirectAdjoint(),
    "forward": diffrax.ForwardMode(),
}
RTOL, ATOL = 1e-7, 1e-9
MOST_STEPS = 100_000  # the limit where the number of steps cannot be known beforehand
SOLVER = either(choice("sliding"), instance(diffrax.AbstractSolver, hint="for instance diffrax.Tsit5()"))
OBSERVE = unchecked("observables.resolve checks it, which knows the names of the model")
STATE = instance(State, hint="pass Solution.state")


def _field(t: RealScalarLike, y: PyTree[jax.Array], problem: Problem) -> PyTree[jax.Array]:
    return problem.field(t, y)


def _cloud_norm(weights: jax.Array, error: PyTree[jax.Array]) -> jax.Array:
    """Return the root mean square over the measure: padding has no say, duplicating the particles changes nothing."""
    leaves = [u.reshape(weights.shape[0], -1) for u in jax.tree.leaves(error)]
    squares = jnp.sum(jnp.concatenate(leaves, axis=1) ** 2, axis=1)
    total = jnp.sum(jnp.where(weights > 0, weights * squares, 0.0)) / jnp.sum(weights)
    safe = jnp.where(total > 0, total, 1.0)
    return jnp.where(total > 0, jnp.sqrt(safe / sum(u.shape[1] for u in leaves)), 0.0)


class _Steady(eqx.Module):
    """Stops when the speed of the measure, sqrt(-dE/dt), falls below a tolerance."""

    tolerance: Scalar

    def __call__(self, t: jax.Array, y: PyTree[jax.Array], args: Problem, **kwargs: object) -> jax.Array:
        return args.dissipation(args.cloud(y)) < self.tolerance**2


class SolveOptions(NamedTuple):
    """The arguments of ``solve`` beside flow, cloud and data, checked and in the form the compiled program takes.

    A tuple, which is made in no time; text and integers in it are fixed in the program, as all that is no array.
    """

    t0: Scalar
    t1: Scalar
    ts: jax.Array | None
    observe: Observable | dict[str, Observable] | None
    solver: diffrax.AbstractSolver
    rule: StepRule | None
    rtol: Scalar
    atol: Scalar
    adjoint: diffrax.AbstractAdjoint
    steady: Scalar | None
    dynamics: Dynamics
    settings: Settings
    clock: str
    max_steps: int


@_checks.arguments(
    flow=FLOW,
    cloud=CLOUD,
    data=DATA,
    t1=number(),
    t0=number(),
    ts=optional(either(count(2), array((None,), least=1))),
    observe=OBSERVE,
    solver=optional(SOLVER),
    step=optional(STEP),
    rtol=optional(number(low=0)),
    atol=optional(number(low=0)),
    clock=choice(*scaling.CLOCKS),
    adjoint=either(choice(*ADJOINTS), instance(diffrax.AbstractAdjoint)),
    steady=optional(number(above=0)),
    max_steps=optional(count(1)),
    temperature=number(low=0),
    reaction=number(low=0),
    conserve=flag,
    key=optional(prng_key),
    measure_error=flag,
    state=optional(STATE),
    throw=flag,
)
def solve(
    flow: Flow,
    cloud: Cloud,
    data: Dataset,
    t1: float | jax.Array,
    *,
    t0: float | jax.Array = 0.0,
    ts: int | Real[ArrayLike, " k"] | Sequence | None = None,
    observe: Observe = None,
    solver: str | diffrax.AbstractSolver | None = None,
    step: StepRule | float | jax.Array | None = None,
    rtol: float | jax.Array | None = None,
    atol: float | jax.Array | None = None,
    clock: str = "mean_field",
    adjoint: str | diffrax.AbstractAdjoint = "checkpoint",
    steady: float | jax.Array | None = None,
    max_steps: int | None = None,
    temperature: float | jax.Array = 0.0,
    reaction: float | jax.Array = 0.0,
    conserve: bool = True,
    key: jax.Array | None = None,
    measure_error: bool = True,
    state: State | None = None,
    throw: bool = True,
) -> Solution:
    """Solve w' = -C grad V from t0 to t1.

    Args:
        flow: the model; a batch-norm flow takes its statistics from ``data`` unless bound before.
        cloud: initial particles.
        data: training data.
        t1: end time on ``clock``. May be traced and differentiated.
        t0: start time.
        ts: save times in [t0, t1]; an integer k means k equally spaced times, both ends included; default only the end.
        observe: what to save at ``ts`` instead of whole clouds: a function (flow, cloud, data) -> pytree such as
            ``meanflow.dissipation``, an ``Observable``, a dict of these by name, or names of the model's own
            observables such as ``["dissipation", "kernel_drift"]``.
        solver: a diffrax solver, or ``"sliding"`` for models that know how neurons move through kinks. By default the
            model decides: ``Tsit5()`` if it is smooth; if it has kinks (relu), where ordinary solvers crawl or err,
            ``"sliding"`` where the model has such a motion (for vector inputs: in float64) and ``Heun()`` otherwise,
            or where sliding runs out of events (``settings.names`` says which it was).
        step: a number or a ``StepRule`` such as ``KernelStep``: fixed steps. None: adaptive steps at ``rtol`` and
            ``atol``, or ``KernelStep(0.25)`` where a solver for kinks was chosen by default.
        rtol, atol: tolerances of the local error in rms over the measure, default 1e-7 and 1e-9. They are not the error
            of the result. Given without ``step`` they ask for adaptive steps, of a model with kinks as well.
        clock: ``"mean_field"``, ``"gradient"``, ``"lazy"`` or ``"normalized"`` (which does not stall as a logistic loss
            decays); see ``meanflow.measures._scaling``.
        adjoint: ``"checkpoint"`` (reverse mode, memory O(sqrt(max_steps)) states), ``"full"`` (reverse through
            the whole loop), ``"forward"`` (forward mode), or a diffrax adjoint.
        steady: stop when the speed sqrt(-dE/dt) of the measure falls below this.
        max_steps: step limit; default 100 000, or what a fixed step needs.
        temperature: tau >= 0. Adds tau log rho to V: particles diffuse, dw = -C grad V dt
            + tau (div C - 1/2 C grad log det C) dt + sqrt(2 tau) C^(1/2) dW. Needs ``key`` and ``step``: Euler-Maruyama
            steps that land on ``ts``.
        reaction: beta >= 0, the rate at which weights move: p_i'/p_i = -beta (V(w_i) - <V>). Not together with a
            temperature.
        conserve: whether reaction conserves the total mass; False leaves out <V>, and ``Solution.final.total`` changes.
        key: PRNG key of the noise; step k uses fold_in(key, k), so runs can be resumed.
        measure_error: where solver and steps were chosen for a model with kinks, run a second time with half the steps
            and put the rms error of the final coordinates, estimated from the difference, into ``stats["error"]``. Not
            done inside jit, vmap and grad, nor for resumed runs.
        state: ``Solution.state`` of an earlier run: goes on from there, whichever cloud of that run ``cloud`` is. Data
            and settings must be those of that run, except for a constant step, tolerances, save times and the end. With
            steps on a dyadic grid two half runs equal one full run bit for bit.
        throw: raise ``FailedRun`` (a RuntimeError that holds the Solution) if the run fails. Inside jit, vmap and grad
            nothing is raised: look at ``Solution.result``.

    Returns:
        A ``Solution``. Cost: one velocity, O(n m d), per stage.

    >>> import jax, jax.numpy as jnp, meanflow as mf
    >>> x = jax.random.normal(jax.random.key(0), (40, 2))
    >>> data = mf.Dataset(x, jnp.abs(x[:, 0]))
    >>> flow = mf.batchnorm("tanh")
    >>> cloud = flow.init(jax.random.key(1), 16, dim=2)
    >>> sol = mf.solve(flow, cloud, data, 5.0, ts=6)
    >>> bool(sol.ok), bool(jnp.all(jnp.diff(sol.energy) < 0))
    (True, True)
    """
    flow, cloud = begin(flow, cloud, state)
    flow = prepare(flow, cloud, data)
    scaling.check_clock(clock, cloud)  # inside the program the width is traced
    dtype = cloud.weights.dtype
    start = scalar(t0 if state is None else state.t, dtype)
    end = scalar(t1, dtype)
    _check_order(start, end)
    times = save_times(ts, start, end, dtype)
    dynamics = Dynamics(flow, cloud, temperature, reaction, conserve, key)
    adaptive = rtol is not None or atol is not None
    method = choose(flow, cloud, data, solver, step, adaptive, dynamics, clock)
    rule = method.rule
    _check_step(method.solver, rule)
    settings = _settings(method.solver, rule, clock, dynamics)
    if state is not None:
        check_resumed(state, settings, data)
    backward = ADJOINTS[adjoint] if isinstance(adjoint, str) else adjoint
    options = SolveOptions(
        t0=start,
        t1=end,
        ts=times,
        observe=observables.resolve(observe, flow, data),
        solver=method.solver.prepared(backward) if isinstance(method.solver, FlowSolver) else method.solver,
        rule=rule,
        rtol=scalar(RTOL if rtol is None else rtol, dtype),
        atol=scalar(ATOL if atol is None else atol, dtype),
        adjoint=backward,
        steady=None if steady is None else scalar(steady, dtype),
        dynamics=dynamics,
        settings=settings,
        clock=clock,
        max_steps=step_budget(rule, start, end, times) if max_steps is None else max_steps,
    )
    solution = _solve(flow, cloud, data, options, state)
    if method.order is not None and state is None and _overflowed(solution):
        # the default must not fail where a rougher method would not: in single precision a neuron among many kinks
        # may go to and fro between two of them
        method = rougher(method)
        settings = _settings(method.solver, rule, clock, dynamics)
        options = options._replace(solver=method.solver, settings=settings)
        solution = _solve(flow, cloud, data, options, None)
    if throw:
        raise_on_failure(solution)
    if measure_error and method.order is not None and state is None:
        solution = _with_error(solution, flow, cloud, data, options, method)
    return solution


def _overflowed(solution: Solution) -> bool:
    """Say whether a run ran out of events; False while it is traced."""
    code = _checks.concrete(solution.result._value)
    return code is not None and bool(np.any(code == code_numbers()["event_overflow"]))


def _with_error(
    solution: Solution, flow: Flow, cloud: Cloud, data: Dataset, options: SolveOptions, method: Method
) -> Solution:
    """Return the solution with its error in ``stats``, found by a second run with half the steps; not while tracing."""
    if _checks.concrete(solution.result._value) is None:
        return solution
    assert isinstance(options.rule, KernelStep) and method.order is not None
    finer = eqx.tree_at(lambda o: o.rule.kappa, options, 0.5 * options.rule.kappa)
    fine = _solve(flow, cloud, data, finer, None)
    error = _distance(flow, solution.final, fine.final) / (1 - 0.5**method.order)
    error = jnp.where(fine.ok & solution.ok, error, jnp.nan)
    return eqx.tree_at(lambda s: s.stats, solution, solution.stats | {"error": error})


@compiled
def _distance(flow: Flow, one: Cloud, other: Cloud) -> jax.Array:
    return observables.displacement(flow, one, other)


@compiled
def _solve(flow: Flow, cloud: Cloud, data: Dataset, options: SolveOptions, state: State | None) -> Solution:
    solver, observe = options.solver, options.observe
    speed = scaling.speed(options.clock, flow.scaling, cloud)
    problem = options.dynamics.problem(flow.chart(cloud), data, speed, options.clock)
    problem = eqx.tree_at(
        lambda p: p.memory, problem, observables.begin(observe, problem), is_leaf=lambda u: u is None
    )
    terms = diffrax.ODETerm(_field)
    y0 = problem.initial() if state is None else state.y
    controller, first = _controller(options, cloud)
    solver_state = controller_state = made_jump = None
    if state is not None:
        solver_state, controller_state, made_jump = _unpack(
            terms, controller, y0, first, problem, options, state
        )
        if isinstance(controller, StepController):
            # the controller continues with its count; a constant step is taken from the new settings
            taken, size = controller_state
            if isinstance(options.rule, ConstantStep):
                size = options.rule.size
            controller = dataclasses.replace(controller, start=(taken, size))
            controller_state = None

    def save(t: jax.Array, y: PyTree[jax.Array], problem: Problem) -> tuple[jax.Array, PyTree]:
        here = problem.seen(y)
        seen = here if observe is None else observables.measure(observe, problem, here)
        return equation.energy(problem.flow, here, problem.data), seen

    raw = inlined(diffrax.diffeqsolve)(
        terms,
        solver,
        options.t0,
        options.t1,
        first,
        y0,
        problem,
        saveat=diffrax.SaveAt(
            subs={
                "series": diffrax.SubSaveAt(t1=True, fn=save),
                "end": diffrax.SubSaveAt(t1=True),
            },
            solver_state=True,
            controller_state=True,
            made_jump=True,
        ),
        stepsize_controller=controller,
        adjoint=options.adjoint if options.ts is None else SaveTimes(options.adjoint, options.ts),
        event=None if options.steady is None else diffrax.Event(_Steady(options.steady)),
        max_steps=options.max_steps,
        throw=False,
        solver_state=solver_state,
        controller_state=controller_state,
        made_jump=made_jump,
    )
    return _solution(raw, problem, options, state)


def _solution(
    raw: diffrax.Solution, problem: Problem, options: SolveOptions, state: State | None
) -> Solution:
    """Put together what diffrax returned, in the coordinates of the model."""
    assert raw.ys is not None and raw.ts is not None
    y1 = jax.tree.map(lambda u: u[-1], raw.ys["end"])
    energies, seen = raw.ys["series"]
    stats = {k: jnp.asarray(v) for k, v in raw.stats.items() if k.startswith("num")}
    result = RESULTS.where(all_finite(y1), RESULTS.promote(raw.result), RESULTS.non_finite)
    if isinstance(options.solver, FlowSolver):
        stats |= options.solver.report(problem, raw.solver_state)
        result = options.solver.result(problem, raw.solver_state, result)
    done = stats["num_steps"] + (0 if state is None else state.steps)
    leaves = tuple(jax.tree.leaves((raw.solver_state, raw.controller_state, raw.made_jump)))
    known = {"t0": options.t0, "t1": options.t1, "rtol": options.rtol, "atol": options.atol}
    if isinstance(options.rule, ConstantStep):
        known["step"] = options.rule.size
    numbers = {name: jnp.asarray(value) for name, value in known.items()}
    return Solution(
        ts=raw.ts["series"],
        energy=energies,
        clouds=seen if options.observe is None else None,
        observed=None if options.observe is None else seen,
        final=problem.cloud(y1),
        state=State(
            t=raw.ts["end"][-1],
            y=y1,
            steps=done,
            leaves=leaves,
            settings=options.settings,
            data=fingerprint(problem.data),
            start=problem.start,
            offset=None if problem.flow.offset is None else problem.flow.offset.cloud,
        ),
        result=result,
        stats=stats,
        settings=Settings(
            options.settings.numbers | numbers, options.settings.names + axis_names(options.observe)
        ),
    )


def _controller(
    options: SolveOptions, cloud: Cloud
) -> tuple[diffrax.AbstractStepSizeController, jax.Array | None]:
    """Return the step size controller and the first step that diffrax wants beside it."""
    if options.rule is None:
        norm = jax.tree_util.Partial(_cloud_norm, cloud.weights)
        return diffrax.PIDController(rtol=options.rtol, atol=options.atol, norm=norm), None
    lands = isinstance(options.solver, FlowSolver) and options.solver.lands_on_saves
    controller = StepController(options.rule, options.ts if lands else None, None, options.t1)
    return controller, jnp.asarray(1.0, options.t0.dtype)  # unused: the controller knows the size


def _unpack(
    terms: PyTree,
    controller: diffrax.AbstractStepSizeController,
    y0: PyTree[jax.Array],
    first: jax.Array | None,
    problem: Problem,
    options: SolveOptions,
    state: State,
) -> tuple[PyTree, PyTree, PyTree]:
    """Rebuild the states of solver and controller from the flat leaves of ``state``."""
    solver, t0, t1 = options.solver, options.t0, options.t1

    def blank() -> PyTree:
        order = solver.error_order(terms)
        _, control = controller.init(terms, t0, t1, y0, first, problem, solver.func, order)
        return solver.init(terms, t0, t1, y0, problem), control, jnp.asarray(False)

    needed, structure = jax.tree.flatten(eqx.filter_eval_shape(blank))
    if len(needed) != len(state.leaves):
        raise ValueError(
            "state must come from a run with the same solver and step settings; "
            f"it holds {len(state.leaves)} arrays, these settings need {len(needed)}"
        )
    return jax.tree.unflatten(structure, state.leaves)


def _settings(
    solver: diffrax.AbstractSolver, rule: StepRule | None, clock: str, dynamics: Dynamics
) -> Settings:
    """Return the settings that a resumed run must share; a constant step and tolerances may change."""
    names = {
        "solver": type(solver).__name__,
        "clock": clock,
        "step": type(rule).__name__ if rule else "adaptive",
    } | type(dynamics).names(dynamics)
    numbers = {} if rule is None or isinstance(rule, ConstantStep) else rule_numbers(rule)
    return Settings(numbers | type(dynamics).numbers(dynamics), tuple(names.items()))


def rule_numbers(rule: StepRule) -> dict[str, jax.Array]:
    """Return the numbers of a step rule, by name."""
    named: Sequence[str] = list(type(rule).__dataclass_fields__)
    values = {f"step.{name}": getattr(rule, name) for name in named}
    return {name: jnp.asarray(v) for name, v in values.items() if eqx.is_array_like(v) and v is not None}


def _check_order(t0: Scalar, t1: Scalar) -> None:
    known = _checks.concrete(t0), _checks.concrete(t1)
    if known[0] is not None and known[1] is not None and np.any(known[1] <= known[0]):
        raise ValueError(f"t1 must be greater than t0 = {known[0]}, got {known[1]}")


def _check_step(solver: diffrax.AbstractSolver, rule: StepRule | None) -> None:
    if rule is None and not isinstance(solver, diffrax.AbstractAdaptiveSolver):
        raise ValueError(
            f"step must be a number or a StepRule with solver {type(solver).__name__}, which has no error estimate, "
            "got None"
        )


def step_budget(rule: StepRule | None, t0: Scalar, t1: Scalar, ts: jax.Array | None = None) -> int:
    """Return a limit for the number of steps from t0 to t1: what a constant step needs, else 100 000."""
    size = rule.size if isinstance(rule, ConstantStep) else None
    known = None if size is None else [_checks.concrete(u) for u in (size, t0, t1)]
    if known is None or any(u is None for u in known):
        return MOST_STEPS
    step, start, end = known
    # a step that is cut short to land on a save time is a step more
    needed = float(np.max((end - start) / step)) + 2 + (0 if ts is None else ts.shape[-1])  # type: ignore[operator]
    # one of few limits, since another one compiles again: 256, 4096, 65536, ...
    return 16 ** int(np.ceil(np.log(max(needed, 256)) / np.log(16) - 1e-9))
