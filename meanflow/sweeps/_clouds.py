"""Initial clouds and data of many cells as host arrays: drawn, cut to their width, filled up and stacked."""

import functools
from collections.abc import Sequence
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from meanflow._boundary import concrete
from meanflow._reuse import compiled
from meanflow.flows._flow import Flow
from meanflow.measures._cloud import Cloud
from meanflow.measures._dataset import Dataset

DRAWN_TOGETHER = 2**20  # numbers up to which it takes longer to compile another program than to draw too many
Stacked = TypeVar("Stacked", Cloud, Dataset)


def draw(
    flow: Flow, key: jax.Array, width: int, sizes: Sequence[int], dim: int | None, outputs: int | None
) -> Cloud:
    """Return ``flow.init(key, width, ...)``, drawn together with more neurons that are cut off again where that pays.

    A draw is one compiled program for each number of neurons. JAX's own generator counts the numbers it draws, so that
    the first neurons do not depend on how many are drawn, and all widths may share one program.

    Args:
        flow: the model.
        key: PRNG key.
        width: the number of neurons to return.
        sizes: numbers of neurons, at least ``width``, that programs for other widths draw.
        dim: input dimension, or None.
        outputs: number of outputs, or None.
    """
    if any(concrete(u) is None for u in jax.tree.leaves(flow) if isinstance(u, jax.Array)):
        # draws do not depend on what is traced in the flow, but a compiled call would return traced particles
        return flow.init(key, width, dim=dim, outputs=outputs)
    if str(jax.random.key_impl(key)) != "threefry2x32" or not _counts_numbers():
        return _draw(flow, key, width, dim, outputs)
    return prefix(_draw(flow, key, room(sizes, (dim or 1) * (outputs or 1)), dim, outputs), width)


@compiled
def _draw(flow: Flow, key: jax.Array, width: int, dim: int | None, outputs: int | None) -> Cloud:
    return flow.init(key, width, dim=dim, outputs=outputs)


@functools.cache
def _counts_numbers() -> bool:
    """Say whether the generator counts its numbers; an older form of it, which can be asked for, does not."""

    @jax.jit  # one small program instead of a dozen
    def agree(key: jax.Array) -> jax.Array:
        return jnp.all(jax.random.bits(key, (3,))[:2] == jax.random.bits(key, (2,)))

    with jax.ensure_compile_time_eval():
        return bool(agree(jax.random.key(0, impl="threefry2x32")))


def room(sizes: Sequence[int], numbers: int) -> int:
    """Return how many neurons to draw at once: the largest of ``sizes`` that is cheap, or the least.

    Args:
        sizes: the numbers of neurons there are programs for.
        numbers: how many numbers a neuron has, about.

    >>> room([512, 8192, 2**30], 2), room([2**28, 2**30], 2) == 2**28
    (8192, True)
    """
    return max((size for size in sizes if size * numbers <= DRAWN_TOGETHER), default=min(sizes))


def prefix(cloud: Cloud, width: int) -> Cloud:
    """Return the first ``width`` particles of equal weight as a network of their own, in host arrays of their own."""
    host = jax.tree.map(np.asarray, cloud)
    if host.size == width:
        return host
    # copies, which do not keep the other particles in memory
    particles, labels = jax.tree.map(lambda u: np.array(u[:width]), (host.particles, host.labels))
    weights = np.full(width, 1.0 / width, host.weights.dtype)
    return _replace(host, particles, labels, weights, np.asarray(width, host.width.dtype))


def with_labels(cloud: Cloud, label: float | jax.Array) -> Cloud:
    """Return the same particles, all with one label."""
    traced = any(isinstance(u, jax.Array) for u in (label, cloud.weights))
    labels = (jnp if traced else np).full_like(cloud.weights, label)
    return _replace(cloud, cloud.particles, labels, cloud.weights, cloud.width)


def scaled(cloud: Cloud, amplitude: str, factor: float | jax.Array) -> Cloud:
    """Return the cloud with one coordinate of its particles, named ``amplitude``, times ``factor``."""
    dtype = cloud.weights.dtype
    share = factor.astype(dtype) if isinstance(factor, jax.Array) else dtype.type(factor)
    value = getattr(cloud.particles, amplitude) * share
    return cloud.at(cloud.particles._replace(**{amplitude: value}))


def stack_padded(many: Sequence[Stacked], size: int) -> Stacked:
    """Stack clouds or data on the host, each filled up with copies of its last entry at weight zero.

    What is being traced is stacked by JAX.

    Args:
        many: the clouds or data, of different sizes.
        size: the size of all of them afterwards.
    """
    on_host = all(isinstance(u, np.ndarray) for u in jax.tree.leaves(many))
    lib = np if on_host else jnp

    def grown(*values: np.ndarray) -> np.ndarray:
        if not np.ndim(values[0]):  # the width of a cloud
            return lib.stack(values)
        last = [lib.broadcast_to(u[-1:], (size - len(u), *u.shape[1:])) for u in values]  # type: ignore[has-type]
        return lib.stack([lib.concatenate(pair) for pair in zip(values, last, strict=True)])

    full: Stacked = jax.tree.map(grown, *many)
    real = np.stack([np.arange(size) < one.weights.shape[0] for one in many])
    return eqx.tree_at(lambda one: one.weights, full, lib.where(real, full.weights, 0))


def _replace(cloud: Cloud, *parts: object) -> Cloud:
    """Return a cloud with new particles, labels, weights and width; unchecked, since they may be on the host."""
    return eqx.tree_at(
        lambda c: (c.particles, c.labels, c.weights, c.width), cloud, parts, is_leaf=lambda u: u is None
    )
