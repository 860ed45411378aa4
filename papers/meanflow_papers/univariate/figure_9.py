"""Figure 9: the field felt by a neuron, attracting samples, and where neurons gather."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import meanflow as mf
from meanflow import univariate as uni
from meanflow.flows import predict
from meanflow.measures import Affine, Cloud
from meanflow.plots import fit, plane
from meanflow.solvers import Solution, solve
from meanflow.univariate import balance
from meanflow_papers.entry import Arguments, entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.pictures import field
from meanflow_papers.style import COLORS, no_legend, panels
from meanflow_papers.univariate.pictures import GRID, knot_counts
from meanflow_papers.univariate.setup import random_neurons, square_wave


def field_at_10(outcome: Outcome, arguments: Arguments) -> Arrays:
    """004/figure-9: function, neurons, residual and the field felt by a neuron of either sign at flow time 10."""
    data = square_wave()
    cloud = balance.lift(mf.Cloud(random_neurons(jax.random.key(9), 400), labels=jnp.inf), "sqrt")
    flow = uni.full(alpha="sqrt", outer=False)
    sol = mf.solve(flow, cloud, data, 10.0, solver="sliding", step=arguments["step"], clock="gradient")
    residual = mf.predict(flow, sol.final, data.x) - data.y
    polar = balance.project(sol.final, "sqrt").particles
    reach = 1.05 * float(jnp.max(jnp.abs(polar.r)))
    u, v = (w.ravel() for w in np.meshgrid(*2 * [np.linspace(-reach, reach, 18)]))
    return {
        "grid": GRID,
        "x": data.x,
        "y": data.y,
        "f": mf.predict(flow, sol.final, jnp.asarray(GRID)),
        "r": polar.r,
        "theta": polar.theta,
        "residual": residual,
        "u": u,
        "v": v,
        "velocity": -_force(np.stack([u, v], axis=-1), data.x, residual),  # if r > 0; opposite for r < 0
    }


def draw(data: Arrays) -> Figure:
    """The field on a neuron with r > 0, the function, and the neurons with the attracting rays."""
    figure, grid = panels(1, 3, width=4.1, height=4.3)
    rays = uni.classify_rays(data["x"], data["residual"])
    reach = float(np.max(np.abs(data["u"])))
    plane([], [], grid[0], samples=data["x"], rays=rays, reach=reach)
    field(data["u"], data["v"], data["velocity"], grid[0])
    grid[0].set_title("field on a neuron with $r > 0$ at $t = 10$\n(for $r < 0$ the arrows turn round)")
    grid[1].set_title("function at $t = 10$")
    grid[2].set_title("neurons at $t = 10$")
    fit(data["grid"], {"$f$": data["f"]}, mf.Dataset(data["x"], data["y"]), grid[1])
    grid[1].set_ylim(-2.4, 2.4)
    knot_counts(grid[1], data["theta"])
    plane(data["r"], data["theta"], grid[2], samples=data["x"], rays=rays, reach=reach)
    handles = [*grid[1].get_legend_handles_labels()[0], *grid[2].get_legend_handles_labels()[0]]
    for ray, signs in zip(handles[2:4], (("> 0", "< 0"), ("< 0", "> 0")), strict=True):
        ray.set_label(f"ray that attracts $r {signs[0]}$ and repels $r {signs[1]}$")
    for mark in handles[4:]:
        mark.set_label(f"neurons, {mark.get_label()}")
    handles.insert(
        2, Line2D([], [], lw=4, color=COLORS[2], alpha=0.7, label="number of knots in each of 110 bins")
    )
    words = "darker: more samples active; white: their lines"
    handles.append(Line2D([], [], color="0.84", lw=5, label=words))
    for ax in grid:
        no_legend(ax)
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=7.5)
    return figure


@entry(
    "004/figure-9",
    title="the field felt by a neuron, attracting samples, and where neurons gather",
    claims=(
        ("Section 3.1", "the velocity field is piece-wise linear on each cylindrical region R x A_k"),
        (
            "Figure 9",
            'These samples are "attractors" or "repulsors" where particles get stuck or get pushed '
            "away from.",
        ),
    ),
    full={"times": (10.0, 40.0, 100.0, 150.0)},
    minutes=(0.41, 0.7),
    verdict="corrected",
    setup="square wave, delta = +inf, 1000 neurons, sliding solver to flow time 150; drawn: 400 neurons at time 10.",
    draw=draw,
    picture=field_at_10,
)
def figure_9(
    times: tuple[float, ...] = (10.0, 40.0, 100.0, 150.0), width: int = 1000, step: float = 0.02
) -> Outcome:
    """Compute the field in the plane, the rays that attract, and where captured neurons sit.

    The paper claims that the field is piecewise linear and that neurons gather at attracting samples. We
    solve to several times with the sliding solver and compare the rule for attracting rays with the field
    just beside each ray.

    Decisive are that rule and field agree on every ray, that every captured live neuron sits on a ray that
    attracts it, and that the energy never rises.
    """
    data = square_wave()
    cloud = balance.lift(Cloud(random_neurons(jax.random.key(9), width), labels=jnp.inf), "sqrt")
    flow = uni.full(alpha="sqrt", outer=False)
    sol = solve(
        flow, cloud, data, times[-1], ts=jnp.asarray(times), solver="sliding", step=step, clock="gradient"
    )

    def inspect(w: Affine) -> dict[str, jax.Array]:
        residual = predict(flow, cloud.at(w), data.x) - data.y
        table = uni.classify_rays(data.x, residual)
        # independent of the rule: the tangential field just beside each ray, on both sides, for r > 0
        beside = table.theta[None, :] + 1e-6 * jnp.array([-1.0, 1.0])[:, None]
        d = jnp.stack([jnp.cos(beside), jnp.sin(beside)], axis=-1)
        force = _force(d, data.x, residual)
        turning = force[..., 1] * d[..., 0] - force[..., 0] * d[..., 1]
        pulls = (turning[0] < 0) & (turning[1] > 0)  # theta' = -r <G, t>
        pushes = (turning[0] > 0) & (turning[1] < 0)
        seen = pulls.astype(jnp.int32) - pushes.astype(jnp.int32)
        p, theta = jnp.stack([w.a, -w.b], axis=-1), jnp.arctan2(-w.b, w.a)
        gap = jnp.abs(jnp.sin(theta[:, None] - table.theta[None, :]))
        ahead = jnp.cos(theta[:, None] - table.theta[None, :]) > 0
        # a neuron pushed off the data stays at the ray of the last sample: dead, not captured
        alive = jnp.any(p @ _tilde(data.x).T > 1e-9, axis=1)
        on = (gap < 1e-9) & ahead & alive[:, None]
        kind = jnp.where(w.c[:, None] > 0, table.positive[None, :], table.negative[None, :])
        return {
            "disagree": jnp.sum(seen != table.positive) + jnp.sum(-seen != table.negative),
            "captured": jnp.sum(jnp.any(on, 1)),
            "attracted": jnp.sum(on & (kind == 1)),
            "repelled": jnp.sum(on & (kind == -1)),
            "attractors": jnp.sum(table.positive != 0),
        }

    found = {k: np.asarray(v) for k, v in jax.vmap(inspect)(_series(sol).particles).items()}
    return Outcome(
        "004/figure-9",
        "constant per region in (u, v); captured live neurons sit on rays that attract at that moment, all of them "
        f"({', '.join(str(int(n)) for n in found['captured'])} of {width} at t = "
        f"{', '.join(f'{t:g}' for t in times)}, to 1e-9 under the sliding solver)",
        {"times": np.array(times), **found, **{k: int(v) for k, v in sol.stats.items()}},
        (
            Criterion("rays where rule and field disagree", float(found["disagree"].sum()), 0, 0),
            Criterion("neurons on repulsors", float(found["repelled"].sum()), 0, 0),
            Criterion(
                "captured but not attracted", float((found["captured"] - found["attracted"]).sum()), 0, 0
            ),
            Criterion("largest rise of the energy", float(np.diff(np.asarray(sol.energy)).max()), high=0),
            Criterion("least number of captured neurons", float(found["captured"].min()), 1),
            Criterion("solver finished", float(bool(sol.ok)), 1, 1),
        ),
    )


def _series(solution: Solution) -> Cloud:
    assert solution.clouds is not None  # nothing was observed in their place
    return solution.clouds


def _tilde(x: jax.Array) -> jax.Array:
    return jnp.stack([x, jnp.ones_like(x)], axis=-1)


def _force(d: ArrayLike, x: jax.Array, residual: jax.Array) -> jax.Array:
    """Return the sum of residual_j (x_j, 1) over the samples that a neuron of direction d (..., 2) sees."""
    seen = (jnp.einsum("...k,jk->...j", d, _tilde(x)) > 0).astype(x.dtype)
    return jnp.einsum("...j,j,jk->...k", seen, residual, _tilde(x))
