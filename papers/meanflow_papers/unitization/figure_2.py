"""The unitization paper on digits: its theorems, Figures 2 and 3, Table 4 and Algorithm 3.

Claims are about what runs here: scikit-learn's digits stand in for MNIST and CIFAR, so a curve that does not
reproduce does not refute the published one. The CIFAR tables need the data (``training.cifar``) and an
accelerator; only the size of their networks is checked. The ImageNet table is out of scope.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from meanflow import transport
from meanflow.experiments.outcome import Criterion, Outcome
from meanflow.layers import BatchNorm, UnitizedBatchNorm
from meanflow.training import CNN, MLP, ResNet, Trainer, Watch, count_parameters, digits, staircase
from meanflow.training.data import Data
from meanflow.transport import bounds

_unit = partial(UnitizedBatchNorm, momentum=0.9)
DENSE: dict[str, Callable[..., Any]] = {
    "BN": partial(BatchNorm, momentum=0.9),
    "(10) from 0": _unit,  # the stated default
    "(10) from .5": partial(_unit, alpha_init=0.5),
    "(10) from 1": partial(_unit, alpha_init=1.0),
    "(9) from .5": partial(_unit, alpha_init=0.5, interpolation="harmonic", alpha_constraint="clip"),
    # true unitization; n = d multiplies by sqrt(d), so that outputs have the size of standardised ones
    "alpha = 1": partial(_unit, alpha_init=1.0, train_alpha=False, n="features"),
}
IMAGES: dict[str, Callable[..., Any]] = {
    "BN": BatchNorm,
    **{f"GN{g}": partial(nnx.GroupNorm, num_groups=g) for g in (1, 2, 4, 8, 16)},
    "(10) n=HW": partial(UnitizedBatchNorm, n="pixels"),
    "(10) n=C": UnitizedBatchNorm,
    "alpha = 1": partial(UnitizedBatchNorm, alpha_init=1.0, train_alpha=False),
}


def _splits(seeds: int, *, flat: bool) -> Data:
    """One random split of digits a seed, stacked."""
    splits = [digits(seed) for seed in range(seeds)]
    splits = [s.flat() for s in splits] if flat else splits
    return Data(*(np.stack(part) for part in zip(*splits, strict=True)))


def _train_dense(
    norm: Callable[..., Any], seeds: int, epochs: int, watch: Watch
) -> tuple[Trainer, Any, dict[str, Any]]:
    """The network 64-[100]x10-8-10 under plain SGD at 0.05, divided by 5 at 30, 60 and 80 %."""
    data = _splits(seeds, flat=True)
    schedule = staircase(0.05, epochs, data.train_x.shape[1] // 128)
    make = lambda rngs: MLP(64, [100] * 10 + [8], 10, norm, rngs=rngs)
    trainer = Trainer(make, optax.sgd(schedule), batch=128, watch=watch, ensemble=True)
    return trainer, *trainer.run(jax.random.split(jax.random.key(0), seeds), data, epochs)


def moments(
    seeds: int = 4, epochs: int = 60, variants: Iterable[str] = ("BN", "(10) from 0", "alpha = 1")
) -> Outcome:
    """Figure 2: skewness and kurtosis of the 8-unit layer over training, in inference mode.

    About a minute a variant on one core; ``variants=DENSE`` runs all six.
    """
    data: dict[str, Any] = {}
    for name in variants:
        watch = Watch(moments="running", shift=False)
        trainer, state, record = _train_dense(DENSE[name], seeds, epochs, watch)
        late = {m: record[m][3:] for m in ("skewness", "kurtosis")}  # from epoch 4
        data[name] = {
            "skewness": record["skewness"],
            "kurtosis": record["kurtosis"],
            "sd_skewness": float(np.median(late["skewness"].std(0).mean(-1))),
            "sd_kurtosis": float(np.median(late["kurtosis"].std(0).mean(-1))),
            "max_kurtosis": float(np.median(np.abs(late["kurtosis"]).max((0, 2)))),
            "accuracy": record["test_accuracy"][-1],
        }
        if name != "BN":
            alpha = jax.vmap(lambda s, t=trainer: t.network(s).norms[-1].alpha)(state)
            data[name]["alpha"] = np.asarray(alpha)
    plain, default, unit = (data[name] for name in ("BN", "(10) from 0", "alpha = 1"))
    ratio = lambda a, b: a["sd_kurtosis"] / b["sd_kurtosis"]
    return Outcome(
        "003/figure-2",
        "unitization (alpha trained from 0) keeps skewness and kurtosis more stable than batch norm",
        "the stated default does not stabilise (alpha turns negative); alpha fixed at 1 controls kurtosis, "
        "not skewness (digits)",
        data,
        (
            Criterion("sd of kurtosis, alpha = 1 / BN", ratio(unit, plain), high=0.6),
            Criterion("max |kurtosis|, alpha = 1", unit["max_kurtosis"], high=2.0),
            Criterion("max |kurtosis|, BN", plain["max_kurtosis"], low=2.5),
            Criterion("sd of kurtosis, default / BN", ratio(default, plain), 0.7, 1.3),
            Criterion("smallest alpha of the default", float(default["alpha"].min()), high=-1e-6),
        ),
    )


def ics_trace(
    seeds: int = 3,
    epochs: int = 50,
    variants: Iterable[str] = ("BN", "(10) from 0", "alpha = 1"),
    moments: str = "batch",
) -> Outcome:
    """Figure 3: the shift of the 8-unit layer from epoch to epoch falls with the learning rate, 5 to 1.

    ``moments="running"`` measures in inference mode instead, where the noise of the running averages
    hides the later drops.
    """
    data: dict[str, Any] = {}
    for name in variants:
        *_, record = _train_dense(DENSE[name], seeds, epochs, Watch(moments=moments, rows=400))
        w, drops = record["ics_exact"], [round(f * epochs) for f in (0.3, 0.6, 0.8)]
        data[name] = {
            **{k: v for k, v in record.items() if k.startswith("ics_")},
            "loss_shift": record["loss_shift"],
            "test_accuracy": record["test_accuracy"],
            "ratios": np.array([w[t - 4 : t].mean(0) / w[t : t + 4].mean(0) for t in drops]),
            "paired_over_exact": float(np.median(record["ics_paired"] / w)),
        }
    ratios = np.stack([d["ratios"] for d in data.values()])
    pairing = max(d["paired_over_exact"] for d in data.values())
    if moments == "batch":
        criteria: tuple[Criterion, ...] = (
            Criterion("smallest ratio at a drop", float(ratios.min()), low=3.5),
            Criterion("largest ratio at a drop", float(ratios.max()), high=7.0),
            Criterion("paired / exact W1, median", pairing, high=1.01),
        )
        finding = "W1 is proportional to the learning rate, for batch norm and unitization alike (digits)"
    else:
        criteria = (
            Criterion("median ratio at the last two drops", float(np.median(ratios[:, 1:])), high=2.0),
        )
        finding = "in inference mode the noise of the running averages hides the later drops (digits)"
    claim = "the distance drops with the learning rate as the accuracy rises, so ICS relates to performance"
    return Outcome("003/figure-3", claim, finding, data, criteria)


def micro_batches(
    rate: float = 0.01,
    epochs: int = 6,
    seeds: int = 4,
    variants: Iterable[str] = ("BN", "GN1", "GN4", "GN16", "(10) n=HW", "(10) n=C", "alpha = 1"),
    falling: bool = False,
    strides: tuple[int, ...] = (1, 2, 1, 2),
    train: int = 1197,
) -> Outcome:
    """Table 4: batches of two images through four 3 x 3 convolutions of 16 channels, and the mean over pixels.

    SGD with momentum 0.9 at a constant rate, 1197 training and 600 test images, accuracy after the last epoch.
    The criteria (each run above 0.96, all within 0.03) come from reference runs with two seeds, of whose network
    only the channels are known. They are *not met* here: at the constant rate the last epoch is too noisy. Four
    seeds gave a worst run of 0.920 and a spread of 0.065 (0.926 and 0.067 with 1500 training images; 0.888 and
    0.105 with strides 1). ``falling`` divides the rate as in the other experiments. All layers have 16 channels,
    so that "groups" and "channels per group" are the same divisions. About 10 s a run on one core.
    """
    schedule = staircase(rate, epochs, train // 2) if falling else rate
    data: dict[str, Any] = {}
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
        f"no ranking: the methods' means over {seeds} seeds lie within {np.ptp(means):.3f} ({means.min():.3f} to "
        f"{means.max():.3f}), the seeds of one method up to {np.ptp(final, axis=1).max():.3f} apart. Of "
        f"{final.size} runs {int(np.sum(final < 0.96))} end below 0.96 (digits)",
        data,
        (
            Criterion("worst accuracy", float(final.min()), low=0.96),
            Criterion("spread of accuracies", float(np.ptp(final)), high=0.03),
        ),
    )


def theorems() -> Outcome:
    """Theorems 1 to 3.3 at the points that decide them: both sides of each inequality."""
    pair, dirac = jnp.array([[-2.0], [2.0]]), jnp.zeros((2, 1))
    alpha, far = jnp.array([0.9, 0.3, 0.7]), 1e5 * jnp.eye(3)[1:2]
    rng = np.random.default_rng(0)
    data = {
        "theorem 1, Dirac against two points": bounds.theorem1(pair, dirac),
        "(4), d = 64": bounds.equation4(*jnp.asarray(rng.normal(size=(2, 500, 64)))),
        "theorem 2, shifted samples": bounds.theorem2(
            *jnp.asarray(rng.normal(size=(2, 200, 3)) + [[[1.0]], [[0]]])
        ),
        "theorem 3.1, antipodes": bounds.theorem31(far, -far),
        "theorem 3.2, antipodes": bounds.theorem32(far, -far, 0.3),
        "theorem 3.3 for (9)": bounds.theorem33(far, -far, alpha, interpolation="harmonic"),
        "theorem 3.3 for (10)": bounds.theorem33(far, -far, alpha, interpolation="linear"),
    }
    over = lambda name: float(data[name].distance / data[name].printed)
    lower = data["theorem 2, shifted samples"]
    upper = [float(b.distance / b.corrected) for name, b in data.items() if b is not lower]
    return Outcome(
        "003/theorems",
        "Theorem 1 bounds W1 by moments; Theorem 3.3 bounds the trained unitization by 2 / min alpha",
        "Theorem 1 holds but is never tight; Theorem 3.3 holds for (9) and fails without limit for (10)",
        {name: b._asdict() for name, b in data.items()},
        (
            Criterion(
                "distance / printed bound of theorem 3.3 for (10)", over("theorem 3.3 for (10)"), low=1e4
            ),
            Criterion(
                "distance / printed bound of theorem 3.3 for (9)", over("theorem 3.3 for (9)"), high=1.0
            ),
            Criterion("largest distance / corrected upper bound", max(upper), high=1 + 1e-5),
            Criterion("tightness of the corrected moment bound", upper[0], low=1 - 1e-5),
            Criterion("lower bound / distance", float(lower.corrected / lower.distance), 0.0, 1 + 1e-5),
        ),
    )


def critic(dimension: int = 32, samples: int = 600) -> Outcome:
    """Algorithm 3: the clipped critic's output over W1, for shifts and scalings of a Gaussian."""
    z = jax.random.normal(jax.random.key(1), (samples, dimension))
    cases = {"shift .3": z + 0.3, "shift 1": z + 1.0, "scale 1.5": 1.5 * z, "scale 3": 3.0 * z}
    data: dict[str, Any] = {}
    for name, x in cases.items():
        out = transport.critic_distance(x, z, key=jax.random.key(2))
        w = float(transport.paired_distance(x, z))  # both couplings are monotone, so this pairing is optimal
        data[name] = {
            "w1": w,
            "ratio": float(out.value) / w,
            **{k: float(v) for k, v in out._asdict().items()},
        }
    ratios = np.array([d["ratio"] for d in data.values()])
    certified = max(d["lower_bound"] / d["w1"] for d in data.values())
    return Outcome(
        "003/algorithm-3",
        "the critic returns K W1 with a fixed K",
        "the factor varies by more than 3; divided by its Lipschitz bound it is a (loose) lower bound",
        data,
        (
            Criterion("largest / smallest critic / W1", float(ratios.max() / ratios.min()), low=3.0),
            Criterion("certified lower bound / W1", float(certified), 0.0, 1.1),  # held-out half against all
        ),
    )


def resnet_sizes() -> Outcome:
    """The networks of Tables 1 and 2: numbers of parameters against the published 0.27 M and 1.7 M."""
    zeros = nnx.initializers.zeros  # only shapes matter
    make = lambda depth: ResNet(depth, 10, BatchNorm, kernel_init=zeros, rngs=nnx.Rngs(0))
    data = {f"ResNet-{depth}": count_parameters(partial(make, depth)) for depth in (20, 110, 164)}
    millions = {name: count / 1e6 for name, count in data.items()}
    return Outcome(
        "003/tables-1-2",
        "ResNet-20, -110 and -164 with any normalisation layer (0.27 M, 1.7 M, 1.7 M parameters)",
        "sizes agree; the accuracies need CIFAR and an accelerator and were not run",
        data,
        (
            Criterion("ResNet-20, million parameters", millions["ResNet-20"], 0.265, 0.275),
            Criterion("ResNet-110, million parameters", millions["ResNet-110"], 1.65, 1.75),
            Criterion("ResNet-164, million parameters", millions["ResNet-164"], 1.65, 1.75),
        ),
    )
