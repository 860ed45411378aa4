"""Bounds on W_1 between a layer's outputs at two times: the unitization theorems, printed and corrected.

Formulas take samples x (after) and y (before), (N, d) and (M, d), use population moments, hold for the
empirical measures themselves and are pure JAX. Each ``theorem...`` function also computes the exact
distance and returns a ``Bound`` with both sides. r denotes |x|, a = min alpha.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meanflow import _checks
from meanflow.layers.functional import recenter, rescale, unitize
from meanflow.transport.exact import wasserstein

FORMS = ("printed", "corrected")


_unitize = jax.jit(unitize, static_argnames="interpolation")


class Bound(NamedTuple):
    """Both sides of an inequality on W_1: the paper's, the corrected one, and the exact distance.

    Upper bounds unless the function says lower. ``printed`` is what the paper states, whether it holds
    or not.
    """

    printed: jax.Array
    corrected: jax.Array
    distance: jax.Array


@partial(jax.jit, static_argnames="form")
def moment_bound(x: jax.Array, y: jax.Array, form: str = "corrected") -> jax.Array:
    """Upper bound from two moments (Theorem 1).

        printed     sum var + sum var' + |dmu| + 2          (neither scale-equivariant nor ever attained)
        corrected   sqrt( sum var + sum var' + |dmu|^2 )    (independent coupling and W_1 <= W_2; sharp)

    >>> dirac, pair = jnp.zeros((2, 1)), jnp.array([[-2.0], [2.0]])
    >>> print(moment_bound(pair, dirac), wasserstein(pair, dirac), moment_bound(pair, dirac, "printed"))
    2.0 2.0 6.0
    """
    _checks.one_of("form", form, FORMS)
    spread = jnp.sum(jnp.var(x, axis=0)) + jnp.sum(jnp.var(y, axis=0))
    shift = jnp.sum(jnp.square(jnp.mean(x, axis=0) - jnp.mean(y, axis=0)))
    return spread + jnp.sqrt(shift) + 2 if form == "printed" else jnp.sqrt(spread + shift)


def standardized_bound(dimension: int, form: str = "corrected") -> float:
    """Upper bound (4) for d features of mean 0 and variance 1: printed 2d + 2, corrected sqrt(2d)."""
    _checks.one_of("form", form, FORMS)
    return 2.0 * dimension + 2 if form == "printed" else (2.0 * dimension) ** 0.5


def truncated_power(x: jax.Array, p: int, c: float | jax.Array) -> jax.Array:
    """f_{p,C}(x) = sum_i clip(x_i, -C, C)^p / (p C^(p-1) sqrt(d)), a 1-Lipschitz function; (N, d) -> (N,)."""
    p = _checks.whole("p", p, 1)
    _checks.at_least("c", c, 0.0, strict=True)
    ratio = jnp.clip(x / c, -1, 1)  # scaled first: C^p overflows float32 early
    return c * jnp.sum(ratio**p, axis=-1) / (p * x.shape[-1] ** 0.5)


def power_bound(x: jax.Array, y: jax.Array, p: int, c: float | jax.Array) -> jax.Array:
    """Lower bound |E f_{p,C}(x) - E f_{p,C}(y)| (Theorem 2; the paper asks p >= 2, p = 1 is valid too)."""
    return jnp.abs(jnp.mean(truncated_power(x, p, c)) - jnp.mean(truncated_power(y, p, c)))


def noise_bound(x: jax.Array, y: jax.Array, c: float) -> jax.Array:
    """Lower bound (5): the p = 2 bound written with the errors of mean and variance of standardised outputs.

    | sum_i (mu_i')^2 + (var_i' - 1) - mu_i^2 - (var_i - 1) | / (2 C sqrt(d)), for supports in [-C, C]^d.
    """
    noise = [jnp.sum(jnp.square(jnp.mean(u, axis=0)) + jnp.var(u, axis=0) - 1) for u in (x, y)]
    return jnp.abs(noise[0] - noise[1]) / (2 * c * x.shape[1] ** 0.5)


@partial(jax.jit, static_argnames="orders")
def best_power_bound(x: jax.Array, y: jax.Array, orders: tuple[int, ...] = (1, 2, 3, 4)) -> jax.Array:
    """The largest ``power_bound`` over orders and a grid of C from 1/16 to 1 times the largest entry."""
    top = jnp.maximum(jnp.max(jnp.abs(x)), jnp.max(jnp.abs(y)))
    top = jnp.where(top > 0, top, 1)
    scales = top * jnp.geomspace(1 / 16, 1, 9, dtype=top.dtype)
    return jnp.max(jnp.stack([jax.vmap(lambda c, p=p: power_bound(x, y, p, c))(scales) for p in orders]))


def harmonic_norm(r: jax.Array, alpha: jax.Array) -> jax.Array:
    """The largest norm (9) gives a vector of norm r: r/(1+a(r-1)), a = min alpha if r >= 1, else the max."""
    low, high = jnp.min(alpha), jnp.max(alpha)
    alpha = jnp.where(r >= 1, low, high)
    scale = 1 + alpha * (r - 1)
    return jnp.where(scale > 0, r / jnp.where(scale > 0, scale, 1), 0)


@partial(jax.jit, static_argnames=("interpolation", "form"))
def unitized_bound(
    x: jax.Array,
    y: jax.Array,
    alpha: Any,
    *,
    interpolation: str = "linear",
    form: str = "corrected",
    alpha_y: Any = None,
) -> jax.Array:
    """Upper bound on W_1 between unitize(x, alpha) and unitize(y, alpha), from the norms r = |x| and |y|.

        printed               2 / a, or E r + E r' + 2 if a = 0     (Theorem 3.3; + 0 for a scalar alpha, 3.2)
        corrected, harmonic   E h(r) + E h(r') with h = ``harmonic_norm``; always <= 2 / a
        corrected, linear     2 + (1 - a) (E(r - 1)_+ + E(r' - 1)_+) for alpha in [0, 1]; sharp
                              2 max|alpha| + max|1 - alpha| (E r + E r') for any alpha

    The printed bound is a theorem about the harmonic form (9) only; the linear form (10), which the
    paper runs, violates it without limit.

    Args:
        x: inputs of the map after, (N, d).
        y: inputs of the map before, (M, d).
        alpha: number or (d,).
        interpolation: ``"linear"`` or ``"harmonic"``.
        form: ``"printed"`` or ``"corrected"``.
        alpha_y: alpha before, where it has moved; the printed bound becomes 1/a + 1/a'.
    """
    _checks.one_of("form", form, FORMS)
    _checks.one_of("interpolation", interpolation, ("linear", "harmonic"))
    after, before = jnp.asarray(alpha, x.dtype), jnp.asarray(alpha if alpha_y is None else alpha_y, x.dtype)
    sides = [(jnp.linalg.norm(x, axis=1), after), (jnp.linalg.norm(y, axis=1), before)]
    if form == "printed":
        return sum((_printed_half(r, a) for r, a in sides), jnp.zeros((), x.dtype))
    half = _harmonic_half if interpolation == "harmonic" else _linear_half
    return half(*sides[0]) + half(*sides[1])


def _printed_half(r: jax.Array, alpha: jax.Array) -> jax.Array:
    low = jnp.min(alpha)
    free = jnp.mean(r) + (1 if alpha.ndim else 0)
    return jnp.where(low > 0, 1 / jnp.where(low > 0, low, 1), free)


def _harmonic_half(r: jax.Array, alpha: jax.Array) -> jax.Array:
    return jnp.mean(harmonic_norm(r, alpha))


def _linear_half(r: jax.Array, alpha: jax.Array) -> jax.Array:
    inside = jnp.all((alpha >= 0) & (alpha <= 1))
    tight = 1 + (1 - jnp.min(alpha)) * jnp.mean(jnp.maximum(r - 1, 0))
    loose = jnp.max(jnp.abs(alpha)) + jnp.max(jnp.abs(1 - alpha)) * jnp.mean(r)
    return jnp.where(inside, tight, loose)


def unitized_standardized_bound(dimension: int, alpha_min: float) -> float:
    """Upper bound for the practical form (10) after exact standardisation, alpha in [0, 1]^d, a its minimum.

    2 (a + (1 - a) sqrt(d)) for d >= 4 and 2 + (1 - a) d / 2 below; at a = 0 the smaller sqrt(2d) holds
    only if all alpha are 0.
    """
    if not 0 <= alpha_min <= 1:
        raise ValueError(f"alpha_min must lie in [0, 1], got {alpha_min}")
    if dimension >= 4:
        return 2 * (alpha_min + (1 - alpha_min) * dimension**0.5)
    return 2 + (1 - alpha_min) * dimension / 2


def output_bound(
    x: jax.Array, y: jax.Array, gamma: Any, beta: Any, gamma_y: Any = None, beta_y: Any = None
) -> jax.Array:
    """Upper bound on the layer outputs gamma x + beta and gamma' y + beta' after the affine map.

    |beta - beta'| + max|gamma| E|x| + max|gamma'| E|y|, with x, y the unaffined outputs: no constant bound
    survives a trained gamma and beta.
    """
    gamma_y, beta_y = (gamma if gamma_y is None else gamma_y), (beta if beta_y is None else beta_y)
    halves = [
        jnp.max(jnp.abs(jnp.asarray(g))) * jnp.mean(jnp.linalg.norm(u, axis=1))
        for g, u in ((gamma, x), (gamma_y, y))
    ]
    return jnp.linalg.norm(jnp.asarray(beta) - jnp.asarray(beta_y)) + halves[0] + halves[1]


def theorem1(x: jax.Array, y: jax.Array) -> Bound:
    """Theorem 1: W_1 against its bound from two moments."""
    return Bound(moment_bound(x, y, "printed"), moment_bound(x, y), wasserstein(x, y))


def equation4(x: jax.Array, y: jax.Array) -> Bound:
    """(4) without noise: both samples are standardised exactly, then compared."""
    x, y = (rescale(recenter(u)) for u in (x, y))
    d = x.shape[1]
    printed, corrected = (jnp.asarray(standardized_bound(d, form), x.dtype) for form in FORMS)
    return Bound(printed, corrected, wasserstein(x, y))


def theorem2(x: jax.Array, y: jax.Array, p: int = 2, c: float | None = None) -> Bound:
    """Theorem 2, a *lower* bound. Printed: order p at C (default the largest entry); corrected: the best."""
    top = float(jnp.maximum(jnp.max(jnp.abs(x)), jnp.max(jnp.abs(y)))) if c is None else c
    if p < 2:
        raise ValueError(f"p must be an integer >= 2 as printed, got {p}; power_bound takes p = 1")
    return Bound(power_bound(x, y, p, top), best_power_bound(x, y), wasserstein(x, y))


def theorem31(x: jax.Array, y: jax.Array) -> Bound:
    """Theorem 3.1: unit vectors are at most 2 apart; correct, attained by antipodal points."""
    return theorem33(x, y, 1.0, interpolation="harmonic")


def theorem32(x: jax.Array, y: jax.Array, alpha: float) -> Bound:
    """Theorem 3.2: scalar alpha in (8); correct, and sharper as h(E r) + h(E r') by concavity."""
    bound = theorem33(x, y, float(alpha), interpolation="harmonic")
    means = [jnp.mean(jnp.linalg.norm(u, axis=1)) for u in (x, y)]
    halves = [harmonic_norm(r, jnp.asarray(alpha, r.dtype)) for r in means]
    return bound._replace(corrected=halves[0] + halves[1])


def theorem33(x: jax.Array, y: jax.Array, alpha: Any, *, interpolation: str = "harmonic") -> Bound:
    """Theorem 3.3 for a vector alpha: true of the harmonic form, false of the linear one the paper runs."""
    bounds = [unitized_bound(x, y, alpha, interpolation=interpolation, form=form) for form in FORMS]
    images = [_unitize(u, alpha, interpolation=interpolation) for u in (x, y)]
    return Bound(bounds[0], bounds[1], wasserstein(images[0], images[1]))


def standardized_layer(x: jax.Array, y: jax.Array, alpha: Any) -> Bound:
    """The practical layer before gamma and beta: exact standardisation, then (10) with alpha in [0, 1]^d.

    Printed: 2 / min alpha of Theorem 3.3 (infinite at 0); corrected: ``unitized_standardized_bound``.
    """
    low, images = float(jnp.min(jnp.asarray(alpha))), [unitize(rescale(recenter(u)), alpha) for u in (x, y)]
    corrected = unitized_standardized_bound(x.shape[1], low)
    printed = 2 / low if low > 0 else float("inf")
    sides = [jnp.asarray(side, x.dtype) for side in (printed, corrected)]
    return Bound(sides[0], sides[1], wasserstein(images[0], images[1]))


def layer_output(
    x: jax.Array, y: jax.Array, gamma: Any, beta: Any, gamma_y: Any = None, beta_y: Any = None
) -> Bound:
    """The layer after gamma and beta, of unit samples: printed 2 of Theorem 3.1; corrected ``output_bound``."""
    gamma_y, beta_y = (gamma if gamma_y is None else gamma_y), (beta if beta_y is None else beta_y)
    units = [unitize(u, 1.0) for u in (x, y)]
    lay = lambda u, g, b: u * jnp.asarray(g, u.dtype)[None] + jnp.asarray(b, u.dtype)[None]
    distance = wasserstein(lay(units[0], gamma, beta), lay(units[1], gamma_y, beta_y))
    corrected = output_bound(units[0], units[1], gamma, beta, gamma_y, beta_y)
    return Bound(jnp.asarray(2.0, x.dtype), corrected, distance)


def unbounded_example(scale: float, dimension: int, p: int = 2) -> tuple[float, float]:
    """The paper's unnormalised example: uniform on [C/2, C]^d against uniform on [0, C/4]^d.

    Returns:
        The printed lower bound (2^-p - 4^-p) sqrt(d) C / p, and |dmu| = 5 C sqrt(d) / 8: a lower bound too,
        6.7 times larger at p = 2, and W_1 itself in d = 1.
    """
    return (2.0**-p - 4.0**-p) * dimension**0.5 * scale / p, 5 * scale * dimension**0.5 / 8
