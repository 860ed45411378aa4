"""The trainer against hand-made steps; resuming bit for bit; what it records against direct computation."""

import doctest
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from meanflow import transport
from meanflow.layers import BatchNorm, UnitizedBatchNorm
from meanflow.training import CNN, MLP, Trainer, Watch, load_state, save_state, staircase, trainer
from meanflow.training.data import Data
from meanflow.training.trainer import cross_entropy


def small_data(seed=0, n=24, d=5):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n + 10, d)).astype("float32")
    y = (x[:, 0] > 0).astype("int32")
    return Data(x[:n], y[:n], x[n:], y[n:])


def network(rngs, norm=BatchNorm):
    return MLP(5, [6, 4], 2, partial(norm, momentum=0.9), rngs=rngs)


def make_trainer(**options):
    options = {"batch": 8, "watch": Watch(rows=20), **options}
    optimizer = optax.sgd(staircase(0.1, 4, 3), momentum=0.9)
    return Trainer(partial(network, norm=UnitizedBatchNorm), optimizer, **options)


def same(a, b):
    for u, v in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if jnp.issubdtype(u.dtype, jax.dtypes.prng_key):
            u, v = jax.random.key_data(u), jax.random.key_data(v)
        np.testing.assert_array_equal(u, v)


def test_one_full_batch_step_is_gradient_descent(key):
    data = small_data()
    run = Trainer(network, optax.sgd(0.1), batch=24)
    state = run.init(key)
    model = run.network(state, training=True)
    loss = lambda m: cross_entropy(m(jnp.asarray(data.train_x)), jnp.asarray(data.train_y))
    value, grads = nnx.value_and_grad(loss)(model)  # moments move in the model itself
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, state.params, grads)
    new, record = run.run(state, data, 1)
    for a, b in zip(jax.tree.leaves(new.params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(record["train_loss"][0], value, rtol=1e-5)
    np.testing.assert_allclose(
        new.stats["norms"][0]["mean"][...], model.norms[0].mean[...], rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize(("rows", "idle"), [(12, 0), (14, 2)])
def test_an_epoch_visits_each_row_once(key, rows, idle):
    """With one-hot rows and the sum of outputs as loss, a weight moves by -rate once its row is seen."""
    data = Data(*(np.eye(rows, dtype="float32"), np.zeros(rows, "int32")) * 2)
    make = lambda rngs: nnx.Linear(rows, 1, use_bias=False, rngs=rngs)
    run = Trainer(make, optax.sgd(0.5), batch=4, loss=lambda f, y: jnp.sum(f))
    state = run.init(key)
    new, _ = run.run(state, data, 1)
    moved = np.asarray(state.params["kernel"][...] - new.params["kernel"][...]).ravel()
    np.testing.assert_allclose(np.sort(moved), np.r_[np.zeros(idle), np.full(rows - idle, 0.5)], atol=1e-6)
    again, _ = run.run(new, data, 3)
    moved = np.asarray(new.params["kernel"][...] - again.params["kernel"][...]).ravel()
    assert moved.sum() == pytest.approx(0.5 * 2 * (rows - idle), rel=1e-5)


def test_two_halves_equal_one_run(key, tmp_path):
    data, run = small_data(), make_trainer()
    whole, record = run.run(key, data, 4)
    half, first = run.run(key, data, 2, checkpoint=tmp_path / "state.npz", config={"seed": 0})
    loaded, header = load_state(tmp_path / "state.npz", make_trainer().init(jax.random.key(5)))
    same(loaded, half)
    assert header["config"] == {"seed": 0}
    assert header["versions"]["jax"] == jax.__version__
    assert [p.name for p in tmp_path.iterdir()] == ["state.npz"]
    resumed, second = make_trainer().run(loaded, data, 4)
    same(resumed, whole)
    for name, values in record.items():
        np.testing.assert_array_equal(values, np.concatenate([first[name], second[name]]))
    assert list(record["epoch"]) == [1, 2, 3, 4]
    untouched, empty = run.run(whole, data, 4)
    same(untouched, whole)
    assert empty == {}


def test_load_refuses_another_network(key, tmp_path):
    save_state(tmp_path / "state.npz", make_trainer().init(key))
    other = Trainer(lambda rngs: MLP(5, [7, 4], 2, BatchNorm, rngs=rngs), optax.sgd(0.1))
    with pytest.raises(ValueError, match="must hold"):
        load_state(tmp_path / "state.npz", other.init(key))


def test_ensemble_equals_single_runs(key):
    keys = jax.random.split(key, 2)
    splits = [small_data(seed) for seed in range(2)]
    together = make_trainer(ensemble=True)
    stacked = Data(*(np.stack(part) for part in zip(*splits, strict=True)))
    states, record = together.run(keys, stacked, 2)
    single = make_trainer()
    for k in range(2):
        state, alone = single.run(keys[k], splits[k], 2)
        for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(states.params), strict=True):
            np.testing.assert_allclose(a, b[k], rtol=1e-4, atol=1e-6)
        for name in ("train_loss", "ics_exact", "kurtosis", "loss_shift", "test_accuracy"):
            np.testing.assert_allclose(alone[name], record[name][:, k], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("moments", ["batch", "running"])
def test_records_equal_direct_computation(key, moments):
    data = small_data()
    run = make_trainer(watch=Watch(layer=0, moments=moments, rows=15))
    old, _ = run.run(key, data, 1)
    new, record = run.run(old, data, 2)
    x, y = jnp.asarray(data.train_x), jnp.asarray(data.train_y)
    training = moments == "batch"
    before, after = (run.network(s, training=training).lower(x, 0) for s in (old, new))
    w = transport.wasserstein(after[:15], before[:15])
    np.testing.assert_allclose(record["ics_exact"][0], w, rtol=1e-4)
    assert record["ics_lower"][0] <= record["ics_exact"][0] * (1 + 1e-5)
    assert record["ics_exact"][0] <= record["ics_upper"][0] * (1 + 1e-5)
    assert record["ics_upper"][0] <= record["ics_paired"][0] * (1 + 1e-5)
    np.testing.assert_allclose(record["kurtosis"][0], transport.moments(after).kurtosis, rtol=1e-3, atol=1e-4)
    top = run.network(old, training=training)
    shift = cross_entropy(top.upper(after, 0), y) - cross_entropy(top.upper(before, 0), y)
    np.testing.assert_allclose(record["loss_shift"][0], shift, rtol=1e-3, atol=1e-6)
    logits = run.network(new)(jnp.asarray(data.test_x))
    np.testing.assert_allclose(record["test_accuracy"][0], np.mean(np.argmax(logits, 1) == data.test_y))


def test_batch_moments_standardise_the_watched_layer(key):
    """With full-batch moments the unaffined batch-norm outputs have mean 0 and variance 1 exactly."""
    run = Trainer(network, optax.sgd(0.1), batch=8, watch=Watch())
    _, record = run.run(key, small_data(), 2)
    np.testing.assert_allclose(record["mean"], 0, atol=1e-5)
    np.testing.assert_allclose(record["variance"], 1, atol=1e-3)


@pytest.mark.parametrize("layer", [0, 1, -1])
def test_networks_can_be_cut(layer):
    norms = [BatchNorm, UnitizedBatchNorm, partial(nnx.GroupNorm, num_groups=2)]
    for norm in norms:
        dense = MLP(3, [4, 6], 2, norm, rngs=nnx.Rngs(0))
        conv = CNN(1, [4, 6], 2, norm, strides=(1, 2), rngs=nnx.Rngs(0))
        for net, shape in ((dense, (7, 3)), (conv, (3, 6, 6, 1))):
            x = jnp.asarray(np.random.default_rng(0).normal(size=shape), "float32")
            np.testing.assert_allclose(net.upper(net.lower(x, layer), layer), net(x), rtol=1e-6)


def test_network_errors():
    with pytest.raises(ValueError, match="at least one hidden layer"):
        MLP(3, [], 2, BatchNorm, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="equally many"):
        CNN(1, [4, 4], 2, BatchNorm, strides=(1,), rngs=nnx.Rngs(0))


def test_compiles_once(key):
    traces = []

    def loss(logits, labels):
        traces.append(1)
        return cross_entropy(logits, labels)

    run = Trainer(network, optax.sgd(0.1), batch=8, loss=loss)
    state, _ = run.run(key, small_data(), 1)
    seen = len(traces)
    run.run(state, small_data(1), 4)
    assert len(traces) == seen


def test_progress_only_where_asked(key, capsys):
    run = Trainer(network, optax.sgd(0.1), batch=8)
    state, _ = run.run(key, small_data(), 1)
    assert capsys.readouterr() == ("", "")
    run.run(state, small_data(), 2, progress=True)
    assert "epochs" in capsys.readouterr().err


def test_bad_input(key):
    with pytest.raises(ValueError, match="batch must be at most the 24 training rows"):
        Trainer(network, optax.sgd(0.1)).run(key, small_data(), 1)
    with pytest.raises(ValueError, match=r"watch\.moments"):
        make_trainer(watch=Watch(moments="mean"))


def test_staircase():
    schedule = staircase(0.05, 50, 11)
    rates = [float(schedule(11 * epoch)) for epoch in range(50)]
    np.testing.assert_allclose(rates, [0.05] * 15 + [0.01] * 15 + [0.002] * 10 + [0.0004] * 10, rtol=1e-6)
    assert float(schedule(11 * 15 - 1)) == pytest.approx(0.05)


def test_examples():
    assert doctest.testmod(trainer).failed == 0
