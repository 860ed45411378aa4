"""Bounds on W_1 between the outputs of a layer at two times: the theorems of the unitization paper, corrected.

The functions take samples x (after) and y (before), use population moments, hold for the empirical measures themselves
and are pure JAX. What the paper printed stands beside these bounds in ``meanflow_papers.unitization.bounds``; bounds
that know what the layer does (unitization, gamma and beta) are in ``meanflow_papers.unitization.corrected``.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from meanflow import _boundary
from meanflow._boundary import Count, Positive, array, checked

Samples = Annotated[Float[ArrayLike, "_ d"], array((None, None), squares=True)]


@checked
@jax.jit
def moment_bound(x: Samples, y: Samples) -> Float[Array, ""]:
    """Return the upper bound sqrt(sum var + sum var' + |dmu|^2) from two moments (Theorem 1, corrected).

    Here var and var' are the variances of the features of x and y, and dmu is the difference of their means. The bound
    follows from the independent coupling and W_1 <= W_2, and it is sharp.

    Args:
        x: outputs after.
        y: outputs before.

    >>> from meanflow.transport import wasserstein
    >>> dirac, pair = jnp.zeros((2, 1)), jnp.array([[-2.0], [2.0]])
    >>> print(moment_bound(pair, dirac), wasserstein(pair, dirac))
    2.0 2.0
    """
    _boundary.shape("y", y, (None, jnp.shape(x)[1]))
    x, y = jnp.asarray(x), jnp.asarray(y)
    # E|x - y|^2 of independent x and y is the sum of all variances plus the squared distance of the means
    variance = jnp.sum(jnp.var(x, axis=0)) + jnp.sum(jnp.var(y, axis=0))
    shift = jnp.sum(jnp.square(jnp.mean(x, axis=0) - jnp.mean(y, axis=0)))
    return jnp.sqrt(variance + shift)


@checked
def truncated_power(x: Float[ArrayLike, "*n d"], p: Count, c: Positive) -> Float[Array, "*n"]:
    """Return f_{p,C}(x) = sum_i clip(x_i, -C, C)^p / (p C^(p-1) sqrt(d)), a 1-Lipschitz function of each sample.

    Args:
        x: samples.
        p: power, an integer from 1 on.
        c: C > 0, where the entries are clipped.

    >>> print(truncated_power(jnp.array([3.0]), 2, 1.0))
    0.5
    """
    x = jnp.asarray(x)
    ratio = jnp.clip(x / c, -1, 1)  # scaled first: C^p overflows float32 early
    return c * jnp.sum(ratio**p, axis=-1) / (p * x.shape[-1] ** 0.5)


@checked
def power_bound(x: Samples, y: Samples, p: Count, c: Positive) -> Float[Array, ""]:
    """Return the lower bound |E f_{p,C}(x) - E f_{p,C}(y)| (Theorem 2), where f is ``truncated_power``.

    The paper asks for p >= 2; p = 1 is valid too.

    Args:
        x: outputs after.
        y: outputs before.
        p: power, an integer from 1 on.
        c: C > 0, where the entries are clipped.

    >>> print(power_bound(jnp.zeros((2, 1)), jnp.ones((2, 1)), 1, 1.0))
    1.0
    """
    _boundary.shape("y", y, (None, jnp.shape(x)[1]))
    return jnp.abs(jnp.mean(truncated_power(x, p, c)) - jnp.mean(truncated_power(y, p, c)))


@checked
@partial(jax.jit, static_argnames="orders")
def best_power_bound(x: Samples, y: Samples, orders: tuple[Count, ...] = (1, 2, 3, 4)) -> Float[Array, ""]:
    """Return the largest ``power_bound`` over several powers and nine values of C.

    The values of C run from 1/16 to 1 times the largest entry of the samples.

    Args:
        x: outputs after.
        y: outputs before.
        orders: the powers.

    >>> print(best_power_bound(jnp.zeros((2, 1)), jnp.ones((2, 1))))
    1.0
    """
    _boundary.shape("y", y, (None, jnp.shape(x)[1]))
    top = jnp.maximum(jnp.max(jnp.abs(x)), jnp.max(jnp.abs(y)))
    # samples that are all zero: any C gives the bound 0
    top = jnp.where(top > 0, top, 1)
    scales = top * jnp.geomspace(1 / 16, 1, 9, dtype=top.dtype)
    return jnp.max(jnp.stack([jax.vmap(lambda c, p=p: power_bound(x, y, p, c))(scales) for p in orders]))
