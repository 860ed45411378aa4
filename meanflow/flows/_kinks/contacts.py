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
    """The frozen forces, and the normals they act along.

    Attributes:
        normal: (n, d) the samples.
        live: (n,) which of them are planes.
        jump: (n,) J = R_+ - R_-.
        base: (d,) the force on the negative side of all planes.
        dies: whether neurons on that side of all planes feel nothing, a scalar.
        gram: (n, n) inner products of all normals, or None where they are computed when they are needed.
    """

    normal: Float[Array, "n d"]
    live: Bool[Array, " n"]
    jump: Float[Array, " n"]
    base: Float[Array, " d"]
    dies: Bool[Array, ""]
    gram: Float[Array, "n n"] | None


class Contacts(NamedTuple):
    """Where neurons are among the planes.

    Attributes:
        side: (m, n) 1 or -1; 0 for planes the neuron sits on, and for entries that are not planes.
        slots: (m, k) the planes it sits on; n marks an empty slot.
        lam: (m, k) weight of the positive side in the force, for each slot.
        came: (m, k) the side from which it has just arrived on the plane, 1 or -1; 0 if it has been sliding on it.
    """

    side: Int[Array, "m n"]
    slots: Int[Array, "m k"]
    lam: Float[Array, "m k"]
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
        lam: weight of the positive side from now on.
        nonunique: whether the rule left the decision open.
        side: (m, n) the sides of all planes, with those that are left.
    """

    slides: Bool[Array, "m k"]
    leaves: Bool[Array, "m k"]
    target: Int[Array, "m k"]
    lam: Float[Array, "m k"]
    nonunique: Bool[Array, "m k"]
    side: Int[Array, "m n"]


def at(table: Float[Array, "n *d"], slots: Int[Array, "m k"]) -> Float[Array, "m k *d"]:
    """Return the rows of ``table`` in the slots, 0 for empty ones."""
    return jnp.take(table, slots, axis=0, mode="fill", fill_value=0)


def touch(contacts: Contacts, forces: Forces, moving: Bool[Array, " m"]) -> Kinks:
    """Look up the planes that the ``moving`` neurons sit on."""
    valid = (contacts.slots < forces.live.shape[0]) & moving[:, None]
    # the few planes of a neuron are gathered, (m, k, d), so that an event costs O(k d) and not O(n d)
    normal, jump = at(forces.normal, contacts.slots), at(forces.jump, contacts.slots)
    if forces.gram is None:
        gram = jnp.einsum("mkd,mld->mkl", normal, normal)
    else:
        # empty slots hold n, one past the end: they read the last row, and are masked below
        last = forces.gram.shape[0] - 1
        known = jnp.minimum(contacts.slots, last)
        gram = forces.gram[known[:, :, None], known[:, None, :]]
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
    lam = jnp.where(kinks.valid, choice.lam, contacts.lam)
    side = set_sides(contacts, leaves, target)
    return Decision(slides, leaves, target, lam, choice.nonunique & kinks.valid, side)


def set_sides(contacts: Contacts, chosen: Bool[Array, "m k"], value: Int[Array, "..."]) -> Int[Array, "m n"]:
    """Return the sides of all planes, with those of the ``chosen`` slots replaced by ``value``, () or (m, k)."""
    # slots that are not chosen write to column n, which does not exist, and are dropped
    rows, n = jnp.arange(contacts.slots.shape[0])[:, None], contacts.side.shape[1]
    return contacts.side.at[rows, jnp.where(chosen, contacts.slots, n)].set(value, mode="drop")


def settle(
    contacts: Contacts,
    decision: Decision,
    met: Int[Array, " m"],
    arrives: Bool[Array, " m"],
    left: Vector,
    step: Vector,
    is_real: Bool[Array, " m"],
    forces: Forces,
) -> tuple[Contacts, Vector, Counts]:
    """Record who arrives on which plane, and who is done with those it left.

    Args:
        contacts: before the decision.
        decision: at the last event.
        met: the plane that is met next.
        arrives: whether it is.
        left: the time each neuron had left.
        step: how much of it has passed since the last event.
        is_real: neurons whose events count.
        forces: the frozen forces.

    Returns:
        The contacts, the time that is left, negative for neurons without an empty slot, and the events that have taken
        place.
    """
    contacts = contacts._replace(side=decision.side)
    n = contacts.side.shape[1]
    came = contacts.came
    fits = jnp.any((contacts.slots >= n) | (contacts.slots == met[:, None]), axis=1)
    # a step so short that the clock does not advance by it: the planes of an instant stay together while slots last
    passes = ~((left - step >= left) & arrives & fits)[:, None]
    gone = decision.leaves & passes
    # planes left in an instant that is not over count as touched again: side 0
    side = set_sides(contacts, decision.leaves & ~passes, jnp.zeros((), came.dtype))
    # to the side opposite to where it came from is a crossing; after sliding (came = 0) it is a release
    crosses, freed = gone & (came == -decision.target), gone & (came == 0)
    alone = ~jnp.any(side > 0, axis=1) & ~jnp.any(decision.slides, axis=1) & forces.dies
    counts = tally(
        (left > 0) & is_real,
        crossings=crosses,
        captures=decision.slides & (came != 0) & passes,
        releases=freed,
        deaths=jnp.any(crosses | freed, axis=1) & alone,
        nonunique=decision.nonunique & passes,
    )
    slots = jnp.where(gone, n, contacts.slots)
    known = arrives[:, None] & (slots == met[:, None])  # it left this plane in the same instant
    # the plane that is met goes to the first empty slot; without one the neuron is lost, and the run overflows
    empty = slots >= n
    new = arrives[:, None] & ~jnp.any(known, axis=1)[:, None] & empty & (jnp.cumsum(empty, axis=1) == 1)
    lost = arrives & ~jnp.any(known | new, axis=1)
    # it arrives with the force of the side it comes from: lam = 1 from the positive side, 0 from the negative
    before = jnp.take_along_axis(side, met[:, None], axis=1)
    hit = arrives[:, None] & (jnp.arange(n)[None, :] == met[:, None])
    settled = Contacts(
        jnp.where(hit, 0, side).astype(side.dtype),
        jnp.where(new, met[:, None], slots).astype(slots.dtype),
        jnp.where(new, (before > 0).astype(decision.lam.dtype), jnp.where(gone, 0.0, decision.lam)),
        jnp.where(new, before, jnp.where(passes, 0, came)).astype(came.dtype),
    )
    return settled, jnp.where(lost, -1.0, left - step), counts


def force_of(side: Int[Array, "m n"], forces: Forces) -> Float[Array, "m d"]:
    """Return the force of all planes on whose sides the neurons are; those they sit on are left out."""
    return forces.base[None, :] + jnp.where(side > 0, forces.jump[None, :], 0.0) @ forces.normal
