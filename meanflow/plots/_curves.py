"""Curves over time, over the input, over sizes."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

from meanflow import _checks
from meanflow._checks import either, flag, host_array, instance, mapping, optional, text
from meanflow._numerics import loglog_slope
from meanflow.plots.style import AXES, COLORS, DASHES, MARKERS, PALE, REFERENCE, SAMPLE, axes, key, sparse
from meanflow.solvers._solution import Solution


@runtime_checkable
class Course(Protocol):
    """Energies (k,) at times (k,), such as a ``Solution``."""

    @property
    def ts(self) -> ArrayLike: ...  # noqa: D102

    @property
    def energy(self) -> ArrayLike: ...  # noqa: D102


@runtime_checkable
class Points(Protocol):
    """Samples of a function, such as a ``Dataset`` with inputs (n,)."""

    @property
    def x(self) -> ArrayLike: ...  # noqa: D102

    @property
    def y(self) -> ArrayLike: ...  # noqa: D102


def points(name: str, value: object) -> object:
    """Accept samples of a function of one variable: x and y of shape (n,)."""
    instance(Points, hint="for instance a Dataset")(name, value)
    shapes = np.shape(value.x), np.shape(value.y)  # type: ignore[attr-defined]
    if len(shapes[0]) != 1 or shapes[0] != shapes[1]:
        raise ValueError(f"{name} must have x and y of shape (n,), got {shapes[0]} and {shapes[1]}")
    return value


COURSE = instance(Course, hint="for instance a Solution")


@_checks.arguments(runs=either(COURSE, mapping(COURSE, least=1)), ax=AXES)
def energies(runs: Course | Mapping[str, Course], ax: Axes | None = None) -> Axes:
    """Energy against time of a solution or of several, log-log after the start.

    Args:
        runs: a ``Solution`` (or anything with ``ts`` and ``energy``), or several by name.
        ax: matplotlib Axes; a new figure by default.
    """
    ax = axes(ax)
    runs = runs if isinstance(runs, Mapping) else {"": runs}
    for color, (name, run) in zip(COLORS * 4, runs.items(), strict=False):
        ts, energy = np.asarray(run.ts), np.asarray(run.energy)
        later = ts > 0
        ax.plot(ts[later], energy[later], label=name, color=color)
    ax.set(xscale="log", yscale="log", xlabel="$t$", ylabel=r"$E(\mu_t)$")
    key(ax)
    return ax


@_checks.arguments(
    x=host_array((None,), nan=True, least=1),
    f=mapping(host_array((None,), nan=True), least=1),
    data=optional(points),
    ax=AXES,
    knots=optional(host_array((None,), nan=True)),
)
def fit(
    x: ArrayLike,
    f: Mapping[str, ArrayLike],
    data: Points | None,
    ax: Axes | None = None,
    *,
    knots: ArrayLike | None = None,
) -> Axes:
    """Functions of one variable over the samples they fit, and the knots of the first.

    Args:
        x: (k,) grid.
        f: name -> (k,) values on the grid.
        data: ``Dataset`` with inputs (n,), or None.
        ax: matplotlib Axes; a new figure by default.
        knots: (m,) positions; those on the grid are marked on the first curve.
    """
    x = np.asarray(x)
    _check_curves("f", x, f)
    ax = axes(ax)
    for color, (name, values) in zip(COLORS * 4, f.items(), strict=False):
        ax.plot(x, np.asarray(values), label=name, color=color)
    if knots is not None:
        knots = np.asarray(knots)
        inside = knots[(knots >= x[0]) & (knots <= x[-1])]
        first = np.asarray(next(iter(f.values())))
        height = np.interp(inside, x, first)
        size = 3.2 if len(inside) < 80 else 2.2
        ax.plot(inside, height, "o", label="knots", ms=size, mfc="white", mec=COLORS[2], mew=0.8)
    if data is not None:
        ax.plot(
            np.asarray(data.x),
            np.asarray(data.y),
            "x",
            color=SAMPLE,
            ms=5,
            mew=1.1,
            zorder=3,
            label="samples",
        )
    ax.set(xlabel="$x$", ylabel="$f(x)$")
    key(ax)
    return ax


def _check_curves(name: str, x: np.ndarray, curves: Mapping[str, ArrayLike]) -> None:
    """Refuse curves that have not one value for each point of the axis ``x``."""
    for key_, values in curves.items():
        if np.shape(values)[-1:] != x.shape:
            raise ValueError(
                f"{name}[{key_!r}] must have {x.size} values like x, got shape {np.shape(values)}"
            )


@_checks.arguments(
    x=either(instance(Solution), host_array((None,), nan=True, least=1)),
    curves=optional(mapping(host_array((None,), (None, None), nan=True))),
    ax=AXES,
    xlabel=text,
    ylabel=text,
    logx=flag,
    logy=flag,
    spread=flag,
)
def traces(
    x: ArrayLike | Solution,
    curves: Mapping[str, ArrayLike] | None = None,
    ax: Axes | None = None,
    *,
    xlabel: str = "",
    ylabel: str = "",
    logx: bool = False,
    logy: bool = False,
    spread: bool = True,
) -> Axes:
    """Named curves over one axis: the median over runs, and their range as a band.

    Args:
        x: (k,), or a ``Solution``: then its save times, and its observables that are numbers are the curves.
        curves: name -> (k,) or (runs, k); None with a ``Solution``.
        ax: matplotlib Axes; a new figure by default.
        xlabel, ylabel: axis labels.
        logx, logy: logarithmic axes.
        spread: draw the band from the smallest to the largest run.
    """
    if isinstance(x, Solution):
        if curves is not None:
            raise ValueError("curves must be None where x is a Solution, got a mapping")
        seen = x.to_xarray().drop_vars("energy")
        curves = {str(name): u.values for name, u in seen.items() if u.dims == ("time",)}
        if not curves:
            raise ValueError("x must be a Solution that has observed numbers, got one without; see observe=")
        x, xlabel = x.ts, xlabel or "$t$"
    if curves is None:
        raise ValueError("curves must be a mapping from names to values, got None")
    x = np.asarray(x)
    _check_curves("curves", x, curves)
    ax = axes(ax)
    for k, (name, values) in enumerate(curves.items()):
        values = np.atleast_2d(np.asarray(values))
        color, dash = COLORS[k % len(COLORS)], DASHES[(k // len(COLORS)) % len(DASHES)]
        ax.plot(x, np.median(values, axis=0), color=color, ls=dash, label=name)
        if spread and len(values) > 1:
            ax.fill_between(x, values.min(0), values.max(0), color=color, alpha=0.18, lw=0)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    if logx:
        ax.set_xscale("log")
    if logy:
        ax.set_yscale("log")
    key(ax)
    return ax


def convergence(
    sizes: ArrayLike | Mapping[str, ArrayLike],
    errors: Mapping[str, ArrayLike],
    ax: Axes | None = None,
    *,
    orders: dict[str, float] | None = None,
    xlabel: str = "$m$",
    ylabel: str = "error",
    fitted: bool = True,
) -> Axes:
    """Errors against sizes, log-log, with the fitted exponent in the legend and guides of given slope.

    Args:
        sizes: (k,), or name -> (k,) when the curves have their own.
        errors: name -> (k,) positive.
        ax: matplotlib Axes; a new figure by default.
        orders: label -> slope of a dashed guide, started at the first curve.
        xlabel, ylabel: axis labels.
        fitted: append the least-squares slope to each label.
    """
    ax = axes(ax)
    for k, (name, values) in enumerate(errors.items()):
        n = np.asarray(sizes[name] if isinstance(sizes, dict) else sizes, float)
        values = np.asarray(values, float)
        good = values > 0
        slope = loglog_slope(n[good], values[good]) if good.sum() > 1 else np.nan
        label = f"{name}: slope ${slope:.2f}$" if fitted else name
        ax.plot(
            n[good],
            values[good],
            marker=MARKERS[k % len(MARKERS)],
            color=COLORS[k % len(COLORS)],
            label=label,
        )
        if k == 0:
            for dash, (guide, order) in zip(DASHES[1:] * 3, (orders or {}).items(), strict=False):
                line = values[good][0] * (n[good] / n[good][0]) ** order
                ax.plot(n[good], line, color=PALE, ls=dash, lw=1.0, label=guide, zorder=0)
    ax.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel)
    every = sorted({float(n) for line in ax.lines for n in np.asarray(line.get_xdata())})
    if len(every) <= 6:
        ax.set_xticks(every, [f"{n:g}" for n in every])
    sparse(ax)
    key(ax)
    return ax


def speeds(
    theta: ArrayLike | Mapping[str, ArrayLike],
    speed: Mapping[str, ArrayLike],
    ax: Axes | None = None,
    *,
    log: bool = False,
) -> Axes:
    """Speed of the neurons against their direction theta in [0, 2 pi), one curve a model (angular-speed profile).

    Args:
        theta: (m,), or name -> (m,).
        speed: name -> (m,).
        ax: matplotlib Axes; a new figure by default.
        log: logarithmic speeds.
    """
    ax = axes(ax)
    for k, (name, values) in enumerate(speed.items()):
        turn = np.mod(np.asarray(theta[name] if isinstance(theta, dict) else theta), 2 * np.pi)
        order = np.argsort(turn)
        ax.plot(
            turn[order],
            np.asarray(values)[order],
            label=name,
            marker=MARKERS[k],
            color=COLORS[k % len(COLORS)],
            ms=3,
            lw=0.8,
        )
    ax.set_xticks(np.pi / 2 * np.arange(5), ["$0$", r"$\pi/2$", r"$\pi$", r"$3\pi/2$", r"$2\pi$"])
    ax.set(
        xlabel=r"direction $\vartheta$ of $b$",
        ylabel=r"tangential speed $|\dot b_\perp|$",
        xlim=(0, 2 * np.pi),
    )
    if log:
        ax.set_yscale("log")
    else:
        ax.set_ylim(bottom=0)
    key(ax)
    return ax


def spectrum(values: Mapping[str, ArrayLike], ax: Axes | None = None, *, relative: bool = True) -> Axes:
    """Eigenvalues in falling order, log-log; by default divided by the largest.

    Args:
        values: name -> (k,) eigenvalues in any order; those not positive are left out.
        ax: matplotlib Axes; a new figure by default.
        relative: divide by the largest.
    """
    ax = axes(ax)
    for k, (name, found) in enumerate(values.items()):
        found = np.sort(np.asarray(found, float))[::-1]
        found = found[found > 0]
        scaled = found / found[0] if relative else found
        ax.plot(
            np.arange(1, len(found) + 1),
            scaled,
            color=COLORS[k % len(COLORS)],
            label=name,
            marker=MARKERS[k % len(MARKERS)],
            markevery=0.08,
            ms=3,
            lw=1.0,
        )
    ylabel = r"$\lambda_k / \lambda_{\max}$" if relative else r"$\lambda_k$"
    ax.set(xscale="log", yscale="log", xlabel="rank $k$", ylabel=ylabel)
    key(ax)
    return ax


def ics_trace(
    epoch: ArrayLike, shift: Mapping[str, ArrayLike], ax: Axes | None = None, *, drops: Sequence[float] = ()
) -> Axes:
    """Internal covariate shift, W1 between consecutive epochs, on a logarithmic axis.

    Args:
        epoch: (k,).
        shift: name -> (k,) or (runs, k).
        ax: matplotlib Axes; a new figure by default.
        drops: epochs at which the learning rate falls, as vertical lines.
    """
    ax = traces(epoch, shift, ax, xlabel="epoch", ylabel=r"$W_1$ from epoch to epoch", logy=True)
    for k, drop in enumerate(drops):
        ax.axvline(
            drop, color=REFERENCE, lw=0.8, ls=DASHES[2], zorder=0, label="rate falls" if k == 0 else None
        )
    key(ax)
    return ax
