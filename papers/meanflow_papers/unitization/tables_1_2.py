"""Tables 1 and 2: accuracy of ResNets on CIFAR, and the size of these networks."""

from functools import partial
from pathlib import Path

import numpy as np
from flax import nnx

from meanflow.layers import BatchNorm
from meanflow.training import ResNet
from meanflow.training.resnet import count_parameters
from meanflow_papers.entry import CIFAR, entry
from meanflow_papers.outcome import Criterion, Outcome
from meanflow_papers.unitization.cifar import EPOCHS, NORMS, accuracies, draw_accuracies, load

PUBLISHED = {
    10: {20: (0.9179, 0.9221), 110: (0.9399, 0.9412), 164: (0.9434, 0.9462)},
    100: {20: (0.6643, 0.6749), 110: (0.7227, 0.7331), 164: (0.7656, 0.7758)},
}


def _table(
    folder: str | Path | None,
    classes: int,
    depths: tuple[int, ...],
    epochs: int,
    limit: int | None,
    seeds: int,
) -> Outcome:
    data = load(folder, classes, limit)
    accuracy: dict[str, np.ndarray] = {}
    published: dict[str, float] = {}
    criteria = []
    whole = limit is None and epochs >= EPOCHS
    for depth in depths:
        batch = 64 if depth == 164 else 128
        for name, norm, paper in zip(NORMS, NORMS.values(), PUBLISHED[classes][depth], strict=True):
            row = f"ResNet-{depth} ({name})"
            accuracy[row] = accuracies(data, norm, depth, classes, batch, epochs, seeds)
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


@entry(
    "003/table-1",
    title="accuracy of ResNet-20, -110, -164 on CIFAR-10, batch norm against unitization",
    small={"depths": (20,), "epochs": 2, "limit": 2000, "seeds": 1},
    full={"depths": (20, 110, 164), "epochs": 200, "seeds": 5},
    minutes=(10.0, 50_000.0),
    verdict="not tested",
    status="needs data",
    reason=CIFAR,
    data="cifar-10",
    setup="SGD with Nesterov momentum 0.9, weight decay 5e-4, 200 epochs, median of 5; small: a check of the path.",
    draw=draw_accuracies,
)
def table_1(
    folder: str | Path | None = None,
    depths: tuple[int, ...] = (20, 110, 164),
    epochs: int = EPOCHS,
    limit: int | None = None,
    seeds: int = 5,
) -> Outcome:
    """Train ResNets with batch norm and with unitization on CIFAR-10.

    The paper claims that unitization is more accurate for every depth. Decisive is that the median accuracy
    of each network lies within 0.01 of the published one, at the published size only.

    Args:
        folder: folder with the CIFAR-10 files.
        depths: 20, 110, 164.
        epochs: the paper has 200.
        limit: use only this many images of each split.
        seeds: runs of each network; the median is compared.
    """
    return _table(folder, 10, depths, epochs, limit, seeds)


@entry(
    "003/table-2",
    title="accuracy of ResNet-20, -110, -164 on CIFAR-100, batch norm against unitization",
    small={"depths": (20,), "epochs": 2, "limit": 2000, "seeds": 1},
    full={"depths": (20, 110, 164), "epochs": 200, "seeds": 5},
    minutes=(10.0, 50_000.0),
    verdict="not tested",
    status="needs data",
    reason=CIFAR,
    data="cifar-100",
    setup="as table 1 with 100 classes.",
    draw=draw_accuracies,
)
def table_2(
    folder: str | Path | None = None,
    depths: tuple[int, ...] = (20, 110, 164),
    epochs: int = EPOCHS,
    limit: int | None = None,
    seeds: int = 5,
) -> Outcome:
    """Train the same networks on CIFAR-100; claim, criteria and arguments are those of ``table_1``."""
    return _table(folder, 100, depths, epochs, limit, seeds)


@entry(
    "003/tables-1-2-sizes",
    title="the networks of tables 1 and 2: numbers of parameters",
    setup="ResNet-20, -110 and -164 built without allocating them.",
)
def resnet_sizes() -> Outcome:
    """Count the parameters of the ResNets of Tables 1 and 2.

    The paper states 0.27 M and 1.7 M parameters. Decisive is that the networks built here have these sizes;
    they are built without allocating them.
    """
    zeros = nnx.initializers.zeros  # only shapes matter
    make = lambda depth: ResNet(depth, 10, BatchNorm, kernel_init=zeros, rngs=nnx.Rngs(0))
    data = {f"ResNet-{depth}": count_parameters(partial(make, depth)) for depth in (20, 110, 164)}
    millions = {name: count / 1e6 for name, count in data.items()}
    return Outcome(
        "003/tables-1-2",
        "ResNet-20, -110 and -164 with any normalization layer (0.27 M, 1.7 M, 1.7 M parameters)",
        "sizes agree; the accuracies need CIFAR and an accelerator and were not run",
        data,
        (
            Criterion("ResNet-20, million parameters", millions["ResNet-20"], 0.265, 0.275),
            Criterion("ResNet-110, million parameters", millions["ResNet-110"], 1.65, 1.75),
            Criterion("ResNet-164, million parameters", millions["ResNet-164"], 1.65, 1.75),
        ),
    )
