"""Exact motion of univariate ReLU neurons in a frozen force table, through kinks, by the Filippov rule.

While the residual is frozen, a neuron (p, c) in region R moves by p' = -kp c G, c' = -kc <G, p> with constant G = G_R:
a straight line along G, covered with hyperbolic time. It meets the ray of sample j when <x~_j, p> = 0; with
H = <x~_j, G>, S = <p, G>, Z = <x~_j, p>, g^2 = kp kc |G|^2 and T = 2 tanh(g t/2)/g that is the quadratic equation

    (kp kc H S/2 - Z g^2/4) T^2 - kp H c T + Z = 0,

regular at G = 0. At the ray the normal speed is z'_- = -kp c H_- on the side where the sample is inactive and z'_+ =
-kp c H_+ on the other: the neuron slides if z'_- > 0 >= z'_+, crosses if both have one sign, and on a repulsor
(z'_- < 0 < z'_+) has no unique future; it then takes the inactive side, as relu'(0) = 0 does, and the event is counted.
Sliding is the same motion with G projected on the ray; it ends when the table changes, when c passes 0 (delta < 0)
or when p passes 0 (delta > 0). At p = 0 all regions meet, the dead one among them, and the future is not unique (plain
descent may die there); the neuron goes on along the opposite ray if it is let, and the event is counted.

Region and ray are state, never inferred from the angle. Only the two rays that bound a region are tested, so there
is no m x s array.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from meanflow._numerics import safe_divide, safe_sqrt
from meanflow.univariate import forces
from meanflow.univariate.rays import normal_forces, sample_rays

SMALL = 4096  # up to this many neurons all are moved together in every event
BLOCKS = 32  # beyond, neurons with events left are gathered, 1/BLOCKS of all at a time


class Neurons(NamedTuple):
    """Neurons in motion, arrays of shape (m,): position p = (u, v), ``c``, ``region``, ``ray`` (the ray they sit on, or
    -1), ``fresh`` (whether they have just arrived there), ``left`` (the time still to go).
    """

    u: jax.Array
    v: jax.Array
    c: jax.Array
    region: jax.Array
    ray: jax.Array
    fresh: jax.Array
    left: jax.Array


class Counts(NamedTuple):
    """Events so far, as integers: regions entered through a ray, neurons caught by a ray, set free, gone to the dead
    region, and decisions that the Filippov rule leaves open."""

    crossings: jax.Array
    captures: jax.Array
    releases: jax.Array
    deaths: jax.Array
    nonunique: jax.Array


class Field(NamedTuple):
    """Frozen forces per region and ray, arrays of shape (2s,).

    ``force_u``, ``force_v``: the force in each region. ``idle``, ``busy``: normal force <x~, G> on the two sides of
    each ray, ``along`` the common tangential force. ``x``, ``ray_u``, ``ray_v``: sample and unit vector of the ray.
    ``to_idle``, ``to_busy``: regions on its two sides.
    """

    force_u: jax.Array
    force_v: jax.Array
    idle: jax.Array
    busy: jax.Array
    along: jax.Array
    x: jax.Array
    ray_u: jax.Array
    ray_v: jax.Array
    to_idle: jax.Array
    to_busy: jax.Array


def freeze(x: jax.Array, g: jax.Array) -> Field:
    """The field of the covector g (s,) at sorted samples x (s,). O(s)."""
    rays = sample_rays(x)
    table = forces.region_forces(g, x)
    idle, busy = normal_forces(rays, table)
    along = jnp.sum(rays.direction * table[rays.idle], axis=-1)
    return Field(
        *(table[:, 0], table[:, 1], idle, busy, along, rays.normal[:, 0]),
        *(rays.direction[:, 0], rays.direction[:, 1], rays.idle, rays.busy),
    )


def _series(v: jax.Array, start: int, terms: int) -> jax.Array:
    """sum_n v^n / (2n + start)!, n < terms."""
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


def hyperbolic(v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """sinh(w)/w and (cosh(w) - 1)/w^2 as smooth functions of v = w^2 >= 0."""
    small = v < 0.25
    w = jnp.sqrt(jnp.where(small, 1.0, v))
    inner = jnp.where(small, v, 0.0)
    grown = jnp.exp(w / 2)
    half = (grown - 1 / grown) / 2  # sinh(w/2)
    sine = jnp.where(small, _series(inner, 1, 8), half * (grown + 1 / grown) / w)
    cosine = jnp.where(small, _series(inner, 2, 8), 2 * (half / w) ** 2)
    return sine, cosine


def arctanh_ratio(v: jax.Array) -> jax.Array:
    """artanh(w)/w as a smooth function of v = w^2 in [0, 1)."""
    small = v < 0.03
    w = jnp.sqrt(jnp.where(small, 0.25, v))
    inner = jnp.where(small, v, 0.0)
    total = jnp.zeros_like(v)
    for n in reversed(range(11)):
        total = total * inner + 1.0 / (2 * n + 1)
    return jnp.where(small, total, jnp.arctanh(w) / w)


def first_root(a: jax.Array, b: jax.Array, z: jax.Array, g2: jax.Array) -> jax.Array:
    """First zero T after 0 of a T^2 + b T + z, for z >= 0, with g T < 2; inf if there is none.

    A neuron that leaves the ray it is on (z = 0, b >= 0) is not held back: the root at 0 is skipped. Entries
    without a root are masked before anything is divided, so that derivatives stay finite.
    """
    square = b * b - 4 * a * z
    falling = b < 0
    real = (square >= 0) & (falling | (a < 0))
    root = safe_sqrt(jnp.where(real, square, 1.0))
    top = jnp.where(falling, 2 * z, b + root)
    bottom = jnp.where(real, jnp.where(falling, root - b, -2 * a), 1.0)
    scaled = top / bottom
    return jnp.where(real & (g2 * scaled**2 < 4), scaled, jnp.inf)


def clock_time(scaled: jax.Array, g2: jax.Array) -> jax.Array:
    """t with T = 2 tanh(g t/2)/g; inf for T = inf."""
    good = jnp.isfinite(scaled)
    known = jnp.where(good, scaled, 0.0)
    return jnp.where(good, known * arctanh_ratio(g2 * known**2 / 4), jnp.inf)


def advance(
    neurons: Neurons, counts: Counts, field: Field, kp: jax.Array, kc: jax.Array, real: jax.Array
) -> tuple[Neurons, Counts]:
    """One event for every neuron that has time left: decide at the ray, then move to the next ray or to the end.

    Args:
        neurons: current state; ``left`` = 0 marks those that are done and stay as they are.
        counts: event counters, increased.
        field: frozen forces.
        kp, kc: (m,) factors of the two layers.
        real: (m,) False for padding, whose events are not counted.
    """
    u, v, c, region, ray, fresh, left = neurons
    total = field.x.shape[0]
    s = total // 2
    moving = left > 0

    # 1. neurons on a ray: slide, cross, die, or no unique future
    at = ray >= 0
    b = jnp.maximum(ray, 0)
    ray_u, ray_v, along = field.ray_u[b], field.ray_v[b], field.along[b]
    reach = u * ray_u + v * ray_v
    # the sign that c is about to have, if it is 0 now
    c_next = jnp.where(c == 0, -kc * reach * along, c)
    idle_speed = -kp * c_next * field.idle[b]
    busy_speed = -kp * c_next * field.busy[b]
    holds = ((idle_speed > 0) & (busy_speed <= 0)) | ((idle_speed == 0) & (busy_speed == 0))
    repels = (idle_speed < 0) & (busy_speed > 0)
    # p = 0 and the opposite ray pushes back as well: the neuron is dead
    inward = holds & (reach <= 0) & (kp * c_next * along > 0)
    slides = at & holds & ~inward
    leaves = at & ~slides
    target = jnp.where((idle_speed > 0) & (busy_speed > 0), field.to_busy[b], field.to_idle[b])
    entered = jnp.where(leaves, jnp.where(inward, 0, target), region)

    def tally(event: jax.Array) -> jax.Array:
        return jnp.sum(event & moving & real, dtype=jnp.int32)

    crosses = leaves & fresh & (entered != region)
    freed = leaves & ~fresh
    counts = Counts(
        counts.crossings + tally(crosses),
        counts.captures + tally(slides & fresh),
        counts.releases + tally(freed),
        counts.deaths + tally((crosses | freed) & (entered == 0)),
        counts.nonunique + tally(at & repels),
    )
    region = jnp.where(moving, entered, region)

    # 2. force and time to the next event
    force_u = jnp.where(slides, along * ray_u, field.force_u[region])
    force_v = jnp.where(slides, along * ray_v, field.force_v[region])
    g2 = kp * kc * (force_u**2 + force_v**2)
    work = u * force_u + v * force_v

    def meet(ahead: jax.Array, active: jax.Array) -> tuple[jax.Array, jax.Array]:
        side = jnp.where(active, 1.0, -1.0).astype(c.dtype)
        # the same stored numbers as in step 1, so that both steps agree on every sign
        normal_force = side * jnp.where(active, field.busy[ahead], field.idle[ahead])
        height = side * (field.x[ahead] * u + v)
        return normal_force, jnp.where(leaves & (ahead == ray), 0.0, jnp.maximum(height, 0.0))

    lower = jnp.where(region == 0, total - 1, region - 1)
    force_low, height_low = meet(lower, (region >= 1) & (region <= s))
    force_high, height_high = meet(region, region >= s)
    # sliding: one event is p = 0, <d, p> in the place of <x~, p>; the other c = 0, c (1 + g^2 T^2/4) = kc S T
    force_low = jnp.where(slides, along, force_low)
    height_low = jnp.where(slides, reach, height_low)
    sign = jnp.sign(c)
    one = first_root(
        kp * kc * force_low * work / 2 - height_low * g2 / 4, -kp * force_low * c, height_low, g2
    )
    two = first_root(
        jnp.where(slides, sign * c * g2 / 4, kp * kc * force_high * work / 2 - height_high * g2 / 4),
        jnp.where(slides, -sign * kc * work, -kp * force_high * c),
        jnp.where(slides, sign * c, height_high),
        g2,
    )
    first = one <= two
    time = clock_time(jnp.minimum(one, two), g2)  # T grows with t, so the smaller T comes first
    exits = moving & (time < left)
    step = jnp.where(exits, time, left)

    # 3. move
    sine, cosine = hyperbolic(g2 * step**2)
    sine, cosine = step * sine, step**2 * cosine
    shift = kp * (c * sine - kc * work * cosine)
    u_new, v_new = u - shift * force_u, v - shift * force_v
    c_new = c + c * g2 * cosine - kc * work * sine

    # 4. arrive: positions are put on the ray, since z = 0 there exactly (only now: repeated, it would drift)
    arrives = exits & ~slides
    met = jnp.where(first, lower, region)
    # only with a single sample can either half of the line be met
    behind = field.ray_u[met] * u_new + field.ray_v[met] * v_new < 0
    met = jnp.where(behind, (met + s) % total, met)
    through = exits & slides & first  # p = 0
    halts = exits & slides & ~first  # c = 0
    opposite = (b + s) % total
    ray_new = jnp.where(arrives, met, jnp.where(slides, jnp.where(through, opposite, b), -1))
    line_u, line_v = field.ray_u[met], field.ray_v[met]
    on_line = u_new * line_u + v_new * line_v
    counts = counts._replace(nonunique=counts.nonunique + tally(through))
    new = Neurons(
        jnp.where(arrives, on_line * line_u, jnp.where(through, 0.0, u_new)),
        jnp.where(arrives, on_line * line_v, jnp.where(through, 0.0, v_new)),
        jnp.where(halts, 0.0, c_new),
        jnp.where(through, field.to_idle[opposite], region),  # there the other samples have changed sides
        ray_new,
        arrives,
        jnp.where(exits, left - step, 0.0),
    )
    return jax.tree.map(lambda old, now: jnp.where(moving, now, old), neurons, new), counts


def run(
    neurons: Neurons,
    counts: Counts,
    field: Field,
    kp: jax.Array,
    kc: jax.Array,
    real: jax.Array,
    max_events: int | None,
) -> tuple[Neurons, Counts, jax.Array]:
    """All events of a step. Returns the neurons, the counts and whether real neurons ran out of events.

    With ``max_events=None`` loops run until no neuron has time left, at most 2s + 2 events each; with a number
    it is a scan of that length, which reverse mode can pass through, and later turns cost nothing when idle.
    """

    cap = field.x.shape[0] + 2
    if max_events is None:
        many = neurons.left.shape[0] > SMALL
        if many:  # all move once together; a small cloud does so in the loop, which compiles one copy less
            neurons, counts = advance(neurons, counts, field, kp, kc, real)
        neurons, counts = _finish(neurons, counts, field, kp, kc, real, cap - many)
    else:

        def attempt(state: tuple[Neurons, Counts], _: None) -> tuple[tuple[Neurons, Counts], None]:
            turn = lambda u: advance(u[0], u[1], field, kp, kc, real)
            return jax.lax.cond(jnp.any(state[0].left > 0), turn, lambda u: u, state), None

        (neurons, counts), _ = jax.lax.scan(attempt, (neurons, counts), length=max_events)
    return neurons, counts, jnp.any((neurons.left > 0) & real)


def _finish(
    neurons: Neurons,
    counts: Counts,
    field: Field,
    kp: jax.Array,
    kc: jax.Array,
    real: jax.Array,
    cap: int,
) -> tuple[Neurons, Counts]:
    """At most ``cap`` further events. In large clouds the few neurons that have any are gathered in blocks, so that the
    rest costs nothing."""
    size = neurons.left.shape[0]
    block = size if size <= SMALL else size // BLOCKS

    def unfinished(carry: tuple) -> jax.Array:
        # a block that runs into the cap keeps its time left; the round limit then ends the loop
        return jnp.any(carry[1].left > 0) & (carry[0] < 2 * BLOCKS)

    def work(carry: tuple) -> tuple:
        rounds, everyone, counts = carry
        if block == size:
            chosen, own = everyone, (kp, kc, real)
        else:
            index = jnp.nonzero(everyone.left > 0, size=block, fill_value=size)[0]
            take = lambda u: jnp.take(u, index, mode="fill", fill_value=0)
            chosen, own = jax.tree.map(take, everyone), (take(kp), take(kc), take(real))

        def go(inner: tuple) -> tuple:
            return inner[0] + 1, *advance(inner[1], inner[2], field, *own)

        going = lambda inner: (inner[0] < cap) & jnp.any(inner[1].left > 0)
        _, chosen, counts = jax.lax.while_loop(going, go, (0, chosen, counts))
        if block == size:
            return rounds + 2 * BLOCKS, chosen, counts
        put = lambda u, v: u.at[index].set(v, mode="drop")
        return rounds + 1, jax.tree.map(put, everyone, chosen), counts

    _, neurons, counts = jax.lax.while_loop(unfinished, work, (0, neurons, counts))
    return neurons, counts


def soft_drift(r: jax.Array, pull: jax.Array, lam: jax.Array, time: jax.Array) -> jax.Array:
    """r(time) for r' = -(pull + lam sign r): linear, and by the same rule r sticks at 0 while |pull| <= lam."""
    sign = jnp.where(r == 0, -jnp.sign(pull), jnp.sign(r))
    speed = pull + lam * sign
    towards = speed * sign > 0
    ahead = r - speed * time
    arrives = towards & (ahead * sign <= 0)
    spent = jnp.where(arrives, safe_divide(r, jnp.where(arrives, speed, 1.0)), 0.0)
    beyond = jnp.where(jnp.abs(pull) > lam, -(pull - lam * sign) * (time - spent), 0.0)
    stuck = (r == 0) & (jnp.abs(pull) <= lam)
    return jnp.where(stuck, 0.0, jnp.where(arrives, beyond, ahead))
