"""The loop that carries all neurons through all events of a sub-step, and its derivatives.

A motion supplies ``advance``, which carries every neuron over one event; here it is repeated until no neuron has time
left. Few neurons of a cloud meet a kink in one sub-step: an opening pass may carry all others to the end, and those
that remain are gathered in blocks, so that the rest costs nothing. Under vmap the loops of all clouds of a batch run as
long as the longest.

Reverse mode keeps the start of a sub-step alone. It repeats the events, keeps the states before the last of them, goes
back through these from event to event, and does the same again for the events before. So no bound on the number of
events has to be guessed, and what is kept does not grow with it. Going back, the states before and after an event are
both known, and with them everything that was decided: a motion may supply a ``Replay``, the smooth part of an event
alone, which is much less to compile and to differentiate than ``advance``. Forward mode differentiates the plain loop.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, PyTree

from meanflow.flows._blocks import is_own, join_rows, split_rows

# up to this many neurons all are moved together in every event, if a motion does not say otherwise
TOGETHER = 4096
BLOCKS = 32  # beyond, neurons with events left are gathered, 1/BLOCKS of all at a time
LEAST = 16  # but at least this many
# states kept at a time while a sub-step is differentiated in reverse; before them events are repeated from the start
KEPT = 8
LARGE = 1 << 22  # numbers in a state beyond which only two are kept: eight would take 256 MB
# numbers in all states up to which all are kept: they fit into a cache, and the program has one loop less to compile
SMALL = 1 << 16

# what a program keeps for reverse mode if the ends of sub-steps are not to be computed twice
ENDS = "ends of events"
KEEP_ENDS = jax.checkpoint_policies.save_only_these_names(ENDS)

# A neuron went through a kink; arrived on one and began to slide; left one it was sliding on; lost its last active
# sample; met a kink at which the Filippov rule leaves the decision open.
KINDS = ("crossings", "captures", "releases", "deaths", "nonunique")


# How many events there have been so far, in the order of ``KINDS``. One array and not five: every array of the state of
# a run is copied, kept and differentiated by code of its own.
Counts: TypeAlias = Int[Array, " kinds"]


def no_events() -> Counts:
    """Return all zeros."""
    return jnp.zeros(len(KINDS), jnp.int32)


def by_name(counts: Counts) -> dict[str, Int[Array, ""]]:
    """Return one number for each kind."""
    return {name: counts[k] for k, name in enumerate(KINDS)}


def tally(counted: Bool[Array, " m"], **events: Bool[Array, "m ..."]) -> Counts:
    """Count events of the neurons that are ``counted``; one keyword for each of ``KINDS`` there may have been."""
    number = lambda event: jnp.sum(event.reshape(event.shape[0], -1), axis=1, dtype=jnp.int32)
    none = jnp.zeros(counted.shape, jnp.int32)
    table = jnp.stack([number(events[name]) if name in events else none for name in KINDS])
    return jnp.sum(jnp.where(counted[None, :], table, 0), axis=1, dtype=jnp.int32)


class Rates(NamedTuple):
    """Constants of each neuron, (m,) each.

    Attributes:
        inner, outer: rates kp and kc at which the two layers learn; 0 where a layer is frozen.
        is_real: False for padding, whose events are not counted.
    """

    inner: Float[Array, " m"]
    outer: Float[Array, " m"]
    is_real: Bool[Array, " m"]


# Neurons on their way through a sub-step: a NamedTuple of arrays with leading axis m. One of them is ``left`` (m,), the
# time that each still has to move, not positive for one that is done.
Neurons: TypeAlias = Any
# (neurons, what is constant for each of them, what all share) -> (neurons after one event, events of each kind)
Advance: TypeAlias = Callable[[Neurons, PyTree[Array], PyTree[Array]], tuple[Neurons, Counts]]
# (neurons before an event, neurons after it, what is constant for each, what all share) -> neurons after it. The same
# numbers to rounding as ``advance`` gives, with the same derivatives in the neurons before and in the constants; those
# after serve to read off what was decided and when, and have no derivatives.
Replay: TypeAlias = Callable[[Neurons, Neurons, PyTree[Array], PyTree[Array]], Neurons]
Arguments: TypeAlias = tuple[Neurons, PyTree[Array], PyTree[Array]]


class Steps(NamedTuple):
    """What a motion does with its neurons, as functions of their arguments alone.

    Attributes:
        advance: carries every neuron with time left over one event.
        first: what is done with all neurons before those with events left are gathered: ``advance`` itself, or
            something cheaper that carries most of them to the end. Without it all are gathered, block by block, which
            suits an ``advance`` that takes long to compile: it stands in the program once.
        replay: what is differentiated in reverse mode; ``advance`` itself if there is none.
    """

    advance: Advance
    first: Advance | None = None
    replay: Replay | None = None


class _Way(NamedTuple):
    """All of a passage that is no array: what is done, how often at most, and whether neurons are gathered."""

    steps: Steps
    cap: int
    gather: bool


def run(
    steps: Steps,
    neurons: Neurons,
    rows: PyTree[Array],
    shared: PyTree[Array],
    cap: int,
    *,
    forward: bool = False,
    together: int = TOGETHER,
    blocks: int = 1,
) -> tuple[Neurons, Counts]:
    """Carry all neurons through all events of a sub-step; one that needs more than ``cap`` keeps its time left.

    Args:
        steps: what the motion does from event to event.
        neurons: their state, with leading axis m.
        rows: constants of each neuron, arrays with leading axis m.
        shared: constants that all neurons share.
        cap: the most events of one neuron.
        forward: whether the program is differentiated in forward mode, which the default refuses.
        together: up to this many neurons are not gathered but all moved together, which is less to compile.
        blocks: how many blocks of neurons are moved one after the other. What ``steps`` compute on the way then
            exists for one block at a time.
    """
    if blocks > 1:
        size = neurons.left.shape[0]
        parts, own = jax.tree.map(lambda u: split_rows(u, blocks), (neurons, rows))
        parts = parts._replace(left=jnp.where(is_own(size, blocks), parts.left, 0.0))  # copies do not move

        def carry(part: tuple[Neurons, PyTree[Array]]) -> tuple[Neurons, Counts]:
            some, theirs = part
            return run(steps, some, theirs, shared, cap, forward=forward, together=together)

        ends, counts = jax.lax.map(carry, (parts, own))
        ended = jax.tree.map(lambda u: join_rows(u, size), ends)
        return ended, jax.tree.map(lambda u: jnp.sum(u, axis=0, dtype=u.dtype), counts)
    arguments = (neurons, rows, shared)
    way = _Way(steps, cap, gather=neurons.left.shape[0] > together)
    if forward:
        return _loop(arguments, way)
    end, counts = _reversible(arguments, way)
    return jax.tree.map(lambda u: checkpoint_name(u, ENDS), end), counts


@eqx.filter_custom_vjp
def _reversible(arguments: Arguments, way: _Way) -> tuple[Neurons, Counts]:
    return _loop(arguments, way)


@_reversible.def_fwd
def _run_forward(perturbed: PyTree, arguments: Arguments, way: _Way) -> tuple:
    """Run, and keep nothing but the arguments: what is kept is copied for each step of a run that is replayed."""
    return _loop(arguments, way), None


@_reversible.def_bwd
def _run_backward(
    residuals: None, slopes: PyTree, perturbed: PyTree, arguments: Arguments, way: _Way
) -> PyTree:
    """Repeat the events and go back through the last ones, which are kept; then the same for those before."""
    neurons, rows, shared = arguments
    (advance, _, replay), cap, _ = way
    entries = sum(u.size for u in jax.tree.leaves(neurons))
    kept = cap if entries * cap <= SMALL else min(cap, KEPT if entries <= LARGE else 2)
    # slopes exist for real numbers alone; those of ``rows`` and ``shared`` add up over all events
    smooth, fixed = eqx.partition((rows, shared), eqx.is_inexact_array)
    empty = lambda tree: jax.tree.map(jnp.zeros_like, eqx.filter(tree, eqx.is_inexact_array))
    fill = lambda u, v: jnp.zeros_like(u) if v is None else v
    # what nothing depends on has no slope: zeros stand for it
    ends = empty(neurons)
    ends = jax.tree.map(fill, ends, jax.tree.map(lambda _, v: v, ends, slopes[0]))
    buffer = jax.tree.map(lambda u: jnp.zeros((kept, *u.shape), u.dtype), neurons)

    def back(carry: tuple, states: Neurons) -> tuple:
        """Pull the slopes of the state ``after`` an event back to the one before it."""
        turn, after, upstream, gathered = carry
        turn = turn - 1
        before = jax.tree.map(lambda u: jax.lax.dynamic_index_in_dim(u, turn % kept, keepdims=False), states)
        moving, still = eqx.partition(before, eqx.is_inexact_array)

        def once(moving: PyTree, smooth: PyTree) -> PyTree:
            start, given = eqx.combine(moving, still), eqx.combine(smooth, fixed)
            end = advance(start, *given)[0] if replay is None else replay(start, after, *given)
            return eqx.filter(end, eqx.is_inexact_array)

        _, pull = jax.vjp(once, moving, smooth)
        upstream, more = pull(upstream)
        return turn, before, upstream, jax.tree.map(jnp.add, gathered, more)

    def stretch(carry: tuple) -> tuple:
        """Go back through the last ``kept`` of the first ``end`` events."""
        end, upstream, gathered = carry

        def go(carry: tuple) -> tuple:
            turn, now, states = carry
            put = lambda u, v: jax.lax.dynamic_update_index_in_dim(u, v, turn % kept, 0)
            return turn + 1, advance(now, rows, shared)[0], jax.tree.map(put, states, now)

        going = lambda carry: (carry[0] < end) & jnp.any(carry[1].left > 0)
        turns, last, states = jax.lax.while_loop(going, go, (jnp.zeros_like(end), neurons, buffer))
        begin = jnp.maximum(turns - kept, 0)
        turn, _, upstream, gathered = jax.lax.while_loop(
            lambda carry: carry[0] > begin,
            lambda carry: back(carry, states),
            (turns, last, upstream, gathered),
        )
        return turn, upstream, gathered

    carry = (jnp.asarray(cap, jnp.int32), ends, jax.tree.map(jnp.zeros_like, smooth))
    again = lambda carry: jax.lax.while_loop(lambda carry: carry[0] > 0, stretch, carry)
    _, start, (own, common) = stretch(carry) if kept == cap else again(carry)
    return start, own, common


def _loop(arguments: Arguments, way: _Way) -> tuple[Neurons, Counts]:
    """Advance until nobody has time left: all together, or those with time left in gathered blocks."""
    neurons, rows, shared = arguments
    (advance, opening, _), cap, gather = way
    none = jnp.zeros((), jnp.int32)

    def go(carry: tuple) -> tuple:
        turn, now, counts = carry
        now, more = advance(now, rows, shared)
        return turn + 1, now, counts + more

    if not gather:
        going = lambda carry: (carry[0] < cap) & jnp.any(carry[1].left > 0)
        _, neurons, counts = jax.lax.while_loop(going, go, (none, neurons, no_events()))
        return neurons, counts

    counts = no_events()
    if opening is not None:
        neurons, counts = opening(neurons, rows, shared)
    size = neurons.left.shape[0]
    block = max(LEAST, size // BLOCKS)
    waiting = lambda everyone, turns: (everyone.left > 0) & (turns < cap)

    def work(carry: tuple) -> tuple:
        """Take the first neurons that have events left over one of them."""
        turns, everyone, counts = carry
        index = jnp.nonzero(waiting(everyone, turns), size=block, fill_value=size)[0]
        chosen, own = jax.tree.map(lambda u: jnp.take(u, index, axis=0, mode="clip"), (everyone, rows))
        chosen = chosen._replace(left=jnp.where(index < size, chosen.left, 0.0))  # no neuron twice
        chosen, more = advance(chosen, own, shared)
        everyone = jax.tree.map(lambda u, v: u.at[index].set(v, mode="drop"), everyone, chosen)
        return turns.at[index].add(1, mode="drop"), everyone, counts + more

    # each neuron has ``cap`` turns of its own; an opening that is an event has used up one
    taken = 1 if opening is advance else 0
    first = (jnp.full(size, taken, jnp.int32), neurons, counts)
    _, neurons, counts = jax.lax.while_loop(lambda carry: jnp.any(waiting(carry[1], carry[0])), work, first)
    return neurons, counts
