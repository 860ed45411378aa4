"""The look of the papers' figures: the library's colors and canvases, grids of panels, legends that cover no curve."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from meanflow.plots.style import COLORS as COLORS
from meanflow.plots.style import DASHES as DASHES
from meanflow.plots.style import NEGATIVE as NEGATIVE
from meanflow.plots.style import PALE as PALE
from meanflow.plots.style import POSITIVE as POSITIVE
from meanflow.plots.style import SAMPLE as SAMPLE
from meanflow.plots.style import axes as axes
from meanflow.plots.style import canvas as canvas
from meanflow.plots.style import key as key
from meanflow.plots.style import theme as theme

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
REFERENCE = "#5F6368"


def panels(
    rows: int, columns: int, *, width: float = 3.3, height: float = 2.7, **kwargs: Any
) -> tuple[Figure, list[Axes]]:
    """(figure, list of Axes row by row) of a grid with panels of ``width`` x ``height`` inches."""
    figure = canvas(width * columns, height * rows)
    grid = figure.subplots(rows, columns, squeeze=False, **kwargs)
    return figure, list(grid.ravel())


def shades(count: int) -> list[tuple[float, float, float, float]]:
    """``count`` colors in order of lightness, readable in grey and by the color-blind."""
    scale = matplotlib.colormaps["viridis"]
    return [scale(0.9 * k / max(count - 1, 1)) for k in range(count)]


def no_legend(ax: Axes) -> None:
    """Remove the legend of the Axes if there is one."""
    legend = ax.get_legend()
    if legend is not None:
        legend.remove()


def below(ax: Axes, columns: int = 2, **kwargs: Any) -> None:
    """A legend under the Axes, where no curve can be, and under the label of the axis, which flat Axes have near."""
    inches = ax.get_window_extent().height / ax.figure.dpi
    anchor = (0.5, -max(0.2, 0.55 / inches))
    ax.legend(loc="upper center", bbox_to_anchor=anchor, ncols=columns, **{"fontsize": 7.5, **kwargs})


def save(figure: Figure, stem: str | Path, formats: Sequence[str] = ("png",), dpi: int = 150) -> list[Path]:
    """Writes ``stem.png`` and so on; PNG, SVG and PDF carry no date, so that equal figures are equal files."""
    stem = Path(stem)
    stem.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for kind in formats:
        path = stem.with_name(f"{stem.name}.{kind}")
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
        # under another name first: a figure is whole or absent, also when the process is killed
        part = stem.with_name(f".part-{stem.name}.{kind}")
        with theme():
            figure.savefig(part, dpi=dpi, metadata=metadata)
        part.replace(path)
        written.append(path)
    return written


def sparse(ax: Axes, axis: Literal["x", "y"] = "x", count: int = 5) -> None:
    """Few tick labels on a linear axis, none on the minor ticks of a logarithmic one."""
    line = ax.xaxis if axis == "x" else ax.yaxis
    if line.get_scale() == "linear":
        ax.locator_params(axis=axis, nbins=count)
    else:
        line.set_minor_formatter(NullFormatter())
