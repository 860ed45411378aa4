"""Save times of runs in continuous time, in a form that lowers for accelerators."""

from collections.abc import Sequence

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PyTree, Real

from meanflow import _checks


def save_times(
    ts: int | Real[ArrayLike, " k"] | Sequence | None,
    t0: jax.Array | np.ndarray,
    t1: jax.Array | np.ndarray,
    dtype: jnp.dtype,
) -> Float[Array, " k"] | None:
    """Return the argument ``ts`` of a solver as an array, checked where it is known; None stays None.

    An integer k means k equally spaced times, both ends included.
    """
    if ts is None:
        return None
    if isinstance(ts, int | np.integer):
        count = _checks.whole("ts", ts, 2)
        return jnp.minimum(t0 + (t1 - t0) * jnp.linspace(0.0, 1.0, count, dtype=dtype), t1)
    chosen = _checks.array((None,))("ts", ts).astype(dtype)
    times, start, end = (_checks.concrete(u) for u in (chosen, t0, t1))
    if times is None or start is None or end is None:
        return chosen
    if times.size < 1 or np.any(np.diff(times) <= 0) or times[0] < start or times[-1] > end:
        raise ValueError(f"ts must increase within [t0, t1] = [{start}, {end}], got {times}")
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
