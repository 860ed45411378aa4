"""Random pairs of small clouds and their exact distances, for the tests of bounds."""

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

SLACK = 1e-12


def pairs(seed, trials, n=6, d=4):
    """Random pairs of small clouds: heavy tails, shifts, scales over four decades, repeated points."""
    rng = np.random.default_rng(seed)
    shape = (2, trials, n, d)
    points = np.where(
        rng.random((2, trials, 1, 1)) < 0.5, rng.normal(size=shape), rng.standard_t(1.5, size=shape)
    )
    points *= 10 ** rng.uniform(-2, 2, size=(2, trials, 1, 1))
    points *= rng.random((2, trials, 1, d)) < 0.8  # some features are switched off
    points += rng.normal(size=(2, trials, 1, d)) * 10 ** rng.uniform(-2, 2, size=(1, trials, 1, 1))
    points[:, ::5, 1:] = points[:, ::5, :1]  # every fifth pair is two Diracs
    return points[0], points[1]


def exact(x, y):
    """W_1 of each pair by assignment, independently of the package."""
    out = []
    for a, b in zip(np.asarray(x), np.asarray(y), strict=True):
        costs = cdist(a, b)
        out.append(costs[linear_sum_assignment(costs)].mean())
    return np.array(out)


def over_pairs(function, *arrays):
    return np.asarray(jax.jit(jax.vmap(function))(*(jnp.asarray(a) for a in arrays)))
