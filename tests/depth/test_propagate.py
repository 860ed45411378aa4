"""Random deep networks: against a plain numpy loop, in law, and through every switch."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meanflow import depth
from meanflow.depth import Layer
from meanflow.depth import _observables as observables
from meanflow.depth._propagation import drawn_by_law


def waves(key, shape, dtype):
    """Fixed weights, so that numpy can use the same ones."""
    i, j = np.indices(shape)
    return jnp.asarray(np.sin(1.3 * i + 2.1 * j + 0.7 * i * j + 0.2) / np.sqrt(shape[0]), dtype)


def by_hand(x, widths, recenter, rescale, activation):
    """The same network, one line of numpy a stage; the spread is written out."""
    batches = [x]
    for width in widths:
        z = x @ np.asarray(waves(None, (x.shape[1], width), float))
        mean = z.mean(0)
        spread = np.sqrt(((z - mean) ** 2).mean(0)) if rescale == "std" else np.sqrt((z**2).mean(0))
        z = z - mean if recenter else z
        if rescale is not None:
            # after recentring the spread about the mean and about zero are the same number
            z = z / (np.sqrt((z**2).mean(0)) if recenter else spread)
        x = np.maximum(z, 0) if activation == "relu" else z
        batches.append(x)
    return batches


@pytest.mark.parametrize(
    "recenter, rescale, activation",
    [(r, s, "relu") for r in (True, False) for s in (None, "std", "rms")]
    + [(True, None, "linear"), (False, "rms", "linear")],
)
def test_every_switch_against_numpy(recenter, rescale, activation):
    x = np.random.default_rng(0).normal(size=(6, 4)) + 0.5
    net = {"recenter": recenter, "rescale": rescale, "activation": activation}
    layer = Layer(**net, weights=waves)
    run = depth.propagate(jax.random.key(0), x, (5, 5, 3), layer, observe=lambda x: x @ x.T)
    batches = by_hand(x, (5, 5, 3), **net)
    np.testing.assert_allclose(run.final, batches[-1], rtol=1e-11, atol=1e-11)
    for gram, batch in zip(run.layers, batches, strict=True):
        np.testing.assert_allclose(gram, batch @ batch.T, rtol=1e-10, atol=1e-10)


def test_records_of_every_layer_against_numpy():
    x = np.random.default_rng(0).normal(size=(6, 4)) + 0.5
    widths = (9, 9, 9, 3)  # wider and narrower than the batch
    run = depth.propagate(jax.random.key(0), x, widths, Layer(weights=waves, rescale="std"))
    for t, batch in enumerate(by_hand(x, widths, True, "std", "relu")):
        values = np.linalg.svd(batch, compute_uv=False)
        np.testing.assert_allclose(
            run.layers.singular_values[t, : len(values)], values, rtol=1e-9, atol=1e-10
        )
        assert not np.any(run.layers.singular_values[t, len(values) :])
        np.testing.assert_allclose(run.layers.gram[t], batch @ batch.T, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("features", [2, 40])
def test_drawing_the_law_gives_the_law_of_x_w(key, features):
    # columns of x W are independent N(0, K variance / fan_in); 2e5 of them pin covariance and kurtosis
    x = jax.random.normal(key, (5, features))
    width = 200_000
    z = drawn_by_law(jax.random.fold_in(key, 1), x, width, 2.0)
    covariance = 2.0 / features * x @ x.T
    error = jnp.abs(z @ z.T / width - covariance)
    size = jnp.sqrt(jnp.diagonal(covariance))
    assert jnp.max(error / (size[:, None] * size[None, :])) < 5 * np.sqrt(2 / width)
    unit = z / size[:, None]
    np.testing.assert_allclose(jnp.mean(unit**4, axis=1), 3.0, atol=5 * np.sqrt(96 / width))
    assert abs(jnp.mean(unit[:, 1:] * unit[:, :-1])) < 5 / np.sqrt(width)  # neighbouring neurons: independent


def test_both_ways_of_drawing_agree_on_average(key):
    x = jax.random.normal(key, (2, 30))
    angle = {}
    for draw in ("law", "weights"):
        keys, net = jax.random.split(key, 200), {"layer": Layer(recenter=False), "observe": observables.gram}
        run = depth.propagate(keys, x, [64] * 3, draw=draw, chunk=50, **net)
        angle[draw] = depth.pair_angles(run.layers[:, -1])[:, 0]
    noise = np.sqrt((jnp.var(angle["law"]) + jnp.var(angle["weights"])) / 200)
    assert abs(angle["law"].mean() - angle["weights"].mean()) < 4 * noise


def test_renormalizing_keeps_the_geometry_and_the_scale(key):
    x = jax.random.normal(key, (6, 8))
    plain, scaled = (
        depth.propagate(key, x, [32] * 12, renormalize=r, observe=observables.gram) for r in (False, True)
    )
    np.testing.assert_allclose(depth.pair_angles(scaled.layers), depth.pair_angles(plain.layers), atol=1e-9)
    back = scaled.layers * jnp.exp(2 * scaled.log_scale)[:, None, None]
    np.testing.assert_allclose(back, plain.layers, rtol=1e-9, atol=1e-14)
    np.testing.assert_allclose(jnp.trace(scaled.layers, axis1=1, axis2=2), 6.0, rtol=1e-12)


def test_depth_1000_neither_underflows_nor_overflows(key):
    x = jax.random.normal(key, (4, 8), jnp.float32)
    net = {"renormalize": True, "layer": Layer(weights="gaussian"), "observe": observables.gram}
    run = depth.propagate(key, x, [32] * 1000, **net)
    assert run.final.dtype == jnp.float32
    assert bool(jnp.all(jnp.isfinite(run.layers)))
    assert run.log_scale[-1] < -100  # exp of it is 0 in float32


def test_seeds_chunks_and_single_runs_agree(key):
    keys = jax.random.split(key, 5)
    x = jax.random.normal(key, (5, 6, 4))
    net = {"widths": [5, 5], "layer": Layer(rescale="std"), "observe": observables.gram, "draw": "weights"}
    run = lambda **kw: depth.propagate(keys, x, **net, **kw).layers
    whole = run()
    np.testing.assert_allclose(run(chunk=2), whole, rtol=1e-12, atol=1e-12)
    single = depth.propagate(keys[3], x[3], **net)
    np.testing.assert_allclose(single.layers, whole[3], rtol=1e-12, atol=1e-12)
    shared = depth.propagate(keys, x[0], **net).layers
    np.testing.assert_allclose(shared[0], whole[0], rtol=1e-12, atol=1e-12)


def test_second_call_compiles_nothing(key):
    # the look at its shape, the input, the first layer, and one body for the other 49
    @chex.assert_max_traces(n=4)
    def observe(x):
        return jnp.sum(x)

    for seed in range(3):
        x = jax.random.normal(jax.random.key(seed), (4, 3))
        depth.propagate(jax.random.key(seed), x, [8] * 50, observe=observe)


def test_gradient_through_a_deep_network(key):
    x = jax.random.normal(key, (4, 3))
    cubes = lambda x: jnp.sum(x**3)

    def size(x):
        layer = Layer(rescale="rms")
        return depth.propagate(key, x, [6] * 4, layer, draw="weights", observe=cubes).layers[-1]

    slope = jax.grad(size)(x)
    step = 1e-6
    for i, j in [(0, 0), (2, 1), (3, 2)]:
        e = jnp.zeros_like(x).at[i, j].set(step)
        np.testing.assert_allclose(
            slope[i, j], (size(x + e) - size(x - e)) / (2 * step), rtol=1e-5, atol=1e-7
        )


def test_orthogonal_linear_layers_keep_the_gram_matrix(key):
    x = jax.random.normal(key, (4, 16))
    layer = Layer(recenter=False, activation="linear", weights="orthogonal")
    run = depth.propagate(key, x, [16] * 5, layer)
    np.testing.assert_allclose(run.layers.gram, jnp.broadcast_to(x @ x.T, (6, 4, 4)), rtol=1e-12, atol=1e-12)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"widths": []}, "widths"),
        ({"widths": [0]}, "widths"),
        ({"draw": "law", "layer": Layer(weights="orthogonal")}, "draw='law'"),
        ({"chunk": 0}, "chunk"),
        ({"x": np.full((3, 2), np.nan)}, "finite"),
        ({"x": np.zeros(3)}, "x must have 2 or 3 axes"),
        ({"observe": lambda x: x[0], "widths": [4, 5]}, "observe"),
        ({"key": 0}, "key"),
    ],
)
@pytest.mark.bad_input
def test_bad_arguments(kwargs, message):
    arguments = {"key": jax.random.key(0), "x": np.eye(3), "widths": [4]} | kwargs
    with pytest.raises(ValueError, match=message):
        depth.propagate(**arguments)


@pytest.mark.bad_input
@pytest.mark.parametrize("wrong", [{"rescale": "variance"}, {"weights": "xavier"}, {"activation": "rellu"}])
def test_bad_layers(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Layer(**wrong)


def test_observables_of_simple_batches():
    x = jnp.array([[3.0, 0.0], [0.0, 0.0], [1.0, 1.0], [-2.0, 0.0]])
    gram = observables.gram(x)
    expected = [[0, 90, 45, 180], [90, 90, 90, 90], [45, 90, 0, 135], [180, 90, 135, 0]]
    np.testing.assert_allclose(observables.angles(gram), expected, atol=1e-5)
    assert np.all(np.isnan(observables.angles(gram.at[2, 2].set(jnp.nan))[2]))  # a failure is not 90 degrees
    np.testing.assert_allclose(observables.norms(gram), [3, 0, np.sqrt(2), 2], rtol=1e-14)
    record = observables.LayerRecord(gram, jnp.array([2.0, 1.0, 1e-6, 0.0]))
    assert record.rank(1e-5) == 2 and record.rank(1e-7) == 3
    np.testing.assert_allclose(record.stable_rank, 1.25, rtol=1e-9)


def test_product_rank_is_bounded_by_the_smaller_rank():
    # the paper says max; linear layers therefore never raise the rank, ReLU does
    rng = np.random.default_rng(1)
    x = rng.normal(size=(6, 2))
    linear = depth.propagate(jax.random.key(0), x, [50], Layer(recenter=False, activation="linear"))
    relu = depth.propagate(jax.random.key(0), x, [50], Layer(recenter=False))
    assert linear.layers.rank(1e-9)[1] == 2 and relu.layers.rank(1e-9)[1] == 6
