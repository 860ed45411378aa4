"""``sweep``: a flow, data and a grid in, one labelled data set out."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, Key, PyTree, UInt32

from meanflow import _boundary
from meanflow._boundary import (
    Count,
    FilePath,
    Length,
    array,
    checked,
    count,
    either,
    function,
    number,
    sequence,
    unchecked,
)
from meanflow._identity import Json, describe
from meanflow._observable import Observable
from meanflow.flows._flow import Flow, bind_and_check
from meanflow.measures._cloud import Cloud
from meanflow.measures._dataset import DATA, Dataset
from meanflow.solvers._batches import Batches
from meanflow.solvers._continuous import solve
from meanflow.solvers._discrete import descend
from meanflow.solvers._dynamics import Noise
from meanflow.solvers._solution import Solution
from meanflow.solvers._step import ConstantStep
from meanflow.sweeps import _clouds as clouds
from meanflow.sweeps import _grid as grids
from meanflow.sweeps import _plan as plans
from meanflow.sweeps._grid import Grid, Group, Value
from meanflow.sweeps._plan import AXES, SEEDS, Cell, Execution, Plan, Results, any_key
from meanflow.sweeps._results import Observe, check_names, choose

if TYPE_CHECKING:  # slow to import
    import xarray

Samples: TypeAlias = Annotated[Dataset | Callable[..., Dataset], either(DATA, function)]
Init: TypeAlias = Callable[..., Cloud]
Numbers: TypeAlias = Annotated[
    Sequence[float] | Float[ArrayLike, "k"], sequence(number(infinite=True, static=True))
]
Counts: TypeAlias = Annotated[Sequence[int] | Int[Array, "k"] | Int[np.ndarray, "k"], sequence(count(1))]
AnyKey: TypeAlias = Annotated[int | Key[Array, ""] | UInt32[ArrayLike, "words"], any_key]
Values: TypeAlias = dict[str, Any]  # values of named axes or settings, of any kind
Changes: TypeAlias = Mapping[str, Array]  # other values along some axes

# arguments of solve and descend that a sweep sets itself
OWN = ("t1", "steps", "ts", "every", "observe", "state", "throw")
UNCHANGED: Changes = MappingProxyType({})
KEPT = 64  # draws that a plan keeps at a time


class RunCell(Cell):
    """One training run: inputs {cloud, key, data, varied} -> energies, observables, result code.

    Attributes:
        made: the flow, under ``"flow"``, and the settings of the solver; None for numbers that differ between the
            cells, which are among the inputs as ``varied``.
        observe: what to record, by name.
        horizon: {"t1": time, "ts": save times} for ``solve``, {"steps": n, "every": k} for ``descend``.
        most: the most steps of a run whose step is varied, or None.
    """

    made: Values
    observe: dict[str, Observable]
    horizon: Values
    most: int | None = eqx.field(static=True, default=None)

    def solution(self, data: Dataset | None, inputs: Mapping[str, PyTree]) -> Solution:
        """Return the run as the solver returns it."""
        settings = dict(eqx.combine(self.made, inputs["varied"]) if "varied" in inputs else self.made)
        flow, data = settings.pop("flow"), inputs.get("data", data)
        for name, value in settings.items():
            if needs_key(value):
                key = jax.random.wrap_key_data(inputs["key"])
                settings[name] = eqx.tree_at(lambda u: u.key, value, key, is_leaf=lambda u: u is None)
        if self.most is not None:
            settings["step"] = ConstantStep(settings["step"].astype(inputs["cloud"].weights.dtype), self.most)
        solver: Callable[..., Solution] = descend if "steps" in self.horizon else solve
        return solver(
            flow=flow,
            cloud=inputs["cloud"],
            data=data,
            observe=self.observe,
            throw=False,
            **self.horizon,
            **settings,
        )

    def __call__(self, shared: Dataset | None, inputs: Mapping[str, PyTree]) -> Results:
        """Return arrays by name; the leading axis of all but ``result`` and the counts is the save time."""
        run = self.solution(shared, inputs)
        reached = jnp.isfinite(run.ts)

        def mask(u: Array) -> Array:
            if "steps" in self.horizon or not jnp.issubdtype(u.dtype, jnp.floating):
                return u  # a fixed number of steps ends where it is told to
            return jnp.where(reached.reshape((-1,) + (1,) * (u.ndim - 1)), u, jnp.nan)

        series = {"t": run.ts, "energy": run.energy} | plans.flatten(run.observed)
        counts = {name.removeprefix("num_"): value for name, value in run.stats.items()}
        return {name: mask(u) for name, u in series.items()} | counts | {"result": run.result._value}


def needs_key(setting: object) -> bool:
    """Say whether a setting draws random numbers and was given no key: every cell gives it one of its own."""
    return isinstance(setting, Noise | Batches) and setting.key is None


@dataclass(frozen=True, kw_only=True, eq=False)
class Sweep(Plan):
    """A planned sweep of networks; nothing is computed until ``run``, ``values``, ``cloud`` or ``single`` is called.

    Attributes:
        shared: the data that all cells train on; None if each has its own.
        samples: the data, or a function of a key and axis values that returns them.
        room: the number of samples that the data of each cell are filled up to; None for shared data.
        flow: the model or a function of axis values that returns one.
        init: draws the initial clouds; None for the model's own law.
        observe: what is recorded.
        horizon: arguments of the solver that say when it ends and what it saves.
        settings: further arguments of the solver, or functions of axis values that return them.
        taken: the axes that each function among flow, data, init and settings takes, by its name.
        key: what all random numbers come from.
        along: name, values and units of the save axis.
    """

    samples: Samples
    room: int | None
    flow: Model
    init: Init | None
    observe: dict[str, Observable]
    horizon: Values
    settings: Values
    taken: dict[str, tuple[str, ...]]
    key: Key[Array, ""]
    along: Json
    # what was made and drawn, by what decides it: filled as the plan is used
    kept: dict[Any, Any] = field(default_factory=dict)
    drawn: dict[Any, Any] = field(default_factory=dict)

    @property
    def waste(self) -> float:
        """The share of padding among all stored particles, (stored - real)/stored."""
        stored = sum(group.size * len(group.cells) for group in self.groups)
        widths = self.grid.axes["width"]
        return 1.0 - float(np.mean(widths)) * self.grid.size / stored

    def cell(self, group: Group) -> RunCell:
        """Return the program of one cell of a group."""
        return self._program(group)[0]

    def cloud(self, **cell: Value) -> Cloud:
        """Return the initial cloud of a cell, named by its axis values, at its true width."""
        return jax.tree.map(jnp.asarray, self._cloud(self.grid.find(**cell)))

    def single(self, **cell: Value) -> Solution:
        """Run one cell alone, unpadded and unbatched, and return what the solver returns."""
        index = self.grid.find(**cell)
        inputs = {"cloud": self.cloud(**cell), "key": self._run_key(index)}
        alone = RunCell(self.made(index), self.observe, self.horizon)
        return alone.solution(jax.tree.map(jnp.asarray, self._data(index)), inputs)

    def values(self, data: Dataset | None = None, **axes: ArrayLike) -> dict[str, Array]:
        """Return all results as arrays over the grid, a pure function of data and axes: jit it, differentiate it.

        All cells of a group run at once and in one process; use ``run`` for grids that need chunks.

        Args:
            data: the data, if all cells share them; default those of the plan.
            axes: other values along numeric axes, such as ``delta`` or ``scale``, as many as the plan has. What draws
                clouds or data from them is traced. Without them the initial clouds are constants.

        >>> import jax, jax.numpy as jnp, meanflow as mf
        >>> data = mf.Dataset(jnp.linspace(-1.0, 1.0, 4), jnp.array([1.0, -1.0, 1.0, 0.0]))
        >>> plan = mf.sweep(
        ...     mf.lifted(), data, widths=[4], deltas=[0.0], steps=2, step=0.1, observe=(), compute=False
        ... )
        >>> loss = lambda y, delta: plan.values(mf.Dataset(data.x, y), delta=delta)["energy"][..., -1].sum()
        >>> [u.shape for u in jax.grad(loss, (0, 1))(data.y, jnp.array([0.5]))]
        [(4,), (1,)]
        """
        if data is not None and self.shared is None:
            raise ValueError("data must be None where each cell has data of its own, got a Dataset")
        data = self.shared if data is None else data
        free = [n for n, v in self.grid.axes.items() if n not in ("width", "seed") and grids.is_numeric(v)]
        changed = {}
        for name, values in axes.items():
            if name not in free:
                raise ValueError(
                    f"axes of other values must be among the numeric ones of {free}, got {name!r}"
                )
            changed[name] = array((len(self.grid.axes[name]),), infinite=True)(name, values)
        parts = []
        for group in self.groups:
            cell, varied = self._program(group, changed)
            inputs = self._inputs(group, group.cells, group.size, changed) | {"varied": varied}
            parts.append(plans.batched(cell, data, jax.tree.map(jnp.asarray, inputs)))
        back = np.argsort(np.concatenate([group.cells for group in self.groups]))
        whole = {}
        for name in parts[0]:
            some = [part[name] for part in parts if name in part]
            # particle records of different sizes are left out
            if len(some) == len(parts) and len({u.shape[1:] for u in some}) == 1:
                whole[name] = jnp.concatenate(some)[back].reshape(*self.grid.shape, *some[0].shape[1:])
        return whole

    def inputs(self, group: Group, cells: Sequence[int], multiple: int = 1) -> PyTree[np.ndarray]:
        """Return padded clouds, and what else differs between some cells, as host arrays with a leading axis."""
        places = {cell: k for k, cell in enumerate(group.cells)}
        chosen = np.array([places[cell] for cell in cells])
        varied = jax.tree.map(lambda u: u[chosen], self._program(group)[1])
        return self._inputs(group, cells, grids.round_up(group.size, multiple)) | {"varied": varied}

    def _inputs(
        self, group: Group, cells: Sequence[int], size: int, changed: Changes = UNCHANGED
    ) -> dict[str, PyTree]:
        """Return clouds of one size, data and keys of some cells; on the host, where nothing is changed."""
        inputs: dict[str, PyTree] = {
            "cloud": clouds.stack_padded([self._cloud(c, changed) for c in cells], size)
        }
        if self.room is not None:
            inputs["data"] = clouds.stack_padded([self._data(c, changed) for c in cells], self.room)
        if any(map(needs_key, self.made(group.cells[0]).values())):
            inputs["key"] = np.stack([np.asarray(self._run_key(cell)) for cell in cells])
        return inputs

    def _program(self, group: Group, changed: Changes = UNCHANGED) -> tuple[RunCell, PyTree]:
        """Return the program of a group of cells, and the numbers in flow and settings that differ between them."""
        if not changed and group in self.kept:
            return self.kept[group]
        made = [self.made(cell, changed) for cell in group.cells]
        different = list({id(one): one for one in made}.values())  # cells with the same values share one
        if any(structure_of(one) != structure_of(made[0]) for one in different):
            raise ValueError(f"axes must not change what is compiled, got other values of {list(changed)}")
        differs = jax.tree.map(_differ, *different)
        rows = {id(one): jax.tree.leaves(eqx.filter(one, differs)) for one in different}
        columns = [_stack(column) for column in zip(*(rows[id(one)] for one in made), strict=True)]
        varied = jax.tree.unflatten(jax.tree.structure(eqx.filter(made[0], differs)), columns)
        most = None
        if differs.get("step") is True and "t1" in self.horizon:
            steps = [step for one in different if (step := _boundary.concrete(one["step"])) is not None]
            if len(steps) == len(different):  # none of them is being traced
                ends = np.zeros(()), np.asarray(self.horizon["t1"])
                most = ConstantStep(np.min(steps)).limit(*ends, len(self.horizon["ts"]))
        rest = eqx.filter(made[0], differs, inverse=True)
        found = RunCell(rest, self.observe, self.horizon, most), varied
        if not changed:
            self.kept[group] = found
        return found

    @property
    def makers(self) -> list[str]:
        """The axes that flow and settings depend on."""
        takes = [some for name, some in self.taken.items() if name == "flow" or name in self.settings]
        named = [name for name in self.grid.axes if name in SETTINGS]
        return list(dict.fromkeys([*named, *(name for some in takes for name in some)]))

    def made(self, cell: int, changed: Changes = UNCHANGED) -> Values:
        """Return the flow of a cell, under ``"flow"``, and the settings of its solver."""
        makers, values = self.makers, self._at(cell, changed)

        def make() -> Values:
            given: Values = {"flow": self.flow} | self.settings
            for name in given:
                if name in self.taken:
                    given[name] = given[name](**{axis: values[axis] for axis in self.taken[name]})
            if not isinstance(given["flow"], Flow):
                raise ValueError(f"flow must return a Flow, got {type(given['flow']).__name__}")
            return given | {name: values[name] for name in makers if name in SETTINGS}

        if any(name in changed for name in makers):
            return make()
        places = self.grid.places(cell)
        tag = ("made", *(places[name] for name in makers))
        if tag not in self.kept:
            with jax.ensure_compile_time_eval():  # constants, also while a caller is being traced
                self.kept[tag] = make()
        return self.kept[tag]

    def _at(self, cell: int, changed: Changes) -> Values:
        """Return the value of each axis at a cell, the changed ones as arrays."""
        places = self.grid.places(cell)
        return self.grid.at(cell) | {name: new[places[name]] for name, new in changed.items()}

    def check(self) -> None:
        """Make the checks that solvers skip while they are being traced, on the first cell of each group."""
        for group in self.groups:
            cell = group.cells[0]
            cloud = jax.tree.map(jnp.asarray, self._cloud(cell))
            data = jax.tree.map(jnp.asarray, self._data(cell))
            bind_and_check(self.made(cell)["flow"].begin(cloud), cloud, data)

    def identity(self) -> Json:
        """Return a description of model, data, axes, solver settings, observables and key."""
        data = self.samples
        return {
            "kind": "sweep",
            "flow": describe(self.flow),
            "data": {name: describe(getattr(data, name)) for name in ("x", "y", "weights")}
            if isinstance(data, Dataset)
            else describe(data),
            "axes": {name: describe(list(values)) for name, values in self.grid.axes.items()},
            "init": describe(self.init),
            "key": jax.random.key_data(self.key).tolist(),
            "horizon": describe(self.horizon),
            "settings": describe(self.settings),
            "observe": describe(self.observe),
            "precision": str(jnp.result_type(float)),
        }

    def variables(self) -> Json:
        """Return names, units and meaning of the observables, and the values along their axes."""
        about = {
            name: {"dims": list(o.dims), "units": o.units, "about": o.about}
            for name, o in self.observe.items()
        }
        coords = {n: np.asarray(v).tolist() for o in self.observe.values() for n, v in o.coords.items()}
        data, more = self.shared, {}
        if data is not None and data.x.ndim == 1:
            more["samples"] = {"x": np.asarray(data.x).tolist(), "y": np.asarray(data.y).tolist()}
            coords.setdefault("sample", more["samples"]["x"])
        coords.setdefault("sample", list(range(self.room or data.size)))
        return {"along": self.along, "variables": about, "coords": coords} | more

    def _run_key(self, cell: int) -> UInt32[Array, words]:
        """Return the raw numbers of the key of minibatches and noise."""
        values = self.grid.at(cell)
        with jax.ensure_compile_time_eval():
            key = jax.random.fold_in(self._start_key(values), values["width"])
            return jax.random.key_data(jax.random.fold_in(key, 1))

    def _start_key(self, values: Values) -> Key[Array, ""]:
        return jax.random.fold_in(jax.random.fold_in(self.key, values["seed"]), values["width"])

    def _remember(
        self, names: Sequence[str], cell: int, changed: Changes, draw: Callable[[], PyTree]
    ) -> PyTree:
        """Return ``draw()``, which depends on the axes ``names``; as host arrays and only once, if none is changed."""
        if any(name in changed for name in names):
            return draw()
        places = self.grid.places(cell)
        # by place along the axis: texts of two laws or functions may well be equal
        tag = (draw.__name__, *(places[name] for name in names))
        if tag not in self.drawn:
            if len(self.drawn) >= KEPT:
                self.drawn.clear()  # neighbouring cells share draws, distant ones do not
            with jax.ensure_compile_time_eval():  # a draw is a constant, also while a caller is being traced
                self.drawn[tag] = jax.tree.map(np.asarray, draw())
        return self.drawn[tag]

    def _data(self, cell: int, changed: Changes = UNCHANGED) -> Dataset:
        """Return the data of a cell, at their true size."""
        samples, names, values = self.samples, self.taken.get("data", ()), self._at(cell, changed)
        if isinstance(samples, Dataset):
            return samples

        def data() -> Dataset:
            found = samples(jax.random.split(self.key)[1], **{name: values[name] for name in names})
            if not isinstance(found, Dataset):
                raise ValueError(f"data must return a Dataset, got {type(found).__name__}")
            return found

        return self._remember(names, cell, changed, data)

    def _cloud(self, cell: int, changed: Changes = UNCHANGED) -> Cloud:
        """Return the initial cloud of a cell, at its true width."""
        values, init = self._at(cell, changed), self.init
        width = values["width"]
        takes = {name: self.taken.get(name, ()) for name in ("flow", "data", "init")}

        def cloud() -> Cloud:
            key = self._start_key(values)
            if init is None:
                return self._usual(cell, changed, key, width)
            found = init(key, width, **{name: values[name] for name in takes["init"]})
            if not isinstance(found, Cloud):
                raise ValueError(f"init must return a Cloud, got {type(found).__name__}")
            if found.size != width:
                raise ValueError(
                    f"init must return a cloud of the width it is given, {width}, got {found.size}"
                )
            return found

        names = takes["init"] if init is not None else (*takes["flow"], *takes["data"])
        found = self._remember(("width", "seed", *names), cell, changed, cloud)
        if "delta" in values and "delta" not in takes["init"]:
            if init is not None and found.labels is not None:
                raise ValueError(
                    "deltas would overwrite the labels that init returns; leave one of them out, or let init take "
                    "an argument delta"
                )
            found = clouds.with_labels(found, values["delta"])
        if "scale" in values and "scale" not in takes["init"]:
            amplitude = self.made(cell, changed)["flow"].feature.amplitude
            found = clouds.scaled(found, amplitude or "", values["scale"])
        return found

    def _usual(self, cell: int, changed: Changes, key: Key[Array, ""], width: int) -> Cloud:
        """Draw a cloud from the model's own law."""
        data = self._data(cell, changed)
        flow = self.made(cell, changed)["flow"].bind(data)
        outputs = flow.loss.outputs(data.y)
        if self.room is not None and outputs is not None and data.y.ndim == 1:
            # a small sample may miss the last classes
            if "outputs" not in self.kept:
                cells, _ = self.grid.one_each(self.taken["data"])
                self.kept["outputs"] = max(flow.loss.outputs(self._data(one).y) for one in cells)
            outputs = self.kept["outputs"]
        sizes = [group.size for group in self.groups if group.size >= width]
        return clouds.draw(flow, key, width, sizes, data.x.shape[1] if data.x.ndim == 2 else None, outputs)


def structure_of(made: Values) -> tuple[object, ...]:
    """Return what must be equal for two flows with settings to run in one program: all but the numbers in them."""
    leaves, structure = jax.tree.flatten(made)
    kinds = [(np.shape(u), getattr(u, "dtype", None)) if _is_number(u) else u for u in leaves]
    return structure, *kinds


def _is_number(leaf: object) -> bool:
    return isinstance(leaf, int | float | np.ndarray | np.generic | jax.Array) and not isinstance(leaf, bool)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _differ(*leaves: Any) -> bool:
    """Say whether numbers differ, or may differ since they are being traced; what is no number does not."""
    if not _is_number(leaves[0]) or all(one is leaves[0] for one in leaves):
        return False
    if _is_key(leaves[0]):
        leaves = tuple(map(jax.random.key_data, leaves))
    known = [_boundary.concrete(one) for one in leaves]
    return any(one is None or known[0] is None or not np.array_equal(one, known[0]) for one in known)


def _stack(column: Sequence[Any]) -> ArrayLike:
    """Return values of several cells as one array, on the host if none is on a device."""
    if not hasattr(column[0], "dtype"):
        return plans.numbers(column)
    on_host = not _is_key(column[0]) and all(_boundary.concrete(u) is not None for u in column)
    return np.stack([np.asarray(u) for u in column]) if on_host else jnp.stack(column)


def settings_of(solver: Callable[..., Solution]) -> tuple[str, ...]:
    """Return the arguments of a solver that are not the sweep's own business."""
    parameters = inspect.signature(solver).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in OWN)


SETTINGS = tuple(dict.fromkeys([*settings_of(solve), *settings_of(descend)]))


def make_grid(
    widths: Counts, deltas: Numbers | None, axes: Mapping[str, Iterable[Value]] | None, seeds: int | Counts
) -> Grid:
    """Return the grid width x delta x named axes x seed, checked."""
    named: dict[str, Any] = {"width": widths}
    if deltas is not None:
        named["delta"] = deltas
    for name, values in (axes or {}).items():
        if name in (*named, "seed", "step_size"):
            raise ValueError(f"axes must not use the name {name!r}, which is taken")
        named[name] = AMPLITUDES("axes['scale']", values) if name == "scale" else values
    return Grid(grids.axis_values(named | {"seed": plans.seed_list(seeds)}))


def find_takers(functions: Mapping[str, object], names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return which axes each function takes as arguments; refuse an axis that reaches nothing.

    Args:
        functions: flow, data, init and settings by name; what is no function takes nothing.
        names: the names of the axes, beside width and seed.
    """
    taken = {}
    for name, one in functions.items():
        if not callable(one) or isinstance(one, eqx.Module | type):
            continue
        parameters = inspect.signature(one).parameters
        anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        # width is an argument of every init, and data are the same for all widths
        more = {"data": ("seed",), "init": ("seed",)}.get(name, ("width",))
        own = [n for n in more if n in parameters]
        taken[name] = (*(n for n in names if anything or n in parameters), *own)
    reached = {"delta", "scale", *SETTINGS}.union(*taken.values())
    lost = next((name for name in names if name not in reached), None)
    if lost is not None:
        raise ValueError(
            f"axes[{lost!r}] reaches nothing: flow, data, init and settings do not take it, and the settings that can "
            f"be swept are {sorted(SETTINGS)}"
        )
    return taken


def check_settings(solver: Callable[..., Solution], given: Iterable[str], axes: Iterable[str]) -> None:
    """Refuse a setting that the solver of the sweep does not have, or that is given twice."""
    named = [name for name in axes if name in SETTINGS]
    clash = next((name for name in given if name in named), None)
    if clash is not None:
        raise ValueError(f"{clash} is given both as an axis and as a setting")
    allowed = settings_of(solver)
    stray = next((name for name in (*given, *named) if name not in allowed), None)
    if stray is not None:
        end = "steps" if solver is solve else "t1"
        hint = f" (it belongs to runs with {end})" if stray in SETTINGS else ""
        raise ValueError(
            f"settings of {solver.__name__} must be among {sorted(allowed)}, got {stray!r}{hint}"
        )


def check_changes(flow: Flow, grid: Grid, taken: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse axes delta and scale for a model whose clouds they cannot change."""
    by_function = {name for some in taken.values() for name in some}
    if "delta" in grid.axes and flow.space.label_name != "delta" and "delta" not in by_function:
        raise ValueError(
            "deltas need a flow whose labels are balances (meanflow.lifted), or an init that takes delta, "
            f"got a flow on {type(flow.space).__name__}"
        )
    if "scale" in grid.axes and "scale" not in taken.get("init", ()) and flow.feature.amplitude is None:
        raise ValueError(
            "the axis scale needs a feature that names its amplitude, or an init that takes scale, "
            f"got {type(flow.feature).__name__}"
        )


def find_horizon(t1: float | None, steps: int | None, saves: Values, clock: object) -> tuple[Values, Json]:
    """Return the arguments of the solver that set the end and the saves, and the save axis of the result.

    Args:
        t1: end time, or None.
        steps: number of steps, or None.
        saves: the arguments ``ts`` and ``every``, as far as they were given.
        clock: name of the clock, for the units; something else if it differs between cells.
    """
    ts, every = saves.get("ts"), saves.get("every")
    if (t1 is None) == (steps is None):
        raise ValueError(f"exactly one of t1 and steps must be given, got t1={t1!r}, steps={steps!r}")
    if steps is not None:
        if ts is not None:
            raise ValueError("ts belongs to t1; with steps pass every, the number of steps between saves")
        every = steps if every is None else _boundary.whole("every", every, 1)
        if steps % every:
            raise ValueError(f"every must divide steps, got steps={steps}, every={every}")
        done = list(range(0, steps + 1, every))
        return {"steps": steps, "every": every}, {"name": "step", "values": done, "units": "steps"}
    if every is not None or t1 is None:
        raise ValueError("every belongs to steps; with t1 pass ts, the save times")
    if ts is None or isinstance(ts, int):
        ts = np.linspace(0.0, 1.0, ts or 2) * t1
    times = np.asarray(ts, jnp.result_type(float))
    if np.any(np.diff(times) <= 0) or times[0] < 0 or times[-1] > times.dtype.type(t1):
        raise ValueError(f"ts must increase within [0, t1] = [0, {t1}], got {times}")
    units = f"{clock} time" if isinstance(clock, str) else "time on the clock of the run"
    return {"t1": float(t1), "ts": jnp.asarray(times)}, {
        "name": "time",
        "values": times.tolist(),
        "units": units,
    }


def check_data(plan: Sweep) -> int:
    """Check the data of all cells, which must be of one kind and hold a batch; return the largest number of samples."""
    first, sizes = plan._data(0), []
    cells, _ = plan.grid.one_each(
        [n for n in plan.grid.axes if n in (*plan.taken.get("data", ()), *plan.makers)]
    )
    for cell in cells:
        found, made = plan._data(cell), plan.made(cell)
        kinds = [[(u.shape[1:], u.dtype) for u in (one.x, one.y)] for one in (first, found)]
        if kinds[0] != kinds[1]:
            raise ValueError(
                f"data must return inputs and targets of one kind for all cells, got {kinds[0]} and {kinds[1]}"
            )
        rank = made["flow"].feature.input_ndim
        if rank is not None and found.x.ndim != rank:
            raise ValueError(
                f"data.x must have shape {'(n,)' if rank == 1 else '(n, d)'} for this flow, got {found.x.shape}"
            )
        batches = made.get("batches")
        if batches is not None:
            with_key = eqx.tree_at(lambda b: b.key, batches, plan.key, is_leaf=lambda u: u is None)
            with_key.check(found)
        sizes.append(found.size)
    return max(sizes)


def model(name: str, value: object) -> object:
    """Accept a flow, or a function that returns one."""
    if not isinstance(value, Flow) and (not callable(value) or inspect.isclass(value)):
        raise ValueError(f"{name} must be a Flow or a function that returns one, got {_boundary.show(value)}")
    return value


Model: TypeAlias = Annotated[Flow | Callable[..., Flow], model]


AMPLITUDES = sequence(number(static=True))
BALANCES = sequence(number(infinite=True, static=True))


@overload
def sweep(*given: Any, compute: Literal[False], **named: Any) -> Sweep: ...
@overload
def sweep(*given: Any, **named: Any) -> xarray.Dataset: ...
@checked  # type: ignore[misc]  # mypy takes the decorated function for one without overloads
def sweep(
    flow: Model,
    data: Samples,
    *,
    widths: Counts,
    deltas: Numbers | None = None,
    axes: Annotated[Mapping[str, Iterable[Value]], AXES] | None = None,
    seeds: Annotated[int | Counts, SEEDS] = 1,
    init: Init | None = None,
    t1: Length | None = None,
    steps: Count | None = None,
    observe: Annotated[
        Observe, unchecked("results.choose checks it, which knows the names of the model")
    ] = None,
    key: AnyKey = 0,
    store: FilePath | None = None,
    execution: Execution | None = None,
    compute: bool = True,
    **settings: Annotated[Any, unchecked("the solver checks each of them")],
) -> xarray.Dataset | Sweep:
    """Train one network per cell of a grid width x named axes x seed, in as few compiled programs as possible.

    Clouds are drawn at their true width, padded with weight zero to a common size and run side by side. The result of a
    cell does not depend on its neighbours, on the chunk size or on the devices beyond rounding.

    Args:
        flow: the model, or a function of named axes (and ``width``, if it has such an argument) that returns one.
        data: training data, shared by all cells; or a function (key, **axes) -> Dataset that gets the axes (and
            ``seed``) it has arguments for, such as the number of samples, the noise or the teacher. The key is the same
            for all cells: fold in what the draw shall depend on. Data are filled up to a common size with weight zero,
            so that cells with different numbers of samples share a program.
        widths: distinct numbers of neurons.
        deltas: balances of a ``lifted`` flow (the labels), -inf and +inf allowed; axis ``delta``.
        axes: further axes by name. Values go to what has an argument of that name, among ``flow``, ``data``, ``init``
            and settings that are functions; or they are the values of a setting, such as ``axes={"step": [0.1, 0.2]}``
            (called ``step_size`` in the result). ``scale`` multiplies the initial amplitudes (r, a or c). Numbers that
            enter as arrays share one compiled program; what else differs (names, solvers, sizes of batches) compiles
            once for each value.
        seeds: number of seeds, or their list.
        init: (key, width, **axes) -> Cloud; default ``flow.init``. It gets the axes (and ``seed``) it has arguments
            for. The key differs between widths and seeds.
        t1: end time of runs by ``solve``.
        steps: number of steps of runs by ``descend``; exactly one of ``t1`` and ``steps`` is given.
        observe: None for the usual observables of the model; names of observables (``"default"`` for the usual ones,
            ``"neurons"`` for the coordinates of every neuron; ``kernel_drift`` and the statistics of knots take long to
            compile and are recorded when named); or a dict of further ones.
        key: integer or PRNG key that all random numbers come from.
        store: run directory. Finished chunks are kept there and a killed run goes on from them. One process writes
            there at a time; another run, or another division of the grid, is refused with the differences.
        execution: how it is run: ``sweeps.Execution`` says the size of chunks, padding, devices, progress.
        compute: False returns a plan instead: ``plan.run(store=)``; ``plan.values(data, **axes)``, all results as a
            pure function of data and axes; ``plan.single(**cell)``, one cell run alone; ``plan.cloud(**cell)``, its
            initial cloud; and ``plan.grid``, ``groups``, ``chunks`` and ``waste``, which say how it would be run.
        settings: save times and settings of the solver. With ``t1``, those of ``solve``: ``ts`` (save times or their
            number; default start and end), ``solver``, ``step``, ``dynamics``, ``clock``, ``adjoint``, ``steady``. With
            ``steps``, those of ``descend``: ``every`` (steps between saves), ``optimizer``, ``step``, ``batches``,
            ``dynamics``, ``clock``, ``adjoint``. The clock is ``"lazy"`` by default, so that widths are compared at the
            same stage of training for every alpha. Each but ``ts`` and ``every`` may be a function of axes, such as
            ``dynamics=lambda temperature: Noise(temperature)``. ``Noise`` and ``Batches`` without a key get one of
            their own in every cell.

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
    if store is not None and not compute:
        raise ValueError("store must be None with compute=False; pass it to plan.run")
    grid = make_grid(widths, deltas, axes, seeds)
    solver: Callable[..., Solution] = solve if steps is None else descend
    saves: Values = {name: settings.pop(name) for name in ("ts", "every") if name in settings}
    check_settings(solver, settings, grid.axes)
    if "clock" not in grid.axes:
        settings.setdefault("clock", "lazy")  # equal to mean-field time for alpha = m
    horizon, along = find_horizon(t1, steps, saves, settings.get("clock"))
    names = [name for name in grid.axes if name not in ("width", "seed")]
    taken = find_takers({"flow": flow, "data": data, "init": init} | settings, names)
    shared = data if isinstance(data, Dataset) else None
    draft = Sweep(
        grid=grid,
        groups=(),
        shared=shared,
        execution=execution or Execution(),
        samples=data,
        room=None,
        flow=flow,
        init=init,
        observe={},
        horizon=horizon,
        settings=settings,
        taken=taken,
        key=any_key("key", key),
        along=along,
    )
    known: list[object] = []
    cells, which = grid.one_each(draft.makers)
    for cell in cells:
        for name, value in draft.made(cell).items():
            if name != "flow":
                solver.kinds()[name](name, value)  # type: ignore[attr-defined]
        known.append(structure_of(draft.made(cell)))
    template = draft.made(0)["flow"]
    room = check_data(draft)
    check_changes(template, grid, taken)
    first = jax.tree.map(jnp.asarray, draft._data(0))
    recorded = choose(observe, template.bind(first).observables(first))
    check_names(grid, recorded, along["name"])
    kinds = np.array([known.index(one) for one in known])[which]
    plan = dataclasses.replace(
        draft,
        groups=grids.make_groups(grid, kinds.tolist(), draft.execution.waste),
        observe=recorded,
        room=None if shared is not None else room,
    )
    return plan.run(store=store) if compute else plan
