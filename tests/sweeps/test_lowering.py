"""The compiled programs lower for CPU, GPU and TPU in float32, without float64 and without host callbacks."""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meanflow as mf
from meanflow import kernels
from meanflow.solvers import eulerian
from meanflow.sweeps import program

PLATFORMS = ["cpu", "cuda", "tpu"]
KEYS = jax.random.key(0), jax.random.key(1)


def single(tree):
    """The same pytree in float32."""
    return jax.tree.map(
        lambda u: u.astype(jnp.float32) if eqx.is_array(u) and u.dtype == jnp.float64 else u, tree
    )


def line():
    x = np.linspace(-1, 1, 5, dtype=np.float32)
    return mf.Dataset(x, np.sin(3 * x), "sum")


def plane():
    x = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)
    return mf.Dataset(x, np.abs(x[:, 0]))


def labelled():
    return mf.lifted().init(KEYS[0], 4, labels=1.0)


def flat():
    return mf.vanilla().init(KEYS[1], 4, dim=2)


def adaptive(cloud, data):
    return mf.solve(mf.batchnorm("tanh"), cloud, data, 1.0).energy


def with_save_times(cloud, data):
    observe = {"speed": mf.dissipation}
    return mf.solve(mf.batchnorm("tanh"), cloud, data, 1.0, ts=3, observe=observe, steady=1e-3).observed


def gradient(cloud, data):
    def loss(w):
        return mf.solve(mf.vanilla("tanh"), cloud.at(w), data, 1.0, step=0.25, solver=diffrax.Euler()).energy[
            -1
        ]

    return jax.grad(loss)(cloud.particles)


def kernel_steps(cloud, data):
    return mf.solve(
        mf.vanilla("tanh"), cloud, data, 1.0, ts=3, step=mf.KernelStep(0.2), solver=diffrax.Heun()
    ).energy


def sliding(cloud, data):
    return mf.solve(mf.lifted(), cloud, data, 1.0, solver="sliding", step=0.1, ts=3).energy


def descent(cloud, data):
    """Every univariate space, fast and dense forces."""
    polar = mf.Cloud(cloud.particles)
    runs = [
        mf.descend(mf.lifted(), cloud, data, 4, step=mf.KernelStep(0.2, 2)),
        mf.descend(mf.lifted(forces="fast"), cloud, data, 4, step=0.1),
        mf.descend(mf.canonical(variation=0.1), polar, data, 4, step=0.1),
        mf.descend(mf.full(decay=0.1), mf.geometry.balance.lift(cloud), data, 4, step=0.1),
    ]
    return [run.energy for run in runs]


def minibatches(cloud, data):
    """An optimiser with a state, batches with their own statistics, and the manifold."""
    flow = mf.batchnorm("relu")
    key = jax.random.key(3)
    adam = optax.adam(1e-2)
    noisy = mf.descend(
        flow, cloud, data, 4, optimizer=adam, batch_size=5, statistics="batch", key=key, every=2
    )
    bound = mf.batchnorm_manifold("relu").bind(data)
    start = cloud.at(
        mf.Neurons(cloud.particles.a, mf.geometry.normalize(cloud.particles.b, bound.space.sigma))
    )
    return noisy.energy, mf.descend(bound, start, data, 4, step=0.1).energy


def finite_volumes(cloud, data):
    flow = mf.batchnorm_manifold("tanh").bind(data)
    density = single(eulerian.uniform_density(6, 8, 3.0))
    return eulerian.evolve(flow, density, data, 0.5, ts=[0.2, 0.5]).energy


def network(params, x):
    return jnp.tanh(x @ params["b"].T) @ params["a"]


def tangent_kernels(cloud, data):
    params = {"a": cloud.particles.a, "b": cloud.particles.b}
    full = kernels.empirical_ntk(network, params, data.x)
    operator = kernels.ntk_operator(network, params, data.x)
    flow = kernels.kernel_flow(full, jnp.zeros_like(data.y), data.y)
    spectrum = kernels.top_eigenpairs(operator, 2, key=jax.random.key(0)).values
    closed = kernels.univariate_ntk(data.x[:, 0], data.x[:, 0])
    return full, flow(jnp.asarray([0.5, 1.0], full.dtype)), spectrum, closed


def swept(cloud, data):
    """Both solvers, with all default observables."""
    shapes = {"steps": {"steps": 4, "every": 2}, "time": {"t1": 0.5, "ts": 2}}
    runs = []
    for horizon in shapes.values():
        with jax.ensure_compile_time_eval():
            plan = mf.sweeps.prepare(
                mf.lifted("sqrt"), line(), widths=(3, 4), deltas=(-1.0, np.inf), step=0.1, **horizon
            )
            inputs = jax.tree.map(jnp.asarray, plan.inputs(plan.groups[0], plan.groups[0].cells))
        runs.append(program.batched(plan.cell(plan.groups[0]), data, inputs))
    return runs


@pytest.mark.parametrize(
    ("function", "cloud", "data"),
    [
        (adaptive, flat, plane),
        (with_save_times, flat, plane),
        (gradient, flat, plane),
        (kernel_steps, flat, plane),
        (sliding, labelled, line),
        (descent, labelled, line),
        (minibatches, flat, plane),
        (finite_volumes, flat, plane),
        (tangent_kernels, flat, plane),
        (swept, labelled, line),
    ],
)
def test_lowers_for_all_platforms(function, cloud, data):
    with jax.enable_x64(False):
        arguments = single((cloud(), data()))
        leaves, structure = jax.tree.flatten(arguments)
        run = jax.jit(lambda *leaves: function(*jax.tree.unflatten(structure, leaves)))
        text = jax.export.export(run, platforms=PLATFORMS)(*leaves).mlir_module()
    assert "f64" not in text
    assert "callback" not in text
