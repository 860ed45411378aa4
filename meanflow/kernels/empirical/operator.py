"""The tangent kernel as a linear operator, and spectra that need only products with it.

K v = J (J' v): one vector-Jacobian and one Jacobian-vector product on the whole batch, right for coupled
samples too. A product costs about four forward passes and the memory of the batch's activations; K is never
formed.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from meanflow import _checks
from meanflow.kernels.empirical.ntk import Apply, Params, resolve


class KernelOperator(eqx.Module):
    """The kernel K(x, x) on vectors of length T C (outputs of sample 0 first, then sample 1, ...).

    ``operator @ v`` multiplies; ``operator.matvec()`` is the linear map itself, linearised once, for use in a
    compiled loop or in ``jax.scipy.sparse.linalg.cg``.
    """

    apply: Any
    params: Any
    x: Any
    stats: str | None = eqx.field(static=True)
    free: bool = eqx.field(static=True)

    def _function(self) -> Callable[[Params], jax.Array]:
        if self.free:
            return lambda p: self.apply(p, self.x).reshape(-1)
        left = resolve(self.apply, self.params, self.x, None, self.stats).left
        return lambda p: left(p).reshape(-1)

    @property
    def shape(self) -> tuple[int, int]:
        """(T C, T C)."""
        size = jax.eval_shape(self._function(), self.params).shape[0]
        return size, size

    @property
    def dtype(self) -> Any:
        """Of the outputs."""
        return jax.eval_shape(self._function(), self.params).dtype

    def matvec(self) -> Callable[[jax.Array], jax.Array]:
        """v -> K v, with the forward pass done once."""
        moving, still = eqx.partition(self.params, eqx.is_inexact_array)
        function = self._function()
        _, push = jax.linearize(lambda p: function(eqx.combine(p, still)), moving)
        pull = jax.linear_transpose(push, moving)
        return lambda v: push(pull(v)[0])

    def __matmul__(self, v: jax.Array) -> jax.Array:
        return _multiply(self, v)


@eqx.filter_jit
def _multiply(operator: KernelOperator, v: jax.Array) -> jax.Array:
    product = operator.matvec()
    return product(v) if v.ndim == 1 else jax.vmap(product, in_axes=1, out_axes=1)(v)


def ntk_operator(apply: Apply, params: Params, x: Any, *, stats: str | None = None) -> KernelOperator:
    """The kernel of ``apply`` at (params, x) as an operator; ``stats`` as in ``empirical_ntk``.

    >>> import jax.numpy as jnp
    >>> K = ntk_operator(lambda w, x: x @ w, jnp.ones(2), jnp.array([[1.0, 0.0], [1.0, 1.0]]))
    >>> (K @ jnp.array([1.0, 1.0])).tolist()
    [2.0, 3.0]
    """
    maps = resolve(apply, params, x, None, stats)
    return KernelOperator(apply, params, jnp.asarray(x), stats, maps.single is apply)


Kernel = KernelOperator | jax.Array


def _product(kernel: Kernel) -> Callable[[jax.Array], jax.Array]:
    return kernel.matvec() if isinstance(kernel, KernelOperator) else lambda v: kernel @ v


def _square(kernel: Kernel) -> tuple[int, Any]:
    if len(kernel.shape) != 2 or kernel.shape[0] != kernel.shape[1]:
        raise ValueError(f"kernel must be a square matrix or an operator, got shape {kernel.shape}")
    return kernel.shape[0], kernel.dtype


class Lanczos(NamedTuple):
    """Krylov basis (steps, n) with orthonormal rows, diagonal (steps,) and off-diagonal (steps,) of the
    projection.

    The last off-diagonal is the norm of the residual, which bounds the error of Ritz values.
    """

    basis: jax.Array
    diagonal: jax.Array
    off_diagonal: jax.Array

    def matrix(self) -> jax.Array:
        """The tridiagonal projection, (steps, steps)."""
        side = self.off_diagonal[:-1]
        return jnp.diag(self.diagonal) + jnp.diag(side, 1) + jnp.diag(side, -1)


def lanczos(
    product: Callable[[jax.Array], jax.Array], start: jax.Array, steps: int, key: jax.Array
) -> Lanczos:
    """Lanczos iteration with full reorthogonalisation (twice, which is enough).

    When the Krylov space is exhausted it goes on from a fresh random direction, so that repeated eigenvalues
    are found and ``steps = n`` gives the whole spectrum. Memory steps * n; time steps products + steps^2 n.
    """
    n, dtype = start.shape[0], start.dtype
    tiny = 100 * float(jnp.finfo(dtype).eps)

    def orthogonal(v: jax.Array, basis: jax.Array) -> jax.Array:
        for _ in range(2):
            v = v - basis.T @ (basis @ v)
        return v

    def step(j: jax.Array, state: Any) -> Any:
        basis, diagonal, side, v, scale = state
        basis = basis.at[j].set(v)
        w = product(v)
        a = v @ w
        w = orthogonal(w, basis)
        b = jnp.linalg.norm(w)
        scale = jnp.maximum(scale, jnp.abs(a) + b)
        fresh = orthogonal(jax.random.normal(jax.random.fold_in(key, j), (n,), dtype), basis)
        broken = b <= tiny * scale
        w = jnp.where(broken, fresh, w)
        following = w / jnp.maximum(jnp.linalg.norm(w), jnp.finfo(dtype).tiny)
        return basis, diagonal.at[j].set(a), side.at[j].set(jnp.where(broken, 0.0, b)), following, scale

    zeros = jnp.zeros(steps, dtype)
    state = (jnp.zeros((steps, n), dtype), zeros, zeros, start / jnp.linalg.norm(start), jnp.zeros((), dtype))
    basis, diagonal, side, _, _ = jax.lax.fori_loop(0, steps, step, state)
    return Lanczos(basis, diagonal, side)


class Eigenpairs(NamedTuple):
    """``values`` (k,) largest first, ``vectors`` (n, k), ``residuals`` (k,): |K u - value u|, its error."""

    values: jax.Array
    vectors: jax.Array
    residuals: jax.Array


@eqx.filter_jit
def top_eigenpairs(kernel: Kernel, k: int, *, key: jax.Array, steps: int | None = None) -> Eigenpairs:
    """The k largest eigenvalues and their eigenvectors by Lanczos, from products alone.

    Args:
        kernel: symmetric matrix (n, n) or ``KernelOperator``.
        k: how many.
        key: for the start vector.
        steps: products spent, default min(n, 2 k + 30); look at ``residuals`` to see whether they were
            enough.
    """
    n, dtype = _square(kernel)
    k = _checks.whole("k", k, 1)
    if k > n:
        raise ValueError(f"k must be at most {n}, the size of the kernel, got {k}")
    count = min(n, 2 * k + 30) if steps is None else min(n, _checks.whole("steps", steps, k))
    run = lanczos(_product(kernel), jax.random.normal(key, (n,), dtype), count, jax.random.fold_in(key, 1))
    values, small = jnp.linalg.eigh(run.matrix())
    values, small = values[::-1][:k], small[:, ::-1][:, :k]
    return Eigenpairs(values, run.basis.T @ small, jnp.abs(run.off_diagonal[-1] * small[-1]))


class Moments(NamedTuple):
    """Mean ``m`` = Tr K / n and mean square ``s`` = Tr K^2 / n of the eigenvalues, with standard errors.

    ``v_error`` is that of the variance v = s - m^2, and far below the sum of the other two: m and s err
    together, since both come from the same random directions.
    """

    m: jax.Array
    s: jax.Array
    m_error: jax.Array
    s_error: jax.Array
    v_error: jax.Array

    @property
    def v(self) -> jax.Array:
        """Variance of the eigenvalues, s - m^2."""
        return self.s - self.m**2


@eqx.filter_jit
def moments(kernel: Kernel, *, key: jax.Array, probes: int = 16, deflate: jax.Array | None = None) -> Moments:
    """Stochastic trace of K and K^2, exact on a few leading directions Q.

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
    signs = jax.random.rademacher(key, (probes, n), dtype)
    free = signs - (signs @ basis) @ basis.T
    # one product at a time: a batch of products would multiply the activations' memory
    images = jax.lax.map(product, free)
    known = jax.lax.map(product, basis.T)
    one = jnp.sum(free * images, axis=1)
    two = jnp.sum(images**2, axis=1)
    m, s = (jnp.sum(basis.T * known) + jnp.mean(one)) / n, (jnp.sum(known**2) + jnp.mean(two)) / n
    error = lambda a: jnp.std(a, ddof=1) / math.sqrt(probes) / n
    return Moments(m, s, error(one), error(two), error(two - 2 * m * one))


class Density(NamedTuple):
    """The spectral density as point masses: ``nodes`` and ``weights`` (probes * steps,), weights sum to 1."""

    nodes: jax.Array
    weights: jax.Array

    def cumulative(self, value: jax.Array) -> jax.Array:
        """Estimated fraction of eigenvalues <= value, elementwise."""
        below = self.nodes[:, None] <= jnp.atleast_1d(value)[None, :]
        return jnp.sum(self.weights[:, None] * below, axis=0)

    def smooth(self, grid: jax.Array, width: float) -> jax.Array:
        """Density on ``grid`` with every node widened to a Gaussian of standard deviation ``width``."""
        u = (grid[:, None] - self.nodes[None, :]) / width
        return jnp.exp(-0.5 * u**2) @ self.weights / (width * math.sqrt(2 * math.pi))


@eqx.filter_jit
def spectral_density(kernel: Kernel, *, key: jax.Array, probes: int = 8, steps: int = 40) -> Density:
    """Stochastic Lanczos quadrature, probes * steps products; 2 steps - 1 moments of each probe are exact."""
    n, dtype = _square(kernel)
    steps = min(steps, n)
    product = _product(kernel)

    def one(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        run = lanczos(product, jax.random.rademacher(key, (n,), dtype), steps, jax.random.fold_in(key, 1))
        values, vectors = jnp.linalg.eigh(run.matrix())
        return values, vectors[0] ** 2

    nodes, weights = jax.lax.map(one, jax.random.split(key, probes))
    return Density(nodes.reshape(-1), weights.reshape(-1) / probes)


@eqx.filter_jit
def condition_number(kernel: Kernel, *, key: jax.Array, steps: int | None = None) -> jax.Array:
    """lambda_max / lambda_min by Lanczos; exact for steps = n (default), a lower bound for fewer steps."""
    n, dtype = _square(kernel)
    count = n if steps is None else min(n, _checks.whole("steps", steps, 1))
    run = lanczos(_product(kernel), jax.random.normal(key, (n,), dtype), count, jax.random.fold_in(key, 1))
    values = jnp.linalg.eigvalsh(run.matrix())
    return values[-1] / values[0]


class Spectrum(NamedTuple):
    """Summary of a kernel's spectrum.

    Attributes:
        values: eigenvalues, largest first; all of them, or the leading ones.
        m: mean of all eigenvalues.
        s: mean of their squares.
        v: their variance, s - m^2.
        lower, upper: s / m <= lambda_max <= sqrt(T s), which hold for every positive semi-definite kernel.
        residuals: |K u - value u| of the values found by Lanczos, which bounds their error; 0 otherwise.
        m_error, v_error: standard errors of an operator's estimated moments; 0 for a matrix.
    """

    values: jax.Array
    m: jax.Array
    s: jax.Array
    v: jax.Array
    lower: jax.Array
    upper: jax.Array
    residuals: jax.Array
    m_error: jax.Array
    v_error: jax.Array


def spectrum(
    kernel: Kernel,
    *,
    top: int | None = None,
    key: jax.Array | None = None,
    probes: int = 16,
    steps: int | None = None,
) -> Spectrum:
    """Eigenvalues and their moments ("BN NTK" section A.4).

    Args:
        kernel: symmetric (T, T) matrix, or a ``KernelOperator``.
        top: number of leading eigenvalues. None: 4 by Lanczos, else all.
        key: for random directions. An operator needs it: its moments are estimated (``moments``, without the
            leading eigenvectors' share of the error). With a key, eigenvalues of a matrix come from Lanczos
            too; its moments are exact.
        probes: random directions used for an operator's moments.
        steps: of Lanczos, see ``top_eigenpairs``.

    >>> import jax.numpy as jnp
    >>> s = spectrum(jnp.diag(jnp.array([3.0, 1.0])))
    >>> s.values.tolist(), float(s.m), float(s.v)
    ([3.0, 1.0], 2.0, 1.0)
    """
    n, dtype = _square(kernel)
    zero = jnp.zeros((), dtype)
    if key is None:
        if isinstance(kernel, KernelOperator):
            raise ValueError("key must be given for an operator, got None")
        values = jnp.linalg.eigvalsh(kernel)[::-1][:top]
        residuals = jnp.zeros_like(values)
    else:
        one, two = jax.random.split(key)
        values, vectors, residuals = top_eigenpairs(kernel, 4 if top is None else top, key=one, steps=steps)
    if isinstance(kernel, KernelOperator):
        estimate = moments(kernel, key=two, probes=probes, deflate=vectors)
    else:
        m, s = jnp.trace(kernel) / n, jnp.sum(kernel * kernel.T) / n
        estimate = Moments(m, s, zero, zero, zero)
    m, s = estimate.m, estimate.s
    bounds = s / m, jnp.sqrt(np.asarray(n, dtype) * s)
    return Spectrum(values, m, s, estimate.v, *bounds, residuals, estimate.m_error, estimate.v_error)
