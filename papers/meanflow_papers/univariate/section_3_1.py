"""Section 3.1: finite networks fluctuate around the mean-field limit, and the flow without a penalty fits the data."""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from meanflow import univariate as uni
from meanflow.flows import predict
from meanflow.measures import Dataset
from meanflow.solvers import KernelStep, eulerian, solve
from meanflow_papers.entry import Arguments, entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.style import COLORS, MARKERS, PALE, REFERENCE, below, panels, shades

GUIDE: Arguments = {"color": PALE, "ls": "--", "lw": 1, "label": "$m^{-1/2}$"}
SLOW = (
    "the exponent at these widths is not -1/2 yet: its 95 % interval over 96 seeds is [-.71, -.56] at t = 10 and "
    "[-.46, -.32] at t = 50. Between neighbouring widths it is -.61, -.72, -.53 at t = 10 and -.30, -.41, "
    "-.46 at t = 50. (An earlier run had -1.04 and -1.18, by steps of one over the largest eigenvalue of the kernel, "
    "renewed every 20 steps: one of 24 networks of width 32 became unstable and went .57 from the median function. "
    "With a quarter of the step the standard deviation there is .033 instead of .120, and from width 64 on the same "
    "within 5 %.)"
)


def standard_deviation(f: np.ndarray) -> np.ndarray:
    """Return the standard deviation over seeds, root mean square over points, of functions (seeds, times, points)."""
    return np.sqrt(np.mean(np.var(f, axis=0, ddof=1), axis=-1))


def exponents(widths: tuple[int, ...], functions: list[np.ndarray]) -> np.ndarray:
    """Return the exponents (times,) in the width of the standard deviation over seeds."""
    rows = np.log([standard_deviation(f) for f in functions])
    return np.polyfit(np.log(widths), rows, 1)[0]


def draw(data: Arrays) -> Figure:
    """Fluctuations against the width; networks around the solution of (11); energy against time from several starts."""
    figure, (left, middle, right) = panels(1, 3, width=4.6, height=4.4)
    widths, times = np.asarray(data["widths"], float), np.asarray(data["times"])
    deviation = np.asarray(data["standard deviation"])  # (times, widths)
    for k, time in enumerate(times):
        slope, (low, high) = np.asarray(data["slopes"])[k], np.asarray(data["intervals"])[:, k]
        label = f"$t = {time:g}$: slope {slope:.2f} [{low:.2f}, {high:.2f}]"
        left.plot(widths, deviation[k], marker=MARKERS[k], color=COLORS[k], label=label)
    left.plot(widths, 1.4 * deviation[0, 0] * (widths / widths[0]) ** -0.5, **GUIDE)
    left.set(xscale="log", yscale="log", xlabel="$m$", ylabel="standard deviation of $f_m$ over seeds")
    left.set_xticks(widths, [f"{m:g}" for m in widths])
    left.set_yticks([0.01, 0.02, 0.04], ["0.01", "0.02", "0.04"])
    left.minorticks_off()
    left.set_title("fluctuations, 95 % intervals over seeds")
    x = np.asarray(data["grid"])
    for k in range(len(np.asarray(data["limit"]))):
        low, high = np.quantile(np.asarray(data["widest"])[:, k], [0.05, 0.95], axis=0)
        band = f"5 to 95 % of networks, $m = {widths[-1]:g}$, $t = {times[k]:g}$"
        middle.fill_between(x, low, high, color=COLORS[k], alpha=0.3, lw=0, label=band)
        limit = f"(11) on a grid, $t = {times[k]:g}$"
        middle.plot(x, np.asarray(data["limit"])[k], color=COLORS[k], label=limit)
    middle.plot(
        np.asarray(data["samples"]),
        np.asarray(data["samples"]) ** 2,
        "o",
        color=REFERENCE,
        ms=4,
        label="samples",
    )
    middle.set(xlabel="$x$", ylabel="$f(x)$", title="networks around the solution of (11)")
    energy = np.asarray(data["energy"])
    for k, (color, row) in enumerate(zip(shades(len(energy)), energy, strict=True)):
        right.plot(np.asarray(data["course"]), np.maximum(row, 1e-16), color=color, label=f"start {k + 1}")
    right.set(xscale="symlog", yscale="log", xlabel="$t$", ylabel="energy $L$, no penalty")
    right.set_title(f"width {int(data['wide'])}: every start goes to 0")
    for ax, columns in ((left, 1), (middle, 1), (right, 4)):
        below(ax, columns=columns)
    return figure


@entry(
    "004/section-3.1",
    title="the canonical flow: fluctuations of order m^-1/2, its limit (11), and global convergence without a penalty",
    claims=(
        ("Section 3.1", "fluctuations of order 1/sqrt(m) around the mean-field solution"),
        (
            "Section 3.1",
            "The global convergence of this PDE for interaction kernels arising from single-hidden "
            "layer neural networks has been established under mild assumptions",
        ),
    ),
    small={"seeds": 24},
    minutes=(1.13, 1.7),
    verdict="corrected",
    explained={
        "slope of the standard deviation at t = 10": SLOW,
        "slope of the standard deviation at t = 50": SLOW,
    },
    setup="five samples of x^2, sliding solver, a quarter of one over the largest eigenvalue of the kernel as step; 24 "
    "(full: 96) seeds of width 32 to 256 to time 50, 4 of width 256 to time 400; finite volumes for (11), 120 x 120 "
    "cells, to time 10.",
    draw=draw,
)
def section_3_1(
    widths: tuple[int, ...] = (32, 64, 128, 256),
    seeds: int = 96,
    times: tuple[float, ...] = (1.0, 10.0, 50.0),
    wide: int = 256,
    starts: int = 4,
    end: float = 400.0,
    cells: int = 120,
) -> Outcome:
    """Measure how functions of finite networks fluctuate around the solution of (11), and follow the energy.

    The paper cites that finite networks fluctuate around the mean-field limit with order 1/sqrt(m), and that the
    flow converges globally. We draw many networks of each width and measure on [-1, 1], at three times, the standard
    deviation of the function over seeds; the limit itself is the solution of the continuity equation (11) on a grid of
    (r, theta), which knows nothing of particles.

    Decisive are the exponents of the standard deviation in the width, -1/2 within 0.1 at each time; that -1/2 lies in
    the 95 % interval of the exponent between the two largest widths; the distance from
    the median function of the widest networks to that of (11) at the first two times, at most 0.02; and the energy at
    the end over that at the start, at most 1e-6 from every start. The first is *not met* at the later times.
    """
    x = jnp.linspace(-1, 1, 5)
    data, flow = Dataset(x, x**2, weights="sum"), uni.canonical()
    step = KernelStep(0.25, every=20)
    grid = jnp.linspace(-1, 1, 41)
    function = lambda flow, cloud, data: predict(flow, cloud, grid)
    functions = []
    for m in widths:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(31), m), seeds)

        def course(key: jax.Array, m: int = m) -> jax.Array:
            start, ts = flow.init(key, m), jnp.asarray(times)
            sol = solve(flow, start, data, times[-1], ts=ts, observe=function, solver="sliding", step=step)
            return sol.observed

        found = jax.jit(lambda k, f=course: jax.lax.map(f, k))(keys)  # (seeds, times, points)
        functions.append(np.asarray(found))
    slopes = exponents(widths, functions)
    rng = np.random.default_rng(0)
    again = lambda: [f[rng.integers(0, len(f), len(f))] for f in functions]
    draws = [again() for _ in range(400)]
    quantiles = lambda rows: np.quantile(rows, [0.025, 0.975], axis=0)
    intervals = quantiles([exponents(widths, drawn) for drawn in draws])
    # the exponent between the two largest widths alone
    last = exponents(widths[-2:], functions[-2:])
    last_intervals = quantiles([exponents(widths[-2:], drawn[-2:]) for drawn in draws])
    missed = np.maximum(last_intervals[0] + 0.5, -0.5 - last_intervals[1])
    early = np.asarray(times[:2])
    density = eulerian.evolve(flow, eulerian.uniform_density(cells, cells, 5.0), data, early[-1], early)
    limit = np.stack([predict(flow, density.final.at(mass).cloud(flow.space), grid) for mass in density.mass])
    middle = np.median(functions[-1][:, :2], axis=0)
    gap = float(np.sqrt(np.mean((middle - limit) ** 2, axis=-1)).max())
    ts = np.concatenate([[0.0], np.geomspace(0.5, end, 24)])

    def descent(key: jax.Array) -> jax.Array:
        return solve(flow, flow.init(key, wide), data, end, ts=ts, solver="sliding", step=step).energy

    energy = np.asarray(
        jax.jit(lambda k: jax.lax.map(descent, k))(jax.random.split(jax.random.key(32), starts))
    )
    left = float(np.max(energy[:, -1] / energy[:, 0]))
    shown = ", ".join(
        f"{slope:.2f} [{low:.2f}, {high:.2f}]" for slope, low, high in zip(slopes, *intervals, strict=True)
    )
    shown_last = ", ".join(
        f"{slope:.2f} [{low:.2f}, {high:.2f}]" for slope, low, high in zip(last, *last_intervals, strict=True)
    )
    return Outcome(
        "004/section-3.1",
        f"the standard deviation falls with the exponents {shown} at t = {', '.join(f'{t:g}' for t in times)} (95 % "
        f"intervals over seeds); between the two largest widths alone with {shown_last}. The median function of width "
        f"{widths[-1]} is {gap:.3f} from the solution of (11) on a grid. Global convergence is seen: at t = {end:g} at "
        f"most {left:.0e} of the energy is left from {starts} starts",
        {
            "widths": np.array(widths),
            "times": np.array(times),
            "standard deviation": np.array([standard_deviation(f) for f in functions]).T,
            "slopes": slopes,
            "intervals": intervals,
            "slopes of the two largest": last,
            "intervals of the two largest": last_intervals,
            "grid": grid,
            "samples": x,
            "widest": functions[-1][:, :2],
            "limit": limit,
            "course": ts,
            "energy": energy,
            "wide": wide,
        },
        (
            *(
                Criterion(f"slope of the standard deviation at t = {time:g}", float(slope), -0.6, -0.4)
                for time, slope in zip(times, slopes, strict=True)
            ),
            *(
                Criterion(
                    f"two largest widths, t = {time:g}: -1/2 beyond the interval by", float(gap), high=0
                )
                for time, gap in zip(times, missed, strict=True)
            ),
            Criterion("distance of the median function to that of (11)", gap, 0, 0.02),
            Criterion("largest energy at the end / start", left, 0, 1e-6),
        ),
    )
