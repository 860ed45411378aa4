"""Tables 1, 2 and 4 and Figure 3 of the unitization paper on CIFAR, from local files; made for an accelerator.

Training as published: SGD with Nesterov momentum 0.9, weight decay 5e-4, rate 0.05 divided by 5 at 30, 60 and 80 % of
200 epochs, padded crops and mirrors, He weights shared by the methods, alpha from 0. At a reduced size the path from
the files to the table is checked, not the claim.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from meanflow.experiments.outcome import Criterion, Outcome
from meanflow.layers import BatchNorm, UnitizedBatchNorm
from meanflow.training import ResNet, Trainer, Watch, cifar, staircase
from meanflow.training.data import Data, crop_and_flip

NORMS: dict[str, Callable[..., Any]] = {
    "BN": partial(BatchNorm, momentum=0.9),
    "unitization": partial(UnitizedBatchNorm, momentum=0.9, n="pixels"),
}
PUBLISHED = {
    10: {20: (0.9179, 0.9221), 110: (0.9399, 0.9412), 164: (0.9434, 0.9462)},
    100: {20: (0.6643, 0.6749), 110: (0.7227, 0.7331), 164: (0.7656, 0.7758)},
}
MICRO = {"BN": 0.7150, "unitization": 0.8188}
MICRO |= dict(
    zip(("G = 1", "G = 2", "G = 4", "G = 8", "G = 16"), (0.1, 0.1, 0.1, 0.7163, 0.7376), strict=True)
)
EPOCHS = 200  # of the published runs


def _load(folder: str | Path | None, classes: int, limit: int | None) -> Data:
    if folder is None:
        raise FileNotFoundError(f"CIFAR-{classes} is read from a local folder; give --data FOLDER")
    data = cifar(folder, classes)
    return data if limit is None else Data(*(part[:limit] for part in data))


def train(
    data: Data,
    norm: Callable[..., Any],
    depth: int,
    classes: int,
    batch: int,
    epochs: int,
    seeds: int,
    watch: Watch | None = None,
) -> list[dict[str, np.ndarray]]:
    """The records of a ResNet trained as published, one a seed."""
    schedule = staircase(0.05, epochs, len(data.train_x) // batch)
    descent = optax.sgd(schedule, momentum=0.9, nesterov=True)
    optimizer = optax.chain(optax.add_decayed_weights(5e-4), descent)
    make = lambda rngs: ResNet(depth, classes, norm, rngs=rngs)
    trainer = Trainer(make, optimizer, batch=batch, augment=crop_and_flip, watch=watch)
    return [trainer.run(jax.random.key(seed), data, epochs)[1] for seed in range(seeds)]


def _accuracies(*arguments: Any) -> np.ndarray:
    """Final test accuracies (seeds,) of ``train``."""
    return np.array([run["test_accuracy"][-1] for run in train(*arguments)])


def _table(
    folder: Any, classes: int, depths: tuple[int, ...], epochs: int, limit: int | None, seeds: int
) -> Outcome:
    data = _load(folder, classes, limit)
    accuracy: dict[str, np.ndarray] = {}
    published: dict[str, float] = {}
    criteria = []
    whole = limit is None and epochs >= EPOCHS
    for depth in depths:
        batch = 64 if depth == 164 else 128
        for name, norm, paper in zip(NORMS, NORMS.values(), PUBLISHED[classes][depth], strict=True):
            row = f"ResNet-{depth} ({name})"
            accuracy[row] = _accuracies(data, norm, depth, classes, batch, epochs, seeds)
            published[row] = paper
            middle = float(np.median(accuracy[row]))
            if whole:  # otherwise nothing is claimed
                criteria.append(Criterion(f"{row}: median", middle, paper - 0.01, paper + 0.01))
    return Outcome(
        f"003/table-{1 if classes == 10 else 2}",
        "unitization is more accurate than batch norm for every depth",
        "accuracies of this run beside the published ones"
        if whole
        else "a check of the path from the files to the table: far from the published number of epochs or images",
        {"accuracy": accuracy, "published": published},
        tuple(criteria),
    )


def table_1(
    folder: Any = None,
    depths: tuple[int, ...] = (20, 110, 164),
    epochs: int = EPOCHS,
    limit: int | None = None,
    seeds: int = 5,
) -> Outcome:
    """CIFAR-10: accuracy of ResNets with batch norm and with unitization.

    Args:
        folder: with the CIFAR-10 files.
        depths: 20, 110, 164.
        epochs: the paper has 200.
        limit: use only this many images of each split.
        seeds: runs of each network; the median is compared.
    """
    return _table(folder, 10, depths, epochs, limit, seeds)


def table_2(
    folder: Any = None,
    depths: tuple[int, ...] = (20, 110, 164),
    epochs: int = EPOCHS,
    limit: int | None = None,
    seeds: int = 5,
) -> Outcome:
    """CIFAR-100: the same with 100 classes; arguments as in ``table_1``."""
    return _table(folder, 100, depths, epochs, limit, seeds)


def table_4(
    folder: Any = None,
    depth: int = 110,
    epochs: int = EPOCHS,
    limit: int | None = None,
    groups: tuple[int, ...] = (1, 2, 4, 8, 16),
    seeds: int = 3,
) -> Outcome:
    """CIFAR-10 in batches of two: batch norm, unitization, group norm with G groups; arguments as in ``table_1``."""
    data = _load(folder, 10, limit)
    methods = NORMS | {f"G = {g}": partial(nnx.GroupNorm, num_groups=g) for g in groups}
    accuracy = {name: _accuracies(data, norm, depth, 10, 2, epochs, seeds) for name, norm in methods.items()}
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


def figure_3(
    folder: Any = None,
    classes: int = 10,
    depth: int = 110,
    epochs: int = EPOCHS,
    limit: int | None = None,
    inputs: int = 2000,
    seeds: int = 1,
) -> Outcome:
    """Covariate shift and accuracy of ResNets over training, the shift between its bounds instead of by a critic.

    Args:
        folder, epochs, limit, seeds: as in ``table_1``.
        classes: 10 or 100.
        depth: of the network; the paper has 110.
        inputs: training images on which the last normalisation layer is watched (the paper: six layers, all images).
    """
    data = _load(folder, classes, limit)
    watch = Watch(rows=min(inputs, 400), inputs=inputs)
    runs: dict[str, Any] = {}
    for name, norm in NORMS.items():
        records = train(data, norm, depth, classes, 128, epochs, seeds, watch)
        kept = [n for n in records[0] if n.startswith("ics_") or n == "test_accuracy"]
        runs[name] = {n: np.stack([record[n] for record in records], axis=1) for n in kept}
    whole = limit is None and epochs >= EPOCHS
    drops = [round(f * epochs) for f in (0.3, 0.6, 0.8)]
    falls = [
        float(np.min(w[t - 4 : t].mean(0) / w[t : t + 4].mean(0)))
        for w in (run["ics_exact"] for run in runs.values())
        for t in drops
        if whole
    ]
    return Outcome(
        "003/figure-3-cifar",
        "the distance drops with the learning rate as the accuracy rises, so ICS relates to performance",
        "distance and accuracy of this run" if whole else "a check of the path, not of the claim",
        runs,
        (Criterion("smallest ratio of the distance at a drop of the rate", min(falls), low=1.0),)
        if whole
        else (),
    )
