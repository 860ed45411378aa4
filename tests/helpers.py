"""Shared problems for the tests of the core."""

import jax
import jax.numpy as jnp
import numpy as np

import meanflow as mf
from meanflow import activations
from meanflow.measures import laws

MODELS = ("vanilla", "batchnorm", "batchnorm_manifold")


def problem(model, *, activation="tanh", loss="squared", width=7, points=30, dim=3, seed=0, norms=(0.3, 3.0)):
    """(bound flow, cloud, data) with inputs of nonzero mean and an anisotropic covariance."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(points, dim)) @ rng.normal(size=(dim, dim)) + 1.5
    y = np.sin(x[:, 0]) + 0.3 * x[:, 1]
    if loss == "logistic":
        y = np.sign(y)
    data = mf.Dataset(x, y, rng.uniform(0.5, 1.5, points) / points)
    flow = getattr(mf, model)(activation, loss).bind(data)
    cloud = flow.init(jax.random.key(seed + 1), width, dim=dim, b=laws.mixed_scales(dim, *norms))
    return flow, cloud, data


def ring(count, variances=(5.0, 1.0)):
    """Points sqrt(2 var) (cos, sin) on an ellipse: mean 0 and covariance diag(variances) exactly. (count, 2)."""
    turn = 2 * np.pi * np.arange(count) / count
    return np.sqrt(2.0 * np.array(variances)) * np.stack([np.cos(turn), np.sin(turn)], axis=1)


def ring_problem():
    """The tanh flow on the batch-norm manifold and a smooth target on a ring of 128 points."""
    x = ring(128)
    data = mf.Dataset(x, 2 * np.tanh(1.5 * x[:, 0] / np.sqrt(5)) - np.tanh(x[:, 1] + x[:, 0] / 2))
    return mf.batchnorm_manifold("tanh").bind(data), data


def largest_gap(one, two):
    """Largest absolute difference between the leaves of two pytrees."""
    gaps = jax.tree.map(lambda u, v: float(jnp.max(jnp.abs(u - v))), one, two)
    return float(np.max(jax.tree.leaves(gaps)))  # NaN in any leaf, where Python's max would pass over it


ACTIVATIONS = [*activations.NAMED, lambda z: z / (1 + z**2)]
