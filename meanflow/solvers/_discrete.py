"""Discrete time: gradient descent and its relatives, on optax."""

from __future__ import annotations

from typing import Annotated

import jax
import optax

from meanflow import _boundary
from meanflow._boundary import Count, checked, choice, instance
from meanflow._identity import describe, json_digest
from meanflow._reuse import canonical, kept
from meanflow.flows import _observables as observables
from meanflow.flows._flow import Flow, bind_and_check
from meanflow.measures import _scaling as scaling
from meanflow.measures._cloud import Cloud
from meanflow.measures._dataset import Dataset
from meanflow.solvers._adaptive import ADJOINTS
from meanflow.solvers._batches import Batches
from meanflow.solvers._continuous import Observed
from meanflow.solvers._dynamics import Dynamics
from meanflow.solvers._fluctuations import part, with_fluctuations
from meanflow.solvers._run import PLAIN, Counts, Options, run, settings_of
from meanflow.solvers._solution import (
    Solution,
    State,
    begin,
    check_resumed,
    raise_on_failure,
)
from meanflow.solvers._step import STEP, StepRule, as_rule

_boundary.declare(
    optax.GradientTransformation, instance(optax.GradientTransformation, hint="for instance optax.adam(1e-2)")
)
_boundary.declare(Batches, instance(Batches, hint="for instance Batches(32, key)"))


@checked
def descend(
    flow: Flow,
    cloud: Cloud,
    data: Dataset,
    steps: Count,
    *,
    optimizer: optax.GradientTransformation | None = None,
    step: Annotated[StepRule | float | jax.Array, STEP] | None = None,
    every: Count | None = None,
    observe: Observed = None,
    batches: Batches | None = None,
    dynamics: Dynamics | None = None,
    clock: Annotated[str, choice(*scaling.CLOCKS)] = "mean_field",
    adjoint: Annotated[str, choice("checkpoint", "full")] = "checkpoint",
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
        step: a number or a ``StepRule`` such as ``KernelStep`` that multiplies the optimizer's updates; default 1 with
            an optimizer.
        every: steps between saves (divides ``steps``); default only the end. The start is saved too, unless the
            run is resumed.
        observe: as in ``solve``.
        batches: ``Batches(size, key)``: minibatches, or fresh samples, in place of all samples in every step.
        dynamics: ``Noise`` or ``Reaction`` beside the gradient; not with an optimizer.
        clock: ``"mean_field"``, ``"gradient"``, ``"lazy"`` or ``"normalized"``, as in ``solve``.
        adjoint: ``"checkpoint"`` (reverse mode stores about 2 sqrt(every) states per save) or ``"full"`` (the state of
            every step, which spares one pass over the steps).
        state: ``Solution.state`` of an earlier run; goes on bit for bit, whichever cloud of that run ``cloud`` is. Data
            and settings must be those of that run, except for a constant step, ``steps``, ``every`` and ``observe``.
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
    bound = bind_and_check(flow, cloud, data)
    scaling.check_clock(clock, cloud)  # inside the program the width is traced
    if optimizer is None and step is None:
        raise ValueError("step must be a number or a StepRule when no optimizer is given, got None")
    if dynamics is not None:
        if optimizer is not None:
            raise ValueError("optimizer must be None (plain descent) with dynamics, got an optimizer")
        dynamics.check(bound, cloud)
    if batches is not None:
        batches.check(data)
    rule = as_rule(1.0 if step is None else step, cloud.weights.dtype)
    names = {
        "optimizer": "plain descent" if optimizer is None else describe_optimizer(optimizer),
        "clock": clock,
        "step": type(rule).__name__,
        **({} if batches is None else batches.names()),
    }
    options = Options(
        horizon=Counts(steps, steps if every is None else every),
        # one made anew finds the program of its like
        method=PLAIN if optimizer is None else canonical(optimizer),
        rule=rule,
        adjoint=ADJOINTS[adjoint],
        limit=steps,
        clock=clock,
        observe=None if observe is None else observables.resolve(observe, bound, data),
        dynamics=dynamics,
        batches=batches,
        settings=settings_of(names, rule, dynamics),
    )
    if state is not None:
        check_resumed(state, options.settings, data)
    # statistics of each minibatch: the flow stays unbound, and is bound to the batch in every step
    per_batch = batches is not None and batches.statistics == "batch"
    options, wanted, alone = part(options, state)
    used = flow if per_batch else bound
    solution = run(used, cloud, data, options, state)
    if throw:
        raise_on_failure(solution)
    return with_fluctuations(solution, wanted, alone, used, cloud, data, options)


@kept()
def describe_optimizer(optimizer: optax.GradientTransformation) -> str:
    """Return a text that is equal for equal optimizers; remembered, since following their code takes milliseconds."""
    return json_digest(describe(optimizer))
