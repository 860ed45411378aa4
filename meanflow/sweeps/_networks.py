"""``sweep``: a flow, data and a grid in, one labelled data set out."""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from meanflow import _checks
from meanflow._checks import array, count, either, flag, number, optional, sequence, unchecked
from meanflow.flows._flow import Flow
from meanflow.measures._dataset import DATA, Dataset
from meanflow.solvers._continuous import solve
from meanflow.solvers._discrete import descend
from meanflow.sweeps import _grid as grids
from meanflow.sweeps._arguments import (
    STATIC_SETTINGS,
    AnyKey,
    Counts,
    Init,
    Model,
    Numbers,
    Samples,
    check_changes,
    check_flows,
    check_inputs,
    check_settings,
    check_values,
    find_horizon,
    find_takers,
    first_flow,
    make_grid,
    most_steps,
)
from meanflow.sweeps._cells import Sweep
from meanflow.sweeps._grid import Value
from meanflow.sweeps._plan import AXES, FINITE, NUMBERS, RUN, SEEDS, any_key, as_key
from meanflow.sweeps._results import Observe, check_names, choose
from meanflow.sweeps._runner import Progress

if TYPE_CHECKING:  # slow to import
    import xarray


def model(name: str, value: object) -> object:
    """Accept a flow, or a function that returns one."""
    if not isinstance(value, Flow) and (not callable(value) or inspect.isclass(value)):
        raise ValueError(f"{name} must be a Flow or a function that returns one, got {_checks.show(value)}")
    return value


WIDTHS = sequence(count(1))
SAMPLES = either(DATA, _checks.function)


@_checks.arguments(
    flow=model,
    data=SAMPLES,
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
    data: Samples,
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
        A plan with ``run(store=, mesh=, progress=)``; ``values(data, **axes)``, all results as a pure function of data
        and axes;
        ``single(**cell)``, one cell run alone; ``cloud(**cell)``, its initial cloud; and ``grid``, ``groups``,
        ``chunks`` and ``waste``, which say how it would be run.
    """
    grid = make_grid(widths, deltas, scales, axes, seeds)
    named = [name for name in grid.axes if name not in ("width", "seed")]
    taken = find_takers(flow, data, init, named)
    asked = (*taken["flow"], *taken["solver"])  # by what is compiled; clouds and data are made beforehand
    static = [
        n for n in named if n in STATIC_SETTINGS or (n in asked and not grids.is_traceable(grid.axes[n]))
    ]
    template = first_flow(flow, grid, taken)
    if isinstance(data, Dataset):
        check_inputs(template, data)
    check_changes(template, grid, taken)
    clash = sorted(set(settings) & set(named))
    if clash:
        raise ValueError(f"{clash[0]} is given both as an axis and as a setting")
    settings.setdefault("clock", "lazy")  # equal to mean-field time for alpha = m
    horizon, along = find_horizon(t1, ts, steps, every, settings, grid)
    if steps is None and settings.get("max_steps") is None and "max_steps" not in grid.axes:
        settings["max_steps"] = most_steps(grid, settings.get("step"), **horizon)
    solver = solve if steps is None else descend
    check_settings(solver, [*settings, *taken["solver"]])
    check_values(solver, settings, {name: grid.axes[name] for name in taken["solver"]})
    check_flows(flow, grid, taken)
    order = ["width", "seed", *(n for n in named if n not in static)]
    planned = Sweep(
        grid=grid,
        groups=grids.make_groups(grid, static, waste, 1, order),
        shared=data if isinstance(data, Dataset) else None,
        samples=data,
        room=None,
        flow=flow,
        init=init,
        observe={},
        horizon=horizon,
        settings=settings,
        taken=taken,
        nested=nested,
        key=as_key(key),
        chunk=chunk,
        along=along,
    )
    first = data if isinstance(data, Dataset) else jax.tree.map(jnp.asarray, planned._data(0))
    check_inputs(template, first)
    recorded = choose(observe, template.bind(first).observables(first))
    check_names(grid, recorded, along["name"])
    room = None if isinstance(data, Dataset) else planned.largest_data()
    return dataclasses.replace(planned, observe=recorded, room=room)


@_checks.arguments(
    flow=model, data=SAMPLES, widths=WIDTHS, **RUN, plan=unchecked("prepare checks each of them")
)
def sweep(
    flow: Model,
    data: Samples,
    *,
    widths: Counts,
    store: str | pathlib.Path | None = None,
    mesh: Mesh | None = None,
    progress: Progress = None,
    **plan: Any,
) -> xarray.Dataset:
    """Train one network per cell of a grid width x named axes x seed, in as few compiled programs as possible.

    Clouds are drawn at their true width, padded with weight zero to a common size and run side by side; widths are
    grouped so that padding stays below ``waste``. The result of a cell does not depend on its neighbours, on the chunk
    size or on the devices beyond rounding.

    Args:
        flow: the model, or a function of named axes (and ``width``, if it has such an argument) that returns one.
        data: training data, shared by all cells; or a function (key, **axes) -> Dataset that gets the axes (and
            ``seed``) it has arguments for, such as the number of samples, the noise or the teacher. The key is the same
            for all cells: fold in what the draw shall depend on. Data are filled up to a common size with weight zero,
            so that cells with different numbers of samples share a program.
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
        observe: None for the usual observables of the model; names of observables (``"default"`` for the usual ones,
            ``"neurons"`` for the coordinates of every neuron; ``kernel_drift`` and the statistics of knots take long to
            compile and are recorded when named); or a dict of further ones.
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
