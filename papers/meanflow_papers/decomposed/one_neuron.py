"""One neuron for each sample as an initialization."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

from meanflow import depth
from meanflow_papers.decomposed.setup import digits
from meanflow_papers.entry import entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.style import COLORS, PALE, REFERENCE, below, panels


def matched_neurons(x: np.ndarray | jax.Array, relax: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Return kernel (k, n) and bias (n,) of a ReLU layer whose neuron i fires for sample i of n samples only.

    With t_i = max_{j != i} x_i . x_j and s_i = 1 / (1 - t_i), neuron i has weights s_i x_i and bias -s_i t_i. It
    answers 1 to its own sample and 0 to every other one, so the outputs of the samples are orthonormal. On new
    inputs such neurons are mostly silent.

    Args:
        x: distinct samples (n, k) of unit length; otherwise x_i . x_i need not be the largest product.
        relax: moves each threshold by this share from the largest product t_i towards the median product. Values from
            0.25 to 0.5 keep the outputs within a few degrees of orthogonal, and most new inputs activate something.
    """
    x = np.asarray(x, float)
    n = len(x)
    products = (x @ x.T)[~np.eye(n, dtype=bool)].reshape(n, n - 1)
    top = products.max(1)
    slope = 1 / (1 - top)
    # raised by a millionth of 1 - t_i, so that rounding errors of the closest sample cannot reach the threshold
    threshold = top + 1e-6 * (1 - top) + relax * (np.median(products, axis=1) - top)
    return (slope[:, None] * x).T, -slope * threshold


def draw(data: Arrays) -> Figure:
    """Angles between the codes, new inputs that activate nothing, and accuracies; one mark a random split."""
    figure, (left, middle, right) = panels(1, 3, width=3.9, height=3.0)
    names = {n: n.replace("relax=", "relaxed by ") if n != "he" else "He (accuracy only)" for n in data}
    for row, case in enumerate(data.values()):
        for ax, what, k in (
            (left, "mean angle", 0),
            (middle, "silent", 0),
            (right, "test accuracy", 0),
            (right, "train accuracy", 1),
        ):
            if what in case:
                values = np.asarray(case[what])
                label = what.removesuffix(" accuracy") if row == 0 and ax is right else None
                place = np.full(len(values), row)
                ax.plot(values, place, "o^"[k], color=COLORS[k], ms=5, alpha=0.7, label=label)
    left.axvline(90.0, color=REFERENCE, lw=0.8, ls=":", label="orthogonal")
    left.set(xlabel="mean angle between the codes (degrees)", title="orthogonal on its samples ...")
    middle.set(xlabel="share of new inputs that activate nothing", title="... silent on many new inputs")
    right.set(xlabel="accuracy", title="after training")
    for ax in (left, middle, right):
        ax.set_yticks(range(len(names)), list(names.values()) if ax is left else [])
        ax.set_ylim(len(names) - 0.5, -0.5)
        ax.grid(axis="y", color=PALE, alpha=0.35, lw=0.6)
    middle.plot([], [], "o", color=COLORS[0], ms=5, alpha=0.7, label="one random split (all panels)")
    for ax in (left, middle, right):
        below(ax)
    return figure


@entry(
    "002/one-neuron-per-sample",
    title="one neuron a sample as initialization: orthogonal codes, silent on new inputs",
    claims=(
        (
            "Discussion",
            "That neuron will fire only for its associated input. This way, we attain an orthogonal "
            "representation and sparse activity in the network, as we observe in our work.",
        ),
    ),
    minutes=(0.15, 0.15),
    setup="200 unit-norm digits, 300 steps of Adam, 4 random splits.",
    draw=draw,
)
def one_neuron_per_sample(samples: int = 200, steps: int = 300, seeds: int = 4) -> Outcome:
    """Initialize a layer with one neuron for each of 200 digits and train it.

    The paper claims that this gives an orthogonal representation and sparse activity. We measure angles and
    rank on the samples, the share of new inputs that activate nothing, and accuracies after 300 steps of
    Adam, for several random splits.

    Decisive are the angles (90 degrees), the rank, the mean angle of a relaxed version, and whether more than a tenth
    of the new inputs activate nothing.
    """
    images, labels = digits()
    x = jnp.asarray(images / np.linalg.norm(images, axis=1, keepdims=True))
    y = jnp.asarray(labels)
    optimizer = optax.adam(1e-2)

    @jax.jit
    def fit(kernel: jax.Array, bias: jax.Array, train: jax.Array, test: jax.Array) -> jax.Array:
        out = jax.random.normal(jax.random.key(9), (samples, 10)) / samples**0.5
        net = lambda p, x: jax.nn.relu(x @ p[0] + p[1][None]) @ p[2] + p[3][None]
        loss = lambda p: jnp.mean(optax.softmax_cross_entropy_with_integer_labels(net(p, x[train]), y[train]))

        def step(_: object, state: tuple) -> tuple:
            update, opt = optimizer.update(jax.grad(loss)(state[0]), state[1], state[0])
            return optax.apply_updates(state[0], update), opt

        right = lambda p, i: jnp.mean(jnp.argmax(net(p, x[i]), 1) == y[i])
        params = (kernel, bias, out, jnp.zeros(10))
        params = jax.lax.fori_loop(0, steps, step, (params, optimizer.init(params)))[0]
        return jnp.stack([right(params, train), right(params, test)])

    found: dict[str, dict[str, list]] = {}

    def note(name: str, **values: float | jax.Array) -> None:
        for what, value in values.items():
            found.setdefault(name, {}).setdefault(what, []).append(float(value))

    for seed in range(seeds):
        order = jnp.asarray(np.random.default_rng(seed).permutation(len(images)))
        train, test = order[:samples], order[samples:]
        for relax in (0.0, 0.25, 0.5):
            kernel, bias = (jnp.asarray(u, x.dtype) for u in matched_neurons(x[train], relax))
            code = jax.nn.relu(x[train] @ kernel + bias[None])
            angles = depth.Gram(code @ code.T).pair_angles
            # the price: new inputs that no neuron answers
            silent = jnp.mean(jnp.all(x[test] @ kernel + bias[None] <= 0, axis=1))
            right, right_new = fit(kernel, bias, train, test)
            off = jnp.max(jnp.abs(angles - 90))
            rank = jnp.linalg.matrix_rank(code, rtol=1e-9)
            note(f"relax={relax}", rank=rank, silent=silent, off=off)
            mean_angle = {"mean angle": jnp.mean(angles)}
            note(f"relax={relax}", **mean_angle, **{"train accuracy": right, "test accuracy": right_new})
        he = jax.random.normal(jax.random.fold_in(jax.random.key(10), seed), (64, samples)) * (2 / 64) ** 0.5
        right, right_new = fit(he, jnp.zeros(samples), train, test)
        note("he", **{"train accuracy": right, "test accuracy": right_new})
    data: Arrays = {
        name: {what: np.array(values) for what, values in row.items()} for name, row in found.items()
    }
    exact = data["relax=0.0"]
    ends = lambda values: f"{values.min():.3f} to {values.max():.3f}"
    return Outcome(
        name="002/one-neuron-per-sample",
        finding=f"True of its samples, at a price: {exact['silent'].min():.0%} to {exact['silent'].max():.0%} of "
        "the new "
        f"inputs activate nothing ({seeds} splits). Test accuracy "
        + ", ".join(f"{name} {ends(row['test accuracy'])}" for name, row in data.items()),
        data=data,
        criteria=(
            Criterion("largest deviation from 90 degrees", float(exact["off"].max()), high=1e-3),
            Criterion("least rank", float(exact["rank"].min()), samples, samples),
            Criterion(
                "relaxed by 25 %: least mean angle", float(data["relax=0.25"]["mean angle"].min()), 85, 90
            ),
            Criterion("least share of new inputs that activate nothing", float(exact["silent"].min()), 0.1),
        ),
    )
