"""Functions of a symmetric matrix, times vectors, with derivatives in the matrix that need no distinct eigenvalues.

For S = V diag(l) V' and a function f, the derivative of f(S) in the direction dS is (Daleckii and Krein)

    d f(S) = V (F o (V' dS V)) V',    F_ij = (f(l_i) - f(l_j)) / (l_i - l_j),    F_ij = f'(l_i) where l_i = l_j.

Derivatives of eigenvectors, which do not exist where eigenvalues are equal, do not enter. The functions here are what
training under a fixed kernel needs: what is left of a residual (``DECAY``) and its integral over time (``GAIN``).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, PyTree

State: TypeAlias = tuple[Array, Array, Array, Array, Array]
# learning rate and momentum of gradient descent, or None and None for gradient flow
Constants: TypeAlias = PyTree[Array]


class Spectral(NamedTuple):
    """A function f of eigenvalues, which also depends on times and constants.

    Attributes:
        value: (eigenvalues (N,), times, constants) -> f, times.shape + (N,).
        difference: (eigenvalues (N,), one time, constants) -> divided differences F, (N, N).
    """

    value: Callable[[Array, PyTree[Array], Constants], Array]
    difference: Callable[[Array, PyTree[Array], Constants], Array]


@jax.jit
def spectrum(matrix: Float[Array, "n n"]) -> tuple[Float[Array, " n"], Float[Array, "n n"]]:
    """Return eigenvalues >= 0, largest first, and eigenvectors in columns, of a positive semi-definite matrix.

    Eigenvectors of equal eigenvalues have no derivative; here they are taken not to turn into each other, so that it is
    finite, and right for what does not depend on their choice. ``apply`` needs none.
    """
    return _spectrum(matrix)


@jax.custom_jvp
def _spectrum(matrix: Float[Array, "n n"]) -> tuple[Float[Array, " n"], Float[Array, "n n"]]:
    values, vectors = jnp.linalg.eigh(matrix)
    # rounding may leave -1e-17, and such a mode would grow in time
    return jnp.maximum(values, 0.0)[::-1], vectors[:, ::-1]


@_spectrum.defjvp
def _spectrum_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[tuple, tuple]:
    values, vectors = _spectrum(*primals)
    turned = vectors.T @ _symmetric(tangents[0]) @ vectors
    gap = values[None, :] - values[:, None]
    apart = jnp.abs(gap) > _floor(values)
    turn = jnp.where(apart, turned / jnp.where(apart, gap, 1.0), 0.0)
    return (values, vectors), (jnp.diagonal(turned), vectors @ turn)


def _symmetric(matrix: Array) -> Array:
    return (matrix + matrix.T) / 2


def _floor(values: Float[Array, " n"]) -> Array:
    """Return the size of eigenvalues that are zero up to rounding."""
    return values[0] * values.shape[0] * jnp.finfo(values.dtype).eps


@partial(jax.jit, static_argnums=0)
def apply(
    function: Spectral,
    matrix: Float[Array, "n n"],
    found: tuple[Float[Array, " n"], Float[Array, "n n"]],
    times: Float[Array, "*times"],
    constants: Constants,
    columns: Float[Array, "n c"],
) -> Float[Array, "*times n c"]:
    """Return V' f(S) c, the entries of f(S) c along the eigenvectors V, which count as constants from here on.

    It has first derivatives in S, and all derivatives in the other arguments. Second derivatives in S are refused.

    Args:
        function: f.
        matrix: S, for its derivative.
        found: its eigenvalues and eigenvectors.
        times, constants: arguments of f.
        columns: the vectors c.
    """
    values, vectors = jax.lax.stop_gradient(found)
    return _apply(function, values, vectors, matrix, times, constants, vectors.T @ columns)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _apply(
    function: Spectral,
    values: Array,
    vectors: Array,
    matrix: Array,
    times: PyTree[Array],
    constants: Constants,
    coefficients: Array,
) -> Array:
    scale = function.value(values, times, constants)
    return scale[..., None] * coefficients.reshape((1,) * (scale.ndim - 1) + coefficients.shape)


def _apply_jvp(function: Spectral, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    values, vectors, matrix, times, constants, coefficients = primals
    _, _, d_matrix, d_times, d_constants, d_coefficients = tangents
    out = _apply(function, *primals)
    change = jnp.zeros_like(out)
    # each part is a function of the matrix again, for derivatives of derivatives
    if not isinstance(d_coefficients, SymbolicZero):
        change += _apply(function, values, vectors, matrix, times, constants, d_coefficients)
    moved = jax.tree.leaves((d_times, d_constants), is_leaf=_is_zero)
    if not all(map(_is_zero, moved)):
        pairs = (times, _filled(d_times)), (constants, _filled(d_constants))
        slope = Spectral(_along(function.value), _along(function.difference))
        change += _apply(slope, values, vectors, matrix, *pairs, coefficients)
    if not isinstance(d_matrix, SymbolicZero):
        fixed = _once(values, matrix)
        change += _turned(function.difference, fixed, vectors, d_matrix, times, constants, coefficients)
    return out, change


_apply.defjvp(_apply_jvp, symbolic_zeros=True)


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, SymbolicZero)


def _filled(tangents: PyTree) -> PyTree[Array]:
    return jax.tree.map(
        lambda u: jnp.zeros(u.shape, u.dtype) if _is_zero(u) else u, tangents, is_leaf=_is_zero
    )


def _along(function: Callable) -> Callable:
    """Return the derivative of a function in times and constants, along tangents that stand beside them."""

    def slope(values: Array, times: tuple, constants: tuple) -> Array:
        return jax.jvp(partial(function, values), (times[0], constants[0]), (times[1], constants[1]))[1]

    return slope


@partial(jax.jit, static_argnums=0)
def _turned(
    difference: Callable,
    values: Array,
    vectors: Array,
    d_matrix: Array,
    times: PyTree[Array],
    constants: Constants,
    coefficients: Array,
) -> Array:
    """Return (F o V' dS V) c, times.shape + (n, c): linear in dS."""
    inner = vectors.T @ _symmetric(d_matrix) @ vectors
    shape = jax.tree.leaves(times)[0].shape

    # one time after the other, and F once more in reverse mode: together they would take times x n^2 numbers
    @jax.checkpoint
    def one(time: PyTree[Array]) -> Array:
        return (difference(values, time, constants) * inner) @ coefficients

    flat = jax.tree.map(jnp.ravel, times)
    return jax.lax.map(one, flat).reshape(shape + coefficients.shape)


@jax.custom_jvp
def _once(values: Array, matrix: Array) -> Array:
    return values


@_once.defjvp
def _once_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    raise ValueError(
        "a kernel flow has no second derivatives in its kernel, got a derivative of a derivative"
    )


def _limits(values: Float[Array, " n"]) -> tuple[Array, Array]:
    """Return decay and gain at the end of training; modes at rounding level stay untrained."""
    kept = values > _floor(values)
    return jnp.where(kept, 0.0, 1.0), jnp.where(kept, 1 / jnp.where(kept, values, 1.0), 0.0)


def _limit_differences(values: Float[Array, " n"]) -> tuple[Array, Array]:
    """Return the divided differences of ``_limits`` along changes that keep the rank, those of a pseudo-inverse."""
    left, inverse = _limits(values)
    mixed = left[:, None] != left[None, :]
    either = inverse[:, None] + inverse[None, :]
    product = inverse[:, None] * inverse[None, :]
    return jnp.where(mixed, -either, 0.0), jnp.where(mixed, either**2, 0.0) - product


def _finite(times: Array) -> Array:
    return jnp.where(jnp.isinf(times), 0.0, times)


def _decay(values: Float[Array, " n"], times: Array, constants: Constants) -> Float[Array, "*times n"]:
    """Return exp(-l t), or what is left after t steps: (1 - eta l)^t without momentum."""
    eta, mu = constants
    row, t = values.reshape((1,) * times.ndim + (-1,)), times[..., None]
    if eta is not None and mu is None:
        # sign and modulus apart: a power of a negative base with a float exponent is NaN
        factor = 1 - eta * row
        odd = jnp.where((t % 2 == 1) & (factor < 0), -1.0, 1.0)
        return odd * jnp.abs(factor) ** t
    moving = jnp.exp(-row * _finite(t)) if eta is None else _steps(_decay_step(eta, mu), values, times)
    return jnp.where(jnp.isinf(t), _limits(values)[0].reshape(row.shape), moving)


def _gain(values: Float[Array, " n"], times: Array, constants: Constants) -> Float[Array, "*times n"]:
    """Return (1 - decay) / l, and its limit, the time itself, where l is 0."""
    eta, mu = constants
    row, t = values.reshape((1,) * times.ndim + (-1,)), times[..., None]
    if mu is not None:
        gain = _steps(_gain_step(eta, mu), values, times)
    else:
        if eta is None:
            lost, still = -jnp.expm1(-row * _finite(t)), t
        else:
            # where steps are short, 1 - (1 - eta l)^k loses digits that expm1 keeps
            short = eta * row < 0.5
            gentle = -jnp.expm1(t * jnp.log1p(-jnp.where(short, eta * row, 0.0)))
            lost, still = jnp.where(short, gentle, 1 - _decay(values, times, constants)), eta * t
        moves = row > 0
        gain = jnp.where(moves, lost / jnp.where(moves, row, 1.0), still)
    return jnp.where(jnp.isinf(t), _limits(values)[1].reshape(row.shape), gain)


def _pairs(values: Float[Array, " n"]) -> tuple[Array, Array]:
    """Return the smaller and the larger eigenvalue of each pair, (n, n)."""
    return jnp.minimum(values[:, None], values[None, :]), jnp.maximum(values[:, None], values[None, :])


def _decay_difference(values: Float[Array, " n"], time: Array, constants: Constants) -> Float[Array, "n n"]:
    eta, mu = constants
    if eta is None:
        low, high = _pairs(values)
        moving = -_finite(time) * jnp.exp(-low * _finite(time)) * _mean_exp((high - low) * _finite(time))
    else:
        moving = _step_difference(_decay_step(eta, mu), values, time)
    return jnp.where(jnp.isinf(time), _limit_differences(values)[0], moving)


def _gain_difference(values: Float[Array, " n"], time: Array, constants: Constants) -> Float[Array, "n n"]:
    eta, mu = constants
    if eta is None:
        low, high = _pairs(values)
        moving = -(_finite(time) ** 2) * _mean_exp_2(low * _finite(time), high * _finite(time))
    else:
        moving = _step_difference(_gain_step(eta, mu), values, time)
    return jnp.where(jnp.isinf(time), _limit_differences(values)[1], moving)


DECAY = Spectral(_decay, _decay_difference)
GAIN = Spectral(_gain, _gain_difference)


def _mean_exp(u: Array) -> Array:
    """Return (1 - exp(-u)) / u for u >= 0: the divided difference of exp at 0 and -u."""
    small = u == 0
    return jnp.where(small, 1 - u / 2, -jnp.expm1(-u) / jnp.where(small, 1.0, u))


def _mean_exp_2(p: Array, q: Array) -> Array:
    """Return the divided difference of exp at 0, -p and -q for 0 <= p <= q; 1/2 where both are 0."""
    near = q < 0.5  # the quotient loses digits in proportion to 1/q, the series converges like 2^-k / k!
    safe = jnp.where(near, 1.0, q)
    far = (_mean_exp(p) - jnp.exp(-p) * _mean_exp(q - p)) / safe
    small_p, small_q = jnp.where(near, p, 0.0), jnp.where(near, q, 0.0)
    # sum of h_k(-p, -q) / (k + 2)! with the complete homogeneous polynomials h_k
    term, power, factorial, series = jnp.ones_like(q), jnp.ones_like(q), 2.0, jnp.full_like(q, 0.5)
    for k in range(1, 15):
        power = -small_q * power
        term, factorial = power - small_p * term, factorial * (k + 2)
        series = series + term / factorial
    return jnp.where(near, series, far)


class Step(NamedTuple):
    """One step of gradient descent in a mode of eigenvalue l: state <- (fixed + l slope) state; the first entry counts.

    Attributes:
        fixed, slope: (p, p).
        start: (p,).
    """

    fixed: Float[Array, "p p"]
    slope: Float[Array, "p p"]
    start: Float[Array, " p"]


def _decay_step(eta: Array, mu: Array | None) -> Step:
    """Return the step of (residual, velocity)."""
    if mu is None:
        return Step(jnp.ones((1, 1), eta.dtype), -eta[None, None], jnp.ones(1, eta.dtype))
    fixed = jnp.array([[1.0, -mu], [0.0, mu]], eta.dtype)
    slope = eta * jnp.array([[-1.0, 0.0], [1.0, 0.0]], eta.dtype)
    return Step(fixed, slope, jnp.array([1.0, 0.0], eta.dtype))


def _gain_step(eta: Array, mu: Array | None) -> Step:
    """Return the step of (gain, its velocity, 1)."""
    keep = 0.0 if mu is None else mu
    # velocity <- mu velocity + eta (1 - l gain), gain <- gain + velocity
    fixed = jnp.array([[1.0, keep, eta], [0.0, keep, eta], [0.0, 0.0, 1.0]], eta.dtype)
    slope = eta * jnp.array([[-1.0, 0.0, 0.0], [-1.0, 0.0, 0.0], [0.0, 0.0, 0.0]], eta.dtype)
    return Step(fixed, slope, jnp.array([0.0, 0.0, 1.0], eta.dtype))


def _steps(step: Step, values: Float[Array, " n"], times: Array) -> Float[Array, "*times n"]:
    """Return the first entry of the state after whole numbers of steps, by powers of the matrix of one step.

    They need no distinct eigenvalues, which are equal at the momentum that damps a mode best.
    """
    count = _finite(times).astype(int)
    power = step.fixed[None] + values[:, None, None] * step.slope[None]
    state = jnp.broadcast_to(step.start, (*count.shape, values.shape[0], step.start.shape[0]))

    def bit(carry: tuple[Array, Array, Array], _: None) -> tuple[tuple[Array, Array, Array], None]:
        left, power, state = carry
        further = jnp.einsum("nij,...nj->...ni", power, state)
        odd = (left % 2 == 1)[..., None, None]
        return (left // 2, power @ power, jnp.where(odd, further, state)), None

    return jax.lax.scan(bit, (count, power, state), None, length=31)[0][2][..., 0]


def _step_difference(step: Step, values: Float[Array, " n"], time: Array) -> Float[Array, "n n"]:
    """Return the divided differences of ``_steps`` at one number of steps; NaN unless it is whole.

    With A_i = fixed + l_i slope, the corner of the k-th power of [[A_i, slope], [0, A_j]] is (A_i^k - A_j^k) over
    (l_i - l_j), and no difference of eigenvalues is formed.
    """
    count = _finite(time).astype(int)
    n, p = values.shape[0], step.start.shape[0]
    power = step.fixed[None] + values[:, None, None] * step.slope[None]
    corner = jnp.broadcast_to(step.slope, (n, n, p, p))
    state, change = jnp.broadcast_to(step.start, (n, p)), jnp.zeros((n, n, p), values.dtype)

    def bit(carry: State, _: None) -> tuple[State, None]:
        left, power, corner, state, change = carry
        odd = left % 2 == 1
        changed = jnp.einsum("iab,ijb->ija", power, change) + jnp.einsum("ijab,jb->ija", corner, state)
        moved = jnp.einsum("jab,jb->ja", power, state)
        squared = jnp.einsum("iab,ijbc->ijac", power, corner) + jnp.einsum("ijab,jbc->ijac", corner, power)
        state, change = jnp.where(odd, moved, state), jnp.where(odd, changed, change)
        return (left // 2, power @ power, squared, state, change), None

    start = (count, power, corner, state, change)
    change = jax.lax.scan(bit, start, None, length=31)[0][4][..., 0]
    return jnp.where(_finite(time) == count, change, jnp.nan)
