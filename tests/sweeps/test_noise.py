"""Noise in sweeps: a cell runs as it does alone, whatever its neighbors, its padding and the devices."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meanflow as mf

X = jax.random.normal(jax.random.key(0), (12, 2))
DATA = mf.Dataset(X, jnp.tanh(X[:, 0]))
GRID = {"widths": [3, 5], "seeds": 2, "steps": 3, "step": 0.1, "observe": ["predictions"], "key": 4}


def test_a_noisy_cell_runs_as_it_does_alone(quick_compilation):
    plan = mf.sweep(
        mf.vanilla("tanh"),
        DATA,
        axes={"temperature": [0.05, 0.2]},
        dynamics=lambda temperature: mf.solvers.Noise(temperature),
        execution=mf.sweeps.Execution(waste=0.9),
        compute=False,
        **GRID,
    )
    assert len(plan.groups) == 1  # both widths in one program: the smaller one is padded
    found = plan.values()["predictions"]
    for place, (width, tau, seed) in {(0, 1, 1): (3, 0.2, 1), (1, 0, 0): (5, 0.05, 0)}.items():
        alone = plan.single(width=width, temperature=tau, seed=seed)
        index = tuple(
            dict(zip(("width", "temperature", "seed"), place, strict=True))[n] for n in plan.grid.axes
        )
        np.testing.assert_allclose(found[index][-1], alone.observed["predictions"][-1], rtol=1e-12)
    assert len(np.unique(np.asarray(found)[..., -1, 0])) == 8


SHARDED = """
import jax
jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp, numpy as np, meanflow as mf
from jax.sharding import NamedSharding, PartitionSpec
x = jax.random.normal(jax.random.key(0), (12, 2))
data, flow = mf.Dataset(x, jnp.tanh(x[:, 0])), mf.vanilla("tanh")
cloud = flow.init(jax.random.key(1), 8, dim=2)
run = lambda c: mf.descend(flow, c, data, 3, step=0.1, dynamics=mf.solvers.Noise(0.2, jax.random.key(2)), throw=False).final
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
