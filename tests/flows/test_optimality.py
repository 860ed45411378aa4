"""Certificates of global optimality against scans, convex programs over all cells and trained networks."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ring
from scipy.optimize import LinearConstraint, minimize

import meanflow as mf
from meanflow import activations
from meanflow.flows import certificate, global_minimum
from meanflow.flows._sphere_maximum import Shape, Slopes, cover, stationary

RELU = Slopes(1.0, 0.0)


def decay(w):
    """Weight decay, whose least over balanced neurons is |a| |b|."""
    return (w.a**2 + jnp.sum(w.b**2, axis=1)) / 2


def variation(w):
    return jnp.abs(w.a) * jnp.linalg.norm(w.b, axis=1)


def random_directions(rng, count, d):
    u = rng.normal(size=(count, d))
    return u / np.linalg.norm(u, axis=1, keepdims=True)


def boxes(z, r, slopes, budget=100_000, tolerance=1e-5):
    """The same maximum by branch and bound, which knows nothing of cells."""
    jump = abs(slopes.plus - slopes.minus)
    shape = Shape(lambda t: t * slopes.at(t), slopes.at, 0.0, jump)
    return cover(z, r[:, None], shape, np.eye(z.shape[1]), budget, tolerance)


@pytest.mark.parametrize(("n", "d"), [(1, 1), (9, 2), (6, 3), (60, 3), (8, 4)])
@pytest.mark.parametrize("slopes", [RELU, Slopes(1.0, 0.01), Slopes(1.0, -1.0), Slopes(1.0, 1.0)])
def test_the_walk_through_all_faces_finds_the_maximum(n, d, slopes):
    """ReLU, leaky ReLU, abs and linear: above every scan, and between the bounds of branch and bound."""
    rng = np.random.default_rng(10 * n + d)
    z, r = rng.normal(size=(n, d)), rng.normal(size=n)
    found, other = stationary(z, r, slopes), boxes(z, r, slopes)
    t = random_directions(rng, 20_000, d) @ z.T
    assert found.bound >= np.abs((t * slopes.at(t)) @ r).max() and found.bound - found.values[0] < 1e-9
    assert other.values[0] <= found.bound and found.values[0] <= other.bound
    np.testing.assert_allclose(other.values[0], found.values[0], rtol=1e-3 if d > 3 else 2e-5)
    t = found.directions[0] @ z.T
    np.testing.assert_allclose(abs((t * slopes.at(t)) @ r), found.values[0], rtol=1e-12)


def test_samples_in_special_position():
    """A grid with a bias, whose hyperplanes meet many at a time; parallel, opposite and zero samples in a plane."""
    rng = np.random.default_rng(0)
    grid = np.array([(u, v, 1.0) for u in (-1, 0, 1) for v in (-1, 0, 1)])
    line = np.array([[1.0, 2.0, 0], [2.0, 4.0, 0], [-1.0, -2.0, 0], [0, 0, 0], [0.0, 1.0, 0]])
    for z in (grid, line):
        r = rng.normal(size=len(z))
        found, other = stationary(z, r, RELU), boxes(z, r, RELU)
        assert other.values[0] <= found.bound and found.values[0] <= other.bound
        np.testing.assert_allclose(other.values[0], found.values[0], rtol=2e-5)


@pytest.mark.parametrize("d", [2, 3, 5])
def test_boxes_bound_what_the_walk_finds(d):
    rng = np.random.default_rng(d)
    z, r = rng.normal(size=(12, d)), rng.normal(size=12)
    exact = stationary(z, r, RELU).values[0]
    for budget in (100, 100_000):
        found = boxes(z, r, RELU, budget, 1e-4)
        assert found.values[0] <= exact * (1 + 1e-12) and exact <= found.bound
    assert found.bound < exact * (1 + (2e-4 if d < 5 else 0.1)), found.bound / exact


def test_boxes_bound_a_smooth_force_of_two_outputs():
    rng = np.random.default_rng(4)
    z, r = rng.normal(size=(20, 3)), rng.normal(size=(20, 2))
    shape = Shape(np.tanh, lambda t: 1 / np.cosh(t) ** 2, 4 / 27**0.5, 0.0)
    found = cover(z, r, shape, np.eye(3), 100_000, 1e-6)
    scan = np.linalg.norm(np.tanh(random_directions(rng, 200_000, 3) @ z.T) @ r, axis=1).max()
    assert scan <= found.bound <= scan * (1 + 1e-3)
    assert found.bound - found.values[0] < 2e-6 * found.bound


def student_and_teacher():
    x = ring(48)
    flow = mf.batchnorm_manifold("tanh", mean=jnp.zeros(2), covariance=jnp.diag(jnp.array([5.0, 1.0])))
    turn = np.array([0.4, 1.9, 4.0])
    teacher = flow.space.from_raw(
        mf.Cloud(mf.Neurons(jnp.array([3.0, -3.0, 2.0]), jnp.asarray(np.c_[np.cos(turn), np.sin(turn)])))
    )
    return flow, teacher, mf.Dataset(x, mf.predict(flow, teacher, x))


def test_the_force_vanishes_at_the_teacher_only():
    flow, teacher, data = student_and_teacher()
    at_teacher = certificate(flow, teacher, data)
    assert at_teacher.bound < 1e-14 and at_teacher.optimal()
    other = teacher.at(mf.Neurons(0.5 * teacher.particles.a, teacher.particles.b))
    found = certificate(flow, other, data)
    # against a direct maximization over the angle
    turn = np.linspace(0, 2 * np.pi, 40_001)
    b = np.c_[np.cos(turn), np.sin(turn)]
    bb = b / np.sqrt(np.sum(b**2 * [5.0, 1.0], axis=1))[:, None]
    residual = np.asarray(mf.predict(flow, other, data.x) - data.y) / 48
    exact = np.abs(residual @ np.tanh(np.asarray(data.x) @ bb.T)).max()
    assert abs(found.value / exact - 1) < 2e-6 and exact <= found.bound < exact * (1 + 3e-6)
    raw = mf.batchnorm("tanh", mean=flow.feature.mean, covariance=flow.feature.covariance)
    again = certificate(raw, mf.geometry.lift(other), data)
    np.testing.assert_allclose(again[:4], found[:4], rtol=1e-5)
    # the minimum is 0: the gap is the energy
    energy = float(mf.energy(flow, other, data))
    assert found.lower <= energy == found.upper and found.lower > 0.1 * energy and not found.optimal()


def small_problem(d, bias, n=6, seed=0):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(n, d)), rng.normal(size=n)
    return mf.Dataset(x, y), np.c_[x, np.ones(n)] if bias else x


def program_over_cells(z, y, lam):
    """The minimum by a convex program: in each cell two vectors, of charge v and -v, that stay in the cell."""
    n, d = z.shape
    patterns = {tuple(p) for p in np.random.default_rng(1).normal(size=(200_000, d)) @ z.T > 0}
    cells = [2.0 * np.array(p) - 1 for p in sorted(patterns)]
    maps = np.concatenate([np.where(c > 0, 1.0, 0.0)[:, None] * z for c in cells], axis=1)
    size = d * len(cells)
    inside = np.zeros((n * len(cells), size))
    for k, c in enumerate(cells):
        inside[n * k : n * (k + 1), d * k : d * (k + 1)] = c[:, None] * z
    both = np.block([[inside, np.zeros_like(inside)], [np.zeros_like(inside), inside]])

    def energy(v):
        gap = maps @ (v[:size] - v[size:]) - y
        length = np.sqrt(np.sum(v.reshape(-1, d) ** 2, axis=1) + 1e-14)  # smooth where a vector vanishes
        slope = (
            np.concatenate([gap @ maps, -gap @ maps]) / n + lam * (v.reshape(-1, d) / length[:, None]).ravel()
        )
        return gap @ gap / n / 2 + lam * length.sum(), slope

    found = minimize(
        energy,
        np.full(2 * size, 1e-3),
        jac=True,
        method="SLSQP",
        constraints=LinearConstraint(both, 0, np.inf),
        options={"maxiter": 600, "ftol": 1e-13},
    )
    return found.fun, len(cells)


@pytest.mark.parametrize(("d", "bias", "n"), [(1, True, 7), (2, False, 7), (2, True, 4), (3, False, 4)])
def test_the_global_minimum_is_that_of_a_program_over_all_cells(d, bias, n):
    data, z = small_problem(d, bias, n)
    expected, cells = program_over_cells(z, np.asarray(data.y), 0.05)
    assert cells == 2 * sum(np.prod(range(n - i, n)) // np.prod(range(1, i + 1)) for i in range(z.shape[1]))
    flow = mf.vanilla("relu", bias=bias, penalty=(decay, 0.05))
    found = global_minimum(flow, data)
    np.testing.assert_allclose(found.value, expected, rtol=1e-5)
    assert found.value <= expected * (1 + 1e-9) and found.value - found.bound < 1e-9
    np.testing.assert_allclose(mf.energy(flow, found.cloud, data), found.value, rtol=1e-12)
    assert certificate(flow, found.cloud, data).optimal(1e-8)


@pytest.mark.parametrize("model", ["leaky", "batchnorm", "sphere"])
def test_minima_of_other_models_are_certified(model):
    """The energy of the cloud is the value, no random neuron improves on it, and the bound is met."""
    rng = np.random.default_rng(7)
    data = mf.Dataset(rng.normal(size=(30, 2)), rng.normal(size=30))
    flow = {
        "leaky": mf.vanilla("leaky_relu", penalty=(variation, 0.02)),
        "batchnorm": mf.batchnorm_manifold("relu", penalty=(lambda w: jnp.abs(w.a), 0.02)).bind(data),
        "sphere": mf.vanilla("relu", inner="sphere", penalty=(lambda w: jnp.ones_like(w.a), 0.02)),
    }[model]
    found = global_minimum(flow, data)
    np.testing.assert_allclose(mf.energy(flow, found.cloud, data), found.value, rtol=1e-10)
    assert found.value - found.bound < 1e-9 * found.value
    units = flow.space.from_raw(
        mf.Cloud(mf.Neurons(jnp.ones(2000), jnp.asarray(random_directions(rng, 2000, 2))))
    )
    for a in (1.0, -1.0):
        probes = units.at(units.particles._replace(a=jnp.full(2000, a)))
        assert float(mf.first_variation(flow, found.cloud, data, probes).min()) > -1e-9


def test_a_penalty_of_0_means_the_least_charge_that_fits():
    """The limit of small penalties; of two samples on a line the charge is known."""
    data = mf.Dataset(jnp.array([[1.0], [2.0]]), jnp.array([1.0, 2.0]))
    found = global_minimum(mf.vanilla("relu", penalty=(variation, 0.0)), data)
    np.testing.assert_allclose([found.value, found.bound, found.force], [1.0, 1.0, 1.0], rtol=1e-8)
    np.testing.assert_allclose(mf.predict(mf.vanilla("relu"), found.cloud, data.x), data.y, rtol=1e-8)


def trained(loss="squared"):
    """A wide network of two fine layers, trained by descent with weight decay."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(20, 2))
    y = np.abs(x[:, 0]) - 0.5
    data = mf.Dataset(x, np.sign(y) if loss == "logistic" else y)
    flow = mf.vanilla("relu", loss, penalty=(decay, 0.02))
    turn = 2 * np.pi * np.arange(100) / 100
    b = np.tile(np.c_[np.cos(turn), np.sin(turn)], (2, 1))
    cloud = mf.Cloud(mf.Neurons(np.repeat([0.5, -0.5], 100), 0.5 * b))
    run = mf.descend(flow, cloud, data, 3000, step=0.2)
    return flow, cloud, run, data


def test_a_trained_network_ends_within_its_gap():
    flow, cloud, run, data = trained()
    least = global_minimum(flow, data)
    gap = float(run.energy[-1]) - least.value
    found = certificate(flow, run.final, data)
    assert 0 <= found.lower <= gap + 1e-9 and gap <= found.upper + 1e-9
    assert found.upper < 0.01 * least.value
    before = certificate(flow, cloud, data)
    gap = float(mf.energy(flow, cloud, data)) - least.value
    assert 0.3 * gap < before.lower <= gap <= before.upper < 3 * gap


def test_a_logistic_loss_has_bounds_too():
    flow, cloud, run, data = trained("logistic")
    first, last = (certificate(flow, network, data) for network in (cloud, run.final))
    assert 0 <= last.lower <= last.upper < 0.02 * float(run.energy[-1])
    # any network is above the lower bound that another one gives
    fall = float(mf.energy(flow, cloud, data) - run.energy[-1])
    assert fall <= first.upper and first.lower <= fall + last.upper


def test_an_arc_on_which_neurons_get_stuck_has_a_gap_that_says_so():
    x = ring(32)
    student = mf.batchnorm_manifold(
        activations.softplus(4.0), covariance=np.diag([5.0, 1.0]), mean=np.zeros(2)
    )
    circle = lambda turn: jnp.stack([jnp.cos(turn), jnp.sin(turn)], axis=1)
    teacher = mf.Neurons(3.0 * jnp.array([1.0, -1.0, 1.5]), circle(jnp.array([0.4, 1.9, 4.0])))
    data = mf.Dataset(x, mf.predict(student, student.space.from_raw(mf.Cloud(teacher)), x))
    alone = student.space.from_raw(mf.Cloud(mf.Neurons(jnp.zeros(32), circle(jnp.linspace(0.0, 0.5, 32)))))
    stuck = mf.descend(student, alone, data, 4000, step=0.05)
    found, energy = certificate(student, stuck.final, data), float(stuck.energy[-1])
    assert energy > 0.1 and found.value > 0.2 and found.bound < found.value * (1 + 3e-6)
    assert 0.2 * energy < found.lower <= energy == found.upper and not found.optimal()


def test_where_nothing_is_known_the_bound_is_infinite():
    rng = np.random.default_rng(8)
    data = mf.Dataset(rng.normal(size=(10, 3)), rng.normal(size=10))
    flow = mf.vanilla("tanh")
    cloud = mf.Cloud(mf.Neurons(rng.normal(size=4), rng.normal(size=(4, 3))))
    found = certificate(flow, cloud, data)
    assert found.bound == np.inf and 0 < found.lower <= found.upper == float(mf.energy(flow, cloud, data))
    # many dimensions: the budget ends the search, and the bound says how far it got
    wide = mf.Dataset(rng.normal(size=(30, 12)), rng.normal(size=30))
    relu = mf.vanilla("relu", penalty=(decay, 0.1))
    cloud = mf.Cloud(mf.Neurons(rng.normal(size=4), rng.normal(size=(4, 12))))
    bounds = [certificate(relu, cloud, wide, budget=budget).bound for budget in (50, 5000)]
    assert certificate(relu, cloud, wide).value < bounds[1] <= bounds[0] < np.inf


def test_what_has_no_certificate_is_refused():
    data = mf.Dataset(jnp.eye(2), jnp.ones(2))
    cloud = mf.Cloud(mf.Neurons(jnp.ones(1), jnp.ones((1, 2))))
    square = lambda w: w.a**2
    one_sided = lambda w: jnp.maximum(w.a, 0.0) * jnp.linalg.norm(w.b, axis=1)
    root = lambda w: jnp.sqrt(variation(w))
    for penalty in (square, root, one_sided, lambda w: jnp.abs(w.a) * jnp.abs(w.b[:, 0])):
        with pytest.raises(ValueError, match="penalty must"):
            certificate(mf.vanilla("relu", penalty=(penalty, 0.1)), cloud, data)
    with pytest.raises(ValueError, match="not centered"):
        certificate(mf.vanilla("relu", centered=True).begin(cloud), cloud, data)
    with pytest.raises(ValueError, match="have no scale and shift"):
        affine = mf.batchnorm("relu", affine=True, mean=np.zeros(2), covariance=np.eye(2))
        global_minimum(mf.flows.make_flow(affine.feature, affine.space, penalty=(square, 0.1)), data)
    with pytest.raises(ValueError, match="positively homogeneous"):
        global_minimum(mf.vanilla("tanh", penalty=(variation, 0.1)), data)
    with pytest.raises(ValueError, match="needs loss='squared'"):
        global_minimum(mf.vanilla("relu"), data)
