"""Recentering and ReLU at infinite width: the states with one odd point."""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from meanflow import depth
from meanflow_papers.entry import Arguments, entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.style import REFERENCE, below, panels, shades


def odd_paths(outcome: Outcome, arguments: Arguments) -> Arrays:
    """002/odd-states: the infinite-width recursion from an outlier and from equal inputs, by batch size."""
    found = {}
    for n in (5, 10, 20, 50):
        start = jnp.diag(jnp.ones(n).at[0].set(4.0))
        grams = depth.expected_gram(start, 400, renormalize=True)
        found[f"n={n}"] = jax.vmap(depth.odd_point)(grams)._asdict()
    return {"paths": found}


def draw(data: Arrays) -> Figure:
    """Cluster angle and norm ratio in depth at infinite width, by batch size; dotted: the fixed points."""
    figure, (left, right) = panels(1, 2, width=4.4, height=3.8)
    paths = data["paths"]
    ordered = sorted(paths.items(), key=lambda pair: int(pair[0][2:]))
    for color, (name, odd) in zip(shades(len(paths)), ordered, strict=True):
        layers = np.arange(len(odd["cluster_angle"]))  # layer 0 is the input
        left.plot(layers, np.asarray(odd["cluster_angle"]), color=color, label=f"${name}$")
        right.plot(layers, np.asarray(odd["norm_ratio"]), color=color, label=f"${name}$")
        if name in data:  # n = 5 has no such state
            ratio, _, angle, _ = data[name]
            left.axhline(float(angle), color=color, lw=0.8, ls=":")
            right.axhline(float(ratio), color=color, lw=0.8, ls=":")
    left.set(xlabel="layer", ylabel="angle inside the cluster (degrees)", ylim=(0, 95))
    right.set(yscale="log", xlabel="layer", ylabel="norm of the odd point / next largest")
    for ax in (left, right):
        ax.set_xscale("symlog", linthresh=1)
        ax.set_xticks([0, 1, 10, 100], ["0", "1", "10", "100"])
        ax.plot([], [], color=REFERENCE, lw=0.8, ls=":", label="state with an odd point")
        below(ax, columns=3)
    return figure


@entry(
    "002/odd-states",
    title="recentering + ReLU at infinite width: states with an odd point",
    minutes=(0.14, 0.14),
    verdict="refuted",
    setup="fixed points of the Gram recursion, n = 6 to 100.",
    draw=draw,
    picture=odd_paths,
)
def odd_states() -> Outcome:
    """Find the states with one odd point of the infinite-width recursion for several batch sizes.

    The paper claims that all points but one collapse to a single point. Decisive are norm ratios, angles
    and critical outlier scales against a table that was computed independently, and that n = 6 has no such
    state.
    """
    table = {  # norm ratio, odd angle, cluster angle, critical scale
        7: (3.849, 86.24, 61.37, 1.560),
        10: (7.412, 88.71, 45.20, 1.227),
        20: (18.079, 89.82, 24.54, 1.077),
        50: (48.589, 89.99, 10.38, None),
        100: (98.787, 90.00, 5.29, None),
    }
    rows: dict[int, tuple[jax.Array | float | None, ...]] = {}
    error = 0.0
    for n, expected in table.items():
        state = depth._odd_points.odd_state(n)
        scale = depth._odd_points.critical_scale(n) if expected[3] else None
        rows[n] = (state.norm_ratio, state.odd_angle, state.cluster_angle, scale)
        units = (1e-3, 1e-2, 1e-2, 1e-3)  # last digit given
        columns = zip(rows[n], expected, units, strict=True)
        error = max(error, *(abs(float(v) - e) / u for v, e, u in columns if v is not None and e))
    return Outcome(
        name="002/odd-states",
        claim="All points but one collapse to a single point.",
        finding="The cluster keeps an angle of about 540/n degrees, and the state exists from n = 7 only.",
        data={f"n={n}": row for n, row in rows.items()},
        criteria=(
            Criterion("largest error in units of the last digit", error, high=0.51),
            Criterion(
                "n = 6: norm ratio", float(depth._odd_points.odd_state(6).norm_ratio), 1 - 1e-9, 1 + 1e-9
            ),
        ),
    )
