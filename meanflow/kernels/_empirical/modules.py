"""Networks as functions of (params, batch), with normalization statistics that can be taken out of them.

The kernel engine takes any JAX function ``apply(params, batch) -> outputs``. Batch normalization makes the output of
one sample depend on the other samples through a few statistics. A ``Normalized`` function exposes these statistics, so
that the engine can compute them from another batch, or hold them fixed.

Samples are a batch (T, ...), or a pytree of such arrays, which the engine sees as the array of their indices.
"""

from collections.abc import Callable
from typing import TypeAlias, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree, Shaped

from meanflow import _boundary

Params: TypeAlias = PyTree
Statistics: TypeAlias = PyTree
# axes without a name, since functions take batches of different sizes
Batch: TypeAlias = PyTree[Shaped[Array, "_ ..."]]
Outputs: TypeAlias = Shaped[Array, "_ ..."]
Apply: TypeAlias = Callable[[Params, Batch], Outputs]
Wrapper: TypeAlias = Callable[[Callable[..., PyTree]], Callable[..., PyTree]]

_FLOATS = _boundary.array(least=0, half=True, squares=True)


def floats(name: str, value: object) -> object:
    """Accept a pytree with at least one array of finite floats; what else it holds is the function's matter."""
    count = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(value):
        place = f"{name}{jax.tree_util.keystr(path)}"
        if isinstance(leaf, str):
            raise TypeError(f"{place} must be an array, got {_boundary.show(leaf)}")
        dtype = getattr(leaf, "dtype", jnp.result_type(float) if isinstance(leaf, float) else None)
        if dtype is not None and jnp.issubdtype(dtype, jnp.inexact):
            _boundary.numeric(place, leaf)
            _boundary.finite(place, leaf)
            count += 1
    if not count:
        raise ValueError(f"{name} must hold at least one array of floats, got {_boundary.show(value)}")
    return value


def batches(name: str, value: object) -> object:
    """Accept a batch of samples (T, ...), or a dict, tuple or other pytree of such arrays of one length T.

    Integers (such as tokens) stay integers.
    """
    single = isinstance(value, list | np.ndarray | jax.Array) or jax.tree_util.all_leaves([value])
    leaves: list[Array] = [value] if single else jax.tree.leaves(value)  # type: ignore[list-item]
    if not leaves or not (single or all(hasattr(leaf, "shape") for leaf in leaves)):
        raise ValueError(
            f"{name} must be a batch of samples, or a pytree of such arrays, got {_boundary.show(value)}"
        )
    arrays: list[Array] = []
    for leaf in leaves:
        place = name if single else f"arrays of {name}"
        _boundary.numeric(place, leaf)
        arrays.append(jnp.asarray(leaf))
        if arrays[-1].ndim < 1:
            raise ValueError(f"{place} must be a batch of samples (T, ...), got a single number")
        if jnp.issubdtype(arrays[-1].dtype, jnp.floating):
            _FLOATS(place, leaf)
        if arrays[-1].shape[0] != arrays[0].shape[0]:
            shapes = [leaf.shape for leaf in leaves]
            raise ValueError(f"the arrays of {name} must have one number of samples, got shapes {shapes}")
    return arrays[0] if single else jax.tree.unflatten(jax.tree.structure(value), arrays)


class Function(eqx.Module):
    """A function with arrays inside, which ``eqx.filter_jit`` traces.

    To ``jax.jit``, which hashes the function it is given, two of them are the same only if they are one object.
    """

    def probed(self, x: Batch) -> tuple[Callable[..., PyTree], PyTree]:
        """Return the function, and the samples for x, at which to probe whether samples are coupled."""
        return cast(Callable[..., PyTree], self), x

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


class Normalized(Function):
    """A network whose normalization statistics are an argument instead of a side effect.

    Called as ``network(params, batch)`` it normalizes with the statistics of that very batch.

    Attributes:
        apply: (params, batch, statistics) -> outputs (T, ...). Once the statistics are given, the output at a sample
            must depend on that sample alone.
        statistics: (params, batch) -> the statistics of the batch, any pytree of arrays.
        running: the averages of the statistics that the model has gathered in training, which it normalizes with in
            inference; None if it keeps none. ``stats="running"`` uses them.

    >>> import jax.numpy as jnp
    >>> moments = lambda w, x: (jnp.mean(x @ w), jnp.std(x @ w))
    >>> net = Normalized(lambda w, x, s: (x @ w - s[0]) / s[1], moments)
    >>> net(jnp.ones(1), jnp.array([[0.0], [2.0]])).tolist()
    [-1.0, 1.0]
    """

    apply: Callable[[Params, Batch, Statistics], Outputs]
    statistics: Callable[[Params, Batch], Statistics]
    running: Statistics = None

    def __check_init__(self) -> None:
        _boundary.function("apply", self.apply)
        _boundary.function("statistics", self.statistics)

    def __call__(self, params: Params, batch: Batch) -> Outputs:
        """Return the outputs at ``batch``, normalized with its own statistics."""
        return self.apply(params, batch, self.statistics(params, batch))


def wrapped(apply: Apply | Normalized, wrap: Wrapper, statistics: Wrapper) -> Apply | Normalized:
    """Return the function with its outputs wrapped, and its statistics if it has any."""
    if not isinstance(apply, Normalized):
        return wrap(apply)
    return Normalized(wrap(apply.apply), statistics(apply.statistics), apply.running)


class BySample(Function):
    """A function of a pytree of samples as a function of their indices."""

    function: Callable[..., PyTree]
    samples: PyTree

    def probed(self, x: Batch) -> tuple[Callable[..., PyTree], PyTree]:
        """Return the function of samples itself."""
        return self.function, self.samples

    def __call__(self, params: Params, index: Int[Array, " T"], *statistics: PyTree) -> PyTree:
        """Evaluate the function at the samples with these indices."""
        return self.function(params, jax.tree.map(lambda a: a[index], self.samples), *statistics)


def as_arrays(
    apply: Apply | Normalized, x: PyTree, z: PyTree
) -> tuple[Apply | Normalized, Batch, Batch | None]:
    """Return function and batches of arrays: a pytree of samples becomes the array of their indices."""
    if z is not None and jax.tree.structure(x) != jax.tree.structure(z):  # type: ignore[operator]
        raise ValueError(
            f"x and z must have the same structure, got {jax.tree.structure(x)} and {jax.tree.structure(z)}"
        )
    if eqx.is_array(x):
        return apply, x, z
    samples = x if z is None else jax.tree.map(lambda a, b: jnp.concatenate([a, b]), x, z)
    first, count = (jax.tree.leaves(a)[0].shape[0] for a in (x, samples))
    wrap = lambda function: BySample(function, samples)
    index = jnp.arange(count)
    return wrapped(apply, wrap, wrap), index[:first], None if z is None else index[first:]
