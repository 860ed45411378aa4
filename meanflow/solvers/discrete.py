"""Discrete time: gradient descent and its relatives, on optax."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from meanflow import _checks
from meanflow._numerics import iterate
from meanflow.flows.flow import Flow, energy, velocity
from meanflow.measures import scaling
from meanflow.measures.cloud import Cloud
from meanflow.measures.dataset import Dataset
from meanflow.solvers.continuous import observe_with, raise_on_failure, settings_text
from meanflow.solvers.solution import RESULTS, Solution, State
from meanflow.solvers.step import KernelStep, Problem, next_size

PLAIN = optax.sgd(1.0)  # one object, so that repeated calls share one compiled program


class _Carry(NamedTuple):
    t: jax.Array
    particles: Any
    steps: jax.Array
    optimizer: Any
    size: jax.Array


def descend(
    flow: Flow,
    cloud: Cloud,
    data: Dataset,
    steps: int,
    *,
    optimizer: optax.GradientTransformation | None = None,
    step: Any = None,
    every: int | None = None,
    observe: Any = None,
    batch_size: int | None = None,
    statistics: str = "frozen",
    key: jax.Array | None = None,
    clock: str = "mean_field",
    adjoint: str = "checkpoint",
    state: State | None = None,
    throw: bool = False,
) -> Solution:
    """Runs ``steps`` steps w <- retract(w, step * optimizer(gradient)) in one compiled scan.

    The gradient is minus the velocity on ``clock``. With the default optimiser a step of size h is an Euler step
    of the flow, and gradient descent on the loss with learning rate h (clock ``"gradient"``), m h
    (``"mean_field"``) or h m (alpha/m)^2 (``"lazy"``).

    Args:
        flow, cloud, data: model, initial particles, training data.
        steps: number of steps, >= 1.
        optimizer: any optax optimiser; default plain descent, which needs ``step``.
        step: a number or ``KernelStep`` that multiplies the optimiser's updates; default 1 with an optimiser.
        every: steps between saves (divides ``steps``); default only the end. The start is saved too, unless the
            run is resumed.
        observe: as in ``solve``.
        batch_size: size of minibatches drawn without replacement at each step; needs ``key``.
        statistics: under batch norm, ``"frozen"`` (those of the whole data) or ``"batch"`` (of each minibatch).
        key: PRNG key of the minibatches; step k uses fold_in(key, k), so runs can be resumed.
        clock: ``"mean_field"``, ``"gradient"`` or ``"lazy"``.
        adjoint: ``"checkpoint"`` (reverse mode stores about 2 sqrt(every) states per save) or ``"full"`` (all).
        state: ``Solution.state`` of an earlier run with the same settings; goes on bit for bit.
        throw: raise RuntimeError if the result is not finite (outside jit).

    Returns:
        A ``Solution``; ``ts`` is the sum of the step sizes, that is flow time for plain descent and the step
        count for an optimiser without ``step``.

    >>> import jax, jax.numpy as jnp, meanflow as mf
    >>> x = jax.random.normal(jax.random.key(0), (40, 2))
    >>> data = mf.Dataset(x, jnp.abs(x[:, 0]))
    >>> flow = mf.vanilla("tanh")
    >>> cloud = flow.init(jax.random.key(1), 16, dim=2)
    >>> run = mf.descend(flow, cloud, data, 100, step=0.1, every=50)
    >>> run.energy.shape, round(float(run.ts[-1]), 6)
    ((3,), 10.0)
    """
    flow_given, flow = flow, flow.bind(data)
    flow.check(cloud, data.x)
    steps = _checks.whole("steps", steps, 1)
    every = steps if every is None else _checks.whole("every", every, 1)
    _checks.one_of("adjoint", adjoint, ("checkpoint", "full"))
    _checks.one_of("statistics", statistics, ("frozen", "batch"))
    if optimizer is None and step is None:
        raise ValueError("step must be a number or KernelStep when no optimizer is given, got None")
    if batch_size is not None:
        batch_size = _checks.whole("batch_size", batch_size, 1)
        if batch_size > data.size:
            raise ValueError(f"batch_size must be at most the number of points {data.size}, got {batch_size}")
        if key is None:
            raise ValueError("key must be a PRNG key when batch_size is given, got None")
        if statistics == "batch":
            flow = flow_given
            if data.x.ndim == 2 and batch_size <= data.x.shape[1]:
                raise ValueError(
                    f"batch_size must exceed d = {data.x.shape[1]} for batch statistics, got {batch_size}"
                )
    settings = settings_text(
        optimizer=optimizer, step=step, steps=steps, batch_size=batch_size, statistics=statistics, clock=clock
    )
    if not isinstance(step, KernelStep):
        step = 1.0 if step is None else step
        _checks.at_least("step", step, 0.0, strict=True)
        step = jnp.asarray(step, cloud.weights.dtype)
    optimizer = PLAIN if optimizer is None else optimizer
    parts = _descend(
        flow, cloud, data, steps, optimizer, step, every, observe, batch_size, key, clock, adjoint, state
    )
    solution = Solution(**parts, settings=settings)
    if throw:
        raise_on_failure(solution)
    return solution


@eqx.filter_jit
def _descend(
    flow: Flow,
    cloud: Cloud,
    data: Dataset,
    steps: int,
    optimizer: optax.GradientTransformation,
    rule: Any,
    every: int,
    observe: Any,
    batch_size: int | None,
    key: Any,
    clock: str,
    adjoint: str,
    state: State | None,
) -> dict[str, Any]:
    whole = flow.bind(data)
    problem = Problem(whole, cloud, data, scaling.speed(clock, flow.scaling, cloud))
    # a plain step moves the neurons alike in all coordinates, up to its own error; the state of an optimiser would not
    easy = flow.chart(cloud) if optimizer == PLAIN else (flow, cloud, lambda particles: particles)
    model, base, back = easy
    inner_problem = problem._replace(flow=model.bind(data), cloud=base)
    carry = _start(base, optimizer, rule, state)

    def step(carry: _Carry, _: None) -> _Carry:
        here = base.at(carry.particles)
        batch = data
        if batch_size is not None:
            chosen = jax.random.choice(
                jax.random.fold_in(key, carry.steps), data.size, (batch_size,), replace=False
            )
            batch = data.take(chosen)
        bound = model.bind(batch)
        gradient = jax.tree.map(lambda v: -problem.speed * v, velocity(bound, here, batch))
        size = next_size(rule, carry.steps, carry.size, inner_problem, here)
        updates, inner = optimizer.update(gradient, carry.optimizer, carry.particles)
        moved = bound.space.retract(here, jax.tree.map(lambda u: size * u, updates))
        return _Carry(carry.t + size, moved, carry.steps + 1, inner, size)

    def look(carry: _Carry) -> Any:
        here = cloud.at(back(carry.particles))
        seen = here if observe is None else observe_with(observe, problem, here)
        return carry.t, energy(whole, here, data), seen

    first = look(carry)
    carry, series = iterate(step, carry, None, steps, every, look, checkpoint=adjoint == "checkpoint")
    if state is None:
        series = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, series)
    times, energies, seen = series
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(u)) for u in jax.tree.leaves(carry.particles)]))
    return {
        "ts": times,
        "energy": energies,
        "clouds": seen if observe is None else None,
        "observed": None if observe is None else seen,
        "final": cloud.at(back(carry.particles)),
        "state": State(
            carry.t, carry.particles, carry.steps, tuple(jax.tree.leaves((carry.optimizer, carry.size)))
        ),
        "result": RESULTS.where(finite, RESULTS.successful, RESULTS.non_finite),
        "stats": {"num_steps": carry.steps},
    }


def _start(cloud: Cloud, optimizer: optax.GradientTransformation, rule: Any, state: State | None) -> _Carry:
    dtype = cloud.weights.dtype
    fresh = optimizer.init(cloud.particles)
    # a KernelStep is refreshed at step 0, so its first size is never used
    size = jnp.zeros((), dtype) if isinstance(rule, KernelStep) else rule.astype(dtype)
    if state is None:
        return _Carry(jnp.zeros((), dtype), cloud.particles, jnp.asarray(0, jnp.int32), fresh, size)
    structure: Any = jax.tree.structure((fresh, size))
    if structure.num_leaves != len(state.leaves):
        raise ValueError(
            "state must come from a run with the same optimizer; "
            f"it holds {len(state.leaves)} arrays, this optimizer needs {structure.num_leaves}"
        )
    inner, size = jax.tree.unflatten(structure, state.leaves)
    return _Carry(state.t, state.y, state.steps, inner, size)
