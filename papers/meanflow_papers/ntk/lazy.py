"""Training of wide networks against linearized predictions under batch norm."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from meanflow import kernels
from meanflow_papers.entry import Arguments, entry
from meanflow_papers.intervals import mean, told
from meanflow_papers.ntk.networks import Weights, dense, normalize, seed_key
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.style import COLORS, MARKERS, REFERENCE, below, panels

PREDICTIONS = {
    "plain, frozen K": "plain, frozen $K$",
    "BN, frozen K_BN": r"batch norm, frozen $K_{\mathrm{BN}}$",
    "BN, frozen K before BN": "batch norm exact, frozen $K$",
    "same, test points": "the same on test points",
}


def draw(data: Arrays) -> Figure:
    """Errors of the linearized predictions against the width: geometric means, and every seed."""
    figure, (ax,) = panels(1, 1, width=6.0, height=4.4)
    widths = np.asarray(data["widths"])
    for k, (name, title) in enumerate(PREDICTIONS.items()):
        errors = np.asarray(data[name])  # (widths, seeds)
        slope = told(np.asarray(data["exponents"][name]))
        style: Arguments = {"color": COLORS[k], "marker": MARKERS[k]}
        ax.plot(widths, np.exp(np.log(errors).mean(1)), label=f"{title}: $N$ to the {slope}", **style)
        ax.plot(widths, errors, ls="", ms=3, alpha=0.5, **style)
    ax.plot([], [], ls="", marker="o", ms=3, alpha=0.5, color=REFERENCE, label="each seed")
    ax.axhline(0.01, color=REFERENCE, lw=0.8, ls=":", label="1 % of the initial residual")
    ax.set(xscale="log", yscale="log", xlabel="$N$", ylabel="error / initial residual after 100 steps")
    ax.set_xticks(widths, [str(n) for n in widths])
    ax.minorticks_off()
    below(ax, columns=1)
    return figure


class _Circle(NamedTuple):
    """Training points x (T, 2) on a circle, points z (T, 2) between them, and targets y (T,) at x."""

    x: jax.Array
    z: jax.Array
    y: jax.Array


def _circle(samples: int) -> _Circle:
    angle = 2 * np.pi * np.arange(samples) / samples
    point = lambda a: jnp.asarray(np.stack([np.cos(a), np.sin(a)], axis=1) * np.sqrt(2))
    y = jnp.asarray(np.sin(angle) + 0.5 * np.cos(2 * angle + 1))
    # a normalized output has standard deviation 1, and can reach no other target
    return _Circle(point(angle), point(angle + np.pi / samples), y / jnp.std(y))


def _descend(loss: Callable[[Weights], jax.Array], weights: Weights, rate: jax.Array, steps: int) -> Weights:
    """Return the weights after so many steps of plain gradient descent."""
    step = lambda w, _: (jax.tree.map(lambda a, g: a - rate * g, w, jax.grad(loss)(w)), None)
    return jax.lax.scan(step, weights, length=steps)[0]


def linearized_batchnorm(
    kernel: jax.Array,
    start: jax.Array,
    y: jax.Array,
    *,
    learning_rate: jax.Array | float,
    steps: int,
    cross: jax.Array,
    at: jax.Array,
    epsilon: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Train a network with batch norm on the output, linearized before batch norm; the loss is (1/2) sum (f - y)^2.

    u <- u - learning_rate K B(u) (bn(u) - y), where u are the outputs before batch norm. Their kernel K is frozen (it
    is what becomes constant with width); batch norm and its Jacobian B(u) stay exact and move with u.

    Args:
        kernel: K (T, T) before batch norm, frozen at initialization.
        start: u(0) at the training points (T,).
        y: targets (T,).
        learning_rate: of gradient descent.
        steps: number of steps.
        cross: K(z, x) before batch norm, (S, T).
        at: u(0) at the test points z, (S,).
        epsilon: added to the variance.

    Returns:
        Normalized outputs after the last step, (T,) and (S,); test points use the training batch's statistics.
    """

    def step(_: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        u, there = state
        normed, pull = jax.vjp(lambda u: normalize(u, epsilon), u)
        force = learning_rate * pull(normed - y)[0]  # B is symmetric
        return u - kernel @ force, there - cross @ force

    u, there = jax.lax.fori_loop(0, steps, step, (start, at))
    return normalize(u, epsilon), normalize(there, epsilon, u)


def _errors(key: jax.Array, *, width: int, circle: _Circle, steps: int) -> list[jax.Array]:
    """Return the errors of the three predictions at the training points, and of the last at the test points."""
    x, z, y = circle
    apply, weights = dense(key, (2, width, width, 1), bias_variance=0.1)
    kernel = kernels.empirical_ntk(apply, weights, x, stats="frozen")
    cross = kernels.empirical_ntk(apply, weights, z, x, stats="frozen")
    f, g = apply(weights, x), apply(weights, z)
    normed = lambda w: normalize(apply(w, x))
    size = lambda a, b, r: jnp.linalg.norm(a - b) / jnp.linalg.norm(r)
    rate = 0.5 / jnp.linalg.eigvalsh(kernel)[-1]
    trained = _descend(lambda w: 0.5 * jnp.sum((apply(w, x) - y) ** 2), weights, rate, steps)
    plain = kernels.kernel_flow(kernel, f, y, learning_rate=rate, weights=1.0)(steps)
    after = kernels.batchnorm_ntk(kernel, f)
    rate = 0.5 / jnp.linalg.eigvalsh(after)[-1]
    normal = _descend(lambda w: 0.5 * jnp.sum((normed(w) - y) ** 2), weights, rate, steps)
    frozen = kernels.kernel_flow(after, normed(weights), y, learning_rate=rate, weights=1.0)(steps)
    exact, exact_between = linearized_batchnorm(
        kernel, f, y, learning_rate=rate, steps=steps, cross=cross, at=g
    )
    start = normed(weights) - y
    # at test points a trained network uses the statistics of the training batch
    between = normalize(apply(normal, z), 0.0, apply(normal, x))
    return [
        size(plain, apply(trained, x), f - y),
        size(frozen, normed(normal), start),
        size(exact, normed(normal), start),
        size(exact_between, between, start),
    ]


@entry(
    "000/lazy",
    title="gradient descent against three linearized predictions under batch norm",
    full={"seeds": 8},
    minutes=(0.99, 2.2),
    verdict="no claim",
    setup="The text we have prints no claim about training; its kernel suggests that modes decay as "
    "exp(-lambda(K_BN) t). "
    "[2, N, N, 1] networks, N = 128, 512, 2048, 32 points on a circle, 100 steps at 0.5/lambda_max, 4 seeds.",
    draw=draw,
)
def lazy_training(
    widths: tuple[int, ...] = (128, 512, 2048), seeds: int = 4, samples: int = 32, steps: int = 100
) -> Outcome:
    """Train networks [2, N, N, 1] on a circle and compare them with three linearized predictions.

    That under batch norm the modes decay as exp(-lambda(K_BN) t), as if K_BN were constant, is how the kernel of the
    supplement suggests to read the main paper; no sentence of the supplement says so. We compare gradient descent
    with a frozen K without batch norm, a frozen K_BN, and a frozen K before an exact batch norm. The rate is
    0.5/lambda_max of the kernel in question; errors are relative to the initial residual. Test points lie between the
    training points and use the statistics of the training batch.

    Decisive is whether the error of each prediction falls with the width N: the 95 % interval over seeds of its
    exponent lies below 0; for the frozen K_BN it lies above the exponent -1/2 of a linearization that becomes exact. At
    the largest width the predictions that hold must be within 1 % of the initial residual on the training and on the
    test points, and the one that does not must be off by more than a tenth of it; the ends of the intervals count.
    """
    circle, rows = _circle(samples), []
    for width in widths:
        run = jax.jit(partial(_errors, width=width, circle=circle, steps=steps))
        rows.append([run(seed_key(7, width, s)) for s in range(seeds)])
    table = dict(zip(PREDICTIONS, np.moveaxis(np.array(rows), -1, 0), strict=True))  # (widths, seeds) each
    slope = lambda errors: np.polyfit(np.log(widths), np.log(errors), 1)[0]  # one a seed
    exponents = {name: mean(slope(errors)) for name, errors in table.items()}
    last = {name: np.exp(mean(np.log(errors[-1]))) for name, errors in table.items()}
    plain, frozen, before, test = PREDICTIONS
    return Outcome(
        "000/lazy",
        f"the modes do not decay as exp(-lambda(K_BN) t) at any width: K_BN depends on f. At N = {widths[-1]} that "
        f"prediction is off by {told(last[frozen])} of "
        f"the initial residual (95 % interval over {seeds} seeds), and the error goes as N to the "
        f"{told(exponents[frozen])}. Freezing K before batch norm, with batch norm exact, works: "
        f"{told(last[before], 4)}, exponent {told(exponents[before])}",
        {"widths": np.asarray(widths), **table, "exponents": exponents},
        (
            *(
                Criterion(f"{name}: exponent in N, upper end of its interval", exponents[name][2], high=0.0)
                for name in (plain, before, test)
            ),
            Criterion(f"{frozen}: exponent in N, lower end of its interval", exponents[frozen][1], low=-0.5),
            Criterion(f"{frozen}: error at the largest N, lower end", last[frozen][1], low=0.1),
            *(
                Criterion(f"{name}: error at the largest N, upper end", last[name][2], high=0.01)
                for name in (before, test)
            ),
        ),
    )
