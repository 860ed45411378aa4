"""The trainer against hand-made steps; resuming bit for bit; what it records against direct computation."""

import os
import pathlib
import subprocess
import sys
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats
from flax import nnx

from meanflow import transport
from meanflow.layers import BatchNorm, UnitizedBatchNorm
from meanflow.training import LayerShift, Stack, Trainer
from meanflow.training import _trainer as trainer
from meanflow.training._checkpoints import load_state, save_state
from meanflow.training._shift import moments
from meanflow.training._trainer import cross_entropy
from meanflow.training.data import Data

pytestmark = pytest.mark.usefixtures("quick_compilation")


def small_data(seed=0, n=24, d=5):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n + 10, d)).astype("float32")
    y = (x[:, 0] > 0).astype("int32")
    return Data(x[:n], y[:n], x[n:], y[n:])


def network(rngs, norm=BatchNorm):
    return Stack(5, [6, 4], 2, partial(norm, momentum=0.9), rngs=rngs)


def make_trainer(norm=UnitizedBatchNorm, **options):
    options = {"batch_size": 8, "observe": LayerShift(rows=20), **options}
    optimizer = optax.sgd(optax.piecewise_constant_schedule(0.1, {3: 0.2, 6: 0.2, 9: 0.2}), momentum=0.9)
    return Trainer(partial(network, norm=norm), optimizer, **options)


@pytest.fixture(scope="module")
def shared():
    """One trainer for many tests: its programs compile once."""
    return make_trainer()


def same(a, b):
    for u, v in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if jnp.issubdtype(u.dtype, jax.dtypes.prng_key):
            u, v = jax.random.key_data(u), jax.random.key_data(v)
        np.testing.assert_array_equal(u, v)


def test_one_full_batch_step_is_gradient_descent(key):
    data = small_data()
    make = lambda rngs: Stack(5, [4], 2, partial(BatchNorm, momentum=0.9), rngs=rngs)
    run = Trainer(make, optax.sgd(0.1), batch_size=24)
    state, _ = run.run(key, data, 0)
    model = run.network(state, training=True)

    @nnx.jit
    def step(model, x, y):
        return nnx.value_and_grad(lambda m: cross_entropy(m(x), y))(model)  # moments move in the model itself

    value, grads = step(model, jnp.asarray(data.train_x), jnp.asarray(data.train_y))
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, state.params, grads)
    new, record = run.run(state, data, 1)
    chex.assert_trees_all_close(new.params, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(record["train_loss"][0], value, rtol=1e-5)
    np.testing.assert_allclose(
        new.stats["norms"][0]["mean"][...], model.norms[0].mean[...], rtol=1e-4, atol=1e-6
    )


def test_an_epoch_visits_each_row_once(key):
    """With one-hot rows and the sum of outputs as loss, a weight moves by -rate once its row is seen."""
    rows, idle = 14, 2  # batches of 4 leave two rows out
    data = Data(*(np.eye(rows, dtype="float32"), np.zeros(rows, "int32")) * 2)
    make = lambda rngs: nnx.Linear(rows, 1, use_bias=False, rngs=rngs)
    run = Trainer(make, optax.sgd(0.5), batch_size=4, loss=lambda f, y: jnp.sum(f))
    state = run.init(key)
    new, _ = run.run(state, data, 1)
    moved = np.asarray(state.params["kernel"][...] - new.params["kernel"][...]).ravel()
    np.testing.assert_allclose(np.sort(moved), np.r_[np.zeros(idle), np.full(rows - idle, 0.5)], atol=1e-6)
    again, _ = run.run(new, data, 3)
    moved = np.asarray(new.params["kernel"][...] - again.params["kernel"][...]).ravel()
    assert moved.sum() == pytest.approx(0.5 * 2 * (rows - idle), rel=1e-5)


def test_augmentation_is_for_training_only(key):
    """One-hot rows tripled on the way in: weights move three times as far, the evaluation stays."""
    data = Data(*(np.eye(8, dtype="float32"), np.zeros(8, "int32")) * 2)
    make = lambda rngs: nnx.Linear(8, 1, use_bias=False, rngs=rngs)
    run = Trainer(
        make, optax.sgd(0.5), batch_size=4, loss=lambda f, y: jnp.sum(f), augment=lambda key, x: 3 * x
    )
    state, _ = run.run(key, data, 0)
    new, record = run.run(state, data, 1)
    moved = np.asarray(state.params["kernel"][...] - new.params["kernel"][...]).ravel()
    np.testing.assert_allclose(moved, 1.5, rtol=1e-5)
    np.testing.assert_allclose(record["test_loss"][0], np.sum(new.params["kernel"][...]), rtol=1e-5)


def linear(rngs):
    return nnx.Linear(5, 2, rngs=rngs)


def test_evaluation_in_pieces(key, monkeypatch):
    monkeypatch.setattr(trainer, "EVALUATION_BATCH", 4)
    run = Trainer(linear, optax.sgd(0.1))
    state = run.init(key)
    x, y = (jnp.asarray(u) for u in small_data()[2:])  # ten rows: two pieces and a remainder
    out = jax.jit(run.evaluate)(state, x, y)
    logits = x @ state.params["kernel"][...] + state.params["bias"][...][None]
    np.testing.assert_allclose(out["loss"], cross_entropy(logits, y), rtol=1e-5)
    np.testing.assert_allclose(out["accuracy"], np.mean(np.argmax(logits, 1) == y))


def test_a_loop_on_the_host_takes_the_same_steps(key, monkeypatch):
    """One program a minibatch, with augmentation and a remainder in the evaluation, against one loop an epoch."""
    monkeypatch.setattr(trainer, "EVALUATION_BATCH", 4)
    noisy = lambda key, x: x + 0.1 * jax.random.normal(key, x.shape, x.dtype)
    runs = [
        Trainer(network, optax.sgd(0.1, momentum=0.9), batch_size=8, augment=noisy, loop=loop).run(
            key, small_data(), 2
        )
        for loop in ("program", "host")
    ]
    one, other = ((state.params, state.stats) for state, _ in runs)
    chex.assert_trees_all_close(one, other, rtol=1e-4, atol=1e-6)
    chex.assert_trees_all_close(*(record for _, record in runs), rtol=1e-5)
    chex.assert_tree_all_finite((one, runs[0][1]))


def test_two_halves_equal_one_run(shared, key, tmp_path):
    data = small_data()
    whole, record = shared.run(key, data, 4)
    half, first = shared.run(key, data, 2, checkpoint=tmp_path / "state.npz")
    template, _ = shared.run(jax.random.key(5), data, 0)
    loaded, header = load_state(tmp_path / "state.npz", template)
    same(loaded, half)
    assert header["versions"]["jax"] == jax.__version__
    assert [p.name for p in tmp_path.iterdir()] == ["state.npz"]
    before = dict(vars(shared))
    resumed, second = shared.run(loaded, data, 4)
    assert all(vars(shared)[name] is value for name, value in before.items())  # it remembers nothing itself
    same(resumed, whole)
    for name, values in record.items():
        np.testing.assert_array_equal(values, np.concatenate([first[name], second[name]]))
    assert list(record["epoch"]) == [1, 2, 3, 4]
    untouched, empty = shared.run(whole, data, 4)
    same(untouched, whole)
    assert empty == {}


def test_a_checkpoint_keeps_the_record_and_goes_on(shared, key, tmp_path):
    data, path = small_data(), tmp_path / "state.npz"
    whole, record = shared.run(key, data, 3)
    shared.run(key, data, 1, checkpoint=path)
    state, full = shared.run(key, data, 3, checkpoint=path)  # the same call again goes on
    same(state, whole)
    for name, values in record.items():
        np.testing.assert_array_equal(full[name], values)
    stamp = path.read_bytes()
    again, full = shared.run(key, data, 3, checkpoint=path)  # nothing left to do
    same(again, whole)
    assert list(full["epoch"]) == [1, 2, 3] and path.read_bytes() == stamp
    early, _ = shared.run(key, data, 1)
    for change, words in (
        (lambda: shared.run(jax.random.key(9), data, 3, checkpoint=path), "key"),
        (lambda: shared.run(key, small_data(7), 3, checkpoint=path), "data.train_x"),
        (lambda: shared.run(early, data, 3, checkpoint=path), "has 3 epochs, the state 1"),
    ):
        with pytest.raises(ValueError, match=words):
            change()
        assert path.read_bytes() == stamp
    path.write_bytes(stamp[: len(stamp) // 2])
    with pytest.raises(ValueError, match=r"state.npz is damaged or not written by Trainer.run"):
        shared.run(key, data, 3, checkpoint=path)


@pytest.mark.bad_input
def test_bad_input_of_the_trainer(shared, key):
    data = small_data()
    spoiled = data._replace(train_x=data.train_x * np.nan)
    for call, words in (
        (lambda: Trainer(make_trainer, optax.sgd), "optimizer must be a GradientTransformation"),
        (lambda: Trainer(make_trainer, "adam"), "optimizer must be a GradientTransformation"),
        (lambda: shared.run(0, data, 1), "state must be"),
        (lambda: shared.run(jax.random.split(key, 2), data, 1), "state must be one key"),
        (lambda: shared.run(key, data[:2], 1), "data must be a training.data.Data"),
        (lambda: shared.run(key, spoiled, 1), "data.train_x must be finite"),
        (lambda: shared.run(key, data._replace(train_y=data.train_y[:3]), 1), "a label for each train row"),
        (lambda: LayerShift(moments="bogus"), "moments must be one of"),
        (lambda: make_trainer(loop="hosts"), "loop must be one of"),
        (lambda: make_trainer(loop="vmap"), "loop must be one of"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            call()


def synchronized(axis_name=None, mesh=None, observe=None):
    norm = partial(UnitizedBatchNorm, alpha_init=0.3, axis_name=axis_name)
    make = lambda rngs: Stack(5, (6,), 2, norm=norm, rngs=rngs)
    return Trainer(make, optax.sgd(0.1), batch_size=8, mesh=mesh, observe=observe)


def test_training_over_a_mesh_of_one_device(key):
    """Layers that name the axis of the mesh find it bound, in training, in inference and when they are watched."""
    data, observe = small_data(), LayerShift(rows=8)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    plain, record = synchronized(observe=observe).run(key, data, 2)
    state, other = synchronized("data", mesh, observe).run(key, data, 2)
    chex.assert_trees_all_close(plain.params, state.params, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(other, record, rtol=1e-4, atol=1e-5)
    chex.assert_tree_all_finite((state.params, record))
    with pytest.raises(ValueError, match="mesh must have one axis whose length divides"):
        Trainer(linear, optax.sgd(0.1), mesh=mesh, loop="ensemble")


TWO_DEVICES = """
import sys
import chex, jax, numpy as np
sys.path[:0] = ["tests", "tests/training"]
from test_trainer import small_data, synchronized
assert jax.device_count() == 2
data, key = small_data(), jax.random.key(3)
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
plain, record = synchronized().run(key, data, 3)
state, other = synchronized("data", mesh).run(key, data, 3)
runs = ((run.params, run.stats, seen["train_loss"]) for run, seen in ((plain, record), (state, other)))
chex.assert_trees_all_close(*runs, rtol=1e-4, atol=1e-5)
alone, _ = synchronized(None, mesh).run(key, data, 3)  # moments of each half
assert abs(alone.params["head"]["kernel"][...] - plain.params["head"]["kernel"][...]).max() > 1e-4
"""


@pytest.mark.slow
def test_training_over_two_devices_equals_one(tmp_path):
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", TWO_DEVICES], env=env, cwd=root, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_load_refuses_another_network(shared, key, tmp_path):
    state, _ = shared.run(key, small_data(), 0)
    save_state(tmp_path / "state.npz", state)
    wider = state._replace(params=jax.tree.map(lambda p: jnp.stack([p, p]), state.params))
    with pytest.raises(ValueError, match=r"must hold .* of shape \(2, "):
        load_state(tmp_path / "state.npz", wider)


@pytest.mark.parametrize("part", ["text", "header is a list", "no header"])
def test_a_damaged_checkpoint_is_named(shared, key, tmp_path, part):
    state, _ = shared.run(key, small_data(), 0)
    save_state(tmp_path / "state.npz", state)
    with np.load(tmp_path / "state.npz") as file:
        arrays = dict(file)
    if part == "text":
        arrays[".epoch"] = np.array("three")
    elif part == "no header":
        arrays.pop("header")
    else:
        arrays["header"] = np.array("[]")
    np.savez(tmp_path / "state.npz", **arrays)
    with pytest.raises(ValueError, match=r"state\.npz (is damaged|must hold numbers \.epoch)"):
        load_state(tmp_path / "state.npz", state)


def test_ensemble_equals_single_runs(shared, key):
    keys = jax.random.split(key, 2)
    splits = [small_data(seed) for seed in range(2)]
    together = make_trainer(loop="ensemble")
    stacked = Data(*(np.stack(part) for part in zip(*splits, strict=True)))
    states, record = together.run(keys, stacked, 2)
    for k in range(2):
        state, alone = shared.run(keys[k], splits[k], 2)
        own = jax.tree.map(lambda u, k=k: u[k], states.params)
        chex.assert_trees_all_close(state.params, own, rtol=1e-4, atol=1e-6)
        for name in ("train_loss", "ics_exact", "kurtosis", "loss_shift", "test_accuracy"):
            np.testing.assert_allclose(alone[name], record[name][:, k], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("moments", ["batch", "running"])
def test_records_equal_direct_computation(shared, key, moments):
    data = small_data()
    old, _ = shared.run(key, data, 1)
    new, record = shared.run(old, data, 2)
    x, y = jnp.asarray(data.train_x), jnp.asarray(data.train_y)
    training = moments == "batch"
    layer, rows = (-1, 20) if training else (0, 15)
    watching = (
        shared if training else make_trainer(observe=LayerShift(layer=layer, moments=moments, rows=rows))
    )
    seen = watching._observed(data, old, new)
    lower = jax.jit(lambda s: shared.network(s, training=training).lower(x, layer))
    upper = jax.jit(lambda s, h: shared.network(s, training=training).upper(h, layer))
    before, after = lower(old), lower(new)
    exact = transport.wasserstein(after[:rows], before[:rows])
    np.testing.assert_allclose(seen["ics_exact"], exact, rtol=1e-4)
    assert seen["ics_lower"] <= seen["ics_exact"] * (1 + 1e-5)
    assert seen["ics_exact"] <= seen["ics_upper"] * (1 + 1e-5)
    assert seen["ics_upper"] <= seen["ics_paired"] * (1 + 1e-5)
    np.testing.assert_allclose(seen["kurtosis"], scipy.stats.kurtosis(after), rtol=1e-3, atol=1e-4)
    shift = cross_entropy(upper(old, after), y) - cross_entropy(upper(old, before), y)
    np.testing.assert_allclose(seen["loss_shift"], shift, rtol=1e-3, atol=1e-6)
    logits = jax.jit(lambda s, x: shared.network(s)(x))(new, jnp.asarray(data.test_x))
    np.testing.assert_allclose(record["test_accuracy"][0], np.mean(np.argmax(logits, 1) == data.test_y))
    if training:  # alpha has barely moved from 0: standardised up to that
        np.testing.assert_allclose(seen["mean"], 0, atol=0.1)
        np.testing.assert_allclose(seen["variance"], 1, atol=0.3)


@pytest.mark.parametrize("norm", [UnitizedBatchNorm, partial(nnx.GroupNorm, num_groups=2)])
def test_networks_can_be_cut(norm):
    dense = Stack(3, [4, 6], 2, norm, rngs=nnx.Rngs(0))
    conv = Stack(1, [4, 6], 2, norm, strides=(1, 2), rngs=nnx.Rngs(0))
    nets = ((dense, (7, 3)), (conv, (3, 6, 6, 1))) if norm is UnitizedBatchNorm else ((conv, (3, 6, 6, 1)),)
    for net, shape in nets:
        x = jnp.asarray(np.random.default_rng(0).normal(size=shape), "float32")
        graph, state = nnx.split(net)

        @jax.jit
        def cuts(state, x, graph=graph):
            fresh = lambda: nnx.merge(graph, state, copy=True)
            return fresh()(x), [fresh().upper(fresh().lower(x, k), k) for k in (0, -1)]

        whole, parts = cuts(state, x)
        for part in parts:
            np.testing.assert_allclose(part, whole, rtol=1e-5, atol=1e-6)


def test_networks_without_normalization():
    """By the affine maps and ReLU alone, also cut at a layer."""
    net = Stack(3, [4, 6], 2, None, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), "float32")
    h = x
    for layer in net.maps:
        h = np.maximum(h @ layer.kernel[...] + layer.bias[...][None], 0)
    exact = h @ net.head.kernel[...] + net.head.bias[...][None]
    np.testing.assert_allclose(net(x), exact, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(net.upper(net.lower(x, 0), 0), exact, rtol=1e-5, atol=1e-6)


def test_network_errors():
    with pytest.raises(ValueError, match="x must be images"):
        Stack(3, [4], 2, BatchNorm, strides=(1,), rngs=nnx.Rngs(0))(jnp.ones((2, 3)))
    with pytest.raises(ValueError, match="widths must hold at least 1"):
        Stack(3, [], 2, BatchNorm, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="equally many"):
        Stack(1, [4, 4], 2, BatchNorm, strides=(1,), rngs=nnx.Rngs(0))


def test_compiles_once_and_is_silent(key, capsys):
    traces = []

    def loss(logits, labels):
        traces.append(1)
        return cross_entropy(logits, labels)

    run = Trainer(linear, optax.sgd(0.1), batch_size=8, loss=loss)
    state, _ = run.run(key, small_data(), 1)
    seen = len(traces)
    state, _ = run.run(state, small_data(1), 3)
    assert len(traces) == seen
    assert capsys.readouterr() == ("", "")  # no bar: the tests are no terminal
    run.run(state, small_data(1), 4, progress=True)
    assert "epochs" in capsys.readouterr().err


def test_functions_of_the_network_are_observables(key):
    """Beside the record of an ensemble, one entry a run; and a network that cannot be cut is refused by name."""
    size = lambda net: jnp.sum(net.kernel[...] ** 2)
    splits = [small_data(seed) for seed in (1, 2)]
    stacked = Data(*(np.stack(part) for part in zip(*splits, strict=True)))
    run = Trainer(linear, optax.sgd(0.1), batch_size=8, loop="ensemble", observe=size)
    states, record = run.run(jax.random.split(key, 2), stacked, 2)
    kernel = states.params["kernel"][...]
    np.testing.assert_allclose(record["observed"][-1], np.sum(kernel**2, axis=(1, 2)), rtol=1e-6)
    assert record["observed"].shape == (2, 2)
    with pytest.raises(ValueError, match="a network with the methods lower and upper, got Linear"):
        Trainer(linear, optax.sgd(0.1), batch_size=8, observe=LayerShift()).run(key, splits[0], 1)


def test_targets_in_float64_beside_inputs_in_float32(key):
    data = small_data()
    smooth = data._replace(train_y=data.train_x[:, :2].astype(float), test_y=data.test_x[:, :2].astype(float))
    run = Trainer(linear, optax.sgd(0.1), batch_size=8, loss=lambda f, y: jnp.mean((f - y) ** 2))
    _, record = run.run(key, smooth, 3)
    assert np.all(np.diff(record["train_loss"]) < 0)


@pytest.mark.bad_input
def test_bad_input(shared, key):
    with pytest.raises(ValueError, match="batch_size must be at most the 4 training rows, got 8"):
        shared.run(key, small_data(n=4), 1)
    with pytest.raises(ValueError, match="moments must be one of"):
        make_trainer(observe=LayerShift(moments="mean"))


def test_moments_equal_scipy():
    x = np.random.default_rng(0).gamma(2.0, size=(500, 3)) * np.array([1.0, 5.0, 0.1])
    out = moments(jnp.asarray(x))
    np.testing.assert_allclose(out.mean, x.mean(0), rtol=1e-12)
    np.testing.assert_allclose(out.variance, x.var(0), rtol=1e-12)
    np.testing.assert_allclose(out.skewness, scipy.stats.skew(x), rtol=1e-12)
    np.testing.assert_allclose(out.kurtosis, scipy.stats.kurtosis(x), rtol=1e-12)
    flat = moments(jnp.ones((4, 2)))
    np.testing.assert_array_equal(flat.skewness, 0)
    np.testing.assert_array_equal(flat.kurtosis, 0)
