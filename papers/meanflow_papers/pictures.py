"""Kinds of pictures that several papers draw: a batch inside a network, directions, errors against sizes.

Each draws on the Axes it is given, or on those of a new figure, and returns them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from numpy.typing import ArrayLike

from meanflow_papers.style import COLORS, DASHES, MARKERS, PALE, REFERENCE, SAMPLE, axes, key, sparse

NOTE: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": 6.5}


def angles(
    before: ArrayLike,
    after: ArrayLike,
    ax: Axes | None = None,
    *,
    label: str | None = None,
    color: str = COLORS[0],
) -> Axes:
    """Angles between pairs of samples before and after a layer, in degrees, beside the diagonal of no change.

    Args:
        before, after: arrays of equal size.
        ax: matplotlib Axes; a new figure by default.
        label: legend entry.
        color: of the points.
    """
    ax = axes(ax)
    before, after = np.ravel(before), np.ravel(after)
    size = 6 if len(before) < 500 else 3
    ax.plot(before, after, ".", ms=size, alpha=0.6, color=color, label=label, mec="none")
    if not any(line.get_gid() == "diagonal" for line in ax.lines):
        ax.plot([0, 180], [0, 180], color=PALE, lw=0.7, zorder=0, gid="diagonal")
    low = min(before.min(), after.min(), *(ax.get_xlim() if len(ax.lines) > 2 else (180.0,)))
    high = max(before.max(), after.max(), *(ax.get_xlim() if len(ax.lines) > 2 else (0.0,)))
    margin = 0.04 * (high - low) + 1
    limits = (max(0.0, low - margin), min(180.0, high + margin))
    ax.set(xlim=limits, ylim=limits, aspect="equal")
    ax.set(xlabel="angle before the layer (degrees)", ylabel="angle after the layer (degrees)")
    key(ax)
    return ax


def projection(points: ArrayLike, odd: int | None = None, ax: Axes | None = None) -> Axes:
    """A batch (n, 2) in the plane, with the origin and the odd point marked."""
    ax = axes(ax)
    points = np.asarray(points)
    rest = np.ones(len(points), bool)
    if odd is not None:
        rest[odd] = False
        ax.plot(*points[odd], MARKERS[3], color=COLORS[1], ms=6, label="odd point")
    ax.plot(
        points[rest, 0], points[rest, 1], "o", ms=4, color=COLORS[0], mec="white", mew=0.4, label="cluster"
    )
    ax.plot(0, 0, "+", color=REFERENCE, ms=7)
    ax.set(xlabel="first random direction", ylabel="second random direction")
    key(ax)
    return ax


def activity_histogram(shares: Mapping[str, ArrayLike], ax: Axes | None = None, *, bins: int = 25) -> Axes:
    """Histogram over neurons of the share of inputs that activate them.

    Args:
        shares: name -> (neurons,) in [0, 1].
        ax: matplotlib Axes; a new figure by default.
        bins: of the unit interval.
    """
    ax = axes(ax)
    for k, (name, values) in enumerate(shares.items()):
        ax.hist(
            np.asarray(values),
            bins=bins,
            range=(0, 1),
            color=COLORS[k],
            label=name,
            density=True,
            histtype="step",
            lw=1.4,
        )
    ax.set(xlabel="share of inputs that activate a neuron", ylabel="density of neurons", xlim=(0, 1))
    key(ax)
    return ax


def tree(layers: Sequence[ArrayLike], ax: Axes | None = None, *, counts: bool = False) -> Axes:
    """Rows of the tree model, layer by layer: each node is a number line from 0 with the samples, its mean a tick.

    All number lines have one scale, so that rows are seen to contract. Children are relu(x - mean) on the left and
    relu(mean - x) on the right, drawn below their parent. The first row is measured from its least value.

    Args:
        layers: sequence of arrays (rows, n); layer t has twice the rows of layer t - 1, the children of row i being
            rows i and i + rows (the order of weights (I, -I)).
        ax: matplotlib Axes; a new figure by default.
        counts: write the number of samples above each cluster and its value below.
    """
    ax = axes(ax)
    places = {0: [0.5]}
    first = np.atleast_2d(np.asarray(layers[0], float))
    reach = 0.42 / len(np.atleast_2d(np.asarray(layers[-1])))
    scale = 2 * reach / max(float(np.ptp(first)), 1e-300)
    for depth, rows in enumerate(layers):
        rows = np.atleast_2d(np.asarray(rows, float))
        if depth:
            gap = 0.5 / len(rows)
            above = places[depth - 1]
            places[depth] = [p - gap for p in above] + [p + gap for p in above]
        for i, row in enumerate(rows if depth else rows - rows.min()):
            center = places[depth][i]
            zero = center - reach
            spot, mean = zero + row * scale, zero + row.mean() * scale
            ax.plot([zero, center + reach], [-depth, -depth], color=PALE, lw=0.7, zorder=1)
            ax.plot([zero, zero], [-depth - 0.05, -depth + 0.05], color=PALE, lw=1.1, zorder=1)
            ax.plot([mean, mean], [-depth - 0.09, -depth + 0.09], color=REFERENCE, lw=1.1, zorder=2)
            for value, count in (
                zip(*np.unique(row.round(9), return_counts=True), strict=True) if counts else ()
            ):
                at = zero + value * scale
                ax.annotate(str(count), (at, -depth + 0.085 * (count - 1)), (0, 4), **NOTE, va="bottom")
                label = f"{value:.2g}" if value else ""
                ax.annotate(label, (at, -depth - 0.09), (0, -2), **NOTE, va="top", color=REFERENCE)
            seen: dict[float, int] = {}
            for j, x in enumerate(spot):
                level = seen.get(round(float(x), 9), 0)  # equal values are stacked
                seen[round(float(x), 9)] = level + 1
                ax.plot(
                    [x],
                    [-depth + 0.085 * level],
                    marker=MARKERS[j % len(MARKERS)],
                    color=COLORS[j % len(COLORS)],
                    ms=4.2,
                    mec="white",
                    mew=0.4,
                    zorder=3,
                    ls="",
                )
            if depth:
                parent = places[depth - 1][i % len(places[depth - 1])]
                ax.plot([parent, center], [-depth + 0.76, -depth + 0.5], color=PALE, lw=0.6, zorder=0)
    count = len(places)
    marks = [
        (MARKERS[j % len(MARKERS)], COLORS[j % len(COLORS)], f"$x_{j + 1}$") for j in range(first.shape[1])
    ]
    handles = []
    for marker, color, label in (*marks, ("|", PALE, "0"), ("|", REFERENCE, "mean")):
        handles.append(
            Line2D([], [], ls="", marker=marker, color=color, label=label, ms=8 if marker == "|" else 5)
        )
    ax.legend(
        handles=handles, loc="lower center", bbox_to_anchor=(0.5, -0.12), ncols=first.shape[1] + 2, fontsize=8
    )
    ax.set(xlim=(0, 1), ylim=(-count + 0.7, 0.5), xticks=[])
    ax.set_yticks([-d for d in range(count)], [f"layer {d}" for d in range(count)])
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    return ax


def needles(
    b: ArrayLike, ax: Axes | None = None, *, color: str = COLORS[0], label: str | None = None
) -> Axes:
    """Each direction of b (m, 2) as a segment from the origin to the unit circle."""
    ax = axes(ax)
    b = np.asarray(b)
    s = b / np.linalg.norm(b, axis=1, keepdims=True)
    gaps = np.full(len(s), np.nan)
    ends = np.stack([np.zeros_like(s), s, np.stack([gaps, gaps], 1)], axis=1).reshape(-1, 2)
    ax.plot(ends[:, 0], ends[:, 1], color=color, lw=0.8, label=label)
    ax.plot(s[:, 0], s[:, 1], ".", ms=3.5, color=color)
    turn = np.linspace(0, 2 * np.pi, 200)
    if not any(line.get_gid() == "circle" for line in ax.lines):
        ax.plot(np.cos(turn), np.sin(turn), color=PALE, lw=0.7, zorder=0, gid="circle")
    ax.set(aspect="equal", xlim=(-1.12, 1.12), ylim=(-1.12, 1.12), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    return ax


def field(
    u: ArrayLike, v: ArrayLike, velocity: ArrayLike, ax: Axes | None = None, *, color: str = SAMPLE
) -> Axes:
    """Arrows (k, 2) at the points (u, v) of the plane, all of one length: the direction is what matters."""
    ax = axes(ax)
    velocity = np.asarray(velocity)
    size = np.linalg.norm(velocity, axis=1, keepdims=True)
    unit = np.where(size > 0, velocity / np.where(size > 0, size, 1), 0)
    ax.quiver(u, v, unit[:, 0], unit[:, 1], color=color, angles="xy", pivot="mid", scale=34, width=0.0028)
    ax.set(xlabel="$u$", ylabel="$v$", aspect="equal")
    return ax


def speeds(
    theta: ArrayLike | Mapping[str, ArrayLike],
    speed: Mapping[str, ArrayLike],
    ax: Axes | None = None,
    *,
    log: bool = False,
) -> Axes:
    """Speed of the neurons against their direction theta in [0, 2 pi), one curve a model (angular-speed profile).

    Args:
        theta: (m,), or name -> (m,).
        speed: name -> (m,).
        ax: matplotlib Axes; a new figure by default.
        log: logarithmic speeds.
    """
    ax = axes(ax)
    for k, (name, values) in enumerate(speed.items()):
        turn = np.mod(np.asarray(theta[name] if isinstance(theta, dict) else theta), 2 * np.pi)
        order = np.argsort(turn)
        ax.plot(
            turn[order],
            np.asarray(values)[order],
            label=name,
            marker=MARKERS[k],
            color=COLORS[k % len(COLORS)],
            ms=3,
            lw=0.8,
        )
    ax.set_xticks(np.pi / 2 * np.arange(5), ["$0$", r"$\pi/2$", r"$\pi$", r"$3\pi/2$", r"$2\pi$"])
    ax.set(
        xlabel=r"direction $\vartheta$ of $b$",
        ylabel=r"tangential speed $|\dot b_\perp|$",
        xlim=(0, 2 * np.pi),
    )
    if log:
        ax.set_yscale("log")
    else:
        ax.set_ylim(bottom=0)
    key(ax)
    return ax


def convergence(
    sizes: ArrayLike | Mapping[str, ArrayLike],
    errors: Mapping[str, ArrayLike],
    ax: Axes | None = None,
    *,
    orders: dict[str, float] | None = None,
    xlabel: str = "$m$",
    ylabel: str = "error",
    fitted: bool = True,
) -> Axes:
    """Errors against sizes, log-log, with the fitted exponent in the legend and guides of given slope.

    Args:
        sizes: (k,), or name -> (k,) when the curves have their own.
        errors: name -> (k,) positive.
        ax: matplotlib Axes; a new figure by default.
        orders: label -> slope of a dashed guide, started at the first curve.
        xlabel, ylabel: axis labels.
        fitted: append the least-squares slope to each label.
    """
    ax = axes(ax)
    for k, (name, values) in enumerate(errors.items()):
        n = np.asarray(sizes[name] if isinstance(sizes, dict) else sizes, float)
        values = np.asarray(values, float)
        good = values > 0
        slope = np.polyfit(np.log(n[good]), np.log(values[good]), 1)[0] if good.sum() > 1 else np.nan
        label = f"{name}: slope ${slope:.2f}$" if fitted else name
        ax.plot(
            n[good],
            values[good],
            marker=MARKERS[k % len(MARKERS)],
            color=COLORS[k % len(COLORS)],
            label=label,
        )
        if k == 0:
            for dash, (guide, order) in zip(DASHES[1:] * 3, (orders or {}).items(), strict=False):
                line = values[good][0] * (n[good] / n[good][0]) ** order
                ax.plot(n[good], line, color=PALE, ls=dash, lw=1.0, label=guide, zorder=0)
    ax.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel)
    every = sorted({float(n) for line in ax.lines for n in np.asarray(line.get_xdata())})
    if len(every) <= 6:
        ax.set_xticks(every, [f"{n:g}" for n in every])
    sparse(ax)
    key(ax)
    return ax
