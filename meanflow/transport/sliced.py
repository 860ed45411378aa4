"""Distances through projections on lines: sliced and marginal Wasserstein, both lower bounds on W_1."""

import math
from functools import partial

import jax
import jax.numpy as jnp

from meanflow import _checks
from meanflow._numerics import safe_norm, safe_root
from meanflow.transport.wasserstein import wasserstein


def slicing_constant(dimension: int) -> float:
    """c_d = sqrt(pi) Gamma((d+1)/2) / Gamma(d/2) = 1 / E|<u, e>|, u uniform on the sphere of R^d.

    c_d times the sliced W_1 is a lower bound on W_1, and equal to it for translations.

    >>> print(round(slicing_constant(1), 6), round(slicing_constant(3), 6))
    1.0 2.0
    """
    d = _checks.whole("dimension", dimension, 1)
    return math.sqrt(math.pi) * math.exp(math.lgamma((d + 1) / 2) - math.lgamma(d / 2))


def sliced_distances(
    x: jax.Array, y: jax.Array, p: float = 1, *, key: jax.Array, directions: int = 256
) -> jax.Array:
    """W_p of the projections on random directions, (directions,); cost O(L (d N + N log N)), pure JAX.

    Each is a lower bound on W_p(x, y); their mean and spread give the sliced distance and its error.
    """
    _checks.whole("directions", directions, 1)
    if jnp.ndim(x) != 2 or jnp.ndim(y) != 2 or jnp.shape(x)[1] != jnp.shape(y)[1]:
        raise ValueError(f"x and y must have shapes (N, d) and (M, d), got {jnp.shape(x)} and {jnp.shape(y)}")
    _checks.finite("x", x)
    _checks.finite("y", y)
    return _sliced(jnp.asarray(x), jnp.asarray(y), p, key, directions)


@partial(jax.jit, static_argnames=("p", "directions"))
def _sliced(x: jax.Array, y: jax.Array, p: float, key: jax.Array, directions: int) -> jax.Array:
    normals = jax.random.normal(key, (directions, x.shape[1]), x.dtype)
    units = normals / jnp.linalg.norm(normals, axis=1, keepdims=True)
    return jax.vmap(lambda u: wasserstein(x @ u, y @ u, p))(units)


def sliced_wasserstein(
    x: jax.Array,
    y: jax.Array,
    p: float = 1,
    *,
    key: jax.Array,
    directions: int = 256,
    scaled: bool = False,
) -> jax.Array:
    """The sliced distance (mean over directions of W_p(projections)^p)^(1/p).

    Works under jit, vmap and grad.

    Args:
        x: points (N, d).
        y: points (M, d).
        p: order.
        key: PRNG key of the directions; Monte Carlo error falls like 1/sqrt(directions).
        directions: number of random directions.
        scaled: multiply by ``slicing_constant(d)``; for p = 1 this estimates a lower bound on W_1 in the
            units of W_1, exact for translations.
    """
    mean = safe_root(jnp.mean(sliced_distances(x, y, p, key=key, directions=directions) ** p), p)
    return mean * slicing_constant(jnp.shape(x)[1]) if scaled else mean


@jax.jit
def marginal_wasserstein(x: jax.Array, y: jax.Array, basis: jax.Array | None = None) -> jax.Array:
    """sqrt( sum_i W_1(marginal i)^2 ), a lower bound on W_1 that sorting alone certifies.

    By Jensen's inequality E|x - y| >= |(E|x_1 - y_1|, ..., E|x_d - y_d|)| under any coupling. It holds
    in every orthonormal basis, is exact for translations (unlike a finite number of slices) and costs
    O(d N log N).

    Args:
        x: points (N, d).
        y: points (M, d).
        basis: orthonormal columns (d, d); the coordinate axes by default.
    """
    if basis is not None:
        x, y = x @ basis, y @ basis
    return safe_norm(jax.vmap(wasserstein, in_axes=(1, 1))(x, y))
