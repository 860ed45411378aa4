"""Theorem 10: every sequence of transformations leaves at most three clusters after finitely many layers."""

import numpy as np
from matplotlib.figure import Figure

from meanflow_papers.decomposed.tree_model import tree
from meanflow_papers.entry import entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.style import COLORS, MARKERS, PALE, below, panels

SEQUENCES = {
    "positive only": (1.0, 1.0),
    "negative only": (0.0, 0.0),
    "in turn": (1.0, 0.0),
    "at random": (0.5, 0.5),
}
GAPS = 10.0 ** -np.arange(1, 10, 2)


def clusters(rows: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """Return the number of distinct values of rows (m, n) after each transformation, (layers + 1, m).

    ``positive`` (layers, m) says which transformation each row undergoes. Rows are divided by their largest value,
    which changes neither equality nor what follows; a value equal to the mean up to rounding becomes 0 under both.
    """
    found = [_count(rows)]
    for signs in positive:
        moved = rows - rows.mean(axis=1, keepdims=True)
        size = np.abs(moved).max(axis=1, keepdims=True)
        moved = np.where(np.abs(moved) < 1e-14 * size, 0.0, moved)
        rows = np.maximum(np.where(signs[:, None], moved, -moved), 0.0)
        rows = rows / np.where(size > 0, size, 1.0)
        found.append(_count(rows))
    return np.array(found)


def _count(rows: np.ndarray) -> np.ndarray:
    return 1 + np.sum(np.diff(np.sort(rows, axis=1), axis=1) > 0, axis=1)


def draw(data: Arrays) -> Figure:
    """Clusters by layer for several sequences; layers until stability by batch size, and by the smallest gap."""
    figure, (left, middle, right) = panels(1, 3, width=4.1, height=3.7)
    for k, (name, course) in enumerate(data["courses"].items()):
        values = np.asarray(course)  # (layers + 1, rows)
        left.plot(values.mean(1), color=COLORS[k], label=name)
        left.fill_between(
            np.arange(len(values)), values.min(1), values.max(1), color=COLORS[k], alpha=0.12, lw=0
        )
    left.axhline(3, color=PALE, ls="--", label="stable: at most 3")
    left.set(
        xscale="symlog",
        xlim=(0, None),
        xlabel="layer",
        ylabel="clusters of a row, mean and range",
        title="30 samples",
    )
    sizes = np.asarray(data["sizes"])
    for k, (name, rows) in enumerate(data["first"].items()):
        values = np.asarray(rows)  # (sizes, rows)
        middle.plot(sizes, np.median(values, axis=1), marker=MARKERS[k], color=COLORS[k], label=name)
        middle.plot(sizes, values.max(axis=1), ls=":", color=COLORS[k])
    middle.set(xscale="log", yscale="log", xlabel="$n$", ylabel="first stable layer: median, dotted largest")
    middle.set_title("random rows")
    gaps = np.asarray(data["gaps"])
    right.plot(gaps, data["by gap"], "o-", color=COLORS[0], label="of all sequences the slowest")
    right.set(
        xscale="log", xlabel=r"gap $\epsilon$ of $(0, 1, 1 + \epsilon, 2.7)$", ylabel="first stable layer"
    )
    right.invert_xaxis()
    right.set_title("no bound in $n$ alone")
    for ax in (left, middle, right):
        below(ax, columns=2)
    return figure


@entry(
    "002/theorem-10",
    title="layers until a row has at most three clusters, for any sequence of transformations",
    claims=(("Theorem 10", "Then, there exists a finite t_0 >= 0 such that x^(t_0) is stable."),),
    minutes=(0.03, 0.03),
    setup="random rows of 4 to 100 values, 200 of each size, under four kinds of sequences of 400 transformations.",
    draw=draw,
)
def theorem_10(rows: int = 200, layers: int = 400) -> Outcome:
    """Follow random rows through sequences of positive and negative transformations and count their clusters.

    The paper claims that every row has at most three clusters from some layer on, whatever the sequence, and (Lemma
    7) that their number never grows. Decisive are both, for every row and sequence; and that this layer is not
    bounded by n: for four samples it grows as their smallest gap shrinks.
    """
    rng = np.random.default_rng(0)
    sizes = np.array([4, 7, 12, 30, 100])
    first: dict[str, list[np.ndarray]] = {name: [] for name in SEQUENCES}
    courses: Arrays = {}
    growth, most = 0, 0
    for n in sizes:
        start = rng.standard_normal((rows, n))
        for name, chances in SEQUENCES.items():
            chance = np.resize(np.array(chances), layers)[:, None]
            found = clusters(start, rng.uniform(size=(layers, rows)) < chance)
            growth, most = max(growth, int(np.diff(found, axis=0).max())), max(most, int(found[-1].max()))
            first[name].append(np.argmax(found <= 3, axis=0))
            if n == 30:
                courses[name] = found
    near = np.stack([[0.0, 1.0, 1.0 + gap, 2.7] for gap in GAPS])
    most_by_layer = np.stack(
        [np.asarray(tree(row, 60).max_clusters[:, 0]) for row in near]
    )  # over all 2^t sequences
    slow = 1 + np.argmax(most_by_layer <= 3, axis=1)
    return Outcome(
        "002/theorem-10",
        f"true of all {rows * len(sizes) * len(SEQUENCES)} rows: the last becomes stable after "
        f"{max(int(np.max(v)) for v in first.values())} layers. The layer is not bounded in n: for four samples "
        "with a gap from "
        f"{GAPS[0]:g} to {GAPS[-1]:.0e} it is {', '.join(str(v) for v in slow)}",
        {
            "courses": courses,
            "sizes": sizes,
            "first": {name: np.array(found) for name, found in first.items()},
            "gaps": GAPS,
            "by gap": slow,
        },
        (
            Criterion("most clusters at the last layer", float(most), 1, 3),
            Criterion("largest growth of the number of clusters in a layer", float(growth), high=0),
            Criterion(
                "four samples: layers at the least gap minus those at the largest",
                float(slow[-1] - slow[0]),
                low=5,
            ),
        ),
    )
