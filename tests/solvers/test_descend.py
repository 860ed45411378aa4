"""Discrete time: Euler = gradient descent for every clock, optimisers, minibatches, resume, kernel steps."""

from functools import partial

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import MODELS, largest_gap, problem

import meanflow as mf
from meanflow._loops import iterate
from meanflow.geometry import _omega as omega
from meanflow.solvers._step import dominant_vector, top_eigenvalue


@pytest.mark.parametrize(("clock", "width"), [("mean_field", 3), ("gradient", 8), ("lazy", 3)])
def test_euler_is_gradient_descent_with_the_mapped_learning_rate(clock, width):
    """Three programs: Euler steps of solve, descend, and a hand-written loop over jax.grad of the plain loss."""
    flow, cloud, data = problem("batchnorm", width=width)
    h, steps = 1 / 32, 20
    euler = mf.solve(flow, cloud, data, steps * h, solver=diffrax.Euler(), step=h, clock=clock).final
    descent = mf.descend(flow, cloud, data, steps, step=h, clock=clock).final
    assert largest_gap(euler.particles, descent.particles) < 1e-14

    def loss(w):
        z = (data.x - flow.feature.mean[None]) @ mf.geometry.normalize(w.b, flow.feature.covariance).T
        return 0.5 * data.weights @ (jnp.mean(w.a[None] * jnp.tanh(z), axis=1) - data.y) ** 2

    rate = h if clock == "gradient" else h * width
    w, gradient = cloud.particles, jax.jit(jax.grad(loss))
    for _ in range(steps):
        w = jax.tree.map(lambda u, g: u - rate * g, w, gradient(w))
    assert largest_gap(w, descent.particles) < 1e-13


@pytest.mark.parametrize("model", MODELS)
def test_optimisers_and_momentum_match_optax(model):
    flow, cloud, data = problem(model)
    optimizer = optax.adam(0.05)
    run = mf.descend(flow, cloud, data, 10, optimizer=optimizer)
    assert float(run.ts[-1]) == 10
    if model == "batchnorm_manifold":  # stays on Omega although Adam's updates are not tangent
        length = omega.sigma_norm(run.final.particles.b, flow.feature.covariance)
        np.testing.assert_allclose(length, 1, rtol=1e-13)
        return
    w, state = cloud.particles, optimizer.init(cloud.particles)
    for _ in range(10):
        gradient = jax.tree.map(jnp.negative, mf.velocity(flow, cloud.at(w), data))
        updates, state = optimizer.update(gradient, state)
        w = optax.apply_updates(w, updates)
    assert largest_gap(w, run.final.particles) < 1e-13


def test_manifold_descent_follows_the_flow_to_first_order():
    flow, cloud, data = problem("batchnorm_manifold")
    exact = mf.solve(flow, cloud, data, 1.0, step=mf.Adaptive(1e-10, 1e-12)).final
    errors = [
        largest_gap(mf.descend(flow, cloud, data, n, step=1 / n).final.particles, exact.particles)
        for n in (64, 128)
    ]
    assert 1.8 < errors[0] / errors[1] < 2.2


def test_two_halves_equal_the_whole_bit_for_bit():
    flow, cloud, data = problem("batchnorm")
    for settings in (
        {"step": 0.1},
        {"step": mf.KernelStep(0.5, 3)},
        {"optimizer": optax.adam(0.01)},
        {"step": 0.1, "batches": mf.Batches(10, jax.random.key(0))},
    ):
        whole = mf.descend(flow, cloud, data, 10, every=5, **settings)
        half = mf.descend(flow, cloud, data, 5, every=5, **settings)
        rest = mf.descend(flow, half.final, data, 5, every=5, state=half.state, **settings)
        assert largest_gap(rest.final.particles, whole.final.particles) == 0
        np.testing.assert_array_equal(np.r_[half.energy, rest.energy], whole.energy)
        np.testing.assert_array_equal(rest.ts[-1], whole.ts[-1])


def test_batch_statistics_bias_the_gradient_like_one_over_the_batch_size():
    """Against frozen statistics on the same batches, which are unbiased; B * bias is constant up to 1 - B/N."""
    _, cloud, data = problem("batchnorm", points=200)
    data = mf.Dataset(data.x, data.y)
    frozen, fresh = mf.batchnorm("tanh").bind(data), mf.batchnorm("tanh")
    full = jnp.concatenate([u.ravel() for u in mf.velocity(frozen, cloud, data)])

    @partial(jax.jit, static_argnums=0)
    def draw(size):
        def one(key):
            batch = data.take(jax.random.choice(key, 200, (size,), replace=False))
            pair = [mf.velocity(flow, cloud, batch) for flow in (frozen, fresh)]
            return [jnp.concatenate([u.ravel() for u in v]) for v in pair]

        return jax.lax.map(one, jax.random.split(jax.random.key(1), 40_000), batch_size=2000)

    scaled = []
    for size in (8, 16, 32):
        plain, biased = (np.asarray(u) for u in draw(size))
        noise = plain.std(axis=0) / 200
        assert np.max(np.abs(plain.mean(axis=0) - full) / noise) < 5
        gap = biased - plain
        bias = np.linalg.norm(gap.mean(axis=0))
        assert bias > 3 * np.linalg.norm(gap.std(axis=0)) / 200
        scaled.append(bias / (1 / size - 1 / 200))
    assert max(scaled) / min(scaled) < 1.8


def test_norms_are_conserved_by_every_minibatch():
    """b . b' = 0 for each batch, with its own or with frozen statistics: only Euler's O(step^2) growth is left."""
    flow, cloud, data = problem("batchnorm", points=100, norms=(0.8, 1.5))
    start = jnp.linalg.norm(cloud.particles.b, axis=1)
    for statistics in ("batch", "frozen"):
        drift = []
        for size in (2e-3, 1e-3):
            batches = mf.Batches(20, jax.random.key(0), statistics=statistics)
            run = mf.descend(mf.batchnorm("tanh"), cloud, data, 50, step=size, batches=batches)
            drift.append(float(jnp.max(jnp.abs(jnp.linalg.norm(run.final.particles.b, axis=1) / start - 1))))
        assert drift[1] < 1e-3
        assert 3.5 < drift[0] / drift[1] < 4.5


@pytest.mark.parametrize("points", [20, 300])
@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_kernel_step_is_the_top_eigenvalue(points, loss):
    """Dense and power-iteration paths against numpy on the explicit kernel."""
    flow, cloud, data = problem("batchnorm", points=points, loss=loss)
    kernel = np.asarray(mf.tangent_kernel(flow, cloud, data.x))
    f = mf.predict(flow, cloud, data.x)
    bend = np.asarray(flow.loss.curvature(f, data.y) * data.weights)
    expected = np.linalg.eigvals(kernel * bend[None, :]).real.max()
    np.testing.assert_allclose(
        top_eigenvalue(flow, cloud, data), expected, rtol=1e-8 if points == 20 else 1e-3
    )


@pytest.mark.parametrize("gap", [0.0, 1e-9, 1e-7, 1e-3, 0.5])
def test_dominant_vector_against_lapack(gap):
    """The Rayleigh quotient is the top eigenvalue to 1e-8 for any gap between the first two eigenvalues."""
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(12, 12)))[0]
    spectrum = 7.0 * np.concatenate([[1.0, 1.0 - gap], rng.uniform(0, 0.4, 10)])
    matrix = (basis * spectrum) @ basis.T
    v = np.asarray(dominant_vector(jnp.asarray(matrix)))
    np.testing.assert_allclose(np.linalg.norm(v), 1, rtol=1e-12)
    np.testing.assert_allclose(v @ matrix @ v, np.linalg.eigvalsh(matrix)[-1], rtol=1.1e-8)
    assert not np.any(dominant_vector(jnp.zeros((12, 12))))


def test_kernel_step_is_stable_below_two_and_not_above():
    """Near a minimum plain descent with kappa = 1.8 contracts and with kappa = 2.3 expands."""
    flow, cloud, data = problem("vanilla", points=4, width=20)
    near = mf.solve(flow, cloud, data, 500.0, step=mf.Adaptive(1e-8, 1e-10)).final
    start = near.at(jax.tree.map(lambda u: u + 1e-6, near.particles))
    for kappa, shrinks in ((1.8, True), (2.3, False)):
        run = mf.descend(flow, start, data, 60, step=mf.KernelStep(kappa, 1))
        assert bool(run.energy[-1] < run.energy[0]) == shrinks


def test_vmap_over_steps_widths_and_seeds():
    flow, cloud, data = problem("batchnorm")
    rates = jnp.array([0.01, 0.1])
    both = jax.vmap(lambda h: mf.descend(flow, cloud, data, 8, step=h).energy)(rates)
    for k, rate in enumerate(rates):
        np.testing.assert_allclose(both[k], mf.descend(flow, cloud, data, 8, step=rate).energy, rtol=1e-14)
    small = mf.Cloud(jax.tree.map(lambda u: u[:3], cloud.particles))
    wide = jax.vmap(lambda c: mf.descend(flow, c, data, 8, step=0.1).energy)(mf.Cloud.stack([small, cloud]))
    np.testing.assert_allclose(wide[0], mf.descend(flow, small, data, 8, step=0.1).energy, rtol=1e-13)


def test_iterate_with_inputs_and_checkpoints():
    inputs = jnp.arange(12.0)
    for every, checkpoint in ((4, False), (12, True), (6, True)):
        end, seen = iterate(
            lambda s, u: 0.5 * s + u, 1.0, inputs, 12, every, lambda s: s, checkpoint=checkpoint
        )
        s, expected = 1.0, []
        for k in range(12):
            s = 0.5 * s + k
            if (k + 1) % every == 0:
                expected.append(s)
        np.testing.assert_allclose(seen, expected)
        assert float(end) == s


BAD = [
    ({"steps": 0, "step": 0.1}, "steps must be an integer >= 1"),
    ({"steps": 10}, "step must be a number or a StepRule when no optimizer"),
    ({"steps": 10, "step": 0.1, "every": 3}, "steps must be a multiple of every"),
    ({"steps": 10, "step": 0.0}, "step must be > 0"),
    ({"steps": 10, "step": 0.1, "batches": mf.Batches(31, jax.random.key(0))}, "batches must have at most"),
    ({"steps": 10, "step": 0.1, "batches": mf.Batches(3)}, "batches must have a PRNG key"),
    (
        {"steps": 10, "step": 0.1, "batches": mf.Batches(1, jax.random.key(0), statistics="batch")},
        "a size of at least 2",
    ),
]


@pytest.mark.bad_input
@pytest.mark.parametrize(("settings", "words"), BAD, ids=[words for _, words in BAD])
def test_bad_input_is_refused(settings, words):
    _, cloud, data = problem("batchnorm")
    with pytest.raises(ValueError, match=words):
        mf.descend(mf.batchnorm("tanh"), cloud, data, **settings)
