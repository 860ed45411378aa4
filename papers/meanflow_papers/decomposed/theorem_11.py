"""Theorem 11: where the tree model ends, and bounds on it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from meanflow_papers.decomposed.tree_model import tree
from meanflow_papers.entry import entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.style import COLORS, PALE, key, panels


class TreeLimits(NamedTuple):
    """Geometry of the tree as the depth grows, for an interior sample i and the extreme ones 1 and n (sorted).

    Attributes:
        ratio_first: |x_i| / |x_1|.
        ratio_last: |x_i| / |x_n|.
        cos_first: cosine of x_i and x_1.
        cos_last: cosine of x_i and x_n.
    """

    ratio_first: jax.Array
    ratio_last: jax.Array
    cos_first: jax.Array
    cos_last: jax.Array


def tree_limits(n: int, rho: float | jax.Array) -> TreeLimits:
    """Return the limits of norm ratios and cosines as the depth grows, for n samples.

    The extreme samples become orthogonal, x_1 . x_n = 0, and the interior samples merge. With rho the limit of
    S_{n-1} / S_1, the odd sample is x_1 for rho < 1, x_n for rho > 1, and both are odd for rho = 1 (symmetric inputs).
    """
    rho = jnp.asarray(rho)
    # only the splits 1 and n-1 survive; in units of S_1 / n^2 the squared lengths of x_1, x_i, x_n are m + rho, 1 + rho
    # and 1 + m rho, and <x_i, x_1> = rho, <x_i, x_n> = 1
    m = (n - 1) ** 2
    return TreeLimits(
        jnp.sqrt((1 + rho) / (m + rho)),
        jnp.sqrt((1 + rho) / (1 + m * rho)),
        rho / jnp.sqrt((1 + rho) * (m + rho)),
        1 / jnp.sqrt((1 + rho) * (1 + m * rho)),
    )


class TreeBounds(NamedTuple):
    """Theorem 11, items 3 and 4: how short the others are beside the escaped sample, and how far apart in angle.

    Attributes:
        ratio: sharp upper bound on |x_i| / |x_odd|, sqrt(2 / ((n-1)^2 + 1)); symmetric inputs attain it.
        angle: sharp lower bound on their angle in radians, arccos(1 / sqrt(2 ((n-1)^2 + 1))).
        printed_ratio: the paper's bound 3 / (n-2), which is not sharp.
        printed_angle: the paper's bound pi/2 - sqrt(2) pi / (n-2), which is not sharp, and negative for n <= 4.
    """

    ratio: np.ndarray
    angle: np.ndarray
    printed_ratio: np.ndarray
    printed_angle: np.ndarray


def tree_bounds(n: int | np.ndarray) -> TreeBounds:
    """Return the bounds of Theorem 11 for n >= 3 samples; at n = 2 the printed ones are infinite."""
    n = np.asarray(n)
    m = (n - 1) ** 2 + 1
    return TreeBounds(
        np.sqrt(2 / m), np.arccos(1 / np.sqrt(2 * m)), 3 / (n - 2), np.pi / 2 - np.sqrt(2) * np.pi / (n - 2)
    )


def draw(data: Arrays) -> Figure:
    """Norm ratio and angle of the tree's limit against the sharp and the printed bounds."""
    figure, (left, right) = panels(1, 2, width=3.7, height=3.0)
    sizes = np.array([int(name[2:]) for name in data])
    for n, row in zip(sizes, data.values(), strict=True):
        for ax, values in ((left, row["ratio"]), (right, np.degrees(row["angle"]))):
            ax.plot(np.full(np.size(values), n), np.ravel(values), ".", color=COLORS[0], ms=4)
    n = np.linspace(sizes.min(), sizes.max(), 200)
    bounds = tree_bounds(n)
    left.plot(n, bounds.ratio, color=COLORS[1], label="sharp bound")
    left.plot(n, bounds.printed_ratio, color=PALE, ls="--", label="printed bound")
    right.plot(n, np.degrees(bounds.angle), color=COLORS[1], label="sharp bound")
    printed = np.degrees(bounds.printed_angle)
    right.plot(n[printed > 0], printed[printed > 0], color=PALE, ls="--", label="printed bound")
    left.set(xlabel="$n$", ylabel=r"$|x_i| / |x_{\mathrm{odd}}|$ at depth 10000", yscale="log")
    right.set(xlabel="$n$", ylabel=r"$\angle(x_i, x_{\mathrm{odd}})$ (degrees)")
    for ax in (left, right):
        ax.plot([], [], ".", color=COLORS[0], label="inputs")
        key(ax)
    return figure


@entry(
    "002/theorem-11",
    title="the tree at depth 10000: limits, sharp bounds, printed bounds",
    claims=(
        (
            "after Theorem 11",
            "the representations of the largest and smallest starting datapoints become orthogonal "
            "(item 1 of the Theorem); the datapoint representations are all clustered together except "
            "for one or two points (item 2)",
        ),
        (
            "Theorem 11, equation (12)",
            "pi/2 - sqrt(2) pi/(n-2) <= lim_{t -> inf} angle(x_i^(t), x_1^(t)) <= pi/2",
        ),
    ),
    full={"draws": 100},
    minutes=(0.3, 1.5),
    setup="random and symmetric inputs, 10000 layers by the O(n^2) algorithm.",
    draw=draw,
)
def theorem_11(sizes: tuple[int, ...] = (5, 10, 50), draws: int = 20, layers: int = 10_000) -> Outcome:
    """Run the tree model to depth 10 000 and compare its end with limits and bounds.

    The paper claims that the extreme samples are orthogonal (1), that the others merge (2), a norm ratio of at most
    3/(n-2) (3) and an angle of at least pi/2 - sqrt(2) pi/(n-2) (4). Decisive are these four items at the last layer;
    the distance from the limits in closed form; and the ratio to our sharp bounds, which symmetric inputs attain.
    """
    extremes = merging = worst_ratio = 0.0
    worst_angle = np.inf
    table: dict[int, Arrays] = {}
    worst_limit = worst_bound = 0.0
    attained = 1.0
    for n in sizes:
        random = jax.random.normal(jax.random.key(n), (draws, n))
        inputs = jnp.concatenate([random, jnp.linspace(-1.0, 1.0, n)[None]])
        records = jax.lax.map(lambda x: tree(x, layers, every=layers - 1), inputs)
        grams, order = records.gram[:, -1], records.order[:, 0]
        rho = records.weight[:, -1, 0, -1] / records.weight[:, -1, 0, 0]
        # samples in the order of their inputs: the extreme ones first and last, the interior ones between
        sort = jax.vmap(lambda g, o: g[o[:, None], o[None, :]])(grams, order)
        length = jnp.sqrt(jnp.diagonal(sort, axis1=1, axis2=2))
        ratio = length[:, 1:-1, None] / length[:, None, jnp.array([0, -1])]
        cosine = sort[:, 1:-1, jnp.array([0, -1])] / (
            length[:, 1:-1, None] * length[:, None, jnp.array([0, -1])]
        )
        limits = tree_limits(n, rho)
        theory = jnp.stack([limits.ratio_first, limits.ratio_last], axis=1)[:, None, :]
        theory_cos = jnp.stack([limits.cos_first, limits.cos_last], axis=1)[:, None, :]
        worst_limit = max(worst_limit, float(jnp.max(jnp.abs(ratio - theory))))
        worst_limit = max(worst_limit, float(jnp.max(jnp.abs(cosine - theory_cos))))
        bounds = tree_bounds(n)
        unit = sort / (length[:, :, None] * length[:, None, :])
        extremes = max(extremes, float(jnp.max(jnp.abs(unit[:, 0, -1]))))
        merging = max(merging, float(jnp.max(jnp.abs(unit[:, 1:-1, 1:-1] - 1))))
        best = jnp.min(jnp.max(ratio, axis=1), axis=1)  # over the two extreme samples
        angle = jnp.arccos(jnp.min(jnp.max(cosine, axis=1), axis=1))
        worst_bound = max(
            worst_bound, float(jnp.max(best / bounds.ratio)), float(jnp.max(bounds.angle / angle))
        )
        worst_ratio = max(worst_ratio, float(jnp.max(best) / bounds.printed_ratio))
        worst_angle = min(worst_angle, float(jnp.min(angle) - bounds.printed_angle))
        attained = min(attained, float(best[-1] / bounds.ratio))
        table[n] = {"rho": rho, "ratio": best, "angle": angle, "bounds": bounds._asdict()}
    return Outcome(
        name="002/theorem-11",
        finding="True, as printed. Sharp: sqrt(2/((n-1)^2+1)) and arccos(1/sqrt(2((n-1)^2+1))), attained by "
        "symmetric inputs.",
        data={f"n={n}": row for n, row in table.items()},
        criteria=(
            Criterion("item 1: cosine of the extreme samples", extremes, high=0),
            Criterion("item 2: largest 1 - cosine of two others", merging, high=1e-12),
            Criterion("item 3: largest norm ratio over 3/(n-2)", worst_ratio, high=1),
            Criterion("item 4: least angle minus the printed bound", worst_angle, low=0),
            Criterion("distance from the limits", worst_limit, high=1e-12),
            Criterion("largest value over its sharp bound", worst_bound, high=1 + 1e-12),
            Criterion("symmetric input over the sharp bound", attained, 1 - 1e-12),
        ),
    )
