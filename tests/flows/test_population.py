"""Gaussian inputs without samples: closed expectations against quadrature, the committee machine, fresh samples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import largest_gap
from overlaps import energy, overlap_path, students

import meanflow as mf
from meanflow.activations import Stretched
from meanflow.flows import GaussianPopulation

SOFT = Stretched("erf", 0.5**0.5)


def trapezoid(count=121, span=9.0):
    """Nodes (count^2, 2) and weights for N(0, I) in the plane; for smooth integrands as exact as floating point."""
    nodes = np.linspace(-span, span, count)
    weights = np.exp(-0.5 * nodes**2)
    x = np.stack([u.ravel() for u in np.meshgrid(nodes, nodes)], axis=1)
    return x, np.outer(weights, weights).ravel() / weights.sum() ** 2


def polar_rule(rings, turns):
    """Nodes and weights for N(0, I) in the plane that resolve kinks along rays: even steps in the angle."""
    nodes, weights = np.polynomial.laguerre.laggauss(rings)  # radius^2/2 is exponential
    turn = 2 * np.pi * (np.arange(turns) + 0.5) / turns
    x = np.sqrt(2 * nodes)[:, None, None] * np.stack([np.cos(turn), np.sin(turn)], axis=1)
    return x.reshape(-1, 2), np.repeat(weights / weights.sum(), turns) / turns


@pytest.mark.parametrize(
    ("activation", "model", "tolerance"),
    [
        (SOFT, "vanilla", 1e-9),
        ("relu", "vanilla", 1e-4),
        ("erf", "batchnorm", 1e-8),
        ("tanh", "batchnorm_manifold", 1e-8),
    ],
)
def test_energy_and_velocity_are_expectations(activation, model, tolerance, quick_compilation):
    rng = np.random.default_rng(1)
    statistics = {} if model == "vanilla" else {"mean": np.zeros(2), "covariance": np.eye(2)}
    flow = getattr(mf, model)(activation, alpha="sqrt", **statistics)
    draw = lambda m: flow.space.from_raw(
        mf.Cloud(mf.Neurons(rng.normal(size=m), 0.7 * rng.normal(size=(m, 2))))
    )
    student, teacher = draw(4), draw(3)
    population = GaussianPopulation(flow, teacher)
    x, weights = polar_rule(40, 4000) if activation == "relu" else trapezoid()
    data = mf.Dataset(x, mf.predict(flow, teacher, x), weights)
    np.testing.assert_allclose(
        mf.energy(flow, student, population), mf.energy(flow, student, data), rtol=10 * tolerance
    )
    gap = largest_gap(mf.velocity(flow, student, population), mf.velocity(flow, student, data))
    assert gap < 10 * tolerance * float(jnp.abs(mf.velocity(flow, student, data).a).max())
    assert abs(float(mf.energy(flow, teacher, population))) < 1e-14


MODELS = {
    "vanilla m": lambda s: mf.vanilla(s),
    "vanilla one": lambda s: mf.vanilla(s, alpha="one"),
    "batchnorm": lambda s: mf.batchnorm(s, alpha="sqrt"),
    "batchnorm wide": lambda s: mf.batchnorm(s, mean=np.zeros(2), covariance=2 * np.eye(2), alpha=0.7),
    "manifold": lambda s: mf.batchnorm_manifold(s, mean=np.zeros(2), covariance=COVARIANCE, alpha="one"),
}
COVARIANCE = np.array([[1.5, 0.4], [0.4, 0.6]])


def two_networks(one, other, activation, seed=2):
    """A student, its neurons, and a population whose teacher has another model and another width."""
    flows = [MODELS[name](activation) for name in (one, other)]
    rng = np.random.default_rng(seed)
    raw = [mf.Cloud(mf.Neurons(rng.normal(size=m), 0.7 * rng.normal(size=(m, 2)))) for m in (4, 3)]
    student, teacher = (flow.space.from_raw(cloud) for flow, cloud in zip(flows, raw, strict=True))
    return flows[0], student, GaussianPopulation(flows[1], teacher)


@pytest.mark.parametrize("other", MODELS)
@pytest.mark.parametrize("one", MODELS)
def test_targets_are_those_of_the_teachers_own_model(one, other, quick_compilation):
    """All pairs, by quadrature in the plane, where the targets are the predictions of the teacher's flow."""
    flow, student, population = two_networks(one, other, "erf")
    x, weights = trapezoid()
    data = mf.Dataset(x, mf.predict(population.flow, population.teacher, x), weights)
    bound = flow.bind(population)
    np.testing.assert_allclose(
        mf.energy(bound, student, population), mf.energy(bound, student, data), rtol=1e-8
    )
    for ours, theirs in zip(
        jax.tree.leaves(mf.velocity(flow, student, population)),
        jax.tree.leaves(mf.velocity(bound, student, data)),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-7 * float(jnp.abs(theirs).max()))


def test_expectations_are_means_over_what_the_population_draws(quick_compilation):
    """All pairs, within 4 standard errors of a mean over samples: independent of how expectations are computed."""
    size = 200_000
    for one in MODELS:
        for other in MODELS:
            flow, student, population = two_networks(one, other, "relu")
            flow = flow.bind(population)
            x, y = population.sample(jax.random.key(7), size)
            f = mf.predict(flow, student, x)
            losses = 0.5 * (f - y) ** 2
            error = jnp.std(losses) / np.sqrt(size)
            gap = mf.energy(flow, student, population) - jnp.mean(losses)
            assert abs(float(gap)) < 4 * float(error), (one, other)
            # the outer weights move against the derivative of the loss in them: (f - y) a_i s(b_i . x) over a_i
            each = (y - f)[:, None] * flow.feature(student, x) / student.particles.a[None, :]
            moved = mf.velocity(flow, student, population).a
            error = jnp.std(each, axis=0) / np.sqrt(size)
            assert jnp.all(jnp.abs(moved - jnp.mean(each, axis=0)) < 4 * error), (one, other)


def test_a_traced_mean_is_never_taken_for_zero():
    """Inside of a program of the user the mean cannot be refused; the energy is then NaN and not that of mean 0."""
    _, student, population = two_networks("batchnorm", "vanilla one", "erf")
    energy = jax.jit(
        lambda mean: mf.energy(mf.batchnorm("erf", mean=mean, covariance=jnp.eye(2)), student, population)
    )
    assert np.isfinite(energy(jnp.zeros(2))) and np.isnan(energy(jnp.full(2, 0.5)))


PLATEAUS = {2: 0.011611, 3: 0.020297, 5: 0.036226}
PLAIN_PLATEAUS = {2: 0.031865, 3: 0.054859, 5: 0.097195}


REST = [(k, s) for k in (2, 3, 5) for s in (SOFT, "erf") if (k, s) != (2, SOFT)]


@pytest.mark.parametrize(
    ("k", "activation"), [(2, SOFT), *(pytest.param(*case, marks=pytest.mark.slow) for case in REST)]
)
def test_the_symmetric_plateau_of_the_committee_machine(k, activation):
    """K students that start alike stay alike, at K/pi (pi/6 - K arcsin(1/(2K))) for erf(b.x/sqrt 2)."""
    flow = mf.vanilla(activation, alpha="one", outer=0.0)
    data = GaussianPopulation(flow, mf.Cloud(mf.Neurons(jnp.ones(k), jnp.eye(k))))
    start = mf.Cloud(mf.Neurons(jnp.ones(k), jnp.full((k, k), 0.3)))
    sol = mf.solve(flow, start, data, 300.0, clock="gradient", step=mf.Adaptive(1e-9, 1e-11), steady=1e-8)
    table = PLATEAUS if activation is SOFT else PLAIN_PLATEAUS
    assert abs(float(sol.energy[-1]) - table[k]) < 5e-7
    if activation is SOFT:
        closed = k / np.pi * (np.pi / 6 - k * np.arcsin(1 / (2 * k)))
        np.testing.assert_allclose(sol.energy[-1], closed, rtol=1e-7)


def online(d, eta, alpha, start, key):
    """Overlaps (R, Q) after alpha d steps of one-pass descent with rate eta/d, one fresh sample a step."""
    flow = mf.vanilla(SOFT, alpha="one", outer=0.0)
    data = GaussianPopulation(flow, mf.Cloud(mf.Neurons(jnp.ones(2), jnp.eye(2, d))))
    cloud = mf.Cloud(mf.Neurons(jnp.ones(2), start))
    run = mf.descend(
        flow,
        cloud,
        data,
        int(alpha * d),
        step=eta / d,
        clock="gradient",
        batches=mf.Batches(1, key, sampler=data.sample),
        throw=False,
    )
    b = run.final.particles.b
    return b[:, :2], b @ b.T


def test_the_overlap_equations_know_the_gradient_of_the_population_loss():
    """To first order in the rate they are gradient flow on the population, whose energy the overlaps give."""
    overlaps, norms = np.array([[0.3, 0.1], [0.0, 0.2]]), np.array([[0.6, 0.1], [0.1, 0.4]])
    start = students(5, overlaps, norms, 0)
    flow = mf.vanilla(SOFT, alpha="one", outer=0.0)
    data = GaussianPopulation(flow, mf.Cloud(mf.Neurons(jnp.ones(2), jnp.eye(2, 5))))
    cloud = mf.Cloud(mf.Neurons(jnp.ones(2), start))
    np.testing.assert_allclose(mf.energy(flow, cloud, data), energy(overlaps, norms), rtol=1e-12)
    v = mf.velocity(flow, cloud, data).b / 2  # on the gradient clock
    r, q = (path[-1] for path in overlap_path(overlaps, norms, 1.0, [1e-4], noise=False))
    np.testing.assert_allclose((r - overlaps) / 1e-4, v[:, :2], atol=1e-3)
    np.testing.assert_allclose((q - norms) / 1e-4, v @ start.T + start @ v.T, atol=1e-3)


@pytest.mark.slow
def test_one_pass_descent_follows_the_overlap_equations():
    """Saad and Solla 1995 with eta^2 terms, before the escape: the error falls like 1/sqrt(d)."""
    eta, alpha, seeds = 1.0, 4.0, 24
    overlaps = np.array([[0.02, 0.01], [0.0, 0.015]])
    norms = np.array([[0.3, 0.02], [0.02, 0.25]])
    limit = [path[-1] for path in overlap_path(overlaps, norms, eta, [alpha])]
    sizes, errors = (500, 1000, 2000), []
    for d in sizes:
        start = students(d, overlaps, norms, d)
        keys = jax.random.split(jax.random.key(1), seeds)
        r, q = jax.jit(jax.vmap(lambda k, d=d, start=start: online(d, eta, alpha, start, k)))(keys)
        square = jnp.mean((r - limit[0][None]) ** 2) + jnp.mean((q - limit[1][None]) ** 2)
        errors.append(float(jnp.sqrt(square)))
    slope = np.polyfit(np.log(sizes), np.log(errors), 1)[0]
    assert abs(slope + 0.5) < 0.15, (slope, errors)
    # without the eta^2 terms the equations are wrong by more than the error at any of these sizes
    gap = np.abs(overlap_path(overlaps, norms, eta, [alpha], noise=False)[1][-1] - limit[1]).max()
    assert gap > 3 * errors[0]


def test_fresh_samples_descend_the_population_loss_on_average(key):
    """One step on a large fresh batch is a step on the population, within the error of its mean."""
    flow = mf.vanilla(SOFT, alpha="one")
    teacher = mf.Cloud(mf.Neurons(jnp.ones(2), jnp.eye(2, 3)))
    data = GaussianPopulation(flow, teacher)
    cloud = flow.init(key, 4, dim=3)
    exact = mf.descend(flow, cloud, data, 2, step=0.05)
    batch = 20_000
    fresh = mf.descend(flow, cloud, data, 2, step=0.05, batches=mf.Batches(batch, key, sampler=data.sample))
    gap = largest_gap(exact.final.particles, fresh.final.particles)
    assert 0 < gap < 0.1 * 4 * 2 * 5 / np.sqrt(batch)
    np.testing.assert_allclose(fresh.energy, exact.energy, atol=0.05)
    again = mf.descend(flow, cloud, data, 2, step=0.05, batches=mf.Batches(batch, key, sampler=data.sample))
    assert largest_gap(again.final.particles, fresh.final.particles) == 0


def test_what_a_population_cannot_do_is_refused(key):
    flow = mf.vanilla("erf")
    teacher = mf.Cloud(mf.Neurons(jnp.ones(2), jnp.eye(2)))
    data = GaussianPopulation(flow, teacher)
    with pytest.raises(ValueError, match="needs flows with loss='squared'"):
        mf.energy(mf.vanilla("erf", "huber"), teacher, data)
    with pytest.raises(ValueError, match="student with the teacher's activation"):
        mf.energy(mf.vanilla("tanh"), teacher, data)
    centered = mf.vanilla("erf", centered=True).begin(teacher)
    kinked = mf.vanilla(lambda z: jnp.abs(z))
    for make in (lambda flow: mf.energy(flow, teacher, data), lambda flow: GaussianPopulation(flow, teacher)):
        with pytest.raises(ValueError, match="not centered"):
            make(centered)
        with pytest.raises(ValueError, match="batch norm with mean 0, got mean = "):
            make(mf.batchnorm("erf", mean=jnp.full(2, 0.5), covariance=jnp.eye(2)))
    with pytest.raises(ValueError, match="smooth or has a closed form"):
        GaussianPopulation(kinked, teacher)
    with pytest.raises(ValueError, match="without scale and shift"):
        affine = mf.batchnorm("erf", affine=True)
        mf.energy(affine, affine.bind(data).init(key, 2, dim=2), data)
    with pytest.raises(ValueError, match="without a bias"):
        GaussianPopulation(mf.vanilla("erf", bias=True), mf.Cloud(mf.Neurons(jnp.ones(2), jnp.eye(2))))
    with pytest.raises(ValueError, match="teacher must hold Neurons"):
        GaussianPopulation(flow, mf.Cloud(mf.Polar(jnp.ones(2), jnp.ones(2))))
    with pytest.raises(ValueError, match="KernelStep needs data with samples"):
        mf.descend(flow, teacher, data, 2, step=mf.KernelStep(1.0))
    with pytest.raises(ValueError, match="batches must have a PRNG key"):
        mf.descend(flow, teacher, data, 2, step=0.1, batches=mf.Batches(1, sampler=data.sample))
