"""NNX layers against numpy, nnx.BatchNorm and finite differences, in training and inference mode."""

import inspect
import os
import subprocess
import sys
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from meanflow.layers import (
    BatchNorm,
    Recenter,
    Rescale,
    Unitize,
    UnitizedBatchNorm,
)
from meanflow.layers._standardize import Standardization, standardize
from meanflow.transport import wasserstein

pytestmark = pytest.mark.usefixtures("quick_compilation")

WIDE = {"param_dtype": jnp.float64}


def batch(seed=0, shape=(12, 5)):
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape) * np.linspace(0.5, 3, shape[-1]) + np.linspace(-2, 2, shape[-1])


def dress(layer, seed=9):
    """Random gamma, beta and alpha, so that no test passes by their initial values."""
    rng = np.random.default_rng(seed)
    for value in jax.tree.leaves(nnx.state(layer, nnx.Param), is_leaf=lambda v: isinstance(v, nnx.Variable)):
        value[...] = jnp.asarray(rng.random(value[...].shape) + 0.2)
    return layer


def expected(x, layer, mean, var, eps=1e-5):
    """Algorithm 1 and 2, written out in numpy on moments (features,)."""
    out = (x - mean) / np.sqrt(var + eps)
    if isinstance(layer, UnitizedBatchNorm):
        flat = out.reshape(out.shape[0], -1)
        pixels = flat.shape[1] // x.shape[-1]
        s = (flat**2).sum(1) / (1 if x.ndim == 2 else x.shape[-1] * pixels)
        p = (1 / np.sqrt(s + eps)).reshape((-1,) + (1,) * (x.ndim - 1))
        alpha = np.asarray(layer.alpha)
        out = out * (p * alpha + 1 - alpha)
    return np.asarray(layer.scale[...]) * out + np.asarray(layer.bias[...])


@pytest.mark.parametrize("shape", [(12, 5), (4, 3, 2, 5)])
@pytest.mark.parametrize("kind", [BatchNorm, UnitizedBatchNorm])
def test_train_and_eval_equal_numpy(kind, shape):
    layer = dress(kind(5, momentum=0.8, **WIDE))
    x = batch(0, shape)
    axes = tuple(range(len(shape) - 1))
    mean, var = x.mean(axes), x.var(axes)
    np.testing.assert_allclose(layer(jnp.asarray(x)), expected(x, layer, mean, var), rtol=1e-11)
    running = 0.2 * mean, 0.8 + 0.2 * var
    np.testing.assert_allclose(layer.mean[...], running[0], rtol=1e-12)
    np.testing.assert_allclose(layer.var[...], running[1], rtol=1e-12)
    layer.eval()
    y = batch(1, shape)
    np.testing.assert_allclose(layer(jnp.asarray(y)), expected(y, layer, *running), rtol=1e-11)
    np.testing.assert_allclose(layer.mean[...], running[0], rtol=1e-12)  # untouched in inference


@pytest.mark.parametrize("mode", ["std", "rms"])
def test_recenter_and_rescale_equal_numpy(mode):
    x, y = batch(0), batch(1)
    centre, scale = Recenter(5, momentum=0.5, **WIDE), Rescale(5, mode=mode, momentum=0.5, **WIDE)
    np.testing.assert_allclose(centre(jnp.asarray(x)), x - x.mean(0), rtol=1e-12)
    second = x.var(0) if mode == "std" else (x**2).mean(0)
    np.testing.assert_allclose(scale(jnp.asarray(x)), x / np.sqrt(second + 1e-5), rtol=1e-12)
    centre.eval(), scale.eval()
    np.testing.assert_allclose(centre(jnp.asarray(y)), y - 0.5 * x.mean(0), rtol=1e-12)
    np.testing.assert_allclose(scale(jnp.asarray(y)), y / np.sqrt(0.5 + 0.5 * second + 1e-5), rtol=1e-12)


@pytest.mark.parametrize("mode", ["std", "rms"])
def test_batchnorm_is_rescale_after_recenter(mode):
    norm = BatchNorm(5, use_scale=False, use_bias=False, **WIDE)
    centre, scale = Recenter(5, **WIDE), Rescale(5, mode=mode, **WIDE)
    for seed in range(3):
        x = jnp.asarray(batch(seed))
        np.testing.assert_allclose(norm(x), scale(centre(x)), rtol=1e-12)
    for layer in (norm, centre, scale):
        layer.eval()
    x = jnp.asarray(batch(7))
    np.testing.assert_allclose(norm(x), scale(centre(x)), rtol=1e-12)


@pytest.mark.parametrize("shape", [(16, 5), (4, 3, 3, 5)])
def test_equals_flax(shape):
    theirs = nnx.BatchNorm(5, momentum=0.9, use_fast_variance=False, rngs=nnx.Rngs(0))
    ours, unit = BatchNorm(5, momentum=0.9), UnitizedBatchNorm(5, momentum=0.9)
    with jax.numpy_rank_promotion("allow"):
        for seed in range(4):
            x = jnp.asarray(batch(seed, shape), "float32")
            y = theirs(x)
            np.testing.assert_allclose(ours(x), y, rtol=2e-5, atol=2e-6)
            np.testing.assert_allclose(unit(x), y, rtol=2e-5, atol=2e-6)
        for layer in (ours, unit):
            np.testing.assert_allclose(layer.mean[...], theirs.mean[...], rtol=1e-6)
            np.testing.assert_allclose(layer.var[...], theirs.var[...], rtol=1e-6)
        for layer in (ours, unit, theirs):
            layer.eval()
        y = theirs(x)
        np.testing.assert_allclose(ours(x), y, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(unit(x), y, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("shape", [(16, 5), (4, 3, 3, 5)])
@pytest.mark.parametrize("interpolation", ["linear", "harmonic"])
def test_alpha_zero_is_batchnorm_exactly(shape, interpolation):
    norm, unit = (
        BatchNorm(5, **WIDE),
        UnitizedBatchNorm(5, interpolation=interpolation, train_alpha=False, **WIDE),
    )
    x = jnp.asarray(batch(0, shape))
    np.testing.assert_array_equal(norm(x), unit(x))
    norm.eval(), unit.eval()
    np.testing.assert_array_equal(norm(x), unit(x))


def test_unit_norms_at_alpha_one():
    x = jnp.asarray(batch(0, (20, 5)))
    layer = UnitizedBatchNorm(5, alpha_init=1.0, epsilon=1e-14, **WIDE)
    np.testing.assert_allclose(np.linalg.norm(layer(x), axis=1), 1.0, rtol=1e-12)
    image = jnp.asarray(batch(0, (3, 4, 6, 5)))
    for n, norm in ((None, np.sqrt(5 * 24)), ("pixels", 24.0), (1, np.sqrt(24))):
        layer = UnitizedBatchNorm(5, alpha_init=1.0, n=n, epsilon=1e-14, **WIDE)
        out = np.asarray(layer.normalized(image)).reshape(3, -1)
        # sqrt(n HW) an image, so HW with the paper's n = HW: its bound 2 is 2 HW for images
        np.testing.assert_allclose(np.linalg.norm(out, axis=1), norm, rtol=1e-12)
    pixel = UnitizedBatchNorm(5, alpha_init=1.0, n=1, sample="pixel", epsilon=1e-14, **WIDE)
    np.testing.assert_allclose(np.linalg.norm(pixel(image), axis=-1), 1.0, rtol=1e-12)


@pytest.mark.parametrize("side", [32, 16, 8])
def test_images_are_not_bounded_by_two(side):
    """Algorithm 2 with the paper's n has 2 HW for Theorem 3.1's 2, reached by an image and its negative."""
    image = jnp.asarray(batch(0, (1, side, side, 3)))
    layer = Unitize(3, alpha_init=1.0, train_alpha=False, n="pixels", epsilon=0.0, param_dtype=jnp.float64)
    rows = [layer(u).reshape(1, -1) for u in (image, -image)]
    assert float(jnp.linalg.norm(rows[0])) == pytest.approx(side**2)  # 1024, 256, 64
    assert float(wasserstein(*rows)) == pytest.approx(2 * side**2)


def test_conv_on_one_pixel_is_dense():
    x = batch(0, (10, 5))
    dense, conv = (UnitizedBatchNorm(5, alpha_init=0.7, n=1, **WIDE) for _ in range(2))
    out = conv(jnp.asarray(x.reshape(10, 1, 1, 5)))
    np.testing.assert_allclose(dense(jnp.asarray(x)), out.reshape(10, 5), rtol=1e-13)


def test_factor_does_not_depend_on_resolution_at_fixed_n():
    image = batch(0, (3, 4, 4, 5))
    double = image.repeat(2, axis=1).repeat(2, axis=2)
    factor = lambda layer, x: layer(jnp.asarray(x)) / np.asarray(x)
    for n, ratio in ((None, 1.0), (16, 1.0), ("pixels", 2.0)):
        layer = Unitize(5, alpha_init=1.0, n=n, epsilon=0.0, param_dtype=jnp.float64)
        np.testing.assert_allclose(
            factor(layer, double)[:, 0, 0], ratio * factor(layer, image)[:, 0, 0], rtol=1e-12
        )


@pytest.mark.parametrize(
    ("channels", "side", "p"), [(16, 32, 8.0), (32, 16, 2.83), (64, 8, 1.0), (64, 56, 7.0), (2048, 7, 0.155)]
)
def test_the_papers_n_amplifies_early_layers(channels, side, p):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, side, side, channels)))
    layer = Unitize(channels, alpha_init=1.0, n="pixels", param_dtype=jnp.float64)
    assert float(jnp.mean(layer(x) / x)) == pytest.approx(p, rel=0.02)
    ours = Unitize(channels, alpha_init=1.0, param_dtype=jnp.float64)
    assert float(jnp.mean(ours(x) / x)) == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("axis", [1, -1])
def test_feature_axis(axis):
    x = batch(0, (4, 3, 2, 5))
    make = lambda **k: dress(UnitizedBatchNorm(5, **k, **WIDE))
    reference = make()(jnp.asarray(x))
    moved = make(axis=axis)(jnp.moveaxis(jnp.asarray(x), -1, axis))
    np.testing.assert_allclose(jnp.moveaxis(moved, axis, -1), reference, rtol=1e-12)


@pytest.mark.parametrize(
    "make",
    [
        lambda: BatchNorm(3, **WIDE),
        lambda: Rescale(3, mode="rms", use_scale=True, **WIDE),
        lambda: UnitizedBatchNorm(3, **WIDE),
        lambda: UnitizedBatchNorm(3, interpolation="harmonic", alpha_init=0.5, clip_alpha=True, **WIDE),
        lambda: UnitizedBatchNorm(3, alpha_init=0.5, alpha_shape="scalar", **WIDE),
    ],
)
def test_gradients_equal_finite_differences(make):
    layer = dress(make())
    x, w = batch(0, (4, 3)), np.random.default_rng(5).normal(size=(4, 3))
    graph, params, rest = nnx.split(layer, nnx.Param, ...)

    def f(params, x):
        return jnp.sum(w * jnp.tanh(nnx.merge(graph, params, rest, copy=True)(x)))

    grads = jax.jit(jax.grad(f, (0, 1)))(params, jnp.asarray(x))
    flat, unravel = jax.flatten_util.ravel_pytree((params, jnp.asarray(x)))
    flat_grad = jax.flatten_util.ravel_pytree(grads)[0]
    value = jax.jit(lambda v: f(*unravel(v)))
    for i in range(flat.size):
        h = jnp.zeros_like(flat).at[i].set(1e-6)
        slope = (value(flat + h) - value(flat - h)) / 2e-6
        np.testing.assert_allclose(flat_grad[i], slope, rtol=2e-6, atol=1e-8)


@pytest.mark.parametrize("shape", [(1, 4), (2, 4), (1, 2, 2, 4)])
def test_tiny_batches_are_defined(shape):
    x = jnp.asarray(batch(0, shape))
    graph, _, rest = nnx.split(UnitizedBatchNorm(4, **WIDE), nnx.Param, ...)

    @jax.jit
    def call(params, x):
        def f(params, x):
            out = nnx.merge(graph, params, rest, copy=True)(x)
            return jnp.sum(jnp.sin(1 + out)), out

        return jax.value_and_grad(f, (0, 1), has_aux=True)(params, x)

    for alpha in (0.0, 1.0):
        params = nnx.split(UnitizedBatchNorm(4, alpha_init=alpha, **WIDE), nnx.Param, ...)[1]
        (value, out), grads = call(params, x)
        chex.assert_tree_all_finite((value, grads))
        if shape == (1, 4):
            np.testing.assert_array_equal(out, 0)  # beta
            np.testing.assert_array_equal(grads[1], 0)
        if shape == (2, 4) and alpha == 0:
            np.testing.assert_allclose(np.abs(out), 1, rtol=1e-3)  # a batch of two is plus and minus one


def test_exact_variance_where_flax_fails():
    x = jnp.asarray(1e4 + 0.1 * np.random.default_rng(0).normal(size=(4096, 1)), "float32")
    with jax.numpy_rank_promotion("allow"):
        theirs = nnx.BatchNorm(1, rngs=nnx.Rngs(0))(x)
    assert abs(np.log(float(jnp.std(theirs)))) > 2  # 0.026 or 31, by the rounding of E x^2 - (E x)^2
    assert float(jnp.std(BatchNorm(1)(x))) == pytest.approx(1.0, abs=2e-3)


def test_train_equals_eval_on_the_same_moments():
    x = jnp.asarray(batch(0))
    layer = dress(UnitizedBatchNorm(5, momentum=0.0, **WIDE))
    trained = layer(x)
    layer.eval()
    np.testing.assert_array_equal(layer(x), trained)


def test_dtypes():
    x = jnp.asarray(batch(), jnp.bfloat16)
    layer = UnitizedBatchNorm(5, dtype=jnp.bfloat16)
    assert layer(x).dtype == jnp.bfloat16
    assert layer.mean[...].dtype == jnp.float32
    np.testing.assert_allclose(layer.mean[...], 0.01 * np.asarray(x, "float64").mean(0), rtol=1e-5)
    assert BatchNorm(5)(jnp.asarray(batch(), "float32")).dtype == jnp.float32
    # running moments keep their dtype, so that they can be carried by a scan
    wide = BatchNorm(5)
    wide(jnp.asarray(batch()))
    assert wide.mean[...].dtype == jnp.float32


def test_clipped_fixed_and_single_alpha():
    clip = UnitizedBatchNorm(3, interpolation="harmonic", alpha_init=0.5, clip_alpha=True)
    clip.raw[...] = jnp.array([-1.0, 0.3, 2.0], jnp.float32)
    np.testing.assert_allclose(clip.alpha, [0.0, 0.3, 1.0], rtol=1e-6)
    fixed = Unitize(3, alpha_init=1.0, train_alpha=False)
    assert not jax.tree.leaves(nnx.state(fixed, nnx.Param))
    assert UnitizedBatchNorm(3, alpha_shape="scalar").alpha.shape == ()
    with pytest.warns(UserWarning, match="plain batch norm"):
        UnitizedBatchNorm(3, clip_alpha=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: UnitizedBatchNorm(3, interpolation="harmonic"), "pole"),
        (lambda: Unitize(3, alpha_init=1.5, clip_alpha=True), "alpha_init must be <= 1"),
        (lambda: BatchNorm(0), "num_features"),
        (lambda: BatchNorm(3, epsilon=0.0), "epsilon must be > 0"),
        (lambda: Rescale(3, mode="max"), "mode must be one of"),
        (lambda: Unitize(3, n="width"), "n must be one of"),
        (lambda: BatchNorm(3)(jnp.ones((2, 4))), "3 features on axis -1, got"),
        (lambda: BatchNorm(3, use_running_average=None)(jnp.ones((2, 3))), "use_running_average"),
    ],
)
@pytest.mark.bad_input
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_moments_synchronise_over_a_vmapped_axis():
    x = jnp.asarray(batch(0, (4, 3, 5)))
    whole = BatchNorm(5, **WIDE)(x.reshape(12, 5)).reshape(4, 3, 5)
    graph, state = nnx.split(BatchNorm(5, axis_name="shards", **WIDE))
    shards = jax.vmap(lambda u: nnx.merge(graph, state, copy=True)(u), axis_name="shards")(x)
    np.testing.assert_allclose(shards, whole, rtol=1e-12)


TWO_DEVICES = """
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec as P
from meanflow.transport import wasserstein
from meanflow.layers import BatchNorm, UnitizedBatchNorm
assert jax.device_count() == 2
mesh = Mesh(np.array(jax.devices()), ("data",))
x = jax.random.normal(jax.random.key(0), (8, 3)) * 2 + 1
whole = UnitizedBatchNorm(3, alpha_init=0.5)
graph, state = nnx.split(UnitizedBatchNorm(3, alpha_init=0.5, axis_name="data"))
def call(u):
    layer = nnx.merge(graph, state, copy=True)
    return layer(u), layer.mean[...]
y, mean = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=P("data"), out_specs=(P("data"), P())))(x)
np.testing.assert_allclose(y, whole(x), rtol=1e-5)
np.testing.assert_allclose(mean, whole.mean[...], rtol=1e-5)
# automatic sharding: the plain layer on a sharded batch, no axis name
plain = nnx.split(UnitizedBatchNorm(3, alpha_init=0.5))
sharded = jax.device_put(x, jax.NamedSharding(mesh, P("data")))
z = jax.jit(lambda u: nnx.merge(*plain, copy=True)(u))(sharded)
assert len(z.sharding.device_set) == 2
np.testing.assert_allclose(z, y, rtol=1e-5, atol=1e-6)
# each device a group of its own
graph, state = nnx.split(BatchNorm(3, axis_name="data", axis_index_groups=[[0], [1]]))
alone = jax.shard_map(
    lambda u: nnx.merge(graph, state, copy=True)(u),
    mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False,
)
halves = [BatchNorm(3)(part) for part in jnp.split(x, 2)]
np.testing.assert_allclose(jax.jit(alone)(x), jnp.concatenate(halves), rtol=1e-5, atol=1e-6)
"""


def test_moments_synchronise_over_two_devices():
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-c", TWO_DEVICES], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_one_compile_per_shape():
    graph, state = nnx.split(UnitizedBatchNorm(5))

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(state, x):
        layer = nnx.merge(graph, state)
        y = layer(x)
        return nnx.state(layer), y

    for seed in range(3):
        state, _ = step(state, jnp.asarray(batch(seed)))


ALL = [Recenter, Rescale, BatchNorm, Unitize, UnitizedBatchNorm]


@pytest.mark.parametrize("kind", ALL)
def test_every_layer_takes_what_flax_takes(kind):
    """Whatever code written for nnx.BatchNorm passes, to the constructor and to the call."""
    x = jnp.asarray(batch(0, (6, 5)), "float32")
    options = dict(
        use_running_average=None,
        axis=-1,
        momentum=0.9,
        epsilon=1e-5,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        use_bias=True,
        use_scale=True,
        bias_init=nnx.initializers.constant(0.5),
        scale_init=nnx.initializers.constant(2.0),
        axis_name=None,
        axis_index_groups=None,
        use_fast_variance=True,
        promote_dtype=lambda arrays, *, dtype: tuple(u.astype(dtype) for u in arrays),
        rngs=nnx.Rngs(0),
        bias_metadata={"mark": "b"},
        scale_metadata={"mark": "s"},
    )
    assert set(inspect.signature(nnx.BatchNorm.__init__).parameters) == {"self", "num_features", *options}
    layer = kind(5, **options)
    assert layer.bias.mark == "b" and layer.scale.mark == "s"
    out = layer(x, use_running_average=False)
    np.testing.assert_allclose(out, 2 * layer.normalized(x, use_running_average=False) + 0.5, rtol=1e-5)
    assert layer(x, use_running_average=True, mask=jnp.ones((6, 1))).shape == x.shape
    assert set(jax.tree.leaves(jax.tree.map(lambda u: u.dtype, out))) == {jnp.dtype("float32")}
    if kind in (BatchNorm, UnitizedBatchNorm):
        with jax.numpy_rank_promotion("allow"):
            flax_layer = nnx.BatchNorm(
                5,
                use_running_average=False,
                bias_init=nnx.initializers.constant(0.5),
                scale_init=nnx.initializers.constant(2.0),
                rngs=nnx.Rngs(0),
            )
            np.testing.assert_allclose(out, flax_layer(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ALL)
def test_half_precision_is_as_accurate_as_its_rounding(kind, name):
    """Sums are taken in float32: images of 200704 numbers, and features of mean 100."""
    rng = np.random.default_rng(0)
    unit = float(jnp.finfo(name).eps)
    settings = {"alpha_init": 0.7} if kind in (Unitize, UnitizedBatchNorm) else {}
    for shape, mean in (((2, 28, 28, 64), 0.0), ((64, 8), 100.0)):
        x = jnp.asarray(mean + rng.normal(size=shape), name)
        exact = kind(shape[-1], **settings, **WIDE)(x.astype("float64"))
        out = kind(shape[-1], dtype=name, **settings)(x)
        assert out.dtype == jnp.dtype(name)
        np.testing.assert_allclose(np.asarray(out, "float64"), exact, rtol=0.51 * unit, atol=1e-4)
        assert np.abs(np.asarray(out, "float64")).max() > 0.1  # float16 zeros would be close to nothing
        plain = kind(shape[-1], **settings)(x)  # without dtype: that of the parameters, or the input's
        np.testing.assert_allclose(np.asarray(plain, "float64"), exact, rtol=0.51 * unit, atol=1e-4)


@pytest.mark.parametrize("kind", [Recenter, Rescale, BatchNorm, UnitizedBatchNorm])
def test_bad_batches_do_not_enter_the_running_moments(kind):
    layer = kind(3)
    good = jnp.asarray(batch(0, (6, 3)), "float32")
    layer(good)
    before = jax.tree.map(np.asarray, nnx.state(layer, nnx.BatchStat))
    bad = good.at[1, 2].set(jnp.nan)
    with pytest.raises(ValueError, match="x must be finite in training"):
        layer(bad)
    with pytest.raises(ValueError, match="x must not be empty in training"):
        layer(good[:0])
    layer(good, mask=jnp.zeros((6, 1)))  # nothing counts
    chex.assert_trees_all_equal(before, nnx.state(layer, nnx.BatchStat))
    graph, state = nnx.split(layer)

    @jax.jit
    def step(state, x):
        layer = nnx.merge(graph, state, copy=True)
        return layer(x), nnx.state(layer, nnx.BatchStat)

    out, after = step(state, bad)
    # it is seen
    assert np.all(np.isnan(out[:, 2]) if kind is not UnitizedBatchNorm else np.isnan(out).any(1))
    chex.assert_tree_all_finite(after)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(new[2], old[2])
        assert np.all(new[:2] != old[:2])


@pytest.mark.parametrize("kind", [BatchNorm, Recenter, Rescale])
def test_masked_entries_do_not_count(kind):
    x = batch(0, (8, 3, 4))
    mask = np.random.default_rng(1).integers(0, 2, (8, 3, 1)).astype(bool)
    mask[0] = True
    inside = x[np.broadcast_to(mask, x.shape)].reshape(-1, 4)
    layer, reference = kind(4, momentum=0.0, **WIDE), kind(4, momentum=0.0, **WIDE)
    spoiled = jnp.asarray(np.where(mask, x, 1e6))
    out = layer(spoiled, mask=jnp.asarray(mask))
    np.testing.assert_allclose(np.asarray(out)[mask[..., 0]], reference(jnp.asarray(inside)), rtol=1e-10)
    seen, wanted = (nnx.state(each, nnx.BatchStat) for each in (layer, reference))
    chex.assert_tree_all_finite(wanted)
    chex.assert_trees_all_close(seen, wanted, rtol=1e-10)
    with pytest.raises(ValueError, match="mask must broadcast against x"):
        layer(spoiled, mask=jnp.ones((2, 3)))


def test_running_variance_as_in_torch_and_several_feature_axes():
    x = batch(0, (10, 3, 4))
    layer = BatchNorm(12, axis=(1, 2), momentum=0.9, unbiased=True, **WIDE)
    flat = BatchNorm(12, momentum=0.9, **WIDE)
    np.testing.assert_allclose(layer(jnp.asarray(x)), flat(jnp.asarray(x.reshape(10, 12))).reshape(x.shape))
    np.testing.assert_allclose(layer.var[...], 0.9 + 0.1 * x.reshape(10, 12).var(0, ddof=1), rtol=1e-12)
    np.testing.assert_allclose(layer.mean[...], 0.1 * x.reshape(10, 12).mean(0), rtol=1e-12)
    with pytest.raises(ValueError, match="axis must be among the 2 axes of x"):
        BatchNorm(3, axis=2)(jnp.ones((4, 3)))


def test_shards_with_different_numbers_of_entries():
    """The mean over all entries that count, not the mean of the means of the shards."""
    x = jnp.asarray(batch(0, (2, 3, 5)))
    mask = jnp.ones((2, 3, 1)).at[0, :2].set(0)
    graph, state = nnx.split(BatchNorm(5, axis_name="shards", unbiased=True, **WIDE))

    def call(u, mask):
        layer = nnx.merge(graph, state, copy=True)
        return layer(u, mask=mask), layer.var[...]

    out, var = jax.vmap(call, axis_name="shards")(x, mask)
    rows = np.asarray(x)[np.asarray(mask[..., 0]) > 0]
    np.testing.assert_allclose(out, (np.asarray(x) - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-5), rtol=1e-10)
    np.testing.assert_allclose(var[1], 0.99 + 0.01 * rows.var(0, ddof=1), rtol=1e-12)


def test_derivatives_of_second_order_and_forward_mode():
    """The written-out derivative of standardize, against that of its definition."""
    x, w = jnp.asarray(batch(0, (5, 2))), jnp.asarray(batch(3, (5, 2)))
    gamma, beta = jnp.array([[0.7, 1.3]]), jnp.array([[0.2, -0.4]])
    mask = jnp.array([[1.0], [1.0], [0.0], [1.0], [1.0]])

    def plain(x, gamma, beta, center, moment):
        mean = jnp.sum(mask * x, 0, keepdims=True) / 4
        second = jnp.sum(mask * (x if moment == "rms" else x - mean) ** 2, 0, keepdims=True) / 4
        u = x - mean if center else x
        u = u if moment is None else u / jnp.sqrt(second + 0.1)
        return gamma * u + beta, mean, second

    def ours(x, gamma, beta, center, moment):
        return standardize(x, gamma, beta, mask, Standardization((0,), 0.1, center, moment))

    for center, moment in ((True, "std"), (True, None), (False, "std"), (False, "rms")):

        def value(f, x, gamma, beta, how=(center, moment)):
            y, mean, second = f(x, gamma, beta, *how)
            return jnp.sum(w * jnp.sin(y)) + jnp.sum(jnp.sin(mean) * second)

        for derivative in (jax.jacfwd, jax.grad, lambda f, at: jax.hessian(lambda x: f(x, gamma, beta))):
            found, expected = (
                jax.tree.leaves(jax.jit(derivative(partial(value, f), (0, 1, 2)))(x, gamma, beta))
                if derivative is not None and "lambda" not in derivative.__name__
                else jax.tree.leaves(jax.jit(derivative(partial(value, f), None))(x))
                for f in (ours, plain)
            )
            chex.assert_tree_all_finite(expected)
            chex.assert_trees_all_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.bad_input
def test_masks_are_zeros_and_ones_and_squares_are_numbers():
    layer, x = BatchNorm(2), jnp.asarray(batch(0, (3, 2)), jnp.float32)
    with pytest.raises(ValueError, match="mask must hold zeros and ones"):
        layer(x, mask=jnp.full((3, 1), 0.5))
    with pytest.raises(ValueError, match="x must be finite in training, and so must its squares"):
        layer(1e30 * x)
    assert jnp.all(layer.var[...] == 1)
