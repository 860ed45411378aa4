"""Figure 3: the first step of descent lengthens small neurons."""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import meanflow as mf
from meanflow.plots.style import COLORS, PALE, key, panels
from meanflow_papers.entry import entry
from meanflow_papers.manifold.setup import DATA, quasi_normal, spokes
from meanflow_papers.outcome import Arrays, Criterion, Outcome


def draw(data: Arrays) -> Figure:
    """Norms before and after the first step, and later."""
    figure, (left, right) = panels(1, 2, width=4.0, height=3.2)
    norms = np.asarray(data["norms"])
    order = np.argsort(norms[0])
    start = norms[0][order]
    left.plot(start, norms[1][order], "o", color=COLORS[0], label="after 1 step", ms=4)
    left.plot(start, norms[-1][order], "^", color=COLORS[1], label=f"after {len(norms) - 1} steps", ms=4)
    left.plot(start, start, color=PALE, lw=1, label="no change")
    left.set(xscale="log", yscale="log", xlabel=r"$|b_0|$", ylabel=r"$|b_n|$")
    key(left)
    steps = np.arange(len(norms)) + 1
    for k in order[:: max(1, len(order) // 10)]:
        right.plot(steps, norms[:, k], color=COLORS[0], lw=0.9, alpha=0.8)
    right.set(xscale="log", yscale="log", xlabel="iteration + 1", ylabel=r"$|b_n|$ of ten neurons")
    return figure


@entry(
    "001/figure-3",
    title="first-step amplification: norms of 40 neurons after one step of descent",
    verdict="corrected",
    setup=f"{DATA} (eta = 0.1, 200 steps); norms from 1e-3 to 1, log-spaced.",
    draw=draw,
)
def figure_3(width: int = 40, eta: float = 0.1, steps: int = 200) -> Outcome:
    """Follow the norms of neurons through the first steps of descent with batch norm.

    The paper claims that after one step a smaller neuron is always the bigger one. The gradient g at |b| =
    1 scales as 1/|b| and is orthogonal to b, so |b1|^2 = |b0|^2 + eta^2 g^2/|b0|^2.

    Decisive are this formula to rounding, its sum over all steps, and that no norm is below sqrt(2 eta g)
    after one step.
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
    return Outcome(
        "001/figure-3",
        "After one step a smaller neuron is always the bigger one.",
        "|b1|^2 = |b0|^2 + eta^2 g^2/|b0|^2 is not monotone: it is least, sqrt(2 eta g), at |b0| = sqrt(eta g). Tiny "
        "neurons jump by almost 90 degrees and are then frozen.",
        {"norms": length, "energy": np.asarray(run.energy)},
        (
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
