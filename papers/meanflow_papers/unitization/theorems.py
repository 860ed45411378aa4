"""Theorems 1 to 3.3: bounds on the Wasserstein distance between a layer's outputs at two times."""

import jax.numpy as jnp
import numpy as np

from meanflow_papers.entry import entry
from meanflow_papers.outcome import Criterion, Outcome
from meanflow_papers.unitization import bounds


@entry(
    "003/theorems",
    title="theorems 1 to 3.3 at the points that decide them",
    minutes=(0.2, 0.2),
    verdict="corrected",
    setup="Diracs, Gaussian samples and antipodes, both sides of each inequality.",
)
def theorems() -> Outcome:
    """Evaluate both sides of Theorems 1 to 3.3 at the points that decide them.

    The paper claims that Theorem 1 bounds W1 by moments and that Theorem 3.3 bounds trained unitization by
    2 / min alpha. We take Diracs, Gaussian samples and antipodes.

    Decisive is the distance over the printed and over the corrected bound: Theorem 3.3 holds for the form
    (9) and fails without limit for (10), which the paper runs.
    """
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
