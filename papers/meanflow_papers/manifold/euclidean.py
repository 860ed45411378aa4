"""The metric of batch norm against the Euclidean one on Omega: constants that Theorem 4 needs for increments of bb."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Comparison(NamedTuple):
    """Sharp constants between G and the Euclidean metric on Omega.

    Attributes:
        upper: |v|_G <= upper |v| for tangent v.
        lower: |v| <= lower |v|_G.
        condition: largest ratio of the eigenvalues of G on a tangent space, (k+1)^2/(4k), k = cond(S).
    """

    upper: jax.Array
    lower: jax.Array
    condition: jax.Array


@jax.jit
def comparison(sigma: Float[Array, "d d"]) -> Comparison:
    """Return the constants for a covariance S (d, d): chord <= lower * angle and angle <= (pi/2) upper * chord."""
    spectrum = jnp.linalg.eigvalsh(sigma)
    low, high = spectrum[0], spectrum[-1]
    k = high / low
    stretch = jnp.where(k <= 2, 1.0, 4 * (k + 1) ** 3 / (27 * k**2))
    return Comparison(jnp.sqrt(high), jnp.sqrt(stretch / low), (k + 1) ** 2 / (4 * k))
