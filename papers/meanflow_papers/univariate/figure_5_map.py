"""Figure 5 and section 1.2 as one sweep over balances: the map of the regimes."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import meanflow as mf
from meanflow.flows import Observable
from meanflow.plots import heat_map
from meanflow_papers.entry import entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.style import COLORS, MARKERS, below, panels

DELTAS = (-np.inf, -100.0, -10.0, 0.0, 10.0, 100.0, np.inf)
OBSERVED = ("angle_displacement", "concentration", "on_sample_share", "predictions")


def square_law(key: jax.Array, width: int) -> mf.Cloud:
    """Angles of (a, b) uniform on a square, r uniform on (-3, 3)."""
    a, b, r = jax.random.uniform(key, (3, width), minval=-1.0, maxval=1.0)
    return mf.Cloud(mf.Polar(3 * r, jnp.arctan2(-b, a)))


def draw(data: Arrays) -> Figure:
    """Turning, concentration and knots on samples by balance (and width)."""
    runs = data["runs"]
    names = {
        "angle_displacement": r"rms $\Delta\theta$",
        "concentration": "slope jumps in 8 bins",
        "on_sample_share": "knots on samples",
    }
    end = runs.isel(step=-1).median("seed")
    if runs.sizes["width"] > 1:
        figure, grid = panels(1, 3, width=3.8, height=2.8)
        for ax, (name, title) in zip(grid, names.items(), strict=True):
            heat_map(end[name], ax)
            ax.set_title(title)
        return figure
    figure, (ax,) = panels(1, 1, width=5.6, height=4.0)
    deltas, last = runs.delta.values, runs.isel(step=-1).squeeze("width")
    for k, (name, title) in enumerate(names.items()):
        ax.plot(range(len(deltas)), end[name].values.ravel(), marker=MARKERS[k], color=COLORS[k], label=title)
        low, high = last[name].min("seed").values, last[name].max("seed").values
        ax.fill_between(range(len(deltas)), low, high, color=COLORS[k], alpha=0.18, lw=0)
    ax.set_xticks(range(len(deltas)), [f"${d:.3g}$".replace("inf", r"\infty") for d in deltas])
    ax.set(xlabel=r"balance $\delta$", ylabel="median and range over seeds", ylim=(-0.03, 1.05))
    below(ax, columns=3)
    return figure


@entry(
    "004/figure-5-map",
    title="Figure 5 as one sweep: turning, concentration and knots on samples by delta",
    claims=(
        (
            "Section 4",
            "as we vary delta, the network function goes from being smooth and non-adaptive in the "
            "kernel regime ... to very adaptive",
        ),
    ),
    small={"seeds": 3},
    full={"seeds": 6, "widths": (20, 50, 100, 200, 500)},
    minutes=(0.1, 6.0),
    setup="width 200, seven balances, 10000 steps.",
    draw=draw,
)
def regime_map(
    widths: tuple[int, ...] = (200,),
    deltas: tuple[float, ...] = DELTAS,
    seeds: int = 6,
    steps: int = 10_000,
    every: int | None = None,
    observe: Mapping[str, Observable | None] | None = None,
    store: str | None = None,
) -> Outcome:
    """Sweep the balance delta for 20 samples of sin(2 pi x), alpha = sqrt m, kappa = 0.2.

    The paper claims a kernel regime for delta << 0, an adaptive one for delta >> 0 and a smooth passage.
    Decisive, at width 200, are that neurons turn ten times less at -100 than at 100, that the turn and the
    concentration of slope jumps rise on the way, and that twice as many knots end on samples at inf as at -100.

    Args:
        widths: the criteria are those of width 200, which must be among them.
        deltas: must contain -inf, -100, -10, 0, 100 and inf.
        seeds, steps: of each cell.
        every: steps between saves; default start and end only.
        observe: observables to record beside those of the criteria.
        store: folder in which the sweep keeps its results; default none.
    """
    x = np.linspace(-1, 1, 20)
    data = mf.Dataset(x, np.sin(2 * np.pi * x), "sum")
    flow = mf.lifted(alpha="sqrt")
    defaults = flow.observables(data)
    ds = mf.sweep(
        flow,
        data,
        widths=widths,
        deltas=deltas,
        seeds=seeds,
        init=square_law,
        steps=steps,
        every=steps if every is None else every,
        step=mf.KernelStep(0.2),
        observe={n: one if n in OBSERVED else None for n, one in defaults.items()} | dict(observe or {}),
        store=store,
    )
    end = ds.sel(width=200).median("seed")
    end = end.isel(step=-1)

    def at(name: str, delta: float) -> float:
        return float(end[name].sel(delta=delta))

    def rise(name: str) -> float:
        return float(np.min(np.diff([at(name, delta) for delta in (-100.0, -10.0, 0.0, 100.0)])))

    return Outcome(
        "004/figure-5-map",
        f"true at the end of {steps} steps; the passage lies between delta = -100 and 10: neurons turn by "
        f"{at('angle_displacement', -100.0):.4f} at -100, {at('angle_displacement', 0.0):.2f} at 0 and "
        f"{at('angle_displacement', np.inf):.2f} at +inf (medians of rms angles)",
        {"runs": ds, "samples": data},
        (
            Criterion("failed runs", float((ds.result != 0).sum()), 0, 0),
            # what the claim says of the two ends and of the way between them, without numbers of a run
            Criterion(
                "turn at -100 over turn at 100",
                at("angle_displacement", -100.0) / at("angle_displacement", 100.0),
                high=0.1,
            ),
            Criterion(
                "least rise of the turn from -100 to -10, 0 and 100", rise("angle_displacement"), low=0
            ),
            Criterion("least rise of the concentration on this way", rise("concentration"), low=0),
            Criterion(
                "on-sample share at inf over that at -100",
                at("on_sample_share", np.inf) / at("on_sample_share", -100.0),
                low=2,
            ),
        ),
    )
