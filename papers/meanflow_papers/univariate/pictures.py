"""What several drawings of paper 004 share: titles, samples and rays, and runs that only a drawing needs."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike
from matplotlib.axes import Axes

import meanflow as mf
from meanflow import univariate as uni
from meanflow.plots.clouds import plane
from meanflow.plots.curves import fit
from meanflow.plots.maps import number
from meanflow.plots.style import no_legend
from meanflow.univariate import balance
from meanflow_papers.outcome import Arrays
from meanflow_papers.univariate.setup import Rate, random_neurons

GRID = np.linspace(-1.15, 1.15, 921)
FRAMES = 50


class Samples(NamedTuple):
    """Training samples, as the plots of functions take them: inputs and targets, (n,) each."""

    x: ArrayLike
    y: ArrayLike


class Rays(NamedTuple):
    """Rays of the samples and whether they attract neurons of either sign, as ``classify_rays`` gives them."""

    theta: ArrayLike
    sample: ArrayLike
    positive: ArrayLike
    negative: ArrayLike


def balance_title(delta: float) -> str:
    """Return the title "delta = ..." of a panel."""
    return rf"$\delta = {number(float(delta)).strip('$')}$"


def knot_places(theta: ArrayLike) -> np.ndarray:
    """Return the knot b/a = -tan(theta) of each neuron; vertical ones are far outside."""
    with np.errstate(all="ignore"):
        return -np.tan(np.asarray(theta))


def draw_state(
    ax_f: Axes,
    ax_uv: Axes,
    data: Arrays,
    f: ArrayLike,
    r: ArrayLike,
    theta: ArrayLike,
    reach: float | None = None,
) -> None:
    """Function with knots on one Axes, neurons on the other."""
    fit(data["grid"], {"$f$": f}, Samples(data["x"], data["y"]), ax_f, knots=knot_places(theta))
    plane(r, theta, ax_uv, samples=data["x"], reach=reach)
    for ax in (ax_f, ax_uv):  # the panels are small
        no_legend(ax)


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
    flow = uni.full(alpha, inner=kp, outer=kc)
    see: Callable[[mf.Flow, mf.Cloud, mf.Dataset], mf.Polar] = lambda flow, cloud, data: (
        balance.project(cloud, alpha).particles
    )
    every = max(1, epochs // FRAMES)
    run = mf.descend(
        flow, mf.Cloud(start), data, every * FRAMES, step=step, clock="gradient", every=every, observe=see
    )
    f = mf.predict(flow, run.final, jnp.asarray(GRID))
    return {"f": f, "r": run.observed.r, "theta": run.observed.theta}


def journeys_by_balance(
    data: mf.Dataset,
    key: jax.Array,
    width: int,
    epochs: int,
    settings: tuple[Sequence[float], Sequence[float]],
) -> Arrays:
    """``journey`` of one start for pairs (delta, kappa), alpha = sqrt m; arrays with a leading axis of pairs."""

    def one(delta: jax.Array, kappa: jax.Array) -> dict[str, jax.Array]:
        kp, kc = balance.layer_rates(delta)
        start = balance.lift(mf.Cloud(random_neurons(key, width), labels=delta), "sqrt").particles
        return journey(start, data, epochs, mf.KernelStep(kappa, 20), "sqrt", kp, kc)

    deltas, kappas = (jnp.asarray(u) for u in settings)
    found = jax.jit(jax.vmap(one))(deltas, kappas)
    return {"grid": GRID, "x": data.x, "y": data.y, "runs": found, "run_delta": deltas}
