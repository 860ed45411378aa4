"""Expectations of four activations, E[s'(x_i) s'(x_k) s(x_v) s(x_w)], for jointly Gaussian numbers of mean zero.

They are what one step of gradient descent on a fresh sample adds to the products of the weights. For erf there is a
closed form. For ReLU the covariance of the pair (i, k) with (v, w) is switched on along a path: at its start the two
pairs are independent, and its slope is a sum of closed forms (Plackett's identity), so that one integral is left.
"""

import math
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from meanflow._numerics import safe_divide, safe_sqrt
from meanflow.activations import Activation, Stretched
from meanflow.kernels._infinite.dual import _known_name, dual_activation

# (covariance (N, N), i, k) -> (N, N), the expectations for all v and w
Fourth: TypeAlias = Callable[[Array, Array, Array], Array]


def _erf(c: Float[Array, "N N"], i: Int[Array, ""], k: Int[Array, ""]) -> Float[Array, "N N"]:
    """Return the expectations for s = erf: under the weight s'(x_i) s'(x_k) the others are Gaussian again."""
    c = 2 * c  # erf(z) = g(sqrt(2) z) with g(u) = erf(u / sqrt(2)), for which the formulas are short
    p, q, r = 1 + c[i, i], 1 + c[k, k], c[i, k]
    gap, u, v = p * q - r**2, c[i], c[k]
    outer = lambda a, b: a[:, None] * b[None, :]
    rest = c - (q * outer(u, u) - r * (outer(u, v) + outer(v, u)) + p * outer(v, v)) / gap
    size = jnp.sqrt(1 + jnp.diagonal(rest))
    # two derivatives bring a factor sqrt(2) each
    return 2 * (2 / math.pi) ** 2 / jnp.sqrt(gap) * jnp.arcsin(rest / outer(size, size))


# The integrand has roots of 1 - t at the end t = 1 where variables coincide: in s, t = 1 - (1 - s)^2, it is smooth.
_NODES, _MASS = np.polynomial.legendre.leggauss(32)
_PATH, _MASS = 1 - (1 - (_NODES + 1) / 2) ** 2, (1 - (_NODES + 1) / 2) * _MASS


def _conditional(variance: Array, covariance: Array, given: Array) -> Array:
    """Return a variance once another number is known; what rounding leaves of zero becomes zero."""
    rest = variance - safe_divide(covariance**2, given)
    return jnp.where(rest > 64 * float(jnp.finfo(rest.dtype).eps) * variance, rest, 0.0)


def _both_positive(p: Array, q: Array, r: Array) -> Array:
    """Return the probability that two numbers of variances p, q and covariance r are positive; 1/4 if one is 0."""
    gap = p * q - r**2
    inside = gap > 64 * float(jnp.finfo(gap.dtype).eps) * p * q
    angle = jnp.arctan2(r, safe_sqrt(jnp.where(inside, gap, 1.0)))
    flat = jnp.where(p * q > 0, math.pi / 2 * jnp.sign(r), 0.0)
    return 0.25 + jnp.where(inside, angle, flat) / (2 * math.pi)


def _density(variance: Array) -> Array:
    """Return the density at 0 of a Gaussian number; 0 for one that is 0 always, whose products with it vanish."""
    return safe_divide(jnp.ones_like(variance), safe_sqrt(2 * math.pi * variance))


def _three(u: Array, cross: Array, c: Array) -> Array:
    """Return E[1(u > 0) 1(x_v > 0) relu(x_w)], (N, N), for variance ``u``, covariances (N,) with u and ``c`` (N, N)."""
    x, w, variance = cross[:, None], cross[None, :], jnp.diagonal(c)
    p, q = variance[:, None] + 0 * c, variance[None, :] + 0 * c
    # E[w h] = sum of the covariances of w with the three numbers times the expected derivatives of h, by Stein
    on = lambda known, a, b, ab, ka, kb: (
        _density(known)
        * _both_positive(
            _conditional(a, ka, known), _conditional(b, kb, known), ab - safe_divide(ka * kb, known)
        )
    )
    u = u + 0 * c
    return q * on(q, u, p, x, w, c) + w * on(u, p, q, c, x, w) + c * on(p, u, q, w, x, c)


def _relu(c: Float[Array, "N N"], i: Int[Array, ""], k: Int[Array, ""]) -> Float[Array, "N N"]:
    """Return the expectations for s = relu."""
    dual = dual_activation("relu")
    variance = jnp.diagonal(c)
    left, right = jnp.broadcast_arrays(variance[:, None], variance[None, :])
    values = dual(left, right, c).value

    def slope(t: Array) -> Array:
        total = jnp.zeros_like(c)
        for a, b in ((i, k), (k, i)):
            # the number x_a is held at 0, where its step sits
            near, far, own = t * c[a], t * c[b], c[a, a]
            known = c - safe_divide(near[:, None] * near[None, :], own)
            known = jnp.where(jnp.eye(len(c), dtype=bool), jnp.diag(_conditional(variance, near, own)), known)
            other = _conditional(c[b, b], c[a, b], own)
            cross = far - safe_divide(near * c[a, b], own)
            total += _density(own) * c[a][:, None] * _three(other, cross, known)
        return total + total.T

    path, mass = jnp.asarray(_PATH, c.dtype), jnp.asarray(_MASS, c.dtype)
    start = _both_positive(c[i, i], c[k, k], c[i, k]) * values
    return start + jnp.tensordot(mass, jax.vmap(slope)(path), 1)


CLOSED: dict[str, Fourth] = {"erf": _erf, "relu": _relu}


def fourth_moments(activation: Activation) -> Fourth:
    """Return the map (covariance (N, N), i, k) -> (N, N) of the expectations of an activation.

    Raises:
        ValueError: for activations other than erf and relu, or these stretched.

    >>> same = jnp.ones((1, 1))
    >>> round(float(fourth_moments(jax.nn.relu)(same, 0, 0)[0, 0]), 6)  # E[relu(x)^2]
    0.5
    """
    name = _known_name(activation)
    if name not in CLOSED:
        raise ValueError(
            f"activation must be one of {list(CLOSED)}, or one of them Stretched, got {activation}"
        )
    if not isinstance(activation, Stretched):
        return CLOSED[name]
    square = activation.frequency**2
    return lambda c, i, k: square * CLOSED[name](square * c, i, k)
