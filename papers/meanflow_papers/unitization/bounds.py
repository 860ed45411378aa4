"""Both sides of the inequalities of paper 003: the bound as printed, the corrected one, and the exact distance.

Formulas take samples x (after) and y (before) of a layer's outputs, (N, d) and (M, d), and use population moments.
The corrected bounds are those of ``meanflow.transport.ics`` and of ``corrected``. r denotes |x|, a = min alpha.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanflow.layers.functional import recenter, rescale, unitize
from meanflow.transport import ics, wasserstein
from meanflow_papers.unitization import corrected as corrected_bounds

Sample = Float[Array, "n d"]
Scalar = Float[Array, ""]
Alpha = float | Float[Array, "d"]

_unitize = jax.jit(unitize, static_argnames="interpolation")


class Bound(NamedTuple):
    """Both sides of an inequality on W_1.

    The bounds are upper bounds unless the function says lower. ``printed`` is what the paper states, whether it
    holds or not.
    """

    printed: Scalar
    corrected: Scalar
    distance: Scalar


@jax.jit
def printed_moment_bound(x: Sample, y: Sample) -> Scalar:
    """Return the bound of Theorem 1 as printed, sum var + sum var' + |dmu| + 2.

    It holds, but it is neither scale-equivariant nor ever attained.
    """
    spread = jnp.sum(jnp.var(x, axis=0)) + jnp.sum(jnp.var(y, axis=0))
    return spread + jnp.linalg.norm(jnp.mean(x, axis=0) - jnp.mean(y, axis=0)) + 2


@jax.jit
def printed_unitized_bound(x: Sample, y: Sample, alpha: Alpha, alpha_y: Alpha | None = None) -> Scalar:
    """Return the bound of Theorem 3.3 as printed: 2 / a, or E r + E r' + 2 where a = 0.

    It is a theorem about the harmonic form (9) only. For a scalar alpha (Theorem 3.2) nothing is added to the norms
    where a = 0.

    Args:
        x: inputs of the map after, (N, d).
        y: inputs of the map before, (M, d).
        alpha: number or (d,).
        alpha_y: alpha before, where it has moved; the bound becomes 1/a + 1/a'.
    """

    def half(u: Sample, alpha: Alpha) -> Scalar:
        value = jnp.asarray(alpha, u.dtype)
        low = jnp.min(value)
        free = jnp.mean(jnp.linalg.norm(u, axis=1)) + (1 if value.ndim else 0)
        return jnp.where(low > 0, 1 / jnp.where(low > 0, low, 1), free)

    return half(x, alpha) + half(y, alpha if alpha_y is None else alpha_y)


def best_bound(x: Sample, y: Sample, piece: str) -> Scalar:
    """Return a bound of ``transport.ics`` by its name."""
    return jnp.asarray(ics(y, x, max_exact=0).pieces[piece])


def theorem1(x: Sample, y: Sample) -> Bound:
    """Theorem 1: W_1 against its bound from two moments."""
    return Bound(printed_moment_bound(x, y), best_bound(x, y, "moment"), wasserstein(x, y))


def equation4(x: Sample, y: Sample) -> Bound:
    """Equation (4) without noise, printed 2d + 2: both samples are standardized exactly, then compared."""
    x, y = (rescale(recenter(u)) for u in (x, y))
    d = x.shape[1]
    printed, corrected = (
        jnp.asarray(side, x.dtype) for side in (2.0 * d + 2, corrected_bounds.standardized_bound(d))
    )
    return Bound(printed, corrected, wasserstein(x, y))


def theorem2(x: Sample, y: Sample, p: int = 2, c: float | None = None) -> Bound:
    """Theorem 2, a *lower* bound. Printed: order p at C (default the largest entry); corrected: the best."""
    top = float(jnp.maximum(jnp.max(jnp.abs(x)), jnp.max(jnp.abs(y)))) if c is None else c
    if p < 2:
        raise ValueError(f"p must be an integer >= 2 as printed, got {p}; power_bound takes p = 1")
    return Bound(corrected_bounds.power_bound(x, y, p, top), best_bound(x, y, "power"), wasserstein(x, y))


def theorem31(x: Sample, y: Sample) -> Bound:
    """Theorem 3.1: unit vectors are at most 2 apart; correct, and attained by antipodal points."""
    return theorem33(x, y, 1.0, interpolation="harmonic")


def theorem32(x: Sample, y: Sample, alpha: float) -> Bound:
    """Theorem 3.2: a scalar alpha in (8); correct, and sharper as h(E r) + h(E r') by concavity."""
    bound = theorem33(x, y, float(alpha), interpolation="harmonic")
    means = [jnp.mean(jnp.linalg.norm(u, axis=1)) for u in (x, y)]
    halves = [corrected_bounds.harmonic_norm(r, jnp.asarray(alpha, r.dtype)) for r in means]
    return bound._replace(corrected=halves[0] + halves[1])


def theorem33(x: Sample, y: Sample, alpha: Alpha, *, interpolation: str = "harmonic") -> Bound:
    """Theorem 3.3 for a vector alpha: true of the harmonic form, false of the linear one that the paper runs."""
    corrected = corrected_bounds.unitized_bound(x, y, alpha, interpolation=interpolation)
    images = [_unitize(u, alpha, interpolation=interpolation) for u in (x, y)]
    return Bound(printed_unitized_bound(x, y, alpha), corrected, wasserstein(images[0], images[1]))


def standardized_layer(x: Sample, y: Sample, alpha: Alpha) -> Bound:
    """The practical layer before gamma and beta: exact standardization, then (10) with alpha in [0, 1]^d.

    Printed is 2 / min alpha of Theorem 3.3 (infinite at 0), corrected ``unitized_standardized_bound``.
    """
    low, images = float(jnp.min(jnp.asarray(alpha))), [unitize(rescale(recenter(u)), alpha) for u in (x, y)]
    corrected = corrected_bounds.unitized_standardized_bound(x.shape[1], low)
    printed = 2 / low if low > 0 else float("inf")
    sides = [jnp.asarray(side, x.dtype) for side in (printed, corrected)]
    return Bound(sides[0], sides[1], wasserstein(images[0], images[1]))


def layer_output(
    x: Sample,
    y: Sample,
    gamma: Float[Array, "d"],
    beta: Float[Array, "d"],
    gamma_y: Float[Array, "d"] | None = None,
    beta_y: Float[Array, "d"] | None = None,
) -> Bound:
    """The layer after gamma and beta, of unit samples: printed 2 of Theorem 3.1, corrected ``output_bound``."""
    gamma_y, beta_y = (gamma if gamma_y is None else gamma_y), (beta if beta_y is None else beta_y)
    units = [unitize(u, 1.0) for u in (x, y)]
    lay = lambda u, g, b: u * jnp.asarray(g, u.dtype)[None] + jnp.asarray(b, u.dtype)[None]
    distance = wasserstein(lay(units[0], gamma, beta), lay(units[1], gamma_y, beta_y))
    corrected = corrected_bounds.output_bound(units[0], units[1], gamma, beta, gamma_y, beta_y)
    return Bound(jnp.asarray(2.0, x.dtype), corrected, distance)


def unbounded_example(scale: float, dimension: int, p: int = 2) -> tuple[float, float]:
    """The paper's example without normalization: uniform on [C/2, C]^d against uniform on [0, C/4]^d.

    Returns:
        The printed lower bound (2^-p - 4^-p) sqrt(d) C / p, and |dmu| = 5 C sqrt(d) / 8: a lower bound too,
        6.7 times larger at p = 2, and W_1 itself in d = 1.
    """
    return (2.0**-p - 4.0**-p) * dimension**0.5 * scale / p, 5 * scale * dimension**0.5 / 8
