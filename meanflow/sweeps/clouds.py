"""Initial clouds of many cells as host arrays: drawn once, cut to prefixes, padded and stacked."""

import weakref
from collections.abc import Callable, Hashable, Sequence

import equinox as eqx
import jax
import numpy as np

from meanflow.measures.cloud import Cloud

KEPT = 64
# draws by plan; they are forgotten with it
_DRAWN: weakref.WeakKeyDictionary[object, dict[Hashable, Cloud]] = weakref.WeakKeyDictionary()


def remember(plan: object, tag: Hashable, draw: Callable[[], Cloud]) -> Cloud:
    """Return the cloud ``draw()`` as host arrays; a second call with the same plan and tag draws nothing.

    Args:
        plan: whose draw it is.
        tag: what decides the draw within the plan.
        draw: makes the cloud.
    """
    kept = _DRAWN.setdefault(plan, {})
    if tag not in kept:
        if len(kept) >= KEPT:
            kept.clear()  # neighboring cells share draws, distant ones do not
        kept[tag] = jax.tree.map(np.asarray, draw())
    return kept[tag]


def prefix(cloud: Cloud, width: int) -> Cloud:
    """Return the first ``width`` particles as a network of their own."""
    particles, labels = jax.tree.map(lambda u: u[:width], (cloud.particles, cloud.labels))
    weights = np.asarray(cloud.weights[:width])
    even = np.all(weights == weights[0])
    weights = np.full_like(weights, 1.0 / width) if even else weights / weights.sum()
    return _replace(cloud, particles, labels, weights, np.asarray(width, cloud.width.dtype))


def with_labels(cloud: Cloud, label: float) -> Cloud:
    """Return the same particles, all with one label."""
    labels = np.full_like(cloud.weights, label)
    return _replace(cloud, cloud.particles, labels, cloud.weights, cloud.width)


def scaled(cloud: Cloud, amplitude: str, factor: float) -> Cloud:
    """Return the cloud with one coordinate of its particles, named ``amplitude``, times ``factor``."""
    value = getattr(cloud.particles, amplitude) * cloud.weights.dtype.type(factor)
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


def _replace(cloud: Cloud, *parts: object) -> Cloud:
    """Return a cloud with new particles, labels, weights and width; unchecked, since the arrays may be stacked."""
    return eqx.tree_at(
        lambda c: (c.particles, c.labels, c.weights, c.width), cloud, parts, is_leaf=lambda u: u is None
    )
