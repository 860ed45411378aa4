"""The checker of ``pytest --beartype``: stops wrong types and shapes, lets through what the library allows."""

from typing import Self

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, ArrayLike, Float, TypeCheckError, jaxtyped

signatures = pytest.importorskip("signatures", reason="beartype is not installed")


@jaxtyped(typechecker=signatures.check)
def product(x: Float[ArrayLike, "n d"], w: Float[ArrayLike, " d"], scale: float = 1.0) -> Float[Array, " n"]:
    return scale * (jnp.asarray(x) @ jnp.asarray(w))


class Chain:
    @jaxtyped(typechecker=signatures.check)
    def link(self) -> Self:
        return self


def test_allowed():
    assert product(np.ones((2, 3)), jnp.ones(3), 2).shape == (2,)
    assert isinstance(Chain().link(), Chain)


@pytest.mark.parametrize("w", [np.ones(2), np.ones((3, 1)), np.ones(3, int), "text"])
def test_refused(w):
    with pytest.raises(TypeCheckError):
        product(np.ones((2, 3)), w)
