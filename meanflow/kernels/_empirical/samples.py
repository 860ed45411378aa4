"""Samples: a batch (T, ...), or a pytree of such arrays, which the engine sees as the array of their indices."""

from collections.abc import Callable
from typing import TypeAlias, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from meanflow import _checks
from meanflow.kernels._empirical.modules import Apply, Batch, Function, Normalized, Params, batch

Wrapper: TypeAlias = Callable[[Callable[..., PyTree]], Callable[..., PyTree]]


def batches(name: str, value: object) -> object:
    """Accept a batch of samples (T, ...), or a dict, tuple or other pytree of such arrays of one length T."""
    if isinstance(value, list | np.ndarray | jax.Array) or jax.tree_util.all_leaves([value]):
        return batch(name, value)
    leaves = jax.tree.leaves(value)
    if not leaves or not all(hasattr(leaf, "shape") for leaf in leaves):
        raise ValueError(
            f"{name} must be a batch of samples, or a pytree of such arrays, got {_checks.show(value)}"
        )
    arrays = [cast(Array, batch(f"arrays of {name}", leaf)) for leaf in leaves]
    if len({a.shape[0] for a in arrays}) > 1:
        raise ValueError(
            f"the arrays of {name} must have one number of samples, got shapes {[a.shape for a in arrays]}"
        )
    return jax.tree.unflatten(jax.tree.structure(value), arrays)


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
    if eqx.is_array(x):
        if z is not None and not eqx.is_array(z):
            raise ValueError("x and z must have the same structure, got an array and a pytree")
        return apply, x, z
    if z is not None and jax.tree.structure(x) != jax.tree.structure(z):  # type: ignore[operator]
        raise ValueError(
            f"x and z must have the same structure, got {jax.tree.structure(x)} and {jax.tree.structure(z)}"
        )
    samples = x if z is None else jax.tree.map(lambda a, b: jnp.concatenate([a, b]), x, z)
    first = jax.tree.leaves(x)[0].shape[0]
    count = jax.tree.leaves(samples)[0].shape[0]
    wrap = lambda function: BySample(function, samples)
    index = jnp.arange(count)
    return wrapped(apply, wrap, wrap), index[:first], None if z is None else index[first:]
