"""On which side of every hyperplane a neuron is, on which it sits, and how it comes and goes.

A neuron sits on the planes in its slots. At an event ``touch`` looks up what the Filippov rule asks about them,
``take_sides`` turns its answer into the sides on which the neuron goes on, and ``settle`` records the next plane that
is met.

**One instant.** In exact arithmetic a neuron that leaves a plane is gone from it. In floating point it can meet the
next plane, or the same one, in a time in which its clock does not advance. The planes it has just left then still
belong to the instant: ``settle`` keeps them in their slots, so that the rule is asked once more about all of them
together, and counts the events when time has passed. Within an instant the set of planes only grows, so that it always
ends.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from meanflow.flows._kinks import filippov
from meanflow.flows._kinks.passage import Counts, tally

Vector = Float[Array, " m"]


class Forces(NamedTuple):
    """The frozen forces, and the normals they act along: what derivatives pass through.

    Attributes:
        normal: (n, d) the samples.
        jump: (n,) J = R_+ - R_-.
        base: (d,) the force on the negative side of all planes.
        ahead: (d,) the force on the positive side of all planes.
    """

    normal: Float[Array, "n d"]
    jump: Float[Array, " n"]
    base: Float[Array, " d"]
    ahead: Float[Array, " d"]


class Tables(NamedTuple):
    """What decisions look up beside the forces.

    Attributes:
        live: (n,) which samples are planes.
        dies: whether neurons on the negative side of all planes feel nothing, a scalar.
        gram: (n, n) inner products of all normals, or None where they are computed when they are needed.
    """

    live: Bool[Array, " n"]
    dies: Bool[Array, ""]
    gram: Float[Array, "n n"] | None


class Contacts(NamedTuple):
    """Where neurons are among the planes.

    Attributes:
        side: (m, n) 1 or -1; 0 for planes the neuron sits on, and for entries that are not planes.
        slots: (m, k) the planes it sits on; n marks an empty slot.
        came: (m, k) the side from which it has just arrived on the plane, 1 or -1; 0 if it has been sliding on it.
    """

    side: Int[Array, "m n"]
    slots: Int[Array, "m k"]
    came: Int[Array, "m k"]


class Kinks(NamedTuple):
    """The planes that neurons sit on.

    Attributes:
        valid: (m, k) whether the slot holds a plane, and the neuron has time left.
        normal: (m, k, d) their normals.
        jump: (m, k) the jumps of the force.
        gram: (m, k, k) inner products of the normals; 0 where one of the two is not valid.
    """

    valid: Bool[Array, "m k"]
    normal: Float[Array, "m k d"]
    jump: Float[Array, "m k"]
    gram: Float[Array, "m k k"]


class Decision(NamedTuple):
    """What becomes of the planes in the slots, (m, k) each but for ``side``.

    Attributes:
        slides, leaves: whether the neuron stays on the plane, or leaves it; neither for empty slots.
        target: the side to which it leaves, 1 or -1.
        nonunique: whether the rule left the decision open.
        side: (m, n) the sides of all planes, with those that are left.
    """

    slides: Bool[Array, "m k"]
    leaves: Bool[Array, "m k"]
    target: Int[Array, "m k"]
    nonunique: Bool[Array, "m k"]
    side: Int[Array, "m n"]


class Held(NamedTuple):
    """What is constant from one event to the next, and what of it lasts.

    Attributes:
        slots: (m, k) the planes the neuron sat on.
        active: (m, k) which of them it has left to their positive side.
        free: (m, k) on which of them it slides.
        table: (m, k, k) of which the ``free`` rows and columns are minus the inverse of the inner products there.
        passes: (m,) whether what it has left is behind it for good, and not met again in the same instant.
        met: (m,) the plane it meets next.
        falls: (m,) whether it arrives there from the positive side.
    """

    slots: Int[Array, "m k"]
    active: Bool[Array, "m k"]
    free: Bool[Array, "m k"]
    table: Float[Array, "m k k"]
    passes: Bool[Array, " m"]
    met: Int[Array, " m"]
    falls: Bool[Array, " m"]


def at(table: Float[Array, "n ..."], slots: Int[Array, "m ..."]) -> Float[Array, "m ..."]:
    """Return the rows of ``table`` in the slots, 0 for empty ones."""
    return jnp.take(table, slots, axis=0, mode="fill", fill_value=0)


def touch(
    slots: Int[Array, "m k"],
    forces: Forces,
    valid: Bool[Array, "m k"],
    known: Float[Array, "n n"] | None = None,
) -> Kinks:
    """Look up the planes in the ``valid`` slots, and their inner products among those that are ``known``."""
    # the few planes of a neuron are gathered, (m, k, d), so that an event costs O(k d) and not O(n d)
    normal, jump = at(forces.normal, slots), at(forces.jump, slots)
    if known is None:
        gram = jnp.einsum("mkd,mld->mkl", normal, normal)
    else:
        # empty slots hold n, one past the end: they read the last row, and are masked below
        rows = jnp.minimum(slots, known.shape[0] - 1)
        gram = known[rows[:, :, None], rows[:, None, :]]
    gram = jnp.where(valid[:, :, None] & valid[:, None, :], gram, 0.0)
    return Kinks(valid, normal, jnp.where(valid, jump, 0.0), gram)


def along(kinks: Kinks, weight: Float[Array, "m k"]) -> Float[Array, "m d"]:
    """Return the force sum_k weight_k J_k x_k."""
    return jnp.sum((weight * kinks.jump)[:, :, None] * kinks.normal, axis=1)


def pull(kinks: Kinks, force: Float[Array, "m d"]) -> Float[Array, "m k"]:
    """Return <x_k, force>."""
    return jnp.sum(kinks.normal * force[:, None, :], axis=-1)


def take_sides(contacts: Contacts, kinks: Kinks, choice: filippov.Choice) -> Decision:
    """Leave the planes that the rule has decided to leave."""
    slides = kinks.valid & (choice.state == filippov.SLIDES)
    leaves = kinks.valid & ~slides
    target = jnp.where(choice.state == filippov.ACTIVE, 1, -1).astype(contacts.side.dtype)
    side = _set_sides(contacts.side, jnp.where(leaves, contacts.slots, contacts.side.shape[1]), target)
    return Decision(slides, leaves, target, choice.nonunique & kinks.valid, side)


def _set_sides(
    side: Int[Array, "m n"], slots: Int[Array, "m k"], value: Int[Array, "..."] | int
) -> Int[Array, "m n"]:
    """Return the sides of all planes, with those in ``slots`` replaced by ``value``, () or (m, k)."""
    # empty slots write to column n, which does not exist, and are dropped
    return side.at[jnp.arange(slots.shape[0])[:, None], slots].set(value, mode="drop")


def settle(
    contacts: Contacts,
    decision: Decision,
    table: Float[Array, "m k k"],
    met: Int[Array, " m"],
    arrives: Bool[Array, " m"],
    times: tuple[Vector, Vector],
    is_real: Bool[Array, " m"],
    dies: Bool[Array, ""],
) -> tuple[Contacts, Held, Vector, Counts]:
    """Record who arrives on which plane, and who is done with those it left.

    Args:
        contacts: before the decision.
        decision: at the last event.
        table: of the decision, see ``Held``.
        met: the plane that is met next.
        arrives: whether it is.
        times: the time each neuron had left, and how much of it has passed since the last event.
        is_real: neurons whose events count.
        dies: see ``Tables``.

    Returns:
        The contacts, what is needed to carry the forces on, the time that is left, negative for neurons without an
        empty slot, and the events that have taken place.
    """
    _, slots, came = contacts
    left, step = times
    n = contacts.side.shape[1]
    goes = (left > 0) & is_real
    met_here = slots == met[:, None]
    fits = jnp.any((slots >= n) | met_here, axis=1)
    # a step so short that the clock does not advance by it: the planes of an instant stay together while slots last
    passes = ~((left - step >= left) & arrives & fits)
    gone = decision.leaves & passes[:, None]
    # to the side opposite to where it came from is a crossing; after sliding (came = 0) it is a release
    crosses, freed = gone & (came == -decision.target), gone & (came == 0)
    alone = ~jnp.any(decision.side > 0, axis=1) & ~jnp.any(decision.slides, axis=1) & dies
    counts = tally(
        goes,
        crossings=crosses,
        captures=decision.slides & (came != 0) & passes[:, None],
        releases=freed,
        deaths=jnp.any(crosses | freed, axis=1) & alone,
        nonunique=decision.nonunique & passes[:, None],
    )
    # the plane that is met goes to the first empty slot, unless it was left in the same instant; without an empty slot
    # the neuron is lost, and the run overflows
    kept = jnp.where(gone, n, slots)
    empty = kept >= n
    first = empty & (jnp.cumsum(empty, axis=1) == 1)
    known = jnp.any((kept == met[:, None]), axis=1)
    new = (arrives & ~known)[:, None] & first
    lost = arrives & ~known & ~jnp.any(empty, axis=1)
    before = jnp.take_along_axis(decision.side, met[:, None], axis=1)
    # planes left in an instant that is not over count as touched again: side 0
    touched = jnp.where(decision.leaves & ~passes[:, None], slots, n)
    touched = jnp.concatenate([touched, jnp.where(arrives, met, n)[:, None]], axis=1)
    settled = Contacts(
        _set_sides(decision.side, touched, 0),
        jnp.where(new, met[:, None], kept).astype(slots.dtype),
        jnp.where(new, before, jnp.where(passes[:, None], 0, came)).astype(came.dtype),
    )
    falls = arrives & ~known & (before[:, 0] > 0)
    active = decision.leaves & (decision.target > 0)
    held = Held(slots, active, decision.slides, table, passes, met.astype(slots.dtype), falls)
    return settled, held, jnp.where(lost, -1.0, left - step), counts


def force_between(
    force: Float[Array, "m d"], active: Bool[Array, "m k"], kinks: Kinks
) -> Float[Array, "m d"]:
    """Return the force with that of planes that are left to their positive side."""
    return force + along(kinks, active.astype(force.dtype))


def force_behind(force: Float[Array, "m d"], held: Held, kinks: Kinks, forces: Forces) -> Float[Array, "m d"]:
    """Return the ``force`` before an event carried on to the next one.

    It is that of all planes on whose sides the neuron is: planes that are left come in, and the one that is met falls
    out if the neuron was on its positive side.
    """
    force = force_between(force, held.active & held.passes[:, None], kinks)
    weight = jnp.where(held.falls, at(forces.jump, held.met), 0.0)
    return force - weight[:, None] * at(forces.normal, held.met)


def force_of(side: Int[Array, "m n"], forces: Forces) -> Float[Array, "m d"]:
    """Return the force of all planes on whose sides the neurons are; those they sit on are left out."""
    return forces.base[None, :] + jnp.where(side > 0, forces.jump[None, :], 0.0) @ forces.normal
