"""Numerics that several rooms share: safe roots and quotients, angles, slopes of power laws, the one loop.

The functions named ``safe_*`` are ordinary formulas that also have a finite derivative where the textbook form
has none. ``jnp.where(u > 0, jnp.sqrt(u), 0)`` is not enough: reverse mode differentiates the branch that was
not taken as well and multiplies its infinite derivative by zero, which gives NaN. So the argument is replaced
before the root is taken, and the result afterwards.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, TypeVar

import equinox as eqx
import equinox.internal as eqxi  # the loop that diffrax steps with: reverse mode through a while
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PyTree, Real

State = TypeVar("State")
Observed = TypeVar("Observed")


def safe_sqrt(u: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return sqrt(u), and 0 with derivative 0 where u <= 0 (elementwise); NaN stays NaN.

    >>> float(jax.grad(safe_sqrt)(0.0)), float(safe_sqrt(jnp.array(4.0)))
    (0.0, 2.0)
    """
    zero = u <= 0  # not "u > 0": NaN must not become 0
    return jnp.where(zero, 0.0, jnp.sqrt(jnp.where(zero, 1.0, u)))


def safe_root(u: Float[Array, "..."], order: float) -> Float[Array, "..."]:
    """Return u^(1/order), and 0 with derivative 0 where u <= 0 (elementwise); order 1 returns u itself. NaN stays NaN.

    >>> round(float(safe_root(jnp.array(8.0), 3.0)), 6)
    2.0
    """
    if order == 1:
        return u
    zero = u <= 0
    return jnp.where(zero, 0.0, jnp.where(zero, 1.0, u) ** (1 / order))


def safe_divide(u: Float[Array, "..."], v: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return u / v, and 0 with derivative 0 where v = 0 (elementwise).

    >>> safe_divide(jnp.array([1.0, 1.0]), jnp.array([2.0, 0.0])).tolist()
    [0.5, 0.0]
    """
    nonzero = v != 0
    return jnp.where(nonzero, u / jnp.where(nonzero, v, 1.0), 0.0)


def safe_norm(
    v: Float[Array, "..."], axis: int | tuple[int, ...] | None = -1, *, keepdims: bool = False
) -> Float[Array, "..."]:
    """Return the Euclidean norm of ``v`` over ``axis``; its derivative at the zero vector is 0.

    ``axis=None`` takes the norm of all entries; ``keepdims`` keeps the reduced axes with length 1.

    >>> float(safe_norm(jnp.array([3.0, 4.0]))), jax.grad(safe_norm)(jnp.zeros(2)).tolist()
    (5.0, [0.0, 0.0])
    """
    return safe_sqrt(jnp.sum(v * v, axis=axis, keepdims=keepdims))


def magnitude(
    u: Float[Array, "..."], axis: int | tuple[int, ...] | None = None, *, keepdims: bool = False
) -> Float[Array, "..."]:
    """Return the largest |u| over ``axis``, 1 where that is 0, as a constant of differentiation.

    Powers overflow and underflow long before the numbers themselves do, in float32 at 1e19 and 1e-19 for squares. What
    is homogeneous, f(c u) = c f(u), is therefore computed as c f(u / c) with this c, which changes no derivative.

    >>> float(magnitude(jnp.array([-3.0, 2.0]))), float(magnitude(jnp.zeros(2)))
    (3.0, 1.0)
    """
    top = jax.lax.stop_gradient(jnp.max(jnp.abs(u), axis=axis, keepdims=keepdims))
    return jnp.where(top == 0, 1.0, top)


def scaled_norm(v: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return ``safe_norm`` of ``v`` over its last axis, without overflow and underflow of the squares.

    >>> float(scaled_norm(jnp.array([3e-30, 4e-30], jnp.float32)) / jnp.float32(5e-30)).__round__(6)
    1.0
    """
    scale = magnitude(v, -1, keepdims=True)
    return scale[..., 0] * safe_norm(v / scale)


def power_mean(
    u: Float[Array, " k"], order: float, weights: Float[Array, " k"] | None = None
) -> Float[Array, ""]:
    """Return (sum_i w_i u_i^order)^(1/order) for u >= 0, without overflow and underflow of the powers; w_i = 1/k.

    >>> round(float(power_mean(jnp.array([1.0, 7.0]), 2)), 6)
    5.0
    """
    mean = lambda v: jnp.mean(v) if weights is None else jnp.sum(weights * v)
    if order == 1:
        return mean(u)
    scale = magnitude(u)
    return scale * safe_root(mean((u / scale) ** order), order)


def wrap_angle(turn: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return the angle in [-pi, pi] that equals ``turn`` up to whole turns (radians, elementwise).

    >>> round(float(wrap_angle(jnp.array(1.5 * jnp.pi))), 4)
    -1.5708
    """
    return jnp.arctan2(jnp.sin(turn), jnp.cos(turn))


def loglog_slope(
    sizes: Real[ArrayLike, " k"] | Sequence[float], values: Real[ArrayLike, " k"] | Sequence[float]
) -> float:
    """Return the exponent p of the power law values = C sizes^p that fits best, on the host.

    The fit is by least squares of log(values) against log(sizes). Both must be positive.

    >>> round(loglog_slope([1.0, 2.0, 4.0], [3.0, 12.0, 48.0]), 12)
    2.0
    """
    return float(np.polyfit(np.log(np.asarray(sizes, float)), np.log(np.asarray(values, float)), 1)[0])


def weighted_gram(
    u: Float[Array, "n m"], v: Float[Array, "k m"], weights: Float[Array, " m"]
) -> Float[Array, "n k"]:
    """Return u diag(weights) v' with weights >= 0; the same array for u and v makes one pass over it less.

    >>> u = jnp.array([[1.0, 2.0]])
    >>> float(weighted_gram(u, u, jnp.array([4.0, 1.0]))[0, 0])
    8.0
    """
    return _own_gram(u, weights) if u is v else (u * weights[None, :]) @ v.T


@jax.custom_jvp
def _own_gram(u: Float[Array, "n m"], weights: Float[Array, " m"]) -> Float[Array, "n n"]:
    # one array instead of u and u * weights: beside the product, time goes into writing such arrays
    scaled = u * jnp.sqrt(weights)[None, :]
    return scaled @ scaled.T


@_own_gram.defjvp
def _own_gram_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    # by the other form, as the root has no derivative at the weight 0 of padding
    plain = lambda u, weights: (u * weights[None, :]) @ u.T
    return _own_gram(*primals), jax.jvp(plain, primals, tangents)[1]


_SQUARINGS = 24


def dominant_vector(matrix: Float[Array, "n n"]) -> Float[Array, " n"]:
    """Return the unit top eigenvector of a matrix with eigenvalues >= 0, by squaring it 24 times.

    M^(2^k), rescaled, tends to the projector on the top eigenspace. M is positive semi-definite, or a product of two
    such matrices. The Rayleigh quotient of the result is the top
    eigenvalue to a relative 1/(2^25 e) = 1e-8 for any spectrum. Unlike an eigendecomposition this is products only:
    fast under vmap and on accelerators, and without LAPACK, whose batched call deadlocks when several CPU devices
    share a process. A zero matrix gives a zero vector.

    >>> dominant_vector(jnp.diag(jnp.array([1.0, 3.0]))).tolist()
    [0.0, 1.0]
    """

    def scaled(m: jax.Array) -> jax.Array:
        size = jnp.trace(m)
        return m / jnp.where(size > 0, size, 1.0)

    def square(_: int | jax.Array, m: jax.Array) -> jax.Array:
        return scaled(jnp.matmul(m, m, precision=jax.lax.Precision.HIGHEST))

    power = jax.lax.fori_loop(0, _SQUARINGS, square, scaled(matrix))
    column = power[:, jnp.argmax(jnp.diagonal(power))]
    length = jnp.linalg.norm(column)
    return column / jnp.where(length > 0, length, 1.0)


class KeyBits(eqx.Module):
    """A PRNG key by its bits, for steps of ``iterate`` that draw random numbers.

    A typed key that stands inside of a branch has no zero of its kind when the branch is differentiated in reverse
    (jax 0.10.1 then builds a program that does not compile); its bits have.

    >>> key = jax.random.key(3)
    >>> bool(KeyBits(key).key == key)
    True
    """

    bits: Array
    kind: Hashable = eqx.field(static=True)

    def __init__(self, key: Array) -> None:
        self.bits, self.kind = jax.random.key_data(key), jax.random.key_impl(key)

    @property
    def key(self) -> Array:
        """The typed key."""
        return jax.random.wrap_key_data(self.bits, impl=self.kind)  # type: ignore[arg-type]


def iterate(
    step: Callable[[State, PyTree], State],
    state: State,
    inputs: PyTree[Array] | None,
    steps: int,
    every: int,
    observe: Callable[[State], Observed],
    *,
    checkpoint: bool = False,
    first: bool = False,
) -> tuple[State, Observed]:
    """Apply ``step`` ``steps`` times and observe the state after each ``every`` of them, in a compiled scan.

    This is the one discrete-time loop: gradient descent, training, the critic and the linearized descent run
    on it.

    Args:
        step: (state, input) -> state.
        state: any pytree; only what the next step needs.
        inputs: pytree of arrays with leading axis ``steps`` (one slice a step), or None.
        steps: number of steps, a multiple of ``every``.
        every: steps between two observations.
        observe: state -> pytree of arrays.
        checkpoint: in reverse mode keep about 2 sqrt(every) states per observation instead of every one, for
            one more forward pass. What a step computes on the way is never kept.
        first: observe the initial state too. The observation is compiled once for all: it may be larger than a step.

    Returns:
        The final state, and the observations stacked along a leading axis of length steps // every (one more with
        ``first``).

    >>> end, seen = iterate(lambda s, u: s + u, jnp.zeros(()), jnp.ones(4), 4, 2, lambda s: s)
    >>> float(end), seen.tolist()
    (4.0, [2.0, 4.0])
    """
    if steps % every:
        raise ValueError(f"steps must be a multiple of every, got steps={steps}, every={every}")
    rounds = steps // every

    def block(state: State, slices: PyTree) -> tuple[State, Observed]:
        state = _run(step, state, slices, every, checkpoint)
        return state, observe(state)

    slices = _split(inputs, rounds, every)
    if not first:
        return jax.lax.scan(block, state, slices, length=rounds)

    def turn(state: State, item: tuple[Array, PyTree]) -> tuple[State, Observed]:
        number, slices = item
        # the number is the same for all members of a batch, so that this stays a branch under vmap
        state = jax.lax.cond(
            number > 0, lambda s: _run(step, s, slices, every, checkpoint), lambda s: s, state
        )
        return state, observe(state)

    ahead = jax.tree.map(lambda u: jnp.concatenate([u[:1], u]), slices)  # the first turn takes no steps
    return jax.lax.scan(turn, state, (jnp.arange(rounds + 1), ahead))


def iterate_until(
    step: Callable[[State, Array], State],
    state: State,
    more: Callable[[State, Array], Array],
    stops: Float[Array, " k"],
    observe: Callable[[State, Array], Observed],
    *,
    limit: int,
    kind: Literal["lax", "checkpointed", "bounded"],
    checkpoints: int | None = None,
) -> tuple[State, Observed]:
    """Apply ``step`` until each of the ``stops`` in turn and observe the state there: ``iterate`` where time counts.

    The number of steps is found out while the program runs, so that another end or step compiles nothing again.

    Args:
        step: (state, stop) -> state; the last step before a stop must end there.
        state: any pytree; only what the next step needs.
        more: (state, stop) -> whether another step is needed.
        stops: (k,) what is to be reached, in order.
        observe: (state, stop) -> pytree of arrays.
        limit: the most steps between two stops.
        kind: how derivatives pass, as ``equinox.internal.while_loop`` calls it: ``"checkpointed"`` or ``"bounded"`` for
            reverse mode, which keep some states or all of them, ``"lax"`` for forward mode.
        checkpoints: the states kept between two stops by ``"checkpointed"``; None for about sqrt(2 limit / k).

    Returns:
        The final state, and the observations stacked along a leading axis of length k.

    >>> end, seen = iterate_until(
    ...     lambda s, stop: s + 1, jnp.zeros(()), lambda s, stop: s < stop, jnp.array([2.0, 5.0]),
    ...     lambda s, stop: 10 * s, limit=8, kind="lax",
    ... )
    >>> float(end), seen.tolist()
    (5.0, [20.0, 50.0])
    """
    how: dict[str, Any] = {} if kind == "lax" else {"max_steps": limit}
    if kind == "checkpointed":
        how["checkpoints"] = checkpoints or math.ceil(math.sqrt(2 * limit / stops.shape[0]))

    def leg(state: State, stop: Array) -> tuple[State, Observed]:
        state = eqxi.while_loop(lambda s: more(s, stop), lambda s: step(s, stop), state, kind=kind, **how)
        return state, observe(state, stop)

    return jax.lax.scan(leg, state, stops)


def land(
    time: Float[Array, ""], size: Float[Array, ""], stop: Float[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the end and the length of a step: ``size`` long, or cut (stretched by rounding) to end at ``stop``.

    >>> [round(float(u), 6) for u in land(jnp.array(0.75), jnp.array(0.5), jnp.array(1.0))]
    [1.0, 0.25]
    """
    end = time + size
    lands = time + (1 + 1e-6) * size >= stop
    # where end = stop this is ``size`` to the last bit, and has the derivative of ``stop - time``
    return jnp.where(lands, stop, end), jnp.where(lands, size + (stop - end), size)


def _run(
    step: Callable[[State, PyTree], State], state: State, inputs: PyTree, length: int, checkpoint: bool
) -> State:
    """Take ``length`` steps without observing."""

    # In reverse mode each step keeps its state alone: what it computes on the way (activations of all samples and
    # neurons) is as large as many states, and cheaper to compute again than to write and read.
    @jax.checkpoint
    def one(state: State, slice_: PyTree) -> tuple[State, None]:
        return step(state, slice_), None

    if not checkpoint:
        return jax.lax.scan(one, state, inputs, length=length)[0]

    # Segments of about sqrt(length) steps: only their starts are stored, the inside is recomputed.
    size = _segment(length)
    count = length // size

    @jax.checkpoint
    def segment(state: State, slices: PyTree) -> tuple[State, None]:
        return jax.lax.scan(one, state, slices, length=size)

    head = _split(jax.tree.map(lambda u: u[: count * size], inputs), count, size)
    state, _ = jax.lax.scan(segment, state, head, length=count)
    rest = length - count * size
    if rest == 0:
        return state
    return jax.lax.scan(one, state, jax.tree.map(lambda u: u[count * size :], inputs), length=rest)[0]


def _segment(length: int) -> int:
    """Return a number near sqrt(length), one that divides it if possible: a rest would be compiled once more.

    >>> _segment(1000), _segment(1013)
    (25, 31)
    """
    root = max(1, math.isqrt(length))
    near = [k for k in range(max(1, root // 2), 2 * root + 1) if length % k == 0]
    return min(near, key=lambda k: abs(math.log(k / length**0.5))) if near else root


def _split(inputs: PyTree, rounds: int, every: int) -> PyTree:
    """Reshape the leading axis of every array from (rounds * every,) to (rounds, every)."""
    return jax.tree.map(lambda u: u.reshape((rounds, every, *u.shape[1:])), inputs)
