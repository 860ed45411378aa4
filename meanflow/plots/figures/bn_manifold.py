"""Figures of paper 001 (batch norm as a metric)."""

from typing import Any

import jax
import numpy as np

from meanflow.plots.clouds import directions, needles
from meanflow.plots.curves import convergence, speeds, traces
from meanflow.plots.style import COLOURS, PALE, REFERENCE, canvas, key, panels

NAMES = {"bn": "batch norm", "vanilla": "vanilla"}


def figure_1(data: dict[str, Any]) -> Any:
    """Speeds by direction at iteration 500 (left), directions at four times (right), for both models."""
    figure = canvas(11.5, 4.6)
    grid = figure.add_gridspec(2, 6, width_ratios=(1.9, 1, 1, 1, 1, 1.6))
    shown = (0, 2, 3, 4)
    for row, (name, title) in enumerate(NAMES.items()):
        ax = speeds(data["direction"][name], {title: data["speed"][name]}, figure.add_subplot(grid[row, 0]))
        ax.lines[0].set_color(COLOURS[row])
        ax.get_legend().remove()
        ax.set_title(f"{title}, iteration 500")
        for k, frame in enumerate(shown):
            cloud = jax.tree.map(lambda u, i=frame: u[i], data["clouds"][name])
            ax = figure.add_subplot(grid[row, 1 + k], projection="polar")
            directions(cloud, ax, bins=50, colour=COLOURS[row])
            ax.set_xticklabels([])
            if row == 0:
                ax.set_title(f"iteration {int(data['frames'][frame])}")
    curves = {title: data["Q"][name] for name, title in NAMES.items()}
    label = r"alignment $Q = \langle\cos 2\vartheta\rangle$"
    traces(data["iteration"], curves, figure.add_subplot(grid[0, 5]), xlabel="iteration", ylabel=label)
    curves = {title: data["energy"][name] for name, title in NAMES.items()}
    ax = figure.add_subplot(grid[1, 5])
    traces(data["iteration"], curves, ax, xlabel="iteration", ylabel="loss $L$", logy=True)
    return figure


def figure_2(data: dict[str, Any]) -> Any:
    """Directions of short and long neurons in time, and their alignment."""
    figure = canvas(11.0, 4.4)
    above, below = figure.subfigures(2, 1, height_ratios=(1, 1.3))
    b = np.asarray(data["b"])
    for ax, k, iteration in zip(above.subplots(1, 6), range(6), data["frames"], strict=True):
        needles(b[k, 25:], ax, colour=COLOURS[3])
        needles(b[k, :25], ax, colour=COLOURS[0])
        ax.set_title(f"iteration {int(iteration)}")
    left, right = below.subplots(1, 2)
    q = np.asarray(data["Q"])
    label = r"alignment $Q = \langle\cos 2\vartheta\rangle$"
    curves = {"$|b_0| = 1$": q[:, 0], "$|b_0| = 10$": q[:, 1]}
    traces(data["iteration"], curves, left, xlabel="iteration", ylabel=label)
    left.lines[1].set_color(COLOURS[3])
    key(left)
    traces(data["iteration"], {"": data["energy"]}, right, xlabel="iteration", ylabel="loss $L$", logy=True)
    return figure


def figure_3(data: dict[str, Any]) -> Any:
    """Norms before and after the first step, and later."""
    figure, (left, right) = panels(1, 2, width=4.0, height=3.2)
    norms = np.asarray(data["norms"])
    order = np.argsort(norms[0])
    start = norms[0][order]
    left.plot(start, norms[1][order], "o", color=COLOURS[0], label="after 1 step", ms=4)
    left.plot(start, norms[-1][order], "^", color=COLOURS[1], label=f"after {len(norms) - 1} steps", ms=4)
    left.plot(start, start, color=PALE, lw=1, label="no change")
    left.set(xscale="log", yscale="log", xlabel=r"$|b_0|$", ylabel=r"$|b_n|$")
    key(left)
    steps = np.arange(len(norms)) + 1
    for k in order[:: max(1, len(order) // 10)]:
        right.plot(steps, norms[:, k], color=COLOURS[0], lw=0.9, alpha=0.8)
    right.set(xscale="log", yscale="log", xlabel="iteration + 1", ylabel=r"$|b_n|$ of ten neurons")
    return figure


def learning_rates(data: dict[str, Any]) -> Any:
    """Final loss against the learning rate."""
    figure, (ax,) = panels(1, 1, width=4.6, height=3.2)
    etas = np.asarray(data["etas"])
    labels = {"bn": "batch norm", "bn, mixed norms": "batch norm, mixed norms", "vanilla": "vanilla"}
    for k, (name, label) in enumerate(labels.items()):
        values = np.asarray(data["final"][name], float)
        fine = np.isfinite(values) & (values < 1e3)
        ax.plot(etas[fine], values[fine], marker="os^"[k], color=COLOURS[k], label=label)
        for eta in etas[~fine]:
            ax.plot(
                [eta], [0.97 - 0.05 * k], marker="x", color=COLOURS[k], transform=ax.get_xaxis_transform()
            )
    ax.axhline(data["initial"], color=REFERENCE, lw=0.8, ls="--", label="start")
    ax.set(xscale="log", yscale="log", xlabel=r"learning rate $\eta$", ylabel="loss after the run")
    ax.set_title(r"crosses: diverged", fontsize=8)
    key(ax)
    return figure


def theorem_3(data: dict[str, Any]) -> Any:
    """Gaps between the two flows, with and without the factor 1/c^2."""
    figure, (ax,) = panels(1, 1, width=5.2, height=2.6)
    rows = {
        "gap": "with $1/c^2$",
        "printed": "as printed",
        "norm drift": r"drift of $|b|$",
        "Omega drift": r"drift off $\Omega$",
    }
    for k, (case, marker) in enumerate(zip(data, "os", strict=True)):
        values = [max(data[case][row], 1e-17) for row in rows]
        title = {"c = 1": "$c = 1$", "c in 0.2..5": r"$c \in [0.2, 5]$"}.get(case, case)
        ax.plot(values, np.arange(4) + 0.12 * (2 * k - 1), marker, color=COLOURS[k], label=title, ms=6)
    ax.set_yticks(range(4), list(rows.values()))
    ax.set(
        xscale="log", xlabel=r"largest difference of $f$, or drift, over $t \in [0, t_1]$", ylim=(3.5, -0.5)
    )
    ax.grid(axis="y", color=PALE, alpha=0.4, lw=0.6)
    key(ax, loc="center right")
    return figure


def theorem_4(data: dict[str, Any]) -> Any:
    """Function error against the width."""
    figure, (ax,) = panels(1, 1, width=4.6, height=3.3)
    errors = {f"{name} neurons": values for name, values in data["errors"].items()}
    guides = {r"$m^{-1/2}$": -0.5, "$m^{-1}$": -1.0}
    convergence(data["widths"], errors, ax, orders=guides, ylabel=r"$\|f_m - f_\infty\|_{L^2(\mu)}$")
    return figure


def theorem_5(data: dict[str, Any]) -> Any:
    """Energy, certificate and speed at the end, from the circle and from the arc."""
    figure, (ax,) = panels(1, 1, width=5.0, height=2.4)
    rows = {"energy": "energy $L$", "certificate": r"certificate $\max|F|$", "speed": "rms speed"}
    for k, case in enumerate(("circle", "arc")):
        values = [data[case][row] for row in rows]
        ax.plot(
            values,
            np.arange(3) + 0.1 * (2 * k - 1),
            "os"[k],
            color=COLOURS[k],
            label=f"from the {case}",
            ms=6,
        )
    ax.set_yticks(range(3), list(rows.values()))
    ax.set(xscale="log", ylim=(2.5, -0.5), xlabel="value at the end")
    ax.grid(axis="y", color=PALE, alpha=0.4, lw=0.6)
    key(ax, loc="center left")
    return figure


DRAWINGS = {
    "001/figure-1": figure_1,
    "001/figure-2": figure_2,
    "001/figure-3": figure_3,
    "001/learning-rate-sensitivity": learning_rates,
    "001/theorem-3": theorem_3,
    "001/theorem-4": theorem_4,
    "001/theorem-5": theorem_5,
}
