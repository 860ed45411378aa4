"""The file that explains the equation without this package computes what this package computes."""

import importlib.util
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meanflow as mf

PLACE = pathlib.Path(__file__).parent.parent.parent / "docs" / "plain_jax.py"
spec = importlib.util.spec_from_file_location("plain_jax", PLACE)
one = importlib.util.module_from_spec(spec)
spec.loader.exec_module(one)


def test_it_needs_nothing_but_jax():
    code = f"import sys, runpy; runpy.run_path({str(PLACE)!r}); print('meanflow' in sys.modules, 'jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
    assert len(PLACE.read_text().splitlines()) < 160


@pytest.mark.parametrize("name", ["plain", "batch norm"])
def test_the_package_gives_the_same_numbers(name, key):
    kx, ka, kb = jax.random.split(key, 3)
    x = jax.random.normal(kx, (12, 2)) * jnp.array([[2.2, 1.0]]) + 0.5
    data = mf.Dataset(x, jnp.sin(x[:, 0]))
    p = jnp.full(8, 1 / 8)
    a, b = jax.random.normal(ka, (8,)), jax.random.normal(kb, (8, 2))
    if name == "plain":
        flow, feature, cometric = mf.vanilla("tanh"), one.plain, one.flat
    else:
        flow = mf.batchnorm_manifold("tanh").bind(data)
        feature, cometric = one.normalized(x.mean(0), jnp.cov(x.T, bias=True), length=1.5)
        b = one.on_the_ellipsoid(b, jnp.cov(x.T, bias=True))
    cloud = mf.Cloud(mf.Neurons(a, b), labels=None if name == "plain" else 1.5)
    inputs, given = ((a, b), p, x), (x, data.y)
    close = lambda u, v: np.testing.assert_allclose(u, v, rtol=1e-11, atol=1e-13)  # noqa: E731
    close(one.predict(feature, *inputs), mf.predict(flow, cloud, x))
    close(one.energy(feature, (a, b), p, *given), mf.energy(flow, cloud, data))
    moved = one.velocity(feature, cometric, (a, b), p, *given)
    jax.tree.map(close, moved, tuple(mf.velocity(flow, cloud, data)))
    close(one.dissipation(feature, cometric, (a, b), p, *given), mf.dissipation(flow, cloud, data))
    close(one.kernel(feature, cometric, *inputs), mf.tangent_kernel(flow, cloud, x))
    end, _ = one.solve(feature, cometric, (a, b), p, *given, 1.0, 100)
    run = mf.solve(flow, cloud, data, 1.0, step=mf.Adaptive(1e-9, 1e-11))
    np.testing.assert_allclose(end[1], run.final.particles.b, rtol=1e-7)
