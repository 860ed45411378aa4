"""Figure 6: how many inputs activate a neuron, with and without recentering."""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from meanflow import depth
from meanflow.depth.observables import activity
from meanflow.plots import batches
from meanflow.plots.style import COLORS, key, panels
from meanflow_papers.decomposed.setup import BATCH_NORM, RMS_ONLY, STD_ONLY
from meanflow_papers.entry import entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome


def draw(data: Arrays) -> Figure:
    """Activity over the network, and the histogram of the busiest neuron of each."""
    figure, grid = panels(1, 3, width=3.5, height=2.9)
    names = {"BN": "batch norm", "RS(rms)": "rescaling by the rms", "RS(std)": "rescaling by the std"}
    batches.activity({label: data[name]["activity"] for name, label in names.items()}, grid[0])
    for ax, kind in zip(grid[1:], ("busiest neuron", "typical neuron"), strict=True):
        for k, (name, label) in enumerate(names.items()):
            count, edges = (np.asarray(u, float) for u in data[name][kind])
            ax.stairs(count / count.sum(), edges, color=COLORS[k], label=label, lw=1.3)
        ax.set(xlabel="response to an input", ylabel="share of inputs", yscale="log")
        ax.set_title(f"the {kind}")
    key(grid[1])
    return figure


@entry(
    "002/figure-6",
    title="activity of the neurons with and without recentering",
    minutes=(0.2, 0.2),
    setup="512 Gaussian inputs, width 256, 30 layers.",
    draw=draw,
)
def figure_6(n: int = 512, width: int = 256, layers: int = 30) -> Outcome:
    """Measure the share of inputs that activate each neuron of the last layer, with and without recentering.

    The paper claims that without recentering some neurons respond to most inputs and with it almost none
    do. Decisive is the share of neurons that are active on more than 90 % of the inputs.
    """
    x = jax.random.normal(jax.random.key(6), (n, 50))
    nets = {"BN": BATCH_NORM, "RS(rms)": RMS_ONLY, "RS(std)": STD_ONLY}
    data: Arrays = {}
    for name, net in nets.items():
        run = depth.propagate(jax.random.key(61), x, [width] * layers, observe=lambda x: (), **net)
        share = activity(run.final)
        busiest = run.final[:, jnp.argmax(share)]
        data[name] = {
            "activity": share,
            "above 90%": jnp.mean(share > 0.9),
            "below 10%": jnp.mean(share < 0.1),
            "quantiles 5-95%": jnp.quantile(share, jnp.array([0.05, 0.95])),
            "busiest neuron": jnp.histogram(busiest, bins=40),
            "typical neuron": jnp.histogram(run.final[:, jnp.argsort(share)[width // 2]], bins=40),
        }
    return Outcome(
        name="002/figure-6",
        claim="Without recentering some neurons respond to most inputs; with it almost none do.",
        finding=f"Neurons active on over 90 % of inputs: BN {float(data['BN']['above 90%']):.1%}, "
        f"RS(rms) {float(data['RS(rms)']['above 90%']):.1%}, "
        f"RS(std) {float(data['RS(std)']['above 90%']):.1%}.",
        data=data,
        criteria=(
            Criterion("BN: share above 90 %", float(data["BN"]["above 90%"]), high=0),
            Criterion("RS(rms): share above 90 %", float(data["RS(rms)"]["above 90%"]), 0.05),
        ),
    )
