"""Batch norm against vanilla, and one univariate network in three regimes: flows, numbers and figures."""

import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import meanflow as mf
from meanflow import plots
from meanflow.experiments.batchnorm import alignment, quasi_normal, spokes

jax.config.update("jax_enable_x64", True)


def batchnorm_against_vanilla(folder: pathlib.Path) -> None:
    """Neurons in the plane, inputs with variances 5 and 1, target |x_1|."""
    x = quasi_normal(400)
    data = mf.Dataset(x, np.abs(x[:, 0]))
    runs = {
        name: mf.descend(flow, spokes(50), data, 4000, step=0.01, every=100)
        for name, flow in {"batch norm": mf.batchnorm().bind(data), "vanilla": mf.vanilla()}.items()
    }
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    plots.energies(runs, figure.add_subplot(131))
    for k, (name, run) in enumerate(runs.items()):
        ax = plots.directions(run.final, figure.add_subplot(132 + k, projection="polar"))
        ax.set_title(f"{name}: directions of $b$")
        q = float(alignment(None, run.final, None))
        print(f"{name:>10}: loss {float(run.energy[-1]):.2e}, alignment with the wide axis {q:.2f}")
    figure.savefig(folder / "batchnorm.png", dpi=150)


def univariate_regimes(folder: pathlib.Path) -> None:
    """A square wave fitted by 200 neurons of balance delta: kernel, intermediate and adaptive regimes."""
    x = np.linspace(-1, 1, 10)
    data = mf.Dataset(x, np.array([1.0, 1, 1, -1, -1, -1, 1, 1, 1, -1]), "sum")
    flow = mf.lifted(alpha="sqrt")
    grid = jnp.linspace(-1.2, 1.2, 400)
    curves = {}
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    for k, delta in enumerate((-100.0, 100.0)):
        cloud = flow.init(jax.random.key(0), 200, labels=delta)
        run = mf.descend(flow, cloud, data, 4000, step=mf.KernelStep(0.2), clock="lazy")
        curves[rf"$\delta = {delta:g}$"] = mf.predict(flow, run.final, grid)
        turned = run.final.particles.theta - cloud.particles.theta
        rms = float(jnp.sqrt(jnp.mean(turned**2)))
        print(f"delta {delta:>5g}: loss {float(run.energy[-1]):.3f}, rms turn of the neurons {rms:.4f}")
        ax = plots.plane(*run.final.particles, figure.add_subplot(132 + k))
        ax.set_title(rf"neurons at $\delta = {delta:g}$")
    plots.fit(grid, curves, data, figure.add_subplot(131))
    figure.savefig(folder / "univariate.png", dpi=150)


def main(folder: str) -> None:
    """Runs both and says where the figures are."""
    start = time.perf_counter()
    out = pathlib.Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    batchnorm_against_vanilla(out)
    univariate_regimes(out)
    print(f"figures in {out}/ after {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "out/demo")
