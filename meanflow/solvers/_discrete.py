"""Discrete time: gradient descent and its relatives, on optax."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from meanflow import _checks
from meanflow._checks import choice, count, flag, instance, number, optional, prng_key, taking
from meanflow._identity import describe, json_digest
from meanflow._numerics import KeyBits, iterate
from meanflow._reuse import canonical, compiled, kept
from meanflow.flows import _equation as equation
from meanflow.flows import _observables as observables
from meanflow.flows._flow import FLOW, Flow, prepare
from meanflow.flows._observables import Observable, Observe
from meanflow.flows._problem import Problem, Weighted
from meanflow.measures import _scaling as scaling
from meanflow.measures._cloud import CLOUD, Cloud
from meanflow.measures._dataset import DATA, Dataset
from meanflow.solvers._batches import Batches
from meanflow.solvers._continuous import OBSERVE, STATE, rule_numbers
from meanflow.solvers._dynamics import SAMPLES, Dynamics, check_sampler
from meanflow.solvers._labelled import axis_names
from meanflow.solvers._solution import (
    RESULTS,
    Settings,
    Solution,
    State,
    begin,
    check_resumed,
    fingerprint,
    raise_on_failure,
)
from meanflow.solvers._stages import runge_kutta
from meanflow.solvers._step import STEP, ConstantStep, StepRule, all_finite, as_rule

Sampler = Callable[[jax.Array, int], tuple[jax.Array, jax.Array]]  # (key, batch size) -> (x, y)

PLAIN = optax.sgd(1.0)  # one object, so that repeated calls share one compiled program
METHOD = instance(
    diffrax.AbstractERK, hint="for instance diffrax.Heun(); the sliding solver belongs to runs with t1"
)
OPTIMIZER = instance(optax.GradientTransformation, hint="for instance optax.adam(1e-2)")


class DescentOptions(NamedTuple):
    """The arguments of ``descend`` beside flow, cloud and data, checked and in the form the compiled program takes.

    A tuple as ``SolveOptions``; text and integers in it are fixed in the program.
    """

    optimizer: optax.GradientTransformation
    solver: diffrax.AbstractERK | None
    rule: StepRule
    observe: Observable | dict[str, Observable] | None
    key: jax.Array | None
    sampler: Sampler | None
    dynamics: Dynamics
    settings: Settings
    steps: int
    every: int
    batch_size: int | None
    replace: bool
    clock: str
    adjoint: str


class _Carry(NamedTuple):
    t: jax.Array
    y: PyTree[jax.Array]
    steps: jax.Array
    optimizer: optax.OptState
    size: jax.Array


@_checks.arguments(
    flow=FLOW,
    cloud=CLOUD,
    data=DATA,
    steps=count(1),
    optimizer=optional(OPTIMIZER),
    solver=optional(METHOD),
    step=optional(STEP),
    every=optional(count(1)),
    observe=OBSERVE,
    batch_size=optional(count(1)),
    replace=flag,
    statistics=choice("frozen", "batch"),
    sampler=optional(taking(2)),
    temperature=number(low=0),
    reaction=number(low=0),
    conserve=flag,
    key=optional(prng_key),
    clock=choice(*scaling.CLOCKS),
    adjoint=choice("checkpoint", "full"),
    state=optional(STATE),
    throw=flag,
)
def descend(
    flow: Flow,
    cloud: Cloud,
    data: Dataset,
    steps: int,
    *,
    optimizer: optax.GradientTransformation | None = None,
    solver: diffrax.AbstractERK | None = None,
    step: StepRule | float | jax.Array | None = None,
    every: int | None = None,
    observe: Observe = None,
    batch_size: int | None = None,
    replace: bool = False,
    statistics: str = "frozen",
    sampler: Sampler | None = None,
    temperature: float | jax.Array = 0.0,
    reaction: float | jax.Array = 0.0,
    conserve: bool = True,
    key: jax.Array | None = None,
    clock: str = "mean_field",
    adjoint: str = "checkpoint",
    state: State | None = None,
    throw: bool = True,
) -> Solution:
    """Run ``steps`` steps w <- retract(w, step * optimizer(gradient)) in one compiled scan.

    The gradient is minus the velocity on ``clock``. With the default optimizer a step of size h is an Euler step
    of the flow, and gradient descent on the loss with learning rate h (clock ``"gradient"``), m h
    (``"mean_field"``) or h m (alpha/m)^2 (``"lazy"``). Flows with a chart of their own (``lifted``) step in it:
    the optimizer sees the gradient in the coordinates of the chart.

    Args:
        flow, cloud, data: model, initial particles, training data.
        steps: number of steps, >= 1.
        optimizer: any optax optimizer; default plain descent, which needs ``step``.
        solver: an explicit Runge-Kutta method such as ``diffrax.Heun()`` instead of Euler steps: the numbers are those
            of ``solve`` with this solver and ``step``, but the number of steps is known beforehand and the stages are
            written out, so that an accelerator never waits for the host. Not with an optimizer or a temperature.
        step: a number or a ``StepRule`` such as ``KernelStep`` that multiplies the optimizer's updates; default 1 with
            an optimizer.
        every: steps between saves (divides ``steps``); default only the end. The start is saved too, unless the
            run is resumed.
        observe: as in ``solve``.
        batch_size: size of minibatches; needs ``key``. Every epoch takes the samples in a new random order and goes
            through n // batch_size batches of them (the rest of that order is left out). A step costs O(batch_size),
            whatever n. The weights of a batch are scaled up to the total weight of the data.
        replace: draw each batch independently and with replacement instead of by epochs.
        statistics: under batch norm, ``"frozen"`` (those of the whole data) or ``"batch"`` (of each minibatch).
        key: PRNG key of the minibatches. The batch of a step is a function of this key and of the number of the
            step, so runs can be resumed.
        clock: ``"mean_field"``, ``"gradient"`` or ``"lazy"``.
        adjoint: ``"checkpoint"`` (reverse mode stores about 2 sqrt(every) states per save) or ``"full"`` (the state of
            every step, which spares one pass over the steps).
        state: ``Solution.state`` of an earlier run; goes on bit for bit (to rounding with ``solver``), whichever cloud
            of that run ``cloud`` is. Data and settings must be those of that run, except for a constant step,
            ``steps``, ``every`` and ``observe``.
        throw: raise ``FailedRun`` (a RuntimeError that holds the Solution) if the result is not finite. Inside jit,
            vmap and grad nothing is raised: look at ``Solution.result``.

    Returns:
        A ``Solution``; ``ts`` is the sum of the step sizes, that is flow time for plain descent and the step
        count for an optimizer without ``step``.

    >>> import jax, jax.numpy as jnp, meanflow as mf
    >>> x = jax.random.normal(jax.random.key(0), (40, 2))
    >>> data = mf.Dataset(x, jnp.abs(x[:, 0]))
    >>> flow = mf.vanilla("tanh")
    >>> cloud = flow.init(jax.random.key(1), 16, dim=2)
    >>> run = mf.descend(flow, cloud, data, 100, step=0.1, every=50)
    >>> run.energy.shape, round(float(run.ts[-1]), 6)
    ((3,), 10.0)
    """
    flow, cloud = begin(flow, cloud, state)
    bound = prepare(flow, cloud, data)
    scaling.check_clock(clock, cloud)  # inside the program the width is traced
    optimizer = canonical(optimizer)  # one made anew finds the program of its like
    if optimizer is None and step is None:
        raise ValueError("step must be a number or a StepRule when no optimizer is given, got None")
    dynamics = Dynamics(bound, cloud, temperature, reaction, conserve, key)
    if dynamics.moves and optimizer is not None:
        raise ValueError(
            "optimizer must be None (plain descent) with temperature or reaction, got an optimizer"
        )
    if solver is not None and (optimizer is not None or dynamics.temperature is not None):
        raise ValueError(
            "solver must be None with an optimizer or a temperature, whose steps are their own, "
            f"got {type(solver).__name__}"
        )
    if sampler is not None:
        if batch_size is None or key is None:
            raise ValueError(f"sampler needs batch_size and key, got batch_size={batch_size} and key={key}")
        check_sampler(sampler, key, batch_size, data)
    elif batch_size is not None:
        _check_batches(batch_size, statistics, key, data)
    elif replace:
        raise ValueError("replace needs batch_size, the size of the batches that are drawn, got None")
    rule = as_rule(1.0 if step is None else step, cloud.weights.dtype)
    names = {
        "optimizer": "plain descent" if optimizer is None else describe_optimizer(optimizer),
        "clock": clock,
        "step": type(rule).__name__,
        "batch_size": str(batch_size),
        "replace": str(replace),
        "statistics": statistics,
    } | type(dynamics).names(dynamics)
    if solver is not None:
        names["solver"] = type(solver).__name__
    if sampler is not None:
        names["sampler"] = "fresh samples"
    numbers = {} if isinstance(rule, ConstantStep) else rule_numbers(rule)
    settings = Settings(numbers | type(dynamics).numbers(dynamics), tuple(names.items()))
    if state is not None:
        check_resumed(state, settings, data)
    options = DescentOptions(
        optimizer=PLAIN if optimizer is None else optimizer,
        solver=solver,
        rule=rule,
        observe=observables.resolve(observe, bound, data),
        key=key,
        sampler=sampler,
        dynamics=dynamics,
        settings=settings,
        steps=steps,
        every=steps if every is None else every,
        batch_size=batch_size,
        replace=replace,
        clock=clock,
        adjoint=adjoint,
    )
    # statistics of each minibatch: the flow stays unbound, and is bound to the batch in every step
    per_batch = batch_size is not None and statistics == "batch"
    solution = _descend(flow if per_batch else bound, cloud, data, options, state)
    if throw:
        raise_on_failure(solution)
    return solution


@compiled
def _descend(
    flow: Flow, cloud: Cloud, data: Dataset, options: DescentOptions, state: State | None
) -> Solution:
    observe, rule = options.observe, options.rule
    speed = scaling.speed(options.clock, flow.scaling, cloud)
    bound = flow.bind(data)
    problem = options.dynamics.problem(bound.chart(cloud), data, speed, options.clock)
    problem = eqx.tree_at(
        lambda p: p.memory, problem, observables.begin(observe, problem), is_leaf=lambda u: u is None
    )
    model = flow.chart(cloud).flow
    carry = _start(problem, options, state)
    draw = _batches(problem.samples if options.batch_size is None else data, options)

    def step(carry: _Carry, _: None) -> _Carry:
        here = problem.here(carry.y)
        batch = draw(carry.steps)
        bound = model.bind(batch)
        size = rule.next_size(carry.steps, carry.size, problem, carry.y)
        if options.solver is not None:
            field = lambda y: problem.rates(problem.here(y), batch, bound)
            moved = runge_kutta(options.solver, field, carry.y, size)
            return _Carry(carry.t + size, moved, carry.steps + 1, carry.optimizer, size)
        rates = problem.rates(here, batch, bound)
        v = rates.particles if isinstance(rates, Weighted) else rates
        gradient = jax.tree.map(jnp.negative, v)
        updates, inner = options.optimizer.update(gradient, carry.optimizer, here.particles)
        by = jax.tree.map(lambda u: size * u, updates)
        if problem.temperature is not None:
            by = jax.tree.map(jnp.add, by, problem.noise(here, carry.steps, size, bound))
        if isinstance(rates, Weighted):
            by = Weighted(by, size * rates.log_growth)
        moved = problem.move(here, carry.y, by, bound)
        return _Carry(carry.t + size, moved, carry.steps + 1, inner, size)

    def look(carry: _Carry) -> tuple[jax.Array, jax.Array, PyTree]:
        here = problem.seen(carry.y)
        seen = here if observe is None else observables.measure(observe, problem, here)
        return carry.t, equation.energy(problem.flow, here, data), seen

    checkpoint = options.adjoint == "checkpoint"
    carry, (times, energies, seen) = iterate(
        step, carry, None, options.steps, options.every, look, checkpoint=checkpoint, first=state is None
    )
    leaves = tuple(jax.tree.leaves((carry.optimizer, carry.size)))
    numbers = {"steps": jnp.asarray(options.steps), "every": jnp.asarray(options.every)}
    if isinstance(rule, ConstantStep):
        numbers["step"] = jnp.asarray(rule.size)
    return Solution(
        ts=times,
        energy=energies,
        clouds=seen if observe is None else None,
        observed=None if observe is None else seen,
        final=problem.cloud(carry.y),
        state=State(
            t=carry.t,
            y=carry.y,
            steps=carry.steps,
            leaves=leaves,
            settings=options.settings,
            data=fingerprint(data),
            start=cloud,
            offset=None if flow.offset is None else flow.offset.cloud,
        ),
        result=RESULTS.where(all_finite(carry.y), RESULTS.successful, RESULTS.non_finite),
        stats={"num_steps": carry.steps},
        settings=Settings(
            options.settings.numbers | numbers, options.settings.names + axis_names(options.observe)
        ),
    )


def _start(problem: Problem, options: DescentOptions, state: State | None) -> _Carry:
    """Return what the first step starts from: a fresh optimizer, or the one of the run that is resumed."""
    base, rule = problem.chart.base, options.rule
    dtype, y0 = base.weights.dtype, problem.initial()
    fresh = options.optimizer.init(base.particles)
    # a rule that is refreshed sets the size at step 0, so that this one is never used
    size = jnp.zeros((), dtype) if rule.every is not None else rule.size_at(problem, y0).astype(dtype)
    if state is None:
        return _Carry(jnp.zeros((), dtype), y0, jnp.asarray(0, jnp.int32), fresh, size)
    needed, structure = jax.tree.flatten((fresh, size))
    if len(needed) != len(state.leaves):
        raise ValueError(
            "state must come from a run with the same optimizer; "
            f"it holds {len(state.leaves)} arrays, this optimizer needs {len(needed)}"
        )
    inner, kept = jax.tree.unflatten(structure, state.leaves)
    return _Carry(state.t, state.y, state.steps, inner, size if isinstance(rule, ConstantStep) else kept)


def _batches(data: Dataset, options: DescentOptions) -> Callable[[jax.Array], Dataset]:
    """Return the map from the number of a step to the data it looks at: all, a minibatch, or fresh samples."""
    if options.batch_size is None:
        return lambda step: data
    assert options.key is not None
    if options.sampler is None:
        return Batches(data, options.key, options.batch_size, replace=options.replace).at
    sampler, size = options.sampler, options.batch_size
    bits = KeyBits(jax.random.fold_in(options.key, SAMPLES))
    return lambda step: Dataset(*sampler(jax.random.fold_in(bits.key, step), size))


def _check_batches(batch_size: int, statistics: str, key: jax.Array | None, data: Dataset) -> None:
    if batch_size > data.size:
        raise ValueError(f"batch_size must be at most the number of points {data.size}, got {batch_size}")
    if key is None:
        raise ValueError("key must be a PRNG key when batch_size is given, got None")
    if batch_size == 1 and statistics == "batch":
        raise ValueError("batch_size must be at least 2 for statistics of each batch, got 1")


@kept()
def describe_optimizer(optimizer: optax.GradientTransformation) -> str:
    """Return a text that is equal for equal optimizers; remembered, since following their code takes milliseconds."""
    return json_digest(describe(optimizer))
