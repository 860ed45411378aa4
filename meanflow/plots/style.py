"""Colors and defaults shared by all plots: color-blind safe (Okabe-Ito), thin axes, vector output.

Every plot draws on the Axes it is given, or on those of a new figure, and returns them. Figures are made here rather
than by pyplot, so that nothing is kept alive between plots and no display is needed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Annotated, Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from meanflow import _boundary
from meanflow._boundary import Length, checked, instance, unchecked

Options = Annotated[Any, unchecked("matplotlib knows its own options")]
_boundary.declare(Axes, instance(Axes, hint="for instance figure.add_subplot()"))

# Okabe and Ito's palette without its yellow, which is too pale for lines
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES: tuple[str | tuple[int, tuple[float, ...]], ...] = (
    "-",
    (0, (5, 1.5)),
    (0, (1.5, 1.2)),
    (0, (5, 1.5, 1, 1.5)),
)
POSITIVE = COLORS[0]
NEGATIVE = COLORS[1]
SAMPLE = "#000000"
PALE = "#9AA0A6"
RULES: dict[Any, float | str | bool] = {  # matplotlib types the keys one by one, and differently by version
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9.5,
    "legend.fontsize": 8.0,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "legend.frameon": False,
    "legend.handlelength": 1.8,
    "axes.linewidth": 0.7,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.0,
    "mathtext.fontset": "dejavusans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "path",  # the same letters on every machine
    "svg.hashsalt": "meanflow",  # the same figure gives the same file
    "pdf.fonttype": 42,
}


@checked
def theme() -> AbstractContextManager[None]:
    """Return the house style as a context manager; figures made and saved inside have it."""
    return matplotlib.rc_context(RULES)


@checked
def axes(ax: Axes | None = None, **kwargs: Options) -> Axes:
    """Return the given Axes, or those of a new figure.

    Args:
        ax: Axes, or None.
        kwargs: options of ``Figure.add_subplot`` for new ones, such as ``projection="polar"``.
    """
    if ax is not None:
        return ax
    with theme():
        return canvas(4.5, 3.2).add_subplot(**kwargs)


@checked
def canvas(width: Length, height: Length) -> Figure:
    """Return an empty figure whose parts never overlap.

    Args:
        width: of the figure, in inches.
        height: of the figure, in inches.
    """
    return Figure(figsize=(width, height), layout="constrained")


@checked
def key(ax: Axes, **kwargs: Options) -> None:
    """Draw a legend if anything has a label.

    Args:
        ax: Axes.
        kwargs: options of ``Axes.legend``.
    """
    if ax.get_legend_handles_labels()[0]:
        ax.legend(**{"frameon": False, "fontsize": RULES["legend.fontsize"], **kwargs})
