"""The type of functions that draw parameters; it stands apart because flax is not needed to name it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeAlias

import jax
from jax.typing import DTypeLike

from meanflow._boundary import function

# (key, shape, dtype) -> array; the protocol of jax also asks for an ``out_sharding``, which users need not take
Initializer: TypeAlias = Annotated[Callable[[jax.Array, tuple[int, ...], DTypeLike], jax.Array], function]
