"""Figure 1: a network as a piecewise linear function, and its neurons in the plane (u, v)."""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from meanflow import univariate as uni
from meanflow.flows.flow import predict
from meanflow.measures import Cloud
from meanflow.plots.clouds import plane
from meanflow.plots.curves import fit
from meanflow.plots.style import PALE, key, panels
from meanflow.univariate import balance, forces
from meanflow.univariate.rays import dead_arc
from meanflow_papers.entry import entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.univariate.setup import random_neurons


def draw(data: Arrays) -> Figure:
    """The function with its knots, and the neurons between the sample lines."""
    figure, (left, right) = panels(1, 2, width=3.9, height=3.4)
    grid, f = np.asarray(data["grid"]), np.asarray(data["f"])
    fit(grid, {"$f(x)$": f}, None, left, knots=data["knots"])
    for k, x in enumerate(np.asarray(data["samples"])):
        left.axvline(x, color=PALE, lw=0.8, ls=":", zorder=0, label="samples $x_j$" if k == 0 else None)
    key(left)
    uv = np.asarray(data["plane"])
    r = np.asarray(data["sign"]) * np.linalg.norm(uv, axis=1)
    plane(r, np.arctan2(uv[:, 1], uv[:, 0]), right, samples=data["samples"])
    for line in right.lines:
        if str(line.get_label()).startswith("$r"):
            line.set_markersize(11)
    return figure


@entry(
    "004/figure-1",
    title="a network as a piecewise linear function, and its neurons in the plane (u, v)",
    verdict="corrected",
    setup="12 neurons, 5 samples.",
    draw=draw,
)
def figure_1(seed: int = 0) -> Outcome:
    """Evaluate a network of 12 neurons as a function and as points in the plane.

    The paper claims that f is piecewise linear with knots b/a = v/u and that the sample lines cut the plane
    into 2s - 1 regions. Decisive are the places where f bends, the relation of knots and (u, v), which is
    b/a = -v/u, and the number of activation patterns, which is 2s.
    """
    x = jnp.array([-0.9, -0.4, 0.1, 0.5, 0.8])
    polar = random_neurons(jax.random.key(seed), 12, 2.0)
    cloud, flow = Cloud(polar), uni.canonical()
    grid = jnp.linspace(-1.5, 1.5, 2001)
    f = predict(flow, cloud, grid)
    knot = -jnp.tan(polar.theta)
    bent = jnp.abs(f[2:] - 2 * f[1:-1] + f[:-2]) > 1e-9
    near = jnp.min(jnp.abs(grid[1:-1, None] - knot[None, :]), axis=1) <= grid[1] - grid[0]
    angles = jnp.linspace(-jnp.pi, jnp.pi, 40001)[1:]
    regions = forces.find_regions(balance.unit(angles), x)
    patterns = {tuple(u) for u in np.asarray(forces.is_active(balance.unit(angles), x).T)}
    plane = balance.to_plane(polar)
    return Outcome(
        "004/figure-1",
        "f is piecewise linear with knots b/a = v/u; the sample lines cut the plane into 2s - 1 regions",
        "knots are b/a = -v/u, and there are 2s regions: the dead one was not counted",
        {"grid": grid, "f": f, "knots": knot, "plane": plane, "sign": jnp.sign(polar.r), "samples": x},
        (
            Criterion("bends away from knots", float(jnp.sum(bent & ~near)), 0, 0),
            Criterion("knot = -v/u", float(jnp.max(jnp.abs(knot + plane[:, 1] / plane[:, 0]))), 0, 1e-9),
            Criterion("patterns", float(len(patterns)), 10, 10),
            Criterion("regions", float(len(set(regions.tolist()))), 10, 10),
            Criterion("dead arc", float(jnp.mean(regions == 0) * 2 * jnp.pi - dead_arc(x)), -3e-4, 3e-4),
        ),
    )
