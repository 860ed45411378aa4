"""RKHS norms of the univariate kernels: weighted curvature plus a penalty on the affine part.

``feature_norm`` measures a function by the random-feature kernel of a law, ``tangent_norm`` by its tangent kernel; both
are "univariate ReLU", Theorem 5 and Corollary 6, corrected. For a law symmetric under (a, b) -> (-a, -b) write

    f(x) = 1/2 int f''(u) abs(x - u) du + A x + D;
    norm(f)^2 = int f''^2 / nu_3 du + 4 (A, -D) M^-1 (A, -D)^T,     M = E[(a, b)(a, b)^T].

The published norm weighs curvature with nu_1 in place of nu_3 (both in ``kernels``) and has no affine part. A law with
slopes of one sign has no affine part, but f and f' must vanish at the inactive end of the knots. Functions are scalar
JAX callables; integrals use Gauss-Legendre nodes in arctan(u) between break points, so that f'' may be only piecewise
smooth.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from meanflow import _checks
from meanflow._checks import array, count, number
from meanflow.univariate._kernels import indicator, random_feature
from meanflow.univariate._weight_laws import DensityLaw, Scalar, Uniform, weight_law

Function = Callable[[Float[Array, ""]], Float[Array, ""]]
Breaks = Sequence[float] | Float[ArrayLike, "*k"]


class FeatureNorm(NamedTuple):
    """The squared random-feature norm of a function, in two parts: of f'' and of the affine part A x + D."""

    curvature: Float[Array, ""]
    affine: Float[Array, ""]

    @property
    def total(self) -> Float[Array, ""]:
        """Return the squared norm."""
        return self.curvature + self.affine


class TangentNorm(NamedTuple):
    """The squared tangent-kernel norm of one decomposition f = f_1 + f_2 + f_3, part by part.

    Attributes:
        feature: random-feature norm of f_1, which training c can reach.
        slope: norm of f_2, which training b can reach.
        ratio: norm of f_3, which training a can reach.
    """

    feature: FeatureNorm
    slope: Float[Array, ""]
    ratio: Float[Array, ""]

    @property
    def total(self) -> Float[Array, ""]:
        """Return the squared norm, an upper bound that the best decomposition attains."""
        return self.feature.total + self.slope + self.ratio


def _rule(law: DensityLaw, breaks: Breaks, nodes: int) -> tuple[jax.Array, jax.Array]:
    """Return nodes and weights on the knots' support, split at ``breaks``, at 0 and at the law's own kinks."""
    low, high = law.support()
    own = [law.reach(), -law.reach()] if isinstance(law, Uniform) else []
    cuts = jnp.concatenate([jnp.atleast_1d(jnp.asarray(breaks, float)), jnp.array([0.0, *own])])
    edges = jnp.arctan(jnp.sort(jnp.concatenate([jnp.stack([low, high]), jnp.clip(cuts, low, high)])))
    points, weights = np.polynomial.legendre.leggauss(nodes)
    half = (edges[1:] - edges[:-1])[:, None] / 2
    # cells of no width (a cut on the edge of the support) are moved inside and get weight 0
    empty = half < 16 * jnp.finfo(edges.dtype).eps
    half, left = jnp.where(empty, 0, half), edges[:-1, None]
    left = jnp.where(empty, jnp.sum(left[jnp.argmax(half)]) + jnp.max(half), left)
    u = jnp.tan(left + half * (1 + jnp.asarray(points, edges.dtype)[None, :]))
    return u.ravel(), (half * jnp.asarray(weights, edges.dtype)[None, :] * (1 + u * u)).ravel()


def density_law(name: str, value: object) -> DensityLaw:
    """Accept the laws whose knots have a density; return the law. This is a kind of ``meanflow._checks``."""
    law = weight_law(name, value)
    if not isinstance(law, DensityLaw):
        given = type(law).__name__
        raise ValueError(f"{name} must have a knot density, got {given}, which has none")
    return law


@_checks.arguments(f=_checks.function, law=density_law, breaks=array((), (None,), least=0), nodes=count(1))
def feature_norm(
    f: Function, *, law: str | DensityLaw = "signs", breaks: Breaks = (), nodes: int = 40
) -> FeatureNorm:
    """Return the squared RKHS norm of f for the random-feature kernel of ``law`` (Theorem 5, corrected).

    Args:
        f: scalar -> scalar, twice differentiable but for kinks of f'' at ``breaks``; f'' must vanish where
            the law has no knots.
        law: name or law object with a knot density.
        breaks: points where f'' is not smooth, shape (k,).
        nodes: quadrature nodes between two breaks.

    Returns:
        Curvature and affine parts; their sum is the squared norm.

    >>> norm = feature_norm(lambda u: random_feature(u, 0.5, law="radial"), law="radial", breaks=[0.5])
    >>> round(float(norm.total), 5)                      # the reproducing property: K(0.5, 0.5)
    0.625
    """
    law = density_law("law", law)
    u, du = _rule(law, breaks, nodes)
    second = jax.vmap(jax.grad(jax.grad(f)))(u)
    curvature = jnp.sum(du * second**2 / law.nu_3(u))
    if not law.symmetric:
        return FeatureNorm(curvature, jnp.zeros_like(curvature))
    zero = jnp.zeros((), u.dtype)
    slope = jax.grad(f)(zero) + jnp.sum(du * second * jnp.sign(u)) / 2
    constant = f(zero) - jnp.sum(du * second * jnp.abs(u)) / 2
    affine = jnp.stack([slope, -constant])
    return FeatureNorm(curvature, 4 * affine @ jnp.linalg.solve(law.moments(), affine))


def _gate_norm(
    at_zero: jax.Array, first: jax.Array, law: DensityLaw, u: jax.Array, du: jax.Array
) -> jax.Array:
    """Return the norm of the indicator kernel: int f'^2/nu_1, plus 4 D^2 for f = 1/2 int f'(u) sign(x-u) du + D."""
    curvature = jnp.sum(du * first**2 / law.nu_1(u))
    if not law.symmetric:
        return curvature
    return curvature + 4 * (at_zero + jnp.sum(du * first * jnp.sign(u)) / 2) ** 2


@_checks.arguments(law=density_law, c2=number(above=0), breaks=array((), (None,), least=0), nodes=count(1))
def tangent_norm(
    parts: tuple[Function, Function, Function],
    *,
    law: str | DensityLaw = "signs",
    c2: Scalar = 1.0,
    breaks: Breaks = (),
    nodes: int = 40,
) -> TangentNorm:
    """Return the squared tangent-kernel norm of one decomposition f = f_1 + f_2 + f_3 (Corollary 6, corrected).

    It is

        norm(f_1)^2 of ``feature_norm`` + (1/E c^2) [int f_2'^2/nu_1 + int (u f_3' - f_3)^2/(u^4 nu_1)].

    Symmetric laws add 4 D^2 for the constant part of f_2 and of f_3/u; one-signed laws ask f_2 and f_3/u to
    vanish at the inactive end.
    The norm of f is the infimum over decompositions; for a kernel section ``tangent_parts`` attains it.

    Args:
        parts: (f_1, f_2, f_3), scalar -> scalar, with f_3(0) = 0.
        law: name or law object with a knot density.
        c2: E(c^2).
        breaks: points where f_1'', f_2' or f_3' is not smooth, shape (k,).
        nodes: quadrature nodes between two breaks.
    """
    law = density_law("law", law)
    f1, f2, f3 = parts
    u, du = _rule(law, breaks, nodes)
    zero = jnp.zeros((), u.dtype)
    slope = _gate_norm(f2(zero), jax.vmap(jax.grad(f2))(u), law, u, du)
    quotient = (u * jax.vmap(jax.grad(f3))(u) - jax.vmap(f3)(u)) / u**2  # (f_3 / u)'
    ratio = _gate_norm(jax.grad(f3)(zero), quotient, law, u, du)
    return TangentNorm(feature_norm(f1, law=law, breaks=breaks, nodes=nodes), slope / c2, ratio / c2)


@_checks.arguments(z=number(), law=weight_law, c2=number(low=0))
def tangent_parts(
    z: Scalar, *, law: str | DensityLaw = "signs", c2: Scalar = 1.0
) -> tuple[Function, Function, Function]:
    """Return the best decomposition of the section K_NTK(., z): (K_RF, E(c^2) K_1, E(c^2) x z K_1)."""
    return (
        lambda x: random_feature(x, z, law=law),
        lambda x: c2 * indicator(x, z, law=law),
        lambda x: c2 * x * z * indicator(x, z, law=law),
    )
