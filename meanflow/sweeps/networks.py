"""``sweep``: a flow, data and a grid in, one labelled data set out."""

import inspect
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, ArrayLike, Float, Int, Key, PyTree, UInt32

from meanflow import _checks
from meanflow._checks import array, count, either, flag, number, optional, sequence, unchecked
from meanflow._identity import Json, describe
from meanflow.flows.flow import Flow
from meanflow.flows.flow import prepare as check_fit
from meanflow.flows.observables import Observable
from meanflow.measures.cloud import Cloud
from meanflow.measures.dataset import DATA, Dataset
from meanflow.solvers.continuous import solve, step_budget
from meanflow.solvers.discrete import descend
from meanflow.solvers.solution import Solution
from meanflow.solvers.step import ConstantStep
from meanflow.sweeps import clouds, program
from meanflow.sweeps import grid as grids
from meanflow.sweeps.grid import Grid, Group, Value
from meanflow.sweeps.plan import AXES, FINITE, NUMBERS, RUN, SEEDS, Plan, any_key, as_key, as_seeds, numbers
from meanflow.sweeps.program import Values
from meanflow.sweeps.results import Observe, check_names, choose
from meanflow.sweeps.runner import Progress

if TYPE_CHECKING:  # slow to import
    import xarray

Model: TypeAlias = Flow | Callable[..., Flow]
Init: TypeAlias = Callable[..., Cloud]
Numbers: TypeAlias = Sequence[float] | Float[ArrayLike, "k"]
Counts: TypeAlias = Sequence[int] | Int[Array, "k"] | Int[np.ndarray, "k"]
AnyKey: TypeAlias = int | Key[Array, ""] | UInt32[ArrayLike, "words"]

TRACED_SETTINGS = ("step", "rtol", "atol", "steady", "temperature", "reaction")
STATIC_SETTINGS = (
    "solver",
    "optimizer",
    "clock",
    "adjoint",
    "batch_size",
    "replace",
    "statistics",
    "max_steps",
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Sweep(Plan):
    """A planned sweep of networks; nothing is computed until ``run``, ``values``, ``cloud`` or ``single`` is called.

    Attributes:
        shared: the data.
        flow: the model or a function of axis values that returns one.
        init: draws the initial clouds; None for the model's own law.
        observe: what is recorded.
        horizon, settings: arguments of the solver.
        taken: the axes that flow, init and solver take.
        nested, key: how random numbers depend on width and seed.
        along: name, values and units of the save axis.
    """

    flow: Model
    init: Init | None
    observe: dict[str, Observable]
    horizon: Values
    settings: Values
    taken: dict[str, tuple[str, ...]]
    nested: bool
    key: Key[Array, ""]
    along: Json

    @property
    def waste(self) -> float:
        """The share of padding among all stored particles."""
        return grids.padding_waste(self.groups, self.grid)

    def cell(self, group: Group) -> program.RunCell:
        """Return the program of one cell of a group."""
        fixed = dict(group.fixed)
        return program.RunCell(self.flow, self.observe, self.horizon, self.settings, self.taken, fixed)

    def cloud(self, **cell: Value) -> Cloud:
        """Return the initial cloud of a cell, named by its axis values, at its true width."""
        return jax.tree.map(jnp.asarray, self._cloud(self.grid.find(**cell)))

    def single(self, **cell: Value) -> Solution:
        """Run one cell alone, unpadded and unbatched, and return what the solver returns."""
        index = self.grid.find(**cell)
        (group,) = (g for g in self.groups if index in g.cells)
        values = self.grid.at(index)
        inputs = {"cloud": self.cloud(**cell), "axes": {n: values[n] for n in self._traced(group)}}
        if self._draws():
            inputs["key"] = self._batch_key(values)
        return self.cell(group).solution(self.shared, inputs)

    def values(self, data: Dataset | None = None) -> dict[str, Array]:
        """Return all results as arrays over the grid, a pure function of the data: jit it, differentiate it.

        All cells of a group run at once and in one process; use ``run`` for grids that need chunks. The initial clouds
        are constants.

        >>> import jax, jax.numpy as jnp, meanflow as mf
        >>> data = mf.Dataset(jnp.linspace(-1.0, 1.0, 4), jnp.array([1.0, -1.0, 1.0, 0.0]))
        >>> plan = mf.sweeps.prepare(mf.lifted(), data, widths=[4], deltas=[0.0], steps=2, step=0.1, observe=())
        >>> loss = lambda y: plan.values(mf.Dataset(data.x, y))["energy"][..., -1].sum()
        >>> jax.grad(loss)(data.y).shape
        (4,)
        """
        data = self.shared if data is None else data
        order = np.concatenate([group.cells for group in self.groups])
        with jax.ensure_compile_time_eval():  # the clouds are constants, also while a caller is being traced
            inputs = [jax.tree.map(jnp.asarray, self.inputs(g, g.cells)) for g in self.groups]
        parts = [program.batched(self.cell(g), data, i) for g, i in zip(self.groups, inputs, strict=True)]
        names = [name for name in parts[0] if all(name in part for part in parts)]
        back = np.argsort(order)
        whole = {}
        for name in names:
            some = [part[name] for part in parts]
            if len({u.shape[1:] for u in some}) > 1:
                continue  # particle records of different sizes
            whole[name] = jnp.concatenate(some)[back].reshape(*self.grid.shape, *some[0].shape[1:])
        return whole

    def inputs(self, group: Group, cells: Sequence[int], multiple: int = 1) -> PyTree[np.ndarray]:
        """Return padded clouds and axis values of some cells, as host arrays with a leading axis."""
        size = -(-group.size // multiple) * multiple
        values = [self.grid.at(cell) for cell in cells]
        inputs: dict[str, PyTree] = {"cloud": clouds.stack_padded([self._cloud(c) for c in cells], size)}
        inputs["axes"] = {name: numbers([v[name] for v in values]) for name in self._traced(group)}
        if self._draws():
            inputs["key"] = np.stack([np.asarray(self._batch_key(v)) for v in values])
        return inputs

    def identity(self) -> Json:
        """Return a description of model, data, axes, solver settings, observables and key."""
        return {
            "kind": "sweep",
            "flow": describe(self.flow),
            "data": {name: describe(getattr(self.shared, name)) for name in ("x", "y", "weights")},
            "axes": {name: describe(list(values)) for name, values in self.grid.axes.items()},
            "init": describe(self.init),
            "nested": self.nested,
            "key": jax.random.key_data(self.key).tolist(),
            "horizon": describe(self.horizon),
            "settings": describe(self.settings),
            "observe": describe(self.observe),
            "precision": str(jnp.result_type(float)),
        }

    def layout(self, chunks: Sequence[grids.Chunk] | None = None) -> Json:
        """Return axes, chunks, and names, units and meaning of the observables."""
        about = {
            name: {"dims": list(o.dims), "units": o.units, "about": o.about}
            for name, o in self.observe.items()
        }
        coords = {n: np.asarray(v).tolist() for o in self.observe.values() for n, v in o.coords.items()}
        univariate = self.shared.x.ndim == 1
        coords.setdefault(
            "sample", np.asarray(self.shared.x).tolist() if univariate else [*range(self.shared.size)]
        )
        more = {"along": self.along, "variables": about, "coords": coords}
        if univariate:
            more["samples"] = {name: np.asarray(getattr(self.shared, name)).tolist() for name in ("x", "y")}
        return super().layout(chunks) | more

    def check(self) -> None:
        """Make the checks that solvers skip while they are being traced, on the first cell of each group."""
        for group in self.groups:
            first = group.cells[0]
            cloud = jax.tree.map(jnp.asarray, self._cloud(first))
            flow = self._flow_at(self.grid.at(first))
            check_fit(flow.begin(cloud), cloud, self.shared)

    def _draws(self) -> bool:
        """Whether runs draw minibatches or noise, and need a key of their own."""
        given = {*self.settings, *self.taken["solver"]}
        return bool(given & {"batch_size", "temperature"})

    def _traced(self, group: Group) -> list[str]:
        fixed = dict(group.fixed)
        names = dict.fromkeys([*self.taken["flow"], *self.taken["solver"]])
        return [name for name in names if name not in fixed]

    def _keys(self, values: Values, width: int) -> Key[Array, ""]:
        key = jax.random.fold_in(self.key, values["seed"])
        return key if self.nested else jax.random.fold_in(key, width)

    def _batch_key(self, values: Values) -> UInt32[Array, "words"]:
        key = jax.random.fold_in(self._keys(values, values["width"]), values["width"])
        return jax.random.key_data(jax.random.fold_in(key, 1))

    def _flow_at(self, values: Values) -> Flow:
        if isinstance(self.flow, Flow):
            return self.flow
        return self.flow(**{name: values[name] for name in self.taken["flow"]})

    def _cloud(self, cell: int) -> Cloud:
        """Return the initial cloud of a cell as host arrays, at its true width."""
        values, places = self.grid.at(cell), self.grid.places(cell)
        width = max(self.grid.axes["width"]) if self.nested else values["width"]
        names = self.taken["init"] if self.init is not None else self.taken["flow"]
        # by place along the axis: texts of two laws or functions may well be equal
        tag = (width, values["seed"], *(places[name] for name in names))
        passed = {name: values[name] for name in names}
        cloud = clouds.remember(self, tag, lambda: self._draw(values, width, passed))
        if cloud.size > values["width"]:
            cloud = clouds.prefix(cloud, values["width"])
        if "delta" in values and "delta" not in self.taken["init"]:
            cloud = clouds.with_labels(cloud, values["delta"])
        if "scale" in values and "scale" not in self.taken["init"]:
            cloud = clouds.scaled(cloud, self._flow_at(values).feature.amplitude or "", values["scale"])
        return cloud

    def _draw(self, values: Values, width: int, passed: Values) -> Cloud:
        key = self._keys(values, width)
        if self.init is None:
            x = self.shared.x
            flow = self._flow_at(values).bind(self.shared)
            outputs = flow.loss.outputs(self.shared.y)
            return flow.init(key, width, dim=x.shape[1] if x.ndim == 2 else None, outputs=outputs)
        cloud = self.init(key, width, **passed)
        if not isinstance(cloud, Cloud):
            raise ValueError(f"init must return a Cloud, got {type(cloud).__name__}")
        if cloud.size != width:
            raise ValueError(f"init must return a cloud of the width it is given, {width}, got {cloud.size}")
        return cloud


def model(name: str, value: object) -> object:
    """Accept a flow, or a function that returns one."""
    if not isinstance(value, Flow) and (not callable(value) or inspect.isclass(value)):
        raise ValueError(f"{name} must be a Flow or a function that returns one, got {_checks.show(value)}")
    return value


WIDTHS = sequence(count(1))


@_checks.arguments(
    flow=model,
    data=DATA,
    widths=WIDTHS,
    deltas=optional(NUMBERS),
    scales=optional(FINITE),
    axes=optional(AXES),
    seeds=SEEDS,
    ts=optional(either(count(2), array((None,), least=1))),
    observe=unchecked("results.choose checks it, which knows the names of the model"),
    nested=flag,
    key=any_key,
    settings=unchecked("the solver checks each of them"),
    init=optional(_checks.function),
    t1=optional(number(above=0.0)),
    steps=optional(count(1)),
    every=optional(count(1)),
    chunk=optional(count(1)),
    waste=number(low=0.0, high=1.0),
)
def prepare(
    flow: Model,
    data: Dataset,
    *,
    widths: Counts,
    deltas: Numbers | None = None,
    scales: Numbers | None = None,
    axes: Mapping[str, Iterable[Value]] | None = None,
    seeds: int | Counts = 1,
    init: Init | None = None,
    t1: float | None = None,
    ts: int | Numbers | None = None,
    steps: int | None = None,
    every: int | None = None,
    observe: Observe = None,
    chunk: int | None = None,
    waste: float = 0.15,
    nested: bool = False,
    key: AnyKey = 0,
    **settings: Any,
) -> Sweep:
    """Plan a sweep without running it; the arguments are those of ``sweep``.

    Returns:
        A plan with ``run(store=, mesh=, progress=)``; ``values(data)``, all results as a pure function of the data;
        ``single(**cell)``, one cell run alone; ``cloud(**cell)``, its initial cloud; and ``grid``, ``groups``,
        ``chunks`` and ``waste``, which say how it would be run.
    """
    grid = _make_grid(widths, deltas, scales, axes, seeds)
    named = [name for name in grid.axes if name not in ("width", "seed")]
    taken = _find_takers(flow, init, named)
    static = [n for n in named if n in STATIC_SETTINGS or not grids.is_traceable(grid.axes[n])]
    template = _first_flow(flow, grid, taken)
    _check_inputs(template, data)
    _check_changes(template, grid, taken)
    clash = sorted(set(settings) & set(named))
    if clash:
        raise ValueError(f"{clash[0]} is given both as an axis and as a setting")
    settings.setdefault("clock", "lazy")  # equal to mean-field time for alpha = m
    horizon, along = _horizon(t1, ts, steps, every, settings, grid)
    if steps is None and settings.get("max_steps") is None and "max_steps" not in grid.axes:
        settings["max_steps"] = _most_steps(grid, settings.get("step"), **horizon)
    solver = solve if steps is None else descend
    _check_settings(solver, [*settings, *taken["solver"]])
    _check_values(solver, settings, {name: grid.axes[name] for name in taken["solver"]})
    _check_flows(flow, grid, taken)
    recorded = choose(observe, template.bind(data).observables(data))
    check_names(grid, recorded, along["name"])
    order = ["width", "seed", *(n for n in named if n not in static)]
    return Sweep(
        grid=grid,
        groups=grids.make_groups(grid, static, waste, 1, order),
        shared=data,
        flow=flow,
        init=init,
        observe=recorded,
        horizon=horizon,
        settings=settings,
        taken=taken,
        nested=nested,
        key=as_key(key),
        chunk=chunk,
        along=along,
    )


@_checks.arguments(flow=model, data=DATA, widths=WIDTHS, **RUN, plan=unchecked("prepare checks each of them"))
def sweep(
    flow: Model,
    data: Dataset,
    *,
    widths: Counts,
    store: str | pathlib.Path | None = None,
    mesh: Mesh | None = None,
    progress: Progress = None,
    **plan: Any,
) -> "xarray.Dataset":
    """Train one network per cell of a grid width x named axes x seed, in as few compiled programs as possible.

    Clouds are drawn at their true width, padded with weight zero to a common size and run side by side; widths are
    grouped so that padding stays below ``waste``. The result of a cell does not depend on its neighbours, on the chunk
    size or on the devices beyond rounding.

    Args:
        flow: the model, or a function of named axes (and ``width``, if it has such an argument) that returns one.
        data: training data, shared by all cells.
        widths: distinct numbers of neurons.
        deltas: balances of a ``lifted`` flow (the labels), -inf and +inf allowed; axis ``delta``.
        scales: factors of the initial amplitudes (r, a or c); axis ``scale``.
        axes: further axes by name. Each is passed to ``flow``, ``init`` or, if it is a setting such as ``step``, to the
            solver (the axis ``step`` is then called ``step_size``). Axes of numbers share one program; other values
            (names, solvers) get one program each.
        seeds: number of seeds, or their list.
        init: (key, width, **axes) -> Cloud; default ``flow.init``. It gets the axes it has arguments for.
        t1, ts: end time and save times (as in ``solve``; default start and end) of a run in continuous time.
        steps, every: number of steps and steps between saves (as in ``descend``) of a run in discrete time.
        observe: None for ``default_observables``; names of some of these (``"default"`` for all of them, ``"neurons"``
            for the coordinates of every neuron); or a dict of further ones.
        store: run directory. Finished chunks are kept there and a killed run goes on from them. One process writes
            there at a time; another run, or another division of the grid, is refused with the differences.
        chunk: most cells run at once; default about 2^15 particles per CPU device and 2^20 per accelerator.
        mesh: devices, axes ``sweep`` and ``particles`` (``sweeps.make_mesh``); default all devices along ``sweep``.
        waste: allowed share of padding among stored particles.
        nested: networks of one seed are prefixes of the widest; otherwise independent of each other.
        key: integer or PRNG key that all random numbers come from.
        progress: True, False, a function (cells done, cells in all), or None: a bar if the error output is a terminal.
        plan: settings of the solver: ``solver``, ``step``, ``rtol``, ``optimizer``, ``clock``, ... The clock is
            ``"lazy"`` by default, so that widths are compared at the same stage of training for every alpha.

    Returns:
        ``xarray.Dataset`` with axes width, the named ones, seed, then time (or step): ``energy``, the observables,
        ``t``, solver counts, and ``result`` (0 is success; a failed cell holds NaN from its failure on).

    >>> import jax.numpy as jnp, meanflow as mf
    >>> data = mf.Dataset(jnp.linspace(-1.0, 1.0, 5), jnp.array([1.0, -1.0, 1.0, 0.0, 1.0]), "sum")
    >>> ds = mf.sweep(mf.lifted(alpha="sqrt"), data, widths=[3, 4], deltas=[-1.0, float("inf")], seeds=2,
    ...               steps=4, every=2, step=0.01, observe=["angle_displacement"])
    >>> dict(ds.energy.sizes)
    {'width': 2, 'delta': 2, 'seed': 2, 'step': 3}
    """
    return prepare(flow, data, widths=widths, **plan).run(store=store, mesh=mesh, progress=progress)


def _make_grid(
    widths: Counts,
    deltas: Numbers | None,
    scales: Numbers | None,
    axes: Mapping[str, Iterable[Value]] | None,
    seeds: int | Counts,
) -> Grid:
    """Return the grid width x delta x scale x named axes x seed, checked."""
    named: dict[str, Iterable[Value]] = {"width": widths}
    if deltas is not None:
        named["delta"] = [float(d) for d in np.asarray(deltas, float).ravel()]
    if scales is not None:
        named["scale"] = [float(s) for s in np.asarray(scales, float).ravel()]
    for name, values in (axes or {}).items():
        if name in (*named, "seed", "step_size"):
            raise ValueError(f"axes must not use the name {name!r}, which is taken")
        named[name] = values
    named["seed"] = as_seeds(seeds)
    checked = grids.axis_values(named)
    checked["width"] = tuple(_checks.whole("widths", w, 1) for w in checked["width"])
    checked["seed"] = tuple(_checks.whole("seeds", s, 0) for s in checked["seed"])
    return Grid(checked)


def _find_takers(flow: Model, init: Init | None, named: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return which of the named axes flow, init and solver take; refuse an axis that reaches nothing."""
    taken = {
        "flow": () if isinstance(flow, Flow) else _takes(flow, [*named, "width"]),
        "init": () if init is None else _takes(init, named),
        "solver": tuple(n for n in named if n in TRACED_SETTINGS + STATIC_SETTINGS),
    }
    for name in named:
        if name in ("delta", "scale") or any(name in some for some in taken.values()):
            continue
        raise ValueError(
            f"axes[{name!r}] reaches nothing: flow and init do not take it, and the settings that can be swept are "
            f"{[*TRACED_SETTINGS, *STATIC_SETTINGS]}"
        )
    return taken


def _first_flow(flow: Model, grid: Grid, taken: Mapping[str, tuple[str, ...]]) -> Flow:
    """Return the model of the first cell, which stands for all of them in the checks."""
    if isinstance(flow, Flow):
        return flow
    first = grid.at(0)
    made = flow(**{n: first[n] for n in taken["flow"]})
    if not isinstance(made, Flow):
        raise ValueError(f"flow must return a Flow, got {type(made).__name__}")
    return made


def _takes(function: Callable[..., object], names: Sequence[str]) -> tuple[str, ...]:
    """Return the names among ``names`` that ``function`` has arguments for; **kwargs takes all but the width."""
    parameters = inspect.signature(function).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return tuple(n for n in names if n in parameters or (anything and n != "width"))


def _check_settings(solver: Callable[..., Solution], given: Sequence[str]) -> None:
    """Refuse a setting that the solver of the sweep does not have."""
    allowed = _settings_of(solver)
    stray = next((name for name in given if name not in allowed), None)
    if stray is None:
        return
    other, end = (descend, "steps") if solver is solve else (solve, "t1")
    hint = f" (it belongs to runs with {end})" if stray in _settings_of(other) else ""
    raise ValueError(f"settings of {solver.__name__} must be among {allowed}, got {stray!r}{hint}")


def _check_values(
    solver: Callable[..., Solution], settings: Mapping[str, object], axes: Mapping[str, Sequence[object]]
) -> None:
    """Check settings, and every value of an axis of settings, by the kinds of the solver: before anything compiles.

    Inside a compiled sweep their values are traced, and no check sees them.
    """
    kinds = solver.kinds  # type: ignore[attr-defined]
    for name, value in settings.items():
        kinds[name](name, value)
    for name, values in axes.items():
        for value in values:
            kinds[name](name, value)


def _check_flows(flow: Model, grid: Grid, taken: Mapping[str, tuple[str, ...]]) -> None:
    """Build the model for each value of each of its axes: one that is refused is refused before anything compiles."""
    if isinstance(flow, Flow):
        return
    first = {name: values[0] for name, values in grid.axes.items()}
    for name in taken["flow"]:
        for value in grid.axes[name]:
            values = first | {name: value}
            flow(**{n: values[n] for n in taken["flow"]})


def _settings_of(solver: Callable[..., Solution]) -> list[str]:
    """Return the arguments of a solver that are not the sweep's own business."""
    own = ("t0", "ts", "every", "observe", "key", "state", "throw")
    parameters = inspect.signature(solver).parameters.values()
    return sorted(p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in own)


def _check_inputs(flow: Flow, data: Dataset) -> None:
    """Refuse data whose inputs have another rank than those of the model."""
    rank = flow.feature.input_ndim
    if rank is not None and data.x.ndim != rank:
        raise ValueError(
            f"data.x must have shape {'(n,)' if rank == 1 else '(n, d)'} for this flow, got {data.x.shape}"
        )


def _check_changes(flow: Flow, grid: Grid, taken: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse axes delta and scale for a model whose clouds they cannot change."""
    if (
        "delta" in grid.axes
        and flow.space.label_name != "delta"
        and not any("delta" in some for some in taken.values())
    ):
        raise ValueError(
            "deltas need a flow whose labels are balances (meanflow.lifted), or an init that takes delta, "
            f"got a flow on {type(flow.space).__name__}"
        )
    if "scale" in grid.axes and "scale" not in taken["init"] and flow.feature.amplitude is None:
        raise ValueError(
            "scales need a feature that names its amplitude, or an init that takes scale, "
            f"got {type(flow.feature).__name__}"
        )


def _horizon(
    t1: float | None,
    ts: int | Numbers | None,
    steps: int | None,
    every: int | None,
    settings: Values,
    grid: Grid,
) -> tuple[Values, Json]:
    """Return the arguments of the solver that set the end and the saves, and the save axis of the result."""
    if (t1 is None) == (steps is None):
        raise ValueError(f"exactly one of t1 and steps must be given, got t1={t1!r}, steps={steps!r}")
    if steps is not None:
        if ts is not None:
            raise ValueError("ts belongs to t1; with steps pass every, the number of steps between saves")
        every = steps if every is None else every
        if steps % every:
            raise ValueError(f"every must divide steps, got steps={steps}, every={every}")
        done = list(range(0, steps + 1, every))
        return {"steps": steps, "every": every}, {"name": "step", "values": done, "units": "steps"}
    if every is not None or t1 is None:
        raise ValueError("every belongs to steps; with t1 pass ts, the save times")
    if ts is None or (isinstance(ts, int | np.integer) and not isinstance(ts, bool)):
        ts = np.linspace(0.0, 1.0, _checks.whole("ts", 2 if ts is None else ts, 2)) * t1
    times = np.asarray(ts, jnp.result_type(float))
    _checks.shape("ts", times, (None,))
    _checks.finite("ts", times)
    if times.size < 1 or np.any(np.diff(times) <= 0) or times[0] < 0 or times[-1] > times.dtype.type(t1):
        raise ValueError(f"ts must increase within [0, t1] = [0, {t1}], got {times}")
    units = "time on the clock of the run" if "clock" in grid.axes else f"{settings['clock']} time"
    along = {"name": "time", "values": times.tolist(), "units": units}
    return {"t1": float(t1), "ts": jnp.asarray(times)}, along


def _most_steps(grid: Grid, step: object, t1: float, ts: Float[Array, "times"]) -> int:
    """Return the number of steps that the smallest step of the grid needs; while it is traced it is unknown."""
    if "step" in grid.axes and grids.is_traceable(grid.axes["step"]):
        step = min(grid.axes["step"])
    rule = ConstantStep(jnp.asarray(step, float)) if isinstance(step, int | float | np.number) else None
    return step_budget(rule, jnp.asarray(0.0), jnp.asarray(t1), ts)
