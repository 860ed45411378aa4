"""Coordinate networks: encoding, batch-norm placement, signals and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from meanflow import kernels
from meanflow_papers.ntk import coordinate


def test_encoding():
    x = jnp.array([[0.25, -0.5]])
    out = coordinate.encode(x, 2)
    expected = [0.25, -0.5]
    for j in range(2):
        expected += [np.sin(np.pi * 2**j * v) for v in (0.25, -0.5)]
        expected += [np.cos(np.pi * 2**j * v) for v in (0.25, -0.5)]
    np.testing.assert_allclose(out[0], expected, atol=1e-15)


@pytest.mark.parametrize("norm", coordinate.NORMS)
def test_placement(norm):
    """Scaling the weights before a batch norm changes nothing; without one it does."""
    # tanh, since a later batch norm undoes the scale of a relu layer too
    options = {"width": 16, "octaves": 1, "activation": "tanh", "epsilon": 0.0}
    model = coordinate.CoordinateMLP(1, norm=norm, rngs=nnx.Rngs(0), **options)
    x = jnp.linspace(-1, 1, 9)[:, None]
    where = {"none": [], "hidden": [0, 1, 2], "later": [1, 2], "output": [3], "both": [0, 1, 2, 3]}[norm]
    assert len(model.scales) == len(where) == len(jax.eval_shape(lambda: model.statistics(x)))
    graph, state = nnx.split(model)

    def outputs(factors):
        scaled = nnx.merge(graph, state, copy=True)
        for factor, layer in zip(factors, scaled.layers, strict=True):
            for leaf in (layer.kernel, layer.bias):
                leaf.set_value(factor * leaf[...])
        return scaled(x)

    # one layer times 3, each in turn
    before, *after = jax.jit(jax.vmap(outputs))(1.0 + 2.0 * jnp.eye(5, 4, -1))
    for i in range(4):
        assert np.allclose(after[i], before, rtol=1e-9, atol=1e-9) == (i in where)
    with pytest.raises(ValueError, match="norm must be one of"):
        coordinate.CoordinateMLP(1, norm="everywhere", rngs=nnx.Rngs(0))


def test_trap_first_layer_batch_norm_on_a_line():
    """On raw 1-D input batch norm makes every first-layer unit +-(x - mean)/std: W^1 has no gradient."""
    x = jnp.linspace(-1, 1, 11)[:, None] ** 3
    dead = coordinate.CoordinateMLP(1, width=8, norm="hidden", epsilon=0.0, rngs=nnx.Rngs(0))
    live = coordinate.CoordinateMLP(1, width=8, norm="later", epsilon=0.0, rngs=nnx.Rngs(0))
    for model, alive in ((dead, False), (live, True)):
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        grads = jax.jit(jax.grad(lambda p, g=graph, r=rest: jnp.sum(nnx.merge(g, p, r)(x) ** 2)))(params)
        first = float(jnp.max(jnp.abs(grads["layers"][0]["kernel"][...])))
        assert (first > 1e-6) == alive
    pre = dead.layers[0](x)
    units = (pre - pre.mean(0)[None]) / pre.std(0)[None]
    line = (x - x.mean()) / x.std()
    np.testing.assert_allclose(np.abs(units), np.abs(np.repeat(line, 8, 1)), atol=1e-12)


def test_network_is_what_the_kernel_engine_sees(key):
    apply, params = coordinate.ensemble(key, 2, 1, width=8, hidden=2, norm="later")
    member = jax.tree.map(lambda a: a[0], params)
    x, z = jnp.linspace(-1, 1, 6)[:, None], jnp.array([[0.1], [0.7]])
    with pytest.raises(ValueError, match="stats must be"):
        kernels.empirical_ntk(apply, member, x)
    ours = kernels.empirical_ntk(apply, member, x, z, stats="train")
    both = jnp.concatenate([z, x])
    push = jax.jit(lambda p: coordinate.evaluate(apply, p, both, x))
    outputs, gradient = jax.jit(lambda p: (apply(p, x), jax.grad(lambda p: apply(p, x)[3])(p)))(member)
    # the same statistics: evaluating x among the training points changes nothing
    np.testing.assert_allclose(push(member)[2:], outputs, rtol=1e-12)
    step = 1e-6
    ahead = push(jax.tree.map(lambda a, g: a + step * g, member, gradient))
    back = push(jax.tree.map(lambda a, g: a - step * g, member, gradient))
    np.testing.assert_allclose(ours[3], (ahead - back)[:2] / (2 * step), rtol=1e-6)


def test_signals():
    signal = coordinate.sines()
    assert signal.x.shape == (256, 1) and float(signal.x[0, 0]) == -1.0
    power = np.abs(np.fft.rfft(signal.y)) / 128
    np.testing.assert_allclose(power[[1, 2, 4, 8, 16, 32]], 1.0, rtol=1e-10)
    np.testing.assert_allclose(np.delete(power, [1, 2, 4, 8, 16, 32]), 0.0, atol=1e-12)
    picture = coordinate.picture()
    assert picture.x.shape == (1024, 2) and picture.held_out.shape == (961, 2)
    np.testing.assert_allclose([picture.y.mean(), picture.y.std()], [0, 1], atol=1e-12)
    gap = np.min(np.linalg.norm(picture.x[:, None] - picture.held_out[None, :50], axis=-1))
    np.testing.assert_allclose(gap, np.sqrt(2) / 32, rtol=1e-10)
    photo = coordinate.photograph(size=16)
    assert photo.x.shape == photo.held_out.shape == (128, 2)


def test_frequency_error_and_psnr():
    t = jnp.arange(64) / 64
    wave = lambda k: jnp.sin(2 * jnp.pi * k * t + 0.3)
    y = wave(1) + 2 * wave(5)
    error = coordinate.frequency_error(wave(1) + 1.5 * wave(5), y, (1, 5))
    np.testing.assert_allclose(error, [0.0, 0.25], atol=1e-12)
    np.testing.assert_allclose(coordinate.psnr(y + 0.1, y, 2.0), 20 * np.log10(20), rtol=1e-10)


def test_fit_is_adam_on_every_member(key):
    """The stacked run equals a plain loop on one member."""
    import optax

    apply, params = coordinate.ensemble(key, 2, 1, width=6, hidden=1, norm="hidden", octaves=1)
    x = jnp.linspace(-1, 1, 8)[:, None]
    y = jnp.sin(3 * x[:, 0])
    run = coordinate.fit(
        apply, params, x, y, learning_rate=1e-2, steps=4, every=2, observe=lambda p: apply(p, x)
    )
    assert run.observed.shape == (2, 2, 8) and list(run.steps) == [2, 4]
    member = jax.tree.map(lambda a: a[1], params)
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, 4))
    memory = optimizer.init(member)
    gradient = jax.grad(lambda p: 0.5 * jnp.mean((apply(p, x) - y) ** 2))

    @jax.jit
    def step(p, memory):
        updates, memory = optimizer.update(gradient(p), memory)
        p = optax.apply_updates(p, updates)
        return p, memory, apply(p, x)

    for _ in range(4):
        member, memory, outputs = step(member, memory)
    np.testing.assert_allclose(run.observed[1, -1], outputs, rtol=1e-9, atol=1e-12)
