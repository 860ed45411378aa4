"""Curves over time and over the input."""

from typing import Any

import numpy as np

from meanflow.plots.style import COLOURS, axes


def energies(runs: dict[str, Any], ax: Any = None) -> Any:
    """Energy against time of several solutions, log-log after the start.

    Args:
        runs: name -> ``Solution`` (or anything with ``ts`` and ``energy``).
        ax: matplotlib Axes; a new figure by default.
    """
    ax = axes(ax)
    for colour, (name, run) in zip(COLOURS * 4, runs.items(), strict=False):
        ts, energy = np.asarray(run.ts), np.asarray(run.energy)
        later = ts > 0
        ax.plot(ts[later], energy[later], label=name, color=colour)
    ax.set(xscale="log", yscale="log", xlabel="$t$", ylabel=r"$E(\mu_t)$")
    ax.legend(frameon=False)
    return ax


def fit(x: Any, f: dict[str, Any], data: Any, ax: Any = None) -> Any:
    """Functions of one variable over the samples they fit.

    Args:
        x: (k,) grid.
        f: name -> (k,) values on the grid.
        data: ``Dataset`` with inputs (n,).
        ax: matplotlib Axes; a new figure by default.
    """
    ax = axes(ax)
    for colour, (name, values) in zip(COLOURS * 4, f.items(), strict=False):
        ax.plot(np.asarray(x), np.asarray(values), label=name, color=colour, lw=1.3)
    ax.plot(np.asarray(data.x), np.asarray(data.y), "o", color="black", ms=4, zorder=3)
    ax.set(xlabel="$x$", ylabel="$f(x)$")
    ax.legend(frameon=False)
    return ax
