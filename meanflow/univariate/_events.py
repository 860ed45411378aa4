"""Exact motion of univariate ReLU neurons in a frozen force table, through kinks, by the Filippov rule.

The sliding solver freezes the residual for a sub-step. Then neurons no longer see each other, and this module moves
each one from event to event in closed form. An event is the moment at which a neuron meets the ray of a sample, where
its velocity jumps. ``freeze`` tabulates the forces and ``advance`` carries every neuron over one event;
``flows._kinks.passage`` repeats that, and differentiates ``carry``, the smooth motion over a known event. The
rule at a ray is in ``_decide``, the way to the next event in ``_fly``. This is the motion of ``flows._kinks.planes``
for x~ = (x, 1), where sorted samples spare the array of size neurons x samples.

**Between events.** Write p = (a, -b) for the inner weights of a neuron, c for the outer one, and kp, kc for the rates
at which the two layers learn. In region R (numbered in ``_forces``) the force G = G_R is constant, and

    p' = -kp c G,    c' = -kc <G, p>,

whose closed form is in ``flows._kinks.cell``. The neuron meets the ray of sample j when z = <x~_j, p> = 0.

**At a ray.** The sample j of the ray is inactive on one side of it (z < 0) and active on the other. The force differs
between the sides by what the sample itself contributes, g_j x~_j, so with H = <x~_j, G> the normal speed jumps from

    z'_- = -kp c H_-    where the sample is inactive    to    z'_+ = -kp c (H_- + g_j |x~_j|^2)    where it is active.

If both speeds have one sign the neuron crosses. If z'_- > 0 >= z'_+ both sides push it back, and it slides along the
ray: the same motion, with G projected on the ray. On a repulsor (z'_- < 0 < z'_+) it has no unique future: it takes the
inactive side, as relu'(0) = 0 does, and the event is counted. Sliding ends when the table changes, when c passes 0
(possible for a balance delta = c^2 - |p|^2 < 0) or when p passes 0 (for delta > 0). At p = 0 all regions meet, the dead
one among them, and the future is again not unique (plain descent may die there): the neuron goes on along the opposite
ray where the forces allow it, and the event is counted.

Region and ray are part of the state. They are never inferred from the angle, which rounding may have moved. Only the
two rays that bound a region are tested, so there is no array of size neurons x samples.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from meanflow._numerics import safe_divide
from meanflow.flows._kinks.cell import clock_time, first_root, travel
from meanflow.flows._kinks.passage import Counts, Rates, Task, tally
from meanflow.univariate import _forces as forces


class Moving(NamedTuple):
    """What has derivatives of neurons on their way through a sub-step; every field has shape (m,).

    Attributes:
        u, v: the inner weights p = (u, v) = (a, -b).
        c: the outer weight.
        left: the time it still has to move; 0 for a neuron that is done.
    """

    u: Float[Array, " m"]
    v: Float[Array, " m"]
    c: Float[Array, " m"]
    left: Float[Array, " m"]


class MovingNeurons(NamedTuple):
    """Neurons on their way through a sub-step; every field has shape (m,).

    Attributes:
        moving: see there.
        region: index of the activation region, in the order of ``forces``.
        ray: index of the ray on which the neuron sits, or -1.
        fresh: whether the neuron has just arrived on that ray.
    """

    moving: Moving
    region: Int[Array, " m"]
    ray: Int[Array, " m"]
    fresh: Bool[Array, " m"]


# how the motion between two events ends: with the time, on a ray, at p = 0 or at c = 0
TIME, RAY, ZERO, REST = 0, 1, 2, 3


class Flight(NamedTuple):
    """An event: what was decided, and the motion behind it; every field has shape (m,).

    Attributes:
        moves: whether the neuron takes part.
        slides: whether it moves along a ray.
        returns: whether it comes back to the ray where it began.
        region: the region whose force drives it.
        sample: that of the ray along which it moves, or of the one it meets.
        kind: how the motion ends.
        time: how long it takes.
    """

    moves: Bool[Array, " m"]
    slides: Bool[Array, " m"]
    returns: Bool[Array, " m"]
    region: Int[Array, " m"]
    sample: Int[Array, " m"]
    kind: Int[Array, " m"]
    time: Float[Array, " m"]


class Field(NamedTuple):
    """The frozen forces around s samples.

    Attributes:
        x: (s,) the sorted samples.
        forces: (2s, 2) the force G in each region.
    """

    x: Float[Array, " s"]
    forces: Float[Array, "rays 2"]

    def pull(
        self, u: Float[Array, " m"], v: Float[Array, " m"], region: Int[Array, " m"], ray: Int[Array, " m"]
    ) -> Float[Array, " m"]:
        """Return <G, d> for neurons with the unit vector d = (u, v); on a ray, where d is its direction, along that."""
        force_u, force_v = _row(self.forces, region)
        x = _row(self.x[:, None], _sample(jnp.maximum(ray, 0), self.x.shape[0]))[0]
        side = jnp.where(ray < self.x.shape[0], 1.0, -1.0).astype(x.dtype)
        along = side * (force_u - x * force_v) / jnp.sqrt(1 + x * x)
        return jnp.where(ray >= 0, along, u * force_u + v * force_v)


class Tables(NamedTuple):
    """The same forces as they are looked up at an event, one row for each region and ray: two look-ups.

    Attributes:
        regions: (2s, 6) for each region its force G = (force_u, force_v), and for the two rays that bound it, the
            clockwise one first, the sample x and the normal force that lets a neuron inside move towards the ray if it
            has the sign of its outer weight: <x~, G> where the sample is active, -<x~, G> where it is not.
        rays: (2s, 5) for each ray its unit vector, the tangential force <ray, G>, which is the same on both sides, and
            the normal force <x~, G> on the two sides, where its sample is inactive and active.
    """

    regions: Float[Array, "rays 6"]
    rays: Float[Array, "rays 5"]


def freeze(x: Float[Array, " s"], covector: Float[Array, " s"]) -> tuple[Field, Tables]:
    """Tabulate the forces of the residual ``covector`` (s,) at sorted samples ``x`` (s,), in O(s)."""
    samples, force = x, forces.region_forces(covector, x)
    s = x.shape[0]
    # Rays 0 .. s-1 face right, the others left, each half from the last sample to the first; ray b lies between the
    # regions b and b + 1. Slices, and not look-ups, which would be scattered sums in reverse mode.
    sample = jnp.concatenate([samples[::-1], samples[::-1]])
    behind = jnp.concatenate([force[:s], force[s + 1 :], force[:1]])  # its sample is inactive
    ahead = jnp.concatenate([force[1 : s + 1], force[s:]])
    side = jnp.concatenate([jnp.ones_like(samples), -jnp.ones_like(samples)])
    ray_u = side / jnp.hypot(1.0, sample).astype(x.dtype)
    ray_v = -ray_u * sample
    # On the ray <x~, ray> = 0, so the ray's own sample adds nothing along it: either side gives the same force.
    along = ray_u * behind[:, 0] + ray_v * behind[:, 1]
    # Across it the two sides differ by g_j |x~_j|^2, what the sample itself contributes: here the velocity jumps.
    idle = sample * behind[:, 0] + behind[:, 1]
    busy = sample * ahead[:, 0] + ahead[:, 1]
    # Region R lies between the rays R - 1 and R; the samples of these are active in regions 1 .. s and s .. 2s - 1.
    # The height |<x~, p>| above a ray changes at the rate -kp c H, H = <x~, G> where the sample is active (height =
    # <x~, p>) and -<x~, G> where it is not. Both are taken from the tables of the rays, so that the sign of H is the
    # one that the rule at the ray sees: a neuron that the rule sends into a region is not at once sent back.
    turn = lambda u: jnp.concatenate([u[-1:], u[:-1]])
    low = turn(jnp.concatenate([busy[:s], -idle[s:]]))
    high = jnp.concatenate([-idle[:s], busy[s:]])
    return Field(x, force), Tables(
        jnp.stack([force[:, 0], force[:, 1], turn(sample), low, sample, high], axis=-1),
        jnp.stack([ray_u, ray_v, along, idle, busy], axis=-1),
    )


def _sample(ray: Int[Array, " m"], count: int) -> Int[Array, " m"]:
    """Return the sample of each ray, for ``count`` samples; ray -1 has the first of those of the right half."""
    return jnp.where(ray < count, count - 1 - ray, 2 * count - 1 - ray)


def _row(table: Float[Array, "rays k"], index: Int[Array, " m"]) -> tuple[Float[Array, " m"], ...]:
    """Return the columns of the chosen rows."""
    # one column after the other: a TPU would pad an array (m, k) to 128 numbers for each neuron
    return tuple(table[:, k].at[index].get(mode="promise_in_bounds") for k in range(table.shape[1]))


class _Decision(NamedTuple):
    """What the Filippov rule decides for neurons on a ray; every field has shape (m,).

    Attributes:
        at: whether the neuron is on a ray; the others keep their region.
        ray_u, ray_v: unit vector of the ray.
        along: <ray, G>, the force along the ray.
        reach: <ray, p>, the distance from the origin.
        slides, leaves: whether the neuron slides along the ray or goes into a region.
        repels: whether both sides drive neurons away from the ray.
        entered: the region of the neuron from now on.
    """

    at: Bool[Array, " m"]
    ray_u: Float[Array, " m"]
    ray_v: Float[Array, " m"]
    along: Float[Array, " m"]
    reach: Float[Array, " m"]
    slides: Bool[Array, " m"]
    leaves: Bool[Array, " m"]
    repels: Bool[Array, " m"]
    entered: Int[Array, " m"]


def _beside(ray: Int[Array, " m"], total: int) -> tuple[Int[Array, " m"], Int[Array, " m"]]:
    """Return the regions beside each ray, where its sample is inactive and where it is active."""
    after = jnp.where(ray == total - 1, 0, ray + 1)
    right = ray < total // 2
    return jnp.where(right, ray, after), jnp.where(right, after, ray)


def _opposite(ray: Int[Array, " m"], total: int) -> Int[Array, " m"]:
    """Return the other half of the line of each ray."""
    return jnp.where(ray < total // 2, ray + total // 2, ray - total // 2)


def _decide(
    neurons: MovingNeurons, tables: Tables, inner_rate: Float[Array, " m"], outer_rate: Float[Array, " m"]
) -> _Decision:
    """Decide for each neuron on a ray whether it slides, crosses or dies."""
    u, v, c, _ = neurons.moving
    at = neurons.ray >= 0
    ray = jnp.maximum(neurons.ray, 0)
    ray_u, ray_v, along, idle, busy = _row(tables.rays, ray)
    to_idle, to_busy = _beside(ray, tables.rays.shape[0])
    # On the ray p = reach * ray.
    reach = u * ray_u + v * ray_v
    # Only the sign of c matters below. At c = 0 it is about to be that of c' = -kc <G, p> = -kc reach along.
    c_next = jnp.where(c == 0, -outer_rate * reach * along, c)
    idle_speed, busy_speed = -inner_rate * c_next * idle, -inner_rate * c_next * busy
    # The rule: z = <x~, p> = 0 here. It grows on the inactive side (z < 0) and falls on the active one: both sides push
    # back, and the neuron slides. Where no side moves at all it stays on the ray too.
    holds = ((idle_speed > 0) & (busy_speed <= 0)) | ((idle_speed == 0) & (busy_speed == 0))
    repels = (idle_speed < 0) & (busy_speed > 0)
    # Sliding means reach' = -kp c along. At p = 0 (reach = 0, arrived on the opposite ray) a negative rate would lead
    # back through the origin: both halves of the line push inward, no ray is left to slide on, and the neuron dies.
    inward = holds & (reach <= 0) & (inner_rate * c_next * along > 0)
    slides = at & holds & ~inward
    leaves = at & ~slides
    # It goes to the active side if both speeds are positive, and to the inactive one in every other case, a repulsor
    # among them. Region 0 sees no sample.
    target = jnp.where((idle_speed > 0) & (busy_speed > 0), to_busy, to_idle)
    entered = jnp.where(leaves, jnp.where(inward, 0, target), neurons.region)
    return _Decision(at, ray_u, ray_v, along, reach, slides, leaves, repels, entered)


def _count(
    neurons: MovingNeurons, decision: _Decision, through: Bool[Array, " m"], counted: Bool[Array, " m"]
) -> Counts:
    """Count the decisions at rays and who went ``through`` p = 0, for the neurons that are ``counted``."""
    # A neuron that has just arrived either crosses (its region changes), is captured, or turns back, which is no event.
    # One that was on the ray before can only be released.
    crosses = decision.leaves & neurons.fresh & (decision.entered != neurons.region)
    freed = decision.leaves & ~neurons.fresh
    return tally(
        counted,
        crossings=crosses,
        captures=decision.slides & neurons.fresh,
        releases=freed,
        deaths=(crosses | freed) & (decision.entered == 0),
        nonunique=(decision.at & decision.repels) | through,  # one that leaves does not slide to p = 0
    )


def _fly(
    neurons: MovingNeurons, decision: _Decision, rates: Rates, tables: Tables
) -> tuple[MovingNeurons, Flight]:
    """Move neurons, whose region is decided, to their next event or to the end of their time."""
    (u, v, c, left), region, origin, _ = neurons
    inner_rate, outer_rate, _ = rates
    slides, along, reach = decision.slides, decision.along, decision.reach
    total = tables.rays.shape[0]
    half = total // 2
    # 1. The force and both bounding rays in one look-up; normal forces are the numbers that _decide saw (see freeze).
    free_u, free_v, x_low, force_low, x_high, force_high = _row(tables.regions, region)
    force_u = jnp.where(slides, along * decision.ray_u, free_u)
    force_v = jnp.where(slides, along * decision.ray_v, free_v)
    # constants of the closed form: w^2 = kp kc |G|^2 and S = <G, p>
    both = inner_rate * outer_rate
    g2 = both * (force_u**2 + force_v**2)
    work = u * force_u + v * force_v

    def height(ahead: Int[Array, " m"], x: jax.Array, active: Bool[Array, " m"]) -> jax.Array:
        # Z >= 0 of first_root. Rounding may leave z on the wrong side of a ray, and a neuron that has just left a ray
        # is exactly on it: both are at height 0, from where only a return counts.
        z = x * u + v
        just_left = decision.leaves & (ahead == origin)
        return jnp.where(just_left, 0.0, jnp.maximum(jnp.where(active, z, -z), 0.0))

    # 2. Two events can end the motion, one row each, (2, m). In T = 2 tanh(w t/2)/w both are quadratic equations. Free
    # neurons meet the lower ray, R - 1, or the upper one, R, with height Z and normal force H (kinks.cell):
    #     (kp kc H S/2 - Z w^2/4) T^2 - kp c H T + Z = 0.
    # Sliding ones meet p = 0, the same equation with Z = <ray, p> and H = <ray, G>, or c = 0, which is
    #     |c| (1 + w^2 T^2/4) - sign(c) kc S T = 0     since c(t) = c cosh(w t) - kc S sinh(w t)/w.
    lower = jnp.where(region == 0, total - 1, region - 1)
    height_low = height(lower, x_low, (region >= 1) & (region <= half))
    height_high = height(region, x_high, region >= half)
    toward = jnp.stack([jnp.where(slides, along, force_low), force_high])
    away = jnp.stack([jnp.where(slides, reach, height_low), height_high])
    row = lambda u: u[None, :]
    second = row(both * work / 2) * toward - away * row(g2 / 4)
    slope = -row(inner_rate * c) * toward
    # the second event of a sliding neuron: c comes to rest
    rest = row(slides) & (jnp.arange(2)[:, None] == 1)
    size = jnp.abs(c)
    meetings = first_root(
        jnp.where(rest, row(size * g2 / 4), second),
        jnp.where(rest, row(-jnp.sign(c) * outer_rate * work), slope),
        jnp.where(rest, row(size), away),
        row(g2),
    )
    time = clock_time(jnp.min(meetings, axis=0), g2)  # T grows with t, so the smaller T comes first
    first = meetings[0] <= meetings[1]
    # an event at the very end of the time left is left to the next sub-step, with new forces
    exits = (left > 0) & (time < left)
    step = jnp.where(exits, time, left)

    # 3. The motion in closed form: p' = -kp c G moves p along G only.
    c, shift = travel(c, work, g2, inner_rate, outer_rate, step)
    u, v = u - shift * force_u, v - shift * force_v

    # 4. On a ray <x~, p> = 0 holds exactly, so the position is projected on it; only on arrival, since the projection
    # would drift if it were repeated.
    arrives = exits & ~slides
    met, x = jnp.where(first, lower, region), jnp.where(first, x_low, x_high)
    on_line = (u - x * v) / (1 + x**2)  # the point of the line nearest to p is on_line (1, -x)
    # The line of a sample consists of two opposite rays. A region bounded by both is a half plane, which there is only
    # for a single sample: then the side on which p arrives says which of the two was met.
    behind = (on_line < 0) == (met < half)
    met = jnp.where(behind & (on_line != 0), _opposite(met, total), met)
    through = exits & slides & first  # p = 0
    halts = exits & slides & ~first  # c = 0
    opposite = _opposite(origin, total)
    ray = jnp.where(arrives, met, jnp.where(slides, jnp.where(through, opposite, origin), -1))
    kind = jnp.where(through, ZERO, jnp.where(halts, REST, RAY))
    kind = jnp.where(exits, kind, TIME).astype(jnp.int32)
    sample = _sample(jnp.maximum(ray, 0), half)
    returns = arrives & (origin >= 0) & (_sample(origin, half) == sample)
    moving = Moving(
        jnp.where(arrives, on_line, jnp.where(through, 0.0, u)),
        jnp.where(arrives, -x * on_line, jnp.where(through, 0.0, v)),
        jnp.where(halts, 0.0, c),
        jnp.where(exits, left - step, 0.0),
    )
    # beyond the origin every other sample has changed sides; which side of its ray is taken is decided there
    beyond = jnp.where(through, _beside(opposite, total)[0], region)
    flight = Flight(left > 0, slides, returns, region, sample, kind, step)
    return MovingNeurons(moving, beyond, ray, arrives), flight


def advance(task: Task) -> tuple[MovingNeurons, Flight, Counts]:
    """Carry every neuron over one event: decide at the ray, then move to the next ray or to the end of its time.

    All is computed for every neuron; those without time left stay as they are.
    """
    neurons, rates, _, tables = task
    moving = neurons.moving.left > 0
    decision = _decide(neurons, tables, rates.inner, rates.outer)
    started = neurons._replace(region=jnp.where(moving, decision.entered, neurons.region))
    moved, found = _fly(started, decision, rates, tables)
    counts = _count(neurons, decision, found.kind == ZERO, moving & rates.is_real)
    return jax.tree.map(lambda old, new: jnp.where(moving, new, old), neurons, moved), found, counts


def carry(before: Moving, flight: Flight, rates: Rates, field: Field) -> Moving:
    """Return the neurons behind an event that is known, as a smooth function of those before it.

    The motion lasts a time that is held constant. Where it ends in an event, a root of z(t) = 0, the neuron moves on
    for the zero time dt = -z(t)/z'(t), with z' held constant: one step of Newton's method, whose derivative is that of
    the root. Otherwise the time is all that was left, and dt is what that differs from its own value, zero again.
    """
    inner_rate, outer_rate, _ = rates
    held = jax.lax.stop_gradient
    u0, v0, c0, left = before
    slides, time = flight.slides, flight.time
    arrives, through, halts = (flight.kind == k for k in (RAY, ZERO, REST))

    # The constant force of the motion: that of the region, or for sliding neurons its projection on the ray.
    look = lambda table, index: table.at[index].get(mode="promise_in_bounds")
    # a column at a time: the sums of their slopes by region are then one-dimensional
    force_u, force_v = look(field.forces[:, 0], flight.region), look(field.forces[:, 1], flight.region)
    x = look(field.x, flight.sample)
    inverse = 1 / (1 + x * x)
    on_line = lambda u, v: (u - x * v) * inverse  # the point of the line nearest to (u, v) is on_line (1, -x)
    along = on_line(force_u, force_v)
    force_u, force_v = jnp.where(slides, along, force_u), jnp.where(slides, -x * along, force_v)
    # The motion, for the time that the event took, as a smooth function of where it began.
    work = u0 * force_u + v0 * force_v
    g2 = inner_rate * outer_rate * (force_u**2 + force_v**2)
    c, shift = travel(c0, work, g2, inner_rate, outer_rate, time)
    u, v = u0 - shift * force_u, v0 - shift * force_v

    # The function of time that vanishes at the event, and its rate there: the height above the ray for one that
    # arrives, <(1, -x), p>/|x~|^2 for one that passes p = 0, and c for one that comes to rest.
    normal = x * force_u + force_v
    # a neuron that returns to the ray it has left began exactly on it
    height = jnp.where(flight.returns, 0.0, x * u0 + v0) - shift * normal
    speed_p, speed_c = held(-inner_rate * c), held(-outer_rate * (u * force_u + v * force_v))
    root = jnp.where(arrives, height, jnp.where(through, on_line(u, v), c))
    speed = jnp.where(halts, speed_c, speed_p * held(jnp.where(arrives, normal, along)))
    exits = flight.kind != TIME
    later = jnp.where(exits, -safe_divide(root, speed), left)
    later = later - held(later)  # zero but for its derivative: the values are those that were reached
    u, v, c = u + later * speed_p * held(force_u), v + later * speed_p * held(force_v), c + later * speed_c
    nearest = on_line(u, v)
    return Moving(
        jnp.where(arrives, nearest, jnp.where(through, 0.0, u)),
        jnp.where(arrives, -x * nearest, jnp.where(through, 0.0, v)),
        jnp.where(halts, 0.0, c),
        jnp.where(exits, left - time - later, 0.0),
    )


def soft_drift(
    r: Float[Array, "*m"], pull: Float[Array, "*m"], strength: Float[Array, ""], time: Float[Array, ""]
) -> Float[Array, "*m"]:
    """Return r at ``time`` for r' = -(pull + strength sign r), the motion of an amplitude under a penalty on |r|.

    The motion is linear; by the Filippov rule r sticks at 0 while |pull| <= strength.
    """
    # from r = 0 it can only leave in the direction -pull
    sign = jnp.where(r == 0, -jnp.sign(pull), jnp.sign(r))
    speed = pull + strength * sign
    towards = speed * sign > 0
    ahead = r - speed * time
    # If it reaches 0 on the way, it has spent the time r / speed. With |pull| > strength it goes on to the other side,
    # where the penalty has the other sign; otherwise it stays at 0.
    arrives = towards & (ahead * sign <= 0)
    spent = jnp.where(arrives, safe_divide(r, jnp.where(arrives, speed, 1.0)), 0.0)
    beyond = jnp.where(jnp.abs(pull) > strength, -(pull - strength * sign) * (time - spent), 0.0)
    stuck = (r == 0) & (jnp.abs(pull) <= strength)
    return jnp.where(stuck, 0.0, jnp.where(arrives, beyond, ahead))
