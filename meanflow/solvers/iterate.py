"""The one discrete-time loop: a compiled scan that observes every few steps.

``descend``, the trainer and the sweeps all run on it.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

State = TypeVar("State")


def iterate(
    step: Callable[[State, Any], State],
    state: State,
    inputs: Any,
    steps: int,
    every: int,
    observe: Callable[[State], Any],
) -> tuple[State, Any]:
    """Applies ``step`` ``steps`` times and observes after each ``every`` of them.

    Args:
        step: (state, input) -> state.
        state: any pytree; only what the next step needs.
        inputs: pytree of arrays with leading axis ``steps`` (one slice a step), or None.
        steps: a multiple of ``every``.
        every: steps between two observations.
        observe: state -> pytree of arrays.

    Returns:
        Final state; observations stacked along a leading axis of length steps // every.
    """
    if steps % every:
        raise ValueError(f"steps must be a multiple of every, got steps={steps}, every={every}")
    rounds = steps // every
    blocks = jax.tree.map(lambda u: u.reshape((rounds, every) + u.shape[1:]), inputs)

    def one(state: State, slice_: Any) -> tuple[State, None]:
        return step(state, slice_), None

    def block(state: State, slices: Any) -> tuple[State, Any]:
        state, _ = jax.lax.scan(one, state, slices, length=every)
        return state, observe(state)

    return jax.lax.scan(block, state, blocks, length=rounds)
