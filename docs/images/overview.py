"""Draws overview.png: one equation, four inverse metrics. Run: python docs/images/overview.py"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import meanflow as mf

jax.config.update("jax_enable_x64", True)

figure = Figure(figsize=(11, 3.1), layout="constrained")
panels = figure.subplots(1, 3)

# univariate: the same network with two balances; knots over time, through the kinks
x = jnp.linspace(-1.0, 1.0, 10)
data = mf.Dataset(x, jnp.array([1.0, 1, 1, -1, -1, -1, 1, 1, 1, -1]), weights="sum")
r = 3 * jax.random.uniform(jax.random.key(0), (60,), minval=-1, maxval=1)
theta = jax.random.uniform(jax.random.key(1), (60,), minval=-np.pi, maxval=np.pi)
for ax, delta, name in zip(panels[:2], (-100.0, 10.0), ("kernel regime", "adaptive regime"), strict=True):
    cloud = mf.Cloud(mf.Polar(r, theta), labels=delta)
    end = 30 / abs(delta)  # functions move at a speed of order |delta|
    run = mf.solve(mf.lifted(), cloud, data, end, ts=151, solver="sliding", step=end / 300, throw=True)
    knots = -np.tan(run.clouds.particles.theta)
    for k in range(60):
        inside = np.where(np.abs(knots[:, k]) < 1.15, knots[:, k], np.nan)
        ax.plot(run.ts, inside, color="#0072B2" if r[k] > 0 else "#D55E00", lw=0.8)
    for sample in x:
        ax.axhline(sample, color="0.85", lw=0.8, zorder=0)
    ax.set(title=f"{name}, $\\delta$ = {delta:g}", xlabel="time", ylabel="knots $b/a$", ylim=(-1.12, 1.12))

# the plane: directions of the neurons under two metrics
x = jax.random.normal(jax.random.key(2), (200, 2)) * jnp.array([5.0**0.5, 1.0])[None]
data = mf.Dataset(x, jnp.abs(x[:, 0]))
cloud = mf.vanilla().init(jax.random.key(3), 40, dim=2)
for flow, colour, name in ((mf.vanilla(), "0.65", "vanilla"), (mf.batchnorm(), "#009E73", "batch norm")):
    run = mf.solve(flow, cloud, data, 20.0, ts=101, step=0.05)
    b = run.clouds.particles.b
    angle = np.degrees(np.unwrap(np.arctan2(b[..., 1], b[..., 0]), axis=0))
    panels[2].plot(run.ts, angle, color=colour, lw=0.8)
    panels[2].plot([], [], color=colour, label=name)
panels[2].set(title="variances 5 and 1, target $|x_1|$", xlabel="time", ylabel="direction of $b$ (degrees)")
panels[2].set_yticks([-180, -90, 0, 90, 180])
panels[2].legend(fontsize=8, loc="center right", bbox_to_anchor=(1.0, 0.64))
figure.savefig(pathlib.Path(__file__).with_suffix(".png"), dpi=100)
