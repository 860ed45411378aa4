"""Figures of paper 002 (batch norm decomposed)."""

from typing import Any

import numpy as np

from meanflow.plots.batches import activity, angles, projection, tree
from meanflow.plots.curves import traces
from meanflow.plots.maps import dots
from meanflow.plots.style import COLOURS, DASHES, PALE, REFERENCE, canvas, key, panels, shades

BN = {"batchnorm": "batch norm", "default": "default weights", "he": "He weights"}


def figure_2(data: dict[str, Any]) -> Any:
    """Accuracy in training, and rank of the last hidden layer at the start."""
    figure, (left, right) = panels(1, 2, width=3.9, height=3.0)
    epochs = np.arange(np.shape(data["he_accuracy"])[1])
    curves = {title: data[f"{name}_accuracy"] for name, title in BN.items()}
    traces(epochs, curves, left, xlabel="epoch", ylabel="training accuracy")
    left.set_ylim(0, 1.03)
    kinds = {
        "rank": r"$\sigma_i > 10^{-2}\sigma_1$",
        "rank_1e-5": r"$\sigma_i > 10^{-5}\sigma_1$",
        "stable_rank": "stable rank",
    }
    for k, (kind, label) in enumerate(kinds.items()):
        for row, name in enumerate(BN):
            values = np.ravel(data[f"{name}_{kind}"])
            shown = label if row == 0 else None
            right.plot(
                values,
                np.full(len(values), row + 0.18 * (k - 1)),
                "os^"[k],
                color=COLOURS[k + 3],
                label=shown,
                ms=5,
            )
    right.set_yticks(range(3), list(BN.values()))
    right.set(xscale="log", xlabel="rank of the last hidden layer at the start", ylim=(2.6, -0.6))
    right.grid(axis="y", color=PALE, alpha=0.4, lw=0.6)
    key(right, loc="center right")
    return figure


def figure_3(data: dict[str, Any]) -> Any:
    """Random projection of the last layer, and angles before and after it."""
    figure, (left, right) = panels(1, 2, width=3.7, height=3.2)
    odd = int(np.ravel(data["odd"]["sample"])[0])
    projection(np.asarray(data["projection"])[0], odd, left)
    before, after = np.asarray(data["angles_before"])[0], np.asarray(data["angles_after"])[0]
    n = before.shape[-1]
    i, j = np.triu_indices(n, 1)
    pair = (i == odd) | (j == odd)
    angles(before[i, j][~pair], after[i, j][~pair], right, label="inside the cluster")
    angles(before[i, j][pair], after[i, j][pair], right, label="with the odd point", colour=COLOURS[1])
    return figure


def no_outlier(data: dict[str, Any]) -> Any:
    """Angles of the state reached, by batch size; filled where a point escaped."""
    figure, (left, right) = panels(1, 2, width=3.5, height=2.9)
    sizes = [int(name[2:]) for name in data]
    for ax, what, label in (
        (left, "cluster_angle", "angle inside the cluster (degrees)"),
        (right, "norm_ratio", "norm of the odd point / next largest"),
    ):
        for n, odd in zip(sizes, data.values(), strict=True):
            values, escaped = np.asarray(odd[what]), np.asarray(odd["escaped"], bool)
            spread = n * (1 + 0.05 * np.linspace(-1, 1, len(values)))
            ax.plot(spread[escaped], values[escaped], "o", color=COLOURS[1], ms=4.5)
            ax.plot(spread[~escaped], values[~escaped], "o", mfc="none", color=COLOURS[0], ms=4.5)
        ax.set(xscale="log", xlabel="batch size $n$", ylabel=label)
        ax.set_xticks(sizes, [str(n) for n in sizes])
        ax.minorticks_off()
    size = np.linspace(7, 60, 100)
    left.plot(size, 540 / size, color=PALE, ls="--", lw=1, label=r"$540^\circ/n$")
    left.plot([], [], "o", color=COLOURS[1], label="a point escaped")
    left.plot([], [], "o", mfc="none", color=COLOURS[0], label="none")
    left.set_ylim(0, 90)
    right.set_yscale("log")
    key(left)
    return figure


def digits_escape(data: dict[str, Any]) -> Any:
    """Norm ratio of the odd point in depth, one line a batch."""
    figure, (left, right) = panels(1, 2, width=3.5, height=2.9)
    odd = data["odd"]
    for what, ax, label in (
        ("norm_ratio", left, "norm of the odd point / next largest"),
        ("cluster_angle", right, "angle inside the cluster (degrees)"),
    ):
        for row in np.asarray(odd[what]):
            ax.plot(np.arange(len(row)), row, color=COLOURS[0], lw=0.9, alpha=0.8)
        ax.set(xlabel="layer", ylabel=label)
    left.set_yscale("log")
    return figure


def figure_4(data: dict[str, Any]) -> Any:
    """The first three layers of the tree."""
    rows = np.asarray(data["rows"])
    figure = canvas(9.0, 4.0)
    tree([rows[t][: 2**t] for t in range(4)], figure.add_subplot())
    return figure


def figure_5(data: dict[str, Any]) -> Any:
    """Angles before and after layer 30, with the limits of infinite width."""
    sizes = sorted({name.rpartition("n=")[2] for name in data}, key=int)
    figure, grid = panels(1, len(sizes), width=3.9, height=3.6)
    names = {"BN": "batch norm", "RS(rms)": "rescaling by the rms", "RS(std)": "rescaling by the std"}
    for ax, n in zip(grid, sizes, strict=True):
        for k, (name, label) in enumerate(names.items()):
            pairs = np.asarray(data[f"{name} n={n}"])
            angles(pairs[:, 0], pairs[:, 1], ax, label=label, colour=COLOURS[k])
        for where in (75, 60):
            ax.axhline(where, color=REFERENCE, lw=0.7, ls=DASHES[2], zorder=0)
            ax.text(ax.get_xlim()[0] + 1, where + 0.5, f"paper: {where}°", fontsize=7, color=REFERENCE)
        ax.set_title(f"$n = {n}$")
        key(ax, loc="lower right", markerscale=2)
    return figure


def figure_6(data: dict[str, Any]) -> Any:
    """Activity over the network, and the histogram of the busiest neuron of each."""
    figure, grid = panels(1, 3, width=3.5, height=2.9)
    names = {"BN": "batch norm", "RS(rms)": "rescaling by the rms", "RS(std)": "rescaling by the std"}
    activity({label: data[name]["activity"] for name, label in names.items()}, grid[0])
    for ax, kind in zip(grid[1:], ("busiest neuron", "typical neuron"), strict=True):
        for k, (name, label) in enumerate(names.items()):
            count, edges = (np.asarray(u, float) for u in data[name][kind])
            ax.stairs(count / count.sum(), edges, color=COLOURS[k], label=label, lw=1.3)
        ax.set(xlabel="response to an input", ylabel="share of inputs", yscale="log")
        ax.set_title(f"the {kind}")
    key(grid[1])
    return figure


def _rows(data: dict[str, Any], kind: str) -> Any:
    figure = canvas(9.0, 4.0)
    tree(data["rows"][kind], figure.add_subplot())
    return figure


def figure_7(data: dict[str, Any]) -> Any:
    """Rows with two clusters stay so."""
    return _rows(data, "two")


def figure_8(data: dict[str, Any]) -> Any:
    """A row with three clusters has at most one such child."""
    return _rows(data, "three")


def theorem_3(data: dict[str, Any]) -> Any:
    """Probability of missing full rank against the number of neurons, and three bounds."""
    figure, grid = panels(1, len(data), width=2.9, height=2.8)
    for ax, (name, row) in zip(grid, data.items(), strict=True):
        neurons = np.asarray(row["neurons"])
        failure = np.asarray(row["failure"], float)
        seen = failure > 0
        ax.plot(neurons[seen], failure[seen], "o", color=COLOURS[0], ms=3.5, label="measured")
        for k, (bound, label) in enumerate(
            (("binomial", "binomial tail"), ("chernoff", "(7a)"), ("simple", "(7b)"))
        ):
            values = np.minimum(np.asarray(row["bounds"][bound]), 1.0)
            ax.plot(neurons, values, color=COLOURS[k + 1], ls=DASHES[k], lw=1.1, label=label)
        ax.set(xscale="log", yscale="log", ylim=(1e-4, 1.6), xlabel="neurons $d$")
        ax.set_title(f"{name}, $\\gamma$ = {float(row['gamma']):.2g}")
    grid[0].set_ylabel("probability that the rank is below $n$")
    key(grid[0])
    return figure


def theorem_11(data: dict[str, Any]) -> Any:
    """Norm ratio and angle of the tree's limit against the sharp and the printed bounds."""
    figure, (left, right) = panels(1, 2, width=3.7, height=3.0)
    sizes = np.array([int(name[2:]) for name in data])
    for n, row in zip(sizes, data.values(), strict=True):
        for ax, values in ((left, row["ratio"]), (right, np.degrees(row["angle"]))):
            ax.plot(np.full(np.size(values), n), np.ravel(values), ".", color=COLOURS[0], ms=4)
    n = np.linspace(sizes.min(), sizes.max(), 200)
    left.plot(n, np.sqrt(2 / ((n - 1) ** 2 + 1)), color=COLOURS[1], label="sharp bound")
    left.plot(n, 3 / (n - 2), color=PALE, ls="--", label="printed bound")
    right.plot(
        n, np.degrees(np.arccos(1 / np.sqrt(2 * ((n - 1) ** 2 + 1)))), color=COLOURS[1], label="sharp bound"
    )
    printed = np.degrees(np.pi / 2 - np.sqrt(2) * np.pi / (n - 2))
    right.plot(n[printed > 0], printed[printed > 0], color=PALE, ls="--", label="printed bound")
    left.set(xlabel="$n$", ylabel=r"$|x_i| / |x_{\mathrm{odd}}|$ at depth 10000", yscale="log")
    right.set(xlabel="$n$", ylabel=r"$\angle(x_i, x_{\mathrm{odd}})$ (degrees)")
    for ax in (left, right):
        ax.plot([], [], ".", color=COLOURS[0], label="inputs")
        key(ax)
    return figure


def odd_states(data: dict[str, Any]) -> Any:
    """Cluster angle and norm ratio in depth at infinite width, by batch size."""
    figure, (left, right) = panels(1, 2, width=3.6, height=3.0)
    paths = data["paths"]
    ordered = sorted(paths.items(), key=lambda pair: int(pair[0][2:]))
    for colour, (name, odd) in zip(shades(len(paths)), ordered, strict=True):
        layers = np.arange(1, len(odd["cluster_angle"]) + 1)
        left.plot(layers, np.asarray(odd["cluster_angle"]), color=colour, label=f"${name}$")
        right.plot(layers, np.asarray(odd["norm_ratio"]), color=colour, label=f"${name}$")
    left.set(xscale="log", xlabel="layer", ylabel="angle inside the cluster (degrees)", ylim=(0, 95))
    right.set(xscale="log", yscale="log", xlabel="layer", ylabel="norm of the odd point / next largest")
    key(left)
    return figure


def linear_rescale(data: dict[str, Any]) -> Any:
    """Orthogonality gap in depth for two widths."""
    figure, (ax,) = panels(1, 1, width=4.4, height=3.0)
    for k, (width, gap) in enumerate(data["gap"].items()):
        ax.plot(np.arange(len(gap)), np.asarray(gap), color=COLOURS[k], label=f"width {width}")
    ax.set(xlabel="layer", ylabel="orthogonality gap", yscale="log")
    key(ax)
    return figure


def linear_recenter(data: dict[str, Any]) -> Any:
    """Mean of the batch in depth: removed by the first layer."""
    figure, (ax,) = panels(1, 1, width=4.4, height=2.8)
    mean = np.asarray(data["relative_mean"])
    ax.plot(np.arange(len(mean)), np.maximum(mean, 1e-18), marker="o", ms=3, color=COLOURS[0])
    ax.set(xlabel="layer", ylabel="largest batch mean / largest entry", yscale="log")
    return figure


def one_neuron(data: dict[str, Any]) -> Any:
    """Training and test accuracy of the starts."""
    figure, (ax,) = panels(1, 1, width=4.8, height=2.5)
    names = [n.replace("relax=", "relaxed by ") if n != "he" else "He weights" for n in data]
    pairs = np.array([row["train and test accuracy"] for row in data.values()])
    dots({n: p[1:] for n, p in zip(names, pairs, strict=True)}, ax, xlabel="accuracy")
    ax.lines[0].set_label("test")
    ax.plot(pairs[:, 0], np.arange(len(pairs)), "^", color=COLOURS[1], ms=5, label="train")
    key(ax)
    return figure


DRAWINGS = {
    "002/figure-2": figure_2,
    "002/figure-3": figure_3,
    "002/figure-3-no-outlier": no_outlier,
    "002/figure-3-digits": digits_escape,
    "002/figure-4": figure_4,
    "002/figure-5": figure_5,
    "002/figure-5-digits": figure_5,
    "002/figure-6": figure_6,
    "002/figure-7": figure_7,
    "002/figure-8": figure_8,
    "002/theorem-3": theorem_3,
    "002/theorem-11": theorem_11,
    "002/odd-states": odd_states,
    "002/linear-recenter": linear_recenter,
    "002/linear-rescale": linear_rescale,
    "002/one-neuron-per-sample": one_neuron,
}
