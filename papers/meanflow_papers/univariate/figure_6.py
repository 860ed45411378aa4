"""Figure 6: 1000 neurons on a square wave at the two extreme balances."""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from meanflow.measures import Cloud
from meanflow.plots import plane, traces
from meanflow.univariate import balance
from meanflow_papers.entry import Arguments, entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.style import no_legend, panels
from meanflow_papers.univariate.pictures import (
    balance_title,
    draw_state,
    journeys_by_balance,
    legend_of_states,
)
from meanflow_papers.univariate.setup import layer_rates, random_neurons, square_wave, train

# what the whole is of which the six fullest bins are a part, and the least share asked for
READINGS = (
    ("concentration", "of the window", 0.95),
    ("concentration_of_all", "of all jumps", 0.9),
    ("concentration_of_live", "of live neurons", 0.9),
)


def extremes(outcome: Outcome, arguments: Arguments) -> Arrays:
    """004/figure-6: the first seed's function, neurons and their paths for both extremes."""
    key = jax.random.split(jax.random.key(6), arguments["seeds"])[0]
    settings = ([-np.inf, np.inf], [1.0, 0.1])
    return journeys_by_balance(square_wave(), key, arguments["width"], arguments["epochs"], settings)


def draw(data: Arrays) -> Figure:
    """Function, neurons and paths of 100 neurons for both extremes, and the share of knots on samples in time."""
    runs, deltas, later = data["runs"], np.asarray(data["run_delta"]), data["later"]
    figure, grid = panels(2, 4, width=3.3, height=3.3)
    pick = np.random.default_rng(0).permutation(np.asarray(runs["r"]).shape[-1])[:100]
    epochs = np.asarray(data["epoch"])
    for row, delta in enumerate(deltas):
        function, neurons, paths, course = grid[4 * row : 4 * row + 4]
        r, theta = np.asarray(runs["r"])[row], np.asarray(runs["theta"])[row]
        reach = float(np.quantile(np.abs(r[-1]), 0.995)) * 1.1
        draw_state(
            function,
            neurons,
            data,
            np.asarray(runs["f"])[row],
            r[-1],
            theta[-1],
            reach,
            later=np.asarray(later["f"])[row],
        )
        losses = f"$L$ = {float(np.asarray(runs['loss'])[row]):.2g}, later {float(np.asarray(later['loss'])[row]):.2g}"
        function.set_title(f"{balance_title(delta)}: {losses}")
        neurons.set_title("neurons at the end")
        uv = np.abs(r)[..., None] * np.stack([np.cos(theta), np.sin(theta)], axis=-1)
        plane(r[-1, pick], theta[-1, pick], paths, samples=data["x"], paths=uv[:, pick], reach=reach)
        no_legend(paths)
        paths.set_title("paths of 100 neurons")
        curves = {
            "knots on samples": np.asarray(data["share"])[row],
            "slope jumps in 6 bins": np.asarray(data["concentration"])[row],
            "dead neurons": np.asarray(data["dead"])[row],
        }
        traces(epochs, curves, course, xlabel="epoch", ylabel="share (median and range)")
        course.set_ylim(0, 1.03)
        course.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, 1.16), ncols=3, columnspacing=0.8)
    legend_of_states(figure, f"after {epochs[-1]:.0f} epochs", f"after {int(later['epochs'])} larger steps")
    return figure


@entry(
    "004/figure-6",
    title="1000 neurons on a square wave: delta = -inf against delta = +inf, with their paths",
    claims=(
        (
            "Appendix D",
            "if delta = -inf, the neurons move radially away from the origin and thus the knot "
            "positions do not change (top row). In stark contrast, if delta = inf, the neurons adapt "
            'to the input data, and the knots "stick" to input samples (bottom row).',
        ),
    ),
    minutes=(0.26, 0.26),
    verdict="corrected",
    setup="ten samples of a square wave, alpha = sqrt m, 10000 epochs, 6 seeds; one network 50000 "
    "epochs at 0.5/lambda_max.",
    draw=draw,
    picture=extremes,
)
def figure_6(epochs: int = 10000, seeds: int = 6, width: int = 1000) -> Outcome:
    """Train 1000 neurons on a square wave at delta = -inf and at delta = +inf.

    The paper claims that neurons move radially at -inf and cluster at the samples at +inf. Decisive are
    the concentration of slope jumps at +inf at the end, and the largest share of knots on samples on the way: this
    share rises and falls with time, and the whole course is kept and drawn. (At -inf neurons cannot turn.)
    """
    data = square_wave()
    saves = 25
    run = train(data, epochs, 20, 6, saves=saves)
    settings = (jnp.array([-jnp.inf, jnp.inf]), jnp.array([1.0, 0.1]))

    def one(key: jax.Array, delta: jax.Array, kappa: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        kp, kc = layer_rates(delta)
        w = balance.lift(Cloud(random_neurons(key, width), labels=delta), "sqrt").particles
        loss, stats, _ = run(w, kp, kc, kappa)
        return loss, stats

    keys = jax.random.split(jax.random.key(6), seeds)
    loss, stats = jax.vmap(lambda d, k: jax.vmap(lambda u: one(u, d, k))(keys))(*settings)
    course = {name: np.asarray(value) for name, value in stats.items()}  # (deltas, seeds, times)
    middle = {name: np.median(value[..., -1], axis=1) for name, value in course.items()}
    share = np.median(course["share"][1], axis=0)
    largest, least = float(share.max()), float(share[1:].min())
    left = np.median(np.asarray(loss)[1] / np.asarray(loss)[1, :, :1], axis=0)[share.argmax()]
    return Outcome(
        "004/figure-6",
        f"at delta = +inf {middle['concentration'][1]:.3f} of the slope jumps inside the window end in six bins. How "
        f"many knots are on samples varies with time: medians between {least:.2f} and {largest:.2f} on the way to "
        f"epoch {epochs}, and with the initial scale (figure-6-course); {left:.2f} of the loss is left where it is "
        f"largest. {middle['dead'][1]:.0%} of the neurons are dead at the end, "
        f"{np.median(course['dead'][1, :, 0]):.0%} at the start",
        {
            "delta": settings[0],
            "epoch": np.linspace(0, epochs, saves + 1),
            "loss": np.asarray(loss),
            **course,
        },
        (
            *(
                Criterion(f"concentration_6 at +inf, {what}", float(middle[name][1]), low, 1)
                for name, what, low in READINGS
            ),
            Criterion("largest share on the way at +inf", largest, 0.5, 1),
            # one per cent of the loss at the start would be called a fit
            Criterion("loss left at +inf when the share is largest", float(left), low=0.01),
        ),
    )
