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
from meanflow._loops import iterate
from meanflow.kernels._empirical.spectra import top_eigenpairs
from meanflow.solvers import eulerian
from meanflow.solvers._step import top_eigenvalue
from meanflow.sweeps._devices import batched

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
        mf.descend(mf.canonical(penalty=0.1), polar, data, 4, step=0.1),
        mf.descend(mf.full(penalty=0.1), mf.univariate.balance.lift(cloud), data, 4, step=0.1),
    ]
    return [run.energy for run in runs]


def minibatches(cloud, data):
    """An optimiser with a state, batches with their own statistics, and the manifold."""
    flow = mf.batchnorm("relu")
    key = jax.random.key(3)
    adam = optax.adam(1e-2)
    noisy = mf.descend(
        flow, cloud, data, 4, optimizer=adam, batches=mf.solvers.Batches(5, key, statistics="batch"), every=2
    )
    bound = mf.batchnorm_manifold("relu").bind(data)
    start = cloud.at(
        mf.Neurons(cloud.particles.a, mf.geometry.normalize(cloud.particles.b, bound.space.covariance))
    )
    return noisy.energy, mf.descend(bound, start, data, 4, step=0.1).energy


def every_univariate_model(cloud, data):
    """Both solvers on every space that ``descent`` and ``sliding`` leave out."""
    polar = mf.Cloud(cloud.particles)
    models = {
        mf.canonical: polar,
        mf.planar: polar,
        mf.radial: polar,
        mf.full: mf.univariate.balance.lift(cloud),
    }
    euler = {"step": 0.25, "solver": diffrax.Euler(), "ts": 2}
    continuous = [mf.solve(make(), start, data, 0.5, **euler).energy for make, start in models.items()]
    discrete = [mf.descend(make(), start, data, 2, step=0.1).energy for make, start in models.items()]
    return continuous, discrete


def sliding_on_the_cylinder(cloud, data):
    polar = mf.Cloud(cloud.particles)
    return [
        mf.solve(flow, polar, data, 0.2, solver=mf.solvers.Sliding(), step=0.1).energy
        for flow in (mf.canonical(), mf.planar())
    ]


def gradient_through_kinks(cloud, data):
    def loss(w):
        through = mf.solvers.Sliding(max_events=2)
        return mf.solve(mf.lifted(), cloud.at(w), data, 0.2, solver=through, step=0.1).energy[-1]

    return jax.grad(loss)(cloud.particles)


def other_adjoints(cloud, data):
    def end(y, adjoint, run=mf.solve):
        return run(mf.vanilla("tanh"), cloud, mf.Dataset(data.x, y), 1, step=0.25, adjoint=adjoint).energy[-1]

    forward = jax.jvp(lambda y: end(y, "forward"), (data.y,), (jnp.ones_like(data.y),))
    descents = [
        jax.grad(lambda y, a=a: end(y, a, lambda *given, **k: mf.descend(*given, **k)))(data.y)
        for a in ("checkpoint", "full")
    ]
    return forward, jax.grad(lambda y: end(y, "full"))(data.y), descents


def resumed(cloud, data):
    flow = mf.vanilla("tanh")
    half = mf.solve(flow, cloud, data, 0.5, step=0.25)
    whole = mf.solve(flow, cloud, data, 1.0, step=0.25, state=half.state)
    first = mf.descend(flow, cloud, data, 2, step=0.1)
    return whole.energy, mf.descend(flow, cloud, data, 2, step=0.1, state=first.state).energy


def loops_and_steps(cloud, data):
    flow = mf.vanilla("tanh")
    count = iterate(lambda u, v: u + v, jnp.zeros((), data.y.dtype), data.y, 8, 4, lambda u: u)
    return count, top_eigenvalue(flow, cloud, data)


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
    spectrum = top_eigenpairs(operator, 2, key=jax.random.key(0)).values
    closed = mf.univariate.wide_kernel(data.x[:, 0], data.x[:, 0])
    return full, flow(jnp.asarray([0.5, 1.0], full.dtype)), spectrum, closed


def networks(params, x):
    """Two outputs and two layers, for the methods of the kernel engine."""
    return jnp.tanh(x @ params["b"].T) @ jnp.stack([params["a"], params["a"] ** 2], axis=1)


def kernel_methods(cloud, data):
    """Every method, every reduction, chunks, coupled samples, and matrix-free spectra."""
    params = {"a": cloud.particles.a, "b": cloud.particles.b}
    batch = kernels.Normalized(
        lambda p, x, s: (networks(p, x) - s[0]) / s[1],
        lambda p, x: (jnp.mean(networks(p, x), 0, keepdims=True), jnp.std(networks(p, x), 0, keepdims=True)),
    )
    found = [
        kernels.empirical_ntk(
            networks, params, data.x, data.x[:3], outputs=outputs, method=kernels.Method(method, chunk=3)
        )
        for method in ("jacobian", "products", "structured")
        for outputs in ("full", "trace", "diagonal")
    ]
    found += [
        kernels.empirical_ntk(batch, params, data.x, stats=stats) for stats in ("batch", "train", "frozen")
    ]
    operator = kernels.ntk_operator(batch, params, data.x, stats="batch")
    return found, kernels.spectrum(operator, top=2, key=jax.random.key(0))


def kernels_in_closed_form(cloud, data):
    kernel, shapes = (
        data.x @ data.x.T,
        tuple(jnp.ones(s, data.x.dtype) for s in ((data.x.shape[1], 4), (4, 1))),
    )
    apply = lambda p, x: jax.nn.gelu(jax.nn.relu(x @ p[0])) @ p[1]
    infinite = kernels.infinite_width(apply, shapes, data.x, variances=(2.0, 2.0))
    course = kernels.kernel_flow(kernel, jnp.zeros_like(data.y), data.y, learning_rate=0.1)(jnp.arange(4))
    return infinite, kernels.batchnorm_ntk(kernel, data.y), course


def lower_sweep(flow, shared, data, **settings):
    with jax.ensure_compile_time_eval():
        plan = mf.sweep(flow, shared(), widths=(3, 4), step=0.1, compute=False, **settings)
        inputs = jax.tree.map(jnp.asarray, plan.inputs(plan.groups[0], plan.groups[0].cells))
    return batched(plan.cell(plan.groups[0]), data, inputs)


def swept(cloud, data):
    """All three solvers, with all default observables."""
    horizons = ({"steps": 4, "every": 2}, {"t1": 0.5, "ts": 2}, {"t1": 0.2, "solver": "sliding"})
    ends = {"deltas": (-1.0, np.inf)}
    return [lower_sweep(mf.lifted(alpha="sqrt"), line, data, **ends, **horizon) for horizon in horizons]


def swept_raw(cloud, data):
    return lower_sweep(mf.full(alpha="sqrt"), line, data, steps=2, observe=["default", "neurons"])


def swept_in_the_plane(cloud, data):
    batches = {"steps": 4, "batches": mf.solvers.Batches(5, statistics="batch")}
    return [
        lower_sweep(mf.vanilla("relu"), plane, data, steps=4),
        lower_sweep(mf.batchnorm("relu"), plane, data, **batches),
        lower_sweep(mf.batchnorm_manifold("tanh"), plane, data, t1=0.5),
    ]


CASES = [
    (adaptive, flat, plane),
    (with_save_times, flat, plane),
    (gradient, flat, plane),
    (kernel_steps, flat, plane),
    (sliding, labelled, line),
    (descent, labelled, line),
    (minibatches, flat, plane),
    (every_univariate_model, labelled, line),
    (sliding_on_the_cylinder, labelled, line),
    (gradient_through_kinks, labelled, line),
    (other_adjoints, flat, plane),
    (resumed, flat, plane),
    (loops_and_steps, flat, plane),
    (finite_volumes, flat, plane),
    (tangent_kernels, flat, plane),
    (kernel_methods, flat, plane),
    (kernels_in_closed_form, flat, plane),
    (swept, labelled, line),
    (swept_raw, labelled, line),
    (swept_in_the_plane, flat, plane),
]


def flat_single(function, cloud, data):
    """A case as a function of arrays of float32, and these arrays."""
    leaves, structure = jax.tree.flatten(single((cloud(), data())))
    return lambda *leaves: function(*jax.tree.unflatten(structure, leaves)), leaves


@pytest.mark.parametrize(("function", "cloud", "data"), CASES)
def test_lowers_for_all_platforms(function, cloud, data):
    with jax.enable_x64(False):
        run, leaves = flat_single(function, cloud, data)
        text = jax.export.export(jax.jit(run), platforms=PLATFORMS)(*leaves).mlir_module()
    assert "f64" not in text
    assert "callback" not in text


def test_what_must_not_be_there_would_be_found():
    """The words looked for are those that jax writes."""
    x = jnp.ones(2)
    called = jax.jit(lambda u: jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(u.shape, u.dtype), u))
    text = called.lower(x).as_text()
    assert "callback" in text and "f64" in text
