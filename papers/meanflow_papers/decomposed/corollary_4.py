"""Corollary 4: Theorem 3 with batch norm before the ReLU, and the hypothesis it needs."""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from meanflow_papers.decomposed.lemma_2 import rank
from meanflow_papers.decomposed.rank import gamma
from meanflow_papers.decomposed.theorem_3 import neurons_to_full_rank, rank_bounds
from meanflow_papers.entry import entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.style import COLORS, DASHES, MARKERS, below, panels


def normalized_outputs(x: np.ndarray, weights: np.ndarray, recenter: bool) -> np.ndarray:
    """Return ReLU(BN(W X)) for samples x (n, k) and weights (d, k), as (d, n); without ``recenter`` BN only "
    "rescales."""
    z = weights @ x.T
    moved = z - z.mean(axis=1, keepdims=True)
    return np.maximum((moved if recenter else z) / moved.std(axis=1, keepdims=True), 0)


def draw(data: Arrays) -> Figure:
    """Probability of missing full rank under batch norm, with bounds; rank against neurons where the hypothesis "
    "fails."""
    figure, (left, right) = panels(1, 2, width=4.8, height=3.9)
    neurons, failure = np.asarray(data["neurons"]), np.asarray(data["failure"])
    seen = failure > 0
    left.plot(neurons[seen], failure[seen], "o", color=COLORS[0], ms=4, label="measured")
    names = {"binomial": "binomial tail", "chernoff": "(7a)", "simple": "(7b)"}
    for k, (name, label) in enumerate(names.items()):
        left.plot(
            neurons, np.minimum(data["bounds"][name], 1), color=COLORS[k + 1], ls=DASHES[k], label=label
        )
    left.set(
        xscale="log",
        yscale="log",
        ylim=(1e-4, 1.6),
        xlabel="neurons $d$",
        ylabel="probability of rank below $n$",
    )
    left.set_title(r"batch norm, $\gamma$ of the centred samples")
    for k, (name, ranks) in enumerate(data["ranks"].items()):
        right.plot(data["widths"], ranks, marker=MARKERS[k], color=COLORS[k], label=name)
    right.set(
        xscale="log",
        xlabel="neurons $d$",
        ylabel="rank",
        title="five samples, one of them the mean of the batch",
    )
    for ax in (left, right):
        below(ax, columns=2)
    return figure


@entry(
    "002/corollary-4",
    title="full rank with batch norm before the ReLU, and a batch that never reaches it",
    claims=(
        (
            "Corollary 4",
            "Theorem 3 holds for y := min {d : rank(ReLU(BN(W^(d)X))) = n}, where BN refers to recentering and "
            "rescaling",
        ),
    ),
    minutes=(0.03, 0.03),
    verdict="corrected",
    setup="four points in three dimensions, 2000 runs; and four random points with their mean, up to 3000 neurons.",
    draw=draw,
)
def corollary_4(runs: int = 2000) -> Outcome:
    """Count neurons to full rank under batch norm, and show a batch without collinear samples that never gets there.

    Theorem 3 asks that no two samples are collinear. The paper claims its bounds for batch norm, with gamma of the
    centred samples. Rescaling changes no rank, so the neurons of the centred batch decide. Decisive are that no bound
    is violated, by more than four standard errors, where no two *centred* samples are collinear; and a batch without
    collinear samples whose mean is one of them: without recentering it reaches full rank, with it never, as a centred
    sample is 0.
    """
    rng = np.random.default_rng(2)
    x = rng.normal(size=(4, 3))
    good = x + np.array([[0.0, 0, 1], [0, 0, 0], [0, 0, 0], [0, 2, 0]])
    least = gamma(good, recenter=True).value
    y = neurons_to_full_rank(jax.random.key(4), jnp.asarray(good - good.mean(0)), runs)
    neurons = jnp.unique(jnp.round(jnp.geomspace(4, 16 / least, 30)).astype(int))
    bounds = rank_bounds(4, least, neurons)
    missed = jnp.mean(y[None, :] > neurons[:, None], axis=1)
    noise = 4 * jnp.sqrt(missed * (1 - missed) / runs) + 4 / runs
    violations = float(jnp.sum(missed > bounds.binomial + noise) + (y.mean() > bounds.expected[0]))
    bad = np.concatenate([x, x.mean(0, keepdims=True)])
    weights, widths = rng.normal(size=(3000, 3)), np.array([1, 2, 3, 4, 5, 7, 10, 20, 50, 200, 1000, 3000])
    ranks = {
        name: np.array([rank(normalized_outputs(bad, weights[:d], recenter)) for d in widths])
        for name, recenter in (("with recentering", True), ("rescaling alone", False))
    }
    return Outcome(
        "002/corollary-4",
        "true where no two centred samples are collinear, which is not what Theorem 3 asks for. Of five samples "
        "of which no "
        f"two are collinear, one being their mean, the rank stays {ranks['with recentering'][-1]} with "
        "recentering, at any "
        f"width, and is {ranks['rescaling alone'][-1]} without",
        {"neurons": neurons, "failure": missed, "bounds": bounds._asdict(), "widths": widths, "ranks": ranks},
        (
            Criterion("violated bounds, gamma of the centred samples", violations, 0, 0),
            Criterion(
                "the mean among the samples: rank with 3000 neurons and recentering",
                float(ranks["with recentering"][-1]),
                4,
                4,
            ),
            Criterion("the same without recentering", float(ranks["rescaling alone"][-1]), 5, 5),
        ),
    )
