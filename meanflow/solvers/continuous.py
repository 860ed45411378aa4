"""Continuous time: the flow as an ODE, on diffrax."""

import json
from collections.abc import Callable
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from meanflow import _checks
from meanflow.flows.flow import Flow, dissipation, energy, velocity
from meanflow.measures import scaling
from meanflow.measures.cloud import Cloud
from meanflow.measures.dataset import Dataset
from meanflow.solvers.saving import SaveTimes, save_times
from meanflow.solvers.solution import RESULTS, Solution, State, versions
from meanflow.solvers.step import KernelStep, Problem, StepController, cloud_at

ADJOINTS: dict[str, Callable[[], diffrax.AbstractAdjoint]] = {
    "checkpoint": diffrax.RecursiveCheckpointAdjoint,
    "full": diffrax.DirectAdjoint,
    "forward": diffrax.ForwardMode,
}


def _field(t: Any, y: Any, problem: Problem) -> Any:
    v = velocity(problem.flow, problem.cloud.at(y), problem.data)
    return jax.tree.map(lambda u: problem.speed * u, v)


def _cloud_norm(weights: jax.Array, error: Any) -> jax.Array:
    """Root mean square over the measure: padding has no say, and duplicating the particles changes nothing."""
    leaves = [u.reshape(weights.shape[0], -1) for u in jax.tree.leaves(error)]
    squares = jnp.sum(jnp.concatenate(leaves, axis=1) ** 2, axis=1)
    total = jnp.sum(jnp.where(weights > 0, weights * squares, 0.0))
    safe = jnp.where(total > 0, total, 1.0)
    return jnp.where(total > 0, jnp.sqrt(safe / sum(u.shape[1] for u in leaves)), 0.0)


class _Steady(eqx.Module):
    """Stops when the speed of the measure, sqrt(-dE/dt), falls below a tolerance."""

    tolerance: jax.Array
    solver: diffrax.AbstractSolver

    def __call__(self, t: Any, y: Any, args: Problem, **kwargs: Any) -> jax.Array:
        cloud = cloud_at(self.solver, args, y)
        return args.speed * dissipation(args.flow, cloud, args.data) < self.tolerance**2


def solve(
    flow: Flow,
    cloud: Cloud,
    data: Dataset,
    t1: Any,
    *,
    t0: Any = 0.0,
    ts: Any = None,
    observe: Any = None,
    solver: Any = None,
    step: Any = None,
    rtol: float = 1e-7,
    atol: float = 1e-9,
    clock: str = "mean_field",
    adjoint: Any = "checkpoint",
    steady: Any = None,
    max_steps: int | None = None,
    state: State | None = None,
    throw: bool = False,
) -> Solution:
    """Solves w' = -C grad V from t0 to t1.

    Args:
        flow: the model; a batch-norm flow takes its statistics from ``data`` unless bound before.
        cloud: initial particles.
        data: training data.
        t1: end time on ``clock``. May be traced and differentiated.
        t0: start time.
        ts: save times in [t0, t1]; an integer k means k equal intervals' ends, t0 included; default only the end.
        observe: what to save at ``ts`` instead of whole clouds: a function (flow, cloud, data) -> pytree, or a
            dict of them; ``meanflow.dissipation`` and its like fit as they are. ``FromStart(function)`` is called
            as function(flow, cloud, data, start) with the initial cloud.
        solver: a diffrax solver (default ``Tsit5()``), or ``"sliding"`` for univariate ReLU flows, whose velocity
            jumps and which ordinary solvers cannot resolve. Reverse mode through kinks needs a fixed number of events
            a step: ``solvers.Sliding(max_events=8)``.
        step: a number or ``KernelStep``: fixed steps. None: adaptive steps at ``rtol``, ``atol``.
        rtol, atol: tolerances of the local error in rms over the measure. They are not the error of the result.
        clock: ``"mean_field"``, ``"gradient"`` or ``"lazy"``; see ``meanflow.measures.scaling``.
        adjoint: ``"checkpoint"`` (reverse mode, memory O(sqrt(max_steps)) states), ``"full"`` (reverse through
            the whole loop), ``"forward"`` (forward mode), or a diffrax adjoint.
        steady: stop when the speed sqrt(-dE/dt) of the measure falls below this.
        max_steps: step limit; default 100 000, or what a fixed step needs.
        state: ``Solution.state`` of an earlier run with the same settings: goes on from there (``cloud`` supplies
            weights and labels). With steps on a dyadic grid two half runs equal one full run bit for bit.
        throw: raise RuntimeError on failure (outside jit); otherwise look at ``Solution.result``.

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
    flow = flow.bind(data)
    flow.check(cloud, data.x)
    dtype = cloud.weights.dtype
    if state is not None:
        t0 = state.t
    t0, t1 = jnp.asarray(t0, dtype), jnp.asarray(t1, dtype)
    _check_times(t0, t1)
    ts = save_times(ts, t0, t1, dtype)
    solver = _resolve_solver(solver)
    settings = settings_text(
        solver=solver, step=step, rtol=rtol, atol=atol, clock=clock, adjoint=adjoint, t0=t0, t1=t1
    )
    if isinstance(adjoint, str):
        _checks.one_of("adjoint", adjoint, ADJOINTS)
        adjoint = ADJOINTS[adjoint]()
    if step is not None and not isinstance(step, KernelStep):
        _checks.at_least("step", step, 0.0, strict=True)
        step = jnp.asarray(step, dtype)
    if max_steps is None:
        max_steps = _step_budget(step, t0, t1)
    max_steps = _checks.whole("max_steps", max_steps, 1)
    if steady is not None:
        _checks.at_least("steady", steady, 0.0, strict=True)
        steady = jnp.asarray(steady, dtype)
    parts = _solve(
        flow,
        cloud,
        data,
        t0,
        t1,
        ts,
        observe,
        solver,
        step,
        jnp.asarray(rtol, dtype),
        jnp.asarray(atol, dtype),
        clock,
        adjoint,
        steady,
        max_steps,
        state,
    )
    solution = Solution(**parts, settings=settings)
    if throw:
        raise_on_failure(solution)
    return solution


@eqx.filter_jit
def _solve(
    flow: Flow,
    cloud: Cloud,
    data: Dataset,
    t0: jax.Array,
    t1: jax.Array,
    ts: jax.Array | None,
    observe: Any,
    solver: Any,
    step: Any,
    rtol: jax.Array,
    atol: jax.Array,
    clock: str,
    adjoint: diffrax.AbstractAdjoint,
    steady: jax.Array | None,
    max_steps: int,
    state: State | None,
) -> dict[str, Any]:
    problem = Problem(flow, cloud, data, scaling.speed(clock, flow.scaling, cloud))
    encode = getattr(solver, "encode", None)
    y0 = state.y if state is not None else (cloud.particles if encode is None else encode(flow, cloud))
    # a solver with coordinates of its own brings the velocity in them
    terms = diffrax.ODETerm(_field if encode is None else solver.velocity)
    stops = ts if getattr(solver, "clip_to_saves", False) else None
    if step is None:
        norm = jax.tree_util.Partial(_cloud_norm, cloud.weights)
        controller: Any = diffrax.PIDController(rtol=rtol, atol=atol, norm=norm)
        size = None
    else:
        controller = StepController(step, solver, stops, None)
        size = jnp.asarray(1.0, t0.dtype)  # unused: the controller knows the size
    solver_state = controller_state = made_jump = None
    if state is not None:
        solver_state, controller_state, made_jump = _unpack(
            terms, solver, controller, t0, t1, y0, size, problem, state
        )
        if step is not None:
            controller = StepController(step, solver, stops, controller_state)
            controller_state = None

    def save(t: jax.Array, y: Any, problem: Problem) -> Any:
        here = cloud_at(solver, problem, y)
        seen = here if observe is None else observe_with(observe, problem, here)
        return energy(problem.flow, here, problem.data), seen

    raw = diffrax.diffeqsolve(
        terms,
        solver,
        t0,
        t1,
        size,
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
        adjoint=adjoint if ts is None else SaveTimes(adjoint, ts),
        event=None if steady is None else diffrax.Event(_Steady(steady, solver)),
        max_steps=max_steps,
        throw=False,
        solver_state=solver_state,
        controller_state=controller_state,
        made_jump=made_jump,
    )
    y1 = jax.tree.map(lambda u: u[-1], raw.ys["end"])
    energies, seen = raw.ys["series"]
    stats = {k: v for k, v in raw.stats.items() if k.startswith("num")}
    result = RESULTS.promote(raw.result)
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(u)) for u in jax.tree.leaves(y1)]))
    result = RESULTS.where(finite, result, RESULTS.non_finite)
    if hasattr(solver, "report"):
        stats |= solver.report(raw.solver_state)
        result = RESULTS.where(solver.failed(raw.solver_state), RESULTS.event_overflow, result)
    done = stats["num_steps"] + (0 if state is None else state.steps)
    leaves = tuple(jax.tree.leaves((raw.solver_state, raw.controller_state, raw.made_jump)))
    return {
        "ts": raw.ts["series"],
        "energy": energies,
        "clouds": seen if observe is None else None,
        "observed": None if observe is None else seen,
        "final": cloud_at(solver, problem, y1),
        "state": State(raw.ts["end"][-1], y1, done, leaves),
        "result": result,
        "stats": stats,
    }


def _unpack(
    terms: Any,
    solver: Any,
    controller: Any,
    t0: Any,
    t1: Any,
    y0: Any,
    size: Any,
    problem: Problem,
    state: State,
) -> tuple[Any, Any, Any]:
    """Rebuilds the stepper's own state from the flat leaves of ``state``."""

    def blank() -> Any:
        order = solver.error_order(terms)
        _, control = controller.init(terms, t0, t1, y0, size, problem, solver.func, order)
        return solver.init(terms, t0, t1, y0, problem), control, jnp.asarray(False)

    structure: Any = jax.tree.structure(eqx.filter_eval_shape(blank))
    if structure.num_leaves != len(state.leaves):
        raise ValueError(
            "state must come from a run with the same solver and step settings; "
            f"it holds {len(state.leaves)} arrays, these settings need {structure.num_leaves}"
        )
    return jax.tree.unflatten(structure, state.leaves)


class FromStart(eqx.Module):
    """Marks an observer that compares with the start: ``function(flow, cloud, data, start) -> pytree``.

    ``start`` is the cloud that was given to the solver (in a resumed run, the one passed along with ``state``).
    """

    function: Callable[[Flow, Cloud, Dataset, Cloud], Any]


def observe_with(observe: Any, problem: Problem, cloud: Cloud) -> Any:
    """What ``observe`` (a function, ``FromStart`` or a dict of these) sees at ``cloud`` during ``problem``."""
    if isinstance(observe, dict):
        return {name: observe_with(one, problem, cloud) for name, one in observe.items()}
    if isinstance(observe, FromStart):
        return observe.function(problem.flow, cloud, problem.data, problem.cloud)
    return observe(problem.flow, cloud, problem.data)


def _check_times(t0: jax.Array, t1: jax.Array) -> None:
    _checks.finite("t0", t0)
    _checks.finite("t1", t1)
    known = _checks.concrete(t0), _checks.concrete(t1)
    if known[0] is not None and known[1] is not None and np.any(known[1] <= known[0]):
        raise ValueError(f"t1 must be greater than t0 = {known[0]}, got {known[1]}")


def _resolve_solver(solver: Any) -> diffrax.AbstractSolver:
    if solver is None:
        return diffrax.Tsit5()
    if isinstance(solver, str):
        _checks.one_of("solver", solver, ("sliding",))
        from meanflow.solvers.sliding import Sliding

        return Sliding()
    return solver


def _step_budget(step: Any, t0: jax.Array, t1: jax.Array) -> int:
    fixed = step is not None and not isinstance(step, KernelStep)
    size, start, end = (_checks.concrete(u) if fixed else None for u in (step, t0, t1))
    if size is None or start is None or end is None:
        return 100_000
    needed = float(np.max((end - start) / size)) + 2
    return 1 << int(np.ceil(np.log2(max(needed, 16))))  # powers of two: few compiled shapes


def settings_text(**values: Any) -> str:
    """Settings and package versions as JSON, for ``Solution.settings``."""
    shown = {}
    for name, value in values.items():
        known = _checks.concrete(value) if isinstance(value, jax.Array) else None
        shown[name] = known.tolist() if known is not None else str(value)
    return json.dumps(shown | {"versions": versions()})


def raise_on_failure(solution: Solution) -> None:
    """Raises RuntimeError with the code's message unless every run of the solution is ok; not under jit."""
    ok = _checks.concrete(solution.ok)
    if ok is not None and not np.all(ok):
        if ok.ndim:
            raise RuntimeError(f"{int(np.sum(~ok))} of {ok.size} runs failed; see Solution.result")
        raise RuntimeError(f"the run failed: {RESULTS[solution.result]}")  # type: ignore[misc]
