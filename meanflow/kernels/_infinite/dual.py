"""Dual activations: E[phi(u) phi(v)] and E[phi'(u) phi'(v)] for jointly Gaussian u, v of mean zero.

Closed forms for linear, relu, leaky_relu, erf, sine and gaussian; a two-dimensional trapezoid rule for any
other activation, which for smooth ones converges faster than Gauss-Hermite (tanh at variance 4: 1e-15 with
201 nodes, where Gauss-Hermite needs over 200 for 1e-8).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanflow._numerics import safe_divide, safe_sqrt
from meanflow.activations import NAMED, Activation, Stretched, resolve


class Dual(NamedTuple):
    """The dual of an activation, elementwise in the given variances and covariance.

    Attributes:
        value: E[phi(u) phi(v)].
        slope: E[phi'(u) phi'(v)].
    """

    value: Float[Array, "..."]
    slope: Float[Array, "..."]


# (variance of u, variance of v, covariance) -> Dual; called a, c, b below
DualFunction: TypeAlias = Callable[[Array, Array, Array], Dual]


def _linear(a: Array, c: Array, b: Array) -> Dual:
    return Dual(b, jnp.ones_like(b))


def _size(variance: Array) -> Array:
    """Return a power of two near the standard deviation, a constant of differentiation.

    The product of two variances underflows or overflows long before they do themselves (float32: inputs of size 1e-10
    and 1e10). Divided by powers of two, numbers of ordinary size lose not a bit.
    """
    exponent = jnp.frexp(jax.lax.stop_gradient(variance))[1]
    return jnp.ldexp(jnp.ones_like(variance), exponent // 2)


@jax.jit
def _angle(a: Array, c: Array, b: Array) -> tuple[Array, Array]:
    """Return |u| |v| sin(angle) and the angle between u and v.

    Where they are parallel, or one is zero, the angle is exactly 0 or pi and its gradient, infinite there, is 0.
    """
    s, t = _size(a), _size(c)
    a, c, b = a / s / s, c / t / t, b / s / t
    gap = a * c - b**2
    # what is below this is rounding, and would be read as an angle of 1e-8
    inside = gap > 4 * float(jnp.finfo(b.dtype).eps) * a * c
    root = safe_sqrt(jnp.where(inside, gap, 0.0))
    flat = jnp.where(b < 0, math.pi, 0.0).astype(b.dtype)
    return root * s * t, jnp.where(inside, jnp.arctan2(root, jnp.where(inside, b, 1.0)), flat)


@jax.custom_jvp
def _relu_value(a: Array, c: Array, b: Array) -> Array:
    """Return E[relu(u) relu(v)]; its derivative is given below, hence finite and accurate at every angle and norm."""
    root, angle = _angle(a, c, b)
    return (root + (math.pi - angle) * b) / (2 * math.pi)


@_relu_value.defjvp
def _relu_value_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    (a, c, b), (da, dc, db) = primals, tangents
    root, angle = _angle(a, c, b)
    change = (math.pi - angle) * db + root / 2 * (safe_divide(da, a) + safe_divide(dc, c))
    return _relu_value(a, c, b), change / (2 * math.pi)


def _relu(a: Array, c: Array, b: Array) -> Dual:
    return Dual(_relu_value(a, c, b), (math.pi - _angle(a, c, b)[1]) / (2 * math.pi))


def _leaky_relu(a: Array, c: Array, b: Array, leak: float = 0.01) -> Dual:
    # phi(u) = leak u + (1 - leak) relu(u), and E[u relu(v)] = b / 2
    relu = _relu(a, c, b)
    value = leak**2 * b + leak * (1 - leak) * b + (1 - leak) ** 2 * relu.value
    return Dual(value, leak**2 + leak * (1 - leak) + (1 - leak) ** 2 * relu.slope)


@partial(jax.jit, static_argnums=3)
def _shifted(a: Array, c: Array, b: Array, w: float) -> tuple[Array, Array, Array, Array]:
    """Return r, w b / (s t), s and t, of which (1 + w a)(1 + w c) - (w b)^2 = (r s t)^2."""
    s, t = _size(1 / w + a), _size(1 / w + c)
    u, v = 1 / (w * s * s), 1 / (w * t * t)
    a, c, b = a / s / s, c / t / t, b / s / t
    gap = a * c - b**2
    # rounding, which the other terms outweigh unless variances are huge; the derivative stays that of the gap
    noise = jnp.where(gap < 4 * float(jnp.finfo(b.dtype).eps) * a * c, gap, 0.0)
    square = u * v + u * c + v * a + (gap - jax.lax.stop_gradient(noise))
    return w * jnp.sqrt(square), w * b, s, t


def _erf(a: Array, c: Array, b: Array) -> Dual:
    root, b, s, t = _shifted(a, c, b, 2.0)
    return Dual((2 / math.pi) * jnp.arctan2(b, root), (4 / math.pi) / root / s / t)


def _sine(a: Array, c: Array, b: Array) -> Dual:
    close, far = jnp.exp(-(a + c - 2 * b) / 2), jnp.exp(-(a + c + 2 * b) / 2)
    return Dual((close - far) / 2, (close + far) / 2)


def _gaussian(a: Array, c: Array, b: Array) -> Dual:
    root, b, s, t = _shifted(a, c, b, 1.0)
    value = 1 / root / s / t
    return Dual(value, value / s / t * (b / root**2))


CLOSED: dict[str, DualFunction] = {
    "linear": _linear,
    "relu": _relu,
    "leaky_relu": _leaky_relu,
    "erf": _erf,
    "sine": _sine,
    "gaussian": _gaussian,
}


# Nodes in each direction, over 9 standard deviations to both sides: tanh at variance 4 is right to 1e-15.
_GRID = np.linspace(-9.0, 9.0, 201)
_MASS = np.exp(-0.5 * _GRID**2) * (_GRID[1] - _GRID[0]) / math.sqrt(2 * math.pi)


def trapezoid(activation: str | Activation) -> DualFunction:
    """Return the dual of a smooth activation by the trapezoid rule.

    Args:
        activation: a name, or a function that maps arrays elementwise.

    Returns:
        (variance of u, variance of v, covariance) -> ``Dual``. Time: 201^2 activations an entry; memory 64 x 201^2. A
        kink costs accuracy (relu: 1e-3).

    >>> one, zero = jnp.ones(1), jnp.zeros(1)
    >>> bool(jnp.abs(trapezoid("tanh")(one, one, zero).value[0]) < 1e-6)  # odd, and u, v independent
    True
    """
    phi = resolve(activation)

    def one(entry: tuple[Array, Array, Array]) -> Dual:
        a, c, b = entry
        z, w = jnp.asarray(_GRID, b.dtype), jnp.asarray(_MASS, b.dtype)
        first, second = jnp.sqrt(a), jnp.sqrt(c)
        size = first * second
        safe = jnp.where(size > 0.0, size, 1.0)
        cosine = jnp.clip(b / safe, -1.0, 1.0)
        gap = (1.0 - cosine) * (1.0 + cosine)
        sine = safe_sqrt(gap)
        u = first * z
        v = second * (cosine * z[:, None] + sine * z[None, :])
        left, left_slope = jax.jvp(phi, (u,), (jnp.ones_like(u),))
        right, right_slope = jax.jvp(phi, (v,), (jnp.ones_like(v),))
        return Dual((w * left) @ (right @ w), (w * left_slope) @ (right_slope @ w))

    def dual(a: Array, c: Array, b: Array) -> Dual:
        shape = jnp.shape(b)
        entries = tuple(jnp.broadcast_to(e, shape).reshape(-1) for e in (a, c, b))
        out = jax.lax.map(one, entries, batch_size=64)
        return Dual(out.value.reshape(shape), out.slope.reshape(shape))

    return dual


def _known_name(activation: str | Activation) -> str | None:
    """Return the name of an activation: a function that has one is as good as its name."""
    if isinstance(activation, str):
        return activation
    if isinstance(activation, Stretched):
        return activation.name
    return {function: name for name, function in NAMED.items()}.get(activation)


def has_closed_form(activation: str | Activation) -> bool:
    """Say whether ``dual_activation`` knows a closed form, and needs no quadrature.

    >>> has_closed_form("relu"), has_closed_form(jnp.tanh)
    (True, False)
    """
    return _known_name(activation) in CLOSED


def dual_activation(activation: str | Activation) -> DualFunction:
    """Return the dual of phi as a function (variance of u, variance of v, covariance) -> ``Dual``.

    Args:
        activation: a name, or a function that maps arrays elementwise. Names with a closed form (``CLOSED``) use it,
            also where the argument is ``Stretched``; everything else uses ``trapezoid``.

    >>> import jax.numpy as jnp
    >>> one = jnp.ones(())
    >>> float(dual_activation("relu")(one, one, one).value)
    0.5
    """
    name = _known_name(activation)
    if name not in CLOSED:
        return trapezoid(activation)
    base = CLOSED[name]
    if not isinstance(activation, Stretched):
        return base
    # of phi(w z) the arguments have w^2 times the covariance, and two derivatives give w^2 more
    factor = activation.frequency**2

    def stretched(a: Array, c: Array, b: Array) -> Dual:
        out = base(factor * a, factor * c, factor * b)
        return Dual(out.value, factor * out.slope)

    return stretched
