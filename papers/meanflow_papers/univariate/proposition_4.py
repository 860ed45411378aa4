"""Proposition 4: the flow of (a, b, c), seen in canonical coordinates, is the canonical flow in another metric."""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import meanflow as mf
from meanflow import univariate as uni
from meanflow.univariate import balance
from meanflow_papers.entry import entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.style import COLORS, PALE, REFERENCE, below, panels

ALPHAS = ("m", "sqrt", "one")


def plane(polar: mf.Polar) -> np.ndarray:
    """Return |r| (cos theta, sin theta), (..., 2)."""
    size = np.abs(np.asarray(polar.r))
    return size[..., None] * np.stack([np.cos(polar.theta), np.sin(polar.theta)], axis=-1)


def draw(data: Arrays) -> Figure:
    """Paths of both flows in the plane for one scaling, their distance in time for all, and the loss along (19)."""
    figure, (left, middle, right) = panels(1, 3, width=4.0, height=3.7)
    raw, reduced = np.asarray(data["raw"]), np.asarray(data["reduced"])  # (times, neurons, 2)
    for k in range(raw.shape[1]):
        color = COLORS[k % len(COLORS)]
        left.plot(reduced[:, k, 0], reduced[:, k, 1], color=color, lw=1.2)
        left.plot(raw[::8, k, 0], raw[::8, k, 1], "o", mfc="none", color=color, ms=4)
    left.plot([], [], color=REFERENCE, label=r"$\dot w = -P\,\nabla \tilde L$")
    left.plot([], [], "o", mfc="none", color=REFERENCE, ms=4, label="flow of $(a, b, c)$, projected")
    left.plot(0, 0, "+", color=REFERENCE)
    left.set(xlabel="$u$", ylabel="$v$", title=r"paths of the neurons, $\alpha = \sqrt{m}$")
    times = np.asarray(data["times"])
    for k, (alpha, gap) in enumerate(data["gap"].items()):
        middle.plot(
            times[1:], np.maximum(np.asarray(gap)[1:], 1e-17), color=COLORS[k], label=rf"$\alpha$: {alpha}"
        )
    middle.set(
        yscale="log",
        xlabel=r"$t\,m/\alpha^2$",
        ylabel="largest distance of a neuron",
        title="projected flow against $-P$",
    )
    for k, (name, loss) in enumerate(data["loss"].items()):
        right.plot(times, np.asarray(loss), color=COLORS[k], label=name)
    right.axhline(np.asarray(data["loss"]["minus"])[0], color=PALE, lw=0.8)
    right.set(
        yscale="log",
        xlabel=r"$t\,m/\alpha^2$",
        ylabel="loss $L$",
        title="with the printed sign the loss rises",
    )
    for ax in (left, middle, right):
        below(ax, columns=1 if ax is left else 3)
    return figure


@entry(
    "004/proposition-4",
    title="the flow of (a, b, c) in canonical coordinates, and its sign",
    claims=(("Proposition 4, equation (19)", "dot w_i(t) = P_i · nabla_{w_i} tilde L(w), i = 1, ..., m,"),),
    minutes=(0.15, 0.15),
    verdict="corrected",
    setup="seven random neurons, four samples, alpha = m, sqrt m and 1; adaptive steps, tolerance 1e-11.",
    draw=draw,
)
def proposition_4(width: int = 7, t1: float = 0.08, seed: int = 1) -> Outcome:
    """Solve the flow of (a, b, c), project it, and compare with the canonical coordinates moved by -P and by +P.

    The paper claims w' = P grad L~ with P = diag((m/alpha)^2 (a^2 + b^2 + c^2), 1/(a^2 + b^2)), (20). Decisive are: P
    is J J' for the Jacobian J of the projection, by automatic differentiation; the projected velocity is -P grad L~
    (with the printed sign it is off by twice its size); and the projected path is that of the flow with -P.
    """
    rng = np.random.default_rng(seed)
    data = mf.Dataset(np.array([-0.8, -0.1, 0.4, 0.9]), rng.standard_normal(4), weights="sum")
    cloud = mf.Cloud(mf.Affine(*rng.standard_normal((3, width))))
    times = np.linspace(0.0, t1, 41)
    found: Arrays = {"times": times, "gap": {}, "loss": {}}
    metric = minus = plus = 0.0
    for alpha in ALPHAS:
        scale = {"m": width, "sqrt": width**0.5, "one": 1.0}[alpha]
        full, lifted = uni.full(alpha=alpha), uni.lifted(alpha=alpha)
        pace = (
            scale**2 / width
        )  # one horizon for all: the flow is so many times slower than at alpha = sqrt m
        settings = {
            "t1": pace * t1,
            "ts": pace * times,
            "step": mf.Adaptive(1e-11, 1e-12),
            "clock": "gradient",
        }
        polar = balance.project(cloud, alpha)
        a, b, c = (np.asarray(u) for u in cloud.particles)
        square = a**2 + b**2
        printed = np.stack([(width / scale) ** 2 * (square + c**2), 1 / square], axis=1)

        def project(w: jax.Array, alpha: str = alpha) -> jax.Array:
            return jnp.stack(balance.project(mf.Cloud(mf.Affine(*w)), alpha).particles)

        jacobian = np.asarray(jax.jacobian(project)(jnp.stack(cloud.particles)))  # (2, m, 3, m)
        blocks = np.einsum("pici->ipc", jacobian)
        products = np.einsum("ipc,iqc->ipq", blocks, blocks)
        metric = max(
            metric,
            float(np.max(np.abs(products - printed[:, :, None] * np.eye(2)) / printed.max(1)[:, None, None])),
        )

        def loss(w: jax.Array, alpha: str = alpha, polar: mf.Cloud = polar) -> jax.Array:
            flow = uni.lifted(alpha=alpha)
            return mf.energy(flow, polar.at(mf.Polar(*w)), data)

        force = np.asarray(jax.grad(loss)(jnp.stack(polar.particles))).T
        velocity = mf.velocity(full, cloud, data)
        along = (
            jnp.stack(velocity) / width
        )  # the velocity is that of mean-field time, m times the gradient flow's
        seen = np.asarray(jax.jvp(project, (jnp.stack(cloud.particles),), (along,))[1]).T
        size = np.linalg.norm(seen)
        minus = max(minus, float(np.linalg.norm(seen + printed * force) / size))
        plus = max(plus, float(np.linalg.norm(seen - printed * force) / size))
        one, two = mf.solve(full, cloud, data, **settings), mf.solve(lifted, polar, data, **settings)
        assert one.clouds is not None and two.clouds is not None  # whole clouds were saved
        raw = plane(jax.vmap(lambda w, alpha=alpha: balance.project(w, alpha))(one.clouds).particles)
        reduced = plane(two.clouds.particles)
        found["gap"][alpha] = np.max(np.linalg.norm(raw - reduced, axis=-1), axis=1)
        if alpha == "sqrt":
            found |= {"raw": raw, "reduced": reduced}
            found["loss"]["minus"] = np.asarray(two.energy)
            # the printed sign: the flow of the loss turned round
            rising = uni.lifted(alpha=alpha, loss=lambda f, y: -0.5 * (f - y) ** 2)
            found["loss"]["plus, as printed"] = -np.asarray(mf.solve(rising, polar, data, **settings).energy)
    gap = max(float(g.max()) for g in found["gap"].values())
    return Outcome(
        "004/proposition-4",
        f"true with a minus: the projected velocity is -P grad L~ to {minus:.0e}, and the projected path that of the "
        f"reduced flow to {gap:.0e}, for every alpha. With the printed sign it is off by {plus:.2f} times its size "
        "and the "
        "loss rises",
        found,
        (
            Criterion("largest relative error of P = J J'", metric, high=1e-10),
            Criterion("relative error of the velocity -P grad", minus, high=1e-10),
            Criterion("relative error of the velocity +P grad, as printed", plus, low=1.0),
            Criterion("largest distance of the two paths", gap, high=1e-6),
        ),
    )
