"""Modules of flax, equinox and haiku as functions: against their own training and inference modes."""

import chex
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from meanflow import kernels, layers


def gram(function, params):
    """J J' (T, T, C, C) by forward mode, which the engine does not use."""
    jacobian = jax.tree.leaves(jax.jit(jax.jacfwd(function))(params))
    flat = [j.reshape(j.shape[:2] + (-1,)) for j in jacobian]
    return sum(np.einsum("tcp,sdp->tscd", j, j) for j in flat)


def flax_norm(features, rngs):
    layer = nnx.BatchNorm(features, rngs=rngs, param_dtype=jnp.float64, use_fast_variance=False)
    layer.mean.set_value(jnp.zeros(features))  # flax keeps them in float32
    layer.var.set_value(jnp.ones(features))
    return layer


def own_norm(features, rngs):
    return layers.UnitizedBatchNorm(features, alpha_init=0.3, rngs=rngs, param_dtype=jnp.float64)


class Net(nnx.Module):
    """Convolution, batch norm called twice, dropout, head."""

    def __init__(self, rngs, norm=flax_norm, rate=0.0):
        self.conv = nnx.Conv(2, 4, (3,), rngs=rngs, param_dtype=jnp.float64)
        self.norm = norm(4, rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.head = nnx.Linear(4, 2, rngs=rngs, param_dtype=jnp.float64)

    def __call__(self, x):
        h = self.norm(self.conv(x))
        h = self.norm(jnp.tanh(h) + h)
        return self.head(self.dropout(jnp.mean(jnp.tanh(h), axis=1)))


X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 6, 2)))


def trained(norm, seed=0, rate=0.0):
    """A network whose running averages have moved."""
    model = Net(nnx.Rngs(seed), norm, rate)
    model.dropout.deterministic = True
    for shift in (0.0, 1.0, 2.0):
        model((1 + shift) * X + shift)
    return model


@pytest.mark.parametrize("norm", [flax_norm, pytest.param(own_norm, marks=pytest.mark.slow)])
def test_nnx_training_and_inference(norm):
    model = trained(norm)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    by_batch = gram(lambda p: nnx.merge(graph, p, rest, copy=True)(X), params)
    apply, found = kernels.from_module(model)
    np.testing.assert_allclose(
        kernels.empirical_ntk(apply, found, X, stats="batch"), by_batch, rtol=1e-9, atol=1e-10
    )
    inference = kernels.empirical_ntk(apply, found, X, stats="running")
    frozen = kernels.empirical_ntk(apply, found, X, stats="frozen")
    model.eval()
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    exact = gram(lambda p: nnx.merge(graph, p, rest, copy=True)(X), params)
    # running averages are used in inference, and after eval() without a word
    np.testing.assert_allclose(inference, exact, rtol=1e-9, atol=1e-10)
    apply, found = kernels.from_module(model)
    np.testing.assert_allclose(kernels.empirical_ntk(apply, found, X), exact, rtol=1e-9, atol=1e-10)
    assert np.abs(frozen - exact).max() > 0.1 * np.abs(exact).max()  # "frozen" is not inference


def test_nnx_modules_of_one_class_share_programs():
    class Counted(nnx.Module):
        def __init__(self, seed):
            self.net = Net(nnx.Rngs(seed))
            self.net.eval()

        def __call__(self, x):
            return self.net(x)

    @eqx.filter_jit
    @chex.assert_max_traces(n=1)
    def kernel(apply, params):
        return kernels.empirical_ntk(apply, params, X, stats="running")

    first = kernel(*kernels.from_module(Counted(0)))
    second = kernel(*kernels.from_module(Counted(1)))
    assert float(jnp.abs(first - second).max()) > 1e-3


def test_nnx_random_numbers_are_refused_or_fixed():
    model = trained(flax_norm, rate=0.5)
    model.eval()
    model.dropout.deterministic = False
    with pytest.raises(ValueError, match="draws random numbers"):
        kernels.empirical_ntk(*kernels.from_module(model), X)
    apply, params = kernels.from_module(model, key=jax.random.key(4))
    np.testing.assert_allclose(apply(params, X)[2:3], apply(params, X[2:3]), rtol=1e-12)  # one mask for all
    ours = kernels.empirical_ntk(apply, params, X)
    np.testing.assert_allclose(ours, gram(lambda p: apply(p, X), params), rtol=1e-9, atol=1e-12)
    # the gradient with respect to the head shows the thinned units: zero in every sample, doubled elsewhere
    model.dropout.deterministic = True
    whole, _ = kernels.from_module(model)
    head = lambda f: jax.jacfwd(lambda p: f(p, X))(params)["head"]["kernel"][...][:, 0, :, 0]
    thinned, full = head(apply), head(whole)
    kept = np.all(np.isclose(thinned, 2 * full), axis=0)
    assert np.all(kept | np.all(thinned == 0, axis=0)) and 0 < kept.sum() < 4
    model.train()
    with pytest.raises(ValueError, match="batch norm in training mode"):
        kernels.from_module(model, key=jax.random.key(4))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        h = nn.Dense(4, param_dtype=jnp.float64)(x.reshape(x.shape[0], -1))
        h = nn.BatchNorm(use_running_average=not train, momentum=0.9, param_dtype=jnp.float64)(h)
        h = nn.Dropout(0.5, deterministic=not train)(jnp.tanh(h))
        return nn.Dense(2, param_dtype=jnp.float64)(h)


def test_linen_in_inference_needs_no_arguments():
    net = Linen()
    variables = net.init(jax.random.key(0), X)
    moved = jax.tree.map(lambda a: a.astype(jnp.float64) + 0.5, variables["batch_stats"])
    variables = {**variables, "batch_stats": moved}
    apply, params = kernels.from_module(net, variables)
    exact = gram(lambda p: net.apply({"params": p, "batch_stats": moved}, X), params)
    np.testing.assert_allclose(kernels.empirical_ntk(apply, params, X), exact, rtol=1e-9, atol=1e-12)
    explicit, _ = kernels.from_module(net, variables, train={"train": True}, evaluate={"train": False})
    ours = kernels.empirical_ntk(explicit, params, X, stats="running")
    np.testing.assert_allclose(ours, exact, rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match="draws random numbers"):
        kernels.empirical_ntk(explicit, params, X, stats="batch")


@pytest.mark.parametrize("momentum", [0.9, 0.99, 0.9990234375, 0.999])
def test_linen_moments_in_single_precision(momentum):
    """Taken out of what training stores, whatever the momentum and the scale of the data."""
    norm = nn.BatchNorm(momentum=momentum, use_fast_variance=False)
    x = np.random.default_rng(0).normal(size=(64, 3))
    found, exact = [], []
    for scale in (1.0, 1e3, 3e3, 1e4, 1e6):
        batch = jnp.asarray(scale * (x + 0.5), jnp.float32)
        variables = norm.init(jax.random.key(0), batch, use_running_average=True)
        modes = {"use_running_average": False}, {"use_running_average": True}
        apply, params = kernels.from_module(norm, variables, train=modes[0], evaluate=modes[1])
        found.append(jax.jit(apply.statistics)(params, batch))
        wide = np.asarray(batch, np.float64)
        exact.append({"mean": wide.mean(0), "var": wide.var(0)})
        chex.assert_type(jax.tree.leaves(found), jnp.float32)
    for ours, truth in zip(found, exact, strict=True):
        for name in truth:
            np.testing.assert_allclose(ours[name], truth[name], rtol=1e-6)


@pytest.mark.parametrize(
    "scale", [1.0, 3e3, 1e6, *(pytest.param(s, marks=pytest.mark.slow) for s in (1e3, 1e4))]
)
def test_linen_kernel_of_large_inputs_in_single_precision(scale):
    """Against the Jacobian of the module itself in training mode, in double precision."""

    class Deep(nn.Module):
        dtype: type

        @nn.compact
        def __call__(self, x, train):
            for _ in range(2):
                h = nn.Dense(8, param_dtype=self.dtype)(x)
                h = nn.BatchNorm(
                    use_running_average=not train, param_dtype=self.dtype, use_fast_variance=False
                )(h)
                x = jnp.tanh(h)
            return nn.Dense(2, param_dtype=self.dtype)(x)

    x = jnp.asarray(scale * np.random.default_rng(0).normal(size=(12, 3)), jnp.float32)
    net, wide = Deep(jnp.float32), Deep(jnp.float64)
    variables = net.init(jax.random.key(0), x, train=False)
    double = lambda tree: jax.tree.map(lambda a: a.astype(jnp.float64), tree)
    train = lambda p: wide.apply(
        {**double(variables), "params": p}, double(x), train=True, mutable=["batch_stats"]
    )
    exact = gram(lambda p: train(p)[0], double(variables["params"]))
    apply, params = kernels.from_module(net, variables, train={"train": True}, evaluate={"train": False})
    ours = kernels.empirical_ntk(apply, params, x, stats="batch")
    assert ours.dtype == jnp.float32
    np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())


@pytest.mark.slow
def test_linen_random_numbers():
    net = nn.Sequential([nn.Dense(6, param_dtype=jnp.float64), nn.Dropout(0.5, deterministic=False)])
    variables = net.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X[:, 0])
    apply, params = kernels.from_module(net, variables)
    with pytest.raises(ValueError, match="draws random numbers"):
        apply(params, X[:, 0])
    apply, params = kernels.from_module(net, variables, key=jax.random.key(2))
    out = apply(params, X[:, 0])
    dropped = np.all(np.asarray(out) == 0, axis=0)
    plain = np.asarray(X[:, 0] @ params["layers_0"]["kernel"] + params["layers_0"]["bias"][None])
    np.testing.assert_allclose(out, np.where(dropped[None], 0, 2 * plain), rtol=1e-12)


class Equinox(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self, key, mode):
        one, two = jax.random.split(key)
        self.first, self.last = eqx.nn.Linear(12, 4, key=one), eqx.nn.Linear(4, 2, key=two)
        self.norm = eqx.nn.BatchNorm(4, axis_name="batch", mode=mode, momentum=0.8)

    def __call__(self, x, state):
        h, state = self.norm(self.first(x.reshape(-1)), state)
        return self.last(jnp.tanh(h)), state


@pytest.mark.parametrize("mode", ["batch", pytest.param("ema", marks=pytest.mark.slow)])
def test_equinox_batch_norm(mode):
    model, state = eqx.nn.make_with_state(Equinox)(jax.random.key(0), mode)
    run = lambda model, x, state: jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
        x, state
    )
    fresh = jax.tree.map(lambda a: a, state)
    for shift in (0.0, 1.0):
        _, state = run(model, (1 + shift) * X + shift, state)
    apply, params = kernels.from_module(model, state=state)
    static = eqx.partition(model, eqx.is_inexact_array)[1]
    # a fresh state normalizes by the batch in both modes
    trained = gram(lambda p: run(eqx.combine(p, static), X, jax.tree.map(lambda a: a, fresh))[0], params)
    ours = kernels.empirical_ntk(apply, params, X, stats="batch")
    np.testing.assert_allclose(ours, trained, rtol=1e-9, atol=1e-12)
    inference = eqx.nn.inference_mode(model)
    exact = gram(
        lambda p: run(eqx.combine(p, eqx.partition(inference, eqx.is_inexact_array)[1]), X, state)[0], params
    )
    ours = kernels.empirical_ntk(apply, params, X, stats="running")
    np.testing.assert_allclose(ours, exact, rtol=1e-9, atol=1e-12)
    plain, params = kernels.from_module(inference, state=state)
    np.testing.assert_allclose(kernels.empirical_ntk(plain, params, X), exact, rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match="per_sample"):
        kernels.from_module(model, state=state, per_sample=False)


def test_equinox_dropout_with_a_key():
    model = eqx.nn.Sequential([eqx.nn.Linear(2, 6, key=jax.random.key(0)), eqx.nn.Dropout(0.5)])
    apply, params = kernels.from_module(model, key=jax.random.key(1))
    out = np.asarray(apply(params, X[:, 0]))
    dropped = np.all(out == 0, axis=0)
    assert 0 < dropped.sum() < 6 and np.all((out == 0) == dropped[None])


def test_haiku_style():
    w = jax.random.normal(jax.random.key(0), (2, 4))

    def transformed(params, rng, x):
        h = x @ params
        return h if rng is None else h * jax.random.bernoulli(rng, 0.5, h.shape)

    exact = np.einsum("ti,si,cd->tscd", X[:, 0], X[:, 0], np.eye(4))
    apply, _ = kernels.from_module(transformed, w)
    np.testing.assert_allclose(jax.jit(apply)(w, X[:, 0]), X[:, 0] @ w, rtol=1e-12)
    ours = kernels.empirical_ntk(apply, w, X[:, 0])
    np.testing.assert_allclose(ours, exact, rtol=1e-12)
    key = jax.random.key(5)
    mask = np.asarray(jax.random.bernoulli(key, 0.5, (1, 4)))[0]
    ours = kernels.empirical_ntk(*kernels.from_module(transformed, w, key=key), X[:, 0])
    np.testing.assert_allclose(ours, exact * (mask[:, None] * mask[None, :]), rtol=1e-12)

    def with_state(params, state, rng, x):
        return state["scale"] * (x @ params), state

    state = {"scale": jnp.array(3.0)}
    ours = kernels.empirical_ntk(*kernels.from_module(with_state, w, state=state), X[:, 0])
    np.testing.assert_allclose(ours, 9 * exact, rtol=1e-12)
    with pytest.raises(ValueError, match="key cannot be given"):
        kernels.from_module(with_state, w, state=state, key=key)
