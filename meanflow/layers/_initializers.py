"""The type of functions that draw parameters; it stands apart because flax is not needed to name it."""

from typing import Protocol, runtime_checkable

import jax
from jax.typing import DTypeLike


@runtime_checkable
class Initializer(Protocol):
    """A function that draws a parameter: ``(key, shape, dtype) -> array``, as any jax or flax initializer."""

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike, /) -> jax.Array:
        """Draw an array of the given shape and dtype."""
