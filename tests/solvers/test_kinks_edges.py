"""Where the sliding solver for vector inputs has to decide within rounding: grazing, several planes at once, b = 0."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meanflow as mf
from meanflow.flows._kinks import contacts, passage, planes

frozen = lambda f, y: f * y  # a linear loss freezes the residual at y
# two planes that catch the neuron, and one sample for each half of the line on which they meet
CORNER = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [-0.3, -0.3, 1.0], [0.2, 0.1, -1.0]])
DTYPES = (np.float32, np.float64)


def corner(a, b, r, t1, dtype=np.float64, step=0.25):
    """One neuron in the frozen field of residuals r at CORNER; all cases share a program."""
    cloud = mf.Cloud(mf.Neurons(np.array([a], dtype), np.array([b], dtype)))
    data = mf.Dataset(CORNER.astype(dtype), np.array(r, dtype), weights="sum")
    sol = mf.solve(mf.vanilla(loss=frozen), cloud, data, t1, solver="sliding", step=step)
    assert bool(sol.ok)
    return (
        float(sol.final.particles.a[0]),
        np.asarray(sol.final.particles.b[0], float),
        {k: int(v) for k, v in sol.stats.items()},
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_planes_met_at_the_same_time(dtype):
    """By symmetry both planes are met at once; the neuron is caught on both, and then moves along their line."""
    a0, b0, r = 1.0, np.array([0.25, 0.25, 0.5]), np.array([1.0, 1.0, 0.5, 0.0])
    g = r[:3] @ CORNER[:3]
    # in the first cell: a and the component along g are hyperbolic functions of time (one plane: b_1 = 0)
    length = np.linalg.norm(g)
    along = b0 @ g / length
    path = lambda t: a0 * np.cosh(length * t) - along * np.sinh(length * t)
    shift = lambda t: along * np.cosh(length * t) - a0 * np.sinh(length * t) - along
    times = np.linspace(0, 1, 2_000_001)
    hit = times[np.argmax(b0[0] + shift(times) * g[0] / length <= 0)]
    a1, height = path(hit), b0[2] + shift(hit) * g[2] / length
    # then on the line: the force is its component r_3 along the third axis
    late = 0.75 - hit
    a2 = a1 * np.cosh(r[2] * late) - height * np.sinh(r[2] * late)
    end = height * np.cosh(r[2] * late) - a1 * np.sinh(r[2] * late)
    a, b, stats = corner(a0, b0, r, 0.75, dtype)
    small = 1e-6 if dtype == np.float64 else 1e-5
    np.testing.assert_allclose([a, b[2]], [a2, end], atol=small)
    np.testing.assert_allclose(b[:2], 0.0, atol=np.finfo(dtype).eps)
    assert (stats["captures"], stats["planes"], stats["crossings"], stats["nonunique"]) == (2, 2, 0, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_b_zero_goes_on_along_the_opposite_ray_where_the_forces_drive_it_outward(dtype):
    """On two planes in d = 3: b_3 = s cosh - a sinh until it is 0 at tanh(r t) = s/a, then -a' sinh beyond."""
    a0, s0, r, rate = 1.0, 0.25, 0.5, 0.75
    a, b, stats = corner(a0, [0.0, 0.0, s0], [1.0, 1.0, r, -rate], 2.0, dtype)
    zero, left = np.arctanh(s0 / a0) / r, np.sqrt(a0**2 - s0**2)
    expected = [left * np.cosh(rate * (2.0 - zero)), -left * np.sinh(rate * (2.0 - zero))]
    np.testing.assert_allclose([a, b[2]], expected, rtol=1e-12 if dtype == np.float64 else 1e-5)
    np.testing.assert_array_equal(b[:2], 0.0)
    assert (stats["nonunique"], stats["sliding"], stats["deaths"]) == (1, 1, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_b_zero_is_the_end_where_the_forces_beyond_push_back(dtype):
    a, b, stats = corner(1.0, [0.0, 0.0, 0.25], [1.0, 1.0, 0.5, 0.75], 2.0, dtype)
    np.testing.assert_allclose(a, np.sqrt(1 - 0.25**2), rtol=1e-12 if dtype == np.float64 else 1e-6)
    np.testing.assert_array_equal(b, 0.0)
    assert (stats["nonunique"], stats["deaths"], stats["sliding"]) == (1, 1, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("came", [-1, 1])
def test_a_normal_speed_that_is_all_rounding_does_not_stop_the_clock(dtype, came):
    """A neuron on a plane whose normal force is a few units in the last place, of either sign: one event, then on."""
    normal = jnp.asarray(CORNER, dtype)
    for units in (-8, -1, 0, 1, 8):
        force = np.array([[units * np.finfo(dtype).eps, 0.0, 1.0]])
        zero = jnp.zeros(3, dtype)
        load = contacts.Forces(normal, jnp.zeros(4, dtype), zero, zero)
        b = jnp.asarray([[0.0, 0.5, 4.0]], dtype)
        z = (b @ normal.T).at[:, 0].set(0.0)
        here = contacts.Contacts(
            jnp.sign(z).astype(jnp.int8),
            jnp.asarray([[0, 4, 4]], jnp.int32),
            jnp.asarray([[came, 0, 0]], jnp.int8),
        )
        one = jnp.ones(1, dtype)
        moving = planes.Moving(one, b, jnp.asarray(force, dtype), jnp.full(1, 0.1, dtype))
        walkers = planes.Walkers(moving, z, here, jnp.zeros(1, bool))
        tables = contacts.Tables(jnp.ones(4, bool), jnp.asarray(True), None)
        end, _, _ = ADVANCE(passage.Task(walkers, passage.Rates(one, one, one > 0), load, tables))
        assert float(end.moving.left[0]) == 0.0, units
        assert abs(float(end.z[0, 0])) <= 8 * np.finfo(dtype).eps


ADVANCE = jax.jit(planes.advance)


def test_more_planes_than_a_neuron_can_sit_on_end_the_run_with_a_code():
    """Each axis catches the neuron, which the last sample pushes back; sixteen planes have room, seventeen do not."""
    axes, pushed = 17, 0.3
    x = np.eye(axes + 1)
    x[-1, :-1] = -pushed
    data = mf.Dataset(x, np.array([1.0] * axes + [0.5]), weights="sum")
    flow, ends = mf.vanilla(loss=frozen), {}
    for beyond in (-1.0, 0.2):  # a neuron far behind the first plane never meets it
        b = np.array([beyond, *np.linspace(0.1, 0.3, axes - 1), 5.0])
        cloud = mf.Cloud(mf.Neurons(np.array([10.0]), b[None]))
        ends[beyond] = mf.solve(flow, cloud, data, 0.1, solver="sliding", step=0.1, throw=False)
    assert bool(ends[-1.0].ok) and int(ends[-1.0].stats["planes"]) == axes - 1
    np.testing.assert_allclose(ends[-1.0].final.particles.b[0, 1:-1], 0.0, atol=1e-15)
    assert ends[0.2].result == mf.RESULTS.event_overflow
