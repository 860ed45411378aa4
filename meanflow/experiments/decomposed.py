"""Figures, theorems and claims of "BN decomposed" (002), each with its pass criteria."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meanflow import depth
from meanflow._numerics import iterate
from meanflow.depth.observables import activity, rank, stable_rank
from meanflow.depth.propagate import WEIGHTS
from meanflow.experiments.outcome import Criterion, Outcome
from meanflow.layers import functional

BATCH_NORM: dict[str, Any] = {"recenter": True, "rescale": "std"}
RMS_ONLY: dict[str, Any] = {"recenter": False, "rescale": "rms"}
STD_ONLY: dict[str, Any] = {"recenter": False, "rescale": "std"}


def digits() -> tuple[np.ndarray, np.ndarray]:
    """The 1797 handwritten digits of scikit-learn: images (1797, 64) in 0..16, and labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return data.data, data.target


def _batches(source: str, key: jax.Array, seeds: int, n: int) -> jax.Array:
    """(seeds, n, k): Gaussian inputs with k = 50, or random digits."""
    if source == "gaussian":
        return jax.random.normal(key, (seeds, n, 50))
    images = jnp.asarray(digits()[0], float)
    pick = jax.vmap(lambda k: jax.random.choice(k, len(images), (n,), replace=False))
    return images[pick(jax.random.split(key, seeds))]


def _mlp(params: dict[str, Any], x: jax.Array, norm: bool) -> tuple[jax.Array, jax.Array]:
    """Logits and last hidden batch of a ReLU network, with batch norm before each ReLU if ``norm``."""

    def hidden(x: jax.Array, layer: tuple) -> tuple[jax.Array, None]:
        weight, bias, scale = layer
        z = x @ weight
        if norm:
            z = functional.rescale(functional.recenter(z), epsilon=1e-5) * scale[None]
        return jax.nn.relu(z + bias[None]), None

    x = hidden(x, params["first"])[0]
    x = jax.lax.scan(hidden, x, params["rest"])[0]
    return x @ params["out"][0] + params["out"][1][None], x


def _mlp_init(key: jax.Array, law: str, inputs: int, width: int, depth: int, dtype: Any) -> dict[str, Any]:
    def layer(key: jax.Array, fan_in: int, fan_out: int) -> tuple[jax.Array, ...]:
        kw, kb = jax.random.split(key)
        bound = fan_in**-0.5 if law == "uniform" else 0.0  # PyTorch draws the bias like the weights
        bias = bound * jax.random.uniform(kb, (fan_out,), dtype, -1, 1)
        return WEIGHTS[law](kw, (fan_in, fan_out), dtype), bias, jnp.ones(fan_out, dtype)

    first, rest, out = jax.random.split(key, 3)
    return {
        "first": layer(first, inputs, width),
        "rest": jax.vmap(lambda k: layer(k, width, width))(jax.random.split(rest, depth - 1)),
        "out": layer(out, width, 10)[:2],
    }


def figure_2(seeds: int = 2, epochs: int = 40, hidden: int = 20, width: int = 128) -> Outcome:
    """Rank of the last hidden layer at initialisation and final training accuracy, on digits.

    SGD with momentum 0.9, step 0.01, batches of 128, float32. About a minute.
    """
    images, labels = digits()
    x, y = jnp.asarray(images / 16 - 0.5, jnp.float32), jnp.asarray(labels)
    optimizer = optax.sgd(0.01, momentum=0.9)
    per_epoch = len(images) // 128

    def train(key: jax.Array, law: str, norm: bool) -> dict[str, jax.Array]:
        k_init, k_data = jax.random.split(key)
        params = _mlp_init(k_init, law, x.shape[1], width, hidden, x.dtype)
        order = jax.vmap(lambda k: jax.random.permutation(k, len(images)))(jax.random.split(k_data, epochs))
        order = order[:, : per_epoch * 128].reshape(-1, 128)

        def loss(params: Any, index: jax.Array) -> jax.Array:
            logits = _mlp(params, x[index], norm)[0]
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, y[index]))

        def step(state: tuple, index: jax.Array) -> tuple:
            params, opt = state
            update, opt = optimizer.update(jax.grad(loss)(params, index), opt, params)
            return optax.apply_updates(params, update), opt

        observe = lambda state: jnp.mean(jnp.argmax(_mlp(state[0], x, norm)[0], 1) == y)
        at_start = jnp.linalg.svd(_mlp(params, x[:512], norm)[1], compute_uv=False)
        start = (params, optimizer.init(params))
        _, accuracy = iterate(step, start, order, epochs * per_epoch, per_epoch, observe)
        return {"accuracy": accuracy, "singular_values": at_start}

    keys = jax.random.split(jax.random.key(2), seeds)
    nets = {"batchnorm": ("uniform", True), "default": ("uniform", False), "he": ("he", False)}
    data: dict[str, Any] = {}
    for name, (law, norm) in nets.items():
        run = jax.jit(jax.vmap(lambda k, law=law, norm=norm: train(k, law, norm)))(keys)
        values = run["singular_values"]
        data |= {f"{name}_accuracy": run["accuracy"], f"{name}_rank": rank(values, 1e-2)}
        data |= {f"{name}_stable_rank": stable_rank(values), f"{name}_rank_1e-5": rank(values, 1e-5)}
    last = lambda name: data[f"{name}_accuracy"][:, -1]
    return Outcome(
        name="002/figure-2",
        claim="A network may reach high training accuracy from low-rank representations at initialisation.",
        finding="He trains from a low *soft* rank (stable rank below 1.2); its hard rank is not low.",
        data=data,
        criteria=(
            Criterion("batch norm: least rank", float(data["batchnorm_rank"].min()), width, width),
            Criterion("batch norm: least accuracy", float(last("batchnorm").min()), 0.98),
            Criterion("default init: largest accuracy", float(last("default").max()), high=0.2),
            Criterion("He: largest stable rank", float(data["he_stable_rank"].max()), high=1.2),
            Criterion("He: least accuracy", float(last("he").min()), 0.98),
        ),
    )


def figure_3(seeds: int = 6, n: int = 20, width: int = 300, layers: int = 60) -> Outcome:
    """Recenter + ReLU with one outlier (input 0 times 3): one odd point, the others in a cluster."""
    x = jax.random.normal(jax.random.key(3), (seeds, n, 20)).at[:, 0].multiply(3.0)
    run = depth.propagate(jax.random.split(jax.random.key(31), seeds), x, [width] * layers, renormalize=True)
    odd = depth.odd_point(run.layers.gram[:, -1])
    limit = depth.odd_state(n)
    wide = depth.odd_point(depth.expected_gram(x[0] @ x[0].T, layers, renormalize=True)[-1])
    return Outcome(
        name="002/figure-3",
        claim="All points collapse to one cluster except one odd point, far away and orthogonal.",
        finding="One odd point escapes; the cluster keeps an angle (infinite width: "
        f"{float(limit.cluster_angle):.2f} degrees at n = {n}), it does not collapse.",
        data={
            "angles_before": run.layers.angles[:, -2],
            "angles_after": run.layers.angles[:, -1],
            "projection": run.final @ jax.random.normal(jax.random.key(32), (width, 2)),
            "odd": odd._asdict(),
            "infinite_width": wide._asdict(),
        },
        criteria=(
            Criterion(
                "runs whose odd point is input 0", float(jnp.sum(odd.escaped & (odd.sample == 0))), seeds
            ),
            Criterion("mean norm ratio", float(odd.norm_ratio.mean()), 10),
            Criterion("least odd angle", float(odd.odd_angle.min()), 85),
            Criterion("mean cluster angle", float(odd.cluster_angle.mean()), high=45),
            Criterion("cluster angle at infinite width", float(wide.cluster_angle), 24.5, 32),
        ),
    )


def figure_3_no_outlier(seeds: int = 8, width: int = 500, layers: int = 100) -> Outcome:
    """The same without an outlier, for several batch sizes: rare or absent in small batches."""
    sizes = (5, 10, 20, 50)
    found, farthest = {}, {}
    for n in sizes:
        x = jax.random.normal(jax.random.key(33), (seeds, n, 20))
        keys = jax.random.split(jax.random.key(34), seeds)
        run = depth.propagate(keys, x, [width] * layers, renormalize=True, observe=lambda x: x @ x.T)
        found[n] = depth.odd_point(run.layers[:, -1])
        farthest[n] = int(jnp.sum(_farthest(x) == found[n].sample))
    count = lambda n: float(found[n].escaped.sum())
    return Outcome(
        name="002/figure-3-no-outlier",
        claim="Consistent for all the batches that we experimented with; the odd point has the largest norm.",
        finding=f"Escapes out of {seeds}: "
        + ", ".join(f"n={n}: {count(n):.0f}" for n in sizes)
        + f". At n=20 the odd point was the input farthest from the mean in {farthest[20]} of {seeds}.",
        data={f"n={n}": odd._asdict() for n, odd in found.items()},
        criteria=(
            Criterion("escapes at n=5", count(5), high=0),
            Criterion("escapes at n=20", count(20), seeds - 1),
            Criterion(
                "median cluster angle at n=20", float(jnp.median(found[20].cluster_angle)), 19.54, 29.54
            ),
        ),
    )


def _farthest(x: jax.Array) -> jax.Array:
    """Which sample of each batch (seeds, n, k) lies farthest from the batch mean."""
    return jnp.argmax(jnp.sum(jnp.square(x - x.mean(1, keepdims=True)), axis=2), axis=1)


def figure_3_digits(seeds: int = 24, n: int = 20, width: int = 300, layers: int = 200) -> Outcome:
    """The same on raw digits: a point escapes, but rarely the one farthest from the mean.

    The reference runs saw an escape in six of six batches after 60 layers. Of 24 batches 21 have escaped by
    then, and 16 in infinitely wide networks; all 24 have in both after 200 layers, the depth used here.
    """
    x = _batches("digits", jax.random.key(35), seeds, n)
    keys = jax.random.split(jax.random.key(36), seeds)
    run = depth.propagate(keys, x, [width] * layers, renormalize=True, observe=lambda x: x @ x.T)
    odd = depth.odd_point(run.layers)
    recursion = jax.vmap(lambda x: depth.expected_gram(x @ x.T, layers, renormalize=True))
    wide = depth.odd_point(recursion(x))
    far, early = _farthest(x), min(60, layers)
    same = int(jnp.sum(far == odd.sample[:, -1]))
    return Outcome(
        name="002/figure-3-digits",
        claim="The odd point is typically the one with the largest norm.",
        finding=f"The farthest input from the mean escaped in {same} of {seeds} runs. Some batches take over "
        f"60 layers: {int(odd.escaped[:, early].sum())} of {seeds} had an odd point there, "
        f"{int(wide.escaped[:, early].sum())} at infinite width.",
        data={"odd": odd._asdict(), "infinite_width": wide._asdict(), "farthest": far},
        criteria=(
            Criterion("escapes at the last layer", float(odd.escaped[:, -1].sum()), seeds),
            Criterion("escapes at infinite width", float(wide.escaped[:, -1].sum()), seeds),
        ),
    )


def figure_4(layers: int = 12) -> Outcome:
    """The tree of five points: its explicit rows, and the O(n^2) algorithm against them."""
    x = jnp.asarray([[0.0], [1.0], [2.0], [4.0], [9.0]])
    widths = [2 ** (t + 1) for t in range(layers)]
    rows = lambda x: jnp.pad(x.T, ((0, 2**layers - x.shape[1]), (0, 0)))[:8]
    explicit = depth.propagate(
        jax.random.key(0), x, widths, weights=depth.split_identity, observe=lambda x: (x @ x.T, rows(x))
    )
    grams, first = explicit.layers
    record = depth.tree(x, layers)
    exact = record.gram * jnp.exp(2 * record.log_scale)[:, None, None]
    error = jnp.max(jnp.abs(exact - grams[1:]), axis=(1, 2)) / jnp.max(grams[1:], axis=(1, 2))
    return Outcome(
        name="002/figure-4",
        claim="The first three layers of the binary tree of positive and negative transformations.",
        finding=f"{2**layers} explicit rows and at most 3 + 2 x 4 numbers give the same Gram matrices.",
        data={"rows": first[:4], "error": error, "clusters": record.max_clusters},
        criteria=(Criterion("largest relative error", float(error.max()), high=1e-13),),
    )


def _figure_5(source: str, seeds: int, n: int, width: int) -> tuple[dict[str, jax.Array], list[Criterion]]:
    x = _batches(source, jax.random.key(5), seeds, n)
    keys = jax.random.split(jax.random.key(51), seeds)
    nets = {"BN": BATCH_NORM, "RS(rms)": RMS_ONLY, "RS(std)": STD_ONLY}
    runs = {k: depth.propagate(keys, x, [width] * 30, **v).layers.pair_angles for k, v in nets.items()}
    mean = {k: float(v[:, -1].mean()) for k, v in runs.items()}
    start = jnp.full((n, n), 0.5) + 0.5 * jnp.eye(n)
    bn = float(jnp.degrees(jnp.arccos(depth.batchnorm_cosine(n))))
    rms = float(depth.pair_angles(depth.fixed_point(start, **RMS_ONLY).gram)[0])
    return {f"{k} n={n}": v[:, -2:] for k, v in runs.items()}, [
        Criterion(f"BN n={n}", mean["BN"], bn - 1, bn + 1),
        Criterion(f"RS(rms) n={n}", mean["RS(rms)"], rms - 2, rms + 2),
        # below 10 degrees was set for n = 10; at n = 64 the reference runs themselves gave 15 to 19 (infinite
        # width: 14 to 15.3), and the range stated for all batches is 1 to 32
        Criterion(f"RS(std) n={n}", mean["RS(std)"], high=10 if n == 10 else 32),
    ]


def figure_5(seeds: int = 3, width: int = 512) -> Outcome:
    """Pairwise angles before and after layer 30 with batch norm and with rescaling alone, Gaussian inputs."""
    data, criteria = _figure_5("gaussian", seeds, 10, width)
    return Outcome(
        name="002/figure-5",
        claim="About 75 degrees with batch norm, about 60 without recentring.",
        finding="These are the n = 10 values, 74.65 and 59.84; the second needs the rms, not the std.",
        data=data,
        criteria=tuple(criteria),
    )


def figure_5_digits(seeds: int = 4, width: int = 512) -> Outcome:
    """The same on digits, for batches of 10 and 64: the angles depend on the batch size."""
    small, small_criteria = _figure_5("digits", seeds, 10, width)
    large, large_criteria = _figure_5("digits", seeds, 64, width)
    return Outcome(
        name="002/figure-5-digits",
        claim="About 75 degrees with batch norm, about 60 without recentring.",
        finding="Batches of 64 give 71.92 and 58.93. Rescaling by the std alone collapses the angles: to "
        f"{small_criteria[2].value:.1f} degrees at n = 10 and {large_criteria[2].value:.1f} at n = 64.",
        data=small | large,
        criteria=(*small_criteria, *large_criteria),
    )


def figure_6(n: int = 512, width: int = 256, layers: int = 30) -> Outcome:
    """Neuron activity at the last layer with and without recentring."""
    x = jax.random.normal(jax.random.key(6), (n, 50))
    nets = {"BN": BATCH_NORM, "RS(rms)": RMS_ONLY, "RS(std)": STD_ONLY}
    data: dict[str, Any] = {}
    for name, net in nets.items():
        run = depth.propagate(jax.random.key(61), x, [width] * layers, observe=lambda x: (), **net)
        share = activity(run.final)
        busiest = run.final[:, jnp.argmax(share)]
        data[name] = {
            "activity": share,
            "above 90%": jnp.mean(share > 0.9),
            "below 10%": jnp.mean(share < 0.1),
            "quantiles 5-95%": jnp.quantile(share, jnp.array([0.05, 0.95])),
            "busiest neuron": jnp.histogram(busiest, bins=40),
            "typical neuron": jnp.histogram(run.final[:, jnp.argsort(share)[width // 2]], bins=40),
        }
    return Outcome(
        name="002/figure-6",
        claim="Without recentring some neurons respond to most inputs; with it almost none do.",
        finding=f"Neurons active on over 90 % of inputs: BN {float(data['BN']['above 90%']):.1%}, "
        f"RS(rms) {float(data['RS(rms)']['above 90%']):.1%}, "
        f"RS(std) {float(data['RS(std)']['above 90%']):.1%}.",
        data=data,
        criteria=(
            Criterion("BN: share above 90 %", float(data["BN"]["above 90%"]), high=0),
            Criterion("RS(rms): share above 90 %", float(data["RS(rms)"]["above 90%"]), 0.05),
        ),
    )


def figures_7_8(n: int = 7, layers: int = 8) -> Outcome:
    """Stable rows: two clusters stay two, with (38)-(40); three clusters leave at most one such child."""
    split = 2
    two = jnp.where(jnp.arange(n) < split, 0.0, 1.0)
    record = depth.tree(two, layers)
    total = record.weight[:, 0, split - 1] * jnp.exp(2 * record.log_scale)
    shrink = (split**2 + (n - split) ** 2) / n**2
    # layer 1 holds (s/n)^2 and ((n-s)/n)^2 times height 1; each layer multiplies the sum by lambda_s
    theory = shrink ** jnp.arange(1, layers + 1)
    three = jnp.concatenate([jnp.zeros(1), jnp.ones(1), jnp.full(n - 2, 3.7)])
    tie = jnp.concatenate([jnp.zeros(1), jnp.full(n - 2, 1.0), jnp.full(1, 2.0)])  # middle value = mean
    counts = {k: depth.tree(v, layers).multi_rows[:, 0] for k, v in {"generic": three, "tie": tie}.items()}
    return Outcome(
        name="002/figures-7-8",
        claim="A three-cluster row always has exactly one three-cluster child.",
        finding="At most one: none when the middle value equals the mean.",
        data={"two_cluster_weight": total, "three_cluster_rows": counts},
        criteria=(
            Criterion("two clusters: error of (40)", float(jnp.max(jnp.abs(total / theory - 1))), high=1e-12),
            Criterion("generic row: most three-cluster rows", float(counts["generic"].max()), 1, 1),
            Criterion("tied row: three-cluster rows at layer 1", float(counts["tie"][0]), 0, 0),
        ),
    )
