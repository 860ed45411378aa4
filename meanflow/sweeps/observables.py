"""What a sweep records at each save time, by default and on request.

An observable is a function (flow, cloud, data) -> array with a description of its axes. All of them ignore padding
(weight zero), so a run gives the same numbers at every stored size.
"""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from meanflow import activations
from meanflow._numerics import safe_sqrt
from meanflow.flows.features import BatchNormed, TwoLayer
from meanflow.flows.flow import Flow, dissipation, tangent_kernel
from meanflow.flows.univariate import knots
from meanflow.flows.univariate.models import Univariate
from meanflow.geometry import omega
from meanflow.geometry.balance import Layers, balance
from meanflow.geometry.space import Space
from meanflow.measures import scaling
from meanflow.measures.cloud import Affine, Cloud, Neurons, Polar
from meanflow.measures.dataset import Dataset
from meanflow.solvers.continuous import FromStart
from meanflow.sweeps.results import PLAIN

KERNEL_POINTS = 64  # the kernel drift looks at this many samples at most; its cost grows with their square
GRID_POINTS = 101


class Observable(eqx.Module):
    """A function of a run with names for its axes.

    Attributes:
        function: (flow, cloud, data) -> array, or dict of arrays; with ``from_start`` it gets the initial cloud as a
            fourth argument.
        dims: names of the axes of the result; ``"particle"`` may differ in length between widths (filled with NaN).
        coords: values along some of those axes, by name.
        units: unit of the numbers, ``"1"`` for pure numbers.
        about: one line for the reader of the data set.
        from_start: whether the observable compares with the start of the run.
    """

    function: Callable[..., Any]
    dims: tuple[str, ...] = eqx.field(static=True, default=())
    coords: dict[str, Any] = eqx.field(default_factory=dict)
    units: str = eqx.field(static=True, default="1")
    about: str = eqx.field(static=True, default="")
    from_start: bool = eqx.field(static=True, default=False)

    def observer(self) -> Any:
        """In the form the solvers take."""
        return FromStart(self.function) if self.from_start else self.function


class PredictOn(eqx.Module):
    """f on fixed inputs ``x`` (k,) or (k, d)."""

    x: jax.Array

    def __call__(self, flow: Flow, cloud: Cloud, data: Dataset) -> jax.Array:
        """Predictions (k,)."""
        return flow.feature.predict(cloud, self.x.astype(cloud.weights.dtype))


class Dissipation(eqx.Module):
    """-dE/dt on the clock of the run."""

    clock: str = eqx.field(static=True)

    def __call__(self, flow: Flow, cloud: Cloud, data: Dataset) -> jax.Array:
        """A scalar."""
        return scaling.speed(self.clock, flow.scaling, cloud) * dissipation(flow, cloud, data)


def on_clock(observable: Observable, clock: str) -> Observable:
    """The same observable of a run on another clock."""
    if not isinstance(observable.function, Dissipation):
        return observable
    return eqx.tree_at(lambda o: o.function, observable, Dissipation(clock))


class KnotConcentration(eqx.Module):
    """Share of sum |c a| in the ``count`` fullest of 110 bins over the range of the data plus 5 % at each end."""

    count: int = eqx.field(static=True)

    def __call__(self, flow: Flow, cloud: Cloud, data: Dataset) -> jax.Array:
        """A scalar."""
        a, b, c = affine(cloud)
        margin = 0.05 * (jnp.max(data.x) - jnp.min(data.x))
        low, high = jnp.min(data.x) - margin, jnp.max(data.x) + margin
        place = 2.2 * (_knots(a, b) - low) / (high - low) - 1.1  # the window [-1.1, 1.1] of the definition
        return knots.concentration(place, cloud.weights * jnp.abs(c * a), self.count)


def affine(cloud: Cloud) -> Affine:
    """Univariate neurons as (a, b, c) up to positive factors of each neuron's parts that leave c |(a, b)| unchanged."""
    if isinstance(cloud.particles, Affine):
        return cloud.particles
    r, theta = cloud.particles
    return Affine(jnp.cos(theta), -jnp.sin(theta), r)


def _knots(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.where(a != 0, b / jnp.where(a != 0, a, 1.0), jnp.inf)


def on_sample_share(flow: Flow, cloud: Cloud, data: Dataset) -> jax.Array:
    """Share of the knots within 5 % of the mean spacing of a sample; see ``flows.univariate.knots``."""
    a, b, _ = affine(cloud)
    real = (cloud.weights > 0).astype(a.dtype)
    return knots.on_sample_share(_knots(a, b), jnp.sort(data.x), mass=real)


def dead_share(flow: Flow, cloud: Cloud, data: Dataset) -> jax.Array:
    """Share of the neurons that are active on no sample."""
    a, b, _ = affine(cloud)
    return knots.dead_share(a, b, data.x, weights=cloud.weights)


def slope_variation(flow: Flow, cloud: Cloud, data: Dataset) -> jax.Array:
    """Total variation of f', equation (17) of "univariate ReLU"; coinciding knots are merged."""
    a, b, c = affine(cloud)
    scale = flow.scaling.ratio(cloud) if isinstance(cloud.particles, Affine) else 1.0
    return knots.total_variation(knots.piecewise_linear(a, b, c, weights=cloud.weights, scale=scale))


def _rms(cloud: Cloud, squares: jax.Array) -> jax.Array:
    return safe_sqrt(jnp.sum(jnp.where(cloud.weights > 0, cloud.weights * squares, 0.0)))


def displacement(flow: Flow, cloud: Cloud, data: Dataset, start: Cloud) -> jax.Array:
    """Root mean square distance of the coordinates from the start (angles the short way round)."""
    moved = jax.tree.map(jnp.subtract, cloud.particles, start.particles)
    if isinstance(cloud.particles, Polar):
        moved = Polar(moved.r, _wrap(moved.theta))
    squares = [jnp.sum(u.reshape(u.shape[0], -1) ** 2, axis=1) for u in jax.tree.leaves(moved)]
    return _rms(cloud, jnp.sum(jnp.stack(squares), axis=0))


def angle_displacement(flow: Flow, cloud: Cloud, data: Dataset, start: Cloud) -> jax.Array:
    """Root mean square angle between the directions of the neurons now and at the start, in radians."""
    if isinstance(cloud.particles, Polar):
        turn = _wrap(cloud.particles.theta - start.particles.theta)
    elif isinstance(cloud.particles, Affine):
        turn = _wrap(_angle(cloud.particles) - _angle(start.particles))
    else:
        now, then = (_unit(c.particles.b) for c in (cloud, start))
        # half-angle form: accurate for small angles, where arccos of the product is not
        turn = 2 * jnp.arctan2(_length(now - then), _length(now + then))
    return _rms(cloud, turn**2)


def _angle(particles: Affine) -> jax.Array:
    return jnp.arctan2(-particles.b, particles.a)


def _wrap(angle: jax.Array) -> jax.Array:
    return jnp.arctan2(jnp.sin(angle), jnp.cos(angle))


def _length(u: jax.Array) -> jax.Array:
    return safe_sqrt(jnp.sum(u**2, axis=-1))


def _unit(u: jax.Array) -> jax.Array:
    return u / _length(u)[:, None]


def kernel_drift(flow: Flow, cloud: Cloud, data: Dataset, start: Cloud) -> jax.Array:
    """|K_t - K_0| / |K_0| of the tangent kernel on the samples (64 of them, evenly chosen, if there are more)."""
    pick = np.unique(np.linspace(0, data.size - 1, min(data.size, KERNEL_POINTS)).round().astype(int))
    x = data.x[pick]
    now, then = tangent_kernel(flow, cloud, x), tangent_kernel(flow, start, x)
    return safe_sqrt(jnp.sum((now - then) ** 2)) / jnp.linalg.norm(then)


def _law(flow: Flow) -> Callable[[Flow, Cloud], tuple[jax.Array, jax.Array]] | None:
    """The conservation law of a model: a function (flow, cloud) -> (conserved, scale), each (m,); None without one."""
    feature: Any = flow.feature
    free = flow.regulariser is None
    if isinstance(feature, BatchNormed):
        if not feature.raw:
            return _on_manifold
        return _raw_norm if free else None
    flat_relu = type(flow.space) is Space and isinstance(feature, TwoLayer)
    if free and flat_relu and feature.activation is activations.resolve("relu"):
        return _relu_balance
    if free and feature.record is Affine and isinstance(flow.space, Layers):
        return _affine_balance
    return None


def _raw_norm(flow: Flow, cloud: Cloud) -> tuple[jax.Array, jax.Array]:
    square = jnp.sum(cloud.particles.b**2, axis=-1)
    return square, square


def _on_manifold(flow: Flow, cloud: Cloud) -> tuple[jax.Array, jax.Array]:
    feature: Any = flow.feature
    square = omega.sigma_norm(cloud.particles.b, feature.sigma)[:, 0] ** 2
    return square, square


def _relu_balance(flow: Flow, cloud: Cloud) -> tuple[jax.Array, jax.Array]:
    a, b = cloud.particles
    norm = jnp.sum(b**2, axis=-1)
    return a**2 - norm, a**2 + norm


def _affine_balance(flow: Flow, cloud: Cloud) -> tuple[jax.Array, jax.Array]:
    a, b, c = cloud.particles
    space: Any = flow.space
    learns = space.inner_moves * space.outer_moves  # conserved only if both layers learn
    return jnp.where(learns == 0, 0.0, balance(cloud.particles)), a**2 + b**2 + c**2


def invariant_drift(flow: Flow, cloud: Cloud, data: Dataset, start: Cloud) -> jax.Array:
    """Root mean square change of what the flow conserves for each neuron, relative to its scale at the start.

    |b|^2 under batch norm in raw coordinates, b'Sb = 1 on the manifold, a^2 - |b|^2 for a vanilla ReLU network and
    c^2 - a^2 - b^2 for a full univariate one; all but the second without a penalty only.
    """
    law = _law(flow)
    if law is None:
        raise ValueError("invariant_drift needs a flow with a conserved quantity, got one without")
    now, (then, scale) = law(flow, cloud)[0], law(flow, start)
    return _rms(cloud, (now - then) ** 2) / _rms(start, scale**2)


def particles(flow: Flow, cloud: Cloud, data: Dataset) -> dict[str, jax.Array]:
    """Coordinates of every neuron, NaN for padding; a vector coordinate b gives b_0, b_1, ..."""
    real = cloud.weights > 0
    named: dict[str, jax.Array] = {}
    for name, value in cloud.particles._asdict().items():
        columns = (
            {name: value} if value.ndim == 1 else {f"{name}_{k}": value[:, k] for k in range(value.shape[1])}
        )
        named |= {key: jnp.where(real, column, jnp.nan) for key, column in columns.items()}
    return named


def prediction_grid(data: Dataset, points: int = GRID_POINTS) -> np.ndarray:
    """Univariate inputs for predictions: the range of the data widened by 10 % at each end."""
    x = np.asarray(data.x)
    margin = 0.1 * (x.max() - x.min())
    return np.linspace(x.min() - margin, x.max() + margin, points).astype(x.dtype)


def default_observables(flow: Flow, data: Dataset, clock: str = "lazy") -> dict[str, Observable]:
    """Dissipation, predictions, displacements, kernel and invariant drift; for univariate flows knot statistics.

    Args:
        flow: a model of the sweep; which observables exist depends on its type only.
        data: training data; concrete, since the prediction grid is taken from it.
        clock: clock of the run, for the dissipation.
    """
    chosen = {
        "dissipation": Observable(Dissipation(clock), about="-dE/dt on the clock of the run"),
        "displacement": Observable(displacement, about="rms change of the coordinates", from_start=True),
        "kernel_drift": Observable(kernel_drift, about="|K_t - K_0| / |K_0| on the samples", from_start=True),
    }
    univariate = isinstance(flow.feature, Univariate)
    if univariate or flow.feature.record is Neurons:
        chosen["angle_displacement"] = Observable(
            angle_displacement, units="rad", about="rms turn of the neurons", from_start=True
        )
    if _law(flow) is not None:
        chosen["invariant_drift"] = Observable(
            invariant_drift, about="rms relative change of what the flow conserves", from_start=True
        )
    if not univariate:
        chosen["predictions"] = Observable(PredictOn(data.x), ("sample",), {}, about="f at the samples")
        return chosen
    grid = prediction_grid(data)
    chosen["predictions"] = Observable(
        PredictOn(jnp.asarray(grid)), ("x",), {"x": jnp.asarray(grid)}, about="f on a grid"
    )
    chosen["dead_share"] = Observable(dead_share, about="share of neurons active on no sample")
    chosen["slope_variation"] = Observable(slope_variation, about="total variation of f'")
    if data.size > 1:
        chosen["on_sample_share"] = Observable(on_sample_share, about="share of knots at a sample")
        chosen["concentration"] = Observable(
            KnotConcentration(8), about="share of sum |c a| in the 8 fullest of 110 bins"
        )
    return chosen


ON_REQUEST = {"neurons": Observable(particles, ("particle",), about="coordinates of every neuron")}


def choose(observe: Any, defaults: Mapping[str, Observable]) -> dict[str, Observable]:
    """Resolves the argument ``observe`` of a sweep.

    None: the defaults. A sequence of names: these of the defaults and of ``ON_REQUEST``; ``"default"`` stands for all
    defaults. A dict: the defaults and these; a name mapped to None is left out; plain functions and ``FromStart`` are
    allowed.
    """
    if observe is None:
        return dict(defaults)
    if isinstance(observe, Mapping):
        chosen = dict(defaults)
        for name, one in observe.items():
            if name in PLAIN:
                raise ValueError(f"observe must not use the name {name!r}, which every sweep records itself")
            if one is None:
                chosen.pop(name, None)
            elif isinstance(one, Observable):
                chosen[name] = one
            elif isinstance(one, FromStart):
                chosen[name] = Observable(one.function, from_start=True)
            elif callable(one):
                chosen[name] = Observable(one)
            else:
                raise ValueError(f"observe[{name!r}] must be a function or Observable, got {one!r}")
        return chosen
    names = [observe] if isinstance(observe, str) else list(observe)
    known = {**defaults, **ON_REQUEST}
    unknown = [name for name in names if name not in (*known, "default")]
    if unknown:
        raise ValueError(f"observe must name observables among {sorted(known)} or 'default', got {unknown}")
    everything = dict(defaults) if "default" in names else {}
    return everything | {name: known[name] for name in names if name != "default"}
