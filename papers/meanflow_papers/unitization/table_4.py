"""Table 4: batches of two images, on digits and on CIFAR."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from meanflow.layers import BatchNorm, UnitizedBatchNorm
from meanflow.training import Stack, Trainer
from meanflow.training.data import digits
from meanflow_papers.entry import CIFAR, entry
from meanflow_papers.intervals import difference, equivalence
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.style import COLORS, PALE, REFERENCE, panels
from meanflow_papers.unitization.cifar import EPOCHS, Training, draw_accuracies, load
from meanflow_papers.unitization.presets import PRESETS, MakeNorm

IMAGES: dict[str, MakeNorm] = {
    "BN": BatchNorm,
    **{f"GN{g}": partial(nnx.GroupNorm, num_groups=g) for g in (1, 2, 4, 8, 16)},
    "(10) n=HW": partial(UnitizedBatchNorm, n="pixels"),
    "(10) n=C": UnitizedBatchNorm,
    "alpha = 1": partial(UnitizedBatchNorm, alpha_init=1.0, train_alpha=False),
}
MICRO = {"BN": 0.7150, "unitization": 0.8188}  # published, ResNet-110 on CIFAR-10 in batches of two
MICRO |= dict(zip((f"G = {g}" for g in (1, 2, 4, 8, 16)), (0.1, 0.1, 0.1, 0.7163, 0.7376), strict=True))
MICRO |= dict(
    zip((f"{c} a group" for c in (1, 2, 4, 8, 16)), (0.7954, 0.7358, 0.7068, 0.7204, 0.1), strict=True)
)


NAMES = {
    "BN": "batch norm",
    **{f"GN{g}": f"group norm, {g} group{'s' * (g > 1)}" for g in (1, 2, 4, 8, 16)},
    "(10) n=HW": "unitization (10), $n = HW$",
    "(10) n=C": "unitization (10), $n = C$",
    "alpha = 1": r"$\alpha = 1$ fixed",
}


def draw(data: Arrays) -> Figure:
    """Test accuracy of each method at each rate, one dot a seed; mean differences to batch norm with intervals."""
    rates = list(data["accuracy"])
    figure, grid = panels(2, len(rates), width=4.4, height=3.0)
    for k, rate in enumerate(rates):
        top, bottom = grid[k], grid[len(rates) + k]
        table = data["accuracy"][rate]
        for row, (name, values) in enumerate(table.items()):
            values = np.asarray(values)
            top.plot(values, np.full(len(values), row), "o", color=COLORS[0], ms=5, mec="white", mew=0.5)
            top.plot([values.mean()], [row], "|", color=COLORS[1], ms=14, mew=2)
            if name != "BN":
                gap, half = difference(values, np.asarray(table["BN"]))
                bottom.errorbar([gap], [row], xerr=[half], fmt="s", color=COLORS[1], capsize=3)
        for ax in (top, bottom):
            ax.set_yticks(range(len(table)), [NAMES[name] for name in table] if k == 0 else [])
            ax.set_ylim(len(table) - 0.5, -0.5)
            ax.grid(axis="y", color=PALE, alpha=0.35, lw=0.6)
        top.axvline(0.1, color=REFERENCE, lw=0.8, ls=":")
        least = min(float(np.min(values)) for values in table.values())
        # an axis of its own where every run learns, so that their differences are seen
        top.set(
            xlabel="test accuracy after the last epoch",
            xlim=(0, 1.02) if least < 0.5 else (least - 0.02, 1.0),
        )
        top.set_title(f"rate {rate}")
        bottom.axvline(0.0, color=REFERENCE, lw=0.8)
        bottom.set_xlabel("mean difference to batch norm, 95 % interval")
    marks = [
        Line2D([], [], ls="", marker="o", color=COLORS[0], label="one run"),
        Line2D([], [], ls="", marker="|", ms=12, mew=2, color=COLORS[1], label="mean"),
        Line2D([], [], ls="", marker="s", color=COLORS[1], label="difference to batch norm"),
        Line2D([], [], ls=":", color=REFERENCE, label="chance"),
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=3)
    return figure


@entry(
    "003/table-4",
    title="batches of two images: batch norm, group norm, unitization, at two learning rates",
    claims=(
        (
            "Appendix C",
            "the unitization still outperforms the other techniques for micro-batches. Some networks "
            "with GN cannot even converge, where the accuracy (of only 10%) degrades",
        ),
    ),
    small={"seeds": 4},
    full={
        "seeds": 10,
        "rates": (0.005, 0.01, 0.02, 0.05),
        "variants": ("BN", "GN1", "GN2", "GN4", "GN8", "GN16", "(10) n=HW", "(10) n=C", "alpha = 1"),
    },
    minutes=(1.64, 20.0),
    verdict="not reproduced",
    setup="1-16-16-16-16 convolutions on digits, batch 2, 6 epochs at the constant rates 0.01 and 0.05, 4 seeds (the "
    "paper: ResNet-110 on CIFAR-10 at 0.05).",
    draw=draw,
)
def table_4(
    rates: tuple[float, ...] = (0.01, 0.05),
    epochs: int = 6,
    seeds: int = 4,
    variants: Iterable[str] = ("BN", "GN1", "GN4", "(10) n=HW", "(10) n=C"),
    strides: tuple[int, ...] = (1, 2, 1, 2),
    train: int = 1197,
) -> Outcome:
    """Train on batches of two images: four 3 x 3 convolutions of 16 channels, and the mean over pixels.

    The paper claims that unitization wins clearly at batch size 2, where group norm may fail to train (accuracy 0.1
    with 1, 2 and 4 groups). We use SGD with momentum 0.9 at constant rates, 1197 training and 600 test images, and the
    accuracy after the last epoch. All layers have 16 channels, so that "groups" and "channels per group" are the same
    divisions. Seeds are paired: a seed has one split and one start for all methods.

    Decisive at the paper's rate, 0.05, are whether group norm with one group fails in some run (below 0.2, where
    chance is 0.1) while batch norm learns in all (above one half), and whether unitization as printed, (10) with n =
    HW, is below batch norm in every seed. At 0.01 every run must learn. "No difference was found" says little with
    few seeds: the finding gives the least bound within which the methods are equal by two one-sided tests.
    """
    accuracy: dict[str, dict[str, np.ndarray]] = {}
    keys = jax.random.split(jax.random.key(0), seeds)
    for rate in rates:
        accuracy[f"{rate:g}"] = {}
        for name in variants:
            make = lambda rngs, name=name: Stack(1, [16] * 4, 10, IMAGES[name], strides=strides, rngs=rngs)
            trainer = Trainer(make, optax.sgd(rate, momentum=0.9), batch_size=2)
            runs = [trainer.run(key, digits(seed, train), epochs)[1] for seed, key in enumerate(keys)]
            accuracy[f"{rate:g}"][name] = np.array([run["test_accuracy"][-1] for run in runs])
    low, high = accuracy["0.01"], accuracy["0.05"]
    equal = max(equivalence(values, low["BN"]) for name, values in low.items() if name != "BN")
    rows = lambda table: ", ".join(
        f"{n} {v.mean():.2f} ({v.min():.2f} to {v.max():.2f})" for n, v in table.items()
    )
    gap, half = difference(high["(10) n=HW"], high["BN"])
    return Outcome(
        "003/table-4",
        f"that group norm may fail depends on the rate. At 0.05, the paper's: {rows(high)}; the printed form (10) with "
        f"n = HW differs from batch norm by {gap:.2f} +- {half:.2f}, so it does not win here. At 0.01: {rows(low)}; "
        f"there all methods are equal to batch norm within {equal:.2f} (two one-sided tests at 5 %, {seeds} seeds), "
        "and no ranking can be given (digits, small network)",
        {"accuracy": accuracy},
        (
            Criterion("rate 0.05: worst run of one group", float(high["GN1"].min()), high=0.2),
            Criterion("rate 0.05: worst run of batch norm", float(high["BN"].min()), low=0.5),
            Criterion(
                "rate 0.05: largest (10) n=HW - batch norm",
                float((high["(10) n=HW"] - high["BN"]).max()),
                high=0,
            ),
            Criterion("rate 0.01: worst run", float(min(v.min() for v in low.values())), low=0.5),
        ),
    )


@entry(
    "003/table-4-cifar",
    title="the same for ResNet-110 on CIFAR-10",
    claims=(
        (
            "Appendix C",
            "the unitization still outperforms the other techniques for micro-batches. Some networks "
            "with GN cannot even converge, where the accuracy (of only 10%) degrades",
        ),
    ),
    small={"depth": 8, "epochs": 1, "limit": 100, "groups": (1,), "channels": (1,), "seeds": 1},
    full={"depth": 110, "epochs": 200, "seeds": 3},
    minutes=(1.0, 50_000.0),
    verdict="not tested",
    status="needs data",
    reason=CIFAR,
    data="cifar-10",
    setup="ResNet-110, batch 2, group norm with G = 1 .. 16 groups and with 1 .. 16 channels a group: all twelve "
    "columns. Small: the path from the files to the table alone, ResNet-8 for 50 minibatches and four of the columns, "
    "which decides nothing.",
    draw=draw_accuracies,
)
def table_4_cifar(
    folder: str | Path | None = None,
    depth: int = 110,
    epochs: int = EPOCHS,
    limit: int | None = None,
    groups: tuple[int, ...] = (1, 2, 4, 8, 16),
    channels: tuple[int, ...] = (1, 2, 4, 8, 16),
    seeds: int = 3,
    presets: tuple[str, ...] = ("paper",),
) -> Outcome:
    """Train ResNets on CIFAR-10 in batches of two: batch norm, unitization, and both divisions of group norm.

    The paper claims that unitization wins clearly. Decisive is its median accuracy minus the best of the
    others, at the published size only. Arguments are those of ``resnet_accuracies``; ``groups`` are numbers of groups
    of all layers, ``channels`` numbers of channels in a group, ``presets`` keys of ``presets.PRESETS``.
    """
    data = load(folder, 10, limit)
    grouped: dict[str, MakeNorm] = {f"G = {g}": partial(nnx.GroupNorm, num_groups=g) for g in groups}
    grouped |= {f"{c} a group": partial(nnx.GroupNorm, num_groups=None, group_size=c) for c in channels}
    accuracy: dict[str, np.ndarray] = {}
    published: dict[str, float] = {}
    for preset in presets:
        training = Training(depth, epochs, 2, preset=preset)
        for method, norm in {**PRESETS[preset].norms, **grouped}.items():
            row = method if len(presets) == 1 else f"{method}, {preset}"
            accuracy[row] = training.accuracies(data, norm, seeds)
            published[row] = MICRO[method]
    whole = limit is None and epochs >= EPOCHS and depth == 110
    middle = {row: float(np.median(values)) for row, values in accuracy.items()}
    best = max(v for row, v in middle.items() if not row.startswith("unitization"))
    ours = max(v for row, v in middle.items() if row.startswith("unitization"))
    found = ", ".join(f"{row} {v.mean():.2f} ({v.min():.2f} to {v.max():.2f})" for row, v in accuracy.items())
    minibatches = epochs * (len(data.train_x) // 2)
    return Outcome(
        "003/table-4-cifar",
        f"test accuracies {found}"
        + (
            ""
            if whole
            else f", ResNet-{depth} after {minibatches} minibatches of two, where the paper has ResNet-110 and 5 "
            "million: nothing follows for the end of the training"
        ),
        {"accuracy": accuracy, "published": published},
        (Criterion("unitization - best of the others", ours - best, 0.0),) if whole else (),
    )
