"""The one discrete-time loop: a compiled scan that observes every few steps.

``descend``, the trainer and the sweeps all run on it.
"""

import math
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
    *,
    checkpoint: bool = False,
) -> tuple[State, Any]:
    """Applies ``step`` ``steps`` times and observes after each ``every`` of them.

    Args:
        step: (state, input) -> state.
        state: any pytree; only what the next step needs.
        inputs: pytree of arrays with leading axis ``steps`` (one slice a step), or None.
        steps: a multiple of ``every``.
        every: steps between two observations.
        observe: state -> pytree of arrays.
        checkpoint: in reverse mode keep about 2 sqrt(every) states per observation instead of every one, for
            one more forward pass.

    Returns:
        Final state; observations stacked along a leading axis of length steps // every.
    """
    if steps % every:
        raise ValueError(f"steps must be a multiple of every, got steps={steps}, every={every}")
    rounds = steps // every

    def block(state: State, slices: Any) -> tuple[State, Any]:
        state = _run(step, state, slices, every, checkpoint)
        return state, observe(state)

    return jax.lax.scan(block, state, _split(inputs, rounds, every), length=rounds)


def _run(
    step: Callable[[State, Any], State], state: State, inputs: Any, length: int, checkpoint: bool
) -> State:
    def one(state: State, slice_: Any) -> tuple[State, None]:
        return step(state, slice_), None

    if not checkpoint:
        return jax.lax.scan(one, state, inputs, length=length)[0]

    # segments of about sqrt(length) steps: only their starts are stored, the inside is recomputed
    size = max(1, math.isqrt(length))
    count = length // size

    @jax.checkpoint
    def segment(state: State, slices: Any) -> tuple[State, None]:
        return jax.lax.scan(one, state, slices, length=size)

    head = _split(jax.tree.map(lambda u: u[: count * size], inputs), count, size)
    state, _ = jax.lax.scan(segment, state, head, length=count)
    rest = length - count * size
    return jax.lax.scan(one, state, jax.tree.map(lambda u: u[count * size :], inputs), length=rest)[0]


def _split(inputs: Any, rounds: int, every: int) -> Any:
    return jax.tree.map(lambda u: u.reshape((rounds, every, *u.shape[1:])), inputs)
