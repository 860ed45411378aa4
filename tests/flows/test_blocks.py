"""Neurons treated block by block give the numbers of all neurons at once, and need memory for one block only."""

import os
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import MODELS, largest_gap, problem

import meanflow as mf
from meanflow.flows import _blocks as blocks
from meanflow.flows import _equation as equation
from meanflow.flows import _features as features


def _everything(flow, cloud, data, probe):
    """Return what the equation computes by going through the neurons, and derivatives of it."""
    v = jnp.cos(jnp.arange(data.size * 1.0))

    def loss(y):
        there = mf.Dataset(data.x, y, data.weights)
        moved = jax.tree.map(jnp.add, cloud.particles, equation.velocity(flow, cloud, there))
        return equation.energy(flow, cloud.at(moved), there)

    return {
        "predictions": equation.predict(flow, cloud, data.x),
        "velocity": equation.velocity(flow, cloud, data),
        "dissipation": equation.dissipation(flow, cloud, data, 0.5),
        "variation": equation.first_variation(flow, cloud, data, probe),
        "kernel": equation.kernel_operator(flow, cloud, data.x, data.x)(v),
        "gradient": jax.grad(loss)(data.y),
        "curvature": jax.jvp(jax.grad(loss), (data.y,), (v,))[1],
    }


@pytest.mark.parametrize(("model", "devices"), [*((model, 1) for model in MODELS), (next(iter(MODELS)), 2)])
def test_blocks_change_nothing(model, devices, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: devices)  # which decides how blocks are cut
    flow, cloud, data = problem(model)
    cloud = cloud.pad(cloud.size + 3)  # padding, and a size that the number of blocks does not divide
    whole = jax.jit(_everything)(flow, cloud, data, cloud)
    monkeypatch.setattr(features, "CACHED", data.size)
    monkeypatch.setattr(features, "BLOCK", data.size * 4)
    count = flow.feature.blocks(cloud, data.x)
    assert count > 2 and cloud.size % count
    parts = jax.jit(lambda *args: _everything(*args))(flow, cloud, data, cloud)
    for name, value in whole.items():
        scale = largest_gap(value, jax.tree.map(jnp.zeros_like, value))
        assert largest_gap(value, parts[name]) < 1e-12 * (1 + scale), name


@pytest.mark.parametrize("devices", [1, 2])
def test_blocks_of_vector_outputs_and_labels(devices, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (12, 3))
    flow = mf.vanilla("tanh", loss="softmax")
    data = mf.Dataset(x, jnp.arange(12) % 4)
    cloud = flow.init(keys[1], 10, dim=3, outputs=4)
    whole = equation.velocity(flow, cloud, data)
    monkeypatch.setattr(features, "CACHED", 12)
    monkeypatch.setattr(features, "BLOCK", 24)
    assert flow.feature.blocks(cloud, x) == 5
    assert largest_gap(whole, equation.velocity(flow, cloud, data)) < 1e-13
    labelled = mf.Cloud(cloud.particles, labels=np.arange(10.0))
    split = blocks._split(labelled, 3)
    chex.assert_shape([split.labels, split.weights], (3, 4))
    order = "F" if devices > 1 else "C"  # with several devices a block takes every third row
    np.testing.assert_array_equal(np.ravel(split.labels, order)[:10], np.arange(10.0))
    np.testing.assert_allclose(np.ravel(split.weights, order), [0.1] * 10 + [0.0] * 2)


def test_large_networks_need_memory_for_one_block_only():
    width, count, dim = 10**6, 1000, 10
    flow = mf.vanilla("tanh")
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    cloud = jax.eval_shape(
        lambda a, b: mf.Cloud(mf.Neurons(a, b), width=width), shape(width), shape(width, dim)
    )
    data = jax.eval_shape(mf.Dataset, shape(count, dim), shape(count))
    run = jax.jit(lambda cloud, data: mf.descend(flow, cloud, data, 10, step=0.1, clock="mean_field").energy)
    planned = run.lower(cloud, data).compile().memory_analysis().temp_size_in_bytes
    # particles and velocities are 44 MB each, one array over all samples and neurons would be 4000 MB
    assert planned < 110e6


SPREAD = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import meanflow as mf
from meanflow.flows import _equation as equation, _features as features

features.CACHED, features.BLOCK = 512, 4096
mesh = jax.make_mesh((2,), ("particles",), axis_types=(jax.sharding.AxisType.Auto,))
x = jax.random.normal(jax.random.key(0), (64, 5))
flow, data = mf.vanilla("tanh"), mf.Dataset(x, jnp.sin(x[:, 0]))
cloud = flow.init(jax.random.key(1), 512, dim=5)
assert flow.feature.blocks(cloud, x) == 8
place = lambda u: NamedSharding(mesh, PartitionSpec("particles") if u.ndim else PartitionSpec())
cloud = jax.tree.map(lambda u: jax.device_put(u, place(u)), cloud)
text = jax.jit(lambda c: equation.velocity(flow, c, data)).lower(cloud).compile().as_text()
print(text.count(" all-gather("), text.count(" all-reduce("))
"""


def test_blocks_of_a_spread_cloud_stay_where_they_are():
    """Two devices with half of the particles each: one sum of predictions, and no particle leaves its device."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SPREAD], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    gathers, sums = map(int, done.stdout.split())
    assert gathers == 0 and sums == 1
