"""Tables over two axes of a sweep."""

from __future__ import annotations

import numpy as np
import xarray
from matplotlib.axes import Axes

from meanflow import _boundary
from meanflow._boundary import checked
from meanflow.plots.style import axes

SYMBOLS = {"width": "width $m$", "delta": r"balance $\delta$", "scale": "scale of $r$", "seed": "seed"}


def _number(value: float | np.number | str) -> str:
    """A number for a tick or cell: three digits, infinities as symbols; text as it is."""
    if isinstance(value, str):
        return value
    if np.isinf(value):
        return r"$\infty$" if value > 0 else r"$-\infty$"
    return f"{value:.3g}"


@checked
def heat_map(values: xarray.DataArray, ax: Axes | None = None, *, log: bool = False) -> Axes:
    """A table over two axes as colors with the numbers written in; axes are evenly spaced, so +-inf are fine.

    Args:
        values: two-dimensional ``xarray.DataArray``; axes of length 1 are dropped.
        ax: matplotlib Axes; a new figure by default.
        log: colors by the logarithm of the values.

    >>> table = xarray.DataArray([[1.0, 2.0], [3.0, 4.0]], {"width": [4, 8], "seed": [0, 1]}, ["width", "seed"])
    >>> heat_map(table).get_ylabel()
    'width $m$'
    """
    values = values.squeeze(drop=True)
    if values.ndim != 2:
        raise ValueError(f"values must have two axes longer than 1, got {dict(values.sizes)}")
    if not values.size or not _boundary.is_real(values.dtype):
        raise ValueError(
            f"values must hold real numbers, at least one, got type {values.dtype} and shape {values.shape}"
        )
    ax = axes(ax)
    # axes are evenly spaced by their order, so that infinite balances have a place
    rows, columns = (str(name) for name in values.dims)
    shown = np.asarray(values, float)
    with np.errstate(divide="ignore", invalid="ignore"):
        # zeros and negative numbers have no logarithm: they are left blank
        color = np.log10(shown) if log else shown
    image = ax.imshow(np.ma.masked_invalid(color), aspect="auto", cmap="viridis", origin="lower")
    ax.set_xticks(range(values.sizes[columns]), [_number(v) for v in values[columns].values])
    ax.set_yticks(range(values.sizes[rows]), [_number(v) for v in values[rows].values])
    ax.set(xlabel=SYMBOLS.get(columns, columns), ylabel=SYMBOLS.get(rows, rows))
    ax.set_title(values.attrs.get("long_name", values.name))
    ax.spines[:].set_visible(False)
    for (i, j), v in np.ndenumerate(shown):
        share = float(np.asarray(image.norm(color[i, j]))) if np.isfinite(color[i, j]) else 0.0
        ink = "black" if share > 0.6 else "white"  # dark figures on the light end of the scale
        ax.text(j, i, f"{v:.2g}", ha="center", va="center", fontsize=7, color=ink)
    return ax
