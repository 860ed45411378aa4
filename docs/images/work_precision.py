"""Draws work_precision.png: error against work through kinks. Run: python docs/images/work_precision.py

The runs are those of ``meanflow bench kinks.work_precision``: 200 neurons, 100 samples, d = 10, time 10, float64.
"""

import pathlib

import jax
from matplotlib.figure import Figure

from meanflow_benchmarks.kinks import work_precision

STYLES = {
    "sliding": ("#D55E00", "o-", "sliding"),
    "euler": ("#0072B2", "s--", "Euler"),
    "heun": ("#56B4E9", "^--", "Heun"),
    "tsit5": ("#009E73", "v:", "Tsit5, adaptive"),
    "dopri8": ("#CC79A7", "D:", "Dopri8, adaptive"),
}


def draw(found: dict[str, float | list[float]]) -> Figure:
    """Error over force evaluations and over processor seconds; runs that stalled are left out."""
    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for ax, cost, label in (
        (left, "evaluations", "force evaluations"),
        (right, "seconds", "processor seconds"),
    ):
        for name, (color, style, title) in STYLES.items():
            ax.loglog(
                found[f"{name}_{cost}"], found[f"{name}_error"], style, color=color, ms=4, lw=1.2, label=title
            )
        ax.axhline(1e-4, color="0.8", lw=0.8, zorder=0)
        ax.set_xlabel(label)
    left.set_ylabel("largest error of a parameter")
    left.legend(fontsize=7)
    return figure


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    draw(work_precision()).savefig(pathlib.Path(__file__).with_suffix(".png"), dpi=100)
