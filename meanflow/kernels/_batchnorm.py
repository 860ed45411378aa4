"""Tangent kernels under batch normalization, from the kernel before it.

Batch norm of outputs f (T,): h = f - mean f, s^2 = |h|^2/T + epsilon, output h/s. Its Jacobian is the symmetric matrix
B = (1/s)(I - 11'/T - h h'/(T s^2)), so the kernel is exactly K_BN = B K B. ("BN NTK" eq. A.3 and A.18 print a one-sided
product, which is right only for its eigenvalues.)
"""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from meanflow import _boundary
from meanflow._boundary import Rate, array, checked
from meanflow._matrices import kernel as kernel_kind
from meanflow.layers._standardize import batch_scale
from meanflow.layers.functional import recenter


def normalize(
    outputs: Float[Array, "T ..."],
    epsilon: float | jax.Array = 0.0,
    reference: Float[Array, "R ..."] | None = None,
) -> Float[Array, "T ..."]:
    """Return batch norm of ``outputs`` over the first axis: minus the mean, divided by the standard deviation.

    Args:
        outputs: (T, ...).
        epsilon: added to the variance.
        reference: (R, ...), the values whose statistics are used; by default the outputs themselves.

    >>> normalize(jnp.array([0.0, 2.0])).tolist()
    [-1.0, 1.0]
    """
    source = outputs if reference is None else reference
    return (outputs - jnp.mean(source, axis=0, keepdims=True)) / batch_scale(source, epsilon=epsilon)


def jacobian_apply(
    outputs: Float[Array, " T"],
    directions: Float[Array, "T k"],
    epsilon: float | jax.Array = 0.0,
    at: Float[Array, " S"] | None = None,
    change: Float[Array, "S k"] | None = None,
) -> Float[Array, "_ k"]:
    """Return B v for every column v of ``directions``: a rank-two update, O(T k), never a matrix product.

    Args:
        outputs: f before batch norm, at which the Jacobian B is taken.
        directions: changes v of f, in columns.
        epsilon: added to the variance.
        at: values at other points that are normalized by the same statistics.
        change: changes of those values, in columns. Given with ``at``, the result is the change (S, k) of the
            normalized values there.
    """
    # B v = (v - mean v - h (h.v)/(T s^2)) / s; elsewhere the mean and h.v are still those of the batch
    h = recenter(outputs)
    size = outputs.shape[0]
    s = batch_scale(outputs, epsilon=epsilon)[0]
    mean = jnp.mean(directions, axis=0, keepdims=True)
    along = (h @ directions)[None, :] / (size * s**2)
    shifted, moved = (h, directions) if at is None or change is None else (at - jnp.mean(outputs), change)
    return (moved - mean - shifted[:, None] * along) / s


@checked
def batchnorm_ntk(
    kernel: Annotated[Float[ArrayLike, "T T *CC"], kernel_kind],
    outputs: Annotated[Float[ArrayLike, "T *C"], array((None,), (None, None), squares=True)],
    *,
    epsilon: Rate = 0.0,
    scale: Annotated[Float[ArrayLike, "..."], array((), (None,))] | None = None,
    cross: Annotated[Float[ArrayLike, "T S *CC"], array()] | None = None,
    at: Annotated[Float[ArrayLike, "S *C"], array()] | None = None,
) -> Float[Array, "T _ *CC"]:
    """Return the kernel after batch norm of the outputs, B K B; gradients through mean and variance are included.

    Args:
        kernel: K before batch norm, (T, T), or (T, T, C, C) for C outputs, each normalized on its own.
        outputs: f before batch norm, (T,) or (T, C).
        epsilon: added to the variance.
        scale: gamma, a number or (C,), of a trained scale and shift gamma h/s + beta after batch norm. Given, gamma and
            beta count as parameters, which adds (h/s)(h/s)' + 11' to gamma^2 B K B (equal outputs only).
        cross: K(x, z) before batch norm, (T, S) or (T, S, C, C). Given with ``at``, the result is the kernel
            between x and z, both normalized by the statistics of x: ``stats="train"`` of ``empirical_ntk``.
        at: f at z, (S,) or (S, C).

    Returns:
        (T, T) or (T, S), or these + (C, C). At epsilon = 0, without scale, 1 and h are null vectors.
        Time O(T^2 C^2).

    >>> import jax.numpy as jnp
    >>> K = batchnorm_ntk(jnp.eye(3), jnp.array([-1.0, 0.0, 1.0]))
    >>> bool(jnp.allclose(K @ jnp.ones(3), 0, atol=1e-6))
    True
    """
    k, f = jnp.asarray(kernel), jnp.asarray(outputs)
    if f.ndim not in (1, 2) or k.ndim != 2 * f.ndim:
        raise ValueError(
            f"kernel must be (T, T) with outputs (T,), or (T, T, C, C) with (T, C); got {k.shape} and {f.shape}"
        )
    _boundary.shape("outputs", f, (k.shape[0], *k.shape[2:3]))
    if scale is not None:
        _boundary.shape("scale", scale, (), f.shape[1:] or (1,))
    if (cross is None) != (at is None):
        raise ValueError("cross and at must be given together")
    wide = k if cross is None else jnp.asarray(cross)
    points = f if at is None else jnp.asarray(at)
    _boundary.shape("at", points, (None, *f.shape[1:]))
    _boundary.shape("cross", wide, (f.shape[0], points.shape[0], *k.shape[2:]))
    if (known := _boundary.concrete(f)) is not None and not np.any(_boundary.concrete(epsilon)):
        # a mean is rounded, and outputs that are all the same then seem to differ from it
        rounding = 4 * np.finfo(known.dtype).eps * np.abs(known).max(0)
        if np.any(np.abs(known - known.mean(0)).max(0) <= rounding):
            raise ValueError(
                "outputs must vary over the samples where epsilon = 0, got outputs that are constant"
            )
    single = f.ndim == 1
    if single:  # one output is the case C = 1
        k, wide, f, points = k[..., None, None], wide[..., None, None], f[:, None], points[:, None]

    # block (c, d) of the kernel: rows by the statistics of output c, columns by those of output d
    def block(k: Array, w: Array, rows: Array, columns: Array, there: Array) -> Array:
        right = jacobian_apply(columns, k.T, epsilon, there, w.T)  # K(x, z) B', columns z, transposed
        return jacobian_apply(rows, right.T, epsilon)

    inner = jax.vmap(block, in_axes=(-1, -1, None, -1, -1), out_axes=-1)  # over d
    result = jax.vmap(inner, in_axes=(-2, -2, -1, None, None), out_axes=-2)(k, wide, f, f, points)  # over c
    if cross is None:
        # centering cancels most of a kernel with a large mean, and rounding in what is left is not symmetric
        result = 0.5 * (result + result.transpose(1, 0, 3, 2))
    if scale is not None:
        gamma = jnp.broadcast_to(jnp.asarray(scale, f.dtype), f.shape[1:])
        left, right = normalize(f, epsilon), normalize(points, epsilon, f)
        own = left[:, None, :] * right[None, :, :] + 1.0  # gradients of gamma and of beta
        result = result * (gamma[:, None] * gamma[None, :])[None, None]
        result = result + own[..., None, :] * jnp.eye(f.shape[1], dtype=f.dtype)[None, None]
    return result[..., 0, 0] if single else result
