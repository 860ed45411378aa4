"""Laws of the inner weights (a, b) of univariate ReLU neurons relu(a x - b), with what kernels and norms need of them.

``WeightLaw`` says what the kernels of ``meanflow.univariate._kernels`` ask of a law, ``DensityLaw`` is the base of laws
with elementwise formulas, and ``Finite`` is the law of finitely many given neurons. To add a law, write a subclass of
``DensityLaw`` and, if it should be known by name, add it to ``LAWS``.

Laws with formulas also know two densities of the knot u = b / a, the point where a neuron bends,

    nu_1(u) du = P(knot in du),        nu_3(u) du = E[a^2; knot in du],

which weigh the RKHS norms of ``meanflow.univariate._norms``. All formulas hold inside and outside the support
of the knots, keep the dtype of the input and can be differentiated.
"""

import abc
import math
from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Key

from meanflow import _checks

Scalar = float | Float[Array, ""]
Formula = Callable[[jax.Array, jax.Array, Scalar, Scalar], jax.Array]  # (x, z, low, high) -> values

# two Gauss-Legendre nodes on (0, 1): exact for cubics
_GAUSS = (0.5 - math.sqrt(3.0) / 6.0, 0.5 + math.sqrt(3.0) / 6.0)


def _interval_feature(x: jax.Array, z: jax.Array, low: Scalar, high: Scalar) -> jax.Array:
    """Return E (x-b)_+ (z-b)_+ for b ~ U(low, high): the mean of (b-x)(b-z) over b up to min(x, z, high)."""
    top = jnp.clip(jnp.minimum(x, z), low, high)
    mean = (top * top + top * low + low * low) / 3 - (x + z) * (top + low) / 2 + x * z
    return (top - low) * mean / (high - low)


def _interval_indicator(x: jax.Array, z: jax.Array, low: Scalar, high: Scalar) -> jax.Array:
    """Return P(b < min(x, z)) for b ~ U(low, high)."""
    return (jnp.clip(jnp.minimum(x, z), low, high) - low) / (high - low)


def _both_facings(interval: Formula, x: jax.Array, z: jax.Array, bound: jax.Array) -> jax.Array:
    """Average an interval kernel with b ~ U(-bound, bound) over a = 1 and a = -1."""
    return (interval(x, z, -bound, bound) + interval(-x, -z, -bound, bound)) / 2


class WeightLaw(eqx.Module):
    """The law of the inner weights (a, b) of a neuron, by what the kernels of this module need of it."""

    @abc.abstractmethod
    def feature_gram(
        self, x: Float[ArrayLike, "*x"], z: Float[ArrayLike, "*z"] | None
    ) -> Float[Array, "*shape"]:
        """Return E relu(a x - b) relu(a z - b) for all pairs, shape x.shape + z.shape; z = None means x itself."""

    @abc.abstractmethod
    def indicator_gram(
        self, x: Float[ArrayLike, "*x"], z: Float[ArrayLike, "*z"] | None
    ) -> Float[Array, "*shape"]:
        """Return P(a x > b and a z > b) for all pairs, shape x.shape + z.shape; z = None means x itself."""


class DensityLaw(WeightLaw):
    """A law of (a, b) whose knots b/a have a density, with closed forms for its kernels.

    Attributes:
        symmetric: True if the law is the same for (-a, -b); False if a has one sign.
    """

    symmetric: ClassVar[bool] = True

    def feature_gram(
        self, x: Float[ArrayLike, "*x"], z: Float[ArrayLike, "*z"] | None
    ) -> Float[Array, "*shape"]:
        """Return the random-feature kernel of all pairs by the elementwise formula."""
        return self.random_feature(*pairs(x, z))

    def indicator_gram(
        self, x: Float[ArrayLike, "*x"], z: Float[ArrayLike, "*z"] | None
    ) -> Float[Array, "*shape"]:
        """Return the indicator kernel of all pairs by the elementwise formula."""
        return self.indicator(*pairs(x, z))

    @abc.abstractmethod
    def random_feature(self, x: Float[Array, "*x"], z: Float[Array, "*x"]) -> Float[Array, "*x"]:
        """Return E relu(a x - b) relu(a z - b), elementwise."""

    @abc.abstractmethod
    def indicator(self, x: Float[Array, "*x"], z: Float[Array, "*x"]) -> Float[Array, "*x"]:
        """Return P(a x > b and a z > b), elementwise."""

    @abc.abstractmethod
    def nu_1(self, u: Float[Array, "*u"]) -> Float[Array, "*u"]:
        """Return the density of the knots b / a at u, elementwise."""

    @abc.abstractmethod
    def nu_3(self, u: Float[Array, "*u"]) -> Float[Array, "*u"]:
        """Return the density of the knots at u, each counted a^2 times, elementwise."""

    @abc.abstractmethod
    def moments(self) -> Float[Array, "2 2"]:
        """Return E[(a, b)(a, b)^T], shape (2, 2)."""

    @abc.abstractmethod
    def sample(
        self, key: Key[Array, ""], width: int
    ) -> tuple[Float[Array, " width"], Float[Array, " width"]]:
        """Draw independent a and b, each of shape (width,)."""

    def support(self) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Return the ends of the smallest interval that holds all knots; the whole line unless a law says otherwise."""
        return jnp.array(-jnp.inf), jnp.array(jnp.inf)


class FixedSlope(DensityLaw):
    """One fixed slope a and b ~ U(low, high): the kernel K_a of equation (29).

    All neurons face the same way, so functions and their slopes vanish at the inactive end of the knots, and there is
    no affine part.

    Attributes:
        slope: the slope a of every neuron.
        low, high: ends of the interval of b.
    """

    slope: Scalar = 1.0
    low: Scalar = 0.0
    high: Scalar = 1.0
    symmetric: ClassVar[bool] = False

    def random_feature(self, x: Float[Array, "*x"], z: Float[Array, "*x"]) -> Float[Array, "*x"]:
        """Return E relu(a x - b) relu(a z - b), elementwise."""
        return _interval_feature(self.slope * x, self.slope * z, self.low, self.high)

    def indicator(self, x: Float[Array, "*x"], z: Float[Array, "*x"]) -> Float[Array, "*x"]:
        """Return P(a x > b and a z > b), elementwise."""
        return _interval_indicator(self.slope * x, self.slope * z, self.low, self.high)

    def _density(self, u: Float[Array, "*u"]) -> Float[Array, "*u"]:
        inside = (self.slope * u >= self.low) & (self.slope * u <= self.high)
        return jnp.where(inside, 1 / (jnp.asarray(self.high, u.dtype) - self.low), 0)

    def nu_1(self, u: Float[Array, "*u"]) -> Float[Array, "*u"]:
        """Return the density of the knots, elementwise."""
        return jnp.abs(self.slope) * self._density(u)

    def nu_3(self, u: Float[Array, "*u"]) -> Float[Array, "*u"]:
        """Return the density of the knots, each counted a^2 times."""
        return jnp.abs(self.slope) ** 3 * self._density(u)

    def moments(self) -> Float[Array, "2 2"]:
        """Return E[(a, b)(a, b)^T], shape (2, 2)."""
        a, low, high = self.slope, self.low, self.high
        cross = a * (low + high) / 2
        return jnp.array([[a * a, cross], [cross, (low * low + low * high + high * high) / 3]])

    def support(self) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Return the ends of the smallest interval that holds all knots."""
        ends = jnp.asarray(self.low) / self.slope, jnp.asarray(self.high) / self.slope
        return jnp.minimum(*ends), jnp.maximum(*ends)

    def sample(
        self, key: Key[Array, ""], width: int
    ) -> tuple[Float[Array, " width"], Float[Array, " width"]]:
        """Draw independent a and b, each of shape (width,)."""
        b = jax.random.uniform(key, (width,), minval=self.low, maxval=self.high)
        return jnp.full_like(b, self.slope), b


class Signs(DensityLaw):
    """a = 1 or -1 with equal odds and b ~ U(-bound, bound), so that knots are uniform on (-bound, bound)."""

    bound: Scalar = 1.0

    def random_feature(self, x: Float[Array, "*x"], z: Float[Array, "*x"]) -> Float[Array, "*x"]:
        """Return the kernel, which is bound^2/6 + xz/2 + abs(x-z)^3/(24 bound) inside the support."""
        return _both_facings(_interval_feature, x, z, jnp.asarray(self.bound, x.dtype))

    def indicator(self, x: Float[Array, "*x"], z: Float[Array, "*x"]) -> Float[Array, "*x"]:
        """Return the kernel, which is 1/2 - abs(x-z)/(4 bound) inside the support."""
        return _both_facings(_interval_indicator, x, z, jnp.asarray(self.bound, x.dtype))

    def nu_1(self, u: Float[Array, "*u"]) -> Float[Array, "*u"]:
        """Return the density of the knots, elementwise."""
        return jnp.where(jnp.abs(u) <= self.bound, 1 / (2 * jnp.asarray(self.bound, u.dtype)), 0)

    def nu_3(self, u: Float[Array, "*u"]) -> Float[Array, "*u"]:
        """Return the density of the knots, each counted a^2 = 1 times."""
        return self.nu_1(u)

    def moments(self) -> Float[Array, "2 2"]:
        """Return E[(a, b)(a, b)^T], shape (2, 2)."""
        return jnp.diag(jnp.array([1.0, self.bound**2 / 3]))

    def support(self) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Return the ends of the smallest interval that holds all knots."""
        return -jnp.asarray(self.bound), jnp.asarray(self.bound)

    def cubic(self) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
        """Return (k0, k1, k3): the kernel is k0 + k1 xz + k3 abs(x-z)^3 for abs(x), abs(z) <= bound."""
        bound = jnp.asarray(self.bound)
        return bound**2 / 6, jnp.full_like(bound, 0.5), 1 / (24 * bound)

    def reach(self) -> Float[Array, ""]:
        """Return the largest abs(x) up to which the kernel is a cubic."""
        return jnp.asarray(self.bound)

    def sample(
        self, key: Key[Array, ""], width: int
    ) -> tuple[Float[Array, " width"], Float[Array, " width"]]:
        """Draw independent a and b, each of shape (width,)."""
        signs, biases = jax.random.split(key)
        b = jax.random.uniform(biases, (width,), minval=-self.bound, maxval=self.bound)
        return jax.random.rademacher(signs, (width,), b.dtype), b

    def midpoints(self, width: int) -> tuple[Float[Array, " width"], Float[Array, " width"]]:
        """Return stratified a and b, each (width,): for each sign, the midpoints of width/2 equal cells of the bias.

        ``width`` must be even. Kernels of this cloud differ from the closed form by O(width^-2).
        """
        half = _checks.whole("width", width, 2) // 2
        if width % 2:
            raise ValueError(f"width must be even, got {width}")
        b = self.bound * ((2 * jnp.arange(half) + 1) / half - 1)
        return jnp.concatenate([jnp.ones_like(b), -jnp.ones_like(b)]), jnp.concatenate([b, b])


class Uniform(DensityLaw):
    """a ~ U(-A, A) and b ~ U(-B, B), independent, with A = ``slope`` and B = ``bound``: the usual initialization."""

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
        return self._average(_interval_feature, x, z)

    def indicator(self, x: Float[Array, "*x"], z: Float[Array, "*x"]) -> Float[Array, "*x"]:
        """Return the kernel, which is 1/2 - A abs(x-z)/(8 B) while A abs(x), A abs(z) <= B."""
        return self._average(_interval_indicator, x, z)

    def nu_1(self, u: Float[Array, "*u"]) -> Float[Array, "*u"]:
        """Return the density of the knots, which decays like u^-2."""
        reach = self._leaves(u, jnp.asarray(self.slope, u.dtype), jnp.asarray(self.bound, u.dtype))
        return reach**2 / (4 * self.slope * self.bound)

    def nu_3(self, u: Float[Array, "*u"]) -> Float[Array, "*u"]:
        """Return the density of the knots, each counted a^2 times: constant while A |u| <= B, then like u^-4."""
        reach = self._leaves(u, jnp.asarray(self.slope, u.dtype), jnp.asarray(self.bound, u.dtype))
        return reach**4 / (8 * self.slope * self.bound)

    def moments(self) -> Float[Array, "2 2"]:
        """Return E[(a, b)(a, b)^T], shape (2, 2)."""
        return jnp.diag(jnp.array([self.slope**2 / 3, self.bound**2 / 3]))

    def cubic(self) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
        """Return (k0, k1, k3): the kernel is k0 + k1 xz + k3 abs(x-z)^3 while A abs(x), A abs(z) <= B."""
        slope, bound = jnp.asarray(self.slope), jnp.asarray(self.bound)
        return bound**2 / 6, slope**2 / 6, slope**3 / (96 * bound)

    def reach(self) -> Float[Array, ""]:
        """Return the largest abs(x) up to which the kernel is a cubic."""
        return jnp.asarray(self.bound) / self.slope

    def sample(
        self, key: Key[Array, ""], width: int
    ) -> tuple[Float[Array, " width"], Float[Array, " width"]]:
        """Draw independent a and b, each of shape (width,)."""
        slopes, biases = jax.random.split(key)
        a = jax.random.uniform(slopes, (width,), minval=-self.slope, maxval=self.slope)
        return a, jax.random.uniform(biases, (width,), minval=-self.bound, maxval=self.bound)


class Radial(DensityLaw):
    """(a, b) with a rotation-invariant law and E(a^2 + b^2) = C = ``second_moment``, 2 for a standard Gaussian."""

    second_moment: Scalar = 2.0

    def random_feature(self, x: Float[Array, "*x"], z: Float[Array, "*x"]) -> Float[Array, "*x"]:
        """Return C/(4 pi) [(pi - |phi|)(xz+1) + |x-z|], phi = arctan x - arctan z, which corrects (26) and (40)."""
        angle = jnp.pi - jnp.abs(jnp.arctan(x) - jnp.arctan(z))
        return self.second_moment / (4 * jnp.pi) * (angle * (x * z + 1) + jnp.abs(x - z))

    def indicator(self, x: Float[Array, "*x"], z: Float[Array, "*x"]) -> Float[Array, "*x"]:
        """Return (pi - |phi|) / (2 pi) with phi = arctan x - arctan z."""
        return 0.5 - jnp.abs(jnp.arctan(x) - jnp.arctan(z)) / (2 * jnp.pi)

    def nu_1(self, u: Float[Array, "*u"]) -> Float[Array, "*u"]:
        """Return the density of the knots, a Cauchy density."""
        return 1 / (jnp.pi * (1 + u * u))

    def nu_3(self, u: Float[Array, "*u"]) -> Float[Array, "*u"]:
        """Return the density of the knots, each counted a^2 times: C / (pi (1 + u^2)^2)."""
        return self.second_moment / (jnp.pi * (1 + u * u) ** 2)

    def moments(self) -> Float[Array, "2 2"]:
        """Return E[(a, b)(a, b)^T], shape (2, 2)."""
        return self.second_moment / 2 * jnp.eye(2)

    def sample(
        self, key: Key[Array, ""], width: int
    ) -> tuple[Float[Array, " width"], Float[Array, " width"]]:
        """Draw independent Gaussian a and b, each of shape (width,)."""
        a, b = jax.random.normal(key, (2, width)) * jnp.sqrt(self.second_moment / 2)
        return a, b


class Finite(WeightLaw):
    """The law of a finite cloud: neurons (a_i, b_i) with weights p_i; kernels by summation, O(m) for each pair.

    Attributes:
        a, b: (m,) inner weights of the neurons.
        weights: (m,) p_i, default 1/m each.
    """

    a: Float[Array, " m"]
    b: Float[Array, " m"]
    weights: Float[Array, " m"]

    def __init__(
        self,
        a: Float[ArrayLike, " m"],
        b: Float[ArrayLike, " m"],
        weights: Float[ArrayLike, " m"] | None = None,
    ) -> None:
        self.a, self.b = jnp.asarray(a), jnp.asarray(b)
        _checks.shape("a", self.a, (None,))
        _checks.shape("b", self.b, self.a.shape)
        self.weights = jnp.full_like(self.a, 1 / self.a.shape[0]) if weights is None else jnp.asarray(weights)
        _checks.shape("weights", self.weights, self.a.shape)

    def _scaled(
        self, gate: Callable[[jax.Array], jax.Array], x: Float[ArrayLike, "*x"]
    ) -> Float[Array, "*x m"]:
        points = jnp.asarray(x)
        row = (1,) * points.ndim + (-1,)
        activity = points[..., None] * self.a.reshape(row) - self.b.reshape(row)
        return gate(activity) * jnp.sqrt(self.weights).reshape(row)

    def features(self, x: Float[ArrayLike, "*x"]) -> Float[Array, "*x m"]:
        """Return sqrt(p_i) relu(a_i x - b_i); the Gram matrix of these is the random-feature kernel."""
        return self._scaled(jax.nn.relu, x)

    def gates(self, x: Float[ArrayLike, "*x"]) -> Float[Array, "*x m"]:
        """Return sqrt(p_i) 1(a_i x > b_i); the Gram matrix of these is the indicator kernel."""
        return self._scaled(lambda activity: (activity > 0).astype(self.weights.dtype), x)

    def feature_gram(
        self, x: Float[ArrayLike, "*x"], z: Float[ArrayLike, "*z"] | None
    ) -> Float[Array, "*shape"]:
        """Return the random-feature kernel of all pairs by summation over the neurons."""
        left = self.features(x)
        return jnp.tensordot(left, left if z is None else self.features(z), axes=(-1, -1))

    def indicator_gram(
        self, x: Float[ArrayLike, "*x"], z: Float[ArrayLike, "*z"] | None
    ) -> Float[Array, "*shape"]:
        """Return the indicator kernel of all pairs by summation over the neurons."""
        left = self.gates(x)
        return jnp.tensordot(left, left if z is None else self.gates(z), axes=(-1, -1))


AnyLaw = str | WeightLaw
LAWS: dict[str, type[DensityLaw]] = {"signs": Signs, "uniform": Uniform, "radial": Radial}


def weight_law(name: str, value: object) -> WeightLaw:
    """Accept a name in ``LAWS`` or a ``WeightLaw``; return the law. This is a kind of ``meanflow._checks``."""
    if isinstance(value, WeightLaw):
        return value
    _checks.one_of(name, value, LAWS)
    return LAWS[str(value)]()


def resolve_law(law: AnyLaw) -> WeightLaw:
    """Return the law behind a name, with its default parameters; a law is returned as it is.

    >>> resolve_law("uniform").bound
    1.0
    """
    return weight_law("law", law)


def pairs(x: Float[ArrayLike, "*x"], z: Float[ArrayLike, "*z"] | None) -> tuple[jax.Array, jax.Array]:
    """Return x and z (x itself if None) in one float dtype, broadcast to shape x.shape + z.shape."""
    first = jnp.asarray(x)
    second = first if z is None else jnp.asarray(z)
    dtype = jnp.result_type(first, second, 0.0)
    shape = first.shape + second.shape
    left = first.astype(dtype).reshape(first.shape + (1,) * second.ndim)
    right = second.astype(dtype).reshape((1,) * first.ndim + second.shape)
    return jnp.broadcast_to(left, shape), jnp.broadcast_to(right, shape)
