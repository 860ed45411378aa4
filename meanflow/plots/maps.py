"""Maps over two axes of a sweep."""

from typing import Any

import numpy as np

from meanflow.plots.style import axes


def heat_map(values: Any, ax: Any = None, *, log: bool = False) -> Any:
    """A table over two axes as colours with the numbers written in; axes are evenly spaced, so +-inf are fine.

    Args:
        values: two-dimensional ``xarray.DataArray``; axes of length 1 are dropped.
        ax: matplotlib Axes; a new figure by default.
        log: colours by the logarithm of the values.
    """
    values = values.squeeze(drop=True)
    if values.ndim != 2:
        raise ValueError(f"values must have two axes longer than 1, got {dict(values.sizes)}")
    ax = axes(ax)
    rows, columns = values.dims
    shown = np.asarray(values, float)
    with np.errstate(divide="ignore", invalid="ignore"):
        colour = np.log10(shown) if log else shown
    ax.imshow(np.ma.masked_invalid(colour), aspect="auto", cmap="viridis", origin="lower")
    ax.set_xticks(range(values.sizes[columns]), [f"{v:g}" for v in values[columns].values])
    ax.set_yticks(range(values.sizes[rows]), [f"{v:g}" for v in values[rows].values])
    ax.set(xlabel=columns, ylabel=rows, title=values.attrs.get("long_name", values.name))
    for (i, j), v in np.ndenumerate(shown):
        ax.text(j, i, f"{v:.2g}", ha="center", va="center", fontsize=6, color="white")
    return ax
