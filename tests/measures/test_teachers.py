"""Teachers against their definitions and moments; alignment of neurons that have found them and that have not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meanflow as mf
from meanflow.measures import teachers


def test_targets_by_definition(key):
    x = np.asarray(jax.random.normal(key, (50, 6)))
    u = teachers.single_index(6, "hermite3", key=key).directions
    z = x @ np.asarray(u[0])
    found = teachers.single_index(6, "hermite3", key=key)(x)
    np.testing.assert_allclose(found, (z**3 - 3 * z) / np.sqrt(6), rtol=1e-10, atol=1e-12)
    many = teachers.multi_index(6, 3, "hermite2", key=key)
    np.testing.assert_allclose(many.directions @ many.directions.T, np.eye(3), atol=1e-14)
    square = (x @ np.asarray(many.directions).T) ** 2
    np.testing.assert_allclose(many(x), np.sum(square - 1, axis=1) / np.sqrt(6), rtol=1e-10)
    signs = np.sign(x)
    np.testing.assert_array_equal(teachers.parity(6, 3)(signs), signs[:, 0] * signs[:, 1] * signs[:, 2])
    steps = signs[:, 0] * (1 + signs[:, 1] * (1 + signs[:, 2])) / np.sqrt(3)
    np.testing.assert_allclose(teachers.staircase(6, 3)(signs), steps, atol=1e-15)


@pytest.mark.parametrize("link", ["linear", "hermite2", "hermite3", "hermite4"])
def test_hermite_links_are_orthonormal(link):
    """By Gauss-Hermite quadrature, exact for these degrees."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(12)
    weights = weights / weights.sum()
    values = {
        name: np.asarray(teachers.LINKS[name](jnp.asarray(nodes))) for name in (link, "hermite2", "linear")
    }
    for name, other in values.items():
        np.testing.assert_allclose(weights @ (values[link] * other), float(name == link), atol=1e-10)
    np.testing.assert_allclose(weights @ values[link], 0.0, atol=1e-12)


def test_draws_are_nested_and_noisy(key):
    teacher = teachers.single_index(4, "tanh", key=key)
    small, large = teacher.draw(key, 5), teacher.draw(key, 4000, noise=0.5)
    np.testing.assert_array_equal(small.x, large.x[:5])
    gap = np.asarray(large.y - teacher(large.x))
    assert abs(gap.std() - 0.5) < 0.03
    np.testing.assert_array_equal(small.y, teacher(small.x))
    with pytest.raises(ValueError, match="at most dim = 4, got 5"):
        teachers.parity(4, 5)


def test_alignment_is_one_in_the_span_and_k_over_d_at_random(key):
    teacher = teachers.multi_index(10, 2, key=key)
    data = teacher.draw(key, 20)
    flow = mf.vanilla("tanh")
    watch = {"alignment": mf.flows.alignment(teacher.directions)}
    wide = flow.init(key, 4000, dim=10)
    b = jax.random.normal(key, (4000, 2)) @ teacher.directions
    for cloud, expected, width in ((wide, 0.2, 0.02), (wide.at(mf.Neurons(wide.particles.a, b)), 1.0, 1e-12)):
        seen = mf.descend(flow, cloud, data, 1, step=0.1, observe=watch).observed["alignment"]
        assert abs(float(seen["subspace"][0]) - expected) < width
        np.testing.assert_allclose(seen["direction"].sum(-1), seen["subspace"], rtol=1e-12)
    f = mf.predict(flow, wide.at(mf.Neurons(wide.particles.a, b)), data.x)
    np.testing.assert_allclose(
        seen["target"][0], f @ data.y / (jnp.linalg.norm(f) * jnp.linalg.norm(data.y)), rtol=1e-10
    )


@pytest.mark.bad_input
def test_links_and_directions_are_checked():
    with pytest.raises(ValueError, match=r"values of link must have shape \(4,\), got shape \(4, 2\)"):
        teachers.multi_index(3, 2, lambda z: z)(jnp.ones((4, 3)))
    with pytest.raises(ValueError, match="directions must have orthonormal rows"):
        teachers.Teacher(jnp.ones((2, 3)), lambda z: z[:, 0], "normal")
