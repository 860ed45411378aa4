"""Initial clouds of many cells as host arrays: prefixes, padding, stacking."""

from collections.abc import Sequence

import equinox as eqx
import jax
import numpy as np

from meanflow.measures.cloud import Cloud


def prefix(cloud: Cloud, width: int) -> Cloud:
    """The first ``width`` particles as a network of their own."""
    particles, labels = jax.tree.map(lambda u: u[:width], (cloud.particles, cloud.labels))
    weights = np.asarray(cloud.weights[:width])
    even = np.all(weights == weights[0])
    weights = np.full_like(weights, 1.0 / width) if even else weights / weights.sum()
    return _replace(cloud, particles, labels, weights, np.asarray(width, cloud.width.dtype))


def with_labels(cloud: Cloud, label: float) -> Cloud:
    """The same particles, all with one label."""
    labels = np.full_like(cloud.weights, label)
    return _replace(cloud, cloud.particles, labels, cloud.weights, cloud.width)


def scaled(cloud: Cloud, name: str, factor: float) -> Cloud:
    """The same cloud with the amplitudes, coordinate ``name``, times ``factor``."""
    value = getattr(cloud.particles, name) * cloud.weights.dtype.type(factor)
    return cloud.at(cloud.particles._replace(**{name: value}))


def stack_padded(clouds: Sequence[Cloud], size: int) -> Cloud:
    """``measures.stack`` on the host: clouds filled up to ``size`` with their last particle at weight zero."""

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
    """A cloud with new particles, labels, weights and width; unchecked, since the arrays may be stacked."""
    return eqx.tree_at(
        lambda c: (c.particles, c.labels, c.weights, c.width), cloud, parts, is_leaf=lambda u: u is None
    )
