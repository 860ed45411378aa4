"""The loop that carries all neurons through all events of a sub-step, and its derivatives.

A motion supplies ``advance``, which carries every neuron over one event; here it is repeated until no neuron has time
left. Few neurons of a cloud meet a kink in one sub-step: an opening pass may carry all others to the end, and those
that remain are gathered in blocks, so that the rest costs nothing. Under vmap the loops of all clouds of a batch run as
long as the longest.

Derivatives never see a decision. ``advance`` says what happened in an ``Event``, and ``carry`` is the smooth motion
over an event that is known: much less to compile and to differentiate. Forward mode adds its derivative to each event.
Reverse mode goes back through a record of events (``_Book``). Small records are kept; otherwise the start of the
sub-step alone, from which events are repeated: the last ones are recorded and gone back through, then those before them
in the same way. So no bound on the number of events has to be guessed, and what is kept does not grow with it.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, PyTree

from meanflow.flows._blocks import is_own, join_rows, split_rows

# up to this many neurons all are moved together in every event, if a motion does not say otherwise
TOGETHER = 4096
BLOCKS = 32  # beyond, neurons with events left are gathered, 1/BLOCKS of all at a time
LEAST = 16  # but at least this many
# events of each neuron recorded at a time in reverse mode; before them events are repeated from the start
KEPT = 8
LARGE = 1 << 22  # numbers in the record of one event beyond which only two are kept: eight would take 256 MB
# numbers in a record of all events up to which it is kept: it fits into a cache, and no event is compiled twice
SMALL = 1 << 16

# what a program keeps for reverse mode if the ends of sub-steps are not to be computed twice
ENDS = "ends of events"
KEEP_ENDS = jax.checkpoint_policies.save_only_these_names(ENDS)

# A neuron went through a kink; arrived on one and began to slide; left one it was sliding on; lost its last active
# sample; met a kink at which the Filippov rule leaves the decision open.
KINDS = ("crossings", "captures", "releases", "deaths", "nonunique")


# The totals of a run: how many events there have been so far, in the order of ``KINDS``, whether time was left after
# the last allowed event, and the most planes on which a neuron has slid. One array and not seven: every array of the
# state of a run is copied, kept and differentiated by code of its own.
Counts: TypeAlias = Int[Array, " totals"]
OVERFLOW, PLANES = len(KINDS), len(KINDS) + 1


def no_events() -> Counts:
    """Return all zeros."""
    return jnp.zeros(len(KINDS) + 2, jnp.int32)


def by_name(counts: Counts) -> dict[str, Int[Array, ""]]:
    """Return one number for each kind."""
    return {name: counts[k] for k, name in enumerate(KINDS)}


def marked(counts: Counts, overflow: Bool[Array, ""], planes: Int[Array, ""] | int = 0) -> Counts:
    """Return the totals with a mark if events ran out, and the number of planes on which a neuron slides now."""
    marks = jnp.stack([overflow.astype(jnp.int32), jnp.asarray(planes, jnp.int32)])
    return counts.at[OVERFLOW:].max(marks)


def tally(counted: Bool[Array, " m"], **events: Bool[Array, "m ..."]) -> Counts:
    """Count events of the neurons that are ``counted``; one keyword for each of ``KINDS`` there may have been."""
    columns = [event.reshape(event.shape[0], -1) for event in events.values()]
    kinds = [KINDS.index(name) for name, u in zip(events, columns, strict=True) for _ in range(u.shape[1])]
    # one table of all events, which is less to compile than a sum for each kind
    found = jnp.sum(jnp.concatenate(columns, axis=1) & counted[:, None], axis=0, dtype=jnp.int32)
    is_kind = np.asarray(kinds)[:, None] == np.arange(len(KINDS) + 2)[None, :]
    return jnp.sum(jnp.where(is_kind, found[:, None], 0), axis=0, dtype=jnp.int32)


class Rates(NamedTuple):
    """Constants of each neuron, (m,) each.

    Attributes:
        inner, outer: rates kp and kc at which the two layers learn; 0 where a layer is frozen.
        is_real: False for padding, whose events are not counted.
    """

    inner: Float[Array, " m"]
    outer: Float[Array, " m"]
    is_real: Bool[Array, " m"]


# Neurons on their way through a sub-step: a NamedTuple of arrays with leading axis m. Its field ``moving`` is a
# NamedTuple of what has derivatives; one of its fields is ``left`` (m,), the time that each neuron still has to move,
# not positive for one that is done.
Neurons: TypeAlias = Any
Moving: TypeAlias = Any
# What was decided at an event, when it took place and how: a NamedTuple of arrays with leading axis m. A field
# ``moves`` (m,) marks the neurons that take part.
Event: TypeAlias = Any


class Task(NamedTuple):
    """The neurons of a sub-step and all that they feel.

    Attributes:
        neurons: where they are, with leading axis m.
        rows: constants of each neuron, arrays with leading axis m.
        shared: constants that all neurons share.
        tables: what is derived from ``shared`` and looked up to decide; it has no derivatives.
    """

    neurons: Neurons
    rows: PyTree[Array]
    shared: PyTree[Array]
    tables: PyTree[Array]


Advance: TypeAlias = Callable[[Task], tuple[Neurons, Event, Counts]]


class Steps(NamedTuple):
    """What a motion does with its neurons, as functions of their arguments alone.

    Attributes:
        advance: carries every neuron with time left over one event: it decides and moves.
        carry: (moving, event, rows, shared) -> moving. The motion over an event that is known, to rounding as
            ``advance`` makes it, and with its derivatives, those of the time of the event included.
        first: what is done with all neurons before those with events left are gathered: ``advance`` itself, or
            something cheaper that carries most of them to the end. Without it all are gathered, block by block, which
            suits an ``advance`` that takes long to compile: it stands in the program once.
    """

    advance: Advance
    carry: Callable[[Moving, Event, PyTree[Array], PyTree[Array]], Moving]
    first: Advance | None = None


class _Way(NamedTuple):
    """All of a passage that is no array: what is done, how often at most, and whether neurons are gathered."""

    steps: Steps
    cap: int
    gather: bool


class _Book(NamedTuple):
    """A record of events: where neurons were before each, and what happened.

    Attributes:
        turns: (m,) how many events each neuron has had.
        entries: pairs (moving, event) packed into arrays (kept, m, k); event e stands in row e modulo ``kept``.
    """

    turns: Int[Array, " m"]
    entries: tuple[Array, ...]


def run(
    steps: Steps, task: Task, cap: int, *, forward: bool = False, together: int = TOGETHER, blocks: int = 1
) -> tuple[Neurons, Counts]:
    """Carry all neurons through all events of a sub-step; one that needs more than ``cap`` keeps its time left.

    Only the field ``moving`` of the neurons that are returned has derivatives.

    Args:
        steps: what the motion does from event to event.
        task: the neurons and what they feel.
        cap: the most events of one neuron.
        forward: whether the program is differentiated in forward mode, which the default refuses.
        together: up to this many neurons are not gathered but all moved together, which is less to compile.
        blocks: how many blocks of neurons are moved one after the other. What ``steps`` compute on the way then
            exists for one block at a time.
    """
    size = task.neurons.moving.left.shape[0]
    if blocks > 1:
        parts, own = jax.tree.map(lambda u: split_rows(u, blocks), (task.neurons, task.rows))
        left = jnp.where(is_own(size, blocks), parts.moving.left, 0.0)  # copies do not move
        parts = _timed(parts, left)

        def carry(part: tuple[Neurons, PyTree[Array]]) -> tuple[Neurons, Counts]:
            some = task._replace(neurons=part[0], rows=part[1])
            return run(steps, some, cap, forward=forward, together=together)

        ends, counts = jax.lax.map(carry, (parts, own))
        ended = jax.tree.map(lambda u: join_rows(u, size), ends)
        return ended, jnp.sum(counts, axis=0, dtype=counts.dtype)
    task = task._replace(tables=jax.lax.stop_gradient(task.tables))
    way = _Way(steps, cap, gather=size > together)
    end, counts = _loop(task, _smooth(way))[:2] if forward else _reversible(task, way)
    return jax.tree.map(lambda u: checkpoint_name(u, ENDS), end), counts


def _timed(neurons: Neurons, left: Array) -> Neurons:
    """Return neurons with this time left."""
    return neurons._replace(moving=neurons.moving._replace(left=left))


def _smooth(way: _Way) -> _Way:
    """Return a way whose events have the derivatives of ``carry``, for forward mode."""

    def with_slopes(event: Advance) -> Advance:
        def advance(task: Task) -> tuple[Neurons, Event, Counts]:
            moved, found, counts = jax.lax.stop_gradient(event(jax.lax.stop_gradient(task)))
            again = _carried(way.steps, task.neurons.moving, found, task.rows, task.shared)
            slope = jax.tree.map(lambda u: u - jax.lax.stop_gradient(u), again)  # zero but for its derivative
            return moved._replace(moving=jax.tree.map(jnp.add, moved.moving, slope)), found, counts

        return advance

    advance, carry, first = way.steps
    smooth = with_slopes(advance)
    opening = None if first is None else smooth if first is advance else with_slopes(first)
    return way._replace(steps=Steps(smooth, carry, opening))


def _carried(
    steps: Steps, moving: Moving, event: Event, rows: PyTree[Array], shared: PyTree[Array]
) -> Moving:
    """Return neurons after an event in which only some take part."""
    moved = steps.carry(moving, event, rows, shared)
    column = lambda u: event.moves.reshape(-1, *[1] * (u.ndim - 1))
    return jax.tree.map(lambda new, old: jnp.where(column(new), new, old), moved, moving)


@eqx.filter_custom_vjp
def _reversible(task: Task, way: _Way) -> tuple[Neurons, Counts]:
    return _loop(task, way)[:2]


@_reversible.def_fwd
def _run_forward(perturbed: PyTree, task: Task, way: _Way) -> tuple:
    """Run, and keep the record of all events if it is small; else only the arguments, from which they are repeated."""
    blank = _blank(task, way, way.cap)
    if sum(u.size for u in blank.entries) > SMALL:
        return _loop(task, way)[:2], None
    end, counts, book = _loop(task, way, blank)
    return (end, counts), jax.tree.map(lambda u: checkpoint_name(u, ENDS), book)


@_reversible.def_bwd
def _run_backward(book: _Book | None, slopes: PyTree, perturbed: PyTree, task: Task, way: _Way) -> Task:
    """Go back through the events that were kept; where these are not all, repeat those before them, and so on."""
    neurons, rows, shared, _ = task
    # slopes exist for real numbers alone; those of ``rows`` and ``shared`` add up over all events, and only what is
    # differentiated has any: mostly not the samples nor the rates, which are half of the work
    asked = jax.tree.map(
        lambda u, moves: bool(moves) and eqx.is_inexact_array(u),
        (rows, shared),
        (perturbed.rows, perturbed.shared),
    )
    smooth, fixed = eqx.partition((rows, shared), asked)
    # what nothing depends on has no slope: zeros stand for it
    fill = lambda u, v: jnp.zeros_like(u) if v is None else v
    ends = jax.tree.map(fill, neurons.moving, slopes[0].moving)
    like = _like(task, way)

    def back(book: _Book, carry: tuple) -> tuple:
        """Pull the slopes of the neurons behind an event back to those before it."""
        turn, upstream, gathered = carry
        turn = turn - 1
        row = lambda u: jax.lax.dynamic_index_in_dim(u, turn % u.shape[0], keepdims=False)
        moving, event = _unpack(jax.tree.map(row, book.entries), like)
        event = event._replace(moves=event.moves & (turn < book.turns))

        def once(moving: Moving, smooth: PyTree) -> Moving:
            return _carried(way.steps, moving, event, *eqx.combine(smooth, fixed))

        upstream, more = jax.vjp(once, moving, smooth)[1](upstream)
        return turn, upstream, jax.tree.map(jnp.add, gathered, more)

    def through(book: _Book, room: int, upstream: tuple) -> tuple:
        """Go back through the last events, of which there is ``room`` for so many in the book."""
        last = jnp.max(book.turns)
        first = jnp.maximum(last - room, 0)
        return jax.lax.while_loop(lambda carry: carry[0] > first, lambda c: back(book, c), (last, *upstream))

    upstream = ends, jax.tree.map(jnp.zeros_like, smooth)
    if book is not None:
        _, *slopes_at_start = through(book, way.cap, upstream)
    else:
        one = _blank(task, way, 1)
        kept = min(way.cap, KEPT if sum(u.size for u in one.entries) <= LARGE else 2)

        def stretch(carry: tuple) -> tuple:
            """Repeat the first ``end`` events and go back through the last ``kept`` of them."""
            end, *upstream = carry
            book = _loop(task, way, _blank(task, way, kept), end)[2]
            assert book is not None
            return through(book, kept, tuple(upstream))

        every = (jnp.asarray(way.cap, jnp.int32), *upstream)
        _, *slopes_at_start = jax.lax.while_loop(lambda carry: carry[0] > 0, stretch, every)
    start, (own, common) = slopes_at_start
    none = jax.tree.map(lambda u: None, neurons)
    return Task(none._replace(moving=start), own, common, jax.tree.map(lambda u: None, task.tables))


def _like(task: Task, way: _Way) -> PyTree:
    """Return the shapes of the neurons before an event, and of the event."""
    return jax.eval_shape(lambda task: (task.neurons.moving, way.steps.advance(task)[1]), task)


def _blank(task: Task, way: _Way, kept: int) -> _Book:
    """Return a record with room for ``kept`` events of each neuron, in which nobody moves."""
    moving, event = task.neurons.moving, _like(task, way)[1]
    entry = _pack((moving, jax.tree.map(lambda u: jnp.zeros(u.shape, u.dtype), event)))
    spread = lambda u: jnp.broadcast_to(u[None], (kept, *u.shape))
    return _Book(jnp.zeros(moving.left.shape, jnp.int32), tuple(spread(u) for u in entry))


def _pack(tree: PyTree[Array]) -> tuple[Array, Array]:
    """Return all numbers of each neuron side by side, real ones (m, k) and others (m, l): few arrays compile fast."""
    leaves = jax.tree.leaves(tree)
    flat = lambda u: u.reshape(u.shape[0], -1)
    real = [flat(u) for u in leaves if eqx.is_inexact_array(u)]
    whole = [flat(u).astype(jnp.int32) for u in leaves if not eqx.is_inexact_array(u)]
    return jnp.concatenate(real, axis=1), jnp.concatenate(whole, axis=1)


def _unpack(packed: tuple[Array, ...], like: PyTree) -> PyTree[Array]:
    """Return the tree behind ``_pack``, with the shapes of ``like`` but for the number of neurons."""
    leaves, structure = jax.tree.flatten(like)
    starts, found = [0, 0], []
    for leaf in leaves:
        k = 0 if jnp.issubdtype(leaf.dtype, jnp.inexact) else 1
        width = math.prod(leaf.shape[1:])
        part = jax.lax.slice_in_dim(packed[k], starts[k], starts[k] + width, axis=1)
        found.append(part.reshape(-1, *leaf.shape[1:]).astype(leaf.dtype))
        starts[k] += width
    return jax.tree.unflatten(structure, found)


def _loop(
    task: Task, way: _Way, book: _Book | None = None, end: Array | int | None = None
) -> tuple[Neurons, Counts, _Book | None]:
    """Advance until nobody has time left: all together, or those with time left in gathered blocks.

    Args:
        task, way: what is done.
        book: where events are entered, or None.
        end: the most events of one neuron; None for that of the way.
    """
    neurons, rows, shared, tables = task
    (advance, _, opening), cap, gather = way
    most = cap if end is None else end

    def enter(book: _Book | None, turn: Array, rows: tuple, before: Moving, event: Event) -> _Book | None:
        """Enter an event of the neurons ``rows``; ``turn`` is how many each has had before."""
        if book is None:
            return None
        entry = _pack((before, event))
        put = lambda u, v: u.at[(turn % u.shape[0], *rows)].set(v, mode="drop")
        return book._replace(entries=tuple(map(put, book.entries, entry)))

    if not gather:

        def go(carry: tuple) -> tuple:
            turn, now, counts, book = carry
            moved, event, more = advance(task._replace(neurons=now))
            book = enter(book, turn, (), now.moving, event)
            return turn + 1, moved, counts + more, book

        going = lambda carry: (carry[0] < most) & jnp.any(carry[1].moving.left > 0)
        first = (jnp.zeros((), jnp.int32), neurons, no_events(), book)
        turn, neurons, counts, book = jax.lax.while_loop(going, go, first)
        return neurons, counts, None if book is None else book._replace(turns=book.turns + turn)

    counts, size = no_events(), neurons.moving.left.shape[0]
    turns = jnp.zeros(size, jnp.int32)
    if opening is not None:
        moved, event, counts = opening(task)
        book = enter(book, jnp.zeros((), jnp.int32), (), neurons.moving, event)
        turns, neurons = turns + event.moves, moved
    block = max(LEAST, size // BLOCKS)
    waiting = lambda everyone, turns: (everyone.moving.left > 0) & (turns < most)

    def work(carry: tuple) -> tuple:
        """Take the first neurons that have events left over one of them."""
        turns, everyone, counts, book = carry
        index = jnp.nonzero(waiting(everyone, turns), size=block, fill_value=size)[0]
        take = lambda u: jnp.take(u, index, axis=0, mode="clip")
        chosen, own = jax.tree.map(take, (everyone, rows))
        chosen = _timed(chosen, jnp.where(index < size, chosen.moving.left, 0.0))  # no neuron twice
        moved, event, more = advance(Task(chosen, own, shared, tables))
        book = enter(book, take(turns), (index,), chosen.moving, event)
        everyone = jax.tree.map(lambda u, v: u.at[index].set(v, mode="drop"), everyone, moved)
        return turns.at[index].add(1, mode="drop"), everyone, counts + more, book

    # each neuron has as many turns of its own
    going = lambda carry: jnp.any(waiting(carry[1], carry[0]))
    turns, neurons, counts, book = jax.lax.while_loop(going, work, (turns, neurons, counts, book))
    return neurons, counts, None if book is None else book._replace(turns=turns)
