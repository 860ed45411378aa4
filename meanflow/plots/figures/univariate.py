"""Figures of paper 004 (univariate ReLU)."""

from typing import Any, NamedTuple

import numpy as np

from meanflow.plots.clouds import attractors, field, plane, regions
from meanflow.plots.curves import convergence, fit
from meanflow.plots.maps import heat_map, number
from meanflow.plots.style import (
    COLOURS,
    DASHES,
    MARKERS,
    PALE,
    below,
    canvas,
    key,
    panels,
    shades,
    sparse,
)


class _Samples(NamedTuple):
    x: Any
    y: Any


class _Rays(NamedTuple):
    theta: Any
    sample: Any
    positive: Any
    negative: Any


def _balance(delta: float) -> str:
    return rf"$\delta = {number(float(delta)).strip('$')}$"


def _knots(theta: Any) -> np.ndarray:
    with np.errstate(all="ignore"):
        return -np.tan(np.asarray(theta))


def figure_1(data: dict[str, Any]) -> Any:
    """The function with its knots, and the neurons between the sample lines."""
    figure, (left, right) = panels(1, 2, width=3.9, height=3.4)
    grid, f = np.asarray(data["grid"]), np.asarray(data["f"])
    fit(grid, {"$f(x)$": f}, None, left, knots=data["knots"])
    for k, x in enumerate(np.asarray(data["samples"])):
        left.axvline(x, color=PALE, lw=0.8, ls=":", zorder=0, label="samples $x_j$" if k == 0 else None)
    key(left)
    uv = np.asarray(data["plane"])
    r = np.asarray(data["sign"]) * np.linalg.norm(uv, axis=1)
    plane(r, np.arctan2(uv[:, 1], uv[:, 0]), right, samples=data["samples"])
    for line in right.lines:
        if line.get_label().startswith("$r"):
            line.set_markersize(11)
    return figure


def figure_2(data: dict[str, Any]) -> Any:
    """Short paths of five neurons under one frozen force, by balance."""
    deltas, paths = np.asarray(data["delta"]), np.asarray(data["paths"])
    figure, grid = panels(1, len(deltas), width=2.4, height=2.5, sharex=True, sharey=True)
    reach = 1.1 * np.abs(paths).max()
    for ax, delta, path in zip(grid, deltas, paths, strict=True):
        for k, uv in enumerate(path):
            ax.plot([0, uv[0, 0]], [0, uv[0, 1]], color=PALE, lw=0.6, ls=":")
            ax.plot(uv[:, 0], uv[:, 1], color=COLOURS[k], lw=1.8)
            ax.plot(*uv[0], "o", color=COLOURS[k], ms=4)
        ax.set(aspect="equal", xlim=(-reach, reach), ylim=(-reach, reach), xlabel="$u$ (along $G$)")
        ax.set_title(_balance(delta))
    grid[0].set_ylabel("$v$")
    return figure


def figure_3(data: dict[str, Any]) -> Any:
    """Slices of the two kernel terms, sampled and in closed form."""
    figure, grid = panels(1, 2, width=3.8, height=3.0)
    x = np.asarray(data["x"])
    for ax, law in zip(grid, ("uniform", "gaussian"), strict=True):
        for k, (term, label) in enumerate(
            (("feature", "random-feature term"), ("indicator", "indicator term"))
        ):
            ax.plot(
                x,
                data[f"{law}/{term}/sampled"],
                color=COLOURS[k],
                lw=3,
                alpha=0.35,
                label=f"{label}, $m = 25000$",
            )
            ax.plot(
                x,
                data[f"{law}/{term}/closed"],
                color=COLOURS[k],
                lw=1.2,
                ls=DASHES[k],
                label=f"{label}, closed form",
            )
        ax.axvline(0.5, color=PALE, lw=0.8, ls=":")
        ax.set(xlabel="$x'$", ylabel="$K(0.5, x')$")
        ax.set_title(f"{law} weights")
    key(grid[0], loc="upper left")
    return figure


def figure_4(data: dict[str, Any]) -> Any:
    """Functions of finite networks beside their limit, and distances to the two splines."""
    figure, grid = panels(1, 3, width=3.6, height=3.0)
    x = np.asarray(data["grid"])
    curves = {"natural spline": data["natural"], r"limit, $b \in (-1, 1)$": data["limit"]["signs"]}
    curves |= {f"$m = {m}$": f for m, f in data["networks"].items()}
    fit(x, curves, _Samples(data["x"], data["y"]), grid[0])
    grid[0].set_ylim(-2.2, 2.4)
    grid[0].legend(fontsize=6.5, ncols=2, loc="upper center")
    sizes = {"stratified knots": data["widths"]} | {
        f"random, {n}": data["random_widths"] for n in data["random"]
    }
    errors = {"stratified knots": data["stratified"]} | {f"random, {n}": g for n, g in data["random"].items()}
    convergence(sizes, errors, grid[1], ylabel="distance to the limit")
    below(grid[1], 1)
    label = "distance to the natural spline"
    convergence(
        data["bounds"],
        data["distance_to_natural"],
        grid[2],
        xlabel="range $B$ of the biases",
        ylabel=label,
        fitted=False,
    )
    return figure


def _state(
    ax_f: Any, ax_uv: Any, data: dict[str, Any], f: Any, r: Any, theta: Any, reach: Any = None
) -> None:
    """Function with knots on one Axes, neurons on the other."""
    fit(data["grid"], {"$f$": f}, _Samples(data["x"], data["y"]), ax_f, knots=_knots(theta))
    ax_f.get_legend().remove()
    plane(r, theta, ax_uv, samples=data["x"], reach=reach)
    ax_uv.get_legend().remove()


def figure_5(data: dict[str, Any]) -> Any:
    """Functions and neurons for four balances, and the statistics of all."""
    runs, deltas = data["runs"], np.asarray(data["run_delta"])
    figure = canvas(12.5, 5.2)
    outer = figure.add_gridspec(2, 5, width_ratios=(1, 1, 1, 1, 1.35))
    for k, delta in enumerate(deltas):
        top, bottom = figure.add_subplot(outer[0, k]), figure.add_subplot(outer[1, k])
        r, theta = (np.asarray(runs[name])[k, -1] for name in ("r", "theta"))
        _state(
            top,
            bottom,
            data,
            np.asarray(runs["f"])[k],
            r,
            theta,
            reach=float(np.quantile(np.abs(r), 0.99)) * 1.15,
        )
        top.set_title(_balance(delta))
        top.set_ylim(-1.6, 1.6)
        if k:
            top.set_ylabel("")
            bottom.set_ylabel("")
    places = np.arange(len(data["delta"]))
    shares = {"share": "knots on samples", "concentration": "slope in 8 bins"}
    for ax, names, label in (
        (figure.add_subplot(outer[0, 4]), shares, "share"),
        (
            figure.add_subplot(outer[1, 4]),
            {"turn": r"rms $\Delta\theta$", "loss": "loss $L$"},
            "median over seeds",
        ),
    ):
        for k, (name, title) in enumerate(names.items()):
            ax.plot(places, np.asarray(data[name]), marker=MARKERS[k], color=COLOURS[k], label=title)
        ax.set_xticks(places, [number(float(d)) for d in data["delta"]])
        ax.set(xlabel=r"$\delta$", ylabel=label)
        key(ax)
    return figure


def figure_6(data: dict[str, Any]) -> Any:
    """Function, neurons and paths of 100 neurons for both extremes."""
    runs, deltas = data["runs"], np.asarray(data["run_delta"])
    figure, grid = panels(2, 3, width=3.5, height=3.1)
    pick = np.random.default_rng(0).permutation(np.asarray(runs["r"]).shape[-1])[:100]
    for row, delta in enumerate(deltas):
        r, theta = np.asarray(runs["r"])[row], np.asarray(runs["theta"])[row]
        reach = float(np.quantile(np.abs(r[-1]), 0.995)) * 1.1
        _state(grid[3 * row], grid[3 * row + 1], data, np.asarray(runs["f"])[row], r[-1], theta[-1], reach)
        grid[3 * row].set_title(f"{_balance(delta)}: function")
        grid[3 * row + 1].set_title("neurons at the end")
        uv = np.abs(r)[..., None] * np.stack([np.cos(theta), np.sin(theta)], axis=-1)
        plane(
            r[-1, pick], theta[-1, pick], grid[3 * row + 2], samples=data["x"], paths=uv[:, pick], reach=reach
        )
        grid[3 * row + 2].set_title("paths of 100 neurons")
    return figure


def figure_7(data: dict[str, Any]) -> Any:
    """One start, five ends."""
    figure, grid = panels(1, 3, width=3.6, height=3.0)
    scales, x = np.asarray(data["k"]), np.asarray(data["grid"])
    grid[0].plot(x, np.asarray(data["before"])[0], color="black")
    grid[0].set(xlabel="$x$", ylabel="$f(x)$")
    grid[0].set_title("start, the same for every $k$")
    colours = shades(len(scales))
    for k, scale in enumerate(scales):
        grid[1].plot(x, np.asarray(data["after"])[k], color=colours[k], label=f"$k = {scale:g}$")
    grid[1].set(xlabel="$x$", ylabel="$f(x)$")
    grid[1].set_title("after training")
    for ax in grid[:2]:
        sparse(ax)
    key(grid[1])
    grid[2].plot(scales, np.asarray(data["turn"]), "o-", color=COLOURS[0], label=r"rms $\Delta\theta$")
    grid[2].plot(scales, np.asarray(data["concentration"]), "s-", color=COLOURS[1], label="slope in 6 bins")
    grid[2].set(xscale="log", yscale="log", xlabel="scale $k$ of $(ka, kb, c/k)$")
    key(grid[2])
    return figure


def figure_8(data: dict[str, Any]) -> Any:
    """Functions and neurons of three widths."""
    figure, grid = panels(2, len(data["runs"]), width=3.3, height=2.8)
    for k, (width, run) in enumerate(data["runs"].items()):
        r, theta = np.asarray(run["r"])[-1], np.asarray(run["theta"])[-1]
        top, bottom = grid[k], grid[len(data["runs"]) + k]
        _state(top, bottom, data, run["f"], r, theta)
        top.set_title(f"$m = {width}$: rms $\\Delta\\theta$ = {float(data['turn'][k]):.2g}")
    return figure


def figure_9(data: dict[str, Any]) -> Any:
    """The field on a neuron with r > 0, the function, and the neurons with the attracting rays."""
    figure, grid = panels(1, 3, width=3.9, height=3.6)
    rays = _Rays(**{k: np.asarray(v) for k, v in data["rays"].items()})
    reach = float(np.max(np.abs(data["u"])))
    regions(data["x"], grid[0], reach=reach)
    attractors(rays, grid[0], reach=reach)
    field(data["u"], data["v"], data["velocity"], grid[0])
    grid[0].set(xlim=(-reach, reach), ylim=(-reach, reach))
    grid[0].set_title("field on a neuron with $r > 0$")
    fit(
        data["grid"], {"$f$": data["f"]}, _Samples(data["x"], data["y"]), grid[1], knots=_knots(data["theta"])
    )
    grid[1].set_ylim(-2.4, 2.4)
    plane(data["r"], data["theta"], grid[2], samples=data["x"], rays=rays, reach=reach)
    grid[2].legend(fontsize=7, loc="upper right", frameon=True, framealpha=0.85, edgecolor="none")
    return figure


def regime_map(data: dict[str, Any]) -> Any:
    """Turning, concentration and knots on samples by balance (and width)."""
    runs = data["runs"]
    names = {
        "angle_displacement": r"rms $\Delta\theta$",
        "concentration": "concentration",
        "on_sample_share": "knots on samples",
    }
    end = runs.isel(step=-1).median("seed")
    if runs.sizes["width"] > 1:
        figure, grid = panels(1, 3, width=3.8, height=2.8)
        for ax, (name, title) in zip(grid, names.items(), strict=True):
            heat_map(end[name], ax)
            ax.set_title(title)
        return figure
    figure, (ax,) = panels(1, 1, width=4.8, height=3.0)
    deltas = runs.delta.values
    for k, (name, title) in enumerate(names.items()):
        ax.plot(
            range(len(deltas)), end[name].values.ravel(), marker=MARKERS[k], color=COLOURS[k], label=title
        )
    ax.set_xticks(range(len(deltas)), [number(d) for d in deltas])
    ax.set(xlabel=r"balance $\delta$", ylabel="median over seeds", ylim=(-0.03, 1.05))
    key(ax)
    return figure


def _course(data: dict[str, Any], time: str, label: str, logarithmic: bool) -> Any:
    """Share of knots on samples, concentration and loss against time; medians over draws, and the draws."""
    figure, grid = panels(1, 3, width=3.0, height=2.7)
    rows = {"share": "share of knots on samples", "concentration": "concentration", "loss": "loss $L$"}
    for ax, (name, text) in zip(grid, rows.items(), strict=True):
        values = np.atleast_2d(np.asarray(data[name]))
        if len(values) > 1:
            ax.plot(np.asarray(data[time]), values.T, color=PALE, lw=0.8)
        ax.plot(np.asarray(data[time]), np.median(values, axis=0), color=COLOURS[0], marker="o", ms=3)
        ax.set(xlabel=label, ylabel=text, xscale="log" if logarithmic else "linear")
        if name != "loss":
            ax.set_ylim(0, 1.02)
    return figure


def figure_5_late(data: dict[str, Any]) -> Any:
    """Knots on samples, concentration and loss against epochs."""
    return _course(data, "epoch", "epoch", logarithmic=False)


def figure_6_course(data: dict[str, Any]) -> Any:
    """Knots on samples, concentration and loss against flow time."""
    return _course(data, "times", "$t$", logarithmic=True)


def sparse_limit(data: dict[str, Any]) -> Any:
    """Excess over the minimum (dashed: fixed directions) and the certificate along the runs; one of the functions."""
    figure, (left, middle, right) = panels(1, 3, width=3.0, height=2.7)
    times, fixed_times = np.asarray(data["times"])[1:], np.asarray(data["fixed_times"])[1:]
    for k, (excess, bound, fixed) in enumerate(
        zip(data["excess"], data["bound"], data["fixed_excess"], strict=True)
    ):
        colour = COLOURS[k % len(COLOURS)]
        left.plot(times, np.maximum(excess[1:], 1e-12), color=colour)
        left.plot(fixed_times, fixed[1:], color=colour, ls="--", lw=0.8)
        middle.plot(times, bound[1:], color=colour)
    left.set(xscale="log", yscale="log", xlabel="$t$", ylabel="$E/E_{\\min} - 1$")
    middle.axhline(1.0, color=PALE, lw=0.8)
    middle.set(xscale="log", xlabel="$t$", ylabel=r"$\sup|F|/\lambda$")
    best = np.asarray(data["f_best"])
    bent = int(np.argmax(np.abs(np.diff(best, 2)).sum(axis=1)))  # the data set with the most bends
    curves = {"flow": np.asarray(data["f"])[bent], "minimiser": best[bent]}
    fit(data["grid"], curves, _Samples(data["x"][bent], data["y"][bent]), right)
    return figure


def lazy_slopes(data: dict[str, Any]) -> Any:
    """Turning of the neurons against the width, for three scalings."""
    figure, (ax,) = panels(1, 1, width=4.6, height=3.2)
    turns = np.asarray(data["turn"])
    named = {
        rf"$\alpha = m^{{{p:g}}}$": row for p, row in zip(np.asarray(data["powers"]), turns, strict=True)
    }
    convergence(
        data["widths"], named, ax, ylabel=r"rms $\Delta\theta$ when the loss is $10^{-3}$ of its start"
    )
    return figure


DRAWINGS = {
    "004/figure-1": figure_1,
    "004/figure-2": figure_2,
    "004/figure-3": figure_3,
    "004/figure-4": figure_4,
    "004/figure-5": figure_5,
    "004/figure-5-map": regime_map,
    "004/figure-6": figure_6,
    "004/figure-7": figure_7,
    "004/figure-8": figure_8,
    "004/figure-9": figure_9,
    "004/figure-5-late": figure_5_late,
    "004/figure-6-course": figure_6_course,
    "004/sparse-limit": sparse_limit,
    "004/lazy-slopes": lazy_slopes,
}
