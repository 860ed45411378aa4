"""What several drawings of paper 004 share: titles, samples and rays, and runs that only a drawing needs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike

import meanflow as mf
from meanflow.flows import univariate as uni
from meanflow.geometry import balance
from meanflow.plots.clouds import plane
from meanflow.plots.curves import fit
from meanflow.plots.maps import number
from meanflow_papers.univariate.setup import random_neurons

GRID = np.linspace(-1.15, 1.15, 921)
FRAMES = 50


class Samples(NamedTuple):
    """Training samples, as the plots of functions take them: inputs and targets, (n,) each."""

    x: Any
    y: Any


class Rays(NamedTuple):
    """Rays of the samples and whether they attract neurons of either sign, as ``classify_rays`` gives them."""

    theta: Any
    sample: Any
    positive: Any
    negative: Any


def balance_title(delta: float) -> str:
    """Return the title "delta = ..." of a panel."""
    return rf"$\delta = {number(float(delta)).strip('$')}$"


def knot_places(theta: ArrayLike) -> np.ndarray:
    """Return the knot b/a = -tan(theta) of each neuron; vertical ones are far outside."""
    with np.errstate(all="ignore"):
        return -np.tan(np.asarray(theta))


def draw_state(
    ax_f: Any, ax_uv: Any, data: dict[str, Any], f: Any, r: Any, theta: Any, reach: Any = None
) -> None:
    """Function with knots on one Axes, neurons on the other."""
    fit(data["grid"], {"$f$": f}, Samples(data["x"], data["y"]), ax_f, knots=knot_places(theta))
    ax_f.get_legend().remove()
    plane(r, theta, ax_uv, samples=data["x"], reach=reach)
    ax_uv.get_legend().remove()


def journey(
    start: mf.Affine,
    data: mf.Dataset,
    epochs: int,
    step: mf.KernelStep,
    alpha: str,
    kp: Any = 1.0,
    kc: Any = 1.0,
) -> dict[str, jax.Array]:
    """Gradient descent of one network: f on the grid at the end, and (r, theta) at ``FRAMES`` + 1 times."""
    flow = uni.full(alpha, inner=kp, outer=kc)
    see: Callable[..., Any] = lambda flow, cloud, data: balance.project(cloud, alpha).particles
    every = max(1, epochs // FRAMES)
    run = mf.descend(
        flow, mf.Cloud(start), data, every * FRAMES, step=step, clock="gradient", every=every, observe=see
    )
    f = mf.predict(flow, run.final, jnp.asarray(GRID))
    return {"f": f, "r": run.observed.r, "theta": run.observed.theta}


def journeys_by_balance(
    data: mf.Dataset, key: jax.Array, width: int, epochs: int, settings: Any
) -> dict[str, Any]:
    """``journey`` of one start for pairs (delta, kappa), alpha = sqrt m; arrays with a leading axis of pairs."""

    def one(delta: jax.Array, kappa: jax.Array) -> dict[str, jax.Array]:
        kp, kc = balance.factors(delta)
        start = balance.lift(mf.Cloud(random_neurons(key, width), labels=delta), "sqrt").particles
        return journey(start, data, epochs, mf.KernelStep(kappa, 20), "sqrt", kp, kc)

    deltas, kappas = (jnp.asarray(u) for u in settings)
    found = jax.jit(jax.vmap(one))(deltas, kappas)
    return {"grid": GRID, "x": data.x, "y": data.y, "runs": found, "run_delta": deltas}
