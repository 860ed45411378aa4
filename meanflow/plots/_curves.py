"""Curves over the input, and over time or sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

from meanflow import _boundary
from meanflow._boundary import checked, either, host_array, instance, mapping
from meanflow.measures._dataset import Dataset
from meanflow.plots.style import COLORS, DASHES, SAMPLE, axes, key
from meanflow.solvers._solution import Solution


@checked
def fit(
    x: Annotated[ArrayLike, host_array((None,), nan=True, least=1)],
    f: Annotated[Mapping[str, ArrayLike], mapping(host_array((None,), nan=True), least=1)],
    data: Dataset | None,
    ax: Axes | None = None,
    *,
    knots: Annotated[ArrayLike, host_array((None,), nan=True)] | None = None,
    bands: Annotated[Mapping[str, ArrayLike], mapping(host_array((None,), nan=True))] | None = None,
) -> Axes:
    """Functions of one variable over the samples they fit, with bands around them, and the knots of the first.

    Args:
        x: (k,) grid.
        f: name -> (k,) values on the grid.
        data: ``Dataset`` with inputs (n,), or None.
        ax: matplotlib Axes; a new figure by default.
        knots: (m,) positions; those on the grid are marked on the first curve.
        bands: name -> (k,) half the height of a band around the function of that name, for instance two standard
            deviations over initializations: ``2 * mf.fluctuations(...).deviation()[-1]``.

    >>> ax = fit([0.0, 0.5, 1.0], {"f": [0.0, 0.0, 1.0]}, None, knots=[0.5])
    >>> [line.get_label() for line in ax.lines]
    ['f', 'knots']
    """
    x = np.asarray(x)
    _check_curves("f", x, f)
    _check_curves("bands", x, bands := bands or {})
    if unknown := sorted(set(bands) - set(f)):
        raise ValueError(f"bands must have names among {sorted(f)}, got {unknown}")
    if data is not None:
        _boundary.shape("data.x", data.x, (None,))
        _boundary.shape("data.y", data.y, np.shape(data.x))
    ax = axes(ax)
    for color, (name, values) in zip(COLORS * 4, f.items(), strict=False):
        ax.plot(x, np.asarray(values), label=name, color=color)
        if name in bands:
            low, high = (np.asarray(values) + sign * np.asarray(bands[name]) for sign in (-1, 1))
            ax.fill_between(x, low, high, color=color, alpha=0.18, lw=0)
    if knots is not None:
        knots = np.asarray(knots)
        # neurons whose knot is off the grid, or at NaN, have none to show
        inside = knots[(knots >= x[0]) & (knots <= x[-1])]
        first = np.asarray(next(iter(f.values())))
        height = np.interp(inside, x, first)
        size = 3.2 if len(inside) < 80 else 2.2
        ax.plot(inside, height, "o", label="knots", ms=size, mfc="white", mec=COLORS[2], mew=0.8)
    if data is not None:
        ax.plot(
            np.asarray(data.x),
            np.asarray(data.y),
            "x",
            color=SAMPLE,
            ms=5,
            mew=1.1,
            zorder=3,
            label="samples",
        )
    ax.set(xlabel="$x$", ylabel="$f(x)$")
    key(ax)
    return ax


def _check_curves(name: str, x: np.ndarray, curves: Mapping[str, ArrayLike]) -> None:
    """Refuse curves that have not one value for each point of the axis ``x``."""
    for key_, values in curves.items():
        if np.shape(values)[-1:] != x.shape:
            raise ValueError(
                f"{name}[{key_!r}] must have {x.size} values like x, got shape {np.shape(values)}"
            )


@checked
def traces(
    x: Annotated[ArrayLike | Solution, either(instance(Solution), host_array((None,), nan=True, least=1))],
    curves: Annotated[Mapping[str, ArrayLike], mapping(host_array((None,), (None, None), nan=True))]
    | None = None,
    ax: Axes | None = None,
    *,
    xlabel: str = "",
    ylabel: str = "",
    logx: bool = False,
    logy: bool = False,
    spread: bool = True,
) -> Axes:
    """Named curves over one axis: the median over runs, and their range as a band.

    Args:
        x: (k,), or a ``Solution``: then its save times, and its observables that are numbers are the curves.
        curves: name -> (k,) or (runs, k); None with a ``Solution``.
        ax: matplotlib Axes; a new figure by default.
        xlabel: label of the horizontal axis; "$t$" by default with a ``Solution``.
        ylabel: label of the vertical axis.
        logx: whether the horizontal axis is logarithmic; points at x <= 0, such as the start of a run, have no place
            on it.
        logy: whether the vertical axis is logarithmic.
        spread: draw the band from the smallest to the largest run.

    >>> ax = traces([1.0, 2.0], {"two runs": [[1.0, 3.0], [3.0, 5.0]]}, xlabel="$t$")
    >>> ax.lines[0].get_ydata().tolist()
    [2.0, 4.0]
    """
    if isinstance(x, Solution):
        if curves is not None:
            raise ValueError("curves must be None where x is a Solution, got a mapping")
        # one number a save: observables that are arrays have more axes than time
        seen = x.to_xarray().drop_vars("energy")
        curves = {str(name): u.values for name, u in seen.items() if u.dims == ("time",)}
        if not curves:
            raise ValueError("x must be a Solution that has observed numbers, got one without; see observe=")
        x, xlabel = x.ts, xlabel or "$t$"
    if curves is None:
        raise ValueError("curves must be a mapping from names to values, got None")
    x = np.asarray(x)
    _check_curves("curves", x, curves)
    ax = axes(ax)
    for k, (name, values) in enumerate(curves.items()):
        values = np.atleast_2d(np.asarray(values))
        # after seven curves the colors come again, dashed
        color, dash = COLORS[k % len(COLORS)], DASHES[(k // len(COLORS)) % len(DASHES)]
        ax.plot(x, np.median(values, axis=0), color=color, ls=dash, label=name)
        if spread and len(values) > 1:
            ax.fill_between(x, values.min(0), values.max(0), color=color, alpha=0.18, lw=0)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    if logx:
        ax.set_xscale("log")
    if logy:
        ax.set_yscale("log")
    key(ax)
    return ax
