"""Kernels of pytrees, by output axes, by groups of parameters, as operators between two batches, over devices."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from meanflow import kernels


def normal(seed, *shape):
    """Gaussian numbers of numpy, which compiles nothing when the tests are collected."""
    return jnp.asarray(np.random.default_rng(30 + seed).normal(size=shape))


X, Z = normal(0, 5, 3), normal(1, 4, 3)
PARAMS = {
    "first": {"w": normal(2, 3, 4), "b": normal(3, 4)},
    "last": normal(4, 4, 6) / 2,
    "count": jnp.arange(3),
}


def net(p, x):
    """Outputs (T, 3, 2)."""
    return (jnp.tanh(x @ p["first"]["w"] + p["first"]["b"][None]) @ p["last"]).reshape(-1, 3, 2)


@functools.cache
def full():
    """Shape (T, S, 3, 2, 3, 2), tested against explicit Jacobians elsewhere."""
    return kernels.empirical_ntk(net, PARAMS, X, Z)


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        pytest.param(("full", "trace"), "tsabcb->tsac", marks=pytest.mark.slow),
        pytest.param(("trace", "full"), "tsabad->tsbd", marks=pytest.mark.slow),
        (("diagonal", "full"), "tsabad->tsabd"),
        pytest.param(("full", "diagonal"), "tsabcb->tsabc", marks=pytest.mark.slow),
        pytest.param(("diagonal", "trace"), "tsabab->tsa", marks=pytest.mark.slow),
        (("trace", "trace"), "tsabab->ts"),
    ],
)
def test_output_axes(outputs, pattern):
    ours = kernels.empirical_ntk(net, PARAMS, X, Z, outputs=outputs)
    np.testing.assert_allclose(ours, np.einsum(pattern, full()), rtol=1e-10, atol=1e-12)


def test_output_axes_of_a_coupled_function_and_bad_ones():
    centered = lambda p, x: net(p, x) - jnp.mean(net(p, x), 0, keepdims=True)
    full = kernels.empirical_ntk(centered, PARAMS, X, stats="batch")
    ours = kernels.empirical_ntk(centered, PARAMS, X, stats="batch", outputs=["trace", "full"])
    np.testing.assert_allclose(ours, np.einsum("tsabad->tsbd", full), rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match="one entry for each of 2 output axes"):
        kernels.empirical_ntk(net, PARAMS, X, outputs=["trace"])


def test_pytrees_of_samples():
    """A function of a dict is that of its concatenated arrays; statistics and operators included."""
    split = lambda x: {"a": x[:, :1], "rest": (x[:, 1:], jnp.arange(len(x)))}
    whole = lambda s: jnp.concatenate([s["a"], s["rest"][0]], axis=1)
    apply = lambda p, s: net(p, whole(s))
    ours = kernels.empirical_ntk(apply, PARAMS, split(X), split(Z), outputs="trace")
    np.testing.assert_allclose(ours, np.einsum("tsabab->ts", full()), rtol=1e-10, atol=1e-12)
    center = kernels.Normalized(
        lambda p, s, mean: apply(p, s) - mean[None], lambda p, s: jnp.mean(apply(p, s), axis=0)
    )
    plain = kernels.Normalized(
        lambda p, x, mean: net(p, x) - mean[None], lambda p, x: jnp.mean(net(p, x), axis=0)
    )
    options = {"stats": "train", "outputs": "trace"}
    ours = kernels.empirical_ntk(center, PARAMS, split(X), split(Z), **options)
    np.testing.assert_allclose(
        ours, kernels.empirical_ntk(plain, PARAMS, X, Z, **options), rtol=1e-9, atol=1e-12
    )
    v = jnp.ones(24)
    np.testing.assert_allclose(
        kernels.ntk_operator(apply, PARAMS, split(X), split(Z)) @ v,
        kernels.ntk_operator(net, PARAMS, X, Z) @ v,
        rtol=1e-12,
    )
    assert kernels.Method().plan(apply, PARAMS, split(X), split(Z)).coupled is False
    recorder = kernels.KernelRecorder(split(X), keep=True)
    recorder(0, (apply, PARAMS))
    own = np.transpose(kernels.empirical_ntk(net, PARAMS, X).reshape(5, 5, 6, 6), (0, 2, 1, 3))
    np.testing.assert_allclose(recorder.record["kernel"][0], own.reshape(30, 30), rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match="couples the samples"):
        kernels.empirical_ntk(lambda p, s: apply(p, s) - jnp.mean(apply(p, s)), PARAMS, split(X))
    with pytest.raises(ValueError, match="same structure"):
        kernels.empirical_ntk(apply, PARAMS, split(X), {"a": X})
    with pytest.raises(ValueError, match="one number of samples"):
        kernels.empirical_ntk(apply, PARAMS, {"a": X, "rest": Z})


def test_groups_need_names():
    with pytest.raises((ValueError, TypeError), match="what groups returns"):
        kernels.empirical_ntk(net, PARAMS, X, groups=lambda path: None)


def test_groups_of_parameters():
    """The share of a group is the kernel of the function of it alone, and shares add up."""
    layer = lambda path: path.split("/")[0]
    shares = kernels.empirical_ntk(net, PARAMS, X, Z, groups=layer)
    assert list(shares) == ["first", "last"]
    np.testing.assert_allclose(sum(shares.values()), full(), rtol=1e-10, atol=1e-12)
    hidden = jnp.tanh(X @ PARAMS["first"]["w"] + PARAMS["first"]["b"][None])
    there = jnp.tanh(Z @ PARAMS["first"]["w"] + PARAMS["first"]["b"][None])
    exact = np.einsum("tk,sk,cd->tscd", hidden, there, np.eye(6)).reshape(5, 4, 3, 2, 3, 2)
    np.testing.assert_allclose(shares["last"], exact, rtol=1e-10, atol=1e-12)
    kinds = kernels.empirical_ntk(
        net, PARAMS, X, groups=lambda path: "bias" if path.endswith("/b") else "weights", outputs="trace"
    )
    whole = kernels.empirical_ntk(net, PARAMS, X, outputs="trace")
    np.testing.assert_allclose(kinds["bias"] + kinds["weights"], whole, rtol=1e-10)

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first, self.last = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)

        def __call__(self, x):
            return self.last(jnp.tanh(self.norm(self.first(x))))

    apply, params = kernels.from_module(Net(nnx.Rngs(0)))
    low = X.astype(jnp.float32)
    layers = kernels.empirical_ntk(apply, params, low, stats="batch", outputs="trace", groups=layer)
    assert sorted(layers) == ["first", "last", "norm"]
    whole = kernels.empirical_ntk(apply, params, low, stats="batch", outputs="trace")
    np.testing.assert_allclose(sum(layers.values()), whole, rtol=1e-4, atol=1e-4)


def test_operator_between_two_batches():
    operator = kernels.ntk_operator(net, PARAMS, X, Z)
    assert operator.shape == (30, 24)
    matrix = np.transpose(full().reshape(5, 4, 6, 6), (0, 2, 1, 3)).reshape(30, 24)
    v = normal(5, 24, 2)
    np.testing.assert_allclose(operator @ v, matrix @ v, rtol=1e-10)
    center = kernels.Normalized(
        lambda p, x, mean: net(p, x) - mean[None], lambda p, x: jnp.mean(net(p, x), axis=0)
    )
    exact = kernels.empirical_ntk(center, PARAMS, X, Z, stats="train").reshape(5, 4, 6, 6)
    matrix = np.transpose(exact, (0, 2, 1, 3)).reshape(30, 24)
    np.testing.assert_allclose(
        kernels.ntk_operator(center, PARAMS, X, Z, stats="train") @ v, matrix @ v, rtol=1e-10, atol=1e-12
    )
    with pytest.raises(ValueError, match="square"):
        kernels.spectrum(operator, key=jax.random.key(0))


DEVICES = """
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_enable_x64", True)
assert jax.device_count() == 4
from meanflow import kernels
keys = jax.random.split(jax.random.key(0), 4)
x, z = jax.random.normal(keys[0], (10, 3)), jax.random.normal(keys[1], (7, 3))
params = {"w": jax.random.normal(keys[2], (3, 5)), "v": jax.random.normal(keys[3], (5, 2))}
net = lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"]
mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
over = kernels.Method(mesh=mesh)
for outputs, method in (("full", "auto"), ("trace", "auto"), (("diagonal",), "jacobian")):
    for other in (None, z):
        spread = kernels.Method(method, mesh=mesh)
        ours = kernels.empirical_ntk(net, params, x, other, outputs=outputs, method=spread)
        alone = kernels.empirical_ntk(net, params, x, other, outputs=outputs, method=method)
        np.testing.assert_allclose(ours, alone, rtol=1e-11, atol=1e-12)
whole = kernels.empirical_ntk(net, params, x[:8], method=over)
assert len(whole.sharding.device_set) == 4
explicit = jax.make_mesh((4,), ("rows",))
ours = kernels.empirical_ntk(net, params, x[:8], method=kernels.Method(mesh=explicit))
np.testing.assert_allclose(ours, whole, rtol=1e-11, atol=1e-12)
center = kernels.Normalized(lambda p, x, m: net(p, x) - m[None], lambda p, x: jnp.mean(net(p, x), 0), jnp.ones(2))
for stats in ("frozen", "running"):
    ours = kernels.empirical_ntk(center, params, x, z, stats=stats, method=over)
    np.testing.assert_allclose(ours, kernels.empirical_ntk(center, params, x, z, stats=stats), rtol=1e-11, atol=1e-12)
try:
    kernels.empirical_ntk(center, params, x, stats="batch", method=over)
except ValueError as error:
    print("refused" if "depend on each other" in str(error) else error)
"""


def test_rows_over_four_devices():
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-c", DEVICES], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "refused"
