"""The sliding solver for vector inputs against an independent event-driven integrator and closed forms."""

import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plane_reference import NotUnique, Reference
from scipy.integrate import simpson

import meanflow as mf
from meanflow.flows._kinks import filippov, passage, planes
from meanflow.flows._kinks.two_layer import homogeneous_slopes
from meanflow.geometry._space import Space

EVENTS = {"crossings": "cross", "captures": "capture", "releases": "release"}
SEEDS = range(6)
SIZES = tuple(2.0**-k for k in range(3, 9))  # from 1/8, five halvings


def problem(d, seed, m=8, n=12):
    rng = np.random.default_rng(100 * d + seed)
    x, y = rng.standard_normal((n, d)), 2 * rng.standard_normal(n)
    return x, y, rng.standard_normal(m), rng.standard_normal((m, d))


@functools.cache
def reference(d, seed, end=10.0):
    """The end state, the events, and the largest number of hyperplanes a neuron has slid on; None if not unique."""
    x, y, a, b = problem(d, seed)
    solver = Reference(x, y, np.full(len(y), 1 / len(y)))
    try:
        final = solver.solve(a, b, end)
    except NotUnique:
        return None
    return final, [e[1] for e in solver.log], solver.most


def drawn(d, seed):
    x, y, a, b = problem(d, seed)
    return mf.vanilla(), mf.Cloud(mf.Neurons(a, b)), mf.Dataset(x, y)


def slide(flow, cloud, data, t1, step, **options):
    return mf.solve(flow, cloud, data, t1, solver="sliding", step=step, **options)


def shown(flow, cloud, data, **options):
    """Runs of one shape share a program, also with those that give eleven other times."""
    return slide(flow, cloud, data, 10.0, 1 / 32, ts=jnp.linspace(0, 10, 11), **options)


def distance(particles, expected):
    return max(np.abs(particles.a - expected[0]).max(), np.abs(particles.b - expected[1]).max())


def balance(w):
    square = jnp.sum(w.b**2, axis=-1)
    return w.a**2 - square, w.a**2 + square


def test_three_hyperplanes_at_once():
    """One neuron slides on three hyperplanes: the end and all events agree with the reference; energy and balance."""
    flow, cloud, data = drawn(5, 2)
    expected, log, most = reference(5, 2)
    sol = shown(flow, cloud, data)
    assert most == 3 == int(sol.stats["planes"])
    assert distance(sol.final.particles, expected) < 2e-4
    for name, short in EVENTS.items():
        assert int(sol.stats[name]) == log.count(short) > 0
    assert int(sol.stats["nonunique"]) == 0 and bool(sol.ok)
    assert np.all(np.diff(sol.energy) < 0)
    (now, scale), (before, _) = balance(sol.final.particles), balance(cloud.particles)
    assert np.max(np.abs(now - before) / scale) < 1e-12
    # what slides has its preactivation at 0 for good, others have not
    z = np.asarray(sol.final.particles.b @ data.x.T)
    on = np.abs(z) < 1e-13
    assert np.sum(np.any(on, axis=1)) == int(sol.stats["sliding"]) > 0
    # two halves make a whole, bit for bit
    half = slide(flow, cloud, data, 5.0, 1 / 32, ts=jnp.linspace(0, 5, 11))
    rest = slide(flow, cloud, data, 10.0, 1 / 32, ts=jnp.linspace(5, 10, 11), state=half.state)
    for u, v in zip(sol.final.particles, rest.final.particles, strict=True):
        np.testing.assert_array_equal(u, v)
    assert {k: int(rest.stats[k]) for k in EVENTS} == {k: int(sol.stats[k]) for k in EVENTS}


def test_parallel_samples_merge_and_zero_samples_are_inert():
    """Two equal samples are one with their weights added; so are multiples, by their squares; a zero one is none."""
    flow, cloud, data = drawn(5, 2)
    x, y, q = (np.array(u) for u in (data.x, data.y, data.weights))
    x[1], x[3] = x[0], 2 * x[2]
    x[5] = 0.0
    twice = mf.Dataset(x, y, q)
    # q_0 (f - y_0) + q_1 (f - y_1), and q_2 (f - y_2) + 2 q_3 (2 f - y_3), acting along x_0 and x_2
    once_y, once_q = y.copy(), q.copy()
    once_q[0], once_y[0] = q[0] + q[1], (q[0] * y[0] + q[1] * y[1]) / (q[0] + q[1])
    once_q[2], once_y[2] = q[2] + 4 * q[3], (q[2] * y[2] + 2 * q[3] * y[3]) / (q[2] + 4 * q[3])
    once_q[[1, 3, 5]] = 0.0
    other = x.copy()
    other[[1, 3, 5]] = np.random.default_rng(0).standard_normal((3, 5))
    one, two = shown(flow, cloud, twice), shown(flow, cloud, mf.Dataset(other, once_y, once_q))
    for u, v in zip(one.final.particles, two.final.particles, strict=True):
        np.testing.assert_allclose(u, v, rtol=1e-9, atol=1e-11)
    assert int(one.stats["captures"]) == int(two.stats["captures"]) > 0


def test_opposite_samples_share_a_hyperplane():
    """x and -x: the neuron loses one sample where it meets the other. Against plain descent with tiny steps."""
    flow, cloud, data = drawn(5, 2)
    x = np.array(data.x)
    x[6:] = -x[:6]
    both = mf.Dataset(x, data.y)
    sol = shown(flow, cloud, both)
    fine = mf.descend(flow, cloud, both, 40_000, step=2.5e-4).final.particles
    assert distance(sol.final.particles, fine) < 2e-3
    assert int(sol.stats["crossings"]) > 0 and int(sol.stats["deaths"]) == 0


def test_dead_and_resting_neurons():
    """Neurons that see no sample, and b = 0, stay where they are to the last bit; one on a hyperplane is decided."""
    flow, cloud, data = drawn(5, 2)
    x = np.abs(np.array(data.x))
    a, b = (np.array(u) for u in cloud.particles)
    b[:4] = -np.abs(b[:4])
    b[3] = 0.0
    b[4] = [x[0, 1], -x[0, 0], 0, 0, 0]  # exactly on the hyperplane of the first sample
    sol = shown(flow, mf.Cloud(mf.Neurons(a, b)), mf.Dataset(x, data.y))
    assert bool(sol.ok)
    np.testing.assert_array_equal(sol.final.particles.a[:4], a[:4])
    np.testing.assert_array_equal(sol.final.particles.b[:4], b[:4])
    assert np.any(sol.final.particles.b[5:] != b[5:])
    # all neurons dead: nothing moves, and that is a result
    none = shown(flow, mf.Cloud(mf.Neurons(a, -np.abs(b))), mf.Dataset(x, data.y))
    np.testing.assert_array_equal(none.final.particles.b, -np.abs(b))
    assert bool(none.ok) and np.all(none.energy == none.energy[0])


def test_one_input_with_a_bias_is_the_univariate_flow():
    """x~ = (x, 1): the same path, events and counts as ``full``, step by step, to 1e-9."""
    rng = np.random.default_rng(3)
    x, y = np.sort(rng.uniform(-1, 1, 6)), 2 * rng.standard_normal(6)
    a, b, c = 0.8 * rng.standard_normal((3, 8))
    line = slide(
        mf.full(alpha="sqrt"), mf.Cloud(mf.Affine(a, b, c)), mf.Dataset(x, y), 20.0, 1 / 16, clock="lazy"
    )
    flow = mf.vanilla(alpha="sqrt", bias=True)
    cloud = mf.Cloud(mf.Neurons(c, np.stack([a, -b], axis=1)))
    plane = slide(flow, cloud, mf.Dataset(x[:, None], y), 20.0, 1 / 16, clock="lazy")
    one, two = line.final.particles, plane.final.particles
    np.testing.assert_allclose(two.a, one.c, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(two.b, np.stack([one.a, -one.b], axis=1), rtol=1e-9, atol=1e-12)
    for name in (*EVENTS, "deaths", "nonunique", "sliding"):
        assert int(line.stats[name]) == int(plane.stats[name]), name
    assert int(line.stats["captures"]) > 0 < int(line.stats["crossings"])


def test_box_least_squares_against_every_pattern():
    """The rule at up to four kinks: least |g| over the box for convex ones, by trying all 3^k patterns."""
    import itertools

    rng = np.random.default_rng(0)
    cases, k, d = 60, 4, 5
    normal, jump, base = rng.standard_normal((cases, k, d)), rng.standard_normal((cases, k)), None
    sign = rng.choice([-1.0, 1.0], cases)
    jump = np.abs(jump) * sign[:, None]  # all convex
    base = rng.standard_normal((cases, d))
    valid = np.arange(k)[None, :] < rng.integers(1, k + 1, cases)[:, None]
    gram = np.einsum("mkd,mld->mkl", normal, normal)
    pull = np.einsum("mkd,md->mk", normal, base)
    size = np.linalg.norm(base, axis=1)
    got = filippov.decide(*(jnp.asarray(u) for u in (gram, jump, pull, size, valid, sign)))
    for i in range(cases):
        columns = (jump[i][:, None] * normal[i])[valid[i]]
        best = (np.inf, None)
        for pattern in itertools.product((0.0, 1.0, None), repeat=len(columns)):
            lam = np.array([0.0 if p is None else p for p in pattern])
            free = [j for j, p in enumerate(pattern) if p is None]
            if free:
                lam[free] = np.linalg.lstsq(columns[free].T, -(base[i] + lam @ columns), rcond=None)[0]
                if lam[free].min() < 0 or lam[free].max() > 1:
                    continue
            best = min(best, (np.linalg.norm(base[i] + lam @ columns), tuple(lam)))
        np.testing.assert_allclose(got.lam[i][valid[i]], best[1], atol=1e-11)
    assert not np.any(got.nonunique)
    # derivatives of the weights in both modes: those of ``hold`` for the pattern that was found
    gram, jump, size, valid, sign = (jnp.asarray(u) for u in (gram, jump, size, valid, sign))
    at = lambda t: jnp.asarray(pull + t * pull**2)
    f = lambda t: jnp.sum(filippov.decide(gram, jump, at(t), size, valid, sign).lam ** 2)
    free, fixed = got.state == filippov.SLIDES, jnp.where(got.state == filippov.ACTIVE, jump, 0.0)
    pairs = valid[:, :, None] & valid[:, None, :]
    outside = lambda t: at(t) + jnp.einsum("mkl,ml->mk", jnp.where(pairs, gram, 0.0), fixed)
    held = lambda t: jnp.sum((filippov.hold(gram, free, got.table, outside(t)) / jump) ** 2)
    h = 1e-6
    np.testing.assert_allclose(jax.grad(held)(0.0), (f(h) - f(-h)) / (2 * h), rtol=1e-6)
    np.testing.assert_allclose(jax.jvp(held, (0.0,), (1.0,))[1], jax.grad(held)(0.0), rtol=1e-10)


def test_a_concave_kink_repels_to_the_inactive_side():
    one = jnp.ones((1, 1))
    away = filippov.decide(one[..., None], -one, 0.5 * one, one[0], one > 0, one[0])
    assert int(away.state[0, 0]) == filippov.INACTIVE and bool(away.nonunique[0, 0])
    through = filippov.decide(one[..., None], -one, -0.5 * one, one[0], one > 0, one[0])
    assert int(through.state[0, 0]) == filippov.ACTIVE and not bool(through.nonunique[0, 0])


def test_arrangement_of_parallel_and_zero_samples():
    x = jnp.array([[1.0, 2.0], [0.0, 0.0], [-2.0, -4.0], [2.0, 1.0], [0.1, 0.2], [1 + 1e-9, 2.0]])
    found = planes.arrange(x)
    assert found.plane.tolist() == [0, 1, 0, 3, 0, 5]
    np.testing.assert_allclose(found.factor, [1, 0, -2, 1, 0.1, 1], rtol=1e-12)
    assert found.live.tolist() == [True, False, False, True, False, True]


def test_slopes_of_activations():
    assert homogeneous_slopes(jax.nn.relu) == (0.0, 1.0) and homogeneous_slopes(jnp.abs) == (-1.0, 1.0)
    assert homogeneous_slopes(jax.nn.leaky_relu) == pytest.approx((0.01, 1.0))
    with pytest.raises(ValueError, match="linear on both sides"):
        homogeneous_slopes(jnp.tanh)


def decay_of(outer, inner):
    return lambda w: 0.5 * (outer * w.a**2 + inner * jnp.sum(w.b**2, axis=-1))


VARIANTS = {
    "leaky_relu": ({"activation": "leaky_relu"}, 2e-3),
    "abs": ({"activation": jnp.abs}, 2e-3),
    "steep": ({"activation": lambda z: jnp.where(z > 0, 0.5, 2.0) * z}, 2e-3),
    "decay": ({"penalty": (decay_of(1.0, 1.0), 0.1)}, 2e-3),
    "two decays": ({"penalty": (decay_of(0.5, 2.0), 0.1)}, 2e-3),
    "inner": ({"outer": False, "penalty": (decay_of(1.0, 1.0), 0.1)}, 2e-3),
    "outer": ({"inner": False, "penalty": (decay_of(1.0, 1.0), 0.1)}, 2e-3),
    "logistic, sqrt": ({"loss": "logistic", "alpha": "sqrt", "centered": True}, 2e-3),
    "bias": ({"bias": True}, 2e-3),
}


@pytest.mark.parametrize(
    "name", [pytest.param(v, marks=() if v == "two decays" else pytest.mark.slow) for v in VARIANTS]
)
def test_variants_against_descent_with_tiny_steps(name):
    """Every kind of kink, decay, frozen layer, loss and scale; plain descent errs by its step, 2e-4."""
    options, tolerance = VARIANTS[name]
    x, y, a, b = problem(3, 4)
    if "bias" in options:
        b = np.concatenate([b, a[:, None]], axis=1)
    if options.get("loss") == "logistic":
        y = np.sign(y)
    flow, cloud, data = mf.vanilla(**options), mf.Cloud(mf.Neurons(a, b)), mf.Dataset(x, y)
    clock = "lazy"
    sol = slide(flow, cloud, data, 4.0, 1 / 32, clock=clock)
    fine = mf.descend(flow, cloud, data, 20_000, step=2e-4, clock=clock).final.particles
    assert bool(sol.ok) and distance(sol.final.particles, fine) < tolerance
    if name == "decay":
        (now, _), (before, _) = balance(sol.final.particles), balance(cloud.particles)
        np.testing.assert_allclose(now, before * np.exp(-2 * 0.1 * 4.0), rtol=1e-11)
    if name in ("inner", "outer"):
        still = "a" if name == "inner" else "b"
        np.testing.assert_array_equal(getattr(sol.final.particles, still), getattr(cloud.particles, still))
    else:
        assert int(sol.stats["crossings"]) > 0


@pytest.mark.slow
def test_padding_single_samples_and_neurons():
    flow, cloud, data = drawn(3, 4)
    whole = slide(flow, cloud, data, 4.0, 1 / 32)
    padded = slide(flow, cloud.pad(11), data, 4.0, 1 / 32)
    for u, v in zip(whole.final.particles, padded.final.particles, strict=True):
        np.testing.assert_allclose(v[:8], u, rtol=1e-10)
    assert {k: int(padded.stats[k]) for k in EVENTS} == {k: int(whole.stats[k]) for k in EVENTS}
    one = mf.Cloud(mf.Neurons(jnp.array([1.5]), jnp.array([[0.2, -0.3, 0.1]])))
    point = mf.Dataset(jnp.array([[1.0, 0.5, -0.2]]), jnp.array([0.7]))
    sol = slide(flow, one, point, 60.0, 1 / 8)
    np.testing.assert_allclose(mf.predict(flow, sol.final, point.x), point.y, atol=1e-6)
    # d = 1 without a bias: all samples share b = 0
    line = mf.Dataset(jnp.array([[1.0], [-0.5], [2.0]]), jnp.array([1.0, 1.0, -1.0]))
    cloud = mf.Cloud(mf.Neurons(jnp.array([1.0, -1.0, 0.5]), jnp.array([[0.3], [0.4], [-0.6]])))
    got = slide(flow, cloud, line, 4.0, 1 / 32)
    fine = mf.descend(flow, cloud, line, 20_000, step=2e-4).final.particles
    assert distance(got.final.particles, fine) < 2e-3


@pytest.mark.slow
def test_clocks_only_rescale_time():
    """For alpha = sqrt(m) the gradient clock runs m, the lazy one m^2/alpha^2 = m times the mean-field clock."""
    _, cloud, data = drawn(3, 4)
    flow, m = mf.vanilla(alpha="sqrt"), 8
    plain = slide(flow, cloud, data, 0.5, 1 / 256)
    assert int(plain.stats["crossings"]) > 0
    for clock in ("gradient", "lazy"):
        other = slide(flow, cloud, data, 0.5 * m, m / 256, clock=clock)
        for u, v in zip(plain.final.particles, other.final.particles, strict=True):
            np.testing.assert_allclose(v, u, rtol=1e-10)
        assert {k: int(other.stats[k]) for k in EVENTS} == {k: int(plain.stats[k]) for k in EVENTS}


@pytest.mark.slow
def test_balance_over_a_thousand_steps():
    flow, cloud, data = drawn(5, 2)
    sol = slide(flow, cloud, data, 31.25, 1 / 32, ts=101)
    (now, scale), (before, _) = balance(sol.clouds.particles), balance(cloud.particles)
    assert int(sol.stats["num_steps"]) >= 1000
    assert np.max(np.abs(now - before[None, :]) / scale) < 1e-12
    assert np.all(np.diff(sol.energy) <= 0)


@pytest.mark.slow
def test_dissipation_equality_between_events():
    flow, cloud, data = drawn(3, 1)
    ts = np.linspace(0, 1 / 64, 9)
    sol = slide(flow, cloud, data, 1 / 64, 1 / 512, ts=ts)
    assert int(sol.stats["crossings"]) == 0 == int(sol.stats["captures"])
    rate = [
        float(mf.dissipation(flow, cloud.at(jax.tree.map(lambda u, k=k: u[k], sol.clouds.particles)), data))
        for k in range(9)
    ]
    np.testing.assert_allclose(sol.energy[0] - sol.energy[-1], simpson(rate, x=ts), rtol=1e-6)


def test_a_residual_that_is_not_finite_is_a_result():
    flow, cloud, data = drawn(5, 2)
    big = cloud.at(jax.tree.map(lambda u: 1e200 * u, cloud.particles))
    bad = shown(flow, big, data, throw=False)
    assert not bool(bad.ok) and mf.RESULTS[bad.result] == mf.RESULTS[mf.RESULTS.non_finite]


def test_float32_meets_the_same_kinks():
    """Six problems in both precisions: every event of one is an event of the other, and the ends agree to 1e-4."""
    seen = 0
    for seed in SEEDS:
        flow, cloud, data = drawn(5, seed)
        single, double = shown(flow, *in_float32(cloud, data)), shown(flow, cloud, data)
        names = (*EVENTS, "deaths", "nonunique", "planes", "sliding")
        assert [int(single.stats[k]) for k in names] == [int(double.stats[k]) for k in names], seed
        assert distance(single.final.particles, double.final.particles) < 1e-4
        seen += int(single.stats["captures"])
    assert seen > 40


def in_float32(*parts):
    return jax.tree.map(lambda u: u.astype(jnp.float32), parts)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_float32_at_a_size_where_planes_are_close(seed):
    """m = 1000, n = 500, d = 50: the float32 run ends, and its events are those of the float64 run up to 1 %."""
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((500, 50)) / np.sqrt(50), rng.standard_normal(500)
    cloud = mf.Cloud(mf.Neurons(rng.standard_normal(1000), rng.standard_normal((1000, 50))))
    data, flow = mf.Dataset(x, y), mf.vanilla()
    runs = [slide(flow, *parts, 4.0, 0.1) for parts in ((cloud, data), in_float32(cloud, data))]
    exact, single = ({k: int(v) for k, v in run.stats.items()} for run in runs)
    print("float64", exact, "float32", single)  # noqa: T201
    assert all(bool(run.ok) for run in runs) and exact["captures"] > 20
    for name in ("crossings", "captures"):
        assert abs(single[name] - exact[name]) <= max(2, 0.01 * exact[name]), name
    np.testing.assert_allclose(runs[1].energy, runs[0].energy, rtol=1e-5)


def test_messages():
    flow, cloud, data = drawn(3, 0)
    many = mf.Cloud(mf.Neurons(jnp.ones((8, 2)), cloud.particles.b))
    with pytest.raises(ValueError, match="one output"):
        slide(flow, many, mf.Dataset(data.x, jnp.ones((12, 2))), 1.0, 0.1)
    with pytest.raises(ValueError, match="without a penalty"):
        slide(mf.batchnorm(penalty=(decay_of(1.0, 1.0), 0.1)), cloud, data, 1.0, 0.1)

    class Cubes(mf.flows.Feature):  # a model of one's own: the message says what is missing
        def __call__(self, cloud, x):
            return jnp.abs(x @ cloud.particles.b.T) ** 3 * cloud.particles.a[None, :]

    own = mf.flows.make_flow(Cubes(mf.Neurons), Space())
    with pytest.raises(ValueError, match=r"motion\(problem\)"):
        slide(own, cloud, data, 1.0, 0.1)
    with pytest.raises(ValueError, match="linear on both sides"):
        slide(mf.vanilla("tanh"), cloud, data, 1.0, 0.1)
    odd = mf.vanilla(penalty=(lambda w: jnp.abs(w.a), 0.1))
    with pytest.raises(ValueError, match="weight decay"):
        slide(odd, cloud, data, 1.0, 0.1)


@pytest.mark.parametrize(("kind", "end"), [("vanilla", 400.0), ("batchnorm", 10.5), ("full", 400.0)])
def test_the_dissipation_on_kinks_is_that_of_the_filippov_solution(kind, end):
    """Observed while neurons slide it is -dE/dt, by central differences; at rest on kinks it ends a run."""
    x, y, a, b = problem(2, 3, n=6)
    if kind == "full":
        flow, cloud = mf.full(), mf.Cloud(mf.Affine(b[:, 0], b[:, 1], a))
        data = mf.Dataset(np.linspace(-1, 1, 6), 0.2 * y)
    else:
        flow, cloud, data = getattr(mf, kind)(), mf.Cloud(mf.Neurons(a, b)), mf.Dataset(x, y)
    ts = 10.0 + 1e-3 * jnp.array([-1.0, 0.0, 1.0])
    sol = slide(flow, cloud, data, end, 1 / 8, ts=ts, observe=["dissipation"], steady=1e-3)
    assert int(sol.stats["sliding"]) > 0
    assert kind == "batchnorm" or float(sol.state.t) < end  # that one goes on for long
    slope = (sol.energy[0] - sol.energy[2]) / (ts[2] - ts[0])
    np.testing.assert_allclose(sol.observed["dissipation"][1], slope, rtol=1e-5)


class Inner(NamedTuple):
    u: jax.Array
    left: jax.Array


class Numbers(NamedTuple):
    moving: Inner


class Shaken(NamedTuple):
    moves: jax.Array
    by: jax.Array


def shake(task):
    """A motion in which every event is the same formula and takes one unit of time."""
    now = task.neurons.moving
    moving = now.left > 0
    by = 0.1 * jnp.sin(task.shared * now.u)
    u = jnp.where(moving, now.u + task.rows * by, now.u)
    counts = passage.tally(moving, crossings=moving)
    return Numbers(Inner(u, jnp.where(moving, now.left - 1.0, now.left))), Shaken(moving, by), counts


def shaken(before, event, rows, shared):
    return Inner(before.u + 0.1 * rows * jnp.sin(shared * before.u), before.left - 1.0)


STEPS = passage.Steps(shake, shaken)


@pytest.mark.parametrize("small", [0, passage.SMALL])
@pytest.mark.parametrize("together", [1, 8])
def test_reverse_mode_of_a_loop_with_more_events_than_it_keeps(small, together, monkeypatch):
    """Forty events, eight or all of them kept at a time, and a bound that cuts the loop short; against plain loops."""
    monkeypatch.setattr(passage, "SMALL", small)

    def end(u, rows, shared, cap, forward):
        task = passage.Task(Numbers(Inner(u, jnp.array([40.0, 3.0, 0.0]))), rows, shared, None)
        return jnp.sum(passage.run(STEPS, task, cap, forward=forward, together=together)[0].moving.u ** 2)

    def plain(u, rows, shared, cap):
        turns = jnp.minimum(jnp.array([40, 3, 0]), cap)
        once = lambda k, u: jnp.where(k < turns, u + 0.1 * rows * jnp.sin(shared * u), u)
        return jnp.sum(jax.lax.fori_loop(0, 40, once, u) ** 2)

    arguments = jnp.array([0.3, 0.5, 0.7]), jnp.array([1.0, 0.9, 0.8]), jnp.array(1.3)
    for cap in (100, 30):
        wanted = jax.grad(plain, argnums=(0, 1, 2))(*arguments, cap)
        got = jax.grad(end, argnums=(0, 1, 2))(*arguments, cap, False)
        ahead = jax.jacfwd(end, argnums=(0, 1, 2))(*arguments, cap, True)
        for u, v, w in zip(got, ahead, wanted, strict=True):
            np.testing.assert_allclose(u, w, rtol=1e-12)
            np.testing.assert_allclose(v, w, rtol=1e-12)


@pytest.mark.parametrize(("cap", "blocks"), [(20, 1), (5, 1), (20, 3)])
def test_neurons_with_events_left_are_gathered(cap, blocks):
    """A hundred neurons with up to thirteen events each, sixteen at a time, against plain Python; also in blocks."""
    rng = np.random.default_rng(0)
    u, rows, left = rng.standard_normal(100), rng.uniform(size=100), np.floor(rng.exponential(2.0, 100))
    assert left.max() == 13 and np.sum(left > 1) > 2 * passage.LEAST
    task = lambda u: passage.Task(
        Numbers(Inner(u, jnp.asarray(left))), jnp.asarray(rows), jnp.array(1.3), None
    )
    end, counts = jax.jit(lambda u: passage.run(STEPS, task(u), cap, together=8, blocks=blocks))(
        jnp.asarray(u)
    )
    turns = np.minimum(left, cap)
    for i in range(100):
        for _ in range(int(turns[i])):
            u[i] += 0.1 * rows[i] * np.sin(1.3 * u[i])
    np.testing.assert_allclose(end.moving.u, u, rtol=1e-13)
    np.testing.assert_array_equal(end.moving.left, left - turns)
    assert int(passage.by_name(counts)["crossings"]) == turns.sum()


def directional(d, seed, end=4.0):
    """The final energy along a random direction of weights and targets: by the solver, and by the reference."""
    x, y, a, b = problem(d, seed)
    rng = np.random.default_rng(seed)
    da, db, dy = (rng.standard_normal(u.shape) for u in (a, b, y))

    def value(s, adjoint="checkpoint"):
        cloud = mf.Cloud(mf.Neurons(jnp.asarray(a), jnp.asarray(b)))
        cloud = cloud.at(mf.Neurons(a + s * da, b + s * db))
        return slide(mf.vanilla(), cloud, mf.Dataset(x, y + s * dy), end, 1 / 64, adjoint=adjoint).energy[-1]

    def exact(s):
        solver = Reference(x, y + s * dy, np.full(len(y), 1 / len(y)))
        a1, b1 = solver.solve(a + s * da, b + s * db, end)
        f = (a1 / len(a1)) @ np.maximum(b1 @ x.T, 0)
        return 0.5 * np.mean((f - y - s * dy) ** 2), [e[1:] for e in solver.log]

    return value, exact


@functools.cache
def gradient_errors():
    """Relative errors of jax.grad at step 1/64 against central differences of the reference, on five seeds."""
    errors = []
    for seed in range(12):
        value, exact = directional(3, seed)
        (low, left), (_, middle), (high, right) = exact(-1e-4), exact(0.0), exact(1e-4)
        if not left == middle == right:
            continue  # the sequence of events changes within the difference
        truth = (high - low) / 2e-4
        errors.append(abs(float(jax.grad(value)(0.0)) - truth) / abs(truth))
        if len(errors) == 5:
            break
    return errors


@pytest.mark.slow
def test_gradients_match_the_reference():
    assert len(gradient_errors()) == 5 and sorted(gradient_errors())[3] < 1e-3, gradient_errors()


@pytest.mark.slow
@pytest.mark.xfail(
    strict=True,
    reason="on seed 0 outer weights, inner weights and targets give 0.166, -0.136 and -0.035, which nearly cancel: the "
    "error at step 1/64 is 1.1e-4, 2.6e-2 of the sum -0.0044. It is the discretisation: an event costs the value "
    "h^2 phi(t/h), where t/h is its place in the step, so the derivative is off by h phi' t': 5.8e-6 at step 1/4096",
)
def test_gradients_match_the_reference_on_all_seeds():
    assert max(gradient_errors()) < 1e-3, gradient_errors()


class FrozenReference(Reference):
    """The loss f y, whose residual is frozen at y: there the solver has no error but rounding, with any step."""

    def residual(self, f):
        return self.q * self.y


@pytest.mark.slow
def test_derivatives_of_events_are_exact():
    """Through crossings and captures in a frozen field, where nothing is discretised: event times and jumps alone."""
    seen = []
    for seed in range(4):
        x, y, a, b = problem(3, seed)
        rng = np.random.default_rng(seed)
        da, db, dy, ca, cb = (rng.standard_normal(u.shape) for u in (a, b, y, a, b))

        def value(s, x=x, y=y, a=a, b=b, da=da, db=db, dy=dy, ca=ca, cb=cb):
            cloud, flow = mf.Cloud(mf.Neurons(a + s * da, b + s * db)), mf.vanilla(loss=lambda f, y: f * y)
            w = slide(flow, cloud, mf.Dataset(x, y + s * dy), 1.5, 0.25, adjoint="forward").final.particles
            return jnp.sum(ca * w.a) + jnp.sum(cb * w.b)

        def exact(s, x=x, y=y, a=a, b=b, da=da, db=db, dy=dy, ca=ca, cb=cb):
            solver = FrozenReference(x, y + s * dy, np.full(len(y), 1 / len(y)))
            a1, b1 = solver.solve(a + s * da, b + s * db, 1.5)
            return np.sum(ca * a1) + np.sum(cb * b1), [e[1:] for e in solver.log]

        (low, left), (high, right) = exact(-1e-5), exact(1e-5)
        if left != right:
            continue  # the sequence of events changes within the difference
        seen += [e[0] for e in left]
        slope = jax.jvp(value, (0.0,), (1.0,))[1]
        np.testing.assert_allclose(slope, (high - low) / 2e-5, rtol=1e-6, atol=1e-6)
    assert seen.count("cross") >= 10 and seen.count("capture") >= 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 2])
def test_gradients_match_finite_differences_and_forward_mode(seed):
    """The derivative of what is computed is exact, also on seed 0, where it is far from that of the reference."""
    value, _ = directional(3, seed)
    slope, h = float(jax.grad(value)(0.0)), 1e-5
    np.testing.assert_allclose(slope, (value(h) - value(-h)) / (2 * h), rtol=1e-7)
    np.testing.assert_allclose(jax.jvp(lambda s: value(s, "forward"), (0.0,), (1.0,))[1], slope, rtol=1e-9)


@eqx.filter_jit
def slide_all(clouds, data, step):
    sol = jax.vmap(lambda c, d: slide(mf.vanilla(), c, d, 10.0, step))(clouds, data)
    return sol.final.particles, sol.ok, {name: sol.stats[name] for name in (*EVENTS, "nonunique", "planes")}


@functools.cache
def errors(d):
    """Per seed: errors by step size, counts by step size, the events of the reference, its most planes."""
    parts = [drawn(d, seed) for seed in SEEDS]
    clouds, data = (jax.tree.map(lambda *u: jnp.stack(u), *(p[k] for p in parts)) for k in (1, 2))
    ends = [slide_all(clouds, data, jnp.asarray(h)) for h in SIZES]
    rows = {}
    for i, seed in enumerate(SEEDS):
        own = lambda w, i=i: jax.tree.map(lambda u: np.asarray(u[i]), w)
        expected = reference(d, seed)
        counts = [own(c) for _, _, c in ends]
        if expected is None:
            assert counts[-1]["nonunique"] > 0  # the solver says so too, and there is nothing to compare
            continue
        assert all(bool(ok[i]) for _, ok, _ in ends)
        error = np.array([distance(own(w), expected[0]) for w, _, _ in ends])
        rows[seed] = error, counts, expected[1], expected[2]
    return rows


@pytest.mark.slow
def test_agrees_with_the_reference_in_all_dimensions():
    """24 problems at step 1/32: below 2e-4 on all, median below 1e-5; neurons on two and three hyperplanes."""
    rows = [(d, seed, *row) for d in (2, 3, 5, 8) for seed, row in errors(d).items()]
    at = SIZES.index(1 / 32)
    found = np.array([row[2][at] for row in rows])
    print({(row[0], row[1]): float(f"{row[2][at]:.1e}") for row in rows}, "median", np.median(found))  # noqa: T201
    assert len(rows) >= 20
    assert found.max() < 2e-4 and np.median(found) < 1e-5, (found.max(), np.median(found))
    most = [row[5] for row in rows]
    assert sum(k >= 2 for k in most) >= 5 and max(most) >= 3
    for d, seed, _, counts, log, planes_at_once in rows:
        fine = counts[-1]
        assert fine["planes"] == planes_at_once, (d, seed)
        for name, short in EVENTS.items():
            assert fine[name] == log.count(short), (d, seed, name)


@pytest.mark.slow
def test_order_through_kinks():
    """Fitted over five halvings, pooled over seeds and dimensions: at least 1.8."""
    logs = [np.log(row[0]) for d in (2, 3, 5, 8) for row in errors(d).values()]
    order = np.polyfit(np.log(SIZES), np.mean(logs, axis=0), 1)[0]
    print("order", order)  # noqa: T201
    assert order >= 1.8, order


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [1, 3])
def test_large_clouds_are_many_copies_of_a_small_one(monkeypatch, blocks):
    """5000 neurons, of which those with events are gathered, also in blocks: copies of eight move like these."""
    from meanflow.flows._kinks import two_layer
    from meanflow.solvers import _sliding as sliding

    copies = 625 if blocks == 1 else 626  # another shape is another program
    flow, cloud, data = drawn(5, 2)
    small = slide(flow, cloud, data, 4.0, 1 / 16)
    monkeypatch.setattr(sliding, "LARGE", 0)  # stages one after the other, as for large states
    monkeypatch.setattr(two_layer, "block_count", lambda entries, dim: blocks)
    many = mf.Cloud(jax.tree.map(lambda u: jnp.tile(u, (copies, *[1] * (u.ndim - 1))), cloud.particles))
    large = slide(flow, many, data, 4.0, 1 / 16)
    for u, v in zip(small.final.particles, large.final.particles, strict=True):
        np.testing.assert_allclose(
            v.reshape(copies, *u.shape), jnp.broadcast_to(u[None], (copies, *u.shape)), rtol=1e-8
        )
    for name in EVENTS:
        assert int(large.stats[name]) == copies * int(small.stats[name])


@pytest.mark.slow
def test_batch_norm_raw_and_on_the_manifold():
    """Against descent with tiny steps; |b| and the constraint to rounding; both coordinates slide alike; order 2."""
    for seed in (2, 4):
        x, y, a, b = problem(3, seed)
        data = mf.Dataset(x + 0.3, y)
        raw, manifold = mf.batchnorm().bind(data), mf.batchnorm_manifold().bind(data)
        cloud = mf.Cloud(mf.Neurons(a, b))
        reduced = manifold.space.from_raw(cloud)
        runs = {rate: slide(raw, cloud, data, 6.0, 1 / rate) for rate in (8, 16, 32, 64)}
        sol = runs[32]
        assert bool(sol.ok) and int(sol.stats["captures"]) > 0 < int(sol.stats["crossings"])
        fine = mf.descend(raw, cloud, data, 60_000, step=1e-4).final.particles
        assert distance(sol.final.particles, fine) < 5e-4
        np.testing.assert_allclose(
            np.linalg.norm(sol.final.particles.b, axis=1), np.linalg.norm(b, axis=1), rtol=1e-13
        )
        other = slide(manifold, reduced, data, 6.0, 1 / 32)
        moved = manifold.space.from_raw(sol.final)
        np.testing.assert_allclose(other.final.particles.a, moved.particles.a, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(other.final.particles.b, moved.particles.b, rtol=1e-10, atol=1e-12)
        held, _ = manifold.invariant()(other.final)
        np.testing.assert_allclose(held, 1.0, rtol=1e-13)
        assert {k: int(sol.stats[k]) for k in EVENTS} == {k: int(other.stats[k]) for k in EVENTS}
        gaps = [distance(runs[k].final.particles, runs[64].final.particles) for k in (8, 16, 32)]
        print("batch norm", seed, {k: int(v) for k, v in sol.stats.items()}, "gaps", gaps)  # noqa: T201
        assert gaps[2] < 2e-5 and gaps[2] < gaps[0] / 4


@pytest.mark.slow
def test_gradients_under_batch_norm():
    x, y, a, b = problem(3, 4)
    turn = np.random.default_rng(0).standard_normal(b.shape)

    def value(s, adjoint="checkpoint"):
        cloud = mf.Cloud(mf.Neurons(jnp.asarray(a), jnp.asarray(b)))
        cloud = cloud.at(mf.Neurons(jnp.asarray(a), b + s * turn))
        return slide(mf.batchnorm(), cloud, mf.Dataset(x + 0.3, y), 4.0, 1 / 16, adjoint=adjoint).energy[-1]

    slope, h = float(jax.grad(value)(0.0)), 1e-5
    np.testing.assert_allclose(slope, (value(h) - value(-h)) / (2 * h), rtol=1e-6)
