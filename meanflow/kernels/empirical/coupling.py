"""Do the samples of a batch depend on each other, and through which statistics?

The tangent kernel needs J = df/dparams. When samples are coupled (batch norm, attention over the batch), the Jacobian
of one sample needs the whole batch, and a kernel computed sample by sample or chunk by chunk is silently wrong. So
every function is probed, and coupled ones are refused until ``stats`` says which statistics are meant.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Shaped

from meanflow import _checks
from meanflow.kernels.empirical.modules import Apply, Batch, Function, Normalized, Outputs, Params, batch

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


@eqx.filter_jit  # so that a function is compiled for the probe once, not at every call
def _first_row(apply: Apply, params: Params, batch: Batch) -> Array:
    return apply(params, batch)[0]


def _moved(leaf: ArrayLike, rng: np.random.Generator) -> ArrayLike:
    """Return a parameter moved off its value by a tenth of its size; a random one where the value is traced."""
    if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
        return leaf
    given, shape = _checks.concrete(leaf), np.shape(leaf)
    noise = rng.normal(size=shape)
    if given is None:
        moved = noise / math.sqrt(max(shape, default=1))
    else:
        moved = given + 0.1 * noise * (np.sqrt(np.mean(np.square(given))) + 0.1)
    return jnp.asarray(moved, jnp.result_type(leaf))


def _random_batch(x: Batch, rows: int, rng: np.random.Generator) -> np.ndarray:
    """Draw ``rows`` samples on the scale of ``x``; integers are drawn from the entries of ``x``."""
    dtype, shape = jnp.result_type(x), np.shape(x)[1:]
    given = _checks.concrete(x)
    if not jnp.issubdtype(dtype, jnp.inexact):
        whole = np.zeros((1, *shape), int) if given is None else given
        return rng.choice(whole, rows)
    center, width = (0.0, 1.0) if given is None else (np.mean(given), np.std(given) + 1e-3)
    return center + width * rng.normal(size=(rows, *shape))


@_checks.arguments(apply=_checks.function, x=batch)
def is_coupled(apply: Apply, params: Params, x: Shaped[ArrayLike, "T ..."]) -> bool:
    """Tell whether the output at one sample depends on the other samples of the batch, by a probe.

    Eight rows at most are evaluated twice, with the companions of the first row exchanged. The parameters are moved
    off the given ones, because a batch norm whose scale starts at 0 hides its coupling there. Inside jit the probe runs
    at trace time with random numbers in place of traced values.

    Args:
        apply: (params, batch) -> outputs (T, ...).
        params: pytree of arrays.
        x: batch (T, ...), which sets the scale of the probe.

    Raises:
        ValueError: if the function closes over traced values, so that it cannot be evaluated now.

    >>> import jax.numpy as jnp
    >>> is_coupled(lambda w, x: x @ w, jnp.ones(2), jnp.ones((3, 2)))
    False
    >>> is_coupled(lambda w, x: x @ w - jnp.mean(x @ w), jnp.ones(2), jnp.ones((3, 2)))
    True
    """
    # a function of indices is probed as the function of samples that it stands for: indices hide what they point to
    function, samples = apply.probed(x) if isinstance(apply, Function) else (apply, x)
    samples = jax.tree.map(jnp.asarray, samples)
    rng = np.random.default_rng(0)
    rows = min(max(jnp.shape(x)[0], 2), 8)
    with jax.ensure_compile_time_eval():
        moved = jax.tree.map(lambda leaf: _moved(leaf, rng), params)
        first, second = (jax.tree.map(lambda leaf: _random_batch(leaf, rows, rng), samples) for _ in range(2))
        for one, two in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
            two[0] = one[0]
        typed = lambda drawn: jax.tree.map(lambda a, leaf: jnp.asarray(a, leaf.dtype), drawn, samples)
        try:
            a = np.asarray(_first_row(function, moved, typed(first)))
            b = np.asarray(_first_row(function, moved, typed(second)))
        except jax.errors.TracerArrayConversionError as error:
            raise Unprobed(
                "apply closes over traced values, so whether it couples samples cannot be probed; "
                f"pass stats= one of {STATS}"
            ) from error
    scale = np.max(np.abs(a), initial=0.0) + np.max(np.abs(b), initial=0.0)
    tolerance = 1e4 * float(jnp.finfo(a.dtype).eps)
    # NaN or infinity decide nothing: such a function counts as coupled and has to be declared
    return not bool(np.all(np.abs(a - b) <= tolerance * scale))


def _probe(apply: Apply, params: Params, x: Batch, declared: bool) -> bool:
    """Probe ``apply``; a function that cannot be probed passes if the caller has ``declared`` it uncoupled."""
    try:
        return is_coupled(apply, params, x)
    except Unprobed:
        if declared:
            return False
        raise


def uncoupled_maps(apply: Apply, x: Batch, z: Batch | None) -> KernelMaps:
    """Return the maps of a function that is known to treat every sample on its own."""
    other = x if z is None else z
    return KernelMaps(lambda p: apply(p, x), lambda p: apply(p, other), apply)


def kernel_maps(
    apply: Apply | Normalized,
    params: Params,
    x: Batch,
    z: Batch | None,
    stats: str | None,
) -> KernelMaps:
    """Return params -> outputs at x and at z, using the statistics chosen by ``stats``.

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
    other = x if z is None else z
    if isinstance(apply, Normalized):
        return _normalized_maps(apply, params, x, other, stats)
    if stats == "batch" or (stats == "train" and z is None):
        return KernelMaps(lambda p: apply(p, x), lambda p: apply(p, other), None)
    if stats == "train" or _probe(apply, params, x, declared=stats in FIXED):
        needs = "the statistics of apply cannot be taken out of it: " if stats else ""
        raise ValueError(
            f"apply couples the samples of a batch and stats is {stats!r}; {needs}"
            'pass stats="batch" (statistics of the batch itself), or wrap apply as '
            'kernels.Normalized(apply, statistics) for "train" (statistics of x, their gradients included) '
            '"frozen" (statistics of x, held fixed) or "running" (the averages that the model keeps)'
        )
    return uncoupled_maps(apply, x, z)


def _normalized_maps(
    apply: Normalized,
    params: Params,
    x: Batch,
    z: Batch,
    stats: str | None,
) -> KernelMaps:
    """Return the maps of a function whose statistics can be taken out of it."""
    if stats is None:
        raise ValueError(f"apply normalizes over the batch: stats must be one of {STATS}, got None")
    if stats == "batch":
        return KernelMaps(lambda p: apply(p, x), lambda p: apply(p, z), None)
    if stats == "train":
        return KernelMaps(lambda p: apply(p, x), lambda p: apply.apply(p, z, apply.statistics(p, x)), None)
    if stats == "running":
        if apply.running is None:
            raise ValueError(
                'apply keeps no running averages: stats="running" needs kernels.Normalized(..., running)'
            )
        constants = apply.running
    else:  # "frozen": computed once, outside of what is differentiated, so that no gradient goes through them
        constants = eqx.filter_jit(apply.statistics)(params, x)
    fixed = lambda p, batch: apply.apply(p, batch, constants)
    return KernelMaps(lambda p: fixed(p, x), lambda p: fixed(p, z), fixed)
