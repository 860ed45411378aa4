"""Section 4.2: how sensitive training is to the learning rate."""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import meanflow as mf
from meanflow_papers.entry import entry
from meanflow_papers.manifold.setup import DATA, quasi_normal, spokes
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.style import COLORS, REFERENCE, below, panels


def draw(data: Arrays) -> Figure:
    """Final loss against the learning rate; a dotted arrow leads to the next rate, at which the run diverged."""
    figure, (ax,) = panels(1, 1, width=5.4, height=3.8)
    etas = np.asarray(data["etas"])
    labels = {"bn": "batch norm", "bn, mixed norms": "batch norm, mixed norms", "vanilla": "vanilla"}
    for k, (name, label) in enumerate(labels.items()):
        values = np.asarray(data["final"][name], float)
        fine = np.isfinite(values) & (values < 1e3)
        ax.plot(etas[fine], values[fine], marker="os^"[k], color=COLORS[k], label=label)
        # a diverged run has no loss to draw: the curve ends with an arrow out of the picture
        if not fine.all():
            last = int(np.flatnonzero(fine)[-1])
            ax.annotate(
                "",
                (etas[last + 1], 1.0),
                (etas[last], values[last]),
                xycoords=("data", "axes fraction"),
                textcoords="data",
                arrowprops={"arrowstyle": "->", "color": COLORS[k], "ls": ":"},
            )
    ax.axhline(data["initial"], color=REFERENCE, lw=0.8, ls="--", label="start")
    ax.plot([], [], color=REFERENCE, ls=":", label="arrow: diverged at the next rate")
    ax.set(xscale="log", yscale="log", xlabel=r"learning rate $\eta$", ylabel="loss after 1000 steps")
    ax.set_xlim(0.8 * etas[0], 1.25 * etas[-1])
    below(ax, columns=3)
    return figure


@entry(
    "001/learning-rate-sensitivity",
    title="final loss against the learning rate (section 4.2)",
    claims=(
        (
            "Section 4.2",
            'This effect gives the BN model an "adaptivity" to select the right learning rate itself, '
            "and hence less sensitivity to the choice of learning rate.",
        ),
    ),
    minutes=(0.07, 0.07),
    verdict="corrected",
    setup=f"{DATA}, 1000 steps at seven rates; batch norm, batch norm with mixed norms, vanilla.",
    draw=draw,
)
def learning_rates(
    etas: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0), steps: int = 1000
) -> Outcome:
    """Measure the loss after a fixed number of steps as the learning rate grows.

    The paper claims in section 4.2 that batch norm is less sensitive to the learning rate. We train batch
    norm, batch norm with neurons of mixed norms, and vanilla at the rates ``etas``.

    Decisive is the largest rate that brings the loss below 1 % of its start, batch norm against vanilla.
    """
    x = quasi_normal(400)
    data = mf.Dataset(x, np.abs(x[:, 0]))
    mixed = np.random.default_rng(0).permutation(np.logspace(-1, 1, 50))
    setups = {
        "bn": (mf.batchnorm().bind(data), spokes(50)),
        "bn, mixed norms": (mf.batchnorm().bind(data), spokes(50, mixed)),
        "vanilla": (mf.vanilla(), spokes(50)),
    }

    def loss(flow: mf.Flow, cloud: mf.Cloud, eta: jax.Array) -> jax.Array:
        return mf.descend(flow, cloud, data, steps, step=eta).energy[-1]

    rates = jnp.asarray(etas)
    final = {
        name: np.asarray(jax.vmap(lambda eta, f=flow, c=cloud: loss(f, c, eta))(rates))
        for name, (flow, cloud) in setups.items()
    }
    start = float(mf.energy(*setups["vanilla"], data))
    etas_, fine = np.asarray(etas), np.isfinite(final["bn, mixed norms"]) & np.isfinite(final["bn"])
    worse = (final["bn, mixed norms"] / final["bn"])[fine & (final["bn"] < start)]
    good = {name: float(np.max(etas_[values < 0.01 * start])) for name, values in final.items()}
    return Outcome(
        "001/learning-rate-sensitivity",
        f"Batch norm tolerates larger steps: it reaches 1 % of the loss at rates up to {good['bn']:g}, vanilla up to "
        f"{good['vanilla']:g} (under batch norm |b| only grows, figure-3, which lowers the effective rate eta/|b|^2). "
        f"Not any rate: at {etas[-1]:g} batch norm diverges too; and at {etas[0]:g} it leaves "
        f"{final['bn'][0] / final['vanilla'][0]:.0f} times vanilla's loss. Neurons of "
        "mixed norms, which the paper expects to adapt to any rate, do worse than neurons of norm 1 at every rate "
        f"at which batch norm learns: the loss that is left is {worse.min():.1f} to {worse.max():.0f} times as large.",
        {"etas": etas_, "final": final, "initial": start},
        (
            # at least the next of the rates, which are about a factor 3 apart
            Criterion(
                "largest rate that reaches 1 % of the loss, BN / vanilla", good["bn"] / good["vanilla"], low=3
            ),
            Criterion("the same with mixed norms", good["bn, mixed norms"] / good["vanilla"], low=3),
            Criterion(
                "least loss left, mixed norms / norm 1, where batch norm learns", float(worse.min()), low=1
            ),
        ),
    )
