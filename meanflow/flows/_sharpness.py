"""Sharpness: the largest curvature of the energy in the metric in which the flow descends it."""

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from meanflow._numerics import dominant_vector
from meanflow._observable import Observable, Values
from meanflow.flows import _equation as equation
from meanflow.flows._flow import Flow
from meanflow.flows._problem import Problem
from meanflow.measures._cloud import Cloud
from meanflow.measures._dataset import Dataset


def sharpness(flow: Flow, cloud: Cloud, data: Dataset, steps: int = 40) -> Float[Array, ""]:
    """Return the top eigenvalue of the Hessian of E in the metric p^-1 C, a scalar in mean-field time.

    Descent with step h is stable below 2 / sharpness. For the squared loss at zero residual it is the top eigenvalue of
    Q^(1/2) K Q^(1/2), K the tangent kernel and Q the weights of the data; the Hessian of E in plain coordinates has 1/m
    of it, against the learning rate m h. On curved spaces it is the covariant Hessian, second derivatives along
    geodesics.

    Args:
        flow: a bound flow.
        cloud: its particles; padding has no say.
        data: training data.
        steps: Hessian-vector products spent by Lanczos, each about two gradients.
    """
    from meanflow.kernels._empirical.spectra import lanczos

    weights = cloud.weights
    root = jnp.where(weights > 0, jnp.where(weights > 0, weights, 1.0) ** -0.5, 0.0)
    flat, unravel = ravel_pytree(cloud.particles)

    def energy(z: jax.Array) -> jax.Array:
        # S S' = C, so that z are orthonormal coordinates of the tangent spaces; retract is right to second order
        v = flow.space.noise(cloud, unravel(z))
        v = jax.tree.map(lambda u: u * root.reshape((-1,) + (1,) * (u.ndim - 1)), v)
        return equation.energy(flow, cloud.at(flow.space.retract(cloud, v)), data)

    _, product = jax.linearize(jax.grad(energy), jnp.zeros_like(flat))
    key = jax.random.key(0)
    start = jax.random.normal(key, flat.shape, flat.dtype)
    matrix = lanczos(product, start, min(steps, flat.size), jax.random.fold_in(key, 1)).matrix()
    # the largest eigenvalue, not the largest in size: shift the spectrum to be positive; no LAPACK, vmap is safe
    bound = jnp.max(jnp.sum(jnp.abs(matrix), axis=1))
    top = jax.lax.stop_gradient(
        dominant_vector(matrix + bound * jnp.eye(matrix.shape[0], dtype=matrix.dtype))
    )
    return top @ matrix @ top


class Sharpness(Observable):
    """The largest curvature of the energy on the clock of the run, to be compared with 2 / step."""

    def measure(self, problem: Problem, cloud: Cloud, memory: Values) -> jax.Array:
        """Return a scalar."""
        return problem.pace(cloud, flow=problem.flow) * sharpness(problem.flow, cloud, problem.data)
