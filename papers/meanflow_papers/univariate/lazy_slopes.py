"""How far neurons turn until the data are fitted, against the width."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from meanflow import univariate as uni
from meanflow.measures import Affine, Cloud, Dataset
from meanflow.solvers import solve
from meanflow_papers.entry import entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.pictures import convergence
from meanflow_papers.style import COLORS, PALE, below, panels
from meanflow_papers.univariate.setup import rms_turn


def draw(data: Arrays) -> Figure:
    """Turning of the neurons against the width, for three scalings."""
    figure, (ax,) = panels(1, 1, width=6.0, height=4.4)
    turns = np.asarray(data["turn"])
    named = {
        rf"$\alpha = m^{{{p:g}}}$": row for p, row in zip(np.asarray(data["powers"]), turns, strict=True)
    }
    convergence(
        data["widths"], named, ax, ylabel=r"rms $\Delta\theta$ when the loss is $10^{-3}$ of its start"
    )
    widths = np.asarray(data["widths"], float)
    for k, (power, row) in enumerate(zip(np.asarray(data["powers"]), turns, strict=True)):
        ax.fill_between(
            widths,
            row * np.exp(-2 * np.asarray(data["turn_error"])[k]),
            row * np.exp(2 * np.asarray(data["turn_error"])[k]),
            color=COLORS[k],
            alpha=0.2,
            lw=0,
        )
        label = "equally spaced angles" if k == 0 else None
        ax.plot(widths, np.asarray(data["turn_even"])[k], "x", color=COLORS[k], label=label)
        guide = row[-1] * (widths / widths[-1]) ** (power - 1)
        ax.plot(widths, guide, color=PALE, ls="--", lw=1, zorder=0, label="slope $p - 1$" if k == 0 else None)
    ax.fill_between([], [], color=PALE, alpha=0.4, label="two standard errors of the draws")
    below(ax, columns=2)
    return figure


def _turn_until_fitted(
    theta: jax.Array, alpha: jax.Array, end: jax.Array, *, data: Dataset
) -> tuple[jax.Array, jax.Array]:
    """Return how far the neurons have turned when the loss is 1e-3 of its start, and whether it got there by ``end``.

    Args:
        theta: angles (m/2,); each becomes two neurons with c = 1 and c = -1, so that f is 0 at the start.
        alpha: scale of the network.
        end: time on the lazy clock.
        data: what is fitted.
    """
    # the lazy clock makes one horizon fit every alpha; the first save below the target is used
    ts = jnp.concatenate([jnp.zeros(1), jnp.geomspace(0.1, end, 200).at[-1].set(end)])
    turned = lambda flow, cloud, data, start: rms_turn(start.particles, cloud.particles)
    sign = jnp.ones_like(theta)
    both = jnp.concatenate([theta, theta])
    cloud = Cloud(Affine(jnp.cos(both), -jnp.sin(both), jnp.concatenate([sign, -sign])))
    flow = uni.full(alpha=alpha)
    run = solve(flow, cloud, data, end, ts=ts, observe=turned, solver="sliding", step=0.3, clock="lazy")
    fitted = run.energy < 1e-3 * 0.5 * jnp.sum(data.y**2)
    return run.observed[jnp.argmax(fitted)], fitted[-1]


@entry(
    "004/lazy-slopes",
    title="how far neurons turn until the data are fitted, against the width, for alpha = m^p",
    claims=(
        (
            "Section 1.2",
            "when alpha(m) = o(m), the variation of each neuron will asymptotically go to zero (lazy "
            "regime), so our local analysis translates into a global one.",
        ),
        (
            "Section 3.2, after equation (21)",
            "if alpha(m) = o(m), the radial component will dominate as m increases.",
        ),
    ),
    small={"widths": (400, 1600, 6400)},
    minutes=(0.99, 1.5),
    verdict="corrected",
    setup="6 samples, paired neurons at random angles, lazy clock, loss down to 1e-3.",
    draw=draw,
)
def lazy_slopes(
    widths: tuple[int, ...] = (100, 400, 1600, 6400),
    powers: tuple[float, ...] = (0.0, 0.25, 0.5),
    neurons: int = 12800,
) -> Outcome:
    """Measure how far neurons turn until the data are fitted, against the width, for alpha = m^power.

    The paper claims that alpha = o(m) makes the motion of each neuron vanish and that the radial component
    dominates. Angles are drawn uniformly, each with both signs of c, so that f_0 = 0. Narrow networks vary
    more from draw to draw: width m gets ``neurons``/m draws, seeds 0, 1, ... A slope is fitted to the means
    of log(turn); its standard error is that of the draws.

    Decisive is the slope of the turning in the width, power - 1 within 0.05.
    """
    x = jnp.linspace(-1, 1, 6)
    data = Dataset(x, jnp.sin(2.5 * x) + 0.3 * x, weights="sum")
    one = partial(_turn_until_fitted, data=data)
    sweep = jax.jit(jax.vmap(jax.vmap(one, (0, None, None)), (None, 0, None)))
    drawn, spaced, reached = [], [], True
    for width in widths:
        alphas = float(width) ** jnp.array(powers)
        half = width // 2
        keys = jax.vmap(jax.random.key)(jnp.arange(neurons // width))
        theta = jax.vmap(lambda k, n=half: jax.random.uniform(k, (n,), maxval=2 * jnp.pi))(keys)
        even = 2 * jnp.pi * (jnp.arange(half) + 0.5) / half
        end = max(100.0, 300.0 * (100 / width) ** 0.4)  # narrow networks may be slow
        turn, done = (np.asarray(u) for u in sweep(jnp.concatenate([theta, even[None, :]]), alphas, end))
        reached &= bool(done.all())
        drawn.append(np.log(turn[:, :-1]))
        spaced.append(np.log(turn[:, -1]))
    mean = np.array([u.mean(axis=1) for u in drawn])  # (widths, powers)
    error = np.array([u.std(axis=1, ddof=1) / np.sqrt(u.shape[1]) for u in drawn])
    logs = np.log(widths)
    lever = (logs - logs.mean()) / np.sum((logs - logs.mean()) ** 2)  # slope = lever @ values
    slopes, errors = lever @ mean, np.sqrt(lever**2 @ error**2)
    even_slopes = lever @ np.array(spaced)
    listed = lambda values: ", ".join(f"{v:.3f}" for v in values)
    return Outcome(
        "004/lazy-slopes",
        f"the turning vanishes like alpha/m: slopes {listed(slopes)} (errors up to {errors.max():.3f}), with equally "
        f"spaced angles {listed(even_slopes)}. That does not make radial motion dominate: the ratio of turning to "
        "radial motion is c^2/(c^2 + n^2), without alpha",
        {
            "widths": np.array(widths),
            "powers": np.array(powers),
            "turn": np.exp(mean).T,
            "turn_error": error.T,
            "turn_even": np.exp(np.array(spaced)).T,
            "slope": slopes,
            "slope_error": errors,
            "slope_even": even_slopes,
        },
        (
            Criterion("all runs reached the target", float(reached), 1, 1),
            *(
                Criterion(f"slope at alpha = m^{power}", float(slope), power - 1.05, power - 0.95)
                for power, slope in zip(powers, slopes, strict=True)
            ),
        ),
    )
