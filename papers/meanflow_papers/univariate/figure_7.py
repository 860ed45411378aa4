"""Figure 7: one function, five scalings of its layers."""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from meanflow import univariate as uni
from meanflow.flows import predict
from meanflow.measures import Affine, Cloud
from meanflow.univariate import balance
from meanflow_papers.entry import entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.style import COLORS, SAMPLE, below, panels, shades, sparse
from meanflow_papers.univariate.setup import last, square_wave, train


def draw(data: Arrays) -> Figure:
    """One start, five ends, with the samples; turning and concentration by scale."""
    figure, grid = panels(1, 3, width=3.9, height=3.4)
    scales, x = np.asarray(data["k"]), np.asarray(data["grid"])
    grid[0].plot(x, np.asarray(data["before"])[0], color=COLORS[0], label="$f$ at the start, for every $k$")
    grid[0].set_title("start")
    colors = shades(len(scales))
    for k, scale in enumerate(scales):
        delta, loss = (float(np.asarray(data[name])[k]) for name in ("delta", "loss"))
        label = rf"$k = {scale:g}$: $\delta$ = {delta:.3g}, $L$ = {loss:.2g}"
        grid[1].plot(x, np.asarray(data["after"])[k], color=colors[k], label=label)
    grid[1].set_title("after training; median balance, final loss")
    for ax in grid[:2]:
        ax.plot(data["x"], data["y"], "x", color=SAMPLE, ms=6, mew=1.3, zorder=4, label="samples")
        ax.set(xlabel="$x$", ylabel="$f(x)$", ylim=(-2, 2))
        sparse(ax)
        below(ax, columns=1 if ax is grid[0] else 2)
    grid[2].plot(
        scales, np.asarray(data["turn"]), "o-", color=COLORS[0], label=r"rms turn $\Delta\theta$ (radians)"
    )
    grid[2].plot(
        scales, np.asarray(data["concentration"]), "s-", color=COLORS[1], label="slope jumps in 6 bins, end"
    )
    grid[2].plot(
        scales,
        np.asarray(data["concentration_before"]),
        "s--",
        color=COLORS[1],
        mfc="white",
        label="the same, start",
    )
    grid[2].set(xscale="log", yscale="log", xlabel="scale $k$ of $(ka, kb, c/k)$")
    grid[2].set_title("adaptive (left) to kernel regime (right)")
    below(grid[2], columns=1)
    return figure


@entry(
    "004/figure-7",
    title="one function, five scalings of its layers, different ends",
    claims=(
        ("Appendix D", "the same initial function can yield extremely different results depending on delta."),
    ),
    minutes=(0.09, 0.09),
    setup="200 neurons, weights (k a, k b, c/k) with k = 0.1 .. 10, 20000 epochs.",
    draw=draw,
)
def figure_7(epochs: int = 20000, width: int = 200, seed: int = 7) -> Outcome:
    """Train one function from five scalings (k a, k b, c/k) of its layers.

    The paper claims that the scale of the layers alone decides between the kernel and the adaptive regime.
    Decisive are that all start as the same function, and that turning, concentration and the final
    functions differ.
    """
    data = square_wave()
    a, b, c = jax.random.uniform(jax.random.key(seed), (3, width), minval=-1.0)
    scales = jnp.array([0.1, 0.3, 1.0, 3.0, 10.0])
    start = jax.vmap(lambda k: Affine(k * a, k * b, 0.3 * c / k))(scales)
    run = train(data, epochs, 20, 6)
    loss, stats, end = jax.vmap(lambda w: run(w, 1.0, 1.0, 0.2))(start)
    begin = loss[0, 0]  # the same for all, as they are one function
    loss, stats = last((loss, stats))
    grid = jnp.linspace(-1, 1, 401)
    curve = jax.vmap(lambda w: predict(uni.full(alpha="sqrt"), Cloud(w), grid))
    before, after = curve(start), curve(end)
    gap = after[0] - after[-1]
    delta = jnp.median(jax.vmap(balance.balance)(start), axis=1)
    return Outcome(
        "004/figure-7",
        f"true of {epochs} epochs: the same function at the start ends as different ones, and neurons turn "
        f"{float(stats['turn'][0] / stats['turn'][-1]):.0f} times as far at k = 0.1 as at 10. The ends are not limits: "
        f"losses {float(loss[0]):.2f} and {float(loss[-1]):.2f} are left of {float(begin):.1f}",
        {
            "k": scales,
            "loss": loss,
            "delta": delta,
            "grid": grid,
            "before": before,
            "after": after,
            "x": data.x,
            "y": data.y,
            **stats,
        },
        (
            Criterion("turn(k=.1) / turn(k=10)", float(stats["turn"][0] / stats["turn"][-1]), 20),
            Criterion("concentration_6 at k=.1", float(stats["concentration"][0]), 0.9, 1),
            Criterion("concentration_6 at k=10", float(stats["concentration"][-1]), 0, 0.35),
            Criterion("rms difference of the two ends", float(jnp.sqrt(jnp.mean(gap**2))), 0.05),
        ),
    )
