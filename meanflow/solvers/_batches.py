"""Minibatches: which samples a step of descent looks at, as a pure function of a key and the number of the step.

Epochs need a fresh order of all n samples each, of which a step uses ``size``. Instead of storing an order, which would
be an array of length n in the state of the loop, a pseudo-random permutation is evaluated where it is needed: a Feistel
network on a table of about sqrt(n) x sqrt(n) cells. A step costs O(size), whatever n; nothing has to be stored to go on
with a run; and reverse mode has no orders to keep.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from meanflow._numerics import KeyBits
from meanflow.measures._dataset import Dataset

ROUNDS = 4  # each moves rows by a random function of the column, then columns by one of the row


class Batches(eqx.Module):
    """Minibatches of a data set.

    Attributes:
        data: the samples.
        bits: PRNG key of the choice.
        real: number of samples up to the last one of positive weight; what stands behind is padding, never drawn.
        total: sum of all weights.
        size: number of samples of a batch.
        replace: draw each batch independently, with replacement, instead of going through epochs.
    """

    data: Dataset
    bits: KeyBits
    real: jax.Array
    total: jax.Array
    size: int = eqx.field(static=True)
    replace: bool = eqx.field(static=True)

    def __init__(self, data: Dataset, key: jax.Array, size: int, *, replace: bool = False) -> None:
        self.data, self.bits, self.size, self.replace = data, KeyBits(key), size, replace
        self.real = data.real.astype(jnp.uint32)
        self.total = jnp.sum(data.weights)

    def chosen(self, step: Int[Array, ""]) -> UInt32[Array, " size"]:
        """Return the numbers of the samples of step 0, 1, ..."""
        step = step.astype(jnp.uint32)
        if self.replace:
            key = jax.random.fold_in(self.bits.key, step)
            return jax.random.randint(key, (self.size,), 0, self.real, jnp.uint32)
        rounds = jnp.maximum(self.real // self.size, 1)
        places = (step % rounds) * self.size + jnp.arange(self.size, dtype=jnp.uint32)
        key = jax.random.fold_in(self.bits.key, step // rounds)
        return shuffle(key, places, self.real)

    def at(self, step: Int[Array, ""]) -> Dataset:
        """Return the batch of a step, with weights scaled up to the total weight of the data."""
        chosen = self.chosen(step)
        shares = self.data.weights[chosen]
        return Dataset(self.data.x[chosen], self.data.y[chosen], shares * (self.total / jnp.sum(shares)))


def shuffle(key: jax.Array, places: UInt32[Array, " k"], count: UInt32[Array, ""]) -> UInt32[Array, " k"]:
    """Return pi(places) for a pseudo-random permutation pi of 0, ..., count - 1 that the key decides. O(k).

    Args:
        key: PRNG key.
        places: (k,) numbers below ``count``.
        count: how many numbers are permuted; may be traced.

    >>> sorted(shuffle(jax.random.key(0), jnp.arange(5, dtype=jnp.uint32), jnp.uint32(5)).tolist())
    [0, 1, 2, 3, 4]
    """
    columns = jnp.ceil(jnp.sqrt(count.astype(jnp.float32))).astype(jnp.uint32)
    rows = (count + columns - 1) // columns
    salts = jax.random.bits(key, (ROUNDS, 2), jnp.uint32)

    def once(number: jax.Array) -> jax.Array:
        row, column = number // columns, number % columns
        for k in range(ROUNDS):
            row = (row + _mix(column ^ salts[k, 0]) % rows) % rows
            column = (column + _mix(row ^ salts[k, 1]) % columns) % columns
        return row * columns + column

    # the table has a few cells too many: from such a cell the permutation is followed until it comes back
    follow = lambda number: jnp.where(number >= count, once(number), number)
    return jax.lax.while_loop(lambda number: jnp.any(number >= count), follow, once(places))


def _mix(u: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Scramble 32 bits: multiplications by odd numbers and shifts, each invertible, so that every bit hangs on all."""
    u = (u ^ (u >> 16)) * jnp.uint32(0x21F0AAAD)
    u = (u ^ (u >> 15)) * jnp.uint32(0xD35A2D97)
    return u ^ (u >> 15)
