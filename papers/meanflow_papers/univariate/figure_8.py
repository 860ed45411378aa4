"""Figure 8: three widths from the default initialization."""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import meanflow as mf
from meanflow.measures import Affine
from meanflow.plots.style import panels
from meanflow.univariate import balance
from meanflow_papers.entry import Arguments, entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.univariate.pictures import GRID, draw_state, journey
from meanflow_papers.univariate.setup import last, sinusoid, train


def width_journeys(outcome: Outcome, arguments: Arguments) -> Arrays:
    """004/figure-8: functions and neurons of the three networks after training."""
    data, found = sinusoid(), {}
    for width in arguments["widths"]:
        key = jax.random.fold_in(jax.random.key(arguments["seed"]), width)
        a, b, c = jax.random.uniform(key, (3, width), minval=-1.0)
        start = mf.Affine(a, b, c / width ** arguments["power"])
        run = jax.jit(journey, static_argnums=(2, 4))(
            start, data, arguments["epochs"], mf.KernelStep(0.5, 50), "one"
        )
        found[width] = run
    return {"grid": GRID, "x": data.x, "y": data.y, "runs": found}


def draw(data: Arrays) -> Figure:
    """Functions and neurons of three widths."""
    figure, grid = panels(2, len(data["runs"]), width=3.3, height=2.8)
    for k, (width, run) in enumerate(data["runs"].items()):
        r, theta = np.asarray(run["r"])[-1], np.asarray(run["theta"])[-1]
        top, bottom = grid[k], grid[len(data["runs"]) + k]
        draw_state(top, bottom, data, run["f"], r, theta)
        top.set_title(f"$m = {width}$: rms $\\Delta\\theta$ = {float(data['turn'][k]):.2g}")
    return figure


@entry(
    "004/figure-8",
    title="20, 200 and 2000 neurons from the default initialization",
    minutes=(0.4, 0.4),
    verdict="corrected",
    setup="20 samples of sin(2 pi x), alpha = 1, c ~ U(-1/m, 1/m), 10000 epochs.",
    draw=draw,
    picture=width_journeys,
)
def figure_8(
    epochs: int = 10000, widths: tuple[int, ...] = (20, 200, 2000), seed: int = 8, power: float = 1.0
) -> Outcome:
    """Train 20, 200 and 2000 neurons from the default initialization, outer weights U(-m^-power, m^-power).

    The paper claims that fewer neurons make delta larger during training. Decisive are the change of the
    mean delta, which is small, and the share c^2/(c^2 + n^2), n = |(a, b)|, which falls with the width and
    with it the turning.
    """
    data = sinusoid()
    rows = []
    for width in widths:
        a, b, c = jax.random.uniform(jax.random.fold_in(jax.random.key(seed), width), (3, width), minval=-1.0)
        start = Affine(a, b, c / width**power)
        loss, stats, end = train(data, epochs, 50, 8, "one")(start, 1.0, 1.0, 0.5)
        loss, stats = last((loss, stats))
        moved = jnp.mean(balance.balance(end)) - jnp.mean(balance.balance(start))
        rows.append({"loss": loss, "delta": jnp.mean(balance.balance(end)), "delta_change": moved, **stats})
    table = {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}
    return Outcome(
        "004/figure-8",
        "fewer neurons make delta larger during training, hence adaptive",
        "delta hardly moves; what falls with the width is c^2/(c^2 + n^2), and with it the turning of the neurons",
        {"width": np.array(widths), **table},
        (
            Criterion("turn falls by", float(table["turn"][0] / table["turn"][-1]), 10),
            Criterion("c^2 fraction falls by", float(table["fraction"][0] / table["fraction"][-1]), 10),
            Criterion("change of the mean delta", float(np.max(np.abs(table["delta_change"]))), 0, 0.05),
        ),
    )
