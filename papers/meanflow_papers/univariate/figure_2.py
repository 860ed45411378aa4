"""Figure 2: local trajectories of neurons as the balance delta grows."""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from meanflow.measures import Polar
from meanflow.univariate import balance
from meanflow_papers.entry import entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.style import COLORS, PALE, REFERENCE, panels
from meanflow_papers.univariate.pictures import balance_title


def draw(data: Arrays) -> Figure:
    """Short paths of five neurons under one frozen force, by balance, and under the reduced flow (7)."""
    deltas, paths, reduced = (np.asarray(data[name]) for name in ("delta", "paths", "reduced"))
    figure, grid = panels(1, len(deltas), width=2.4, height=2.5, sharex=True, sharey=True)
    reach = 1.1 * np.abs(paths).max()
    for ax, delta, path in zip(grid, deltas, paths, strict=True):
        for k, uv in enumerate(reduced if delta == deltas[-1] else ()):
            ax.plot(uv[:, 0], uv[:, 1], color=COLORS[k], lw=1.2, ls="--")
        for k, uv in enumerate(path):
            ax.plot([0, uv[0, 0]], [0, uv[0, 1]], color=PALE, lw=0.6, ls=":")
            ax.plot(uv[:, 0], uv[:, 1], color=COLORS[k], lw=1.8)
            ax.plot(*uv[0], "o", color=COLORS[k], ms=4)
        ax.annotate(
            "", (-0.1 * reach, -0.85 * reach), (0.5 * reach, -0.85 * reach), arrowprops={"arrowstyle": "->"}
        )
        ax.text(0.55 * reach, -0.85 * reach, "$-G$", va="center", fontsize=8)
        ax.set(aspect="equal", xlim=(-reach, reach), ylim=(-reach, reach), xlabel="$u$ (along $G$)")
        ax.set_title(balance_title(delta))
    grid[0].set_ylabel("$v$")
    handles = [
        Line2D([], [], ls="", marker="o", color=REFERENCE, ms=4, label="start of a neuron"),
        Line2D([], [], color=REFERENCE, lw=1.8, label=r"its path (one color a neuron)"),
        Line2D([], [], color=REFERENCE, lw=1.2, ls="--", label="the same under (7), as long"),
        Line2D(
            [], [], color=PALE, lw=0.8, ls=":", label="radial direction, along which the kernel regime moves"
        ),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    return figure


def reduced_path(uv: jax.Array) -> jax.Array:
    """Return the path (41, 2) of (7) in the plane from the same start and as long as ``uv``, for G = (1, 0) and r > 0.

    r' = -<G, d> and theta' = -r <G, t> move the point r d along -(<G, d> d + r^2 <G, t> t).
    """
    length = jnp.sum(jnp.linalg.norm(jnp.diff(uv, axis=0), axis=1))

    def forward(p: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        r = jnp.linalg.norm(p)
        d, t = p / r, jnp.stack([-p[1], p[0]]) / r
        v = -(d[0] * d + r**2 * t[0] * t)
        p = p + length / 400 * v / jnp.linalg.norm(v)
        return p, p

    points = jax.lax.scan(forward, uv[0], length=400)[1]
    return jnp.concatenate([uv[:1], points[9::10]])


@entry(
    "004/figure-2",
    title="local trajectories as the balance delta grows, one frozen force",
    claims=(
        (
            "Section 3.2, after equation (21)",
            "if c_i^2 << a_i^2 + b_i^2 for all i (i.e., delta_i << 0), then radial motion will dominate.",
        ),
        (
            "Section 3.2, after equation (21)",
            "if c_i^2 >> a_i^2 + b_i^2, then a solution of the gradient flow (2) will follow the same "
            "trajectory as for the reduced gradient flow (7).",
        ),
    ),
    minutes=(0.07, 0.07),
    verdict="corrected",
    setup="five neurons, G = (1, 0), delta = -100, -1, 0, 1, 100, in closed form.",
    draw=draw,
)
def figure_2() -> Outcome:
    """Follow five neurons under one frozen force for balances delta from -100 to 100.

    The paper claims that neurons move radially for delta << 0 and along the gradient for delta >> 0, as in
    the reduced flow (7). Paths are in closed form. Decisive are how far each neuron turns and how much of
    its motion is across the force, both monotone in delta; the limit delta = +inf is the planar flow, not
    (7).
    """
    start = Polar(jnp.array([0.6, 0.6, 1.0, 1.0, 1.4]), jnp.array([0.7, 2.0, -1.2, -2.6, 1.5]))
    deltas = jnp.array([-100.0, -1.0, 0.0, 1.0, 100.0])
    force = jnp.array([1.0, 0.0])

    def path(r: jax.Array, theta: jax.Array, delta: jax.Array) -> dict[str, jax.Array]:
        """(c, p) along p' = -c G, c' = -<G, p> in closed form, in a single region (no sample is met)."""
        c, n = balance.split(r, delta)  # m/alpha = 1
        p = n * jnp.stack([jnp.cos(theta), jnp.sin(theta)])
        ts = jnp.linspace(0.0, 1.0, 41) * 0.4 / (c**2 + p @ p)
        along = p @ force
        q = p[None, :] + ((jnp.cosh(ts) - 1) * along - c * jnp.sinh(ts))[:, None] * force[None, :]
        c = c * jnp.cosh(ts) - along * jnp.sinh(ts)
        uv = jnp.abs(c)[:, None] * q  # |r| d(theta) with r = c |p|
        across = uv[-1] - uv[0] - force * ((uv[-1] - uv[0]) @ force)
        n, angle = jnp.linalg.norm(q, axis=-1), jnp.arctan2(q[:, 1], q[:, 0])
        invariants = jnp.stack([q[:, 1], c**2 - n**2])  # n sin psi is the component across the force
        return {
            "uv": uv,
            "turn": jnp.max(jnp.abs(angle - angle[0])),
            "across": jnp.linalg.norm(across) / jnp.linalg.norm(uv[-1] - uv[0]),
            "drift": jnp.max(jnp.abs(invariants - invariants[:, :1]) / (1 + jnp.abs(invariants[:, :1]))),
        }

    paths = jax.vmap(lambda d: jax.vmap(lambda r, t: path(r, t, d))(*start))(deltas)
    turn, across = jnp.max(paths["turn"], 1), jnp.max(paths["across"], 1)
    reduced = jax.vmap(reduced_path)(paths["uv"][-1])
    way = lambda uv: jnp.arctan2(*(uv[:, -1] - uv[:, 0]).T)
    apart = jnp.degrees(jnp.abs(jnp.angle(jnp.exp(1j * (way(reduced) - way(paths["uv"][-1]))))))
    return Outcome(
        "004/figure-2",
        "monotone in delta, but the limit delta = +inf is the planar flow, along the force, and not (7): of "
        "equally long "
        f"paths at delta = 100 and under (7) the directions differ by {float(apart.min()):.0f} to "
        f"{float(apart.max()):.0f} degrees",
        {"delta": deltas, "paths": paths["uv"], "reduced": reduced, "turn": turn, "across": across},
        (
            Criterion("max turn at delta = -100", float(turn[0]), 0, 1e-3),
            Criterion("turn is monotone", float(jnp.min(jnp.diff(turn))), 0),
            Criterion("share across the force at delta = 100", float(across[-1]), 0, 1e-3),
            Criterion("share across is monotone", float(jnp.max(jnp.diff(across))), -np.inf, 0),
            # paths that followed (7) would leave in its direction
            Criterion(
                "largest angle between the ways at delta = 100 and under (7)", float(apart.max()), low=10
            ),
            Criterion("drift of n sin psi and delta", float(jnp.max(paths["drift"])), 0, 1e-12),
        ),
    )
