"""Draws committee.png: plateau and escape of a soft committee machine. Run: python docs/images/committee.py

Two students learn two orthonormal teachers from fresh samples, one at a time, with rate 1/d; the line solves the
equations of Saad and Solla (1995) for their overlaps from the same start.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import meanflow as mf
from meanflow.activations import Stretched
from meanflow.flows import GaussianPopulation

jax.config.update("jax_enable_x64", True)
END, SAVES, ETA = 200, 100, 1.0
times = np.linspace(0, END, SAVES + 1)

figure = Figure(figsize=(6.5, 3.0), layout="constrained")
ax = figure.subplots()
flow = mf.vanilla(Stretched("erf", 0.5**0.5), alpha="one", outer=0.0)
for d, color in ((250, "#56B4E9"), (1000, "#0072B2")):
    data = GaussianPopulation(flow, mf.Cloud(mf.Neurons(jnp.ones(2), jnp.eye(2, d))))
    cloud = mf.Cloud(
        mf.Neurons(jnp.ones(2), 0.002 * jnp.eye(2, d) + (0.3 - 0.002**2) ** 0.5 * jnp.eye(2, d, 2))
    )
    batches = mf.Batches(1, jax.random.key(3), sampler=data.sample)
    settings = {"every": END * d // SAVES, "clock": "gradient", "batches": batches}
    run = mf.descend(flow, cloud, data, END * d, step=ETA / d, **settings)
    ax.plot(times, run.energy, color=color, lw=1.2, label=f"one pass, d = {d}")
law, start = data.overlaps(cloud, rate=ETA)
sol = mf.solve(flow, start, law, END * ETA, ts=SAVES + 1, clock="gradient")
ax.plot(times, sol.energy, "k--", lw=1.2, label="overlap equations")
plateau = 2 / np.pi * (np.pi / 6 - 2 * np.arcsin(1 / 4))
ax.axhline(plateau, color="0.7", lw=0.8, zorder=0, label="plateau of gradient flow")
ax.set(yscale="log", xlabel="samples / d", ylabel="population loss", ylim=(1e-4, 1))
ax.legend(fontsize=8)
figure.savefig(pathlib.Path(__file__).with_suffix(".png"), dpi=100)
