"""The arithmetic of the layers, on arrays that have been checked: moments over masks and devices, gamma and beta."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float

from meanflow._boundary import choice, function

Axes = int | tuple[int, ...]
Batch = Float[Array, "*shape"]
Part = Float[Array, "..."] | None  # broadcasts against a batch
Own = tuple[jax.Array | None, jax.Array | None]  # gamma and beta of a layer
Mode = Annotated[str, choice("std", "rms")]  # whether a second moment is about the mean or about zero
# draws parameters, (key, shape, dtype) -> array; the protocol of jax also asks for an ``out_sharding``
Initializer: TypeAlias = Annotated[Callable[[jax.Array, tuple[int, ...], DTypeLike], jax.Array], function]


def widen(x: Float[ArrayLike, "*shape"]) -> Float[Array, "*shape"]:
    """Return x as an array of at least single precision.

    >>> widen(jnp.ones(2, jnp.bfloat16)).dtype.name
    'float32'
    """
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def fits(name: str, part: ArrayLike, x: jax.Array) -> None:
    """Refuse a part whose shape does not broadcast against that of x."""
    given = jnp.shape(part)
    if len(given) > x.ndim or any(a not in (1, b) for a, b in zip(given[::-1], x.shape[::-1], strict=False)):
        raise ValueError(f"{name} must broadcast against x of shape {x.shape}, got shape {given}")


def axes_of(x: jax.Array, axis: Axes) -> tuple[int, ...]:
    """Return axes as nonnegative numbers in increasing order, or refuse those that x does not have."""
    given = axis if isinstance(axis, tuple) else (axis,)
    found = tuple(sorted({i % x.ndim for i in given if -x.ndim <= i < x.ndim}))
    if len(found) < len(given):
        raise ValueError(
            f"axis must be among the {x.ndim} axes of x, each at most once, got {axis} for shape {x.shape}"
        )
    return found


def result_type(x: ArrayLike) -> jnp.dtype:
    """Return the type of results for input x: its own, or the default float for integers."""
    given = jnp.asarray(x).dtype
    return given if jnp.issubdtype(given, jnp.inexact) else jnp.result_type(float)


def batch_scale(
    x: Float[ArrayLike, "..."], axis: Axes = 0, mode: str = "std", epsilon: float | Float[Array, ""] = 0.0
) -> Float[Array, "..."]:
    """Return the root of the second moment of x over ``axis``, which remains with length 1, plus ``epsilon``.

    >>> print(batch_scale(jnp.array([3.0, 5.0])), batch_scale(jnp.array([1.0, 7.0]), mode="rms"))
    [1.] [5.]
    """
    full = widen(x)
    centered = full - jnp.mean(full, axis=axis, keepdims=True) if mode == "std" else full
    scale = jnp.sqrt(jnp.mean(jnp.square(centered), axis=axis, keepdims=True) + epsilon)
    return scale.astype(result_type(x))


class Standardization(NamedTuple):
    """How ``standardize`` normalizes a batch: all that is known when its program is compiled.

    Attributes:
        axes: axes averaged over.
        epsilon: added to the second moment.
        center: whether the mean is subtracted.
        moment: ``"std"`` divides by the root of the second moment about the mean, ``"rms"`` about zero; None does not
            divide.
        axis_name: name of a mesh or vmap axis along which the batch is split.
        axis_index_groups: groups of devices along that axis which average among themselves.
    """

    axes: tuple[int, ...]
    epsilon: float
    center: bool = True
    moment: str | None = "std"
    axis_name: str | None = None
    axis_index_groups: tuple[tuple[int, ...], ...] | None = None

    def average(self, x: Float[Array, "..."], mask: Part) -> Float[Array, "..."]:
        """Return the mean over the axes, the entries where the mask is 1, and all devices.

        The axes remain with length 1. Where all entries are masked the mean is 0.
        """
        groups = self.axis_index_groups
        among = {} if groups is None else {"axis_index_groups": groups}
        if mask is None:
            local = jnp.mean(x, axis=self.axes, keepdims=True)
            return local if self.axis_name is None else jax.lax.pmean(local, self.axis_name, **among)
        # sums and counts over all devices first: shards may hold different numbers of entries
        total = jnp.sum(jnp.where(mask > 0, x, 0), axis=self.axes, keepdims=True)
        count = jnp.sum(jnp.broadcast_to(mask, x.shape), axis=self.axes, keepdims=True)
        if self.axis_name is not None:
            total, count = jax.lax.psum((total, count), self.axis_name, **among)
        return total / jnp.maximum(count, 1)


@partial(jax.custom_jvp, nondiff_argnums=(4,))
def standardize(
    x: Batch, gamma: Part, beta: Part, mask: Part, how: Standardization
) -> tuple[Batch, Float[Array, "..."], Float[Array, "..."]]:
    """Return the normalized batch gamma u + beta, with the mean m and the second moment of x.

        u = (x - m)/s,   m = E x,   s = sqrt(E (x - m)^2 + epsilon)

    Args:
        x: batch, in at least single precision.
        gamma: factor that broadcasts against x and is constant along the averaged axes, or None for 1.
        beta: summand likewise, or None for 0.
        mask: zeros and ones that broadcast against x, the entries that count; or None.
        how: what is averaged, subtracted and divided by.

    >>> y, mean, variance = standardize(jnp.array([[1.0], [5.0]]), None, None, None, Standardization((0,), 0.0))
    >>> print(y.ravel(), mean.ravel(), variance.ravel())
    [-1.  1.] [3.] [4.]
    """
    mean = how.average(x, mask)
    # two passes: E x^2 - (E x)^2 loses all digits where the mean is much larger than the deviation
    second = how.average(jnp.square(x if how.moment == "rms" else x - mean), mask)
    u = x - mean if how.center else x
    if how.moment is not None:
        u = u / jnp.sqrt(second + how.epsilon)
    return affine(u, gamma, beta), mean, second


Parts = tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]
Outcome = tuple[jax.Array, jax.Array, jax.Array]


@standardize.defjvp
def _standardize_jvp(how: Standardization, primals: Parts, tangents: Parts) -> tuple[Outcome, Outcome]:
    """Return the outcome and its derivative, which is written out.

    What is constant along the batch stands outside of the means, so that the gradient takes two sums over the batch,
    which those of gamma and beta share:

        y' = (gamma/s) x' + (beta' - (gamma/s) E x') + u (gamma' - (gamma/s) E[u x'])
    """
    (x, gamma, beta, mask), (dx, d_gamma, d_beta, _) = primals, tangents
    u, mean, second = standardize(x, None, None, mask, how)
    scale = jnp.ones_like(mean) if how.moment is None else jnp.sqrt(second + how.epsilon)
    rate = scale**-1 if gamma is None else gamma / scale
    d_mean = how.average(dx, mask)
    # u is then the deviation, of which the second moment is taken, over the scale
    same = how.center == (how.moment != "rms")
    deviation = u if same else (x if how.moment == "rms" else x - mean) / scale
    d_scale = how.average(deviation * dx, mask)  # E[(x - m) (x' - m')] = E[(x - m) x']
    shift = -rate * d_mean if how.center else None
    turn = None if how.moment is None else -rate * d_scale
    if d_beta is not None:
        shift = d_beta if shift is None else shift + d_beta
    if d_gamma is not None:
        turn = d_gamma if turn is None else turn + d_gamma
    dy = rate * dx if shift is None else rate * dx + shift
    dy = dy if turn is None else dy + u * turn
    return (affine(u, gamma, beta), mean, second), (dy, d_mean, 2 * scale * d_scale)


def affine(x: Batch, gamma: Part, beta: Part) -> Batch:
    """Return gamma x + beta; None stands for 1 and 0."""
    x = x if gamma is None else x * gamma
    return x if beta is None else x + beta
