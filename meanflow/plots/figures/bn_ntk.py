"""Figures of paper 000 (kernels under batch norm, spectral bias)."""

from typing import Any

import numpy as np

from meanflow.plots.curves import convergence, traces
from meanflow.plots.maps import dots
from meanflow.plots.style import COLOURS, PALE, below, key, panels, shades, sparse

FREQUENCIES = (1, 2, 4, 8, 16, 32)


def table_2(data: dict[str, Any]) -> Any:
    """m, v and the largest eigenvalue against N, for every network, with the fitted exponents."""
    figure, grid = panels(1, 3, width=3.4, height=3.8)
    names = [n for n in data if n not in ("printed", "corrected", "exponents")]
    symbols = (r"mean $m_\lambda$", r"variance $v_\lambda$", r"$\lambda_{\max}$")
    for j, (ax, symbol) in enumerate(zip(grid, symbols, strict=True)):
        sizes = {n: data[n]["sizes"] for n in names}
        values = {n: data[n]["m, v, top"][:, j] for n in names}
        convergence(sizes, values, ax, xlabel="$N = T$", ylabel=symbol, fitted=False)
        for line, name in zip(ax.lines, names, strict=True):
            line.set_label(f"{name}: $N^{{{data['exponents'][name][j]:.2f}}}$")
        below(ax, 2, fontsize=7, columnspacing=0.8)
    return figure


def variance_ratio(data: dict[str, Any]) -> Any:
    """v/m^2 by size, beside what the printed exponent would give."""
    figure, (ax,) = panels(1, 1, width=4.4, height=3.0)
    sizes = np.asarray(data["sizes"], float)
    for k, name in enumerate(("relu", "tanh")):
        values = np.asarray(data[name])
        ax.plot(sizes, values, marker="os"[k], color=COLOURS[k], label=f"{name}: measured")
        printed = values[0] * (sizes / sizes[0]) ** -0.5
        ax.plot(sizes, printed, color=COLOURS[k], ls="--", lw=1, label=r"if $v \sim N^{3/2}$")
    ax.set_xscale("log", base=2)
    ax.set(xlabel="$N = T$", ylabel=r"$v_\lambda / m_\lambda^2$", ylim=(0, None))
    key(ax)
    return figure


def width(data: dict[str, Any]) -> Any:
    """Deviation of K/N from the order parameters."""
    figure, grid = panels(1, 2, width=3.8, height=3.8)
    names = [n for n in data if n != "widths"]
    for j, (ax, entry) in enumerate(
        zip(grid, (r"diagonal $K_{tt}/N$", r"off-diagonal $K_{st}/N$"), strict=True)
    ):
        errors = {n: data[n][j] for n in names}
        guides = {"$N^{-1/2}$": -0.5}
        convergence(data["widths"], errors, ax, orders=guides, xlabel="$N$", ylabel=f"rms error, {entry}")
        below(ax, 2)
    return figure


def printed_kernel(data: dict[str, Any]) -> Any:
    """Relative error of the one-sided kernel."""
    figure, (ax,) = panels(1, 1, width=5.0, height=2.0)
    label = r"relative Frobenius error of the printed $K_{\mathrm{BN}}$"
    dots(
        {
            "random inputs, ReLU": data["random, relu"],
            "line, ReLU": data["line, relu"],
            "line, tanh": data["line, tanh"],
        },
        ax,
        xlabel=label,
    )
    ax.set_xlim(left=0)
    return figure


def lazy(data: dict[str, Any]) -> Any:
    """Errors of the linearised predictions against the width."""
    figure, (ax,) = panels(1, 1, width=4.8, height=3.4)
    names = {
        "plain, frozen K": "plain, frozen $K$",
        "BN, frozen K_BN": r"batch norm, frozen $K_{\mathrm{BN}}$",
        "BN, frozen K before BN": "batch norm exact, frozen $K$",
        "same, test points": "the same on test points",
    }
    errors = {title: data[name] for name, title in names.items()}
    label = "error / initial residual after 100 steps"
    convergence(data["widths"], errors, ax, xlabel="$N$", ylabel=label, fitted=False)
    return figure


def spectral_bias(data: dict[str, Any]) -> Any:
    """Error of each frequency in time, plain and batch norm, and at the end."""
    figure, grid = panels(1, 3, width=3.6, height=3.3)
    colours = shades(len(FREQUENCIES))
    for ax, (name, run) in zip(grid, data.items(), strict=False):
        errors = np.median(run["errors"], axis=0)
        for k, frequency in enumerate(FREQUENCIES):
            ax.plot(run["steps"], errors[:, k], color=colours[k], label=f"$k = {frequency}$")
        ax.axhline(0.2, color=PALE, lw=0.8, ls="--")
        ax.set(xlabel="step", ylabel="relative error of the frequency", yscale="log")
        ax.set_title(name)
    for ax in grid[:2]:
        ax.set_ylim(bottom=max(ax.get_ylim()[0], 1e-5), top=2)
        below(ax, 6, fontsize=7, columnspacing=0.7, handlelength=0.9)
    for k, (name, run) in enumerate(data.items()):
        final = run["errors"][:, -1]
        grid[2].plot(FREQUENCIES, np.median(final, axis=0), marker="os"[k], color=COLOURS[k], label=name)
        grid[2].fill_between(FREQUENCIES, final.min(0), final.max(0), color=COLOURS[k], alpha=0.18, lw=0)
    grid[2].set_xscale("log", base=2)
    grid[2].set(yscale="log", xlabel="frequency $k$", ylabel="final relative error")
    grid[2].set_title("after training, all seeds")
    key(grid[2])
    return figure


def image(data: dict[str, Any]) -> Any:
    """Held-out PSNR in time."""
    figure, grid = panels(1, 2, width=3.7, height=3.0)
    names = {"none": "plain", "hidden": "batch norm"}
    for ax, inputs in zip(grid, ("raw", "encoded"), strict=True):
        curves = {title: data[f"{inputs}, {norm}"] for norm, title in names.items()}
        traces(data["steps"], curves, ax, xlabel="step", ylabel="held-out PSNR (dB)")
        ax.set_title(f"{inputs} coordinates")
    return figure


def coordinates(data: dict[str, Any]) -> Any:
    """How fast the frequency 32 is learned relative to the fastest mode."""
    figure, (ax,) = panels(1, 1, width=4.8, height=3.0)
    places = {"none": "plain", "output": "BN, output", "hidden": "BN, hidden", "later": "BN, layers 2+"}
    for k, inputs in enumerate(("raw", "encoded")):
        values = [data[f"{inputs}, {norm}"][2] for norm in places]
        ax.plot(
            values,
            np.arange(4) + 0.1 * (2 * k - 1),
            "os"[k],
            color=COLOURS[k],
            ms=6,
            label=f"{inputs} coordinates",
        )
    ax.set_yticks(range(4), list(places.values()))
    ax.set(
        xscale="log",
        xlabel=r"$R_{32} / \lambda_{\max}$: rate of frequency 32 over the fastest",
        xlim=(9e-5, 1.1e-2),
        ylim=(3.5, -0.5),
    )
    sparse(ax)
    ax.grid(axis="y", color=PALE, alpha=0.4, lw=0.6)
    key(ax)
    return figure


DRAWINGS = {
    "000/table-2": table_2,
    "000/v-over-m2": variance_ratio,
    "000/width": width,
    "000/A.18": printed_kernel,
    "000/lazy": lazy,
    "000/E1": spectral_bias,
    "000/E2": spectral_bias,
    "000/E3": image,
    "000/photograph": image,
    "000/coordinates": coordinates,
}
