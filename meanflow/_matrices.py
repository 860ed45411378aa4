"""Kinds of matrices: symmetric, positive (semi-)definite, Gram matrices. See ``meanflow._boundary`` for kinds.

A matrix that was computed is symmetric and semi-definite up to rounding only, so all checks here allow for that.
"""

from collections.abc import Callable

import jax
import numpy as np

from meanflow._boundary import array, bounds, concrete


def symmetric(name: str, array: np.ndarray) -> None:
    """Refuse matrices (..., n, n) that differ from their transpose by more than rounding."""
    gap = np.abs(array - np.swapaxes(array, -1, -2)).max(initial=0.0)
    if gap > _rounding(array) * np.abs(array).max(initial=0.0):
        raise ValueError(
            f"{name} must be symmetric, got entries that differ from their mirror image by {gap:.3g}"
        )


def _rounding(array: np.ndarray) -> float:
    """Return the relative error that sums of products may leave in the entries of a matrix."""
    inexact = np.issubdtype(array.dtype, np.floating)
    return 1e3 * float(np.finfo(array.dtype if inexact else float).eps)


def matrix(*, definite: bool = False, low: int = 1) -> Callable[[str, object], jax.Array]:
    """Make the kind of symmetric positive semi-definite matrices (n, n), such as covariances and Gram matrices.

    Args:
        definite: whether the matrix must be positive definite.
        low: least n.
    """
    read = array((None, None), least=low, squares=True)

    def check(name: str, value: object) -> jax.Array:
        converted = read(name, value)
        _check_square(name, converted.shape)
        known = concrete(converted)
        if known is None:
            return converted
        symmetric(name, known)
        # a Gram matrix of few features has eigenvalues 0, which come out as rounding of either sign
        least, most = np.linalg.eigvalsh(known)[[0, -1]]
        rounding = _rounding(known) * len(known) * max(abs(least), abs(most))
        if least < -rounding or (definite and least <= 0):
            wanted = "positive definite" if definite else "positive semi-definite"
            raise ValueError(f"{name} must be {wanted}, got eigenvalues from {least:.3g} to {most:.3g}")
        return converted

    return check


def grams(low: int = 1) -> Callable[[str, object], jax.Array]:
    """Make the kind of Gram matrices (..., n, n) with n >= ``low``, of which there may be very many.

    Instead of eigenvalues it looks at pairs of samples: |g_ij|^2 <= g_ii g_jj.
    """
    read = array(rank=2, squares=True)

    def check(name: str, value: object) -> jax.Array:
        converted = read(name, value)
        _check_square(name, converted.shape)
        if converted.shape[-1] < low:
            raise ValueError(f"{name} must describe at least {low} samples, got shape {converted.shape}")
        _check_pairs(name, concrete(converted))
        return converted

    return check


def kernel(name: str, value: object) -> jax.Array:
    """Accept a kernel K (n, n) at n samples, or (n, n, k, k) between k outputs: a Gram matrix, judged by pairs."""
    converted = array((None, None), (None,) * 4, squares=True)(name, value)
    size = converted.shape
    if size[0] != size[1] or size[2:3] != size[3:]:
        raise ValueError(f"{name} must be a square matrix (n, n), or (n, n, k, k), got shape {size}")
    known = concrete(converted)
    # a pair of samples with outputs is a pair of rows of one large matrix
    if known is not None and known.ndim == 4:
        known = known.transpose(0, 2, 1, 3).reshape(size[0] * size[2], -1)
    _check_pairs(name, known)
    return converted


def _check_pairs(name: str, known: np.ndarray | None) -> None:
    """Refuse matrices (..., n, n) that are not symmetric, or have |g_ij|^2 > g_ii g_jj for some pair."""
    if known is None or known.size == 0:
        return
    symmetric(name, known)
    square = np.diagonal(known, axis1=-2, axis2=-1)
    bounds(f"the diagonal of {name}", square, low=0.0)
    # roots first: the product of two entries could overflow
    most = np.sqrt(square[..., :, None]) * np.sqrt(square[..., None, :])
    if np.any(np.abs(known) > most + _rounding(known) * most.max(axis=(-1, -2), keepdims=True)):
        raise ValueError(f"{name} must be a Gram matrix, got |g_ij|^2 > g_ii g_jj for some pair")


def _check_square(name: str, given: tuple[int, ...]) -> None:
    if given[-1] != given[-2]:
        raise ValueError(f"{name} must be a square matrix, got shape {given}")
