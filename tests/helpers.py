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


def largest_gap(one, two):
    """Largest absolute difference between the leaves of two pytrees."""
    gaps = jax.tree.map(lambda u, v: float(jnp.max(jnp.abs(u - v))), one, two)
    return max(jax.tree.leaves(gaps))


ACTIVATIONS = [*activations.NAMED, lambda z: z / (1 + z**2)]
