"""Table 2: how the spectrum of the kernel grows with the width, and the ratio v/m^2 that decides."""

import functools
import math
import time
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from meanflow import kernels
from meanflow_papers.entry import Arguments, entry
from meanflow_papers.ntk.networks import dense, seed_key
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.pictures import convergence
from meanflow_papers.style import COLORS, REFERENCE, below, key, panels

NETWORKS = ("plain", "BN output", "BN hidden", "BN both")
# Exponents of (m, v, lambda_max) in N at T = N. The printed table has no hidden row; a pair is an interval.
PRINTED: dict[str, tuple[float | tuple[float, float], ...]] = {
    "plain": (1.0, 3.0, 2.0),
    "BN output": (1.0, 1.5, (1.0, 1.5)),
}
CORRECTED: dict[str, tuple[float, ...]] = {
    "plain": (1.0, 3.0, 2.0),
    "BN output": (1.0, 2.0, 1.0),
    "BN hidden": (1.0, 3.0, 2.0),
    "BN both": (1.0, 2.0, 1.0),
}
ODD_WITHOUT_BIAS = (1.0, 2.0, 1.0)  # kappa_2 = 0: a plain tanh network scales like one with batch norm


class _Measured(NamedTuple):
    """m, v and lambda_max, the relative standard error of v, the relative residual of lambda_max, seconds."""

    m: float
    v: float
    top: float
    error: float
    residual: float
    seconds: float


@functools.cache  # Table 2 and the ratio v/m^2 share most networks
def _measure(network: str, width: int, seed: int, activation: str, bias: float) -> _Measured:
    """The spectrum at T = N: of the exact kernel where samples are free, of the operator under hidden BN."""
    start = time.perf_counter()
    variance = 2.0 if activation == "relu" else 1.5
    # a number of numpy would make the inputs double, and weights that are converted hide their Gram matrices
    x = math.sqrt(width) * jnp.eye(width, dtype=jnp.float32)
    inside = network in ("BN hidden", "BN both")
    apply, weights = dense(
        seed_key(width, seed),
        (width, width, width, 1),
        activation=activation,
        weight_variance=variance,
        bias_variance=bias,
        network=network if inside else "plain",
        dtype=jnp.float32,
    )
    options: Arguments = {"key": seed_key(5, seed), "top": 4, "probes": 16}
    if inside:  # products with K alone: 24 for the edge of the spectrum, 20 for the moments
        operator = kernels.ntk_operator(apply, weights, x, stats="batch")
        out = kernels.spectrum(operator, steps=24, **options)
    else:
        kernel = kernels.empirical_ntk(apply, weights, x)
        kernel = kernel if network == "plain" else kernels.batchnorm_ntk(kernel, apply(weights, x))
        out = kernels.spectrum(kernel, steps=60, **options)
    m, v, top = float(out.mean), float(out.variance), float(out.values[0])
    spent = time.perf_counter() - start
    return _Measured(m, v, top, float(out.variance_error) / v, float(out.residuals[0]) / top, spent)


def draw_table_2(data: Arrays) -> Figure:
    """m, v and the largest eigenvalue against N, for every network, with the fitted exponents."""
    figure, grid = panels(1, 3, width=4.2, height=3.9)
    names = [n for n in data if n not in ("printed", "corrected", "exponents", "exponents by seed")]
    symbols = (r"mean $m_\lambda$", r"variance $v_\lambda$", r"$\lambda_{\max}$")
    for j, (ax, symbol) in enumerate(zip(grid, symbols, strict=True)):
        sizes = {n: data[n]["sizes"] for n in names}
        values = {n: np.exp(np.log(data[n]["m, v, top"][..., j]).mean(1)) for n in names}
        convergence(sizes, values, ax, xlabel="$N = T$", ylabel=symbol, fitted=False)
        for line, name in zip(ax.lines, names, strict=True):
            printed = np.atleast_1d(data["printed"][name][j]) if name in data["printed"] else ()
            words = f" (printed {' to '.join(f'{power:g}' for power in printed)})" if len(printed) else ""
            low, high = np.asarray(data["exponents by seed"][name])[:, j][[0, -1]]
            line.set_label(f"{name}: $N^{{{data['exponents'][name][j]:.2f}}}$ [{low:.2f}, {high:.2f}]{words}")
            rows = np.asarray(data[name]["m, v, top"])[..., j]
            ax.plot(data[name]["sizes"], rows, ".", color=line.get_color(), ms=3, alpha=0.6)
        ax.set_title("mean of the seeds; dots and [ ]: each seed", fontsize=8)
        below(ax, 1, fontsize=7)
    return figure


@entry(
    "000/table-2",
    title="exponents in N of the mean, variance and largest eigenvalue of the kernel, with and without batch norm",
    claims=(
        ("Table 2", "m_lambda O(N) O(N) v_lambda O(N^3) O(N^(3/2)) lambda_max O(N^2) [O(N), O(N^(3/2))]"),
    ),
    small={"sizes": (256, 512, 1024), "hidden_sizes": (256, 512, 1024)},
    minutes=(2.0, 20.0),
    verdict="corrected",
    setup="[N, N, N, 1] networks, T = N orthogonal inputs, weights only; exact kernels, or the matrix-free "
    "operator where batch norm couples the samples.",
    draw=draw_table_2,
)
def table_2(
    sizes: tuple[int, ...] = (256, 512, 1024, 2048),
    hidden_sizes: tuple[int, ...] = (256, 512, 1024, 2048),
    seeds: int = 3,
) -> Outcome:
    """Fit the exponents in N of the mean m, the variance v and the largest eigenvalue of the kernel at T = N.

    The paper claims m ~ N, v ~ N^3, lambda_max ~ N^2 for plain networks and v ~ N^(3/2) under batch norm.
    We measure networks with L = 3 trained weight layers on orthogonal inputs. Fits start at 256, since
    smaller sizes are not yet in the asymptotic regime. Hidden batch norm couples the samples, so its kernel
    is never formed: 44 products of about 12 N^3 operations a network. m and v are then estimates; their
    error, the residual of lambda_max and the seconds of a network are in the data.

    Decisive is whether each fitted exponent lies within its interval around the corrected one.
    """
    rows: dict[str, tuple[str, str, float]] = {n: (n, "relu", 0.0) for n in NETWORKS}
    rows |= {"plain, tanh": ("plain", "tanh", 0.0), "BN output, tanh": ("BN output", "tanh", 0.0)}
    rows |= {"plain, tanh, bias": ("plain", "tanh", 0.1)}
    data: Arrays = {"printed": PRINTED, "corrected": {**CORRECTED, "plain, tanh": ODD_WITHOUT_BIAS}}
    slopes, by_seed = {}, {}
    for row, (network, activation, bias) in rows.items():
        ns = hidden_sizes if network in ("BN hidden", "BN both") else sizes
        runs = [[_measure(network, n, seed, activation, bias) for seed in range(seeds)] for n in ns]
        values = np.array(runs)
        data[row] = {
            "sizes": np.asarray(ns),
            "m, v, top": values[..., :3],  # (sizes, seeds, 3)
            "error of v, residual of top": np.max(values[..., 3:5], axis=1),
            "seconds": np.max(values[..., 5], axis=1),
        }
        logs = np.log(values[..., :3])
        fitted = np.polyfit(np.log(ns), logs.reshape(len(ns), -1), 1)[0].reshape(seeds, 3)
        by_seed[row] = np.sort(fitted, axis=0)
        slopes[row] = fitted.mean(axis=0).tolist()  # sigma^2 fluctuates: average over seeds
    data |= {"exponents": slopes, "exponents by seed": by_seed}
    criteria = [
        Criterion("plain v", slopes["plain"][1], 2.7, 3.3),
        Criterion("plain lambda_max", slopes["plain"][2], 1.8, 2.2),
        Criterion("plain tanh v (kappa_2 = 0)", slopes["plain, tanh"][1], 1.8, 2.2),
        Criterion("plain tanh lambda_max", slopes["plain, tanh"][2], 0.8, 1.2),
        Criterion("plain tanh with bias v", slopes["plain, tanh, bias"][1], 2.5, 3.3),
        Criterion("BN output v, not 3/2", slopes["BN output"][1], 1.75, 2.25),
        Criterion("BN output lambda_max", slopes["BN output"][2], 0.8, 1.2),
        Criterion("BN output tanh v", slopes["BN output, tanh"][1], 1.8, 2.2),
        Criterion("BN hidden v", slopes["BN hidden"][1], 2.7, 3.3),
        Criterion("BN hidden lambda_max", slopes["BN hidden"][2], 1.8, 2.2),
        Criterion("BN both v, not 3/2", slopes["BN both"][1], 1.75, 2.25),
        Criterion("BN both lambda_max", slopes["BN both"][2], 0.8, 1.2),
    ]
    criteria += [Criterion(f"{row} m", slopes[row][0], 0.85, 1.15) for row in rows]
    return Outcome(
        "000/table-2",
        "batch norm on the output has v ~ N^2, lambda_max ~ N; so has a plain odd activation without bias; "
        "batch norm before the activations, as used in practice, keeps N^3 and N^2",
        data,
        tuple(criteria),
    )


def draw_ratio(data: Arrays) -> Figure:
    """v/m^2 by size, beside what the printed exponent would give."""
    figure, (ax,) = panels(1, 1, width=4.4, height=3.0)
    sizes = np.asarray(data["sizes"], float)
    for k, name in enumerate(("relu", "tanh")):
        values = np.asarray(data[name])
        words = {"relu": "ReLU", "tanh": "tanh"}[name]
        ax.plot(sizes, values, marker="os"[k], color=COLORS[k], label=f"{words}: mean of the seeds")
        ax.plot(sizes, np.asarray(data["by_seed"][name]), ".", ms=4, alpha=0.5, color=COLORS[k])
        printed = values[0] * (sizes / sizes[0]) ** -0.5
        ax.plot(sizes, printed, color=COLORS[k], ls="--", lw=1, label=r"if $v \sim N^{3/2}$")
    ax.plot([], [], ".", ms=4, alpha=0.5, color=REFERENCE, label="each seed")
    ax.set(xscale="log", xlabel="$N = T$", ylabel=r"$v_\lambda / m_\lambda^2$", ylim=(0, None))
    ax.set_xticks(sizes, [f"{n:g}" for n in sizes])
    ax.minorticks_off()
    key(ax)
    return figure


@entry(
    "000/v-over-m2",
    title="v/m^2 under batch norm at T = N: constant, so v ~ N^2 and not N^(3/2)",
    claims=(("A.6, equation (A.31)", "v_lambda sim O(N^2) + O(N^(3/2)) - O(N^2) sim O(N^(3/2))"),),
    full={"sizes": (512, 1024, 2048, 4096), "seeds": 3},
    minutes=(1.0, 8.0),
    verdict="refuted",
    setup="[N, N, N, 1] networks with batch norm on the output, ReLU and tanh.",
    draw=draw_ratio,
)
def variance_ratio(sizes: tuple[int, ...] = (512, 1024, 2048), seeds: int = 3) -> Outcome:
    """Follow the ratio v/m^2 under batch norm on the output as T = N grows.

    The paper claims v ~ N^(3/2), under which the ratio halves between N = 512 and 2048. If v ~ N^2 it is
    constant.

    Decisive is the ratio at the largest size over that at the smallest.
    """
    by_seed = {}
    for activation in ("relu", "tanh"):
        runs = [[_measure("BN output", n, seed, activation, 0.0)[:2] for seed in range(seeds)] for n in sizes]
        values = np.array(runs)
        by_seed[activation] = values[..., 1] / values[..., 0] ** 2  # (sizes, seeds)
    ratios = {name: rows.mean(axis=1) for name, rows in by_seed.items()}
    criteria = tuple(
        Criterion(f"{name}: v/m^2 at N = {sizes[-1]} over N = {sizes[0]}", r[-1] / r[0], 0.85, 1.15)
        for name, r in ratios.items()
    )
    return Outcome(
        "000/v-over-m2",
        "v/m^2 is nearly constant, so v ~ N^2: "
        + ", ".join(f"{' '.join(f'{v:.3f}' for v in values)} ({name})" for name, values in ratios.items())
        + f" at N = {', '.join(str(n) for n in sizes)}",
        {"sizes": np.asarray(sizes), **ratios, "by_seed": by_seed},
        criteria,
    )
