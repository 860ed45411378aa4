"""Figures 4, 7 and 8: the binary tree of positive and negative transformations of one feature."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from matplotlib.figure import Figure

from meanflow import depth
from meanflow_papers.decomposed import tree_model
from meanflow_papers.entry import Arguments, entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.pictures import tree
from meanflow_papers.style import canvas

MARKS = "each mark is a sample, the tick their mean; children: relu(x - mean) left, relu(mean - x) right"


def split_identity(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Return the weights (I, -I) of the tree, equation (9), of shape (fan_in, 2 fan_in); nothing is random."""
    fan_in, fan_out = shape
    if fan_out != 2 * fan_in:
        raise ValueError(f"split_identity needs fan_out = 2 fan_in, got shape {shape}")
    return jnp.concatenate([jnp.eye(fan_in, dtype=dtype), -jnp.eye(fan_in, dtype=dtype)], axis=1)


def draw_figure_4(data: Arrays) -> Figure:
    """The first three layers of the tree."""
    rows = np.asarray(data["rows"])
    figure = canvas(9.0, 4.0)
    tree([rows[t][: 2**t] for t in range(4)], figure.add_subplot()).set_title(MARKS)
    return figure


@entry(
    "002/figure-4",
    title="the binary tree of positive and negative transformations",
    minutes=(0.07, 0.07),
    setup="five points, 12 layers: 4096 explicit rows against the O(n^2) algorithm.",
    draw=draw_figure_4,
)
def figure_4(layers: int = 12) -> Outcome:
    """Compute the tree of five points by its explicit rows and by the O(n^2) algorithm.

    The paper draws the first layers of the tree and claims nothing. Decisive is that both ways give the
    same Gram matrix at every layer.
    """
    x = jnp.asarray([[0.0], [1.0], [2.0], [4.0], [9.0]])
    widths = [2 ** (t + 1) for t in range(layers)]
    rows = lambda x: jnp.pad(x.T, ((0, 2**layers - x.shape[1]), (0, 0)))[:8]
    layer = depth.Layer(weights=split_identity)
    explicit = depth.propagate(jax.random.key(0), x, widths, layer, observe=lambda x: (x @ x.T, rows(x)))
    grams, first = explicit.layers
    record = tree_model.tree(x, layers)
    exact = record.gram * jnp.exp(2 * record.log_scale)[:, None, None]
    error = jnp.max(jnp.abs(exact - grams[1:]), axis=(1, 2)) / jnp.max(grams[1:], axis=(1, 2))
    return Outcome(
        name="002/figure-4",
        claim="The first three layers of the binary tree of positive and negative transformations.",
        finding=f"{2**layers} explicit rows and at most 3 + 2 x 4 numbers give the same Gram matrices.",
        data={"rows": first[:4], "error": error, "clusters": record.max_clusters},
        criteria=(Criterion("largest relative error", float(error.max()), high=1e-13),),
    )


def stable_rows(outcome: Outcome, arguments: Arguments) -> Arrays:
    """002/figures-7-8: three layers of explicit rows from two and from three clusters, and from a tie with the mean."""
    rows = {}
    starts = {"two": [0.0, 0, 1, 1, 1], "three": [0.0, 0, 1, 3, 3], "tie": [0.0, 0, 1, 2, 2]}
    for name, x in starts.items():
        layers = [jnp.asarray([x])]
        for _ in range(3):
            z = layers[-1] - jnp.mean(layers[-1], axis=1, keepdims=True)
            layers.append(jnp.maximum(jnp.concatenate([z, -z]), 0.0))
        rows[name] = layers
    return {"rows": rows}


def draw_figure_7(data: Arrays) -> Figure:
    """Rows with two clusters stay so."""
    figure = canvas(9.0, 4.0)
    tree(data["rows"]["two"], figure.add_subplot()).set_title(MARKS)
    return figure


def draw_figure_8(data: Arrays) -> Figure:
    """A row with three clusters has one such child, and none where the middle value equals the mean."""
    figure = canvas(9.0, 7.4)
    above, under = figure.subplots(2, 1)
    tree(data["rows"]["three"], above).set_title(f"{MARKS}\none child has three clusters again")
    tree(data["rows"]["tie"], under).set_title("the middle value equals the mean: both children have two")
    return figure


@entry(
    "002/figure-8",
    title="evolution of three-cluster rows of the tree",
    minutes=(0.07, 0.07),
    verdict="corrected",
    setup="7 points in three clusters, with and without a tie of middle value and mean. Five points are drawn.",
    draw=draw_figure_8,
    picture=stable_rows,
)
@entry(
    "002/figure-7",
    title="evolution of two-cluster rows of the tree",
    minutes=(0.07, 0.07),
    setup="7 points in two clusters, 8 layers; sums of squares against (40). Five points are drawn.",
    draw=draw_figure_7,
    picture=stable_rows,
)
def figures_7_8(n: int = 7, layers: int = 8) -> Outcome:
    """Follow rows of the tree with two and with three clusters of equal values.

    The paper claims that two clusters stay two, with sums of squares given by (38) to (40), and that a
    three-cluster row has exactly one three-cluster child. Decisive are (40) to rounding, and the number of
    three-cluster rows: none after a layer if the middle value equals the mean.
    """
    split = 2
    two = jnp.where(jnp.arange(n) < split, 0.0, 1.0)
    record = tree_model.tree(two, layers)
    total = record.weight[:, 0, split - 1] * jnp.exp(2 * record.log_scale)
    shrink = (split**2 + (n - split) ** 2) / n**2
    # layer 1 holds (s/n)^2 and ((n-s)/n)^2 times height 1; each layer multiplies the sum by lambda_s
    theory = shrink ** jnp.arange(1, layers + 1)
    three = jnp.concatenate([jnp.zeros(1), jnp.ones(1), jnp.full(n - 2, 3.7)])
    tie = jnp.concatenate([jnp.zeros(1), jnp.full(n - 2, 1.0), jnp.full(1, 2.0)])  # middle value = mean
    counts = {
        k: tree_model.tree(v, layers).multi_rows[:, 0] for k, v in {"generic": three, "tie": tie}.items()
    }
    return Outcome(
        name="002/figures-7-8",
        claim="Two clusters stay two, by (38) to (40) (figure 7). A three-cluster row always has exactly one "
        "three-cluster child (figure 8).",
        finding="Figure 7: true, (40) to rounding. Figure 8: at most one; none when the middle value equals the mean.",
        data={"two_cluster_weight": total, "three_cluster_rows": counts},
        criteria=(
            Criterion("two clusters: error of (40)", float(jnp.max(jnp.abs(total / theory - 1))), high=1e-12),
            Criterion("generic row: most three-cluster rows", float(counts["generic"].max()), 1, 1),
            Criterion("tied row: three-cluster rows at layer 1", float(counts["tie"][0]), 0, 0),
        ),
    )
