"""Theorems and claims without a figure of "BN decomposed" (002): both sides computed, with pass criteria."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meanflow import depth
from meanflow._numerics import iterate
from meanflow.depth.initializers import one_neuron_per_sample as initializers_for
from meanflow.depth.observables import gram, orthogonality_gap
from meanflow.experiments.decomposed import digits
from meanflow.experiments.outcome import Criterion, Outcome


def polygon(n: int) -> jax.Array:
    """n equally spaced points on the unit circle, (n, 2)."""
    angle = 2 * jnp.pi * jnp.arange(n) / n
    return jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)


def theorem_3(runs: int = 2000) -> Outcome:
    """Neurons to full rank: the bounds of Theorem 3 and their slack, on polygons and random batches."""
    key = jax.random.key(3)
    batches = {f"{n}-gon": polygon(n) for n in (5, 9)}
    batches["random (3, 8)"] = jax.random.normal(jax.random.key(38), (8, 3))
    batches["random (3, 4)"] = jax.random.normal(jax.random.key(34), (4, 3))
    table: dict[str, Any] = {}
    violations = 0.0
    for name, x in batches.items():
        n = x.shape[0]
        found = depth.gamma(x)
        y = depth.neurons_to_full_rank(key, x, runs)
        neurons = jnp.unique(jnp.round(jnp.geomspace(n, 4 * n / min(found.value, 1 / n), 30)).astype(int))
        bounds = depth.rank_bounds(n, found.value, neurons)
        missed = jnp.mean(y[None, :] > neurons[:, None], axis=1)
        noise = 4 * jnp.sqrt(missed * (1 - missed) / runs) + 4 / runs
        ordered = (bounds.binomial <= bounds.chernoff + 1e-12) & (bounds.chernoff <= bounds.simple + 1e-12)
        violations += float(jnp.sum(~ordered) + jnp.sum(missed > bounds.binomial + noise))
        sharper = depth.expected_neurons_bound(x)
        violations += float(y.mean() > sharper) + float(sharper > bounds.expected[0] * (1 + 1e-9))
        table[name] = {
            "gamma": found.value,
            "mean neurons": float(y.mean()),
            "sum 1/gamma": sharper,
            "n/gamma": float(bounds.expected[0]),
            "neurons": neurons,
            "failure": missed,
            "bounds": bounds._asdict(),
        }
    five = table["5-gon"]
    return Outcome(
        name="002/theorem-3",
        claim="E[neurons to full rank] <= n/gamma, with exponential tails (7a), (7b).",
        finding=f"True, with gamma = 1/(2n) for odd polygons, and loose: {five['mean neurons']:.2f} against "
        f"{five['n/gamma']:.0f} for the 5-gon.",
        data=table,
        criteria=(
            Criterion("violated or disordered bounds", violations, 0, 0),
            Criterion("gamma of the 5-gon", five["gamma"], 0.1 - 1e-12, 0.1 + 1e-12),
            Criterion("mean neurons of the 5-gon", five["mean neurons"], 5.2, 5.7),
        ),
    )


def theorem_11(sizes: tuple[int, ...] = (5, 10, 50), draws: int = 20, layers: int = 10_000) -> Outcome:
    """The tree at depth 10 000: limits, sharp bounds, and the printed ones beside them."""
    table: dict[int, dict[str, Any]] = {}
    worst_limit = worst_bound = 0.0
    attained = 1.0
    for n in sizes:
        random = jax.random.normal(jax.random.key(n), (draws, n))
        inputs = jnp.concatenate([random, jnp.linspace(-1.0, 1.0, n)[None]])
        records = jax.lax.map(lambda x: depth.tree(x, layers, every=layers - 1), inputs)
        grams, order = records.gram[:, -1], records.order[:, 0]
        rho = records.weight[:, -1, 0, -1] / records.weight[:, -1, 0, 0]
        sort = jax.vmap(lambda g, o: g[o[:, None], o[None, :]])(grams, order)
        length = jnp.sqrt(jnp.diagonal(sort, axis1=1, axis2=2))
        ratio = length[:, 1:-1, None] / length[:, None, jnp.array([0, -1])]
        cosine = sort[:, 1:-1, jnp.array([0, -1])] / (
            length[:, 1:-1, None] * length[:, None, jnp.array([0, -1])]
        )
        limits = depth.tree_limits(n, rho)
        theory = jnp.stack([limits.ratio_first, limits.ratio_last], axis=1)[:, None, :]
        theory_cos = jnp.stack([limits.cos_first, limits.cos_last], axis=1)[:, None, :]
        worst_limit = max(worst_limit, float(jnp.max(jnp.abs(ratio - theory))))
        worst_limit = max(worst_limit, float(jnp.max(jnp.abs(cosine - theory_cos))))
        bounds = depth.tree_bounds(n)
        best = jnp.min(jnp.max(ratio, axis=1), axis=1)  # over the two extreme samples
        angle = jnp.arccos(jnp.min(jnp.max(cosine, axis=1), axis=1))
        worst_bound = max(
            worst_bound, float(jnp.max(best / bounds.ratio)), float(jnp.max(bounds.angle / angle))
        )
        attained = min(attained, float(best[-1] / bounds.ratio))
        table[n] = {"rho": rho, "ratio": best, "angle": angle, "bounds": bounds._asdict()}
    return Outcome(
        name="002/theorem-11",
        claim="Norm ratio at most 3/(n-2), angle at least pi/2 - sqrt(2) pi/(n-2).",
        finding="Sharp: sqrt(2/((n-1)^2+1)) and arccos(1/sqrt(2((n-1)^2+1))), attained by symmetric inputs.",
        data={f"n={n}": row for n, row in table.items()},
        criteria=(
            Criterion("distance from the limits", worst_limit, high=1e-12),
            Criterion("largest value over its sharp bound", worst_bound, high=1 + 1e-12),
            Criterion("symmetric input over the sharp bound", attained, 1 - 1e-12),
        ),
    )


def theorems_13_14(n: int = 10, rows: int = 100_000) -> Outcome:
    """The invariant representation: closed forms, Monte Carlo, and what the printed statements miss."""
    x = depth.invariant_representation(n, 4)
    spread = jax.random.normal(jax.random.key(14), (n, 4)).at[0].set(0.0)

    def layer(key: jax.Array, x: jax.Array, alpha: jax.Array) -> jax.Array:
        z = x @ (jax.random.normal(key, (4, rows)) * jnp.sqrt(2 * alpha / rows))
        return gram(depth.Stages()(z))

    exact = depth.one_layer(x)
    measured = layer(jax.random.key(13), x, exact.alpha)
    off = spread / jnp.linalg.norm(spread, axis=1).at[0].set(1.0)[:, None]
    near = depth.one_layer(x + 1e-6 * off)
    i, j = jnp.triu_indices(n - 1, 1)
    pairs = lambda d: d[1:n, 1:n][i, j]
    growth = jnp.max(pairs(near.expected_distances) / pairs(near.distances))
    wide = depth.one_layer(x.at[0].multiply(1.5) + 0.2 / n**2 * off)
    shrink = pairs(wide.expected_distances) / pairs(wide.distances)
    return Outcome(
        name="002/theorems-13-14",
        claim="The expected batch is again invariant, and the cluster contracts.",
        finding="The expected Gram matrix is invariant; the cluster contracts in one layer with R > n/(n-1); "
        f"at the invariant scale close pairs grow by {n**2 / (n**2 - 2 * n + 2):.4f}.",
        data={"exact": exact._asdict(), "measured_gram": measured, "shrink": shrink, "radius": wide.radius},
        criteria=(
            Criterion(
                "defect of the expected Gram", float(jnp.max(jnp.abs(exact.gram[:n, :n] - gram(x)))), 0, 1e-12
            ),
            Criterion("Monte Carlo error", float(jnp.max(jnp.abs(measured - gram(x)))), high=0.03),
            Criterion("odd . centre, any weights", float(jnp.abs(measured[0, 1])), 0, 0),
            Criterion("growth / (n^2/(n^2-2n+2))", float(growth * (n**2 - 2 * n + 2) / n**2), 0.999, 1.001),
            Criterion("one layer, R > n/(n-1): largest factor", float(shrink.max()), high=1),
        ),
    )


def odd_states() -> Outcome:
    """Recenter + ReLU at infinite width: the table of odd-point states and critical outlier scales."""
    table = {  # norm ratio, odd angle, cluster angle, critical scale
        7: (3.849, 86.24, 61.37, 1.560),
        10: (7.412, 88.71, 45.20, 1.227),
        20: (18.079, 89.82, 24.54, 1.077),
        50: (48.589, 89.99, 10.38, None),
        100: (98.787, 90.00, 5.29, None),
    }
    rows: dict[int, tuple[Any, ...]] = {}
    error = 0.0
    for n, expected in table.items():
        state = depth.odd_state(n)
        scale = depth.critical_scale(n) if expected[3] else None
        rows[n] = (state.norm_ratio, state.odd_angle, state.cluster_angle, scale)
        units = (1e-3, 1e-2, 1e-2, 1e-3)  # last digit given
        error = max(
            error, *(abs(float(v) - e) / u for v, e, u in zip(rows[n], expected, units, strict=True) if e)
        )
    return Outcome(
        name="002/odd-states",
        claim="All points but one collapse to a single point.",
        finding="The cluster keeps an angle of about 540/n degrees, and the state exists from n = 7 only.",
        data={f"n={n}": row for n, row in rows.items()},
        criteria=(
            Criterion("largest error in units of the last digit", error, high=0.51),
            Criterion("n = 6: norm ratio", float(depth.odd_state(6).norm_ratio), 1 - 1e-9, 1 + 1e-9),
        ),
    )


def linear_rescale(
    n: int = 10, widths: tuple[int, int] = (200, 1000), layers: int = 60, seeds: int = 4
) -> Outcome:
    """Linear layers with rescaling: orthogonality against depth and width; with recentring, the simplex."""
    x = jax.random.normal(jax.random.key(7), (seeds, n, 30)) + 1.0
    keys = jax.random.split(jax.random.key(71), seeds)
    grams = {}
    for w in widths:
        for recenter in (False, True):
            net: dict[str, Any] = {
                "recenter": recenter,
                "rescale": "rms",
                "activation": "linear",
                "weights": "gaussian",
            }
            grams[w, recenter] = depth.propagate(keys, x, [w] * layers, observe=gram, **net).layers
    gaps = {w: orthogonality_gap(grams[w, False]).mean(0) for w in widths}
    plateau = {w: float(gap[layers // 2 :].mean()) for w, gap in gaps.items()}
    ratio = plateau[widths[0]] / plateau[widths[1]] / (widths[1] / widths[0]) ** 0.5
    mean = {rc: float(depth.pair_angles(grams[widths[1], rc][:, -1]).mean()) for rc in (False, True)}
    simplex = np.degrees(np.arccos(-1 / (n - 1)))
    slope = depth.stability(jnp.eye(n), recenter=False, rescale="rms", activation="linear")[0]
    return Outcome(
        name="002/linear-rescale",
        claim="Rescaling alone makes a full-rank batch orthonormal as the depth grows (previous work).",
        finding=f"Up to a gap that stops at {plateau[widths[1]]:.2f} for width {widths[1]}, proportional to "
        "1/sqrt(width); at infinite width it contracts by n/(n+2) a layer.",
        data={"gap": gaps, "start": depth.pair_angles(grams[widths[1], False][:, 0])},
        criteria=(
            Criterion("mean angle", mean[False], 88.5, 91.5),
            Criterion("ratio of gaps / sqrt(ratio of widths)", ratio, 0.8, 1.25),
            Criterion("recentred: mean angle", mean[True], simplex - 0.5, simplex + 0.5),
            Criterion("infinite width: |slope - n/(n+2)|", float(abs(slope - n / (n + 2))), high=1e-9),
        ),
    )


def linear_recenter(n: int = 10, width: int = 300, layers: int = 30) -> Outcome:
    """Linear layers with recentring: the batch mean is removed once and stays 0."""
    x = jax.random.normal(jax.random.key(8), (n, 30)) + 1.0
    mean = lambda x: jnp.max(jnp.abs(x.mean(0))) / jnp.max(jnp.abs(x))
    run = depth.propagate(
        jax.random.key(81), x, [width] * layers, activation="linear", weights="orthogonal", observe=mean
    )
    free = depth.propagate(
        jax.random.key(81), x - x.mean(0, keepdims=True), [width] * layers,
        recenter=False, activation="linear", weights="orthogonal",
    )  # fmt: skip
    error = jnp.max(jnp.abs(run.final - free.final)) / jnp.max(jnp.abs(free.final))
    return Outcome(
        name="002/linear-recenter",
        claim="Recentring alone changes only the first layer of a linear network.",
        finding="True: recentring the input once gives the same network.",
        data={"relative_mean": run.layers},
        criteria=(
            Criterion("largest relative mean after layer 1", float(run.layers[1:].max()), high=1e-6),
            Criterion("difference from recentring the input", float(error), high=1e-6),
        ),
    )


def one_neuron_per_sample(samples: int = 200, steps: int = 300) -> Outcome:
    """One neuron for each of 200 digits: exactly orthogonal codes, silent on many new inputs."""
    images, labels = digits()
    x = jnp.asarray(images / np.linalg.norm(images, axis=1, keepdims=True))
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:samples], order[samples:]
    y = jnp.asarray(labels)
    optimizer = optax.adam(1e-2)

    def fit(kernel: jax.Array, bias: jax.Array) -> jax.Array:
        out = jax.random.normal(jax.random.key(9), (samples, 10)) / samples**0.5
        net = lambda p, x: jax.nn.relu(x @ p[0] + p[1][None]) @ p[2] + p[3][None]
        loss = lambda p: jnp.mean(optax.softmax_cross_entropy_with_integer_labels(net(p, x[train]), y[train]))

        def step(state: tuple, _: None) -> tuple:
            update, opt = optimizer.update(jax.grad(loss)(state[0]), state[1], state[0])
            return optax.apply_updates(state[0], update), opt

        right = lambda p, i: jnp.mean(jnp.argmax(net(p, x[i]), 1) == y[i])
        params = (kernel, bias, out, jnp.zeros(10))
        start = (params, optimizer.init(params))
        return iterate(
            step, start, None, steps, steps, lambda s: jnp.stack([right(s[0], train), right(s[0], test)])
        )[1][0]

    data: dict[str, Any] = {}
    for relax in (0.0, 0.25, 0.5):
        kernel_init, bias_init = initializers_for(x[train], relax=relax)
        kernel, bias = kernel_init(None, (64, samples), x.dtype), bias_init(None, (samples,), x.dtype)
        code = depth.summary(jax.nn.relu(x[train] @ kernel + bias[None]))
        silent = jnp.mean(jnp.all(x[test] @ kernel + bias[None] <= 0, axis=1))
        data[f"relax={relax}"] = {
            "angles": code.pair_angles, "rank": code.rank(1e-9), "silent": silent,
            "train and test accuracy": jax.jit(fit)(kernel, bias),
        }  # fmt: skip
    he = jax.random.normal(jax.random.key(10), (64, samples)) * (2 / 64) ** 0.5
    data["he"] = {"train and test accuracy": jax.jit(fit)(he, jnp.zeros(samples))}
    exact = data["relax=0.0"]
    return Outcome(
        name="002/one-neuron-per-sample",
        claim="One neuron per data point gives an orthogonal representation and sparse activity.",
        finding=f"Orthogonal on its samples; {float(exact['silent']):.0%} of new inputs activate nothing. "
        + "Test accuracy "
        + ", ".join(f"{k} {float(v['train and test accuracy'][1]):.3f}" for k, v in data.items()),
        data=data,
        criteria=(
            Criterion(
                "largest deviation from 90 degrees", float(jnp.max(jnp.abs(exact["angles"] - 90))), high=1e-3
            ),
            Criterion("rank", float(exact["rank"]), samples, samples),
            Criterion("relaxed by 25 %: mean angle", float(data["relax=0.25"]["angles"].mean()), 85, 90),
        ),
    )
