"""The page: a template, a script, and the numbers of a sweep as JSON inside; nothing is loaded from elsewhere.

Titles, names and labels may come from anywhere (a directory's name, a store that somebody sent), so they are data on
the page and never a part of it: the template is filled in one pass, data hold no ``<``, and the page's own security
policy allows the one script and the one style sheet that this package wrote, by their digests, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import pathlib
import re
from collections.abc import Sequence
from importlib import resources
from typing import Annotated

import numpy as np
import xarray
from numpy.typing import ArrayLike

from meanflow import _boundary
from meanflow._boundary import FilePath, checked, host_array, instance
from meanflow.files import atomic_write
from meanflow.measures import Dataset
from meanflow.sweeps._grid import failed, final

MAPS = ("angle_displacement", "concentration", "kernel_drift", "on_sample_share", "accuracy", "energy")
MOST_PARTICLES = 200  # per picture; more cannot be told apart


def sweep_result(name: str, value: object) -> object:
    """Accept a data set of ``sweep``: one that holds energies and results over time or steps."""
    instance(xarray.Dataset, hint="pass what meanflow.sweep returned")(name, value)
    missing = [key for key in ("energy", "result") if key not in value]  # type: ignore[operator]
    if missing:
        raise ValueError(f"{name} must be a data set of meanflow.sweep, got one without {missing}")
    lacking = [d for d in ("width", "seed") if d not in value.result.dims]  # type: ignore[attr-defined]
    if lacking or not {"time", "step"} & set(value.energy.dims):  # type: ignore[attr-defined]
        raise ValueError(
            f"{name} must be a data set of meanflow.sweep, with axes width and seed, and energies along time or step, "
            f"got axes {list(value.sizes)}"  # type: ignore[attr-defined]
        )
    return value


def samples_of(name: str, value: object) -> object:
    """Accept a ``Dataset`` or a pair (x, y) of arrays."""
    if not isinstance(value, Dataset):
        if not isinstance(value, tuple | list) or len(value) != 2:
            raise TypeError(f"{name} must be a Dataset or a pair (x, y), got {_boundary.show(value)}")
        x, y = (host_array(rank=1)(name, entry) for entry in value)
        if x.shape[0] != y.shape[0]:
            raise ValueError(f"{name} must be a pair (x, y) of equal lengths, got {x.shape} and {y.shape}")
    return value


@checked
def write_report(
    runs: Annotated[xarray.Dataset, sweep_result],
    path: FilePath,
    *,
    title: str = "meanflow sweep",
    samples: Annotated[Dataset | tuple[ArrayLike, ArrayLike], samples_of] | None = None,
) -> pathlib.Path:
    """Write one self-contained HTML page about a sweep; nothing in it is loaded from elsewhere.

    Args:
        runs: a data set of ``sweep``. Predictions on a grid give the picture of f; an observable ``neurons`` made from
            ``"neurons"`` gives that of the neurons.
        path: HTML file to write.
        title: heading.
        samples: training data to draw, a ``Dataset`` or pair (x, y).

    Returns:
        The path.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as part:
        # names of directories may hold bytes that are no text
        part.write_text(
            render(contents(runs, title, samples)), encoding="utf-8", errors="replace", newline="\n"
        )
    return path


def render(shown: dict[str, object]) -> str:
    """Return the page that shows what ``contents`` returned."""
    here = resources.files("meanflow.report")
    template, script, style = (
        here.joinpath(name).read_text(encoding="utf-8") for name in ("page.html", "page.js", "page.css")
    )
    data = json.dumps(shown, allow_nan=False, separators=(",", ":"))
    parts = {
        "title": html.escape(str(shown["title"])),
        # without these three characters nothing in the data can end, begin or hide an element
        "data": re.sub("[<>&]", lambda found: f"\\u{ord(found[0]):04x}", data),
        "script": script,
        "style": style,
        "policy": f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; "
        "base-uri 'none'; form-action 'none'",
    }
    # one pass: what is filled in is not looked at again
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


def _digest(text: str) -> str:
    """Return the digest by which a security policy allows an inline script or style sheet."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def contents(
    runs: xarray.Dataset, title: str = "", samples: Dataset | tuple[ArrayLike, ArrayLike] | None = None
) -> dict[str, object]:
    """Return what the page shows, JSON-ready (NaN and infinities as null or text); arguments of ``write_report``."""
    # energies lie along time (solvers of the flow) or steps (descent)
    along = next(d for d in ("time", "step") if d in runs.energy.dims)
    axes = [d for d in runs.result.dims if d != "seed"]
    # the page has two axes: width, and the first other one that varies; the rest is shown at its first value
    columns = next((d for d in axes if d != "width" and runs.sizes[d] > 1), None)
    chosen = {d: 0 for d in axes if d not in ("width", columns)}
    whole, runs = runs, runs.isel(chosen)
    if columns is None:
        columns = "all"
        runs = runs.expand_dims(all=[0])
    runs = runs.transpose("width", columns, "seed", ...)
    median = runs.energy.median("seed").values
    maps = {
        name: {
            "title": runs[name].attrs.get("long_name", name),
            "units": runs[name].attrs.get("units", "1"),
            "values": _clean(final(runs, name).median("seed").values),
        }
        for name in MAPS
        if name in runs and along in runs[name].dims
    }
    page: dict[str, object] = {
        "title": title,
        "rows": {"name": "width", "values": [_text(v) for v in runs.width.values]},
        "columns": {"name": columns, "values": [_text(v) for v in runs[columns].values]},
        "along": {"name": along, "values": _clean(runs[along].values)},
        "energy": _clean(median),
        "summary": _summary(whole, [d for d in chosen if whole.sizes[d] > 1]),
        "maps": maps,
        "provenance": _provenance(whole),
    }
    # functions and neurons have no median: those of the first seed
    first = runs.isel(seed=0)
    if "predictions" in runs and "x" in runs.predictions.dims:
        page["x"] = _clean(runs.x.values)
        page["f"] = _clean(first.predictions.values)
    plane = _plane(first)
    if plane is not None:
        names = ("u", "v", "sign")
        page["neurons"] = {n: _clean(u[..., :MOST_PARTICLES], 3) for n, u in zip(names, plane, strict=True)}
    if samples is not None:
        x, y = (samples.x, samples.y) if isinstance(samples, Dataset) else samples
        if np.ndim(x) == 1:
            page["samples"] = {"x": _clean(np.asarray(x)), "y": _clean(np.asarray(y))}
    return page


def _clean(values: ArrayLike, digits: int = 5) -> list | float | int | None:
    """Return nested lists of numbers rounded to a few digits; what is not finite becomes None."""
    array = np.asarray(values)
    if array.ndim:
        return [_clean(v, digits) for v in array]
    # JSON has neither NaN nor infinities; whole numbers need no point
    number = float(array)
    if not math.isfinite(number):
        return None
    return int(number) if number == int(number) and abs(number) < 1e9 else float(f"{number:.{digits}g}")


def _text(value: object) -> str:
    """Return an axis value as the page writes it."""
    return f"{value:g}" if isinstance(value, int | float | np.number) else str(value)


def _plane(runs: xarray.Dataset) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """(u, v) = |r| d(theta) and the sign of r of recorded neurons, up to the factor m/alpha in raw coordinates."""
    if "neurons_r" in runs and "neurons_theta" in runs:
        r, theta = runs.neurons_r.values, runs.neurons_theta.values
        return np.abs(r) * np.cos(theta), np.abs(r) * np.sin(theta), np.sign(r)
    if all(f"neurons_{name}" in runs for name in "abc"):
        a, b, c = (runs[f"neurons_{name}"].values for name in "abc")
        return np.abs(c) * a, -np.abs(c) * b, np.sign(c)
    return None


def _summary(runs: xarray.Dataset, shown: Sequence[str]) -> str:
    """One line: the axes, the number of runs, how many failed, and at which values of the other axes they are shown."""
    axes = " x ".join(f"{runs.sizes[d]} {d}s" if runs.sizes[d] > 1 else f"1 {d}" for d in runs.result.dims)
    missing = int((runs.result == -1).sum())
    rest = f", {missing} not run yet" if missing else ""
    held = ", ".join(f"{d} = {_text(runs[d].values[0])}" for d in shown)
    pictures = f" Pictures at {held}." if held else ""
    return f"{axes}: {runs.result.size} runs, {int(failed(runs).sum())} failed{rest}.{pictures}"


def _provenance(runs: xarray.Dataset) -> list[list[str]]:
    """Name and text of every setting; nested ones are joined by dots."""
    found: list[list[str]] = []

    def walk(name: str, value: object) -> None:
        if isinstance(value, dict) and value:
            for key, inside in value.items():
                walk(f"{name}.{key}" if name else str(key), inside)
        else:
            found.append([name, value if isinstance(value, str) else json.dumps(value)])

    for name, text in runs.attrs.items():
        if name == "title":
            continue
        try:
            value = json.loads(text)
        except (TypeError, ValueError):
            value = str(text)
        walk("" if name == "run" else str(name), value)
    return found
