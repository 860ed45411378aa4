"""The separation checker of Theorem 5 of the manifold paper."""

import jax.numpy as jnp
import numpy as np
import pytest

import meanflow as mf
from meanflow_papers.manifold.separation import separates


def test_separation_in_the_plane_and_in_space():
    turn = 2 * np.pi * np.arange(64) / 64
    wave = mf.Cloud(
        mf.Neurons(jnp.asarray(0.5 * np.sin(turn)), jnp.asarray(np.c_[np.cos(turn), np.sin(turn)]))
    )
    assert separates(wave, 1.0, tolerance=0.15)
    half = mf.Cloud(mf.Neurons(wave.particles.a[:32], wave.particles.b[:32]))
    assert not separates(half, 1.0, tolerance=0.15)
    jump = mf.Cloud(mf.Neurons(jnp.asarray(np.where(turn < np.pi, 0.5, -0.5)), wave.particles.b))
    assert not separates(jump, 1.0, tolerance=0.15)  # two half circles at different heights leave gaps

    rng = np.random.default_rng(0)
    b = rng.normal(size=(600, 3))
    sphere = mf.Cloud(mf.Neurons(jnp.zeros(600), jnp.asarray(b)))
    cap = mf.Cloud(mf.Neurons(jnp.zeros(600), jnp.asarray(np.c_[b[:, :2], np.abs(b[:, 2]) + 0.1])))
    assert separates(sphere, 1.0, tolerance=0.5)
    assert not separates(cap, 1.0, tolerance=0.5)


def test_separation_is_about_one_output():
    cloud = mf.Cloud(mf.Neurons(jnp.ones((4, 2)), jnp.ones((4, 3))))
    with pytest.raises(ValueError, match="one output"):
        separates(cloud, 1.0, tolerance=0.1)
