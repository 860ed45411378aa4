"""Neurons over time, as a moving picture in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
from matplotlib.animation import FuncAnimation, HTMLWriter, PillowWriter
from matplotlib.artist import Artist
from numpy.typing import ArrayLike

from meanflow._boundary import FilePath, checked, count, host_array, instance
from meanflow.files import atomic_write
from meanflow.plots._clouds import AXES, positions, regions, saved
from meanflow.plots.style import NEGATIVE, POSITIVE, canvas, theme
from meanflow.solvers._solution import Solution


@checked
def animate(
    run: Annotated[
        Solution, instance(Solution, hint="pass ts= to solve or every= to descend, so that clouds are saved")
    ],
    path: FilePath,
    *,
    samples: Annotated[ArrayLike, host_array((None,))] | None = None,
    fps: Annotated[int, count(1, 100)] = 12,
    dpi: Annotated[int, count(10, 1000)] = 100,
) -> Path:
    """Write the neurons of a run over time to a file, one frame a save time, and return its path.

    Neurons stand where ``plane`` draws them and have the color of the sign of their contribution; the title shows time
    and energy. Axes are those of the whole run, so that nothing jumps. A file that exists is replaced once the new one
    is whole.

    Args:
        run: a ``Solution`` with saved clouds.
        path: ends with ``.gif``, or with ``.html`` for a page of its own with buttons.
        samples: (s,) inputs of a univariate run, whose activation regions are shaded.
        fps: frames a second.
        dpi: dots an inch; a picture has 4 by 4 inches.

    >>> import jax, jax.numpy as jnp, meanflow as mf, tempfile, pathlib
    >>> data = mf.Dataset(jnp.linspace(-1.0, 1.0, 3), jnp.array([1.0, -1.0, 1.0]))
    >>> flow = mf.canonical()
    >>> run = mf.descend(flow, flow.init(jax.random.key(0), 4), data, 2, step=0.1, every=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     mf.plots.animate(run, pathlib.Path(folder) / "run.gif", dpi=20).name
    'run.gif'
    """
    path = Path(path)
    if path.suffix not in (".gif", ".html"):
        raise ValueError(f"path must end with one of ['.gif', '.html'], got {path.name!r}")
    clouds = saved(run)
    # a run that stopped early has no times for the saves it did not reach
    reached = np.isfinite(np.asarray(run.ts))
    everywhere, sides, kind = positions(clouds)
    places, signs = everywhere[reached], sides[reached]
    times, energies = np.asarray(run.ts)[reached], np.asarray(run.energy)[reached]
    # the largest distance of any frame, with a margin
    reach = 1.08 * max(float(np.max(np.abs(places), initial=0.0)), 1e-12)
    with theme():
        figure = canvas(4.0, 4.0)
        ax = figure.add_subplot()
        if samples is not None:
            regions(samples, ax, reach)
        xlabel, ylabel = AXES.get(kind, ("first coordinate", "second coordinate"))
        ax.set(xlabel=xlabel, ylabel=ylabel, aspect="equal", xlim=(-reach, reach), ylim=(-reach, reach))
        dots = [
            ax.plot([], [], ".", ms=4.5, color=color, mec="white", mew=0.2)[0]
            for color in (POSITIVE, NEGATIVE)
        ]

        def draw(frame: int) -> list[Artist]:
            # the same two artists in each frame: only their points change
            for sign, dot in zip((1, -1), dots, strict=True):
                dot.set_data(*places[frame][signs[frame] == sign].T)
            ax.set_title(f"$t = {times[frame]:.3g}$,  $E = {energies[frame]:.3g}$")
            return [*dots]

        film = FuncAnimation(figure, draw, frames=len(times), init_func=lambda: [*dots])
        path.parent.mkdir(parents=True, exist_ok=True)
        gif = path.suffix == ".gif"
        writer = PillowWriter(fps=fps) if gif else HTMLWriter(fps=fps, embed_frames=True)
        with atomic_write(path) as part:
            film.save(part, writer=writer, dpi=dpi)
    return path
