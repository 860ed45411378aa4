"""Linear networks with rescaling alone or recentering alone."""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from meanflow import depth
from meanflow_papers.decomposed.fixed_points import stability
from meanflow_papers.entry import entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.style import COLORS, below, panels


def orthogonality_gap(gram: jax.Array) -> jax.Array:
    """Return n |gram / trace(gram) - I / n|_F of matrices (..., n, n); 0 for orthogonal samples of equal length."""
    n = gram.shape[-1]
    trace = jnp.trace(gram, axis1=-2, axis2=-1)[..., None, None]
    identity = jnp.broadcast_to(jnp.eye(n, dtype=gram.dtype), gram.shape)
    return jnp.sqrt(jnp.sum(jnp.square(gram * (n / trace) - identity), axis=(-1, -2)))


def draw_rescale(data: Arrays) -> Figure:
    """Orthogonality gap in depth for two widths: means, and every seed."""
    figure, (ax,) = panels(1, 1, width=5.0, height=3.6)
    for k, (width, gap) in enumerate(data["gap"].items()):
        rows = np.asarray(gap)  # (seeds, layers + 1)
        layers = np.arange(rows.shape[1])
        ax.plot(layers, rows.T, color=COLORS[k], lw=0.6, alpha=0.5)
        ax.plot(layers, rows.mean(0), color=COLORS[k], lw=2, label=f"width {width}, mean")
        ax.plot([], [], color=COLORS[k], lw=0.6, alpha=0.5, label="each seed")
    ax.set(xlabel="layer", ylabel="orthogonality gap", yscale="log")
    ax.set_title(r"the gap stops, at a height of order 1/$\sqrt{\mathrm{width}}$")
    below(ax, columns=2)
    return figure


@entry(
    "002/linear-rescale",
    title="linear layers with rescaling: orthogonality by depth and width",
    claims=(
        (
            "Introduction",
            "Under that framework at initialization, it was shown that a full-rank batch becomes "
            "orthonormal asymptotically as the depth of the network grows.",
        ),
    ),
    minutes=(0.19, 0.19),
    verdict="corrected",
    setup="10 inputs, widths 200 and 1000, 60 layers, 4 seeds.",
    draw=draw_rescale,
)
def linear_rescale(
    n: int = 10, widths: tuple[int, int] = (200, 1000), layers: int = 60, seeds: int = 4
) -> Outcome:
    """Follow the orthogonality of a batch through linear layers with rescaling.

    The paper cites that rescaling alone makes a full-rank batch orthonormal as the depth grows. Decisive
    are the mean angle, the gap that remains and falls as 1/sqrt(width), the simplex angle with recentering,
    and the contraction n/(n+2) a layer at infinite width.
    """
    x = jax.random.normal(jax.random.key(7), (seeds, n, 30)) + 1.0
    keys = jax.random.split(jax.random.key(71), seeds)
    grams = {}
    for w in widths:
        for recenter in (False, True):
            layer = depth.Layer(recenter, "rms", "linear", "gaussian")
            run = depth.propagate(keys, x, [w] * layers, layer, observe=lambda x: x @ x.T)
            grams[w, recenter] = run.layers
    gaps = {w: orthogonality_gap(grams[w, False]) for w in widths}  # (seeds, layers + 1)
    # the gap first contracts and then stays where finite width keeps it: the second half of the layers
    plateau = {w: float(gap[:, layers // 2 :].mean()) for w, gap in gaps.items()}
    ratio = plateau[widths[0]] / plateau[widths[1]] / (widths[1] / widths[0]) ** 0.5
    mean = {rc: float(depth.Gram(grams[widths[1], rc][:, -1]).pair_angles.mean()) for rc in (False, True)}
    # n recentered samples cannot be orthogonal; at best they form a regular simplex
    simplex = np.degrees(np.arccos(-1 / (n - 1)))
    slope = stability(jnp.eye(n), depth.Layer(False, "rms", "linear"))[0]
    return Outcome(
        name="002/linear-rescale",
        finding=f"Up to a gap that stops at {plateau[widths[1]]:.2f} for width {widths[1]}, proportional to "
        "1/sqrt(width); at infinite width it contracts by n/(n+2) a layer.",
        data={"gap": gaps, "start": depth.Gram(grams[widths[1], False][:, 0]).pair_angles},
        criteria=(
            Criterion("mean angle", mean[False], 88.5, 91.5),
            Criterion("ratio of gaps / sqrt(ratio of widths)", ratio, 0.8, 1.25),
            Criterion("recentered: mean angle", mean[True], simplex - 0.5, simplex + 0.5),
            Criterion("infinite width: |slope - n/(n+2)|", float(abs(slope - n / (n + 2))), high=1e-9),
        ),
    )


def draw_recenter(data: Arrays) -> Figure:
    """Mean of the batch in depth: removed by the first layer."""
    figure, (ax,) = panels(1, 1, width=4.4, height=2.8)
    mean = np.asarray(data["relative_mean"])
    ax.plot(np.arange(len(mean)), np.maximum(mean, 1e-18), marker="o", ms=3, color=COLORS[0])
    ax.set(xlabel="layer", ylabel="largest batch mean / largest entry", yscale="log")
    return figure


@entry(
    "002/linear-recenter",
    title="linear layers with recentering: only the first matters",
    claims=(
        (
            "Section II",
            "when used alone, RC does not have any effect on the batch representation after the first layer.",
        ),
    ),
    minutes=(0.07, 0.07),
    setup="10 inputs, width 300, 30 orthogonal layers.",
    draw=draw_recenter,
)
def linear_recenter(n: int = 10, width: int = 300, layers: int = 30) -> Outcome:
    """Follow the batch mean through linear layers with recentering.

    The paper claims that recentering changes only the first layer of a linear network. Decisive is that
    recentering the input once gives the same outputs to rounding.
    """
    x = jax.random.normal(jax.random.key(8), (n, 30)) + 1.0
    mean = lambda x: jnp.max(jnp.abs(x.mean(0))) / jnp.max(jnp.abs(x))
    widths, key = [width] * layers, jax.random.key(81)
    layer = lambda recenter: depth.Layer(recenter, activation="linear", weights="orthogonal")
    run = depth.propagate(key, x, widths, layer(True), observe=mean)
    free = depth.propagate(key, x - x.mean(0, keepdims=True), widths, layer(False))
    error = jnp.max(jnp.abs(run.final - free.final)) / jnp.max(jnp.abs(free.final))
    return Outcome(
        name="002/linear-recenter",
        finding="True: recentering the input once gives the same network.",
        data={"relative_mean": run.layers},
        criteria=(
            Criterion("largest relative mean after layer 1", float(run.layers[1:].max()), high=1e-6),
            Criterion("difference from recentering the input", float(error), high=1e-6),
        ),
    )
