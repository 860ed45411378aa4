"""Noise does not depend on how the particles are split over devices."""

import os
import pathlib
import subprocess
import sys

import pytest

SHARDED = """
import jax
jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp, numpy as np, meanflow as mf
from jax.sharding import NamedSharding, PartitionSpec
x = jax.random.normal(jax.random.key(0), (12, 2))
data, flow = mf.Dataset(x, jnp.tanh(x[:, 0])), mf.vanilla("tanh")
cloud = flow.init(jax.random.key(1), 8, dim=2)
noise = mf.solvers.Noise(0.2, jax.random.key(2))
run = lambda c: mf.descend(flow, c, data, 3, step=0.1, dynamics=noise, throw=False).final
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("p",))
split = jax.tree.map(lambda u: jax.device_put(u, NamedSharding(mesh, PartitionSpec("p" if u.ndim else None)))
                     if u.ndim else u, cloud)
one, four = run(cloud), jax.jit(run)(split)
assert len(four.particles.b.sharding.device_set) == 4
assert np.allclose(one.particles.b, four.particles.b, rtol=0, atol=1e-13)
"""


@pytest.mark.slow
def test_noise_is_the_same_when_particles_are_split_over_devices():
    root = pathlib.Path(__file__).parents[2]
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SHARDED],
        env=os.environ | flags | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
