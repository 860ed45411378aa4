"""Closed forms of kernels of neurons relu(a x - b), for laws of the inner weights (a, b).

Users give the laws of ``meanflow.measures.laws`` from which particles are drawn, one for a and one for b;
``weight_law`` finds the closed form that belongs to them. A closed form is two expectations, those that ``_kernels``
needs, in and outside the support of the knots b / a. They keep the dtype of the input and can be differentiated, in the
parameters of the law too. To add one, write a subclass of ``WeightLaw`` and name it in ``weight_law``.
"""

import abc
import math
from collections.abc import Callable, Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from meanflow import _boundary
from meanflow.measures.laws import Law, as_law

Scalar = float | Float[Array, ""]
Formula = Callable[[jax.Array, jax.Array, Scalar, Scalar], jax.Array]  # (x, z, low, high) -> values

# two Gauss-Legendre nodes on (0, 1): exact for cubics
_GAUSS = (0.5 - math.sqrt(3.0) / 6.0, 0.5 + math.sqrt(3.0) / 6.0)


def interval_feature(x: jax.Array, z: jax.Array, low: Scalar, high: Scalar) -> jax.Array:
    """Return E (x-b)_+ (z-b)_+ for b ~ U(low, high): the mean of (b-x)(b-z) over b up to min(x, z, high)."""
    top = jnp.clip(jnp.minimum(x, z), low, high)
    # the mean of b^2 - (x + z) b + x z over (low, top); times the share (top - low) / (high - low) of the interval
    mean = (top * top + top * low + low * low) / 3 - (x + z) * (top + low) / 2 + x * z
    return (top - low) * mean / (high - low)


def interval_indicator(x: jax.Array, z: jax.Array, low: Scalar, high: Scalar) -> jax.Array:
    """Return P(b < min(x, z)) for b ~ U(low, high)."""
    return (jnp.clip(jnp.minimum(x, z), low, high) - low) / (high - low)


def _both_facings(interval: Formula, x: jax.Array, z: jax.Array, bound: jax.Array) -> jax.Array:
    """Average an interval kernel with b ~ U(-bound, bound) over a = 1 and a = -1."""
    return (interval(x, z, -bound, bound) + interval(-x, -z, -bound, bound)) / 2


class WeightLaw(eqx.Module):
    """The law of the inner weights (a, b) of a neuron, by the two expectations that kernels need."""

    @abc.abstractmethod
    def random_feature(self, x: Float[Array, "*x"], z: Float[Array, "*x"]) -> Float[Array, "*x"]:
        """Return E relu(a x - b) relu(a z - b), elementwise."""

    @abc.abstractmethod
    def indicator(self, x: Float[Array, "*x"], z: Float[Array, "*x"]) -> Float[Array, "*x"]:
        """Return P(a x > b and a z > b), elementwise."""


class SignsLaw(WeightLaw):
    """a = 1 or -1 with equal odds and b ~ U(-bound, bound), so that knots are uniform on (-bound, bound).

    Attributes:
        bound: half the length of the interval of b.
    """

    bound: Scalar = 1.0

    def random_feature(self, x: Float[Array, "*x"], z: Float[Array, "*x"]) -> Float[Array, "*x"]:
        """Return the kernel, which is bound^2/6 + xz/2 + abs(x-z)^3/(24 bound) inside the support."""
        return _both_facings(interval_feature, x, z, jnp.asarray(self.bound, x.dtype))

    def indicator(self, x: Float[Array, "*x"], z: Float[Array, "*x"]) -> Float[Array, "*x"]:
        """Return the kernel, which is 1/2 - abs(x-z)/(4 bound) inside the support."""
        return _both_facings(interval_indicator, x, z, jnp.asarray(self.bound, x.dtype))

    def cubic(self) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
        """Return (k0, k1, k3): the kernel is k0 + k1 xz + k3 abs(x-z)^3 for abs(x), abs(z) <= bound."""
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

    def _average(self, interval: Formula, x: jax.Array, z: jax.Array) -> jax.Array:
        # (1/A) int_0^A k(a x, a z) da; between the breakpoints bound/|x|, bound/|z| a cubic in a
        bound = jnp.asarray(self.bound, x.dtype)
        slope = jnp.asarray(self.slope, x.dtype)
        leave = [self._leaves(v, slope, bound) for v in (x, z)]
        edges = jnp.stack(
            [jnp.zeros_like(x), jnp.minimum(*leave), jnp.maximum(*leave), jnp.full_like(x, slope)]
        )
        length = edges[1:] - edges[:-1]
        a = jnp.stack([edges[:-1] + node * length for node in _GAUSS])  # (node, piece, *x.shape)
        values = _both_facings(interval, a * x[None, None], a * z[None, None], bound)
        return jnp.sum(jnp.mean(values, axis=0) * length, axis=0) / slope

    @staticmethod
    def _leaves(x: jax.Array, slope: jax.Array, bound: jax.Array) -> jax.Array:
        """Return the slope a at which a x leaves the support of b, at most ``slope``."""
        outside = slope * jnp.abs(x) > bound
        return jnp.where(outside, bound / jnp.where(outside, jnp.abs(x), 1), slope)

    def random_feature(self, x: Float[Array, "*x"], z: Float[Array, "*x"]) -> Float[Array, "*x"]:
        """Return the kernel: B^2/6 + A^2 xz/6 + A^3 abs(x-z)^3/(96 B) while A |x|, A |z| <= B, rational in x beyond."""
        return self._average(interval_feature, x, z)

    def indicator(self, x: Float[Array, "*x"], z: Float[Array, "*x"]) -> Float[Array, "*x"]:
        """Return the kernel, which is 1/2 - A abs(x-z)/(8 B) while A abs(x), A abs(z) <= B."""
        return self._average(interval_indicator, x, z)

    def cubic(self) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
        """Return (k0, k1, k3): the kernel is k0 + k1 xz + k3 abs(x-z)^3 while A abs(x), A abs(z) <= B."""
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

    def random_feature(self, x: Float[Array, "*x"], z: Float[Array, "*x"]) -> Float[Array, "*x"]:
        """Return C/(4 pi) [(pi - |phi|)(xz+1) + |x-z|], phi = arctan x - arctan z, which corrects (26) and (40)."""
        angle = jnp.pi - jnp.abs(jnp.arctan(x) - jnp.arctan(z))
        return self.second_moment / (4 * jnp.pi) * (angle * (x * z + 1) + jnp.abs(x - z))

    def indicator(self, x: Float[Array, "*x"], z: Float[Array, "*x"]) -> Float[Array, "*x"]:
        """Return (pi - |phi|) / (2 pi) with phi = arctan x - arctan z."""
        return 0.5 - jnp.abs(jnp.arctan(x) - jnp.arctan(z)) / (2 * jnp.pi)


AnyLaw = str | Mapping[str, Law] | WeightLaw
LAWS: dict[str, type[WeightLaw]] = {"signs": SignsLaw, "uniform": UniformLaw, "radial": RadialLaw}


def _equal(one: Scalar, other: Scalar) -> bool:
    """Say whether two parameters are equal, as far as is known: what is traced cannot be looked at."""
    left, right = _boundary.concrete(one), _boundary.concrete(other)
    return left is None or right is None or bool(left == right)


def weight_law(name: str, value: object) -> WeightLaw:
    """Accept a name in ``LAWS``, or laws {"a": ..., "b": ...}; return the closed form. A kind of ``_boundary``."""
    if isinstance(value, WeightLaw):
        return value
    if not isinstance(value, Mapping):
        _boundary.one_of(name, value, LAWS)
        return LAWS[str(value)]()
    given = {key: as_law(f"{name}[{key!r}]", law) for key, law in value.items()}
    if set(given) != {"a", "b"}:
        raise ValueError(f"{name} must hold the laws of 'a' and 'b', got {sorted(given)}")
    (first, p), (second, q) = ((given[k].family, given[k].parameters) for k in "ab")
    centered = second == "uniform" and _equal(-q[0], q[1])
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


def pairs(x: Float[ArrayLike, "*x"], z: Float[ArrayLike, "*z"] | None) -> tuple[jax.Array, jax.Array]:
    """Return x and z (x itself if None) in one float dtype, broadcast to shape x.shape + z.shape."""
    first = jnp.asarray(x)
    second = first if z is None else jnp.asarray(z)
    dtype = jnp.result_type(first, second, 0.0)
    shape = first.shape + second.shape
    left = first.astype(dtype).reshape(first.shape + (1,) * second.ndim)
    right = second.astype(dtype).reshape((1,) * first.ndim + second.shape)
    return jnp.broadcast_to(left, shape), jnp.broadcast_to(right, shape)
