"""Algorithm 3: a clipped critic as an estimate of the Wasserstein distance."""

import jax
import numpy as np
from matplotlib.figure import Figure

from meanflow import transport
from meanflow.plots.maps import dots
from meanflow.plots.style import panels
from meanflow_papers.entry import entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome


def draw(data: Arrays) -> Figure:
    """Output of the clipped critic over the exact distance."""
    figure, (ax,) = panels(1, 1, width=4.6, height=2.2)
    dots(
        {name: [row["ratio"]] for name, row in data.items()},
        ax,
        xlabel=r"critic / exact $W_1$ (a constant, if it measured $W_1$)",
    )
    ax.set_xlim(left=0)
    return figure


@entry(
    "003/algorithm-3",
    title="the clipped critic against exact W1",
    minutes=(0.3, 0.3),
    verdict="refuted",
    setup="shifts and scalings of a Gaussian in 32 dimensions, 600 samples.",
    draw=draw,
)
def algorithm_3(dimension: int = 32, samples: int = 600) -> Outcome:
    """Compare the output of the clipped critic with W1, for shifts and scalings of a Gaussian.

    The paper claims that the critic returns K W1 with a fixed K. Decisive is how much the ratio of the two
    varies between cases; divided by its Lipschitz bound the critic is a lower bound.
    """
    z = jax.random.normal(jax.random.key(1), (samples, dimension))
    cases = {"shift .3": z + 0.3, "shift 1": z + 1.0, "scale 1.5": 1.5 * z, "scale 3": 3.0 * z}
    data: Arrays = {}
    for name, x in cases.items():
        out = transport.critic_distance(x, z, key=jax.random.key(2))
        w = float(
            transport.covariate_shift.paired_distance(x, z)
        )  # both couplings are monotone, so this pairing is optimal
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
