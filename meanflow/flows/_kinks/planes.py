"""Neurons between the hyperplanes of the samples: what happens from one event to the next.

A sample x switches a neuron on or off where <x, b> = 0. ``arrange`` finds the hyperplanes of the data: samples that are
parallel share one, a zero sample has none. ``freeze`` puts the frozen residual on them: on its two sides a plane with
normal x pulls with R_+ x and R_- x, so that a neuron feels g = sum of R_- x over all planes, and J x = (R_+ - R_-) x
more for every plane on whose positive side it is. ``advance`` carries neurons over one event: the decision at the
planes they sit on (``filippov``), then the closed form (``cell``) to the next plane or to the end of their time.

**b = 0** is reached by sliding on d - 1 planes, along a line. There all planes meet and the future is not unique: the
neuron goes on along the opposite ray if the forces there drive it outward; if not it rests, without active samples.
Both are counted as not unique.

The side of every plane and the planes a neuron sits on are part of the state, never inferred from b, which rounding may
have moved.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from meanflow._numerics import safe_divide, safe_norm
from meanflow.flows._kinks import cell, contacts, filippov
from meanflow.flows._kinks.contacts import Contacts, Decision, Forces, force_of
from meanflow.flows._kinks.passage import Counts, Rates, no_events, tally

Vector = Float[Array, " m"]
Normals = Float[Array, "n d"]
Products = Float[Array, "n n"]
Slopes = tuple[float, float]  # of the activation, below and above 0


class Planes(NamedTuple):
    """The hyperplanes of n samples, of which as many entries are used as there are different ones.

    Attributes:
        plane: (n,) the entry of each sample: the first sample that is parallel to it.
        factor: (n,) what multiplies that sample to give this one; 0 for a zero sample.
        live: (n,) which entries are planes.
    """

    plane: Int[Array, " n"]
    factor: Float[Array, " n"]
    live: Bool[Array, " n"]


class Walkers(NamedTuple):
    """Neurons on their way through a sub-step.

    Attributes:
        a, b: outer (m,) and inner (m, d) weights.
        force: (m, d) g, all contributions included.
        z: (m, n) <x, b> for every plane.
        contacts: on which side of each plane the neuron is, and on which planes it sits.
        at_zero: (m,) whether it has just passed through b = 0.
        left: (m,) the time it still has to move; negative if it ran out of slots.
    """

    a: Vector
    b: Float[Array, "m d"]
    force: Float[Array, "m d"]
    z: Float[Array, "m n"]
    contacts: Contacts
    at_zero: Bool[Array, " m"]
    left: Vector


def arrange(x: Float[Array, "n d"], block: int = 256) -> Planes:
    """Find the hyperplanes of samples ``x``: which are parallel to one before them, and which are zero. O(n^2 d)."""
    x = jax.lax.stop_gradient(x)
    n = x.shape[0]
    norm = safe_norm(x)
    unit = x / jnp.where(norm == 0, 1.0, norm)[:, None]
    eps = jnp.finfo(x.dtype).eps

    # the sample before this one with the largest |cosine|: the only candidate to be parallel
    def nearest(row: Int[Array, ""]) -> Int[Array, ""]:
        cosine = jnp.where(jnp.arange(n) < row, jnp.abs(unit @ unit[row]), -1.0)
        return jnp.argmax(cosine)

    index = jnp.arange(n)
    other = jax.lax.map(nearest, index, batch_size=min(block, n))
    along = jnp.sum(unit * unit[other], axis=-1)
    # the cosine of a small angle is 1 in floating point: the difference of the vectors decides
    apart = safe_norm(unit - jnp.sign(along)[:, None] * unit[other])
    parallel = (other < index) & (apart <= 8 * eps) & (norm > 0)
    plane = jnp.where(parallel, other, index)
    for _ in range(max(n - 1, 1).bit_length()):  # the chain of each sample leads to the first of its kind
        plane = plane[plane]
    sign = jnp.sign(jnp.sum(unit * unit[plane], axis=-1))
    factor = jnp.where(norm > 0, sign * norm / jnp.where(norm > 0, norm[plane], 1.0), 0.0)
    factor = jnp.where((plane == index) & (norm > 0), 1.0, factor)
    return Planes(plane, factor, (plane == index) & (norm > 0))


def freeze(
    normal: Normals,
    planes: Planes,
    covector: Float[Array, " n"],
    slopes: Slopes,
    gram: Products | None = None,
) -> Forces:
    """Put the residual ``covector`` (n,) on the planes.

    Args:
        normal: the samples.
        planes: their arrangement.
        covector: the frozen residual.
        slopes: those of the activation below and above 0.
        gram: inner products of the samples, if they are known.
    """
    below, above = slopes
    # a sample c x with c > 0 is active where x is, one with c < 0 on the other side: R_+ and R_- (n,) by plane
    weight = covector * planes.factor
    ahead = planes.factor > 0
    gather = lambda u: jax.ops.segment_sum(u, planes.plane, num_segments=normal.shape[0])
    positive = gather(weight * jnp.where(ahead, above, below))
    negative = gather(weight * jnp.where(ahead, below, above))
    # relu, and no sample that points backward: behind all planes nothing is active
    dies = jnp.asarray(below == 0) & jnp.all(planes.factor >= 0)
    return Forces(normal, planes.live, positive - negative, negative @ normal, dies, gram)


def predictions(
    share: Vector, b: Float[Array, "m d"], z: Float[Array, "m n"], side: Int[Array, "m n"], planes: Planes,
    slopes: Slopes, normal: Normals,
) -> Float[Array, " n"]:  # fmt: skip
    """Return sum_i share_i s(<x_j, b_i>) for every sample, from the sides on which the neurons are."""
    below, above = slopes
    # sums over neurons ahead of each plane (n,); those behind are the rest of the linear sum, O(n d) and not O(m n)
    positive = jnp.sum(jnp.where(side > 0, z * share[:, None], 0.0), axis=0)
    negative = normal @ (share @ b) - positive
    positive, negative = positive[planes.plane], negative[planes.plane]
    ahead = planes.factor > 0
    with_up, with_down = jnp.where(ahead, positive, negative), jnp.where(ahead, negative, positive)
    return planes.factor * (above * with_up + below * with_down)


def advance(walkers: Walkers, rates: Rates, forces: Forces) -> tuple[Walkers, Counts]:
    """Carry every neuron with time left over one event: decide at its planes, then move to the next event."""
    on = (walkers.contacts.slots < forces.live.shape[0]) & (walkers.left > 0)[:, None]
    decision, force, normal_force = jax.lax.cond(jnp.any(on), _decide, _go_on, walkers, rates, forces)
    return _move(walkers._replace(force=force), decision, normal_force, rates, forces)


def glide(walkers: Walkers, rates: Rates, forces: Forces) -> tuple[Walkers, Counts]:
    """Move neurons that meet no plane to the end of their time, and leave all others where they are.

    A plane is met where the shift of b along g equals z / <x, g>. So the extremes of <x, g> / z over the planes, and
    those of the shift over the time, say whether there is an event, with one quotient for each plane and no root.
    """
    a, b, force, z, (side, slots, _, _), _, left = walkers
    # S, w^2 and <x, g> of the closed form in ``cell``
    both = rates.inner * rates.outer
    work = jnp.sum(b * force, axis=-1)
    g2 = both * jnp.sum(force * force, axis=-1)
    normal_force = force @ forces.normal.T
    time = jnp.maximum(left, 0.0)
    # the shift turns back where a passes 0
    own = jnp.sign(a)
    turn = cell.clock_time(cell.first_root(own * a * g2 / 4, -own * rates.outer * work, own * a, g2), g2)
    end, shift = cell.travel(a, work, g2, rates.inner, rates.outer, time)
    _, furthest = cell.travel(a, work, g2, rates.inner, rates.outer, jnp.minimum(turn, time))
    highest = jnp.maximum(jnp.maximum(shift, furthest), 0.0)
    lowest = jnp.minimum(jnp.minimum(shift, furthest), 0.0)
    # shift <x, g>/z >= 1 is <x, b - shift g> on the other side; a height that rounding made 0 is met by any move to it
    tiny = jnp.finfo(z.dtype).tiny
    height = jnp.where(z == 0, side * jnp.asarray(tiny, z.dtype), z)
    ratio = jnp.where(side == 0, 0.0, normal_force / jnp.where(side == 0, 1.0, height))
    meets = (highest * jnp.max(ratio, axis=1) >= 1) | (lowest * jnp.min(ratio, axis=1) >= 1)
    done = (left > 0) & ~meets & jnp.all(slots >= z.shape[1], axis=1)
    shift = jnp.where(done, shift, 0.0)[:, None]
    moved = walkers._replace(
        a=jnp.where(done, end, a),
        b=b - shift * force,
        z=jnp.where(side == 0, 0.0, z - shift * normal_force),
        left=jnp.where(done, 0.0, left),
    )
    return moved, no_events()


Decided = tuple[Decision, Float[Array, "m d"], Float[Array, "m n"]]


def _go_on(walkers: Walkers, rates: Rates, forces: Forces) -> Decided:
    """Return what ``_decide`` does for neurons that sit on no plane."""
    side, slots, lam, came = walkers.contacts
    never = jnp.zeros(slots.shape, bool)
    return Decision(never, never, came, lam, never, side), walkers.force, walkers.force @ forces.normal.T


def _decide(walkers: Walkers, rates: Rates, forces: Forces) -> Decided:
    """Apply the Filippov rule; return the decision, the force g, and <x, g> for every plane."""
    force, now = walkers.force, walkers.contacts
    kinks = contacts.touch(now, forces, walkers.left > 0)
    # the sign that a is about to have, if it is 0 now; b is tangent to the planes, so they do not matter for it
    work = jnp.sum(walkers.b * force, axis=-1)
    sign = jnp.sign(jnp.where(walkers.a == 0, -rates.outer * work, walkers.a))
    # g_0: the force with all planes that the neuron sits on inactive
    without = force - contacts.along(kinks, now.lam)
    choice = filippov.decide(
        kinks.gram, kinks.jump, contacts.pull(kinks, without), safe_norm(without), kinks.valid, sign
    )
    decision = contacts.take_sides(now, kinks, choice)
    on = jnp.any(kinks.valid, axis=1)[:, None]
    force = jnp.where(on, without + contacts.along(kinks, choice.lam), force)
    normal_force = force @ forces.normal.T

    # beyond b = 0: z' = -a <x, g> must lead outward from every plane on the new ray, else the neuron rests at b = 0,
    # behind all planes, where it feels the base force alone
    live = forces.live[None, :]
    speeds = jnp.where(live, decision.side * normal_force * -sign[:, None], 0.0)
    backward = (walkers.at_zero & (jnp.min(speeds, axis=1) < 0))[:, None]
    decision = decision._replace(
        side=jnp.where(backward, jnp.where(live, -1, 0), decision.side).astype(now.side.dtype),
        slides=decision.slides & ~backward,
        leaves=decision.leaves | (decision.slides & backward),
        target=jnp.where(backward, -1, decision.target).astype(now.side.dtype),
        lam=jnp.where(backward, 0.0, decision.lam),
    )
    force = jnp.where(backward, forces.base[None, :], force)
    normal_force = jnp.where(backward, (forces.normal @ forces.base)[None, :], normal_force)
    return decision, force, _consistent(normal_force, now, decision, sign)


def _consistent(
    normal_force: Float[Array, "m n"], before: Contacts, decision: Decision, sign: Vector
) -> Float[Array, "m n"]:
    """Return <x, g> with 0 for planes that are left with no normal speed but rounding.

    The rule lets a neuron leave to a side to which it does not move, if its normal speed is 0 within rounding. It then
    moves parallel to the plane. With the normal force that rounding has left over it would meet the plane again at
    once, be sent to the same side, and so on: the clock would stand still.
    """
    n = normal_force.shape[1]
    rows = jnp.arange(normal_force.shape[0])[:, None]
    own = jnp.take_along_axis(normal_force, jnp.minimum(before.slots, n - 1), axis=1)
    back = decision.leaves & (decision.target * -sign[:, None] * own <= 0)
    return normal_force.at[rows, jnp.where(back, before.slots, n)].set(0.0, mode="drop")


def _move(
    walkers: Walkers, decision: Decision, normal_force: Float[Array, "m n"], rates: Rates, forces: Forces
) -> tuple[Walkers, Counts]:
    """Move every neuron to its next event or to the end of its time, and count the events of the last decision.

    Neurons without time left keep their state: they move for no time.
    """
    a, b, force, z, before, _, left = walkers
    n, dim = forces.normal.shape
    side = decision.side
    both = rates.inner * rates.outer
    work = jnp.sum(b * force, axis=-1)
    g2 = both * jnp.sum(force * force, axis=-1)
    planes = jnp.sum(decision.slides, axis=1)
    slides = planes > 0
    # on d - 1 planes a neuron has one direction left: it meets b = 0, where all other planes are met too
    on_line = (planes == dim - 1) & (dim > 1)

    # the next plane: found without derivatives, then its time once more with them
    sign = side.astype(z.dtype)
    height = jnp.maximum(sign * z, 0.0)

    # the quadratic of ``cell`` for Z = height and H = toward, for all planes (m, n) or for one of each neuron (m,)
    def coefficients(toward: jax.Array, height: jax.Array, wide: bool) -> tuple[jax.Array, ...]:
        row = (lambda u: u[:, None]) if wide else (lambda u: u)
        second = row(both * work / 2) * toward - height * row(g2 / 4)
        return second, -row(rates.inner * a) * toward, height, row(g2)

    hits = cell.first_root(*jax.lax.stop_gradient(coefficients(sign * normal_force, height, True)))
    hits = jnp.where((side != 0) & ~on_line[:, None], hits, jnp.inf)
    ahead = _argmin(hits)
    pick = lambda u: jnp.take_along_axis(u, ahead[:, None], axis=1)[:, 0]
    meets = jnp.isfinite(pick(hits))
    second, slope, constant, _ = coefficients(pick(sign) * pick(normal_force), pick(height), False)
    second, slope, constant = (jnp.where(meets, u, 0.0) for u in (second, slope, constant))
    to_plane = cell.first_root(second, slope, constant, g2)
    to_plane = jnp.where(meets, to_plane, jnp.inf)

    # a = 0 while sliding changes the nature of the kinks; b = 0 is met on a line
    own = jnp.sign(a)
    to_rest = cell.first_root(own * a * g2 / 4, -own * rates.outer * work, own * a, g2)
    to_rest = jnp.where(slides, to_rest, jnp.inf)
    reach = safe_norm(b)
    along = safe_divide(work, reach)
    to_zero = cell.first_root(*coefficients(along, reach, False))
    to_zero = jnp.where(on_line, to_zero, jnp.inf)
    # all three are values of the monotone clock T of ``cell``: the least is the next event, and one time is enough
    first = jnp.minimum(to_plane, jnp.minimum(to_rest, to_zero))
    time = cell.clock_time(first, g2)
    exits = time < left
    step = jnp.where(exits, time, jnp.maximum(left, 0.0))

    a, shift = cell.travel(a, work, g2, rates.inner, rates.outer, step)
    b = b - shift[:, None] * force
    z = jnp.where(side == 0, 0.0, z - shift[:, None] * normal_force)
    # which event it is: where two coincide, the plane comes before b = 0, and that before a = 0
    arrives = exits & (to_plane <= first)
    through = exits & ~arrives & (to_zero <= first)
    halts = exits & ~arrives & ~through

    after, still, counts = contacts.settle(
        before, decision, ahead, arrives, left, step, rates.is_real, forces
    )
    # through b = 0 a line goes on along its opposite ray: every side changes
    z = jnp.where((after.side == 0) | through[:, None], 0.0, z)
    after = after._replace(side=jnp.where(through[:, None], -after.side, after.side))

    # beyond b = 0 all sides have changed, and with them the force; few neurons get there, so that most events skip it
    def refresh(force: jax.Array) -> jax.Array:
        weight = after.lam * contacts.at(forces.jump, after.slots)
        turned = jnp.sum(weight[:, :, None] * contacts.at(forces.normal, after.slots), axis=1)
        return jnp.where(through[:, None], force_of(after.side, forces) + turned, force)

    moved = Walkers(
        jnp.where(halts, 0.0, a),
        jnp.where(through[:, None], 0.0, b),
        jax.lax.cond(jnp.any(through), refresh, lambda u: u, force),
        z,
        after,
        through,
        still,
    )
    return moved, counts + tally((left > 0) & rates.is_real, nonunique=through)


def _argmin(table: Float[Array, "m n"]) -> Int[Array, " m"]:
    """Return the first column with the least entry of each row; two plain reductions are faster than jnp.argmin."""
    n = table.shape[1]
    least = jnp.min(table, axis=1, keepdims=True)
    first = jnp.min(jnp.where(table == least, jnp.arange(n, dtype=jnp.int32)[None, :], n), axis=1)
    return jnp.minimum(first, n - 1)  # no entry equals a least one that is not a number
