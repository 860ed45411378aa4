"""Pictures of a batch inside a network: angles before and after a layer, an odd point, activity, the tree model."""

from typing import Any

import numpy as np

from meanflow.plots.style import COLOURS, MARKERS, PALE, REFERENCE, axes, key


def angles(
    before: Any, after: Any, ax: Any = None, *, label: str | None = None, colour: str = COLOURS[0]
) -> Any:
    """Angles between pairs of samples before and after a layer, in degrees, beside the diagonal of no change.

    Args:
        before, after: arrays of equal size.
        ax: matplotlib Axes; a new figure by default.
        label: legend entry.
        colour: of the points.
    """
    ax = axes(ax)
    before, after = np.ravel(before), np.ravel(after)
    size = 6 if len(before) < 500 else 3
    ax.plot(before, after, ".", ms=size, alpha=0.6, color=colour, label=label, mec="none")
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


def projection(points: Any, odd: int | None = None, ax: Any = None) -> Any:
    """A batch (n, 2) in the plane, with the origin and the odd point marked."""
    ax = axes(ax)
    points = np.asarray(points)
    rest = np.ones(len(points), bool)
    if odd is not None:
        rest[odd] = False
        ax.plot(*points[odd], MARKERS[3], color=COLOURS[1], ms=6, label="odd point")
    ax.plot(
        points[rest, 0], points[rest, 1], "o", ms=4, color=COLOURS[0], mec="white", mew=0.4, label="cluster"
    )
    ax.plot(0, 0, "+", color=REFERENCE, ms=7)
    ax.set(xlabel="first random direction", ylabel="second random direction")
    key(ax)
    return ax


def activity(shares: dict[str, Any], ax: Any = None, *, bins: int = 25) -> Any:
    """Histogram over neurons of the share of inputs that activate them.

    Args:
        shares: name -> (neurons,) in [0, 1].
        ax: matplotlib Axes; a new figure by default.
        bins: of the unit interval.
    """
    ax = axes(ax)
    for k, (name, values) in enumerate(shares.items()):
        style = {"color": COLOURS[k], "label": name, "density": True, "histtype": "step", "lw": 1.4}
        ax.hist(np.asarray(values), bins=bins, range=(0, 1), **style)
    ax.set(xlabel="share of inputs that activate a neuron", ylabel="density of neurons", xlim=(0, 1))
    key(ax)
    return ax


def tree(layers: Any, ax: Any = None) -> Any:
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
            centre = places[depth][i]
            span = row.max() - row.min()
            scale = reach * 2 / span if span > 0 else 0.0
            spot = centre - reach + (row - row.min()) * scale
            mean = centre - reach + (row.mean() - row.min()) * scale
            ax.plot([centre - reach, centre + reach], [-depth, -depth], color=PALE, lw=0.7, zorder=1)
            ax.plot([mean, mean], [-depth - 0.09, -depth + 0.09], color=REFERENCE, lw=1.1, zorder=2)
            seen: dict[float, int] = {}
            for j, x in enumerate(spot):
                level = seen.get(round(float(x), 9), 0)  # equal values are stacked
                seen[round(float(x), 9)] = level + 1
                style = {"marker": MARKERS[j % len(MARKERS)], "color": COLOURS[j % len(COLOURS)], "ms": 4.2}
                ax.plot([x], [-depth + 0.085 * level], mec="white", mew=0.4, zorder=3, ls="", **style)
            if depth:
                parent = places[depth - 1][i % len(places[depth - 1])]
                ax.plot([parent, centre], [-depth + 0.82, -depth + 0.42], color=PALE, lw=0.6, zorder=0)
    count = len(places)
    ax.set(xlim=(0, 1), ylim=(-count + 0.7, 0.5), xticks=[])
    ax.set_yticks([-d for d in range(count)], [f"layer {d}" for d in range(count)])
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    return ax
