"""Colours and defaults shared by all plots: colour-blind safe (Okabe-Ito), thin axes."""

from typing import Any

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000")


def axes(ax: Any = None, **kwargs: Any) -> Any:
    """The given Axes, or those of a new figure."""
    if ax is None:
        from matplotlib.figure import Figure

        ax = Figure(figsize=(4.5, 3.2), layout="constrained").add_subplot(**kwargs)
    if hasattr(ax, "spines") and "top" in ax.spines:
        ax.spines[["top", "right"]].set_visible(False)
    return ax
