"""Experiments E1 and E2: which frequencies of a signal a coordinate network learns first."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from meanflow.plots.style import COLORS, PALE, below, key, panels, shades
from meanflow_papers.entry import entry
from meanflow_papers.ntk import coordinate
from meanflow_papers.outcome import Arrays, Criterion, Outcome

DRAWS = (
    "the plain network's final error at k = 16 varies from 0.07 to 0.34 between seeds (medians of 3 to 9 seeds: 0.12 "
    "to 0.22), so bounds on its median are met by some draws only; they were not tuned"
)
FREQUENCIES = (1, 2, 4, 8, 16, 32)


def _line(norm: str, octaves: int, rate: float, steps: int, seeds: int) -> dict[str, np.ndarray]:
    """Per-frequency errors (seeds, records, k), training and held-out mean squared errors on the sines."""
    signal = jax.tree.map(lambda a: a.astype(jnp.float32), coordinate.sines(FREQUENCIES))
    apply, params = coordinate.ensemble(
        jax.random.key(0), seeds, 1, norm=norm, octaves=octaves, dtype=jnp.float32
    )
    observe = lambda p: coordinate.frequency_error(apply(p, signal.x), signal.y, FREQUENCIES)
    run = coordinate.fit(
        apply, params, signal.x, signal.y, learning_rate=rate, steps=steps, every=20, observe=observe
    )
    errors = np.asarray(run.observed)
    below = errors <= 0.2
    reached = np.where(below.any(axis=1), run.steps[np.argmax(below, axis=1)], 2 * steps)
    square = lambda z, truth: np.asarray(
        jax.vmap(lambda p: jnp.mean((coordinate.evaluate(apply, p, z, signal.x) - truth) ** 2))(run.params)
    )
    return {
        "errors": errors,
        "steps": run.steps,
        "reached": reached,
        "train": square(signal.x, signal.y),
        "held out": square(signal.held_out, signal.truth),
    }


def _interval(statistic: Callable[..., float], *samples: np.ndarray, draws: int = 4000) -> np.ndarray:
    """(value, low, high): a statistic of independent samples, and its 95 % bootstrap interval."""
    rng = np.random.default_rng(0)
    again = [rng.choice(s, (draws, len(s))) for s in samples]
    low, high = np.quantile([statistic(*rows) for rows in zip(*again, strict=True)], (0.025, 0.975))
    return np.array([statistic(*samples), low, high])


def draw(data: Arrays) -> Figure:
    """Error of each frequency in time, plain and batch norm, and at the end."""
    figure, grid = panels(1, 3, width=3.6, height=3.3)
    colors = shades(len(FREQUENCIES))
    for ax, (name, run) in zip(grid, data.items(), strict=False):
        errors = np.median(run["errors"], axis=0)
        for k, frequency in enumerate(FREQUENCIES):
            ax.plot(run["steps"], errors[:, k], color=colors[k], label=f"$k = {frequency}$")
        ax.axhline(0.2, color=PALE, lw=0.8, ls="--")
        ax.set(xlabel="step", ylabel="relative error of the frequency", yscale="log")
        ax.set_title(name)
    for ax in grid[:2]:
        ax.set_ylim(bottom=max(ax.get_ylim()[0], 1e-5), top=2)
        below(ax, 6, fontsize=7, columnspacing=0.7, handlelength=0.9)
    for k, (name, run) in enumerate(data.items()):
        final = run["errors"][:, -1]
        grid[2].plot(FREQUENCIES, np.median(final, axis=0), marker="os"[k], color=COLORS[k], label=name)
        grid[2].fill_between(FREQUENCIES, final.min(0), final.max(0), color=COLORS[k], alpha=0.18, lw=0)
    grid[2].set_xscale("log", base=2)
    grid[2].set(yscale="log", xlabel="frequency $k$", ylabel="final relative error")
    grid[2].set_title("after training, all seeds")
    key(grid[2])
    return figure


@entry(
    "000/E1",
    title="spectral bias: six sines on raw coordinates, plain against batch norm",
    small={"seeds": 5},
    minutes=(0.7, 2.2),
    setup="256 points, width 128, three hidden layers, Adam with cosine decay, 2000 steps.",
    explained={"final error at k = 16, plain": DRAWS, "held-out error, plain over BN": DRAWS},
    draw=draw,
)
def spectral_bias_line(steps: int = 2000, seeds: int = 16) -> Outcome:
    """E1: fit six unit sines on raw 1-D coordinates, plain and with batch norm on layers 2+.

    The paper claims that batch norm alleviates spectral bias. The learning rates, 1e-2 and 1e-3, are each
    side's best by final training error; the plain side had the larger search. The plain network's final
    error at k = 16 varies by a factor of 5 between seeds, so that the median of a few falls on either side
    of 0.15; the data hold bootstrap intervals.

    Decisive are medians over seeds: the steps until the error at frequency 8 is below 0.2, the final error
    at 16, and the held-out error, each of batch norm against plain.
    """
    plain = _line("none", 0, 1e-2, steps, seeds)
    norm = _line("later", 0, 1e-3, steps, seeds)
    k8, k16 = FREQUENCIES.index(8), FREQUENCIES.index(16)
    speed = np.median(norm["reached"][:, k8]) / np.median(plain["reached"][:, k8])
    ends = [run["errors"][:, -1, k16] for run in (plain, norm)]
    ratio = lambda a, b: np.median(a) / np.median(b)
    for run, end in zip((plain, norm), ends, strict=True):
        run["final, k = 16"] = _interval(np.median, end)
    norm["plain over this, final, k = 16"] = _interval(ratio, *ends)
    norm["plain over this, held out"] = _interval(ratio, plain["held out"], norm["held out"])
    return Outcome(
        "000/E1",
        "batch norm alleviates spectral bias",
        "true with batch norm before the activations (not on the output), and on held-out points",
        {"plain": plain, "batch norm": norm},
        (
            Criterion("steps to error 0.2 at k = 8, BN over plain", speed, 0.0, 0.5),
            Criterion("final error at k = 16, BN", norm["final, k = 16"][0], 0.0, 0.1),
            Criterion("final error at k = 16, plain", plain["final, k = 16"][0], 0.15),
            # the two bounds above ask for 0.15/0.1; of the ratio even the lower end of the interval must hold
            Criterion("final error at k = 16, plain over BN", norm["plain over this, final, k = 16"][1], 1.5),
            Criterion("held-out error, plain over BN", norm["plain over this, held out"][0], 2.0),
        ),
    )


@entry(
    "000/E2",
    title="the same with positional encoding: faster, not better",
    minutes=(0.5, 0.5),
    verdict="corrected",
    setup="as E1 with three octaves, 3 seeds.",
    draw=draw,
)
def spectral_bias_encoded(steps: int = 2000, seeds: int = 3) -> Outcome:
    """E2: fit the same signal with positional encoding (3 octaves), rate 1e-3 on both sides.

    The paper claims that batch norm helps encoded networks too. Decisive are the steps until the error at
    frequency 32 is below 0.2; held-out errors end equal, so nothing is claimed about accuracy.
    """
    plain = _line("none", 3, 1e-3, steps, seeds)
    norm = _line("hidden", 3, 1e-3, steps, seeds)
    last = FREQUENCIES.index(32)
    speed = np.median(norm["reached"][:, last]) / np.median(plain["reached"][:, last])
    return Outcome(
        "000/E2",
        "batch norm helps encoded networks too",
        "it is faster; held-out error ends equal, so no claim of accuracy",
        {"plain": plain, "batch norm": norm},
        (Criterion("steps to error 0.2 at k = 32, BN over plain", speed, 0.0, 0.6),),
    )
