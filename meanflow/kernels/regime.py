"""Training in the kernel regime: exact flows, regression, linearised descent, and how far a kernel drifts.

Loss (1/2) sum_j q_j (f_j - y_j)^2 with weights q_j = 1/n unless given. Time is learning rate x steps.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from meanflow import _checks
from meanflow.kernels.batchnorm import jacobian_apply, normalise


class KernelFlow(NamedTuple):
    """Modes of f' = -K Q (f - y): in mode i the residual decays as exp(-rates[i] t).

    Attributes:
        rates: eigenvalues of Q^(1/2) K Q^(1/2), largest first, (n,).
        modes: its orthonormal eigenvectors in columns, (n, n).
        weights: q, (n,).
        residual: f(0) - y, (n,).
        target: y, (n,).
    """

    rates: jax.Array
    modes: jax.Array
    weights: jax.Array
    residual: jax.Array
    target: jax.Array

    def coefficients(self) -> jax.Array:
        """Initial residual in each mode, (n,): squares sum to twice the loss."""
        return self.modes.T @ (jnp.sqrt(self.weights) * self.residual)

    def __call__(self, times: jax.Array) -> jax.Array:
        """f(t) at the training points, (times, n)."""
        decay = jnp.exp(-jnp.atleast_1d(times)[:, None] * self.rates[None]) * self.coefficients()[None]
        return self.target[None] + decay @ self.modes.T / jnp.sqrt(self.weights)[None]

    def loss(self, times: jax.Array) -> jax.Array:
        """Loss at every time, (times,)."""
        decay = jnp.exp(-jnp.atleast_1d(times)[:, None] * self.rates[None])
        return 0.5 * jnp.sum((decay * self.coefficients()[None]) ** 2, axis=1)

    def at(self, cross: jax.Array, start: jax.Array, times: jax.Array) -> jax.Array:
        """f(t) at other points z, (times, S), from K(z, x) (S, n) and f(0) at z (S,)."""
        t = jnp.atleast_1d(times)[:, None]
        rates = jnp.maximum(self.rates, 0.0)[None]
        # (1 - exp(-rate t)) / rate, which is t for a mode that does not move
        slow = rates * t < 1e-8
        safe = jnp.where(slow, 1.0, rates)
        integral = jnp.where(slow, t * jnp.ones_like(rates), -jnp.expm1(-rates * t) / safe)
        push = (integral * self.coefficients()[None]) @ self.modes.T * jnp.sqrt(self.weights)[None]
        return start[None] - push @ cross.T


def _weights(weights: Any, y: jax.Array) -> jax.Array:
    if weights is None:
        return jnp.full(y.shape, 1.0 / y.shape[0], y.dtype)
    weights = jnp.broadcast_to(jnp.asarray(weights, y.dtype), y.shape)
    _checks.at_least("weights", weights, 0.0, strict=True)
    return weights


def kernel_flow(kernel: jax.Array, start: jax.Array, y: jax.Array, *, weights: Any = None) -> KernelFlow:
    """Exact solution of gradient flow under a fixed kernel, by one eigendecomposition.

    Args:
        kernel: K (n, n), symmetric positive semi-definite.
        start: f(0), (n,).
        y: targets, (n,).
        weights: q_j > 0, default 1/n; a number stands for all.

    >>> import jax.numpy as jnp
    >>> flow = kernel_flow(jnp.eye(2), jnp.zeros(2), jnp.ones(2), weights=1.0)
    >>> round(float(flow(1.0)[0, 0]), 4)  # 1 - exp(-1)
    0.6321
    """
    _checks.shape("kernel", kernel, (y.shape[0], y.shape[0]))
    _checks.shape("start", start, y.shape)
    q = _weights(weights, y)
    root = jnp.sqrt(q)
    rates, modes = jnp.linalg.eigh(root[:, None] * kernel * root[None, :])
    return KernelFlow(rates[::-1], modes[:, ::-1], q, start - y, y)


def kernel_regression(
    kernel: jax.Array, y: jax.Array, cross: jax.Array | None = None, *, ridge: float = 0.0
) -> jax.Array:
    """K(z, x) (K + ridge I)^-1 y: the limit of kernel flow from 0 at ridge = 0. ``cross`` is (S, n), default
    K.

    Uses a Cholesky factor, so K + ridge I must be positive definite (batch norm kernels are singular: give a
    ridge).
    """
    size = y.shape[0]
    factor = jax.scipy.linalg.cho_factor(kernel + ridge * jnp.eye(size, dtype=kernel.dtype))
    solution = jax.scipy.linalg.cho_solve(factor, y)
    return (kernel if cross is None else cross) @ solution


def _record(step: Any, state: Any, steps: int, every: int, observe: Any) -> Any:
    # the loop of solvers.iterate, which this room may not import
    if steps % every:
        raise ValueError(f"steps must be a multiple of every, got steps={steps}, every={every}")

    def block(state: Any, _: None) -> Any:
        state = jax.lax.fori_loop(0, every, lambda _, s: step(s), state)
        return state, observe(state)

    return jax.lax.scan(block, state, length=steps // every)[1]


class Descent(NamedTuple):
    """Outputs every few steps: ``train`` (records, n), ``test`` (records, S) or None."""

    train: jax.Array
    test: jax.Array | None


@eqx.filter_jit
def linearised_descent(
    kernel: jax.Array,
    start: jax.Array,
    y: jax.Array,
    *,
    rate: Any,
    steps: int,
    every: int = 1,
    weights: Any = None,
    cross: jax.Array | None = None,
    at: jax.Array | None = None,
) -> Descent:
    """f <- f - rate K Q (f - y): gradient descent of the linearised network.

    It predicts wide plain networks. It does not predict networks with batch norm on the output at any width,
    not even with their own kernel, since B K B depends on f, which moves by O(1): see
    ``linearised_batchnorm``.

    Args:
        kernel: K (n, n), frozen at initialisation.
        start: f(0) at the training points (n,).
        y: targets (n,).
        rate: learning rate.
        steps, every: number of steps, and steps between records.
        weights: q, default 1/n.
        cross: K(z, x), (S, n), to follow test points too.
        at: f(0) at z, (S,).
    """
    q = _weights(weights, y)

    def step(state: Any) -> Any:
        f, g = state
        force = rate * q * (f - y)
        return f - kernel @ force, g if cross is None else g - cross @ force

    records = _record(step, (start, at), steps, every, lambda s: s)
    return Descent(*records)


@eqx.filter_jit
def linearised_batchnorm(
    kernel: jax.Array,
    start: jax.Array,
    y: jax.Array,
    *,
    rate: Any,
    steps: int,
    every: int = 1,
    epsilon: float = 0.0,
    weights: Any = None,
    cross: jax.Array | None = None,
    at: jax.Array | None = None,
) -> Descent:
    """Linearised training that works under batch norm on the output: z <- z - rate K B(z) Q (bn(z) - y).

    The kernel K before batch norm is frozen (it is what becomes constant with width); batch norm and its
    Jacobian B(z) stay exact and move with z. Arguments as in ``linearised_descent``, with ``kernel``,
    ``start``, ``cross`` and ``at`` all taken before batch norm.

    Returns:
        Normalised outputs; test points use the training batch's statistics.
    """
    q = _weights(weights, y)

    def step(state: Any) -> Any:
        z, g = state
        residual = q * (normalise(z, epsilon) - y)
        force = rate * jacobian_apply(z, residual[:, None], epsilon)[:, 0]
        return z - kernel @ force, g if cross is None else g - cross @ force

    def observe(state: Any) -> Any:
        z, g = state
        return normalise(z, epsilon), None if g is None else normalise(g, epsilon, z)

    records = _record(step, (start, at), steps, every, observe)
    return Descent(*records)


def alignment(kernel: jax.Array, y: jax.Array, *, centred: bool = False) -> jax.Array:
    """<K, y y'> / (|K| |y y'|) in [0, 1], K (T, T), y (T,): how much of the kernel points along the target.

    ``centred`` removes the means of K's rows and columns and of y first.
    """
    if centred:
        y = y - jnp.mean(y)
        kernel = kernel - jnp.mean(kernel, axis=0, keepdims=True)
        kernel = kernel - jnp.mean(kernel, axis=1, keepdims=True)
    return y @ (kernel @ y) / (jnp.linalg.norm(kernel) * (y @ y))


def kernel_drift(kernels: jax.Array, reference: jax.Array | None = None) -> jax.Array:
    """|K_i - K_0| / |K_0| (Frobenius), (k,), for kernels (k, T, T); K_0 is the first by default."""
    base = kernels[0] if reference is None else reference
    change = jnp.sqrt(jnp.sum((kernels - base[None]) ** 2, axis=tuple(range(1, kernels.ndim))))
    return change / jnp.linalg.norm(base.reshape(-1))


def drift_observer(
    kernel: Callable[..., jax.Array], reference: jax.Array
) -> Callable[..., dict[str, jax.Array]]:
    """An ``observe`` callback: {"drift", "trace", "kernel cosine"} of the kernel against ``reference``.

    Args:
        kernel: called with what the callback is called with. For ``solve`` and ``descend`` that is
            ``lambda flow, cloud, data: mf.tangent_kernel(flow, cloud, data.x)``; for a loop over parameters
            ``lambda params: empirical_ntk(apply, params, x, stats=...)``.
        reference: the kernel at the start.

    >>> import jax.numpy as jnp
    >>> observe = drift_observer(lambda w: w * jnp.eye(2), jnp.eye(2))
    >>> float(observe(3.0)["drift"])
    2.0
    """
    norm = jnp.linalg.norm(reference.reshape(-1))

    def observe(*state: Any) -> dict[str, jax.Array]:
        now = kernel(*state)
        size = jnp.linalg.norm(now.reshape(-1))
        return {
            "drift": kernel_drift(now[None], reference)[0],
            "trace": jnp.sum(jnp.diagonal(now)),
            "kernel cosine": jnp.sum(now * reference) / (norm * size),
        }

    return observe
