"""What the papers draw and no criterion needs: trajectories, final functions, fields, for one seed.

Each function takes the outcome of an experiment and the arguments it was run with, and returns arrays to add to the
outcome's data before it is drawn.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import meanflow as mf
from meanflow import depth
from meanflow import univariate as uni
from meanflow.experiments import batchnorm, univariate, univariate_kernels
from meanflow.experiments.outcome import Outcome
from meanflow.kernels.readout import minimum_norm
from meanflow.univariate import balance, forces
from meanflow.univariate.kernels import Finite, Signs
from meanflow.univariate.knots import piecewise_linear

GRID = np.linspace(-1.15, 1.15, 921)
FRAMES = 50


def speed_profiles(outcome: Outcome, arguments: dict[str, Any]) -> dict[str, Any]:
    """001/figure-1: tangential speed of each neuron against its direction at iteration 500."""
    data, clouds = outcome.data["data"], outcome.data["clouds"]
    out: dict[str, Any] = {"speed": {}, "direction": {}}
    for name, flow in {"bn": mf.batchnorm().bind(data), "vanilla": mf.vanilla()}.items():
        cloud = jax.tree.map(lambda u: u[1], clouds[name])
        b = np.asarray(cloud.particles.b)
        out["speed"][name] = batchnorm.tangential_speeds(flow, cloud, data)
        out["direction"][name] = np.mod(np.arctan2(b[:, 1], b[:, 0]), 2 * np.pi)
    return out


def two_scales(outcome: Outcome, arguments: dict[str, Any]) -> dict[str, Any]:
    """001/figure-2: directions of the 25 short and 25 long neurons at six iterations, (6, 50, 2)."""
    x = batchnorm.quasi_normal(400)
    data = mf.Dataset(x, np.abs(x[:, 0]))
    short, long = batchnorm.spokes(25).particles, batchnorm.spokes(25, 10.0).particles
    cloud = mf.Cloud(jax.tree.map(lambda u, v: jnp.concatenate([u, v]), short, long))
    see: Callable[..., Any] = lambda flow, cloud, data: cloud.particles.b
    steps = arguments["steps"]
    flow = mf.batchnorm().bind(data)
    run = mf.descend(flow, cloud, data, steps, step=arguments["eta"], every=steps // 5, observe=see)
    return {"b": run.observed, "frames": np.arange(0, steps + 1, steps // 5)}


def stable_rows(outcome: Outcome, arguments: dict[str, Any]) -> dict[str, Any]:
    """002/figures-7-8: three layers of explicit rows from two and from three clusters."""
    rows = {}
    for name, x in {"two": [0.0, 0, 1, 1, 1], "three": [0.0, 0, 1, 3, 3]}.items():
        layers = [jnp.asarray([x])]
        for _ in range(3):
            z = layers[-1] - jnp.mean(layers[-1], axis=1, keepdims=True)
            layers.append(jnp.maximum(jnp.concatenate([z, -z]), 0.0))
        rows[name] = layers
    return {"rows": rows}


def odd_paths(outcome: Outcome, arguments: dict[str, Any]) -> dict[str, Any]:
    """002/odd-states: the infinite-width recursion from an outlier and from equal inputs, by batch size."""
    found = {}
    for n in (5, 10, 20, 50):
        start = jnp.diag(jnp.ones(n).at[0].set(4.0))
        grams = depth.expected_gram(start, 400, renormalize=True)
        found[f"n={n}"] = jax.vmap(depth.odd_point)(grams)._asdict()
    return {"paths": found}


def spline_networks(outcome: Outcome, arguments: dict[str, Any]) -> dict[str, Any]:
    """004/figure-4: functions of three random networks whose output weights are trained to the end."""
    x, y = univariate_kernels.square_wave()
    grid = outcome.data["grid"]
    found = {}
    for width in (30, 100, 1000):
        a, b = Signs(1.0).sample(jax.random.key(0), width)
        cloud = Finite(a, b)
        c = minimum_norm(cloud.features(x), y)
        found[width] = piecewise_linear(a, b, c, weights=jnp.sqrt(cloud.weights))(grid)
    return {"networks": found, "x": x, "y": y}


def _journey(
    start: mf.Affine,
    data: mf.Dataset,
    epochs: int,
    step: mf.KernelStep,
    alpha: str,
    kp: Any = 1.0,
    kc: Any = 1.0,
) -> dict[str, jax.Array]:
    """Gradient descent of one network: f on the grid at the end, and (r, theta) at ``FRAMES`` + 1 times."""
    flow = uni.full(alpha, inner=kp, outer=kc)
    see: Callable[..., Any] = lambda flow, cloud, data: balance.project(cloud, alpha).particles
    every = max(1, epochs // FRAMES)
    run = mf.descend(
        flow, mf.Cloud(start), data, every * FRAMES, step=step, clock="gradient", every=every, observe=see
    )
    f = mf.predict(flow, run.final, jnp.asarray(GRID))
    return {"f": f, "r": run.observed.r, "theta": run.observed.theta}


def _by_balance(data: mf.Dataset, key: jax.Array, width: int, epochs: int, settings: Any) -> dict[str, Any]:
    """``_journey`` of one start for pairs (delta, kappa), alpha = sqrt m; arrays with a leading axis of pairs."""

    def one(delta: jax.Array, kappa: jax.Array) -> dict[str, jax.Array]:
        kp, kc = balance.layer_rates(delta)
        start = balance.lift(mf.Cloud(univariate.draw(key, width), labels=delta), "sqrt").particles
        return _journey(start, data, epochs, mf.KernelStep(kappa, 20), "sqrt", kp, kc)

    deltas, kappas = (jnp.asarray(u) for u in settings)
    found = jax.jit(jax.vmap(one))(deltas, kappas)
    return {"grid": GRID, "x": data.x, "y": data.y, "runs": found, "run_delta": deltas}


def regimes(outcome: Outcome, arguments: dict[str, Any]) -> dict[str, Any]:
    """004/figure-5: the first seed's function and neurons for four balances."""
    key = jax.random.split(jax.random.key(5), arguments["seeds"])[0]
    kappa = arguments["kappa"]
    settings = ([-np.inf, -10.0, 0.0, np.inf], [kappa] * 4)
    return _by_balance(univariate.sinusoid(), key, 200, arguments["epochs"], settings)


def extremes(outcome: Outcome, arguments: dict[str, Any]) -> dict[str, Any]:
    """004/figure-6: the first seed's function, neurons and their paths for both extremes."""
    key = jax.random.split(jax.random.key(6), arguments["seeds"])[0]
    settings = ([-np.inf, np.inf], [1.0, 0.1])
    return _by_balance(univariate.square_wave(), key, arguments["width"], arguments["epochs"], settings)


def widths(outcome: Outcome, arguments: dict[str, Any]) -> dict[str, Any]:
    """004/figure-8: functions and neurons of the three networks after training."""
    data, found = univariate.sinusoid(), {}
    for width in arguments["widths"]:
        key = jax.random.fold_in(jax.random.key(arguments["seed"]), width)
        a, b, c = jax.random.uniform(key, (3, width), minval=-1.0)
        start = mf.Affine(a, b, c / width ** arguments["power"])
        run = jax.jit(_journey, static_argnums=(2, 4))(
            start, data, arguments["epochs"], mf.KernelStep(0.5, 50), "one"
        )
        found[width] = run
    return {"grid": GRID, "x": data.x, "y": data.y, "runs": found}


def field(outcome: Outcome, arguments: dict[str, Any]) -> dict[str, Any]:
    """004/figure-9: function, neurons, rays and the field felt by a neuron of either sign at flow time 10."""
    data = univariate.square_wave()
    cloud = balance.lift(mf.Cloud(univariate.draw(jax.random.key(9), 400), labels=jnp.inf), "sqrt")
    flow = uni.full("sqrt", outer=False)
    sol = mf.solve(flow, cloud, data, 10.0, solver="sliding", step=arguments["step"], clock="gradient")
    residual = mf.predict(flow, sol.final, data.x) - data.y
    table = forces.region_forces(residual, data.x)
    polar = balance.project(sol.final, "sqrt").particles
    reach = 1.05 * float(jnp.max(jnp.abs(polar.r)))
    u, v = (w.ravel() for w in np.meshgrid(*2 * [np.linspace(-reach, reach, 18)]))
    home = forces.find_regions(jnp.stack([jnp.asarray(u), jnp.asarray(v)], axis=-1), data.x)
    return {
        "grid": GRID,
        "x": data.x,
        "y": data.y,
        "f": mf.predict(flow, sol.final, jnp.asarray(GRID)),
        "r": polar.r,
        "theta": polar.theta,
        "rays": uni.classify_rays(data.x, residual)._asdict(),
        "u": u,
        "v": v,
        "velocity": -np.asarray(table)[np.asarray(home)],  # of a neuron with r > 0; opposite for r < 0
    }
