"""The motion of a neuron in a cell of the arrangement of kinks, in closed form.

With the residual frozen and no kink met, the force g on a neuron is constant, and its inner weights b and outer weight
a, which learn at rates kp and kc, obey

    b' = -kp a g,    a' = -kc <g, b>.

This is a straight line along g, covered with hyperbolic time (``travel``); a^2/kc - |b|^2/kp is conserved. A quantity
<x, b> = Z with H = <x, g>, S = <g, b>, w^2 = kp kc |g|^2 and T = 2 tanh(w t/2)/w vanishes where

    (kp kc H S/2 - Z w^2/4) T^2 - kp H a T + Z = 0,

a quadratic equation that is regular at g = 0 (``first_root``, ``clock_time``).
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanflow._numerics import safe_sqrt

Numbers = Float[Array, "*n"]
Vector = Float[Array, " m"]


def hyperbolic(v: Numbers) -> tuple[Numbers, Numbers]:
    """Return sinh(w)/w and (cosh(w) - 1)/w^2 as smooth functions of v = w^2 >= 0.

    Both come from h = sinh(w/2)/(w/2): they are h cosh(w/2) = h sqrt(1 + v h^2/4), and h^2/2.
    """
    half = _half_sine(v)
    square = half * half
    return half * jnp.sqrt(1 + v * square / 4), square / 2


@jax.custom_jvp
def _half_sine(v: Numbers) -> Numbers:
    """Return h = sinh(w/2)/(w/2) for v = w^2."""
    w = jnp.sqrt(v)
    # by exp(w/2) - 1 neither end cancels; a series would be computed anew by everything that is made of it
    grown = jnp.expm1(w / 2)
    return jnp.where(v > 0, (grown + grown / (grown + 1)) / jnp.where(v > 0, w, 1.0), 1.0)


@_half_sine.defjvp
def _half_sine_jvp(primals: tuple[Numbers], tangents: tuple[Numbers]) -> tuple[Numbers, Numbers]:
    (v,), (change,) = primals, tangents
    half = _half_sine(v)
    # dh/dv = (cosh(w/2) - h) / 2v, which cancels at small arguments: these go by the series
    small = v < 0.25
    inner = jnp.where(small, v, 0.0)
    series = jnp.zeros_like(v)
    for n in reversed(range(1, 7)):
        series = series * inner + n / (4.0**n * math.factorial(2 * n + 1))
    far = (jnp.sqrt(1 + v * half * half / 4) - half) / jnp.where(small, 1.0, 2 * v)
    return half, change * jnp.where(small, series, far)


def first_root(a: Numbers, b: Numbers, z: Numbers, g2: Float[Array, "*#n"]) -> Numbers:
    """Return the first zero T > 0 of a T^2 + b T + z that has g T < 2, or inf if there is none.

    A neuron that leaves the ray it is on (z = 0, b >= 0) is not held back: the root at 0 is skipped. Entries
    without a root are masked before anything is divided, so that derivatives stay finite.

    Args:
        a, b, z: coefficients, with z >= 0.
        g2: g^2; g T = 2 tanh(g t/2) is below 2 at every time t.
    """
    square = b * b - 4 * a * z
    falling = b < 0
    real = (square >= 0) & (falling | (a < 0))
    root = safe_sqrt(jnp.where(real, square, 1.0))
    # of the two forms of the quadratic formula each sign of b has one that does not cancel
    top = jnp.where(falling, 2 * z, b + root)
    bottom = jnp.where(real, jnp.where(falling, root - b, -2 * a), 1.0)
    scaled = top / bottom
    return jnp.where(real & (g2 * scaled**2 < 4), scaled, jnp.inf)


def clock_time(scaled: Numbers, g2: Numbers) -> Numbers:
    """Return the time t at which 2 tanh(g t/2)/g equals ``scaled``; inf for inf. It is not differentiated."""
    # t = T artanh(u)/u with u = g T/2
    ratio = jnp.sqrt(g2) * scaled / 2
    bent = (ratio > 0) & (ratio < 1)
    return jnp.where(
        bent, scaled * (jnp.arctanh(jnp.where(bent, ratio, 0.5)) / jnp.where(bent, ratio, 0.5)), scaled
    )


def travel(
    a: Vector, work: Vector, g2: Vector, inner_rate: Vector, outer_rate: Vector, time: Vector
) -> tuple[Vector, Vector]:
    """Return a at ``time``, and the shift for which b has become b - shift g.

    Args:
        a: outer weights.
        work: S = <g, b>.
        g2: w^2 = kp kc |g|^2.
        inner_rate, outer_rate: kp and kc.
        time: how long each neuron moves.
    """
    sine, cosine = hyperbolic(g2 * time**2)
    sine, cosine = time * sine, time**2 * cosine
    shift = inner_rate * (a * sine - outer_rate * work * cosine)
    return a + a * g2 * cosine - outer_rate * work * sine, shift
