"""Steps that adapt their length, by diffrax."""

from collections.abc import Callable, Sequence

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PyTree, Real

from meanflow import _boundary
from meanflow._reuse import inlined
from meanflow.flows._problem import Problem
from meanflow.solvers._step import Adaptive, Scalar
from meanflow.solvers._stepper import field

ADJOINTS: dict[str, diffrax.AbstractAdjoint] = {
    "checkpoint": diffrax.RecursiveCheckpointAdjoint(),
    "full": diffrax.DirectAdjoint(),
    "forward": diffrax.ForwardMode(),
}


def save_times(
    ts: int | Real[ArrayLike, " k"] | Sequence, t0: Scalar, t1: Scalar, dtype: jnp.dtype
) -> Float[Array, " k"]:
    """Return the argument ``ts`` of ``solve`` as an array, checked where it is known.

    An integer k means k equally spaced times, both ends included.
    """
    if isinstance(ts, int | np.integer):
        count = _boundary.whole("ts", ts, 2)
        return jnp.minimum(t0 + (t1 - t0) * jnp.linspace(0.0, 1.0, count, dtype=dtype), t1)
    chosen = _boundary.array((None,))("ts", ts).astype(dtype)
    times, start, end = (_boundary.concrete(u) for u in (chosen, t0, t1))
    if times is None or start is None or end is None:
        return chosen
    if times.size < 1 or np.any(np.diff(times) <= 0) or times[0] < start or times[-1] > end:
        raise ValueError(f"ts must increase within [0, t1] = [{start}, {end}], got {times}")
    return chosen


class SaveTimes(diffrax.AbstractAdjoint):
    """Hands the save times to the loop of ``adjoint``, past the check of their order.

    diffrax makes that check inside the program and reports a failure through a host callback, which accelerators
    cannot have; ``save_times`` has checked them before anything was traced. Needs a ``SaveAt`` whose ``subs`` are a
    dict in which ``"series"`` is to be saved at the times.
    """

    adjoint: diffrax.AbstractAdjoint
    ts: jax.Array

    def loop(self, *, saveat: diffrax.SaveAt, init_state: PyTree, **rest: PyTree) -> PyTree:
        """Run the loop of the adjoint, with ``series`` saved at the times and room for that."""
        series = diffrax.SubSaveAt(ts=self.ts, fn=saveat.subs["series"].fn)
        saveat = eqx.tree_at(
            lambda s: s.subs["series"], saveat, series, is_leaf=lambda u: isinstance(u, diffrax.SubSaveAt)
        )
        room = lambda u: jnp.full((self.ts.shape[0], *u.shape[1:]), jnp.inf, u.dtype)
        buffers = lambda s: (s.save_state["series"].ts, s.save_state["series"].ys)
        init_state = eqx.tree_at(buffers, init_state, jax.tree.map(room, buffers(init_state)))
        return self.adjoint.loop(saveat=saveat, init_state=init_state, **rest)


class _Steady(eqx.Module):
    """Stops when the speed of the measure, sqrt(-dE/dt), falls below a tolerance."""

    tolerance: Scalar

    def __call__(self, t: jax.Array, y: PyTree[jax.Array], args: Problem, **kwargs: object) -> jax.Array:
        return args.dissipation(args.cloud(y)) < self.tolerance**2


def _cloud_norm(weights: jax.Array, error: PyTree[jax.Array]) -> jax.Array:
    """Return the root mean square over the measure: padding has no say, duplicating the particles changes nothing."""
    leaves = [u.reshape(weights.shape[0], -1) for u in jax.tree.leaves(error)]
    squares = jnp.sum(jnp.concatenate(leaves, axis=1) ** 2, axis=1)
    total = jnp.sum(jnp.where(weights > 0, weights * squares, 0.0)) / jnp.sum(weights)
    safe = jnp.where(total > 0, total, 1.0)
    return jnp.where(total > 0, jnp.sqrt(safe / sum(u.shape[1] for u in leaves)), 0.0)


def integrate(
    problem: Problem,
    solver: diffrax.AbstractSolver,
    rule: Adaptive,
    times: tuple[Scalar, Scalar, jax.Array | None, Scalar | None],
    look: Callable[[Array, PyTree[Array]], PyTree[Array]],
    adjoint: diffrax.AbstractAdjoint,
    y: PyTree[Array],
    resume: Callable[[PyTree], PyTree[Array]] | None,
    ends: bool = False,
) -> diffrax.Solution:
    """Return diffrax's solution, with what ``look`` saw as ``ys["series"]`` and the end of the run as ``ys["end"]``.

    Args:
        problem: flow, data and clock.
        solver: any solver of diffrax with an error estimate.
        rule: tolerances.
        times: start, end, save times (None for the end alone), and the speed below which a run has come to rest
            (None to go on to the end).
        look: (t, y) -> what is saved.
        adjoint: how derivatives pass.
        y: the state from which the run starts or goes on.
        resume: gives the states of solver and controller of an earlier run the structure it is handed; None for a
            new run.
        ends: whether to return the ends of the steps as ``ts["ends"]``, (most steps,), infinite behind the last.
    """
    start, end, saves, steady = times
    terms = diffrax.ODETerm(field)
    norm = jax.tree_util.Partial(_cloud_norm, problem.chart.base.weights)
    dtype = y_dtype(y)
    controller = diffrax.PIDController(
        rtol=jnp.asarray(rule.rtol, dtype), atol=jnp.asarray(rule.atol, dtype), norm=norm
    )
    solver_state = controller_state = made_jump = None
    if resume is not None:

        def blank() -> PyTree:
            order = solver.error_order(terms)
            _, control = controller.init(terms, start, end, y, None, problem, solver.func, order)
            return solver.init(terms, start, end, y, problem), control, jnp.asarray(False)

        solver_state, controller_state, made_jump = resume(eqx.filter_eval_shape(blank))
    return inlined(diffrax.diffeqsolve)(
        terms,
        solver,
        start,
        end,
        None,
        y,
        problem,
        saveat=diffrax.SaveAt(
            subs={
                "series": diffrax.SubSaveAt(t1=True, fn=lambda t, y, problem: look(t, y)),
                "end": diffrax.SubSaveAt(t1=True),
                **({"ends": diffrax.SubSaveAt(steps=True, fn=lambda t, y, problem: None)} if ends else {}),
            },
            solver_state=True,
            controller_state=True,
            made_jump=True,
        ),
        stepsize_controller=controller,
        adjoint=adjoint if saves is None else SaveTimes(adjoint, saves),
        event=None if steady is None else diffrax.Event(_Steady(steady)),
        max_steps=rule.max_steps,
        throw=False,
        solver_state=solver_state,
        controller_state=controller_state,
        made_jump=made_jump,
    )


def y_dtype(y: PyTree[Array]) -> jnp.dtype:
    """Return the type of the numbers of a state."""
    return jax.tree.leaves(y)[0].dtype
