"""Theorems 2 and 3: training with batch norm is a gradient flow on a manifold."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import meanflow as mf
from meanflow.geometry import omega
from meanflow.measures import laws
from meanflow.plots.style import COLORS, PALE, key, panels
from meanflow_papers.entry import entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome


def draw(data: Arrays) -> Figure:
    """Gaps between the two flows, with and without the factor 1/c^2."""
    figure, (ax,) = panels(1, 1, width=5.2, height=2.6)
    rows = {
        "gap": "with $1/c^2$",
        "printed": "as printed",
        "norm drift": r"drift of $|b|$",
        "Omega drift": r"drift off $\Omega$",
    }
    for k, (case, marker) in enumerate(zip(data, "os", strict=True)):
        values = [max(data[case][row], 1e-17) for row in rows]
        title = {"c = 1": "$c = 1$", "c in 0.2..5": r"$c \in [0.2, 5]$"}.get(case, case)
        ax.plot(values, np.arange(4) + 0.12 * (2 * k - 1), marker, color=COLORS[k], label=title, ms=6)
    ax.set_yticks(range(4), list(rows.values()))
    ax.set(
        xscale="log", xlabel=r"largest difference of $f$, or drift, over $t \in [0, t_1]$", ylim=(3.5, -0.5)
    )
    ax.grid(axis="y", color=PALE, alpha=0.4, lw=0.6)
    key(ax, loc="center right")
    return figure


@entry(
    "001/theorem-3",
    title="raw batch norm and the flow on the manifold give the same function (theorems 2 and 3)",
    minutes=(0.3, 0.3),
    verdict="corrected",
    setup="12 tanh neurons, 300 points in 3 dimensions with mean 1.5, t in [0, 20], tolerance 1e-11.",
    draw=draw,
)
def theorem_3(width: int = 12, points: int = 300, t1: float = 20.0, activation: str = "tanh") -> Outcome:
    """Solve training with batch norm in raw coordinates and on the manifold, and compare the functions.

    Theorems 2 and 3 claim that batch-norm training is the gradient flow of the metric G on R x Omega. We
    solve both flows from the same start, for neurons of norm c = 1 and for norms from 0.2 to 5, and once
    more with the theorem as printed, which lacks the factor 1/c^2.

    Decisive are the largest gap between the functions, which must vanish with the factor and must not
    without it, and the drift of |b| and of the distance to Omega.
    """
    rng = np.random.default_rng(1)
    x = rng.normal(size=(points, 3)) @ rng.normal(size=(3, 3)) + 1.5
    data = mf.Dataset(x, np.sin(x[:, 0]) + 0.3 * x[:, 1])
    raw, manifold = mf.batchnorm(activation).bind(data), mf.batchnorm_manifold(activation).bind(data)
    sigma = data.moments()[1]
    solve = partial(mf.solve, t1=t1, ts=11, rtol=1e-11, atol=1e-12)
    numbers = {}
    for name, law in {"c = 1": laws.sphere(3), "c in 0.2..5": laws.mixed_scales(3, 0.2, 5.0)}.items():
        cloud = raw.init(jax.random.key(2), width, dim=3, b=law)
        reduced = mf.geometry.project(cloud, sigma)
        one = solve(raw, cloud, data)
        two = solve(manifold, reduced, data)
        unit = mf.Cloud(reduced.particles, reduced.weights)
        printed = solve(manifold, unit, data)  # the theorem as printed has no factor 1/c^2
        f = [
            jax.vmap(lambda c, m=model: mf.predict(m, c, data.x))(sol.clouds)
            for model, sol in ((raw, one), (manifold, two), (manifold, printed))
        ]
        assert one.clouds is not None and two.clouds is not None  # whole clouds were saved
        norms = jnp.linalg.norm(one.clouds.particles.b, axis=-1)
        size = jax.vmap(lambda b: omega.sigma_norm(b, sigma))(two.clouds.particles.b)
        numbers[name] = {
            "gap": float(jnp.max(jnp.abs(f[0] - f[1]))),
            "printed": float(jnp.max(jnp.abs(f[0] - f[2]))),
            "norm drift": float(jnp.max(jnp.abs(norms / norms[0][None] - 1))),
            "Omega drift": float(jnp.max(jnp.abs(size - 1))),
        }
    checks = [Criterion(f"{k}, {name}", numbers[name][k], high=1e-8) for name in numbers for k in ("gap",)]
    checks += [
        Criterion(f"{k}, {name}", numbers[name][k], high=1e-9)
        for name in numbers
        for k in ("norm drift", "Omega drift")
    ]
    checks.append(
        Criterion("gap of the printed theorem, c in 0.2..5", numbers["c in 0.2..5"]["printed"], low=0.05)
    )
    return Outcome(
        "001/theorem-3",
        "Batch-norm training is the gradient flow of the metric G on R x Omega.",
        "Exactly, with a factor 1/c^2 for neurons of norm c that the paper omits.",
        numbers,
        tuple(checks),
    )
