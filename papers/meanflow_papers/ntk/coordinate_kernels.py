"""Kernels of coordinate networks: which placement of batch norm helps high frequencies."""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from meanflow import kernels
from meanflow.plots.style import COLORS, PALE, key, panels, sparse
from meanflow_papers.entry import entry
from meanflow_papers.ntk import coordinate
from meanflow_papers.ntk.networks import seed_key
from meanflow_papers.outcome import Arrays, Criterion, Outcome


def draw(data: Arrays) -> Figure:
    """How fast the frequency 32 is learned relative to the fastest mode."""
    figure, (ax,) = panels(1, 1, width=4.8, height=3.0)
    places = {"none": "plain", "output": "BN, output", "hidden": "BN, hidden", "later": "BN, layers 2+"}
    for k, inputs in enumerate(("raw", "encoded")):
        values = [data[f"{inputs}, {norm}"][2] for norm in places]
        ax.plot(
            values,
            np.arange(4) + 0.1 * (2 * k - 1),
            "os"[k],
            color=COLORS[k],
            ms=6,
            label=f"{inputs} coordinates",
        )
    ax.set_yticks(range(4), list(places.values()))
    ax.set(
        xscale="log",
        xlabel=r"$R_{32} / \lambda_{\max}$: rate of frequency 32 over the fastest",
        xlim=(9e-5, 1.1e-2),
        ylim=(3.5, -0.5),
    )
    sparse(ax)
    ax.grid(axis="y", color=PALE, alpha=0.4, lw=0.6)
    key(ax)
    return figure


@entry(
    "000/coordinates",
    title="kernels of real 1-D coordinate networks: which batch norm lifts high frequencies",
    minutes=(1.0, 1.0),
    verdict="corrected",
    setup="three hidden layers of 128 ReLU units; batch norm on the output, on all hidden layers, on layers 2+.",
    draw=draw,
)
def coordinate_spectra(seeds: int = 2, samples: int = 256, width: int = 128) -> Outcome:
    """Compute kernels of 1-D coordinate networks for four placements of batch norm.

    The paper's theory is about batch norm on the output. We measure the gain at frequency 32, that is R_32
    / lambda_max over the plain network's, where R_k is the mean Rayleigh quotient of sin and cos at k
    cycles.

    Decisive is whether the gain of each placement lies in its interval: batch norm before the activations,
    which the theory leaves out, helps most.
    """
    signal = coordinate.sines(samples=samples)
    t = 2 * np.pi * 32 * np.arange(samples) / samples
    waves = jnp.asarray(np.stack([np.sin(t), np.cos(t)]) * np.sqrt(2 / samples))
    data = {}
    for inputs, octaves in (("raw", 0), ("encoded", 3)):
        for norm in ("none", "output", "hidden", "later"):
            apply, params = coordinate.ensemble(
                seed_key(10), seeds, 1, norm=norm, octaves=octaves, width=width
            )
            rows = []
            for i in range(seeds):
                member = jax.tree.map(lambda a, i=i: a[i], params)
                stats = None if norm == "none" else "batch"
                kernel = kernels.empirical_ntk(apply, member, signal.x, stats=stats)
                values = jnp.linalg.eigvalsh(kernel)[::-1]
                rayleigh = jnp.mean(jnp.sum(waves * (waves @ kernel), axis=1))
                top = values[0]
                rows.append([top / jnp.mean(values), jnp.sum(values > 1e-2 * top), rayleigh / top])
            data[f"{inputs}, {norm}"] = np.mean(np.asarray(rows), axis=0)
    gain = lambda inputs, norm: float(data[f"{inputs}, {norm}"][2] / data[f"{inputs}, none"][2])
    return Outcome(
        "000/coordinates",
        "batch norm on the output flattens the spectrum",
        "on real coordinates batch norm before the activations, which the theory leaves out, helps most",
        data,
        (
            Criterion("raw: gain of BN on layers 2+", gain("raw", "later"), 4.0, 16.0),
            Criterion("raw: gain of BN on the output", gain("raw", "output"), 1.0, 5.0),
            Criterion("encoded: gain of BN on hidden layers", gain("encoded", "hidden"), 6.0, 26.0),
            Criterion("encoded: gain of BN on the output", gain("encoded", "output"), 2.5, 13.0),
            Criterion(
                "raw: lambda_max/m of output BN over plain",
                float(data["raw, output"][0] / data["raw, none"][0]),
                0.8,
                1.4,
            ),
        ),
    )
