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
from typing import Annotated, TypeAlias

import numpy as np
import xarray
from numpy.typing import ArrayLike

from meanflow import _boundary
from meanflow._boundary import FilePath, checked, host_array, instance
from meanflow.files import atomic_write
from meanflow.measures import Dataset
from meanflow.sweeps._grid import failed, final

# these come first where they were recorded: the page opens with the first of them
MAPS = ("angle_displacement", "concentration", "kernel_drift", "on_sample_share", "accuracy", "energy")
MOST_PARTICLES = 200  # per picture; more cannot be told apart
MOST_POINTS = 400  # of a curve, or samples of a picture
MOST_MOMENTS = 100  # of the slider
MOST_OUTPUTS = 6  # colors
MOST_NUMBERS = 400_000  # of all moving pictures together, about 4 MB
MOST_CURVES = 12  # losses that can be told apart; more become quantiles
# settings that stand above the fold
FIRST_ASKED = ("horizon.", "settings.", "data.x", "precision", "versions.meanflow", "versions.jax", "source")


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
        x, y = (host_array((None,), (None, None))(name, entry) for entry in value)
        if x.shape[0] != y.shape[0]:
            raise ValueError(f"{name} must be a pair (x, y) of equal lengths, got {x.shape} and {y.shape}")
    return value


Samples: TypeAlias = Dataset | tuple[ArrayLike, ArrayLike] | None


@checked
def write_report(
    runs: Annotated[xarray.Dataset, sweep_result],
    path: FilePath,
    *,
    title: str = "meanflow sweep",
    samples: Annotated[Dataset | tuple[ArrayLike, ArrayLike], samples_of] | None = None,
) -> pathlib.Path:
    """Write one self-contained HTML page about a sweep; nothing in it is loaded from elsewhere.

    The page draws what was recorded: losses of all cells (their quantiles where there are more than a dozen), final
    values over the grid, and one selected network in time. Predictions on a grid are curves, predictions at samples
    points over the targets. Neurons (``observe=["default", "neurons"]``) stand where ``plots.plane`` draws them; those
    of more than two coordinates in their two leading directions.

    Args:
        runs: a data set of ``sweep``.
        path: HTML file to write.
        title: heading.
        samples: training data to draw, a ``Dataset`` or a pair of x (n,) or (n, d) and y (n,) or (n, k).

    Returns:
        The path.

    >>> import jax.numpy as jnp, meanflow as mf, pathlib, tempfile
    >>> data = mf.Dataset(jnp.linspace(-1.0, 1.0, 3), jnp.array([1.0, -1.0, 1.0]))
    >>> runs = mf.sweep(mf.canonical(), data, widths=[3, 4], steps=2, step=0.1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = write_report(runs, pathlib.Path(folder) / "page.html", title="two widths", samples=data)
    ...     print(page.name, page.read_text().count("<canvas"), "pictures")
    page.html 4 pictures
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


def contents(runs: xarray.Dataset, title: str = "", samples: Samples = None) -> dict[str, object]:
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
    maps = _maps(runs, along)
    runs = runs.isel({along: _spread(runs.sizes[along], MOST_POINTS)})
    median = runs.energy.median("seed").values
    page: dict[str, object] = {
        "title": title,
        "rows": {"name": "width", "values": _texts(runs.width.values)},
        "columns": {"name": columns, "values": _texts(runs[columns].values)},
        "along": {"name": along, "values": _clean(runs[along].values)},
        "energy": _clean(median),
        "missing": _missing(runs),
        "summary": _summary(whole, [d for d in chosen if whole.sizes[d] > 1]),
        "maps": maps,
        "provenance": _provenance(whole),
    }
    curves = median.reshape(-1, median.shape[-1])
    if len(curves) > MOST_CURVES:
        page["bands"] = _clean(_quantiles(curves))
    page["function"], page["neurons"] = _moving(runs, along, samples, page)
    return page


def _maps(runs: xarray.Dataset, along: str) -> dict[str, object]:
    """Return the final values of every recorded number, median over seeds."""
    axes = {str(d) for d in runs.result.dims}
    numbers = [
        str(name)
        for name, value in runs.items()
        if value.dtype.kind in "fiu" and axes <= set(value.dims) <= axes | {along}
    ]
    known = [name for name in MAPS if name in numbers]
    # times and codes are no results
    rest = [name for name in numbers if name not in (*known, "t", "result")]
    run = runs.result >= 0
    return {
        name: {
            "title": runs[name].attrs.get("long_name", name),
            "units": runs[name].attrs.get("units", "1"),
            "values": _clean(final(runs, name).where(run).median("seed").values),
        }
        for name in known + rest
    }


def _missing(runs: xarray.Dataset) -> list[list[str]]:
    """Say of each cell why it has no numbers: every seed failed or has not been run; else an empty text."""
    waiting = (runs.result == -1).all("seed").values
    broken = (failed(runs) | (runs.result == -1)).all("seed").values
    return np.where(waiting, "not run", np.where(broken, "failed", "")).tolist()


def _quantiles(curves: np.ndarray) -> np.ndarray:
    """Return five quantiles over the cells that have numbers, (5, k); NaN where there are none."""
    shares, found = (0.05, 0.25, 0.5, 0.75, 0.95), np.isfinite(curves).any(0)
    bands = np.full((len(shares), curves.shape[-1]), np.nan)
    bands[:, found] = np.nanquantile(curves[:, found], shares, axis=0)
    return bands


def _spread(size: int, most: int) -> np.ndarray:
    """Return at most ``most`` places among ``size``, evenly spread from the first to the last."""
    return np.unique(np.linspace(0, size - 1, min(size, most)).round().astype(int))


def _moving(
    runs: xarray.Dataset, along: str, samples: Samples, page: dict[str, object]
) -> tuple[dict[str, object], dict[str, object]]:
    """Return the pictures of one network in time, of its function and of its neurons, for all cells.

    Functions and neurons have no median: they are those of the first seed. ``page["moments"]`` becomes the places of
    their frames among the saves: all of them where the page does not grow too large.
    """
    first = runs.isel(seed=0)
    values = first.predictions.isel({along: 0}).size if "predictions" in runs else 0
    neurons = 3 * first.result.size * min(runs.sizes.get("particle", 0), MOST_PARTICLES)
    frames = MOST_NUMBERS // max(1, values + neurons)
    moments = _spread(runs.sizes[along], min(max(2, frames), MOST_MOMENTS))
    page["moments"] = moments.tolist()
    first = first.isel({along: moments})
    return _function(first, samples), _neurons(first, samples)


def _function(runs: xarray.Dataset, samples: Samples) -> dict[str, object]:
    """Return predictions as curves on a grid, or as points at samples: (rows, columns, moments, outputs, points)."""
    if "predictions" not in runs:
        return {"reason": "predictions were not recorded"}
    values = runs.predictions
    grid = "x" in values.dims
    if not grid and "sample" not in values.dims:
        return {"reason": f"predictions have axes {list(values.dims)[3:]}, which are not drawn"}
    one = values if "output" in values.dims else values.expand_dims("output", axis=-1)
    f = np.moveaxis(one.values, -1, -2)[..., :MOST_OUTPUTS, :]
    x, y = _pair(samples)
    if y is not None:
        y = (y[None] if y.ndim == 1 else y.T)[:MOST_OUTPUTS]
    of = "one color an output; " if f.shape[-2] > 1 else ""
    if grid:
        shown: dict[str, object] = {
            "kind": "grid",
            "x": _clean(runs.x.values),
            "values": _clean(f),
            "xname": "x",
            "yname": "f(x)",
        }
        shown["caption"] = f"The function of the network, {of}pale: where it started. First seed."
        if x is not None and y is not None and x.ndim == 1:
            shown["samples"] = {"x": _clean(x), "y": _clean(y)}
            shown["caption"] = (
                f"The function of the network, {of}pale: where it started; dots: samples. First seed."
            )
        return shown
    kept = _spread(f.shape[-1], MOST_POINTS)
    shown = {"kind": "samples", "values": _clean(f[..., kept]), "yname": "prediction"}
    if y is not None and y.shape == f.shape[-2:]:
        text = f"Predictions at the samples over their targets, {of}pale: where they started. First seed."
        return shown | {"x": _clean(y[:, kept]), "xname": "target", "diagonal": True, "caption": text}
    places = np.broadcast_to(kept, (f.shape[-2], len(kept)))
    text = f"Predictions at the samples, {of}pale: where they started. First seed."
    return shown | {"x": _clean(places), "xname": "number of the sample", "caption": text}


def _pair(samples: Samples) -> tuple[np.ndarray | None, np.ndarray | None]:
    if samples is None:
        return None, None
    x, y = (samples.x, samples.y) if isinstance(samples, Dataset) else samples
    return np.asarray(x), np.asarray(y)


def _neurons(runs: xarray.Dataset, samples: Samples) -> dict[str, object]:
    """Return where neurons stand, u, v and sign of (rows, columns, moments, particles), and how to call the axes."""
    from meanflow.plots._places import leading, places

    fields = _recorded(runs)
    if not fields:
        return {"reason": 'neurons were not recorded: observe=["default", "neurons"] does'}
    place, sign, name = places(fields)
    place, sign = place[..., :MOST_PARTICLES, :], sign[..., :MOST_PARTICLES]
    size, held = place.shape[-1], None
    if size < 2:
        return {"reason": "neurons of one coordinate have no picture in the plane"}
    if size > 2:
        place, held = leading(place)
    labels = ["u", "v"] if size == 2 and name == "r" else [f"{name}{k}" for k in (1, 2)]
    if size > 2:
        labels = [f"leading direction {k} of {name}" for k in (1, 2)]
    text = "Neurons at (u, v) = |r| (cos θ, sin θ)" if name == "r" else f"Neurons at {name}"
    if held is not None:
        text = f"Neurons at their {name}, in the two directions that hold most of it at the end"
    if (sign != 0).any():
        of = "first " if "a" in fields and fields["a"].ndim > sign.ndim else ""
        text += f"; blue: positive {of}output, orange: negative"
    shown = {"u": _clean(place[..., 0], 3), "v": _clean(place[..., 1], 3), "sign": _clean(sign)}
    shown |= {"labels": labels, "held": None if held is None else _clean(held, 3)}
    x, _ = _pair(samples)
    if name == "r" and x is not None and x.ndim == 1:
        shown["rays"] = _clean(x)
        text += ". On a dashed ray the kink of a neuron sits at a sample"
    return shown | {"caption": f"{text}; pale: where they started. First seed."}


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


def _text(value: object, digits: int = 4) -> str:
    """Return an axis value as the page writes it."""
    return f"{value:.{digits}g}" if isinstance(value, float | np.floating) else str(value)


def _texts(values: np.ndarray) -> list[str]:
    """Return the values of an axis in as few digits as tell them apart."""
    written = ([_text(v, digits) for v in values] for digits in (3, 4, 6, 9, 17))
    return next((texts for texts in written if len(set(texts)) == len(texts)), [_text(v) for v in values])


def _recorded(runs: xarray.Dataset) -> dict[str, np.ndarray]:
    """Return recorded coordinates of neurons by name; ``neurons_b_0``, ``neurons_b_1`` are two columns of b."""
    found: dict[str, dict[tuple[int, ...], np.ndarray]] = {}
    for name, value in runs.items():
        match = re.fullmatch(r"neurons_(.+?)((?:_\d+)*)", str(name))
        if match and value.dims[-1:] == ("particle",):
            place = tuple(int(k) for k in match[2].split("_")[1:])
            found.setdefault(match[1], {})[place] = value.values
    return {
        name: columns[()] if () in columns else np.stack([columns[k] for k in sorted(columns)], -1)
        for name, columns in found.items()
    }


def _summary(runs: xarray.Dataset, shown: Sequence[str]) -> str:
    """One line: the axes, the number of runs, how many failed, and at which values of the other axes they are shown."""
    named = [(runs.sizes[d], str(d).replace("_", " ")) for d in runs.result.dims]
    axes = " x ".join(f"{size} {name}s" if size > 1 else f"1 {name}" for size, name in named)
    count = f"{runs.result.size} runs" if runs.result.size > 1 else "1 run"
    missing = int((runs.result == -1).sum())
    rest = f", {missing} not run yet" if missing else ""
    held = ", ".join(f"{d} = {_text(runs[d].values[0])}" for d in shown)
    pictures = f" Pictures at {held}." if held else ""
    return f"{axes}: {count}, {int(failed(runs).sum())} failed{rest}.{pictures}"


def _provenance(runs: xarray.Dataset) -> dict[str, list[list[str]]]:
    """Name and text of every setting, nested ones joined by dots: in short what a reader asks first, and all."""
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
    short = [
        # one word before the name and the kind of a single number say nothing to a reader
        [re.sub(r"^(horizon|settings|versions)\.", "", name), re.sub(r"^(float|int)\d+:", "", text)]
        for name, text in found
        if name.startswith(FIRST_ASKED)
    ]
    model = next((m for name, _ in found if (m := re.search(r"\.feature\.(\w+)[:.]", name))), None)
    if model:
        short.insert(0, ["model", model[1]])
    return {"short": short, "all": found}
