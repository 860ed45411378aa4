"""Theorems 13 and 14: the invariant representation and one layer from it, corrected.

In Definition 12, |x_1| = 1, all other samples equal nu, |nu| = 1/(n-1) and x_1 . nu = 0. A Gaussian layer with width
times variance = 2 alpha reproduces the expected *Gram matrix* of this batch. (Theorem 13 says the expected batch, but
that one has parallel columns; and the norms of Theorem 14 are expected *squared* norms.)

Theorem 14 as printed is vacuous: Definition 12 forces R^2 = |x_1 - nu|^2 = 1 + 1/(n-1)^2 < (n/(n-1))^2. Without the
hypothesis of invariance it holds for one layer, because R > n/(n-1) makes alpha < 1; after that layer, R is the one of
Definition 12. There alpha = n^2/(n^2-2n+2) > 1, and small distances inside the cluster *grow* by that factor: the
representation is invariant but repels.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from meanflow import depth
from meanflow_papers.entry import entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.style import COLORS, PALE, below, panels


def invariant_representation(n: int, features: int = 2) -> jax.Array:
    """Return the batch (n, features) of Definition 12, whose expected Gram matrix recenter + ReLU reproduces.

    >>> invariant_representation(3).tolist()
    [[1.0, 0.0], [0.0, 0.5], [0.0, 0.5]]
    """
    x = jnp.zeros((n, features))
    return x.at[0, 0].set(1.0).at[1:, 1].set(1.0 / (n - 1))


class OneLayer(NamedTuple):
    """Exact expectations after one layer relu(recenter(x W)), where W has variance 2 alpha / width.

    Below, nu is the mean of all samples but the first, and nu^ is the image of nu under the layer (not the mean of the
    images). The matrices, of shape (n+1, n+1), list the n samples and then nu.

    Attributes:
        alpha: the gain that was used.
        radius: R = |x_1 - nu| before the layer.
        odd_square: E |x_1'|^2 = alpha ((n-1)/n)^2 R^2.
        center_square: E |nu^|^2 = alpha R^2 / n^2.
        gram: expected Gram matrix after the layer.
        distances: squared distances before the layer.
        expected_distances: expected squared distances after the layer.
    """

    alpha: jax.Array
    radius: jax.Array
    odd_square: jax.Array
    center_square: jax.Array
    gram: jax.Array
    distances: jax.Array
    expected_distances: jax.Array


def _distances(gram: jax.Array) -> jax.Array:
    """Return the squared distances between samples, from their Gram matrix."""
    square = jnp.diagonal(gram)
    return square[:, None] + square[None, :] - 2 * gram


def one_layer(x: jax.Array, alpha: float | None = None) -> OneLayer:
    """Return what one layer of recenter + ReLU does to a batch on average, in closed form (Theorems 13 and 14).

    The distances of pairs obey E |x_i' - x_j'|^2 = alpha (|x_i - x_j|^2 - 2 |y_i| |y_j| g(theta)), where y are the
    recentered samples, theta is their angle and g = (sin theta - theta cos theta) / pi >= 0. So a layer certainly
    contracts only if alpha <= 1, and the distances of close pairs grow by alpha.

    Args:
        x: batch (n, k); sample 0 is the odd one.
        alpha: gain. The default is n^2 / ((n-1)^2 R^2) of Theorem 14, which makes E |x_1'|^2 = 1. At the scale of
            Definition 12 it is the alpha of Theorem 13.
    """
    n = x.shape[0]
    center = jnp.mean(x[1:], axis=0, keepdims=True)
    radius = jnp.sqrt(jnp.sum(jnp.square(x[:1] - center)))
    gain = n**2 / ((n - 1) ** 2 * radius**2) if alpha is None else jnp.asarray(alpha, x.dtype)
    extended = jnp.concatenate([x, center])
    # nu goes through the layer but does not count in the mean, so the batch is recentered here
    shifted = extended - jnp.mean(x, axis=0, keepdims=True)
    gram = gain * depth.expected_gram(shifted @ shifted.T, 1, depth.Layer(recenter=False))[1]
    return OneLayer(
        alpha=gain,
        radius=radius,
        odd_square=gain * ((n - 1) / n) ** 2 * radius**2,
        center_square=gain * radius**2 / n**2,
        gram=gram,
        distances=_distances(extended @ extended.T),
        expected_distances=_distances(gram),
    )


def draw(data: Arrays) -> Figure:
    """By which factor close pairs of the cluster grow in one layer, by the distance R; the Gram matrix of one layer."""
    figure, (left, right) = panels(1, 2, width=5.2, height=4.0)
    n = int(data["n"])
    radius, low, high = (np.asarray(data[k]) for k in ("radii", "least factor", "largest factor"))
    left.fill_between(radius, low, high, color=COLORS[0], alpha=0.3, lw=0)
    left.plot(radius, high, color=COLORS[0], label="pairs of the cluster, exact (range)")
    left.plot(radius, (n / (n - 1)) ** 2 / radius**2, "k--", lw=0.9, label=r"$\alpha = (n/(n-1))^2/R^2$")
    left.axhline(1.0, color=PALE, lw=1)
    left.axvline(
        float(data["invariant radius"]), color=COLORS[1], lw=1, label="$R$ of the invariant representation"
    )
    left.axvline(n / (n - 1), color=COLORS[2], lw=1, ls=":", label="$R = n/(n-1)$, asked for by Theorem 14")
    left.plot(
        [float(data["invariant radius"])],
        [n**2 / (n**2 - 2 * n + 2)],
        "o",
        color=COLORS[1],
        label=f"$n^2/(n^2-2n+2)$ = {n**2 / (n**2 - 2 * n + 2):.4f}",
    )
    left.set(
        xlabel="distance $R$ of the odd point to the cluster",
        ylabel="squared distance\nof close pairs, after / before",
    )
    left.set_title(f"one layer, $n = {n}$: pairs grow left of $n/(n-1)$")
    below(left, columns=1)
    exact, measured = (np.asarray(data[k]) for k in ("gram", "measured_gram"))
    places = np.arange(n)
    right.plot(places, np.diag(exact), "_", ms=16, color=COLORS[0], label="squared norm, invariant")
    right.plot(
        places, np.diag(measured), "o", mfc="none", color=COLORS[0], label="after a layer, 100000 random rows"
    )
    right.plot(
        places[1:], exact[0, 1:], "_", ms=16, color=COLORS[1], label="product with the odd point, invariant"
    )
    right.plot(places[1:], measured[0, 1:], "s", mfc="none", color=COLORS[1], label="after a layer")
    right.set_yscale("symlog", linthresh=1e-3)
    right.set(xlabel="sample (0 is the odd point)", ylabel="entries of the Gram matrix")
    right.set_title("Theorem 13 for Gram matrices")
    below(right, columns=1)
    return figure


@entry(
    "002/theorems-13-14",
    title="the invariant representation and one layer from it",
    claims=(
        ("Theorem 13", "E[X^(t+1)] is also an invariant representation under RC+ReLU"),
        (
            "before Theorem 14",
            "item 4 shows that the cluster contracts, while keeping the scale of the representation "
            "of x_1 the same.",
        ),
    ),
    minutes=(0.13, 0.13),
    verdict="corrected",
    setup="10 points in 4 dimensions: closed forms and 100000 random rows.",
    draw=draw,
)
def theorems_13_14(n: int = 10, rows: int = 100_000) -> Outcome:
    """Check the invariant representation in closed form and by Monte Carlo.

    The paper claims that the expected batch after a layer is again invariant and that the cluster
    contracts. Decisive are the expected Gram matrix (not the expected batch), its estimate from random
    rows, and by which factor close pairs grow or shrink in one layer.
    """
    x = invariant_representation(n, 4)
    gram = x @ x.T
    spread = jax.random.normal(jax.random.key(14), (n, 4)).at[0].set(0.0)

    def layer(key: jax.Array, x: jax.Array, alpha: jax.Array) -> jax.Array:
        z = x @ (jax.random.normal(key, (4, rows)) * jnp.sqrt(2 * alpha / rows))
        y = jax.nn.relu(z - z.mean(0, keepdims=True))
        return y @ y.T

    exact = one_layer(x)
    measured = layer(jax.random.key(13), x, exact.alpha)
    # pairs inside the cluster at a distance so small that the growth factor is its limit, alpha
    off = spread / jnp.linalg.norm(spread, axis=1).at[0].set(1.0)[:, None]
    near = one_layer(x + 1e-6 * off)
    i, j = jnp.triu_indices(n - 1, 1)
    pairs = lambda d: d[1:n, 1:n][i, j]
    growth = jnp.max(pairs(near.expected_distances) / pairs(near.distances))

    def factors(scale: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Distance of a scaled odd point, and the least and largest factor of close pairs in one layer."""
        moved = one_layer(x.at[0].multiply(scale) + 1e-6 * off)
        ratio = pairs(moved.expected_distances) / pairs(moved.distances)
        return moved.radius, jnp.min(ratio), jnp.max(ratio)

    radii, least, largest = jax.vmap(factors)(jnp.linspace(0.7, 1.8, 45))
    wide = one_layer(x.at[0].multiply(1.5) + 0.2 / n**2 * off)
    shrink = pairs(wide.expected_distances) / pairs(wide.distances)
    return Outcome(
        name="002/theorems-13-14",
        finding="The expected Gram matrix is invariant; the cluster contracts in one layer with R > n/(n-1); "
        f"at the invariant scale close pairs grow by {n**2 / (n**2 - 2 * n + 2):.4f}.",
        data={
            "n": n,
            "exact": exact._asdict(),
            "gram": gram,
            "measured_gram": measured,
            "shrink": shrink,
            "radius": wide.radius,
            "invariant radius": exact.radius,
            "radii": radii,
            "least factor": least,
            "largest factor": largest,
        },
        criteria=(
            Criterion(
                "defect of the expected Gram", float(jnp.max(jnp.abs(exact.gram[:n, :n] - gram))), 0, 1e-12
            ),
            Criterion("Monte Carlo error", float(jnp.max(jnp.abs(measured - gram))), high=0.03),
            Criterion("odd . center, any weights", float(jnp.abs(measured[0, 1])), 0, 0),
            Criterion("growth / (n^2/(n^2-2n+2))", float(growth * (n**2 - 2 * n + 2) / n**2), 0.999, 1.001),
            Criterion("one layer, R > n/(n-1): largest factor", float(shrink.max()), high=1),
        ),
    )
