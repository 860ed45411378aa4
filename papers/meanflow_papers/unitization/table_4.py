"""Table 4: batches of two images, on digits and on CIFAR."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure

from meanflow.layers import BatchNorm, UnitizedBatchNorm
from meanflow.plots.maps import dots
from meanflow.plots.style import panels
from meanflow.training import CNN, Trainer
from meanflow.training.data import digits
from meanflow.training.networks import MakeNorm
from meanflow.training.trainer import staircase
from meanflow_papers.entry import CIFAR, entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.unitization.cifar import EPOCHS, NORMS, accuracies, draw_accuracies, load

RATE = (
    "single runs at a constant rate end anywhere in .92 to .99, whatever the method; the independent check, with "
    "strides and split unknown to us, had .975 to .990; with a falling rate all lie within .96 to .99"
)
IMAGES: dict[str, MakeNorm] = {
    "BN": BatchNorm,
    **{f"GN{g}": partial(nnx.GroupNorm, num_groups=g) for g in (1, 2, 4, 8, 16)},
    "(10) n=HW": partial(UnitizedBatchNorm, n="pixels"),
    "(10) n=C": UnitizedBatchNorm,
    "alpha = 1": partial(UnitizedBatchNorm, alpha_init=1.0, train_alpha=False),
}
MICRO = {"BN": 0.7150, "unitization": 0.8188}
MICRO |= dict(
    zip(("G = 1", "G = 2", "G = 4", "G = 8", "G = 16"), (0.1, 0.1, 0.1, 0.7163, 0.7376), strict=True)
)


def draw(data: Arrays) -> Figure:
    """Test accuracy of each method, one dot a seed."""
    figure, (ax,) = panels(1, 1, width=4.8, height=0.7 + 0.28 * len(data))
    dots(data, ax, xlabel="test accuracy, batches of two")
    return figure


@entry(
    "003/table-4",
    title="batches of two images: batch norm, group norm, unitization",
    small={"seeds": 2},
    full={
        "seeds": 5,
        "variants": ("BN", "GN1", "GN2", "GN4", "GN8", "GN16", "(10) n=HW", "(10) n=C", "alpha = 1"),
    },
    minutes=(0.6, 4.0),
    verdict="not reproduced",
    setup="1-16-16-16-16 convolutions on digits, batch 2, constant rate 0.01 (the paper: ResNet-110 on CIFAR-10).",
    explained={"worst accuracy": RATE, "spread of accuracies": RATE},
    draw=draw,
)
def table_4(
    rate: float = 0.01,
    epochs: int = 6,
    seeds: int = 4,
    variants: Iterable[str] = ("BN", "GN1", "GN4", "GN16", "(10) n=HW", "(10) n=C", "alpha = 1"),
    falling: bool = False,
    strides: tuple[int, ...] = (1, 2, 1, 2),
    train: int = 1197,
) -> Outcome:
    """Train on batches of two images: four 3 x 3 convolutions of 16 channels, and the mean over pixels.

    The paper claims that unitization wins clearly at batch size 2, where group norm may fail to train. We
    use SGD with momentum 0.9 at a constant rate, 1197 training and 600 test images, and the accuracy after
    the last epoch. All layers have 16 channels, so that "groups" and "channels per group" are the same
    divisions. About 10 s a run on one core.

    The criteria (each run above 0.96, all within 0.03) come from reference runs with two seeds, of whose
    network only the channels are known. They are *not met* here: at the constant rate the last epoch is too
    noisy. Four seeds gave a worst run of 0.920 and a spread of 0.065 (0.926 and 0.067 with 1500 training
    images; 0.888 and 0.105 with strides 1). ``falling`` divides the rate as in the other experiments.
    """
    schedule = staircase(rate, epochs, train // 2) if falling else rate
    data: Arrays = {}
    keys = jax.random.split(jax.random.key(0), seeds)
    for name in variants:
        make = lambda rngs, name=name: CNN(1, [16] * 4, 10, IMAGES[name], strides=strides, rngs=rngs)
        trainer = Trainer(make, optax.sgd(schedule, momentum=0.9), batch=2)
        runs = [trainer.run(key, digits(seed, train), epochs)[1] for seed, key in enumerate(keys)]
        data[name] = np.array([run["test_accuracy"][-1] for run in runs])
    final = np.stack(list(data.values()))
    means = final.mean(1)
    return Outcome(
        "003/table-4",
        "unitization wins clearly at batch size 2, where group norm may fail to train",
        f"no ranking: the methods' means over {seeds} seeds lie within {np.ptp(means):.3f} ({np.min(means):.3f} to "
        f"{np.max(means):.3f}), the seeds of one method up to {np.ptp(final, axis=1).max():.3f} apart. Of "
        f"{final.size} runs {int(np.sum(final < 0.96))} end below 0.96 (digits)",
        data,
        (
            Criterion("worst accuracy", float(final.min()), low=0.96),
            Criterion("spread of accuracies", float(np.ptp(final)), high=0.03),
        ),
    )


@entry(
    "003/table-4-cifar",
    title="the same for ResNet-110 on CIFAR-10",
    small={"depth": 8, "epochs": 1, "limit": 1000, "groups": (1,), "seeds": 1},
    full={"depth": 110, "epochs": 200, "seeds": 3},
    minutes=(10.0, 50_000.0),
    verdict="not tested",
    status="needs data",
    reason=CIFAR,
    data="cifar-10",
    setup="ResNet-110, batch 2, group norm with G = 1 .. 16 groups; small: a check of the path.",
    draw=draw_accuracies,
)
def table_4_cifar(
    folder: str | Path | None = None,
    depth: int = 110,
    epochs: int = EPOCHS,
    limit: int | None = None,
    groups: tuple[int, ...] = (1, 2, 4, 8, 16),
    seeds: int = 3,
) -> Outcome:
    """Train ResNets on CIFAR-10 in batches of two: batch norm, unitization, group norm with G groups.

    The paper claims that unitization wins clearly. Decisive is its median accuracy minus the best of the
    others, at the published size only. Arguments are those of ``table_1``.
    """
    data = load(folder, 10, limit)
    methods = NORMS | {f"G = {g}": partial(nnx.GroupNorm, num_groups=g) for g in groups}
    accuracy = {name: accuracies(data, norm, depth, 10, 2, epochs, seeds) for name, norm in methods.items()}
    middle = {name: float(np.median(values)) for name, values in accuracy.items()}
    whole = limit is None and epochs >= EPOCHS and depth == 110
    best = max(v for name, v in middle.items() if name != "unitization")
    check = Criterion("unitization - best of the others", middle["unitization"] - best, 0.0)
    return Outcome(
        "003/table-4-cifar",
        "unitization wins clearly at batch size 2, where group norm may fail to train",
        "accuracies of this run beside the published ones"
        if whole
        else "a check of the path, not of the claim",
        {"accuracy": accuracy, "published": {n: MICRO[n] for n in accuracy if n in MICRO}},
        (check,) if whole else (),
    )
