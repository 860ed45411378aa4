"""Exact motion of univariate ReLU neurons in a frozen force table, through kinks, by the Filippov rule.

The sliding solver freezes the residual for a sub-step. Then neurons no longer see each other, and this module moves
each one from event to event in closed form; an event is the moment at which a neuron meets the ray of a sample, where
its velocity jumps. ``freeze`` tabulates the forces, ``advance`` carries every neuron over one event, ``run`` repeats
that. The rule at a ray is in ``_decide``, the next event in ``_chart_course``, the closed form in ``_travel``.

**Between events.** Write p = (a, -b) for the inner weights of a neuron, c for the outer one, and kp, kc for the rates
at which the two layers learn (``inner_rate`` and ``outer_rate`` below). In region R the force G = G_R is constant, and

    p' = -kp c G,    c' = -kc <G, p>

is a straight line along G, covered with hyperbolic time. The neuron meets the ray of sample j when <x~_j, p> = 0, where
x~ = (x, 1). With H = <x~_j, G>, S = <p, G>, Z = <x~_j, p>, g^2 = kp kc |G|^2 and T = 2 tanh(g t/2)/g that is

    (kp kc H S/2 - Z g^2/4) T^2 - kp H c T + Z = 0,

a quadratic equation that is regular at G = 0 (``first_root``, ``clock_time``).

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

from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from meanflow._numerics import safe_divide, safe_sqrt
from meanflow.univariate import forces
from meanflow.univariate.rays import normal_forces, sample_rays

SMALL = 4096  # up to this many neurons all are moved together in every event
BLOCKS = 32  # beyond, neurons with events left are gathered, 1/BLOCKS of all at a time


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


class Counts(NamedTuple):
    """How many events there have been so far, one integer for each kind.

    Attributes:
        crossings: a neuron went through a ray into another region.
        captures: a neuron arrived on a ray and began to slide.
        releases: a sliding neuron left its ray.
        deaths: a neuron entered the region in which no sample is active.
        nonunique: the Filippov rule left the decision open.
    """

    crossings: Int[Array, ""]
    captures: Int[Array, ""]
    releases: Int[Array, ""]
    deaths: Int[Array, ""]
    nonunique: Int[Array, ""]


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


Progress: TypeAlias = tuple[Int[Array, ""], MovingNeurons, Counts]  # turns so far, neurons, events so far


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


def _series(v: Float[Array, "*n"], start: int, terms: int) -> Float[Array, "*n"]:
    """Return the sum of v^n / (2n + start)! over n < ``terms``."""
    total, factor = jnp.zeros_like(v), 1.0
    coefficients = []
    for i in range(1, start + 1):
        factor /= i
    for n in range(terms):
        coefficients.append(factor)
        factor /= (2 * n + start + 1) * (2 * n + start + 2)
    for value in reversed(coefficients):
        total = total * v + value
    return total


def hyperbolic(v: Float[Array, "*n"]) -> tuple[Float[Array, "*n"], Float[Array, "*n"]]:
    """Return sinh(w)/w and (cosh(w) - 1)/w^2 as smooth functions of v = w^2 >= 0."""
    # the closed forms divide 0 by 0 at w = 0 and have no derivative there: small arguments go by the series
    small = v < 0.25
    w = jnp.sqrt(jnp.where(small, 1.0, v))
    inner = jnp.where(small, v, 0.0)
    grown = jnp.exp(w / 2)
    half = (grown - 1 / grown) / 2  # sinh(w/2)
    sine = jnp.where(small, _series(inner, 1, 8), half * (grown + 1 / grown) / w)
    cosine = jnp.where(small, _series(inner, 2, 8), 2 * (half / w) ** 2)
    return sine, cosine


def arctanh_ratio(v: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Return artanh(w)/w as a smooth function of v = w^2 in [0, 1)."""
    small = v < 0.03
    w = jnp.sqrt(jnp.where(small, 0.25, v))
    inner = jnp.where(small, v, 0.0)
    total = jnp.zeros_like(v)
    for n in reversed(range(11)):
        total = total * inner + 1.0 / (2 * n + 1)
    return jnp.where(small, total, jnp.arctanh(w) / w)


def first_root(
    a: Float[Array, "*n"], b: Float[Array, "*n"], z: Float[Array, "*n"], g2: Float[Array, "*n"]
) -> Float[Array, "*n"]:
    """Return the first zero T > 0 of a T^2 + b T + z that has g T < 2, or inf if there is none.

    A neuron that leaves the ray it is on (z = 0, b >= 0) is not held back: the root at 0 is skipped. Entries
    without a root are masked before anything is divided, so that derivatives stay finite.

    Args:
        a, b, z: coefficients, with z >= 0.
        g2: g^2; g T = 2 tanh(g t/2) is below 2 at every time t.
    """
    square = b * b - 4 * a * z
    falling = b < 0
    real = (square >= 0) & (falling | (a < 0))
    root = safe_sqrt(jnp.where(real, square, 1.0))
    # of the two forms of the quadratic formula each sign of b has one that does not cancel
    top = jnp.where(falling, 2 * z, b + root)
    bottom = jnp.where(real, jnp.where(falling, root - b, -2 * a), 1.0)
    scaled = top / bottom
    return jnp.where(real & (g2 * scaled**2 < 4), scaled, jnp.inf)


def clock_time(scaled: Float[Array, "*n"], g2: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Return the time t at which 2 tanh(g t/2)/g equals ``scaled``; inf for inf."""
    good = jnp.isfinite(scaled)
    known = jnp.where(good, scaled, 0.0)
    return jnp.where(good, known * arctanh_ratio(g2 * known**2 / 4), jnp.inf)


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


def _tally(event: Bool[Array, " m"], counted: Bool[Array, " m"]) -> Int[Array, ""]:
    return jnp.sum(event & counted, dtype=jnp.int32)


def _count(counts: Counts, neurons: MovingNeurons, decision: _Decision, counted: Bool[Array, " m"]) -> Counts:
    """Add the decisions at rays to the counters, for the neurons that are ``counted``."""
    crosses = decision.leaves & neurons.fresh & (decision.entered != neurons.region)
    freed = decision.leaves & ~neurons.fresh
    return Counts(
        counts.crossings + _tally(crosses, counted),
        counts.captures + _tally(decision.slides & neurons.fresh, counted),
        counts.releases + _tally(freed, counted),
        counts.deaths + _tally((crosses | freed) & (decision.entered == 0), counted),
        counts.nonunique + _tally(decision.at & decision.repels, counted),
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


def _travel(
    neurons: MovingNeurons, course: _Course, inner_rate: Float[Array, " m"], outer_rate: Float[Array, " m"]
) -> tuple[Float[Array, " m"], Float[Array, " m"], Float[Array, " m"]]:
    """Return (u, v, c) at the end of the course, by the closed form."""
    sine, cosine = hyperbolic(course.g2 * course.step**2)
    sine, cosine = course.step * sine, course.step**2 * cosine
    shift = inner_rate * (neurons.c * sine - outer_rate * course.work * cosine)
    c = neurons.c + neurons.c * course.g2 * cosine - outer_rate * course.work * sine
    return neurons.u - shift * course.force_u, neurons.v - shift * course.force_v, c


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


def advance(
    neurons: MovingNeurons,
    counts: Counts,
    field: Field,
    inner_rate: Float[Array, " m"],
    outer_rate: Float[Array, " m"],
    is_real: Bool[Array, " m"],
) -> tuple[MovingNeurons, Counts]:
    """Carry every neuron over one event: decide at the ray, then move to the next ray or to the end of its time.

    Args:
        neurons: current state; ``left`` = 0 marks those that are done and stay as they are.
        counts: event counters, which are increased.
        field: frozen forces.
        inner_rate, outer_rate: (m,) rates kp and kc at which (a, b) and c learn; 0 where a layer is frozen.
        is_real: (m,) False for padding, whose events are not counted.

    Returns:
        The neurons after the event, and the counters.
    """
    moving = neurons.left > 0
    decision = _decide(neurons, field, inner_rate, outer_rate)
    counts = _count(counts, neurons, decision, moving & is_real)
    started = neurons._replace(region=jnp.where(moving, decision.entered, neurons.region))
    course = _chart_course(started, decision, field, inner_rate, outer_rate)
    end = _travel(started, course, inner_rate, outer_rate)
    moved, through = _arrive(started, decision, course, field, end)
    counts = counts._replace(nonunique=counts.nonunique + _tally(through, moving & is_real))
    return jax.tree.map(lambda old, new: jnp.where(moving, new, old), neurons, moved), counts


def run(
    neurons: MovingNeurons,
    counts: Counts,
    field: Field,
    inner_rate: Float[Array, " m"],
    outer_rate: Float[Array, " m"],
    is_real: Bool[Array, " m"],
    max_events: int | None,
) -> tuple[MovingNeurons, Counts, Bool[Array, ""]]:
    """Carry all neurons through all events of a sub-step; arguments as for ``advance``.

    Args:
        max_events: None for loops that run until no neuron has time left, with at most 2s + 2 events for each; or the
            length of a scan, which reverse mode can pass through. Turns in which nobody moves cost nothing.

    Returns:
        The neurons, the counters, and whether a real neuron has time left after the last allowed event.
    """
    cap = field.x.shape[0] + 2
    if max_events is None:
        many = neurons.left.shape[0] > SMALL
        if many:  # all move once together; a small cloud does so in the loop, which compiles one copy less
            neurons, counts = advance(neurons, counts, field, inner_rate, outer_rate, is_real)
        neurons, counts = _finish(neurons, counts, field, (inner_rate, outer_rate, is_real), cap - many)
    else:

        def attempt(
            state: tuple[MovingNeurons, Counts], _: None
        ) -> tuple[tuple[MovingNeurons, Counts], None]:
            turn = lambda u: advance(u[0], u[1], field, inner_rate, outer_rate, is_real)
            return jax.lax.cond(jnp.any(state[0].left > 0), turn, lambda u: u, state), None

        (neurons, counts), _ = jax.lax.scan(attempt, (neurons, counts), length=max_events)
    return neurons, counts, jnp.any((neurons.left > 0) & is_real)


def _finish(
    neurons: MovingNeurons,
    counts: Counts,
    field: Field,
    constants: tuple[Float[Array, " m"], Float[Array, " m"], Bool[Array, " m"]],
    cap: int,
) -> tuple[MovingNeurons, Counts]:
    """Carry every neuron over at most ``cap`` further events; ``constants`` are (inner_rate, outer_rate, is_real).

    In large clouds few neurons have any events left: these are gathered in blocks, so that the rest costs nothing.
    """
    size = neurons.left.shape[0]
    block = size if size <= SMALL else size // BLOCKS
    none = jnp.zeros((), jnp.int32)

    def unfinished(carry: Progress) -> jax.Array:
        # a block that runs into the cap keeps its time left; the round limit then ends the loop
        return jnp.any(carry[1].left > 0) & (carry[0] < 2 * BLOCKS)

    def work(carry: Progress) -> Progress:
        rounds, everyone, counts = carry
        if block == size:
            chosen, own = everyone, constants
        else:
            index = jnp.nonzero(everyone.left > 0, size=block, fill_value=size)[0]
            take = lambda u: jnp.take(u, index, mode="fill", fill_value=0)
            chosen, own = jax.tree.map(take, (everyone, constants))

        def go(inner: Progress) -> Progress:
            return inner[0] + 1, *advance(inner[1], inner[2], field, *own)

        going = lambda inner: (inner[0] < cap) & jnp.any(inner[1].left > 0)
        _, chosen, counts = jax.lax.while_loop(going, go, (none, chosen, counts))
        if block == size:
            return rounds + 2 * BLOCKS, chosen, counts
        put = lambda u, v: u.at[index].set(v, mode="drop")
        return rounds + 1, jax.tree.map(put, everyone, chosen), counts

    _, neurons, counts = jax.lax.while_loop(unfinished, work, (none, neurons, counts))
    return neurons, counts


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
