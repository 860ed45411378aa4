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
from meanflow.flows._kinks.passage import Counts, Rates, tally

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
        side: (m, n) 1 or -1; 0 for planes the neuron sits on, and for entries that are not planes. Within an instant
            the planes in the slots may have a side already.
        slots: (m, k) the planes it sits on; n marks an empty slot.
        came: (m, k) the side from which it has just arrived on the plane, 1 or -1; 0 if it has been sliding on it.
    """

    side: Int[Array, "m n"]
    slots: Int[Array, "m k"]
    came: Int[Array, "m k"]


class Kinks(NamedTuple):
    """The planes in the slots of neurons: normals (m, k, d) and jumps of the force (m, k), 0 for empty slots."""

    normal: Float[Array, "m k d"]
    jump: Float[Array, "m k"]


class Decision(NamedTuple):
    """What becomes of the planes in the slots.

    Attributes:
        slides, active: (m, k) on which planes the neuron slides, and which it leaves to their positive side.
        leaves: (m, k) which it leaves, to either side; neither slides nor leaves for empty slots.
        nonunique: (m, k) whether the rule left the decision open.
        side: (m, n) the sides of all planes, 2 or -2 for those that are left; 1 or -1 again for ``settle``.
    """

    slides: Bool[Array, "m k"]
    active: Bool[Array, "m k"]
    leaves: Bool[Array, "m k"]
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
        met: (m,) the plane it meets next; n where there is none.
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


def touch(slots: Int[Array, "m k"], forces: Forces) -> Kinks:
    """Look up the planes in the slots."""
    # the few planes of a neuron are gathered, (m, k, d), so that an event costs O(k d) and not O(n d)
    return Kinks(at(forces.normal, slots), at(forces.jump, slots))


def products(
    kinks: Kinks, slots: Int[Array, "m k"], known: Float[Array, "n n"] | None = None
) -> Float[Array, "m k k"]:
    """Return the inner products of the normals in the slots, looked up among those that are ``known``."""
    if known is None:
        return jnp.einsum("mkd,mld->mkl", kinks.normal, kinks.normal)
    # empty slots hold n, one past the end: they read the last row, which nothing asks for
    rows = jnp.minimum(slots, known.shape[0] - 1)
    return known[rows[:, :, None], rows[:, None, :]]


def along(kinks: Kinks, weight: Float[Array, "m k"]) -> Float[Array, "m d"]:
    """Return the force sum_k weight_k J_k x_k."""
    return jnp.sum((weight * kinks.jump)[:, :, None] * kinks.normal, axis=1)


def pull(kinks: Kinks, force: Float[Array, "m d"]) -> Float[Array, "m k"]:
    """Return <x_k, force>."""
    return jnp.sum(kinks.normal * force[:, None, :], axis=-1)


def take_sides(contacts: Contacts, valid: Bool[Array, "m k"], choice: filippov.Choice) -> Decision:
    """Leave the planes in the ``valid`` slots that the rule has decided to leave."""
    slides, active = (valid & (choice.state == k) for k in (filippov.SLIDES, filippov.ACTIVE))
    # empty slots write to column n, which does not exist, and are dropped
    rows, columns = (
        jnp.arange(valid.shape[0])[:, None],
        jnp.where(valid, contacts.slots, contacts.side.shape[1]),
    )
    now = jnp.where(slides, 0, jnp.where(active, 2, -2)).astype(contacts.side.dtype)
    side = contacts.side.at[rows, columns].set(now, mode="drop")
    return Decision(slides, active, valid & ~slides, choice.nonunique & valid, side)


def settle(
    contacts: Contacts,
    decision: Decision,
    table: Float[Array, "m k k"],
    met: Int[Array, " m"],
    through: Bool[Array, " m"],
    times: tuple[Vector, Vector],
    rates: Rates,
    dies: Bool[Array, ""],
) -> tuple[Contacts, Held, Vector, Counts]:
    """Record who arrives on which plane, and who is done with those it left.

    Args:
        contacts: before the decision.
        decision: at the last event.
        table: of the decision, see ``Held``.
        met: the plane that is met next; n where there is none.
        through: whether the neuron passes through b = 0 instead, where all its sides change.
        times: the time each neuron had left, and how much of it has passed since the last event.
        rates: which neurons are real, whose events count.
        dies: see ``Tables``.

    Returns:
        The contacts, what is needed to carry the forces on, the time that is left, negative for neurons without an
        empty slot, and the events that have taken place.
    """
    _, slots, came = contacts
    (left, step), side = times, decision.side
    n, k = side.shape[1], slots.shape[1]
    arrives = met < n
    fits = jnp.any((slots >= n) | (slots == met[:, None]), axis=1)
    # a step so short that the clock does not advance by it: the planes of an instant stay together while slots last
    passes = ~((left - step >= left) & arrives & fits)
    gone = decision.leaves & passes[:, None]
    target = jnp.where(decision.active, 1, -1)
    # to the side opposite to where it came from is a crossing; after sliding (came = 0) it is a release
    crosses, freed = gone & (came == -target), gone & (came == 0)
    alone = ~jnp.any(side > 0, axis=1) & ~jnp.any(decision.slides, axis=1) & dies
    counts = tally(
        (left > 0) & rates.is_real,
        crossings=crosses,
        captures=decision.slides & (came != 0) & passes[:, None],
        releases=freed,
        deaths=jnp.any(crosses | freed, axis=1) & alone,
        nonunique=jnp.concatenate([decision.nonunique & passes[:, None], through[:, None]], axis=1),
    )
    # the plane that is met goes to the first empty slot, unless it was left in the same instant and has one (place -1);
    # without an empty slot (place k) the neuron is lost, and the run overflows
    kept, index = jnp.where(gone, n, slots), jnp.arange(k)[None, :]
    place = jnp.min(jnp.where(kept == met[:, None], -1, jnp.where(kept >= n, index, k)), axis=1)
    lost, enters = arrives & (place == k), arrives & (place >= 0)
    new = enters[:, None] & (index == place[:, None])
    before = jnp.take_along_axis(side, jnp.minimum(met, n - 1)[:, None], axis=1)
    # planes left in an instant that is not over keep the side they were left to: the rule is asked about them again
    # before anything looks at it
    after = jnp.where(jnp.arange(n)[None, :] == met[:, None], 0, side)
    settled = Contacts(
        jnp.where(through[:, None], -after, after).astype(side.dtype),
        jnp.where(new, met[:, None], kept).astype(slots.dtype),
        jnp.where(new, before, jnp.where(passes[:, None], 0, came)).astype(came.dtype),
    )
    falls = enters & (before[:, 0] > 0)
    held = Held(slots, decision.active, decision.slides, table, passes, met.astype(slots.dtype), falls)
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
