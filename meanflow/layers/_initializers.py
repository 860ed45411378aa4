"""The type of functions that draw parameters; it stands apart because flax is not needed to name it."""

from collections.abc import Callable
from typing import TypeAlias

import jax
from jax.typing import DTypeLike

# (key, shape, dtype) -> array; the protocol of jax also asks for an ``out_sharding``, which users need not take
Initializer: TypeAlias = Callable[[jax.Array, tuple[int, ...], DTypeLike], jax.Array]
