"""One neuron per sample, as a flax layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from meanflow import depth
from meanflow.depth._initializers import one_neuron_per_sample


def unit(key, n, k, dtype=float):
    x = jax.random.normal(key, (n, k), dtype)
    return x / jnp.linalg.norm(x, axis=1, keepdims=True)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_flax_layer_gives_orthonormal_codes(key, dtype):
    x = unit(key, 30, 8, dtype)
    kernel_init, bias_init = one_neuron_per_sample(x, margin=1e-4)
    layer = nnx.Linear(
        8, 30, kernel_init=kernel_init, bias_init=bias_init, param_dtype=dtype, rngs=nnx.Rngs(0)
    )
    code = nnx.relu(layer(x))
    np.testing.assert_array_equal(np.count_nonzero(np.asarray(code), axis=1), 1)
    np.testing.assert_allclose(code, np.eye(30), atol=2e-4 if dtype == jnp.float64 else 1e-2)
    assert depth._observables.summary(code).rank(1e-6) == 30


def test_relaxed_thresholds_wake_more_neurons(key):
    x, new = unit(key, 60, 10), unit(jax.random.fold_in(key, 1), 500, 10)
    silent, angle = [], []
    for relax in (0.0, 0.25, 0.5):
        kernel_init, bias_init = one_neuron_per_sample(x, relax=relax)
        kernel, bias = kernel_init(key, (10, 60), float), bias_init(key, (60,), float)
        respond = lambda z, kernel=kernel, bias=bias: jax.nn.relu(z @ kernel + bias[None])
        silent.append(float(jnp.mean(jnp.all(respond(new) == 0, axis=1))))
        angle.append(float(depth.pair_angles(respond(x) @ respond(x).T).mean()))
    assert silent[0] > silent[1] > silent[2]
    assert angle[0] == 90.0 > angle[1] > angle[2] > 75


def test_bad_samples(key):
    x = unit(key, 5, 3)
    with pytest.raises(ValueError, match="unit length"):
        one_neuron_per_sample(2 * x)
    with pytest.raises(ValueError, match="distinct"):
        one_neuron_per_sample(jnp.concatenate([x, x[:1]]))
    with pytest.raises(ValueError, match="at least 2"):
        one_neuron_per_sample(x[:1])
    with pytest.raises(ValueError, match="shape must be"):
        one_neuron_per_sample(x)[0](key, (3, 4), float)
