"""Training the output weights alone, in closed form, and when a whole network trains like that.

With (a, b) frozen, f(x) = sum_i c_i feature_i(x) is linear in c. The residual rho = f - y on the samples
obeys rho' = -K rho in time and rho <- (I - lr K) rho in steps, where K = features features^T. One
eigendecomposition gives every time and every number of steps, so early stopping costs O(n^2) a point.

A full network (a, b, c) with balance delta = c^2 - n^2 moves in angle by the fraction ``tangential_fraction``
of its metric: 0 for delta -> -inf (kernel regime), 1 for delta -> +inf (adaptive regime), whatever alpha is.
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


def balance_ratio(delta: ArrayLike, q: ArrayLike) -> jax.Array:
    """k = delta / (2 abs(q)), q = c n = alpha r / m: kernel regime for k << -1, adaptive for k >> 1."""
    return jnp.asarray(delta) / (2 * jnp.abs(jnp.asarray(q)))


@jax.jit
def tangential_fraction(delta: ArrayLike, q: ArrayLike) -> jax.Array:
    """Tangential over radial speed, c^2/(c^2 + n^2) = (1 + k/sqrt(1 + k^2))/2 with k = ``balance_ratio``.

    Free of cancellation for any balance, delta = +-inf included; 1/2 at delta = q = 0.

    >>> [float(tangential_fraction(d, 1.0)) for d in (-jnp.inf, 0.0, jnp.inf)]
    [0.0, 0.5, 1.0]
    """
    delta, q = jnp.broadcast_arrays(jnp.asarray(delta, jnp.result_type(delta, q, 0.0)), jnp.asarray(q))
    bounded = jnp.where(jnp.isinf(delta), 0, delta)
    scale = jnp.maximum(jnp.abs(bounded), 2 * jnp.abs(q))
    unit = jnp.where(scale > 0, scale, 1)
    d, two_q = bounded / unit, 2 * q / unit
    h = jnp.sqrt(jnp.where(scale > 0, d * d + two_q * two_q, 1))
    big = (jnp.abs(d) + h) / 2
    small = (two_q / 2) ** 2 / big
    fraction = jnp.where(d >= 0, big, small) / h
    fraction = jnp.where(scale > 0, fraction, 0.5)
    return jnp.where(jnp.isinf(delta), (delta > 0).astype(fraction.dtype), fraction)


def lazy_time(t: float | jax.Array, width: int, alpha: float) -> float | jax.Array:
    """The clock tau = t width / alpha^2 in which functions move at speed O(1) for every scaling alpha."""
    return t * width / alpha**2


def lazy_displacement_exponent(power: float) -> float:
    """Slope power - 1 of log(weight displacement) against log(width) for alpha = width^power and f_0 = 0.

    When the residual has gone, weights have moved O(alpha / width): -1, -0.75, -0.5 for power 0, 1/4, 1/2.
    """
    return power - 1.0
