"""What the arguments of a sweep mean together: the grid, who takes which axis, the horizon, and what is refused."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, Key, UInt32

from meanflow import _checks
from meanflow._identity import Json
from meanflow.flows._flow import Flow
from meanflow.measures._cloud import Cloud
from meanflow.measures._dataset import Dataset
from meanflow.solvers._continuous import solve, step_budget
from meanflow.solvers._discrete import descend
from meanflow.solvers._solution import Solution
from meanflow.solvers._step import ConstantStep
from meanflow.sweeps import _grid as grids
from meanflow.sweeps._grid import Grid, Value
from meanflow.sweeps._plan import as_seeds
from meanflow.sweeps._program import Values

Model: TypeAlias = Flow | Callable[..., Flow]
Samples: TypeAlias = Dataset | Callable[..., Dataset]
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


def make_grid(
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


def find_takers(
    flow: Model, data: Samples, init: Init | None, named: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Return which of the named axes flow, data, init and solver take; refuse an axis that reaches nothing."""
    taken = {
        "flow": () if isinstance(flow, Flow) else _takes(flow, [*named, "width"]),
        "data": () if isinstance(data, Dataset) else _takes(data, [*named, "seed"]),
        "init": () if init is None else _takes(init, named),
        "solver": tuple(n for n in named if n in TRACED_SETTINGS + STATIC_SETTINGS),
    }
    for name in named:
        if name in ("delta", "scale") or any(name in some for some in taken.values()):
            continue
        raise ValueError(
            f"axes[{name!r}] reaches nothing: flow, data and init do not take it, and the settings that can be "
            f"swept are {[*TRACED_SETTINGS, *STATIC_SETTINGS]}"
        )
    return taken


def first_flow(flow: Model, grid: Grid, taken: Mapping[str, tuple[str, ...]]) -> Flow:
    """Return the model of the first cell, which stands for all of them in the checks."""
    if isinstance(flow, Flow):
        return flow
    first = grid.at(0)
    made = flow(**{n: first[n] for n in taken["flow"]})
    if not isinstance(made, Flow):
        raise ValueError(f"flow must return a Flow, got {type(made).__name__}")
    return made


def _takes(function: Callable[..., object], names: Sequence[str]) -> tuple[str, ...]:
    """Return the names among ``names`` that ``function`` has arguments for; **kwargs takes all but width and seed."""
    parameters = inspect.signature(function).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return tuple(n for n in names if n in parameters or (anything and n not in ("width", "seed")))


def check_settings(solver: Callable[..., Solution], given: Sequence[str]) -> None:
    """Refuse a setting that the solver of the sweep does not have."""
    allowed = _settings_of(solver)
    stray = next((name for name in given if name not in allowed), None)
    if stray is None:
        return
    other, end = (descend, "steps") if solver is solve else (solve, "t1")
    hint = f" (it belongs to runs with {end})" if stray in _settings_of(other) else ""
    raise ValueError(f"settings of {solver.__name__} must be among {allowed}, got {stray!r}{hint}")


def check_values(
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


def check_flows(flow: Model, grid: Grid, taken: Mapping[str, tuple[str, ...]]) -> None:
    """Build the model for each value of each of its axes: one that is refused is refused before anything compiles."""
    if isinstance(flow, Flow):
        return
    first = grid.at(0)
    for name in taken["flow"]:
        for value in grid.axes[name]:
            values = first | {name: value}
            flow(**{n: values[n] for n in taken["flow"]})


def _settings_of(solver: Callable[..., Solution]) -> list[str]:
    """Return the arguments of a solver that are not the sweep's own business."""
    own = ("t0", "ts", "every", "observe", "key", "state", "throw", "measure_error")
    parameters = inspect.signature(solver).parameters.values()
    return sorted(p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in own)


def check_inputs(flow: Flow, data: Dataset) -> None:
    """Refuse data whose inputs have another rank than those of the model."""
    rank = flow.feature.input_ndim
    if rank is not None and data.x.ndim != rank:
        raise ValueError(
            f"data.x must have shape {'(n,)' if rank == 1 else '(n, d)'} for this flow, got {data.x.shape}"
        )


def check_changes(flow: Flow, grid: Grid, taken: Mapping[str, tuple[str, ...]]) -> None:
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


def find_horizon(
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


def most_steps(grid: Grid, step: object, t1: float, ts: Float[Array, "times"]) -> int:
    """Return the number of steps that the smallest step of the grid needs; while it is traced it is unknown."""
    if "step" in grid.axes and grids.is_traceable(grid.axes["step"]):
        step = min(grid.axes["step"])
    rule = ConstantStep(jnp.asarray(step, float)) if isinstance(step, int | float | np.number) else None
    return step_budget(rule, jnp.asarray(0.0), jnp.asarray(t1), ts)
