"""Proposition 1: how the residuals move, by the covariances of the measure on each region."""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import meanflow as mf
from meanflow import univariate as uni
from meanflow_papers.entry import entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.style import COLORS, REFERENCE, below, panels
from meanflow_papers.univariate.setup import random_neurons


def right_side(r: np.ndarray, theta: np.ndarray, x: np.ndarray, rho: np.ndarray) -> np.ndarray:
    """Return the right side of (13) for polar neurons (m,) and sorted samples (s,): minus a sum over the 2s - 1 "
    "regions."""
    tilde = np.stack([x, np.ones_like(x)], axis=1)
    d = np.stack([np.cos(theta), np.sin(theta)], axis=1)
    t = np.stack([-d[:, 1], d[:, 0]], axis=1)
    each = r[:, None, None] ** 2 * t[:, :, None] * t[:, None] + d[:, :, None] * d[:, None]
    sees = d @ tilde.T >= 0  # (m, s)
    total = np.zeros(len(x))
    for pattern in np.unique(sees, axis=0):
        inside = np.all(sees == pattern, axis=1)
        sigma = each[inside].sum(0) / len(r)
        total -= pattern * (tilde @ (sigma @ ((rho * pattern) @ tilde)))
    return total


def draw(data: Arrays) -> Figure:
    """Rates of the residuals along a run by differences and by (13), and how far apart they are."""
    figure, (left, right) = panels(1, 2, width=5.0, height=4.0)
    times = np.asarray(data["times"])
    rates, sides = np.asarray(data["rates"]), np.asarray(data["right side"])  # (times, samples)
    for j in range(rates.shape[1]):
        left.plot(times, sides[:, j], color=COLORS[j])
        left.plot(times[::10], rates[::10, j], "o", mfc="none", ms=4, color=COLORS[j], label=f"$x_{j + 1}$")
    left.plot([], [], color=REFERENCE, label="right side of (13)")
    left.plot([], [], "o", mfc="none", ms=4, color=REFERENCE, label="differences of the solution")
    left.set(xlabel="$t$", ylabel=r"$\dot\rho_j$", title="rates of the residuals, canonical flow")
    below(left, columns=4)
    right.plot(
        times,
        np.linalg.norm(rates - sides, axis=1) / np.linalg.norm(sides, axis=1),
        color=COLORS[0],
        label="relative distance of the two",
    )
    right.plot(times, data["on rays"], color=COLORS[1], label="share of neurons on a ray")
    right.set(xlabel="$t$", ylim=(0, 1.5))
    right.set_yscale("symlog", linthresh=1e-4)
    right.set_title("(13) holds while no neurons sit on rays")
    below(right, columns=2)
    return figure


@entry(
    "004/proposition-1",
    title="rates of the residuals by the covariances of the regions",
    claims=(
        (
            "Proposition 1, equation (13)",
            "dot rho_j(t) = -tilde x_j^T sum_{k; A_k subset B_j} Sigma_k(t) (sum_{j' in C_k} rho_{j'}(t) tilde x_{j'})",
        ),
    ),
    minutes=(0.03, 0.03),
    verdict="corrected",
    setup="canonical flow in mean-field time, 200 neurons, five samples, sliding solver; 20 random clouds.",
    draw=draw,
)
def proposition_1(width: int = 200, t1: float = 1.0, saves: int = 200, clouds: int = 20) -> Outcome:
    """Compare (13) with the derivative of the residuals along the velocity, and with differences of a solution.

    Decisive are the largest relative error over random clouds, where no neuron sits on a ray, and what happens along a
    solution, in which rays catch neurons: on a ray the velocity is none of those of its two regions, and (13) is off by
    more than a tenth at the end.
    """
    x = np.array([-1.0, -0.4, 0.1, 0.5, 1.0])
    data, flow = mf.Dataset(x, np.array([1.0, -0.5, 0.8, -1.0, 0.6]), weights="sum"), uni.canonical()
    worst = 0.0
    for seed in range(clouds):
        cloud = mf.Cloud(random_neurons(jax.random.key(seed), width))
        v = mf.velocity(flow, cloud, data)
        f, rate = jax.jvp(lambda w, c=cloud: mf.predict(flow, c.at(w), data.x), (cloud.particles,), (v,))
        r, theta = (np.asarray(u) for u in cloud.particles)
        ours = right_side(r, theta, x, np.asarray(f - data.y))
        worst = max(worst, float(np.linalg.norm(ours - rate) / np.linalg.norm(rate)))
    times = np.linspace(0.0, t1, saves + 1)
    start = mf.Cloud(random_neurons(jax.random.key(0), width))
    sol = mf.solve(flow, start, data, t1, ts=times, solver="sliding", step=t1 / saves / 4)
    assert sol.clouds is not None  # whole clouds were saved
    r, theta = (np.asarray(u) for u in sol.clouds.particles)  # (times, m)
    f = np.asarray(jax.vmap(lambda c: mf.predict(flow, c, jnp.asarray(x)))(sol.clouds))
    rho = f - np.asarray(data.y)
    sides = np.stack([right_side(u, v, x, p) for u, v, p in zip(r, theta, rho, strict=True)])
    rates = np.gradient(rho, times, axis=0, edge_order=2)
    tilde = np.stack([x, np.ones_like(x)], axis=1)
    gaps = np.abs(np.stack([np.cos(theta), np.sin(theta)], axis=-1) @ tilde.T) / np.linalg.norm(tilde, axis=1)
    caught = np.mean(np.any(gaps < 1e-9, axis=-1), axis=1)
    error = np.linalg.norm(rates - sides, axis=1) / np.linalg.norm(sides, axis=1)
    early = slice(1, saves // 10)
    return Outcome(
        "004/proposition-1",
        f"true, to {worst:.0e}, of measures without mass on the rays of the samples, in mean-field time. The flow "
        "brings "
        f"mass there: along a solution differences agree with (13) within {error[early].min():.1%} at first; at t "
        f"= {t1:g}, "
        f"where {caught[-1]:.0%} of the neurons sit on rays, it is off by {error[-1]:.0%}",
        {"times": times, "rates": rates, "right side": sides, "on rays": caught},
        (
            Criterion("random clouds: largest relative error", worst, high=1e-10),
            Criterion(
                "along a solution, first tenth: least relative error", float(error[early].min()), high=0.01
            ),
            Criterion("along a solution, at the end: share of neurons on rays", float(caught[-1]), low=0.1),
            Criterion("along a solution, at the end: relative error", float(error[-1]), low=0.1),
        ),
    )
