"""Theorem 11: where the tree model ends, and bounds on it."""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from meanflow import depth
from meanflow_papers.entry import entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.style import COLORS, PALE, key, panels


def draw(data: Arrays) -> Figure:
    """Norm ratio and angle of the tree's limit against the sharp and the printed bounds."""
    figure, (left, right) = panels(1, 2, width=3.7, height=3.0)
    sizes = np.array([int(name[2:]) for name in data])
    for n, row in zip(sizes, data.values(), strict=True):
        for ax, values in ((left, row["ratio"]), (right, np.degrees(row["angle"]))):
            ax.plot(np.full(np.size(values), n), np.ravel(values), ".", color=COLORS[0], ms=4)
    n = np.linspace(sizes.min(), sizes.max(), 200)
    left.plot(n, np.sqrt(2 / ((n - 1) ** 2 + 1)), color=COLORS[1], label="sharp bound")
    left.plot(n, 3 / (n - 2), color=PALE, ls="--", label="printed bound")
    right.plot(
        n, np.degrees(np.arccos(1 / np.sqrt(2 * ((n - 1) ** 2 + 1)))), color=COLORS[1], label="sharp bound"
    )
    printed = np.degrees(np.pi / 2 - np.sqrt(2) * np.pi / (n - 2))
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
    full={"draws": 100},
    minutes=(0.3, 1.5),
    verdict="corrected",
    setup="random and symmetric inputs, 10000 layers by the O(n^2) algorithm.",
    draw=draw,
)
def theorem_11(sizes: tuple[int, ...] = (5, 10, 50), draws: int = 20, layers: int = 10_000) -> Outcome:
    """Run the tree model to depth 10 000 and compare its end with limits and bounds.

    The paper claims a norm ratio of at most 3/(n-2) and an angle of at least pi/2 - sqrt(2) pi/(n-2).
    Decisive are the distance from the limits in closed form, and the ratio to our sharp bounds, which
    symmetric inputs attain.
    """
    table: dict[int, Arrays] = {}
    worst_limit = worst_bound = 0.0
    attained = 1.0
    for n in sizes:
        random = jax.random.normal(jax.random.key(n), (draws, n))
        inputs = jnp.concatenate([random, jnp.linspace(-1.0, 1.0, n)[None]])
        records = jax.lax.map(lambda x: depth.tree(x, layers, every=layers - 1), inputs)
        grams, order = records.gram[:, -1], records.order[:, 0]
        rho = records.weight[:, -1, 0, -1] / records.weight[:, -1, 0, 0]
        sort = jax.vmap(lambda g, o: g[o[:, None], o[None, :]])(grams, order)
        length = jnp.sqrt(jnp.diagonal(sort, axis1=1, axis2=2))
        ratio = length[:, 1:-1, None] / length[:, None, jnp.array([0, -1])]
        cosine = sort[:, 1:-1, jnp.array([0, -1])] / (
            length[:, 1:-1, None] * length[:, None, jnp.array([0, -1])]
        )
        limits = depth._tree_model.tree_limits(n, rho)
        theory = jnp.stack([limits.ratio_first, limits.ratio_last], axis=1)[:, None, :]
        theory_cos = jnp.stack([limits.cos_first, limits.cos_last], axis=1)[:, None, :]
        worst_limit = max(worst_limit, float(jnp.max(jnp.abs(ratio - theory))))
        worst_limit = max(worst_limit, float(jnp.max(jnp.abs(cosine - theory_cos))))
        bounds = depth._tree_model.tree_bounds(n)
        best = jnp.min(jnp.max(ratio, axis=1), axis=1)  # over the two extreme samples
        angle = jnp.arccos(jnp.min(jnp.max(cosine, axis=1), axis=1))
        worst_bound = max(
            worst_bound, float(jnp.max(best / bounds.ratio)), float(jnp.max(bounds.angle / angle))
        )
        attained = min(attained, float(best[-1] / bounds.ratio))
        table[n] = {"rho": rho, "ratio": best, "angle": angle, "bounds": bounds._asdict()}
    return Outcome(
        name="002/theorem-11",
        claim="Norm ratio at most 3/(n-2), angle at least pi/2 - sqrt(2) pi/(n-2).",
        finding="Sharp: sqrt(2/((n-1)^2+1)) and arccos(1/sqrt(2((n-1)^2+1))), attained by symmetric inputs.",
        data={f"n={n}": row for n, row in table.items()},
        criteria=(
            Criterion("distance from the limits", worst_limit, high=1e-12),
            Criterion("largest value over its sharp bound", worst_bound, high=1 + 1e-12),
            Criterion("symmetric input over the sharp bound", attained, 1 - 1e-12),
        ),
    )
