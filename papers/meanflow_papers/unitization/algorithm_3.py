"""Algorithm 3: a clipped critic as an estimate of the Wasserstein distance."""

import jax
import numpy as np
from matplotlib.figure import Figure

from meanflow import transport
from meanflow_papers.entry import Arguments, entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.style import COLORS, DASHES, MARKERS, PALE, REFERENCE, below, panels
from meanflow_papers.unitization.critic import critic_distance


def draw(data: Arrays) -> Figure:
    """Output of the clipped critic, and its certified lower bound, against the exact distance."""
    figure, (left, right) = panels(1, 2, width=4.6, height=4.0)
    kinds = {
        "shift": [n for n in data if n.startswith("shift")],
        "scale": [n for n in data if n.startswith("scale")],
    }
    for k, (kind, names) in enumerate(kinds.items()):
        w = np.array([data[n]["w1"] for n in names])
        critic = np.array([data[n]["value"] for n in names])
        bound = np.array([data[n]["lower_bound"] for n in names])
        order = np.argsort(w)
        style: Arguments = {"color": COLORS[k], "marker": MARKERS[k]}
        words = {"shift": "shifts of a Gaussian", "scale": "scalings of a Gaussian"}[kind]
        left.plot(w[order], critic[order], label=f"{words} by the numbers", **style)
        right.plot(w[order], bound[order] / w[order], label=words, **style)
        for i in order:
            left.annotate(
                names[i].split()[1], (w[i], critic[i]), (4, -9), textcoords="offset points", fontsize=7
            )
    w = np.array(sorted(row["w1"] for row in data.values()))
    for k, (name, label) in enumerate(
        (("shift 1", "$K W_1$, $K$ from shift 1"), ("scale 3", "$K W_1$, $K$ from scale 3"))
    ):
        left.plot(w, data[name]["ratio"] * w, color=PALE, ls=DASHES[k + 1], lw=1, label=label)
    left.set(xscale="log", yscale="log", xlabel="exact $W_1$", ylabel="output of the clipped critic")
    left.set_title("one $K$ does not fit")
    right.axhline(1.0, color=REFERENCE, lw=0.8, label="exact")
    right.set(xscale="log", yscale="log", xlabel="exact $W_1$", ylabel="critic / its Lipschitz bound / $W_1$")
    right.set_title("divided by its Lipschitz bound: a lower bound")
    for ax in (left, right):
        below(ax, columns=2)
    return figure


@entry(
    "003/algorithm-3",
    title="the clipped critic against exact W1",
    claims=(
        (
            "Appendix B.1",
            "the constraint can be relaxed such that w is required to satisfy ||f_w||_L <= K for some "
            "K > 0, and then the EM distance is K W(p_l^(t+Delta t), p_l^(t)).",
        ),
    ),
    minutes=(0.1, 0.1),
    verdict="corrected",
    setup="shifts and scalings of a Gaussian in 32 dimensions, 600 samples.",
    draw=draw,
)
def algorithm_3(dimension: int = 32, samples: int = 600) -> Outcome:
    """Compare the output of the clipped critic with W1, for shifts and scalings of a Gaussian.

    The paper claims that the critic returns K W1 with a fixed K. Decisive is how much the ratio of the two
    varies between cases; divided by its Lipschitz bound the critic is a lower bound.
    """
    z = jax.random.normal(jax.random.key(1), (samples, dimension))
    cases = {"shift 0.1": z + 0.1, "shift 0.3": z + 0.3, "shift 1": z + 1.0}
    cases |= {"scale 1.2": 1.2 * z, "scale 1.5": 1.5 * z, "scale 3": 3.0 * z}
    data: Arrays = {}
    for name, x in cases.items():
        out = critic_distance(x, z, key=jax.random.key(2))
        # both couplings are monotone, so this pairing is optimal
        w = transport.ics(z, x, max_exact=0).pieces["paired"]
        data[name] = {
            "w1": w,
            "ratio": float(out.value) / w,
            **{k: float(v) for k, v in out._asdict().items()},
        }
    ratios = np.array([d["ratio"] for d in data.values()])
    certified = max(d["lower_bound"] / d["w1"] for d in data.values())
    return Outcome(
        "003/algorithm-3",
        "K W is an upper bound on what the critic returns, not its value: the ratio to W varies from "
        f"{ratios.min():.2g} to "
        f"{ratios.max():.2g} between shifts and scalings; divided by its Lipschitz bound the critic "
        "is a (loose) lower bound",
        data,
        (
            Criterion("largest / smallest critic / W1", float(ratios.max() / ratios.min()), low=3.0),
            Criterion("certified lower bound / W1", float(certified), 0.0, 1.1),  # held-out half against all
        ),
    )
