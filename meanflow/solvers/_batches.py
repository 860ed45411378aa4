"""Minibatches: which samples a step of descent looks at, as a pure function of a key and the number of the step.

Epochs need a fresh order of all n samples each, of which a step uses ``size``. Instead of storing an order, which would
be an array of length n in the state of the loop, a pseudo-random permutation is evaluated where it is needed: a Feistel
network on a table of about sqrt(n) x sqrt(n) cells. A step costs O(size), whatever n; nothing has to be stored to go on
with a run; and reverse mode has no orders to keep.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from meanflow._boundary import Count, PRNGKey, checked, choice
from meanflow._loops import KeyBits
from meanflow.measures._dataset import Dataset

ROUNDS = 4  # each moves rows by a random function of the column, then columns by one of the row
SAMPLES = 1_000_033  # folded into the key of fresh samples, so that they do not repeat the numbers of noise

Sampler = Callable[[jax.Array, int], tuple[jax.Array, jax.Array]]  # (key, batch size) -> (x, y)


@checked
class Batches(eqx.Module):
    """Which samples a step of ``descend`` looks at.

    By default every epoch takes the samples in a new random order and goes through n // size batches of them (the rest
    of that order is left out). A step costs O(size), whatever n. The weights of a batch are scaled up to the total
    weight of the data. The batch of a step is a function of ``key`` and of the number of the step.

    Attributes:
        size: number of samples of a batch.
        key: PRNG key of the choice. None only in a sweep, which gives every cell a key of its own.
        replace: draw each batch independently and with replacement instead of by epochs.
        statistics: under batch norm, ``"frozen"`` (those of the whole data) or ``"batch"`` (of each minibatch).
        sampler: a function (key, size) -> (x, y) that draws fresh samples for every step; None to take those of the
            data.

    >>> import jax
    >>> Batches(32, jax.random.key(0)).size
    32
    """

    size: Count = eqx.field(static=True)
    key: PRNGKey | None = None
    replace: bool = eqx.field(static=True, default=False)
    statistics: Annotated[str, choice("frozen", "batch")] = eqx.field(static=True, default="frozen")
    sampler: Sampler | None = eqx.field(static=True, default=None)

    def check(self, data: Dataset) -> None:
        """Refuse batches that cannot be taken from these data."""
        if self.key is None:
            raise ValueError("batches must have a PRNG key, got Batches(size, key=None)")
        if self.size == 1 and self.statistics == "batch":
            raise ValueError("batches must have a size of at least 2 for statistics of each batch, got 1")
        if self.sampler is not None:
            _check_sampler(self.sampler, self.key, self.size, data)
        elif self.size > data.size:
            raise ValueError(
                f"batches must have at most the size of the data, {data.size} samples, got {self.size}"
            )

    def names(self) -> dict[str, str]:
        """Return the texts that a resumed run must share, by name."""
        names = {"batches": str(self.size), "replace": str(self.replace), "statistics": self.statistics}
        return names if self.sampler is None else names | {"sampler": "fresh samples"}

    def of(self, data: Dataset) -> Callable[[Int[Array, ""]], Dataset]:
        """Return the map from the number of a step, 0, 1, ..., to the samples that it looks at."""
        assert self.key is not None  # checked before
        if self.sampler is not None:
            sampler, size = self.sampler, self.size
            bits = KeyBits(jax.random.fold_in(self.key, SAMPLES))
            return lambda step: Dataset(*sampler(jax.random.fold_in(bits.key, step), size))
        key = KeyBits(self.key)
        # what stands behind the last sample of positive weight is padding, never drawn
        real, total = data.real.astype(jnp.uint32), jnp.sum(data.weights)

        def at(step: Int[Array, ""]) -> Dataset:
            chosen = self.chosen(key.key, step.astype(jnp.uint32), real)
            shares = data.weights[chosen]
            return Dataset(data.x[chosen], data.y[chosen], shares * (total / jnp.sum(shares)))

        return at

    def chosen(
        self, key: jax.Array, step: UInt32[Array, ""], real: UInt32[Array, ""]
    ) -> UInt32[Array, " size"]:
        """Return the numbers of the samples of a step, out of the first ``real`` ones."""
        if self.replace:
            return jax.random.randint(jax.random.fold_in(key, step), (self.size,), 0, real, jnp.uint32)
        rounds = jnp.maximum(real // self.size, 1)
        places = (step % rounds) * self.size + jnp.arange(self.size, dtype=jnp.uint32)
        return shuffle(jax.random.fold_in(key, step // rounds), places, real)


def _check_sampler(sampler: Sampler, key: jax.Array, size: int, data: Dataset) -> None:
    """Refuse a sampler of fresh data that does not return ``size`` inputs and targets like those of ``data``."""
    found = jax.eval_shape(lambda key: sampler(key, size), key)
    shapes = (
        [tuple(getattr(part, "shape", ())) for part in found] if isinstance(found, tuple | list) else found
    )
    wanted = [(size, *data.x.shape[1:]), (size, *data.y.shape[1:])]
    if shapes != wanted:
        raise ValueError(
            f"sampler must return inputs and targets of shapes {wanted[0]} and {wanted[1]}, got {shapes}"
        )


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
