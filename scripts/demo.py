"""Batch norm against vanilla, and a sweep of univariate networks through their regimes: figures and a report."""

import pathlib
import sys
import time

import jax
import numpy as np
from matplotlib.figure import Figure

import meanflow as mf
from meanflow import plots
from meanflow.report import write_report
from meanflow_papers.manifold.setup import alignment, quasi_normal, spokes
from meanflow_papers.univariate.figure_5_map import square_law

jax.config.update("jax_enable_x64", True)
mf.keep_programs()


def batchnorm_against_vanilla(folder: pathlib.Path) -> None:
    """Neurons in the plane, inputs with variances 5 and 1, target |x_1|."""
    x = quasi_normal(400)
    data = mf.Dataset(x, np.abs(x[:, 0]))
    runs = {
        name: mf.descend(flow, spokes(50), data, 4000, step=0.01, every=100)
        for name, flow in {"batch norm": mf.batchnorm().bind(data), "vanilla": mf.vanilla()}.items()
    }
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    # from the start on, which a logarithmic axis of times could not show
    losses = {name: run.energy for name, run in runs.items()}
    plots.traces(
        runs["vanilla"].ts, losses, figure.add_subplot(131), xlabel="$t$", ylabel="loss $L$", logy=True
    )
    for k, (name, run) in enumerate(runs.items()):
        ax = plots.directions(run.final, figure.add_subplot(132 + k, projection="polar"))
        ax.set_title(f"{name}: directions of $b$")
        q = float(alignment(None, run.final, None))
        print(f"{name:>10}: loss {float(run.energy[-1]):.2e}, alignment with the wide axis {q:.2f}")
    figure.savefig(folder / "batchnorm.png", dpi=150)


def regime_sweep(folder: pathlib.Path) -> None:
    """3 widths x 7 balances x 3 seeds of univariate networks that fit a sine, and the page about them."""
    x = np.linspace(-1, 1, 20)
    data = mf.Dataset(x, np.sin(2 * np.pi * x), "sum")
    runs = mf.sweep(
        mf.lifted(alpha="sqrt"),
        data,
        widths=(50, 100, 200),
        deltas=(-np.inf, -100.0, -10.0, 0.0, 10.0, 100.0, np.inf),
        seeds=3,
        init=square_law,
        steps=40_000,
        every=1000,
        step=mf.KernelStep(0.5),
        observe=["default", "concentration", "on_sample_share", "neurons"],
    )
    last, first_loss = runs.isel(step=-1), float(runs.energy.isel(step=0).median())
    figure = Figure(figsize=(12, 6.4), layout="constrained")
    shown = ((-100.0, "kernel regime"), (0.0, "in between"), (100.0, "feature regime"))
    for k, (delta, name) in enumerate(shown):
        one = last.sel(width=200, delta=delta)
        median = one.median("seed")
        print(
            f"{name:>15} (balance {delta:>4g}): loss {float(median.energy):.3f} of {first_loss:.2f}, "
            f"rms turn {float(median.angle_displacement):.4f}, concentration {float(median.concentration):.2f}"
        )
        ax = figure.add_subplot(231 + k)
        first = one.isel(seed=0)
        plots.fit(
            runs.x.values,
            {"f": first.predictions.values},
            data,
            ax,
            knots=-np.tan(first.neurons_theta.values),
        )
        ax.set_title(f"{name}: balance {delta:g}")
    for k, name in enumerate(("angle_displacement", "concentration", "energy")):
        values = last[name].median("seed").assign_attrs(runs[name].attrs)
        plots.heat_map(values, figure.add_subplot(234 + k))
    figure.savefig(folder / "regimes.png", dpi=150)
    page = write_report(runs, folder / "report.html", title="Kernel and feature regimes", samples=data)
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
