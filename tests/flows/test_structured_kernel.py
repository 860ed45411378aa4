"""The fast forms of the tangent kernel against the Jacobian, for every model that has one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import MODELS, problem

import meanflow as mf
from meanflow.flows import _equation as equation


def by_columns(flow, cloud, x, z):
    """K(x, z) from products with unit vectors, which know nothing of the fast form."""
    apply = equation.kernel_operator(flow, cloud, x, z)
    return jax.vmap(apply)(jnp.eye(z.shape[0])).T


@pytest.mark.parametrize("alpha", ["m", "sqrt"])
@pytest.mark.parametrize("activation", ["tanh", "relu", "gelu"])
@pytest.mark.parametrize("model", MODELS)
def test_two_layer_kernels(model, activation, alpha):
    _, cloud, data = problem(model)
    flow = getattr(mf, model)(activation, alpha=alpha).bind(data)
    padded = cloud.pad(9)
    z = data.x[:5] + 0.1
    expected = by_columns(flow, cloud, data.x, z)
    assert flow.feature.kernel(cloud, data.x, z, flow.space) is not None
    np.testing.assert_allclose(mf.tangent_kernel(flow, cloud, data.x, z), expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(mf.tangent_kernel(flow, padded, data.x, z), expected, rtol=1e-10, atol=1e-12)


def test_kernels_with_a_bias(key):
    flow = mf.vanilla("tanh", bias=True)
    cloud = flow.init(key, 6, dim=3)
    x, z = jax.random.normal(key, (7, 3)), jax.random.normal(key, (4, 3))
    np.testing.assert_allclose(
        mf.tangent_kernel(flow, cloud, x, z), by_columns(flow, cloud, x, z), rtol=1e-10
    )


@pytest.mark.parametrize("model", ["canonical", "lifted", "planar", "radial", "full"])
def test_univariate_kernels(model, key):
    flow = getattr(mf, model)() if model == "canonical" else getattr(mf, model)(alpha="sqrt")
    cloud = flow.init(key, 12, labels=jnp.linspace(-2.0, 2.0, 12) if model == "lifted" else None)
    x, z = jnp.linspace(-1, 1, 9), jnp.linspace(-0.9, 1.1, 5)
    assert flow.feature.kernel(cloud, x, z, flow.space) is not None
    np.testing.assert_allclose(
        mf.tangent_kernel(flow, cloud, x, z), by_columns(flow, cloud, x, z), rtol=1e-10, atol=1e-13
    )


def test_kernel_of_one_array_is_that_of_two_equal_ones_with_its_derivatives():
    flow = mf.vanilla("tanh")
    cloud = flow.init(jax.random.key(0), 5, dim=3).pad(
        7
    )  # the weight of padding is 0, where a root has no derivative
    x = jax.random.normal(jax.random.key(1), (4, 3))
    towards = jax.tree.map(lambda u: jnp.abs(jnp.cos(jnp.arange(u.size * 1.0))).reshape(u.shape), cloud)

    def kernel(t):
        return equation.tangent_kernel(flow, jax.tree.map(lambda u, v: u + t * v, cloud, towards), x, x)

    np.testing.assert_allclose(kernel(0.0), by_columns(flow, cloud, x, x + 0.0), rtol=1e-10)
    step = 1e-5
    # one-sided, of second order: weights must not fall below 0
    measured = (4 * kernel(step) - kernel(2 * step) - 3 * kernel(0.0)) / (2 * step)
    np.testing.assert_allclose(jax.jvp(kernel, (0.0,), (1.0,))[1], measured, atol=1e-7)
    np.testing.assert_allclose(jax.jacrev(kernel)(0.0), measured, atol=1e-7)
