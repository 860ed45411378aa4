"""Features phi(w; x): what one neuron contributes to the prediction f(x) = sum_i p_i phi(w_i; x).

A prediction is one number, or a row of k numbers: predictions are (n,) or (n, k), features (n, m) or (n, m, k).
"""

import abc
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from meanflow import _boundary, activations
from meanflow._module import Module
from meanflow._numerics import weighted_gram
from meanflow._observable import Observable
from meanflow.activations import Activation
from meanflow.flows._observables import Predictions
from meanflow.geometry import _omega as omega
from meanflow.geometry import _sphere as sphere
from meanflow.geometry._neurons import LayerRates
from meanflow.geometry._space import Invariant, Space
from meanflow.measures._cloud import Cloud, Neurons
from meanflow.measures._dataset import Dataset
from meanflow.measures._scaling import Scaling

if TYPE_CHECKING:
    from meanflow.flows._motion import FrozenMotion
    from meanflow.flows._problem import Problem

# Numbers of an array over samples and neurons, as ``meanflow bench flows.blocks`` measures them: BLOCK in one block (it
# stays in the cache of a processor), CACHED up to which all neurons are treated at once where inputs have at most CHEAP
# dimensions, LARGEST where they have more and products are dearer to compute twice.
BLOCK, CACHED, LARGEST, CHEAP = 2**20, 2**22, 2**26, 32

Pull = Callable[[jax.Array], PyTree[jax.Array]]


def _average(weights: jax.Array, features: jax.Array) -> jax.Array:
    """Return sum_i p_i phi_i; a fused reduction, which spares writing the (n, m) features that a product would need."""
    return jnp.sum(features * weights.reshape((1, -1) + (1,) * (features.ndim - 2)), axis=1)


def block_count(entries: int, dim: int) -> int:
    """Return into how many blocks arrays of ``entries`` numbers, over samples and neurons, are best divided.

    The products with inputs of dimension ``dim`` are computed once more with blocks: for large ones arrays must be
    larger to make up for it.
    """
    whole = CACHED if dim <= CHEAP else LARGEST
    return 1 if entries <= whole else -(-entries // BLOCK)


class Feature(Module):
    """What one neuron contributes to the prediction. Subclasses define ``__call__``; the rest has defaults.

    A feature also says what the rest of the package needs to know about its neurons, so that a model of your own is
    treated like a built-in one everywhere.

    Attributes:
        record: the type of its particles, a NamedTuple of arrays.
        input_ndim: rank of the inputs x, 1 for (n,) or 2 for (n, d); None allows both.
        amplitude: name of the coordinate in which a neuron is linear (initial scales multiply it), or None.
        angles: names of coordinates that are angles.
        has_direction: whether ``turn`` is defined.
    """

    record: type = eqx.field(static=True)
    input_ndim: ClassVar[int | None] = None
    amplitude: ClassVar[str | None] = None
    angles: ClassVar[tuple[str, ...]] = ()
    has_direction: ClassVar[bool] = False

    @abc.abstractmethod
    def __call__(self, cloud: Cloud, x: jax.Array) -> jax.Array:
        """Return phi(w_i; x_j) as an (n, m) array, or (n, m, k) for k outputs; weights do not enter."""

    def output_shape(self, cloud: Cloud) -> tuple[int, ...]:
        """Return the shape of one prediction, () or (k,): that of the amplitude of one neuron."""
        return () if self.amplitude is None else getattr(cloud.particles, self.amplitude).shape[1:]

    def blocks(self, cloud: Cloud, x: jax.Array) -> int:
        """Return in how many blocks the neurons are best treated one after the other; see ``flows.blocks``.

        Blocks spare writing and reading arrays of n m numbers, and evaluate every neuron twice for a gradient. The
        default is right for neurons that cost as much as their input has numbers.
        """
        entries = x.shape[0] * cloud.size * math.prod(self.output_shape(cloud))
        return block_count(entries, x.shape[1] if x.ndim > 1 else 1)

    def bind(self, data: Dataset) -> Self:
        """Fix what the feature takes from the data (mean and covariance, under batch norm)."""
        return self

    def check(self, cloud: Cloud, x: jax.Array) -> None:
        """Raise ValueError if cloud and inputs do not fit this feature."""
        if not isinstance(cloud.particles, self.record):
            raise ValueError(
                f"cloud.particles must be {self.record.__name__}, got {type(cloud.particles).__name__}"
            )
        if self.input_ndim is not None and x.ndim != self.input_ndim:
            wanted = "(n,)" if self.input_ndim == 1 else "(n, d)"
            raise ValueError(f"x must have shape {wanted} for this flow, got {x.shape}")

    def turn(self, cloud: Cloud, start: Cloud) -> jax.Array:
        """Return the angle (m,) between the directions of each neuron in ``cloud`` and in ``start``."""
        raise NotImplementedError(f"{type(self).__name__} does not say what the direction of a neuron is")

    def invariant(self, space: Space) -> Invariant | None:
        """Return the conservation law of the flow in ``space`` without a penalty; None if none is known."""
        return None

    def observables(self, data: Dataset) -> dict[str, Observable]:
        """Return what is worth recording about this model, by name, beside what every model has."""
        return {"predictions": Predictions(dims=("sample", "output"), about="f at the samples")}

    def has_kinks(self) -> bool:
        """Say whether velocities jump, as those of ReLU networks do where a neuron meets a sample; False by default."""
        return False

    def motion(self, problem: "Problem") -> "FrozenMotion":
        """Return how neurons move while the residual is frozen; the sliding solver needs it."""
        raise ValueError(
            f"solver='sliding' needs a feature that defines motion(problem), got {type(self).__name__}; "
            "vanilla flows with relu, leaky_relu or abs and the univariate ReLU flows have one (a FrozenMotion). Use a "
            "diffrax solver, or fixed steps such as KernelStep"
        )

    def kernel(
        self, cloud: Cloud, x: jax.Array, z: jax.Array, space: Space, outputs: str = "full"
    ) -> jax.Array | None:
        """Return the tangent kernel K(x, z) in ``space`` in a fast exact form, in the shape that ``outputs`` names.

        It is (n_x, n_z) for one output. None, the default, means that there is no such form, and the kernel is found
        by differentiating ``predict``.
        """
        return None

    def check_overlap(self, feature: "Feature") -> None:
        """Raise ValueError unless ``overlap`` with neurons of ``feature`` is defined; skips what is being traced."""
        raise ValueError(
            "a Gaussian population needs features that define overlap(cloud, feature, other), "
            f"got {type(self).__name__}"
        )

    def overlap(self, cloud: Cloud, feature: "Feature", other: Cloud) -> jax.Array:
        """Return E[phi(w_i; x) psi(v_k; x)] over x ~ N(0, I), (m, m'), for neurons w of ``cloud`` and v of ``other``.

        phi is this feature and psi is ``feature``, each with statistics and an output scale of its own.
        """
        raise NotImplementedError(f"{type(self).__name__} has no closed expectations")

    def potential(self, cloud: Cloud, x: jax.Array, g: jax.Array) -> jax.Array:
        """Return sum_j <g_j, phi(w_i; x_j)>, shape (m,), for covectors g (n,) or (n, k)."""
        features = self(cloud, x)
        if g.ndim == 1:
            return g @ features
        return jnp.einsum("jc,jic->i", g, features)

    def linearize(self, cloud: Cloud, x: jax.Array) -> tuple[jax.Array, Pull]:
        """Return predictions f (n,) or (n, k), and the map g -> grad_w sum_j <g_j, phi(w; x_j)>, per particle.

        The map never involves the weights p_i: it is the differential of the potential at each particle, not
        the derivative of the loss, so particles of weight zero need no special care. Override it with a faster exact
        form where there is one.
        """
        features, pullback = jax.vjp(lambda w: self(cloud.at(w), x), cloud.particles)

        def pull(g: jax.Array) -> PyTree[jax.Array]:
            return pullback(jnp.broadcast_to(jnp.expand_dims(g, 1), features.shape))[0]

        return _average(cloud.weights, features), pull

    def linearize_data(self, cloud: Cloud, data: Dataset) -> tuple[jax.Array, Pull]:
        """Return ``linearize`` at the samples of a data set.

        Override it where something that the data set knows about its samples, such as their order, saves time.
        """
        return self.linearize(cloud, data.x)

    def arrange(self, cloud: Cloud, data: Dataset) -> Dataset:
        """Return the samples in the order in which ``linearize_data`` is fastest; solvers ask once for a run."""
        return data

    def predict(self, cloud: Cloud, x: jax.Array) -> jax.Array:
        """Return f(x_j) = sum_i p_i phi(w_i; x_j), shape (n,) or (n, k)."""
        return _average(cloud.weights, self(cloud, x))


class TwoLayer(Feature):
    """phi = (m/alpha) a s(b . x) for inputs x (n, d), with a (m,) or, for k outputs, (m, k). Cost O(n m (d + k)).

    Attributes:
        activation: s, elementwise.
        scaling: the output scale alpha(m); with alpha = m the network is the mean over its neurons.
        bias: whether the last entry of b is a bias: b (m, d + 1) and phi = (m/alpha) a s(b . (x, 1)).
        scale_free: whether the length of b does not matter.
    """

    record: type = eqx.field(static=True, init=False, default=Neurons)
    activation: Activation = eqx.field(static=True)
    scaling: Scaling = Scaling()
    bias: bool = eqx.field(static=True, default=False, kw_only=True)
    input_ndim: ClassVar[int | None] = 2
    amplitude: ClassVar[str | None] = "a"
    has_direction: ClassVar[bool] = True
    scale_free: ClassVar[bool] = False

    def check(self, cloud: Cloud, x: jax.Array) -> None:
        """Raise ValueError unless the shapes of a, b and x agree."""
        Feature.check(self, cloud, x)
        _boundary.shape("particles.a", cloud.particles.a, (cloud.size,), (cloud.size, None))
        _boundary.shape("particles.b", cloud.particles.b, (cloud.size, None))
        extra = 1 if self.bias else 0
        if x.shape[1] + extra != cloud.particles.b.shape[1]:
            wanted = "one column more than x (the bias)" if self.bias else "as many columns as x"
            raise ValueError(
                f"particles.b must have {wanted}, got shape {cloud.particles.b.shape} for x of shape {x.shape}"
            )

    def blocks(self, cloud: Cloud, x: jax.Array) -> int:
        """Return the number of blocks of neurons; k outputs need no arrays beside those of one."""
        return block_count(x.shape[0] * cloud.size, x.shape[1])

    def inputs(self, x: jax.Array) -> jax.Array:
        """Return what the ``directions`` are multiplied with: x, or (x, 1) with a bias."""
        return jnp.concatenate([x, jnp.ones_like(x[:, :1])], axis=1) if self.bias else x

    def directions(self, cloud: Cloud) -> jax.Array:
        """Return the vectors (m, d) whose products with ``inputs`` are the preactivations."""
        return cloud.particles.b

    def shifted(self, cloud: Cloud, products: jax.Array) -> jax.Array:
        """Return what the activation is applied to, (n, m), from the products of directions and inputs."""
        return products

    def unit_inputs(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return z (n, e), with which unit vectors u have the preactivations z . u, and the map (e, d) from u to b."""
        z = self.inputs(x)
        return z, jnp.eye(z.shape[1], dtype=z.dtype)

    def hidden(self, cloud: Cloud, x: jax.Array) -> jax.Array:
        """Return the activations s(b_i . x_j), shape (n, m)."""
        return self.activation(self.shifted(cloud, self.inputs(x) @ self.directions(cloud).T))

    def __call__(self, cloud: Cloud, x: jax.Array) -> jax.Array:
        """Return (m/alpha) a_i s(b_i . x_j)."""
        hidden, a = self.hidden(cloud, x), self.amplitudes(cloud)
        return hidden * a[None, :] if a.ndim == 1 else hidden[:, :, None] * a[None, :, :]

    def predict(self, cloud: Cloud, x: jax.Array) -> jax.Array:
        """Return f(x); k outputs are one matrix product, without the (n, m, k) features."""
        if cloud.particles.a.ndim == 1:
            return Feature.predict(self, cloud, x)
        return self.hidden(cloud, x) @ (cloud.weights[:, None] * self.amplitudes(cloud))

    def potential(self, cloud: Cloud, x: jax.Array, g: jax.Array) -> jax.Array:
        """Return sum_j <g_j, a_i> s(b_i . x_j), times m/alpha."""
        if g.ndim == 1:
            return Feature.potential(self, cloud, x, g)
        return jnp.sum(self.hidden(cloud, x) * (g @ self.amplitudes(cloud).T), axis=0)

    def linearize(self, cloud: Cloud, x: jax.Array) -> tuple[jax.Array, Pull]:
        """Return predictions and covectors; k outputs are matrix products, without the (n, m, k) features."""
        if cloud.particles.a.ndim == 1:
            return Feature.linearize(self, cloud, x)
        # phi is linear in a, so that only the hidden layer is differentiated; the covector of a is a product with it
        hidden, pullback = jax.vjp(lambda w: self.hidden(cloud.at(w), x), cloud.particles)
        a = self.amplitudes(cloud)

        def pull(g: jax.Array) -> PyTree[jax.Array]:
            outer = hidden.T @ g
            outer = outer if self.scaling.kind == "m" else self.scaling.ratio(cloud) * outer
            return pullback(g @ a.T)[0]._replace(a=outer)

        return hidden @ (cloud.weights[:, None] * a), pull

    def kernel(
        self, cloud: Cloud, x: jax.Array, z: jax.Array, space: Space, outputs: str = "full"
    ) -> jax.Array | None:
        """Return sum_i p_i (m/alpha)^2 [s(b.x) s(b.z) I + a a' s'(b.x) s'(b.z) <x, z>] in flat space.

        Layers with rates of their own multiply the two terms by them.
        """
        if type(space) not in (Space, LayerRates):
            return None
        # for x = z the activations are computed once; the same array on both sides also saves ``weighted_gram`` a pass
        same, b = z is x, cloud.particles.b
        x, z = self.inputs(x), self.inputs(z)
        value_x, slope_x = self._activate(x @ b.T)
        value_z, slope_z = (value_x, slope_x) if same else self._activate(z @ b.T)
        gram = x @ z.T
        # products of two different outputs may be negative
        signed = cloud.particles.a.ndim > 1 and outputs == "full"
        if isinstance(space, LayerRates):
            inner_rate, outer_rate = space.rates(cloud)
            value_x, slope_x = value_x * outer_rate[None, :], slope_x * inner_rate[None, :]

        def inner(weight: jax.Array) -> jax.Array:
            if signed:
                return ((slope_x * weight[None, :]) @ slope_z.T) * gram
            return weighted_gram(slope_x, slope_z, weight) * gram

        return self._join(cloud, (value_x, value_z), inner, outputs)

    def _activate(self, preactivation: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return s and s' at the preactivations (n, m)."""
        return jax.jvp(self.activation, (preactivation,), (jnp.ones_like(preactivation),))

    def _join(
        self,
        cloud: Cloud,
        values: tuple[jax.Array, jax.Array],
        inner: Callable[[jax.Array], jax.Array],
        outputs: str,
    ) -> jax.Array:
        """Return the kernel from the part of the outer weights a and that of the inner ones.

        Args:
            cloud: the neurons.
            values: activations at x and z, (n_x, m) and (n_z, m).
            inner: maps weights (m,) of the neurons to the kernel (n_x, n_z) of their inner coordinates.
            outputs: ``"full"``, ``"diagonal"`` or ``"trace"``.
        """
        scale = cloud.weights if self.scaling.kind == "m" else cloud.weights * self.scaling.ratio(cloud) ** 2
        a = cloud.particles.a
        outer = weighted_gram(*values, scale)
        if a.ndim == 1:
            return outer + inner(scale * a**2)
        count = a.shape[1]
        if outputs == "trace":
            return count * outer + inner(scale * jnp.sum(a**2, axis=1))
        # Two outputs share the outer part only if they are the same one, since a_c moves output c alone. The inner part
        # has a_c a_d for any two, as b moves all of them.
        # one product of (n, m) arrays for each pair of outputs: together they would take k^2 times the memory
        if outputs == "diagonal":
            return outer[:, :, None] + jnp.moveaxis(jax.lax.map(inner, (scale[:, None] * a**2).T), 0, -1)
        pairs = (scale[:, None, None] * a[:, :, None] * a[:, None, :]).reshape(cloud.size, count**2)
        mixed = jnp.moveaxis(jax.lax.map(inner, pairs.T), 0, -1).reshape(*outer.shape, count, count)
        return outer[:, :, None, None] * jnp.eye(count, dtype=outer.dtype)[None, None] + mixed

    def check_overlap(self, feature: Feature) -> None:
        """Raise ValueError unless both have the same activation, of known expectations, and centered preactivations."""
        from meanflow.kernels._infinite.dual import has_closed_form

        if not isinstance(feature, TwoLayer) or feature.activation != self.activation:
            raise ValueError(
                "a Gaussian population needs a student with the teacher's activation in two layers, got another one"
            )
        for one in (self, feature):
            one.centering()
        if self.has_kinks() and not has_closed_form(self.activation):
            raise ValueError(
                "a Gaussian population needs an activation that is smooth or has a closed form (such as 'relu'), "
                f"got {self.activation}, whose slope jumps"
            )

    def centering(self) -> float | jax.Array:
        """Return 1 if preactivations have mean 0 over x ~ N(0, I), NaN if that is not known; else raise ValueError."""
        if self.bias:
            raise ValueError("a Gaussian population needs neurons without a bias, got bias=True")
        return 1.0

    def overlap(self, cloud: Cloud, feature: Feature, other: Cloud) -> jax.Array:
        """Return amplitudes times the dual activation of the directions."""
        from meanflow.kernels._infinite.dual import dual_activation

        self.check_overlap(feature)
        assert isinstance(feature, TwoLayer)
        left, right = self.directions(cloud), feature.directions(other)
        first, second = jnp.broadcast_arrays(
            jnp.sum(left**2, axis=1)[:, None], jnp.sum(right**2, axis=1)[None, :]
        )
        dual = dual_activation(self.activation)(first, second, left @ right.T).value
        a = self.amplitudes(cloud).reshape(cloud.size, -1)
        c = feature.amplitudes(other).reshape(other.size, -1)
        return (a @ c.T) * dual * (self.centering() * feature.centering())

    def amplitudes(self, cloud: Cloud) -> jax.Array:
        """Return (m/alpha) a, (m,) or (m, k): what multiplies the activation of each neuron."""
        a = cloud.particles.a
        # alpha = m is the mean itself: nothing to multiply, and clouds of infinite width have no m
        return a if self.scaling.kind == "m" else self.scaling.ratio(cloud) * a

    def motion(self, problem: "Problem") -> "FrozenMotion":
        """Return the exact motion of (a, b) between the hyperplanes of the samples, for one output."""
        self.check_motion(problem)
        from meanflow.flows._kinks.two_layer import TwoLayerMotion

        return TwoLayerMotion(problem, self)

    def check_motion(self, problem: "Problem") -> None:
        """Raise ValueError unless neurons have one output and meet samples."""
        if problem.chart.base.particles.a.ndim > 1:
            raise ValueError(
                "solver='sliding' needs one output: with k outputs neurons do not move in planes between kinks, got "
                f"particles.a of shape {problem.chart.base.particles.a.shape}; use fixed steps of diffrax.Heun()"
            )
        if not isinstance(problem.data, Dataset):
            raise ValueError(
                "solver='sliding' needs samples, whose kinks neurons meet one by one, got "
                f"{type(problem.data).__name__}; use a diffrax solver"
            )

    def has_kinks(self) -> bool:
        """Say whether the slope of the activation jumps."""
        return activations.has_kink(self.activation)

    def turn(self, cloud: Cloud, start: Cloud) -> jax.Array:
        """Return the angle between b now and at the start."""
        return sphere.angle(*(omega.direction(one.particles.b) for one in (cloud, start)))

    def invariant(self, space: Space) -> Invariant | None:
        """Return the balance |a|^2 - |b|^2, on the scale |a|^2 + |b|^2, which ReLU neurons conserve in flat space."""
        if type(space) is not Space or self.activation is not activations.resolve("relu"):
            return None
        return _relu_balance


def _relu_balance(cloud: Cloud) -> tuple[jax.Array, jax.Array]:
    outer, inner = (jnp.sum(u.reshape(cloud.size, -1) ** 2, axis=1) for u in cloud.particles)
    return outer - inner, outer + inner
