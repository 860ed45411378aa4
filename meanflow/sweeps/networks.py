"""``sweep``: a flow, data and a grid in, one labelled data set out."""

import inspect
import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from meanflow import _checks
from meanflow.flows.features import BatchNormed, TwoLayer
from meanflow.flows.flow import Flow
from meanflow.flows.univariate.models import Univariate
from meanflow.geometry.balance import Lifted
from meanflow.measures.cloud import Cloud
from meanflow.measures.dataset import Dataset
from meanflow.solvers.descend import descend
from meanflow.solvers.solution import Solution
from meanflow.solvers.solve import _step_budget, solve
from meanflow.sweeps import clouds, program
from meanflow.sweeps import grid as grids
from meanflow.sweeps.grid import Grid, Group
from meanflow.sweeps.identity import describe
from meanflow.sweeps.labels import PLAIN, SHOWN
from meanflow.sweeps.observables import Observable, choose, default_observables, on_clock
from meanflow.sweeps.plan import Plan, as_key, numbers

TRACED_SETTINGS = ("step", "rtol", "atol", "steady")
STATIC_SETTINGS = ("solver", "optimizer", "clock", "adjoint", "batch_size", "statistics", "max_steps")


@dataclass(kw_only=True)
class Sweep(Plan):
    """A planned sweep: nothing is computed until ``run``, ``values``, ``cloud`` or ``single`` is called.

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

    flow: Any
    init: Callable[..., Cloud] | None
    observe: dict[str, Observable]
    horizon: dict[str, Any]
    settings: dict[str, Any]
    taken: dict[str, tuple[str, ...]]
    nested: bool
    key: jax.Array
    along: dict[str, Any]
    _drawn: dict[Any, Cloud] = field(default_factory=dict)

    @property
    def waste(self) -> float:
        """Share of padding among all stored particles."""
        return grids.padding_waste(self.groups, self.grid)

    def cell(self, group: Group) -> program.RunCell:
        """The program of one cell of a group."""
        fixed = dict(group.fixed)
        observe = self.observe
        if "clock" in fixed:  # what is measured in time follows the clock of the cell
            observe = {name: on_clock(one, fixed["clock"]) for name, one in observe.items()}
        return program.RunCell(self.flow, observe, self.horizon, self.settings, self.taken, fixed)

    def cloud(self, **cell: Any) -> Cloud:
        """The initial cloud of a cell, at its true width."""
        return jax.tree.map(jnp.asarray, self._cloud(self.grid.at(self.grid.find(**cell))))

    def single(self, **cell: Any) -> Solution:
        """One cell run alone, unpadded and unbatched, as the solver returns it."""
        index = self.grid.find(**cell)
        (group,) = (g for g in self.groups if index in g.cells)
        values = self.grid.at(index)
        inputs = {"cloud": self.cloud(**cell), "axes": {n: values[n] for n in self._traced(group)}}
        if self._has_batches():
            inputs["key"] = self._batch_key(values)
        return self.cell(group).solution(self.shared, inputs)

    def values(self, data: Dataset | None = None) -> dict[str, jax.Array]:
        """All results as arrays over the grid, a pure function of the data: jit it, differentiate it.

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

    def inputs(self, group: Group, cells: Sequence[int]) -> dict[str, Any]:
        """Padded clouds and axis values of some cells, as host arrays with a leading axis."""
        size = -(-group.size // self.multiple) * self.multiple
        values = [self.grid.at(cell) for cell in cells]
        inputs: dict[str, Any] = {"cloud": clouds.stack_padded([self._cloud(v) for v in values], size)}
        inputs["axes"] = {name: numbers([v[name] for v in values]) for name in self._traced(group)}
        if self._has_batches():
            inputs["key"] = np.stack([np.asarray(self._batch_key(v)) for v in values])
        return inputs

    def identity(self) -> dict[str, Any]:
        """Model, data, axes, solver settings, observables and key."""
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

    def layout(self) -> dict[str, Any]:
        """Axes, chunks, and names, units and meaning of the observables."""
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
        return super().layout() | more

    def check(self) -> None:
        """The checks of the solvers that are skipped while they are being traced, on the first cell of each group."""
        for group in self.groups:
            values = self.grid.at(group.cells[0])
            cloud = jax.tree.map(jnp.asarray, self._cloud(values))
            self._flow_at(values).bind(self.shared).check(cloud, self.shared.x)

    def _has_batches(self) -> bool:
        return "batch_size" in self.settings or "batch_size" in self.taken["solver"]

    def _traced(self, group: Group) -> list[str]:
        fixed = dict(group.fixed)
        names = dict.fromkeys([*self.taken["flow"], *self.taken["solver"]])
        return [name for name in names if name not in fixed]

    def _keys(self, values: dict[str, Any], width: int) -> jax.Array:
        key = jax.random.fold_in(self.key, values["seed"])
        return key if self.nested else jax.random.fold_in(key, width)

    def _batch_key(self, values: dict[str, Any]) -> jax.Array:
        key = jax.random.fold_in(self._keys(values, values["width"]), values["width"])
        return jax.random.key_data(jax.random.fold_in(key, 1))

    def _flow_at(self, values: dict[str, Any]) -> Flow:
        if isinstance(self.flow, Flow):
            return self.flow
        return self.flow(**{name: values[name] for name in self.taken["flow"]})

    def _cloud(self, values: dict[str, Any]) -> Cloud:
        """Initial cloud of a cell as host arrays, at its true width."""
        width = max(self.grid.axes["width"]) if self.nested else values["width"]
        names = self.taken["init"] if self.init is not None else self.taken["flow"]
        passed = {name: values[name] for name in names}
        tag = (width, values["seed"], tuple(map(str, passed.values())))
        if tag not in self._drawn:
            if len(self._drawn) > 64:
                self._drawn.clear()  # neighbouring cells share draws, distant ones do not
            self._drawn[tag] = jax.tree.map(np.asarray, self._draw(values, width, passed))
        cloud = self._drawn[tag]
        if cloud.size > values["width"]:
            cloud = clouds.prefix(cloud, values["width"])
        if "delta" in values and "delta" not in self.taken["init"]:
            cloud = clouds.with_labels(cloud, values["delta"])
        if "scale" in values and "scale" not in self.taken["init"]:
            cloud = clouds.scaled(cloud, values["scale"])
        return cloud

    def _draw(self, values: dict[str, Any], width: int, passed: dict[str, Any]) -> Cloud:
        key = self._keys(values, width)
        if self.init is None:
            x = self.shared.x
            flow = self._flow_at(values).bind(self.shared)
            return flow.init(key, width, dim=x.shape[1] if x.ndim == 2 else None)
        cloud = self.init(key, width, **passed)
        if not isinstance(cloud, Cloud):
            raise ValueError(f"init must return a Cloud, got {type(cloud).__name__}")
        if cloud.size != width:
            raise ValueError(f"init must return a cloud of the width it is given, {width}, got {cloud.size}")
        return cloud


def prepare(
    flow: Flow | Callable[..., Flow],
    data: Dataset,
    *,
    widths: Sequence[int],
    deltas: Sequence[float] | None = None,
    scales: Sequence[float] | None = None,
    axes: Mapping[str, Sequence[Any]] | None = None,
    seeds: int | Sequence[int] = 1,
    init: Callable[..., Cloud] | None = None,
    t1: float | None = None,
    ts: Any = None,
    steps: int | None = None,
    every: int | None = None,
    observe: Any = None,
    chunk: int | None = None,
    waste: float = 0.15,
    nested: bool = False,
    key: Any = 0,
    **settings: Any,
) -> Sweep:
    """Plans a sweep without running it; arguments as in ``sweep``."""
    if not isinstance(flow, Flow) and not callable(flow):
        raise ValueError(f"flow must be a Flow or a function that returns one, got {type(flow).__name__}")
    if not isinstance(data, Dataset):
        raise ValueError(f"data must be a meanflow.Dataset, got {type(data).__name__}")
    grid = _make_grid(widths, deltas, scales, axes, seeds)
    named = [name for name in grid.axes if name not in ("width", "seed")]
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
    static = [n for n in named if n in STATIC_SETTINGS or not grids.is_traceable(grid.axes[n])]
    first = grid.at(0)
    template = flow if isinstance(flow, Flow) else flow(**{n: first[n] for n in taken["flow"]})
    if not isinstance(template, Flow):
        raise ValueError(f"flow must return a Flow, got {type(template).__name__}")
    _check_inputs(template, data)
    _check_labels(template, grid, taken)
    clash = sorted(set(settings) & set(named))
    if clash:
        raise ValueError(f"{clash[0]} is given both as an axis and as a setting")
    settings.setdefault("clock", "lazy")  # equal to mean-field time for alpha = m
    horizon, along = _horizon(t1, ts, steps, every, settings, grid)
    _check_settings(solve if steps is None else descend, [*settings, *taken["solver"]])
    recorded = choose(observe, default_observables(template.bind(data), data, settings["clock"]))
    _check_names(grid, recorded, along["name"])
    if chunk is not None:
        chunk = _checks.whole("chunk", chunk, 1)
    key = as_key(key)
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
        key=key,
        chunk=chunk,
        along=along,
    )


def sweep(
    flow: Flow | Callable[..., Flow],
    data: Dataset,
    *,
    widths: Sequence[int],
    store: str | pathlib.Path | None = None,
    mesh: Mesh | None = None,
    progress: Any = None,
    **plan: Any,
) -> Any:
    """Trains one network per cell of a grid width x named axes x seed, in as few compiled programs as possible.

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
        store: run directory. Finished chunks are kept there and a killed run goes on from them.
        chunk: most cells run at once; default about 2^13 particles per CPU device and 2^20 per accelerator.
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


def _make_grid(widths: Any, deltas: Any, scales: Any, axes: Any, seeds: Any) -> Grid:
    named: dict[str, Any] = {"width": widths}
    if isinstance(widths, str | int):
        raise ValueError(f"widths must be a sequence of integers, got {widths!r}")
    if deltas is not None:
        named["delta"] = [float(d) for d in np.asarray(deltas, float).ravel()]
    if scales is not None:
        named["scale"] = [float(s) for s in np.asarray(scales, float).ravel()]
        _checks.finite("scales", named["scale"])
    for name, values in (axes or {}).items():
        if name in (*named, "seed", "step_size"):
            raise ValueError(f"axes must not use the name {name!r}, which is taken")
        named[name] = values
    count = isinstance(seeds, int | np.integer) and not isinstance(seeds, bool)
    named["seed"] = list(range(_checks.whole("seeds", seeds, 1))) if count else seeds
    checked = grids.axis_values(named)
    checked["width"] = tuple(_checks.whole("widths", w, 1) for w in checked["width"])
    checked["seed"] = tuple(_checks.whole("seeds", s, 0) for s in checked["seed"])
    return Grid(checked)


def _takes(function: Callable[..., Any], names: Sequence[str]) -> tuple[str, ...]:
    """The names among ``names`` that ``function`` has arguments for; **kwargs takes all but the width."""
    parameters = inspect.signature(function).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return tuple(n for n in names if n in parameters or (anything and n != "width"))


def _check_settings(solver: Callable[..., Any], given: Sequence[str]) -> None:
    """Refuses a setting that the solver of the sweep does not have."""
    allowed = _settings_of(solver)
    stray = next((name for name in given if name not in allowed), None)
    if stray is None:
        return
    other, end = (descend, "steps") if solver is solve else (solve, "t1")
    hint = f" (it belongs to runs with {end})" if stray in _settings_of(other) else ""
    raise ValueError(f"settings of {solver.__name__} must be among {allowed}, got {stray!r}{hint}")


def _settings_of(solver: Callable[..., Any]) -> list[str]:
    """Arguments of a solver that are not the sweep's own business."""
    own = ("t0", "ts", "every", "observe", "key", "state", "throw")
    parameters = inspect.signature(solver).parameters.values()
    return sorted(p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in own)


def _check_names(grid: Grid, observe: Mapping[str, Observable], along: str) -> None:
    """Refuses observables and their axes that are called like an axis of the grid, before hours of computing."""
    dims = {d for one in observe.values() for d in one.dims}
    for name in (SHOWN.get(n, n) for n in grid.axes):
        if name in PLAIN or name in observe or name in dims or name == along:
            raise ValueError(
                f"axes and observables need different names, got {name!r} for an axis and for something recorded"
            )


def _check_inputs(flow: Flow, data: Dataset) -> None:
    univariate = isinstance(flow.feature, Univariate)
    if (univariate and data.x.ndim != 1) or (
        isinstance(flow.feature, TwoLayer | BatchNormed) and data.x.ndim != 2
    ):
        raise ValueError(
            f"data.x must have shape {'(n,)' if univariate else '(n, d)'} for this flow, got {data.x.shape}"
        )


def _check_labels(flow: Flow, grid: Grid, taken: dict[str, tuple[str, ...]]) -> None:
    labelled = isinstance(flow.space, Lifted) and flow.space.limit is None
    if "delta" in grid.axes and not labelled and not any("delta" in some for some in taken.values()):
        raise ValueError(
            "deltas need a flow whose labels are balances (meanflow.lifted), or an init that takes delta, "
            f"got a flow on {type(flow.space).__name__}"
        )
    if "scale" in grid.axes and "scale" not in taken["init"] and flow.feature.record not in clouds.AMPLITUDE:
        raise ValueError("scales need neurons of type Neurons, Polar or Affine, or an init that takes scale")


def _horizon(
    t1: Any, ts: Any, steps: Any, every: Any, settings: dict[str, Any], grid: Grid
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of the solver that set the end and the saves, and the save axis of the result."""
    if (t1 is None) == (steps is None):
        raise ValueError(f"exactly one of t1 and steps must be given, got t1={t1!r}, steps={steps!r}")
    if steps is not None:
        if ts is not None:
            raise ValueError("ts belongs to t1; with steps pass every, the number of steps between saves")
        steps = _checks.whole("steps", steps, 1)
        every = steps if every is None else _checks.whole("every", every, 1)
        if steps % every:
            raise ValueError(f"every must divide steps, got steps={steps}, every={every}")
        count = list(range(0, steps + 1, every))
        return {"steps": steps, "every": every}, {"name": "step", "values": count, "units": "steps"}
    if every is not None:
        raise ValueError("every belongs to steps; with t1 pass ts, the save times")
    _checks.finite("t1", t1)
    _checks.at_least("t1", t1, 0.0, strict=True)
    times = (
        np.linspace(0.0, 1.0, _checks.whole("ts", 2 if ts is None else ts, 2)) * t1 if _is_count(ts) else ts
    )
    times = np.asarray(times, jnp.result_type(float))
    _checks.shape("ts", times, (None,))
    _checks.finite("ts", times)
    if times.size < 1 or np.any(np.diff(times) <= 0) or times[0] < 0 or times[-1] > times.dtype.type(t1):
        raise ValueError(f"ts must increase within [0, t1] = [0, {t1}], got {times}")
    if settings.get("max_steps") is None and "max_steps" not in grid.axes:
        # inside the program the step is traced and its budget unknown
        step = min(grid.axes["step"]) if _numeric_axis(grid, "step") else settings.get("step")
        plain = isinstance(step, int | float | np.generic)
        settings["max_steps"] = _step_budget(step if plain else None, jnp.asarray(0.0), jnp.asarray(t1))
    units = "time on the clock of the run" if "clock" in grid.axes else f"{settings['clock']} time"
    along = {"name": "time", "values": times.tolist(), "units": units}
    return {"t1": float(t1), "ts": jnp.asarray(times)}, along


def _is_count(ts: Any) -> bool:
    return ts is None or (isinstance(ts, int | np.integer) and not isinstance(ts, bool))


def _numeric_axis(grid: Grid, name: str) -> bool:
    return name in grid.axes and grids.is_traceable(grid.axes[name])
