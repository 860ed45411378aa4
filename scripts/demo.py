"""Batch norm against vanilla, and a sweep of univariate networks through their regimes: figures and a report."""

import pathlib
import sys
import time

import jax
import numpy as np
from matplotlib.figure import Figure

import meanflow as mf
from meanflow import plots
from meanflow.experiments.batchnorm import alignment, quasi_normal, spokes
from meanflow.report import write_report
from meanflow.sweeps import Observable, particles

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


def regime_sweep(folder: pathlib.Path) -> None:
    """8 widths x 9 balances x 4 seeds of univariate networks that learn a square wave, and the page about them."""
    x = np.linspace(-1, 1, 10)
    data = mf.Dataset(x, np.array([1.0, 1, 1, -1, -1, -1, 1, 1, 1, -1]), "sum")
    runs = mf.sweep(
        mf.lifted(alpha="sqrt"),
        data,
        widths=(20, 30, 45, 65, 100, 140, 200, 300),
        deltas=(-np.inf, -100, -10, -1, 0, 1, 10, 100, np.inf),
        seeds=4,
        scales=(3.0,),
        steps=4000,
        every=400,
        step=mf.KernelStep(0.2),
        observe={
            "neurons": Observable(particles, dims=("particle",)),
            "slope_variation": None,
            "dissipation": None,
        },
    )
    turn = runs.angle_displacement.isel(step=-1, scale=0).median("seed")
    full = runs.concentration.isel(step=-1, scale=0).median("seed")
    for delta in (-100.0, 0.0, 100.0):
        at = {"width": 200, "delta": delta}
        turned, filled = float(turn.sel(at)), float(full.sel(at))
        print(f"width 200, delta {delta:>5g}: rms turn {turned:.4f}, concentration {filled:.3f}")
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    plots.heat_map(turn, figure.add_subplot())
    figure.savefig(folder / "regimes.png", dpi=150)
    page = write_report(runs, folder / "report.html", title="Kernel and adaptive regimes", samples=data)
    print(f"{int((runs.result == 0).sum())} of {runs.result.size} runs succeeded; report in {page}")


def main(folder: str) -> None:
    """Runs both and says where the figures are."""
    start = time.perf_counter()
    out = pathlib.Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    batchnorm_against_vanilla(out)
    regime_sweep(out)
    print(f"figures in {out}/ after {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "out/demo")
