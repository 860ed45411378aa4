"""Kernels of finite networks against their infinite-width order parameters."""

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from meanflow import kernels
from meanflow_papers.entry import entry
from meanflow_papers.intervals import bootstrap, told
from meanflow_papers.ntk.networks import dense, seed_key
from meanflow_papers.ntk.predictions import kappas
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.style import COLORS, MARKERS, PALE, below, panels

WIDTH_CASES = (("relu", 2.0), ("tanh", 1.5), ("erf", 1.5), ("sine", 1.5), ("linear", 1.0))
PAIRS = ("tt", "st")  # on and off the diagonal


def draw(data: Arrays) -> Figure:
    """Deviation of K/N from the order parameters."""
    figure, grid = panels(1, 2, width=3.8, height=3.8)
    widths = np.asarray(data["widths"], float)
    for pair, ax, part in zip(PAIRS, grid, (r"diagonal $K_{tt}/N$", r"off-diagonal $K_{st}/N$"), strict=True):
        for k, (name, _) in enumerate(WIDTH_CASES):
            squares = np.asarray(data[name][pair])  # (widths, seeds)
            middle, low, high = np.sqrt([bootstrap(np.mean, row) for row in squares]).T
            places = widths * 1.04 ** (k - 2)  # side by side
            label = f"{name}: {told(np.asarray(data['slopes'][name][pair]))}"
            ends = [middle - low, high - middle]
            ax.errorbar(
                places, middle, yerr=ends, fmt=MARKERS[k] + "-", color=COLORS[k], capsize=2, lw=1, label=label
            )
        lowest = min(np.sqrt(np.mean(data[name][pair][0])) for name, _ in WIDTH_CASES)
        guide = 0.8 * lowest * (widths / widths[0]) ** -0.5
        ax.plot(widths, guide, color=PALE, ls="--", lw=1, zorder=0, label="$N^{-1/2}$")
        ax.set(xscale="log", yscale="log", xlabel="$N$", ylabel=f"rms error, {part}")
        ax.set_xticks(widths, [f"{n:g}" for n in widths])
        ax.minorticks_off()
        ax.set_title("exponents with 99.5 % intervals; bars: 95 %")
        below(ax, 2)
    return figure


@entry(
    "000/width",
    title="K/N of finite networks against the order parameters: error of order 1/sqrt(N)",
    claims=(("A.3, equation (A.16)", "K = (L-1)NM + O(sqrt(N))"),),
    small={"widths": (128, 256, 512, 1024)},
    full={"widths": (128, 256, 512, 1024, 2048, 4096)},
    minutes=(0.35, 30.0),
    verdict="corrected",
    setup="T = 32 orthogonal inputs, three weight layers, five activations.",
    draw=draw,
)
def width_convergence(widths: tuple[int, ...] = (128, 256, 512, 1024), seeds: int = 20) -> Outcome:
    """Compare K/N of finite networks with the order parameters of infinite width.

    The paper claims that K/N tends to (L - 1) kappa with corrections of order 1/sqrt(N). We compute kernels
    of networks with L = 3 weight layers at T = 32 orthogonal inputs (input dimension N), for five
    activations.

    Decisive are the ten exponents of the deviation in N: -1/2 lies inside the interval of each (99.5 %, so that all ten
    do in 19 of 20 repetitions), and no interval is wider than 1/2, which leaves neither 0 nor -1 inside.
    """
    samples = 32
    data: Arrays = {"widths": np.asarray(widths), "slopes": {}}
    exponent = lambda *rows: np.polyfit(np.log(widths), 0.5 * np.log([row.mean() for row in rows]), 1)[0]
    for name, variance in WIDTH_CASES:
        kappa = kappas(depth=3, alpha_0=1.0, activation=name, weight_variance=variance)
        squares: dict[str, list[list[float]]] = {pair: [[] for _ in widths] for pair in PAIRS}
        for i, width in enumerate(widths):
            x = np.sqrt(width) * jnp.eye(samples, width)
            for seed in range(seeds):
                apply, weights = dense(
                    seed_key(width, seed),
                    (width, width, width, 1),
                    activation=name,
                    weight_variance=variance,
                )
                kernel = np.asarray(kernels.empirical_ntk(apply, weights, x)) / width
                off = kernel[~np.eye(samples, dtype=bool)]
                squares["tt"][i].append(float(np.mean((np.diag(kernel) - 2 * float(kappa.one)) ** 2)))
                squares["st"][i].append(float(np.mean((off - 2 * float(kappa.two)) ** 2)))
        data[name] = {pair: np.array(rows) for pair, rows in squares.items()}
        data["slopes"][name] = {
            pair: bootstrap(exponent, *rows, draws=2000, level=0.995) for pair, rows in data[name].items()
        }
    found = {f"{name}, {pair}": row for name, both in data["slopes"].items() for pair, row in both.items()}
    slopes = np.array(list(found.values()))
    return Outcome(
        "000/width",
        "true with p^{l-1} in place of the printed p^l, and alpha_0 = N_0/N explicit: exponents from "
        f"{slopes[:, 0].min():.2f} to {slopes[:, 0].max():.2f} between N = {widths[0]} and {widths[-1]}, none "
        "further from "
        f"-1/2 than {np.abs(slopes[:, 1:] + 0.5).max():.2f} at the ends of its interval",
        data,
        (
            *(
                Criterion(
                    f"{name}: -1/2 beyond the interval of the exponent by",
                    max(low + 0.5, -0.5 - high),
                    high=0,
                )
                for name, (_, low, high) in found.items()
            ),
            Criterion("widest interval of an exponent", float(np.ptp(slopes[:, 1:], axis=1).max()), high=0.5),
        ),
    )
