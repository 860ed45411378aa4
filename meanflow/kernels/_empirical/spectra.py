"""Spectra of kernels, from products alone: eigenvalues by Lanczos, moments by random directions.

Every function takes a symmetric matrix or a ``KernelOperator``, so that the spectrum of a kernel that does not fit in
memory can be computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, Key

from meanflow import _boundary
from meanflow._boundary import Count, PRNGKey, checked, count
from meanflow._matrices import grams
from meanflow._reuse import compiled
from meanflow.kernels._empirical.operator import KernelOperator

Kernel: TypeAlias = KernelOperator | Float[Array, "n n"]
Product: TypeAlias = Callable[[Float[Array, " n"]], Float[Array, " n"]]


def square_kernel(name: str, value: object) -> object:
    """Accept a kernel as a Gram matrix (n, n), or a ``KernelOperator``."""
    if isinstance(value, KernelOperator):
        return value
    _boundary.array((None, None))(name, value)
    return grams()(name, value)


def _product(kernel: Kernel) -> Product:
    return kernel.matvec() if isinstance(kernel, KernelOperator) else lambda v: kernel @ v


def _square(kernel: Kernel) -> tuple[int, np.dtype]:
    """Return size and dtype of a kernel, and refuse one that is not square."""
    if len(kernel.shape) != 2 or kernel.shape[0] != kernel.shape[1]:
        raise ValueError(f"kernel must be a square matrix or an operator, got shape {kernel.shape}")
    return kernel.shape[0], kernel.dtype


class Lanczos(NamedTuple):
    """The projection of a symmetric operator on a Krylov space, which is tridiagonal.

    Attributes:
        basis: orthonormal rows (steps, n).
        diagonal: of the projection, (steps,).
        off_diagonal: of the projection, (steps,). The last one is the norm of the residual, which bounds the error of
            the eigenvalues of the projection.
    """

    basis: Float[Array, "steps n"]
    diagonal: Float[Array, " steps"]
    off_diagonal: Float[Array, " steps"]

    def matrix(self) -> Float[Array, "steps steps"]:
        """Return the tridiagonal projection as a matrix."""
        side = self.off_diagonal[:-1]
        return jnp.diag(self.diagonal) + jnp.diag(side, 1) + jnp.diag(side, -1)


def lanczos(product: Product, start: Float[Array, " n"], steps: int, key: Key[Array, ""]) -> Lanczos:
    """Run the Lanczos iteration with full reorthogonalization (twice, which is enough).

    When the Krylov space is exhausted it goes on from a fresh random direction, so that repeated eigenvalues are found
    and ``steps = n`` gives the whole spectrum. Memory steps * n; time steps products + steps^2 n.

    Args:
        product: v -> K v for a symmetric K.
        start: first direction, not zero.
        steps: number of products, at most n.
        key: for the fresh directions.
    """
    n, dtype = start.shape[0], start.dtype
    tiny = 100 * float(jnp.finfo(dtype).eps)

    def orthogonal(v: Array, basis: Array) -> Array:
        # a second pass removes what rounding in the first one left along the basis
        for _ in range(2):
            v = v - basis.T @ (basis @ v)
        return v

    def step(j: Int[Array, ""], state: tuple[Array, ...]) -> tuple[Array, ...]:
        basis, diagonal, side, v, scale = state
        basis = basis.at[j].set(v)
        w = product(v)
        a = v @ w
        w = orthogonal(w, basis)
        b = jnp.linalg.norm(w)
        scale = jnp.maximum(scale, jnp.abs(a) + b)
        fresh = orthogonal(jax.random.normal(jax.random.fold_in(key, j), (n,), dtype), basis)
        broken = b <= tiny * scale  # what is left is rounding: the Krylov space is exhausted
        w = jnp.where(broken, fresh, w)
        following = w / jnp.maximum(jnp.linalg.norm(w), jnp.finfo(dtype).tiny)
        return basis, diagonal.at[j].set(a), side.at[j].set(jnp.where(broken, 0.0, b)), following, scale

    zeros = jnp.zeros(steps, dtype)
    state = (jnp.zeros((steps, n), dtype), zeros, zeros, start / jnp.linalg.norm(start), jnp.zeros((), dtype))
    basis, diagonal, side, _, _ = jax.lax.fori_loop(0, steps, step, state)
    return Lanczos(basis, diagonal, side)


class Eigenpairs(NamedTuple):
    """Leading eigenvalues with their vectors.

    Attributes:
        values: largest first, (k,).
        vectors: orthonormal columns, (n, k).
        residuals: |K u - value u|, which bounds the error of each value, (k,).
    """

    values: Float[Array, " k"]
    vectors: Float[Array, "n k"]
    residuals: Float[Array, " k"]


@compiled
def top_eigenpairs(kernel: Kernel, k: int, *, key: Key[Array, ""], steps: int | None = None) -> Eigenpairs:
    """Return the k largest eigenvalues and their eigenvectors by Lanczos, from products alone.

    Args:
        kernel: symmetric matrix (n, n) or ``KernelOperator``.
        k: how many.
        key: for the start vector.
        steps: products spent, default min(n, 2 k + 30); look at ``residuals`` to see whether they were
            enough.

    >>> import jax
    >>> pairs = top_eigenpairs(jnp.diag(jnp.array([3.0, 1.0, 2.0])), 2, key=jax.random.key(0))
    >>> [round(float(v), 4) for v in pairs.values]
    [3.0, 2.0]
    """
    n, dtype = _square(kernel)
    k = _boundary.whole("k", k, 1)
    if k > n:
        raise ValueError(f"k must be at most {n}, the size of the kernel, got {k}")
    count = min(n, 2 * k + 30) if steps is None else min(n, _boundary.whole("steps", steps, k))
    # eigenvalues of the projection approximate the outer ones of K, with error at most |last off-diagonal x last entry|
    run = lanczos(_product(kernel), jax.random.normal(key, (n,), dtype), count, jax.random.fold_in(key, 1))
    values, small = jnp.linalg.eigh(run.matrix())
    values, small = values[::-1][:k], small[:, ::-1][:, :k]
    return Eigenpairs(values, run.basis.T @ small, jnp.abs(run.off_diagonal[-1] * small[-1]))


class SpectralMoments(eqx.Module):
    """Mean and mean square of all eigenvalues, estimated, with standard errors.

    Attributes:
        mean: Tr K / n.
        mean_square: Tr K^2 / n.
        mean_error: standard error of the mean.
        mean_square_error: standard error of the mean square.
        variance_error: standard error of the variance. It is far below the sum of the other two, because mean and mean
            square err together: both come from the same random directions.
    """

    mean: Float[Array, ""]
    mean_square: Float[Array, ""]
    mean_error: Float[Array, ""]
    mean_square_error: Float[Array, ""]
    variance_error: Float[Array, ""]

    @property
    def variance(self) -> Float[Array, ""]:
        """Variance of the eigenvalues, mean_square - mean^2."""
        return self.mean_square - self.mean**2


@compiled
def spectral_moments(
    kernel: Kernel, *, key: Key[Array, ""], probes: int = 16, deflate: Float[Array, "n k"] | None = None
) -> SpectralMoments:
    """Estimate the traces of K and K^2 by random directions, exactly on a few leading directions Q.

    Tr A = Tr Q'AQ + E g'(I - QQ') A (I - QQ')g with random signs g: removing the leading eigenvectors removes
    the variance they cause, which for a plain ReLU network is nearly all of it.

    Args:
        kernel: symmetric matrix (n, n) or ``KernelOperator``.
        key: for the signs.
        probes: number of random directions, at least 2 for an error.
        deflate: Q, k orthonormal columns (n, k), for instance ``top_eigenpairs(...).vectors``; default none.
            Costs probes + k products.
    """
    n, dtype = _square(kernel)
    product = _product(kernel)
    basis = jnp.zeros((n, 0), dtype) if deflate is None else deflate
    # Hutchinson: E g'Ag = Tr A for random signs g, of which the share of Q is removed and added exactly
    signs = jax.random.rademacher(key, (probes, n), dtype)
    free = signs - (signs @ basis) @ basis.T
    # one product at a time: a batch of products would multiply the activations' memory
    images = jax.lax.map(product, free)
    known = jax.lax.map(product, basis.T)
    # g'Kg and |Kg|^2 = g'K^2g of each direction
    one = jnp.sum(free * images, axis=1)
    two = jnp.sum(images**2, axis=1)
    mean = (jnp.sum(basis.T * known) + jnp.mean(one)) / n
    mean_square = (jnp.sum(known**2) + jnp.mean(two)) / n
    error = lambda a: jnp.std(a, ddof=1) / math.sqrt(probes) / n
    # the variance changes by d(mean_square) - 2 mean d(mean)
    return SpectralMoments(mean, mean_square, error(one), error(two), error(two - 2 * mean * one))


class Spectrum(SpectralMoments):
    """Summary of a kernel's spectrum: moments of all eigenvalues, whose standard errors are 0 for a matrix, and these.

    Attributes:
        values: eigenvalues, largest first; all of them, or the leading ones, (k,).
        lower, upper: mean_square / mean <= lambda_max <= sqrt(n mean_square), which hold for every positive
            semi-definite kernel.
        residuals: |K u - value u| of the values found by Lanczos, which bounds their error; 0 otherwise, (k,).
    """

    values: Float[Array, " k"]
    lower: Float[Array, ""]
    upper: Float[Array, ""]
    residuals: Float[Array, " k"]


@checked
def spectrum(
    kernel: Annotated[KernelOperator | Float[ArrayLike, "n n"], square_kernel],
    *,
    top: Count | None = None,
    key: PRNGKey | None = None,
    probes: Annotated[int, count(2)] = 16,
    steps: Count | None = None,
) -> Spectrum:
    """Return eigenvalues of a kernel and the moments of all of them ("BN NTK" section A.4).

    Args:
        kernel: symmetric (n, n) matrix, or a ``KernelOperator`` as ``ntk_operator`` returns it.
        top: number of leading eigenvalues. None: 4 by Lanczos, else all.
        key: for random directions. An operator needs it: its moments are estimated, without the leading eigenvectors'
            share of the error. With a key, eigenvalues of a matrix come from Lanczos too; its moments are exact.
        probes: random directions used for an operator's moments.
        steps: products spent by Lanczos, default min(n, 2 top + 30); ``residuals`` tells whether they were enough.

    Returns:
        A ``Spectrum``: eigenvalues, their mean, mean square and variance, bounds on the largest one, errors.

    >>> import jax.numpy as jnp
    >>> s = spectrum(jnp.diag(jnp.array([3.0, 1.0])))
    >>> s.values.tolist(), float(s.mean), float(s.variance)
    ([3.0, 1.0], 2.0, 1.0)
    """
    matrix = kernel if isinstance(kernel, KernelOperator) else jnp.asarray(kernel)
    n, dtype = _square(matrix)
    zero = jnp.zeros((), dtype)
    if key is None:
        if isinstance(matrix, KernelOperator):
            raise ValueError("key must be given for an operator, got None")
        values = jnp.linalg.eigvalsh(matrix)[::-1][:top]
        residuals = jnp.zeros_like(values)
    else:
        one, two = jax.random.split(key)
        values, vectors, residuals = top_eigenpairs(matrix, 4 if top is None else top, key=one, steps=steps)
    if isinstance(matrix, KernelOperator):
        estimate = spectral_moments(matrix, key=two, probes=probes, deflate=vectors)
    else:
        mean, mean_square = jnp.trace(matrix) / n, jnp.sum(matrix * matrix.T) / n
        estimate = SpectralMoments(mean, mean_square, zero, zero, zero)
    lower = estimate.mean_square / estimate.mean
    upper = jnp.sqrt(np.asarray(n, dtype) * estimate.mean_square)
    return Spectrum(**vars(estimate), values=values, lower=lower, upper=upper, residuals=residuals)
