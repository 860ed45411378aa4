"""What several drawings of paper 004 share: titles, samples and rays, and runs that only a drawing needs."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import meanflow as mf
from meanflow import univariate as uni
from meanflow.plots import fit, plane
from meanflow.univariate import balance
from meanflow_papers.outcome import Arrays
from meanflow_papers.style import COLORS, NEGATIVE, POSITIVE, SAMPLE, no_legend
from meanflow_papers.univariate.setup import Rate, layer_rates, random_neurons

GRID = np.linspace(-1.15, 1.15, 921)
FRAMES = 50


def balance_title(delta: float) -> str:
    """Return the title "delta = ..." of a panel."""
    return rf"$\delta = {float(delta):.3g}$".replace("inf", r"\infty")


def knot_places(theta: ArrayLike) -> np.ndarray:
    """Return the knot b/a = -tan(theta) of each neuron; vertical ones are far outside."""
    with np.errstate(all="ignore"):
        return -np.tan(np.asarray(theta))


def knot_counts(ax: Axes, theta: ArrayLike) -> None:
    """Count the knots in 110 bins under a function: marks on the curve would cover it, and each other."""
    low, high = GRID[0], GRID[-1]
    counts, edges = np.histogram(knot_places(theta), bins=110, range=(low, high))
    bars = ax.twinx()
    bars.stairs(counts, edges, fill=True, color=COLORS[2], alpha=0.7)
    top = max(int(counts.max()), 1)
    bars.set_ylim(0, 4 * top)  # the lowest quarter of the panel
    bars.set_yticks([0, top])
    bars.tick_params(labelsize=6, colors=COLORS[2], length=2)
    bars.spines[:].set_visible(False)
    bars.set_zorder(-1)
    ax.set_zorder(1)
    ax.patch.set_visible(False)


def draw_state(
    ax_f: Axes,
    ax_uv: Axes,
    data: Arrays,
    f: ArrayLike,
    r: ArrayLike,
    theta: ArrayLike,
    reach: float | None = None,
    later: ArrayLike | None = None,
) -> None:
    """Function with knots on one Axes, neurons on the other; ``legend_of_states`` explains their marks.

    ``later`` is the function of the same network after much longer training, a thin dashed curve.
    """
    fit(data["grid"], {"$f$": f}, mf.Dataset(data["x"], data["y"]), ax_f)
    knot_counts(ax_f, theta)
    if later is not None:
        ax_f.plot(data["grid"], np.asarray(later), color=COLORS[6], lw=0.9, ls=(0, (4, 1.5)))
    plane(r, theta, ax_uv, samples=data["x"], reach=reach)
    for ax in (ax_f, ax_uv):  # the panels are small, and all have the same marks
        no_legend(ax)


def legend_of_states(figure: Figure, shown: str, later: str | None = None) -> None:
    """One legend under the figure for every panel that ``draw_state`` has drawn.

    Args:
        figure: the figure.
        shown: what the solid function is, for instance "after 10000 epochs".
        later: what the dashed function is; None where there is none.
    """
    mark = lambda **style: Line2D([], [], **{"ls": "", **style})
    handles = [mark(ls="-", color=COLORS[0], label=f"$f$ {shown}")]
    if later is not None:
        handles.append(mark(ls=(0, (4, 1.5)), lw=0.9, color=COLORS[6], label=f"$f$ {later}"))
    handles += [
        mark(ls="-", lw=4, color=COLORS[2], alpha=0.7, label="number of knots $-v/u$ in each of 110 bins"),
        mark(marker="x", color=SAMPLE, ms=5, label="samples"),
        mark(marker=".", ms=8, color=POSITIVE, label="neurons, $r > 0$"),
        mark(marker=".", ms=8, color=NEGATIVE, label="neurons, $r < 0$"),
        mark(ls="-", lw=4, color="0.85", label="darker: more samples active"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8)


def journey(
    start: mf.Affine,
    data: mf.Dataset,
    epochs: int,
    step: mf.KernelStep,
    alpha: str,
    kp: Rate = 1.0,
    kc: Rate = 1.0,
) -> dict[str, jax.Array]:
    """Gradient descent of one network: f on the grid at the end, and (r, theta) at ``FRAMES`` + 1 times."""
    flow = uni.full(alpha=alpha, inner=kp, outer=kc)
    see: Callable[[mf.Flow, mf.Cloud, mf.Dataset], mf.Polar] = lambda flow, cloud, data: (
        balance.project(cloud, alpha).particles
    )
    every = max(1, epochs // FRAMES)
    run = mf.descend(
        flow, mf.Cloud(start), data, every * FRAMES, step=step, clock="gradient", every=every, observe=see
    )
    f = mf.predict(flow, run.final, jnp.asarray(GRID))
    return {"f": f, "r": run.observed.r, "theta": run.observed.theta, "loss": run.energy[-1]}


def journeys_by_balance(
    data: mf.Dataset,
    key: jax.Array,
    width: int,
    epochs: int,
    settings: tuple[Sequence[float], Sequence[float]],
    later: int = 5,
) -> Arrays:
    """``journey`` of one start for pairs (delta, kappa), alpha = sqrt m; arrays with a leading axis of pairs.

    The same start is trained ``later`` times as many epochs at kappa = 0.5 too, to show where the function goes.
    """

    def one(delta: jax.Array, kappa: jax.Array, epochs: int) -> dict[str, jax.Array]:
        kp, kc = layer_rates(delta)
        start = balance.lift(mf.Cloud(random_neurons(key, width), labels=delta), "sqrt").particles
        return journey(start, data, epochs, mf.KernelStep(kappa, 20), "sqrt", kp, kc)

    deltas, kappas = (jnp.asarray(u) for u in settings)
    found = jax.jit(jax.vmap(lambda delta, kappa: one(delta, kappa, epochs)))(deltas, kappas)
    long = jax.jit(jax.vmap(lambda delta: one(delta, jnp.asarray(0.5), later * epochs)))(deltas)
    return {
        "grid": GRID,
        "x": data.x,
        "y": data.y,
        "runs": found,
        "run_delta": deltas,
        "later": {"f": long["f"], "loss": long["loss"], "epochs": later * epochs},
    }
