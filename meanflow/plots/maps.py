"""Maps over two axes of a sweep, and tables of numbers."""

from typing import Any

import numpy as np

from meanflow.plots.style import COLOURS, MARKERS, PALE, axes, sparse

SYMBOLS = {"width": "width $m$", "delta": r"balance $\delta$", "scale": "scale of $r$", "seed": "seed"}


def number(value: float | str) -> str:
    """A number for a tick or cell: three digits, infinities as symbols; text as it is."""
    if isinstance(value, str):
        return value
    if np.isinf(value):
        return r"$\infty$" if value > 0 else r"$-\infty$"
    return f"{value:.3g}"


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
    image = ax.imshow(np.ma.masked_invalid(colour), aspect="auto", cmap="viridis", origin="lower")
    ax.set_xticks(range(values.sizes[columns]), [number(v) for v in values[columns].values])
    ax.set_yticks(range(values.sizes[rows]), [number(v) for v in values[rows].values])
    ax.set(xlabel=SYMBOLS.get(columns, columns), ylabel=SYMBOLS.get(rows, rows))
    ax.set_title(values.attrs.get("long_name", values.name))
    ax.spines[:].set_visible(False)
    for (i, j), v in np.ndenumerate(shown):
        share = image.norm(colour[i, j]) if np.isfinite(colour[i, j]) else 0.0
        ink = "black" if share > 0.6 else "white"  # dark figures on the light end of the scale
        ax.text(j, i, f"{v:.2g}", ha="center", va="center", fontsize=7, color=ink)
    return ax


def dots(table: dict[str, Any], ax: Any = None, *, xlabel: str = "", reference: Any = None) -> Any:
    """One row a name, one dot a run: for few runs, where a mean with a bar would pretend.

    Args:
        table: name -> (runs,) values.
        ax: matplotlib Axes; a new figure by default.
        xlabel: axis label.
        reference: vertical lines, label -> position.
    """
    ax = axes(ax)
    names = list(table)
    for row, name in enumerate(names):
        values = np.atleast_1d(np.asarray(table[name], float))
        ax.plot(values, np.full(len(values), row), "o", color=COLOURS[0], ms=5, mec="white", mew=0.5)
    for k, (label, where) in enumerate((reference or {}).items()):
        ax.axvline(where, color=COLOURS[1 + k], lw=1.0, ls="--", label=label)
    ax.set_yticks(range(len(names)), names)
    ax.set(xlabel=xlabel, ylim=(len(names) - 0.5, -0.5))
    sparse(ax)
    ax.grid(axis="y", color=PALE, alpha=0.35, lw=0.6)
    ax.set_axisbelow(True)
    if reference:
        ax.legend(frameon=False, fontsize=8)
    return ax


def criteria(checks: Any, ax: Any = None) -> Any:
    """Criteria as rows: where each value lies in its interval, with the numbers beside it.

    The allowed interval is drawn as a bar of unit length; a one-sided interval has one end. A value that passed is a
    filled blue circle, one that failed an orange cross, clipped at the frame.

    Args:
        checks: sequence of ``Criterion``.
        ax: matplotlib Axes; a new figure by default.
    """
    ax = axes(ax)
    checks = list(checks)
    for row, check in enumerate(checks):
        place, left, right = _placed(check.value, check.low, check.high)
        ax.plot([left, right], [row, row], color=PALE, lw=5, alpha=0.45, solid_capstyle="butt", zorder=1)
        good = check.passed
        style = {"color": COLOURS[0] if good else COLOURS[1], "marker": MARKERS[0] if good else "X"}
        ax.plot([np.clip(place, -0.3, 1.3)], [row], ms=6, mec="white", mew=0.5, zorder=2, ls="", **style)
        ax.text(1.42, row, f"{check.value:.3g}", va="center", ha="left", fontsize=7.5)
        ax.text(
            1.92, row, _interval(check.low, check.high), va="center", ha="left", fontsize=7.5, color="#5F6368"
        )
    ax.set_yticks(range(len(checks)), [c.name.replace("$", r"\$") for c in checks], fontsize=7.5)
    ax.set(xlim=(-0.35, 2.7), ylim=(len(checks) - 0.4, -0.6), xticks=[])
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    return ax


def _interval(low: float, high: float) -> str:
    if np.isinf(low):
        return f"$\\leq$ {high:.4g}" if np.isfinite(high) else "any"
    if np.isinf(high):
        return f"$\\geq$ {low:.4g}"
    return f"= {low:.4g}" if low == high else f"{low:.4g} .. {high:.4g}"


def _placed(value: float, low: float, high: float) -> tuple[float, float, float]:
    """Position of the value and of the ends of the interval, where the finite interval is (0, 1)."""
    if np.isfinite(low) and np.isfinite(high):
        width = high - low
        if width == 0:
            return 0.5 + 0.4 * np.sign(value - low), 0.48, 0.52
        return (value - low) / width, 0.0, 1.0
    if np.isfinite(high):  # at most: 1 is the bound
        size = abs(high) if high else 1.0
        return 1 + float(np.tanh((value - high) / (2 * size))), -0.3, 1.0
    if np.isfinite(low):
        size = abs(low) if low else 1.0
        return float(np.tanh((value - low) / (2 * size))), 0.0, 1.3
    return 0.5, -0.3, 1.3
