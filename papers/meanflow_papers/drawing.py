"""The figure of an outcome: its entry's own drawing, or its criteria where there is none."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from meanflow_papers.entry import Entry
from meanflow_papers.outcome import Criterion, Outcome
from meanflow_papers.style import COLORS, MARKERS, PALE, axes, canvas, theme


def figure_of(entry: Entry, outcome: Outcome) -> Figure:
    """Draw the outcome as its entry says, in the house style; an entry without a drawing shows its criteria."""
    with theme():
        if entry.draw is not None:
            return entry.draw(outcome.data)
        figure = canvas(6.6, 0.7 + 0.27 * max(len(outcome.criteria), 1))
        draw_criteria(outcome.criteria, figure.add_subplot())
        return figure


def draw_criteria(checks: Sequence[Criterion], ax: Axes | None = None) -> Axes:
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
        color, marker = (COLORS[0], MARKERS[0]) if good else (COLORS[1], "X")
        ax.plot(
            [np.clip(place, -0.3, 1.3)],
            [row],
            ms=6,
            mec="white",
            mew=0.5,
            zorder=2,
            ls="",
            color=color,
            marker=marker,
        )
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
