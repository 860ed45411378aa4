"""Figure 3: the first step of descent lengthens small neurons."""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import meanflow as mf
from meanflow_papers.entry import entry
from meanflow_papers.manifold.setup import DATA, quasi_normal, spokes
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.style import COLORS, PALE, below, panels, shades


def draw(data: Arrays) -> Figure:
    """Norms before and after the first step beside the formula, and later."""
    figure, (left, right) = panels(1, 2, width=5.6, height=4.8)
    norms, formula = np.asarray(data["norms"]), np.asarray(data["formula"])
    start, drive = norms[0], np.asarray(data["step_times_gradient"])
    left.plot(start, norms[1], "o", mfc="none", color=COLORS[0], label="after 1 step", ms=7)
    left.plot(
        start,
        formula,
        ".",
        color=COLORS[6],
        label=r"$\sqrt{|b_0|^2 + (\eta g/|b_0|)^2}$, each with its $g$",
        ms=3,
    )
    sizes = np.geomspace(start.min(), start.max(), 200)
    for k, share in enumerate((0.1, 0.5, 0.9)):
        g = float(np.quantile(drive, share))
        label = r"formula at the 10, 50, 90 % quantiles of $g$" if k == 0 else None
        left.plot(
            sizes, np.sqrt(sizes**2 + (g / sizes) ** 2), color=PALE, lw=1, ls="--", zorder=0, label=label
        )
    least = np.sqrt(drive)
    left.plot(
        least,
        np.sqrt(2 * drive),
        "_",
        color=COLORS[2],
        ms=7,
        label=r"its least value $\sqrt{2\eta g}$, at $\sqrt{\eta g}$",
    )
    left.plot(sizes, sizes, color=PALE, lw=1, label="no change")
    left.set(xscale="log", yscale="log", xlabel=r"$|b_0|$", ylabel=r"$|b_n|$")
    below(left, columns=1)
    steps = np.arange(len(norms)) + 1
    order = np.argsort(start)
    chosen = order[:: max(1, len(order) // 10)]
    for color, k in zip(shades(len(chosen)), chosen, strict=True):
        right.plot(steps, norms[:, k], color=color, lw=1.1, label=f"$|b_0|$ = {start[k]:.2g}")
    right.set(xscale="log", yscale="log", xlabel="iteration + 1", ylabel=r"$|b_n|$ of ten neurons")
    below(right, columns=4)
    return figure


@entry(
    "001/figure-3",
    title="first-step amplification: norms of 40 neurons after one step of descent",
    claims=(
        (
            "Section 4.3",
            "The smaller the neuron is initially, the bigger it becomes after one iteration. "
            "Therefore, starting from the second iteration, all neurons are large enough to avoid "
            "unstable dynamics.",
        ),
    ),
    minutes=(0.03, 0.03),
    verdict="corrected",
    setup=f"{DATA} (eta = 0.1, 200 steps); norms from 1e-3 to 1, log-spaced.",
    draw=draw,
)
def figure_3(width: int = 40, eta: float = 0.1, steps: int = 200) -> Outcome:
    """Follow the norms of neurons through the first steps of descent with batch norm.

    The paper claims that the smaller a neuron is at the start, the bigger it is after one step, and that all neurons
    are stable from the second one on. The gradient g at |b| = 1 scales as 1/|b| and is orthogonal to b, so
    |b1|^2 = |b0|^2 + eta^2 g^2/|b0|^2.

    Decisive for the claims are the pairs of neurons whose smaller one has |b0| > 2 sqrt(eta g): were they true, the
    smaller one would be the bigger one after the step in all of them, not in less than half; and the largest angle by
    which a neuron turns in one of the later steps, which is more than ten degrees. Decisive for ours are the formula to
    rounding, its sum over all steps, and that no norm is below sqrt(2 eta g) after one step.
    """
    x = quasi_normal(400)
    data = mf.Dataset(x, np.abs(x[:, 0]))
    flow = mf.batchnorm().bind(data)
    norms = np.random.default_rng(0).permutation(np.logspace(-3, 0, width))
    cloud = spokes(width, norms)

    def see(flow: mf.Flow, cloud: mf.Cloud, data: mf.Dataset) -> tuple[jax.Array, jax.Array]:
        length = jnp.linalg.norm(cloud.particles.b, axis=1)
        return length, jnp.linalg.norm(mf.velocity(flow, cloud, data).b, axis=1)

    run = mf.descend(flow, cloud, data, steps, step=eta, every=1, observe=see)
    length, pull = (np.asarray(u) for u in run.observed)
    unit_pull = pull[0] * length[0]  # the gradient scales as 1/|b|
    formula = np.sqrt(length[0] ** 2 + (eta * unit_pull / length[0]) ** 2)
    sums = length[0] ** 2 + eta**2 * np.cumsum(pull[:-1] ** 2, axis=0)
    turned = np.degrees(np.arccos(np.minimum(length[:-1] / length[1:], 1.0)))  # each step is orthogonal to b
    tiny = length[0] < 0.01
    # pairs (i, j) with |b0_i| < |b0_j|, and those among them whose smaller neuron is not small for its gradient
    smaller = length[0][:, None] < length[0][None, :]
    large = smaller & (length[0] > 2 * np.sqrt(eta * unit_pull))[:, None]
    swapped = length[1][:, None] > length[1][None, :]
    return Outcome(
        "001/figure-3",
        "|b1|^2 = |b0|^2 + eta^2 g^2/|b0|^2 is not monotone: it is least, sqrt(2 eta g), at |b0| = sqrt(eta g). "
        f"The smaller one of two neurons becomes the bigger one in {swapped[smaller].mean():.0%} of all pairs, and in "
        f"{swapped[large].mean():.0%} of those whose smaller one is twice that long. Neurons with |b0| < 0.01 turn "
        f"by {turned[0, tiny].min():.0f} degrees or more in the first step and by "
        f"{np.median(turned[1:, tiny].sum(axis=0)):.1g} (median; at most {turned[1:, tiny].sum(axis=0).max():.0f}) in "
        f"the other {steps - 1} together; of all neurons one turns by {turned[1:].max():.0f} degrees in a later "
        "step, so "
        "that not all are stable.",
        {
            "norms": length,
            "formula": formula,
            "step_times_gradient": eta * unit_pull,
            "energy": np.asarray(run.energy),
        },
        (
            Criterion(
                "share of pairs beyond 2 sqrt(eta g) whose smaller neuron becomes the bigger",
                float(swapped[large].mean()),
                high=0.5,
            ),
            Criterion("largest turn in one of the later steps, degrees", float(turned[1:].max()), low=10),
            Criterion(
                "error of the one-step formula", float(np.max(np.abs(length[1] / formula - 1))), high=1e-12
            ),
            Criterion("error of the sum rule", float(np.max(np.abs(length[1:] ** 2 / sums - 1))), high=1e-12),
            Criterion(
                "least |b1| / sqrt(2 eta g)",
                float(np.min(length[1] / np.sqrt(2 * eta * unit_pull))),
                1 - 1e-12,
            ),
            Criterion("least change of a norm", float(np.min(np.diff(length, axis=0))), low=-1e-12),
        ),
    )
