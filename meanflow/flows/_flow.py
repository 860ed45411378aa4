"""Flows: a model of learning, and the public functions of the one equation (see ``meanflow.flows._equation``).

Everything here is a pure function of pytrees and works under jit, vmap and grad. Each public function checks its
arguments once and then runs one compiled program of the inner function of the same name.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PyTree, Real

from meanflow import _boundary
from meanflow._boundary import (
    Count,
    PRNGKey,
    Rate,
    array,
    checked,
    choice,
    declare,
    either,
    floating,
    instance,
    number,
    subclass,
    taking,
    unchecked,
)
from meanflow._module import Module
from meanflow._observable import Observable
from meanflow._reuse import canonical, compiled, kept_by_shape
from meanflow.flows import _blocks as blocks
from meanflow.flows import _equation as equation
from meanflow.flows._features import Feature
from meanflow.flows._losses import AnyLoss, Loss
from meanflow.flows._observables import common_observables
from meanflow.flows._problem import Chart
from meanflow.geometry._space import Invariant, Space
from meanflow.measures._cloud import LABELS, Cloud
from meanflow.measures._dataset import Dataset
from meanflow.measures._sampling import sample
from meanflow.measures._scaling import NAMES, Scaling
from meanflow.measures.laws import Law, as_law

if TYPE_CHECKING:
    from meanflow.measures._scaling import Alpha


class Penalty(eqx.Module):
    """The penalty lam * reg(w).

    Attributes:
        function: maps the record of particles to one value each, (m,).
        strength: lam >= 0, a scalar.
    """

    function: Callable[[PyTree[jax.Array]], jax.Array] = eqx.field(static=True)
    strength: jax.Array


class Offset(eqx.Module):
    """The prediction f_0 of a network that stands still, subtracted from that of one that learns.

    Attributes:
        feature: its feature, bound to its statistics.
        cloud: its neurons.
    """

    feature: Feature
    cloud: Cloud

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return f_0(x), shape (n,) or (n, k)."""
        return blocks.predict(self.feature, self.cloud, x)


class Flow(Module):
    """A model of learning: a feature phi, a geometry with inverse metric C, a loss, and an optional penalty.

    Build one with ``vanilla``, ``batchnorm``, ``batchnorm_manifold`` or a univariate constructor, or assemble parts of
    your own with ``make_flow``. Whatever the rest of the package knows about a model it asks the model's parts.

    Attributes:
        feature: what one neuron contributes to the prediction.
        space: the geometry of its particles.
        loss: the loss of a prediction.
        scaling: the output scale alpha(m).
        penalty: the penalty, or None.
        laws: maps the input dimension to the default laws of an initial cloud; None if there are none.
        chart_type: the coordinates in which solvers step this flow.
        centered: whether the network is f - f_0, with f_0 its prediction at the start of a run.
        offset: f_0, or None until ``begin`` (or for a flow that is not centered).
    """

    feature: Feature
    space: Space
    loss: Loss
    scaling: Scaling
    penalty: Penalty | None = None
    laws: Callable[[int | None], dict[str, Law]] | None = eqx.field(static=True, default=None)
    chart_type: type[Chart] = eqx.field(static=True, default=Chart)
    centered: bool = eqx.field(static=True, default=False)
    offset: Offset | None = None

    @checked
    def bind(self, data: Dataset) -> Self:
        """Freeze the statistics that the model takes from the data; does nothing where they are known."""
        kept = vars(self).get("_bound")
        if kept is not None and kept[0]() is data:
            return kept[1]
        feature, space = self.feature.bind(data), self.space.bind(data)
        if feature is self.feature and space is self.space:
            return self
        offset = None if self.offset is None else Offset(feature, self.offset.cloud)
        bound = dataclasses.replace(self, feature=feature, space=space, offset=offset)
        # eager calls bind anew each time, mostly to the same data; what is traced must not outlive its trace
        if all(_boundary.concrete(u) is not None for u in jax.tree.leaves((feature, space))):
            vars(self)["_bound"] = weakref.ref(data), bound
        return bound

    def __getstate__(self) -> dict[str, object]:
        """Leave out what ``bind`` keeps: a flow that is sent to another process binds there."""
        return {name: value for name, value in vars(self).items() if name != "_bound"}

    @checked
    def begin(self, cloud: Cloud) -> Self:
        """Return the flow of a run that starts at ``cloud``: a centered flow subtracts the prediction of that cloud.

        Solvers and sweeps call it; call it yourself to evaluate a centered flow, or to start a new run where another
        ended. A run that is resumed through its state knows where it began.

        >>> import jax, meanflow as mf
        >>> flow = mf.vanilla("tanh", alpha="sqrt", centered=True)
        >>> cloud = flow.init(jax.random.key(0), 8, dim=2)
        >>> mf.predict(flow.begin(cloud), cloud, [[1.0, 0.0]]).tolist()
        [0.0]
        """
        if not self.centered or self.offset is not None:
            return self
        return dataclasses.replace(self, offset=Offset(self.feature, cloud))

    @checked
    def init(
        self,
        key: PRNGKey,
        width: Count,
        *,
        dim: Count | None = None,
        outputs: Count | None = None,
        labels: Annotated[ArrayLike, LABELS] | None = None,
        paired: bool = False,
        **laws: Annotated[
            Law | float | Callable[[jax.Array], jax.Array],
            unchecked("sample checks the law of each coordinate"),
        ],
    ) -> Cloud:
        """Draw a random cloud of ``width`` independent neurons, each coordinate from a law of its own.

        By default these are

            vanilla, batchnorm            a uniform on (-1, 1), b uniform on the unit sphere of R^d
            with a bias                   b uniform on the unit sphere of R^(d+1)
            with affine                   also scale = 1, shift = 0
            batchnorm_manifold            a and b as above, then b / |b|_S, with the label |b| = 1
            canonical, planar, radial, lifted    r uniform on (-1, 1), theta uniform on (-pi, pi)
            full                          a, b and c uniform on (-1, 1)

        so that a network starts at f = O(1/sqrt(width)) under alpha = "m". Give other laws by name:
        ``flow.init(key, 64, dim=3, a=laws.signs(), b=laws.normal(dim=3))`` with ``laws = meanflow.measures.laws``.

        Args:
            key: PRNG key.
            width: number of neurons, >= 1.
            dim: input dimension d, for models with vector inputs; not needed where all coordinates are given laws.
            outputs: number of outputs k, drawn independently: the amplitude is (width, k). None: one, without an axis.
            labels: a number or a (width,) array, if the geometry needs labels.
            paired: draw neurons in pairs of opposite amplitude, one behind the other, so that the network starts at
                f_0 = 0 (symmetric initialization). The width must be even.
            laws: the law of a coordinate by name, instead of the model's default: a law such as
                ``a=measures.laws.signs()``, a number, or a function that maps uniform numbers in (0, 1), of the shape
                of the coordinate, to its values.

        >>> import jax, jax.numpy as jnp, meanflow as mf
        >>> cloud = mf.canonical().init(jax.random.key(0), 3, r=0.5, theta=lambda u: jnp.pi * u)
        >>> cloud.particles.r.tolist(), bool(jnp.all(cloud.particles.theta > 0))
        ([0.5, 0.5, 0.5], True)
        """
        if self.laws is None:
            raise ValueError("this flow names no default laws; use meanflow.measures.sample")
        # the dimension of the inputs is that of the given laws, if all are given
        names = getattr(self.feature.record, "_fields", ("?",))
        known = all(isinstance(laws.get(name), Law) for name in names)
        usual = {} if known else self.laws(dim)
        chosen = usual | {name: as_law(name, law, usual.get(name)) for name, law in laws.items()}
        name = self.feature.amplitude
        if outputs is not None:
            if name is None or self.feature.input_ndim == 1:
                raise ValueError(f"outputs must be None for {type(self.feature).__name__}, got {outputs}")
            chosen[name] = chosen[name].repeat(outputs)
        if not paired:
            return self.space.from_raw(sample(key, width, self.feature.record, chosen, labels=labels))
        if width % 2 or name is None:
            raise ValueError(f"paired needs an even width and a feature with an amplitude, got width {width}")
        # f_0 = 0 exactly: both of a pair have the same inner weights, and amplitudes of opposite sign
        half = sample(key, width // 2, self.feature.record, chosen)
        twice = jax.tree.map(lambda u: jnp.repeat(u, 2, axis=0), half.particles)
        amplitude = getattr(twice, name)
        sign = jnp.where(jnp.arange(width) % 2 == 0, 1.0, -1.0).astype(half.weights.dtype)
        both = twice._replace(**{name: sign.reshape((-1,) + (1,) * (amplitude.ndim - 1)) * amplitude})
        return self.space.from_raw(Cloud(both, labels=labels))

    @checked
    def chart(self, cloud: Cloud) -> Chart:
        """Return the coordinates in which solvers step this flow from ``cloud``."""
        return self.chart_type(self, cloud)

    def invariant(self) -> Invariant | None:
        """Return the conservation law of this flow: a map of clouds to (conserved, scale), both (m,); None without one.

        The space knows what its points obey at any time, the feature what is conserved while nothing is penalised.
        """
        held = self.space.invariant()
        if held is None and self.penalty is None:
            held = self.feature.invariant(self.space)
        return held

    @checked
    def observables(self, data: Dataset) -> dict[str, Observable]:
        """Return all that can be recorded by name: common quantities and those of the model, each with its ``about``.

        A sweep records those that are ``usual`` without being asked, a solver none. Functions of your own, and test
        sets for the loss on them, go beside them: ``observe={"dissipation": "dissipation", "test": test}``.
        """
        return common_observables(self, data) | self.feature.observables(data)

    def check(self, cloud: Cloud, x: jax.Array) -> None:
        """Raise ValueError if the cloud or the inputs do not fit the model; skips what is being traced."""
        if self.centered and self.offset is None:
            raise ValueError("a centered flow needs the start of its run: call flow.begin(cloud) first")
        self.feature.check(cloud, x)
        if self.offset is not None:
            self.offset.feature.check(self.offset.cloud, x)
        self.space.check(cloud)
        self.scaling.check(cloud)


ALPHA = either(choice(*NAMES), number(above=0))


def penalty_pair(name: str, value: object) -> tuple[object, object]:
    """Accept a pair (function, strength): a function of the particles and a number >= 0. A kind of ``_boundary``."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(f"{name} must be a pair (function, strength), got {_boundary.show(value)}")
    return taking(1)(f"{name}[0]", value[0]), number(low=0)(f"{name}[1]", value[1])


FLOW = declare(Flow, instance(Flow, hint="build one by calling a constructor such as meanflow.vanilla()"))


@checked
def make_flow(
    feature: Feature,
    space: Space,
    loss: AnyLoss = "squared",
    *,
    alpha: Annotated["Alpha", ALPHA] = "m",
    penalty: Annotated[tuple[Callable[[PyTree[jax.Array]], jax.Array], float | jax.Array], penalty_pair]
    | None = None,
    laws: Callable[[int | None], dict[str, Law]] | None = None,
    chart: Annotated[type[Chart], subclass(Chart)] = Chart,
    centered: bool = False,
) -> Flow:
    """Assemble a flow from its parts.

    Args:
        feature: what one neuron contributes to the prediction.
        space: the geometry.
        loss: ``"squared"``, ``"logistic"``, ``"huber"``, ``"softmax"`` or a callable (f, y) -> loss: elementwise for
            one output, of rows f (k,) for k outputs.
        alpha: the output scale, which decides the lazy clock; a feature that uses it has it as well.
        penalty: a pair (function, lam): the penalty lam sum_i p_i function(w)_i, where the function maps particles to
            (m,) values and lam >= 0; or None.
        laws: maps the input dimension (or None) to the laws of an initial cloud, by coordinate.
        chart: the coordinates in which solvers step the flow.
        centered: learn with f - f_0, where f_0 is the prediction at the start of the run.
    """
    weighted = None if penalty is None else Penalty(canonical(penalty[0]), floating(penalty[1]))
    return Flow(feature, space, Loss(loss), Scaling(alpha), weighted, laws, chart, centered)


def bind_and_check(flow: Flow, cloud: Cloud, data: Dataset) -> Flow:
    """Bind a flow to the data and check that cloud, data and flow fit together; the entry of all public functions."""
    flow = flow.bind(data)
    flow.check(cloud, data.x)
    if isinstance(data, equation.Population):
        data.check(flow)
    flow.loss.check(flow.feature.output_shape(cloud), data.y)
    if flow.penalty is not None:
        _check_penalty(flow.penalty.function, cloud.particles)
    return flow


@kept_by_shape  # to know the shape means to trace, which takes milliseconds
def _check_penalty(penalty: Callable[[PyTree[jax.Array]], jax.Array], particles: PyTree[jax.Array]) -> None:
    """Refuse a penalty that does not return one number for each particle."""
    given, wanted = jax.eval_shape(penalty, particles), np.shape(jax.tree.leaves(particles)[0])[:1]
    if getattr(given, "shape", None) != wanted:
        raise ValueError(
            f"penalty must return one value for each particle, shape {wanted}, "
            f"got {getattr(given, 'shape', type(given).__name__)}"
        )


INPUTS = array((None,), (None, None), squares=True)
Inputs = Annotated[Real[ArrayLike, "n *d"] | Sequence, INPUTS]


@checked
def predict(flow: Flow, cloud: Cloud, x: Inputs) -> Float[Array, "n *k"]:
    """Return f(x), shape (n,), or (n, k) for k outputs. A batch-norm flow must be bound to its statistics first.

    Args:
        flow: the model.
        cloud: its neurons.
        x: inputs (n,) or (n, d).

    >>> import jax, meanflow as mf
    >>> flow = mf.vanilla("tanh")
    >>> cloud = flow.init(jax.random.key(0), 8, dim=2)
    >>> mf.predict(flow, cloud, [[1.0, 0.0], [0.0, 1.0]]).shape
    (2,)
    """
    inputs = jnp.asarray(x)
    flow.check(cloud, inputs)
    return _predict(flow, cloud, inputs)


@checked
def energy(flow: Flow, cloud: Cloud, data: Dataset) -> Float[Array, ""]:
    """Return E = sum_j q_j l(f(x_j), y_j) + lam sum_i p_i reg(w_i), a scalar.

    Args:
        flow: the model; statistics that it lacks are those of the data.
        cloud: its neurons.
        data: training data.
    """
    return _energy(bind_and_check(flow, cloud, data), cloud, data)


@checked
def velocity(flow: Flow, cloud: Cloud, data: Dataset) -> PyTree[Float[Array, "m ..."]]:
    """Return w_i' = -C(w_i) grad V(w_i) in mean-field time, a record like the particles.

    It equals -(1/p_i) C dE/dw_i, but is computed without dividing by p_i, so padding moves as test particles do.
    Cost O(n m d).

    Args:
        flow: the model; statistics that it lacks are those of the data.
        cloud: its neurons.
        data: training data.
    """
    return _velocity(bind_and_check(flow, cloud, data), cloud, data)


@checked
def dissipation(
    flow: Flow, cloud: Cloud, data: Dataset, *, reaction: Rate = 0.0, conserve: bool = True
) -> Float[Array, ""]:
    """Return -dE/dt = sum_i p_i <grad V, C grad V> in mean-field time; its root is the speed of the measure.

    Args:
        flow, cloud, data: as in ``energy``.
        reaction: the rate beta at which weights move as well, which adds beta sum_i p_i (V(w_i) - <V>)^2.
        conserve: False leaves out <V>, as for a flow of free mass.
    """
    still = isinstance(reaction, float | int) and reaction == 0
    return _dissipation(bind_and_check(flow, cloud, data), cloud, data, None if still else reaction, conserve)


@checked
def first_variation(
    flow: Flow,
    cloud: Cloud,
    data: Dataset,
    probes: Annotated[
        Cloud | PyTree[Float[Array, "k ..."]],
        unchecked("a pytree of the model's particles; Cloud and flow.check look at it"),
    ],
) -> Float[Array, " k"]:
    """Return V(w) = dE/dmu at the particles ``probes``, shape (k,).

    At a minimiser V is constant (zero for these homogeneous features) on the support and nowhere smaller.

    Args:
        flow, cloud, data: as in ``energy``.
        probes: particles of the model, a record with leading axis k or a Cloud, whose weights do not matter.
    """
    flow = bind_and_check(flow, cloud, data)
    probe = probes if isinstance(probes, Cloud) else Cloud(probes, width=cloud.width)
    flow.check(probe, data.x)
    return _first_variation(flow, cloud, data, probe)


OUTPUTS = choice("full", "trace", "diagonal")


@checked
def tangent_kernel(
    flow: Flow,
    cloud: Cloud,
    x: Inputs,
    z: Annotated[Real[ArrayLike, "k *d"] | Sequence, INPUTS] | None = None,
    *,
    outputs: Annotated[str, OUTPUTS] = "full",
    chunk: Count = 16,
) -> Float[Array, "n k *outputs"]:
    """Return K(x, z) = sum_i p_i <grad phi(w_i; x), C grad phi(w_i; z)>, shape (n_x, n_z); z = x by default.

    Under the mean-field clock predictions obey f' = -K (q l'). The built-in models sum products of their activations
    over neurons: O(n_x n_z m) operations beside O(n m d), and O(n m) memory. A feature without such a form is
    differentiated ``chunk`` columns at a time, in O(n_x n_z m d) operations and O(chunk n m) memory.

    Args:
        flow: the model, bound to its statistics.
        cloud: its neurons.
        x, z: inputs (n_x, d) and (n_z, d), or without the last axis.
        outputs: for k outputs K(x, z) is a k x k matrix for each pair: ``"full"`` gives (n_x, n_z, k, k),
            ``"diagonal"`` the entries of equal outputs (n_x, n_z, k), and ``"trace"`` their sum (n_x, n_z), as in
            ``kernels.empirical_ntk``.
        chunk: how many columns are differentiated at a time.
    """
    left, right = jnp.asarray(x), None if z is None else jnp.asarray(z)
    for inputs in (left,) if right is None else (left, right):
        flow.check(cloud, inputs)
    return _tangent_kernel(flow, cloud, left, right, chunk, outputs)


_predict = compiled(equation.predict)
_energy = compiled(equation.energy)
_velocity = compiled(equation.velocity)
_dissipation = compiled(equation.dissipation)
_first_variation = compiled(equation.first_variation)


@compiled
def _tangent_kernel(
    flow: Flow, cloud: Cloud, x: jax.Array, z: jax.Array | None, chunk: int, outputs: str
) -> jax.Array:
    # None instead of x a second time: the compiler then knows that both sides are the same, and computes one
    return equation.tangent_kernel(flow, cloud, x, x if z is None else z, chunk, outputs)
