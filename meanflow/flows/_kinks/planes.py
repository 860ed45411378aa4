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
from meanflow.flows._kinks.contacts import Contacts, Decision, Forces, Held, Kinks, Tables
from meanflow.flows._kinks.passage import Counts, Rates, Task, no_events

Vector = Float[Array, " m"]
Normals = Float[Array, "n d"]
Products = Float[Array, "n n"]
Slopes = tuple[float, float]  # of the activation, below and above 0


class Planes(NamedTuple):
    """The hyperplanes of n samples, of which as many entries are used as there are different ones.

    Attributes:
        plane: (n,) the entry of each sample: the first sample that is parallel to it.
        factor: (n,) what multiplies that sample to give this one; 0 for a zero sample.
    """

    plane: Int[Array, " n"]
    factor: Float[Array, " n"]

    @property
    def live(self) -> Bool[Array, " n"]:
        """Which entries are planes (n,)."""
        return (self.plane == jnp.arange(self.plane.shape[0])) & (self.factor != 0)


class Moving(NamedTuple):
    """What has derivatives of neurons on their way through a sub-step.

    Attributes:
        a, b: outer (m,) and inner (m, d) weights.
        force: (m, d) the force of all planes on whose sides the neuron is, those it sits on left out.
        left: (m,) the time it still has to move; negative if it ran out of slots.
    """

    a: Vector
    b: Float[Array, "m d"]
    force: Float[Array, "m d"]
    left: Vector


class Walkers(NamedTuple):
    """Neurons on their way through a sub-step.

    Attributes:
        moving: see there.
        z: (m, n) <x, b> for every plane, without derivatives.
        contacts: on which side of each plane the neuron is, and on which planes it sits.
        at_zero: (m,) whether it has just passed through b = 0.
    """

    moving: Moving
    z: Float[Array, "m n"]
    contacts: Contacts
    at_zero: Bool[Array, " m"]


# how the motion between two events ends
TIME, PLANE, ZERO, REST = 0, 1, 2, 3


class Walk(NamedTuple):
    """An event: what was decided, and the motion behind it.

    Attributes:
        moves: (m,) whether the neuron takes part.
        held: what is constant on the way.
        time: (m,) how long the motion takes.
        kind: (m,) how it ends: with the ``TIME`` left, on a ``PLANE``, at b = 0 (``ZERO``) or a = 0 (``REST``).
        stays: (m,) whether the neuron began at b = 0 and is to stay there, behind all planes.
    """

    moves: Bool[Array, " m"]
    held: Held
    time: Vector
    kind: Int[Array, " m"]
    stays: Bool[Array, " m"]


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
    # the chain of each sample leads to the first of its kind
    follow = lambda _, plane: plane.at[plane].get(mode="promise_in_bounds")
    plane = jax.lax.fori_loop(0, max(n - 1, 1).bit_length(), follow, plane)
    sign = jnp.sign(jnp.sum(unit * unit[plane], axis=-1))
    factor = jnp.where(norm > 0, sign * norm / jnp.where(norm > 0, norm[plane], 1.0), 0.0)
    factor = jnp.where((plane == index) & (norm > 0), 1.0, factor)
    return Planes(plane, factor)


def freeze(
    normal: Normals,
    planes: Planes,
    covector: Float[Array, " n"],
    slopes: Slopes,
    gram: Products | None = None,
) -> tuple[Forces, Tables]:
    """Put the residual ``covector`` (n,) on the planes.

    Args:
        normal: the samples.
        planes: their arrangement.
        covector: the frozen residual.
        slopes: those of the activation below and above 0.
        gram: inner products of the samples, if they are known.
    """
    below, above = slopes
    # a sample c x with c > 0 is active where x is, one with c < 0 on the other side: behind x all samples contribute
    # covector c x times the slope there, and across the plane the slope jumps by (above - below) |c| in either case
    behind = jnp.where(planes.factor > 0, below, above)
    jump = (above - below) * jax.ops.segment_sum(
        covector * jnp.abs(planes.factor), planes.plane, num_segments=normal.shape[0]
    )
    # relu, and no sample that points backward: behind all planes nothing is active
    dies = jnp.asarray(below == 0) & jnp.all(planes.factor >= 0)
    base = (covector * behind) @ normal
    return Forces(normal, jump, base, base + jump @ normal), Tables(planes.live, dies, gram)


def predictions(
    share: Vector, b: Float[Array, "m d"], z: Float[Array, "m n"], side: Int[Array, "m n"], planes: Planes,
    slopes: Slopes, normal: Normals,
) -> Float[Array, " n"]:  # fmt: skip
    """Return sum_i share_i s(<x_j, b_i>) for every sample, from the sides on which the neurons are."""
    below, above = slopes
    # sum of |c| <x, b> over the neurons ahead of each plane (n,); the rest is in the linear sum, O(n d) and not O(m n)
    ahead = jnp.sum(jnp.where(side > 0, z * share[:, None], 0.0), axis=0)[planes.plane]
    behind = jnp.where(planes.factor > 0, below, above)
    return behind * (normal @ (share @ b)) + (above - below) * jnp.abs(planes.factor) * ahead


def advance(task: Task) -> tuple[Walkers, Walk, Counts]:
    """Carry every neuron with time left over one event: decide at its planes, then move to the next event."""
    now, forces = task.neurons.contacts, task.shared
    kinks = contacts.touch(now.slots, forces)
    valid = (now.slots < forces.normal.shape[0]) & (task.neurons.moving.left > 0)[:, None]
    # few events begin on a plane; the others need no rule
    decided = jax.lax.cond(jnp.any(valid), _decide, _go_on, task, kinks, valid)
    return _move(task, kinks, *decided)


def glide(task: Task) -> tuple[Walkers, Walk, Counts]:
    """Move neurons that meet no plane to the end of their time, and leave all others where they are.

    A plane is met where the shift of b along g equals z / <x, g>. So the extremes of <x, g> / z over the planes, and
    those of the shift over the time, say whether there is an event, with one quotient for each plane and no root.
    """
    walkers, rates, forces, _ = task
    (a, b, force, left), z, (side, slots, came), _ = walkers
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
    moved = Moving(jnp.where(done, end, a), b - shift * force, force, jnp.where(done, 0.0, left))
    never, nowhere = jnp.zeros(slots.shape, bool), jnp.zeros(a.shape, slots.dtype)
    table = jnp.zeros((*slots.shape, slots.shape[1]), a.dtype)
    held = Held(slots, never, never, table, done, nowhere, jnp.zeros(a.shape, bool))
    found = Walk(done, held, time, nowhere, jnp.zeros(a.shape, bool))
    z = jnp.where(side == 0, 0.0, z - shift * normal_force)
    return walkers._replace(moving=moved, z=z), found, no_events()


# the decision, the table of ``Held``, the force g while the neuron moves, <x, g> for every plane, ``Walk.stays``
Decided = tuple[Decision, Float[Array, "m k k"], Float[Array, "m d"], Float[Array, "m n"], Bool[Array, " m"]]


def _go_on(task: Task, kinks: Kinks, valid: Bool[Array, "m k"]) -> Decided:
    """Return what ``_decide`` does for neurons that sit on no plane."""
    force, never = task.neurons.moving.force, jnp.zeros_like(valid)
    table = jnp.zeros((*valid.shape, valid.shape[1]), force.dtype)
    decision = Decision(never, never, never, never, task.neurons.contacts.side)
    return decision, table, force, force @ task.shared.normal.T, jnp.zeros(force.shape[0], bool)


def _decide(task: Task, kinks: Kinks, valid: Bool[Array, "m k"]) -> Decided:
    """Apply the Filippov rule."""
    walkers, rates, forces, tables = task
    (a, b, without, _), _, now, at_zero = walkers
    # b is tangent to the planes, so they do not matter for the sign that a is about to have
    sign = jnp.sign(jnp.where(a == 0, -rates.outer * jnp.sum(b * without, axis=-1), a))
    gram = contacts.products(kinks, now.slots, tables.gram)
    choice = filippov.decide(gram, kinks.jump, contacts.pull(kinks, without), safe_norm(without), valid, sign)
    decision = contacts.take_sides(now, valid, choice)
    force = without + contacts.along(kinks, choice.lam)
    normal_force = force @ forces.normal.T
    side = jnp.sign(decision.side)
    outward = -sign[:, None] * side * normal_force
    # beyond b = 0: z' = -a <x, g> must lead outward from every plane on the new ray, else the neuron rests at b = 0,
    # behind all planes, where it feels the base force alone from the next event on
    stays = at_zero & (jnp.min(outward, axis=1) < 0)
    rests = stays[:, None]
    # The rule lets a neuron leave to a side to which it does not move, if its normal speed is 0 within rounding. It
    # then moves parallel to the plane. With what rounding has left of the normal force it would meet the plane again at
    # once, be sent to the same side, and so on: the clock would stand still.
    normal_force = jnp.where((jnp.abs(decision.side) > 1) & (outward <= 0), 0.0, normal_force)
    decision = decision._replace(
        side=jnp.where(rests, jnp.where(tables.live, -1, 0)[None, :], side).astype(now.side.dtype),
        slides=decision.slides & ~rests,
        active=decision.active & ~rests,
        leaves=decision.leaves | (decision.slides & rests),
    )
    return decision, choice.table, force, normal_force, stays


def _move(
    task: Task,
    kinks: Kinks,
    decision: Decision,
    table: Float[Array, "m k k"],
    force: Float[Array, "m d"],
    normal_force: Float[Array, "m n"],
    stays: Bool[Array, " m"],
) -> tuple[Walkers, Walk, Counts]:
    """Move every neuron to its next event or to the end of its time, and count the events of the last decision.

    Neurons without time left keep their state: they move for no time.
    """
    walkers, rates, forces, tables = task
    (a, b, without, left), z, before, _ = walkers
    dim = b.shape[1]
    both = rates.inner * rates.outer
    work = jnp.sum(b * force, axis=-1)
    g2 = both * jnp.sum(force * force, axis=-1)
    planes = jnp.sum(decision.slides, axis=1)
    slides = planes > 0
    # on d - 1 planes a neuron has one direction left: it meets b = 0, where all other planes are met too
    on_line = (planes == dim - 1) & (dim > 1)

    # the quadratics of ``cell``: for Z = height and H = toward, one for each plane (m, n),
    sign = decision.side.astype(z.dtype)
    height = jnp.maximum(sign * z, 0.0)
    toward = sign * normal_force
    second = (both * work / 2)[:, None] * toward - height * (g2 / 4)[:, None]
    hits = cell.first_root(second, -(rates.inner * a)[:, None] * toward, height, g2[:, None])
    hits = jnp.where((sign != 0) & ~on_line[:, None], hits, jnp.inf)
    ahead, to_plane = _argmin(hits)
    # and one for the end of sliding: a = 0 changes the nature of the kinks, and on a line |b| = 0 may be met. Only one
    # of the two can be, since kp a^2 - kc |b|^2 is conserved on the line
    reach, size, own = safe_norm(b), jnp.abs(a), jnp.sign(a)
    to_zero = on_line & (rates.inner * a**2 > rates.outer * reach**2)
    along = safe_divide(work, reach)
    to_end = cell.first_root(
        jnp.where(to_zero, both * work / 2 * along - reach * (g2 / 4), size * g2 / 4),
        jnp.where(to_zero, -rates.inner * a * along, -own * rates.outer * work),
        jnp.where(to_zero, reach, size),
        g2,
    )
    to_end = jnp.where(slides, to_end, jnp.inf)
    # both are values of the monotone clock T of ``cell``: the least is the next event, and one time is enough; where
    # two coincide, the plane comes first
    time = cell.clock_time(jnp.minimum(to_plane, to_end), g2)
    exits = time < left
    step = jnp.where(exits & ~stays, time, jnp.where(stays, 0.0, jnp.maximum(left, 0.0)))
    kind = jnp.where(to_plane <= to_end, PLANE, jnp.where(to_zero, ZERO, REST))
    kind = jnp.where(stays, ZERO, jnp.where(exits, kind, TIME))
    through, met = (kind == ZERO) & ~stays, jnp.where(kind == PLANE, ahead, z.shape[1])

    a, shift = cell.travel(a, work, g2, rates.inner, rates.outer, step)
    b = b - shift[:, None] * force
    z = z - shift[:, None] * normal_force
    # through b = 0 a line goes on along its opposite ray: every side changes
    after, held, still, counts = contacts.settle(
        before, decision, table, met, through, (left, step), rates, tables.dies
    )
    found = Walk(left > 0, held, step, kind, stays)
    behind = _force_behind(without, found, kinks, forces)
    moved = Moving(
        jnp.where(kind == REST, 0.0, a),
        jnp.where((kind == ZERO)[:, None], 0.0, b),
        jnp.where(found.moves[:, None], behind, without),
        still,
    )
    z = jnp.where((after.side == 0) | (kind == ZERO)[:, None], 0.0, z)
    return Walkers(moved, z, after, through), found, counts


def _force_behind(
    force: Float[Array, "m d"], walk: Walk, kinks: Kinks, forces: Forces
) -> Float[Array, "m d"]:
    """Return ``Moving.force`` behind an event, from that before it."""
    force = contacts.force_behind(force, walk.held, kinks, forces)
    # beyond b = 0 a neuron is on the other side of all planes but those it slides on: of the sum of both forces each
    # plane makes up base + ahead
    slid = contacts.along(kinks, walk.held.free.astype(force.dtype))
    mirrored = (forces.base + forces.ahead)[None, :] - force - slid
    force = jnp.where((walk.kind == ZERO)[:, None], mirrored, force)
    return jnp.where(walk.stays[:, None], forces.base[None, :], force)


def carry(before: Moving, walk: Walk, rates: Rates, forces: Forces) -> Moving:
    """Return the neurons behind an event that is known, as a smooth function of those before it.

    The motion lasts a time that is held constant. Where it ends in an event, the root of some z(t), it is continued for
    the zero time -z/z' with z' held constant: one step of Newton's method, whose derivative is that of the root.
    Otherwise it ends with the time left, and is continued for the zero time by which that differs from its own value.
    """
    constant = jax.lax.stop_gradient
    a, b, force, left = before
    held, kind = walk.held, walk.kind
    # 1. The force on the way: planes that are slid on come in with the weights that make their normal forces vanish.
    kinks = contacts.touch(held.slots, forces)
    driving = contacts.force_between(force, held.active, kinks)
    gram = contacts.products(kinks, held.slots)
    mixed = filippov.hold(gram, held.free, held.table, contacts.pull(kinks, driving))
    driving = driving + jnp.sum(mixed[:, :, None] * kinks.normal, axis=1)
    # 2. The motion for the time that it took.
    work = jnp.sum(b * driving, axis=-1)
    g2 = rates.inner * rates.outer * jnp.sum(driving * driving, axis=-1)
    a1, shift = cell.travel(a, work, g2, rates.inner, rates.outer, walk.time)
    b1 = b - shift[:, None] * driving
    # 3. z and z' at its end: the height over a plane, or along b where b = 0 is met, or a.
    speed_a = constant(-rates.outer * jnp.sum(b1 * driving, axis=-1))
    speed_b = constant(-(rates.inner * a1)[:, None] * driving)
    toward = jnp.where((kind == PLANE)[:, None], contacts.at(forces.normal, held.met), constant(b))
    rests = kind == REST
    root = jnp.where(rests, a1, jnp.sum(b1 * toward, axis=-1))
    speed = jnp.where(rests, speed_a, constant(jnp.sum(speed_b * toward, axis=-1)))
    later = jnp.where(kind == TIME, left, -safe_divide(root, speed))
    later = later - constant(later)  # zero but for its derivative
    a1, b1 = a1 + later * speed_a, b1 + later[:, None] * speed_b
    return Moving(
        jnp.where(rests, 0.0, a1),
        jnp.where((kind == ZERO)[:, None], 0.0, b1),
        _force_behind(force, walk, kinks, forces),
        jnp.where(kind == TIME, 0.0, left - walk.time - later),
    )


def _argmin(table: Float[Array, "m n"]) -> tuple[Int[Array, " m"], Vector]:
    """Return the first column with the least entry of each row, and that entry; two plain reductions beat argmin."""
    n = table.shape[1]
    least = jnp.min(table, axis=1)
    first = jnp.min(jnp.where(table == least[:, None], jnp.arange(n, dtype=jnp.int32)[None, :], n), axis=1)
    return jnp.minimum(first, n - 1), least  # no entry equals a least one that is not a number
