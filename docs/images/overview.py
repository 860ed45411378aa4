"""Draws overview.png: three ways to learn under one equation. Run: python docs/images/overview.py"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import meanflow as mf
from meanflow import plots

jax.config.update("jax_enable_x64", True)

with plots.style.theme():
    figure = Figure(figsize=(11, 3.3), layout="constrained")
    panels = figure.subplots(1, 3)

    # univariate: the same network with two balances; knots over time, through the kinks
    x = jnp.linspace(-1.0, 1.0, 10)
    data = mf.Dataset(x, jnp.array([1.0, 1, 1, -1, -1, -1, 1, 1, 1, -1]), weights="sum")
    r = 3 * jax.random.uniform(jax.random.key(0), (60,), minval=-1, maxval=1)
    theta = jax.random.uniform(jax.random.key(1), (60,), minval=-np.pi, maxval=np.pi)
    for ax, delta, name in zip(panels[:2], (-100.0, 10.0), ("kernel regime", "feature regime"), strict=True):
        cloud = mf.Cloud(mf.Polar(r, theta), labels=delta)
        end = 30 / abs(delta)  # functions move at a speed of order |delta|
        run = mf.solve(mf.lifted(), cloud, data, end, ts=151, solver="sliding", step=end / 300)
        plots.knots(run, ax, samples=x)
        ax.set(
            title=f"{name}: balance {delta:g}", xlabel="time", ylabel="where each neuron bends (input $x$)"
        )
        ax.set_xticks(np.linspace(0, end, 4), ["0", "10", "20", "30"])
        ax.set_xlabel(r"time $\times\ |$balance$|$")

    # the plane: directions of the neurons under two metrics
    x = jax.random.normal(jax.random.key(2), (200, 2)) * jnp.array([5.0**0.5, 1.0])[None]
    data = mf.Dataset(x, jnp.abs(x[:, 0]))
    cloud = mf.vanilla().init(jax.random.key(3), 40, dim=2)
    for flow, color, name in (
        (mf.vanilla(), plots.style.PALE, "plain"),
        (mf.batchnorm(), plots.style.COLORS[2], "batch norm"),
    ):
        run = mf.solve(flow, cloud, data, 20.0, ts=101, step=0.05)
        plots.directions(run, panels[2], color=color, label=name)
    panels[2].set(
        title="two inputs, target $|x_1|$", xlabel="time", ylabel="direction of each neuron (degrees)"
    )
    panels[2].set_yticks([-180, -90, 0, 90, 180])
    plots.style.key(panels[2], loc="center right", bbox_to_anchor=(1.0, 0.64), frameon=True, edgecolor="none")
    figure.savefig(pathlib.Path(__file__).with_suffix(".png"), dpi=100)
