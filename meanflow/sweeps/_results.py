"""What a sweep records, from the observables asked for to one labelled ``xarray.Dataset``."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from meanflow._identity import Json, digest
from meanflow._observable import Observable
from meanflow.flows._observables import as_observable, named
from meanflow.solvers._solution import code_numbers
from meanflow.sweeps._grid import Chunk, Grid, Value, is_numeric

if TYPE_CHECKING:  # slow to import
    import xarray

Observe: TypeAlias = (
    None | str | Sequence[str] | Mapping[str, Observable | Callable[..., PyTree] | str | None]
)

PLAIN = {  # what every sweep records
    "t": "time on the clock of the run",
    "energy": "loss plus penalty",
    "steps": "number of solver steps",
    "accepted_steps": "number of accepted steps",
    "rejected_steps": "number of rejected steps",
    "result": "result code; 0 is success",
}
AXES = {
    "width": "number of neurons",
    "delta": "balance of the neurons",
    "scale": "factor of the initial amplitudes",
    "seed": "number of the random draw",
    "step": "steps done",
    "step_size": "step size",
    "time": "time on the clock of the run",
    "sample": "input of the sample, or its number",
    "x": "input",
}
SHOWN = {"step": "step_size"}  # "step" is the axis of saves
STEADY = code_numbers()["event_occurred"]  # of a run that was asked to stop in a steady state, and did


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
        taken = next((name for name in observe if name in PLAIN), None)
        if taken is not None:
            raise ValueError(f"observe must not use the name {taken!r}, which every sweep records itself")
        given = {
            n: as_observable(f"observe[{n!r}]", one, defaults)
            for n, one in observe.items()
            if one is not None
        }
        return {n: one for n, one in usual.items() if n not in observe} | given
    if not isinstance(observe, str | list | tuple):
        raise ValueError(f"observe must be None, names or a dict of observables, got {observe!r}")
    names = [observe] if isinstance(observe, str) else list(observe)
    everything = usual if "default" in names else {}
    return everything | named([name for name in names if name != "default"], defaults)


def check_names(grid: Grid, observe: Mapping[str, Observable], along: str) -> None:
    """Refuse observables and their axes that are called like an axis of the grid, before hours of computing."""
    recorded = {*PLAIN, *observe, along}.union(*(one.dims for one in observe.values()))
    clash = next((name for n in grid.axes if (name := SHOWN.get(n, n)) in recorded), None)
    if clash is not None:
        raise ValueError(
            f"axes and observables need different names, got {clash!r} for an axis and for something recorded"
        )


def assemble(
    grid: Grid, chunks: Sequence[Chunk], results: Mapping[str, Mapping[str, np.ndarray]], config: Json
) -> "xarray.Dataset":
    """Return one data set with the results of all chunks that are there; missing cells are NaN (-1 for integers).

    Args:
        grid: the grid of the sweep.
        chunks: its chunks.
        results: arrays of each chunk by name.
        config: JSON-ready, as in a store. Its ``"layout"`` holds ``along`` (name, values, units of the save axis),
            ``variables`` (dims, units and description of each), ``coords`` (values along further axes).
    """
    import xarray

    layout, run = config["layout"], config["run"]
    along, labelled = layout["along"], dict(layout["coords"])
    outer = [SHOWN.get(name, name) for name in grid.axes]
    coords = dict(zip(outer, map(axis_labels, grid.axes.values()), strict=True))
    there = [c for c in chunks if c.name in results]
    variables = {}
    for name in dict.fromkeys(name for c in there for name in results[c.name]):
        whole = _join(grid, [(c, results[c.name][name]) for c in there])
        about = _described(name, layout["variables"])
        dims = [*outer, *_dims(name, whole.ndim - len(outer), along, about)]
        variables[name] = (dims, whole, _attributes(name, about))
        labelled |= {along["name"]: along["values"]} if along else {}
        coords |= {d: labelled[d] for d in dims if d in labelled}
    found = xarray.Dataset(variables, coords)
    for name in coords:
        found[name].attrs = {"long_name": AXES.get(name, name), "units": "1"}
    if along and along["name"] in coords:
        found[along["name"]].attrs["units"] = along["units"]
    return found.assign_attrs(
        title="meanflow sweep",
        versions=json.dumps(config["versions"]),
        source=config["source"],
        run=json.dumps(run),
        data_hash=digest(json.dumps(run["data"]).encode()) if "data" in run else "",
        key=json.dumps(run.get("key")),
    )


def _join(grid: Grid, parts: Sequence[tuple[Chunk, np.ndarray]]) -> np.ndarray:
    """Return one variable over the whole grid from its values in some chunks."""
    tails = np.array([part.shape[1:] for _, part in parts])
    empty = {"f": np.nan, "b": False}.get(parts[0][1].dtype.kind, -1)
    full = np.full((grid.size, *tails.max(0).astype(int)), empty, parts[0][1].dtype)
    for chunk, part in parts:
        # narrower groups leave the rest empty
        window = full[(slice(None), *map(slice, part.shape[1:]))]
        window[np.array(chunk.cells)] = part
    return full.reshape(*grid.shape, *full.shape[1:])


def _attributes(name: str, about: Json) -> Json:
    """Return units and description of a variable."""
    if name not in PLAIN:
        return {"units": about.get("units", "1"), "long_name": about.get("about") or name}
    attributes: Json = {"long_name": PLAIN[name], "units": "1"}
    if name == "result":
        codes = code_numbers()
        attributes |= {"flag_values": list(codes.values()), "flag_meanings": " ".join(codes)}
    return attributes


def _described(name: str, variables: Mapping[str, Json]) -> Json:
    """Return the description of a variable; the parts of an observable that is a dict share its description."""
    parent = next((known for known in variables if name == known or name.startswith(f"{known}_")), name)
    return variables.get(name, variables.get(parent, {}))


def _dims(name: str, extra: int, along: Json | None, about: Json) -> list[str]:
    """Return the names of the axes behind those of the grid: the save axis first, then the observable's own."""
    lead = [along["name"]] if extra and along and about.get("series", True) else []
    rest, given = extra - len(lead), about.get("dims", [])
    # the last names stand for axes that not every model has, such as the outputs of a network
    return lead + (given[:rest] if len(given) >= rest else [f"{name}_{k}" for k in range(rest)])


def axis_labels(values: Sequence[Value]) -> list[float | str]:
    """Return numbers as they are, anything else as short text that is the same in every process and always distinct.

    >>> axis_labels(["lazy", "gradient"])
    ['lazy', 'gradient']
    """
    if is_numeric(values):
        return list(values)
    texts = [_label(v) for v in values]
    return [t if texts.count(t) == 1 else f"{t}#{k}" for k, t in enumerate(texts)]


def _label(value: Value) -> str:
    """Return for instance ``KernelStep(kappa=0.1)``; without readable fields a name. Defaults are left out."""
    if isinstance(value, str | bool | int | float):
        return str(value)
    if isinstance(value, eqx.Module):
        usual = {n: p.default for n, p in inspect.signature(type(value)).parameters.items()}
        shown = {n: getattr(value, n, None) for n in value.__dataclass_fields__}
        plain = [
            f"{n}={np.asarray(v).item()}"
            for n, v in shown.items()
            # keys of random numbers are arrays too
            if (isinstance(v, int | float | str) or _is_number(v)) and usual.get(n) is not v
        ]
        return f"{type(value).__name__}({', '.join(plain)})"
    return str(getattr(value, "__qualname__", type(value).__name__))


def _is_number(value: object) -> bool:
    return isinstance(value, jax.Array) and value.size == 1 and isinstance(value.dtype, np.dtype)


def final(runs: "xarray.Dataset", name: str) -> "xarray.DataArray":
    """Return the last save of a variable of a sweep; of a run that stopped in a steady state, the last before it did.

    Args:
        runs: a data set of ``sweep``.
        name: the variable.
    """
    value = runs[name]
    along = next((d for d in ("time", "step") if d in value.dims), None)
    if along is None:
        return value
    last = value.isel({along: -1}, drop=True)
    if "result" not in runs or "t" not in runs or along not in runs.t.dims:
        return last
    saved = np.isfinite(runs.t).sum(along) - 1
    stopped = (runs.result == STEADY) & (saved >= 0)
    return value.isel({along: saved.clip(0)}, drop=True).where(stopped, last).assign_attrs(value.attrs)


def failed(runs: "xarray.Dataset") -> "xarray.DataArray":
    """Say of each run of a sweep whether it ended in a failure; those that have not been run did not."""
    return (runs.result != 0) & (runs.result != STEADY) & (runs.result != -1)
