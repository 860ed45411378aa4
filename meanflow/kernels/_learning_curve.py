"""Learning curves of kernel regression, predicted from eigenvalues and the coefficients of the target.

Let K(x, x') = sum_i lam_i phi_i(x) phi_i(x') with functions phi_i that are orthonormal under the law of the inputs, and
f*(x) = sum_i v_i phi_i(x) the target. Regression with ridge delta on n independent samples,
f = K(., x) (K(x, x) + delta I)^-1 y, behaves as if it shrank each coefficient by a fixed factor, the learnability

    L_i = lam_i / (lam_i + kappa),     sum_i L_i + delta / kappa = n,

where kappa is the effective regularization. With noise of variance sigma^2 in the labels

    E_test  = n / (n - sum_i L_i^2) (sum_i (1 - L_i)^2 v_i^2 + sigma^2) - sigma^2
    E_train = (1 - sum_i L_i / n)^2 (E_test + sigma^2)

(Simon, Dickens, Karkada and DeWeese 2023). This is exact for Gaussian features in the limit of many modes and samples.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Real

from meanflow import _boundary
from meanflow._boundary import Rate, array, checked, either
from meanflow._matrices import kernel as kernel_kind
from meanflow._reuse import compiled
from meanflow.kernels import _spectral as spectral

HALVINGS = 80  # of an interval of this length in log kappa: exact to rounding
BELOW = (
    80.0  # kappa is sought down to exp(-80) of its largest value; where it is smaller still it counts as 0
)


class LearningCurve(NamedTuple):
    """What kernel regression does with n samples, for each n that was asked for.

    Attributes:
        test: mean squared distance to the target without noise, summed over outputs, of the shape of n.
        train: mean squared distance to the (noisy) labels of the samples, of the shape of n.
        learnability: L_i, the share of each mode of the target that is learned, n.shape + (p,).
        regularization: kappa, of the shape of n; 0 where more samples than modes determine everything.
        overfitting: n / (n - sum_i L_i^2), by which finite samples multiply the error, of the shape of n.
    """

    test: Float[Array, "..."]
    train: Float[Array, "..."]
    learnability: Float[Array, "... p"]
    regularization: Float[Array, "..."]
    overfitting: Float[Array, "..."]


@checked
def learning_curve(
    kernel: Annotated[Float[ArrayLike, "N *N"], either(array((None,), low=0), kernel_kind)],
    target: Float[ArrayLike, "N *k"],
    samples: Annotated[Real[ArrayLike, "..."], array(above=0)],
    *,
    ridge: Rate = 0.0,
    noise: Rate = 0.0,
    weights: Annotated[Float[ArrayLike, " N"], array((None,), low=0)] | None = None,
) -> LearningCurve:
    """Predict test and train error of kernel regression with n samples, before any of them is drawn.

    Args:
        kernel: the kernel on N points that stand for the law of the inputs, (N, N), as ``empirical_ntk``
            or ``infinite_width`` return it for one output; or for a known law its eigenvalues (p,).
        target: the target on these points, (N,) or (N, k); for a known law its coefficients in the orthonormal
            eigenfunctions, (p,) or (p, k).
        samples: n, one number or an array of any shape; need not be whole.
        ridge: delta, added to the diagonal of the kernel of the samples.
        noise: variance of the noise in the labels, for each output.
        weights: probabilities of the points, (N,), 1/N by default; of a known law there are none.

    Returns:
        A ``LearningCurve``, differentiable in all numbers. Errors are mean squares, twice the loss. Cost: one
        eigendecomposition, O(N^3), and O(N) for each n.

    >>> curve = learning_curve([1.0, 1.0, 0.1, 0.1], [1.0, 0.0, 1.0, 0.0], [1.0, 3.0], ridge=0.1)
    >>> print(curve.test.round(3), curve.regularization.round(3))
    [1.849 0.996] [1.481 0.175]
    """
    given = jnp.asarray(kernel)
    values = jnp.asarray(target)
    if values.ndim not in (1, 2) or values.shape[0] != given.shape[0]:
        raise ValueError(
            f"target must have shape ({given.shape[0]},) or ({given.shape[0]}, k), like the kernel, got {values.shape}"
        )
    share = None
    if weights is not None:
        if given.ndim == 1:
            raise ValueError("weights must be None where eigenvalues of a known law are given, got an array")
        share = jnp.asarray(weights)
        _boundary.shape("weights", share, (given.shape[0],))
        share = share / jnp.sum(share)
    dtype = jnp.result_type(given, values)
    return _curve(
        given.astype(dtype),
        values.astype(dtype).reshape(values.shape[0], -1),
        jnp.asarray(samples, dtype),
        jnp.asarray(ridge, dtype),
        jnp.asarray(noise, dtype),
        None if share is None else share.astype(dtype),
    )


@compiled
def _curve(
    kernel: Array, target: Array, samples: Array, ridge: Array, noise: Array, weights: Array | None
) -> LearningCurve:
    if kernel.ndim == 2:
        points = kernel.shape[0]
        root = jnp.full(points, points**-0.5, kernel.dtype) if weights is None else jnp.sqrt(weights)
        # functions on the points in coordinates in which their inner product is the plain one
        kernel, modes = spectral.spectrum(root[:, None] * kernel * root[None, :])
        target = modes.T @ (root[:, None] * target)
    shape, n = samples.shape, samples.reshape(-1)
    kappa = _regularization(kernel, n, ridge)
    # modes without an eigenvalue are never learned, also where kappa is 0
    learned = kernel[None, :] / (kernel[None, :] + jnp.where(kernel[None, :] > 0, kappa[:, None], 1.0))
    overfitting = n / (n - jnp.sum(learned**2, axis=1))
    missed = (1 - learned) ** 2 @ jnp.sum(target**2, axis=1)
    noise = noise * target.shape[1]
    noisy = overfitting * (missed + noise)
    train = (1 - jnp.sum(learned, axis=1) / n) ** 2 * noisy
    found = LearningCurve(noisy - noise, train, learned, kappa, overfitting)
    return jax.tree.map(lambda u: u.reshape(shape + u.shape[1:]), found)


def _regularization(eigenvalues: Array, samples: Array, ridge: Array) -> Array:
    """Return kappa >= 0 with sum_i lam_i / (lam_i + kappa) + ridge / kappa = n, of the shape of ``samples`` (s,)."""

    def excess(log_kappa: Array, lam: Array, n: Array, delta: Array) -> tuple[Array, Array]:
        """Return the left side minus n, which falls in log kappa, and its slope."""
        kappa = jnp.exp(log_kappa)
        share = lam[None, :] / (lam[None, :] + kappa[:, None])
        rest = delta / kappa
        return jnp.sum(share, 1) + rest - n, -jnp.sum(share * (1 - share), 1) - rest

    top = jnp.log((jnp.sum(eigenvalues) + ridge) / samples)  # the left side is below n there
    fixed = jax.lax.stop_gradient((eigenvalues, samples, ridge))
    high = jax.lax.stop_gradient(top)
    low = high - BELOW

    def halve(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = (low + high) / 2
        above = excess(middle, *fixed)[0] > 0
        return jnp.where(above, middle, low), jnp.where(above, high, middle)

    start, _ = jax.lax.fori_loop(0, HALVINGS, halve, (low, high))
    # fewer modes than samples and no ridge: the left side never reaches n
    found = start > low
    start = jnp.where(found, start, 0.0)
    # Newton's steps change nothing but the derivatives: the first gives first ones, both give second ones
    for _ in range(2):
        value, slope = excess(start, eigenvalues, samples, ridge)
        start = start - value / jnp.where(found, slope, 1.0)
    return jnp.where(found, jnp.exp(jnp.where(found, start, 0.0)), 0.0)
