"""The one equation: feature x inverse metric x loss.

    f(x)   = sum_i p_i phi(w_i; x)                                prediction, a number or a row of k numbers
    E(mu)  = sum_j q_j l(f(x_j), y_j) + lam sum_i p_i reg(w_i)    energy
    V(w)   = sum_j q_j <l'(f(x_j), y_j), phi(w; x_j)> + lam reg(w)    first variation
    w_i'   = -C(w_i) grad V(w_i)                                  velocity
    E'     = -sum_i p_i <grad V, C grad V>                        dissipation, an equality
    K(x,z) = sum_i p_i <grad phi(w_i; x), C(w_i) grad phi(w_i; z)>    tangent kernel, a number or a k x k matrix

These are the inner functions: they take flows that are bound to their statistics and arguments that fit, check
nothing, and are what compiled programs are made of. ``meanflow.flows.flow`` has the public functions of the same
names, which check and compile.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from meanflow.measures.cloud import Cloud
from meanflow.measures.dataset import Dataset

if TYPE_CHECKING:
    from meanflow.flows.flow import Flow


def predict(flow: "Flow", cloud: Cloud, x: jax.Array) -> jax.Array:
    """Return f(x), shape (n,) or (n, k); a centered flow predicts f - f_0."""
    f = flow.feature.predict(cloud, x)
    return f if flow.offset is None else f - flow.offset(x)


def energy(flow: "Flow", cloud: Cloud, data: Dataset) -> jax.Array:
    """Return E, a scalar."""
    loss = data.weights @ flow.loss(predict(flow, cloud, data.x), data.y)
    if flow.regularizer is None:
        return loss
    return loss + flow.regularizer.strength * (cloud.weights @ flow.regularizer.function(cloud.particles))


def differential(flow: "Flow", cloud: Cloud, data: Dataset) -> PyTree[jax.Array]:
    """Return grad V at each particle: a covector, in a record like the particles."""
    f, pull = flow.feature.linearize(cloud, data.x)
    if flow.offset is not None:
        f = f - flow.offset(data.x)
    covector = pull(residual(flow, f, data))
    if flow.regularizer is None:
        return covector
    value, pullback = jax.vjp(flow.regularizer.function, cloud.particles)
    extra = pullback(jnp.full_like(value, flow.regularizer.strength))[0]
    return jax.tree.map(jnp.add, covector, extra)


def residual(flow: "Flow", f: jax.Array, data: Dataset) -> jax.Array:
    """Return the covector q_j l'(f_j, y_j) at predictions f, of the shape of f."""
    slope = flow.loss.slope(f, data.y)
    return (data.weights if f.ndim == 1 else data.weights[:, None]) * slope


def velocity(flow: "Flow", cloud: Cloud, data: Dataset) -> PyTree[jax.Array]:
    """Return w' = -C grad V in mean-field time, in a record like the particles."""
    return jax.tree.map(jnp.negative, flow.space.cometric(cloud, differential(flow, cloud, data)))


def dissipation(flow: "Flow", cloud: Cloud, data: Dataset) -> jax.Array:
    """Return -dE/dt = sum_i p_i <grad V, C grad V> in mean-field time, a scalar."""
    covector = differential(flow, cloud, data)
    tangent = flow.space.cometric(cloud, covector)

    def paired(g: jax.Array, v: jax.Array) -> jax.Array:
        return cloud.weights @ jnp.sum((g * v).reshape(cloud.size, -1), 1)

    return jnp.sum(jnp.stack(jax.tree.leaves(jax.tree.map(paired, covector, tangent))))


def first_variation(flow: "Flow", cloud: Cloud, data: Dataset, probe: Cloud) -> jax.Array:
    """Return V at the particles of ``probe``, shape (k,); the weights of the probe do not enter."""
    f = predict(flow, cloud, data.x)
    value = flow.feature.potential(probe, data.x, residual(flow, f, data))
    if flow.regularizer is None:
        return value
    return value + flow.regularizer.strength * flow.regularizer.function(probe.particles)


def kernel_operator(
    flow: "Flow", cloud: Cloud, x: jax.Array, z: jax.Array
) -> Callable[[jax.Array], jax.Array]:
    """Return the map v -> K(x, z) v of v (n_z,) or (n_z, k): one pullback, one jvp, O((n_x + n_z) m d), no Jacobian."""
    _, pull = flow.feature.linearize(cloud, z)
    _, push = jax.linearize(lambda w: predict(flow, cloud.at(w), x), cloud.particles)
    return lambda v: push(flow.space.cometric(cloud, pull(v)))


def tangent_kernel(
    flow: "Flow", cloud: Cloud, x: jax.Array, z: jax.Array, chunk: int = 16, outputs: str = "full"
) -> jax.Array:
    """Return K(x, z): by the feature's own form if it has one, else ``chunk`` columns at a time.

    The shape is (n_x, n_z) for one output. For k of them ``outputs="full"`` gives (n_x, n_z, k, k), ``"diagonal"`` the
    entries of equal outputs (n_x, n_z, k), and ``"trace"`` their sum (n_x, n_z).
    """
    structured = flow.feature.kernel(cloud, x, z, flow.space, outputs)
    if structured is not None:
        return structured
    shape = flow.feature.output_shape(cloud)
    columns = z.shape[0] * math.prod(shape)
    unit = jnp.eye(columns, dtype=z.dtype).reshape(columns, z.shape[0], *shape)
    kernel = jax.lax.map(kernel_operator(flow, cloud, x, z), unit, batch_size=chunk)
    if not shape:
        return kernel.T
    whole = kernel.reshape(*unit.shape[1:], *kernel.shape[1:]).transpose(2, 0, 3, 1)
    if outputs == "full":
        return whole
    diagonal = jnp.diagonal(whole, axis1=2, axis2=3)
    return diagonal if outputs == "diagonal" else jnp.sum(diagonal, axis=2)
