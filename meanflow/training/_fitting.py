"""What the trainer accepts: data, labels, settings; and whether network, loss and data fit together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from meanflow import _boundary
from meanflow._boundary import array
from meanflow.training.data import Data

Inputs = Annotated[Float[Array, "n ..."], array(rank=1, half=True)]
"""Kind of inputs of a network: a batch of finite numbers."""


def labels(name: str, value: object) -> jax.Array:
    """Accept targets, one for each row: an array of at least one axis, of integers or floats."""
    _boundary.array(rank=1)(name, value)
    return jnp.asarray(value)  # classes stay integers


def train_data(name: str, value: object) -> Data:
    """Accept training and test data, four finite arrays that are not empty."""
    if not isinstance(value, tuple) or len(value) != 4:
        raise TypeError(
            f"{name} must be a training.data.Data (train_x, train_y, test_x, test_y), got {_boundary.show(value)}"
        )
    for field, part in zip(Data._fields, value, strict=True):
        _boundary.host_array(rank=1, least=1)(f"{name}.{field}", part)
    return Data(*value)


def maker(name: str, value: object) -> object:
    """Accept a function of ``nnx.Rngs``, or the class of a network, but not a network itself."""
    if isinstance(value, nnx.Module):
        raise TypeError(
            f"{name} must be a function that makes a network, got a network; write lambda rngs: ..."
        )
    return _boundary.either(_boundary.taking(1), _boundary.subclass(nnx.Module))(name, value)


def same_rows(x: jax.Array | np.ndarray, y: jax.Array | np.ndarray, axis: int = 0, name: str = "") -> None:
    """Refuse inputs and targets of unequal numbers of rows."""
    if x.shape[: axis + 1] != y.shape[: axis + 1]:
        what = (
            f"data must have a label for each {name} row" if name else "y must have a label for each row of x"
        )
        raise ValueError(f"{what}, got {x.shape} and {y.shape}")


def check_fit(
    forward: Callable[[jax.Array], jax.Array],
    loss: Callable[[jax.Array, jax.Array], jax.Array],
    augment: Callable[[jax.Array, jax.Array], jax.Array] | None,
    data: Data,
    classifies: bool,
) -> None:
    """Refuse data, loss or augmentation that do not fit the network, before anything is compiled.

    Args:
        forward: the network, batch -> outputs.
        loss: (outputs, labels) -> number.
        augment: (key, batch) -> batch, or None.
        data: of a single run.
        classifies: whether labels are the numbers of classes, of which the network has one output each.
    """
    for name in ("train", "test"):
        x, y = (getattr(data, f"{name}_{part}") for part in "xy")
        # two rows without values: traced, so that a misfit is found in milliseconds
        batch = jax.ShapeDtypeStruct((2, *x.shape[1:]), jnp.result_type(x))
        try:
            outputs = jax.eval_shape(forward, batch)
        except (TypeError, ValueError) as problem:
            raise ValueError(
                f"data.{name}_x has rows of shape {x.shape[1:]}, which the network does not take: {problem}"
            ) from problem
        if classifies:
            _check_classes(f"data.{name}_y", np.asarray(y), outputs.shape[-1])
        value = jax.eval_shape(loss, outputs, jax.ShapeDtypeStruct((2, *y.shape[1:]), jnp.result_type(y)))
        if getattr(value, "shape", None) != ():
            raise ValueError(f"loss must return one number for a batch, got {value}")
        if augment is not None and name == "train":
            changed = jax.eval_shape(augment, jax.random.key(0), batch)
            if getattr(changed, "shape", None) != batch.shape:
                raise ValueError(
                    f"augment must return a batch of shape {batch.shape} like its input, got {changed}"
                )


def _check_classes(name: str, y: np.ndarray, classes: int) -> None:
    """Refuse labels that are no class numbers: a loss would give NaN for them, or count from the end."""
    if not np.issubdtype(y.dtype, np.integer):
        raise ValueError(f"{name} must hold integers, the numbers of classes, got type {y.dtype}")
    _boundary.bounds(name, y, low=0, high=classes - 1)
