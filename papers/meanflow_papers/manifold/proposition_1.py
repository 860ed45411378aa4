"""Proposition 1: G is an inner product on the tangent spaces of the manifold."""

import numpy as np
from matplotlib.figure import Figure

from meanflow_papers.entry import entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.style import COLORS, PALE, REFERENCE, below, panels


def printed_metric(b: np.ndarray, sigma: np.ndarray) -> np.ndarray:
    """Return G_b (d, d) as printed: 1/|b|^2 (I - S b b' S/(b' S^2 b)) [(I - b b' S)(I - S b b')]^+."""
    u = sigma @ b
    left = np.eye(len(b)) - np.outer(b, u)
    tangent = np.eye(len(b)) - np.outer(u, u) / (u @ u)
    return tangent @ np.linalg.pinv(left @ left.T, rcond=1e-10) / (b @ b)


def tangent_basis(b: np.ndarray, sigma: np.ndarray) -> np.ndarray:
    """Return an orthonormal basis (d, d - 1) of the vectors orthogonal to S b."""
    return np.linalg.svd((sigma @ b)[None])[2][1:].T


def draw(data: Arrays) -> Figure:
    """The ellipse with points at equal distances in G, and the eigenvalues of G on tangent spaces by condition "
    "number."""
    figure, (left, right) = panels(1, 2, width=4.6, height=4.2)
    turn = np.linspace(0, 2 * np.pi, 400)
    ellipse = lambda t: np.stack(
        [
            np.cos(t) / np.sqrt(5 * np.cos(t) ** 2 + np.sin(t) ** 2),
            np.sin(t) / np.sqrt(5 * np.cos(t) ** 2 + np.sin(t) ** 2),
        ]
    )
    left.plot(*ellipse(turn), color=PALE, label=r"$\Omega$, $\Sigma = \mathrm{diag}(5, 1)$")
    marks = np.asarray(data["equal steps"])
    left.plot(*marks, "o", color=COLORS[0], ms=4, label="equal distances in $G$ (by integration)")
    for x, y in marks.T:
        left.plot(
            [0, 1.15 * x / np.hypot(x, y)], [0, 1.15 * y / np.hypot(x, y)], color=PALE, lw=0.4, zorder=0
        )
    left.plot([], [], color=PALE, lw=0.4, label="rays at equal angles through them")
    left.set(aspect="equal", xlabel="$b_1$", ylabel="$b_2$", title="lengths in $G$ are angles")
    condition, low, high = (np.asarray(data[name]) for name in ("condition", "least", "largest"))
    right.plot(
        condition,
        high / low,
        ".",
        color=COLORS[0],
        ms=3,
        alpha=0.6,
        label="largest / least eigenvalue, tangent",
    )
    k = np.geomspace(1, condition.max(), 100)
    right.plot(k, (k + 1) ** 2 / (4 * k), color=COLORS[1], label=r"$(\kappa + 1)^2/(4\kappa)$")
    right.axhline(1, color=REFERENCE, lw=0.8)
    right.set(xscale="log", yscale="log", xlabel=r"condition number $\kappa$ of $\Sigma$", ylabel="ratio")
    right.set_title("positive definite on every tangent space")
    for ax in (left, right):
        below(ax, columns=1)
    return figure


@entry(
    "001/proposition-1",
    title="the metric is an inner product on tangent spaces, and its lengths are angles",
    claims=(("Proposition 1", "Then, h is an inner product on T_(a,b) M."),),
    minutes=(0.02, 0.02),
    setup="3000 random points and covariances in 2 to 8 dimensions, condition numbers up to 1e4.",
    draw=draw,
)
def proposition_1(points: int = 500) -> Outcome:
    """Compute G as printed, by its pseudo-inverse, at random points, and its values on a basis of the tangent space.

    The paper claims that h(alpha, beta) = alpha' G beta is an inner product on tangent spaces. Decisive are that it
    is symmetric there and its least eigenvalue, in units of 1/|b|^2 positive; and, for what it is worth, that the
    length of a piece of Omega is the angle that it covers.
    """
    rng = np.random.default_rng(0)
    condition, least, largest, skew = [], [], [], 0.0
    for d in (2, 3, 4, 5, 6, 8):
        for _ in range(points):
            turn = np.linalg.qr(rng.standard_normal((d, d)))[0]
            spectrum = 10 ** rng.uniform(-2, 2, d)
            sigma = (turn * spectrum) @ turn.T
            b = rng.standard_normal(d)
            b = b / np.sqrt(b @ sigma @ b)
            basis = tangent_basis(b, sigma)
            inner = basis.T @ printed_metric(b, sigma) @ basis * (b @ b)
            skew = max(skew, float(np.abs(inner - inner.T).max() / np.abs(inner).max()))
            values = np.linalg.eigvalsh((inner + inner.T) / 2)
            condition.append(np.max(spectrum) / np.min(spectrum))
            least.append(values[0])
            largest.append(values[-1])
    # the length element of the ellipse, integrated, against the angle
    sigma = np.diag([5.0, 1.0])
    t = np.linspace(0, 2 * np.pi, 20_001)
    curve = np.stack([np.cos(t), np.sin(t)]) / np.sqrt(5 * np.cos(t) ** 2 + np.sin(t) ** 2)
    middle, step = (curve[:, 1:] + curve[:, :-1]) / 2, np.diff(curve, axis=1)
    length = np.array(
        [np.sqrt(s @ printed_metric(m, sigma) @ s) for m, s in zip(middle.T[::10], step.T[::10], strict=True)]
    )
    angle = np.diff(t)[::10]
    whole = np.concatenate([[0.0], np.cumsum(np.repeat(length, 10))])
    marks = np.stack([np.interp(np.linspace(0, whole[-1], 25)[:-1], whole, row) for row in curve])
    spread = np.array(largest) / np.array(least)
    bound = (np.array(condition) + 1) ** 2 / (4 * np.array(condition))
    return Outcome(
        "001/proposition-1",
        f"true: at {len(least)} points the form is symmetric to {skew:.0e} and positive definite. Its lengths are "
        "angles: "
        f"(Omega, G) is the round sphere, to {np.max(np.abs(length / angle - 1)):.0e} along an ellipse",
        {
            "condition": np.array(condition),
            "least": np.array(least),
            "largest": np.array(largest),
            "equal steps": marks,
        },
        (
            Criterion("largest asymmetry on tangent vectors", skew, high=1e-8),
            Criterion("least eigenvalue on a tangent space times |b|^2", float(np.min(least)), low=1e-6),
            Criterion(
                "largest eigenvalue ratio over (k+1)^2/(4k)",
                float(np.max(spread / np.maximum(bound, 1))),
                high=1 + 1e-6,
            ),
            Criterion(
                "ellipse: largest |length / angle - 1|", float(np.max(np.abs(length / angle - 1))), high=1e-6
            ),
        ),
    )
