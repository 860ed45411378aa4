"""Long runs of the "univariate ReLU" paper: what Figures 5 and 6 become later, and the regularised flow.

The paper shows its figures at one time. Its story of knots gathering at the samples depends on that time.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meanflow.experiments.outcome import Criterion, Outcome
from meanflow.experiments.univariate import draw, sinusoid, square_wave, train
from meanflow.flows import univariate as uni
from meanflow.flows.flow import Flow
from meanflow.flows.univariate import sparse
from meanflow.geometry import balance
from meanflow.measures import Affine, Cloud, Dataset, Polar
from meanflow.solvers import solve


def _planar_start(key: jax.Array, width: int) -> Affine:
    return balance.lift(Cloud(draw(key, width), labels=jnp.inf), "sqrt").particles


def figure_5_late(epochs: int = 100_000, seeds: int = 6, kappa: float = 0.5, saves: int = 10) -> Outcome:
    """Figure 5 at delta = +inf, ten times longer and with larger steps: the same seeds, medians over them."""
    run = train(sinusoid(), epochs, 20, 8, saves=saves)
    keys = jax.random.split(jax.random.key(5), seeds)
    losses, stats, _ = jax.vmap(lambda k: run(_planar_start(k, 200), 1.0, 0.0, kappa))(keys)
    middle = {name: np.median(value, axis=0) for name, value in stats.items()}
    loss = np.median(losses, axis=0)
    share, concentration = middle["share"], middle["live_concentration"]
    return Outcome(
        "004/figure-5-late",
        "as delta grows, clusters of knots emerge at the samples",
        "at delta = +inf most knots leave the samples again while the fit improves; the slope jumps stay in few places",
        {"epoch": np.linspace(0, epochs, saves + 1), "loss": loss, **middle},
        (
            # the sheet's medians: share .29, concentration_8 .84, loss .026
            Criterion("share at the end", float(share[-1]), 0.19, 0.39),
            Criterion("concentration_8 at the end", float(concentration[-1]), 0.74, 0.94),
            Criterion("loss at the end", float(loss[-1]), 0.013, 0.052),
        ),
    )


def figure_6_course(
    times: tuple[float, ...] = (10.0, 40.0, 120.0, 300.0, 1000.0, 3000.0), seeds: int = 6, width: int = 1000
) -> Outcome:
    """Figure 6 at delta = +inf as a function of time, gradient descent with step 0.02, several draws."""
    rate, every = 0.02, 10.0
    saves = round(times[-1] / every)
    run = train(square_wave(), round(times[-1] / rate), None, 6, saves=saves)
    keys = jax.random.split(jax.random.key(6), seeds)
    loss, stats, _ = jax.vmap(lambda k: run(_planar_start(k, width), 1.0, 0.0, rate))(keys)
    at = [round(t / every) for t in times]
    share, concentration = (np.asarray(stats[k])[:, at] for k in ("share", "live_concentration"))
    swing = share.max(axis=1) - share.min(axis=1)
    return Outcome(
        "004/figure-6-course",
        "neurons cluster at the samples for delta = +inf",
        "they gather in few places early and stay so, but whether these are samples changes back and forth with time",
        {
            "times": np.array(times),
            "loss": np.asarray(loss)[:, at],
            **{name: np.asarray(value)[:, at] for name, value in stats.items()},
        },
        (
            # the sheet's single run: shares .64 .59 .20 .73 .39 .62, concentration_6 .945 .924 .902 .997 .998 .999
            Criterion("least median concentration_6", float(np.median(concentration, axis=0).min()), 0.85, 1),
            Criterion("median concentration_6 at the end", float(np.median(concentration[:, -1])), 0.95, 1),
            Criterion("median over draws of max - min share", float(np.median(swing)), 0.3, 1),
        ),
    )


def sparse_limit(
    lam: float = 0.3, width: int = 256, end: float = 400.0, step: float = 0.1, samples: Dataset | None = None
) -> Outcome:
    """The flow of (16), canonical with the penalty lam mean |r|, against the minimiser over all measures.

    Neurons start almost at r = 0 with equally spaced angles and both signs. At the minimum |F| <= lam everywhere and
    F = -lam sign(r) on the support; ``bound`` is the exact supremum of |F| along the run.
    """
    data = square_wave() if samples is None else samples
    best = sparse.sparse_minimiser(data.x, data.y, lam, weights=data.weights)
    spaced = 2 * jnp.pi * (jnp.arange(width) + 0.5) / width
    sign = jnp.where(jnp.arange(width) % 2 == 0, 1.0, -1.0)
    cloud = Cloud(Polar(1e-3 * sign, spaced))

    def watch(flow: Flow, cloud: Cloud, data: Dataset) -> Any:
        return sparse.duality(*cloud.particles, data.x, data.y, lam, weights=data.weights)

    ts = jnp.concatenate([jnp.zeros(1), jnp.geomspace(end / 256, end, 17)])
    flow = uni.canonical(variation=lam)
    sol = solve(flow, cloud, data, end, ts=ts, observe=watch, solver="sliding", step=step)
    r, theta = (np.asarray(u) for u in sol.final.particles)
    excess = np.asarray(sol.observed.primal) / best.primal - 1
    apart = np.abs(np.angle(np.exp(1j * (theta[:, None] - best.theta[None, :]))))
    apart = np.where(np.sign(r)[:, None] == np.sign(best.charges)[None, :], apart, np.inf).min(axis=1)
    charge = np.abs(r) / np.abs(r).sum()
    grid = np.linspace(float(data.x[0]), float(data.x[-1]), 401)
    network = jnp.mean(r[None, :] * jax.nn.relu(jnp.outer(grid, jnp.cos(theta)) + jnp.sin(theta)[None, :]), 1)
    return Outcome(
        "004/sparse-limit",
        "regularised, the flow finds the function of least weighted total variation of f' (16), (17)",
        "true, with the weight sqrt(1 + x^2) that (17) leaves out; the certificate |F| <= lam closes along the run",
        {
            "times": sol.ts,
            "primal": sol.observed.primal,
            "dual": sol.observed.dual,
            "bound": sol.observed.bound / lam,
            "minimum": best.primal,
            "support": best.theta,
            "alive": int(np.sum(r != 0)),
            "grid": grid,
            "f": network,
            "f_best": best.function()(grid),
        },
        (
            Criterion("duality gap of the reference", (best.primal - best.dual) / best.primal, -1e-9, 1e-8),
            Criterion("objective over its minimum - 1", float(excess[-1]), -1e-9, 1e-4),
            Criterion("objective never below the minimum", float(excess.min()), -1e-9),
            Criterion("sup |F| / lam at the end", float(sol.observed.bound[-1]) / lam, 1 - 1e-3, 1 + 1e-3),
            Criterion("charge within 0.05 of the support", float(charge[apart < 0.05].sum()), 0.99, 1),
            Criterion(
                "largest difference of the functions",
                float(jnp.max(jnp.abs(network - best.function()(grid)))),
                0,
                0.02,
            ),
            Criterion("solver finished", float(bool(sol.ok)), 1, 1),
        ),
    )
