"""One neuron for each sample as an initialization."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

from meanflow import depth
from meanflow._numerics import iterate
from meanflow.depth.initializers import one_neuron_per_sample as initializers_for
from meanflow.plots.maps import dots
from meanflow.plots.style import COLORS, key, panels
from meanflow_papers.decomposed.setup import digits
from meanflow_papers.entry import entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome


def draw(data: Arrays) -> Figure:
    """Training and test accuracy of the starts."""
    figure, (ax,) = panels(1, 1, width=4.8, height=2.5)
    names = [n.replace("relax=", "relaxed by ") if n != "he" else "He weights" for n in data]
    pairs = np.array([row["train and test accuracy"] for row in data.values()])
    dots({n: p[1:] for n, p in zip(names, pairs, strict=True)}, ax, xlabel="accuracy")
    ax.lines[0].set_label("test")
    ax.plot(pairs[:, 0], np.arange(len(pairs)), "^", color=COLORS[1], ms=5, label="train")
    key(ax)
    return figure


@entry(
    "002/one-neuron-per-sample",
    title="one neuron a sample as initialization: orthogonal codes, silent on new inputs",
    minutes=(0.3, 0.3),
    verdict="corrected",
    setup="200 unit-norm digits, 300 steps of Adam.",
    draw=draw,
)
def one_neuron_per_sample(samples: int = 200, steps: int = 300) -> Outcome:
    """Initialize a layer with one neuron for each of 200 digits and train it.

    The paper claims that this gives an orthogonal representation and sparse activity. We measure angles and
    rank on the samples, the share of new inputs that activate nothing, and accuracies after 300 steps of
    Adam.

    Decisive are the angles (90 degrees), the rank, and the mean angle of a relaxed version.
    """
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

    data: Arrays = {}
    for relax in (0.0, 0.25, 0.5):
        kernel_init, bias_init = initializers_for(x[train], relax=relax)
        unused = jax.random.key(0)  # these initializers are constants
        kernel, bias = kernel_init(unused, (64, samples), x.dtype), bias_init(unused, (samples,), x.dtype)
        code = depth.observables.summary(jax.nn.relu(x[train] @ kernel + bias[None]))
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
