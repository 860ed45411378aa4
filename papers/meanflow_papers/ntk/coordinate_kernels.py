"""Kernels of coordinate networks: which placement of batch norm helps high frequencies."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from matplotlib.figure import Figure

from meanflow import kernels
from meanflow_papers.entry import entry
from meanflow_papers.intervals import mean, ratio, told
from meanflow_papers.ntk import coordinate
from meanflow_papers.ntk.networks import seed_key
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.style import COLORS, PALE, REFERENCE, below, panels, sparse

PLACES = {"none": "plain", "output": "BN, output", "hidden": "BN, hidden", "later": "BN, layers 2+"}


def draw(data: Arrays) -> Figure:
    """How fast frequency 32 is learned relative to the fastest mode, and over the network without batch norm."""
    figure, (left, right) = panels(1, 2, width=5.0, height=3.6)
    for k, inputs in enumerate(("raw", "encoded")):
        for row, norm in enumerate(PLACES):
            values = np.asarray(data[f"{inputs}, {norm}"])[:, 2]
            place = row + 0.1 * (2 * k - 1)
            left.plot(values, np.full(len(values), place), "os"[k], color=COLORS[k], ms=4, alpha=0.6)
            if norm != "none":
                middle, low, high = np.asarray(data["gains"][f"{inputs}, {norm}"])
                ends = [[middle - low], [high - middle]]
                right.errorbar([middle], [place], xerr=ends, fmt="os"[k], color=COLORS[k], ms=5, capsize=3)
        left.plot([], [], "os"[k], color=COLORS[k], ms=4, label=f"{inputs} coordinates, each seed")
        right.plot([], [], "os"[k], color=COLORS[k], ms=5, label=f"{inputs} coordinates")
    right.axvline(1.0, color=REFERENCE, lw=0.8, ls=":", label="as without batch norm")
    left.set(xlabel=r"$R_{32} / \lambda_{\max}$: rate of frequency 32 over the fastest")
    right.set(xlabel="gain over the plain network, 95 % interval over seeds")
    for ax in (left, right):
        ax.set_yticks(range(4), list(PLACES.values()))
        ax.set(xscale="log", ylim=(3.5, -0.5))
        sparse(ax)
        ax.grid(axis="y", color=PALE, alpha=0.4, lw=0.6)
        below(ax, columns=2)
    return figure


@entry(
    "000/coordinates",
    title="kernels of real 1-D coordinate networks: which batch norm lifts high frequencies",
    claims=(
        (
            "A.5, after equation (A.20)",
            "K^BN = (L-1)NAM^BN + O(sqrt(N)) approx (L-1)N (kappa_1 - kappa_2)/sigma^2 I + O(sqrt(N))",
        ),
    ),
    minutes=(1.07, 1.07),
    verdict="corrected",
    setup="three hidden layers of 128 ReLU units, 256 points, 6 seeds; batch norm on the output, on all hidden layers, "
    "on layers 2+.",
    draw=draw,
)
def coordinate_spectra(seeds: int = 6, samples: int = 256, width: int = 128) -> Outcome:
    """Compute kernels of 1-D coordinate networks for four placements of batch norm.

    The paper's theory is about batch norm on the output. We measure the gain at frequency 32, that is R_32
    / lambda_max over the plain network's, where R_k is the mean Rayleigh quotient of sin and cos at k
    cycles. Seeds are paired: all placements have the same weights.

    Decisive are 95 % intervals over seeds of ratios, which must lie on one side of 1: batch norm before the
    activations, which the theory leaves out, lifts frequency 32, and more than batch norm on the output does. A
    spectrum that is flat but for two zeros has lambda_max/m near 1: on raw coordinates, with batch norm on the
    output, the lower end of its interval must be above 2.
    """
    signal = coordinate.sines(samples=samples)
    angle = 2 * np.pi * 32 * np.arange(samples) / samples
    waves = jnp.asarray(np.stack([np.sin(angle), np.cos(angle)]) * np.sqrt(2 / samples))
    data: Arrays = {}
    for inputs, octaves in (("raw", 0), ("encoded", 3)):
        for norm in PLACES:
            apply, params = coordinate.ensemble(
                seed_key(10), seeds, 1, norm=norm, octaves=octaves, width=width
            )
            stats = None if norm == "none" else "batch"

            def spectrum(
                member: PyTree, apply: coordinate.Plain = apply, stats: str | None = stats
            ) -> jax.Array:
                kernel = kernels.empirical_ntk(apply, member, signal.x, stats=stats)
                values = jnp.linalg.eigvalsh(kernel)
                rayleigh = jnp.mean(jnp.sum(waves * (waves @ kernel), axis=1))
                top = values[-1]
                return jnp.stack([top / jnp.mean(values), jnp.sum(values > 1e-2 * top), rayleigh / top])

            member = lambda i, p=params: jax.tree.map(lambda a: a[i], p)
            one = jax.jit(spectrum)
            data[f"{inputs}, {norm}"] = np.array([one(member(i)) for i in range(seeds)])
    column = lambda name, k=2: data[name][:, k]
    gains = {
        f"{inputs}, {norm}": ratio(column(f"{inputs}, {norm}"), column(f"{inputs}, none"))
        for inputs in ("raw", "encoded")
        for norm in PLACES
        if norm != "none"
    }
    best = {"raw": "raw, later", "encoded": "encoded, hidden"}
    beyond = {inputs: ratio(column(name), column(f"{inputs}, output")) for inputs, name in best.items()}
    top = ratio(column("raw, output", 0), column("raw, none", 0))
    steep = np.exp(mean(np.log(column("raw, output", 0))))
    shown = ", ".join(f"{told(gains[name], 1)} ({name})" for name in gains)
    return Outcome(
        "000/coordinates",
        "on real coordinates batch norm before the activations, which the theory leaves out, helps most: gains at "
        f"frequency 32 (95 % intervals over {seeds} seeds) {shown}. On raw coordinates the spectrum is not flat under "
        f"batch norm on the output: lambda_max/m is {told(steep, 0)}, {told(top)} times that of the plain network",
        {**data, "gains": gains},
        (
            *(
                Criterion(f"{name}: gain of batch norm, lower end of its interval", gains[name][1], low=1.0)
                for name in best.values()
            ),
            *(
                Criterion(f"{best[inputs]} over output: lower end of its interval", row[1], low=1.0)
                for inputs, row in beyond.items()
            ),
            Criterion("raw: lambda_max/m under output BN, lower end of its interval", steep[1], low=2.0),
        ),
    )
