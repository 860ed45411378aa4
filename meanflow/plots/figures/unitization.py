"""Figures of paper 003 (unitization)."""

from typing import Any

import numpy as np

from meanflow.plots.curves import ics_trace, traces
from meanflow.plots.maps import dots
from meanflow.plots.style import COLOURS, PALE, key, panels

VARIANTS = {
    "BN": "batch norm",
    "(10) from 0": r"unitization, $\alpha$ from 0",
    "unitization": r"unitization, $\alpha$ from 0",
    "alpha = 1": r"$\alpha = 1$ fixed",
}


def figure_2(data: dict[str, Any]) -> Any:
    """Skewness and kurtosis of the eight units of one run, each a line, by variant."""
    figure, grid = panels(2, len(data), width=3.0, height=2.2, sharex=True, sharey="row")
    for column, (name, run) in enumerate(data.items()):
        for row, what in enumerate(("skewness", "kurtosis")):
            ax = grid[row * len(data) + column]
            values = np.asarray(run[what])[:, 0]  # first seed: (epochs, units)
            for k, unit in enumerate(values.T):
                ax.plot(np.arange(1, len(unit) + 1), unit, lw=0.9, color=COLOURS[k % len(COLOURS)])
            if row == 0:
                ax.set_title(VARIANTS.get(name, name))
            else:
                ax.set_xlabel("epoch")
            if column == 0:
                ax.set_ylabel(what if row == 0 else "excess kurtosis")
    return figure


def figure_3(data: dict[str, Any]) -> Any:
    """Covariate shift and accuracy from epoch to epoch; the rate falls at 30, 60 and 80 %."""
    figure, (left, right) = panels(1, 2, width=4.0, height=3.0)
    names = {VARIANTS.get(name, name): run for name, run in data.items()}
    epochs = len(next(iter(data.values()))["ics_exact"])
    drops = [round(f * epochs) + 0.5 for f in (0.3, 0.6, 0.8)]
    axis = np.arange(1, epochs + 1)
    ics_trace(axis, {name: np.asarray(run["ics_exact"]).T for name, run in names.items()}, left, drops=drops)
    curves = {name: np.asarray(run["test_accuracy"]).T for name, run in names.items()}
    traces(axis, curves, right, xlabel="epoch", ylabel="test accuracy")
    for drop in drops:
        right.axvline(drop, color=PALE, lw=0.8, ls=":", zorder=0)
    right.get_legend().remove()
    return figure


def table_4(data: dict[str, Any]) -> Any:
    """Test accuracy of each method, one dot a seed."""
    figure, (ax,) = panels(1, 1, width=4.8, height=0.7 + 0.28 * len(data))
    dots(data, ax, xlabel="test accuracy, batches of two")
    return figure


def accuracies(data: dict[str, Any]) -> Any:
    """Accuracies of tables 1 and 2 beside the published ones."""
    figure, (ax,) = panels(1, 1, width=5.2, height=0.9 + 0.3 * len(data["accuracy"]))
    dots({name: np.asarray(v) for name, v in data["accuracy"].items()}, ax, xlabel="test accuracy")
    for row, name in enumerate(data["accuracy"]):
        if name in data["published"]:
            label = "published" if row == 0 else None
            ax.plot([data["published"][name]], [row], "x", color=COLOURS[1], ms=6, mew=1.5, label=label)
    key(ax)
    return figure


def critic(data: dict[str, Any]) -> Any:
    """Output of the clipped critic over the exact distance."""
    figure, (ax,) = panels(1, 1, width=4.6, height=2.2)
    dots(
        {name: [row["ratio"]] for name, row in data.items()},
        ax,
        xlabel=r"critic / exact $W_1$ (a constant, if it measured $W_1$)",
    )
    ax.set_xlim(left=0)
    return figure


DRAWINGS = {
    "003/figure-2": figure_2,
    "003/figure-3": figure_3,
    "003/figure-3-cifar": figure_3,
    "003/table-1": accuracies,
    "003/table-2": accuracies,
    "003/table-4": table_4,
    "003/table-4-cifar": accuracies,
    "003/algorithm-3": critic,
}
