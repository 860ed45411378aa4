"""Exact motion of univariate ReLU neurons in a frozen force table, through kinks, by the Filippov rule.

The sliding solver freezes the residual for a sub-step. Then neurons no longer see each other, and this module moves
each one from event to event in closed form; an event is the moment at which a neuron meets the ray of a sample, where
its velocity jumps. ``freeze`` tabulates the forces, ``advance`` carries every neuron over one event;
``kinks.passage`` repeats that. The rule at a ray is in ``_decide``, the next event in ``_chart_course``. This is the
motion of ``kinks.planes`` for x~ = (x, 1), where sorted samples spare the array of size neurons x samples.

**Between events.** Write p = (a, -b) for the inner weights of a neuron, c for the outer one, and kp, kc for the rates
at which the two layers learn. In region R the force G = G_R is constant, p' = -kp c G and c' = -kc <G, p>: the closed
form is in ``kinks.cell``. The neuron meets the ray of sample j when <x~_j, p> = 0.

**At a ray.** The normal speed is z'_- = -kp c H_- on the side where the sample is inactive and z'_+ = -kp c H_+ on the
other. The neuron slides along the ray if z'_- > 0 >= z'_+ and crosses it if both have one sign. On a repulsor
(z'_- < 0 < z'_+) it has no unique future: it takes the inactive side, as relu'(0) = 0 does, and the event is counted.
Sliding is the same motion with G projected on the ray. It ends when the table changes, when c passes 0 (balance
delta = c^2 - |p|^2 < 0) or when p passes 0 (delta > 0). At p = 0 all regions meet, the dead one among them, and the
future is again not unique (plain descent may die there): the neuron goes on along the opposite ray where the forces
allow it, and the event is counted.

Region and ray are part of the state, never inferred from the angle, which rounding may have moved. Only the two rays
that bound a region are tested, so there is no array of size neurons x samples.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from meanflow._numerics import safe_divide
from meanflow.flows.kinks.cell import clock_time, first_root, travel
from meanflow.flows.kinks.passage import Counts, Rates, tally
from meanflow.univariate import forces
from meanflow.univariate.rays import normal_forces, sample_rays


class MovingNeurons(NamedTuple):
    """Neurons on their way through a sub-step; every field has shape (m,).

    Attributes:
        u, v: the inner weights p = (u, v) = (a, -b).
        c: the outer weight.
        region: index of the activation region, in the order of ``forces``.
        ray: index of the ray on which the neuron sits, or -1.
        fresh: whether the neuron has just arrived on that ray.
        left: the time it still has to move; 0 for a neuron that is done.
    """

    u: Float[Array, " m"]
    v: Float[Array, " m"]
    c: Float[Array, " m"]
    region: Int[Array, " m"]
    ray: Int[Array, " m"]
    fresh: Bool[Array, " m"]
    left: Float[Array, " m"]


class Field(NamedTuple):
    """The frozen forces of every region and ray; all arrays have shape (2s,) for s samples.

    Attributes:
        force_u, force_v: the force G in each region.
        idle, busy: the normal force <x~, G> on the two sides of each ray, where its sample is inactive and active.
        along: the tangential force <ray, G>, which is the same on both sides.
        x: the sample of each ray.
        ray_u, ray_v: the unit vector of each ray.
        to_idle, to_busy: the regions on its two sides.
    """

    force_u: Float[Array, " rays"]
    force_v: Float[Array, " rays"]
    idle: Float[Array, " rays"]
    busy: Float[Array, " rays"]
    along: Float[Array, " rays"]
    x: Float[Array, " rays"]
    ray_u: Float[Array, " rays"]
    ray_v: Float[Array, " rays"]
    to_idle: Int[Array, " rays"]
    to_busy: Int[Array, " rays"]


def freeze(x: Float[Array, " s"], covector: Float[Array, " s"]) -> Field:
    """Tabulate the forces of the residual ``covector`` (s,) at sorted samples ``x`` (s,), in O(s)."""
    rays = sample_rays(x)
    table = forces.region_forces(covector, x)
    idle, busy = normal_forces(rays, table)
    along = jnp.sum(rays.direction * table[rays.idle], axis=-1)
    return Field(
        *(table[:, 0], table[:, 1], idle, busy, along, rays.normal[:, 0]),
        *(rays.direction[:, 0], rays.direction[:, 1], rays.idle, rays.busy),
    )


class _Decision(NamedTuple):
    """What the Filippov rule decides for neurons on a ray; the others have ``at`` False and keep their region.

    ``ray`` is 0 for neurons on no ray, so that it can be used as an index; ``ray_u``, ``ray_v`` is its unit vector,
    ``along`` the force along it, and ``reach`` = <ray, p> the distance from the origin.
    """

    at: Bool[Array, " m"]
    ray: Int[Array, " m"]
    ray_u: Float[Array, " m"]
    ray_v: Float[Array, " m"]
    along: Float[Array, " m"]
    reach: Float[Array, " m"]
    slides: Bool[Array, " m"]
    leaves: Bool[Array, " m"]
    repels: Bool[Array, " m"]
    entered: Int[Array, " m"]


class _Course(NamedTuple):
    """The motion up to the next event: its constant force, work = <p, G>, g2 = kp kc |G|^2, and where it ends.

    ``lower`` is the ray that bounds the region clockwise; ``first`` says whether the first of the two possible events
    comes first (that ray, or p = 0 for a sliding neuron), ``exits`` whether any comes within the time left.
    """

    force_u: Float[Array, " m"]
    force_v: Float[Array, " m"]
    work: Float[Array, " m"]
    g2: Float[Array, " m"]
    lower: Int[Array, " m"]
    first: Bool[Array, " m"]
    exits: Bool[Array, " m"]
    step: Float[Array, " m"]


def _decide(
    neurons: MovingNeurons, field: Field, inner_rate: Float[Array, " m"], outer_rate: Float[Array, " m"]
) -> _Decision:
    """Decide for each neuron on a ray whether it slides, crosses or dies."""
    at = neurons.ray >= 0
    ray = jnp.maximum(neurons.ray, 0)
    ray_u, ray_v, along = field.ray_u[ray], field.ray_v[ray], field.along[ray]
    reach = neurons.u * ray_u + neurons.v * ray_v
    # the sign that c is about to have, if it is 0 now
    c_next = jnp.where(neurons.c == 0, -outer_rate * reach * along, neurons.c)
    idle_speed = -inner_rate * c_next * field.idle[ray]
    busy_speed = -inner_rate * c_next * field.busy[ray]
    holds = ((idle_speed > 0) & (busy_speed <= 0)) | ((idle_speed == 0) & (busy_speed == 0))
    repels = (idle_speed < 0) & (busy_speed > 0)
    # p = 0 and the opposite ray pushes back as well: the neuron is dead
    inward = holds & (reach <= 0) & (inner_rate * c_next * along > 0)
    slides = at & holds & ~inward
    leaves = at & ~slides
    target = jnp.where((idle_speed > 0) & (busy_speed > 0), field.to_busy[ray], field.to_idle[ray])
    entered = jnp.where(leaves, jnp.where(inward, 0, target), neurons.region)
    return _Decision(at, ray, ray_u, ray_v, along, reach, slides, leaves, repels, entered)


def _count(neurons: MovingNeurons, decision: _Decision, counted: Bool[Array, " m"]) -> Counts:
    """Count the decisions at rays, for the neurons that are ``counted``."""
    crosses = decision.leaves & neurons.fresh & (decision.entered != neurons.region)
    freed = decision.leaves & ~neurons.fresh
    return Counts(
        tally(crosses, counted),
        tally(decision.slides & neurons.fresh, counted),
        tally(freed, counted),
        tally((crosses | freed) & (decision.entered == 0), counted),
        tally(decision.at & decision.repels, counted),
    )


def _chart_course(
    neurons: MovingNeurons,
    decision: _Decision,
    field: Field,
    inner_rate: Float[Array, " m"],
    outer_rate: Float[Array, " m"],
) -> _Course:
    """Find the force on each neuron, its next event and the time until then (at most the time left)."""
    u, v, c, region, _, _, left = neurons
    slides, along, reach = decision.slides, decision.along, decision.reach
    total = field.x.shape[0]
    force_u = jnp.where(slides, along * decision.ray_u, field.force_u[region])
    force_v = jnp.where(slides, along * decision.ray_v, field.force_v[region])
    both = inner_rate * outer_rate
    g2 = both * (force_u**2 + force_v**2)
    work = u * force_u + v * force_v

    def meet(ahead: Int[Array, " m"], active: Bool[Array, " m"]) -> tuple[jax.Array, jax.Array]:
        side = jnp.where(active, 1.0, -1.0).astype(c.dtype)
        # the same stored numbers as in _decide, so that both agree on every sign
        normal_force = side * jnp.where(active, field.busy[ahead], field.idle[ahead])
        height = side * (field.x[ahead] * u + v)
        just_left = decision.leaves & (ahead == neurons.ray)
        return normal_force, jnp.where(just_left, 0.0, jnp.maximum(height, 0.0))

    lower = jnp.where(region == 0, total - 1, region - 1)
    force_low, height_low = meet(lower, (region >= 1) & (region <= total // 2))
    force_high, height_high = meet(region, region >= total // 2)
    # sliding: one event is p = 0, <d, p> in the place of <x~, p>; the other c = 0, c (1 + g^2 T^2/4) = kc S T
    force_low = jnp.where(slides, along, force_low)
    height_low = jnp.where(slides, reach, height_low)
    sign = jnp.sign(c)
    one = first_root(
        both * force_low * work / 2 - height_low * g2 / 4, -inner_rate * force_low * c, height_low, g2
    )
    two = first_root(
        jnp.where(slides, sign * c * g2 / 4, both * force_high * work / 2 - height_high * g2 / 4),
        jnp.where(slides, -sign * outer_rate * work, -inner_rate * force_high * c),
        jnp.where(slides, sign * c, height_high),
        g2,
    )
    time = clock_time(jnp.minimum(one, two), g2)  # T grows with t, so the smaller T comes first
    exits = (left > 0) & (time < left)
    step = jnp.where(exits, time, left)
    return _Course(force_u, force_v, work, g2, lower, one <= two, exits, step)


def _arrive(
    neurons: MovingNeurons,
    decision: _Decision,
    course: _Course,
    field: Field,
    end: tuple[Float[Array, " m"], Float[Array, " m"], Float[Array, " m"]],
) -> tuple[MovingNeurons, Bool[Array, " m"]]:
    """Return the neurons at ``end`` = (u, v, c), on their rays, and which of them passed through p = 0.

    On a ray <x~, p> = 0 holds exactly, so the position is projected on it; only on arrival, since the projection would
    drift if it were repeated.
    """
    u, v, c = end
    total = field.x.shape[0]
    slides, exits = decision.slides, course.exits
    arrives = exits & ~slides
    met = jnp.where(course.first, course.lower, neurons.region)
    # only with a single sample can either half of the line be met
    behind = field.ray_u[met] * u + field.ray_v[met] * v < 0
    met = jnp.where(behind, (met + total // 2) % total, met)
    through = exits & slides & course.first  # p = 0
    halts = exits & slides & ~course.first  # c = 0
    opposite = (decision.ray + total // 2) % total
    ray = jnp.where(arrives, met, jnp.where(slides, jnp.where(through, opposite, decision.ray), -1))
    line_u, line_v = field.ray_u[met], field.ray_v[met]
    on_line = u * line_u + v * line_v
    moved = MovingNeurons(
        jnp.where(arrives, on_line * line_u, jnp.where(through, 0.0, u)),
        jnp.where(arrives, on_line * line_v, jnp.where(through, 0.0, v)),
        jnp.where(halts, 0.0, c),
        jnp.where(
            through, field.to_idle[opposite], neurons.region
        ),  # there the other samples have changed sides
        ray,
        arrives,
        jnp.where(exits, neurons.left - course.step, 0.0),
    )
    return moved, through


def advance(neurons: MovingNeurons, rates: Rates, field: Field) -> tuple[MovingNeurons, Counts]:
    """Carry every neuron over one event: decide at the ray, then move to the next ray or to the end of its time.

    Args:
        neurons: current state; ``left`` = 0 marks those that are done and stay as they are.
        rates: constants of each neuron.
        field: frozen forces.

    Returns:
        The neurons after the event, and how many events of each kind there were.
    """
    inner_rate, outer_rate, is_real = rates
    moving = neurons.left > 0
    decision = _decide(neurons, field, inner_rate, outer_rate)
    counts = _count(neurons, decision, moving & is_real)
    started = neurons._replace(region=jnp.where(moving, decision.entered, neurons.region))
    course = _chart_course(started, decision, field, inner_rate, outer_rate)
    c, shift = travel(neurons.c, course.work, course.g2, inner_rate, outer_rate, course.step)
    end = neurons.u - shift * course.force_u, neurons.v - shift * course.force_v, c
    moved, through = _arrive(started, decision, course, field, end)
    counts = counts._replace(nonunique=counts.nonunique + tally(through, moving & is_real))
    return jax.tree.map(lambda old, new: jnp.where(moving, new, old), neurons, moved), counts


def soft_drift(
    r: Float[Array, "*m"], pull: Float[Array, "*m"], strength: Float[Array, ""], time: Float[Array, ""]
) -> Float[Array, "*m"]:
    """Return r at ``time`` for r' = -(pull + strength sign r), the motion of an amplitude under a penalty on |r|.

    The motion is linear; by the Filippov rule r sticks at 0 while |pull| <= strength.
    """
    sign = jnp.where(r == 0, -jnp.sign(pull), jnp.sign(r))
    speed = pull + strength * sign
    towards = speed * sign > 0
    ahead = r - speed * time
    arrives = towards & (ahead * sign <= 0)
    spent = jnp.where(arrives, safe_divide(r, jnp.where(arrives, speed, 1.0)), 0.0)
    beyond = jnp.where(jnp.abs(pull) > strength, -(pull - strength * sign) * (time - spent), 0.0)
    stuck = (r == 0) & (jnp.abs(pull) <= strength)
    return jnp.where(stuck, 0.0, jnp.where(arrives, beyond, ahead))
