"""Tables 1 and 2: accuracy of ResNets on CIFAR, and the size of these networks."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

from meanflow.layers import BatchNorm
from meanflow.training import ResNet
from meanflow_papers.entry import CIFAR, CIFAR_100, entry
from meanflow_papers.intervals import difference
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.style import COLORS, PALE, below, panels
from meanflow_papers.unitization.cifar import EPOCHS, Training, draw_accuracies, load
from meanflow_papers.unitization.imagenet import BLOCKS, NORMS, ImageNetResNet
from meanflow_papers.unitization.presets import PRESETS

# million parameters, as the authors of these networks give them; the paper itself prints none
USUAL = {"ResNet-20": 0.27, "ResNet-110": 1.7, "ResNet-164": 1.7}
PUBLISHED = {
    10: {20: (0.9179, 0.9221), 110: (0.9399, 0.9412), 164: (0.9434, 0.9462)},
    100: {20: (0.6643, 0.6749), 110: (0.7227, 0.7331), 164: (0.7656, 0.7758)},
}


@entry(
    "003/table-2",
    title="accuracy of ResNet-20, -110, -164 on CIFAR-100, batch norm against unitization",
    claims=(
        (
            "Section 4.2",
            "the unitization still outperforms BN, with increase of over 1% in the accuracy of each "
            "experiment.",
        ),
    ),
    small={"classes": 100, "depths": (20,), "epochs": 1, "limit": 640, "seeds": 1},
    full={"classes": 100, "depths": (20, 110, 164), "epochs": 200, "seeds": 5},
    minutes=(1.0, 50_000.0),
    verdict="not tested",
    status="needs data",
    reason=CIFAR_100,
    data="cifar-100",
    setup="as table 1 with 100 classes.",
    draw=draw_accuracies,
)
@entry(
    "003/table-1",
    title="accuracy of ResNet-20, -110, -164 on CIFAR-10, batch norm against unitization",
    claims=(
        (
            "Section 4.2",
            "The proposed algorithm has better performance, compared with BN, which raises the "
            "classification accuracy for each ResNet.",
        ),
    ),
    small={"depths": (20,), "epochs": 1, "limit": 640, "seeds": 1},
    full={"depths": (20, 110, 164), "epochs": 200, "seeds": 5},
    minutes=(1.0, 50_000.0),
    verdict="not tested",
    status="needs data",
    reason=CIFAR,
    data="cifar-10",
    setup="SGD with Nesterov momentum 0.9, weight decay 5e-4, 200 epochs, median of 5. Small: the path from the "
    "files to "
    "the table alone, ResNet-20 for 5 minibatches, which decides nothing. "
    "After the text of the paper; preset='released' follows the authors' code instead.",
    draw=draw_accuracies,
)
def resnet_accuracies(
    folder: str | Path | None = None,
    classes: int = 10,
    depths: tuple[int, ...] = (20, 110, 164),
    epochs: int = EPOCHS,
    limit: int | None = None,
    seeds: int = 5,
    preset: str = "paper",
    checkpoints: str | Path | None = None,
) -> Outcome:
    """Train ResNets with batch norm and with unitization on CIFAR.

    The paper claims that unitization is more accurate for every depth. Decisive is that the median accuracy
    of each network lies within 0.01 of the published one, at the published size only.

    Args:
        folder: folder with the files of CIFAR-10 or CIFAR-100.
        classes: 10 for Table 1, 100 for Table 2.
        depths: 20, 110, 164.
        epochs: the paper has 200.
        limit: use only this many images of each split.
        seeds: runs of each network; the median is compared.
        preset: "paper" or "released", a key of ``presets.PRESETS``.
        checkpoints: folder where every run is kept after each epoch, to go on from there.
    """
    data = load(folder, classes, limit)
    accuracy: dict[str, np.ndarray] = {}
    published: dict[str, float] = {}
    gaps: dict[str, tuple[float, float]] = {}
    criteria = []
    whole = limit is None and epochs >= EPOCHS
    for depth in depths:
        batch = 64 if depth == 164 else 128
        training = Training(depth, epochs, batch, classes, preset, checkpoints)
        for (name, norm), paper in zip(PRESETS[preset].norms.items(), PUBLISHED[classes][depth], strict=True):
            row = f"ResNet-{depth} ({name})"
            accuracy[row] = training.accuracies(data, norm, seeds, name=row)
            published[row] = paper
            middle = float(np.median(accuracy[row]))
            if whole:  # otherwise nothing is claimed
                criteria.append(Criterion(f"{row}: median", middle, paper - 0.01, paper + 0.01))
        if seeds > 1:
            both = [accuracy[f"ResNet-{depth} ({name})"] for name in ("unitization", "BN")]
            gaps[f"ResNet-{depth}"] = difference(*both)
    minibatches = epochs * (len(data.train_x) // 128)
    found = ", ".join(
        f"{name} {v.mean():.3f} ({v.min():.3f} to {v.max():.3f})" for name, v in accuracy.items()
    )
    between = "; ".join(
        f"{name}: unitization - BN {gap:+.3f} +- {half:.3f}" for name, (gap, half) in gaps.items()
    )
    return Outcome(
        f"003/table-{1 if classes == 10 else 2}",
        f"test accuracies {found}{'; ' if between else ''}{between}"
        + (" (mean difference with its 95 % interval, seeds as pairs)" if between else "")
        + (
            ""
            if whole
            else f", after {minibatches} minibatches of 128 where the paper has 78 000: nothing follows for the end of "
            "the training"
        )
        + f" (preset {preset!r})",
        {"accuracy": accuracy, "published": published},
        tuple(criteria),
    )


def imagenet_size(blocks: tuple[int, ...], classes: int = 1000) -> int:
    """Number of parameters of a pre-activation ResNet with bottlenecks for ImageNet, counted by hand.

    The stem is a 7 x 7 convolution of 64 channels; stage s has ``blocks[s]`` bottlenecks of 64 2^s channels (times 4 at
    the end), the first with a 1 x 1 projection as shortcut. A batch norm before each convolution but the stem has two
    parameters a channel; convolutions have no biases. The outputs of the last block are not normalized (section 4.3).
    """
    total, before = 7 * 7 * 3 * 64, 64
    for stage, count in enumerate(blocks):
        narrow, wide = 64 * 2**stage, 256 * 2**stage
        for k in range(count):
            total += before * narrow + 9 * narrow**2 + narrow * wide + 2 * (before + 2 * narrow)
            total += before * wide if k == 0 else 0
            before = wide
    return total + (before + 1) * classes


def draw_sizes(data: Arrays) -> Figure:
    """Numbers of parameters beside those that are usual for these networks."""
    figure, (ax,) = panels(1, 1, width=6.0, height=2.8)
    places = np.arange(len(data))
    ax.plot([count / 1e6 for count in data.values()], places, "o", color=COLORS[0], ms=7, label="counted")
    for row, (name, count) in enumerate(data.items()):
        ax.text(count / 1e6 * 1.3, row, f"{count / 1e6:.3f} M", va="center", fontsize=8)
        if name in USUAL:
            label = "usual in the literature" if row == 0 else None
            ax.plot([USUAL[name]], [row], "x", color=COLORS[1], ms=8, mew=2, label=label)
    ax.set_yticks(places, list(data))
    ax.grid(axis="y", color=PALE, alpha=0.35, lw=0.6)
    ax.set(xscale="log", xlabel="million parameters", xlim=(0.1, 200), ylim=(-0.6, len(data) - 0.4))
    ax.invert_yaxis()
    below(ax)
    return figure


@entry(
    "003/tables-1-2-sizes",
    title="the networks of tables 1 to 3: numbers of parameters",
    verdict="no claim",
    minutes=(0.45, 0.45),
    setup="ResNet-20, -110 and -164 built without allocating them; ResNet-101 built, counted by hand too, and run "
    "forward "
    "on two images of 64 x 64 pixels with batch norm and with unitization.",
    draw=draw_sizes,
)
def resnet_sizes() -> Outcome:
    """Count the parameters of the ResNets of Tables 1 to 3.

    The paper prints no sizes. Its networks are those of other authors, who give 0.27 M and 1.7 M parameters for CIFAR
    and 44.5 M for ResNet-101. Decisive is that the networks built here have these sizes, so that they are the same
    networks; that ResNet-101 has the size counted by hand; and that with unitization, which starts at alpha = 0, it
    gives the scores that it gives with batch norm, on two small images.
    """
    zeros = nnx.initializers.zeros  # only shapes matter
    make = lambda depth: ResNet(depth, 10, BatchNorm, kernel_init=zeros, rngs=nnx.Rngs(0))
    shapes = lambda depth: nnx.state(nnx.eval_shape(partial(make, depth)), nnx.Param)
    data = {f"ResNet-{d}": sum(u.size for u in jax.tree.leaves(shapes(d))) for d in (20, 110, 164)}
    big = {name: ImageNetResNet(norm, side=64, rngs=nnx.Rngs(0)) for name, norm in NORMS.items()}
    data["ResNet-101"] = sum(u.size for u in jax.tree.leaves(nnx.state(big["BN"], nnx.Param)))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 64, 64, 3)), jnp.float32)
    scores = {name: np.asarray(network(x)) for name, network in big.items()}
    apart = float(np.abs(scores["unitization"] - scores["BN"]).max() / np.abs(scores["BN"]).max())
    millions = {name: count / 1e6 for name, count in data.items()}
    return Outcome(
        "003/tables-1-2",
        "the paper prints no numbers of parameters; ours agree with those usual for these networks; of their "
        "accuracies only the very start was run (003/table-1)",
        data,
        (
            Criterion("ResNet-20, million parameters", millions["ResNet-20"], 0.265, 0.275),
            Criterion("ResNet-110, million parameters", millions["ResNet-110"], 1.65, 1.75),
            Criterion("ResNet-164, million parameters", millions["ResNet-164"], 1.65, 1.75),
            Criterion("ResNet-101, million parameters", millions["ResNet-101"], 44.4, 44.6),
            Criterion(
                "ResNet-101, parameters minus those counted by hand",
                data["ResNet-101"] - imagenet_size(BLOCKS),
                0,
                0,
            ),
            Criterion(
                "ResNet-101, relative distance of the scores at alpha = 0 and under batch norm",
                apart,
                high=1e-3,
            ),
        ),
    )
