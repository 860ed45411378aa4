"""RKHS norms of the univariate kernels: weighted curvature plus a penalty on the affine part.

``feature_norm`` measures a function by the random-feature kernel of a law, ``tangent_norm`` by its tangent kernel; both
are "univariate ReLU", Theorem 5 and Corollary 6, corrected. For a law symmetric under (a, b) -> (-a, -b) write

    f(x) = 1/2 int f''(u) abs(x - u) du + A x + D;
    norm(f)^2 = int f''^2 / nu_3 du + 4 (A, -D) M^-1 (A, -D)^T,     M = E[(a, b)(a, b)^T].

The published norm weighs curvature with nu_1 in place of nu_3 and has no affine part. A law with
slopes of one sign has no affine part, but f and f' must vanish at the inactive end of the knots. Functions are scalar
JAX callables; integrals use Gauss-Legendre nodes in arctan(u) between break points, so that f'' may be only piecewise
smooth.
"""

from functools import partial
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meanflow.univariate import wide_kernel
from meanflow.univariate._kernels import (
    RadialLaw,
    SignsLaw,
    UniformLaw,
    WeightLaw,
    interval_mean,
)

random_feature, indicator = (partial(wide_kernel, kind=kind) for kind in ("feature", "gate"))


class Knots:
    """What the norms need of a law: two densities of the knot u = b / a, moments, and how to draw from it.

    nu_1(u) du = P(knot in du) and nu_3(u) du = E[a^2; knot in du]. ``symmetric`` says that the law is the same for
    (-a, -b); otherwise a has one sign.
    """

    symmetric: ClassVar[bool] = True

    def support(self):
        """Return the ends of the smallest interval that holds all knots."""
        return jnp.array(-jnp.inf), jnp.array(jnp.inf)

    def kinks(self):
        """Return where the densities are not smooth, inside the support."""
        return []


class FixedSlope(WeightLaw, Knots):
    """One fixed slope a and b ~ U(low, high), all neurons facing one way: the kernel K_a of equation (29)."""

    slope: float = 1.0
    low: float = 0.0
    high: float = 1.0
    symmetric: ClassVar[bool] = False

    def mean(self, kind, x, z):
        """Return E g(a x - b) g(a z - b), elementwise."""
        return interval_mean(kind, self.slope * x, self.slope * z, self.low, self.high)

    def _density(self, u):
        inside = (self.slope * u >= self.low) & (self.slope * u <= self.high)
        return jnp.where(inside, 1 / (jnp.asarray(self.high, u.dtype) - self.low), 0)

    def nu_1(self, u):
        """Return the density of the knots, elementwise."""
        return jnp.abs(self.slope) * self._density(u)

    def nu_3(self, u):
        """Return the density of the knots, each counted a^2 times."""
        return jnp.abs(self.slope) ** 3 * self._density(u)

    def moments(self):
        """Return E[(a, b)(a, b)^T], shape (2, 2)."""
        a, low, high = self.slope, self.low, self.high
        cross = a * (low + high) / 2
        return jnp.array([[a * a, cross], [cross, (low * low + low * high + high * high) / 3]])

    def support(self):
        """Return the ends of the smallest interval that holds all knots."""
        ends = jnp.asarray(self.low) / self.slope, jnp.asarray(self.high) / self.slope
        return jnp.minimum(*ends), jnp.maximum(*ends)

    def sample(self, key, width):
        """Draw independent a and b, each of shape (width,)."""
        b = jax.random.uniform(key, (width,), minval=self.low, maxval=self.high)
        return jnp.full_like(b, self.slope), b


class Signs(SignsLaw, Knots):
    """``SignsLaw`` with its knots."""

    def nu_1(self, u):
        """Return the density of the knots, elementwise."""
        return jnp.where(jnp.abs(u) <= self.bound, 1 / (2 * jnp.asarray(self.bound, u.dtype)), 0)

    def nu_3(self, u):
        """Return the density of the knots, each counted a^2 = 1 times."""
        return self.nu_1(u)

    def moments(self):
        """Return E[(a, b)(a, b)^T], shape (2, 2)."""
        return jnp.diag(jnp.array([1.0, self.bound**2 / 3]))

    def support(self):
        """Return the ends of the smallest interval that holds all knots."""
        return -jnp.asarray(self.bound), jnp.asarray(self.bound)

    def sample(self, key, width):
        """Draw independent a and b, each of shape (width,)."""
        signs, biases = jax.random.split(key)
        b = jax.random.uniform(biases, (width,), minval=-self.bound, maxval=self.bound)
        return jax.random.rademacher(signs, (width,), b.dtype), b


class Uniform(UniformLaw, Knots):
    """``UniformLaw`` with its knots."""

    def nu_1(self, u):
        """Return the density of the knots, which decays like u^-2."""
        reach = self.leaves(u)
        return reach**2 / (4 * self.slope * self.bound)

    def nu_3(self, u):
        """Return the density of the knots, each counted a^2 times: constant while A |u| <= B, then like u^-4."""
        reach = self.leaves(u)
        return reach**4 / (8 * self.slope * self.bound)

    def moments(self):
        """Return E[(a, b)(a, b)^T], shape (2, 2)."""
        return jnp.diag(jnp.array([self.slope**2 / 3, self.bound**2 / 3]))

    def sample(self, key, width):
        """Draw independent a and b, each of shape (width,)."""
        slopes, biases = jax.random.split(key)
        a = jax.random.uniform(slopes, (width,), minval=-self.slope, maxval=self.slope)
        return a, jax.random.uniform(biases, (width,), minval=-self.bound, maxval=self.bound)

    def kinks(self):
        """Return the ends of the interval in which the densities are constant."""
        return [self.reach(), -self.reach()]


class Radial(RadialLaw, Knots):
    """``RadialLaw`` with its knots."""

    def nu_1(self, u):
        """Return the density of the knots, a Cauchy density."""
        return 1 / (jnp.pi * (1 + u * u))

    def nu_3(self, u):
        """Return the density of the knots, each counted a^2 times: C / (pi (1 + u^2)^2)."""
        return self.second_moment / (jnp.pi * (1 + u * u) ** 2)

    def moments(self):
        """Return E[(a, b)(a, b)^T], shape (2, 2)."""
        return self.second_moment / 2 * jnp.eye(2)

    def sample(self, key, width):
        """Draw independent Gaussian a and b, each of shape (width,)."""
        a, b = jax.random.normal(key, (2, width)) * jnp.sqrt(self.second_moment / 2)
        return a, b


class FeatureNorm(NamedTuple):
    """The squared random-feature norm of a function, in two parts: of f'' and of the affine part A x + D."""

    curvature: jax.Array
    affine: jax.Array

    @property
    def total(self):
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
    slope: jax.Array
    ratio: jax.Array

    @property
    def total(self):
        """Return the squared norm, an upper bound that the best decomposition attains."""
        return self.feature.total + self.slope + self.ratio


def _rule(law, breaks, nodes: int):
    """Return nodes and weights on the knots' support, split at ``breaks``, at 0 and at the law's own kinks."""
    low, high = law.support()
    cuts = jnp.concatenate([jnp.atleast_1d(jnp.asarray(breaks, float)), jnp.array([0.0, *law.kinks()])])
    edges = jnp.arctan(jnp.sort(jnp.concatenate([jnp.stack([low, high]), jnp.clip(cuts, low, high)])))
    points, weights = np.polynomial.legendre.leggauss(nodes)
    half = (edges[1:] - edges[:-1])[:, None] / 2
    # cells of no width (a cut on the edge of the support) are moved inside and get weight 0
    empty = half < 16 * jnp.finfo(edges.dtype).eps
    half, left = jnp.where(empty, 0, half), edges[:-1, None]
    left = jnp.where(empty, jnp.sum(left[jnp.argmax(half)]) + jnp.max(half), left)
    u = jnp.tan(left + half * (1 + jnp.asarray(points, edges.dtype)[None, :]))
    return u.ravel(), (half * jnp.asarray(weights, edges.dtype)[None, :] * (1 + u * u)).ravel()


def feature_norm(f, *, law, breaks=(), nodes=40):
    """Return the squared RKHS norm of f for the random-feature kernel of ``law`` (Theorem 5, corrected).

    Args:
        f: scalar -> scalar, twice differentiable but for kinks of f'' at ``breaks``; f'' must vanish where
            the law has no knots.
        law: one of the laws above.
        breaks: points where f'' is not smooth, shape (k,).
        nodes: quadrature nodes between two breaks.

    Returns:
        Curvature and affine parts; their sum is the squared norm.
    """
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


def _gate_norm(at_zero, first, law, u, du):
    """Return the norm of the indicator kernel: int f'^2/nu_1, plus 4 D^2 for f = 1/2 int f'(u) sign(x-u) du + D."""
    curvature = jnp.sum(du * first**2 / law.nu_1(u))
    if not law.symmetric:
        return curvature
    return curvature + 4 * (at_zero + jnp.sum(du * first * jnp.sign(u)) / 2) ** 2


def tangent_norm(
    parts,
    *,
    law,
    c2=1.0,
    breaks=(),
    nodes=40,
):
    """Return the squared tangent-kernel norm of one decomposition f = f_1 + f_2 + f_3 (Corollary 6, corrected).

    It is

        norm(f_1)^2 of ``feature_norm`` + (1/E c^2) [int f_2'^2/nu_1 + int (u f_3' - f_3)^2/(u^4 nu_1)].

    Symmetric laws add 4 D^2 for the constant part of f_2 and of f_3/u; one-signed laws ask f_2 and f_3/u to
    vanish at the inactive end.
    The norm of f is the infimum over decompositions; for a kernel section ``tangent_parts`` attains it.

    Args:
        parts: (f_1, f_2, f_3), scalar -> scalar, with f_3(0) = 0.
        law: one of the laws above.
        c2: E(c^2).
        breaks: points where f_1'', f_2' or f_3' is not smooth, shape (k,).
        nodes: quadrature nodes between two breaks.
    """
    f1, f2, f3 = parts
    u, du = _rule(law, breaks, nodes)
    zero = jnp.zeros((), u.dtype)
    slope = _gate_norm(f2(zero), jax.vmap(jax.grad(f2))(u), law, u, du)
    quotient = (u * jax.vmap(jax.grad(f3))(u) - jax.vmap(f3)(u)) / u**2  # (f_3 / u)'
    ratio = _gate_norm(jax.grad(f3)(zero), quotient, law, u, du)
    return TangentNorm(feature_norm(f1, law=law, breaks=breaks, nodes=nodes), slope / c2, ratio / c2)


def tangent_parts(z, *, law, c2=1.0):
    """Return the best decomposition of the section K_NTK(., z): (K_RF, E(c^2) K_1, E(c^2) x z K_1)."""
    return (
        lambda x: random_feature(x, z, law=law),
        lambda x: c2 * indicator(x, z, law=law),
        lambda x: c2 * x * z * indicator(x, z, law=law),
    )
