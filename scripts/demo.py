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
from meanflow_papers.univariate.figure_5_map import regime_map

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
    """8 widths x 9 balances x 4 seeds of univariate networks that learn a sine, and the page about them."""
    outcome = regime_map(
        widths=(20, 30, 45, 65, 100, 140, 200, 300),
        deltas=(-np.inf, -100, -10, -1, 0, 1, 10, 100, np.inf),
        seeds=4,
        every=500,
        observe={"neurons": "neurons"},
    )
    runs, samples = outcome.data["runs"], outcome.data["samples"]
    end = runs.isel(step=-1).median("seed")
    for delta, name in ((-100.0, "kernel"), (-10.0, "intermediate"), (100.0, "adaptive")):
        at = end.sel(width=200, delta=delta)
        turned, filled = float(at.angle_displacement), float(at.concentration)
        print(
            f"{name:>12} regime (width 200, delta {delta:>4g}): rms turn {turned:.4f}, concentration {filled:.2f}"
        )
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    for k, name in enumerate(("angle_displacement", "concentration")):
        values = end[name].assign_attrs(runs[name].attrs)
        plots.heat_map(values, figure.add_subplot(121 + k))
    figure.savefig(folder / "regimes.png", dpi=150)
    page = write_report(runs, folder / "report.html", title="Kernel and adaptive regimes", samples=samples)
    passed = sum(c.passed for c in outcome.criteria)
    print(f"{passed} of {len(outcome.criteria)} numbers of the theory met at width 200")
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
