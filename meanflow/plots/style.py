"""Colours and defaults shared by all plots: colour-blind safe (Okabe-Ito), thin axes, vector output.

Every plot draws on the Axes it is given, or on those of a new figure, and returns them. Figures are made here rather
than by pyplot, so that nothing is kept alive between plots and no display is needed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.5, 1, 1.5)))
POSITIVE, NEGATIVE, SAMPLE, PALE, REFERENCE = COLOURS[0], COLOURS[1], "#000000", "#9AA0A6", "#5F6368"
RULES: Any = {
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


def theme() -> Any:
    """The house style as a context manager; figures made and saved inside have it."""
    import matplotlib

    return matplotlib.rc_context(RULES)


def axes(ax: Any = None, **kwargs: Any) -> Any:
    """The given Axes, or those of a new figure."""
    if ax is not None:
        return ax
    with theme():
        return canvas(4.5, 3.2).add_subplot(**kwargs)


def canvas(width: float, height: float) -> Any:
    """An empty figure of that many inches whose parts never overlap."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def panels(rows: int, columns: int, *, width: float = 3.3, height: float = 2.7, **kwargs: Any) -> Any:
    """(figure, list of Axes row by row) of a grid with panels of ``width`` x ``height`` inches."""
    figure = canvas(width * columns, height * rows)
    grid = figure.subplots(rows, columns, squeeze=False, **kwargs)
    return figure, list(grid.ravel())


def shades(count: int) -> list[Any]:
    """``count`` colours in order of lightness, readable in grey and by the colour-blind."""
    import matplotlib

    scale = matplotlib.colormaps["viridis"]
    return [scale(0.9 * k / max(count - 1, 1)) for k in range(count)]


def key(ax: Any, **kwargs: Any) -> None:
    """A legend where anything has a label."""
    if ax.get_legend_handles_labels()[0]:
        ax.legend(**{"frameon": False, "fontsize": RULES["legend.fontsize"], **kwargs})


def below(ax: Any, columns: int = 2, **kwargs: Any) -> None:
    """A legend under the Axes, where no curve can be."""
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=columns, **{"fontsize": 7.5, **kwargs})


def sparse(ax: Any, axis: str = "x", count: int = 5) -> None:
    """Few tick labels on a linear axis, none on the minor ticks of a logarithmic one."""
    from matplotlib.ticker import NullFormatter

    line = getattr(ax, f"{axis}axis")
    if line.get_scale() == "linear":
        ax.locator_params(axis=axis, nbins=count)
    else:
        line.set_minor_formatter(NullFormatter())


def save(figure: Any, stem: str | Path, formats: Sequence[str] = ("png",), dpi: int = 150) -> list[Path]:
    """Writes ``stem.png`` and so on; PNG, SVG and PDF carry no date, so that equal figures are equal files."""
    stem = Path(stem)
    stem.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for kind in formats:
        path = stem.with_name(f"{stem.name}.{kind}")
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
        with theme():
            figure.savefig(path, dpi=dpi, metadata=metadata)
        written.append(path)
    return written
