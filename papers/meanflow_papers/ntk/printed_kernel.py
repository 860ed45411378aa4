"""Equation A.18: the kernel under batch norm as the paper prints it, beside the exact one."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from matplotlib.figure import Figure

from meanflow import kernels
from meanflow.plots.maps import dots
from meanflow.plots.style import panels
from meanflow_papers.entry import entry
from meanflow_papers.ntk.networks import dense, seed_key
from meanflow_papers.outcome import Arrays, Criterion, Outcome


def one_sided(kernel: Float[Array, "t t"], outputs: Float[Array, "t"]) -> Float[Array, "t t"]:
    """Return the kernel under batch norm as printed in A.18, (I/sigma^2 - h h'/(T sigma^4)) G K G.

    It is not symmetric, and wrong. Without epsilon it has the eigenvalues of the exact B K B, because B is a
    multiple of a projection.

    Args:
        kernel: K (T, T), before batch norm.
        outputs: f (T,), before batch norm; h = G f is f minus its mean.
    """
    h = outputs - jnp.mean(outputs)
    variance = jnp.mean(h**2)
    centered = kernel - jnp.mean(kernel, 0, keepdims=True)
    centered = centered - jnp.mean(centered, 1, keepdims=True)
    return centered / variance - h[:, None] * (h @ centered)[None, :] / (len(h) * variance**2)


def one_sided_error(kernel: Float[Array, "t t"], outputs: Float[Array, "t"]) -> Float[Array, ""]:
    """Return |one_sided - B K B| / |B K B| in the Frobenius norm; the arguments are those of ``one_sided``."""
    exact = kernels.batchnorm_ntk(kernel, outputs)
    return jnp.linalg.norm(one_sided(kernel, outputs) - exact) / jnp.linalg.norm(exact)


def draw(data: Arrays) -> Figure:
    """Relative error of the one-sided kernel."""
    figure, (ax,) = panels(1, 1, width=5.0, height=2.0)
    label = r"relative Frobenius error of the printed $K_{\mathrm{BN}}$"
    dots(
        {
            "random inputs, ReLU": data["random, relu"],
            "line, ReLU": data["line, relu"],
            "line, tanh": data["line, tanh"],
        },
        ax,
        xlabel=label,
    )
    ax.set_xlim(left=0)
    return figure


@entry(
    "000/A.18",
    title="the printed one-sided kernel beside the exact B K B",
    verdict="refuted",
    setup="width 128, T = 64, random inputs and 1-D coordinates, 3 seeds.",
    draw=draw,
)
def printed_kernel(width: int = 128, samples: int = 64, seeds: int = 3) -> Outcome:
    """Compare the printed one-sided kernel of A.18 with the exact B K B.

    The paper claims K_BN = (I/sigma^2 - h h'/(T sigma^4)) G K G. We compute both forms for networks on
    random inputs and on 1-D coordinates.

    Decisive are the relative error in the Frobenius norm, which is not small, and the eigenvalues, which
    agree.
    """
    cases = {
        "random, relu": (jax.random.normal(seed_key(1), (samples, width)), "relu"),
        "line, relu": (jnp.linspace(-1, 1, samples)[:, None], "relu"),
        "line, tanh": (jnp.linspace(-1, 1, samples)[:, None], "tanh"),
    }
    data: Arrays = {}
    spectral = 0.0
    for name, (x, activation) in cases.items():
        errors = []
        for seed in range(seeds):
            widths = (x.shape[1], width, width, 1)
            apply, weights = dense(seed_key(2, seed), widths, activation=activation, bias_variance=0.1)
            kernel, f = kernels.empirical_ntk(apply, weights, x), apply(weights, x)
            exact, printed = kernels.batchnorm_ntk(kernel, f), one_sided(kernel, f)
            errors.append(float(one_sided_error(kernel, f)))
            ours = np.linalg.eigvalsh(np.asarray(exact))
            theirs = np.sort(np.linalg.eigvals(np.asarray(printed)).real)
            spectral = max(spectral, float(np.max(np.abs(ours - theirs)) / ours[-1]))
        data[name] = np.asarray(errors)
    accuracy = 1e-10 if jnp.zeros(()).dtype == jnp.float64 else 1e-3
    return Outcome(
        "000/A.18",
        "K_BN = (I/sigma^2 - h h'/(T sigma^4)) G K G",
        "wrong by 3 % (random inputs) to over 100 % (coordinates), but isospectral: m and lambda_max survive",
        data,
        (
            Criterion("random inputs, mean error", data["random, relu"].mean(), 0.02, 0.3),
            Criterion("1-D relu, mean error", data["line, relu"].mean(), 0.2, 2.5),
            Criterion("1-D tanh, mean error", data["line, tanh"].mean(), 0.2, 3.5),
            Criterion("largest difference of eigenvalues", spectral, 0.0, accuracy),
        ),
    )
