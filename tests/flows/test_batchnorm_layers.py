"""Batch norm as layers have it: trainable scale and shift, singular covariances, statistics of other data."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import largest_gap

import meanflow as mf
from meanflow import geometry
from meanflow.geometry import _omega as omega
from meanflow.measures import BatchNormNeurons, laws
from meanflow.training import data as images


def affine_problem(activation="tanh", outputs=None, points=20, dim=3, width=5):
    """(raw flow, raw cloud, manifold flow, the same cloud there, data), with scales and shifts off their start."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(points, dim)) @ rng.normal(size=(dim, dim)) + 1.0
    y = np.sin(x[:, 0])
    y = y if outputs is None else np.stack([np.roll(y, c) for c in range(outputs)], axis=1)
    data = mf.Dataset(x, y)
    raw, reduced = (
        make(activation, affine=True).bind(data) for make in (mf.batchnorm, mf.batchnorm_manifold)
    )
    cloud = raw.init(
        jax.random.key(2),
        width,
        dim=dim,
        outputs=outputs,
        b=laws.mixed_scales(dim, 0.3, 3.0),
        scale=laws.uniform(0.5, 1.5),
        shift=laws.normal(0.5),
    )
    return raw, cloud, reduced, geometry.project(cloud, raw.feature.covariance), data


class Layer(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        dense = nn.Dense(self.width, use_bias=False, param_dtype=x.dtype)(x)
        return nn.Dense(1, use_bias=False, param_dtype=x.dtype)(
            jnp.tanh(nn.BatchNorm(use_running_average=False, epsilon=0.0, param_dtype=x.dtype)(dense))
        )[:, 0]


def test_euler_steps_are_gradient_descent_of_a_layer():
    """flax's batch norm with its own scale and bias, differentiated through the statistics of the batch."""
    flow, cloud, _, _, data = affine_problem()
    w = cloud.particles
    layer = Layer(cloud.size)
    start = layer.init(jax.random.key(0), data.x)
    params = {
        "Dense_0": {"kernel": w.b.T},
        "BatchNorm_0": {"scale": w.scale, "bias": w.shift},
        "Dense_1": {"kernel": w.a[:, None]},
    }

    def f(p):
        return layer.apply(
            {"params": p, "batch_stats": start["batch_stats"]}, data.x, mutable=["batch_stats"]
        )[0]

    plain = mf.batchnorm("tanh", alpha="one", affine=True).bind(data)
    np.testing.assert_allclose(mf.predict(plain, cloud, data.x), f(params), rtol=1e-11)
    jac = [u.reshape(data.size, -1) for u in jax.tree.leaves(jax.jacobian(f)(params))]
    kernel = cloud.size * sum(u @ u.T for u in jac)
    np.testing.assert_allclose(mf.tangent_kernel(plain, cloud, data.x), kernel, rtol=1e-9, atol=1e-11)
    slope = jax.jit(jax.grad(lambda p: 0.5 * jnp.mean((f(p) - data.y) ** 2)))
    for _ in range(5):
        params = jax.tree.map(lambda u, g: u - 0.05 * g, params, slope(params))
    end = mf.descend(plain, cloud, data, 5, step=0.05, clock="gradient").final.particles
    theirs = BatchNormNeurons(
        a=params["Dense_1"]["kernel"][:, 0],
        b=params["Dense_0"]["kernel"].T,
        scale=params["BatchNorm_0"]["scale"],
        shift=params["BatchNorm_0"]["bias"],
    )
    assert largest_gap(end, theirs) < 1e-12


@pytest.mark.parametrize("outputs", [None, 2])
def test_scale_and_shift_change_no_norms(outputs):
    """|b| and, for ReLU, |a|^2 - scale^2 - shift^2 are orthogonal to the velocity; the manifold agrees."""
    raw, cloud, reduced, there, data = affine_problem("relu", outputs)
    v, w = mf.velocity(raw, cloud, data), cloud.particles
    np.testing.assert_allclose(jnp.sum(v.b * w.b, axis=1), 0.0, atol=1e-14)
    rows = lambda u, p: jnp.sum((u * p).reshape(cloud.size, -1), axis=1)
    np.testing.assert_allclose(rows(v.a, w.a) - v.scale * w.scale - v.shift * w.shift, 0.0, atol=1e-14)
    assert float(jnp.max(jnp.abs(v.scale))) > 1e-3 and float(jnp.max(jnp.abs(v.shift))) > 1e-3
    # the same flow in reduced coordinates, with the metric da^2 + c^2 G + dscale^2 + dshift^2
    pushed = jax.jvp(lambda b: geometry.normalize(b, raw.feature.covariance), (w.b,), (v.b,))[1]
    u = mf.velocity(reduced, there, data)
    assert largest_gap(u, v._replace(b=pushed)) < 1e-12
    lost = mf.dissipation(raw, cloud, data)
    np.testing.assert_allclose(mf.dissipation(reduced, there, data), lost, rtol=1e-12)
    np.testing.assert_allclose(there.weights @ reduced.space.inner(there, u, u), lost, rtol=1e-12)
    _, rate = jax.jvp(lambda p: mf.energy(reduced, there.at(p), data), (there.particles,), (u,))
    np.testing.assert_allclose(rate, -lost, rtol=1e-11)
    kernels = [mf.tangent_kernel(f, c, data.x) for f, c in ((raw, cloud), (reduced, there))]
    np.testing.assert_allclose(*kernels, rtol=1e-10, atol=1e-12)
    bare = mf.flows.make_flow(raw.feature, _Plain())  # without its closed form
    np.testing.assert_allclose(mf.tangent_kernel(bare, cloud, data.x), kernels[0], rtol=1e-10, atol=1e-12)
    # exp and log undo each other in all coordinates
    small = jax.tree.map(lambda s: 0.01 * s, u)
    back = reduced.space.log(there, reduced.space.exp(there, small))
    assert largest_gap(back, small) < 1e-12
    length = jnp.sqrt(reduced.space.inner(there, small, small))
    np.testing.assert_allclose(
        reduced.space.distance(there, reduced.space.exp(there, small)), length, rtol=1e-9
    )


class _Plain(geometry.Space):
    """Flat space under another name."""


def test_affine_runs_keep_what_they_conserve(tmp_path):
    raw, cloud, reduced, there, data = affine_problem("tanh")
    one = mf.solve(raw, cloud, data, 2.0, step=mf.Adaptive(1e-9, 1e-11), observe=["invariant_drift"])
    two = mf.solve(reduced, there, data, 2.0, step=mf.Adaptive(1e-9, 1e-11))
    assert float(one.observed["invariant_drift"][-1]) < 1e-8
    np.testing.assert_allclose(
        mf.predict(raw, one.final, data.x), mf.predict(reduced, two.final, data.x), rtol=1e-6, atol=1e-8
    )
    assert largest_gap(geometry.lift(two.final).particles, one.final.particles) < 1e-6
    assert largest_gap(mf.Solution.load(two.save(tmp_path / "run")).final.particles, two.final.particles) == 0


def digits_problem(count, dim=None):
    rows = images.digits(train=count).flat()
    x = np.asarray(rows.train_x, float)[:, :dim]
    return mf.Dataset(x, np.where(rows.train_y < 5, 1.0, -1.0)), rows


@pytest.mark.parametrize("count", [30, pytest.param(90, marks=pytest.mark.slow)])
def test_singular_covariances_reduce_the_manifold_to_their_range(count):
    """Digits: constant pixels (n > d), and fewer images than pixels (n < d)."""
    data, _ = digits_problem(count)
    raw, reduced = (make("tanh").bind(data) for make in (mf.batchnorm, mf.batchnorm_manifold))
    cloud = raw.init(jax.random.key(0), 6, dim=64, b=laws.mixed_scales(64, 0.5, 2.0))
    sigma = np.asarray(raw.feature.covariance)
    values, vectors = np.linalg.eigh(sigma)
    null = vectors[:, values < 1e-10 * values[-1]]
    assert null.shape[1] >= (5 if count == 90 else 64 - 29)
    there = geometry.project(cloud, sigma)
    b, bb = np.asarray(cloud.particles.b), np.asarray(there.particles.b)
    np.testing.assert_allclose(bb @ null, 0.0, atol=1e-10)
    np.testing.assert_allclose(there.labels, np.linalg.norm(b - (b @ null) @ null.T, axis=1), rtol=1e-10)
    # the same velocity of the predictions and the same energy; the null part of b stands still
    np.testing.assert_allclose(mf.energy(raw, cloud, data), mf.energy(reduced, there, data), rtol=1e-9)
    np.testing.assert_allclose(
        mf.dissipation(raw, cloud, data), mf.dissipation(reduced, there, data), rtol=1e-8
    )
    kernels = [mf.tangent_kernel(f, c, data.x[:20]) for f, c in ((raw, cloud), (reduced, there))]
    np.testing.assert_allclose(*kernels, rtol=1e-7, atol=1e-9)
    ends = [mf.descend(f, c, data, 40, step=0.05).final for f, c in ((raw, cloud), (reduced, there))]
    moved = np.asarray(ends[0].particles.b) - b
    assert np.abs(moved @ null).max() < 1e-12 < 1e-3 < np.abs(moved).max()
    np.testing.assert_allclose(np.asarray(ends[1].particles.b) @ null, 0.0, atol=1e-9)
    # Euler steps of the two charts agree to first order in the step; halving it halves the gap
    finer = [mf.descend(f, c, data, 80, step=0.025).final for f, c in ((raw, cloud), (reduced, there))]
    gaps = [
        float(jnp.max(jnp.abs(mf.predict(raw, one, data.x) - mf.predict(reduced, two, data.x))))
        for one, two in (ends, finer)
    ]
    assert gaps[0] < 0.05 and 0.3 < gaps[1] / gaps[0] < 0.7
    start = reduced.init(jax.random.key(1), 4, dim=64)
    np.testing.assert_allclose(start.particles.b @ null, 0.0, atol=1e-10)
    lifted = geometry.lift(there).particles.b
    np.testing.assert_allclose(jnp.linalg.norm(lifted, axis=1), there.labels, rtol=1e-12)


def test_statistics_may_come_from_all_data_while_a_part_is_trained():
    data, _ = digits_problem(120, dim=40)
    part = mf.Dataset(data.x[:15], data.y[:15])
    raw, reduced = (make("tanh").bind(data) for make in (mf.batchnorm, mf.batchnorm_manifold))
    cloud = raw.init(jax.random.key(0), 5, dim=40)
    there = reduced.space.from_raw(cloud)
    np.testing.assert_allclose(
        mf.dissipation(raw, cloud, part), mf.dissipation(reduced, there, part), rtol=1e-8
    )
    mean, covariance = data.moments()
    by_hand = mf.batchnorm("tanh", mean=mean, covariance=covariance)
    ends = [mf.descend(flow, cloud, part, 20, step=0.1).final for flow in (raw, by_hand)]
    assert largest_gap(ends[0].particles, ends[1].particles) < 1e-12
    # minibatches smaller than the dimension are no obstacle for raw neurons
    key = jax.random.key(0)
    run = mf.descend(
        mf.batchnorm("tanh"), cloud, data, 5, step=0.1, batches=mf.Batches(10, key, statistics="batch")
    )
    assert np.isfinite(run.energy).all()
    # off the plane mean + range(S) the reduced network is the raw one without the null part of b
    narrow = mf.batchnorm_manifold("tanh").bind(part)
    start = narrow.init(jax.random.key(0), 5, dim=40)
    wide, same = mf.batchnorm("tanh").bind(part), geometry.lift(start)
    for function in (mf.energy, mf.dissipation):
        np.testing.assert_allclose(function(narrow, start, data), function(wide, same, data), rtol=1e-9)
    np.testing.assert_allclose(
        mf.tangent_kernel(narrow, start, data.x), mf.tangent_kernel(wide, same, data.x), rtol=1e-8, atol=1e-10
    )


def test_the_null_space_is_found_in_both_precisions():
    """Against the rank of the centered inputs: rare pixels count, constant and repeated ones do not."""
    rows = np.asarray(images.digits().flat().train_x, np.float64)
    for x in (rows, rows[:40], np.concatenate([rows, rows[:, 10:12] - rows[:, 20:22]], axis=1), rows[:, 1:6]):
        rank = np.linalg.matrix_rank(x - x.mean(0))
        for dtype in (np.float32, np.float64):
            sigma = mf.Dataset(x.astype(dtype), np.zeros(len(x), dtype)).moments()[1]
            null = omega.null_projector(sigma)
            found = x.shape[1] - (0 if null is None else round(float(jnp.trace(null))))
            assert found == rank, (x.shape, dtype)
            if null is not None:
                np.testing.assert_allclose(null @ null, null, atol=10 * np.finfo(dtype).eps)
                np.testing.assert_allclose((x - x.mean(0)) @ null, 0.0, atol=3e3 * np.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("units", [3e3, 1e8])
def test_units_of_the_inputs_do_not_matter(units, dtype):
    """Batch norm in other units of one input is the same network: energies of raw and reduced neurons stay."""
    rng = np.random.default_rng(0)
    z, a = rng.normal(size=(50, 2)), np.linspace(-1.0, 1.0, 8)
    b, y = rng.normal(size=(8, 2)), np.sin(z[:, 0] + z[:, 1])
    plain = mf.Dataset(z, y)
    wanted = mf.energy(mf.batchnorm("tanh"), mf.Cloud(mf.Neurons(a, b)), plain)
    scaled = mf.Dataset((z * [units, 1.0]).astype(dtype), y.astype(dtype))
    cloud = mf.Cloud(mf.Neurons(a.astype(dtype), (b / [units, 1.0]).astype(dtype)))
    there = geometry.project(cloud, scaled.moments()[1])
    for flow, start in ((mf.batchnorm("tanh"), cloud), (mf.batchnorm_manifold("tanh"), there)):
        np.testing.assert_allclose(mf.energy(flow, start, scaled), wanted, rtol=1e-5)
    # one direction alone, of little variance beside the other: no direction in which inputs stand still
    lone = mf.Cloud(mf.Neurons(np.ones(1, dtype), np.array([[0.0, 1.0]], dtype)))
    assert np.isfinite(mf.energy(mf.batchnorm("tanh"), lone, scaled))
