"""Fast forces against the dense oracle: identical patterns, equal numbers, derivatives, precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meanflow import univariate as uni
from meanflow.flows import energy, predict, tangent_kernel, velocity
from meanflow.measures import Affine, Cloud, Dataset, Polar, stack
from meanflow.univariate import forces


def hard_case(m=5000, s=300, seed=0, dtype=np.float64):
    """30 % of the knots exactly on samples, both facings, a = 0, duplicate samples and neurons."""
    rng = np.random.default_rng(seed)
    x = np.sort(rng.uniform(-2, 2, s)).astype(dtype)
    x[10:13] = x[10]
    x[40] = x[41]
    a, b, c = rng.standard_normal((3, m)).astype(dtype)
    on = rng.random(m) < 0.3
    b[on] = a[on] * x[rng.integers(0, s, on.sum())]
    a[:20] = 0
    b[20:24], a[20:24] = 0, 0
    a[30:40], b[30:40] = a[40:50], b[40:50]
    return Cloud(Affine(a, b, c)), x, rng.standard_normal(s).astype(dtype)


def numpy_pattern(cloud, x):
    a, b, _ = (np.asarray(u) for u in cloud.particles)
    return (a[None, :] * x[:, None] - b[None, :]) > 0  # numpy does not fuse the product and the difference


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_regions_have_the_dense_pattern(dtype):
    cloud, x, _ = hard_case(dtype=dtype)
    p = uni.full().feature.direction(cloud)
    s = len(x)
    expected = numpy_pattern(cloud, x)
    for compiled in (False, True):
        find = jax.jit(forces.find_regions) if compiled else forces.find_regions
        regions = np.asarray(find(p, jnp.asarray(x)))
        index = np.arange(s)[:, None]
        got = np.where(regions <= s, index >= s - regions, index < 2 * s - regions)
        assert np.array_equal(got, expected)
        dense = (jax.jit(forces.is_active) if compiled else forces.is_active)(p, jnp.asarray(x))
        assert np.array_equal(dense, expected)
    right = np.asarray(cloud.particles.a) > 0
    assert 0.4 < right.mean() < 0.6 and (regions == 0).any() and (regions == s).any()


def test_every_region_is_its_own_arc():
    x = jnp.array([-1.0, -0.2, 0.1, 0.5, 2.0])
    theta = jnp.linspace(-jnp.pi, jnp.pi, 20001)
    regions = np.asarray(forces.find_regions(jnp.stack([jnp.cos(theta), jnp.sin(theta)], -1), x))
    assert set(regions.tolist()) == set(range(10))
    jumps = np.diff(regions)
    assert np.all(np.isin(jumps, [0, 1, -9])) and (jumps == -9).sum() == 1  # counter-clockwise


def test_forces_and_predictions_match_dense_and_numpy():
    cloud, x, y = hard_case()
    active = numpy_pattern(cloud, x)
    a, b, c = (np.asarray(u) for u in cloud.particles)
    data = Dataset(x, y, weights="sum")
    results = {}
    for kind in ("fast", "dense"):
        flow = uni.full("sqrt", forces=kind)
        results[kind] = (predict(flow, cloud, x), *velocity(flow, cloud, data))
    f = np.where(active, a * x[:, None] - b, 0) @ c / np.sqrt(5000)
    rho = f - y
    gx, g1 = active.T @ (rho * x), active.T @ rho
    k = np.sqrt(5000)
    expected = (f, -k * c * gx, k * c * g1, -k * (a * gx - b * g1))
    for kind in ("fast", "dense"):
        for got, want in zip(results[kind], expected, strict=True):
            assert np.max(np.abs(got - want)) <= 1e-13 * np.max(np.abs(want))


def test_order_of_the_samples_does_not_matter():
    cloud, x, y = hard_case(200, 60)
    shuffle = np.random.default_rng(1).permutation(60)
    for kind in ("fast", "dense"):
        flow = uni.full(forces=kind)
        one = velocity(flow, cloud, Dataset(x, y))
        two = velocity(flow, cloud, Dataset(x[shuffle], y[shuffle]))
        for u, v in zip(one, two, strict=True):
            np.testing.assert_allclose(u, v, rtol=1e-11, atol=1e-14)
        np.testing.assert_allclose(
            predict(flow, cloud, x)[shuffle], predict(flow, cloud, x[shuffle]), atol=1e-14
        )


def test_polar_fast_matches_generic_autodiff():
    """The overridden linearize against the base class, which differentiates the dense feature."""
    from meanflow.flows.features import Feature

    cloud = Cloud(Polar(*np.random.default_rng(3).standard_normal((2, 80))))
    x, g = jnp.linspace(-1, 1, 50), jnp.cos(jnp.arange(50.0))
    for kind in ("fast", "dense"):
        feature = uni.canonical(forces=kind).feature
        f, pull = feature.linearize(cloud, x)
        f0, pull0 = Feature.linearize(feature, cloud, x)
        np.testing.assert_allclose(f, f0, atol=1e-14)
        for u, v in zip(pull(g), pull0(g), strict=True):
            np.testing.assert_allclose(u, v, rtol=1e-12, atol=1e-13)


def test_fast_path_is_differentiable():
    cloud, x, y = hard_case(60, 45, seed=2)
    data = Dataset(x, y, weights="sum")

    def through(kind):
        flow = uni.full("sqrt", forces=kind)

        def objective(w, y):
            v = velocity(flow, cloud.at(w), Dataset(x, y, weights="sum"))
            return energy(flow, cloud.at(w), data) + sum(jnp.sum(jnp.sin(u)) for u in v)

        return jax.grad(objective, argnums=(0, 1))(cloud.particles, jnp.asarray(y))

    for u, v in zip(jax.tree.leaves(through("fast")), jax.tree.leaves(through("dense")), strict=True):
        np.testing.assert_allclose(u, v, rtol=1e-9, atol=1e-10)
    kernels = [tangent_kernel(uni.full("sqrt", forces=k), cloud, jnp.asarray(x)) for k in ("fast", "dense")]
    np.testing.assert_allclose(kernels[0], kernels[1], rtol=1e-12, atol=1e-13)


def test_vmap_over_delta_and_over_padded_widths():
    data = Dataset(np.linspace(-1, 1, 45), np.sin(np.linspace(-3, 3, 45)))
    flow = uni.lifted("sqrt", forces="fast")
    polar = Polar(*np.random.default_rng(5).standard_normal((2, 30)))
    deltas = jnp.array([-jnp.inf, -10.0, 0.0, 10.0, jnp.inf])
    go = lambda d: velocity(flow, Cloud(polar, labels=d), data)
    many = jax.vmap(go)(deltas)
    for i, d in enumerate(deltas):
        np.testing.assert_allclose(many.r[i], go(d).r, rtol=1e-13)
    clouds = [Cloud(jax.tree.map(lambda u, m=m: u[:m], polar), labels=1.0) for m in (7, 19, 30)]
    batch = jax.vmap(lambda c: velocity(flow, c, data))(stack(clouds))
    for i, c in enumerate(clouds):
        np.testing.assert_allclose(batch.theta[i, : c.size], velocity(flow, c, data).theta, rtol=1e-12)


def test_float32_stays_float32():
    cloud, x, y = hard_case(500, 60, dtype=np.float32)
    for kind in ("fast", "dense"):
        flow = uni.full("sqrt", forces=kind)
        v = velocity(flow, cloud, Dataset(x, y))
        assert all(u.dtype == jnp.float32 for u in v)
        wide = Cloud(Affine(*(np.asarray(u, np.float64) for u in cloud.particles)))
        exact = velocity(uni.full("sqrt", forces="dense"), wide, Dataset(x.astype(float), y.astype(float)))
        scale = max(float(jnp.max(jnp.abs(u))) for u in exact)
        ties = np.abs(np.asarray(wide.particles.a) * x[:, None] - np.asarray(wide.particles.b)).min(0) < 1e-6
        for u, w in zip(v, exact, strict=True):
            assert np.max(np.abs(np.asarray(u - w))[~ties]) < 1e-5 * scale


def test_auto_follows_the_number_of_samples():
    cloud, _, _ = hard_case(200, 300)
    for s, kind in [(20, "dense"), (200, "fast")]:
        x = jnp.linspace(-1, 1, s)
        text = {
            k: jax.jit(lambda w, k=k, x=x: velocity(uni.full(forces=k), cloud.at(w), Dataset(x, x)))
            .lower(cloud.particles)
            .as_text()
            for k in ("auto", "dense", "fast")
        }
        assert len(text["auto"]) == len(text[kind]) and text["dense"] != text["fast"]
