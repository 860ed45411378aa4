"""Continuous time: the flow as an ODE, until a time is reached."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Annotated

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Real

from meanflow import _boundary
from meanflow._boundary import (
    Number,
    Positive,
    array,
    checked,
    choice,
    count,
    either,
    instance,
    unchecked,
)
from meanflow._reuse import compiled
from meanflow.flows import _observables as observables
from meanflow.flows._flow import Flow, bind_and_check
from meanflow.flows._observables import Observe
from meanflow.measures import _scaling as scaling
from meanflow.measures._cloud import Cloud
from meanflow.measures._dataset import Dataset
from meanflow.solvers._adaptive import ADJOINTS, save_times
from meanflow.solvers._defaults import Method, choose, rougher
from meanflow.solvers._dynamics import Dynamics
from meanflow.solvers._fluctuations import part, with_fluctuations
from meanflow.solvers._run import LOOPS, Options, Times, run, settings_of
from meanflow.solvers._solution import (
    FINE,
    Solution,
    State,
    begin,
    check_resumed,
    outcomes,
    raise_on_failure,
)
from meanflow.solvers._step import ANY_STEP, Adaptive, KernelStep, Scalar, StepRule, scalar
from meanflow.solvers._stepper import Stepper

SOLVER = either(
    choice("sliding"), instance(Stepper, diffrax.AbstractSolver, hint="for instance diffrax.Tsit5()")
)
Observed = Annotated[Observe, unchecked("observables.resolve checks it, which knows the names of the model")]


@checked
def solve(
    flow: Flow,
    cloud: Cloud,
    data: Dataset,
    t1: Number,
    *,
    ts: Annotated[int | Real[ArrayLike, " k"] | Sequence, either(count(2), array((None,), least=1))]
    | None = None,
    observe: Observed = None,
    solver: Annotated[str | Stepper | diffrax.AbstractSolver, SOLVER] | None = None,
    step: Annotated[StepRule | Adaptive | float | jax.Array, ANY_STEP] | None = None,
    dynamics: Dynamics | None = None,
    clock: Annotated[str, choice(*scaling.CLOCKS)] = "mean_field",
    adjoint: Annotated[
        str | diffrax.AbstractAdjoint, either(choice(*ADJOINTS), instance(diffrax.AbstractAdjoint))
    ] = "checkpoint",
    steady: Positive | None = None,
    state: State | None = None,
    throw: bool = True,
) -> Solution:
    """Solve w' = -C grad V from time 0 to t1.

    Args:
        flow: the model; a batch-norm flow takes its statistics from ``data`` unless bound before.
        cloud: initial particles.
        data: training data.
        t1: end time on ``clock``. May be traced and differentiated.
        ts: save times in [0, t1]; an integer k means k equally spaced times, both ends included; default only the end.
            Fixed steps are cut to land on them, adaptive steps interpolate.
        observe: what to save at ``ts`` instead of whole clouds: a function (flow, cloud, data) -> pytree such as
            ``meanflow.dissipation``, an ``Observable``, a dict of these by name, or names of the model's own
            observables such as ``["dissipation", "kernel_drift"]``.
        solver: a diffrax solver, or ``"sliding"`` for models that know how neurons move through kinks. By default the
            model decides: ``Tsit5()`` if it is smooth; if it has kinks (relu), where ordinary solvers crawl or err,
            ``"sliding"`` where the model has such a motion (for vector inputs: in float64) and ``Heun()`` otherwise,
            or where sliding runs out of events (``settings.names`` says which it was).
        step: a number or a ``StepRule`` such as ``KernelStep(0.25)``: fixed steps, of which a run whose energy rises by
            a tenth has failed (``RESULTS.energy_rose``); ``Adaptive(rtol, atol)``: steps that follow an error estimate.
            By default smooth models take ``Adaptive()``. Models with kinks take
            ``KernelStep(0.25)``, and the run is made a second time with half the steps: the rms error of the final
            coordinates, estimated from the difference, is in ``stats["error"]`` (not inside jit, vmap and grad, nor for
            resumed runs).
        dynamics: ``Noise`` (needs ``step``) or ``Reaction`` beside the gradient.
        clock: ``"mean_field"``, ``"gradient"``, ``"lazy"`` or ``"normalized"`` (which does not stall as a logistic loss
            decays); the page about dynamics has the table.
        adjoint: ``"checkpoint"`` (reverse mode, memory O(sqrt(steps)) states), ``"full"`` (reverse through the whole
            loop), ``"forward"`` (forward mode), or a diffrax adjoint.
        steady: stop when the speed sqrt(-dE/dt) of the measure falls below this.
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
    flow = bind_and_check(flow, cloud, data)
    scaling.check_clock(clock, cloud)  # inside the program the width is traced
    dtype = cloud.weights.dtype
    start, end = scalar(0.0 if state is None else state.t, dtype), scalar(t1, dtype)
    _check_order(start, end)
    if dynamics is not None:
        dynamics.check(flow, cloud)
    method = choose(flow, cloud, data, solver, step, dynamics, clock)
    times = None if ts is None else save_times(ts, start, end, dtype)
    backward = ADJOINTS[adjoint] if isinstance(adjoint, str) else adjoint
    if not isinstance(method.rule, Adaptive) and type(backward) not in LOOPS:
        raise ValueError(
            f"adjoint must be one of {list(ADJOINTS)} with fixed steps, or what these names stand for in diffrax, "
            f"got {type(backward).__name__}"
        )
    options = Options(
        horizon=Times(
            start,
            end,
            times,
            times is not None and _ends_at(times, end),
            None if steady is None else scalar(steady, dtype),
        ),
        method=method.stepper,
        rule=method.rule,
        adjoint=backward,
        limit=method.rule.limit(start, end, 1 if times is None else times.shape[-1]),
        clock=clock,
        observe=None if observe is None else observables.resolve(observe, flow, data),
        dynamics=dynamics,
        batches=None,
        settings=settings_of(method.names | {"clock": clock}, method.rule, dynamics),
    )
    if state is not None:
        check_resumed(state, options.settings, data)
    options, wanted, alone = part(options, state)
    solution = run(flow, cloud, data, options, state)
    measured = method.order is not None and state is None
    if measured and outcomes(solution.result) == "event_overflow":
        # the default must not fail where a rougher method would not: in single precision a neuron among many kinks
        # may go to and fro between two of them
        method = rougher(method)
        settings = settings_of(method.names | {"clock": clock}, method.rule, dynamics)
        options = options._replace(method=method.stepper, settings=settings)
        solution = run(flow, cloud, data, options, None)
    if throw:
        raise_on_failure(solution)
        _warn_of_chatter(solution)
    if measured:
        solution = _with_error(solution, flow, cloud, data, options, method)
    return with_fluctuations(solution, wanted, alone, flow, cloud, data, options)


def _warn_of_chatter(solution: Solution) -> None:
    """Warn of a run that has rejected many adaptive steps, as it does where velocities jump; not while tracing."""
    known = (
        _boundary.concrete(solution.stats.get(f"num_{name}_steps", 0)) for name in ("accepted", "rejected")
    )
    accepted, rejected = (None if u is None else int(np.sum(u)) for u in known)
    if accepted is not None and rejected is not None and rejected > max(accepted / 2, 100):
        warnings.warn(
            f"{rejected} of {accepted + rejected} adaptive steps were rejected: the velocity seems to jump, as it does "
            "where an activation has kinks, and the tolerance then says nothing about the error; take fixed steps "
            "instead, such as solver=diffrax.Heun(), step=0.01",
            stacklevel=4,
        )


def _ends_at(times: jax.Array, end: Scalar) -> bool:
    """Say whether the last save time is known to be the end: the run has nowhere to go from there."""
    known, last = _boundary.concrete(end), _boundary.concrete(times)
    return last is not None and known is not None and bool(np.all(last[..., -1] == known))


def _with_error(
    solution: Solution, flow: Flow, cloud: Cloud, data: Dataset, options: Options, method: Method
) -> Solution:
    """Return the solution with its error in ``stats``, found by a second run with half the steps; not while tracing."""
    assert isinstance(options.rule, KernelStep) and method.order is not None
    kappa = _boundary.concrete(options.rule.kappa)
    if outcomes(solution.result) is None or kappa is None:
        return solution
    # the same program with another number; what is small is computed by numpy, which compiles nothing
    fine = run(flow, cloud, data, eqx.tree_at(lambda o: o.rule.kappa, options, 0.5 * kappa), None)
    gap = np.asarray(_distance(flow, solution.final, data, fine.final)) / (1 - 0.5**method.order)
    known = {str(outcomes(solution.result)), str(outcomes(fine.result))} <= set(FINE)
    error = jnp.asarray(gap if known else np.nan, cloud.weights.dtype)
    return eqx.tree_at(lambda s: s.stats, solution, solution.stats | {"error": error})


_distance = compiled(observables.displacement)


def _check_order(t0: Scalar, t1: Scalar) -> None:
    known = _boundary.concrete(t0), _boundary.concrete(t1)
    if known[0] is not None and known[1] is not None and np.any(known[1] <= known[0]):
        raise ValueError(f"t1 must be greater than {known[0]}, where the run starts, got {known[1]}")
