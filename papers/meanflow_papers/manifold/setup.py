"""Inputs, starts and observables that the figures and theorems of paper 001 share.

The paper does not state the teacher, width, step or initialization of its figures; ours are in the code.
Training is plain gradient descent with step eta on the mean-field clock, with the squared loss averaged
over the data.
"""

import jax
import jax.numpy as jnp
import numpy as np

import meanflow as mf
from meanflow.measures import laws, sample

SPREAD = (5.0, 1.0)  # variances of the two inputs
DATA = "400 quasi-normal inputs with covariance diag(5, 1), target |x_1|, ReLU, plain descent"


def ring(count: int, variances: tuple[float, float] = SPREAD) -> np.ndarray:
    """Points sqrt(2 var) (cos, sin) on an ellipse: mean 0 and covariance diag(variances) exactly. (count, 2)."""
    turn = 2 * np.pi * np.arange(count) / count
    return np.sqrt(2.0 * np.array(variances)) * np.stack([np.cos(turn), np.sin(turn)], axis=1)


def quasi_normal(count: int, variances: tuple[float, float] = SPREAD) -> np.ndarray:
    """Quasi-random normal points, corrected to mean 0 and covariance diag(variances) exactly. (count, 2)."""
    given = {"a": laws.constant(), "b": laws.normal(dim=2)}
    z = np.asarray(sample(None, count, mf.Neurons, given, quasi=True).particles.b)
    z = z - z.mean(axis=0)
    whiten = np.linalg.inv(np.linalg.cholesky(z.T @ z / count))
    return z @ whiten.T * np.sqrt(np.array(variances))


def spokes(count: int, norms: np.ndarray | float = 1.0) -> mf.Cloud:
    """Equispaced directions in the plane with a = -1, 1 in turn and |b| = norms."""
    turn = 2 * np.pi * np.arange(count) / count
    b = np.broadcast_to(norms, (count,))[:, None] * np.stack([np.cos(turn), np.sin(turn)], axis=1)
    return mf.Cloud(mf.Neurons(jnp.asarray(np.resize([-1.0, 1.0], count)), jnp.asarray(b)))


def alignment(flow: mf.Flow, cloud: mf.Cloud, data: mf.Dataset) -> jax.Array:
    """Q = mean cos(2 theta): 0 for uniform directions, 1 when all lie on the first axis."""
    b = cloud.particles.b
    return cloud.weights @ ((b[:, 0] ** 2 - b[:, 1] ** 2) / jnp.sum(b**2, axis=1))


def tangential_speeds(flow: mf.Flow, cloud: mf.Cloud, data: mf.Dataset) -> jax.Array:
    """Length of the part of b' that turns the neuron, (m,)."""
    v = mf.velocity(flow, cloud, data).b
    s = mf.geometry.normalize(cloud.particles.b)
    return jnp.linalg.norm(v - s * jnp.sum(s * v, axis=1, keepdims=True), axis=1)
