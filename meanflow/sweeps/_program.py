"""One cell of a sweep as a pure function, all cells of a chunk as one compiled program.

A cell is an ``equinox.Module`` called as cell(shared, inputs) -> dict of arrays. ``batched`` maps it over the leading
axis of ``inputs``; over a mesh, the axis ``sweep`` is split by shard_map (cells never wait for each other's
steps) and the axis ``particles`` by the compiler, which sums over devices where a prediction sums over neurons.
"""

import abc
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled, Lowered
from jaxtyping import Array, PyTree

from meanflow import _checks
from meanflow._reuse import kept_by_shape
from meanflow.flows._flow import Flow
from meanflow.flows._observables import Observable
from meanflow.measures._cloud import Cloud
from meanflow.measures._dataset import Dataset
from meanflow.solvers._continuous import solve
from meanflow.solvers._discrete import descend
from meanflow.solvers._solution import Solution

SWEEP, PARTICLES = "sweep", "particles"
Results: TypeAlias = dict[str, Array]
Values: TypeAlias = dict[str, Any]  # values of named axes or settings, of any kind


class Cell(eqx.Module):
    """The program of one cell: a pure function of what all cells share and of the cell's own inputs."""

    @abc.abstractmethod
    def __call__(self, shared: PyTree, inputs: Mapping[str, PyTree]) -> Results:
        """Return the results of the cell as arrays by name."""


class RunCell(Cell):
    """One training run: inputs {cloud, axes, key, data} -> energies, observables, result code.

    Attributes:
        flow: a Flow, or a function of named axis values that returns one.
        observe: what to record, by name.
        horizon: {"t1": time, "ts": save times} for ``solve``, {"steps": n, "every": k} for ``descend``.
        settings: further arguments of the solver.
        taken: the axes each of flow and solver takes.
        fixed: values of the axes that are not traced.
    """

    flow: Flow | Callable[..., Flow]
    observe: dict[str, Observable]
    horizon: Values
    settings: Values
    taken: dict[str, tuple[str, ...]]
    fixed: Values

    def flow_at(self, values: Values) -> Flow:
        """Return the model of a cell with these axis values."""
        if isinstance(self.flow, Flow):
            return self.flow
        return self.flow(**{name: values[name] for name in self.taken["flow"]})

    def solution(self, data: Dataset | None, inputs: Mapping[str, PyTree]) -> Solution:
        """Return the run as the solver returns it."""
        values = self.fixed | inputs["axes"]
        settings = self.settings | {name: values[name] for name in self.taken["solver"]}
        if "key" in inputs:
            settings["key"] = jax.random.wrap_key_data(inputs["key"])
        solver: Callable[..., Solution] = descend if "steps" in self.horizon else solve
        end = "steps" if "steps" in self.horizon else "t1"
        rest = {name: value for name, value in self.horizon.items() if name != end}
        flow = self.flow_at(values)
        return solver(
            flow,
            inputs["cloud"],
            inputs.get("data", data),
            self.horizon[end],
            observe=self.observe,
            throw=False,
            **rest,
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

        series = {"t": run.ts, "energy": run.energy} | flatten(run.observed)
        counts = {name.removeprefix("num_"): value for name, value in run.stats.items()}
        return {name: mask(u) for name, u in series.items()} | counts | {"result": run.result._value}


class FunctionCell(Cell):
    """A user's function of a key and named values, as a cell.

    Attributes:
        function: (key, **values) -> array, or dict of arrays.
        fixed: values of the axes that are not traced.
    """

    function: Callable[..., PyTree]
    fixed: Values

    def __call__(self, shared: None, inputs: Mapping[str, PyTree]) -> Results:
        """Return the function's arrays by name; a single array is called ``value``."""
        values = self.fixed | inputs["axes"]
        out = self.function(jax.random.wrap_key_data(inputs["key"]), **values)
        named = out if isinstance(out, dict) else {"value": out}
        plain = {
            name: jnp.asarray(u) if isinstance(u, bool | int | float) else u for name, u in named.items()
        }
        return flatten(plain, what="function")


def flatten(tree: Mapping[str, PyTree], prefix: str = "", what: str = "observe") -> Results:
    """Return nested dicts of arrays as one dict whose names are joined by underscores; ``what`` made them.

    >>> list(flatten({"end": {"square": jnp.ones(2)}}))
    ['end_square']
    """
    flat: Results = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}_", what)
        elif hasattr(value, "shape"):
            flat[prefix + name] = value
        else:
            raise ValueError(
                f"{what}[{prefix + name!r}] must return an array or a dict of arrays, got {_checks.show(value)}"
            )
    return flat


def batched(
    cell: Cell, shared: PyTree, inputs: PyTree, mesh: Mesh | None = None, *, one_by_one: bool = False
) -> Results:
    """Map ``cell`` over the leading axis of ``inputs``; pure, so it can be jitted, differentiated and exported.

    Args:
        cell: the program of one cell.
        shared: what all cells share.
        inputs: the inputs of the cells, along the leading axis.
        mesh: devices; None for one.
        one_by_one: each device runs its cells one after the other instead of all at once.
    """
    # closures would hide the arrays of the cell from shard_map
    arrays, rest = eqx.partition((cell, shared), eqx.is_array)

    def run(arrays: PyTree, inputs: PyTree) -> Results:
        cell, shared = eqx.combine(arrays, rest)
        if one_by_one:
            return jax.lax.map(lambda own: cell(shared, own), inputs)
        return jax.vmap(cell, in_axes=(None, 0))(shared, inputs)

    if mesh is None:
        return run(arrays, inputs)
    across = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(SWEEP)),
        out_specs=PartitionSpec(SWEEP),
        axis_names={SWEEP},
        check_vma=False,
    )
    return across(arrays, inputs)


@_checks.arguments(
    sweep=_checks.optional(_checks.count(1)),
    particles=_checks.count(1),
    devices=_checks.optional(_checks.sequence(_checks.instance(jax.Device, hint="see jax.devices()"))),
)
def make_mesh(
    sweep: int | None = None, particles: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Return a mesh with axes ``sweep`` and ``particles`` over all devices of all processes, or the first few.

    Args:
        sweep: devices along which cells are spread; default all that are left.
        particles: devices along which each cloud is spread.
        devices: default ``jax.devices()``.

    >>> dict(make_mesh(sweep=1).shape)
    {'sweep': 1, 'particles': 1}
    """
    devices = list(jax.devices() if devices is None else devices)
    if len(set(devices)) < len(devices):
        raise ValueError(f"devices must be different from each other, got {devices}")
    sweep = max(1, len(devices) // particles) if sweep is None else sweep
    if sweep * particles > len(devices):
        raise ValueError(
            f"a mesh of {sweep} x {particles} devices needs {sweep * particles}, got {len(devices)}"
        )
    return Mesh(np.array(devices[: sweep * particles]).reshape(sweep, particles), (SWEEP, PARTICLES))


def check_mesh(mesh: Mesh | None) -> Mesh | None:
    """Return the mesh to use, None for a single device; refuse axes other than ``sweep`` and ``particles``."""
    if mesh is None:
        return make_mesh() if jax.device_count() > 1 else None
    if not isinstance(mesh, Mesh) or set(mesh.axis_names) != {SWEEP, PARTICLES}:
        raise ValueError(
            f"mesh must have the axes ('sweep', 'particles'), got {mesh!r}; see sweeps.make_mesh"
        )
    return mesh


def specs(inputs: PyTree) -> PyTree[PartitionSpec]:
    """Return how the inputs are split: clouds along both axes, everything else along ``sweep``."""
    by_cell = PartitionSpec(SWEEP)

    def of(node: PyTree) -> PyTree[PartitionSpec]:
        if not isinstance(node, Cloud):
            return by_cell
        both = PartitionSpec(SWEEP, PARTICLES)
        split = jax.tree.map(lambda _: both, node)
        return eqx.tree_at(lambda c: c.width, split, by_cell)

    return jax.tree.map(of, inputs, is_leaf=lambda node: isinstance(node, Cloud))


def place(inputs: PyTree, mesh: Mesh | None) -> PyTree[Array]:
    """Put host arrays on the devices of the mesh; each process fills its own."""
    if mesh is None:
        return jax.tree.map(jnp.asarray, inputs)

    def put(u: np.ndarray, spec: PartitionSpec) -> Array:
        return jax.make_array_from_callback(u.shape, NamedSharding(mesh, spec), lambda index: u[index])

    return jax.tree.map(put, inputs, specs(inputs))


def replicate(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Return the same tree with every array held in full by every device of the mesh."""
    if mesh is None:
        return tree
    everywhere = NamedSharding(mesh, PartitionSpec())

    def put(u: Array) -> Array:
        host = np.asarray(u)
        return jax.make_array_from_callback(host.shape, everywhere, lambda index: host[index])

    arrays, rest = eqx.partition(tree, eqx.is_array)
    return eqx.combine(jax.tree.map(put, arrays), rest)


def compile_batched(cell: Cell, shared: PyTree, inputs: PyTree, mesh: Mesh | None) -> Compiled:
    """Return the compiled program for inputs of these shapes, as a function of the arrays of (cell, shared, inputs).

    It is compiled ahead of time and can run on these shapes only, so a group of cells costs one compilation. Programs
    are kept, and a later sweep with the same settings and shapes uses them again.
    """
    arrays, rest = eqx.partition((cell, shared, inputs), eqx.is_array)
    shapes = jax.tree.map(lambda u: jax.ShapeDtypeStruct(u.shape, u.dtype, sharding=u.sharding), arrays)
    return _compile(rest, shapes, mesh)


@kept_by_shape
def _compile(rest: PyTree, shapes: PyTree, mesh: Mesh | None) -> Compiled:
    """Compile the program for the given static parts and shapes."""

    def lowered(one_by_one: bool) -> Lowered:
        def run(arrays: PyTree) -> Results:
            cell, shared, inputs = eqx.combine(arrays, rest)
            return batched(cell, shared, inputs, mesh, one_by_one=one_by_one)

        return jax.jit(run).lower(shapes)

    program = lowered(False)
    devices = jax.devices()[:1] if mesh is None else mesh.devices.ravel()
    # one such call in one program of one device has the pool of threads for itself
    if devices[0].platform == "cpu" and batched_factorizations(program.as_text()) > (len(devices) == 1):
        program = lowered(True)
    return program.compile()


LAPACK = re.compile(r"custom_call @lapack_\w+\(.*?: \((.*?)\) ->")


def batched_factorizations(text: str) -> int:
    """Return how many times a lowered program factorizes many matrices in one call of LAPACK.

    On the CPU such a call hands its matrices to the pool of threads that it runs in, and waits. When every thread of
    the pool waits like that, as happens when several devices of one host or several calls of one program meet, the
    program stands still for ever (jax 0.10). Calls for one matrix do not wait for anybody.

    >>> text = jax.jit(jnp.linalg.cholesky).lower(jnp.ones((4, 2, 2))).as_text()
    >>> batched_factorizations(text), batched_factorizations(text.replace("4x2x2", "2x2"))
    (1, 0)
    """

    def is_batched(operands: str) -> bool:
        shapes = re.findall(r"tensor<((?:\d+x)*)\w+>", operands)
        return any(math.prod(int(n) for n in sizes.split("x")[:-1][:-2]) > 1 for sizes in shapes)

    return sum(is_batched(operands) for operands in LAPACK.findall(text))


def output_shapes(cell: Cell, shared: PyTree, inputs: PyTree) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of one cell's results, without computing."""
    one = jax.tree.map(lambda u: jax.ShapeDtypeStruct(u.shape[1:], u.dtype), inputs)
    return eqx.filter_eval_shape(cell, shared, one)
