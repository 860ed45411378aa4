"""Cubic splines as the limit of training the output weights of a wide univariate ReLU network.

Inside the support of the knots the random-feature kernel is k0 + k1 xz + k3 |x-z|^3, so its interpolant is a cubic
spline f(x) = d + s x + sum_j w_j |x - x_j|^3 whose constant d and slope s are shrunk by a Gaussian prior of variances
k0 and k1: sum w = (k3/k0) d and sum w x = (k3/k1) s. It is the natural spline only in the limit k0, k1 -> infinity
(wide bias support), where the kernel matrix is hopelessly conditioned (1e13 at bound 1000). ``_banded`` never forms it:
it solves for f'' in O(n).
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from meanflow import _boundary
from meanflow._boundary import array, checked, count
from meanflow.univariate._kernels import AnyLaw, SignsLaw, UniformLaw, weight_law

Samples = Annotated[Float[ArrayLike, " n"], array((None,), squares=True)]


class Spline(eqx.Module):
    """A piecewise cubic function, to be called on arrays of any shape; O(log n) for each point.

    Attributes:
        nodes: sorted samples, (n,).
        taylor: (n + 1, 4) value, first, second and third derivative of each piece: row k + 1 is the piece to
            the right of nodes[k], row 0 that to the left of nodes[0], expanded there.
        constant, slope: the affine part d + s x, which is the mean of the two outer cubics.
    """

    nodes: Float[Array, " n"]
    taylor: Float[Array, "n_plus_1 4"]
    constant: Float[Array, ""]
    slope: Float[Array, ""]

    def __call__(self, x: Float[ArrayLike, "*x"]) -> Float[Array, "*x"]:
        """Return the values at x."""
        return self.derivative(x, 0)

    @checked
    @partial(jax.jit, static_argnames="order")
    def derivative(
        self, x: Annotated[Float[ArrayLike, "*x"], array(least=0)], order: Annotated[int, count(0, 3)] = 1
    ) -> Float[Array, "*x"]:
        """Return the derivative of order 0 to 3 at x; the third one jumps at the nodes."""
        points = jnp.asarray(x, jnp.result_type(x, self.nodes))
        piece = jnp.searchsorted(self.nodes, points, side="right")
        step = points - self.nodes[jnp.maximum(piece - 1, 0)]
        value = jnp.zeros_like(points)
        for power in range(3, order - 1, -1):  # Horner
            value = value * step / (power - order + 1) + self.taylor[piece, power]
        return value


def _assemble(
    x: Float[Array, " n"],
    y: Float[Array, " n"],
    second: Float[Array, " n"],
    outer: Float[Array, ""],
    constant: Float[Array, ""],
    slope: Float[Array, ""],
) -> Spline:
    """Make a spline from values and second derivatives at sorted nodes; ``outer`` is the third derivative beyond."""
    # On each cell f'' is linear between its values at the nodes; f' at the left end then follows from the values of f,
    # and f' at the last node from integrating f'' over the last cell.
    h = jnp.diff(x)
    first = jnp.diff(y) / h - h * (2 * second[:-1] + second[1:]) / 6
    last = first[-1] + h[-1] * (second[-2] + second[-1]) / 2
    third = jnp.diff(second) / h
    columns = [
        jnp.concatenate([y[:1], y]),
        jnp.concatenate([first[:1], first, last[None]]),
        jnp.concatenate([second[:1], second]),
        jnp.concatenate([-outer[None], third, outer[None]]),
    ]
    return Spline(x, jnp.stack(columns, axis=1), constant, slope)


def _samples(
    x: Float[ArrayLike, " n"], y: Float[ArrayLike, " n"]
) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """Return the samples sorted by x, in one dtype; at least two, and no two at one place."""
    dtype = jnp.result_type(x, y, 0.0)
    x, y = jnp.asarray(x, dtype), jnp.asarray(y, dtype)
    _boundary.shape("y", y, x.shape)
    _boundary.bounds("number of samples", x.shape[0], low=2)
    _boundary.finite("cubes of the samples x", x**3)
    order = jnp.argsort(x)
    x, y = x[order], y[order]
    _boundary.bounds("gaps between the samples x", jnp.diff(x), above=0.0)
    return x, y


@jax.jit
def _banded(x: Float[Array, " n"], y: Float[Array, " n"], shrink: tuple[ArrayLike, ArrayLike]) -> Spline:
    """Return the interpolant with sum w = shrink[0] d and sum w x = shrink[1] s, by one tridiagonal solve."""
    # The unknowns are M = f'' at the nodes. Continuity of f' at the inner nodes is the usual tridiagonal system
    #     h_{k-1} M_{k-1} + 2 (h_{k-1} + h_k) M_k + h_k M_{k+1} = 6 (slope_k - slope_{k-1}),
    # and the two end values stay free (first and last row are M_0 and M_{n-1} themselves).
    h = jnp.diff(x)
    zero, one = jnp.zeros_like(x[:1]), jnp.ones_like(x[:1])
    inner = 6 * jnp.diff(jnp.diff(y) / h)
    # f'' at the nodes is linear in its two end values: columns for y, for the left end, for the right end
    flat = jnp.zeros_like(x)
    sides = jnp.stack([jnp.concatenate([zero, inner, zero]), flat.at[0].set(1), flat.at[-1].set(1)])
    lower = jnp.concatenate([zero, h[:-1], zero])
    upper = jnp.concatenate([zero, h[1:], zero])
    diagonal = jnp.concatenate([one, 2 * (h[1:] + h[:-1]), one])
    seconds = jax.lax.linalg.tridiagonal_solve(lower, diagonal, upper, sides.T).T

    def outer_mean(second: jax.Array, ends: jax.Array, outer: jax.Array, rise: jax.Array) -> jax.Array:
        # constant and slope of the mean of the two outer cubics, each expanded at its end node
        (left, right), (x0, x1), (y0, y1) = second[jnp.array([0, -1])], x[jnp.array([0, -1])], ends
        slope0 = rise[0] - h[0] * (2 * second[0] + second[1]) / 6
        slope1 = rise[-1] + h[-1] * (second[-2] + 2 * second[-1]) / 6
        value = (y0 - x0 * slope0 + x0**2 / 2 * left + x0**3 / 6 * outer) + (
            y1 - x1 * slope1 + x1**2 / 2 * right - x1**3 / 6 * outer
        )
        tilt = (slope0 - x0 * left - x0**2 / 2 * outer) + (slope1 - x1 * right + x1**2 / 2 * outer)
        return jnp.stack([value, tilt]) / 2

    ends = y[jnp.array([0, -1])]
    p0, p1 = (jnp.asarray(p, x.dtype) for p in shrink)
    base = outer_mean(seconds[0], ends, jnp.zeros_like(p0), jnp.diff(y) / h)
    # sum w = p0 d and sum w x = p1 s fix f'' at the ends, 6 sum_j w_j |x_end - x_j|, and the third derivative
    # +-6 sum w beyond them, all linear in (d, s). The responses to d = 1 and to s = 1:
    unit = jnp.eye(2, dtype=x.dtype)
    responses = []
    for d, s in unit:
        edge = jnp.stack([-6 * (p0 * d * x[0] - p1 * s), 6 * (p0 * d * x[-1] - p1 * s)])
        responses.append((edge @ seconds[1:], 6 * p0 * d))
    gain = jnp.stack(
        [outer_mean(r, jnp.zeros_like(ends), o, jnp.zeros_like(h)) for r, o in responses], axis=1
    )
    # (d, s) must be the affine part of the spline that they produce: (d, s) = base + gain (d, s), two equations
    affine = jnp.linalg.solve(unit - gain, base)
    second = seconds[0] + affine[0] * responses[0][0] + affine[1] * responses[1][0]
    return _assemble(x, y, second, 6 * p0 * affine[0], affine[0], affine[1])


def cubic_law(name: str, value: object) -> SignsLaw | UniformLaw:
    """Accept the laws with a cubic kernel; return the law. This is a kind of ``meanflow._boundary``."""
    law = weight_law(name, value)
    if not isinstance(law, SignsLaw | UniformLaw):
        raise ValueError(f"{name} must have a cubic kernel, as b of a uniform law has, got {value}")
    return law


@checked
def spline_interpolant(
    x: Samples,
    y: Samples,
    *,
    law: Annotated[AnyLaw, cubic_law] | None = "signs",
) -> Spline:
    """Return what training c alone from c = 0 converges to at infinite width, equation (24), as a spline.

    Args:
        x: distinct inputs, (n,), n >= 2, where the kernel is cubic (|x| <= bound, or bound / slope).
        y: targets, (n,).
        law: "signs", "uniform", or the laws of a and b, as for ``wide_kernel``; b must be uniform. None for biases
            that spread over the whole line: the natural spline, the interpolant of least int f''^2, with f'' = 0 at
            both ends and linear beyond.

    Returns:
        The minimum-norm spline, equal to the network's function inside the cubic region. O(n log n). With a ridge, the
        function follows from ``wide_kernel`` by a solve of O(n^3).

    >>> import jax.numpy as jnp
    >>> from meanflow.measures import laws
    >>> x, y = jnp.array([-0.5, 0.0, 0.8]), jnp.array([1.0, -1.0, 0.5])
    >>> f = spline_interpolant(x, y, law={"a": laws.signs(), "b": laws.uniform(-100.0, 100.0)})
    >>> natural = spline_interpolant(x, y, law=None)
    >>> bool(jnp.abs(f(0.4) - natural(0.4)) < 1e-3)
    True
    """
    # (k3/k0, k3/k1) is 0 for a kernel of unbounded k0 and k1
    shrink: tuple[ArrayLike, ArrayLike] = (0.0, 0.0)
    if law is not None:
        cubic = cubic_law("law", law)
        reach, given = _boundary.concrete(cubic.reach()), _boundary.concrete(x)
        if reach is not None and given is not None and np.max(np.abs(given)) > reach * (1 + 1e-6):
            raise ValueError(
                f"x must lie in [-{reach}, {reach}], where the kernel is cubic; got {np.max(np.abs(given))}"
            )
        k0, k1, k3 = cubic.cubic()
        shrink = k3 / k0, k3 / k1
    return _banded(*_samples(x, y), shrink)
