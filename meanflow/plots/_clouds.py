"""Pictures of clouds: directions on the circle, neurons in a plane, and both of them over time."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Wedge
from numpy.typing import ArrayLike

from meanflow import _boundary
from meanflow._boundary import (
    Count,
    Length,
    checked,
    either,
    host_array,
    instance,
)
from meanflow.measures import Cloud
from meanflow.plots._places import Places, places
from meanflow.plots.style import COLORS, NEGATIVE, PALE, POSITIVE, axes, key
from meanflow.solvers._solution import Solution
from meanflow.univariate._rays import RayTable

# names of the two axes in which neurons stand
AXES = {"r": ("$u$", "$v$"), "|a| b": ("$|a|\\, b_1$", "$|a|\\, b_2$")}


@checked
def directions(
    cloud: Annotated[Cloud | Solution, instance(Solution, Cloud)],
    ax: Axes | None = None,
    *,
    bins: Count = 36,
    color: str = COLORS[0],
    label: str | None = None,
) -> Axes:
    """Directions of b in the plane: a histogram on polar axes, or over time the angle of each neuron.

    The area of a bar is its share of the weight: its radius is the square root of the share, since areas are what the
    eye compares.

    Args:
        cloud: neurons with b (m, 2); or a ``Solution`` with saved clouds, whose angles are drawn over time, in degrees
            and without jumps.
        ax: polar Axes, plain ones for a ``Solution``; a new figure by default.
        bins: sectors of the circle.
        color: of the bars or lines.
        label: name of the lines in a legend.

    >>> import jax, meanflow as mf
    >>> ax = directions(mf.vanilla().init(jax.random.key(0), 30, dim=2), bins=12)
    >>> len(ax.patches)
    12
    """
    if isinstance(cloud, Solution):
        clouds = saved(cloud)
        b = np.asarray(clouds.particles.b)[..., _real(clouds), :]
        angle = np.degrees(np.unwrap(np.arctan2(b[..., 1], b[..., 0]), axis=0))
        ax = axes(ax)
        lines = ax.plot(np.asarray(cloud.ts), angle, color=color, lw=0.8)
        lines[0].set_label(label)
        ax.set(xlabel="$t$", ylabel="direction of $b$ (degrees)")
        return ax
    ax = axes(ax, projection="polar")
    b = np.asarray(cloud.particles.b)
    # angles from -width/2 on, so that no bar is cut at the first axis
    width = 2 * np.pi / bins
    span = (-width / 2, 2 * np.pi - width / 2)  # the first sector is centered on the first axis
    turn = np.mod(np.arctan2(b[:, 1], b[:, 0]) + width / 2, 2 * np.pi) - width / 2
    share, edges = np.histogram(turn, bins=bins, range=span, weights=np.asarray(cloud.weights))
    ax.bar(edges[:-1], np.sqrt(share), width=width, align="edge", color=color, edgecolor="white", lw=0.3)
    ax.set_xticks(np.pi / 2 * np.arange(4), ["$0$", r"$\pi/2$", r"$\pi$", r"$3\pi/2$"])
    ax.set_yticks([])
    ax.spines["polar"].set_color(PALE)
    return ax


def positions(cloud: Cloud) -> Places:
    """Return where neurons stand in a plane, (m, 2), and the signs (m,) of what they contribute; padding is left out.

    Those of more than two coordinates (``places``) stand at the first two. Clouds that are stacked over time give
    (k, m, 2) and (k, m).
    """
    particles = cloud.particles
    if not hasattr(particles, "_asdict"):
        raise ValueError(f"cloud.particles must be a record such as Neurons, got {type(particles).__name__}")
    place, sign, name = places({n: np.asarray(u) for n, u in particles._asdict().items()})
    if place.shape[-1] < 2:
        raise ValueError(
            f"cloud must hold neurons with at least 2 coordinates beside the amplitude to stand in a plane, "
            f"got {place.shape[-1]}"
        )
    real = _real(cloud)
    return Places(place[..., real, :2], sign[..., real], name)


def _real(cloud: Cloud) -> np.ndarray:
    """Return which particles (m,) are neurons: padding has weight 0 at all times."""
    weights = np.asarray(cloud.weights)
    return (weights[0] if weights.ndim > 1 else weights) > 0


def saved(run: Solution) -> Cloud:
    """Return the clouds of a run over time, or refuse a run that has none."""
    if run.clouds is None or run.ts.ndim != 1:
        raise ValueError("run must be a single run with saved clouds: pass ts= or every=, and no observe=")
    return run.clouds


@checked
def knots(
    run: Annotated[
        Solution, instance(Solution, hint="pass ts= to solve or every= to descend, so that clouds are saved")
    ],
    ax: Axes | None = None,
    *,
    samples: Annotated[ArrayLike, host_array((None,), least=1)] | None = None,
) -> Axes:
    """Knots of univariate neurons over time: the input at which each of them bends, b/a = -tan(theta).

    A knot that meets a sample often stays there. Lines have the color of the sign of their neuron's contribution, and
    are as wide as the inputs of the samples, with a margin.

    Args:
        run: a ``Solution`` of univariate neurons with saved clouds.
        ax: matplotlib Axes; a new figure by default.
        samples: (s,) inputs, drawn as grey lines.

    >>> import jax, jax.numpy as jnp, meanflow as mf
    >>> data = mf.Dataset(jnp.linspace(-1.0, 1.0, 3), jnp.array([1.0, -1.0, 1.0]))
    >>> flow = mf.canonical()
    >>> run = mf.descend(flow, flow.init(jax.random.key(0), 4), data, 2, step=0.1, every=1)
    >>> [round(float(end), 2) for end in knots(run, samples=data.x).get_ylim()]
    [-1.15, 1.15]
    """
    clouds = saved(run)
    place, sign, kind = positions(clouds)
    if kind != "r":
        raise ValueError(f"run must be one of univariate neurons, got {type(clouds.particles).__name__}")
    # u x + v = 0: neurons that never bend, at u = 0, have no knot
    u, v = np.moveaxis(place, -1, 0)
    at = -v / np.where(u == 0, np.nan, u)
    if samples is None:
        low, high = np.nanquantile(at[0], (0.1, 0.9)) if np.isfinite(at[0]).any() else (-1.0, 1.0)
    else:
        low, high = float(np.min(np.asarray(samples))), float(np.max(np.asarray(samples)))
    margin = 0.075 * max(high - low, 1e-12)
    ax = axes(ax)
    for sample in np.asarray([] if samples is None else samples):
        ax.axhline(sample, color=PALE, alpha=0.5, lw=0.8, zorder=0)
    # a knot that leaves the picture on one side and comes back on the other draws no line across it
    shown = np.where((at > low - 2 * margin) & (at < high + 2 * margin), at, np.nan)
    for side, color, name in ((1, POSITIVE, "$r > 0$"), (-1, NEGATIVE, "$r < 0$")):
        lines = ax.plot(np.asarray(run.ts), shown[:, sign[0] == side], color=color, lw=0.8)
        if lines:
            lines[0].set_label(name)
    ax.set(xlabel="$t$", ylabel="knots $b/a$", ylim=(low - margin, high + margin))
    key(ax, loc="upper right", frameon=True, framealpha=0.85, edgecolor="none")
    return ax


@checked
def plane(
    r: Annotated[
        ArrayLike | Solution | Cloud,
        either(
            instance(Solution, Cloud, hint="for instance a Solution of univariate neurons"),
            host_array((None,), nan=True),
        ),
    ],
    theta: Annotated[ArrayLike, host_array((None,), nan=True)] | None = None,
    ax: Axes | None = None,
    *,
    samples: Annotated[ArrayLike, host_array((None,))] | None = None,
    rays: Annotated[RayTable, instance(RayTable, hint="the table of univariate.classify_rays")] | None = None,
    paths: Annotated[ArrayLike, host_array((None, None, 2), nan=True)] | None = None,
    reach: Length | None = None,
) -> Axes:
    """Neurons as points in a plane, colored by the sign of their contribution.

    Univariate neurons stand at (u, v) = |r| (cos theta, sin theta), two-layer neurons at |a| times the first two
    entries of b, and those of another model at their first two coordinates beside the amplitude ``a``.

    Args:
        r: (m,) amplitudes; or a ``Cloud``, or a ``Solution``, whose final neurons are drawn, with their paths where it
            has saved clouds.
        theta: (m,) angles; None where ``r`` is a ``Cloud`` or a ``Solution``.
        ax: matplotlib Axes; a new figure by default.
        samples: (s,) inputs; their lines u x_j + v = 0 cut the plane into activation regions, shaded by the
            number of active samples.
        rays: ``RayTable`` of ``classify_rays``: rays that attract neurons of one sign are drawn in its color.
        paths: (frames, m, 2) positions in time.
        reach: half the side of the square shown; default by the largest |r|.

    >>> ax = plane([1.0, -2.0], [0.3, 2.0], samples=[-1.0, 0.0, 1.0])
    >>> len(ax.patches)  # six activation regions
    6
    """
    if isinstance(r, Solution | Cloud):
        if theta is not None:
            raise ValueError("theta must be None where r is a Solution or a Cloud, got an array")
        if isinstance(r, Solution) and r.clouds is not None and paths is None:
            paths = positions(r.clouds)[0]
        place, sign, kind = positions(r.final if isinstance(r, Solution) else r)
    else:
        if theta is None:
            raise ValueError("theta must be an array (m,) like r, got None")
        r, theta = np.asarray(r), np.asarray(theta)
        _boundary.shape("theta", theta, r.shape)
        place, sign, kind = places({"r": r, "theta": theta})
    if paths is not None:
        _boundary.shape("paths", paths, (None, len(sign), 2))
    ax = axes(ax)
    reach = float(reach or 1.08 * max(np.max(np.hypot(*place.T), initial=0.0), 1e-12))
    if samples is not None:
        regions(samples, ax, reach)
    if rays is not None:
        for attracts, color, name in (
            (rays.positive, POSITIVE, "attracts $r > 0$"),
            (rays.negative, NEGATIVE, "attracts $r < 0$"),
        ):
            for k, angle in enumerate(np.asarray(rays.theta)[np.asarray(attracts) == 1]):
                end = 2 * reach * np.array([np.cos(angle), np.sin(angle)])
                label = name if k == 0 else None
                ax.plot([0, end[0]], [0, end[1]], color=color, lw=1.0, alpha=0.7, zorder=0.8, label=label)
    amplitude = "r" if kind == "r" else "a"
    sides = [(1, POSITIVE, f"${amplitude} > 0$"), (-1, NEGATIVE, f"${amplitude} < 0$")]
    if (sign == 0).any():  # neurons without an amplitude
        sides.append((0, PALE, ""))
    if paths is not None:
        paths = np.asarray(paths)
        for side, color, _ in sides:
            pick = paths[:, sign == side]
            # (frames + 1, m, 2), the last row NaN: all paths of a color are one line with gaps
            broken = np.concatenate([pick, np.full((1, *pick.shape[1:]), np.nan)])
            flat = broken.transpose(1, 0, 2).reshape(-1, 2)
            ax.plot(flat[:, 0], flat[:, 1], color=color, lw=0.5, alpha=0.5)
    for side, color, name in sides:
        u, v = place[sign == side].T
        ax.plot(u, v, ".", ms=4.5, color=color, mec="white", mew=0.2, label=name)
    xlabel, ylabel = AXES.get(kind, tuple(f"entry {k} of ${kind}$" for k in (1, 2)))
    ax.set(xlabel=xlabel, ylabel=ylabel, aspect="equal", xlim=(-reach, reach), ylim=(-reach, reach))
    # a legend over the neurons needs a ground of its own, and larger dots than theirs
    look = {"frameon": True, "framealpha": 0.85, "edgecolor": "none", "markerscale": 1.6}
    key(ax, loc="upper right", handletextpad=0.1, **look)
    return ax


def regions(samples: ArrayLike, ax: Axes, reach: float) -> None:
    """Draw the activation regions of samples in the (u, v) plane: lines u x_j + v = 0, darker where more are active."""
    x = np.sort(np.asarray(samples))
    # sample x_j changes between active and inactive on the line cos(theta) x_j + sin(theta) = 0, at two angles
    edges = np.sort(np.concatenate([-np.arctan(x), np.pi - np.arctan(x)]))
    stops = np.append(edges, edges[0] + 2 * np.pi)
    for start, stop in zip(stops[:-1], stops[1:], strict=True):
        # which samples are active is the same everywhere between two lines: ask in the middle
        middle = (start + stop) / 2
        active = np.mean(np.cos(middle) * x + np.sin(middle) > 0)
        # from white to light grey: neurons and paths stay visible on all of them
        shade = 1.0 - 0.16 * active
        wedge = Wedge((0, 0), 2 * reach, np.degrees(start), np.degrees(stop), lw=0, zorder=0)
        wedge.set(color=(shade, shade, min(1.0, shade + 0.02)))
        ax.add_patch(wedge)
    for edge in edges:
        end = 2 * reach * np.array([np.cos(edge), np.sin(edge)])
        ax.plot([0, end[0]], [0, end[1]], color="white", lw=0.8, zorder=0.5)
