"""What a run of a flow records at its save times: what every model offers, and how users ask for it.

All quantities ignore padding (weight zero), so a run gives the same numbers at every stored size.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import ArrayLike, Float

from meanflow import _boundary
from meanflow._boundary import checked
from meanflow._numerics import dominant_vector, safe_divide, safe_sqrt, wrap_angle
from meanflow._observable import Observable, Values, recorded
from meanflow._reuse import canonical
from meanflow.flows import _equation as equation
from meanflow.measures._cloud import BatchNormNeurons, Cloud, Neurons
from meanflow.measures._dataset import Dataset

if TYPE_CHECKING:
    from meanflow.flows._flow import Flow
    from meanflow.flows._problem import Problem

# the kernel drift looks at this many samples at most: its cost grows with their square, and a kernel that drifts does
# so on any of them
KERNEL_POINTS = 64


class FunctionObservable(Observable):
    """A plain function as an observable; users pass the function itself.

    Attributes:
        function: (flow, cloud, data) -> values; with ``from_start`` a fourth argument is the cloud at the start.
        from_start: whether the function compares with the start.
    """

    function: Callable[..., Values]
    from_start: bool = eqx.field(static=True, default=False, kw_only=True)

    def measure(self, problem: "Problem", cloud: Cloud, memory: Values) -> Values:
        """Call the function."""
        start = (problem.start,) if self.from_start else ()
        return recorded(self.function(problem.flow, cloud, problem.data, *start))


class Dissipation(Observable):
    """-dE/dt on the clock of the run."""

    def measure(self, problem: "Problem", cloud: Cloud, memory: Values) -> jax.Array:
        """Return a scalar."""
        return problem.dissipation(cloud)


class Predictions(Observable):
    """f at fixed inputs, or at the samples.

    Attributes:
        x: (k,) or (k, d); None for the inputs of the training data.
    """

    x: jax.Array | None = None

    def measure(self, problem: "Problem", cloud: Cloud, memory: Values) -> jax.Array:
        """Return predictions (k,), or with one more axis for the outputs."""
        x = problem.data.x if self.x is None else self.x
        return equation.predict(problem.flow, cloud, x.astype(cloud.weights.dtype))


class KernelDrift(Observable):
    """|K_t - K_0| / |K_0| of the tangent kernel on the samples (64 of them, evenly chosen, if there are more)."""

    def _kernel(self, problem: "Problem", cloud: Cloud) -> jax.Array:
        data = problem.data
        points = min(data.size, KERNEL_POINTS)
        real = jnp.minimum(data.real, points)  # padding of the data has no say
        index = jnp.arange(points)
        gap = (data.real - 1) / jnp.maximum(real - 1, 1)
        x = data.x[jnp.where(index < real, jnp.round(index * gap), 0).astype(int)]
        kernel = equation.tangent_kernel(problem.flow, cloud, x, x)
        own = (index[:, None] < real) & (index[None, :] < real)
        return kernel * own.astype(kernel.dtype).reshape(points, points, *(1,) * (kernel.ndim - 2))

    def begin(self, problem: "Problem", cloud: Cloud) -> jax.Array:
        """Return the kernel at the start."""
        return self._kernel(problem, cloud)

    def measure(self, problem: "Problem", cloud: Cloud, memory: Values) -> jax.Array:
        """Return a scalar."""
        change = self._kernel(problem, cloud) - memory
        return safe_sqrt(jnp.sum(change**2)) / jnp.linalg.norm(memory)


def sharpness(flow: "Flow", cloud: Cloud, data: Dataset, steps: int = 40) -> jax.Array:
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

    def measure(self, problem: "Problem", cloud: Cloud, memory: Values) -> jax.Array:
        """Return a scalar."""
        return problem.pace(cloud, flow=problem.flow) * sharpness(problem.flow, cloud, problem.data)


def accuracy(flow: "Flow", cloud: Cloud, data: Dataset) -> jax.Array:
    """Return the share of the samples, by their weights, whose largest output is that of their class."""
    guess = jnp.argmax(equation.predict(flow, cloud, data.x), axis=-1)
    truth = data.y if data.y.ndim == 1 else jnp.argmax(data.y, axis=-1)
    return jnp.sum(jnp.where(guess == truth, data.weights, 0.0)) / jnp.sum(data.weights)


def displacement(flow: "Flow", cloud: Cloud, data: Dataset, start: Cloud) -> jax.Array:
    """Return the root mean square distance of the coordinates from the start, angles the short way round."""
    moved = jax.tree.map(jnp.subtract, cloud.particles, start.particles)
    for name in flow.feature.angles:
        moved = moved._replace(**{name: wrap_angle(getattr(moved, name))})
    squares = [jnp.sum(u.reshape(u.shape[0], -1) ** 2, axis=1) for u in jax.tree.leaves(moved)]
    return _rms(cloud, jnp.sum(jnp.stack(squares), axis=0))


def angle_displacement(flow: "Flow", cloud: Cloud, data: Dataset, start: Cloud) -> jax.Array:
    """Return the root mean square angle between the directions of the neurons now and at the start, in radians."""
    return _rms(cloud, flow.feature.turn(cloud, start) ** 2)


def invariant_drift(flow: "Flow", cloud: Cloud, data: Dataset, start: Cloud) -> jax.Array:
    """Return the root mean square change of what the flow conserves, relative to its scale at the start."""
    law = flow.invariant()
    if law is None:
        raise ValueError("invariant_drift needs a flow with a conserved quantity, got one without")
    (now, _), (then, scale) = law(cloud), law(start)
    return _rms(cloud, (now - then) ** 2) / _rms(start, scale**2)


def coordinates(flow: "Flow", cloud: Cloud, data: Dataset) -> dict[str, jax.Array]:
    """Return one (m,) array per coordinate, NaN for padding; a vector coordinate b gives b_0, b_1, ..."""
    real = cloud.weights > 0
    named: dict[str, jax.Array] = {}
    for name, value in cloud.particles._asdict().items():
        columns = {name: value} if value.ndim == 1 else {f"{name}_{k}": u for k, u in enumerate(value.T)}
        named |= {key: jnp.where(real, column, jnp.nan) for key, column in columns.items()}
    return named


@checked
def alignment(
    directions: Float[ArrayLike, "k d"],
) -> Callable[["Flow", Cloud, Dataset], Values]:
    """Return an observable: the alignment of two-layer neurons with ``directions``, and of a network with its targets.

    With weights proportional to p_i |a_i| (the norm of the row, for several outputs) and b^ = b/|b| without bias, it
    records ``subspace``, the mean of |U b^|^2, which is k/d for random neurons and 1 for those that have found the
    span; ``direction`` (k,), the mean of (u_j . b^)^2 for each row of U; and ``target``, the correlation of f and y
    over the samples, <f, y> / (|f| |y|).

    Args:
        directions: U (k, d), orthonormal rows, for instance ``Teacher.directions``.

    >>> import jax, meanflow as mf
    >>> teacher = mf.measures.teachers.single_index(8, "hermite3")
    >>> data = teacher.draw(jax.random.key(0), 32)
    >>> flow = mf.vanilla("tanh")
    >>> run = mf.descend(flow, flow.init(jax.random.key(1), 16, dim=8), data, 2, step=0.1,
    ...                  observe=mf.flows.alignment(teacher.directions))
    >>> run.observed["subspace"].shape, run.observed["direction"].shape
    ((2,), (2, 1))
    """
    rows = jnp.asarray(directions)

    def measure(flow: "Flow", cloud: Cloud, data: Dataset) -> dict[str, jax.Array]:
        if not isinstance(cloud.particles, Neurons | BatchNormNeurons):
            raise ValueError(f"alignment needs neurons (a, b), got {type(cloud.particles).__name__}")
        a, b = cloud.particles.a, cloud.particles.b[:, : rows.shape[1]]
        if b.shape[1] < rows.shape[1]:
            raise ValueError(
                f"directions must have at most {b.shape[1]} columns, like the inner weights, got {rows.shape[1]}"
            )
        size = jnp.abs(a) if a.ndim == 1 else jnp.linalg.norm(a, axis=1)
        share = safe_divide(cloud.weights * size, jnp.sum(cloud.weights * size))
        each = safe_divide((b @ rows.T.astype(b.dtype)) ** 2, jnp.sum(b**2, axis=1)[:, None])
        found = {"subspace": share @ jnp.sum(each, axis=1), "direction": share @ each}
        f, y = equation.predict(flow, cloud, data.x), data.y
        # class numbers have no correlation with the k outputs that tell them apart
        if f.shape != y.shape:
            return found
        weights = data.weights if f.ndim == 1 else data.weights[:, None]
        product = lambda u, v: jnp.sum(weights * u * v)
        return found | {"target": safe_divide(product(f, y), jnp.sqrt(product(f, f) * product(y, y)))}

    return measure


def _rms(cloud: Cloud, squares: jax.Array) -> jax.Array:
    return safe_sqrt(cloud.weights @ jnp.where(cloud.weights > 0, squares, 0.0))


def common_observables(flow: "Flow", data: Dataset) -> dict[str, Observable]:
    """Return the observables that every model has, and those that its parts make possible."""
    from meanflow.flows._fluctuations import Fluctuations
    from meanflow.flows._margins import Margin, trained_norms  # which imports this module

    since = functools.partial(FunctionObservable, from_start=True)
    chosen: dict[str, Observable] = {
        "dissipation": Dissipation(about="-dE/dt on the clock of the run"),
        "displacement": since(displacement, about="rms change of the coordinates"),
        "kernel_drift": KernelDrift(about="|K_t - K_0| / |K_0| on the samples", usual=False),
        "neurons": FunctionObservable(
            coordinates, dims=("particle",), about="coordinates of every neuron", usual=False
        ),
        "sharpness": Sharpness(about="top eigenvalue of the Hessian in the metric of the flow", usual=False),
    }
    if not isinstance(data, equation.Population):
        chosen["fluctuations"] = Fluctuations(
            Predictions(),
            dims=("sample",),
            about="mean, m covariance and m bias over initializations of the predictions at the samples",
            usual=False,
        )
    if flow.loss.labels:
        chosen |= {
            f"{norm}_margin": Margin(norm, about=f"least margin over the {norm} norm", usual=False)
            for norm in trained_norms(flow)
        }
    if flow.loss.classifies:
        chosen["accuracy"] = FunctionObservable(
            accuracy, about="share of the samples that are classified correctly"
        )
    if flow.feature.has_direction:
        chosen["angle_displacement"] = since(angle_displacement, units="rad", about="rms turn of the neurons")
    if flow.invariant() is not None:
        chosen["invariant_drift"] = since(
            invariant_drift, about="rms relative change of what the flow conserves"
        )
    return chosen


class OnOtherData(Observable):
    """The loss on other data than those of training, without the penalty; with classes also the accuracy there.

    Attributes:
        data: the other data, such as a test set.
    """

    data: Dataset

    def measure(self, problem: "Problem", cloud: Cloud, memory: Values) -> Values:
        """Return a scalar, or the scalars ``loss`` and ``accuracy``."""
        flow = problem.flow
        flow.check(cloud, self.data.x)
        flow.loss.check(flow.feature.output_shape(cloud), self.data.y)
        loss = equation.risk(flow, cloud, self.data)
        return {"loss": loss, "accuracy": accuracy(flow, cloud, self.data)} if flow.loss.classifies else loss


One = Observable | Dataset | Callable[..., Values] | str
Observe = None | One | Sequence[str] | Mapping[str, One]


def as_observable(name: str, one: object, known: Mapping[str, Observable]) -> Observable:
    """Return an observable for what a user gave.

    It is an ``Observable``, the name of one of those that are ``known``, a data set for the loss on it, or a function
    of (flow, cloud, data), or of (flow, cloud, data, start).
    """
    if isinstance(one, Observable):
        return one
    if isinstance(one, str):
        return named([one], known)[one]
    if isinstance(one, Dataset):
        return OnOtherData(one, about="loss on other data")
    try:
        _boundary.taking(3)(name, one)
        from_start = False
    except TypeError as problem:
        try:
            _boundary.taking(4)(name, one)
        except TypeError:
            raise problem from None
        from_start = True
    return FunctionObservable(canonical(one), from_start=from_start)  # type: ignore[arg-type]


def resolve(observe: Observe, flow: "Flow", data: Dataset) -> Observable | dict[str, Observable] | None:
    """Return the observables behind the argument ``observe`` of a solver.

    Args:
        observe: None, an ``Observable``, a function or a data set, a dict of these by name, or names of the model's own
            observables (one name, or a sequence of names).
        flow: the model, bound to its statistics.
        data: training data.
    """
    if observe is None:
        return None
    known = flow.observables(data)
    if isinstance(observe, Mapping):
        observe = _boundary.mapping(_boundary.unchecked("checked below"))("observe", observe)  # type: ignore[assignment]
        if "energy" in observe:
            raise ValueError("observe must not use the name 'energy', which every run records itself")
        return {name: as_observable(f"observe[{name!r}]", one, known) for name, one in observe.items()}
    if isinstance(observe, list | tuple):
        return named(observe, known)
    found = as_observable("observe", observe, known)
    return {observe: found} if isinstance(observe, str) else found


def named(names: Sequence[str], known: Mapping[str, Observable]) -> dict[str, Observable]:
    """Return the observables of these names, out of ``known``."""
    unknown = [name for name in names if not isinstance(name, str) or name not in known]
    if unknown:
        raise ValueError(f"observe must name observables among {sorted(known)}, got {unknown}")
    return {name: known[name] for name in names}
