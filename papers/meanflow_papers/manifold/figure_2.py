"""Figure 2: short and long neurons in one network with batch norm."""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import meanflow as mf
from meanflow.plots import traces
from meanflow_papers.entry import Arguments, entry
from meanflow_papers.manifold.setup import DATA, quasi_normal, spokes
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.pictures import needles
from meanflow_papers.style import COLORS, canvas, key


def _directions(flow: mf.Flow, cloud: mf.Cloud, data: mf.Dataset) -> jax.Array:
    """Observe the inner weights b of all neurons."""
    return cloud.particles.b


def two_scales(outcome: Outcome, arguments: Arguments) -> Arrays:
    """001/figure-2: directions of the 25 short and 25 long neurons at six iterations, (6, 50, 2)."""
    x = quasi_normal(400)
    data = mf.Dataset(x, np.abs(x[:, 0]))
    short, long = spokes(25).particles, spokes(25, 10.0).particles
    cloud = mf.Cloud(jax.tree.map(lambda u, v: jnp.concatenate([u, v]), short, long))
    steps = arguments["steps"]
    flow = mf.batchnorm().bind(data)
    run = mf.descend(flow, cloud, data, steps, step=arguments["eta"], every=steps // 5, observe=_directions)
    return {"b": run.observed, "frames": np.arange(0, steps + 1, steps // 5)}


def _inner(b: np.ndarray, ax: Axes) -> None:
    """Draw the directions of the short neurons up to half the radius, so that they cover none of the long ones."""
    half = 0.55 * b / np.linalg.norm(b, axis=1, keepdims=True)
    for tip in half:
        ax.plot([0, tip[0]], [0, tip[1]], color=COLORS[0], lw=1.1)
    ax.plot(half[:, 0], half[:, 1], "o", ms=3.5, color=COLORS[0])


def draw(data: Arrays) -> Figure:
    """Directions of short and long neurons in time, and their alignment."""
    figure = canvas(11.0, 5.0)
    above, below = np.asarray(figure.subfigures(2, 1, height_ratios=(1, 1.3)))
    b = np.asarray(data["b"])
    for ax, k, iteration in zip(above.subplots(1, 6), range(6), data["frames"], strict=True):
        needles(b[k, 25:], ax, color=COLORS[3])
        _inner(b[k, :25], ax)
        ax.set_title(f"iteration {int(iteration)}")
    left, right = below.subplots(1, 2)
    q = np.asarray(data["Q"])
    label = r"alignment $Q = \langle\cos 2\vartheta\rangle$"
    curves = {"$|b_0| = 1$ (short needles above)": q[:, 0], "$|b_0| = 10$ (long needles)": q[:, 1]}
    traces(data["iteration"], curves, left, xlabel="iteration", ylabel=label)
    left.lines[1].set_color(COLORS[3])
    key(left)
    traces(data["iteration"], {"": data["energy"]}, right, xlabel="iteration", ylabel="loss $L$", logy=True)
    return figure


@entry(
    "001/figure-2",
    title="neurons with |b| = 1 and |b| = 10 in one network: the short ones turn first",
    claims=(
        ("Section 4.2", "dot b_2 = (1/c) dot b_1 Hence, for the BN model, smaller neurons move faster."),
        (
            "Section 4",
            "We focus on the speed of parameters b, i.e., the speed of the changing of the neurons' directions.",
        ),
        (
            "Figure 2",
            "The figures show that blue neurons converge faster than purple neurons, i.e. shorter "
            "neurons moves faster than long neurons.",
        ),
    ),
    minutes=(0.05, 0.05),
    verdict="corrected",
    setup=f"{DATA} (eta = 0.01, 10000 steps); 25 neurons of each norm with the same directions.",
    draw=draw,
    picture=two_scales,
)
def figure_2(eta: float = 0.01, steps: int = 10_000) -> Outcome:
    """Train neurons with |b| = 1 and |b| = 10 in one network with batch norm.

    The paper claims that short neurons move faster by 1/c, where c = |b|. We compare the initial velocities
    of both groups, and follow how fast each group aligns with the wide axis.

    Decisive are the exact ratio 10 of the raw speeds (directions then turn 100 times as fast), and that the short
    group passes every level of alignment first.
    """
    x = quasi_normal(400)
    data = mf.Dataset(x, np.abs(x[:, 0]))
    flow = mf.batchnorm().bind(data)
    short, long = spokes(25).particles, spokes(25, 10.0).particles
    cloud = mf.Cloud(jax.tree.map(lambda u, v: jnp.concatenate([u, v]), short, long))

    def both(flow: mf.Flow, cloud: mf.Cloud, data: mf.Dataset) -> jax.Array:
        b = cloud.particles.b
        c2 = (b[:, 0] ** 2 - b[:, 1] ** 2) / jnp.sum(b**2, axis=1)
        return jnp.stack([jnp.mean(c2[:25]), jnp.mean(c2[25:])])

    v = mf.velocity(flow, cloud, data).b
    raw = np.linalg.norm(v, axis=1)
    run = mf.descend(flow, cloud, data, steps, step=eta, every=steps // 100, observe=both)
    q = np.asarray(run.observed)
    levels = np.linspace(0.05, max(0.06, float(q[:, 1].max())), 10)
    first = [[int(np.argmax(q[:, k] >= level)) for level in levels] for k in (0, 1)]
    early = int(2000 / steps * 100)
    return Outcome(
        "001/figure-2",
        "The raw speed goes as 1/c but the direction turns as 1/c^2. The long neurons lag behind: after "
        f"{steps} steps their Q is {q[-1, 1]:.2f}, that of the short ones {q[-1, 0]:.2f}, while "
        f"{float(run.energy[-1] / run.energy[0]):.4f} of the loss is left to move them.",
        {"iteration": np.arange(0, steps + 1, steps // 100), "Q": q, "energy": np.asarray(run.energy)},
        (
            Criterion("raw speed ratio", float(np.max(raw[:25] / raw[25:])), 10 - 1e-9, 10 + 1e-9),
            Criterion("Q of short neurons at 2000", q[early, 0], low=0.95),
            Criterion("Q of long neurons at 2000", q[early, 1], high=0.15),
            Criterion(
                "thresholds where long came first",
                float(np.sum(np.array(first[0]) > np.array(first[1]))),
                0,
                0,
            ),
        ),
    )
