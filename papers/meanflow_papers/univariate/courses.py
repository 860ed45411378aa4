"""What Figures 5 and 6 become later.

The paper shows its figures at one time. Its story of knots gathering at the samples depends on that time.
"""

import jax
import numpy as np
from matplotlib.figure import Figure

from meanflow.plots.style import COLORS, PALE, panels
from meanflow_papers.entry import entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.univariate.setup import planar_start, sinusoid, square_wave, train


def _draw_course(data: Arrays, time: str, label: str, logarithmic: bool) -> Figure:
    """Share of knots on samples, concentration and loss against time; medians over draws, and the draws."""
    figure, grid = panels(1, 3, width=3.0, height=2.7)
    rows = {"share": "share of knots on samples", "concentration": "concentration", "loss": "loss $L$"}
    for ax, (name, text) in zip(grid, rows.items(), strict=True):
        values = np.atleast_2d(np.asarray(data[name]))
        if len(values) > 1:
            ax.plot(np.asarray(data[time]), values.T, color=PALE, lw=0.8)
        ax.plot(np.asarray(data[time]), np.median(values, axis=0), color=COLORS[0], marker="o", ms=3)
        ax.set(xlabel=label, ylabel=text, xscale="log" if logarithmic else "linear")
        if name != "loss":
            ax.set_ylim(0, 1.02)
    return figure


def draw_late(data: Arrays) -> Figure:
    """Knots on samples, concentration and loss against epochs."""
    return _draw_course(data, "epoch", "epoch", logarithmic=False)


@entry(
    "004/figure-5-late",
    title="Figure 5 at delta = +inf ten times later: most knots have left the samples again",
    small={"seeds": 3},
    minutes=(0.5, 0.8),
    verdict="corrected",
    setup="200 neurons, 20 samples of sin(2 pi x), 100000 epochs at 0.5/lambda_max.",
    draw=draw_late,
)
def figure_5_late(epochs: int = 100_000, seeds: int = 6, kappa: float = 0.5, saves: int = 10) -> Outcome:
    """Continue Figure 5 at delta = +inf ten times longer and with larger steps, from the same seeds.

    The paper claims that clusters of knots emerge at the samples. Decisive are medians at the end: most
    knots have left the samples again, while the slope jumps stay in few places and the loss is lower.
    """
    run = train(sinusoid(), epochs, 20, 8, saves=saves)
    keys = jax.random.split(jax.random.key(5), seeds)
    losses, stats, _ = jax.vmap(lambda k: run(planar_start(k, 200), 1.0, 0.0, kappa))(keys)
    middle = {name: np.median(value, axis=0) for name, value in stats.items()}
    loss = np.median(losses, axis=0)
    share, concentration = middle["share"], middle["concentration"]
    return Outcome(
        "004/figure-5-late",
        "as delta grows, clusters of knots emerge at the samples",
        "at delta = +inf most knots leave the samples again while the fit improves; the slope jumps stay in few places",
        {"epoch": np.linspace(0, epochs, saves + 1), "loss": loss, **middle},
        (
            # medians of the reference runs: share .29, concentration_8 .84, loss .026
            Criterion("share at the end", float(share[-1]), 0.19, 0.39),
            Criterion("concentration_8 at the end", float(concentration[-1]), 0.74, 0.94),
            Criterion("loss at the end", float(loss[-1]), 0.013, 0.052),
        ),
    )


def draw_course(data: Arrays) -> Figure:
    """Knots on samples, concentration and loss against flow time."""
    return _draw_course(data, "times", "$t$", logarithmic=True)


@entry(
    "004/figure-6-course",
    title="Figure 6 at delta = +inf as a function of time: few places, but not always the samples",
    small={"times": (10.0, 40.0, 120.0, 300.0), "seeds": 4},
    minutes=(0.3, 1.0),
    verdict="corrected",
    setup="1000 neurons on a square wave, step 0.02.",
    draw=draw_course,
)
def figure_6_course(
    times: tuple[float, ...] = (10.0, 40.0, 120.0, 300.0, 1000.0, 3000.0), seeds: int = 6, width: int = 1000
) -> Outcome:
    """Follow Figure 6 at delta = +inf in time, by gradient descent with step 0.02, for several draws.

    The paper claims that neurons cluster at the samples. Decisive are the concentration in few places,
    which stays high, and how much the share of knots on samples changes over time, which is a lot.
    """
    rate, every = 0.02, 10.0
    saves = round(times[-1] / every)
    run = train(square_wave(), round(times[-1] / rate), None, 6, saves=saves)
    keys = jax.random.split(jax.random.key(6), seeds)
    loss, stats, _ = jax.vmap(lambda k: run(planar_start(k, width), 1.0, 0.0, rate))(keys)
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
            # a single reference run had: shares .64 .59 .20 .73 .39 .62, concentration_6 .945 .924 .902 .997 .998 .999
            Criterion("least median concentration_6", float(np.median(concentration, axis=0).min()), 0.85, 1),
            Criterion("median concentration_6 at the end", float(np.median(concentration[:, -1])), 0.95, 1),
            Criterion("median over draws of max - min share", float(np.median(swing)), 0.3, 1),
        ),
    )
