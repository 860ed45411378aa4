"""The odd point of a batch and the invariant representation."""

import jax.numpy as jnp
import numpy as np
import pytest

from meanflow import depth


@pytest.mark.parametrize("n", [3, 10, 50])
def test_definition_12(n):
    x = depth.invariant_representation(n, 5)
    centre = x[1:].mean(0)
    np.testing.assert_allclose(x[0] @ x[0], 1.0, rtol=1e-15)
    np.testing.assert_allclose(centre @ centre, 1 / (n - 1) ** 2, rtol=1e-14)
    assert x[0] @ centre == 0 and bool(jnp.all(x[1:] == x[1:2]))


def test_odd_point_arguments():
    with pytest.raises(ValueError, match="at least 3"):
        depth.odd_point(jnp.eye(2))


@pytest.mark.bad_input
def test_invariant_representation_arguments():
    with pytest.raises(ValueError, match="n must"):
        depth.invariant_representation(2)
    with pytest.raises(ValueError, match="features"):
        depth.invariant_representation(5, 1)
