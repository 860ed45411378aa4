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


def draw(data: Arrays) -> Figure:
    """Fluctuations of the function against the width at three times; energy against time from several starts."""
    figure, (left, right) = panels(1, 2, width=5.2, height=4.4)
    widths = np.asarray(data["widths"], float)
    for k, time in enumerate(np.asarray(data["times"])):
        for where, style in (("on [-1, 1]", "-"), ("at the samples", ":")):
            row, slope = (np.asarray(data[name][where])[k] for name in ("fluctuation", "slopes"))
            label = f"$t = {time:g}$, {where}: slope {slope:.2f}"
            left.plot(widths, row, ls=style, marker=MARKERS[k], color=COLORS[k], label=label)
    guide = 1.4 * float(np.asarray(data["fluctuation"]["on [-1, 1]"])[0, 0]) * (widths / widths[0]) ** -0.5
    left.plot(widths, guide, color=PALE, ls="--", lw=1, label="$m^{-1/2}$")
    left.set(xscale="log", yscale="log", xlabel="$m$", ylabel="standard deviation of $f_m$ over seeds (rms)")
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
    verdict="corrected",
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
    flow converges globally. We draw many networks of each width and take the standard deviation over seeds of the
    function at three times, root mean square over [-1, 1], and the same at the samples alone.

    Decisive are the exponents in the width on [-1, 1], -1/2 within 0.1 at each time, and the energy at the end over
    that at the start, at most 1e-6 from every start. At the samples the exponent is -1/2 at first only: as every
    network fits them its fluctuations there heal, faster than 1/sqrt(m) (a first run asked for -1/2 there at all times
    and found -0.53, -0.86 and -1.03). The paper's PDE (11) itself is not solved on a grid here.
    """
    x = jnp.linspace(-1, 1, 5)
    data, flow = Dataset(x, x**2, weights="sum"), uni.canonical()
    step = KernelStep(1.0, every=20)
    grid = jnp.linspace(-1, 1, 41)  # every tenth point is a sample
    function = lambda flow, cloud, data: predict(flow, cloud, grid)
    variance = []
    for m in widths:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(31), m), seeds)

        def course(key: jax.Array, m: int = m) -> jax.Array:
            start, ts = flow.init(key, m), jnp.asarray(times)
            sol = solve(flow, start, data, times[-1], ts=ts, observe=function, solver="sliding", step=step)
            return sol.observed

        found = jax.jit(lambda k, f=course: jax.lax.map(f, k))(keys)  # (seeds, times, points)
        variance.append(np.var(np.asarray(found), axis=0, ddof=1))
    parts = {"on [-1, 1]": slice(None), "at the samples": slice(None, None, 10)}
    fluctuation = {  # (times, widths)
        name: np.sqrt(np.mean(np.array(variance)[..., part], axis=-1)).T for name, part in parts.items()
    }
    exponent = lambda row: float(np.polyfit(np.log(widths), np.log(row), 1)[0])
    slopes = {name: np.array([exponent(row) for row in rows]) for name, rows in fluctuation.items()}
    ts = np.concatenate([[0.0], np.geomspace(0.5, end, 24)])

    def descent(key: jax.Array) -> jax.Array:
        return solve(flow, flow.init(key, wide), data, end, ts=ts, solver="sliding", step=step).energy

    energy = np.asarray(
        jax.jit(lambda k: jax.lax.map(descent, k))(jax.random.split(jax.random.key(32), starts))
    )
    left = float((energy[:, -1] / energy[:, 0]).max())
    return Outcome(
        "004/section-3.1",
        "finite networks fluctuate around the mean-field limit with order 1/sqrt(m); the flow converges globally",
        f"the functions do: exponents {', '.join(f'{s:.2f}' for s in slopes['on [-1, 1]'])} at t = "
        f"{', '.join(f'{t:g}' for t in times)}. At the samples fluctuations heal as these are fitted: "
        f"{', '.join(f'{s:.2f}' for s in slopes['at the samples'])}. At t = {end:g} at most {left:.0e} of the energy "
        f"is left from {starts} starts",
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
                Criterion(f"slope on [-1, 1] at t = {time:g}", slope, -0.6, -0.4)
                for time, slope in zip(times, slopes["on [-1, 1]"], strict=True)
            ),
            Criterion("largest energy at the end / start", left, 0, 1e-6),
        ),
    )
