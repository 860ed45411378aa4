"""Global optimality of a two-layer flow: the certificate max |F|.

For features linear in a, V(a, b) = a F(b); with a convex loss a measure is a global minimiser exactly when F = 0
everywhere.
"""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from meanflow._boundary import Count, checked
from meanflow._numerics import safe_norm
from meanflow.flows._flow import Flow, first_variation
from meanflow.measures import laws
from meanflow.measures._cloud import CLOUD, Cloud, Neurons
from meanflow.measures._dataset import Dataset
from meanflow.measures._sampling import sample


class Certificate(NamedTuple):
    """Largest |F| found, and the unit vector where it is attained; 0 certifies a global minimum."""

    value: jax.Array
    direction: jax.Array


def two_layer(name: str, value: object) -> object:
    """Accept a cloud of neurons (a, b)."""
    CLOUD(name, value)
    if not isinstance(value.particles, Neurons):  # type: ignore[attr-defined]
        kind = type(value.particles).__name__  # type: ignore[attr-defined]
        raise TypeError(f"{name} must hold Neurons(a, b), got {kind}")
    return value


@checked
def certificate(
    flow: Flow, cloud: Annotated[Cloud, two_layer], data: Dataset, count: Count = 4096
) -> Certificate:
    """max |F(b)| over ``count`` well-spread directions, F(b) = sum_j q_j l'(f_j, y_j) phi((1, b); x_j).

    With k outputs F(b) is a vector, V(a, b) = <a, F(b)>, and |F| its Euclidean norm. The maximum over finitely many
    directions is a lower bound of the true one. Cost O(count n d).

    Args:
        flow: a two-layer model with a convex loss.
        cloud: its neurons.
        data: training data.
        count: number of directions.
    """
    flow = flow.bind(data)
    dim = cloud.particles.b.shape[1]
    dtype = cloud.weights.dtype
    spread = {"a": laws.constant(), "b": laws.sphere(dim)}
    directions = sample(None, count, Neurons, spread, quasi=True).particles.b.astype(dtype)
    probes = flow.space.from_raw(Cloud(Neurons(jnp.ones(count, dtype), directions))).particles
    shape = cloud.particles.a.shape[1:]
    # one entry of F for each output, as V is linear in a
    units = jnp.eye(math.prod(shape), dtype=dtype).reshape(-1, 1, *shape)
    entries = [probes._replace(a=jnp.broadcast_to(a, (count, *shape))) for a in units]
    size = safe_norm(jnp.stack([first_variation(flow, cloud, data, probe) for probe in entries], axis=-1))
    best = jnp.argmax(size)
    return Certificate(size[best], directions[best])
