"""Laws that every geometry of clouds obeys, in one place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import largest_gap, problem

import meanflow as mf
from meanflow.geometry import Space
from meanflow.measures import laws, sample
from meanflow.univariate._spaces import Cylinder


def spaces():
    _, flat, _ = problem("vanilla")
    curved, cloud, _ = problem("batchnorm_manifold", norms=(0.5, 2.0))
    polar = sample(jax.random.key(3), 7, mf.Polar, {"r": laws.uniform(), "theta": laws.angle()})
    return {"flat": (Space(), flat), "cylinder": (Cylinder(), polar), "manifold": (curved.space, cloud)}


NAMES = ["flat", "cylinder", "manifold"]


def tangent(space, cloud, seed, size=0.3):
    """A random tangent record: the image of a random covector under C."""
    rng = np.random.default_rng(seed)
    covector = jax.tree.map(lambda u: jnp.asarray(size * rng.normal(size=u.shape)), cloud.particles)
    return space.cometric(cloud, covector), covector


@pytest.mark.parametrize("name", NAMES)
def test_metric_and_inverse_metric_belong_together(name):
    space, cloud = spaces()[name]
    v, covector = tangent(space, cloud, 0)
    w, _ = tangent(space, cloud, 1)
    paired = sum(
        jnp.sum((g * u).reshape(7, -1), axis=1)
        for g, u in zip(jax.tree.leaves(covector), jax.tree.leaves(w), strict=True)
    )
    np.testing.assert_allclose(space.inner(cloud, v, w), paired, rtol=1e-10)
    np.testing.assert_allclose(space.inner(cloud, v, w), space.inner(cloud, w, v), rtol=1e-10)
    assert float(jnp.min(space.inner(cloud, v, v))) > 0


@pytest.mark.parametrize("name", NAMES)
def test_exp_log_distance_and_retraction(name):
    space, cloud = spaces()[name]
    v, _ = tangent(space, cloud, 2)
    end = space.exp(cloud, v)
    assert largest_gap(space.log(cloud, end), v) < 1e-11
    length = jnp.sqrt(space.inner(cloud, v, v))
    np.testing.assert_allclose(space.distance(cloud, end), length, rtol=1e-11)
    np.testing.assert_allclose(space.distance(cloud.at(end), cloud.particles), length, rtol=1e-11)
    np.testing.assert_allclose(space.distance(cloud, cloud.particles), 0, atol=1e-14)
    gaps = []
    for h in (0.1, 0.05):
        small = jax.tree.map(lambda u, h=h: h * u, v)
        there = cloud.at(space.exp(cloud, small))
        gaps.append(float(jnp.max(space.distance(there, space.retract(cloud, small)))))
    assert gaps[0] < 1e-12 or 7 < gaps[0] / gaps[1] < 9  # exact, or third-order local error


def test_the_cylinder_takes_the_short_way_round():
    here = mf.Cloud(mf.Polar(jnp.zeros(2), jnp.array([3.0, -3.0])))
    there = mf.Polar(jnp.zeros(2), jnp.array([-3.0, 3.0]))
    np.testing.assert_allclose(Cylinder().distance(here, there), 2 * np.pi - 6, rtol=1e-14)
