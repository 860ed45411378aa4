"""Lemma 2: a further neuron raises the rank with at least the probability of the smallest cell."""

import numpy as np
from matplotlib.figure import Figure

from meanflow_papers.decomposed.rank import gamma
from meanflow_papers.entry import entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.style import COLORS, PALE, below, panels

TOLERANCE = 1e-9  # of outputs scaled to size 1: far above rounding, far below what a new direction adds


def rank(rows: np.ndarray) -> int:
    """Return the rank of outputs (neurons, samples), each neuron scaled to norm 1; silent ones add nothing."""
    size = np.linalg.norm(rows, axis=1, keepdims=True)
    rows = rows[size[:, 0] > 0] / size[size[:, 0] > 0]
    return int(np.linalg.matrix_rank(rows, tol=TOLERANCE)) if len(rows) else 0


def chance_to_gain(x: np.ndarray, rng: np.random.Generator, draws: int) -> float:
    """Draw neurons until the first t samples have rank t, and return how often one more gives all t + 1 rank t + 1."""
    t, k = len(x) - 1, x.shape[1]
    weights = np.zeros((0, k))
    while rank(np.maximum(weights @ x[:t].T, 0)) < t:
        weights = np.concatenate([weights, rng.standard_normal((1, k))])
    outputs = np.maximum(weights @ x.T, 0)
    if rank(outputs) == t + 1:
        return 1.0
    # the last sample's outputs are a combination of the others', by unique coefficients: (13)
    relation = np.linalg.lstsq(outputs[:, :t], outputs[:, t], rcond=None)[0]
    new = np.maximum(rng.standard_normal((draws, k)) @ x.T, 0)
    return float(
        np.mean(np.abs(new[:, :t] @ relation - new[:, t]) > TOLERANCE * (1 + np.abs(relation).max()))
    )


def draw(data: Arrays) -> Figure:
    """Measured probability that a neuron raises the rank against gamma, for random batches."""
    figure, (ax,) = panels(1, 1, width=5.2, height=4.0)
    for k, (name, rows) in enumerate(data.items()):
        found = np.asarray(rows)  # (batches, 2)
        ax.plot(found[:, 0], found[:, 1], "os^D"[k], ms=4, alpha=0.7, color=COLORS[k], label=name)
    ends = np.array([min(np.min(rows[:, 0]) for rows in data.values()), 0.5])
    ax.plot(ends, ends, color=PALE, label=r"the bound, $\gamma(X^{(t+1)})$")
    ax.set(
        xscale="log",
        yscale="log",
        xlabel=r"$\gamma(X^{(t+1)})$",
        ylabel="probability that a neuron raises the rank",
    )
    ax.set_title("every batch lies above the line")
    below(ax, columns=2)
    return figure


@entry(
    "002/lemma-2",
    title="the probability that one more neuron raises the rank, and its bound",
    claims=(
        (
            "Lemma 2, equation (6)",
            "Then, with probability at least gamma(X^(t+1)), rank(ReLU(W^(r+1)X^(t+1))) = t+1",
        ),
    ),
    minutes=(0.02, 0.02),
    setup="60 random batches in the plane and in three dimensions, t + 1 = 4 and 6 samples; 4000 neurons each.",
    draw=draw,
)
def lemma_2(batches: int = 15, draws: int = 4000) -> Outcome:
    """Measure how often one more random neuron raises the rank of a batch, and compare with gamma.

    Neurons are drawn until the first t samples have rank t. The paper claims that a further neuron then gives all t +
    1 samples rank t + 1 with probability at least gamma, the least volume of a cell. Decisive is how many batches
    fall short of it by more than four standard errors of the measured frequency: none.
    """
    rng = np.random.default_rng(0)
    data: Arrays = {}
    for k, n in ((2, 4), (2, 6), (3, 4), (3, 6)):
        rows = []
        for _ in range(batches):
            x = rng.standard_normal((n, k))
            rows.append((gamma(x).value, chance_to_gain(x, rng, draws)))
        data[f"{n} samples in {k} dimensions"] = np.array(rows)
    bound, found = np.concatenate(list(data.values())).T
    short = bound - found - 4 * np.sqrt(bound * (1 - bound) / draws)
    least = float(np.min(found / bound))
    return Outcome(
        "002/lemma-2",
        f"true: no batch of {len(bound)} falls short. The bound is loose: the measured probability is at least "
        f"{least:.1f} "
        f"times gamma, in the median {np.median(found / bound):.0f} times",
        data,
        (
            Criterion("batches below gamma", float(np.sum(short > 0)), 0, 0),
            Criterion(
                "batches whose rank was still to be raised", float(np.sum(found < 1)), low=len(bound) / 4
            ),
        ),
    )
