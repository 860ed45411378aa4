"""Neurons under batch norm between the hyperplanes of the samples: what happens from one event to the next.

A neuron a s(b . x / |b|_S) with centered inputs x moves, in the frozen force g of its cell, by

    a' = -F,    b' = -(a/s) xi,    xi = g - (F/s) S b,    s = |b|_S,    F = g . b / s,

which turns b and keeps |b|. There is no closed form: from event to event the motion is one Runge-Kutta step of order
4, scaled back to |b|, and the time of an event is found by root finding along such steps. On hyperplanes the neuron
slides by the rule of ``filippov`` for the covector xi: g = g_0 + sum_k lam_k J_k x_k with the least |xi|. Since b is
tangent to the planes it sits on, F does not depend on lam; but lam varies as b turns, so that lam = 0 and lam = 1 are
events too. On the batch-norm manifold the metric makes the same motion of it, in the coordinates b/|b|_S.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from meanflow._numerics import safe_divide, safe_norm
from meanflow.flows._kinks import contacts, filippov
from meanflow.flows._kinks.contacts import Contacts, Decision, Forces, Kinks, force_of
from meanflow.flows._kinks.passage import Counts

ROOTS = 10  # steps of the search for the time of an event, by regula falsi with the Illinois rule
POLISH = 6  # steps of Newton's method for the times at which an interpolating cubic meets the planes
# the method of order 4: how far along the last rate each stage looks, and its weight, in steps
STAGES = ((0.0, 1 / 6), (0.5, 1 / 3), (0.5, 1 / 3), (1.0, 1 / 6))

Vector = Float[Array, " m"]
Heights = Float[Array, "m n"]


class Field(NamedTuple):
    """The frozen forces on the planes, and the covariance (d, d) that normalizes neurons."""

    forces: Forces
    covariance: Float[Array, "d d"]


class Turners(NamedTuple):
    """Neurons on their way through a sub-step.

    Attributes:
        a, b: outer (m,) and raw inner (m, d) weights.
        z: (m, n) <x, b> for every plane.
        contacts: on which side of each plane the neuron is, and on which planes it sits.
        freed: (m, k) the side to which it has just been set free, 1 or -1, as lam has come to a bound; 0 elsewhere.
        left: (m,) the time it still has to move; negative if it ran out of slots.
    """

    a: Vector
    b: Float[Array, "m d"]
    z: Float[Array, "m n"]
    contacts: Contacts
    freed: Int[Array, "m k"]
    left: Vector


class _Held(NamedTuple):
    """What is constant between two events: the force of all sides, and the planes that are slid on."""

    force: Float[Array, "m d"]
    kinks: Kinks
    free: Bool[Array, "m k"]
    table: Float[Array, "m k k"]


Rate = tuple[Vector, Float[Array, "m d"], Float[Array, "m k"]]


def _turn(b: Float[Array, "m d"], force: Float[Array, "m d"], covariance: jax.Array) -> tuple[jax.Array, ...]:
    """Return s, F and xi, without planes that are slid on."""
    # s = |b|_S (m,), F = g.b/s (m,), xi = g - (F/s) S b (m, d): <xi, b> = g.b - F s = 0, which keeps |b|
    image = b @ covariance
    scale = jnp.sqrt(jnp.sum(b * image, axis=-1))
    work = jnp.sum(b * force, axis=-1) / scale
    return scale, work, force - (work / scale)[:, None] * image


def _rate(a: Vector, b: Float[Array, "m d"], held: _Held, covariance: jax.Array) -> Rate:
    """Return a', b' and lam."""
    scale, work, turn = _turn(b, held.force, covariance)
    # lam solves <x_k, xi> = 0 on the planes that are slid on, so that b' has no part along their normals
    pull = contacts.pull(held.kinks, turn)
    mixed = filippov.hold(held.kinks.gram, held.free, held.table, pull)
    lam = mixed / jnp.where(held.free, held.kinks.jump, 1.0)
    turn = turn + contacts.along(held.kinks, lam)
    return -work, -(a / scale)[:, None] * turn, lam


def _step(
    a: Vector, b: Float[Array, "m d"], time: Vector, held: _Held, covariance: jax.Array
) -> tuple[Vector, Float[Array, "m d"]]:
    """Take one Runge-Kutta step of order 4, scaled back to |b|.

    The stages are a loop: a rate is what takes long to compile, and it stands in the program once and not four times.
    """

    def stage(carry: tuple, row: jax.Array) -> tuple[tuple, None]:
        (end, turned), (rate_a, rate_b) = carry
        reach, weight = row[0] * time, row[1] * time
        now = _rate(a + reach * rate_a, b + reach[:, None] * rate_b, held, covariance)[:2]
        return ((end + weight * now[0], turned + weight[:, None] * now[1]), now), None

    # the exact motion keeps |b|, the method only to its order: without the scaling |b| would drift over many steps
    still = (jnp.zeros_like(a), jnp.zeros_like(b))
    ((end, turned), _), _ = jax.lax.scan(stage, ((a, b), still), jnp.asarray(STAGES, a.dtype))
    return end, turned * safe_divide(safe_norm(b), safe_norm(turned))[:, None]


def advance(turners: Turners, is_real: Bool[Array, " m"], field: Field) -> tuple[Turners, Counts]:
    """Carry every neuron with time left over one event: decide at its planes, then move to the next event."""
    forces, covariance = field
    now, freed = turners.contacts, turners.freed
    kinks = contacts.touch(now, forces, turners.left > 0)
    # the rule works with xi instead of g: along it the neuron turns, and b is tangent to the planes it sits on
    force = force_of(now.side, forces)
    _, work, turn = _turn(turners.b, force, covariance)
    # a = 0: the sign it is about to have, as a' = -F
    sign = jnp.sign(jnp.where(turners.a == 0, -work, turners.a))
    # a plane whose lam has just come to a bound is left to that side; the rule is not asked again, since rounding
    # decides on which side of the bound it would find lam
    asked = kinks.valid & (freed == 0)
    choice = filippov.decide(
        kinks.gram, kinks.jump, contacts.pull(kinks, turn), safe_norm(force), asked, sign
    )
    state = jnp.where(freed == 0, choice.state, jnp.where(freed > 0, filippov.ACTIVE, filippov.INACTIVE))
    decision = contacts.take_sides(now, kinks, choice._replace(state=state))
    # g holds from now on: the planes left to their positive side add J x, those slid on come in through lam
    active = (decision.leaves & (decision.target > 0)).astype(force.dtype)
    held = _Held(force + contacts.along(kinks, active), kinks, decision.slides, choice.table)
    return _move(turners, decision, held, field, is_real)


def _move(
    turners: Turners, decision: Decision, held: _Held, field: Field, is_real: Bool[Array, " m"]
) -> tuple[Turners, Counts]:
    """Move every neuron to its next event or to the end of its time; those without time left stay."""
    forces, covariance = field
    a, b, z, before, _, left = turners
    side = decision.side
    m, n = z.shape
    k = before.slots.shape[1]
    time = jnp.maximum(left, 0.0)
    path = lambda when: _step(a, b, when, held, covariance)

    # a trial step over all the time left shows which events lie on the way
    # (times are found without derivatives; one Newton step at the end has them all)
    begin = jax.lax.stop_gradient(_rate(a, b, held, covariance))
    end_a, end_b = jax.lax.stop_gradient(path(time))
    finish = jax.lax.stop_gradient(_rate(end_a, end_b, held, covariance))
    sides = side.astype(z.dtype)
    # heights side * <x, b> (m, n) at both ends, and slopes over the whole step: the data of a cubic for each plane
    z0 = sides * jax.lax.stop_gradient(z)
    z1 = sides * (end_b @ forces.normal.T)
    v0, v1 = (sides * (rate[1] @ forces.normal.T) * time[:, None] for rate in (begin, finish))
    # a plane just left is not met again at once, nor for what rounding makes of a path along it
    rows, left_planes = jnp.arange(m)[:, None], jnp.where(decision.leaves, before.slots, n)
    v0 = v0.at[rows, left_planes].max(0.0, mode="drop")
    size = jnp.sqrt(jnp.sum(forces.normal**2, axis=1))[None, :] * safe_norm(b)[:, None]
    slack = 64 * jnp.finfo(z.dtype).eps * jax.lax.stop_gradient(size)
    allowed = jnp.zeros_like(z).at[rows, left_planes].set(1.0, mode="drop") * slack
    when = _first_meeting(z0, z1, v0, v1, allowed)
    when = jnp.where(side != 0, when, jnp.inf)
    ahead = jnp.argmin(when, axis=1)
    to_plane = jnp.min(when, axis=1)
    # when lam meets 0 or 1 (m, 2k), and when a meets 0 on a plane, where convex kinks turn concave: first guesses by
    # the chord from u > 0 to v < 0, in parts of the step
    linear = lambda u, v: jnp.where(
        v < 0, jnp.maximum(u, 0.0) / jnp.where(v < 0, jnp.maximum(u, 0.0) - v, 1.0), jnp.inf
    )
    low = jnp.where(held.free, linear(begin[2], finish[2]), jnp.inf)
    high = jnp.where(held.free, linear(1 - begin[2], 1 - finish[2]), jnp.inf)
    bounds = jnp.concatenate([low, high], axis=1)
    bound = jnp.argmin(bounds, axis=1)
    to_bound = jnp.min(bounds, axis=1)
    sign = jnp.sign(a)
    to_rest = jnp.where(jnp.any(held.free, axis=1), linear(sign * a, sign * end_a), jnp.inf)
    # one event each: the first of the three kinds, arrivals before bounds before halts where they coincide
    first = jnp.minimum(to_plane, jnp.minimum(to_bound, to_rest))
    exits = jnp.isfinite(first) & (left > 0)
    arrives = exits & (to_plane <= first)
    frees = exits & ~arrives & (to_bound <= first)
    halts = exits & ~arrives & ~frees

    # the gauge of each neuron's own event: the height over the plane ahead, lam or 1 - lam, or |a|
    met = jnp.take(forces.normal, ahead, axis=0) * jnp.take_along_axis(sides, ahead[:, None], axis=1)
    which = jnp.arange(k)[None, :] == (bound % k)[:, None]

    def gauge(now_a: Vector, now_b: Float[Array, "m d"], lam: Float[Array, "m k"]) -> Vector:
        """Return what is positive before the event and negative behind it."""
        weight = jnp.sum(jnp.where(which, lam, 0.0), axis=1)
        weight = jnp.where(bound < k, weight, 1 - weight)
        return jnp.where(arrives, jnp.sum(met * now_b, axis=1), jnp.where(frees, weight, sign * now_a))

    def margin(when: Vector) -> Vector:
        """Return the gauge at a time on the way."""
        now = path(when)
        return gauge(*now, _rate(*now, held, covariance)[2])

    ends = gauge(a, b, begin[2]), gauge(end_a, end_b, finish[2])
    found = jax.lax.stop_gradient(_root(margin, time, *ends, jnp.where(exits, first, 1.0)))
    # One more step of Newton's method, with derivatives: the time of the event as a function of everything else. With
    # the slope as a constant the step has the derivative of the root, as the implicit function theorem says.
    gap, slope = jax.jvp(margin, (found,), (jnp.ones_like(found),))
    slope = jax.lax.stop_gradient(slope)
    refined = found - jnp.where(exits & (slope < 0), gap, 0.0) / jnp.where(slope < 0, slope, -1.0)
    step = jnp.where(exits, jnp.clip(refined, 0.0, time), time)
    new_a, new_b = path(step)
    # heights anew from b, but never on the wrong side: sides are remembered, not read off
    z = jnp.where(side == 0, 0.0, new_b @ forces.normal.T)
    z = sides * jnp.maximum(sides * z, 0.0)

    moving = left > 0
    after, still, counts = contacts.settle(before, decision, ahead, arrives, left, step, is_real, forces)
    # the first k bounds are lam = 0, which sets free to the negative side
    outcome = jnp.where(bound < k, -1, 1)[:, None]
    moved = Turners(
        jnp.where(halts, 0.0, jnp.where(moving, new_a, a)),
        jnp.where(moving[:, None], new_b, b),
        jnp.where(moving[:, None], jnp.where(after.side == 0, 0.0, z), turners.z),
        after,
        jnp.where(frees[:, None] & which, outcome, 0).astype(side.dtype),
        still,
    )
    return moved, counts


def _first_meeting(z0: Heights, z1: Heights, v0: Heights, v1: Heights, slack: Heights) -> Heights:
    """Return the time in [0, 1] at which the cubic with these ends and slopes first falls below 0, or inf.

    It must end, or be half way, lower than ``-slack``.
    """
    # Hermite: z(t) = third t^3 + second t^2 + v0 t + z0
    third = 2 * (z0 - z1) + v0 + v1
    second = -3 * (z0 - z1) - 2 * v0 - v1
    value = lambda t: ((third * t + second) * t + v0) * t + z0
    middle = value(0.5)
    crosses = (z1 < -slack) | (middle < -slack) | ((z0 <= 0) & (v0 < 0))
    # a cubic can dip below 0 and come back: half way tells which half holds the first crossing
    low, high = jnp.where(middle < 0, 0.0, 0.5), jnp.where(middle < 0, 0.5, 1.0)

    def narrow(_: Int[Array, ""], bracket: tuple) -> tuple:
        """Newton's method within a bracket that is halved."""
        low, high = bracket
        t = 0.5 * (low + high)
        now = value(t)
        slope = (3 * third * t + 2 * second) * t + v0
        guess = t - now / jnp.where(slope == 0, 1.0, slope)
        low, high = jnp.where(now > 0, t, low), jnp.where(now > 0, high, t)
        inside = (guess > low) & (guess < high)
        beyond = value(jnp.where(inside, guess, low)) > 0
        return jnp.where(inside & beyond, guess, low), jnp.where(inside & ~beyond, guess, high)

    low, high = jax.lax.fori_loop(0, POLISH, narrow, (low, high))
    at_once = (z0 <= 0) & (v0 < 0)
    return jnp.where(crosses, jnp.where(at_once, 0.0, 0.5 * (low + high)), jnp.inf)


def _root(
    margin: Callable[[Vector], Vector], time: Vector, at_start: Vector, at_end: Vector, guess: Vector
) -> Vector:
    """Return where ``margin`` falls through 0 between 0 and ``time``, by the Illinois rule.

    Args:
        margin: positive before the root and negative behind it.
        time: the end of the interval.
        at_start, at_end: its values at 0 and at ``time``.
        guess: where to begin, in [0, 1].
    """
    start, end = jnp.zeros_like(time), time
    first = jnp.clip(guess, 0.0, 1.0) * time

    def narrow(_: Int[Array, ""], carry: tuple) -> tuple:
        low, high, at_low, at_high, now, _ = carry
        value = margin(now)
        ahead = value > 0
        # Illinois: the end that stays has its value halved, so that regula falsi does not creep from one side
        low_next, at_low_next = jnp.where(ahead, now, low), jnp.where(ahead, value, at_low / 2)
        high_next, at_high_next = jnp.where(ahead, high, now), jnp.where(ahead, at_high / 2, value)
        width = at_low_next - at_high_next
        share = jnp.where(width > 0, at_low_next / jnp.where(width > 0, width, 1.0), 0.5)
        return low_next, high_next, at_low_next, at_high_next, low_next + share * (high_next - low_next), now

    carry = (start, end, at_start, at_end, first, first)
    return jax.lax.fori_loop(0, ROOTS, narrow, carry)[4]
