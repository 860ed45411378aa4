"""Initial clouds and data of many cells as host arrays: drawn once, cut to prefixes, padded and stacked."""

import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from meanflow._checks import concrete
from meanflow._reuse import compiled
from meanflow.flows._flow import Flow
from meanflow.measures._cloud import Cloud
from meanflow.measures._dataset import Dataset

KEPT = 64
DRAWN_TOGETHER = 2**20  # numbers up to which it takes longer to compile another program than to draw too many
# draws by plan; they are forgotten with it
_DRAWN: weakref.WeakKeyDictionary[object, dict[Hashable, Any]] = weakref.WeakKeyDictionary()
Drawn = TypeVar("Drawn", Cloud, Dataset, np.ndarray)


def remember(plan: object, tag: Hashable, draw: Callable[[], Drawn]) -> Drawn:
    """Return ``draw()`` as host arrays; a second call with the same plan and tag draws nothing.

    Args:
        plan: whose draw it is.
        tag: what decides the draw within the plan.
        draw: makes it.
    """
    kept = _DRAWN.setdefault(plan, {})
    if tag not in kept:
        if len(kept) >= KEPT:
            kept.clear()  # neighboring cells share draws, distant ones do not
        with jax.ensure_compile_time_eval():  # a draw is a constant, also while a caller is being traced
            kept[tag] = jax.tree.map(np.asarray, draw())
    return kept[tag]


def has_prefixes(key: jax.Array) -> bool:
    """Say whether the first particles that are drawn from a key do not depend on how many are drawn.

    JAX's own generator counts the numbers it draws, unless its older form is asked for; others promise nothing.
    """
    return str(jax.random.key_impl(key)) == "threefry2x32" and _counts_numbers()


@functools.cache
def _counts_numbers() -> bool:
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


def draw(flow: Flow, key: jax.Array, width: int, dim: int | None, outputs: int | None) -> Cloud:
    """Return ``flow.init(key, width, ...)`` by one compiled program a width."""
    arrays = jax.tree.leaves(eqx.filter(flow, eqx.is_array))
    if any(concrete(u) is None for u in [*arrays, jax.random.key_data(key)]):
        # draws do not depend on what is traced in the flow, but a compiled call would return traced particles
        return flow.init(key, width, dim=dim, outputs=outputs)
    return _draw(flow, key, width, dim, outputs)


@compiled
def _draw(flow: Flow, key: jax.Array, width: int, dim: int | None, outputs: int | None) -> Cloud:
    return flow.init(key, width, dim=dim, outputs=outputs)


def cut(cloud: Cloud, width: int) -> Cloud:
    """Return the first ``width`` particles as host arrays of their own, which keep no others in memory."""
    host = jax.tree.map(np.asarray, cloud)
    return host if host.size == width else jax.tree.map(np.array, prefix(host, width))


def prefix(cloud: Cloud, width: int) -> Cloud:
    """Return the first ``width`` particles as a network of their own."""
    particles, labels = jax.tree.map(lambda u: u[:width], (cloud.particles, cloud.labels))
    weights = cloud.weights[:width]
    known = concrete(weights)
    even = known is not None and np.all(known == known[0])
    weights = np.full_like(known, 1.0 / width) if even else weights / weights.sum()  # type: ignore[assignment,arg-type]
    return _replace(cloud, particles, labels, weights, np.asarray(width, cloud.width.dtype))


def with_labels(cloud: Cloud, label: float | jax.Array) -> Cloud:
    """Return the same particles, all with one label."""
    traced = any(isinstance(u, jax.Array) for u in (label, cloud.weights))
    full = jnp.full_like if traced else np.full_like
    labels = full(cloud.weights, label)
    return _replace(cloud, cloud.particles, labels, cloud.weights, cloud.width)


def scaled(cloud: Cloud, amplitude: str, factor: float | jax.Array) -> Cloud:
    """Return the cloud with one coordinate of its particles, named ``amplitude``, times ``factor``."""
    dtype = cloud.weights.dtype
    share = factor.astype(dtype) if isinstance(factor, jax.Array) else dtype.type(factor)
    value = getattr(cloud.particles, amplitude) * share
    return cloud.at(cloud.particles._replace(**{amplitude: value}))


def stack_padded(clouds: Sequence[Cloud], size: int) -> Cloud:
    """Stack clouds on the host, each filled up to ``size`` particles with its last particle at weight zero."""

    def grown(*values: np.ndarray) -> np.ndarray:
        out = np.empty((len(values), size, *values[0].shape[1:]), values[0].dtype)
        for row, u in zip(out, values, strict=True):
            row[: len(u)] = u
            row[len(u) :] = u[-1]
        return out

    particles, labels = jax.tree.map(grown, *((c.particles, c.labels) for c in clouds))
    weights = np.zeros((len(clouds), size), clouds[0].weights.dtype)
    for row, cloud in zip(weights, clouds, strict=True):
        row[: cloud.size] = cloud.weights
    width = np.stack([np.asarray(c.width) for c in clouds])
    return _replace(clouds[0], particles, labels, weights, width)


def stack_data(many: Sequence[Dataset], size: int) -> Dataset:
    """Stack data on the host, each filled up to ``size`` points with its last point at weight zero."""

    def grown(*values: np.ndarray) -> np.ndarray:
        out = np.empty((len(values), size, *values[0].shape[1:]), values[0].dtype)
        for row, u in zip(out, values, strict=True):
            row[: len(u)] = u
            row[len(u) :] = u[-1]
        return out

    full = jax.tree.map(grown, *many)
    weights = np.zeros((len(many), size), many[0].weights.dtype)
    for row, one in zip(weights, many, strict=True):
        row[: one.size] = one.weights
    return eqx.tree_at(lambda d: d.weights, full, weights)


def _replace(cloud: Cloud, *parts: object) -> Cloud:
    """Return a cloud with new particles, labels, weights and width; unchecked, since the arrays may be stacked."""
    return eqx.tree_at(
        lambda c: (c.particles, c.labels, c.weights, c.width), cloud, parts, is_leaf=lambda u: u is None
    )
