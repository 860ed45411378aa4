"""Kernels of wide univariate ReLU networks in closed form, for the laws from which the inner weights (a, b) are drawn.

Users give the laws of ``meanflow.measures.laws`` that draw a and b; ``weight_law`` finds the closed form that belongs
to them. A closed form is the mean of g(a x - b) g(a z - b) for two functions g, relu ("feature") and the unit step
("gate"), in and outside the support of the knots b / a. It keeps the dtype of the input and can be differentiated, in
the parameters of the law too. To add one, write a subclass of ``WeightLaw`` and name it in ``weight_law``.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from functools import partial
from typing import Annotated

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from meanflow import _boundary
from meanflow._boundary import Rate, array, checked, choice
from meanflow.measures.laws import Law, as_law

Scalar = float | Float[Array, ""]

# two Gauss-Legendre nodes on (0, 1): exact for cubics
_GAUSS = (0.5 - math.sqrt(3.0) / 6.0, 0.5 + math.sqrt(3.0) / 6.0)


def interval_mean(kind: str, x: jax.Array, z: jax.Array, low: Scalar, high: Scalar) -> jax.Array:
    """Return E g(x - b) g(z - b) for b ~ U(low, high), where g is relu ("feature") or the unit step ("gate")."""
    top = jnp.clip(jnp.minimum(x, z), low, high)
    share = (top - low) / (high - low)
    if kind == "gate":
        return share
    # the mean of (b - x)(b - z) = b^2 - (x + z) b + x z over b in (low, top), times the share of that interval
    return share * ((top * top + top * low + low * low) / 3 - (x + z) * (top + low) / 2 + x * z)


class WeightLaw(eqx.Module):
    """The law of the inner weights (a, b) of a neuron, by the two expectations that kernels need."""

    @abc.abstractmethod
    def mean(self, kind: str, x: Float[Array, "*x"], z: Float[Array, "*x"]) -> Float[Array, "*x"]:
        """Return E g(a x - b) g(a z - b), elementwise, with g = relu ("feature") or the unit step ("gate")."""


class SignsLaw(WeightLaw):
    """a = 1 or -1 with equal odds and b ~ U(-bound, bound), so that knots are uniform on (-bound, bound).

    Attributes:
        bound: half the length of the interval of b.
    """

    bound: Scalar = 1.0

    def mean(self, kind: str, x: Float[Array, "*x"], z: Float[Array, "*x"]) -> Float[Array, "*x"]:
        """Return the mean, in the support bound^2/6 + xz/2 + abs(x-z)^3/(24 bound) or 1/2 - abs(x-z)/(4 bound)."""
        bound = jnp.asarray(self.bound, x.dtype)
        right, left = (interval_mean(kind, s * x, s * z, -bound, bound) for s in (1, -1))
        return (right + left) / 2

    def cubic(self) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
        """Return (k0, k1, k3): the kernel is k0 + k1 xz + k3 abs(x-z)^3 for abs(x), abs(z) <= ``reach``."""
        bound = jnp.asarray(self.bound)
        return bound**2 / 6, jnp.full_like(bound, 0.5), 1 / (24 * bound)

    def reach(self) -> Float[Array, ""]:
        """Return the largest abs(x) up to which the kernel is a cubic."""
        return jnp.asarray(self.bound)


class UniformLaw(WeightLaw):
    """a ~ U(-A, A) and b ~ U(-B, B), independent: the usual initialization.

    Attributes:
        slope: A, half the length of the interval of a.
        bound: B, half the length of the interval of b.
    """

    slope: Scalar = 1.0
    bound: Scalar = 1.0

    def leaves(self, x: jax.Array) -> jax.Array:
        """Return the slope a at which a x leaves the support of b, at most A."""
        slope, bound = (jnp.asarray(u, x.dtype) for u in (self.slope, self.bound))
        outside = slope * jnp.abs(x) > bound
        return jnp.where(outside, bound / jnp.where(outside, jnp.abs(x), 1), slope)

    def mean(self, kind: str, x: Float[Array, "*x"], z: Float[Array, "*x"]) -> Float[Array, "*x"]:
        """Return (1/A) int_0^A k(a x, a z) da with the kernel k of ``SignsLaw``; inside, that is again a cubic."""
        # between the breakpoints B/|x| and B/|z| the integrand is a cubic in a
        slope = jnp.asarray(self.slope, x.dtype)
        ends = [self.leaves(v) for v in (x, z)]
        edges = jnp.stack(
            [jnp.zeros_like(x), jnp.minimum(*ends), jnp.maximum(*ends), jnp.full_like(x, slope)]
        )
        length = edges[1:] - edges[:-1]
        a = jnp.stack([edges[:-1] + node * length for node in _GAUSS])  # (node, piece, *x.shape)
        values = SignsLaw(self.bound).mean(kind, a * x[None, None], a * z[None, None])
        return jnp.sum(jnp.mean(values, axis=0) * length, axis=0) / slope

    def cubic(self) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
        """Return (k0, k1, k3): the kernel is k0 + k1 xz + k3 abs(x-z)^3 for abs(x), abs(z) <= ``reach``."""
        slope, bound = jnp.asarray(self.slope), jnp.asarray(self.bound)
        return bound**2 / 6, slope**2 / 6, slope**3 / (96 * bound)

    def reach(self) -> Float[Array, ""]:
        """Return the largest abs(x) up to which the kernel is a cubic."""
        return jnp.asarray(self.bound) / self.slope


class RadialLaw(WeightLaw):
    """(a, b) with a rotation-invariant law.

    Attributes:
        second_moment: C = E(a^2 + b^2), 2 for a standard Gaussian.
    """

    second_moment: Scalar = 2.0

    def mean(self, kind: str, x: Float[Array, "*x"], z: Float[Array, "*x"]) -> Float[Array, "*x"]:
        """Return C/(4 pi) [(pi - |phi|)(xz+1) + |x-z|], which corrects (26) and (40), or (pi - |phi|) / (2 pi).

        Here phi = arctan x - arctan z.
        """
        angle = jnp.pi - jnp.abs(jnp.arctan(x) - jnp.arctan(z))
        if kind == "gate":
            return angle / (2 * jnp.pi)
        return self.second_moment / (4 * jnp.pi) * (angle * (x * z + 1) + jnp.abs(x - z))


AnyLaw = str | Mapping[str, Law] | WeightLaw
LAWS: dict[str, type[WeightLaw]] = {"signs": SignsLaw, "uniform": UniformLaw, "radial": RadialLaw}


def _equal(one: Scalar, other: Scalar, unknown: bool = True) -> bool:
    """Say whether two parameters are equal, or ``unknown`` of what is traced and cannot be looked at."""
    left, right = _boundary.concrete(one), _boundary.concrete(other)
    return unknown if left is None or right is None else bool(left == right)


def weight_law(name: str, value: object) -> WeightLaw:
    """Accept a name in ``LAWS``, or laws {"a": ..., "b": ...}; return the closed form. A kind of ``_boundary``."""
    if isinstance(value, WeightLaw):
        return value
    if not isinstance(value, Mapping):
        _boundary.one_of(name, value, LAWS)
        return LAWS[str(value)]()
    given = {key: as_law(f"{name}[{key!r}]", law) for key, law in value.items()}
    if set(given) != {"a", "b"}:
        raise ValueError(f"{name} must hold the laws of 'a' and 'b', got {sorted(map(str, given))}")
    (first, p), (second, q) = ((given[k].family, given[k].parameters) for k in "ab")
    centered = second == "uniform" and _equal(-q[0], q[1])
    if (first == "uniform" and _equal(p[0], p[1], unknown=False)) or (
        centered and _equal(q[0], q[1], unknown=False)
    ):
        raise ValueError(
            f"{name} must be laws of more than one number, got a uniform law on an interval of length 0"
        )
    if first == "signs" and _equal(p[0], 1.0) and centered:
        return SignsLaw(q[1])
    if first == "uniform" and _equal(-p[0], p[1]) and centered:
        return UniformLaw(p[1], q[1])
    if first == second == "normal" and _equal(p[0], q[0]):
        return RadialLaw(2 * p[0] ** 2)
    raise ValueError(
        f"{name} must be laws whose kernel has a closed form: a of signs(1) or uniform(-A, A) with b of "
        "uniform(-B, B), or both normal with one scale; got "
        f"a of {first or 'another law'} and b of {second or 'another law'}"
    )


Points = Annotated[Float[ArrayLike, "*x"], array(squares=True)]


@checked
def wide_kernel(
    x: Points,
    z: Points | None = None,
    kind: Annotated[str, choice("tangent", "feature", "gate")] = "tangent",
    *,
    law: Annotated[AnyLaw, weight_law] = "signs",
    c2: Rate = 1.0,
) -> Float[Array, "*shape"]:
    """Return a kernel of infinitely many neurons c relu(a x - b) whose (a, b) are drawn from a law, eqs. (23), (27).

        feature(x, z) = E relu(a x - b) relu(a z - b)           training c alone
        gate(x, z)    = P(a x > b and a z > b)
        tangent(x, z) = feature + E(c^2) (x z + 1) gate         training (a, b, c)

    Args:
        x: inputs of any shape, for example (n,) or a scalar.
        z: second inputs of any shape; x itself if None.
        kind: ``"tangent"``, ``"feature"`` or ``"gate"``.
        law: "signs" (a = +-1, b ~ U(-1, 1)), "uniform" (both U(-1, 1)), "radial" (both standard normal); or the laws of
            a and b, such as ``{"a": laws.signs(), "b": laws.uniform(-2, 2)}``, with which ``full().init`` draws.
        c2: E(c^2), for an outer weight c independent of (a, b). The tangent kernel of finitely many neurons is
            ``tangent_kernel(full(alpha), cloud, x) / m``, which tends to m / alpha^2 times this one.

    Returns:
        Array of shape x.shape + z.shape.

    >>> float(wide_kernel(0.5, 0.5, "feature", law="radial"))
    0.625
    >>> float(wide_kernel(0.25, -0.25, "gate"))
    0.375
    >>> round(float(wide_kernel(0.5, 0.5, law="radial")), 6)  # 0.625 + (0.25 + 1)/2
    1.25
    """
    second = None if z is None else jnp.asarray(z)
    return _gram(kind, weight_law("law", law), jnp.asarray(x), second, c2)


# Compiled once for each class of laws and each shape: the parameters of the law are arguments of the program.
@partial(jax.jit, static_argnums=0)
def _gram(kind: str, law: WeightLaw, x: jax.Array, z: jax.Array | None, c2: ArrayLike) -> jax.Array:
    z = x if z is None else z
    dtype = jnp.result_type(x, z, 0.0)
    shape = x.shape + z.shape
    left = jnp.broadcast_to(x.astype(dtype).reshape(x.shape + (1,) * z.ndim), shape)
    right = jnp.broadcast_to(z.astype(dtype).reshape((1,) * x.ndim + z.shape), shape)
    if kind != "tangent":
        return law.mean(kind, left, right)
    gate = law.mean("gate", left, right)
    return law.mean("feature", left, right) + jnp.asarray(c2, dtype) * (left * right + 1) * gate
