"""``sweep`` and ``sweep_function``: a model or a function and a grid in, one labelled data set out."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    checked,
    count,
    mapping,
    number,
    sequence,
    text,
    unchecked,
)
from meanflow._identity import Json, describe
from meanflow._observable import Observable
from meanflow.flows._flow import Flow
from meanflow.flows._observables import as_observable, named
from meanflow.measures._dataset import Dataset
from meanflow.solvers._continuous import solve
from meanflow.solvers._discrete import descend
from meanflow.solvers._solution import Solution
from meanflow.sweeps import _grid as grids
from meanflow.sweeps import _plan as plans
from meanflow.sweeps._devices import Cell, Results
from meanflow.sweeps._grid import PLAIN, SHOWN, Grid, Group, Value
from meanflow.sweeps._networks import SETTINGS, Init, Model, Samples, Sweep, Values, settings_of
from meanflow.sweeps._plan import AXES, SEEDS, Execution, Plan, Seeds, any_key

if TYPE_CHECKING:  # slow to import
    import xarray

Numbers: TypeAlias = Annotated[
    Sequence[float] | Float[ArrayLike, "k"], sequence(number(infinite=True, static=True))
]
Counts: TypeAlias = Annotated[Sequence[int] | Int[Array, "k"] | Int[np.ndarray, "k"], sequence(count(1))]
AnyKey: TypeAlias = Annotated[int | Key[Array, ""] | UInt32[ArrayLike, "words"], any_key]
Observe: TypeAlias = (
    None | str | Sequence[str] | Mapping[str, Observable | Callable[..., PyTree] | str | None]
)


def choose(observe: Observe, defaults: Mapping[str, Observable]) -> dict[str, Observable]:
    """Return the observables behind the argument ``observe`` of a sweep, by name.

    Args:
        observe: None for the defaults. A sequence of names: these of what the model offers and of those on request;
            ``"default"`` stands for all defaults. A dict: the defaults and these; a name mapped to None is left out.
        defaults: what the model offers, ``flow.observables(data)``; the defaults are the usual ones of these.
    """
    usual = {name: one for name, one in defaults.items() if one.usual}
    if observe is None:
        return usual
    if isinstance(observe, Mapping):
        if taken := sorted(set(observe) & set(PLAIN)):
            raise ValueError(f"observe must not use the name {taken[0]!r}, which every sweep records itself")
        given = {
            n: as_observable(f"observe[{n!r}]", u, defaults) for n, u in observe.items() if u is not None
        }
        return {n: one for n, one in usual.items() if n not in observe} | given
    if not isinstance(observe, str | list | tuple):
        raise ValueError(f"observe must be None, names or a dict of observables, got {observe!r}")
    names = [observe] if isinstance(observe, str) else observe
    return (usual if "default" in names else {}) | named([n for n in names if n != "default"], defaults)


def check_names(grid: Grid, observe: Mapping[str, Observable], along: str) -> None:
    """Refuse observables and their axes that are called like an axis of the grid, before hours of computing."""
    recorded = {*PLAIN, *observe, along}.union(*[one.dims for one in observe.values()])
    if clash := sorted(recorded & {SHOWN.get(name, name) for name in grid.axes}):
        raise ValueError(
            f"axes and observables need different names, got {clash[0]!r} for an axis and for something recorded"
        )


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
        # width is an argument of every init, and data are the same for all widths
        more = "seed" if name in ("data", "init") else "width"
        taken[name] = tuple(arguments(one, [*names, more], (more,)))
    reached = {"delta", "scale", *SETTINGS}.union(*taken.values())
    if lost := [name for name in names if name not in reached]:
        raise ValueError(
            f"axes[{lost[0]!r}] reaches nothing: flow, data, init and settings do not take it, and the "
            f"settings that can be swept are {sorted(SETTINGS)}"
        )
    return taken


def arguments(
    function: Callable[..., object], names: Iterable[str], not_any: Sequence[str] = ()
) -> list[str]:
    """Return which of the names a function takes; with ``**anything`` all, but for those in ``not_any``."""
    parameters = inspect.signature(function).parameters
    anything = inspect.Parameter.VAR_KEYWORD in {p.kind for p in parameters.values()}
    return [name for name in names if name in parameters or (anything and name not in not_any)]


def check_settings(solver: Callable[..., Solution], given: Iterable[str], axes: Iterable[str]) -> None:
    """Refuse a setting that the solver of the sweep does not have, or that is given twice."""
    given, named = list(given), list(filter(SETTINGS.__contains__, axes))
    if clash := sorted(set(given) & set(named)):
        raise ValueError(f"{clash[0]} is given both as an axis and as a setting")
    allowed = settings_of(solver)
    if stray := [name for name in (*given, *named) if name not in allowed]:
        end = "steps" if solver is solve else "t1"
        hint = f" (it belongs to runs with {end})" if stray[0] in SETTINGS else ""
        raise ValueError(
            f"settings of {solver.__name__} must be among {sorted(allowed)}, got {stray[0]!r}{hint}"
        )


def check_changes(flow: Flow, grid: Grid, taken: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse axes delta and scale for a model whose clouds they cannot change."""
    taken_names = set().union(*taken.values())
    if "delta" in grid.axes and flow.space.label_name != "delta" and "delta" not in taken_names:
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


def check_data(plan: Sweep) -> None:
    """Check the data of all cells, which must be of one kind and hold a batch."""
    first = plan.data(0)
    names = dict.fromkeys([*plan.taken.get("data", ()), *plan.makers])
    for cell in plan.grid.one_each(names)[0]:
        found, made = plan.data(cell), plan.made(cell)
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
        if made.get("batches") is not None:
            is_none = lambda u: u is None
            eqx.tree_at(lambda b: b.key, made["batches"], plan.key, is_leaf=is_none).check(found)


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
    observe: Annotated[Observe, unchecked("choose checks it, which knows the names of the model")] = None,
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
    draft = Sweep(
        grid=grid,
        shared=data if isinstance(data, Dataset) else None,
        execution=execution or Execution(),
        samples=data,
        flow=flow,
        init=init,
        observe={},
        horizon=horizon,
        settings=settings,
        taken=taken,
        key=any_key("key", key),
        along=along,
    )
    for cell in grid.one_each(draft.makers)[0]:
        for name, value in draft.made(cell).items():
            if name != "flow":
                solver.kinds()[name](name, value)  # type: ignore[attr-defined]
    check_data(draft)
    template = draft.made(0)["flow"]
    check_changes(template, grid, taken)
    first = jax.tree.map(jnp.asarray, draft.data(0))
    recorded = choose(observe, template.bind(first).observables(first))
    check_names(grid, recorded, along["name"])
    plan = dataclasses.replace(draft, observe=recorded)
    return plan.run(store=store) if compute else plan


class FunctionCell(Cell):
    """A user's function of a key and named values, as a cell.

    Attributes:
        function: (key, **values) -> array, or dict of arrays.
        fixed: values of the axes that are not traced.
    """

    function: Callable[..., PyTree]
    fixed: dict[str, Value]

    def __call__(self, shared: None, inputs: Mapping[str, PyTree]) -> Results:
        """Return the function's arrays by name; a single array is called ``value``."""
        out = self.function(jax.random.wrap_key_data(inputs["key"]), **self.fixed, **inputs["axes"])
        named = out if isinstance(out, dict) else {"value": out}
        plain = {n: jnp.asarray(u) if isinstance(u, bool | int | float) else u for n, u in named.items()}
        return plans.flatten(plain, what="function")


@dataclass(frozen=True, kw_only=True, eq=False)
class FunctionSweep(Plan):
    """A planned sweep of a user's function.

    Attributes:
        function: the function.
        key: key that the key of every seed is made from.
        dims: names of the axes of each result.
    """

    function: Callable[..., PyTree]
    key: Key[Array, ""]
    dims: dict[str, list[str]]

    @functools.cached_property
    def groups(self) -> tuple[Group, ...]:
        """Cells whose values differ in numbers only."""
        return grids.make_groups(self.grid, self.grid.one_each(filter(self._is_fixed, self.grid.axes))[1])

    def cell(self, group: Group) -> FunctionCell:
        """Return the function with the values of the axes that are not traced."""
        values = self.grid.at(group.cells[0])
        return FunctionCell(self.function, {n: v for n, v in values.items() if self._is_fixed(n)})

    def inputs(self, group: Group, cells: Sequence[int], multiple: int = 1) -> PyTree[np.ndarray]:
        """Return keys and axis values of some cells, with a leading axis; there are no clouds to fill up."""
        places = self.grid.places(np.asarray(cells))
        traced = [name for name in self.grid.axes if name != "seed" and not self._is_fixed(name)]
        keys = [jax.random.fold_in(self.key, self.grid.axes["seed"][k]) for k in places["seed"]]
        return {
            "axes": {name: plans.numbers(self.grid.axes[name])[places[name]] for name in traced},
            "key": np.stack([np.asarray(jax.random.key_data(k)) for k in keys]),
        }

    def _is_fixed(self, name: str) -> bool:
        return not grids.is_numeric(self.grid.axes[name])

    def identity(self) -> Json:
        """Return a description of function, axes and key."""
        return {
            "kind": "function",
            "function": describe(self.function),
            "axes": describe({name: list(values) for name, values in self.grid.axes.items()}),
            "key": jax.random.key_data(self.key).tolist(),
            "precision": str(jnp.result_type(float)),
        }

    def variables(self) -> Json:
        """Return the names that the user gave to the axes of the results."""
        about = {name: {"dims": dims, "series": False} for name, dims in self.dims.items()}
        return {"along": None, "variables": about, "coords": {}}

    def check(self) -> None:
        """Refuse results that are called like axes, and wrong names for their own axes, before computing."""
        found: dict[str, jax.ShapeDtypeStruct] = {}
        for group in self.groups:
            found |= self.shapes(group)
        for name, value in found.items():
            dims = self.dims.get(name, [])
            if {name, *dims} & set(self.grid.axes):
                raise ValueError(
                    f"results and their axes must not be called like an axis of the grid, got {name!r} {dims}"
                )
            if name in self.dims and len(dims) != len(value.shape):
                raise ValueError(f"dims[{name!r}] must name {len(value.shape)} axes, got {dims}")
        if stray := sorted(set(self.dims) - set(found)):
            raise ValueError(f"dims must name results among {sorted(found)}, got {stray[0]!r}")


@checked
def sweep_function(
    function: Callable[..., PyTree],
    *,
    axes: Annotated[Mapping[str, Iterable[Value]], AXES] | None = None,
    seeds: Seeds = 1,
    dims: Annotated[Mapping[str, Sequence[str]], mapping(sequence(text, least=0))] | None = None,
    key: Annotated[int | Key[Array, ""] | UInt32[ArrayLike, "words"], any_key] = 0,
    store: FilePath | None = None,
    execution: Execution | None = None,
) -> "xarray.Dataset":
    """Run any function of a PRNG key and named values over a grid: vmapped, chunked, sharded, stored and labelled.

    Args:
        function: (key, **axes) -> array or dict of arrays; it is traced. The key of seed s is the same in all cells.
        axes: values by name; numbers share one program, other values get one program each.
        seeds: number of seeds, or their list.
        dims: names of the axes of each result (``"value"`` for a function that returns one array).
        key: integer or PRNG key that all random numbers come from.
        store: run directory, as in ``sweep``.
        execution: ``sweeps.Execution``: size of chunks (by default 1024 cells), devices, progress.

    >>> import jax
    >>> noise = lambda key, sigma: sigma * jax.random.normal(key, (3,))
    >>> ds = sweep_function(noise, axes={"sigma": [1.0, 2.0]}, seeds=4)
    >>> dict(ds.value.sizes)
    {'sigma': 2, 'seed': 4, 'value_0': 3}
    """
    grid = Grid(grids.axis_values(dict(axes or {}) | {"seed": plans.seed_list(seeds)}))
    missing = sorted(set(grid.axes) - {"seed", *arguments(function, grid.axes)})
    if missing:
        raise ValueError(f"function must take every axis by name, got one that does not take {missing}")
    execution = execution or Execution()
    return FunctionSweep(
        grid=grid,
        shared=None,
        execution=dataclasses.replace(execution, chunk=execution.chunk or 1024),
        function=function,
        key=any_key("key", key),
        dims={name: list(some) for name, some in (dims or {}).items()},
    ).run(store=store)
