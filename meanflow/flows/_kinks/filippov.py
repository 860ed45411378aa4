"""What a neuron does on kinks: it leaves each of them to one side, or slides along it (the Filippov rule).

A neuron sits on the hyperplanes <x_k, b> = 0 for k in a small set. Its force is g = g_0 + sum_k lam_k J_k x_k with
lam_k in [0, 1], where J_k is the jump of the force: lam_k = 0 on the inactive side, 1 on the active one. Kink k is
convex if a J_k > 0. Over the convex ones g is the vector of least norm, a least-squares problem in a box. Its
optimality conditions say what happens, with the normal speed z'_k = -a <x_k, g>:

    lam_k = 0      and z'_k <= 0    the neuron leaves to the inactive side,
    lam_k = 1      and z'_k >= 0    it leaves to the active side,
    0 < lam_k < 1  and z'_k  = 0    it slides on the hyperplane.

A concave kink (a J_k < 0) is not slid on: the neuron takes the inactive side where that is consistent, else the active
one. Where both are, it has no unique future, and the event is counted.

The pattern is found by principal pivoting with the least-index rule of Murty: while a condition fails, change the
first kink for which it does. Every exchange is one sweep of a small table, so that no matrix is factored.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

INACTIVE, ACTIVE, SLIDES = 0, 1, 2

Slots = Float[Array, "m k"]
Marks = Bool[Array, "m k"]
Table = Float[Array, "m k k"]


class Choice(NamedTuple):
    """The decision at every kink of every neuron; fields have shape (m, k) if not said otherwise.

    Attributes:
        state: ``INACTIVE``, ``ACTIVE`` or ``SLIDES``.
        lam: the weight of the active side, 0, 1 or between.
        nonunique: whether the rule left the decision open.
        table: (m, k, k) holds the inverse Gram matrix of the kinks that are slid on; for ``hold``.
    """

    state: Int[Array, "m k"]
    lam: Slots
    nonunique: Marks
    table: Table


def decide(
    gram: Table, jump: Slots, pull: Slots, size: Float[Array, " m"], valid: Marks, sign: Float[Array, " m"]
) -> Choice:
    """Decide for every neuron what happens at the kinks it sits on.

    The pattern is a piecewise constant function of the arguments; ``lam`` is differentiable in both modes.

    Args:
        gram: inner products of the normals x_k of its kinks in the inverse metric of the inner layer.
        jump: J_k, the jump of the force along x_k.
        pull: <x_k, g_0>, the normal force with all kinks inactive.
        size: the magnitude |g_0|, on which rounding is judged.
        valid: which of the k entries are kinks of the neuron at all.
        sign: the sign of a.

    >>> one = jnp.ones((1, 1))
    >>> choice = decide(one[..., None], one, -0.25 * one, one[0], one > 0, one[0])
    >>> int(choice.state[0, 0]), float(choice.lam[0, 0])
    (2, 0.25)
    """
    gram = jnp.where(valid[:, :, None] & valid[:, None, :], gram, 0.0)
    jump, pull = jnp.where(valid, jump, 0.0), jnp.where(valid, pull, 0.0)
    # the pattern has no derivatives; lam is solved for once more with it, as a differentiable linear system
    held = jax.lax.stop_gradient((gram, jump, pull, size))
    state, table, nonunique = _pivot(*held, valid, sign)
    free, fixed = state == SLIDES, (state == ACTIVE).astype(jump.dtype)
    mixed = hold(gram, free, table, pull + _times(gram, jump * fixed))
    lam = jnp.where(free, mixed / jnp.where(free, jump, 1.0), fixed)
    return Choice(state, lam, nonunique, table)


def hold(gram: Table, free: Marks, table: Table, pull: Slots) -> Slots:
    """Return mu = lam J for which the normal forces pull + gram mu vanish at the ``free`` kinks; 0 at the others.

    ``table`` holds minus the inverse, which ``decide`` has found. One refinement mends what pivoting lost, and with the
    first guess as a constant it has the derivative of the solution, as the implicit function theorem says.
    """
    table = jax.lax.stop_gradient(table)
    invert = lambda v: jnp.where(free, _times(table, jnp.where(free, v, 0.0)), 0.0)
    first = jax.lax.stop_gradient(invert(pull))
    return first + invert(pull + _times(gram, first))


def _times(matrix: Table, vector: Slots) -> Slots:
    return jnp.sum(matrix * vector[:, None, :], axis=-1)


def _pivot(
    gram: jax.Array, jump: jax.Array, pull: jax.Array, size: jax.Array, valid: jax.Array, sign: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the states, the table that holds -gram_FF^-1 for the free kinks F, and where the choice was open."""
    rows, count = jump.shape
    eps = jnp.finfo(jump.dtype).eps
    # rounding of a normal speed: |x_k| |g_0| + sum_l |<x_k, x_l>| |J_l|, with some reserve
    square = jnp.diagonal(gram, axis1=-2, axis2=-1)
    slack = 64 * eps * (jnp.sqrt(square) * size[:, None] + _times(jnp.abs(gram), jnp.abs(jump)))
    convex = valid & (sign[:, None] * jump > 0)

    def look(state: jax.Array, table: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return lam J and the normal speeds."""
        # mu_F = -gram_FF^-1 (pull + gram mu_fixed)_F, with the inverse in the table; z' = -sign (pull + gram mu)
        free, fixed = state == SLIDES, jnp.where(state == ACTIVE, jump, 0.0)
        outside = pull + _times(gram, fixed)
        mixed = fixed + jnp.where(free, _times(table, jnp.where(free, outside, 0.0)), 0.0)
        return mixed, -sign[:, None] * (pull + _times(gram, mixed))

    def failures(state: jax.Array, mixed: jax.Array, speed: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return which conditions fail, and which of these are free kinks whose lam is above 1."""
        lam = mixed / jnp.where(jump == 0, 1.0, jump)
        free = state == SLIDES
        above = free & (lam > 1 + 8 * eps)
        inactive, active = valid & (state == INACTIVE), valid & (state == ACTIVE)
        wrong = (inactive & (speed > slack)) | (active & (speed < -slack)) | (free & (lam < -8 * eps)) | above
        return wrong, above

    def exchange(carry: tuple) -> tuple:
        """Look for failures, and change the first one of each neuron; where there are none all stays as it is."""
        turn, state, table, _, _ = carry
        mixed, speed = look(state, table)
        wrong, above = failures(state, mixed, speed)
        first = wrong & (jnp.cumsum(wrong, axis=1) == 1)
        column = jnp.sum(jnp.where(first[:, None, :], table, 0.0), axis=-1)
        pivot = jnp.sum(jnp.where(first, column, 0.0), axis=-1)
        whole = jnp.sum(jnp.where(first, square, 0.0), axis=-1)
        free = state == SLIDES
        leaving = jnp.any(first & free, axis=1)
        # normals that depend on those of free kinks cannot be freed as well: the other side is the only change
        regular = pivot > eps**0.7 * whole
        entering = jnp.any(first & ~free & convex, axis=1) & regular
        sweeps = leaving | entering
        # the sweep at index i: T - t t'/p off the row and column i, +-t/p on them, -1/p in the corner (symmetric)
        safe = jnp.where(sweeps, pivot, 1.0)
        swept = table - column[:, :, None] * column[:, None, :] / safe[:, None, None]
        edge = jnp.where(entering, 1.0, -1.0)[:, None] * column / safe[:, None]
        swept = jnp.where(first[:, :, None], edge[:, None, :], swept)
        swept = jnp.where(first[:, None, :], edge[:, :, None], swept)
        corner = first[:, :, None] & first[:, None, :]
        swept = jnp.where(corner, -1 / safe[:, None, None], swept)
        table = jnp.where(sweeps[:, None, None], swept, table)
        # a free kink is fixed at the bound that lam has passed; a fixed one is freed, or flipped if it cannot slide
        flipped = jnp.where(state == INACTIVE, ACTIVE, INACTIVE)
        outcome = jnp.where(free, jnp.where(above, ACTIVE, INACTIVE), flipped)
        state = jnp.where(first, jnp.where(entering[:, None], SLIDES, outcome), state)
        return turn + 1, state, table, wrong, speed

    # all inactive, with no sweep done: the table is gram itself; the last round finds that all is well
    start = jnp.full((rows, count), INACTIVE, jnp.int32)
    first = (jnp.zeros((), jnp.int32), start, gram, valid, jnp.zeros_like(pull))
    going = lambda carry: jnp.any(carry[3]) & (carry[0] < 8 * count + 8)
    _, state, table, wrong, speed = jax.lax.while_loop(going, exchange, first)
    # what the kink itself changes, with the weights of those that are slid on following: its Schur complement
    own = sign[:, None] * jump * jnp.diagonal(table, axis1=-2, axis2=-1)
    # the normal speed on either side; both lead away from a concave kink where the future is open
    idle = jnp.where(state == ACTIVE, speed + own, speed)
    busy = jnp.where(state == ACTIVE, speed, speed - own)
    repels = valid & ~convex & (idle < -slack) & (busy > slack)
    return state, table, repels | wrong
