"""Noise at a temperature: closed forms of the discrete scheme, stationary laws by quadrature, geometry, invariances."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import largest_gap, problem, ring_problem
from scipy import optimize

import meanflow as mf
from meanflow.flows import make_flow
from meanflow.flows._features import TwoLayer
from meanflow.flows._free_energy import free_energy
from meanflow.geometry import Space
from meanflow.measures import laws
from meanflow.solvers.eulerian import evolve, uniform_density

NOTHING = mf.Dataset(jnp.zeros((1, 1)), jnp.zeros(1))  # tanh networks have no loss there, and no gradient


def half_square(w):
    return 0.5 * (w.a**2 + jnp.sum(w.b**2, axis=1))


def half_square_b(w):
    return 0.5 * jnp.sum(w.b**2, axis=1)


def within(sample, truth, errors=4.0):
    """Whether the mean of independent numbers is the truth, within some of its standard errors."""
    sample = np.asarray(sample)
    return abs(sample.mean() - truth) < errors * sample.std(ddof=1) / np.sqrt(sample.size)


def test_ornstein_uhlenbeck_has_the_mean_and_variance_of_the_scheme(key):
    m, lam, tau, h = 20_000, 0.7, 0.3, 0.1
    flow = mf.vanilla("tanh", penalty=(half_square, lam))
    start = mf.Cloud(mf.Neurons(jnp.full(m, 1.5), jnp.full((m, 1), -2.0)))
    run = mf.descend(flow, start, NOTHING, 30, step=h, every=10, dynamics=mf.Noise(tau, key))
    shrink = 1 - h * lam
    for row, steps in enumerate((0, 10, 20, 30)):
        mean = shrink**steps
        variance = 2 * tau * h * (1 - shrink ** (2 * steps)) / (1 - shrink**2)
        for cloud, first in ((run.clouds.particles.a[row], 1.5), (run.clouds.particles.b[row, :, 0], -2.0)):
            error = np.sqrt(variance / m)
            assert abs(float(cloud.mean()) - first * mean) <= 4 * error + 1e-12
            # the variance of a sample of Gaussians has the standard error sqrt(2/(m-1)) times its value
            assert abs(float(cloud.var(ddof=1)) - variance) <= 4 * variance * np.sqrt(2 / (m - 1)) + 1e-12
    both = np.stack([run.final.particles.a, run.final.particles.b[:, 0]])
    assert abs(np.corrcoef(both)[0, 1]) < 4 / np.sqrt(m)  # coordinates have noise of their own


def one_neuron(tau, lam=0.4):
    """A tanh neuron with a = 1 frozen and one datum; returns flow, data, E(delta_b) and phi."""
    flow = mf.vanilla("tanh", outer=0.0, penalty=(half_square_b, lam))
    data = mf.Dataset(jnp.array([[1.0]]), jnp.array([1.2]))
    energy = lambda b: 0.5 * (np.tanh(b) - 1.2) ** 2 + lam * b**2 / 2
    return flow, data, energy


def test_one_particle_and_infinitely_many_have_different_stationary_laws(key):
    """Width 1: exp(-E(delta_w)/tau). Infinite width: exp(-V/tau), with V that of the law itself."""
    tau, lam, h = 0.25, 0.4, 0.02
    flow, data, energy = one_neuron(tau, lam)
    grid = np.linspace(-8, 8, 4001)
    density = np.exp(-energy(grid) / tau)
    one = float(np.sum(np.tanh(grid) * density) / np.sum(density))

    def mean_field(f):
        rho = np.exp(-((f - 1.2) * np.tanh(grid) + lam * grid**2 / 2) / tau)
        return float(np.sum(np.tanh(grid) * rho) / np.sum(rho))

    many = optimize.brentq(lambda f: mean_field(f) - f, -1, 1)
    chains = 4096
    wide = mf.Cloud(mf.Neurons(jnp.ones(chains), jnp.ones((chains, 1))))
    single = jax.tree.map(lambda u: u[:1], wide.particles)

    def alone(k):
        run = mf.descend(flow, mf.Cloud(single), data, 400, step=h, dynamics=mf.Noise(tau, k))
        return run.final.particles.b[0, 0]

    last = jax.jit(jax.vmap(alone))(jax.random.split(key, chains))
    assert within(jnp.tanh(last), one)
    run = mf.descend(flow, wide, data, 400, step=h, dynamics=mf.Noise(tau, key))
    assert within(jnp.tanh(run.final.particles.b[:, 0]), many)
    assert not within(jnp.tanh(last), many) and abs(one - many) > 0.03


@pytest.mark.parametrize("label", [1.0, 2.0])
def test_brownian_motion_on_the_sphere_forgets_at_the_right_rate(label, key):
    d, tau, t, m = 4, 0.5, 0.6, 20_000
    sigma = jnp.diag(jnp.array([1.0, 2.0, 0.5, 3.0]))
    flow = mf.batchnorm_manifold("tanh", mean=jnp.zeros(d), covariance=sigma)
    b = jnp.ones((m, d)) / jnp.sqrt(jnp.sum(sigma))
    data = mf.Dataset(jnp.zeros((1, d)), jnp.zeros(1))
    start = mf.Cloud(mf.Neurons(jnp.zeros(m), b), labels=label)
    sol = mf.solve(flow, start, data, t, step=0.01, dynamics=mf.Noise(tau, key))
    unit = sol.final.particles.b / jnp.linalg.norm(sol.final.particles.b, axis=1, keepdims=True)
    cosine = unit @ (b[0] / jnp.linalg.norm(b[0]))
    # a step turns by |v| with |v|^2 = (2 tau h / c^2) chi^2: its mean cosine in closed form up to h^3
    k, s = d - 1, 2 * tau * 0.01 / label**2
    step = 1 - s * k / 2 + s**2 * k * (k + 2) / 24 - s**3 * k * (k + 2) * (k + 4) / 720
    assert within(cosine, step**60)
    assert abs(step**60 - np.exp(-(d - 1) * tau * t / label**2)) < 4e-3
    assert abs(float(cosine.mean()) - np.exp(-(d - 1) * tau * t / label**2)) < 2e-2
    np.testing.assert_allclose(
        jnp.einsum("ij,jk,ik->i", *(sol.final.particles.b, sigma, sol.final.particles.b)), 1
    )
    assert within(sol.final.particles.a**2, 2 * tau * t)


@pytest.mark.parametrize("width", [4, *(pytest.param(m, marks=pytest.mark.slow) for m in (16, 64))])
def test_the_loss_of_a_linear_network_exceeds_its_minimum_by_the_temperature(width, key):
    """<loss> - loss at the mean = tau/(2N) tr A [H (1 - hH/2)]^-1 for Euler steps; the prediction is Gaussian."""
    tau, lam, h, d = 0.4, 0.5, 0.1, 2
    rng = np.random.default_rng(0)
    x = rng.normal(size=(12, d)) * np.array([1.5, 0.7])
    data = mf.Dataset(x, rng.normal(size=12))
    flow = mf.vanilla("linear", outer=0.0, penalty=(half_square_b, lam))
    a = x.T @ x / 12
    hessian = a + lam * np.eye(d)
    mean = np.linalg.solve(hessian, x.T @ np.asarray(data.y) / 12)
    least = 0.5 * np.mean((x @ mean - np.asarray(data.y)) ** 2)
    loss = lambda f: 0.5 * jnp.mean((f - data.y) ** 2)
    excess = tau / (2 * width) * np.trace(a @ np.linalg.inv(hessian @ (np.eye(d) - h * hessian / 2)))
    cloud = mf.Cloud(mf.Neurons(jnp.ones(width), jnp.broadcast_to(mean, (width, d))))

    def alone(k):
        run = mf.descend(flow, cloud, data, 120, step=h, dynamics=mf.Noise(tau, k))
        return loss(mf.predict(flow, run.final, data.x))

    found = jax.jit(jax.vmap(alone))(jax.random.split(key, 4096)) - least
    assert within(found, excess), (float(found.mean()), excess)


@pytest.mark.parametrize("width", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_the_total_energy_of_a_linear_network_has_no_excess_over_the_mean_field_limit(width, key):
    """Equipartition: <E> - min E = tau d/2 at every width, as for infinitely many neurons of law N(mean, tau/lam).

    The loss part alone has the excess tau/(2N) tr A H^-1, and the penalty lacks as much.
    """
    tau, lam, h, d = 0.4, 0.5, 0.02, 2
    rng = np.random.default_rng(0)
    x = rng.normal(size=(12, d)) * np.array([1.5, 0.7])
    data = mf.Dataset(x, rng.normal(size=12))
    flow = mf.vanilla("linear", outer=0.0, penalty=(half_square_b, lam))
    a = x.T @ x / 12
    hessian = a + lam * np.eye(d)
    mean = np.linalg.solve(hessian, x.T @ np.asarray(data.y) / 12)
    least = 0.5 * np.mean((x @ mean - np.asarray(data.y)) ** 2) + lam * mean @ mean / 2
    limit = least + tau * d / 2 / (1 - h * lam / 2)  # of the same scheme, N(mean, tau / (lam (1 - h lam/2)))
    excess = tau / (2 * width) * np.trace(a @ np.linalg.inv(hessian))

    def alone(k):
        one, two = jax.random.split(k)
        b = mean[None, :] + np.sqrt(tau / lam) * jax.random.normal(one, (width, d))  # near the stationary law
        cloud = mf.Cloud(mf.Neurons(jnp.ones(width), b))
        run = mf.descend(flow, cloud, data, 200, step=h, dynamics=mf.Noise(tau, two))
        return mf.energy(flow, run.final, data)

    chains = 4096 if width == 4 else 16384
    found = jax.jit(jax.vmap(alone))(jax.random.split(key, chains))
    # one mode of N has curvature H, the others have lam: what is left is of first order in the step
    step_error = np.trace(np.linalg.inv(np.eye(d) - h * hessian / 2)) - d / (1 - h * lam / 2)
    truth = limit + tau / (2 * width) * step_error
    assert within(found, truth) and abs(truth - limit) < 0.05 * excess
    error = float(found.std() / np.sqrt(chains))
    assert abs(float(found.mean()) - limit) < 0.5 * excess and 4 * error < 0.5 * excess


class Wavy(Space):
    """One coordinate b with C = (1 + 0.5 sin b)^2; a stands still."""

    def _root(self, cloud):
        return 1 + 0.5 * jnp.sin(cloud.particles.b)

    def cometric(self, cloud, covector):
        return mf.Neurons(jnp.zeros_like(covector.a), self._root(cloud) ** 2 * covector.b)

    def noise(self, cloud, normal):
        return mf.Neurons(jnp.zeros_like(normal.a), self._root(cloud) * normal.b)

    def log_volume(self, cloud):
        return -jnp.log(self._root(cloud)[:, 0])


class Uncorrected(Wavy):
    def noise_drift(self, cloud):
        return jax.tree.map(jnp.zeros_like, cloud.particles)


def test_a_metric_that_varies_needs_its_drift(key):
    """The stationary law is exp(-V/tau) times the Riemannian volume; without the Ito drift it is another one."""
    tau, m = 0.5, 20_000
    penalty = lambda w: 0.5 * w.b[:, 0] ** 2 + 0.5 * jnp.cos(w.b[:, 0])
    grid = np.linspace(-7, 7, 20001)
    density = np.exp(-(0.5 * grid**2 + 0.5 * np.cos(grid)) / tau) / (1 + 0.5 * np.sin(grid))
    truth = np.sum(np.sin(grid) * density) / np.sum(density)
    found = {}
    for space in (Wavy(), Uncorrected()):
        flow = make_flow(TwoLayer(jnp.tanh), space, penalty=(penalty, 1.0))
        start = mf.Cloud(mf.Neurons(jnp.ones(m), jnp.zeros((m, 1))))
        run = mf.descend(flow, start, NOTHING, 1000, step=0.01, dynamics=mf.Noise(tau, key))
        found[type(space)] = jnp.sin(run.final.particles.b[:, 0])
    assert abs(float(found[Wavy].mean()) - truth) < 0.02
    assert abs(float(found[Uncorrected].mean()) - truth) > 0.08
    hand = lambda b: 0.5 * jnp.cos(b) * (1 + 0.5 * jnp.sin(b))  # C'/2 in one dimension
    few = mf.Cloud(mf.Neurons(jnp.ones(3), jnp.array([[0.3], [-1.0], [2.0]])))
    np.testing.assert_allclose(Wavy().noise_drift(few).b, hand(few.particles.b), rtol=1e-12)


def test_noise_of_a_particle_depends_on_its_place_alone(key, quick_compilation):
    """Padding, neighbors in a vmapped batch, the solver and resuming change nothing."""
    flow, cloud, data = problem("batchnorm_manifold", width=5)
    settings = {"step": 0.05, "dynamics": mf.Noise(0.1, key)}
    run = mf.descend(flow, cloud, data, 4, every=2, **settings)
    small = mf.Cloud(jax.tree.map(lambda u: u[:3], cloud.particles), labels=cloud.labels[:3])
    pair = mf.Cloud.stack([cloud, small.pad(5)])  # the second has padding, and a neighbor
    both = jax.vmap(lambda c: mf.descend(flow, c, data, 4, throw=False, **settings).final.particles)(pair)
    alone = mf.descend(flow, small, data, 4, **settings).final.particles
    assert largest_gap(jax.tree.map(lambda u: u[1, :3], both), alone) < 1e-13
    assert largest_gap(jax.tree.map(lambda u: u[0], both), run.final.particles) < 1e-13
    solved = mf.solve(flow, cloud, data, 0.2, ts=[0.1, 0.2], **settings)
    assert largest_gap(solved.clouds.particles, jax.tree.map(lambda u: u[1:], run.clouds.particles)) < 1e-13
    half = mf.descend(flow, cloud, data, 2, every=2, **settings)
    rest = mf.descend(flow, cloud, data, 2, every=2, state=half.state, **settings)
    assert largest_gap(rest.final.particles, run.final.particles) == 0


@pytest.mark.slow
def test_lifted_neurons_keep_their_balance_and_diffuse_alike_in_both_coordinates(key):
    """Steps in the raw chart and in (r, theta) are the same law; the plane (delta = inf) is flat."""
    m, tau, t = 20_000, 0.2, 0.5
    data = mf.Dataset(jnp.array([1.0]), jnp.zeros(1))
    cloud = mf.Cloud(mf.Polar(jnp.full(m, 0.8), jnp.full(m, 0.3)), labels=-0.5)
    nothing = lambda f, y: 0.0 * f  # a loss without forces
    chart, polar = mf.lifted(loss=nothing), mf.lifted(loss=nothing, penalty=0.0)
    ends = [
        mf.solve(flow, cloud, data, t, step=0.01, dynamics=mf.Noise(tau, k)).final.particles
        for flow, k in zip((chart, polar), jax.random.split(key), strict=True)
    ]
    for function in (lambda w: w.r, lambda w: w.r**2, lambda w: jnp.cos(w.theta)):
        one, two = (function(w) for w in ends)
        error = np.sqrt((one.var() + two.var()) / m)
        assert abs(float(one.mean() - two.mean())) < 4 * float(error)
    plane = mf.solve(
        mf.planar(loss=nothing), mf.Cloud(cloud.particles), data, t, step=0.01, dynamics=mf.Noise(tau, key)
    )
    assert within(plane.final.particles.r**2, 0.64 + 4 * tau * t)


@pytest.mark.slow
def test_predictions_fluctuate_like_one_over_the_root_of_the_width_at_all_late_times(key):
    """Against the mean-field limit: the self-consistent stationary law, by quadrature."""
    widths, seeds = (64, 256, 1024), 256
    tau, lam, h = 0.25, 0.4, 0.02
    flow, data, _ = one_neuron(tau, lam)
    grid = np.linspace(-8, 8, 4001)

    def mean_field(f):
        rho = np.exp(-((f - 1.2) * np.tanh(grid) + lam * grid**2 / 2) / tau)
        return float(np.sum(np.tanh(grid) * rho) / np.sum(rho))

    limit = optimize.brentq(lambda f: mean_field(f) - f, -1, 1)
    probe = jnp.array([[1.0]])
    rms = []
    for width in widths:
        cloud = mf.Cloud(mf.Neurons(jnp.ones(width), jnp.ones((width, 1))))

        def path(k, cloud=cloud):
            seen = lambda flow, cloud, data: mf.predict(flow, cloud, probe)[0]
            return mf.descend(
                flow, cloud, data, 900, every=300, step=h, dynamics=mf.Noise(tau, k), observe=seen
            ).observed[1:]

        found = jax.jit(jax.vmap(path))(jax.random.split(key, seeds))
        rms.append(np.sqrt(np.mean((np.asarray(found) - limit) ** 2, axis=0)))
    slopes = [np.polyfit(np.log(widths), np.log(column), 1)[0] for column in np.array(rms).T]
    assert len(slopes) == 3 and np.all(np.abs(np.array(slopes) + 0.5) < 0.1), slopes


def test_what_cannot_be_simulated_is_refused(key):
    flow, cloud, data = problem("vanilla")
    noisy = {"dynamics": mf.Noise(0.1, key), "step": 0.1}
    with pytest.raises(ValueError, match="dynamics must be Noise with a PRNG key"):
        mf.descend(flow, cloud, data, 2, dynamics=mf.Noise(0.1), step=0.1)
    with pytest.raises(ValueError, match="step must be a number or a StepRule with noise"):
        mf.solve(flow, cloud, data, 1.0, dynamics=mf.Noise(0.1, key))
    with pytest.raises(ValueError, match="optimizer must be None"):
        import optax

        mf.descend(flow, cloud, data, 2, optimizer=optax.adam(0.1), dynamics=mf.Noise(0.1, key))
    cone = mf.Cloud(mf.Polar(jnp.ones(2), jnp.ones(2)), labels=0.0)
    line = mf.Dataset(jnp.array([1.0]), jnp.zeros(1))
    with pytest.raises(ValueError, match="not smooth at the tip"):
        mf.solve(mf.lifted(), cone, line, 1.0, **noisy)

    class Bare(Space):
        def cometric(self, cloud, covector):
            return jax.tree.map(lambda u: 2 * u, covector)

    with pytest.raises(ValueError, match=r"a space that defines noise\(cloud, normal\), got Bare"):
        mf.descend(make_flow(TwoLayer(jnp.tanh), Bare()), cloud, data, 2, **noisy)
    with pytest.raises(ValueError, match="solver Sliding does not take dynamics"):
        mf.solve(mf.canonical(), mf.Cloud(cone.particles), line, 1.0, solver="sliding", **noisy)


@pytest.mark.slow
def test_the_free_energy_of_a_gaussian_cloud_falls_at_the_rate_of_its_log_sobolev_constant(key):
    """V = lam w^2/2: rho stays Gaussian, F - F* falls at least like exp(-2 lam t), and the estimators agree."""
    m, lam, tau = 20_000, 0.7, 0.3
    flow = mf.vanilla("tanh", penalty=(half_square, lam))
    b, a = jax.random.normal(key, (2, m))
    start = mf.Cloud(mf.Neurons(1.0 + 0.2 * a, 0.2 * b[:, None] - 0.5))
    sol = mf.solve(flow, start, NOTHING, 2.0, ts=5, step=0.01, dynamics=mf.Noise(tau, key))
    clouds = [mf.Cloud(jax.tree.map(lambda u, k=k: u[k], sol.clouds.particles)) for k in range(5)]
    found = [free_energy(flow, cloud, NOTHING, tau, estimator="gaussian") for cloud in clouds]
    # E = 2 tau/2 and two coordinates of variance tau/lam
    least = tau - tau * np.log(2 * np.pi * np.e * tau / lam)
    gaps = np.array([one.value for one in found]) - least
    slack = 4 * tau * found[0].error + 4 * np.sqrt(tau * lam / m)
    assert np.all(gaps[1:] <= gaps[0] * np.exp(-2 * lam * np.asarray(sol.ts[1:])) + slack)
    assert gaps[0] > 0.5 and np.all(np.diff(gaps) < slack)
    # closed form of F along the flow
    shrink = np.exp(-lam * np.asarray(sol.ts))
    spread = 0.04 * shrink**2 + tau / lam * (1 - shrink**2)
    truth = lam * (spread + 0.625 * shrink**2) - tau * np.log(2 * np.pi * np.e * spread)
    np.testing.assert_allclose([one.value for one in found], truth, atol=slack + 0.01)
    near = free_energy(flow, clouds[2], NOTHING, tau)
    assert abs(near.entropy - found[2].entropy) < 4 * (near.error + found[2].error)
    np.testing.assert_allclose(found[2].fisher, 2 / spread[2], rtol=0.05)


def test_neighbors_know_the_volume_of_the_sphere(key):
    """Directions uniform on S^2 of radius c, a normal: int rho log rho = -log(4 pi c^2) - log sqrt(2 pi e)."""
    flow = mf.batchnorm_manifold("tanh", mean=jnp.zeros(3), covariance=jnp.diag(jnp.array([1.0, 2.0, 3.0])))
    cloud = flow.init(key, 4000, dim=3, a=laws.normal(), labels=1.5)
    data = mf.Dataset(jnp.zeros((1, 3)), jnp.zeros(1))
    found = free_energy(flow, cloud, data, 1.0)
    truth = -np.log(4 * np.pi * 1.5**2) - 0.5 * np.log(2 * np.pi * np.e)
    assert abs(found.entropy - truth) < 4 * found.error + 0.02
    assert found.energy == 0 and found.fisher is None
    with pytest.raises(ValueError, match="needs a flat space"):
        free_energy(flow, cloud, data, 1.0, estimator="gaussian")
    with pytest.raises(ValueError, match="equal weights"):
        free_energy(
            mf.vanilla("tanh"), mf.Cloud(mf.Neurons(jnp.ones(2), jnp.eye(2, 3)), [0.4, 0.6]), data, 1.0
        )


@pytest.mark.parametrize("size", [40, pytest.param(80, marks=pytest.mark.slow)])
def test_free_energy_of_the_density_falls_to_the_law_of_gibbs(size):
    """Finite volumes with diffusion: F decreases at every save; the end is exp(-V/tau) of its own potential."""
    flow, data = ring_problem()
    flow = mf.batchnorm_manifold("tanh", penalty=(lambda w: 0.5 * w.a**2, 0.5)).bind(data)
    tau = 0.3
    run = evolve(flow, uniform_density(size, size, 5.0), data, 12.0, 25, temperature=tau)
    assert (
        bool(jnp.all(jnp.diff(run.free_energy) < 1e-12))
        and float(run.free_energy[0] - run.free_energy[-1]) > 0.3
    )
    np.testing.assert_allclose(run.mass.sum((1, 2)), 1, rtol=1e-12)
    assert float(run.mass.min()) >= 0
    cloud = run.final.cloud(flow.space)
    potential = mf.first_variation(flow, cloud, data, cloud)
    gibbs = jax.nn.softmax(-potential / tau).reshape(run.final.mass.shape)
    assert float(jnp.abs(gibbs - run.final.mass).sum()) < 1e-2


@pytest.mark.slow
def test_noisy_particles_have_the_law_of_the_density(key):
    """The particle method against finite volumes, which know nothing of particles, at a time and in the end."""
    _, data = ring_problem()
    flow = mf.batchnorm_manifold("tanh", penalty=(lambda w: 0.5 * w.a**2, 0.5)).bind(data)
    tau, m = 0.3, 20_000
    run = evolve(flow, uniform_density(100, 96, 5.0), data, 4.0, [1.0, 4.0], temperature=tau)
    cloud = flow.init(key, m, dim=2)
    sol = mf.solve(flow, cloud, data, 4.0, ts=[1.0, 4.0], step=0.01, dynamics=mf.Noise(tau, key))
    heights, _ = run.final.centres()
    for k in range(2):
        a = sol.clouds.particles.a[k]
        square = float(run.mass[k].sum(1) @ heights**2)
        assert abs(float((a**2).mean()) - square) < 4 * float((a**2).std()) / np.sqrt(m) + 0.01 * square
        here = mf.Cloud(jax.tree.map(lambda u, k=k: u[k], sol.clouds.particles), labels=cloud.labels)
        f = mf.predict(flow, here, data.x)
        limit = mf.predict(flow, run.final.at(run.mass[k]).cloud(flow.space), data.x)
        assert float(jnp.sqrt(jnp.mean((f - limit) ** 2))) < 0.03
