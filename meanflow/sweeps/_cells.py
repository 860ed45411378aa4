"""A planned sweep of networks: which cloud, data and key each of its cells gets, and what is run for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Key, PyTree, UInt32

from meanflow._checks import array
from meanflow._identity import Json, describe
from meanflow.flows._flow import Flow, bind_and_check
from meanflow.flows._observables import Observable
from meanflow.measures._cloud import Cloud
from meanflow.measures._dataset import Dataset
from meanflow.solvers._solution import Solution
from meanflow.sweeps import _clouds as clouds
from meanflow.sweeps import _grid as grids
from meanflow.sweeps import _program as program
from meanflow.sweeps._arguments import Init, Model, Samples
from meanflow.sweeps._grid import Group, Value
from meanflow.sweeps._plan import Plan, numbers
from meanflow.sweeps._program import Values


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
        horizon, settings: arguments of the solver.
        taken: the axes that flow, data, init and solver take.
        nested, key: how random numbers depend on width and seed.
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
        return self.cell(group).solution(jax.tree.map(jnp.asarray, self._data(index)), inputs)

    def values(self, data: Dataset | None = None, **axes: ArrayLike) -> dict[str, Array]:
        """Return all results as arrays over the grid, a pure function of data and axes: jit it, differentiate it.

        All cells of a group run at once and in one process; use ``run`` for grids that need chunks.

        Args:
            data: the data, if all cells share them; default those of the plan.
            axes: other values along numeric axes, such as ``delta`` or ``scale``, as many as the plan has. What draws
                clouds or data from them is traced. Without them the initial clouds are constants.

        >>> import jax, jax.numpy as jnp, meanflow as mf
        >>> data = mf.Dataset(jnp.linspace(-1.0, 1.0, 4), jnp.array([1.0, -1.0, 1.0, 0.0]))
        >>> plan = mf.sweeps.prepare(mf.lifted(), data, widths=[4], deltas=[0.0], steps=2, step=0.1, observe=())
        >>> loss = lambda y, delta: plan.values(mf.Dataset(data.x, y), delta=delta)["energy"][..., -1].sum()
        >>> [u.shape for u in jax.grad(loss, (0, 1))(data.y, jnp.array([0.5]))]
        [(4,), (1,)]
        """
        if data is not None and self.shared is None:
            raise ValueError("data must be None where each cell has data of its own, got a Dataset")
        data = self.shared if data is None else data
        changed = self._changed(axes)
        order = np.concatenate([group.cells for group in self.groups])
        inputs = []
        for group in self.groups:
            if changed:
                inputs.append(self._traced_inputs(group, changed))
            else:
                # clouds are constants, also while a caller is being traced
                with jax.ensure_compile_time_eval():
                    inputs.append(jax.tree.map(jnp.asarray, self.inputs(group, group.cells)))
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
        if self.room is not None:
            inputs["data"] = clouds.stack_data([self._data(cell) for cell in cells], self.room)
        if self._draws():
            inputs["key"] = np.stack([np.asarray(self._batch_key(v)) for v in values])
        return inputs

    def _changed(self, axes: Mapping[str, ArrayLike]) -> dict[str, Array]:
        """Return new values along axes, checked."""
        fixed = {name for group in self.groups for name, _ in group.fixed}
        changed = {}
        for name, values in axes.items():
            numeric = name in self.grid.axes and grids.is_traceable(self.grid.axes[name])
            if not numeric or name in fixed or name in ("width", "seed"):
                free = [n for n in self.grid.axes if n not in fixed and n not in ("width", "seed")]
                raise ValueError(
                    f"axes of other values must be among the numeric ones of {free}, got {name!r}"
                )
            changed[name] = array((len(self.grid.axes[name]),), infinite=True)(name, values)
        return changed

    def _traced_inputs(self, group: Group, changed: Mapping[str, Array]) -> PyTree:
        """Return the inputs of all cells of a group with changed values along some axes, as a function of these."""
        values = [self._at(cell, changed) for cell in group.cells]
        join = lambda many: jax.tree.map(lambda *u: jnp.stack([jnp.asarray(v) for v in u]), *many)
        inputs: dict[str, PyTree] = {
            "cloud": join([self._cloud(cell, changed).pad(group.size) for cell in group.cells]),
            "axes": {
                name: changed[name][np.array([self.grid.places(cell)[name] for cell in group.cells])]
                if name in changed
                else jnp.asarray(numbers([v[name] for v in values]))
                for name in self._traced(group)
            },
        }
        if self.room is not None:
            inputs["data"] = join([self._data(cell, changed).pad(self.room) for cell in group.cells])
        if self._draws():
            with jax.ensure_compile_time_eval():
                inputs["key"] = jnp.stack([self._batch_key(v) for v in values])
        return inputs

    def _at(self, cell: int, changed: Mapping[str, Array]) -> Values:
        """Return the value of each axis at a cell, the changed ones as traced numbers."""
        places = self.grid.places(cell)
        return self.grid.at(cell) | {name: new[places[name]] for name, new in changed.items()}

    def identity(self) -> Json:
        """Return a description of model, data, axes, solver settings, observables and key."""
        return {
            "kind": "sweep",
            "flow": describe(self.flow),
            "data": describe(self.samples)
            if self.shared is None
            else {name: describe(getattr(self.shared, name)) for name in ("x", "y", "weights")},
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
        univariate = self.shared is not None and self.shared.x.ndim == 1
        count = self.room if self.shared is None else self.shared.size
        assert count is not None
        coords.setdefault("sample", np.asarray(self.shared.x).tolist() if univariate else [*range(count)])
        more = {"along": self.along, "variables": about, "coords": coords}
        if univariate:
            more["samples"] = {name: np.asarray(getattr(self.shared, name)).tolist() for name in ("x", "y")}
        return super().layout(chunks) | more

    def largest_data(self) -> int:
        """Return the number of samples of the largest data of any cell; all must be of one kind, and hold a batch."""
        names, first, sizes = self.taken["data"], self._data(0), []
        batch = self.settings.get("batch_size", max(self.grid.axes.get("batch_size", (1,))))
        seen = {tuple(self.grid.places(c)[n] for n in names): c for c in range(self.grid.size)}
        for cell in seen.values():
            found = self._data(cell)
            kinds = [(u.shape[1:], u.dtype) for one in (first, found) for u in (one.x, one.y)]
            if kinds[:2] != kinds[2:]:
                raise ValueError(
                    f"data must return inputs and targets of one kind for all cells, got {kinds[:2]} and {kinds[2:]}"
                )
            if found.size < batch:
                raise ValueError(
                    f"batch_size must be at most the number of samples, got {batch} for {found.size}"
                )
            sizes.append(found.size)
        return max(sizes)

    def _classes(self, flow: Flow) -> int:
        """Return the number of classes in the data of all cells: a small sample may miss the last ones."""

        def most() -> np.ndarray:
            names = self.taken["data"]
            seen = {tuple(self.grid.places(c)[n] for n in names): c for c in range(self.grid.size)}
            return np.asarray([flow.loss.outputs(self._data(cell).y) for cell in seen.values()]).max(
                keepdims=True
            )

        return int(clouds.remember(self, ("classes",), most)[0])

    def check(self) -> None:
        """Make the checks that solvers skip while they are being traced, on the first cell of each group."""
        for group in self.groups:
            first = group.cells[0]
            cloud = jax.tree.map(jnp.asarray, self._cloud(first))
            flow = self._flow_at(self.grid.at(first))
            bind_and_check(flow.begin(cloud), cloud, jax.tree.map(jnp.asarray, self._data(first)))

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

    def _data(self, cell: int, changed: Mapping[str, Array] = MappingProxyType({})) -> Dataset:
        """Return the data of a cell, at their true size; as host arrays, where nothing is changed."""
        if self.shared is not None:
            return self.shared
        places, names = self.grid.places(cell), self.taken["data"]
        values = self._at(cell, changed)
        draw = lambda: self._draw_data({name: values[name] for name in names})
        if any(name in changed for name in names):
            return draw()
        return clouds.remember(self, ("data", *(places[name] for name in names)), draw)

    def _draw_data(self, passed: Values) -> Dataset:
        assert callable(self.samples)
        found = self.samples(jax.random.split(self.key)[1], **passed)
        if not isinstance(found, Dataset):
            raise ValueError(f"data must return a Dataset, got {type(found).__name__}")
        return found

    def _cloud(self, cell: int, changed: Mapping[str, Array] = MappingProxyType({})) -> Cloud:
        """Return the initial cloud of a cell at its true width; as host arrays, where nothing is changed."""
        values, places = self._at(cell, changed), self.grid.places(cell)
        width = max(self.grid.axes["width"]) if self.nested else values["width"]
        names = self.taken["init"] if self.init is not None else (*self.taken["flow"], *self.taken["data"])
        # by place along the axis: texts of two laws or functions may well be equal
        tag = (width, values["seed"], *(places[name] for name in names))
        passed = {name: values[name] for name in names}
        if any(name in changed for name in names):
            cloud = self._draw(cell, values, width, passed)
        else:
            cloud = clouds.remember(
                self, tag, lambda: clouds.cut(self._draw(cell, values, width, passed), width)
            )
        if cloud.size > values["width"]:
            cloud = clouds.prefix(cloud, values["width"])
        if "delta" in values and "delta" not in self.taken["init"]:
            if self.init is not None and cloud.labels is not None:
                raise ValueError(
                    "deltas would overwrite the labels that init returns; leave one of them out, or let init take "
                    "an argument delta"
                )
            cloud = clouds.with_labels(cloud, values["delta"])
        if "scale" in values and "scale" not in self.taken["init"]:
            cloud = clouds.scaled(cloud, self._flow_at(values).feature.amplitude or "", values["scale"])
        return cloud

    def _draw(self, cell: int, values: Values, width: int, passed: Values) -> Cloud:
        key = self._keys(values, width)
        if self.init is None:
            data = self._data(cell)
            x = data.x
            flow = self._flow_at(values).bind(data)
            outputs = flow.loss.outputs(data.y)
            if self.room is not None and outputs is not None and data.y.ndim == 1:
                outputs = self._classes(flow)
            dim = x.shape[1] if x.ndim == 2 else None
            sizes = [g.size for g in self.groups if g.size >= width]
            # the draw is cut to its width afterwards, so that several widths share one program here too
            shared = not self.nested and clouds.has_prefixes(key)
            room = clouds.room(sizes, (dim or 1) * (outputs or 1)) if shared else width
            return clouds.draw(flow, key, room, dim, outputs)
        cloud = self.init(key, width, **passed)
        if not isinstance(cloud, Cloud):
            raise ValueError(f"init must return a Cloud, got {type(cloud).__name__}")
        if cloud.size != width:
            raise ValueError(f"init must return a cloud of the width it is given, {width}, got {cloud.size}")
        return cloud
