"""Every way of computing an empirical kernel against the explicit Jacobian of the same network."""

import functools

import chex
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from meanflow import kernels


def mlp(key, widths, outputs=None):
    sizes = list(widths) + ([outputs] if outputs else [1])
    keys = jax.random.split(key, len(sizes))
    layers = [
        {
            "w": jax.random.normal(k, (m, n)) / np.sqrt(m),
            "b": 0.1 * jax.random.normal(jax.random.fold_in(k, 1), (n,)),
        }
        for k, m, n in zip(keys[:-1], sizes[:-1], sizes[1:], strict=True)
    ]

    def apply(params, x):
        for layer in params[:-1]:
            x = jnp.tanh(x @ layer["w"] + layer["b"][None])
        out = x @ params[-1]["w"] + params[-1]["b"][None]
        return out if outputs else out[:, 0]

    return apply, layers


def residual(key):
    _, params = mlp(key, (3, 6, 6), 2)

    def apply(p, x):
        h = jnp.tanh(x @ p[0]["w"] + p[0]["b"][None])
        h = h + jax.nn.relu(h @ p[1]["w"] + p[1]["b"][None])
        return h @ p[2]["w"] + p[2]["b"][None]

    return apply, params


class Conv(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 3, (3, 3), rngs=rngs, param_dtype=jnp.float64)
        self.head = nnx.Linear(3, 2, rngs=rngs, param_dtype=jnp.float64)

    def __call__(self, x):
        return self.head(jnp.mean(nnx.relu(self.conv(x)), axis=(1, 2)))


class BatchNormNet(nnx.Module):
    def __init__(self, rngs, hidden, output, outputs=1):
        dense = lambda m, n: nnx.Linear(m, n, rngs=rngs, param_dtype=jnp.float64)

        def norm(n):
            layer = nnx.BatchNorm(n, rngs=rngs, param_dtype=jnp.float64, use_fast_variance=False)
            layer.mean.set_value(jnp.zeros(n))  # flax keeps them in float32, with a warning
            layer.var.set_value(jnp.ones(n))
            return layer

        self.first, self.second = dense(3, 5), dense(5, outputs)
        self.hidden = norm(5) if hidden else None
        self.output = norm(outputs) if output else None

    def __call__(self, x):
        h = self.first(x)
        h = self.hidden(h) if self.hidden is not None else h
        out = self.second(jnp.tanh(h))
        return self.output(out) if self.output is not None else out


def explicit(function, params, other=None):
    """J J' from jacfwd: shares nothing with the engine, which works with reverse mode."""
    rows = [np.asarray(j) for j in jax.tree.leaves(jax.jit(jax.jacfwd(function))(params))]
    columns = (
        rows
        if other is None
        else [np.asarray(j) for j in jax.tree.leaves(jax.jit(jax.jacfwd(other))(params))]
    )
    out = jax.eval_shape(function, params)
    wide = jax.eval_shape(other or function, params)
    flat = lambda j, o: j.reshape(o.shape[0], int(np.prod(o.shape[1:])), -1)
    kernel = sum(
        np.einsum("tcp,sdp->tscd", flat(a, out), flat(b, wide)) for a, b in zip(rows, columns, strict=True)
    )
    return kernel.reshape((out.shape[0], wide.shape[0]) + out.shape[1:] + out.shape[1:])


def case(name, key):
    one, two, three = jax.random.split(key, 3)
    x = jax.random.normal(one, (7, 3))
    z = jax.random.normal(two, (4, 3))
    if name == "conv":
        image = lambda k, n: jax.random.normal(k, (n, 5, 5, 1))
        return *kernels.from_module(Conv(nnx.Rngs(0))), image(one, 7), image(two, 4)
    if name == "linen":
        layer = lambda n: nn.Dense(n, param_dtype=jnp.float64)
        net = nn.Sequential([layer(6), jnp.tanh, layer(2)])
        return *kernels.from_module(net, net.init(three, x)), x, z
    if name == "equinox":
        return *kernels.from_module(eqx.nn.MLP(3, 2, 6, 2, key=three, dtype=jnp.float64)), x, z
    build = {
        "mlp": lambda: mlp(three, (3, 6, 5)),
        "mlp, 3 outputs": lambda: mlp(three, (3, 6, 5), 3),
        "residual": lambda: residual(three),
    }
    return *build[name](), x, z


NAMES = ["mlp", "mlp, 3 outputs", "residual", "conv", "equinox", "linen"]


@functools.cache
def oracle(name):
    """The case with K(x, x) and K(x, z) of its explicit Jacobian, once for all methods."""
    apply, params, x, z = case(name, jax.random.key(1))
    stacked = jnp.concatenate([x, z])
    whole = explicit(lambda p: apply(p, stacked), params)
    return apply, params, x, z, whole[: len(x), : len(x)], whole[: len(x), len(x) :]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", ["jacobian", "products", "structured"])
def test_methods_agree_with_explicit_jacobian(name, method):
    apply, params, x, z, exact, cross = oracle(name)
    chunked = jax.jit(
        lambda p, x, z: kernels.empirical_ntk(apply, p, x, z, method=kernels.Method(method, chunk=3))
    )
    ours = chunked(params, x, z)
    np.testing.assert_allclose(ours, cross, rtol=1e-10, atol=1e-10 * np.abs(exact).max())


@pytest.mark.parametrize("name", ["mlp, 3 outputs", "conv"])
def test_default_method_agrees_with_explicit_jacobian(name):
    apply, params, x, _, exact, _ = oracle(name)
    ours = kernels.empirical_ntk(apply, params, x)
    np.testing.assert_allclose(ours, exact, rtol=1e-10, atol=1e-10 * np.abs(exact).max())


def test_any_chunk_size():
    apply, params, x, z, _, exact = oracle("mlp, 3 outputs")
    for method, chunk in (("jacobian", 5), ("products", 1), ("structured", 1), ("structured", 100)):
        ours = kernels.empirical_ntk(apply, params, x, z, method=kernels.Method(method, chunk=chunk))
        np.testing.assert_allclose(ours, exact, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("method", ["jacobian", "products", "structured"])
def test_reductions(method):
    apply, params, x, _, full, _ = oracle("mlp, 3 outputs")
    diagonal = kernels.empirical_ntk(
        apply, params, x, outputs="diagonal", method=kernels.Method(method, chunk=2)
    )
    np.testing.assert_allclose(diagonal, np.einsum("tscc->tsc", full), rtol=1e-10, atol=1e-12)
    if method == "structured":  # the sum of the diagonal, for every method
        trace = kernels.empirical_ntk(apply, params, x, outputs="trace", method=method)
        np.testing.assert_allclose(trace, np.einsum("tscc->ts", full), rtol=1e-10, atol=1e-12)


BN = [(True, False, 2), (False, True, 1), (True, True, 2)]


@pytest.mark.parametrize(("hidden", "output", "outputs"), BN)
def test_batch_norm_against_explicit_jacobian(hidden, output, outputs, key):
    model = BatchNormNet(nnx.Rngs(1), hidden, output, outputs)
    apply, params = kernels.from_module(model)
    x = jax.random.normal(key, (6, 3))
    z = 2 * jax.random.normal(jax.random.fold_in(key, 1), (4, 3)) + 1
    graph, _, rest = nnx.split(model, nnx.Param, ...)
    trained = lambda p: nnx.merge(graph, p, rest, copy=True)(x)
    exact = explicit(trained, params)  # flax's own training mode
    for method, chunk in (("jacobian", None), ("products", 4), ("structured", 4)):
        kernel = jax.jit(
            lambda p, x, m=method, c=chunk: kernels.empirical_ntk(
                apply, p, x, stats="batch", method=kernels.Method(m, chunk=c)
            )
        )
        ours = kernel(params, x)
        np.testing.assert_allclose(ours, exact, rtol=1e-10, atol=1e-10)
    matrix = np.transpose(ours, (0, 2, 1, 3)).reshape(6 * outputs, 6 * outputs)
    np.testing.assert_allclose(matrix, matrix.T, rtol=0, atol=1e-13 * np.abs(matrix).max())
    assert np.linalg.eigvalsh(matrix).min() > -1e-13 * np.abs(matrix).max()
    if not (hidden and output):
        return  # the rest once, on the network with everything

    # "train": the statistics of x written out by hand, gradients through them included
    def normalise(p, h, reference, name):
        mean, centred = jnp.mean(reference, 0), reference - jnp.mean(reference, 0)[None]
        spread = jnp.sqrt(jnp.mean(centred**2, 0) + 1e-5)
        return (h - mean[None]) / spread[None] * p[name]["scale"][...][None] + p[name]["bias"][...][None]

    def by_hand(p):
        dense = lambda h, name: h @ p[name]["kernel"][...] + p[name]["bias"][...][None]
        a, b = dense(x, "first"), dense(z, "first")
        if hidden:
            a, b = normalise(p, a, a, "hidden"), normalise(p, b, a, "hidden")
        a, b = dense(jnp.tanh(a), "second"), dense(jnp.tanh(b), "second")
        return normalise(p, b, a, "output") if output else b

    cross = explicit(trained, params, by_hand)
    ours = kernels.empirical_ntk(apply, params, x, z, stats="train")
    np.testing.assert_allclose(ours, cross, rtol=1e-9, atol=1e-10 * np.abs(cross).max())
    # "frozen": no gradient through the statistics, samples free again, so the structured path applies
    constants = apply.statistics(params, x)
    frozen = explicit(lambda p: apply.apply(p, x, constants), params)
    ours = kernels.empirical_ntk(apply, params, x, stats="frozen", method="structured")
    np.testing.assert_allclose(ours, frozen, rtol=1e-10, atol=1e-10 * np.abs(frozen).max())
    assert np.abs(frozen - exact).max() > 1e-2 * np.abs(exact).max()


def test_linen_statistics_do_not_depend_on_momentum(key):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            h = nn.Dense(4, param_dtype=jnp.float64)(x)
            h = nn.BatchNorm(use_running_average=not train, momentum=0.9, param_dtype=jnp.float64)(h)
            return nn.Dense(1, param_dtype=jnp.float64)(jnp.tanh(h))

    x = jax.random.normal(key, (6, 3))
    net = Net()
    variables = net.init(key, x, train=True)
    apply, params = kernels.from_module(net, variables, train={"train": True}, evaluate={"train": False})
    stats = {"batch_stats": variables["batch_stats"]}
    trained = lambda p: net.apply({"params": p, **stats}, x, train=True, mutable=["batch_stats"])[0]
    ours = kernels.empirical_ntk(apply, params, x, stats="batch")
    np.testing.assert_allclose(ours, explicit(trained, params), rtol=1e-9, atol=1e-10)


class TestCoupling:
    def norm(self, params, x):
        h = x @ params["w"]
        return params["gamma"] * (h - jnp.mean(h)) / jnp.std(h)

    def test_refused_without_stats(self, key):
        x = jax.random.normal(key, (6, 3))
        params = {"w": jnp.ones(3), "gamma": jnp.array(1.0)}
        with pytest.raises(ValueError, match="couples the samples"):
            kernels.empirical_ntk(self.norm, params, x)
        with pytest.raises(ValueError, match="couples the samples"):
            jax.jit(lambda p, x: kernels.empirical_ntk(self.norm, p, x))(params, x)
        with pytest.raises(ValueError, match="couples the samples"):
            kernels.empirical_ntk(self.norm, params, x, stats="frozen")
        with pytest.raises(ValueError, match="couples the samples"):
            kernels.empirical_ntk(self.norm, params, x, stats="running")
        with pytest.raises(ValueError, match="stats must be one of"):
            kernels.empirical_ntk(self.norm, params, x, stats="eval")
        with pytest.raises(ValueError, match="no running averages"):
            kernels.empirical_ntk(
                kernels.Normalized(lambda p, x, s: x, lambda p, x: x), params, x, stats="running"
            )
        apply, params = kernels.from_module(BatchNormNet(nnx.Rngs(1), True, True))
        with pytest.raises(ValueError, match="stats must be one of"):
            kernels.empirical_ntk(apply, params, x)

    def test_zero_scale_hides_nothing(self, key):
        # with gamma = 0 every output is 0, yet d f / d gamma depends on the whole batch
        x = jax.random.normal(key, (6, 3))
        with pytest.raises(ValueError, match="couples the samples"):
            kernels.empirical_ntk(self.norm, {"w": jnp.ones(3), "gamma": jnp.array(0.0)}, x)

    def test_sample_by_sample_kernel_is_zero(self, key):
        # what a per-sample engine returns for batch norm: each sample minus its own mean
        x = jax.random.normal(key, (6, 3))
        centred = lambda w, x: x @ w - jnp.mean(x @ w)
        alone = jax.vmap(jax.grad(lambda w, s: centred(w, s[None])[0]), (None, 0))(jnp.ones(3), x)
        assert float(jnp.max(jnp.abs(alone))) == 0.0
        ours = kernels.empirical_ntk(centred, jnp.ones(3), x, stats="batch")
        middle = x - jnp.mean(x, 0)[None]
        np.testing.assert_allclose(ours, middle @ middle.T, atol=1e-13)

    def test_closing_over_traced_values(self, key):
        x, w = jax.random.normal(key, (6, 3)), jnp.ones(3)

        def kernel(bias, stats):
            return kernels.empirical_ntk(lambda w, x: jnp.tanh(x @ w + bias), w, x, stats=stats)

        with pytest.raises(ValueError, match="cannot be probed"):
            jax.jit(lambda b: kernel(b, None))(0.3)
        declared = jax.jit(lambda b: kernel(b, "frozen"))(0.3)
        np.testing.assert_allclose(declared, kernel(0.3, None), rtol=1e-12)


def test_structured_falls_back_parameter_by_parameter(key):
    """Shared, scaled, transposed and element-wise parameters, each in a way the trace must get right."""
    k = jax.random.split(key, 6)
    params = {
        "w": jax.random.normal(k[0], (4, 3)),  # transposed and divided
        "g": jax.random.normal(k[1], (4,)),  # scale
        "s": jax.random.normal(k[2], (4, 4)),  # used twice: cross terms
        "v": jax.random.normal(k[3], (4,)),  # vector product
        "c": jax.random.normal(k[4], ()),  # scalar bias
        "unused": jnp.ones(3),
        "steps": jnp.arange(2),  # not differentiable
    }

    def apply(p, x):
        h = jax.nn.relu((x @ p["w"].T / jnp.sqrt(3.0)) * (2.0 * p["g"][None]))
        h = jnp.tanh(h @ p["s"])
        h = h + jnp.tanh(h @ p["s"]) * p["steps"][1]
        return h @ p["v"] + p["c"]

    x = jax.random.normal(k[5], (5, 3))
    diff, rest = eqx.partition(params, eqx.is_inexact_array)
    exact = explicit(lambda p: apply(eqx.combine(p, rest), x), diff)
    for method in ("structured", "jacobian"):
        ours = kernels.empirical_ntk(apply, params, x, method=method)
        np.testing.assert_allclose(ours, exact, rtol=1e-11)


def test_plan_speaks_and_refuses(key):
    apply, params = mlp(key, (3, 50, 50))
    x = jax.random.normal(key, (20, 3))
    plan = kernels.Method().plan(apply, params, x)
    assert plan.method == "structured" and "structured" in plan.reason
    assert kernels.Method().plan(apply, params, x, stats="batch").coupled
    with pytest.raises(ValueError, match="ntk_operator"):
        kernels.empirical_ntk(apply, params, x, method=kernels.Method(limit=1000))
    with pytest.raises(ValueError, match="Jacobian takes"):
        kernels.empirical_ntk(apply, params, x, method=kernels.Method("jacobian", limit=100_000))
    assert kernels.Method(limit=200_000).plan(apply, params, x, stats="batch").method == "products"
    with pytest.raises(ValueError, match="method must be"):
        kernels.empirical_ntk(apply, params, x, method="magic")
    with pytest.raises(ValueError, match="chunk must be"):
        kernels.Method(chunk=0)


def test_float32_stays_float32_and_agrees():
    apply, params, x, _, exact, _ = oracle("mlp")
    low = jax.tree.map(lambda a: a.astype(jnp.float32), (params, x))
    for method in ("jacobian", "products", "structured"):
        ours = kernels.empirical_ntk(apply, *low, method=method)
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, exact, rtol=2e-5, atol=1e-4)


def test_one_compile_a_shape(key):
    apply, params = mlp(key, (3, 8))
    kernel = jax.jit(chex.assert_max_traces(lambda p, x: kernels.empirical_ntk(apply, p, x), n=1))
    kernel(params, jnp.ones((5, 3)))
    kernel(jax.tree.map(lambda a: 2 * a, params), jnp.zeros((5, 3)))
