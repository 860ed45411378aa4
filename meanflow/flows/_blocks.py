"""Features of large networks, a block of neurons at a time.

A feature forms arrays over all samples and neurons. Where they would be larger than the cache of a processor, or than
its memory, their time is that of writing and reading them. The functions here give the same numbers, to rounding, but
go through the neurons block by block: only the arrays of one block exist at a time, and what the second pass over the
neurons needs of the first it computes again. A feature says for itself when that pays (``Feature.blocks``).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from meanflow.measures._cloud import Cloud
from meanflow.measures._dataset import Dataset

if TYPE_CHECKING:
    from meanflow.flows._features import Feature, Pull


def predict(feature: "Feature", cloud: Cloud, x: jax.Array) -> jax.Array:
    """Return ``feature.predict(cloud, x)``, (n,) or (n, k)."""
    count = _count(feature, cloud, x)
    if count == 1:
        return feature.predict(cloud, x)

    def add(f: jax.Array, block: Cloud) -> tuple[jax.Array, None]:
        return f + feature.predict(block, x), None

    # each block is computed again in reverse mode: what it computes on the way is what must not be kept
    shape = jax.eval_shape(lambda: feature.predict(cloud, x))
    return jax.lax.scan(jax.checkpoint(add), jnp.zeros(shape.shape, shape.dtype), _split(cloud, count))[0]


def linearize(
    feature: "Feature", cloud: Cloud, x: jax.Array, data: Dataset | None = None
) -> tuple[jax.Array, "Pull"]:
    """Return predictions at ``x``, and the map from covectors g to those of each particle.

    For the samples x of a data set, pass it too: the feature may know a faster way, ``linearize_data``.
    """
    count = _count(feature, cloud, x)

    def of_block(block: Cloud) -> tuple[jax.Array, "Pull"]:
        return feature.linearize(block, x) if data is None else feature.linearize_data(block, data)

    if count == 1:
        return of_block(cloud)
    pull = lambda g: _each(lambda block: of_block(block)[1](g), cloud, count)
    return predict(feature, cloud, x), pull


def potential(feature: "Feature", cloud: Cloud, x: jax.Array, g: jax.Array) -> jax.Array:
    """Return ``feature.potential(cloud, x, g)``, (m,)."""
    count = _count(feature, cloud, x)
    if count == 1:
        return feature.potential(cloud, x, g)
    return _each(lambda block: feature.potential(block, x, g), cloud, count)


def _count(feature: "Feature", cloud: Cloud, x: jax.Array) -> int:
    """Return the number of blocks that the feature asks for, or a little more where these come out even."""
    count = feature.blocks(cloud, x)
    return 1 if count == 1 else next((k for k in range(count, 2 * count) if cloud.size % k == 0), count)


def _each(function: Callable[[Cloud], PyTree[jax.Array]], cloud: Cloud, count: int) -> PyTree[jax.Array]:
    """Return what ``function`` returns for each particle, in the order of the particles."""
    parts = jax.lax.map(jax.checkpoint(function), _split(cloud, count))
    return jax.tree.map(lambda u: join_rows(u, cloud.size), parts)


def split_rows(u: jax.Array, count: int) -> jax.Array:
    """Return the rows of an array as ``count`` blocks (count, size, ...), filled up with copies of the last row."""
    size = -(-u.shape[0] // count)
    missing = count * size - u.shape[0]
    if missing:
        u = jnp.concatenate([u, jnp.broadcast_to(u[-1:], (missing, *u.shape[1:]))])
    if _interleaved():
        return jnp.moveaxis(u.reshape(size, count, *u.shape[1:]), 1, 0)
    return u.reshape(count, size, *u.shape[1:])


def _interleaved() -> bool:
    """Say whether block k holds the rows k, k + count, k + 2 count, ..., and not those that lie together.

    Both orders are measured. Where a cloud is spread over devices, each device must hold a part of every block, so that
    a velocity takes one sum over devices; blocks of rows that lie together belong to one device each, and the compiler
    then gathers the whole cloud on all of them (``test_blocks_of_a_spread_cloud_stay_where_they_are``). On a single
    device such an order copies the cloud (``test_large_networks_need_memory_for_one_block_only``).
    """
    return jax.device_count() > 1


def join_rows(u: jax.Array, rows: int) -> jax.Array:
    """Return the first ``rows`` rows of an array in blocks, the way back from ``split_rows``."""
    return (jnp.moveaxis(u, 0, 1) if _interleaved() else u).reshape(-1, *u.shape[2:])[:rows]


def is_own(rows: int, count: int) -> jax.Array:
    """Return which rows of the blocks that ``split_rows`` makes are no copies, (count, size)."""
    size = -(-rows // count)
    return split_rows(jnp.arange(count * size), count) < rows


def _split(cloud: Cloud, count: int) -> Cloud:
    """Return ``count`` blocks of particles as stacked clouds, filled up with particles of weight zero."""
    each = lambda u: split_rows(u, count) if u.ndim else jnp.broadcast_to(u, (count,))
    parts = jax.tree.map(each, cloud)
    # the copies that fill up the last rows must not be counted twice
    return eqx.tree_at(lambda c: c.weights, parts, jnp.where(is_own(cloud.size, count), parts.weights, 0.0))
