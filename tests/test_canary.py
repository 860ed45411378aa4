"""Watches for the jax CPU miscompile (jax#39103): jit must equal eager on a per-particle quadratic form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest


@pytest.mark.parametrize("size", [16385, 20000, 32769, 40000])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_jit_equals_eager(size, dtype):
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(3, 3)).astype(dtype)
    points = rng.normal(size=(size, 3)).astype(dtype)

    def form(w):
        return jnp.sum((jnp.asarray(matrix) @ w) ** 2)

    compiled = jax.jit(jax.vmap(form))(points)
    exact = np.sum((points.astype("float64") @ matrix.T.astype("float64")) ** 2, axis=1)
    tolerance = 1e-5 if dtype == "float32" else 1e-12
    np.testing.assert_allclose(compiled, exact, rtol=tolerance)
    np.testing.assert_allclose(compiled, jax.vmap(form)(points), rtol=tolerance)
