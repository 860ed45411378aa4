"""Teachers: targets that depend on few directions of many, and data sets drawn from them.

    y = link(U x) + noise * N(0, 1),     U of shape (k, d) with orthonormal rows

Inputs are standard normal, or uniform signs for functions on the hypercube. A student that learns must find the rows of
U; ``meanflow.flows.alignment`` measures how far it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanflow import _boundary
from meanflow._boundary import Count, PRNGKey, Rate, array, checked, choice, either, function
from meanflow.measures._dataset import Dataset

Link = Annotated[Callable[[jax.Array], jax.Array], function]


@checked
class Teacher(eqx.Module):
    """A target link(U x) and the law of its inputs.

    Attributes:
        directions: U (k, d), orthonormal rows.
        link: maps (n, k) to (n,).
        inputs: ``"normal"`` or ``"signs"``, the law of the entries of x.
    """

    directions: Float[Array, "k d"]
    link: Link = eqx.field(static=True)
    inputs: Annotated[str, choice("normal", "signs")] = eqx.field(static=True)

    def __check_init__(self) -> None:
        """Refuse directions that are not orthonormal."""
        known = _boundary.concrete(self.directions)
        if known is not None and not np.allclose(known @ known.T, np.eye(len(known)), atol=1e-3):
            raise ValueError(
                "directions must have orthonormal rows, so that directions @ directions.T is the identity"
            )

    @checked
    def __call__(self, x: Annotated[Float[Array, "n d"], array((None, None), least=0)]) -> Float[Array, " n"]:
        """Return the targets of inputs x (n, d) without noise, shape (n,)."""
        _boundary.shape("x", x, (None, self.directions.shape[1]))
        values = self.link(x @ self.directions.T)
        _boundary.shape("values of link", values, (x.shape[0],))
        return values

    @checked
    def draw(self, key: PRNGKey, samples: Count, *, noise: Rate = 0.0) -> Dataset:
        """Draw a data set.

        Args:
            key: PRNG key. For one key the first samples of a larger set are a smaller one.
            samples: number n of samples.
            noise: standard deviation of normal noise on the targets.

        >>> import jax
        >>> data = parity(20, 3).draw(jax.random.key(0), 50)
        >>> data.x.shape, sorted(set(data.y.tolist()))
        ((50, 20), [-1.0, 1.0])
        """
        draw = jax.random.normal if self.inputs == "normal" else _signs
        dim = self.directions.shape[1]

        def one(key: jax.Array) -> tuple[jax.Array, jax.Array]:
            first, second = jax.random.split(key)
            return draw(first, (dim,)), jax.random.normal(second)

        # one key a sample, so that the first samples of a larger set are a smaller one
        keys = jax.vmap(lambda k: jax.random.fold_in(key, k))(jnp.arange(samples))
        x, errors = jax.vmap(one)(keys)
        return Dataset(x, self(x) + noise * errors)


def _signs(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.rademacher(key, shape, jnp.result_type(float))


# the polynomials are Hermite's, with mean 0 and variance 1 under the standard normal law
LINKS: dict[str, Link] = {
    "linear": lambda z: z,
    "hermite2": lambda z: (z**2 - 1) / jnp.sqrt(2.0),
    "hermite3": lambda z: (z**3 - 3 * z) / jnp.sqrt(6.0),
    "hermite4": lambda z: (z**4 - 6 * z**2 + 3) / jnp.sqrt(24.0),
    "relu": jax.nn.relu,
    "abs": jnp.abs,
    "tanh": jnp.tanh,
    "sign": jnp.sign,
}
AnyLink = Annotated[str | Link, either(choice(*LINKS), function)]


@checked
def single_index(dim: Count, link: AnyLink = "hermite2", *, key: PRNGKey | None = None) -> Teacher:
    """Return the teacher y = g(u . x) for normal inputs.

    Args:
        dim: input dimension d.
        link: g, a name in ``LINKS`` (normalized Hermite polynomials and others) or an elementwise function. The
            degree of its first Hermite coefficient that is not 0, its information exponent, decides how hard it is.
        key: PRNG key of a uniform direction u; default the first axis.

    >>> import jax.numpy as jnp
    >>> float(single_index(3, "abs")(jnp.array([[-2.0, 1.0, 0.0]]))[0])
    2.0
    """
    g = LINKS[link] if isinstance(link, str) else link
    return multi_index(dim, 1, lambda z: g(z[:, 0]), key=key)


@checked
def multi_index(
    dim: Count, indices: Count, link: AnyLink = "hermite2", *, key: PRNGKey | None = None
) -> Teacher:
    """Return the teacher y = g(u_1 . x, ..., u_k . x) for normal inputs.

    Args:
        dim: input dimension d.
        indices: the number k of directions, at most d.
        link: a function that maps (n, k) to (n,), or a name: then y = sum_i g(u_i . x) / sqrt(k).
        key: PRNG key of uniform orthonormal directions; default the first k axes.

    >>> import jax.numpy as jnp
    >>> float(multi_index(3, 2, lambda z: z[:, 0] * z[:, 1])(jnp.array([[2.0, 3.0, 5.0]]))[0])
    6.0
    """
    _check_count(indices, dim)
    directions = jnp.eye(indices, dim)
    if key is not None:
        directions = jnp.linalg.qr(jax.random.normal(key, (dim, indices)))[0].T
    # over sqrt(k), so that the variance of the targets does not grow with the number of directions
    sum_of = lambda g: lambda z: jnp.sum(g(z), axis=1) / indices**0.5
    return Teacher(directions, sum_of(LINKS[link]) if isinstance(link, str) else link, "normal")


@checked
def staircase(dim: Count, steps: Count, *, key: PRNGKey | None = None) -> Teacher:
    """Return the teacher y = z_1 + z_1 z_2 + ... + z_1 ... z_k over sqrt(k), with z = U x and inputs of signs.

    Args:
        dim: input dimension d.
        steps: the number k of steps, at most d.
        key: PRNG key that chooses k of the axes; default the first k.

    >>> import jax.numpy as jnp
    >>> round(float(staircase(4, 2)(jnp.array([[1.0, -1.0, 1.0, 1.0]]))[0]), 6)
    0.0
    """
    climb = lambda z: jnp.sum(jnp.cumprod(z, axis=1), axis=1) / steps**0.5
    return Teacher(_axes(steps, dim, key), climb, "signs")


@checked
def parity(dim: Count, degree: Count, *, key: PRNGKey | None = None) -> Teacher:
    """Return the teacher y = z_1 z_2 ... z_k, with z = U x and inputs of signs.

    Args:
        dim: input dimension d.
        degree: the number k of factors, at most d.
        key: PRNG key that chooses k of the axes; default the first k.

    >>> import jax.numpy as jnp
    >>> float(parity(4, 2)(jnp.array([[1.0, -1.0, 1.0, 1.0]]))[0])
    -1.0
    """
    return Teacher(_axes(degree, dim, key), lambda z: jnp.prod(z, axis=1), "signs")


def _check_count(count: int, dim: int) -> None:
    if count > dim:
        raise ValueError(f"the number of directions must be at most dim = {dim}, got {count}")


def _axes(count: int, dim: int, key: jax.Array | None) -> jax.Array:
    _check_count(count, dim)
    axes = jnp.arange(count) if key is None else jax.random.permutation(key, dim)[:count]
    return jax.nn.one_hot(axes, dim, dtype=jnp.result_type(float))
