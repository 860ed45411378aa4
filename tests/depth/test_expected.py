"""Infinite-width maps: against quadrature, Monte Carlo, finite differences and wide networks."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meanflow import depth
from meanflow.depth._expected import kappa, recentered, relu_map, rescaled_cosine_limit
from meanflow.depth._odd_points import Blocks, block_layer


def degrees(cosine):
    return float(np.degrees(np.arccos(cosine)))


def test_derivatives_are_right_and_finite_everywhere():
    gram = lambda v: jnp.array([[1.0, 0.0], [0.0, 0.0]]) * v[0] + jnp.array([[0.0, 1.0], [1.0, 0.0]]) * v[1]
    f = lambda v: relu_map(gram(v) + jnp.array([[0.0, 0.0], [0.0, 1.0]]) * v[2])[0, 1]
    slope = jax.jit(jax.grad(f))
    for v in ([1.0, 0.4, 2.0], [3.0, -1.0, 1.0]):
        v = jnp.array(v)
        step = 1e-6 * jnp.eye(3)
        numeric = jnp.stack([(f(v + e) - f(v - e)) / 2e-6 for e in step])
        np.testing.assert_allclose(slope(v), numeric, rtol=1e-7)
    # parallel, opposite and zero vectors: where arccos and sqrt have no derivative
    for v, expected in [
        ([1, 1, 1], [0, 1, 0]),
        ([1, -1, 1], [0, 0, 0]),
        ([0, 0, 1], None),
        ([0, 0, 0], None),
    ]:
        found = slope(jnp.array(v, float))
        assert bool(jnp.all(jnp.isfinite(found)))
        if expected is not None:
            np.testing.assert_allclose(found, expected, atol=1e-7)
    x = jnp.ones((3, 2))  # equal samples: a zero batch after recentring
    assert bool(jnp.all(jnp.isfinite(jax.grad(lambda x: jnp.sum(depth._expected.layer_map(x @ x.T)))(x))))


def test_kappa_is_the_arc_cosine_kernel():
    r = np.linspace(-1, 1, 41)
    expected = (np.sqrt(1 - r**2) + (np.pi - np.arccos(r)) * r) / np.pi
    np.testing.assert_allclose(kappa(r), expected, atol=1e-15)


def test_kernel_exceeds_the_product_unless_parallel(key):
    # the paper's strict inequality for x != y fails for y = c x
    x, y = jax.random.normal(key, (2, 3))
    gram = jnp.stack([x, y, 2.5 * x]) @ jnp.stack([x, y, 2.5 * x]).T
    image = relu_map(gram)
    assert image[0, 1] > gram[0, 1]
    np.testing.assert_allclose(image[0, 2], gram[0, 2], rtol=1e-14)


@pytest.mark.parametrize(
    "recenter, rescale, activation",
    [(True, "std", "relu"), (False, "rms", "relu"), (False, "std", "relu"), (True, None, "leaky_relu")]
    + [(False, "rms", "linear")],
)
def test_one_layer_against_monte_carlo(key, recenter, rescale, activation):
    x = jax.random.normal(key, (6, 6)) + 0.5
    gram = x @ x.T
    exact = depth._expected.layer_map(gram, recenter=recenter, rescale=rescale, activation=activation)
    neurons = 200_000
    z = x @ jax.random.normal(jax.random.fold_in(key, 1), (6, neurons))
    y = depth._propagation.Stages(recenter, rescale, activation)(z)
    products = jnp.einsum("id,jd->ijd", y[:3], y[:3])  # enough entries; all would need 60 MB more
    scale = 2.0 if rescale is None else 1.0  # he weights carry the 2
    noise = scale * jnp.std(products, axis=2) / np.sqrt(neurons)
    assert jnp.max(jnp.abs(scale * products.mean(2) - exact[:3, :3]) / (noise + 1e-12)) < 5
    if rescale is not None:
        finer = depth._expected.layer_map(
            gram, recenter=recenter, rescale=rescale, activation=activation, nodes=200
        )
        np.testing.assert_allclose(exact, finer, rtol=1e-12, atol=1e-13)


def test_rescaling_makes_the_scale_irrelevant(key):
    x = jax.random.normal(key, (5, 7))
    one = depth._expected.layer_map(x @ x.T, rescale="std")
    np.testing.assert_allclose(depth._expected.layer_map(1e6 * x @ x.T, rescale="std"), one, rtol=1e-12)
    np.testing.assert_allclose(jnp.trace(one), 5 / 2, rtol=1e-12)  # mean square 1, half of it survives ReLU


def test_batchnorm_angles():
    table = {5: 78.27, 10: 74.65, 32: 72.40, 64: 71.92, np.inf: 71.44}
    for n, angle in table.items():
        assert abs(degrees(depth._expected.batchnorm_cosine(n)) - angle) < 0.005
    start = jnp.eye(10) + 0.3 * jnp.outer(jnp.arange(10.0), jnp.arange(10.0)) / 45
    found = depth._expected.fixed_point(start, rescale="std")
    np.testing.assert_allclose(
        depth.pair_angles(found.gram), degrees(depth._expected.batchnorm_cosine(10)), atol=1e-6
    )
    assert found.residual < 1e-12


def test_rescaled_angles():
    for n, angle in {5: 60.86, 10: 59.84, 64: 58.93}.items():
        start = 0.5 * jnp.eye(n) + 0.5
        nodes = 100 if n < 64 else 40
        found = depth._expected.fixed_point(start, recenter=False, rescale="rms", nodes=nodes, tolerance=1e-6)
        assert abs(float(depth.pair_angles(found.gram)[0]) - angle) < 0.005
    assert abs(degrees(rescaled_cosine_limit()) - 58.75) < 0.005


def test_dividing_by_the_standard_deviation_without_recentring_collapses_the_angles():
    """Equation (2) read literally, n = 10: 70 degrees after one layer, 1.03 after 30, and falling."""
    x = jax.random.normal(jax.random.key(0), (10, 50))
    run = depth.expected_gram(x @ x.T, 30, recenter=False, rescale="std")
    angle = [float(depth.pair_angles(gram).mean()) for gram in run]
    np.testing.assert_allclose([angle[1], angle[-1]], [70.46, 1.03], atol=0.01)
    assert np.all(np.diff(angle) < 0)


@pytest.mark.parametrize("n, top", [(3, 0.781), (10, 0.967), (20, 0.985)])
def test_symmetric_state_is_stable(n, top):
    c = depth._expected.batchnorm_cosine(n)
    gram = c + (1 - c) * jnp.eye(n)
    values = depth._expected.stability(gram)
    assert abs(abs(values[0]) - top) < 5e-4
    if n == 10:
        # the eigenvalue is the rate at which a generic perturbation dies
        noise = 1e-5 * jax.random.normal(jax.random.key(0), (n, n))
        run = depth.expected_gram(gram + noise + noise.T, 300, renormalize=True)
        off = jnp.sqrt(jnp.sum(jnp.square(run - gram[None]), axis=(1, 2)))
        np.testing.assert_allclose(off[250] / off[249], abs(values[0]), rtol=1e-3)


def test_rescaled_state_has_a_fast_and_a_slow_direction():
    # the slope .39 is that of exchangeable perturbations; generic ones decay more slowly
    n = 10
    gram = depth._expected.fixed_point(0.5 * jnp.eye(n) + 0.5, recenter=False, rescale="rms").gram
    values = depth._expected.stability(gram, recenter=False, rescale="rms")
    step = lambda c: depth._expected.layer_map(c + (1 - c) * jnp.eye(n), recenter=False, rescale="rms")
    cosine = lambda c: step(c)[0, 1] / step(c)[0, 0]
    slope = jax.jit(jax.grad(cosine))(gram[0, 1])
    assert abs(slope - 0.39) < 0.005
    assert np.min(np.abs(values - slope)) < 1e-8
    np.testing.assert_allclose(np.abs(values[0]), 0.8615, atol=1e-4)


def test_linear_rescaling_contracts_by_n_over_n_plus_2():
    for n in (4, 10):
        values = depth._expected.stability(jnp.eye(n), recenter=False, rescale="rms", activation="linear")
        np.testing.assert_allclose(np.abs(values[:-1]), n / (n + 2), atol=1e-10)
        assert abs(values[-1]) < 1e-10  # the scale


def test_wide_network_follows_the_recursion(key):
    x = jax.random.normal(key, (6, 10))
    run = depth.propagate(key, x, [20_000] * 4, rescale="rms", recenter=False, observe=lambda x: x @ x.T)
    exact = depth.expected_gram(x @ x.T, 4, recenter=False, rescale="rms")
    np.testing.assert_allclose(run.layers[1:] / 20_000, exact[1:], atol=0.02)
    plain = depth.propagate(key, x, [20_000] * 4, observe=lambda x: x @ x.T)
    theory = depth.expected_gram(x @ x.T, 4)
    theory = theory.at[1:].multiply(2.0)  # the first layer is 20 000 / 10 as wide as its input: fan_in counts
    ratio = plain.layers[1:] / theory[1:]
    np.testing.assert_allclose(ratio / ratio[:, :1, :1], 1.0, atol=0.1)


def test_float32_works_and_keeps_its_type():
    gram = jnp.eye(6, dtype=jnp.float32) + jnp.float32(0.2)
    for rescale in (None, "rms", "std"):
        out = depth.expected_gram(gram, 5, rescale=rescale)
        wide = depth.expected_gram(gram.astype(jnp.float64), 5, rescale=rescale)
        assert out.dtype == jnp.float32
        np.testing.assert_allclose(out, wide, atol=2e-4)


def test_small_batches_and_bad_names():
    with pytest.raises(ValueError, match="at least 4"):
        depth._expected.layer_map(jnp.eye(3), recenter=False, rescale="std")
    with pytest.raises(ValueError, match="activation"):
        depth.expected_gram(jnp.eye(3), 2, activation="tanh")
    with pytest.raises(ValueError, match="depth"):
        depth.expected_gram(jnp.eye(3), 0)
    with pytest.raises(ValueError, match="gram"):
        depth.expected_gram(jnp.ones((3, 2)), 2)


def test_blocks_are_the_full_recursion():
    blocks = Blocks(
        jnp.array([1.0, 2.0, 4.0]),
        jnp.array([2.0, 1.0, 0.5]),
        jnp.array([[0.0, 0.1, -0.2], [0.1, 0.3, 0.05], [-0.2, 0.05, 0.2]]),
    )
    full = depth._expected.layer_map(blocks.expand())
    full = full * 7 / jnp.trace(full)
    np.testing.assert_allclose(block_layer(blocks).expand(), full, atol=1e-14)
    np.testing.assert_allclose(recentered(full).sum(0), 0.0, atol=1e-14)


def test_odd_state_is_a_stable_fixed_point_and_the_cluster_keeps_an_angle():
    state = depth._odd_points.odd_state(10)
    np.testing.assert_allclose(
        [state.norm_ratio, state.odd_angle, state.cluster_angle], [7.412, 88.71, 45.20], atol=6e-3
    )
    gram = state.blocks.expand()
    image = depth._expected.layer_map(gram)
    np.testing.assert_allclose(image * 10 / jnp.trace(image), gram, atol=1e-11)
    assert abs(depth._expected.stability(gram)[0]) < 1
    odd = depth.odd_point(gram)
    np.testing.assert_allclose(odd.norm_ratio, state.norm_ratio, rtol=1e-10)
    np.testing.assert_allclose(odd.odd_angle, state.odd_angle, rtol=1e-8)
    np.testing.assert_allclose(odd.cluster_angle, state.cluster_angle, rtol=1e-8)
    for n in (50, 100, 400):  # balance alpha (1 - 2 theta / 3 pi) = 1
        assert abs(float(depth._odd_points.odd_state(n).cluster_angle) / (540 / n) - 1) < 2.5 / n


def test_no_odd_state_below_seven():
    for n in (3, 4, 5, 6):
        for scale in (1.5, 5.0, 20.0):
            np.testing.assert_allclose(depth._odd_points.odd_state(n, scale).norm_ratio, 1.0, atol=1e-6)
    assert bool(jnp.isnan(depth._odd_points.critical_scale(6, steps=5)))
    assert depth._odd_points.odd_state(7).norm_ratio > 3.8


def test_bistability_around_the_critical_scale():
    critical = depth._odd_points.critical_scale(10)
    assert abs(critical - 1.227) < 5e-4
    assert depth._odd_points.odd_state(10, critical + 1e-3).norm_ratio > 7
    assert depth._odd_points.odd_state(10, critical - 1e-3).norm_ratio < 1.001


def test_two_equal_outliers_are_a_saddle():
    n = 10
    square = jnp.array([25.0, 1.0])
    run = Blocks(jnp.array([2.0, n - 2.0]), square, jnp.zeros((2, 2)))
    run = jax.lax.fori_loop(0, 3000, lambda _, b: block_layer(b), run)
    assert jnp.sqrt(run.square[0] / run.square[1]) > 2
    assert abs(depth._expected.stability(run.expand())[0]) > 1
    # any inequality resolves it to one odd point
    pair = Blocks(jnp.array([1.0, 1.0, n - 2.0]), jnp.array([25.1, 25.0, 1.0]), jnp.zeros((3, 3)))
    pair = jax.lax.fori_loop(0, 3000, lambda _, b: block_layer(b), pair)
    np.testing.assert_allclose(jnp.sqrt(pair.square[0] / pair.square[2]), 7.412, atol=1e-3)
    np.testing.assert_allclose(pair.square[1], pair.square[2], rtol=1e-6)


def test_odd_point_arguments():
    with pytest.raises(ValueError, match="at least 3"):
        depth.odd_point(jnp.eye(2))
    with pytest.raises(ValueError, match="n must"):
        depth._odd_points.odd_state(2)


@pytest.mark.parametrize(
    "layer",
    [{"rescale": "std"}, {"recenter": False, "rescale": "rms"}, {"recenter": False, "rescale": "std"}],
)
def test_rescaled_layers_have_right_derivatives_where_eigenvalues_coincide(layer):
    """Forward and reverse mode against finite differences at K = I + small, and at K = I, where all are equal."""
    n = 5
    rng = np.random.default_rng(0)
    probe, direction, bump = (jnp.asarray(u + u.T) for u in rng.normal(size=(3, n, n)))

    def value(gram):
        return jnp.sum(probe * depth._expected.layer_map(gram, **layer))

    for start in (jnp.eye(n), jnp.eye(n) + 0.05 * bump):
        h = 1e-5
        expected = (value(start + h * direction) - value(start - h * direction)) / (2 * h)
        forward = jax.jvp(value, (start,), (direction,))[1]
        backward = jnp.sum(jax.grad(value)(start) * direction)
        np.testing.assert_allclose([forward, backward], expected, rtol=1e-7)


def test_no_batched_factorisation_in_the_derivative():
    """Several batched LAPACK calls of one program can deadlock on CPU; products of matrices cannot."""
    calls = lambda f: re.findall(r"@lapack_\w+\(.*", jax.jit(f).lower(jnp.eye(4)).as_text())
    batched = lambda rows: [row for row in rows if re.search(r"tensor<\d+x\d+x\d+xf", row)]
    # the pattern finds what it looks for
    assert batched(calls(lambda u: jnp.linalg.cholesky(jnp.stack([u, u]))))
    found = calls(jax.jacfwd(lambda u: depth._expected.layer_map(u, rescale="std")))
    assert found and not batched(found)
