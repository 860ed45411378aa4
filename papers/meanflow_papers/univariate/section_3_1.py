"""Section 3.1: finite networks fluctuate around the mean-field limit, and the flow without a penalty fits the data."""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from meanflow import univariate as uni
from meanflow.flows.flow import predict
from meanflow.measures import Dataset
from meanflow.plots.style import COLORS, MARKERS, PALE, below, panels, shades
from meanflow.solvers import KernelStep, solve
from meanflow_papers.entry import entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome

UNCLEAR = (
    "at later times these widths show no exponent: of 24 networks of width 32 one is 0.44 from the median function at "
    "t = 10 (typical is 0.026) and rules the standard deviation there, and from 64 to 256 deviations hardly fall "
    "(medians 0.011, 0.007, 0.008)"
)


def draw(data: Arrays) -> Figure:
    """Fluctuations of the function against the width at three times; energy against time from several starts."""
    figure, (left, right) = panels(1, 2, width=5.2, height=4.4)
    widths = np.asarray(data["widths"], float)
    for k, time in enumerate(np.asarray(data["times"])):
        for kind, style in (("standard deviation", ":"), ("median deviation", "-")):
            row, slope = (np.asarray(data[name][kind])[k] for name in ("fluctuation", "slopes"))
            label = f"$t = {time:g}$, {kind}: slope {slope:.2f}"
            left.plot(widths, row, ls=style, marker=MARKERS[k], color=COLORS[k], label=label)
    guide = (
        1.4
        * float(np.asarray(data["fluctuation"]["standard deviation"])[0, 0])
        * (widths / widths[0]) ** -0.5
    )
    left.plot(widths, guide, color=PALE, ls="--", lw=1, label="$m^{-1/2}$")
    left.set(xscale="log", yscale="log", xlabel="$m$", ylabel="deviation of $f_m$ on $[-1, 1]$ over seeds")
    left.set_xticks(widths, [f"{m:g}" for m in widths])
    left.minorticks_off()
    left.set_title("fluctuations around the limit")
    below(left, columns=2)
    energy = np.asarray(data["energy"])
    for k, (color, row) in enumerate(zip(shades(len(energy)), energy, strict=True)):
        right.plot(np.asarray(data["course"]), np.maximum(row, 1e-16), color=color, label=f"start {k + 1}")
    right.set(xscale="symlog", yscale="log", xlabel="$t$", ylabel="energy $L$, no penalty")
    right.set_title(f"width {int(data['wide'])}: every start reaches 0")
    below(right, columns=4)
    return figure


@entry(
    "004/section-3.1",
    title="the canonical flow: fluctuations of order m^-1/2, and global convergence without a penalty",
    minutes=(0.6, 0.6),
    verdict="not reproduced",
    explained={
        "slope of the standard deviation at t = 10": UNCLEAR,
        "slope of the standard deviation at t = 50": UNCLEAR,
    },
    setup="five samples of x^2, sliding solver with a step renewed from the kernel; 24 seeds of width 32 to 256 to "
    "time 50, 4 of width 256 to time 400.",
    draw=draw,
)
def section_3_1(
    widths: tuple[int, ...] = (32, 64, 128, 256),
    seeds: int = 24,
    times: tuple[float, ...] = (1.0, 10.0, 50.0),
    wide: int = 256,
    starts: int = 4,
    end: float = 400.0,
) -> Outcome:
    """Measure how functions of finite networks fluctuate, and follow the energy of the flow without a penalty.

    The paper cites that finite networks fluctuate around the mean-field limit with order 1/sqrt(m), and that the
    flow converges globally. We draw many networks of each width and measure on [-1, 1], at three times, the standard
    deviation of the function over seeds, and the median over seeds of the distance to the median function.

    Decisive are the exponents of the standard deviation in the width, -1/2 within 0.1 at each time, and the energy at
    the end over that at the start, at most 1e-6 from every start. The first is *not met* at the later times, where
    these widths show no clear exponent; the median deviation, which was looked at only then, is in the data. The
    paper's PDE (11) itself is not solved on a grid here.
    """
    x = jnp.linspace(-1, 1, 5)
    data, flow = Dataset(x, x**2, weights="sum"), uni.canonical()
    step = KernelStep(1.0, every=20)
    grid = jnp.linspace(-1, 1, 41)
    function = lambda flow, cloud, data: predict(flow, cloud, grid)
    rows: dict[str, list[np.ndarray]] = {"standard deviation": [], "median deviation": []}
    for m in widths:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(31), m), seeds)

        def course(key: jax.Array, m: int = m) -> jax.Array:
            start, ts = flow.init(key, m), jnp.asarray(times)
            sol = solve(flow, start, data, times[-1], ts=ts, observe=function, solver="sliding", step=step)
            return sol.observed

        found = jax.jit(lambda k, f=course: jax.lax.map(f, k))(keys)  # (seeds, times, points)
        f = np.asarray(found)
        apart = np.sqrt(np.mean((f - np.median(f, axis=0)[None]) ** 2, axis=-1))  # (seeds, times)
        rows["standard deviation"].append(np.sqrt(np.mean(np.var(f, axis=0, ddof=1), axis=-1)))
        rows["median deviation"].append(np.median(apart, axis=0))
    fluctuation = {name: np.array(values).T for name, values in rows.items()}  # (times, widths)
    exponent = lambda row: float(np.polyfit(np.log(widths), np.log(row), 1)[0])
    slopes = {name: np.array([exponent(row) for row in values]) for name, values in fluctuation.items()}
    ts = np.concatenate([[0.0], np.geomspace(0.5, end, 24)])

    def descent(key: jax.Array) -> jax.Array:
        return solve(flow, flow.init(key, wide), data, end, ts=ts, solver="sliding", step=step).energy

    energy = np.asarray(
        jax.jit(lambda k: jax.lax.map(descent, k))(jax.random.split(jax.random.key(32), starts))
    )
    left = float((energy[:, -1] / energy[:, 0]).max())
    shown = lambda name: ", ".join(f"{slope:.2f}" for slope in slopes[name])
    return Outcome(
        "004/section-3.1",
        "finite networks fluctuate around the mean-field limit with order 1/sqrt(m); the flow converges globally",
        f"the standard deviation falls with the exponents {shown('standard deviation')} at t = "
        f"{', '.join(f'{t:g}' for t in times)} (the median deviation: {shown('median deviation')}): order 1/sqrt(m) at "
        "first, later nothing that these widths could show. Global convergence is seen: at t = "
        f"{end:g} at most {left:.0e} of the energy is left from {starts} starts",
        {
            "widths": np.array(widths),
            "times": np.array(times),
            "fluctuation": fluctuation,
            "slopes": slopes,
            "course": ts,
            "energy": energy,
            "wide": wide,
        },
        (
            *(
                Criterion(f"slope of the standard deviation at t = {time:g}", slope, -0.6, -0.4)
                for time, slope in zip(times, slopes["standard deviation"], strict=True)
            ),
            Criterion("largest energy at the end / start", left, 0, 1e-6),
        ),
    )
