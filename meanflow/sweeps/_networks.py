"""The plan of a sweep of networks: the program of one training run, its initial clouds and its data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from types import MappingProxyType
from typing import Annotated, Any, TypeAlias, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Key, PyTree, UInt32

from meanflow import _boundary
from meanflow._boundary import array, concrete, either, function
from meanflow._identity import Json, describe
from meanflow._observable import Observable
from meanflow._reuse import compiled
from meanflow.flows._flow import Flow, bind_and_check
from meanflow.measures._cloud import Cloud
from meanflow.measures._dataset import DATA, Dataset
from meanflow.measures._scaling import NAMES, Scaling
from meanflow.solvers._batches import Batches
from meanflow.solvers._continuous import solve
from meanflow.solvers._discrete import descend
from meanflow.solvers._dynamics import Noise
from meanflow.solvers._solution import Solution
from meanflow.solvers._step import ConstantStep
from meanflow.sweeps import _devices as devices
from meanflow.sweeps import _grid as grids
from meanflow.sweeps import _plan as plans
from meanflow.sweeps._devices import Cell, Results
from meanflow.sweeps._grid import Group, Value
from meanflow.sweeps._plan import Plan

Samples: TypeAlias = Annotated[Dataset | Callable[..., Dataset], either(DATA, function)]
Init: TypeAlias = Callable[..., Cloud]
Values: TypeAlias = dict[str, Any]  # values of named axes or settings, of any kind
Changes: TypeAlias = Mapping[str, Array]  # other values along some axes
Stacked = TypeVar("Stacked", Cloud, Dataset)

# arguments of solve and descend that a sweep sets itself
OWN = ("t1", "steps", "ts", "every", "observe", "state", "throw")
UNCHANGED: Changes = MappingProxyType({})
KEPT = 64  # draws that a plan keeps at a time
DRAWN_TOGETHER = 2**20  # numbers up to which it takes longer to compile another program than to draw too many


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

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what can be made and drawn again."""
        return {one.name: getattr(self, one.name) for one in fields(self)} | {"kept": {}, "drawn": {}}

    @property
    def waste(self) -> float:
        """The share of padding among all stored particles, (stored - real)/stored."""
        stored = sum([group.size * len(group.cells) for group in self.groups])
        return 1.0 - float(np.mean(self.grid.axes["width"])) * self.grid.size / stored

    def cell(self, group: Group) -> RunCell:
        """Return the program of one cell of a group."""
        return self._program(group)[0]

    def cloud(self, **cell: Value) -> Cloud:
        """Return the initial cloud of a cell, named by its axis values, at its true width."""
        index = self.grid.find(**cell)
        clouds = self._clouds([index], self.grid.at(index)["width"], UNCHANGED)
        return jax.tree.map(lambda u: jnp.asarray(u[0]), clouds)

    def single(self, **cell: Value) -> Solution:
        """Run one cell alone, unpadded and unbatched, and return what the solver returns."""
        index = self.grid.find(**cell)
        inputs = {"cloud": self.cloud(**cell), "key": self._run_key(index)}
        alone = RunCell(self.made(index), self.observe, self.horizon)
        return alone.solution(jax.tree.map(jnp.asarray, self.data(index)), inputs)

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
            parts.append(devices.batched(cell, data, jax.tree.map(jnp.asarray, inputs)))
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
        order = np.argsort(group.cells)
        rows = order[np.searchsorted(group.cells, cells, sorter=order)]
        varied = jax.tree.map(lambda u: u[rows], self._program(group)[1])
        return self._inputs(group, cells, grids.round_up(group.size, multiple)) | {"varied": varied}

    def _inputs(
        self, group: Group, cells: Sequence[int], size: int, changed: Changes = UNCHANGED
    ) -> dict[str, PyTree]:
        """Return clouds of one size, data and keys of some cells; on the host, where nothing is changed."""
        inputs: dict[str, PyTree] = {"cloud": self._clouds(cells, size, changed)}
        if self.shared is None:
            inputs["data"] = stack_padded([self.data(cell, changed) for cell in cells], self.room)
        if any(map(needs_key, self.made(group.cells[0]).values())):
            inputs["key"] = np.stack([np.asarray(self._run_key(cell)) for cell in cells])
        return inputs

    def _program(self, group: Group, changed: Changes = UNCHANGED) -> tuple[RunCell, PyTree]:
        """Return the program of a group of cells, and the numbers in flow and settings that differ between them."""
        if not changed and group in self.kept:
            return self.kept[group]
        _, which = self.grid.one_each(self.makers)
        _, first, place = np.unique(which[list(group.cells)], return_index=True, return_inverse=True)
        different = [self.made(group.cells[k], changed) for k in first]
        if changed and any([structure_of(one) != structure_of(different[0]) for one in different]):
            raise ValueError(f"axes must not change what is compiled, got other values of {list(changed)}")
        differs = jax.tree.map(_differ, *different)
        columns = [eqx.filter(one, differs) for one in different]
        varied = jax.tree.map(lambda *column: _stack(column)[place], *columns)
        most = None
        if differs.get("step") is True and "t1" in self.horizon:
            steps = [step for one in different if (step := concrete(one["step"])) is not None]
            if len(steps) == len(different):  # none of them is being traced
                ends = np.zeros(()), np.asarray(self.horizon["t1"])
                most = ConstantStep(np.min(steps)).limit(*ends, len(self.horizon["ts"]))
        found = (
            RunCell(eqx.filter(different[0], differs, inverse=True), self.observe, self.horizon, most),
            varied,
        )
        if not changed:
            self.kept[group] = found
        return found

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Cells whose widths are similar, and whose flow and settings differ in numbers only."""
        cells, which = self.grid.one_each(self.makers)
        known: list[object] = []
        for cell in cells:
            known.append(structure_of(self.made(cell)))
        kinds = np.array([*map(known.index, known)])
        return grids.make_groups(self.grid, kinds[which], self.execution.waste)

    @cached_property
    def makers(self) -> list[str]:
        """The axes that flow and settings depend on."""
        of_flow = self.taken.get("flow", ())
        found = dict.fromkeys([*filter(SETTINGS.__contains__, self.grid.axes), *of_flow])
        for name in self.settings:
            found |= dict.fromkeys(self.taken.get(name, ()))
        # names of output scales are numbers that depend on the width
        named = any(set(NAMES) & set(map(str, self.grid.axes[name])) for name in of_flow)
        return list(found | ({"width": None} if named else {}))

    def made(self, cell: int, changed: Changes = UNCHANGED) -> Values:
        """Return the flow of a cell, under ``"flow"``, and the settings of its solver."""
        return self._remember("made", self.makers, cell, changed, self._make)

    def _make(self, values: Values) -> Values:
        """Return the flow and the settings for these values of the axes."""
        given: Values = {"flow": self.flow} | self.settings
        for name in given:
            if name in self.taken:
                given[name] = given[name](**{axis: values[axis] for axis in self.taken[name]})
        if not isinstance(given["flow"], Flow):
            raise ValueError(f"flow must return a Flow, got {type(given['flow']).__name__}")
        if "width" in self.makers:
            given["flow"] = _numbered(given["flow"], values["width"])
        return given | {name: values[name] for name in self.makers if name in SETTINGS}

    def _remember(
        self,
        kind: str,
        names: Sequence[str],
        cell: int,
        changed: Changes,
        make: Callable[[Values], Any],
    ) -> Any:
        """Return ``make(values)``, which depends on the axes ``names``; only once, if none of these is changed."""
        if not changed.keys().isdisjoint(names):
            places = self.grid.places(cell)
            return make(self.grid.at(cell) | {name: new[places[name]] for name, new in changed.items()})
        # by place along the axis: texts of two laws or functions may well be equal
        tag = (kind, *map(self.grid.places(cell).get, names))
        known = self.kept if kind == "made" else self.drawn
        if tag not in known:
            if len(self.drawn) >= KEPT:
                self.drawn.clear()  # neighbouring cells share draws, distant ones do not
            with jax.ensure_compile_time_eval():  # a constant, also while a caller is being traced
                known[tag] = make(self.grid.at(cell))
        return known[tag]

    def check(self) -> None:
        """Make the checks that solvers skip while they are being traced, on the first cell of each group."""
        for group in self.groups:
            cell = group.cells[0]
            clouds = self._clouds([cell], self.grid.at(cell)["width"], UNCHANGED)
            data, cloud = jax.tree.map(jnp.asarray, (self.data(cell), jax.tree.map(lambda u: u[0], clouds)))
            bind_and_check(self.made(cell)["flow"].begin(cloud), cloud, data)

    def identity(self) -> Json:
        """Return a description of model, data, axes, solver settings, observables and key."""
        data = self.samples
        return {
            "kind": "sweep",
            "flow": describe(self.flow),
            "data": describe({"x": data.x, "y": data.y, "weights": data.weights})
            if isinstance(data, Dataset)
            else describe(data),
            "axes": describe({name: list(values) for name, values in self.grid.axes.items()}),
            "init": describe(self.init),
            "key": jax.random.key_data(self.key).tolist(),
            "horizon": describe(self.horizon),
            "settings": describe(self.settings),
            "observe": describe(self.observe),
            "precision": str(jnp.result_type(float)),
        }

    def variables(self) -> Json:
        """Return names, units and meaning of the observables, and the values along their axes."""
        about: Json = {}
        coords: Json = {}
        for name, one in self.observe.items():
            about[name] = {"dims": list(one.dims), "units": one.units, "about": one.about}
            coords |= {axis: np.asarray(values).tolist() for axis, values in one.coords.items()}
        data, more = self.shared, {}
        if data is not None and data.x.ndim == 1:
            more["samples"] = {"x": np.asarray(data.x).tolist(), "y": np.asarray(data.y).tolist()}
            coords.setdefault("sample", more["samples"]["x"])
        coords.setdefault("sample", list(range(self.room)))
        return {"along": self.along, "variables": about, "coords": coords} | more

    def _run_key(self, cell: int) -> UInt32[Array, words]:
        """Return the raw numbers of the key of minibatches and noise."""
        values = self.grid.at(cell)
        with jax.ensure_compile_time_eval():
            key = jax.random.fold_in(self._start_key(values), values["width"])
            return jax.random.key_data(jax.random.fold_in(key, 1))

    def _start_key(self, values: Values) -> Key[Array, ""]:
        return jax.random.fold_in(jax.random.fold_in(self.key, values["seed"]), values["width"])

    def data(self, cell: int, changed: Changes = UNCHANGED) -> Dataset:
        """Return the data of a cell, at their true size."""
        if self.shared is not None:
            return self.shared
        return self._remember("data", self.taken.get("data", ()), cell, changed, self._sample)

    def _sample(self, values: Values) -> Dataset:
        """Return the data for these values of the axes, as host arrays if nothing of them is traced."""
        taken = {name: values[name] for name in self.taken.get("data", ())}
        found = self.samples(jax.random.split(self.key)[1], **taken)  # type: ignore[operator]
        if not isinstance(found, Dataset):
            raise ValueError(f"data must return a Dataset, got {type(found).__name__}")
        return _on_host(found)

    @cached_property
    def room(self) -> int:
        """The number of samples that the data of each cell are filled up to."""
        return max([self.data(cell).size for cell in self.grid.one_each(self.taken.get("data", ()))[0]])

    def _clouds(self, cells: Sequence[int], size: int, changed: Changes) -> Cloud:
        """Return the initial clouds of some cells, padded to one size, along a leading axis."""
        flow, data, own = (self.taken.get(name, ()) for name in ("flow", "data", "init"))
        names = ("width", "seed", *(own if self.init is not None else (*flow, *data)))
        clouds = stack_padded(
            [
                self._remember("cloud", names, cell, changed, partial(self._start, cell, changed))
                for cell in cells
            ],
            size,
        )
        places = self.grid.places(np.asarray(cells))
        if "delta" in places and "delta" not in own:
            if self.init is not None and clouds.labels is not None:
                raise ValueError(
                    "deltas would overwrite the labels that init returns; leave one of them out, or let init take "
                    "an argument delta"
                )
            labels = self._column("delta", places, changed, clouds.weights)
            clouds = _replace(clouds, clouds.particles, labels)
        if "scale" in places and "scale" not in own:
            amplitude = self.made(cells[0], changed)["flow"].feature.amplitude or ""
            value = getattr(clouds.particles, amplitude)
            value = value * self._column("scale", places, changed, value)
            clouds = _replace(clouds, clouds.particles._replace(**{amplitude: value}), clouds.labels)
        return clouds

    def _column(self, name: str, places: Mapping[str, np.ndarray], changed: Changes, like: Array) -> Array:
        """Return the value of an axis at some cells, with the dtype and shape of ``like``."""
        values = changed[name] if name in changed else np.asarray(self.grid.axes[name])
        column = values[places[name]].astype(like.dtype).reshape(-1, *[1] * (like.ndim - 1))
        return (np if isinstance(column, np.ndarray) else jnp).broadcast_to(column, like.shape)

    def _start(self, cell: int, changed: Changes, values: Values) -> Cloud:
        """Draw the initial cloud of a cell, at its true width."""
        key, width = self._start_key(values), values["width"]
        if self.init is None:
            return self._usual(cell, changed, key, width)
        found = self.init(key, width, **{name: values[name] for name in self.taken["init"]})
        if not isinstance(found, Cloud):
            raise ValueError(f"init must return a Cloud, got {type(found).__name__}")
        if found.size != width:
            raise ValueError(f"init must return a cloud of the width it is given, {width}, got {found.size}")
        return _on_host(found)

    def _usual(self, cell: int, changed: Changes, key: Key[Array, ""], width: int) -> Cloud:
        """Draw a cloud from the model's own law.

        A draw is one compiled program for each number of neurons. JAX's own generator counts the numbers it draws, so
        that the first neurons do not depend on how many are drawn, and all widths may share one program.
        """
        data = self.data(cell, changed)
        flow = self.made(cell, changed)["flow"].bind(data)
        outputs, dim = flow.loss.outputs(data.y), data.x.shape[1] if data.x.ndim == 2 else None
        if self.shared is None and outputs is not None and data.y.ndim == 1:
            # a small sample may miss the last classes
            if "outputs" not in self.kept:
                cells, _ = self.grid.one_each(self.taken["data"])
                self.kept["outputs"] = max([flow.loss.outputs(self.data(one).y) for one in cells])
            outputs = self.kept["outputs"]
        counts = jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
        if not counts or str(jax.random.key_impl(key)) != "threefry2x32":
            return _on_host(_draw(flow, key, width, dim, outputs))
        sizes = [group.size for group in self.groups if group.size >= width]
        return prefix(_draw(flow, key, room(sizes, (dim or 1) * (outputs or 1)), dim, outputs), width)


def _on_host(tree: Stacked) -> Stacked:
    """Return a tree with host arrays, unless something of it is being traced."""
    traced = any([concrete(u) is None for u in jax.tree.leaves(tree)])
    return tree if traced else jax.tree.map(np.asarray, tree)


def _numbered(flow: Flow, width: int) -> Flow:
    """Return the flow with numbers for the names of output scales, so that all of them share a program."""
    alphas = {"m": float(width), "sqrt": float(np.sqrt(width)), "one": 1.0}

    def number(node: Any) -> Any:
        return Scaling(alphas[node.kind]) if isinstance(node, Scaling) and node.kind in alphas else node

    return jax.tree.map(number, flow, is_leaf=lambda node: isinstance(node, Scaling))


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
    if not _is_number(leaves[0]) or all([one is leaves[0] for one in leaves]):
        return False
    if _is_key(leaves[0]):
        leaves = tuple(map(jax.random.key_data, leaves))
    known = [concrete(one) for one in leaves]
    return any([one is None or known[0] is None or not np.array_equal(one, known[0]) for one in known])


def _stack(column: Sequence[Any]) -> Any:
    """Return values of several cells as one array, on the host if none is on a device."""
    if not hasattr(column[0], "dtype"):
        return plans.numbers(column)
    on_host = not _is_key(column[0]) and all([concrete(u) is not None for u in column])
    return np.stack([np.asarray(u) for u in column]) if on_host else jnp.stack(column)


@compiled
def _draw(flow: Flow, key: jax.Array, width: int, dim: int | None, outputs: int | None) -> Cloud:
    return flow.init(key, width, dim=dim, outputs=outputs)


def room(sizes: Sequence[int], numbers: int) -> int:
    """Return how many neurons to draw at once: the largest of ``sizes`` that is cheap, or the least.

    Args:
        sizes: the numbers of neurons there are programs for.
        numbers: how many numbers a neuron has, about.

    >>> room([512, 8192, 2**30], 2), room([2**28, 2**30], 2) == 2**28
    (8192, True)
    """
    return max((size for size in sizes if size * numbers <= DRAWN_TOGETHER), default=min(sizes))


def prefix(cloud: Cloud, width: int) -> Cloud:
    """Return the first ``width`` particles of equal weight as a network of their own, in host arrays if none is traced.

    They are copies, which do not keep the other particles in memory.
    """
    host = _on_host(cloud)
    if host.size == width:
        return host
    particles, labels = jax.tree.map(lambda u: u[:width].copy(), (host.particles, host.labels))
    weights = np.full(width, 1.0 / width, host.weights.dtype)
    whole = _replace(host, particles, labels)
    return eqx.tree_at(lambda c: (c.weights, c.width), whole, (weights, np.asarray(width, host.width.dtype)))


def stack_padded(many: Sequence[Stacked], size: int) -> Stacked:
    """Stack clouds or data, each filled up with copies of its last entry at weight zero; by JAX if one is being traced.

    Args:
        many: the clouds or data, of different sizes.
        size: the size of all of them afterwards.
    """
    lib: Any = np if set(map(type, jax.tree.leaves(many))) == {np.ndarray} else jnp

    def filled(u: Any) -> Any:
        return lib.concatenate([u, lib.broadcast_to(u[-1:], (size - len(u), *u.shape[1:]))])

    def grown(*values: Any) -> Any:
        # the width of a cloud has no axis
        return lib.stack([*map(filled, values)] if np.ndim(values[0]) else values)

    full: Stacked = jax.tree.map(grown, *many)
    sizes = np.array([len(one.weights) for one in many])
    return eqx.tree_at(_weights, full, lib.where(np.arange(size) < sizes[:, None], full.weights, 0))


def _weights(one: Cloud | Dataset) -> Array:
    return one.weights


def _replace(cloud: Cloud, particles: PyTree, labels: Array | None) -> Cloud:
    """Return a cloud with other particles and labels; unchecked, since they may be on the host."""
    return eqx.tree_at(
        lambda c: (c.particles, c.labels), cloud, (particles, labels), is_leaf=lambda u: u is None
    )


def settings_of(solver: Callable[..., Solution]) -> tuple[str, ...]:
    """Return the arguments of a solver that are not the sweep's own business."""
    parameters = inspect.signature(solver).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in OWN)


SETTINGS = tuple(dict.fromkeys([*settings_of(solve), *settings_of(descend)]))


def model(name: str, value: object) -> object:
    """Accept a flow, or a function that returns one."""
    if not isinstance(value, Flow) and (not callable(value) or inspect.isclass(value)):
        raise ValueError(f"{name} must be a Flow or a function that returns one, got {_boundary.show(value)}")
    return value


Model: TypeAlias = Annotated[Flow | Callable[..., Flow], model]
