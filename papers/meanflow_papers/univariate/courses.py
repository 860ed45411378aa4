"""What Figures 5 and 6 become later.

The paper shows its figures at one time. Its story of knots gathering at the samples depends on that time.
"""

import jax
import numpy as np
from matplotlib.figure import Figure

from meanflow_papers.entry import entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.style import COLORS, DASHES, PALE, below, panels
from meanflow_papers.univariate.setup import planar_start, sinusoid, square_wave, train


def _draw_course(data: Arrays, time: str, label: str, logarithmic: bool) -> Figure:
    """Share of knots on samples, concentration and loss against time; medians over draws, and the draws.

    Where the data have a run from a smaller start, its medians are drawn too.
    """
    figure, grid = panels(1, 3, width=3.9, height=3.4)
    rows = {
        "share": "share of knots on samples",
        "concentration": "concentration (three readings)",
        "loss": "loss $L$",
    }
    times = np.asarray(data[time])
    for ax, (name, text) in zip(grid, rows.items(), strict=True):
        values = np.atleast_2d(np.asarray(data[name]))
        for k, row in enumerate(values):
            ax.plot(times, row, color=PALE, lw=0.8, label="each draw" if k == 0 else None)
        first = "median" if name != "concentration" else "median, of the window"
        ax.plot(times, np.median(values, axis=0), color=COLORS[0], marker="o", ms=3, label=first)
        if "smaller" in data:
            row = np.median(np.asarray(data["smaller"][name]), axis=0)
            words = (
                r"median, start with $|r| \leq 1$"
                if name != "concentration"
                else r"of the window, $|r| \leq 1$"
            )
            ax.plot(times, row, color=COLORS[4], marker="s", ms=3, ls="--", label=words)
        ax.set(xlabel=label, ylabel=text, xscale="log" if logarithmic else "linear")
        if name != "loss":
            ax.set_ylim(0, 1.02)
    for k, what in enumerate(("all", "live")):
        values = np.median(np.atleast_2d(np.asarray(data[f"concentration_of_{what}"])), axis=0)
        words = {"all": "median, of all jumps", "live": "median, of live neurons"}[what]
        grid[1].plot(times, values, color=COLORS[k + 1], ls=DASHES[k + 1], label=words)
    grid[0].axhline(0.1, color=COLORS[3], lw=0.9, ls=":", label="chance, 0.10")
    grid[2].set_yscale("log")
    for ax in grid:
        below(ax, columns=2)
    return figure


def draw_late(data: Arrays) -> Figure:
    """Knots on samples, concentration and loss against epochs."""
    return _draw_course(data, "epoch", "epoch", logarithmic=False)


@entry(
    "004/figure-5-late",
    title="Figure 5 at delta = +inf ten times later: most knots have left the samples again",
    claims=(("Section 4", "Note how as delta gets large, clusters of knots emerge at the sample positions"),),
    small={"seeds": 3},
    minutes=(0.14, 0.8),
    verdict="corrected",
    setup="200 neurons, 20 samples of sin(2 pi x), 100000 epochs at 0.5/lambda_max.",
    draw=draw_late,
)
def figure_5_late(epochs: int = 100_000, seeds: int = 6, kappa: float = 0.5, saves: int = 10) -> Outcome:
    """Continue Figure 5 at delta = +inf ten times longer and with larger steps, from the same seeds.

    The paper claims that clusters of knots emerge at the samples. Decisive are medians at the end beside those when the
    share of knots on samples was largest: less than half of that share is left, and less than half of the loss, while
    more than half of the slope jumps are in eight of 110 bins.
    """
    run = train(sinusoid(), epochs, 20, 8, saves=saves)
    keys = jax.random.split(jax.random.key(5), seeds)
    losses, stats, _ = jax.vmap(lambda k: run(planar_start(k, 200), 1.0, 0.0, kappa))(keys)
    middle = {name: np.median(value, axis=0) for name, value in stats.items()}
    loss = np.median(losses, axis=0)
    share, concentration = middle["share"], middle["concentration"]
    return Outcome(
        "004/figure-5-late",
        f"at delta = +inf most knots leave the samples again while the fit improves: medians of the share "
        f"{share.max():.2f} at most and {share[-1]:.2f} at the end, of the loss {loss[np.argmax(share)]:.2f} there and "
        f"{loss[-1]:.3f} at the end; the slope jumps stay in few places, {concentration[-1]:.2f} of them in eight bins",
        {
            "epoch": np.linspace(0, epochs, saves + 1),
            "loss": np.asarray(losses),
            **{name: np.asarray(value) for name, value in stats.items()},
        },
        (
            Criterion("share at the end / largest share", float(share[-1] / share.max()), 0, 0.5),
            Criterion("concentration_8 at the end", float(concentration[-1]), 0.5, 1),
            Criterion(
                "loss at the end / where the share is largest",
                float(loss[-1] / loss[np.argmax(share)]),
                0,
                0.5,
            ),
        ),
    )


def draw_course(data: Arrays) -> Figure:
    """Knots on samples, concentration and loss against flow time."""
    return _draw_course(data, "times", "$t$", logarithmic=True)


@entry(
    "004/figure-6-course",
    title="Figure 6 at delta = +inf as a function of time: few places, but not always the samples",
    claims=(
        (
            "Appendix D",
            'if delta = inf, the neurons adapt to the input data, and the knots "stick" to input '
            "samples (bottom row).",
        ),
    ),
    small={"times": (10.0, 40.0, 120.0, 300.0), "seeds": 4},
    minutes=(0.1, 2.0),
    verdict="corrected",
    setup="1000 neurons on a square wave, step 0.02, from |r| up to 3 as in Figure 6, and from |r| up to 1.",
    draw=draw_course,
)
def figure_6_course(
    times: tuple[float, ...] = (10.0, 40.0, 120.0, 300.0, 1000.0, 3000.0), seeds: int = 6, width: int = 1000
) -> Outcome:
    """Follow Figure 6 at delta = +inf in time, by gradient descent with step 0.02, for several draws.

    The paper claims that neurons cluster at the samples. Decisive are the concentration in few places,
    which stays high, and how much the share of knots on samples changes over time, which is a lot. From a start with
    amplitudes |r| up to 1 instead of 3 the places are mostly off the samples: at the last time fewer than half of the
    knots are on samples, while the concentration is as high.
    """
    rate, every = 0.02, 10.0
    saves = round(times[-1] / every)
    run = train(square_wave(), round(times[-1] / rate), None, 6, saves=saves)
    keys = jax.random.split(jax.random.key(6), seeds)
    at = [round(t / every) for t in times]

    def course(scale: float) -> Arrays:
        loss, stats, _ = jax.vmap(lambda k: run(planar_start(k, width, scale), 1.0, 0.0, rate))(keys)
        return {name: np.asarray(value)[:, at] for name, value in {"loss": loss, **stats}.items()}

    found, smaller = course(3.0), course(1.0)
    share, concentration = found["share"], found["concentration"]
    swing = share.max(axis=1) - share.min(axis=1)
    apart, gathered = (float(np.median(smaller[name][:, -1])) for name in ("share", "concentration"))
    return Outcome(
        "004/figure-6-course",
        "they gather in few places early and stay so, but whether these are samples changes back and forth with time. "
        f"From a start with |r| up to 1 {gathered:.2f} of the slope jumps are in six bins at the last time, and "
        f"{apart:.2f} of the knots on samples (medians over {seeds} draws; chance is 0.10)",
        {"times": np.array(times), **found, "smaller": smaller},
        (
            # a single reference run had: shares .64 .59 .20 .73 .39 .62, concentration_6 .945 .924 .902 .997 .998 .999
            Criterion("least median concentration_6", float(np.median(concentration, axis=0).min()), 0.85, 1),
            Criterion("median concentration_6 at the end", float(np.median(concentration[:, -1])), 0.95, 1),
            Criterion("median over draws of max - min share", float(np.median(swing)), 0.3, 1),
            Criterion("from |r| up to 1: median share at the end", apart, 0, 0.5),
            Criterion("from |r| up to 1: median concentration_6 at the end", gathered, 0.95, 1),
        ),
    )
