"""From chunks of arrays to one labelled ``xarray.Dataset``."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np

from meanflow.solvers.solution import RESULTS
from meanflow.sweeps.grid import Chunk, Grid
from meanflow.sweeps.identity import digest

PLAIN = {
    "t": ("time on the clock of the run", "1"),
    "energy": ("loss plus penalty", "1"),
    "steps": ("number of solver steps", "1"),
    "accepted_steps": ("number of accepted steps", "1"),
    "rejected_steps": ("number of rejected steps", "1"),
    "result": ("result code; 0 is success", "1"),
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
CODES = (
    "successful",
    "max_steps_reached",
    "dt_min_reached",
    "event_occurred",
    "max_steps_rejected",
    "internal_error",
    "non_finite",
    "event_overflow",
)


def result_codes() -> dict[int, str]:
    """Names of the result codes that a sweep may record."""
    return {int(np.asarray(getattr(RESULTS, name)._value)): name for name in CODES}


def assemble(
    grid: Grid,
    chunks: Sequence[Chunk],
    results: Mapping[str, Mapping[str, np.ndarray]],
    layout: Mapping[str, Any],
    provenance: Mapping[str, Any],
) -> Any:
    """One data set from the results of all chunks that are there; missing cells are NaN (-1 for integers).

    Args:
        grid: the grid of the sweep.
        chunks: its chunks.
        results: arrays of each chunk by name.
        layout: JSON-ready: ``along`` (name, values, units of the save axis), ``variables`` (dims, units and description
            of each), ``coords`` (values along further axes).
        provenance: attributes of the data set.
    """
    import xarray

    names: dict[str, np.ndarray] = {}
    for chunk in chunks:
        for name, value in results.get(chunk.name, {}).items():
            names.setdefault(name, value)
    whole: dict[str, np.ndarray] = {}
    for name, example in names.items():
        parts = [(c, results[c.name][name]) for c in chunks if c.name in results]
        tail = tuple(np.max([p.shape[1:] for _, p in parts], axis=0)) if example.ndim > 1 else ()
        empty = np.nan if example.dtype.kind == "f" else (False if example.dtype.kind == "b" else -1)
        full = np.full((grid.size, *(int(k) for k in tail)), empty, example.dtype)
        for chunk, part in parts:
            # narrower groups leave the rest empty
            window: Any = (np.array(chunk.cells), *(slice(0, k) for k in part.shape[1:]))
            full[window] = part
        whole[name] = full.reshape(*grid.shape, *full.shape[1:])
    variables, outer = {}, tuple(SHOWN.get(name, name) for name in grid.axes)
    for name, value in whole.items():
        about = _described(name, layout["variables"])
        extra = value.ndim - len(outer)
        dims = _dims(name, extra, layout.get("along"), about.get("dims", []), bool(about.get("series", True)))
        attrs = {"units": about.get("units", "1"), "long_name": about.get("about") or name}
        if name in PLAIN:
            attrs = {"long_name": PLAIN[name][0], "units": PLAIN[name][1]}
        if name == "result":
            attrs |= {"flag_values": list(result_codes()), "flag_meanings": " ".join(result_codes().values())}
        variables[name] = (outer + dims, value, attrs)
    coords: dict[str, Any] = {
        shown: (shown, np.asarray(axis_labels(values)), _about_axis(shown))
        for shown, values in zip(outer, grid.axes.values(), strict=True)
    }
    used = {d for dims, _, _ in variables.values() for d in dims}
    along = layout.get("along")
    if along is not None and along["name"] in used:
        about_along = _about_axis(along["name"]) | {"units": along["units"]}
        coords[along["name"]] = (along["name"], np.asarray(along["values"]), about_along)
    for name, values in layout.get("coords", {}).items():
        if name in used:
            coords[name] = (name, np.asarray(values), _about_axis(name))
    return xarray.Dataset(variables, coords, dict(provenance))


def _described(name: str, variables: Mapping[str, Any]) -> Mapping[str, Any]:
    """The description of a variable; the parts of an observable that is a dict share its description."""
    if name in variables:
        return variables[name]
    return next((about for parent, about in variables.items() if name.startswith(f"{parent}_")), {})


def _dims(name: str, extra: int, along: Any, given: Sequence[str], series: bool) -> tuple[str, ...]:
    """Names of the axes behind those of the grid: the save axis first, then the observable's own."""
    if extra == 0:
        return ()
    lead = (along["name"],) if along is not None and series else ()
    rest = extra - len(lead)
    own = tuple(given) if len(given) == rest else tuple(f"{name}_{k}" for k in range(rest))
    return lead + own


def _about_axis(name: str) -> dict[str, str]:
    return {"long_name": AXES.get(name, name), "units": "1"}


def axis_labels(values: Sequence[Any]) -> list[Any]:
    """Numbers as they are; anything else as short text, which is the same in every process and always distinct."""
    if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        return list(values)
    texts = [_label(v) for v in values]
    return [t if texts.count(t) == 1 else f"{t}#{k}" for k, t in enumerate(texts)]


def _label(value: Any) -> str:
    """For instance ``KernelStep(kappa=0.1, every=20)``; objects and functions without readable fields by their name."""
    if isinstance(value, str | bool | int | float):
        return str(value)
    if isinstance(value, eqx.Module):
        shown = {n: getattr(value, n, None) for n in value.__dataclass_fields__}
        plain = [
            f"{n}={np.asarray(v).item()}"
            for n, v in shown.items()
            if isinstance(v, int | float | str | jax.Array) and np.size(v) == 1
        ]
        return f"{type(value).__name__}({', '.join(plain)})"
    return str(getattr(value, "__qualname__", type(value).__name__))


def provenance(config: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes that say how a data set came about, as text."""
    run = config["run"]
    return {
        "title": "meanflow sweep",
        "versions": json.dumps(config["versions"]),
        "run": json.dumps(run),
        "data_hash": digest(json.dumps(run["data"]).encode()) if "data" in run else "",
        "key": json.dumps(run.get("key")),
    }
