"""Figure 1: a network as a piecewise linear function, and its neurons in the plane (u, v)."""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from meanflow import univariate as uni
from meanflow.flows import predict
from meanflow.measures import Cloud, Dataset
from meanflow.plots import fit, plane
from meanflow.solvers import solve
from meanflow_papers.entry import entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.style import PALE, below, no_legend, panels
from meanflow_papers.univariate.setup import random_neurons


def draw(data: Arrays) -> Figure:
    """The fitted function with its numbered knots, and the same neurons between the sample lines."""
    figure, (left, right) = panels(1, 2, width=4.6, height=4.4)
    grid, f = np.asarray(data["grid"]), np.asarray(data["f"])
    knots = np.asarray(data["knots"])
    fit(grid, {"$f(x)$": f}, Dataset(data["samples"], data["targets"]), left, knots=knots)
    for k, x in enumerate(np.asarray(data["samples"])):
        left.axvline(x, color=PALE, lw=0.8, ls=":", zorder=0, label="lines $x = x_j$" if k == 0 else None)
    uv = np.asarray(data["plane"])
    sizes = np.linalg.norm(uv, axis=1)
    r = np.asarray(data["sign"]) * sizes
    reach = 1.25 * sizes.max()
    plane(r, np.arctan2(uv[:, 1], uv[:, 0]), right, samples=data["samples"], reach=reach)
    for line in left.lines:
        if line.get_label() == "knots":
            line.set(markersize=9, zorder=2)
    for line in right.lines:
        if str(line.get_label()).startswith("$r"):
            line.set_markersize(11)
    groups: dict[float, list[str]] = {}  # neurons that share a knot share a label
    for k, knot in enumerate(knots):
        groups.setdefault(round(float(knot), 2), []).append(str(k + 1))
    for knot, names in groups.items():
        if grid[0] <= knot <= grid[-1]:
            at = (knot, float(np.interp(knot, grid, f)))
            left.annotate(", ".join(names), at, (5, 7), textcoords="offset points", fontsize=7.5)
    small = sizes < 0.1 * sizes.max()
    _number(right, uv, np.flatnonzero(~small))
    near = right.inset_axes((0.28, 0.06, 0.44, 0.36))  # the rays of the dead region leave this place free
    inner = 1.3 * sizes[small].max()
    plane(r, np.arctan2(uv[:, 1], uv[:, 0]), near, samples=data["samples"], reach=inner)
    no_legend(near)
    near.set(xlabel="", ylabel="")
    near.tick_params(labelsize=6)
    near.set_title("near 0", fontsize=7.5, pad=2)
    _number(near, uv, np.flatnonzero(small))
    left.set_title("function; knots numbered by their neuron")
    right.set_title(
        r"neurons $|r|(\cos\theta, \sin\theta)$" "\nwhite: lines of samples; darker: more active samples"
    )
    below(left, columns=4)
    return figure


def _number(ax: Axes, uv: np.ndarray, chosen: np.ndarray) -> None:
    """Write their numbers above neurons; those that lie almost on each other share a label."""
    groups: list[list[int]] = []
    for k in chosen.tolist():
        close = (g for g in groups if np.linalg.norm(uv[g[0]] - uv[k]) < 0.1 * np.abs(uv[chosen]).max())
        group = next(close, None)
        groups.append([k]) if group is None else group.append(k)
    for group in groups:
        across, up = (float(v) for v in uv[group].mean(axis=0))
        named = ", ".join(str(k + 1) for k in group)
        ax.annotate(named, (across, up), (0, 5), textcoords="offset points", ha="center", fontsize=7.5)


@entry(
    "004/figure-1",
    title="a network as a piecewise linear function, and its neurons in the plane (u, v)",
    claims=(
        ("Section 2.3", "a neuron (a_i, b_i, c_i) coincides with a point x if b_i/a_i = v_i/u_i = x."),
        ("Section 3.1", "partition the circle S^1 into 2s-1 regions A_k"),
    ),
    minutes=(0.14, 0.14),
    verdict="corrected",
    setup="12 neurons that fit 5 samples (canonical flow to time 5000).",
    draw=draw,
)
def figure_1(seed: int = 0) -> Outcome:
    """Fit five samples by 12 neurons and look at the network as a function and as points in the plane.

    The paper claims that f is piecewise linear with knots b/a = v/u and that the sample lines cut the plane
    into 2s - 1 regions. The canonical flow is solved until the samples are fitted. Decisive are the places where f
    bends, the relation of knots and (u, v), which is b/a = -v/u, and the number of activation patterns, which is 2s.
    """
    x, y = jnp.array([-0.9, -0.4, 0.1, 0.5, 0.8]), jnp.array([0.4, -0.3, 0.5, -0.2, 0.3])
    flow, data = uni.canonical(), Dataset(x, y, weights="sum")
    start = Cloud(random_neurons(jax.random.key(seed), 12, 2.0))
    cloud = solve(flow, start, data, 5000.0, solver="sliding", step=0.25).final
    polar = cloud.particles
    grid = jnp.linspace(-1.5, 1.5, 2001)
    f = predict(flow, cloud, grid)
    knot = -jnp.tan(polar.theta)
    bent = jnp.abs(f[2:] - 2 * f[1:-1] + f[:-2]) > 1e-9
    near = jnp.min(jnp.abs(grid[1:-1, None] - knot[None, :]), axis=1) <= grid[1] - grid[0]
    angles = jnp.linspace(-jnp.pi, jnp.pi, 40001)[1:]
    # which samples each direction sees, (samples, angles); a region is an arc of directions that see the same ones
    active = x[:, None] * jnp.cos(angles)[None, :] > -jnp.sin(angles)[None, :]
    patterns = {tuple(u) for u in np.asarray(active.T)}
    regions = jnp.sum(jnp.any(active != jnp.roll(active, 1, axis=1), axis=0))
    dead, dead_arc = jnp.mean(~jnp.any(active, axis=0)), jnp.pi - (jnp.arctan(x[-1]) - jnp.arctan(x[0]))
    plane = jnp.abs(polar.r)[:, None] * jnp.stack([jnp.cos(polar.theta), jnp.sin(polar.theta)], axis=-1)
    return Outcome(
        "004/figure-1",
        "knots are b/a = -v/u, and there are 2s regions: the dead one was not counted",
        {
            "grid": grid,
            "f": f,
            "knots": knot,
            "plane": plane,
            "sign": jnp.sign(polar.r),
            "samples": x,
            "targets": y,
        },
        (
            Criterion(
                "largest error at a sample", float(jnp.max(jnp.abs(predict(flow, cloud, x) - y))), 0, 0.01
            ),
            Criterion("bends away from knots", float(jnp.sum(bent & ~near)), 0, 0),
            Criterion("patterns", float(len(patterns)), 10, 10),
            Criterion("regions", float(regions), 10, 10),
            Criterion("dead arc", float(dead * 2 * jnp.pi - dead_arc), -3e-4, 3e-4),
        ),
    )
