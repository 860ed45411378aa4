"""The recorder of kernels along training: against kernels, drifts and Hessians computed on their own."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from meanflow import kernels
from meanflow._observable import Observable
from meanflow.layers import BatchNorm
from meanflow.training import Trainer
from meanflow.training.data import Data


def test_descent_of_a_linear_network():
    """The first eigenvalue is the sharpness: the largest eigenvalue of the Hessian of the loss."""
    x, y = jax.random.normal(jax.random.key(0), (6, 3)), jnp.arange(12.0).reshape(6, 2)
    net = lambda p, x: x @ p["w"] @ p["v"]
    params = {"w": jnp.eye(3), "v": jnp.ones((3, 2)) / 3}
    recorder = kernels.KernelRecorder(x, y, steps=[0, 3, 4], top=2, keep=True)
    loss = lambda p: 0.5 * jnp.mean(jnp.sum((net(p, x) - y) ** 2, axis=1))
    seen = []
    for step in range(5):
        recorder(step, (net, params))
        seen.append(kernels.empirical_ntk(net, params, x).transpose(0, 2, 1, 3).reshape(12, 12))
        params = jax.tree.map(lambda a, g: a - 0.01 * g, params, jax.grad(loss)(params))
    record = recorder.record
    assert record["step"].tolist() == [0, 3, 4]
    chosen = np.stack(seen)[record["step"]]
    np.testing.assert_allclose(record["kernel"], chosen, rtol=1e-12)
    moved = np.linalg.norm(chosen - chosen[0], axis=(1, 2)) / np.linalg.norm(chosen[0])
    np.testing.assert_allclose(record["drift"], moved, atol=1e-14)
    target = np.outer(y, y)
    alignment = [np.sum(k * target) / np.linalg.norm(k) / np.linalg.norm(target) for k in chosen]
    np.testing.assert_allclose(record["alignment"], alignment, rtol=1e-12)
    np.testing.assert_allclose(record["trace"], np.trace(chosen, axis1=1, axis2=2) / 6, rtol=1e-12)
    # at zero residual the Hessian is the Gauss-Newton matrix
    target = net(params, x)
    perfect = kernels.KernelRecorder(x, top=2)
    perfect(0, (net, params))
    flat, build = jax.flatten_util.ravel_pytree(params)
    hessian = jax.hessian(lambda u: 0.5 * jnp.mean(jnp.sum((net(build(u), x) - target) ** 2, axis=1)))(flat)
    top = np.linalg.eigvalsh(hessian)[::-1][:2]
    np.testing.assert_allclose(perfect.record["eigenvalues"][0], top, rtol=1e-9)


def test_trainer_of_a_convolutional_network_with_one_compilation():
    traces = []

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.conv, self.norm = nnx.Conv(1, 4, (3, 3), rngs=rngs), BatchNorm(4, rngs=rngs)
            self.head = nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, x):
            traces.append(None)
            return self.head(jnp.mean(nnx.relu(self.norm(self.conv(x))), axis=(1, 2)))

    rng = np.random.default_rng(0)
    x = rng.normal(size=(24, 4, 4, 1)).astype(np.float32)
    y = (np.arange(24) % 3).astype(np.int32)
    data = Data(x[:16], y[:16], x[16:], y[16:])
    trainer = Trainer(Net, optax.sgd(0.1), batch_size=8)
    recorder = kernels.KernelRecorder(x[:5], jax.nn.one_hot(y[:5], 3))
    state, _ = trainer.run(jax.random.key(0), data, 1, progress=False, hook=recorder)
    before = len(traces)
    state, _ = trainer.run(state, data, 3, progress=False, hook=recorder)
    record = recorder.record
    assert record["step"].tolist() == [0, 1, 2, 3]
    assert len(traces) == before + 1  # a look at the shapes of the data; no program was traced again
    apply, params = kernels.from_module(trainer.network(state))  # in inference
    kernel = kernels.empirical_ntk(apply, params, x[:5])
    top = np.linalg.eigvalsh(np.transpose(kernel, (0, 2, 1, 3)).reshape(15, 15))[::-1][:3] / 5
    np.testing.assert_allclose(record["eigenvalues"][-1], top, rtol=1e-4)
    assert record["drift"][0] == 0 and np.all(np.diff(record["drift"]) > 0)
    assert np.all((record["alignment"] > 0) & (record["alignment"] < 1))


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x, train=False):
        h = linen.Dense(4, param_dtype=jnp.float64)(x)
        h = linen.BatchNorm(use_running_average=not train, momentum=0.8, param_dtype=jnp.float64)(h)
        return linen.Dense(2, param_dtype=jnp.float64)(jnp.tanh(h))


class Equinox(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self, key):
        self.first, self.last = eqx.nn.Linear(3, 4, key=key), eqx.nn.Linear(4, 2, key=key)
        self.norm = eqx.nn.BatchNorm(4, axis_name="batch", mode="batch", momentum=0.8)

    def __call__(self, x, state):
        h, state = self.norm(self.first(x), state)
        return self.last(jnp.tanh(h)), state


class Nnx(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(3, 4, rngs=rngs, param_dtype=jnp.float64)
        self.norm = nnx.BatchNorm(4, momentum=0.8, rngs=rngs, param_dtype=jnp.float64)
        self.norm.mean.set_value(jnp.zeros(4))  # flax keeps them in float32
        self.norm.var.set_value(jnp.ones(4))
        self.last = nnx.Linear(4, 2, rngs=rngs, param_dtype=jnp.float64)

    def __call__(self, x):
        return self.last(jnp.tanh(self.norm(self.first(x))))


# Each library: the start, then functions of what is trained. "train" returns outputs and the new state, "infer" the
# outputs of inference, "network" what the recorder is called with, "mode" its stats.


def in_linen(mode):
    net = Linen()
    start = net.init(jax.random.key(0), X)
    train = lambda p, s: net.apply({"params": p, "batch_stats": s}, X, train=True, mutable=["batch_stats"])
    infer = lambda p, s: net.apply({"params": p, "batch_stats": s}, X)
    options = {"train": {"train": True}, "evaluate": {"train": False}} if mode else {}
    network = lambda p, s: kernels.from_module(net, {"params": p, "batch_stats": s}, **options)
    state = jax.tree.map(lambda a: a.astype(jnp.float64), start["batch_stats"])
    return (
        start["params"],
        state,
        lambda p, s: (r := train(p, s))[:1] + (r[1]["batch_stats"],),
        infer,
        network,
    )


def in_equinox(mode):
    model, state = eqx.nn.make_with_state(Equinox)(jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    still = eqx.partition(eqx.nn.inference_mode(model), eqx.is_inexact_array)[1]
    mapped = lambda m, s: jax.vmap(m, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(X, s)
    copy = lambda s: jax.tree.map(lambda a: a, s)  # equinox lets a state be used once
    train = lambda p, s: mapped(eqx.combine(p, static), copy(s))
    infer = lambda p, s: mapped(eqx.combine(p, still), copy(s))[0]
    network = lambda p, s: kernels.from_module(eqx.combine(p, static if mode else still), state=copy(s))
    return params, state, train, infer, network


def in_haiku(mode):
    """A function in the style of haiku, which keeps the averages of what comes out of its first layer."""

    def forward(params, state, rng, x, training=False):
        h = x @ params["w"]
        now = {"mean": jnp.mean(h, axis=0), "var": jnp.var(h, axis=0)}
        used = now if training else state
        h = (h - used["mean"][None]) / jnp.sqrt(used["var"][None] + 1e-5)
        return jnp.tanh(h) @ params["v"], jax.tree.map(lambda a, b: 0.8 * a + 0.2 * b, state, now)

    one, two = jax.random.split(jax.random.key(0))
    params = {"w": jax.random.normal(one, (3, 4)), "v": jax.random.normal(two, (4, 2))}
    state = {"mean": jnp.zeros(4), "var": jnp.ones(4)}
    train = lambda p, s: forward(p, s, None, X, True)
    infer = lambda p, s: forward(p, s, None, X)[0]
    return params, state, train, infer, lambda p, s: kernels.from_module(forward, p, state=s)


def in_nnx(mode):
    graph, params, rest = nnx.split(Nnx(), nnx.Param, ...)

    def train(p, s):
        model = nnx.merge(graph, p, s, copy=True)
        return model(X), nnx.split(model, nnx.Param, ...)[2]

    def network(p, s):
        model = nnx.merge(graph, p, s, copy=True)
        if not mode:
            model.eval()
        return model

    def infer(p, s):
        model = nnx.merge(graph, p, s, copy=True)
        model.eval()
        return model(X)

    return params, rest, train, infer, network


X = 1 + 2 * jax.random.normal(jax.random.key(3), (6, 3))


@pytest.mark.parametrize(
    ("library", "mode"),
    [
        (in_linen, None),
        (in_linen, "running"),
        (in_equinox, None),
        pytest.param(in_equinox, "running", marks=pytest.mark.slow),
        (in_haiku, None),
        (in_nnx, None),
        pytest.param(in_nnx, "running", marks=pytest.mark.slow),
    ],
)
def test_batch_statistics_are_those_of_the_step(library, mode):
    """Parameters and running averages are trained; the truth is the Jacobian of inference as it is at each step."""
    params, state, train, infer, network = library(mode)
    y = jnp.stack([jnp.sin(X[:, 0]), X[:, 1]], axis=1)

    def loss(p, s):
        out, s = train(p, s)
        return jnp.mean((out - y) ** 2), s

    step = eqx.filter_jit(jax.value_and_grad(loss, has_aux=True))
    jacobian = eqx.filter_jit(lambda p, s: jax.jacfwd(lambda p: infer(p, s))(p))

    def top(p, s):
        flat = [j.reshape(12, -1) for j in jax.tree.leaves(jacobian(p, s))]
        return np.linalg.eigvalsh(sum(j @ j.T for j in flat))[::-1][:2] / 6

    start = state
    recorder = kernels.KernelRecorder(X, steps=10, stats=mode, top=2)
    exact = []
    for number in range(21):
        recorder(number, network(params, state))
        if number % 10 == 0:
            last = params, state
            exact.append(top(*last))
        (_, state), slope = step(params, state)
        params = jax.tree.map(lambda a, g: a - 0.05 * g, params, slope)
    np.testing.assert_allclose(recorder.record["eigenvalues"], exact, rtol=1e-9)
    # the averages of the start would have been seen
    assert abs(top(last[0], start)[0] / exact[-1][0] - 1) > 0.05


def test_one_program_for_all_states():
    traces = []

    class Counted(Linen):
        def __call__(self, x, train=False):
            traces.append(None)
            return super().__call__(x, train)

    net = Counted()
    variables = net.init(jax.random.key(0), X)
    recorder, counts = kernels.KernelRecorder(X, stats="running"), []
    for step in range(3):
        moved = jax.tree.map(lambda a, step=step: a + step, variables)
        recorder(step, kernels.from_module(net, moved, train={"train": True}, evaluate={"train": False}))
        counts.append(len(traces))
    assert counts[0] == counts[2] and np.all(np.diff(recorder.record["drift"]) > 0)


class Norm(Observable):
    """The length of the parameters, and how far they are from those of the first network."""

    def begin(self, run, state):
        return state[1]

    def measure(self, run, state, memory):
        return {"length": np.linalg.norm(state[1]), "moved": np.linalg.norm(state[1] - memory)}


def test_trace_over_outputs_and_other_observables():
    x, y = np.arange(6.0).reshape(3, 2) / 6, np.array([[1.0, 2.0], [0.0, 1.0], [-1.0, 0.5]])
    net = lambda w, x: jnp.stack([x @ w, (x @ w) ** 2], axis=1)
    recorder = kernels.KernelRecorder(x, y, outputs="trace", keep=True, observe={"weights": Norm()})
    for step in range(2):
        recorder(step, (net, jnp.array([1.0, 0.5 + step])))
    record = recorder.record
    out = x @ np.array([[1.0, 1.0], [0.5, 1.5]])
    exact = np.stack([x @ x.T * (1 + 4 * np.outer(f, f)) for f in out.T])
    np.testing.assert_allclose(record["kernel"], exact, rtol=1e-12)
    np.testing.assert_allclose(record["trace"], np.trace(exact, axis1=1, axis2=2) / 3, rtol=1e-12)
    aligned = [np.sum(k * (y @ y.T)) / np.linalg.norm(k) / np.linalg.norm(y @ y.T) for k in exact]
    np.testing.assert_allclose(record["alignment"], aligned, rtol=1e-12)
    np.testing.assert_allclose(record["weights"]["length"], [1.25**0.5, 3.25**0.5], rtol=1e-12)
    np.testing.assert_allclose(record["weights"]["moved"], [0.0, 1.0], rtol=1e-12)


@pytest.mark.bad_input
def test_bad_use():
    x = jnp.ones((4, 2))
    coupled = lambda w, x: x @ w - jnp.mean(x @ w)
    with pytest.raises(ValueError, match="couples the samples"):
        kernels.KernelRecorder(x)(0, (coupled, jnp.ones(2)))
    with pytest.raises(ValueError, match="y must have 4 rows like x, got shape"):
        kernels.KernelRecorder(x, jnp.ones(3))
    with pytest.raises(ValueError, match="steps"):
        kernels.KernelRecorder(x, steps=0)
    with pytest.raises(ValueError, match="observe must use other names"):
        kernels.KernelRecorder(x, observe={"trace": Norm()})
    linear = lambda w, x: x @ w
    with pytest.raises(ValueError, match="first kernel must not be zero"):
        kernels.KernelRecorder(0 * x)(0, (linear, jnp.ones(2)))
    recorder = kernels.KernelRecorder(x)
    recorder(0, (linear, jnp.ones(2)))
    with pytest.raises(ValueError, match="as many outputs at every step"):
        recorder(1, (lambda w, x: jnp.stack([x @ w, x @ w], 1), jnp.ones(2)))
    with pytest.raises((ValueError, TypeError), match="step must be an integer"):
        recorder("first", (linear, jnp.ones(2)))
    recorder = kernels.KernelRecorder(x)
    assert recorder.record == {}
    with pytest.raises(TypeError, match=r"network must be an NNX module or a pair \(apply, params\)"):
        recorder(0, {"w": jnp.ones(2)})
    with pytest.raises(TypeError, match=r"network must be an NNX module or a pair \(apply, params\)"):
        recorder(0, (jnp.ones(2), jnp.ones(2)))
    # statistics have to be chosen for every network, not only for the first
    model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    model.eval()
    recorder(0, model)
    model.train()
    with pytest.raises(ValueError, match="stats must be one of"):
        recorder(1, model)
