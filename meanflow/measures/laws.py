"""Laws of the initial particles, as maps from the unit cube.

A law consumes ``size`` numbers in (0, 1) and returns one coordinate of a particle. The same law then gives
independent samples (random numbers), quasi-random clouds (a low-discrepancy sequence) and tensor-product
quadrature (a grid): see ``meanflow.measures._sampling``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from meanflow import _boundary
from meanflow._boundary import (
    Count,
    Natural,
    Number,
    Positive,
    Rate,
    array,
    checked,
    count,
    function,
    unchecked,
)


@checked
class Law(eqx.Module):
    """A law on R or R^d, as a map from the unit cube.

    Attributes:
        size: how many numbers in (0, 1) one value consumes.
        transform: maps (k, size) such numbers to (k,) or (k, d) values.
        family: name of the laws of which this is one, or "". Kernels of infinite width have closed forms for some.
        parameters: those that tell it from the others of its family.
    """

    size: Natural = eqx.field(static=True)
    transform: Annotated[Callable[[jax.Array], jax.Array], function] = eqx.field(static=True)
    family: str = eqx.field(static=True, default="")
    parameters: Annotated[
        tuple[float | jax.Array, ...], unchecked("the functions that make laws have checked them")
    ] = ()

    @checked
    def __call__(self, u: Annotated[jax.Array, array((None, None), low=0, high=1, least=0)]) -> jax.Array:
        """Return the values of the law at the points ``u`` (k, size) of the unit cube."""
        if u.shape[1] != self.size:
            raise ValueError(f"u must have shape (k, {self.size}), got {u.shape}")
        return self.transform(u)

    @checked
    def repeat(self, count: Count) -> "Law":
        """Return the law of ``count`` independent copies of this one, which must be a law on R; values (k, count)."""

        def transform(u: jax.Array) -> jax.Array:
            # each copy consumes numbers of its own: nothing ties one output to another
            columns = [self(u[:, start : start + self.size]) for start in range(0, u.shape[1], self.size)]
            if columns[0].ndim != 1:
                raise ValueError(
                    f"only a law of single numbers can be repeated, got one of shape {columns[0].shape[1:]}"
                )
            return jnp.stack(columns, axis=1)

        return Law(self.size * count, transform)


def as_law(name: str, value: object, like: Law | None = None) -> Law:
    """Return the law behind what a user gave: a law, a number that is always taken, or a function of uniform numbers.

    A function maps numbers u in (0, 1) to values: the inverse of a distribution function, such as
    ``lambda u: -jnp.log(u)`` for an exponential law. It gets u (k,) and returns (k,); where the coordinate is a vector
    in R^d, u is (k, d) and so are the values.

    Args:
        name: of the argument, for messages.
        value: what was given.
        like: the law it stands in for, which says whether values are vectors; None for numbers.

    >>> as_law("r", lambda u: u**2)(jnp.array([[0.5], [1.0]])).tolist(), as_law("a", 3)(jnp.zeros((1, 0))).tolist()
    ([0.25, 1.0], [3.0])
    """
    if isinstance(value, Law):
        return value
    if like is not None and not isinstance(like, Law):
        raise TypeError(f"like must be a Law, got {_boundary.show(like)}")
    shape = () if like is None else jax.eval_shape(like, jnp.zeros((1, like.size))).shape[1:]
    if not callable(value) or isinstance(value, type):
        level = _boundary.number()(name, value)
        return Law(0, lambda u: jnp.full((u.shape[0], *shape), level, u.dtype))  # type: ignore[arg-type]

    def transform(u: jax.Array) -> jax.Array:
        values = _boundary.floating(value(u if shape else u[:, 0])).astype(u.dtype)
        _boundary.shape(f"values of {name}", values, (u.shape[0], *shape))
        return values

    return Law(shape[0] if shape else 1, transform)


def _ordered(low: float | jax.Array, high: float | jax.Array) -> None:
    """Refuse an interval that ends before it begins."""
    known = _boundary.concrete(high), _boundary.concrete(low)
    if all(end is not None for end in known) and known[0] < known[1]:  # type: ignore[operator]
        raise ValueError(f"high must be at least low = {low}, got {high}")


@checked
def uniform(low: Number = -1.0, high: Number = 1.0) -> Law:
    """Return the uniform law on (low, high).

    Args:
        low, high: ends of the interval.
    """
    _ordered(low, high)
    return Law(1, lambda u: low + (high - low) * u[:, 0], "uniform", (low, high))


@checked
def normal(scale: Rate = 1.0, dim: Count | None = None) -> Law:
    """Return the normal law N(0, scale^2) on R, or with covariance scale^2 I on R^dim.

    Args:
        scale: standard deviation.
        dim: dimension of a vector; None for a number.
    """

    def transform(u: jax.Array) -> jax.Array:
        z = scale * jax.scipy.special.ndtri(u)
        return z[:, 0] if dim is None else z

    return Law(dim or 1, transform, "normal", (scale,))


@checked
def constant(value: Number = 0.0) -> Law:
    """Return the law that always gives ``value``.

    Args:
        value: the number.
    """
    return Law(0, lambda u: jnp.full(u.shape[:1], value, u.dtype))


@checked
def signs(scale: Number = 1.0) -> Law:
    """Return the law of +scale or -scale, with probability 1/2 each.

    Args:
        scale: size of the numbers.
    """
    return Law(1, lambda u: jnp.where(u[:, 0] < 0.5, scale, -scale).astype(u.dtype), "signs", (scale,))


@checked
def angle(low: Number = -np.pi, high: Number = np.pi) -> Law:
    """Return the law of a uniform angle in (low, high), the full circle by default.

    Args:
        low, high: ends of the interval, in radians.
    """
    return uniform(low, high)


@checked
def sphere(dim: Count, radius: Positive = 1.0) -> Law:
    """Return the uniform law on the sphere of R^dim; for dim = 2 it consumes a single number, the angle.

    Args:
        dim: dimension of the vectors; for 1 the sphere is two points, a sign.
        radius: their length.
    """
    if dim == 2:

        def circle(u: jax.Array) -> jax.Array:
            turn = 2 * jnp.pi * u[:, 0]
            return radius * jnp.stack([jnp.cos(turn), jnp.sin(turn)], axis=-1)

        return Law(1, circle)

    # a normal vector has a uniform direction, in any dimension
    def project(u: jax.Array) -> jax.Array:
        z = jax.scipy.special.ndtri(u)
        return radius * z / jnp.linalg.norm(z, axis=-1, keepdims=True)

    return Law(dim, project)


@checked
def mixed_scales(dim: Annotated[int, count(2)], low: Positive, high: Positive) -> Law:
    """Return the law of vectors in R^dim with a uniform direction and a norm that is log-uniform in (low, high).

    Args:
        dim: dimension of the vectors, >= 2.
        low, high: bounds of their norms.
    """
    _ordered(low, high)
    # the first numbers give the direction, the last one the norm
    direction = sphere(dim)

    def transform(u: jax.Array) -> jax.Array:
        norm = low * (high / low) ** u[:, -1:]
        return norm * direction(u[:, :-1])

    return Law(direction.size + 1, transform)
