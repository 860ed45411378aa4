"""Figure 6: how many inputs activate a neuron, with and without recentering."""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from meanflow import depth
from meanflow_papers.decomposed.setup import BATCH_NORM, RMS_ONLY, STD_ONLY
from meanflow_papers.entry import entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.pictures import activity_histogram
from meanflow_papers.style import COLORS, REFERENCE, no_legend, panels


def draw(data: Arrays) -> Figure:
    """Activity over the network, the busiest and the typical neuron, and how often responses are negligible."""
    figure, grid = panels(2, 2, width=4.6, height=3.6)
    names = {"BN": "batch norm", "RS(rms)": "rescaling by the rms", "RS(std)": "rescaling by the std"}
    activity_histogram({label: data[name]["activity"] for name, label in names.items()}, grid[0])
    no_legend(grid[0])
    grid[0].set_title("how many inputs a neuron responds to")
    activity_histogram({label: data[name]["negligible"] for name, label in names.items()}, grid[1])
    no_legend(grid[1])
    grid[1].axvline(0.5, color=REFERENCE, lw=0.9, ls=":", label='right of it: "most inputs"')
    grid[1].set(xlabel="share of inputs with a response below\n10 % of the neuron's largest")
    grid[1].set_title("negligible responses")
    for ax, kind in zip(grid[2:], ("busiest neuron", "typical neuron"), strict=True):
        for k, name in enumerate(names):
            count, edges = (np.asarray(u, float) for u in data[name][kind])
            ax.stairs(count / count.sum(), edges, color=COLORS[k], lw=1.3)
        ax.set(xlabel="response to an input", ylabel="share of inputs", yscale="log")
        ax.set_title(f"the {kind}")
    handles = [Line2D([], [], color=COLORS[k], label=label) for k, label in enumerate(names.values())]
    figure.legend(
        handles=[*handles, *grid[1].get_legend_handles_labels()[0][-1:]], loc="outside lower center", ncols=4
    )
    return figure


@entry(
    "002/figure-6",
    title="activity of the neurons with and without recentering",
    claims=(
        (
            "Figure 6",
            "Without RC, some neurons exhibit neural activity like the one in Figure (a): the neuron "
            "has significant response for a large number of inputs. With RC, most of the neurons "
            "behave according to Figure (b): the neural response is negligible for most of the "
            "inputs.",
        ),
    ),
    minutes=(0.12, 0.12),
    verdict="corrected",
    setup="512 Gaussian inputs, width 256, 30 layers.",
    draw=draw,
)
def figure_6(n: int = 512, width: int = 256, layers: int = 30) -> Outcome:
    """Measure the share of inputs that activate each neuron of the last layer, with and without recentering.

    The paper claims that without recentering some neurons respond to most inputs, and that with it the response of
    most neurons is negligible for most inputs. Decisive for the first half is the share of neurons that are active on
    more than 90 % of the inputs. The second half depends on what negligible means. Not to respond at all is no reading
    under which it holds: about half of the inputs activate a neuron, as its preactivations are centered. With responses
    below a tenth of the neuron's largest one, decisive is for how many neurons these are more than half of the inputs.
    """
    x = jax.random.normal(jax.random.key(6), (n, 50))
    nets = {"BN": BATCH_NORM, "RS(rms)": RMS_ONLY, "RS(std)": STD_ONLY}
    data: Arrays = {}
    for name, layer in nets.items():
        run = depth.propagate(jax.random.key(61), x, [width] * layers, layer, observe=jnp.mean)
        share = jnp.mean(run.final > 0, axis=0)  # of the inputs, for each neuron
        busiest = run.final[:, jnp.argmax(share)]
        negligible = jnp.mean(run.final < 0.1 * jnp.max(run.final, axis=0, keepdims=True), axis=0)
        data[name] = {
            "activity": share,
            "negligible": negligible,
            "above 90%": jnp.mean(share > 0.9),
            "below 10%": jnp.mean(share < 0.1),
            "quantiles 5-95%": jnp.quantile(share, jnp.array([0.05, 0.95])),
            "busiest neuron": jnp.histogram(busiest, bins=40),
            "typical neuron": jnp.histogram(run.final[:, jnp.argsort(share)[width // 2]], bins=40),
        }
    low, high = (float(q) for q in data["BN"]["quantiles 5-95%"])
    quiet = data["BN"]["negligible"]
    most = float(jnp.mean(quiet > 0.5))
    return Outcome(
        name="002/figure-6",
        finding=f"The first half is true: neurons active on over 90 % of inputs: BN "
        f"{float(data['BN']['above 90%']):.1%}, RS(rms) {float(data['RS(rms)']['above 90%']):.1%}, RS(std) "
        f"{float(data['RS(std)']['above 90%']):.1%}. The second depends on the word: under BN a neuron fires on "
        f"{low:.0%} to {high:.0%} of the inputs (5-95 % of the neurons), so it is not silent for most; its response is "
        f"below a tenth of its largest on {float(quiet.mean()):.0%} of them on average, on more than half for "
        f"{most:.0%} of the neurons.",
        data=data,
        criteria=(
            Criterion("BN: share above 90 %", float(data["BN"]["above 90%"]), high=0),
            Criterion("RS(rms): share above 90 %", float(data["RS(rms)"]["above 90%"]), 0.05),
            Criterion("BN: 5 % quantile of activity", low, 0.35, 0.5),
            Criterion("BN: 95 % quantile of activity", high, 0.5, 0.65),
            Criterion("BN: share of neurons with negligible response to most inputs", most, 0.5),
        ),
    )
