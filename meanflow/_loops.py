"""The loops that everything runs on: a number of steps, or until a time, with observations and derivatives.

``iterate`` takes a known number of steps, ``iterate_until`` finds the number out as it runs. In reverse mode both keep
about the square root of the states and compute the others again.
"""

import math
from collections.abc import Callable, Hashable
from typing import Any, Literal, TypeVar

import equinox as eqx
import equinox.internal as eqxi  # the loop of bounded length: all derivatives of all orders pass
import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

State = TypeVar("State")
Observed = TypeVar("Observed")


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
    apart: bool = False,
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
        apart: where the initial and the final state are all that is observed, compile that twice. For observations
            that are smaller than a loop around them.

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

    if apart and rounds == 1:
        ahead = observe(state)
        state, behind = block(state, inputs)
        return state, jax.tree.map(lambda *u: jnp.stack(u), ahead, behind)

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
    again: Callable[[State, Array], State] | None = None,
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
        kind: how derivatives pass: ``"checkpointed"`` or ``"bounded"`` for reverse mode, which keep some states or all
            of them, ``"lax"`` for forward mode.
        checkpoints: the states kept between two stops by ``"checkpointed"``; None for about sqrt(limit / k).
        again: what ``"checkpointed"`` takes for ``step`` in a run that is differentiated: a smaller program that
            computes the same.

    Returns:
        The final state, and the observations stacked along a leading axis of length k.

    >>> end, seen = iterate_until(
    ...     lambda s, stop: s + 1, jnp.zeros(()), lambda s, stop: s < stop, jnp.array([2.0, 5.0]),
    ...     lambda s, stop: 10 * s, limit=8, kind="lax",
    ... )
    >>> float(end), seen.tolist()
    (5.0, [20.0, 50.0])
    """
    slots = checkpoints or math.ceil(math.sqrt(limit / stops.shape[0]))

    def leg(state: State, stop: Array) -> tuple[State, Observed]:
        going, once = (lambda s: more(s, stop)), (lambda s: step(s, stop))
        if kind == "lax":
            state = jax.lax.while_loop(going, once, state)
        elif kind == "bounded":
            state = eqxi.while_loop(going, once, state, kind="bounded", max_steps=limit)
        else:
            repeat = once if again is None else (lambda s: again(s, stop))
            state = _checkpointed_while(going, once, repeat, state, limit, slots)
        return state, observe(state, stop)

    if stops.shape[0] == 1:  # the usual case takes no loop over stops
        state, seen = leg(state, stops[0])
        return state, jax.tree.map(lambda u: u[None], seen)
    return jax.lax.scan(leg, state, stops)


@jax.custom_batching.custom_vmap
def any_of_batch(flag: Array) -> Array:
    """Return the flag itself; under ``jax.vmap`` whether any of the flags of the batch is set, one flag for all."""
    return flag


@any_of_batch.def_vmap
def _any_of_many(size: int, batched: list[bool], flag: Array) -> tuple[Array, bool]:
    return any_of_batch(jnp.any(flag)), False


@jax.custom_batching.custom_vmap
def _if_batched(flag: Array, new: PyTree[Array], old: PyTree[Array]) -> PyTree[Array]:
    """Return ``new``; under ``jax.vmap``, where members that are done step idly, ``old`` where no flag is set."""
    return new


@_if_batched.def_vmap
def _of_many(
    size: int, batched: tuple[bool, PyTree, PyTree], flag: Array, new: PyTree[Array], old: PyTree[Array]
) -> tuple[PyTree[Array], PyTree[bool]]:
    axes = jax.tree.map(lambda one: 0 if one else None, tuple(batched))
    choose = lambda flag, *pair: jax.tree.map(lambda u, v: jnp.where(flag, u, v), *pair)
    return jax.vmap(choose, axes, axis_size=size)(flag, new, old), jax.tree.map(lambda _: True, new)


def _put(rows: PyTree[Array], place: Array, row: PyTree[Array]) -> PyTree[Array]:
    return jax.tree.map(lambda u, v: jax.lax.dynamic_update_index_in_dim(u, v, place, 0), rows, row)


def _get(rows: PyTree[Array], place: Array) -> PyTree[Array]:
    return jax.tree.map(lambda u: jax.lax.dynamic_index_in_dim(u, place, 0, keepdims=False), rows)


def _checkpointed_while(
    more: Callable[[State], Array],
    step: Callable[[State], State],
    again: Callable[[State], State],
    state: State,
    limit: int,
    slots: int,
) -> State:
    """Apply ``step`` as long as ``more``, at most ``limit`` times; ``jax.grad`` passes.

    Run forwards for a derivative it keeps every ``stride``-th state in ``slots`` places, with a stride that begins at 1
    and doubles whenever no place is left. Backwards it goes through segments of ``stride`` steps, the last one first:
    it takes them again, keeps all their states, and pulls the cotangent back step by step. Under ``jax.vmap`` all
    members take as many steps as the longest, so that the places are the same for all; those that are done stay.
    """
    state = jax.tree.map(jnp.asarray, state)
    slots += slots % 2
    longest = 2 ** math.ceil(math.log2(max(limit / slots, 1)))
    # what the functions close over has derivatives too
    functions = (step, more) if again is step else (step, more, again)
    constants, code = eqx.partition([eqx.filter_closure_convert(f, state) for f in functions], eqx.is_array)

    def rebuilt(*constants: PyTree) -> tuple[Callable[[State], Any], ...]:
        step, more, *others = eqx.combine(*constants, code)
        return step, more, (*others, step)[0]

    unravel = ravel_pytree(eqx.filter(state, eqx.is_inexact_array))[1]

    def packed(state: State) -> tuple[Array, PyTree]:
        # one vector for all floats: a place for each of many small arrays is a large program
        floats, others = eqx.partition(state, eqx.is_inexact_array)
        return ravel_pytree(floats)[0], others

    def unpacked(rows: PyTree, place: Array) -> State:
        flat, others = _get(rows, place)
        return eqx.combine(unravel(flat), others)

    @jax.custom_vjp
    def run(constants: PyTree, state: State) -> State:
        step, more, _ = rebuilt(constants)
        return jax.lax.while_loop(lambda state: more(state), lambda state: step(state), state)

    def forwards(constants: PyTree, state: State) -> tuple[State, tuple]:
        # of the constants only those that are differentiated have cotangents
        perturbed = jax.tree.map(lambda u: u.perturbed and eqx.is_inexact_array(u.value), constants)
        constants, state = jax.tree.map(lambda u: u.value, (constants, state))
        _, more, step = rebuilt(constants)

        def fill(carry: tuple[State, PyTree, Array, Array]) -> tuple[State, PyTree, Array, Array]:
            state, kept, count, stride = carry
            # all places are taken: half of the states make room, and from here on half as many are kept
            stride = jnp.maximum(2 * stride, 1)
            kept = jax.tree.map(lambda u: jnp.concatenate([u[:slots:2], u[slots // 2 :]]), kept)

            def once(carry: tuple[State, PyTree, Array]) -> tuple[State, PyTree, Array]:
                state, kept, count = carry
                # the place behind the last is for states that are not kept: no branch, and no copy of all places
                place = jnp.where(count % stride == 0, count // stride, slots)
                return (
                    _if_batched(more(state), step(state), state),
                    _put(kept, place, packed(state)),
                    count + 1,
                )

            def fits(carry: tuple[State, PyTree, Array]) -> Array:
                return any_of_batch(more(carry[0])) & (carry[2] < slots * stride)

            return *jax.lax.while_loop(fits, once, (state, kept, count)), stride

        room = jax.tree.map(lambda u: jnp.zeros((slots + 1, *u.shape), u.dtype), packed(state))
        none = jnp.asarray(0, jnp.int32)
        end, *kept = jax.lax.while_loop(
            lambda carry: any_of_batch(more(carry[0])), fill, (state, room, none, none)
        )
        return end, (*eqx.partition(constants, perturbed), *kept)

    def backwards(residuals: tuple, cotangent: PyTree) -> tuple[PyTree, PyTree]:
        moving, fixed, kept, count, stride = residuals
        _, more, again = rebuilt(moving, fixed)
        zeros = lambda tree: jax.tree.map(jnp.zeros_like, tree)

        def taken(carry: tuple[Array, State, PyTree]) -> tuple[Array, State, PyTree]:
            number, state, room = carry
            state = _if_batched(more(state), again(state), state)
            return number + 1, state, _put(room, number, packed(state))

        def pulled(carry: tuple[Array, PyTree, PyTree, PyTree]) -> tuple[Array, PyTree, PyTree, PyTree]:
            number, room, slopes, total = carry
            state = unpacked(room, number - 1)
            floats, others = eqx.partition(state, eqx.is_inexact_array)

            def moved(moving: PyTree, floats: PyTree) -> PyTree:
                end = rebuilt(moving, fixed)[2](eqx.combine(floats, others))
                return eqx.filter(end, eqx.is_inexact_array)

            found, before = jax.vjp(moved, moving, floats)[1](slopes)
            found, before = _if_batched(more(state), (found, before), (zeros(found), slopes))
            return number - 1, room, before, jax.tree.map(jnp.add, total, found)

        def segment(carry: tuple[Array, PyTree, PyTree, PyTree]) -> tuple[Array, PyTree, PyTree, PyTree]:
            place, room, slopes, total = carry
            length, start = jnp.minimum(stride, count - place * stride), _get(kept, place)
            first = (jnp.ones_like(count), unpacked(kept, place), _put(room, jnp.zeros_like(count), start))
            _, _, room = jax.lax.while_loop(lambda c: c[0] < length, taken, first)
            back = (length, room, slopes, total)
            _, room, slopes, total = jax.lax.while_loop(lambda c: c[0] > 0, pulled, back)
            return place - 1, room, slopes, total

        room = jax.tree.map(lambda u: jnp.zeros((longest, *u.shape[1:]), u.dtype), kept)

        def given(u: Array | SymbolicZero) -> Array | None:
            if not jnp.issubdtype(u.dtype, jnp.inexact):
                return None
            return jnp.zeros(u.shape, u.dtype) if isinstance(u, SymbolicZero) else u

        slopes = jax.tree.map(given, cotangent)
        begin = ((count + stride - 1) // stride - 1, room, slopes, zeros(moving))
        _, _, slopes, total = jax.lax.while_loop(lambda c: c[0] >= 0, segment, begin)
        return total, slopes

    run.defvjp(forwards, backwards, symbolic_zeros=True)
    return run(jax.tree.map(jnp.asarray, constants), state)


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
