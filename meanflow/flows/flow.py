"""The one equation: feature x inverse metric x loss.

    f(x)   = sum_i p_i phi(w_i; x)                                prediction
    E(mu)  = sum_j q_j l(f(x_j), y_j) + lam sum_i p_i reg(w_i)    energy
    V(w)   = sum_j q_j l'(f(x_j), y_j) phi(w; x_j) + lam reg(w)   first variation
    w_i'   = -C(w_i) grad V(w_i)                                  velocity
    E'     = -sum_i p_i <grad V, C grad V>                        dissipation, an equality
    K(x,z) = sum_i p_i <grad phi(w_i; x), C(w_i) grad phi(w_i; z)>    tangent kernel

Everything here is a pure function of pytrees and works under jit, vmap and grad. Arguments are checked first, then one
compiled program runs, so that calls from a notebook are as fast as calls from inside a jitted function.
"""

from collections.abc import Callable
from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp

from meanflow import _checks
from meanflow.flows.features import Feature
from meanflow.flows.losses import Loss
from meanflow.geometry.space import Space
from meanflow.measures.cloud import Cloud, floating
from meanflow.measures.dataset import Dataset
from meanflow.measures.laws import Law
from meanflow.measures.sampling import sample
from meanflow.measures.scaling import Scaling


class Regulariser(eqx.Module):
    """lam * reg(w): ``function`` maps the particle record to (m,) values."""

    function: Callable[[Any], jax.Array] = eqx.field(static=True)
    strength: jax.Array


class Flow(eqx.Module):
    """A model of learning: feature phi, geometry (inverse metric C), loss, optional regulariser.

    Build one with ``vanilla``, ``batchnorm``, ``batchnorm_manifold`` or a univariate constructor; the parts may
    also be combined by hand.
    """

    feature: Any  # a Feature; models add their own attributes
    space: Any  # a Space
    loss: Loss
    scaling: Scaling
    regulariser: Regulariser | None = None
    laws: Callable[[int | None], dict[str, Law]] | None = eqx.field(static=True, default=None)

    def bind(self, data: Dataset) -> Self:
        """Freezes the statistics that the model takes from the data; does nothing where they are known."""
        feature, space = self.feature.bind(data), self.space.bind(data)
        return eqx.tree_at(lambda f: (f.feature, f.space), self, (feature, space))

    def init(
        self, key: jax.Array, width: int, *, dim: int | None = None, labels: Any = None, **laws: Law
    ) -> Cloud:
        """A random cloud of ``width`` particles.

        Args:
            key: PRNG key.
            width: number of neurons, >= 1.
            dim: input dimension d (models with vector inputs).
            labels: a number or (width,) array, if the geometry needs labels.
            laws: the law of a coordinate by name, overriding the model's default, e.g. ``a=laws.signs()``.
        """
        if self.laws is None:
            raise ValueError("this flow names no default laws; use meanflow.measures.sample")
        drawn = sample(key, width, self.feature.record, {**self.laws(dim), **laws}, labels=labels)
        return self.space.settle(drawn)

    def chart(self, cloud: Cloud) -> tuple["Flow", Cloud, Callable[[Any], Any]]:
        """The same flow in the coordinates in which its steps are cheapest.

        Returns:
            A flow with equal predictions, kernels and retractions, ``cloud`` in its coordinates, and the map of its
            particles back to those of this flow.
        """
        return self.feature.chart(self, cloud)

    def check(self, cloud: Cloud, x: jax.Array) -> None:
        """Raises ValueError if the cloud or the inputs do not fit the model; skips what is being traced."""
        self.feature.check(cloud, x)
        self.space.check(cloud)
        self.scaling.check(cloud)


def make_flow(
    feature: Feature,
    space: Space,
    loss: Any = "squared",
    *,
    alpha: Any = "m",
    regulariser: Callable[[Any], jax.Array] | None = None,
    strength: Any = 0.0,
    laws: Callable[[int | None], dict[str, Law]] | None = None,
) -> Flow:
    """Assembles a flow; ``regulariser`` maps particles to (m,) and is weighted by ``strength`` = lam >= 0."""
    _checks.at_least("strength", strength, 0.0)
    extra = None if regulariser is None else Regulariser(regulariser, floating(strength))
    return Flow(feature, space, Loss(loss), Scaling(alpha), extra, laws)


def predict(flow: Flow, cloud: Cloud, x: Any) -> jax.Array:
    """f(x), shape (n,). A batch-norm flow must be bound to its statistics first."""
    x = floating(x)
    flow.check(cloud, x)
    return _predict(flow, cloud, x)


@eqx.filter_jit
def _predict(flow: Flow, cloud: Cloud, x: jax.Array) -> jax.Array:
    return flow.feature.predict(cloud, x)


def _prepare(flow: Flow, cloud: Cloud, data: Dataset) -> Flow:
    flow = flow.bind(data)
    flow.check(cloud, data.x)
    return flow


def _penalty(flow: Flow, cloud: Cloud) -> jax.Array | float:
    if flow.regulariser is None:
        return 0.0
    return flow.regulariser.strength * (cloud.weights @ flow.regulariser.function(cloud.particles))


def energy(flow: Flow, cloud: Cloud, data: Dataset) -> jax.Array:
    """E = sum_j q_j l(f(x_j), y_j) + lam sum_i p_i reg(w_i), a scalar."""
    return _energy(_prepare(flow, cloud, data), cloud, data)


@eqx.filter_jit
def _energy(flow: Flow, cloud: Cloud, data: Dataset) -> jax.Array:
    f = flow.feature.predict(cloud, data.x)
    return data.weights @ flow.loss(f, data.y) + _penalty(flow, cloud)


def _differential(flow: Flow, cloud: Cloud, data: Dataset) -> Any:
    """grad V at each particle (a covector), for a bound flow."""
    f, pull = flow.feature.linearize(cloud, data.x)
    covector = pull(data.weights * flow.loss.slope(f, data.y))
    if flow.regulariser is not None:
        value, pullback = jax.vjp(flow.regulariser.function, cloud.particles)
        extra = pullback(jnp.full_like(value, flow.regulariser.strength))[0]
        covector = jax.tree.map(jnp.add, covector, extra)
    return covector


def velocity(flow: Flow, cloud: Cloud, data: Dataset) -> Any:
    """w_i' = -C(w_i) grad V(w_i) in mean-field time, a record like the particles.

    Equals -(1/p_i) C dE/dw_i, but is computed without dividing by p_i, so padding moves as test particles do.
    Cost O(n m d).
    """
    return _velocity(_prepare(flow, cloud, data), cloud, data)


@eqx.filter_jit
def _velocity(flow: Flow, cloud: Cloud, data: Dataset) -> Any:
    return jax.tree.map(jnp.negative, flow.space.cometric(cloud, _differential(flow, cloud, data)))


def dissipation(flow: Flow, cloud: Cloud, data: Dataset) -> jax.Array:
    """-dE/dt = sum_i p_i <grad V, C grad V> in mean-field time, a scalar; its root is the speed of the measure."""
    return _dissipation(_prepare(flow, cloud, data), cloud, data)


@eqx.filter_jit
def _dissipation(flow: Flow, cloud: Cloud, data: Dataset) -> jax.Array:
    covector = _differential(flow, cloud, data)
    return _pair(cloud, covector, flow.space.cometric(cloud, covector))


def _pair(cloud: Cloud, covector: Any, tangent: Any) -> jax.Array:
    """sum_i p_i <g_i, v_i>, the natural pairing of covectors and tangents."""
    products = jax.tree.map(
        lambda g, v: cloud.weights @ jnp.sum((g * v).reshape(cloud.size, -1), 1), covector, tangent
    )
    return jnp.sum(jnp.stack(jax.tree.leaves(products)))


def first_variation(flow: Flow, cloud: Cloud, data: Dataset, probes: Any) -> jax.Array:
    """V(w) = dE/dmu at the particles ``probes`` (a record with leading axis k, or a Cloud); shape (k,).

    At a minimiser V is constant (zero for these homogeneous features) on the support and nowhere smaller.
    """
    flow = _prepare(flow, cloud, data)
    probe = probes if isinstance(probes, Cloud) else Cloud(probes, width=cloud.width)
    flow.check(probe, data.x)
    return _first_variation(flow, cloud, data, probe)


@eqx.filter_jit
def _first_variation(flow: Flow, cloud: Cloud, data: Dataset, probe: Cloud) -> jax.Array:
    f = flow.feature.predict(cloud, data.x)
    value = (data.weights * flow.loss.slope(f, data.y)) @ flow.feature(probe, data.x)
    if flow.regulariser is None:
        return value
    return value + flow.regulariser.strength * flow.regulariser.function(probe.particles)


def kernel_operator(flow: Flow, cloud: Cloud, x: jax.Array, z: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """The map v -> K(x, z) v of the tangent kernel, by one pullback and one jvp: O((n_x + n_z) m d), no Jacobian."""
    _, pull = flow.feature.linearize(cloud, z)
    _, push = jax.linearize(lambda w: flow.feature.predict(cloud.at(w), x), cloud.particles)
    return lambda v: push(flow.space.cometric(cloud, pull(v)))


def tangent_kernel(
    flow: Flow, cloud: Cloud, x: jax.Array, z: jax.Array | None = None, *, chunk: int = 16
) -> jax.Array:
    """K(x, z) = sum_i p_i <grad phi(w_i; x), C grad phi(w_i; z)>, shape (n_x, n_z); z = x by default.

    Under the mean-field clock predictions obey f' = -K (q l'). Computed ``chunk`` columns at a time, in
    O(n_x n_z m d) operations and O(chunk n m) memory.
    """
    x = floating(x)
    z = x if z is None else floating(z)
    flow.check(cloud, x)
    flow.check(cloud, z)
    return _tangent_kernel(flow, cloud, x, z, chunk)


@eqx.filter_jit
def _tangent_kernel(flow: Flow, cloud: Cloud, x: jax.Array, z: jax.Array, chunk: int) -> jax.Array:
    columns = jax.lax.map(
        kernel_operator(flow, cloud, x, z), jnp.eye(z.shape[0], dtype=z.dtype), batch_size=chunk
    )
    return columns.T
