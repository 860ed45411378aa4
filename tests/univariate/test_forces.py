"""Fast forces against the dense oracle: identical patterns, equal numbers, derivatives, precision."""

import functools

import chex
import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meanflow import univariate as uni
from meanflow.flows import energy, predict, tangent_kernel, velocity
from meanflow.measures import Affine, Cloud, Dataset, Polar
from meanflow.solvers import descend, solve
from meanflow.univariate import _forces as forces


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
        flow = uni.full(alpha="sqrt", forces=kind)
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
    from meanflow.flows._features import Feature

    cloud = Cloud(Polar(*np.random.default_rng(3).standard_normal((2, 80))))
    x, g = jnp.linspace(-1, 1, 50), jnp.cos(jnp.arange(50.0))
    for kind in ("fast", "dense"):
        feature = uni.canonical(forces=kind).feature
        f, pull = feature.linearize(cloud, x)
        f0, pull0 = Feature.linearize(feature, cloud, x)
        np.testing.assert_allclose(f, f0, atol=1e-14)
        chex.assert_trees_all_close(pull(g), pull0(g), rtol=1e-12, atol=1e-13)


def test_fast_path_is_differentiable():
    cloud, x, y = hard_case(60, 45, seed=2)
    data = Dataset(x, y, weights="sum")

    def through(kind):
        flow = uni.full(alpha="sqrt", forces=kind)

        def objective(w, y):
            v = velocity(flow, cloud.at(w), Dataset(x, y, weights="sum"))
            return energy(flow, cloud.at(w), data) + sum(jnp.sum(jnp.sin(u)) for u in v)

        return jax.grad(objective, argnums=(0, 1))(cloud.particles, jnp.asarray(y))

    gradients = [through(kind) for kind in ("fast", "dense")]
    chex.assert_tree_all_finite(gradients)
    chex.assert_trees_all_close(*gradients, rtol=1e-9, atol=1e-10)
    kernels = [
        tangent_kernel(uni.full(alpha="sqrt", forces=k), cloud, jnp.asarray(x)) for k in ("fast", "dense")
    ]
    np.testing.assert_allclose(kernels[0], kernels[1], rtol=1e-12, atol=1e-13)


def test_vmap_over_delta_and_over_padded_widths():
    data = Dataset(np.linspace(-1, 1, 45), np.sin(np.linspace(-3, 3, 45)))
    flow = uni.lifted(alpha="sqrt", forces="fast")
    polar = Polar(*np.random.default_rng(5).standard_normal((2, 30)))
    deltas = jnp.array([-jnp.inf, -10.0, 0.0, 10.0, jnp.inf])
    go = lambda d: velocity(flow, Cloud(polar, labels=d), data)
    many = jax.vmap(go)(deltas)
    for i, d in enumerate(deltas):
        np.testing.assert_allclose(many.r[i], go(d).r, rtol=1e-13)
    clouds = [Cloud(jax.tree.map(lambda u, m=m: u[:m], polar), labels=1.0) for m in (7, 19, 30)]
    batch = jax.vmap(lambda c: velocity(flow, c, data))(Cloud.stack(clouds))
    for i, c in enumerate(clouds):
        np.testing.assert_allclose(batch.theta[i, : c.size], velocity(flow, c, data).theta, rtol=1e-12)


def test_float32_stays_float32():
    cloud, x, y = hard_case(500, 60, dtype=np.float32)
    for kind in ("fast", "dense"):
        flow = uni.full(alpha="sqrt", forces=kind)
        v = velocity(flow, cloud, Dataset(x, y))
        chex.assert_type(list(v), jnp.float32)
        wide = Cloud(Affine(*(np.asarray(u, np.float64) for u in cloud.particles)))
        exact = velocity(
            uni.full(alpha="sqrt", forces="dense"), wide, Dataset(x.astype(float), y.astype(float))
        )
        scale = max(float(jnp.max(jnp.abs(u))) for u in exact)
        ties = np.abs(np.asarray(wide.particles.a) * x[:, None] - np.asarray(wide.particles.b)).min(0) < 1e-6
        for u, w in zip(v, exact, strict=True):
            assert np.max(np.abs(np.asarray(u - w))[~ties]) < 1e-5 * scale


def lowered(kind, platform, m, s):
    """The program of velocities for a platform, before the compiler has seen it."""
    cloud = Cloud(Affine(*np.ones((3, m))))
    run = jax.jit(lambda w, x: velocity(uni.full(forces=kind), cloud.at(w), Dataset(x, x)))
    return run.trace(cloud.particles, jnp.zeros(s)).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
    ("platform", "m", "s", "kind"),
    [
        ("cpu", 200, 20, "dense"),
        ("cpu", 200, 200, "fast"),
        ("cuda", 200, 200, "dense"),
        ("cuda", 2**20, 1000, "fast"),
        ("tpu", 2**20, 1000, "dense"),
    ],
)
def test_auto_follows_the_platform_and_the_size(platform, m, s, kind):
    """Only the fast forces add up neurons by region; only processors multiply by the array of activations."""
    text = lowered("auto", platform, m, s)
    assert ("stablehlo.scatter" in text) == (kind == "fast")
    assert ("stablehlo.dot" in text) == (kind == "dense" and platform == "cpu")
    assert "stablehlo.scatter" in lowered("fast", platform, m, s)
    assert "stablehlo.scatter" not in lowered("dense", platform, m, s)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_the_three_ways_agree(dtype):
    """Also the way of accelerators, run here, and with its derivatives."""
    cloud, x, g = (jax.tree.map(jnp.asarray, u) for u in hard_case(400, 70, dtype=dtype))
    shuffle = np.random.default_rng(2).permutation(70)
    feature = uni.full().feature
    p, slopes = feature.direction(cloud), feature.slopes(cloud)

    def both(way, slopes, g, x, is_sorted=False):
        f, gather = forces.linearization(p, slopes, x, {"cpu": way}, is_sorted=is_sorted)
        return f, gather(g)

    @functools.partial(jax.jit, static_argnums=0)
    def with_derivatives(way, g, x):
        """Values, and the derivatives of a function of them."""
        out, pull = jax.vjp(functools.partial(both, way), slopes, g, x)
        return *out, *pull((jnp.cos(5 * x), jnp.cos(out[1])))

    tolerance = 1e-12 if dtype == np.float64 else 1e-4
    want = with_derivatives(forces.PRODUCTS, g, x)
    for way in (forces.SUMS, forces.REGIONS):
        got = with_derivatives(way, g[shuffle], x[shuffle])
        for i, (u, v) in enumerate(zip(got, want, strict=True)):
            assert u.dtype == dtype
            v = v[shuffle] if v.shape == x.shape else v
            np.testing.assert_allclose(u, v, rtol=0, atol=tolerance * np.max(np.abs(v)), err_msg=str(i))
    plain, known = (jax.jit(functools.partial(both, forces.REGIONS, is_sorted=k)) for k in (False, True))
    for u, v in zip(plain(slopes, g, x), known(slopes, g, x), strict=True):
        np.testing.assert_array_equal(u, v)  # x was sorted, and to sort it once more changes nothing


def primitives(jaxpr):
    """Yield the names of the operations of a program, and for each of its loops the names inside."""
    for eqn in jaxpr.eqns:
        inside = []
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda u: hasattr(u, "eqns")):
            inner = value.jaxpr if hasattr(value, "jaxpr") else value
            if hasattr(inner, "eqns"):
                inside += primitives(inner)
        yield eqn.primitive.name, inside
        yield from [] if eqn.primitive.name in ("scan", "while") else inside


def innermost_loops(operations):
    for name, inside in operations:
        loops = [u for u, _ in inside if u in ("scan", "while")]
        if name in ("scan", "while") and not loops:
            yield [u for u, _ in inside]
        yield from innermost_loops(inside)


def test_samples_are_sorted_once():
    """A run sorts before its steps, not in them; observers still see the samples as the user gave them."""
    x = np.random.default_rng(0).permutation(np.linspace(-1, 1, 300))
    cloud = Cloud(Affine(*np.random.default_rng(1).standard_normal((3, 200))))
    data, flow = Dataset(x, np.sin(4 * x)), uni.full(forces="fast")
    ordered = data.sorted()
    np.testing.assert_array_equal(ordered.y, np.sin(4 * np.sort(x)))
    for u, v in zip(velocity(flow, cloud, data), velocity(flow, cloud, ordered), strict=True):
        np.testing.assert_allclose(u, v, rtol=1e-12, atol=1e-14)
    seen = {"f": lambda flow, cloud, data: predict(flow, cloud, data.x)}
    run = descend(flow, cloud, data, 20, step=0.1, observe=seen)
    again = descend(uni.full(forces="dense"), cloud, data, 20, step=0.1, observe=seen)
    np.testing.assert_allclose(run.observed["f"], again.observed["f"], rtol=1e-9, atol=1e-11)
    with pytest.raises(ValueError, match="only scalar inputs"):
        Dataset(np.ones((3, 2)), np.ones(3)).sorted()


@pytest.mark.parametrize("clock", ["mean_field", "normalized"])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("solver", ["descend", "solve"])
def test_a_step_predicts_once_and_does_not_sort(solver, centered, clock):
    """The clock takes the slopes of the loss from the velocity, and the start of a centered flow stands still."""
    cloud = Cloud(Affine(*np.random.default_rng(1).standard_normal((3, 200))))
    data = Dataset(np.linspace(-1, 1, 300), np.ones(300))
    flow = uni.full(forces="fast", centered=centered)
    if solver == "descend":
        run = lambda w: descend(flow, cloud.at(w), data, 20, step=0.1, clock=clock).energy
    else:
        run = lambda w: (
            solve(flow, cloud.at(w), data, 1.0, step=0.1, solver=diffrax.Euler(), clock=clock).energy
        )
    operations = list(primitives(jax.make_jaxpr(run)(cloud.particles).jaxpr))
    steps = [names for names in innermost_loops(operations) if "scatter-add" in names]
    assert steps
    for names in steps:
        # a prediction sums two columns by region
        assert "sort" not in names and names.count("scatter-add") == 2
