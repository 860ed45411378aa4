"""Ten classes of MNIST by a two-layer flow with vector outputs (a demonstration; the paper has no such experiment)."""

import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

import meanflow as mf
from meanflow.training.data import mnist
from meanflow_papers.entry import MNIST, entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.style import COLORS, below, panels


def draw(data: Arrays) -> Figure:
    """Share of wrong test images against epochs, and the images that the first network gets wrong."""
    figure, (left, right) = panels(1, 2, width=5.0, height=4.0)
    accuracy = np.asarray(data["accuracy"])  # (seeds, epochs + 1)
    for seed, row in enumerate(accuracy):
        name = "one network a curve" if seed == 0 else None
        left.plot(np.arange(len(row)), 1 - row, marker="o", color=COLORS[0], label=name)
    left.set(xlabel="epoch", ylabel="share of 10000 test images that are wrong", yscale="log")
    shares = [share for share in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if share > 0.8 * (1 - accuracy).min()]
    left.set_yticks(shares, [f"{share:g}" for share in shares])
    left.minorticks_off()
    left.set_xticks(range(accuracy.shape[1]))
    left.set_title(
        f"width {int(data['width'])}: accuracy {accuracy[:, -1].mean():.4f} after {accuracy.shape[1] - 1} epochs"
    )
    below(left)
    images = np.asarray(data["wrong_images"])
    rows = [np.concatenate(list(images[k : k + 8]), axis=1) for k in range(0, len(images) - 7, 8)]
    right.imshow(np.concatenate(rows, axis=0), cmap="gray_r")
    right.set(xticks=[], yticks=[])
    right.spines[:].set_visible(False)
    guesses = " ".join(f"{t}→{g}" for t, g in np.asarray(data["wrong_labels"])[:8])
    right.set_title(
        f"test images that the first network gets wrong\n(first row, truth→guess: {guesses})", fontsize=8
    )
    return figure


@entry(
    "001/mnist",
    title="ten classes of MNIST by a two-layer flow with vector outputs (demonstration)",
    small={"epochs": 2, "seeds": 2},
    full={"epochs": 20, "seeds": 5, "width": 1000},
    minutes=(4.0, 300.0),
    verdict="no claim",
    setup="ReLU neurons with biases, softmax loss, Adam at 2e-3 on batches of 64; all 60000 training images.",
    status="needs data",
    reason=MNIST,
    data="mnist",
    draw=draw,
)
def mnist_flow(
    folder: str | Path | None = None, epochs: int = 2, seeds: int = 2, width: int = 100, batch: int = 64
) -> Outcome:
    """Train two-layer networks with ten outputs on MNIST and measure test accuracy and time.

    The paper claims nothing about it. Decisive is that every network is right on 95 % of the test images.

    Args:
        folder: folder with the files of MNIST.
        epochs: passes over the training images.
        seeds: number of networks.
        width: number of neurons.
        batch: images in a minibatch.
    """
    if folder is None:
        raise FileNotFoundError("MNIST is read from a local folder; run `meanflow data mnist`")
    images = mnist(folder)
    rows = images.flat()
    train, test_x = mf.Dataset(np.asarray(rows.train_x, float), rows.train_y), np.asarray(rows.test_x, float)
    flow = mf.vanilla("relu", "softmax", alpha="sqrt", bias=True)
    per_epoch = len(rows.train_x) // batch
    right = lambda cloud: jnp.argmax(mf.predict(flow, cloud, test_x), axis=1) == rows.test_y
    accuracy, ends = [], []
    clock = time.process_time()
    for seed in range(seeds):
        cloud = flow.init(jax.random.key(seed), width, dim=784, outputs=10)
        run = mf.descend(
            flow,
            cloud,
            train,
            epochs * per_epoch,
            optimizer=optax.adam(2e-3),
            batches=mf.Batches(batch, jax.random.key(100 + seed)),
            every=per_epoch,
            observe=lambda flow, cloud, data: jnp.mean(right(cloud)),
        )
        accuracy.append(np.asarray(run.observed))
        ends.append(run.final)
    seconds = time.process_time() - clock
    found = np.stack(accuracy)
    guess = np.asarray(jnp.argmax(mf.predict(flow, ends[0], test_x), axis=1))
    wrong = np.flatnonzero(guess != rows.test_y)[:32]
    return Outcome(
        "001/mnist",
        f"test accuracy {', '.join(f'{v:.4f}' for v in found[:, -1])} after {epochs} epochs with {width} neurons, "
        f"{seconds / seeds:.0f} s of processor time a network, compilation included",
        {
            "accuracy": found,
            "width": width,
            "seconds": seconds / seeds,
            "wrong_images": images.test_x[wrong, :, :, 0],
            "wrong_labels": np.stack([rows.test_y[wrong], guess[wrong]], axis=1),
        },
        (Criterion("least test accuracy", float(found[:, -1].min()), 0.95),),
    )
