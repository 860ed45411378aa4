"""Pictures of clouds."""

from typing import Any

import numpy as np

from meanflow.plots.style import COLOURS, axes


def directions(cloud: Any, ax: Any = None, *, bins: int = 36, colour: str = COLOURS[0]) -> Any:
    """Histogram of the directions of b in the plane, on polar axes; bars are shares of the weight.

    Args:
        cloud: neurons with b (m, 2).
        ax: polar Axes; a new figure by default.
    """
    ax = axes(ax, projection="polar")
    b = np.asarray(cloud.particles.b)
    turn = np.mod(np.arctan2(b[:, 1], b[:, 0]), 2 * np.pi)
    share, edges = np.histogram(turn, bins=bins, range=(0, 2 * np.pi), weights=np.asarray(cloud.weights))
    ax.bar(edges[:-1], share, width=2 * np.pi / bins, align="edge", color=colour, edgecolor="white", lw=0.3)
    ax.set_yticklabels([])
    return ax


def plane(r: Any, theta: Any, ax: Any = None) -> Any:
    """Univariate neurons in the plane (u, v) = |r| (cos theta, sin theta), coloured by the sign of r."""
    ax = axes(ax)
    r, theta = np.asarray(r), np.asarray(theta)
    for sign, colour, name in ((1, COLOURS[0], "$r > 0$"), (-1, COLOURS[1], "$r < 0$")):
        pick = np.sign(r) == sign
        size = np.abs(r[pick])
        ax.plot(size * np.cos(theta[pick]), size * np.sin(theta[pick]), ".", ms=3, color=colour, label=name)
    ax.set(xlabel="$u$", ylabel="$v$", aspect="equal")
    ax.legend(frameon=False)
    return ax
