"""Figure 6: 1000 neurons on a square wave at the two extreme balances."""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from meanflow.measures import Cloud
from meanflow.plots.clouds import plane
from meanflow.plots.style import panels
from meanflow.univariate import balance
from meanflow_papers.entry import Arguments, entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.univariate.pictures import balance_title, draw_state, journeys_by_balance
from meanflow_papers.univariate.setup import last, random_neurons, square_wave, train


def extremes(outcome: Outcome, arguments: Arguments) -> Arrays:
    """004/figure-6: the first seed's function, neurons and their paths for both extremes."""
    key = jax.random.split(jax.random.key(6), arguments["seeds"])[0]
    settings = ([-np.inf, np.inf], [1.0, 0.1])
    return journeys_by_balance(square_wave(), key, arguments["width"], arguments["epochs"], settings)


def draw(data: Arrays) -> Figure:
    """Function, neurons and paths of 100 neurons for both extremes."""
    runs, deltas = data["runs"], np.asarray(data["run_delta"])
    figure, grid = panels(2, 3, width=3.5, height=3.1)
    pick = np.random.default_rng(0).permutation(np.asarray(runs["r"]).shape[-1])[:100]
    for row, delta in enumerate(deltas):
        r, theta = np.asarray(runs["r"])[row], np.asarray(runs["theta"])[row]
        reach = float(np.quantile(np.abs(r[-1]), 0.995)) * 1.1
        draw_state(
            grid[3 * row], grid[3 * row + 1], data, np.asarray(runs["f"])[row], r[-1], theta[-1], reach
        )
        grid[3 * row].set_title(f"{balance_title(delta)}: function")
        grid[3 * row + 1].set_title("neurons at the end")
        uv = np.abs(r)[..., None] * np.stack([np.cos(theta), np.sin(theta)], axis=-1)
        plane(
            r[-1, pick], theta[-1, pick], grid[3 * row + 2], samples=data["x"], paths=uv[:, pick], reach=reach
        )
        grid[3 * row + 2].set_title("paths of 100 neurons")
    return figure


@entry(
    "004/figure-6",
    title="1000 neurons on a square wave: delta = -inf against delta = +inf, with their paths",
    minutes=(0.5, 0.5),
    verdict="corrected",
    setup="ten samples of a square wave, alpha = sqrt m, 10000 epochs.",
    draw=draw,
    picture=extremes,
)
def figure_6(epochs: int = 10000, seeds: int = 6, width: int = 1000) -> Outcome:
    """Train 1000 neurons on a square wave at delta = -inf and at delta = +inf.

    The paper claims that neurons move radially at -inf and cluster at the samples at +inf. Decisive are
    that no neuron turns at -inf, and the concentration of slope jumps and the share of knots on samples at
    +inf.
    """
    data = square_wave()
    run = train(data, epochs, 20, 6)
    settings = (jnp.array([-jnp.inf, jnp.inf]), jnp.array([1.0, 0.1]))

    def one(key: jax.Array, delta: jax.Array, kappa: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        kp, kc = balance.layer_rates(delta)
        w = balance.lift(Cloud(random_neurons(key, width), labels=delta), "sqrt").particles
        loss, stats, _ = run(w, kp, kc, kappa)
        return loss, stats

    keys = jax.random.split(jax.random.key(6), seeds)
    loss, stats = last(jax.vmap(lambda d, k: jax.vmap(lambda u: one(u, d, k))(keys))(*settings))
    middle = {name: np.median(value, axis=1) for name, value in stats.items()}
    return Outcome(
        "004/figure-6",
        "neurons move radially for delta = -inf and cluster at the samples for delta = +inf",
        "at delta = +inf nearly all slope change sits in a few places; how many knots are on samples varies with "
        "time and with the initial scale, and more neurons are dead than at the start",
        {"delta": settings[0], "loss": np.median(loss, axis=1), **middle},
        (
            Criterion("turn at -inf", float(middle["turn"][0]), 0, 0),
            Criterion("share at -inf unchanged", float(middle["share"][0] - middle["share_before"][0]), 0, 0),
            Criterion("concentration_6 at +inf", float(middle["concentration"][1]), 0.95, 1),
            Criterion("share at +inf", float(middle["share"][1]), 0.5, 1),
        ),
    )
