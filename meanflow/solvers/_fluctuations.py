"""Fluctuations over initializations from one run: how solvers compute them, and the function that returns them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PyTree, Real

from meanflow import _boundary, _observable
from meanflow._boundary import Count, Natural, PRNGKey, checked, unchecked
from meanflow._loops import KeyBits, iterate
from meanflow._observable import Observable, Observables, Values
from meanflow._reuse import compiled
from meanflow.flows import _observables as observables
from meanflow.flows._equation import Population
from meanflow.flows._flow import INPUTS, Flow
from meanflow.flows._fluctuations import EXACT, Difference, Fluctuations
from meanflow.measures._cloud import Cloud
from meanflow.measures._dataset import Dataset
from meanflow.solvers._labelled import axis_names
from meanflow.solvers._run import Counts, Options, Times, problem_of, traced_run
from meanflow.solvers._solution import FINE, Settings, Solution, State, outcomes
from meanflow.solvers._step import ConstantStep
from meanflow.solvers._stepper import has_table

# A Runge-Kutta method of order 4 that needs no more memory than one stage (Carpenter and Kennedy 1994): its stages are
# one short loop, which compiles quickly also where it is differentiated.
KEEP = -np.array([0, 567301805773, 2404267990393, 3550918686646, 1275806237668]) / np.array(
    [1, 1357537059087, 2016746695238, 2091501179385, 842570457699]
)
ADD = np.array([1432997174477, 5161836677717, 1720146321549, 3134564353537, 2277821191437]) / np.array(
    [9575080441755, 13612068292357, 2090206949498, 4481467310338, 14882151754819]
)
PARTS = 2  # of each step that the adaptive run took: the method has one order less
FEW = 1 << 20  # particles times stages up to which the states of a run are all kept
# the relative error that steps which differ from run to run leave in the difference of two runs
UNEVEN = 1e-7


def part(options: Options, state: State | None) -> tuple[Options, dict[str, Fluctuations], bool]:
    """Return the options of the run itself, the fluctuations to be computed beside it, and whether they are all."""
    observe = options.observe
    named: Mapping[str, Observable] = observe if isinstance(observe, Mapping) else {}
    alone = isinstance(observe, Fluctuations)
    listed = {"": observe} if alone else named
    wanted = {name: one for name, one in listed.items() if isinstance(one, Fluctuations)}
    if not wanted:
        return options, {}, False
    if state is not None:
        raise ValueError("state must be None where fluctuations are observed: they count from the start")
    if isinstance(options.horizon, Times) and options.horizon.steady is not None:
        raise ValueError("steady must be None where fluctuations are observed: no two runs would end alike")
    others = {name: one for name, one in named.items() if name not in wanted}
    replayed = isinstance(options.method, diffrax.AbstractSolver) and has_table(options.method)
    return options._replace(observe=others, ends=replayed), wanted, alone


def with_fluctuations(
    solution: Solution,
    wanted: dict[str, Fluctuations],
    alone: bool,
    flow: Flow,
    cloud: Cloud,
    data: Dataset,
    options: Options,
) -> Solution:
    """Return the solution of the run of ``options`` with the fluctuations that ``part`` has found ``wanted``."""
    if not wanted:
        return solution
    stats = dict(solution.stats)
    ends = _boundary.concrete(stats.pop("ends")) if "ends" in stats else None
    # the program is a scan over the steps that the run took, where they are known; else over whatever another run takes
    horizon = options.horizon
    sizes = _sizes(ends, horizon) if ends is not None and isinstance(horizon, Times) else None
    even = sizes is not None or isinstance(horizon, Counts) or isinstance(options.rule, ConstantStep)
    smooth = isinstance(data, Population) or not flow.feature.has_kinks()
    # a centered flow subtracts what the networks predict at their own starts
    centered = flow.offset is not None and flow.offset.cloud is cloud
    flow = dataclasses.replace(flow, offset=None) if centered else flow
    found = {}
    for name, one in wanted.items():
        step = float(jnp.finfo(cloud.weights.dtype).eps if even else UNEVEN) ** (1 / 6)
        units = one.parts(cloud)
        if not smooth:
            # derivatives jump at kinks, which only differences over a distance see in which many kinks are passed
            step = units**-0.5
        known = _boundary.concrete(cloud.width)
        limit = one.directions is None and known is not None and bool(np.all(np.isinf(known)))
        exact = smooth and ((limit and units <= EXACT) or (one.directions or 0) >= units)
        how = Difference(step, smooth, exact)
        seen = _spread(one, flow, cloud, data, options._replace(ends=False), sizes, how)
        # of a run that failed nothing is known; on the host, where that takes no program
        names = outcomes(solution.result)
        if names is None or str(names) not in FINE:
            seen = jax.tree.map(lambda u: jnp.where(solution.ok, u, jnp.nan), seen)
        found[name] = seen
    observed = found[""] if alone else {**solution.observed, **found}
    axes = axis_names(wanted[""] if alone else wanted)
    settings = Settings(solution.settings.numbers, solution.settings.names + axes)
    return dataclasses.replace(solution, observed=observed, stats=stats, settings=settings)


def _sizes(ends: np.ndarray, horizon: Times) -> np.ndarray:
    """Return the steps of an adaptive run, cut at the save times: (saves, most steps between two), filled with 0."""
    start, end = (np.asarray(u) for u in (horizon.start, horizon.end))
    stops = end[None] if horizon.saves is None else np.asarray(horizon.saves)
    legs = []
    for low, high in zip([start, *stops[:-1]], stops, strict=True):
        between = ends[(ends > low) & (ends < high)]
        legs.append(np.repeat(np.diff([low, *between, high]) / PARTS, PARTS))
    most = max(map(len, legs))
    # one of few lengths, since another one compiles again: two digits in base 2
    grain = max(8, 1 << most.bit_length() - 2)
    most = -(-most // grain) * grain
    return np.stack([np.pad(leg, (0, most - len(leg))) for leg in legs]).astype(ends.dtype)


@compiled
def _spread(
    one: Fluctuations,
    flow: Flow,
    cloud: Cloud,
    data: Dataset,
    options: Options,
    sizes: np.ndarray | Array | None,
    how: Difference,
) -> dict[str, Values]:
    """Return what ``one`` finds about runs of these options, or of the steps ``sizes``."""
    options = options._replace(observe=one.of)
    passes_forward = isinstance(options.adjoint, diffrax.ForwardMode)

    def run(cloud: Cloud, forward: bool) -> Values:
        begun = flow.begin(cloud)
        if sizes is not None:
            return _replay(begun, cloud, data, options, sizes, not forward)
        counted = isinstance(options.horizon, Counts)
        adjoint = diffrax.ForwardMode() if forward and not counted else options.adjoint
        return traced_run(begun, cloud, data, options._replace(adjoint=adjoint), None).observed

    return one.of_runs(run, cloud, passes_forward, how)


def _replay(
    flow: Flow, cloud: Cloud, data: Dataset, options: Options, sizes: np.ndarray | Array, backward: bool
) -> Values:
    """Return what is observed along a run of the steps ``sizes`` (saves, steps between two), a short program."""
    problem = problem_of(flow, cloud, data, options)
    assert options.observe is not None
    observe: Observables = options.observe
    saves, steps = sizes.shape
    dtype = cloud.weights.dtype
    rows = (
        jnp.tile(jnp.asarray(KEEP, dtype), sizes.size),
        jnp.tile(jnp.asarray(ADD, dtype), sizes.size),
        jnp.repeat(jnp.asarray(sizes, dtype).ravel(), len(KEEP)),
    )

    def stage(state: tuple[PyTree, PyTree], row: tuple[Array, Array, Array]) -> tuple[PyTree, PyTree]:
        (y, way), (keep, add, size) = state, row
        way = jax.tree.map(lambda k, f: keep * k + size * f, way, problem.field(0.0, y))
        return jax.tree.map(lambda u, k: u + add * k, y, way), way

    def look(state: tuple[PyTree, PyTree]) -> Values:
        return _observable.measure(observe, problem, problem.seen(state[0]), problem.memory)

    start = problem.initial()
    blank = jax.tree.map(jnp.zeros_like, start)
    every = steps * len(KEEP)
    # a short run of a small cloud may keep all its states, which compiles sooner
    checkpoint = backward and saves * every * cloud.weights.size > FEW
    return iterate(stage, (start, blank), rows, saves * every, every, look, checkpoint=checkpoint)[1]


class Expansion(eqx.Module):
    """What is observed of networks of width m, to first order in 1/m: mean + bias/m, with covariance/m around it.

    Attributes:
        solution: the run, with its save times, energies and settings; ``solution.observed["fluctuations"]`` and
            ``solution.to_xarray()`` hold what is below.
    """

    solution: Solution

    @property
    def ts(self) -> Float[Array, " k"]:
        """The save times, (k,)."""
        return self.solution.ts

    @property
    def mean(self) -> Values:
        """What the run of the cloud itself shows at the save times, (k, ...)."""
        return self.solution.observed["fluctuations"]["mean"]

    @property
    def covariance(self) -> Values:
        """m times the covariance over initializations, (k, ..., ...): of an array (k, q) it is (k, q, q)."""
        return self.solution.observed["fluctuations"]["covariance"]

    @property
    def bias(self) -> Values:
        """m times the distance of the mean over initializations from the limit, (k, ...)."""
        return self._second("bias")

    @property
    def bias_error(self) -> Values:
        """The standard error of ``bias`` over its random directions, (k, ...); 0 where it has none."""
        return self._second("bias_error")

    def _second(self, name: str) -> Values:
        if name not in self.solution.observed["fluctuations"]:
            raise ValueError("directions must be at least 1 for a bias, got 0")
        return self.solution.observed["fluctuations"][name]

    @checked
    def deviation(self, width: _boundary.Positive | None = None) -> Values:
        """Return the standard deviation over initializations of networks of a width, (k, ...).

        Args:
            width: m; by default that of the cloud, which must be finite.
        """
        known = _boundary.concrete(self.solution.final.width)
        if width is None and known is not None and np.any(np.isinf(known)):
            raise ValueError("width must be given for a cloud of infinite width, got None")
        m = self.solution.final.width if width is None else width

        def root(mean: Array, covariance: Array) -> Array:
            size = mean[0].size
            variance = jnp.diagonal(covariance.reshape(-1, size, size), axis1=1, axis2=2)
            return jnp.sqrt(variance.reshape(mean.shape) / m)

        return jax.tree.map(root, self.mean, self.covariance)


def _seen(name: str, value: object) -> object:
    """Accept inputs, or anything to observe. A kind of ``_boundary``."""
    if isinstance(value, Mapping) and not all(isinstance(key, str) for key in value):
        raise ValueError(f"{name} must name what is observed by texts, got {_boundary.show(value)}")
    named = isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(one, str) for one in value)
    if value is None or named or isinstance(value, str | Mapping | Observable | Dataset):
        return value
    return (_boundary.function if callable(value) else INPUTS)(name, value)


def _solver(name: str, value: object) -> object:
    """Accept the two functions that run a flow. A kind of ``_boundary``."""
    from meanflow.solvers._continuous import solve
    from meanflow.solvers._discrete import descend

    if value is not solve and value is not descend:
        raise ValueError(f"{name} must be mf.solve or mf.descend, got {_boundary.show(value)}")
    return value


@checked
def fluctuations(
    flow: Flow,
    cloud: Cloud,
    data: Dataset,
    t1: _boundary.Number,
    x: Annotated[Real[ArrayLike, "n *d"] | observables.Observe, _seen] = None,
    *,
    directions: Natural | None = None,
    key: PRNGKey | None = None,
    paired: bool = False,
    chunk: Count = 64,
    run: Annotated[Callable[..., Solution], _solver] | None = None,
    **settings: Annotated[Any, unchecked("solve and descend check their own arguments")],
) -> Expansion:
    """Compute how networks of finite width scatter around one run: covariance and bias over initializations, times m.

    For m neurons drawn independently from the measure of the cloud the predictions f_m at a time obey

        m Cov f_m      ->  sum_i p_i (I_i - <I>)^2,  I_i = df/dp_i
        m (E f_m - f)  ->  1/2 sum_i p_i D^2 f[delta_i - mu, delta_i - mu]

    with the derivatives of what the run predicts in the weights of the cloud it starts from, at constant total mass.
    From a quadrature cloud that is the limit itself. From one random network it is an estimate of its error bars over
    initializations (the infinitesimal jackknife). Random minibatches are the same in all runs; noise is drawn for each
    neuron, and part of what is random.

    Derivatives go through kinks by the sliding solver. Where a model with kinks takes other steps (``descend``, or
    Heun's method) they are those between kinks, and the covariance lacks what neurons that pass them add.

    Args:
        flow, cloud, data, t1: as in ``solve``; with ``run=mf.descend`` the number of steps takes the place of t1.
        x: inputs (n,) or (n, d) at which to predict, by default those of the data; or anything else to observe, as
            ``observe`` of ``solve`` takes it: a function (flow, cloud, data) -> values such as ``mf.energy``, a data
            set for the loss on it, a name, a dict of these.
        directions: how many random directions the bias is averaged over (its standard error is ``bias_error``); 0 for
            no bias. At least as many as there are neurons: all of them, without error. By default that, for smooth
            flows from quadrature clouds of up to 1024 neurons, and 8 random directions otherwise.
        key: of the random directions; ``jax.random.key(0)`` by default.
        paired: whether the neurons were drawn in pairs, one behind the other, as by ``flow.init(..., paired=True)``.
        chunk: the most runs that are computed at once.
        run: ``mf.solve`` (the default) or ``mf.descend``.
        settings: further arguments of ``solve`` or ``descend``, such as ``ts``, ``step``, ``clock`` or ``optimizer``.

    Returns:
        An ``Expansion`` with ``mean`` (k, n), ``covariance`` (k, n, n), ``bias`` and ``bias_error`` (k, n) at the k
        save times, ``deviation(width)`` (k, n), and ``solution``. Observables of other shapes have them in place of n.
        Cost: the run; one pullback for each number and time, or one pushforward for each neuron where these are fewer;
        and four runs for each direction (two with kinks). Memory O(chunk) runs of which O(sqrt(steps)) states are kept.

    >>> import jax, jax.numpy as jnp, meanflow as mf
    >>> flow, data = mf.vanilla("tanh"), mf.Dataset(jnp.array([[1.0], [-0.5]]), jnp.array([1.0, 0.0]))
    >>> cloud = flow.init(jax.random.key(0), 64, dim=1)
    >>> found = mf.fluctuations(flow, cloud, data, 2.0, [[0.5]])
    >>> print(found.mean.shape, found.covariance.shape, found.deviation(100).round(4))
    (1, 1) (1, 1, 1) [[0.0125]]
    """
    from meanflow.solvers._continuous import solve

    of = _what(flow, cloud, data, x)
    one = Fluctuations(of, None if key is None else KeyBits(key), directions, paired, chunk)
    return Expansion((run or solve)(flow, cloud, data, t1, observe={"fluctuations": one}, **settings))


def _what(flow: Flow, cloud: Cloud, data: Dataset, x: object) -> Observables:
    """Return the observable behind the argument ``x``."""
    if x is None:
        if isinstance(data, Population):
            raise ValueError("x must be given for a population, which has no samples to predict, got None")
        return observables.Predictions()
    if isinstance(x, jax.Array):
        flow.bind(data).begin(cloud).check(cloud, x)
        return observables.Predictions(x)
    found = observables.resolve(x, flow.bind(data), data)  # type: ignore[arg-type]
    assert found is not None
    return found
