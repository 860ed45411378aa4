"""What a neuron does on kinks: it leaves each of them to one side, or slides along it (the Filippov rule).

A neuron sits on the hyperplanes <x_k, b> = 0 for k in a small set. Its force is g = g_0 + sum_k mu_k x_k with
mu_k = lam_k J_k and lam_k in [0, 1], where J_k is the jump of the force: lam_k = 0 on the inactive side, 1 on the
active one. Kink k is convex if a J_k > 0. Over the convex ones g is the vector of least norm, a least-squares problem
in a box. Its optimality conditions say what happens, with the normal speed z'_k = -a <x_k, g>:

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
        table: (m, k, k) holds minus the inverse Gram matrix of the kinks that are slid on; for ``hold``.
    """

    state: Int[Array, "m k"]
    lam: Slots
    nonunique: Marks
    table: Table


def decide(
    gram: Table, jump: Slots, pull: Slots, size: Float[Array, " m"], valid: Marks, sign: Float[Array, " m"]
) -> Choice:
    """Decide for every neuron what happens at the kinks it sits on, without derivatives.

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
    gram, jump, pull, size = jax.lax.stop_gradient((gram, jump, pull, size))
    gram = jnp.where(valid[:, :, None] & valid[:, None, :], gram, 0.0)
    jump, pull = jnp.where(valid, jump, 0.0), jnp.where(valid, pull, 0.0)
    count = jump.shape[1]
    eps = jnp.finfo(jump.dtype).eps
    index, sign = jnp.arange(count)[None, :], sign[:, None]
    on_diagonal = jnp.eye(count, dtype=bool)[None]
    diagonal = lambda table: jnp.sum(jnp.where(on_diagonal, table[:, :, :count], 0.0), axis=-1)
    # rounding of a normal speed: |x_k| |g_0| + sum_l |<x_k, x_l>| |J_l|, with some reserve
    square = diagonal(gram)
    slack = 64 * eps * (jnp.sqrt(square) * size[:, None] + _times(jnp.abs(gram), jnp.abs(jump)))
    convex = valid & (sign * jump > 0)

    # The table (m, k, k + 1) begins as (gram, pull), which gives the normal forces pull + gram mu for given mu. A sweep
    # at i exchanges the two: a row of a kink that is slid on gives -mu where the normal forces on such kinks vanish.
    # The last column holds these values at the present mu, which is 0 or J on kinks that are not slid on.
    def failures(state: jax.Array, table: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return which conditions fail, and for which kinks that are slid on lam is above 1."""
        # normal speeds, and on kinks that are slid on mu in units of the sign of J
        value = -sign * table[:, :, -1]
        free = state == SLIDES
        above = free & (value > (1 + 8 * eps) * jnp.abs(jump))
        fails = (valid & (state == INACTIVE) & (value > slack)) | (
            valid & (state == ACTIVE) & (value < -slack)
        )
        return fails | above | (free & (value < -8 * eps * jnp.abs(jump))), above

    def exchange(carry: tuple) -> tuple:
        """Look for failures, and change the first one of each neuron; where there are none all stays as it is."""
        turn, state, table, _ = carry
        wrong, above = failures(state, table)
        # what would become of each kink: one that is slid on is fixed at the bound that lam has passed; a fixed one is
        # slid on, or flipped to its other side if it is concave or depends on kinks that are slid on
        free, active = state == SLIDES, state == ACTIVE
        enters = ~free & convex & (diagonal(table) > eps**0.7 * square)
        after = jnp.where(enters, SLIDES, jnp.where(jnp.where(free, above, ~active), ACTIVE, INACTIVE))
        # by how much the fixed part of mu changes with it
        change = jnp.where(after == ACTIVE, jump, 0.0) - jnp.where(active, jump, 0.0)
        turns = jnp.where(enters, 1.0, jnp.where(free, -1.0, 0.0)).astype(jump.dtype)
        # the first failure i of each neuron: where there is none, nothing is picked
        number = jnp.min(jnp.where(wrong, index, count + 1), axis=1, keepdims=True)
        first = index == number
        pick = lambda u: jnp.sum(jnp.where(first, u, 0.0), axis=1, keepdims=True)
        row = jnp.sum(jnp.where(first[:, :, None], table, 0.0), axis=1)
        column, step, direction = row[:, :count], pick(change), pick(turns)
        pivot = pick(column)
        # the values at the new fixed mu; where i was slid on, its mu is counted from the new bound
        leaves, last = direction < 0, jnp.arange(count + 1)[None, :] == count
        shift = jnp.where(leaves, jnp.where(first, step, 0.0), column * step)
        moved = table + jnp.where(last[None], shift[:, :, None], 0.0)
        own = row + jnp.where(last, jnp.where(leaves, step, pivot * step), 0.0)
        # the sweep at i: T - t t'/p off the row and column i, +-t/p on them, -1/p in the corner
        sweeps = direction != 0
        divisor = jnp.where(sweeps, pivot, 1.0)
        ratio = own / divisor
        across, down = first[:, :, None], (jnp.arange(count + 1)[None, :] == number)[:, None, :]
        swept = moved - column[:, :, None] * ratio[:, None, :]
        swept = jnp.where(across, (direction * ratio)[:, None, :], swept)
        swept = jnp.where(down, (direction * ratio[:, :count])[:, :, None], swept)
        swept = jnp.where(across & down, -1 / divisor[:, :, None], swept)
        table = jnp.where(sweeps[:, :, None], swept, moved)
        return turn + 1, jnp.where(first, after, state), table, wrong

    # all inactive, with no sweep done; the last round finds that all is well
    start = jnp.full(jump.shape, INACTIVE, jnp.int32), jnp.concatenate([gram, pull[:, :, None]], axis=2)
    going = lambda carry: jnp.any(carry[3]) & (carry[0] < 8 * count + 8)
    _, state, table, wrong = jax.lax.while_loop(going, exchange, (jnp.zeros((), jnp.int32), *start, valid))
    free, fixed = state == SLIDES, jnp.where(state == ACTIVE, jump, 0.0)
    speed = -sign * table[:, :, -1]
    # what the kink itself changes, with the weights of those that are slid on following: its Schur complement
    own = sign * jump * diagonal(table)
    # the normal speed on either side; both lead away from a concave kink where the future is open
    idle = jnp.where(state == ACTIVE, speed + own, speed)
    busy = jnp.where(state == ACTIVE, speed, speed - own)
    repels = valid & ~convex & (idle < -slack) & (busy > slack)
    # one refinement mends what pivoting lost
    value, table = table[:, :, -1], table[:, :, :count]
    mixed = jnp.where(free, -value, fixed)
    mixed = mixed + jnp.where(free, _times(table, jnp.where(free, pull + _times(gram, mixed), 0.0)), 0.0)
    lam = jnp.where(free, mixed / jnp.where(free, jump, 1.0), (state == ACTIVE).astype(jump.dtype))
    return Choice(state, lam, repels | wrong, table)


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
