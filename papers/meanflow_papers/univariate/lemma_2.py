"""Lemma 2: which samples attract or repel neurons; the printed inequality beside the two that are needed."""

import numpy as np
from matplotlib.figure import Figure

from meanflow_papers.entry import entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.style import COLORS, PALE, REFERENCE, below, panels


def rays(x: np.ndarray) -> np.ndarray:
    """Return the angles (draws, 2, s) of the two rays of each sample: those that face right, then left."""
    right = -np.arctan(x)
    return np.stack([right, right + np.pi], axis=1)


def turning(theta: np.ndarray, x: np.ndarray, rho: np.ndarray) -> np.ndarray:
    """Return <G, t>, the force across a neuron of each direction theta (draws, k); theta' = -r <G, t>."""
    u, v = np.cos(theta)[..., None], np.sin(theta)[..., None]
    sees = u * x[:, None] + v > 0
    return np.sum(sees * rho[:, None] * (u - v * x[:, None]), axis=-1)


def draw(data: Arrays) -> Figure:
    """How rays are judged by the field, against the sum of Lemma 2; the force around the circle for one data set."""
    figure, (left, right) = panels(1, 2, width=5.4, height=4.2)
    sums, true = np.asarray(data["sums"]).ravel(), np.asarray(data["true"]).ravel()
    bins = np.linspace(-4, 4, 65).tolist()
    parts = [np.clip(sums[true], -4, 4), np.clip(sums[~true], -4, 4)]
    names = ["attracts one sign of $r$ and repels the other", "does neither (at 0: no samples on that side)"]
    left.hist(parts, bins, stacked=True, color=[COLORS[0], PALE], label=names)
    top = left.get_ylim()[1]
    for k, (low, high, label) in enumerate(((-1, 4, "printed (15)"), (-1, 0, "both inequalities"))):
        left.annotate(
            "",
            (low, (1.02 + 0.08 * k) * top),
            (high, (1.02 + 0.08 * k) * top),
            arrowprops={"arrowstyle": "<->"},
        )
        left.text(high + 0.1 - 2.2 * (k == 0), (1.03 + 0.08 * k) * top, label, fontsize=8, va="bottom")
    left.set_ylim(0, 1.22 * top)
    left.set(
        xlabel="sum of Lemma 2 over the samples on one side, divided by " + r"$\rho_k^2 |\tilde x_k|^2$",
        ylabel="rays (clipped at $\\pm 4$)",
        title="all rays, judged by the field beside them",
    )
    below(left, columns=1)
    x, rho = np.asarray(data["x"])[:1], np.asarray(data["rho"])[:1]
    theta = np.linspace(-np.pi / 2, 3 * np.pi / 2, 2001)
    right.plot(theta, turning(theta[None], x, rho)[0], ",", color=REFERENCE)
    right.axhline(0.0, color=PALE, lw=0.8)
    kinds = {
        "attracts or repels": (COLORS[0], "-"),
        "named by (15) alone": (COLORS[1], "--"),
        "neither": (PALE, ":"),
    }
    angles, printed, real = (np.ravel(np.asarray(data[name])[0]) for name in ("rays", "printed", "true"))
    for angle, named, is_true in zip(angles, printed, real, strict=True):
        color, dash = list(kinds.values())[0 if is_true else 1 if named else 2]
        right.axvline(angle, color=color, ls=dash, lw=1.1)
    for name, (color, dash) in kinds.items():
        right.plot(
            [], [], color=color, ls=dash, label=f"ray that {name}" if "attracts" in name else f"ray: {name}"
        )
    right.plot([], [], ".", color=REFERENCE, label=r"force across, $\langle G, t \rangle$")
    right.set(xlabel=r"direction $\theta$", title="one of the data sets: a sign changes at the true ones")
    below(right, columns=2)
    return figure


@entry(
    "004/lemma-2",
    title="which rays attract or repel neurons: one inequality, or two",
    claims=(
        (
            "Lemma 2, equation (15)",
            "A data point x_k is an attractor/repulsor if and only if sum_{i=1}^{k-1} rho_i rho_k (tilde x_i, "
            "tilde x_k) > "
            "-rho_k^2 ||tilde x_k||^2, or sum_{i=k+1}^s rho_i rho_k (tilde x_i, tilde x_k) > -rho_k^2 ||tilde x_k||^2.",
        ),
    ),
    minutes=(0.02, 0.02),
    verdict="corrected",
    setup="4000 random sets of six samples with normal residuals, 48000 rays.",
    draw=draw,
)
def lemma_2(draws: int = 4000, samples: int = 6) -> Outcome:
    """Judge the two rays of each sample by the field just beside them, and by the inequalities.

    A ray attracts one sign of r and repels the other where the force across it changes its sign. The paper claims
    that this is so if and only if (15) holds, a lower bound for a sum over the samples on one side. An upper bound,
    that the sum be negative, is needed too. Decisive are the rays where the field and both inequalities disagree
    (none), and the share of the rays named by (15) alone at which the force changes no sign, more than half.
    """
    rng = np.random.default_rng(0)
    x = np.sort(rng.uniform(-1.5, 1.5, (draws, samples)), axis=1)
    rho = rng.standard_normal((draws, samples))
    angles = rays(x)
    beside = [turning(angles.reshape(draws, -1) + shift, x, rho) for shift in (-1e-7, 1e-7)]
    true = (beside[0] * beside[1] < 0).reshape(draws, 2, samples)
    gram = rho[:, :, None] * rho[:, None] * (x[:, :, None] * x[:, None] + 1)
    own = np.einsum("nkk->nk", gram)
    # the ray that faces right sees the samples above its own, the other one those below
    sums = np.stack([np.tril(gram, -1).sum(1), np.triu(gram, 1).sum(1)], axis=1) / own[:, None]
    printed, ours = sums > -1, (sums > -1) & (sums < 0)
    wrong = float(np.sum(printed & ~true) / np.sum(printed))
    points = float(np.mean(~true.any(1)[printed.any(1)]))
    return Outcome(
        "004/lemma-2",
        "two inequalities are needed, -rho_k^2 |x~_k|^2 < sum < 0, and they agree with the field at every ray. Of "
        "the rays "
        f"that satisfy the printed one {wrong:.0%} attract and repel nothing ({points:.0%} of the data points that it "
        "names); it misses none",
        {"x": x, "rho": rho, "rays": angles, "sums": sums, "true": true, "printed": printed},
        (
            Criterion("rays where field and both inequalities disagree", float(np.sum(ours != true)), 0, 0),
            Criterion("rays that attract or repel and violate (15)", float(np.sum(true & ~printed)), 0, 0),
            Criterion("share of the rays of (15) that do neither", wrong, low=0.5),
        ),
    )
