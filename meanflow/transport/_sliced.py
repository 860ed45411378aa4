"""Distances through projections on lines, the sliced and the marginal Wasserstein distance: lower bounds on W_1."""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Key

from meanflow import _boundary
from meanflow._boundary import Count, PRNGKey, checked, number
from meanflow._numerics import magnitude, power_mean, scaled_norm
from meanflow.transport._exact import wasserstein


def slicing_constant(dimension: int) -> float:
    """Return c_d = sqrt(pi) Gamma((d+1)/2) / Gamma(d/2) for dimension d.

    It is 1 / E|<u, e>| for u uniform on the unit sphere of R^d. So c_d times the sliced W_1 is a lower bound on W_1,
    and equal to it for translations.

    >>> print(round(slicing_constant(1), 6), round(slicing_constant(3), 6))
    1.0 2.0
    """
    d = _boundary.whole("dimension", dimension, 1)
    # by logarithms: the gamma function overflows from d = 343 on
    return math.sqrt(math.pi) * math.exp(math.lgamma((d + 1) / 2) - math.lgamma(d / 2))


@partial(jax.jit, static_argnames=("p", "directions"))
def sliced_distances(
    x: Float[Array, "n d"], y: Float[Array, "m d"], p: float, key: Key[Array, ""], directions: int
) -> Float[Array, "{directions}"]:
    """Return W_p between the projections of two clouds on random directions, each a lower bound on W_p(x, y)."""
    # normalized Gaussian vectors are uniform on the sphere
    normals = jax.random.normal(key, (directions, x.shape[1]), x.dtype)
    units = normals / jnp.linalg.norm(normals, axis=1, keepdims=True)
    size = magnitude(jnp.concatenate([x, y]))  # sums of large entries leave the range of floats
    return size * jax.vmap(lambda u: wasserstein(x / size @ u, y / size @ u, p))(units)


@checked
def sliced_wasserstein(
    x: Float[ArrayLike, "n d"],
    y: Float[ArrayLike, "m d"],
    p: Annotated[float, number(low=1, static=True)] = 1,
    *,
    key: PRNGKey,
    directions: Count = 256,
    scaled: bool = False,
) -> Float[Array, ""]:
    """Return the sliced distance, (mean over directions of W_p(projections)^p)^(1/p).

    It works under jit, vmap and grad, and costs O(L (d N + N log N)) for L directions.

    Args:
        x: points (N, d).
        y: points (M, d).
        p: order, at least 1.
        key: PRNG key of the directions; the Monte Carlo error falls like 1/sqrt(directions).
        directions: number of random directions.
        scaled: multiply by c_d = sqrt(pi) Gamma((d+1)/2) / Gamma(d/2). For p = 1 the result then estimates a lower
            bound on W_1 in the units of W_1, which is exact for translations.

    >>> x = jax.random.normal(jax.random.key(0), (100, 3))
    >>> moved = sliced_wasserstein(x, x + 1.0, key=jax.random.key(1), directions=500, scaled=True)
    >>> bool(abs(moved - 3**0.5) < 0.1)
    True
    """
    if jnp.shape(x)[1] != jnp.shape(y)[1]:
        raise ValueError(f"x and y must have shapes (N, d) and (M, d), got {jnp.shape(x)} and {jnp.shape(y)}")
    x, y = (jnp.asarray(u, jnp.result_type(x, y)) for u in (x, y))
    each = sliced_distances(x, y, p, key, directions)
    size = magnitude(each)
    mean = size * power_mean(each / size, p)
    return mean * slicing_constant(jnp.shape(x)[1]) if scaled else mean


@jax.jit
def marginal_wasserstein(x: Float[ArrayLike, "n d"], y: Float[ArrayLike, "m d"]) -> Float[Array, ""]:
    """Return sqrt( sum_i W_1(marginal i)^2 ), a lower bound on W_1 that needs nothing but sorting.

    By Jensen's inequality E|x - y| >= |(E|x_1 - y_1|, ..., E|x_d - y_d|)| under any coupling. The bound is exact for
    translations (unlike a finite number of slices) and costs O(d N log N).

    >>> print(marginal_wasserstein(jnp.zeros((4, 2)), jnp.full((4, 2), 3.0)).round(4))
    4.2426
    """
    return scaled_norm(jax.vmap(wasserstein, in_axes=(1, 1))(jnp.asarray(x), jnp.asarray(y)))
