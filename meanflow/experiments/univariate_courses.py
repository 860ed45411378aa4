"""Long runs of the "univariate ReLU" paper: what Figures 5 and 6 become later, and the regularised flow.

The paper shows its figures at one time. Its story of knots gathering at the samples depends on that time.
"""

import jax
import jax.numpy as jnp
import numpy as np

from meanflow import univariate as uni
from meanflow.experiments.outcome import Criterion, Outcome
from meanflow.experiments.univariate import draw, sinusoid, square_wave, train
from meanflow.flows.flow import Flow
from meanflow.measures import Affine, Cloud, Dataset, Polar
from meanflow.solvers import KernelStep, solve
from meanflow.univariate import balance, sparse


def _planar_start(key: jax.Array, width: int) -> Affine:
    return balance.lift(Cloud(draw(key, width), labels=jnp.inf), "sqrt").particles


def figure_5_late(epochs: int = 100_000, seeds: int = 6, kappa: float = 0.5, saves: int = 10) -> Outcome:
    """Figure 5 at delta = +inf, ten times longer and with larger steps: the same seeds, medians over them."""
    run = train(sinusoid(), epochs, 20, 8, saves=saves)
    keys = jax.random.split(jax.random.key(5), seeds)
    losses, stats, _ = jax.vmap(lambda k: run(_planar_start(k, 200), 1.0, 0.0, kappa))(keys)
    middle = {name: np.median(value, axis=0) for name, value in stats.items()}
    loss = np.median(losses, axis=0)
    share, concentration = middle["share"], middle["concentration"]
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
    share, concentration = (np.asarray(stats[k])[:, at] for k in ("share", "concentration"))
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
    lam: float = 0.3,
    samples: int = 5,
    draws: int = 5,
    width: int = 128,
    end: float = 400.0,
    fixed_end: float = 10_000.0,
) -> Outcome:
    """The flow of (16) with the penalty lam mean |r|, against the minimiser over all measures, for several data sets.

    Neurons start almost at r = 0 with equally spaced angles and both signs. At the minimum |F| <= lam everywhere and
    F = -lam sign(r) on the support; ``bound`` is the exact supremum of |F|/lam along the run. Canonical to time
    ``end``, and radial (fixed directions, a convex problem) to ``fixed_end``.
    """
    rng = np.random.default_rng(0)
    x = np.sort(rng.uniform(-1, 1, (draws, samples)), axis=1)
    y = rng.standard_normal((draws, samples))
    best = [sparse.sparse_minimizer(u, v, lam) for u, v in zip(x, y, strict=True)]
    minimum = np.array([b.primal for b in best])[:, None]
    spaced = 2 * jnp.pi * (jnp.arange(width) + 0.5) / width
    cloud = Cloud(Polar(jnp.where(jnp.arange(width) % 2 == 0, 1e-3, -1e-3), spaced))
    # few neurons end up with all the mass, r^2 and the kernel grow fast: an older step would be too long
    step = KernelStep(1.0, every=1)

    def watch(flow: Flow, cloud: Cloud, data: Dataset) -> sparse.Duality:
        return sparse.duality(*cloud.particles, data.x, data.y, lam)

    def course(flow: Flow, end: float) -> tuple[np.ndarray, sparse.Duality, Polar]:
        ts = jnp.concatenate([jnp.zeros(1), jnp.geomspace(end / 256, end, 17).at[-1].set(end)])

        def one(x: jax.Array, y: jax.Array) -> tuple[sparse.Duality, Polar]:
            data = Dataset(x, y, weights="sum")
            sol = solve(flow, cloud, data, end, ts=ts, observe=watch, solver="sliding", step=step)
            return sol.observed, sol.final.particles

        return np.asarray(ts), *jax.jit(jax.vmap(one))(jnp.asarray(x), jnp.asarray(y))

    times, found, ends = course(uni.canonical(variation=lam), end)
    fixed_times, fixed, _ = course(uni.radial(variation=lam), fixed_end)
    excess, fixed_excess = (np.asarray(u.primal) / minimum - 1 for u in (found, fixed))  # (draws, times)
    bound = np.asarray(found.bound) / lam
    grid = np.linspace(-1, 1, 401)
    features = jax.nn.relu(
        grid[None, :, None] * jnp.cos(ends.theta)[:, None, :] + jnp.sin(ends.theta)[:, None, :]
    )
    network = np.asarray(jnp.mean(features * ends.r[:, None, :], axis=-1))
    wanted = np.stack([np.asarray(b.function()(grid)) for b in best])
    gap = float(np.max(np.abs(network - wanted)))
    duality_gap = float(max((b.primal - b.dual) / b.primal for b in best))
    rise = max(float(np.max(np.diff(u))) for u in (excess, fixed_excess))
    return Outcome(
        "004/sparse-limit",
        "regularised, the flow finds the function of least weighted total variation of f' (16), (17)",
        "true, with the weight sqrt(1 + x^2) that (17) leaves out, on every data set: the certificate |F| <= lam "
        "closes. With fixed directions it is much slower, and ends at the best measure on those directions",
        {
            "times": times,
            "excess": excess,
            "bound": bound,
            "fixed_times": fixed_times,
            "fixed_excess": fixed_excess,
            "minimum": minimum[:, 0],
            "x": x,
            "y": y,
            "grid": grid,
            "f": network,
            "f_best": wanted,
        },
        (
            Criterion("duality gap of the reference", duality_gap, -1, 1e-8),
            Criterion("worst excess over the minimum at the end", float(excess[:, -1].max()), -1, 1e-3),
            Criterion("worst sup |F| / lam at the end", float(bound[:, -1].max()), 0.99, 1.02),
            Criterion("least excess over the minimum", float(excess.min()), -1e-8),
            Criterion("largest rise of the energy", rise, -1, 1e-9),
            Criterion("functions differ at the end", gap, 0, 0.02),
            Criterion("fixed directions, worst excess", float(fixed_excess[:, -1].max()), -1e-8, 1e-2),
        ),
    )
