"""Neurons between the hyperplanes of the samples: what happens from one event to the next.

A sample x switches a neuron on or off where <x, b> = 0. ``arrange`` finds the hyperplanes of the data: samples that are
parallel share one, a zero sample has none. ``load`` puts the frozen residual on them: on its two sides a plane with
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
from meanflow.flows.kinks import cell, filippov
from meanflow.flows.kinks.passage import Counts

Vector = Float[Array, " m"]


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


class Load(NamedTuple):
    """The frozen forces, and the normals they act along.

    Attributes:
        normal: (n, d) the samples.
        live: (n,) which of them are planes.
        jump: (n,) J = R_+ - R_-.
        base: (d,) the force on the negative side of all planes.
        dies: whether neurons on that side of all planes feel nothing, a scalar.
    """

    normal: Float[Array, "n d"]
    live: Bool[Array, " n"]
    jump: Float[Array, " n"]
    base: Float[Array, " d"]
    dies: Bool[Array, ""]


class Walkers(NamedTuple):
    """Neurons on their way through a sub-step.

    Attributes:
        a, b: outer (m,) and inner (m, d) weights.
        force: (m, d) g, all contributions included.
        z: (m, n) <x, b> for every plane.
        side: (m, n) 1 or -1; 0 for planes the neuron sits on, and for entries that are not planes.
        slots: (m, k) the planes it sits on; n marks an empty slot.
        lam: (m, k) weight of the positive side in the force, for each slot.
        fresh: (m, k) whether the neuron has just arrived on the plane.
        at_zero: (m,) whether it has just passed through b = 0.
        left: (m,) the time it still has to move; negative if it ran out of slots.
    """

    a: Vector
    b: Float[Array, "m d"]
    force: Float[Array, "m d"]
    z: Float[Array, "m n"]
    side: Int[Array, "m n"]
    slots: Int[Array, "m k"]
    lam: Float[Array, "m k"]
    fresh: Bool[Array, "m k"]
    at_zero: Bool[Array, " m"]
    left: Vector


class Rates(NamedTuple):
    """Constants of each neuron: the rates at which its layers learn, and whether it counts."""

    inner: Vector
    outer: Vector
    is_real: Bool[Array, " m"]


def arrange(x: Float[Array, "n d"], block: int = 256) -> Planes:
    """Find the hyperplanes of samples ``x``: which are parallel to one before them, and which are zero. O(n^2 d)."""
    x = jax.lax.stop_gradient(x)
    n = x.shape[0]
    norm = safe_norm(x)
    unit = x / jnp.where(norm == 0, 1.0, norm)[:, None]
    eps = jnp.finfo(x.dtype).eps

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


def load(
    normal: Float[Array, "n d"],
    planes: Planes,
    covector: Float[Array, " n"],
    slopes: tuple[float, float],
) -> Load:
    """Put the residual ``covector`` (n,) on the planes; ``slopes`` are those of the activation below and above 0."""
    below, above = slopes
    weight = covector * planes.factor
    ahead = planes.factor > 0
    gather = lambda u: jax.ops.segment_sum(u, planes.plane, num_segments=normal.shape[0])
    positive = gather(weight * jnp.where(ahead, above, below))
    negative = gather(weight * jnp.where(ahead, below, above))
    dies = jnp.asarray(below == 0) & jnp.all(planes.factor >= 0)
    return Load(normal, planes.live, positive - negative, negative @ normal, dies)


def predictions(
    share: Vector, b: Float[Array, "m d"], z: Float[Array, "m n"], side: Int[Array, "m n"], planes: Planes,
    slopes: tuple[float, float], normal: Float[Array, "n d"],
) -> Float[Array, " n"]:  # fmt: skip
    """Return sum_i share_i s(<x_j, b_i>) for every sample, from the sides on which the neurons are."""
    below, above = slopes
    positive = jnp.sum(jnp.where(side > 0, z * share[:, None], 0.0), axis=0)
    negative = normal @ (share @ b) - positive
    positive, negative = positive[planes.plane], negative[planes.plane]
    ahead = planes.factor > 0
    with_up, with_down = jnp.where(ahead, positive, negative), jnp.where(ahead, negative, positive)
    return planes.factor * (above * with_up + below * with_down)


def tally(event: Bool[Array, "..."], counted: Bool[Array, " m"]) -> Int[Array, ""]:
    """Count events of the neurons that are ``counted``."""
    mask = counted if event.ndim == 1 else counted[:, None]
    return jnp.sum(event & mask, dtype=jnp.int32)


def at(table: Float[Array, "n *d"], slots: Int[Array, "m k"]) -> Float[Array, "m k *d"]:
    """Return the rows of ``table`` in the slots, 0 for empty ones."""
    return jnp.take(table, slots, axis=0, mode="fill", fill_value=0)


def advance(walkers: Walkers, rates: Rates, load: Load) -> tuple[Walkers, Counts]:
    """Carry every neuron with time left over one event: decide at its planes, then move to the next event."""
    decided, left_planes, normal_force, counts = _decide(walkers, rates, load)
    moved, through = _move(decided, left_planes, normal_force, rates, load)
    return moved, counts._replace(nonunique=counts.nonunique + tally(through, rates.is_real))


def glide(walkers: Walkers, rates: Rates, load: Load) -> tuple[Walkers, Counts]:
    """Move neurons that meet no plane to the end of their time, and leave all others where they are.

    A plane is met where the shift of b along g equals z / <x, g>. So the extremes of <x, g> / z over the planes, and
    those of the shift over the time, say whether there is an event, with one quotient for each plane and no root.
    """
    a, b, force, z, side, slots, _, _, _, left = walkers
    both = rates.inner * rates.outer
    work = jnp.sum(b * force, axis=-1)
    g2 = both * jnp.sum(force * force, axis=-1)
    normal_force = force @ load.normal.T
    time = jnp.maximum(left, 0.0)
    # the shift turns back where a passes 0
    own = jnp.sign(a)
    turn = cell.clock_time(cell.first_root(own * a * g2 / 4, -own * rates.outer * work, own * a, g2), g2)
    end, shift = cell.travel(a, work, g2, rates.inner, rates.outer, time)
    _, furthest = cell.travel(a, work, g2, rates.inner, rates.outer, jnp.minimum(turn, time))
    highest = jnp.maximum(jnp.maximum(shift, furthest), 0.0)
    lowest = jnp.minimum(jnp.minimum(shift, furthest), 0.0)
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
    return moved, Counts.none()


def _decide(
    walkers: Walkers, rates: Rates, load: Load
) -> tuple[Walkers, Int[Array, "m k"], Float[Array, "m n"], Counts]:
    """Apply the Filippov rule.

    Returns:
        The neurons, the planes they have just left (n for none), <x, g> for every plane, and the events.
    """
    n = load.normal.shape[0]
    slots, lam, force, b = walkers.slots, walkers.lam, walkers.force, walkers.b
    valid = (slots < n) & (walkers.left > 0)[:, None]
    normal, jump = at(load.normal, slots), at(load.jump, slots)
    gram = jnp.einsum("mkd,mld->mkl", normal, normal)
    without = force - jnp.einsum("mk,mkd->md", lam * jump, normal)
    pull = jnp.einsum("mkd,md->mk", normal, without)
    work = jnp.sum(b * force, axis=-1)
    # the sign that a is about to have, if it is 0 now; b is tangent to the planes, so they do not matter for it
    sign = jnp.sign(jnp.where(walkers.a == 0, -rates.outer * work, walkers.a))
    choice = filippov.decide(gram, jump, pull, safe_norm(without), valid, sign)
    slides = valid & (choice.state == filippov.SLIDES)
    leaves = valid & ~slides
    target = jnp.where(choice.state == filippov.ACTIVE, 1, -1).astype(walkers.side.dtype)
    rows = jnp.arange(slots.shape[0])[:, None]
    left_planes = jnp.where(leaves, slots, n)
    side = walkers.side.at[rows, left_planes].set(target, mode="drop")
    force = without + jnp.einsum("mk,mkd->md", jnp.where(valid, choice.lam, 0.0) * jump, normal)
    force = jnp.where(jnp.any(valid, axis=1)[:, None], force, walkers.force)

    # beyond b = 0: outward on the new ray, or rest
    normal_force = force @ load.normal.T
    speeds = jnp.where(load.live[None, :], side * normal_force * -sign[:, None], 0.0)
    backward = walkers.at_zero & (jnp.min(speeds, axis=1) < 0)
    side = jnp.where(backward[:, None], jnp.where(load.live[None, :], -1, 0).astype(side.dtype), side)
    force = jnp.where(backward[:, None], load.base[None, :], force)
    normal_force = jnp.where(backward[:, None], (load.normal @ load.base)[None, :], normal_force)
    slides = slides & ~backward[:, None]

    came = jnp.where(lam > 0.5, 1, -1)
    crosses = leaves & walkers.fresh & (target != came)
    freed = leaves & ~walkers.fresh
    alone = ~jnp.any(side > 0, axis=1) & ~jnp.any(slides, axis=1) & load.dies
    dies = (jnp.any(crosses | freed, axis=1) | backward) & alone
    counted = (walkers.left > 0) & rates.is_real
    counts = Counts(
        tally(crosses, counted),
        tally(slides & walkers.fresh, counted),
        tally(freed, counted),
        tally(dies, counted),
        tally(choice.nonunique, counted),
    )
    decided = walkers._replace(
        force=force,
        side=side,
        slots=jnp.where(valid & ~slides, n, slots),
        lam=jnp.where(valid, jnp.where(slides, choice.lam, 0.0), lam),
        fresh=jnp.zeros_like(walkers.fresh),
        at_zero=jnp.zeros_like(walkers.at_zero),
    )
    return decided, left_planes, normal_force, counts


def _move(
    walkers: Walkers,
    left_planes: Int[Array, "m k"],
    normal_force: Float[Array, "m n"],
    rates: Rates,
    load: Load,
) -> tuple[Walkers, Bool[Array, " m"]]:
    """Move every neuron to its next event or to the end of its time; return also who passed through b = 0.

    Neurons without time left keep their state: they move for no time.
    """
    a, b, force, z, side, slots, lam, _, _, left = walkers
    m, n = z.shape
    dim = b.shape[1]
    both = rates.inner * rates.outer
    work = jnp.sum(b * force, axis=-1)
    g2 = both * jnp.sum(force * force, axis=-1)
    planes = jnp.sum(slots < n, axis=1)
    slides = planes > 0
    on_line = (planes == dim - 1) & (dim > 1)

    # the next plane: found without derivatives, then its time once more with them
    sign = side.astype(z.dtype)
    height = jnp.maximum(sign * z, 0.0)

    def coefficients(toward: jax.Array, height: jax.Array, wide: bool) -> tuple[jax.Array, ...]:
        row = (lambda u: u[:, None]) if wide else (lambda u: u)
        second = row(both * work / 2) * toward - height * row(g2 / 4)
        return second, -row(rates.inner * a) * toward, height, row(g2)

    second, slope, constant, square = jax.lax.stop_gradient(coefficients(sign * normal_force, height, True))
    # a plane that was just left is not met again at once, whatever rounding says
    slope = slope.at[jnp.arange(m)[:, None], left_planes].max(0.0, mode="drop")
    watched = (side != 0) & ~on_line[:, None]
    hits = jnp.where(watched, cell.first_root(second, slope, constant, square), jnp.inf)
    ahead = jnp.argmin(hits, axis=1)
    pick = lambda u: jnp.take_along_axis(u, ahead[:, None], axis=1)[:, 0]
    meets = jnp.isfinite(pick(hits))
    second, slope, constant, _ = coefficients(pick(sign * normal_force), pick(height), False)
    just_left = jnp.any(left_planes == ahead[:, None], axis=1)
    slope = jnp.where(just_left, jnp.maximum(slope, 0.0), slope)
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
    first = jnp.minimum(to_plane, jnp.minimum(to_rest, to_zero))
    time = cell.clock_time(first, g2)
    exits = time < left
    step = jnp.where(exits, time, jnp.maximum(left, 0.0))

    a, shift = cell.travel(a, work, g2, rates.inner, rates.outer, step)
    b = b - shift[:, None] * force
    z = jnp.where(side == 0, 0.0, z - shift[:, None] * normal_force)
    arrives = exits & (to_plane <= first)
    through = exits & ~arrives & (to_zero <= first)
    halts = exits & ~arrives & ~through

    hit = arrives[:, None] & (jnp.arange(n)[None, :] == ahead[:, None])
    empty = slots >= n
    slot = arrives[:, None] & empty & (jnp.cumsum(empty, axis=1) == 1)
    lost = arrives & ~jnp.any(slot, axis=1)
    lam = jnp.where(slot, (pick(side) > 0).astype(lam.dtype)[:, None], lam)
    side = jnp.where(hit, 0, side).astype(side.dtype)
    side = jnp.where(through[:, None], -side, side)

    def refresh(force: jax.Array) -> jax.Array:
        turned = force_of(side, load) + jnp.einsum(
            "mk,mkd->md", lam * at(load.jump, slots), at(load.normal, slots)
        )
        return jnp.where(through[:, None], turned, force)

    force = jax.lax.cond(jnp.any(through), refresh, lambda u: u, force)
    moved = Walkers(
        jnp.where(halts, 0.0, a),
        jnp.where(through[:, None], 0.0, b),
        force,
        jnp.where(hit | through[:, None], 0.0, z),
        side,
        jnp.where(slot, ahead[:, None], slots).astype(slots.dtype),
        lam,
        slot,
        through,
        jnp.where(lost, -1.0, jnp.where(exits, left - step, jnp.minimum(left, 0.0))),
    )
    return moved, through


def force_of(side: Int[Array, "m n"], load: Load) -> Float[Array, "m d"]:
    """Return the force of all planes on whose sides the neurons are; those they sit on are left out."""
    return load.base[None, :] + jnp.where(side > 0, load.jump[None, :], 0.0) @ load.normal


def start(
    a: Vector,
    b: Float[Array, "m d"],
    z: Float[Array, "m n"],
    side: Int[Array, "m n"],
    slots: Int[Array, "m k"],
    time: Vector,
    load: Load,
) -> Walkers:
    """Return neurons that begin a sub-step; planes they sit on are decided anew, since the forces have changed."""
    lam = jnp.zeros(slots.shape, a.dtype)
    fresh = jnp.zeros(slots.shape, bool)
    return Walkers(a, b, force_of(side, load), z, side, slots, lam, fresh, jnp.zeros(a.shape, bool), time)
