"""Figure 8: three widths from the default initialization."""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import meanflow as mf
from meanflow.measures import Affine
from meanflow.univariate import balance
from meanflow_papers.entry import Arguments, entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.style import COLORS, panels
from meanflow_papers.univariate.pictures import GRID, draw_state, journey, legend_of_states
from meanflow_papers.univariate.setup import last, sinusoid, train


def draw_start(seed: int, width: int, power: float) -> Affine:
    """Draw a, b ~ U(-1, 1) and c ~ U(-m^-power, m^-power)."""
    key = jax.random.fold_in(jax.random.key(seed), width)
    a, b, c = jax.random.uniform(key, (3, width), minval=-1.0)
    return Affine(a, b, c / width**power)


def start_balances(width: int, power: float, draws: int) -> tuple[float, float, float]:
    """Return mean, spread and expectation 1/(3 m^(2 power)) - 2/3 of a network's mean delta at the start."""
    a, b, c = jax.random.uniform(jax.random.key(width), (3, draws, width), minval=-1.0)
    delta = jnp.mean(balance.balance(Affine(a, b, c / width**power)), axis=1)
    return float(jnp.mean(delta)), float(jnp.std(delta)), width ** (-2 * power) / 3 - 2 / 3


def width_journeys(outcome: Outcome, arguments: Arguments) -> Arrays:
    """004/figure-8: functions and neurons of the three networks after training."""
    data, found = sinusoid(), {}
    # the start whose narrow network is stuck least: a median network of 20 neurons does not fit at all
    best = int(np.argmin(outcome.data["loss"][:, 0]))
    for width in arguments["widths"]:
        start = draw_start(arguments["seeds"][best], width, arguments["power"])
        trained = jax.jit(journey, static_argnums=(2, 4))
        found[width] = trained(start, data, arguments["epochs"], mf.KernelStep(0.5, 50), "one")
        long = trained(start, data, 5 * arguments["epochs"], mf.KernelStep(0.5, 50), "one")
        found[width] |= {"later": long["f"], "later_loss": long["loss"]}
    losses = ", ".join(f"{loss:.2g}" for loss in np.sort(outcome.data["loss"][:, 0]))
    words = f"drawn: of {len(arguments['seeds'])} starts the one with the least loss at $m = {arguments['widths'][0]}$"
    shown = f"{words} ({losses})"
    return {
        "grid": GRID,
        "x": data.x,
        "y": data.y,
        "runs": found,
        "epochs": arguments["epochs"],
        "shown": shown,
    }


def draw(data: Arrays) -> Figure:
    """Functions and neurons of three widths; balance at the start, and turning, by width."""
    columns = len(data["runs"])
    figure, grid = panels(2, columns + 1, width=3.2, height=3.2)
    for k, (width, run) in enumerate(data["runs"].items()):
        r, theta = np.asarray(run["r"])[-1], np.asarray(run["theta"])[-1]
        top, bottom = grid[k], grid[columns + 1 + k]
        draw_state(top, bottom, data, run["f"], r, theta, later=run["later"])
        top.set_title(f"$m = {width}$: $L$ = {float(run['loss']):.2g}, later {float(run['later_loss']):.2g}")
        top.set_ylim(-1.6, 1.6)
    widths, ax = np.asarray(data["width"]), grid[columns]
    ax.errorbar(
        widths,
        data["delta_at_start"],
        yerr=data["spread_of_delta"],
        fmt="o",
        color=COLORS[0],
        capsize=3,
        label="one network: mean and sd",
    )
    ax.plot(widths, data["expected_delta"], "_", ms=18, color=COLORS[1], label=r"$E\delta = 1/(3m^2) - 2/3$")
    ax.set(xscale="log", xlabel="width $m$", ylabel=r"mean $\delta$ of a network at the start")
    ax.set_xlim(widths.min() / 2, 2 * widths.max())
    ax.set_ylim(top=float(np.max(data["delta_at_start"] + data["spread_of_delta"])) + 0.12)
    ax.legend(fontsize=7.5, loc="upper right")
    ax = grid[-1]
    for k, (name, label) in enumerate(
        (("turn", r"rms turn $\Delta\theta$"), ("fraction", "median $c^2/(c^2 + n^2)$"))
    ):
        values = np.asarray(data[name])
        ax.plot(widths, np.median(values, axis=0), marker="os"[k], color=COLORS[k], label=label)
        ax.fill_between(widths, values.min(0), values.max(0), color=COLORS[k], alpha=0.18, lw=0)
    ax.set(xscale="log", yscale="log", xlabel="width $m$", ylabel="after training, five starts")
    ax.legend(fontsize=7.5, loc="lower left")
    figure.suptitle(data["shown"], fontsize=9)
    legend_of_states(figure, f"after {int(data['epochs'])} epochs", f"after {5 * int(data['epochs'])} epochs")
    return figure


@entry(
    "004/figure-8",
    title="20, 200 and 2000 neurons from the default initialization",
    claims=(
        (
            "Appendix D",
            "as we scale down the number of neurons, the value of delta grows, making the network "
            "function adapt more to the data.",
        ),
    ),
    minutes=(1.08, 1.08),
    verdict="corrected",
    setup="20 samples of sin(2 pi x), alpha = 1, c ~ U(-1/m, 1/m), 10000 epochs, five starts "
    "(one of them drawn, and 50000 epochs); delta at the start from 2000 draws.",
    draw=draw,
    picture=width_journeys,
)
def figure_8(
    epochs: int = 10000,
    widths: tuple[int, ...] = (20, 200, 2000),
    seeds: tuple[int, ...] = (0, 1, 2, 3, 8),
    power: float = 1.0,
) -> Outcome:
    """Train 20, 200 and 2000 neurons from the default initialization, outer weights U(-m^-power, m^-power).

    The paper says that delta at the start grows as the width shrinks, and that this makes the function adaptive. It
    does grow: E delta = 1/(3 m^2) - 2/3. Decisive are how much that is beside the spread of one draw, and what else
    falls with the width: the share c^2/(c^2 + n^2), n = |(a, b)|, and with it the turning.
    """
    data = sinusoid()
    rows: dict[str, list[list[float]]] = {}
    for seed in seeds:
        ends = []
        for width in widths:
            start = draw_start(seed, width, power)
            loss, stats, _ = train(data, epochs, 50, 8, "one")(start, 1.0, 1.0, 0.5)
            ends.append(last({"loss": loss, **stats}))
        for name in ends[0]:
            rows.setdefault(name, []).append([float(end[name]) for end in ends])
    table = {name: np.array(values) for name, values in rows.items()}  # (seeds, widths)
    draws = 2000
    means, spreads, expected = (
        np.array(u) for u in zip(*(start_balances(w, power, draws) for w in widths), strict=True)
    )
    errors = np.abs(means - expected) / (spreads / np.sqrt(draws))
    growth = expected[0] - expected[-1]
    falls = {name: table[name][:, 0] / table[name][:, -1] for name in ("turn", "fraction")}
    return Outcome(
        "004/figure-8",
        f"E delta = 1/(3m^2) - 2/3 does grow as m shrinks from {widths[-1]} to {widths[0]}, but by {growth:.1e}: "
        f"{growth / spreads[0]:.3f} of the spread of one draw at m = {widths[0]}, which cannot be the reason. What "
        f"falls with the width is c^2/(c^2 + n^2), by {falls['fraction'].min():.0f} to "
        f"{falls['fraction'].max():.0f} times over {len(seeds)} starts, and so does the turning of the neurons, by "
        f"{falls['turn'].min():.0f} to {falls['turn'].max():.0f}",
        {
            "width": np.array(widths),
            "delta_at_start": means,
            "spread_of_delta": spreads,
            "expected_delta": expected,
            **table,
        },
        (
            Criterion("E delta at the start, distance to the formula in standard errors", errors.max(), 0, 4),
            Criterion("growth of E delta / spread of one draw", float(growth / spreads[0]), 0, 0.01),
            Criterion("turn falls by at least", float(falls["turn"].min()), 10),
            Criterion("c^2 fraction falls by at least", float(falls["fraction"].min()), 1000),
        ),
    )
