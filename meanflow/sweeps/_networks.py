"""The plan of a sweep of networks: the program of one training run, its initial clouds and its data."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what can be made and drawn again."""
        return self.__dict__ | {"kept": {}, "drawn": {}}

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
        places = {cell: k for k, cell in enumerate(group.cells)}
        chosen = np.array([places[cell] for cell in cells])
        varied = jax.tree.map(lambda u: u[chosen], self._program(group)[1])
        return self._inputs(group, cells, grids.round_up(group.size, multiple)) | {"varied": varied}

    def _inputs(
        self, group: Group, cells: Sequence[int], size: int, changed: Changes = UNCHANGED
    ) -> dict[str, PyTree]:
        """Return clouds of one size, data and keys of some cells; on the host, where nothing is changed."""
        inputs: dict[str, PyTree] = {"cloud": stack_padded([self._cloud(c, changed) for c in cells], size)}
        if self.room is not None:
            inputs["data"] = stack_padded([self._data(c, changed) for c in cells], self.room)
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
            steps = [step for one in different if (step := concrete(one["step"])) is not None]
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
        found = list(dict.fromkeys([*named, *(name for some in takes for name in some)]))
        return [*found, "width"] if self._named_scales and "width" not in found else found

    @property
    def _named_scales(self) -> bool:
        """Whether an axis of the flow holds names of output scales, which are numbers that depend on the width."""
        axes = (self.grid.axes[name] for name in self.taken.get("flow", ()))
        return any(isinstance(value, str) and value in NAMES for values in axes for value in values)

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
            if self._named_scales:
                given["flow"] = _numbered(given["flow"], values["width"])
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
            found = with_labels(found, values["delta"])
        if "scale" in values and "scale" not in takes["init"]:
            amplitude = self.made(cell, changed)["flow"].feature.amplitude
            found = scaled(found, amplitude or "", values["scale"])
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
        return draw(flow, key, width, sizes, data.x.shape[1] if data.x.ndim == 2 else None, outputs)


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
    if not _is_number(leaves[0]) or all(one is leaves[0] for one in leaves):
        return False
    if _is_key(leaves[0]):
        leaves = tuple(map(jax.random.key_data, leaves))
    known = [concrete(one) for one in leaves]
    return any(one is None or known[0] is None or not np.array_equal(one, known[0]) for one in known)


def _stack(column: Sequence[Any]) -> ArrayLike:
    """Return values of several cells as one array, on the host if none is on a device."""
    if not hasattr(column[0], "dtype"):
        return plans.numbers(column)
    on_host = not _is_key(column[0]) and all(concrete(u) is not None for u in column)
    return np.stack([np.asarray(u) for u in column]) if on_host else jnp.stack(column)


def draw(
    flow: Flow, key: jax.Array, width: int, sizes: Sequence[int], dim: int | None, outputs: int | None
) -> Cloud:
    """Return ``flow.init(key, width, ...)``, drawn together with more neurons that are cut off again where that pays.

    A draw is one compiled program for each number of neurons. JAX's own generator counts the numbers it draws, so that
    the first neurons do not depend on how many are drawn, and all widths may share one program.

    Args:
        flow: the model.
        key: PRNG key.
        width: the number of neurons to return.
        sizes: numbers of neurons, at least ``width``, that programs for other widths draw.
        dim: input dimension, or None.
        outputs: number of outputs, or None.
    """
    if any(concrete(u) is None for u in jax.tree.leaves(flow) if isinstance(u, jax.Array)):
        # draws do not depend on what is traced in the flow, but a compiled call would return traced particles
        return flow.init(key, width, dim=dim, outputs=outputs)
    if str(jax.random.key_impl(key)) != "threefry2x32" or not _counts_numbers():
        return _draw(flow, key, width, dim, outputs)
    return prefix(_draw(flow, key, room(sizes, (dim or 1) * (outputs or 1)), dim, outputs), width)


@compiled
def _draw(flow: Flow, key: jax.Array, width: int, dim: int | None, outputs: int | None) -> Cloud:
    return flow.init(key, width, dim=dim, outputs=outputs)


@functools.cache
def _counts_numbers() -> bool:
    """Say whether the generator counts its numbers; an older form of it, which can be asked for, does not."""

    @jax.jit  # one small program instead of a dozen
    def agree(key: jax.Array) -> jax.Array:
        return jnp.all(jax.random.bits(key, (3,))[:2] == jax.random.bits(key, (2,)))

    with jax.ensure_compile_time_eval():
        return bool(agree(jax.random.key(0, impl="threefry2x32")))


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
    """Return the first ``width`` particles of equal weight as a network of their own, in host arrays of their own."""
    host = jax.tree.map(np.asarray, cloud)
    if host.size == width:
        return host
    # copies, which do not keep the other particles in memory
    particles, labels = jax.tree.map(lambda u: np.array(u[:width]), (host.particles, host.labels))
    weights = np.full(width, 1.0 / width, host.weights.dtype)
    return _replace(host, particles, labels, weights, np.asarray(width, host.width.dtype))


def with_labels(cloud: Cloud, label: float | jax.Array) -> Cloud:
    """Return the same particles, all with one label."""
    traced = any(isinstance(u, jax.Array) for u in (label, cloud.weights))
    labels = (jnp if traced else np).full_like(cloud.weights, label)
    return _replace(cloud, cloud.particles, labels, cloud.weights, cloud.width)


def scaled(cloud: Cloud, amplitude: str, factor: float | jax.Array) -> Cloud:
    """Return the cloud with one coordinate of its particles, named ``amplitude``, times ``factor``."""
    dtype = cloud.weights.dtype
    share = factor.astype(dtype) if isinstance(factor, jax.Array) else dtype.type(factor)
    value = getattr(cloud.particles, amplitude) * share
    return cloud.at(cloud.particles._replace(**{amplitude: value}))


def stack_padded(many: Sequence[Stacked], size: int) -> Stacked:
    """Stack clouds or data on the host, each filled up with copies of its last entry at weight zero.

    What is being traced is stacked by JAX.

    Args:
        many: the clouds or data, of different sizes.
        size: the size of all of them afterwards.
    """
    on_host = all(isinstance(u, np.ndarray) for u in jax.tree.leaves(many))
    lib = np if on_host else jnp

    def grown(*values: np.ndarray) -> np.ndarray:
        if not np.ndim(values[0]):  # the width of a cloud
            return lib.stack(values)
        last = [lib.broadcast_to(u[-1:], (size - len(u), *u.shape[1:])) for u in values]  # type: ignore[has-type]
        return lib.stack([lib.concatenate(pair) for pair in zip(values, last, strict=True)])

    full: Stacked = jax.tree.map(grown, *many)
    real = np.stack([np.arange(size) < one.weights.shape[0] for one in many])
    return eqx.tree_at(lambda one: one.weights, full, lib.where(real, full.weights, 0))


def _replace(cloud: Cloud, *parts: object) -> Cloud:
    """Return a cloud with new particles, labels, weights and width; unchecked, since they may be on the host."""
    return eqx.tree_at(
        lambda c: (c.particles, c.labels, c.weights, c.width), cloud, parts, is_leaf=lambda u: u is None
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
