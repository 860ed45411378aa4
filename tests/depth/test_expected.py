"""Infinite-width maps: against quadrature, Monte Carlo, finite differences and wide networks."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meanflow import depth
from meanflow.depth import Layer
from meanflow.depth._expected import layer_map
from meanflow.depth._propagation import activated

RELU = Layer(recenter=False)


def test_derivatives_are_right_and_finite_everywhere():
    gram = lambda v: jnp.array([[1.0, 0.0], [0.0, 0.0]]) * v[0] + jnp.array([[0.0, 1.0], [1.0, 0.0]]) * v[1]
    f = lambda v: layer_map(gram(v) + jnp.array([[0.0, 0.0], [0.0, 1.0]]) * v[2], RELU)[0, 1]
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
    assert bool(jnp.all(jnp.isfinite(jax.grad(lambda x: jnp.sum(layer_map(x @ x.T)))(x))))


def test_relu_layer_is_the_arc_cosine_kernel():
    r = np.linspace(-1, 1, 41)
    expected = (np.sqrt(1 - r**2) + (np.pi - np.arccos(r)) * r) / np.pi
    found = [layer_map(jnp.array([[1.0, c], [c, 1.0]]), RELU)[0, 1] for c in r]
    np.testing.assert_allclose(found, expected, atol=1e-15)


def test_kernel_exceeds_the_product_unless_parallel(key):
    # the paper's strict inequality for x != y fails for y = c x
    x, y = jax.random.normal(key, (2, 3))
    gram = jnp.stack([x, y, 2.5 * x]) @ jnp.stack([x, y, 2.5 * x]).T
    image = layer_map(gram, RELU)
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
    layer = Layer(recenter, rescale, activation)
    exact = layer_map(gram, layer)
    neurons = 200_000
    z = x @ jax.random.normal(jax.random.fold_in(key, 1), (6, neurons))
    y = activated(layer, z)
    products = jnp.einsum("id,jd->ijd", y[:3], y[:3])  # enough entries; all would need 60 MB more
    scale = 2.0 if rescale is None else 1.0  # he weights carry the 2
    noise = scale * jnp.std(products, axis=2) / np.sqrt(neurons)
    assert jnp.max(jnp.abs(scale * products.mean(2) - exact[:3, :3]) / (noise + 1e-12)) < 5
    if rescale is not None:
        finer = layer_map(gram, layer, nodes=200)
        np.testing.assert_allclose(exact, finer, rtol=1e-12, atol=1e-13)


def test_rescaling_makes_the_scale_irrelevant(key):
    x = jax.random.normal(key, (5, 7))
    one = layer_map(x @ x.T, Layer(rescale="std"))
    np.testing.assert_allclose(layer_map(1e6 * x @ x.T, Layer(rescale="std")), one, rtol=1e-12)
    np.testing.assert_allclose(jnp.trace(one), 5 / 2, rtol=1e-12)  # mean square 1, half of it survives ReLU


def test_dividing_by_the_standard_deviation_without_recentring_collapses_the_angles():
    """Equation (2) read literally, n = 10: 70 degrees after one layer, 1.03 after 30, and falling."""
    x = jax.random.normal(jax.random.key(0), (10, 50))
    run = depth.expected_gram(x @ x.T, 30, Layer(recenter=False, rescale="std"))
    angle = [float(depth.Gram(gram).pair_angles.mean()) for gram in run]
    np.testing.assert_allclose([angle[1], angle[-1]], [70.46, 1.03], atol=0.01)
    assert np.all(np.diff(angle) < 0)


def test_wide_network_follows_the_recursion(key):
    x = jax.random.normal(key, (6, 10))
    rms = Layer(recenter=False, rescale="rms")
    run = depth.propagate(key, x, [20_000] * 4, rms, observe=lambda x: x @ x.T)
    exact = depth.expected_gram(x @ x.T, 4, rms)
    np.testing.assert_allclose(run.layers[1:] / 20_000, exact[1:], atol=0.02)
    plain = depth.propagate(key, x, [20_000] * 4, observe=lambda x: x @ x.T)
    theory = depth.expected_gram(x @ x.T, 4)
    theory = theory.at[1:].multiply(2.0)  # the first layer is 20 000 / 10 as wide as its input: fan_in counts
    ratio = plain.layers[1:] / theory[1:]
    np.testing.assert_allclose(ratio / ratio[:, :1, :1], 1.0, atol=0.1)


def test_float32_works_and_keeps_its_type():
    gram = jnp.eye(6, dtype=jnp.float32) + jnp.float32(0.2)
    for rescale in (None, "rms", "std"):
        out = depth.expected_gram(gram, 5, Layer(rescale=rescale))
        wide = depth.expected_gram(gram.astype(jnp.float64), 5, Layer(rescale=rescale))
        assert out.dtype == jnp.float32
        np.testing.assert_allclose(out, wide, atol=2e-4)


def test_small_batches_and_bad_names():
    with pytest.raises(ValueError, match="at least 4"):
        depth.expected_gram(jnp.eye(3), 2, Layer(recenter=False, rescale="std"))
    with pytest.raises(ValueError, match="activation"):
        depth.expected_gram(jnp.eye(3), 2, Layer(activation="tanh"))
    with pytest.raises(ValueError, match="depth"):
        depth.expected_gram(jnp.eye(3), 0)
    with pytest.raises(ValueError, match="gram"):
        depth.expected_gram(jnp.ones((3, 2)), 2)
    # nothing is left of samples that are equal, up to rounding, or zero
    for gram, layer in (
        (np.ones((4, 4)), Layer()),
        (np.full((4, 4), 0.1), Layer(rescale="std")),
        (np.ones((5, 5)), Layer(False, "std")),
        (np.ones((1, 1)), Layer()),
        (np.zeros((4, 4)), Layer(False, "rms")),
    ):
        with pytest.raises(ValueError, match="gram must hold"):
            depth.expected_gram(gram, 2, layer, renormalize=True)
    with pytest.raises(ValueError, match="renormalize=True"):
        depth.expected_gram(jnp.eye(4, dtype=jnp.float32), 1000)


def test_samples_on_one_line_keep_their_ratios():
    """Of a Gram matrix of rank one a layer sees one Gaussian number g, and |g| drops out."""
    v = np.array([1.0, 2.0, 4.0, 5.0])
    for layer, centered in ((Layer(False, "rms"), v), (Layer(True, "std"), v - v.mean())):
        scale = np.mean(centered**2)
        up, down = np.maximum(centered, 0), np.maximum(-centered, 0)
        exact = (np.outer(up, up) + np.outer(down, down)) / 2 / scale
        found = depth.expected_gram(np.outer(v, v), 1, layer)[1]
        np.testing.assert_allclose(found, exact, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    "layer",
    [Layer(True, "std"), Layer(False, "rms"), Layer(False, "std")],
)
def test_rescaled_layers_have_right_derivatives_where_eigenvalues_coincide(layer):
    """Forward and reverse mode against finite differences at K = I + small, and at K = I, where all are equal."""
    n = 5
    rng = np.random.default_rng(0)
    probe, direction, bump = (jnp.asarray(u + u.T) for u in rng.normal(size=(3, n, n)))

    def value(gram):
        return jnp.sum(probe * layer_map(gram, layer))

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
    found = calls(jax.jacfwd(lambda u: layer_map(u, Layer(rescale="std"))))
    assert found and not batched(found)
