"""RKHS norms of the univariate kernels: weighted curvature plus a penalty on the affine part.

Univariate ReLU, Theorem 5 and Corollary 6, corrected. For a law symmetric under (a, b) -> (-a, -b) write

    f(x) = 1/2 int f''(u) abs(x - u) du + A x + D;
    norm(f)^2 = int f''^2 / nu_3 du + 4 (A, -D) M^-1 (A, -D)^T,     M = E[(a, b)(a, b)^T].

The published norm weighs curvature with nu_1 in place of nu_3 and has no affine part. A one-signed law has no
affine part, but f and f' must vanish at the inactive end of the knots. Functions are scalar JAX callables;
integrals use Gauss-Legendre nodes in arctan(u) between break points, so piecewise smooth f'' is no trouble.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meanflow.univariate.kernels import Finite, Law, Scalar, Uniform, indicator, random_feature, resolve_law

Function = Callable[[jax.Array], jax.Array]


class FeatureNorm(NamedTuple):
    """Squared random-feature norm, in two parts."""

    curvature: jax.Array
    affine: jax.Array

    @property
    def total(self) -> jax.Array:
        """The squared norm."""
        return self.curvature + self.affine


class TangentNorm(NamedTuple):
    """Squared tangent-kernel norm of one decomposition f = f_1 + f_2 + f_3."""

    feature: FeatureNorm
    slope: jax.Array
    ratio: jax.Array

    @property
    def total(self) -> jax.Array:
        """The squared norm, an upper bound attained by the best decomposition."""
        return self.feature.total + self.slope + self.ratio


def _rule(law: Law, breaks: Sequence[float] | jax.Array, nodes: int) -> tuple[jax.Array, jax.Array]:
    """Nodes and weights on the knots' support, split at ``breaks``, at 0 and at the law's own kinks."""
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


def _checked(law: str | Law) -> Law:
    resolved = resolve_law(law)
    if isinstance(resolved, Finite):
        raise ValueError("law must have a knot density, got Finite; for finite clouds use minimum_norm")
    return resolved


def feature_norm(
    f: Function, *, law: str | Law = "signs", breaks: Sequence[float] | jax.Array = (), nodes: int = 40
) -> FeatureNorm:
    """Squared RKHS norm of f for the random-feature kernel of ``law`` (Theorem 5, corrected).

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
    law = _checked(law)
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


def _gate_norm(at_zero: jax.Array, first: jax.Array, law: Law, u: jax.Array, du: jax.Array) -> jax.Array:
    """Indicator kernel: int f'^2/nu_1, plus 4 D^2 where f = 1/2 int f'(u) sign(x-u) du + D."""
    curvature = jnp.sum(du * first**2 / law.nu_1(u))
    if not law.symmetric:
        return curvature
    return curvature + 4 * (at_zero + jnp.sum(du * first * jnp.sign(u)) / 2) ** 2


def tangent_norm(
    parts: tuple[Function, Function, Function],
    *,
    law: str | Law = "signs",
    c2: Scalar = 1.0,
    breaks: Sequence[float] | jax.Array = (),
    nodes: int = 40,
) -> TangentNorm:
    """Squared norm for the tangent kernel of one decomposition f = f_1 + f_2 + f_3 (Corollary 6, corrected).

        norm(f_1)^2 of ``feature_norm`` + (1/E c^2) [int f_2'^2/nu_1 + int (u f_3' - f_3)^2/(u^4 nu_1)]

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
    law = _checked(law)
    f1, f2, f3 = parts
    u, du = _rule(law, breaks, nodes)
    zero = jnp.zeros((), u.dtype)
    slope = _gate_norm(f2(zero), jax.vmap(jax.grad(f2))(u), law, u, du)
    quotient = (u * jax.vmap(jax.grad(f3))(u) - jax.vmap(f3)(u)) / u**2  # (f_3 / u)'
    ratio = _gate_norm(jax.grad(f3)(zero), quotient, law, u, du)
    return TangentNorm(feature_norm(f1, law=law, breaks=breaks, nodes=nodes), slope / c2, ratio / c2)


def tangent_parts(
    z: Scalar, *, law: str | Law = "signs", c2: Scalar = 1.0
) -> tuple[Function, Function, Function]:
    """The best decomposition of the section K_NTK(., z): (K_RF, E(c^2) K_1, E(c^2) x z K_1)."""
    return (
        lambda x: random_feature(x, z, law=law),
        lambda x: c2 * indicator(x, z, law=law),
        lambda x: c2 * x * z * indicator(x, z, law=law),
    )
