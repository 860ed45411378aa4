"""ResNets on CIFAR, from local files; made for an accelerator.

Training is as published: SGD with Nesterov momentum 0.9, weight decay 5e-4, learning rate 0.05 divided by 5
at 30, 60 and 80 % of 200 epochs, padded crops and mirrors, He weights shared by the methods, alpha from 0
(``preset="paper"``), or as in the authors' code (``"released"``, see ``presets``).
At a reduced size the path from the files to the table is checked, not the claim.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from meanflow.training import ResNet, Trainer
from meanflow.training.data import Data, cifar
from meanflow_papers.outcome import Arrays
from meanflow_papers.style import COLORS, PALE, below, panels, sparse
from meanflow_papers.unitization.presets import PRESETS, MakeNorm

EPOCHS = 200  # of the published runs


def load(folder: str | Path | None, classes: int, limit: int | None) -> Data:
    """Read CIFAR-10 or CIFAR-100 from a local folder; ``limit`` keeps that many images of each split."""
    if folder is None:
        raise FileNotFoundError(f"CIFAR-{classes} is read from a local folder; give --data FOLDER")
    data = cifar(folder, classes)
    return data if limit is None else Data(*(part[:limit] for part in data))


@dataclass(frozen=True)
class Training:
    """How a ResNet is trained: what stays the same for the methods that are compared.

    Attributes:
        depth: depth of the network.
        epochs: passes over the images; the learning rate falls at the same parts of them as published.
        batch: images of a minibatch.
        classes: 10 or 100.
        preset: "paper" or "released", a key of ``presets.PRESETS``.
        checkpoints: folder where every run is kept after each epoch, to go on from there when it is started again.
    """

    depth: int
    epochs: int
    batch: int = 128
    classes: int = 10
    preset: str = "paper"
    checkpoints: str | Path | None = None

    def run(
        self,
        data: Data,
        norm: MakeNorm,
        seeds: Iterable[int],
        *,
        hook: Callable[[int, Any], object] | None = None,
        name: str = "",
    ) -> list[dict[str, np.ndarray]]:
        """Return the records of a ResNet with the given normalization, one a seed.

        ``hook`` is that of ``Trainer.run``; ``name`` and the seed name a run among the checkpoints.
        """
        how = PRESETS[self.preset]
        data = how.prepare(data)
        optimizer = how.optimizer(self.epochs * (len(data.train_x) // self.batch))
        make = lambda rngs: ResNet(self.depth, self.classes, norm, released=how.released, rngs=rngs)
        trainer = Trainer(make, optimizer, batch_size=self.batch, augment=how.augment, loop="host")
        place = lambda seed: (
            None if self.checkpoints is None else Path(self.checkpoints) / f"{name} seed {seed}"
        )
        one = lambda seed: trainer.run(
            jax.random.key(seed), data, self.epochs, checkpoint=place(seed), hook=hook, progress=False
        )
        return [one(seed)[1] for seed in seeds]

    def accuracies(self, data: Data, norm: MakeNorm, seeds: int, *, name: str = "") -> np.ndarray:
        """Return the final test accuracies (seeds,) of ``run``."""
        runs = self.run(data, norm, range(seeds), name=name)
        return np.array([run["test_accuracy"][-1] for run in runs])


def draw_accuracies(data: Arrays) -> Figure:
    """Accuracies of tables 1, 2 and 4 beside the published ones, which are those after 200 epochs."""
    figure, (ax,) = panels(1, 1, width=6.0, height=1.6 + 0.3 * len(data["accuracy"]))
    # one row a network, one dot a run: for so few runs a mean with a bar would pretend
    for row, (name, found) in enumerate(data["accuracy"].items()):
        ax.plot(found, np.full(len(found), row), "o", color=COLORS[0], ms=5, mec="white", mew=0.5)
        if name in data["published"]:
            label = f"published, after {EPOCHS} epochs" if row == 0 else None
            ax.plot([data["published"][name]], [row], "x", color=COLORS[1], ms=6, mew=1.5, label=label)
    ax.set_yticks(range(len(data["accuracy"])), list(data["accuracy"]))
    ax.set(xlabel="test accuracy, one dot a run", xlim=(0, 1), ylim=(len(data["accuracy"]) - 0.5, -0.5))
    sparse(ax)
    ax.grid(axis="y", color=PALE, alpha=0.35, lw=0.6)
    ax.set_axisbelow(True)
    below(ax)
    return figure
