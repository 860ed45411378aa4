"""The network 64-[100]x10-8-10 on digits (784 inputs: MNIST), with the normalization layers of Figures 2 and 3."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from meanflow.layers import BatchNorm, UnitizedBatchNorm
from meanflow.training import LayerShift, Stack, Trainer
from meanflow.training.data import Data, digits, mnist
from meanflow_papers.unitization.presets import MakeNorm, staircase

_unit = partial(UnitizedBatchNorm, momentum=0.9)
DENSE: dict[str, MakeNorm] = {
    "BN": partial(BatchNorm, momentum=0.9),
    "(10) from 0": _unit,  # the stated default
    "(10) from .5": partial(_unit, alpha_init=0.5),
    "(10) from 1": partial(_unit, alpha_init=1.0),
    "(9) from .5": partial(_unit, alpha_init=0.5, interpolation="harmonic", clip_alpha=True),
    # true unitization; n = d multiplies by sqrt(d), so that outputs have the size of standardized ones
    "alpha = 1": partial(_unit, alpha_init=1.0, train_alpha=False, n="features"),
}
VARIANTS = {
    "BN": "batch norm",
    "(10) from 0": r"unitization, $\alpha$ from 0",
    "unitization": r"unitization, $\alpha$ from 0",
    "alpha = 1": r"$\alpha = 1$ fixed",
}


def digit_splits(seeds: int, *, flat: bool) -> Data:
    """One random split of digits a seed, stacked."""
    splits = [digits(seed) for seed in range(seeds)]
    splits = [s.flat() for s in splits] if flat else splits
    return Data(*(np.stack(part) for part in zip(*splits, strict=True)))


def mnist_copies(folder: str | Path, seeds: int, limit: int | None) -> Data:
    """MNIST as rows, once for each seed; ``limit`` keeps that many training images, and a sixth of it for the test."""
    data = mnist(folder).flat()
    keep = (limit, limit, None, None) if limit is None else (limit, limit, limit // 6, limit // 6)
    parts = [part[:count] for part, count in zip(data, keep, strict=True)]
    return Data(*(np.broadcast_to(part, (seeds, *part.shape)) for part in parts))


def train_dense(
    norm: MakeNorm, seeds: int, epochs: int, watch: LayerShift, data: Data | None = None
) -> tuple[Trainer, Any, dict[str, np.ndarray]]:
    """The network inputs-[100]x10-8-10 under plain SGD at 0.05, divided by 5 at 30, 60 and 80 %; default on digits."""
    data = digit_splits(seeds, flat=True) if data is None else data
    schedule = staircase(0.05, epochs, data.train_x.shape[1] // 128)
    make = lambda rngs: Stack(data.train_x.shape[-1], [100] * 10 + [8], 10, norm, rngs=rngs)
    trainer = Trainer(make, optax.sgd(schedule), batch_size=128, observe=watch, loop="ensemble")
    return trainer, *trainer.run(jax.random.split(jax.random.key(0), seeds), data, epochs)
