"""Tangent kernels under batch normalisation, from the kernel before it.

Batch norm of outputs f (T,): h = f - mean f, s^2 = |h|^2/T + epsilon, output h/s. Its Jacobian is the
symmetric B = (1/s)(I - 11'/T - h h'/(T s^2)), so the kernel is exactly K_BN = B K B.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from meanflow import _checks
from meanflow.activations import Activation, resolve
from meanflow.layers.functional import recenter, spread

_HIGH = jax.lax.Precision.HIGHEST


def normalise(outputs: jax.Array, epsilon: float = 0.0, reference: jax.Array | None = None) -> jax.Array:
    """Batch norm of (T, ...) over the first axis, by the statistics of ``reference`` (default: the outputs')."""
    source = outputs if reference is None else reference
    return (outputs - jnp.mean(source, axis=0, keepdims=True)) / spread(source, epsilon=epsilon)


def jacobian_apply(
    outputs: jax.Array,
    directions: jax.Array,
    epsilon: float = 0.0,
    at: jax.Array | None = None,
    change: jax.Array | None = None,
) -> jax.Array:
    """B v for every column v of ``directions`` (T, k): a rank-two update, O(T k), never a matrix product.

    With ``at`` (S,) and ``change`` (S, k), values and their changes at other points normalised by the same
    statistics, the change of the normalised values there.
    """
    h = recenter(outputs)
    size = outputs.shape[0]
    s = spread(outputs, epsilon=epsilon)[0]
    mean = jnp.mean(directions, axis=0, keepdims=True)
    along = (h @ directions)[None, :] / (size * s**2)
    if at is None or change is None:
        return (directions - mean - h[:, None] * along) / s
    return (change - mean - (at - jnp.mean(outputs))[:, None] * along) / s


class Affine(NamedTuple):
    """Trained scale and shift after batch norm, gamma h/s + beta; both count as parameters of the kernel."""

    gamma: jax.Array | float = 1.0
    beta: jax.Array | float = 0.0


def batchnorm_ntk(
    kernel: jax.Array,
    outputs: jax.Array,
    *,
    epsilon: float = 0.0,
    affine: Affine | None = None,
    cross: jax.Array | None = None,
    at: jax.Array | None = None,
) -> jax.Array:
    """Kernel after batch norm of the outputs: B K B, exactly (gradients through mean and variance included).

    Args:
        kernel: K before batch norm, (T, T), or (T, T, C, C) for C outputs, each normalised on its own.
        outputs: f before batch norm, (T,) or (T, C).
        epsilon: added to the variance.
        affine: trained scale and shift, (C,) each: adds (h/s)(h/s)' + 11' to gamma^2 B K B (equal outputs
            only).
        cross: K(x, z) before batch norm, (T, S) or (T, S, C, C). Given with ``at``, the result is the kernel
            between x and z, both normalised by the statistics of x: ``stats="train"``.
        at: f at z, (S,) or (S, C).

    Returns:
        (T, T) or (T, S), or these + (C, C). At epsilon = 0, without affine, 1 and h are null vectors.
        Time O(T^2 C^2).

    >>> import jax.numpy as jnp
    >>> K = batchnorm_ntk(jnp.eye(3), jnp.array([-1.0, 0.0, 1.0]))
    >>> bool(jnp.allclose(K @ jnp.ones(3), 0, atol=1e-6))
    True
    """
    if outputs.ndim not in (1, 2) or kernel.ndim != 2 * outputs.ndim:
        raise ValueError(
            f"kernel must be (T, T) with outputs (T,), or (T, T, C, C) with (T, C); got {kernel.shape} and "
            f"{outputs.shape}"
        )
    if (cross is None) != (at is None):
        raise ValueError("cross and at must be given together")
    if outputs.ndim == 1:
        lift = lambda a: a if a is None else a[..., None]
        wide = None if cross is None else cross[..., None, None]
        gamma = affine and Affine(*(jnp.atleast_1d(a) for a in affine))
        out = batchnorm_ntk(
            kernel[..., None, None], outputs[:, None], epsilon=epsilon, affine=gamma, cross=wide, at=lift(at)
        )
        return out[..., 0, 0]

    def block(k: jax.Array, w: jax.Array, f: jax.Array, g: jax.Array, a: jax.Array) -> jax.Array:
        # rows by f's normalisation, columns by g's (at the points z if there are any)
        if cross is None:
            return jacobian_apply(f, jacobian_apply(g, k.T, epsilon).T, epsilon)
        return jacobian_apply(f, jacobian_apply(g, k.T, epsilon, a, w.T).T, epsilon)

    wide = kernel if cross is None else cross
    points = outputs if at is None else at
    inner = jax.vmap(block, in_axes=(-1, -1, None, -1, -1), out_axes=-1)  # over d
    both = jax.vmap(inner, in_axes=(-2, -2, -1, None, None), out_axes=-2)  # over c
    result = both(kernel, wide, outputs, outputs, points)
    if affine is None:
        return result
    channels = outputs.shape[1]
    scale = jnp.broadcast_to(jnp.asarray(affine.gamma, outputs.dtype), (channels,))
    left = normalise(outputs, epsilon)
    right = left if at is None else normalise(at, epsilon, outputs)
    own = left[:, None, :] * right[None, :, :] + 1.0
    result = result * (scale[:, None] * scale[None, :])[None, None]
    return result + own[..., None, :] * jnp.eye(channels, dtype=outputs.dtype)[None, None]


def last_hidden_ntk(
    hidden: jax.Array,
    weights: jax.Array,
    readout: jax.Array,
    activation: str | Activation = "relu",
    *,
    epsilon: float = 0.0,
    gamma: jax.Array | None = None,
    beta: jax.Array | None = None,
) -> jax.Array:
    """Exact kernel of the last hidden layer's weights W when batch norm stands before its activation.

    f = sum_i a_i phi(gamma_i y_i + beta_i), y = batch norm of z = H W' over the batch. Each unit's
    normalisation couples samples, yet K_W needs Gram matrices alone: with C = G H H' G, D_it = a_i gamma_i
    phi'_it / s_i, U = D o y, V = D o (y C) and o the elementwise product,
    K_W = (D'D) o C - (U'V + V'U)/T + U' diag(y_i C y_i) U / T^2.

    Args:
        hidden: H (T, n), the layer's input.
        weights: W (N, n).
        readout: a (N,).
        activation: phi.
        epsilon: added to every variance.
        gamma: scale (N,), default 1.
        beta: shift (N,), default 0.

    Returns:
        (T, T). Time O(T N n + T^2 (n + N)), against T^2 N n for the Jacobian.
    """
    size = hidden.shape[0]
    _checks.shape("weights", weights, (None, hidden.shape[1]))
    _checks.shape("readout", readout, (weights.shape[0],))
    z = jnp.matmul(hidden, weights.T, precision=_HIGH)
    s = spread(z, epsilon=epsilon)
    y = recenter(z) / s
    scale = jnp.ones_like(readout) if gamma is None else gamma
    shift = jnp.zeros_like(readout) if beta is None else beta
    _, slope = jax.jvp(resolve(activation), (scale[None] * y + shift[None],), (jnp.ones_like(y),))
    d = slope * (readout * scale)[None] / s  # (T, N)
    centred = recenter(hidden)
    gram = jnp.matmul(centred, centred.T, precision=_HIGH)
    image = jnp.matmul(gram, y, precision=_HIGH)  # (y C)', (T, N)
    u, v = d * y, d * image
    cross = jnp.matmul(u, v.T, precision=_HIGH)
    quadratic = jnp.sum(y * image, axis=0)
    return (
        jnp.matmul(d, d.T, precision=_HIGH) * gram
        - (cross + cross.T) / size
        + jnp.matmul(u * quadratic[None], u.T, precision=_HIGH) / size**2
    )
