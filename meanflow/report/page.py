"""The page: a template, a script, and the numbers of a sweep as JSON inside; nothing is loaded from elsewhere."""

import html
import json
import math
import pathlib
from importlib import resources
from typing import Any

import numpy as np

MAPS = ("angle_displacement", "concentration", "kernel_drift", "on_sample_share", "energy")
MOST_PARTICLES = 300  # per picture; more cannot be told apart


def write_report(
    runs: Any, path: str | pathlib.Path, *, title: str = "meanflow sweep", samples: Any = None
) -> pathlib.Path:
    """Writes the page for a sweep.

    Args:
        runs: a data set of ``sweep``. Predictions on a grid give the picture of f; an observable ``neurons`` made from
            ``sweeps.particles`` gives that of the neurons.
        path: HTML file to write.
        title: heading.
        samples: training data to draw, a ``Dataset`` or pair (x, y).

    Returns:
        The path.
    """
    path = pathlib.Path(path)
    here = resources.files("meanflow.report")
    text = json.dumps(contents(runs, title, samples), allow_nan=False, separators=(",", ":"))
    page = here.joinpath("page.html").read_text()
    page = page.replace("{{title}}", html.escape(title))
    page = page.replace("{{script}}", here.joinpath("page.js").read_text())
    page = page.replace(
        "{{data}}", text.replace("</", "<\\/")
    )  # nothing in the data may end the script element
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page)
    return path


def contents(runs: Any, title: str = "", samples: Any = None) -> dict[str, Any]:
    """What the page shows, JSON-ready (NaN and infinities as null or text)."""
    along = next(d for d in ("time", "step") if d in runs.energy.dims)
    axes = [d for d in runs.result.dims if d != "seed"]
    columns = next((d for d in axes if d != "width" and runs.sizes[d] > 1), None)
    chosen = {d: 0 for d in axes if d not in ("width", columns)}
    runs = runs.isel(chosen)
    if columns is None:
        columns = "all"
        runs = runs.expand_dims(all=[0])
    runs = runs.transpose("width", columns, "seed", ...)
    median = runs.energy.median("seed").values
    maps = {
        name: {
            "title": runs[name].attrs.get("long_name", name),
            "values": _clean(runs[name].isel({along: -1}).median("seed").values),
        }
        for name in MAPS
        if name in runs and along in runs[name].dims
    }
    page: dict[str, Any] = {
        "title": title,
        "rows": {"name": "width", "values": [_text(v) for v in runs.width.values]},
        "columns": {"name": columns, "values": [_text(v) for v in runs[columns].values]},
        "along": {"name": along, "values": _clean(runs[along].values)},
        "energy": _clean(median),
        "failed": int(((runs.result != 0) & (runs.result != 3)).sum()),
        "maps": maps,
        "provenance": _provenance(runs),
    }
    first = runs.isel(seed=0)
    if "predictions" in runs and "x" in runs.predictions.dims:
        page["x"] = _clean(runs.x.values)
        page["f"] = _clean(first.predictions.values)
    if "neurons_r" in runs and "neurons_theta" in runs:
        r, theta = first.neurons_r.values, first.neurons_theta.values
        pick = slice(0, MOST_PARTICLES)
        u, v = np.abs(r) * np.cos(theta), np.abs(r) * np.sin(theta)
        page["neurons"] = {
            "u": _clean(u[..., pick]),
            "v": _clean(v[..., pick]),
            "sign": _clean(np.sign(r[..., pick])),
        }
    if samples is not None:
        x, y = (samples.x, samples.y) if hasattr(samples, "x") else samples
        if np.ndim(x) == 1:
            page["samples"] = {"x": _clean(np.asarray(x)), "y": _clean(np.asarray(y))}
    return page


def _clean(values: Any) -> Any:
    """Nested lists rounded to five digits; what is not finite becomes None."""
    array = np.asarray(values)
    if array.ndim:
        return [_clean(v) for v in array]
    number = float(array)
    if not math.isfinite(number):
        return None
    return int(number) if number == int(number) and abs(number) < 1e9 else float(f"{number:.5g}")


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float | np.number) else str(value)


def _provenance(runs: Any) -> dict[str, str]:
    return {str(name): str(value) for name, value in runs.attrs.items() if name != "title"}
