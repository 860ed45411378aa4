"""Derivatives of kernels in the parameters, where batch norm and kinks meet."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meanflow import kernels

ROWS, COLUMNS, WIDTH = 6, 4, 8


def draw(number, *shape):
    return jnp.asarray(np.random.default_rng(number).normal(size=shape))


X, Z = draw(0, ROWS, 3), draw(1, COLUMNS, 3)
PARAMS = {"a": draw(2, 3, WIDTH), "g": draw(3, WIDTH), "c": draw(4, WIDTH, WIDTH) / 3, "v": draw(5, WIDTH, 2)}
DIRECTION = {name: draw(10 + i, *value.shape) for i, (name, value) in enumerate(PARAMS.items())}


def moments(h):
    return jnp.mean(h, 0), jnp.var(h, 0)


def scaled(h, statistics):
    mean, variance = statistics
    return (h - mean[None]) / jnp.sqrt(variance + 1e-3)[None]


def preactivations(p, x, statistics):
    """Two hidden layers, batch norm before each ReLU."""
    first = scaled(x @ p["a"], statistics[0]) * p["g"][None]
    return first, scaled(jax.nn.relu(first) @ p["c"], statistics[1])


def statistics(p, x):
    one = moments(x @ p["a"])
    h = jax.nn.relu(scaled(x @ p["a"], one) * p["g"][None])
    return one, moments(h @ p["c"])


def outputs(p, x, statistics):
    return jax.nn.relu(preactivations(p, x, statistics)[1]) @ p["v"]


def moved(step):
    return {name: value + step * DIRECTION[name] for name, value in PARAMS.items()}


def signs(p):
    held = statistics(p, X)
    at_z = [*preactivations(p, Z, held), *preactivations(p, Z, statistics(p, Z))]
    return np.concatenate([np.sign(a).ravel() for a in (*preactivations(p, X, held), *at_z)])


def explicit(stats, p):
    """K(x, z), summed over outputs, of Jacobians written out for each meaning of the statistics."""
    held = statistics(p, X)
    maps = {
        "batch": (lambda q: outputs(q, X, statistics(q, X)), lambda q: outputs(q, Z, statistics(q, Z))),
        "train": (lambda q: outputs(q, X, statistics(q, X)), lambda q: outputs(q, Z, statistics(q, X))),
        "frozen": (lambda q: outputs(q, X, held), lambda q: outputs(q, Z, held)),
    }[stats]
    left, right = (jax.tree.leaves(jax.jacrev(f)(p)) for f in maps)
    flat = lambda j: j.reshape(*j.shape[:2], -1)
    return sum(jnp.einsum("tcm,scm->ts", flat(a), flat(b)) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("stats", ["batch", "train", "frozen"])
@pytest.mark.parametrize("method", ["structured", "products"])
def test_batch_norm_before_kinks(stats, method):
    """No neuron changes sides between the two points of the differences, so that they see what derivatives see.

    The statistics move with the parameters, frozen ones too: no gradient of the outputs goes through those, but the
    kernel is taken at the statistics that the network has at its parameters.
    """
    step = 1e-5
    assert np.array_equal(signs(moved(-step)), signs(moved(step)))
    assert np.min(np.abs(signs(PARAMS))) == 1
    network = kernels.Normalized(outputs, statistics)
    ours = lambda p: kernels.empirical_ntk(network, p, X, Z, outputs="trace", stats=stats, method=method)
    exact = explicit(stats, PARAMS)
    np.testing.assert_allclose(ours(PARAMS), exact, rtol=1e-10, atol=1e-10 * np.abs(exact).max())
    slope = (explicit(stats, moved(step)) - explicit(stats, moved(-step))) / (2 * step)
    small = 1e-7 * np.abs(slope).max()
    _, forward = jax.jvp(ours, (PARAMS,), (DIRECTION,))
    np.testing.assert_allclose(forward, slope, rtol=1e-6, atol=small)
    weights = draw(8, ROWS, COLUMNS)
    slopes = jax.grad(lambda p: jnp.sum(weights * ours(p)))(PARAMS)
    along = sum(jnp.vdot(slopes[name], DIRECTION[name]) for name in PARAMS)
    np.testing.assert_allclose(along, np.sum(weights * slope), rtol=1e-6, atol=small)
