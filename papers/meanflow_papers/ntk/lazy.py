"""Training of wide networks against linearized predictions under batch norm."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from meanflow import kernels
from meanflow.kernels.batchnorm import normalize
from meanflow.kernels.regime import linearized_batchnorm
from meanflow.plots.curves import convergence
from meanflow.plots.style import panels
from meanflow_papers.entry import entry
from meanflow_papers.ntk.networks import Weights, dense, seed_key
from meanflow_papers.outcome import Arrays, Criterion, Outcome


def draw(data: Arrays) -> Figure:
    """Errors of the linearized predictions against the width."""
    figure, (ax,) = panels(1, 1, width=4.8, height=3.4)
    names = {
        "plain, frozen K": "plain, frozen $K$",
        "BN, frozen K_BN": r"batch norm, frozen $K_{\mathrm{BN}}$",
        "BN, frozen K before BN": "batch norm exact, frozen $K$",
        "same, test points": "the same on test points",
    }
    errors = {title: data[name] for name, title in names.items()}
    label = "error / initial residual after 100 steps"
    convergence(data["widths"], errors, ax, xlabel="$N$", ylabel=label, fitted=False)
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
    exact = linearized_batchnorm(
        kernel, f, y, learning_rate=rate, steps=steps, every=steps, weights=1.0, cross=cross, at=g
    )
    start = normed(weights) - y
    # at test points a trained network uses the statistics of the training batch
    between = normalize(apply(normal, z), 0.0, apply(normal, x))
    return [
        size(plain, apply(trained, x), f - y),
        size(frozen, normed(normal), start),
        size(exact.train[-1], normed(normal), start),
        size(jnp.asarray(exact.test)[-1], between, start),
    ]


@entry(
    "000/lazy",
    title="gradient descent against three linearized predictions under batch norm",
    full={"widths": (128, 512, 2048), "seeds": 4},
    minutes=(0.8, 1.5),
    verdict="refuted",
    setup="[2, N, N, 1] networks, 32 points on a circle, 100 steps at 0.5/lambda_max.",
    draw=draw,
)
def lazy_training(
    widths: tuple[int, ...] = (128, 512, 2048), seeds: int = 2, samples: int = 32, steps: int = 100
) -> Outcome:
    """Train networks [2, N, N, 1] on a circle and compare them with three linearized predictions.

    The paper claims that under batch norm the modes decay as exp(-lambda(K_BN) t), as if K_BN were
    constant. We compare gradient descent with a frozen K without batch norm, a frozen K_BN, and a frozen K
    before an exact batch norm. The rate is 0.5/lambda_max of the kernel in question; errors are relative to
    the initial residual. Test points lie between the training points and use the statistics of the training
    batch.

    Decisive is whether the error of each prediction falls with the width N.
    """
    circle, rows = _circle(samples), []
    for width in widths:
        run = jax.jit(partial(_errors, width=width, circle=circle, steps=steps))
        rows.append(np.mean([run(seed_key(7, width, s)) for s in range(seeds)], axis=0))
    errors = np.array(rows).T
    names = ("plain, frozen K", "BN, frozen K_BN", "BN, frozen K before BN", "same, test points")
    return Outcome(
        "000/lazy",
        "under batch norm the modes decay as exp(-lambda(K_BN) t)",
        "not at any width: K_BN depends on f. Freezing K before batch norm, with batch norm exact, works",
        {"widths": np.asarray(widths), **dict(zip(names, errors, strict=True))},
        (
            Criterion("plain, widest", errors[0, -1], 0.0, 0.03),
            Criterion("plain, narrowest over widest", errors[0, 0] / errors[0, -1], 1.5),
            Criterion("frozen K_BN, widest: does not converge", errors[1, -1], 0.4),
            Criterion("frozen K before BN, widest", errors[2, -1], 0.0, 0.02),
            Criterion("frozen K before BN, narrowest over widest", errors[2, 0] / errors[2, -1], 1.5),
            Criterion("test points, widest", errors[3, -1], 0.0, 0.2),
            Criterion("frozen K_BN over frozen K before BN, widest", errors[1, -1] / errors[2, -1], 20.0),
        ),
    )
