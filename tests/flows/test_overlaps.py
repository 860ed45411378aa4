"""Overlaps of students and teachers: expectations by quadrature and sampling, Saad and Solla, networks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from overlaps import energy, four, overlap_path, students
from scipy.integrate import quad

import meanflow as mf
from meanflow.activations import Stretched
from meanflow.flows import GaussianPopulation
from meanflow.kernels._infinite.fourth import fourth_moments

SOFT = Stretched("erf", 0.5**0.5)
FINE = mf.Adaptive(1e-11, 1e-13)


def committee(activation, k=2, d=None, **rates):
    """A soft committee machine and the population of k orthonormal teachers in R^d."""
    flow = mf.vanilla(activation, alpha="one", **({"outer": 0.0} | rates))
    teacher = mf.vanilla(activation, alpha="one")
    return flow, GaussianPopulation(teacher, mf.Cloud(mf.Neurons(jnp.ones(k), jnp.eye(k, d or k))))


def split(cloud):
    """Q and R of a cloud of overlaps, or of several."""
    b, size = np.asarray(cloud.particles.b), cloud.particles.b.shape[-2]
    return b[..., :size], b[..., size:]


def test_four_activations_of_erf_are_the_known_formula():
    root = np.random.default_rng(0).normal(size=(4, 4))
    c = root @ root.T
    found = fourth_moments(SOFT)(jnp.asarray(c), 0, 1)
    for v, w in ((2, 3), (0, 1), (1, 3), (2, 2)):
        at = [0, 1, v, w]
        np.testing.assert_allclose(found[v, w], four(c[np.ix_(at, at)]), rtol=1e-12)


@pytest.mark.parametrize(("i", "k"), [(0, 1), (2, 2)])
def test_four_activations_of_relu_are_an_integral_over_the_angle(i, k):
    """Numbers that are products with x in the plane: the length of x gives E |x|^2 = 2, the angle is integrated."""
    frame = np.random.default_rng(1).normal(size=(4, 2))
    found = fourth_moments(jax.nn.relu)(jnp.asarray(frame @ frame.T), i, k)
    kinks = np.sort(
        np.mod(np.arctan2(frame[:, 1], frame[:, 0])[:, None] + [np.pi / 2, -np.pi / 2], 2 * np.pi).ravel()
    )

    def mean(v, w):
        def f(turn):
            z = frame @ [np.cos(turn), np.sin(turn)]
            return (z[i] > 0) * (z[k] > 0) * max(z[v], 0.0) * max(z[w], 0.0)

        edges = np.concatenate([[0.0], kinks, [2 * np.pi]])
        return sum(quad(f, *pair)[0] for pair in zip(edges[:-1], edges[1:], strict=True)) / np.pi

    expected = [[mean(v, w) for w in range(4)] for v in range(4)]
    np.testing.assert_allclose(found, expected, atol=1e-10)


@pytest.mark.parametrize(
    ("activation", "rates"),
    [(SOFT, {"outer": 1.0}), ("relu", {"outer": 0.5, "inner": np.array([1.0, 0.3, 2.0])})],
)
def test_gradient_flow_is_that_of_the_population(activation, rates, key):
    """The same run in the weights themselves, in more dimensions than there are neurons; output weights learn."""
    flow, data = committee(activation, 2, 6, **rates)
    cloud = mf.Cloud(mf.Neurons(jnp.array([1.0, -0.5, 0.7]), 0.5 * jax.random.normal(key, (3, 6))))
    law, start = data.overlaps(cloud)
    times = [0.5, 2.0, 8.0]
    weights = mf.solve(flow, cloud, data, 8.0, ts=times, step=FINE)
    reduced = mf.solve(flow, start, law, 8.0, ts=times, step=FINE)
    np.testing.assert_allclose(reduced.energy, weights.energy, atol=1e-9)
    np.testing.assert_allclose(reduced.clouds.particles.a, weights.clouds.particles.a, atol=1e-9)
    b, q_and_r = weights.clouds.particles.b, split(reduced.clouds)
    np.testing.assert_allclose(q_and_r[0], b @ jnp.swapaxes(b, 1, 2), atol=1e-9)
    np.testing.assert_allclose(q_and_r[1], b[:, :, :2], atol=1e-9)
    rates_of_fall = [mf.dissipation(flow, *pair) for pair in ((start, law), (cloud, data))]
    np.testing.assert_allclose(*rates_of_fall, rtol=1e-12)


def test_several_outputs():
    flow = mf.vanilla("relu", alpha="sqrt")
    rng = np.random.default_rng(2)
    draw = lambda m: mf.Cloud(mf.Neurons(rng.normal(size=(m, 2)), rng.normal(size=(m, 4))))
    student, teacher = draw(3), draw(2)
    data = GaussianPopulation(flow, teacher)
    law, start = data.overlaps(student)
    np.testing.assert_allclose(mf.energy(flow, start, law), mf.energy(flow, student, data), rtol=1e-12)
    moved, full = mf.velocity(flow, start, law), mf.velocity(flow, student, data)
    np.testing.assert_allclose(moved.a, full.a, rtol=1e-11)
    np.testing.assert_allclose(split(start.at(moved))[1], full.b @ teacher.particles.b.T, rtol=1e-11)


PLATEAUS = {2: 0.011611, 3: 0.020297, 5: 0.036226}


@pytest.mark.parametrize("k", [2, *(pytest.param(k, marks=pytest.mark.slow) for k in (3, 5))])
def test_the_symmetric_plateau(k):
    flow, data = committee(SOFT, k)
    law, start = data.overlaps(mf.Cloud(mf.Neurons(jnp.ones(k), jnp.full((k, k), 0.3))))
    sol = mf.solve(flow, start, law, 300.0, clock="gradient", step=mf.Adaptive(1e-9, 1e-11))
    assert abs(float(sol.energy[-1]) - PLATEAUS[k]) < 5e-7


R0, Q0 = np.array([[0.02, 0.01], [0.0, 0.015]]), np.array([[0.3, 0.02], [0.02, 0.25]])


def by_hand(k=2):
    """The cloud of overlaps R0 and Q0, made without any weights."""
    return mf.Cloud(mf.Neurons(jnp.ones(k), jnp.concatenate([Q0, R0], axis=1)))


def test_one_pass_descent_in_the_limit_is_that_of_saad_and_solla():
    """Their equations with eta^2 terms, written term by term and integrated by scipy."""
    times = np.array([0.5, 2.0, 6.0])
    flow, data = committee(SOFT)
    law, _ = data.overlaps(by_hand_in_the_plane(), rate=1.5)
    # samples over d are time on the gradient clock over eta
    sol = mf.solve(flow, by_hand(), law, 9.0, ts=1.5 * times, clock="gradient", step=mf.Adaptive(1e-9, 1e-11))
    r, q = overlap_path(R0, Q0, 1.5, times)
    found = split(sol.clouds)
    np.testing.assert_allclose(found[0], q, atol=1e-6)
    np.testing.assert_allclose(found[1], r, atol=1e-6)
    np.testing.assert_allclose(sol.energy, [energy(*pair) for pair in zip(r, q, strict=True)], atol=1e-6)


def by_hand_in_the_plane():
    """Any two students: a law depends on their number alone."""
    return mf.Cloud(mf.Neurons(jnp.ones(2), jnp.eye(2)))


@pytest.mark.parametrize(
    ("activation", "rates"), [(SOFT, {"outer": 0.7}), ("relu", {"inner": np.array([0.4, 1.3])})]
)
def test_a_step_of_descent_has_the_mean_of_steps_on_fresh_samples(activation, rates):
    """All terms at once, within 4 standard errors: d = 3, noise on the targets, trained output weights, own rates."""
    d, eta, noise, draws = 3, 0.8, 0.5, 1_000_000
    flow, data = committee(activation, 1, d, **rates)
    rng = np.random.default_rng(3)
    a, b = np.array([1.0, -0.6]), 0.8 * rng.normal(size=(2, d))
    law, start = data.overlaps(mf.Cloud(mf.Neurons(a, b)), rate=eta, dim=d, noise=noise)
    run = mf.descend(flow, start, law, 1, step=eta / d, clock="gradient")
    outer, inner = rates.get("outer", 0.0), np.broadcast_to(rates.get("inner", 1.0), 2)
    x = rng.normal(size=(draws, d))
    slope = jax.vmap(jax.vmap(jax.grad(lambda z: flow.feature.activation(z))))
    value, rise = (np.asarray(f(jnp.asarray(x @ b.T))) for f in (flow.feature.activation, slope))
    target = np.asarray(flow.feature.activation(jnp.asarray(x[:, 0]))) + noise * rng.normal(size=draws)
    error = value @ a - target
    step = eta / d * inner * a * error[:, None] * rise  # times x
    new = b[None] - step[:, :, None] * x[:, None, :]
    samples = np.concatenate([new @ np.swapaxes(new, 1, 2), new[:, :, :1]], axis=2)
    gap = np.abs(samples.mean(axis=0) - run.final.particles.b)
    assert np.all(gap < 4 * samples.std(axis=0) / draws**0.5)
    moved = a - eta / d * outer * error[:, None] * value
    # a layer that stands still has no error but the rounding of a mean
    assert np.all(
        np.abs(moved.mean(axis=0) - run.final.particles.a) < 4 * moved.std(axis=0) / draws**0.5 + 1e-9
    )
    # the terms in eta^2 are seen at this precision
    plain = mf.descend(
        flow, start, data.overlaps(mf.Cloud(mf.Neurons(a, b)))[0], 1, step=eta / d, clock="gradient"
    )
    assert np.any(
        np.abs(samples.mean(axis=0) - plain.final.particles.b) > 40 * samples.std(axis=0) / draws**0.5
    )


def test_runs_are_differentiable_and_batched():
    """The slope of the final error in the rate, the overlaps and d, against finite differences; starts side by side."""
    flow, data = committee(SOFT)

    def final(rate, scale, dim):
        law, _ = data.overlaps(by_hand_in_the_plane(), rate=rate, dim=dim)
        start = by_hand()
        start = start.at(start.particles._replace(b=scale * start.particles.b))
        return mf.descend(flow, start, law, 8, step=0.5, clock="gradient").energy[-1]

    at = (0.7, 1.1, 50.0)
    slopes = jax.jit(jax.grad(final, argnums=(0, 1, 2)))(*at)
    both = jax.jit(jax.vmap(final, in_axes=(0, None, None)))
    for k, h in enumerate((1e-4, 1e-4, 1e-2)):
        ends = [final(*(u + s * h * (j == k) for j, u in enumerate(at))) for s in (1, -1)]
        np.testing.assert_allclose(slopes[k], (ends[0] - ends[1]) / (2 * h), rtol=1e-5)
    rates = jnp.array([0.2, 0.7])
    np.testing.assert_allclose(both(rates, *at[1:])[1], final(*at), rtol=1e-12)


def test_runs_are_saved_and_resumed(tmp_path):
    flow, data = committee(SOFT)
    law, start = data.overlaps(by_hand_in_the_plane(), rate=0.5)
    whole = mf.descend(flow, by_hand(), law, 8, step=0.5, every=4, clock="gradient")
    half = mf.descend(flow, by_hand(), law, 4, step=0.5, clock="gradient")
    half = mf.Solution.load(half.save(tmp_path / "half"))
    rest = mf.descend(flow, half.final, law, 4, step=0.5, clock="gradient", state=half.state)
    np.testing.assert_array_equal(rest.final.particles.b, whole.final.particles.b)
    with pytest.raises(ValueError, match="data"):
        other, _ = data.overlaps(by_hand_in_the_plane(), rate=0.6)
        mf.descend(flow, half.final, other, 4, step=0.5, clock="gradient", state=half.state)
    small = jax.tree.map(lambda u: u.astype(jnp.float32), (by_hand(), law))
    single = mf.descend(flow, *small, 8, step=0.5, clock="gradient")
    assert single.energy.dtype == jnp.float32
    np.testing.assert_allclose(single.energy[-1], whole.energy[-1], rtol=1e-4)


def test_hundreds_of_neurons():
    k = 100
    flow, data = committee("relu", k)
    rng = np.random.default_rng(4)
    cloud = mf.Cloud(mf.Neurons(jnp.ones(k), rng.normal(size=(k, k)) / k))
    law, start = data.overlaps(cloud)
    runs = [
        mf.solve(flow, *pair, 0.02, step=0.005, clock="gradient") for pair in ((start, law), (cloud, data))
    ]
    assert runs[0].energy[-1] < 0.9 * mf.energy(flow, cloud, data)
    np.testing.assert_allclose(runs[0].energy[-1], runs[1].energy[-1], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("activation", [SOFT, "relu"])
def test_networks_in_many_dimensions_follow(activation):
    """One pass at d = 500 to 4000, before the escape: the error falls like 1/sqrt(d)."""
    eta, alpha, seeds, sizes = 1.0, 4.0, 16, (500, 1000, 2000, 4000)
    flow, data = committee(activation)
    law, _ = data.overlaps(by_hand_in_the_plane(), rate=eta)
    limit = mf.solve(flow, by_hand(), law, eta * alpha, clock="gradient", step=mf.Adaptive(1e-9, 1e-11))
    errors = []
    for d in sizes:
        flow, data = committee(activation, 2, d)
        cloud = mf.Cloud(mf.Neurons(jnp.ones(2), students(d, R0, Q0, d)))

        def online(key, flow=flow, data=data, cloud=cloud, d=d):
            batches = mf.Batches(1, key, sampler=data.sample)
            steps = int(alpha * d)
            run = mf.descend(
                flow, cloud, data, steps, step=eta / d, clock="gradient", batches=batches, throw=False
            )
            return data.overlaps(run.final)[1].particles.b

        b = jax.jit(jax.vmap(online))(jax.random.split(jax.random.key(1), seeds))
        errors.append(float(jnp.sqrt(jnp.mean((b - limit.final.particles.b[None]) ** 2))))
    slope = np.polyfit(np.log(sizes), np.log(errors), 1)[0]
    assert abs(slope + 0.5) < 0.15, (slope, errors)


def test_what_overlaps_cannot_do_is_refused(key):
    flow, data = committee(SOFT)
    law, start = data.overlaps(by_hand_in_the_plane())
    with pytest.raises(ValueError, match="activation must be one of"):
        soft = mf.vanilla("tanh")
        GaussianPopulation(soft, by_hand_in_the_plane()).overlaps(by_hand_in_the_plane(), rate=1.0)
    with pytest.raises(ValueError, match="cloud must hold Neurons"):
        data.overlaps(mf.Cloud(mf.Neurons(jnp.ones(2), jnp.eye(2, 3))))
    for other in (
        mf.batchnorm(SOFT, mean=np.zeros(4), covariance=np.eye(4)),
        mf.vanilla(SOFT, inner="sphere"),
    ):
        with pytest.raises(ValueError, match="made by meanflow.vanilla"):
            mf.energy(other, start.at(mf.Neurons(jnp.ones(2), jnp.eye(2, 4))), law)
    with pytest.raises(ValueError, match="another loss"):
        mf.energy(mf.vanilla(SOFT, "huber"), start, law)
    with pytest.raises(ValueError, match="2 students only, got 1"):
        mf.first_variation(flow, start, law, mf.Neurons(jnp.ones(1), jnp.ones((1, 4))))
