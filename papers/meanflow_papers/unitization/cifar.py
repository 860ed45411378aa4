"""ResNets on CIFAR, from local files; made for an accelerator.

Training is as published: SGD with Nesterov momentum 0.9, weight decay 5e-4, learning rate 0.05 divided by 5
at 30, 60 and 80 % of 200 epochs, padded crops and mirrors, He weights shared by the methods, alpha from 0
(``preset="paper"``), or as in the authors' code (``"released"``, see ``presets``).
At a reduced size the path from the files to the table is checked, not the claim.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import jax
import numpy as np
from matplotlib.figure import Figure

from meanflow.plots.maps import dots
from meanflow.plots.style import COLORS, below, panels
from meanflow.training import ResNet, Trainer, Watch
from meanflow.training.data import Data, cifar
from meanflow.training.networks import MakeNorm, Network
from meanflow_papers.outcome import Arrays
from meanflow_papers.unitization.presets import PRESETS

EPOCHS = 200  # of the published runs


def load(folder: str | Path | None, classes: int, limit: int | None) -> Data:
    """Read CIFAR-10 or CIFAR-100 from a local folder; ``limit`` keeps that many images of each split."""
    if folder is None:
        raise FileNotFoundError(f"CIFAR-{classes} is read from a local folder; give --data FOLDER")
    data = cifar(folder, classes)
    return data if limit is None else Data(*(part[:limit] for part in data))


def train(
    data: Data,
    norm: MakeNorm,
    depth: int,
    classes: int,
    batch: int,
    epochs: int,
    seeds: Iterable[int],
    *,
    preset: str = "paper",
    watch: Watch | None = None,
    hook: Callable[[int, Network], object] | None = None,
    checkpoints: str | Path | None = None,
    name: str = "",
) -> list[dict[str, np.ndarray]]:
    """The records of a ResNet trained as published, one a seed.

    With a folder ``checkpoints`` each run is kept there after every epoch, as ``name`` and its seed, and goes on from
    there when it is started again. ``hook`` is that of ``Trainer.run``.
    """
    how = PRESETS[preset]
    data = how.prepare(data)
    optimizer = how.optimizer(epochs * (len(data.train_x) // batch))
    make = lambda rngs: ResNet(depth, classes, norm, released=how.released, rngs=rngs)
    trainer = Trainer(make, optimizer, batch=batch, augment=how.augment, watch=watch, loop="host")
    kept = lambda seed: None if checkpoints is None else Path(checkpoints) / f"{name} seed {seed}"
    return [
        trainer.run(jax.random.key(seed), data, epochs, checkpoint=kept(seed), hook=hook, progress=False)[1]
        for seed in seeds
    ]


def accuracies(
    data: Data,
    norm: MakeNorm,
    depth: int,
    classes: int,
    batch: int,
    epochs: int,
    seeds: int,
    *,
    preset: str = "paper",
    checkpoints: str | Path | None = None,
    name: str = "",
) -> np.ndarray:
    """Return the final test accuracies (seeds,) of ``train``, whose arguments these are."""
    runs = train(
        data,
        norm,
        depth,
        classes,
        batch,
        epochs,
        range(seeds),
        preset=preset,
        checkpoints=checkpoints,
        name=name,
    )
    return np.array([run["test_accuracy"][-1] for run in runs])


def draw_accuracies(data: Arrays) -> Figure:
    """Accuracies of tables 1, 2 and 4 beside the published ones, which are those after 200 epochs."""
    figure, (ax,) = panels(1, 1, width=6.0, height=1.6 + 0.3 * len(data["accuracy"]))
    dots(
        {name: np.asarray(v) for name, v in data["accuracy"].items()},
        ax,
        xlabel="test accuracy, one dot a run",
    )
    for row, name in enumerate(data["accuracy"]):
        if name in data["published"]:
            label = f"published, after {EPOCHS} epochs" if row == 0 else None
            ax.plot([data["published"][name]], [row], "x", color=COLORS[1], ms=6, mew=1.5, label=label)
    ax.set_xlim(0, 1)
    below(ax)
    return figure
