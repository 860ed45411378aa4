"""Kernels of finite networks against their infinite-width order parameters."""

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from meanflow import kernels
from meanflow_papers.entry import entry
from meanflow_papers.ntk.networks import dense, seed_key
from meanflow_papers.ntk.predictions import kappas
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.pictures import convergence
from meanflow_papers.style import below, panels

WIDTH_CASES = (("relu", 2.0), ("tanh", 1.5), ("erf", 1.5), ("sine", 1.5), ("linear", 1.0))


def draw(data: Arrays) -> Figure:
    """Deviation of K/N from the order parameters."""
    figure, grid = panels(1, 2, width=3.8, height=3.8)
    names = [n for n in data if n != "widths"]
    for j, (ax, part) in enumerate(
        zip(grid, (r"diagonal $K_{tt}/N$", r"off-diagonal $K_{st}/N$"), strict=True)
    ):
        errors = {n: data[n][j] for n in names}
        guides = {"$N^{-1/2}$": -0.5}
        convergence(data["widths"], errors, ax, orders=guides, xlabel="$N$", ylabel=f"rms error, {part}")
        below(ax, 2)
    return figure


@entry(
    "000/width",
    title="K/N of finite networks against the order parameters: error of order 1/sqrt(N)",
    small={"widths": (256, 512, 1024), "seeds": 10},
    full={"widths": (256, 512, 1024, 2048, 4096), "seeds": 10},
    minutes=(0.28, 15.0),
    verdict="corrected",
    setup="T = 32 orthogonal inputs, three weight layers, five activations.",
    draw=draw,
)
def width_convergence(widths: tuple[int, ...] = (256, 512, 1024, 2048), seeds: int = 10) -> Outcome:
    """Compare K/N of finite networks with the order parameters of infinite width.

    The paper claims that K/N tends to (L - 1) kappa with corrections of order 1/sqrt(N). We compute kernels
    of networks with L = 3 weight layers at T = 32 orthogonal inputs (input dimension N), for five
    activations.

    Decisive is the exponent of the deviation in N, near -1/2 on and off the diagonal.
    """
    samples, data, criteria = 32, {"widths": np.asarray(widths)}, []
    for name, variance in WIDTH_CASES:
        kappa = kappas(depth=3, alpha_0=1.0, activation=name, weight_variance=variance)
        rms = np.zeros((2, len(widths)))
        for i, width in enumerate(widths):
            x = np.sqrt(width) * jnp.eye(samples, width)
            errors: list[list[np.ndarray]] = [[], []]
            for seed in range(seeds):
                apply, weights = dense(
                    seed_key(width, seed),
                    (width, width, width, 1),
                    activation=name,
                    weight_variance=variance,
                )
                kernel = np.asarray(kernels.empirical_ntk(apply, weights, x)) / width
                off = kernel[~np.eye(samples, dtype=bool)]
                errors[0].append(np.diag(kernel) - 2 * float(kappa.one))
                errors[1].append(off - 2 * float(kappa.two))
            rms[:, i] = [np.sqrt(np.mean(np.square(e))) for e in errors]
        data[name] = rms
        for row, pair in zip(rms, ("tt", "st"), strict=True):
            slope = np.polyfit(np.log(widths), np.log(row), 1)[0]
            criteria.append(Criterion(f"{name} slope {pair}", float(slope), -0.65, -0.35))
        if name == "relu":
            scaled = rms * np.sqrt(np.asarray(widths))[None]
            for j, (pair, low, high) in enumerate((("tt", 5, 11), ("st", 1.5, 3.5))):
                criteria.append(Criterion(f"relu rms {pair} sqrt(N), smallest", scaled[j].min(), low, high))
                criteria.append(Criterion(f"relu rms {pair} sqrt(N), largest", scaled[j].max(), low, high))
    slopes = [c.value for c in criteria if "slope" in c.name]
    return Outcome(
        "000/width",
        "K/N tends to (L-1) kappa with corrections of order 1/sqrt(N)",
        "true with p^{l-1} in place of the printed p^l, and alpha_0 = N_0/N explicit: exponents from "
        f"{min(slopes):.2f} to {max(slopes):.2f} between N = {widths[0]} and {widths[-1]}",
        data,
        tuple(criteria),
    )
