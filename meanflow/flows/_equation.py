"""The one equation: feature x inverse metric x loss.

    f(x)   = sum_i p_i phi(w_i; x)                                prediction, a number or a row of k numbers
    E(mu)  = sum_j q_j l(f(x_j), y_j) + lam sum_i p_i reg(w_i)    energy
    V(w)   = sum_j q_j <l'(f(x_j), y_j), phi(w; x_j)> + lam reg(w)    first variation
    w_i'   = -C(w_i) grad V(w_i)                                  velocity
    E'     = -sum_i p_i <grad V, C grad V>                        dissipation, an equality
    K(x,z) = sum_i p_i <grad phi(w_i; x), C(w_i) grad phi(w_i; z)>    tangent kernel, a number or a k x k matrix

With a reaction rate beta weights move too, and with a temperature tau particles diffuse:

    p_i'/p_i = -beta (V(w_i) - <V>)          probability is conserved; without <V> the total mass is free
    E'       = -sum_i p_i <grad V, C grad V> - beta sum_i p_i (V(w_i) - <V>)^2
    dw_i     = -C grad V dt + tau (div C - 1/2 C grad log det C) dt + sqrt(2 tau) C^(1/2) dW_i

These are the inner functions: they take flows that are bound to their statistics and arguments that fit, check
nothing, and are what compiled programs are made of. ``meanflow.flows._flow`` has the public functions of the same
names, which check and compile.
"""

import abc
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from meanflow.flows import _blocks as blocks
from meanflow.measures._cloud import Cloud
from meanflow.measures._dataset import Dataset

if TYPE_CHECKING:
    from meanflow.flows._flow import Flow


class Population(Dataset):
    """A law of data without samples, for which the expectation of the loss is known: x is (0, d), y and weights (0,).

    The equation asks for ``risk`` and ``potential``; gradients follow by differentiation. A law whose particles are not
    the coordinates of neurons also says how these move.
    """

    def check(self, flow: "Flow") -> None:
        """Raise ValueError if this flow, bound to its statistics, has no known expectation; by default none is refused.

        Public functions and solvers call it before they compile, while statistics can still be looked at.
        """

    def take(self, index: jax.Array) -> "Population":
        """Refuse: there are no samples to take from."""
        raise ValueError("a population has no samples; draw fresh ones with sampler=population.sample")

    @abc.abstractmethod
    def risk(self, flow: "Flow", cloud: Cloud) -> jax.Array:
        """Return the expected loss of the network, a scalar."""

    @abc.abstractmethod
    def potential(self, flow: "Flow", cloud: Cloud, probe: Cloud) -> jax.Array:
        """Return the first variation of the expected loss at the particles of ``probe``, (k,)."""

    def velocity(self, flow: "Flow", cloud: Cloud, tangent: PyTree[jax.Array]) -> PyTree[jax.Array]:
        """Return how particles move, given C grad V; by default by minus that."""
        return jax.tree.map(jnp.negative, tangent)

    def dissipation(
        self, flow: "Flow", cloud: Cloud, covector: PyTree[jax.Array], tangent: PyTree[jax.Array]
    ) -> jax.Array:
        """Return -dE/dt by transport, given grad V and C grad V."""
        return paired(cloud, covector, tangent)


def paired(cloud: Cloud, covector: PyTree[jax.Array], tangent: PyTree[jax.Array]) -> jax.Array:
    """Return sum_i p_i <g_i, v_i>, a scalar."""
    each = lambda g, v: cloud.weights @ jnp.sum((g * v).reshape(cloud.size, -1), 1)
    return jnp.sum(jnp.stack(jax.tree.leaves(jax.tree.map(each, covector, tangent))))


def predict(flow: "Flow", cloud: Cloud, x: jax.Array) -> jax.Array:
    """Return f(x), shape (n,) or (n, k); a centered flow predicts f - f_0."""
    f = blocks.predict(flow.feature, cloud, x)
    return f if flow.offset is None else f - flow.offset(x)


def risk(flow: "Flow", cloud: Cloud, data: Dataset, f: jax.Array | None = None) -> jax.Array:
    """Return sum_j q_j l(f(x_j), y_j), the energy without the penalty: a scalar; ``f`` where it is known already."""
    if isinstance(data, Population):
        return data.risk(flow, cloud)
    return data.weights @ flow.loss(predict(flow, cloud, data.x) if f is None else f, data.y)


def energy(flow: "Flow", cloud: Cloud, data: Dataset, f: jax.Array | None = None) -> jax.Array:
    """Return E, a scalar; ``f`` are the predictions at the samples where they are known already."""
    loss = risk(flow, cloud, data, f)
    if flow.penalty is None:
        return loss
    return loss + flow.penalty.strength * (cloud.weights @ flow.penalty.function(cloud.particles))


def differential(
    flow: "Flow", cloud: Cloud, data: Dataset, offset: jax.Array | None = None
) -> tuple[PyTree[jax.Array], jax.Array | None]:
    """Return grad V at each particle, and the predictions f at the samples (None: there are none).

    ``offset`` is f_0 at the samples, which a centered flow subtracts, where it is known already.
    """
    f = None
    if isinstance(data, Population):
        # V is a function of each particle alone: one pullback of ones gives all their differentials
        value, along = jax.vjp(lambda w: data.potential(flow, cloud, cloud.at(w)), cloud.particles)
        covector = along(jnp.ones_like(value))[0]
    else:
        f, pull = blocks.linearize(flow.feature, cloud, data.x, data)
        if flow.offset is not None:
            f = f - (flow.offset(data.x) if offset is None else offset)
        covector = pull(residual(flow, f, data))
    if flow.penalty is None:
        return covector, f
    # the penalty too acts particle by particle
    value, pullback = jax.vjp(flow.penalty.function, cloud.particles)
    extra = pullback(jnp.full_like(value, flow.penalty.strength))[0]
    return jax.tree.map(jnp.add, covector, extra), f


def residual(flow: "Flow", f: jax.Array, data: Dataset) -> jax.Array:
    """Return the covector q_j l'(f_j, y_j) at predictions f, of the shape of f."""
    slope = flow.loss.slope(f, data.y)
    return (data.weights if f.ndim == 1 else data.weights[:, None]) * slope


def velocity(flow: "Flow", cloud: Cloud, data: Dataset) -> PyTree[jax.Array]:
    """Return w' = -C grad V in mean-field time, in a record like the particles."""
    return velocity_and_predictions(flow, cloud, data)[0]


def velocity_and_predictions(
    flow: "Flow", cloud: Cloud, data: Dataset, offset: jax.Array | None = None
) -> tuple[PyTree[jax.Array], jax.Array | None]:
    """Return the velocity and the predictions f at the samples that it is made of (None for a population).

    Args:
        flow, cloud, data: the model in its state, and what it learns.
        offset: f_0 at the samples, which a centered flow subtracts; computed where it is not given.
    """
    covector, f = differential(flow, cloud, data, offset)
    tangent = flow.space.cometric(cloud, covector)
    if isinstance(data, Population):
        return data.velocity(flow, cloud, tangent), f
    return jax.tree.map(jnp.negative, tangent), f


def growth(flow: "Flow", cloud: Cloud, data: Dataset, *, conserve: bool = True) -> jax.Array:
    """Return p_i'/(beta p_i) = -(V(w_i) - <V>), (m,); without <V> if the total mass is free (not ``conserve``)."""
    value = first_variation(flow, cloud, data, cloud)
    if conserve:
        value = value - cloud.weights @ value / jnp.sum(cloud.weights)
    return -value


def dissipation(
    flow: "Flow",
    cloud: Cloud,
    data: Dataset,
    reaction: float | jax.Array | None = None,
    conserve: bool = True,
) -> jax.Array:
    """Return -dE/dt = sum_i p_i <grad V, C grad V> + beta sum_i p_i (V - <V>)^2 in mean-field time, a scalar."""
    covector, _ = differential(flow, cloud, data)
    tangent = flow.space.cometric(cloud, covector)
    if isinstance(data, Population):
        transport = data.dissipation(flow, cloud, covector, tangent)
    else:
        transport = paired(cloud, covector, tangent)
    if reaction is None:
        return transport
    return transport + reaction * (cloud.weights @ growth(flow, cloud, data, conserve=conserve) ** 2)


def first_variation(flow: "Flow", cloud: Cloud, data: Dataset, probe: Cloud) -> jax.Array:
    """Return V at the particles of ``probe``, shape (k,); the weights of the probe do not enter."""
    if isinstance(data, Population):
        value = data.potential(flow, cloud, probe)
    else:
        f = predict(flow, cloud, data.x)
        value = blocks.potential(flow.feature, probe, data.x, residual(flow, f, data))
    if flow.penalty is None:
        return value
    return value + flow.penalty.strength * flow.penalty.function(probe.particles)


def kernel_operator(
    flow: "Flow", cloud: Cloud, x: jax.Array, z: jax.Array
) -> Callable[[jax.Array], jax.Array]:
    """Return the map v -> K(x, z) v of v (n_z,) or (n_z, k): one pullback, one jvp, O((n_x + n_z) m d), no Jacobian."""
    _, pull = blocks.linearize(flow.feature, cloud, z)
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
    # without a form of its own the feature is differentiated for all pairs of outputs, whichever are asked for
    if outputs == "full":
        return whole
    diagonal = jnp.diagonal(whole, axis1=2, axis2=3)
    return diagonal if outputs == "diagonal" else jnp.sum(diagonal, axis=2)
