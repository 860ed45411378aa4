"""Do the samples of a batch depend on each other, and through which statistics?

The tangent kernel needs J = df/dparams. When samples are coupled (batch norm, attention over the batch), the Jacobian
of one sample needs the whole batch, and a kernel computed sample by sample or chunk by chunk is silently wrong. So
every function is probed, and coupled ones are refused until ``stats`` says which statistics are meant.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jaxtyping import Array, ArrayLike, PyTree

from meanflow import _boundary
from meanflow._reuse import compiled
from meanflow.kernels._empirical.modules import Apply, Batch, Function, Normalized, Outputs, Params
from meanflow.kernels._empirical.visit import equations

STATS = ("batch", "train", "frozen", "running")
# no gradient goes through the statistics, and samples are free of each other
FIXED = ("frozen", "running")


class KernelMaps(NamedTuple):
    """The functions of the parameters whose Jacobians make the kernel K(x, z).

    Attributes:
        left: params -> outputs at x.
        right: params -> outputs at z.
        single: (params, batch) -> outputs, each of which depends on its own sample alone; None if samples are coupled.
    """

    left: Callable[[Params], Outputs]
    right: Callable[[Params], Outputs]
    single: Apply | None


class Unprobed(ValueError):
    """The function closes over traced values and cannot be evaluated while tracing."""


# Compiled, so that a function is compiled for the probe once and not at every call; and with little effort, which takes
# longer than the program runs: the probes of a transformer and of a recurrence take a third of the time.
_quickly = functools.partial(compiled, compiler_options={"xla_backend_optimization_level": 0})


@_quickly
def _together_and_alone(apply: Apply, params: Params, x: Batch) -> list[Array]:
    """Return the outputs of a batch, and those of its samples one by one."""
    alone = jax.tree.map(lambda a: a[:, None], x)
    # two equal rows: a function may squeeze its outputs, and lose the axis of a single sample
    pair = lambda sample: apply(params, jax.tree.map(lambda a: jnp.concatenate([a, a]), sample))[0]
    return [apply(params, x), jax.lax.map(pair, alone, batch_size=64)]


@_quickly
def _together(apply: Apply, params: Params, x: Batch) -> Array:
    """Return the outputs of a batch, traced anew: another program than that above."""
    return apply(params, x)


@compiled
def _statistics(apply: Normalized, params: Params, x: Batch) -> PyTree:
    return apply.statistics(params, x)


def _moved(leaf: ArrayLike, rng: np.random.Generator) -> ArrayLike:
    """Return a parameter moved off its value by a tenth of its size; a random one where the value is traced."""
    if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
        return leaf
    given, shape = _boundary.concrete(leaf), np.shape(leaf)
    noise = rng.normal(size=shape)
    if given is None:
        moved = noise / math.sqrt(max(shape, default=1))
    else:
        moved = given + 0.1 * noise * (np.sqrt(np.mean(np.square(given))) + 0.1)
    return np.asarray(
        moved, jnp.result_type(leaf)
    )  # to cast on the device is a small program for every shape


def is_traced(leaf: object) -> bool:
    """Tell whether a leaf is an array that is being traced."""
    if not isinstance(leaf, jax.Array):
        return False
    try:
        leaf.devices()
    except jax.errors.ConcretizationTypeError:
        return True
    return False


def _random_batch(x: Batch, rows: int, rng: np.random.Generator) -> np.ndarray:
    """Draw ``rows`` samples on the scale of ``x``; integers are drawn from the entries of ``x``."""
    dtype, shape = jnp.result_type(x), (rows, *np.shape(x)[1:])
    given = _boundary.concrete(x)
    if not jnp.issubdtype(dtype, jnp.inexact):
        whole = np.zeros((1, *shape[1:]), int) if given is None else given
        return np.asarray(rng.choice(whole, shape[0]), dtype)
    center, width = (0.0, 1.0) if given is None else (np.mean(given), np.std(given) + 1e-3)
    return np.asarray(center + width * rng.normal(size=shape), dtype)


def _precisions(program: ClosedJaxpr) -> Iterator[float]:
    """Yield the relative rounding error of every floating point value in a traced program, nested ones included."""
    for equation in equations(program):
        for value in (*equation.invars, *equation.outvars):
            dtype = getattr(value.aval, "dtype", None)  # some values, such as tokens, have none
            if dtype is not None and jnp.issubdtype(dtype, jnp.floating):
                yield float(jnp.finfo(dtype).eps)


def _agreement(one: np.ndarray, other: np.ndarray, eps: float) -> bool:
    """Tell whether two evaluations of a function are the same up to 10^4 roundings of relative size ``eps``."""
    finite = np.isfinite(one)
    if not np.array_equal(finite, np.isfinite(other)):
        return False
    # in half precision 10^4 roundings would be more than the outputs themselves
    tolerance = min(1e4 * eps, 0.05) * float(np.max(np.abs(one[finite])))
    return bool(np.all(np.abs(one[finite] - other[finite]) <= tolerance))


def check_outputs(outputs: Callable[[Params], Outputs], params: Params, name: str, x: Batch) -> None:
    """Refuse an empty batch, and outputs that are not one array of floating point numbers, a row a sample."""
    rows = np.shape(jax.tree.leaves(x)[0])[0]
    if rows == 0:
        raise ValueError(f"{name} must hold at least one sample, got an empty batch")
    try:
        out = jax.eval_shape(outputs, params)
    except (TypeError, ValueError, KeyError, IndexError) as problem:
        shapes = jax.tree.map(np.shape, x)
        raise ValueError(
            f"apply must take params and {name} of shape {shapes}, but fails: {problem}"
        ) from problem
    if not isinstance(out, jax.ShapeDtypeStruct):
        raise ValueError(f"apply must return one array (samples, ...), got {type(out).__name__} at {name}")
    if out.ndim < 1 or out.shape[0] != rows:
        raise ValueError(
            f"apply must return one row for each of the {rows} samples of {name}, got shape {out.shape}"
        )
    if not jnp.issubdtype(out.dtype, jnp.floating):
        raise ValueError(f"apply must return floating point numbers, got {out.dtype} at {name}")


def is_coupled(apply: Apply, params: Params, x: Batch) -> bool:
    """Tell whether the output at one sample depends on the other samples of the batch, by a probe.

    A random batch of as many rows as ``x`` is evaluated at once and sample by sample; the engine needs both to agree,
    up to rounding in the lowest precision that the function computes in.
    The parameters are moved off the given ones, because a batch norm whose scale starts at 0 hides its coupling there.
    Inside jit the probe runs at trace time with random numbers in place of traced values.

    Args:
        apply: (params, batch) -> outputs (T, ...).
        params: pytree of arrays.
        x: batch (T, ...), which sets the scale of the probe.

    Raises:
        ValueError: if the function closes over traced values, so that it cannot be evaluated now; if it returns other
            numbers when it is evaluated again; or if it returns nothing but NaN.

    >>> import jax.numpy as jnp
    >>> is_coupled(lambda w, x: x @ w, jnp.ones(2), jnp.ones((3, 2)))
    False
    >>> is_coupled(lambda w, x: x @ w - jnp.mean(x @ w), jnp.ones(2), jnp.ones((3, 2)))
    True
    """
    # a function of indices is probed as the function of samples that it stands for: indices hide what they point to
    function, own = apply.probed(x) if isinstance(apply, Function) else (apply, x)
    count = np.shape(jax.tree.leaves(x)[0])[0]
    own = jax.tree.map(lambda a: a if len(a) == count else jnp.asarray(a)[:count], own)
    rng = np.random.default_rng(0)
    given = not any(map(is_traced, jax.tree.leaves((params, own))))
    with jax.ensure_compile_time_eval():
        drawn = jax.tree.map(lambda a: _random_batch(a, max(count, 2), rng), own)
        moved = jax.tree.map(lambda leaf: _moved(leaf, rng), params)
        # where the random batch or the moved parameters leave the domain of the function, its own ones are tried
        tries = [(moved, drawn), (moved, own), (params, own)] if given else [(moved, drawn)]
        for parameters, samples in tries:
            try:
                first, alone = map(np.asarray, _together_and_alone(function, parameters, samples))
            except jax.errors.TracerArrayConversionError as error:
                raise Unprobed(
                    "apply closes over traced values, so whether it couples samples cannot be probed; "
                    f"pass stats= one of {STATS}"
                ) from error
            if np.any(np.isfinite(first)):
                break
        else:
            raise ValueError(
                "apply returns nothing but NaN or infinity when it is probed for coupled samples; check params and x"
            )
    eps = float(jnp.finfo(first.dtype).eps)
    if _agreement(first, alone, eps):
        return False
    # What is computed in low precision may be returned in a higher one: the state of a recurrent network that starts
    # from double zeros, or bfloat16 layers below a float32 head. The coarsest step sets the rounding.
    with jax.ensure_compile_time_eval():
        program, *_ = eqx.filter_make_jaxpr(function)(parameters, samples)
        again = np.asarray(_together(function, parameters, samples))
    eps = max(_precisions(program), default=eps)
    if not _agreement(first, again, eps):
        raise ValueError(
            "apply is random: it returns other numbers when it is evaluated again; fix its random numbers, "
            "for instance by a key in params or in a closure"
        )
    return not _agreement(first, alone, eps)


def check_function(
    apply: Apply | Normalized, params: Params, x: Batch, z: Batch | None, stats: str | None
) -> None:
    """Refuse a function that does not fit to its arguments, or whose samples are coupled in a way that none has chosen.

    Args:
        apply: (params, batch) -> outputs; plain or ``Normalized``.
        params: pytree of arrays.
        x: batch (T, ...).
        z: second batch (S, ...), or None for x.
        stats: one of ``STATS``, explained at ``empirical_ntk``; None for functions without coupling.

    Raises:
        ValueError: if the function couples samples and ``stats`` does not say what is meant, or asks for statistics
            that cannot be taken out of the function.
    """
    if isinstance(apply, Normalized):
        if stats is None:
            raise ValueError(f"apply normalizes over the batch: stats must be one of {STATS}, got None")
        if stats == "running" and apply.running is None:
            raise ValueError(
                'apply keeps no running averages: stats="running" needs kernels.Normalized(..., running)'
            )
    check_outputs(lambda p: kernel_maps(apply, p, x, z, stats).left(p), params, "x", x)
    if z is not None:
        check_outputs(lambda p: kernel_maps(apply, p, x, z, stats).right(p), params, "z", z)
    if isinstance(apply, Normalized) or stats == "batch" or (stats == "train" and z is None):
        return

    def couples(some: Batch) -> bool:
        try:
            return is_coupled(apply, params, some)
        except Unprobed:
            if stats in FIXED:  # the caller has declared the function free of coupling
                return False
            raise

    rows = lambda a: np.shape(jax.tree.leaves(a)[0])[0]
    # batches of other sizes may be treated otherwise
    if stats == "train" or couples(x) or (z is not None and rows(z) != rows(x) and couples(z)):
        needs = "the statistics of apply cannot be taken out of it: " if stats else ""
        raise ValueError(
            f"apply couples the samples of a batch and stats is {stats!r}; {needs}"
            'pass stats="batch" (statistics of the batch itself), or wrap apply as '
            'kernels.Normalized(apply, statistics) for "train" (statistics of x, their gradients included) '
            '"frozen" (statistics of x, held fixed) or "running" (the averages that the model keeps)'
        )


def kernel_maps(
    apply: Apply | Normalized, params: Params, x: Batch, z: Batch | None, stats: str | None
) -> KernelMaps:
    """Return params -> outputs at x and at z, for arguments that ``check_function`` has accepted."""
    other = x if z is None else z
    if not isinstance(apply, Normalized):
        free = apply if stats in (None, *FIXED) else None
        return KernelMaps(lambda p: apply(p, x), lambda p: apply(p, other), free)
    if stats == "batch":
        return KernelMaps(lambda p: apply(p, x), lambda p: apply(p, other), None)
    if stats == "train":
        right = lambda p: apply.apply(p, other, apply.statistics(p, x))
        return KernelMaps(lambda p: apply(p, x), right, None)
    # computed once, outside of what is differentiated, so that no gradient goes through them
    constants = apply.running if stats == "running" else _statistics(apply, params, x)
    single = lambda p, batch: apply.apply(p, batch, constants)
    return KernelMaps(lambda p: single(p, x), lambda p: single(p, other), single)
