"""Pictures of a batch inside a network: angles before and after a layer, an odd point, activity, the tree model."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

from meanflow.plots.style import COLORS, MARKERS, PALE, REFERENCE, axes, key


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


def activity(shares: Mapping[str, ArrayLike], ax: Axes | None = None, *, bins: int = 25) -> Axes:
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


def tree(layers: Sequence[ArrayLike], ax: Axes | None = None) -> Axes:
    """Rows of the tree model, layer by layer: each node is a number line with the samples, its mean a tick.

    Children are relu(x - mean) on the left and relu(mean - x) on the right, drawn below their parent.

    Args:
        layers: sequence of arrays (rows, n); layer t has twice the rows of layer t - 1, the children of row i being
            rows i and i + rows (the order of weights (I, -I)).
        ax: matplotlib Axes; a new figure by default.
    """
    ax = axes(ax)
    places = {0: [0.5]}
    for depth, rows in enumerate(layers):
        rows = np.atleast_2d(np.asarray(rows, float))
        if depth:
            gap = 0.5 / len(rows)
            above = places[depth - 1]
            places[depth] = [p - gap for p in above] + [p + gap for p in above]
        reach = 0.33 / len(rows)
        for i, row in enumerate(rows):
            center = places[depth][i]
            span = row.max() - row.min()
            scale = reach * 2 / span if span > 0 else 0.0
            spot = center - reach + (row - row.min()) * scale
            mean = center - reach + (row.mean() - row.min()) * scale
            ax.plot([center - reach, center + reach], [-depth, -depth], color=PALE, lw=0.7, zorder=1)
            ax.plot([mean, mean], [-depth - 0.09, -depth + 0.09], color=REFERENCE, lw=1.1, zorder=2)
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
                ax.plot([parent, center], [-depth + 0.82, -depth + 0.42], color=PALE, lw=0.6, zorder=0)
    count = len(places)
    ax.set(xlim=(0, 1), ylim=(-count + 0.7, 0.5), xticks=[])
    ax.set_yticks([-d for d in range(count)], [f"layer {d}" for d in range(count)])
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    return ax
