"""Training the output weights alone, in closed form.

With (a, b) frozen, f(x) = sum_i c_i feature_i(x) is linear in c. The residual rho = f - y on the samples
obeys rho' = -K rho in time and rho <- (I - lr K) rho in steps, where K = features features^T. One
eigendecomposition gives every time and every number of steps, so early stopping costs O(n^2) a point.

A full network trains like this where ``univariate.balance.tangential_fraction`` is small (delta -> -inf).
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from meanflow import _checks


class Readout(eqx.Module):
    """Closed-form training of output weights under the squared loss 1/2 sum_j rho_j^2.

    Args:
        kernel: (n, n) Gram matrix on the samples, symmetric and positive semi-definite. In the clock of
            gradient descent on (1/alpha) sum_i c_i relu(..) it is m / alpha^2 times the mean-feature kernel.
        residual: (n,) initial residual f_0(x_j) - y_j.

    Predictions follow from the dual coefficients beta: f(x) = f_0(x) + K(x, X) beta.

    >>> import jax.numpy as jnp
    >>> training = Readout(jnp.diag(jnp.array([1.0, 4.0])), jnp.array([2.0, 2.0]))
    >>> [round(float(r), 4) for r in training.residual_flow(0.5)]
    [1.2131, 0.2707]
    """

    eigenvalues: jax.Array
    basis: jax.Array
    coordinates: jax.Array

    def __init__(self, kernel: jax.Array, residual: jax.Array):
        n = jnp.shape(residual)[0] if jnp.ndim(residual) == 1 else None
        _checks.shape("residual", residual, (None,))
        _checks.shape("kernel", kernel, (n, n))
        eigenvalues, self.basis = jnp.linalg.eigh(kernel)
        self.eigenvalues = jnp.maximum(eigenvalues, 0)  # rounding may leave -1e-17
        self.coordinates = self.basis.T @ residual

    def _back(self, spectral: jax.Array) -> jax.Array:
        return (spectral * self.coordinates.reshape((1,) * (spectral.ndim - 1) + (-1,))) @ self.basis.T

    def _spectrum(self, like: ArrayLike) -> tuple[jax.Array, jax.Array]:
        array = jnp.asarray(like)
        return self.eigenvalues.reshape((1,) * array.ndim + (-1,)), array[..., None]

    def _powers(self, lr: float | jax.Array, steps: ArrayLike) -> jax.Array:
        # sign and modulus apart: a power of a negative base with a float exponent is NaN
        values, count = self._spectrum(steps)
        factor = 1 - lr * values
        odd = jnp.where((count % 2 == 1) & (factor < 0), -1.0, 1.0)
        return odd * jnp.abs(factor) ** count

    def residual_flow(self, t: ArrayLike) -> jax.Array:
        """exp(-K t) rho_0 at time(s) t, shape t.shape + (n,)."""
        values, time = self._spectrum(t)
        return self._back(jnp.exp(-values * time))

    def residual_descent(self, lr: float | jax.Array, steps: ArrayLike) -> jax.Array:
        """(I - lr K)^steps rho_0, shape steps.shape + (n,)."""
        return self._back(self._powers(lr, steps))

    def dual_flow(self, t: ArrayLike) -> jax.Array:
        """Dual coefficients -K^-1 (I - exp(-K t)) rho_0 at time(s) t, shape t.shape + (n,)."""
        values, time = self._spectrum(t)
        positive = values > 0
        filled = jnp.where(positive, -jnp.expm1(-values * time) / jnp.where(positive, values, 1), time)
        return -self._back(filled)

    def dual_descent(self, lr: float | jax.Array, steps: ArrayLike) -> jax.Array:
        """Dual coefficients after steps of gradient descent, shape steps.shape + (n,)."""
        values, count = self._spectrum(steps)
        small = lr * values < 0.5  # here (1 - (1 - lr v)^k)/v loses digits
        safe = jnp.where(small, lr * values, 0.0)
        gentle = -jnp.expm1(count * jnp.log1p(-safe))
        gain = jnp.where(small, gentle, 1 - self._powers(lr, steps))
        positive = values > 0
        return -self._back(jnp.where(positive, gain / jnp.where(positive, values, 1), lr * count))

    def dual_limit(self) -> jax.Array:
        """Dual coefficients -K^-1 rho_0 of the interpolant, (n,); modes at rounding level stay untrained."""
        floor = self.eigenvalues[-1] * self.eigenvalues.shape[0] * jnp.finfo(self.eigenvalues.dtype).eps
        kept = self.eigenvalues > floor
        return -self._back(jnp.where(kept, 1 / jnp.where(kept, self.eigenvalues, 1), 0))


@jax.jit
def minimum_norm(features: jax.Array, y: jax.Array, c0: jax.Array | None = None) -> jax.Array:
    """The limit of training c alone: the interpolating c nearest to c0, equation (22) corrected.

    The published limit is the interpolant of least norm, which holds only for c0 = 0; in general it is
    c0 + argmin { norm(d) : features (c0 + d) = y }.

    Args:
        features: (n, m) with n <= m and independent rows; f = features @ c.
        y: (n,) targets.
        c0: (m,) initial output weights, zero if None.

    Returns:
        c, shape (m,). O(n^2 m) by a QR factorisation, so the condition number is not squared.
    """
    _checks.shape("features", features, (None, None))
    n, m = features.shape
    _checks.shape("y", y, (n,))
    if n > m:
        raise ValueError(f"features must have at least as many columns as rows, got shape {features.shape}")
    start = jnp.zeros(m, features.dtype) if c0 is None else jnp.asarray(c0)
    q, r = jnp.linalg.qr(features.T)
    return start + q @ jax.scipy.linalg.solve_triangular(r, y - features @ start, trans=1)
