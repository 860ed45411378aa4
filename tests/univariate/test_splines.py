"""Spline interpolants, their natural limit, and training of the output weights in closed form."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import interpolate

from meanflow.kernels import kernel_flow
from meanflow.measures import Affine, Cloud
from meanflow.measures._scaling import Scaling, speed
from meanflow.univariate import spline_interpolant, wide_kernel
from meanflow.univariate._kernels import RadialLaw, SignsLaw, UniformLaw

X = jnp.linspace(-1, 1, 10)
Y = jnp.array([1.0, 1, 1, -1, -1, -1, 1, 1, 1, -1])
GRID = jnp.linspace(-1, 1, 801)
random_feature = partial(wide_kernel, kind="feature")
natural_spline = partial(spline_interpolant, law=None)


def bordered(x, y, shrink):
    """The same equations solved densely: f(u, order) = (d + s u + sum_j w_j |u - x_j|^3)^(order), with d and s.

    [ |xi-xj|^3       1         x      ] [w]   [y]
    [ 1^T          -k3/k0       0      ] [d] = [0]
    [ x^T             0      -k3/k1    ] [s]   [0]
    """
    border = np.stack([np.ones_like(x), x])
    matrix = np.block([[np.abs(x[:, None] - x[None, :]) ** 3, border.T], [border, -np.diag(shrink)]])
    *weights, constant, slope = np.linalg.solve(matrix, np.concatenate([y, np.zeros(2)]))

    def f(u, order):
        gap = np.asarray(u)[:, None] - x[None, :]
        powers = (np.abs(gap) ** 3, 3 * gap * np.abs(gap), 6 * np.abs(gap), 6 * np.where(gap < 0, -1.0, 1.0))[
            order
        ]
        return powers @ np.array(weights) + (constant + slope * np.asarray(u), slope, 0.0, 0.0)[order]

    return f, constant, slope


def test_natural_spline_is_scipys():
    rng = np.random.default_rng(0)
    cases = [(np.array(X), np.array(Y)), (rng.uniform(-3, 5, 2000), rng.normal(size=2000)), (X[:2], Y[2:4])]
    for x, y in cases:
        ours = jax.jit(natural_spline)(jnp.asarray(x), jnp.asarray(y))
        order = np.argsort(x)
        theirs = interpolate.CubicSpline(np.array(x)[order], np.array(y)[order], bc_type="natural")
        grid = np.linspace(np.min(x), np.max(x), 5000)[1:-1]
        for order in range(4):
            truth = theirs(grid, order)
            np.testing.assert_allclose(
                ours.derivative(grid, order), truth, atol=1e-10 * np.abs(truth).max() + 1e-13
            )


@pytest.mark.parametrize(
    "law", [SignsLaw(1.0), SignsLaw(3.0), UniformLaw(1.0, 1.0), UniformLaw(0.7, 2.0)], ids=str
)
def test_spline_form_equals_the_kernel_form_of_equation_24(law):
    alpha = jnp.linalg.solve(random_feature(X, law=law), Y)
    spline = spline_interpolant(X, Y, law=law)
    np.testing.assert_allclose(spline(X), Y, atol=1e-14)
    k0, k1, k3 = law.cubic()
    dense, constant, slope = bordered(np.asarray(X), np.asarray(Y), np.array([k3 / k0, k3 / k1]))
    outside = jnp.linspace(-2, 2, 77)  # beyond the samples the cubics go on
    for order in range(4):
        np.testing.assert_allclose(
            spline.derivative(outside, order), dense(outside, order), atol=1e-9 * 10.0**order
        )
    np.testing.assert_allclose([spline.constant, spline.slope], [constant, slope], atol=1e-10)
    np.testing.assert_allclose(spline(GRID), random_feature(GRID, X, law=law) @ alpha, atol=1e-9)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        (SignsLaw, {1.0: 0.0471, 1.5: 0.0139, 2.0: 0.0075, 5.0: 0.00183, 10.0: 8.1e-4, 100.0: 7.6e-5}),
        (lambda b: UniformLaw(1.0, b), {1.0: 0.0142, 2.0: 0.0041, 5.0: 0.00126, 10.0: 5.9e-4, 100.0: 5.7e-5}),
    ],
)
def test_distance_to_the_natural_spline(family, expected):
    natural = natural_spline(X, Y)(GRID)
    for bound, distance in expected.items():
        gap = jnp.max(jnp.abs(spline_interpolant(X, Y, law=family(bound))(GRID) - natural))
        assert gap == pytest.approx(distance, rel=0.012)


def test_finite_support_does_not_give_the_natural_spline():
    # Theorem 5 as printed: f'' vanishes at the ends
    ends = jnp.array([-1.0, 1.0])
    np.testing.assert_allclose(spline_interpolant(X, Y).derivative(ends, 2), [7.726, 19.445], atol=2e-3)
    uniform = spline_interpolant(X, Y, law="uniform")
    np.testing.assert_allclose(uniform.derivative(ends, 2), [-1.350, 5.855], atol=2e-3)
    np.testing.assert_allclose(natural_spline(X, Y).derivative(ends, 2), 0.0, atol=1e-9)


def test_the_natural_limit_is_well_conditioned_where_the_kernel_matrix_is_not():
    law = SignsLaw(1e7)
    assert jnp.linalg.cond(random_feature(X, law=law)) > 1e15
    scipys = interpolate.CubicSpline(X, Y, bc_type="natural")(GRID)
    np.testing.assert_allclose(spline_interpolant(X, Y, law=law)(GRID), scipys, atol=1e-8)  # 7.6e-3 / bound
    np.testing.assert_allclose(spline_interpolant(X, Y, law=SignsLaw(1e12))(GRID), scipys, atol=1e-10)


def test_gradients_jit_and_single_precision():
    fit = jax.jit(lambda y, bound: spline_interpolant(X, y, law=SignsLaw(bound))(0.37))
    basis, slope = jax.jit(jax.grad(fit, argnums=(0, 1)))(Y, 1.4)
    assert slope == pytest.approx(float(fit(Y, 1.4 + 1e-5) - fit(Y, 1.4 - 1e-5)) / 2e-5, rel=1e-5)
    assert basis @ Y == pytest.approx(float(fit(Y, 1.4)), rel=1e-12)  # linear in y
    single = spline_interpolant(X.astype(jnp.float32), Y.astype(jnp.float32), law=SignsLaw(jnp.float32(1.0)))
    assert single(X.astype(jnp.float32)).dtype == jnp.float32
    np.testing.assert_allclose(single(GRID.astype(jnp.float32)), spline_interpolant(X, Y)(GRID), atol=2e-3)


@pytest.mark.bad_input
def test_bad_arguments():
    with pytest.raises(ValueError, match="cubic kernel"):
        spline_interpolant(X, Y, law=RadialLaw())
    with pytest.raises(ValueError, match="where the kernel is cubic"):
        spline_interpolant(2 * X, Y, law="signs")
    with pytest.raises(ValueError, match="y must have shape"):
        natural_spline(X, Y[:-1])
    with pytest.raises(ValueError, match="gaps between the samples x must be > 0"):
        natural_spline(X.at[1].set(X[2]), Y)
    with pytest.raises(ValueError, match="y must be finite"):
        spline_interpolant(X, Y.at[3].set(jnp.nan))
    with pytest.raises(ValueError, match="order"):
        natural_spline(X, Y).derivative(0.0, 4)
    with pytest.raises(ValueError, match="kernel must have shape"):
        readout(jnp.eye(3), jnp.ones(4))


# ---- training c alone


def readout(kernel, residual, learning_rate=None):
    """Training under the loss 1/2 sum rho^2 with target 0, so that f is the residual rho."""
    return kernel_flow(kernel, residual, jnp.zeros_like(residual), weights=1.0, learning_rate=learning_rate)


def _features(key, x, m=40):
    """relu(a x - b) / sqrt(m) of m neurons with a and b uniform on (-1, 1)."""
    a, b = (jax.random.uniform(k, (m,), minval=-1.0) for k in jax.random.split(key))
    return jax.nn.relu(x[:, None] * a[None, :] - b[None, :]) / jnp.sqrt(m)


def _small_network(key, m=40):
    return _features(key, X), jax.random.normal(jax.random.fold_in(key, 1), (m,))


def test_descent_in_closed_form_matches_the_iterations(key):
    features, c0 = _small_network(key)
    kernel = features @ features.T
    lr = 1.9 / jnp.linalg.eigvalsh(kernel)[-1]  # above 1: the top mode alternates in sign
    training = readout(kernel, features @ c0 - Y, lr)
    step = lambda c, _: (c - lr * features.T @ (features @ c - Y),) * 2
    _, history = jax.lax.scan(step, c0, length=3000)
    counts = jnp.array([1, 2, 7, 500, 3000])
    np.testing.assert_allclose(training(counts), history[counts - 1] @ features.T - Y[None, :], atol=2e-12)
    test_features = _features(key, GRID[::40])
    predictions = (test_features @ c0)[None, :] + training.dual(counts) @ (features @ test_features.T)
    np.testing.assert_allclose(predictions, history[counts - 1] @ test_features.T, atol=1e-10)


def test_flow_in_closed_form_matches_an_ode_solver(key):
    from scipy.integrate import solve_ivp

    features, c0 = _small_network(key)
    field = lambda t, c: -features.T @ (features @ c - Y)
    times = [0.5, 5.0, 50.0]
    exact = solve_ivp(field, (0, 50.0), np.array(c0), t_eval=times, rtol=1e-11, atol=1e-12, method="LSODA")
    training = readout(features @ features.T, features @ c0 - Y)
    np.testing.assert_allclose(training(jnp.array(times)), exact.y.T @ features.T - Y[None, :], atol=1e-8)
    dual = training.dual(jnp.array(times))
    np.testing.assert_allclose(c0[None, :] + dual @ features, exact.y.T, atol=1e-7)
    limit = c0 + training.dual(jnp.inf) @ features
    nearest = c0 + jnp.linalg.lstsq(features, Y - features @ c0)[0]  # the interpolating c nearest to c0
    np.testing.assert_allclose(limit, nearest, atol=1e-7)


def test_zero_modes_of_the_kernel_stay_finite():
    kernel, residual = jnp.array([[2.0, 2.0], [2.0, 2.0]]), jnp.array([1.0, -0.5])
    training, descent = readout(kernel, residual), readout(kernel, residual, 0.1)
    for dual in (training.dual(3.0), descent.dual(5), training.dual(jnp.inf)):
        assert jnp.all(jnp.isfinite(dual))
    mean, half = 0.25, 0.75
    np.testing.assert_allclose(training(3.0), mean * jnp.exp(-12.0) + jnp.array([half, -half]), atol=1e-14)


def test_22_the_limit_keeps_the_start(key):
    features, c0 = _small_network(key)
    training = readout(features @ features.T, features @ c0 - Y)
    trained = c0 + training.dual(1e12) @ features
    rest = np.linalg.pinv(np.asarray(features)) @ np.asarray(Y - features @ c0)
    np.testing.assert_allclose(c0 + rest, trained, atol=1e-8)
    printed = jnp.linalg.lstsq(features, Y)[0]
    np.testing.assert_allclose(features @ printed, Y, atol=1e-11)  # interpolates too, but is another network
    assert jnp.max(jnp.abs(printed - trained)) == pytest.approx(1.956, abs=2e-3)
    assert jnp.linalg.norm(trained - c0) < jnp.linalg.norm(printed - c0)


# ---- when the whole network trains like its output weights


def _train(m, alpha, c_scale, time=None):
    """Full network on 6 points, paired signs so that f_0 = 0; descent with steps 0.02 of the lazy clock.

    Stops at ``time``, or when the loss is 1e-3 of its start.
    """
    x = jnp.linspace(-1, 1, 6)
    y = jnp.sin(2.5 * x) + 0.3 * x
    angle = 2 * jnp.pi * (jnp.arange(m // 2) + 0.5) / (m // 2) + 0.01
    a, b = jnp.tile(jnp.cos(angle), 2), jnp.tile(jnp.sin(angle), 2)
    c = c_scale * jnp.repeat(jnp.array([1.0, -1.0]), m // 2)
    predict = lambda z, x: jax.nn.relu(x[:, None] * z[0][None, :] - z[1][None, :]) @ z[2] / alpha
    loss = jax.value_and_grad(lambda z: jnp.sum((predict(z, x) - y) ** 2) / 2)
    lr = 0.02 * alpha**2 / m
    cloud = Cloud(Affine(a, b, c))
    pace = speed("gradient", Scaling(alpha), cloud) / speed("lazy", Scaling(alpha), cloud)
    assert lr * pace == pytest.approx(0.02)

    def step(state):
        z, count, _ = state
        value, slope = loss(z)
        return jax.tree.map(lambda w, g: w - lr * g, z, slope), count + 1, value

    def go_on(state):
        return (state[2] > 1e-3 * jnp.sum(y**2) / 2) if time is None else state[1] < round(time / 0.02)

    z, _, _ = jax.lax.while_loop(go_on, step, ((a, b, c), 0, jnp.inf))
    grid = jnp.linspace(-1, 1, 101)
    turn = jnp.angle(jnp.exp(1j * (jnp.arctan2(z[1], z[0]) - jnp.arctan2(b, a))))
    return x, y, grid, predict(z, grid), jnp.sqrt(jnp.mean(turn**2))


def test_33_alpha_one_gives_the_tangent_kernel_unless_c_is_small():
    m, time, law = 1600, 60.0, RadialLaw(1.0)

    def kernel_fits(x, y, grid, c2):
        for kernel in (lambda *p: wide_kernel(*p, law=law, c2=c2), lambda *p: random_feature(*p, law=law)):
            yield kernel(grid, x) @ readout(kernel(x, x), -y).dual(time)

    x, y, grid, f, _ = _train(m, 1.0, 1.0, time)
    tangent, feature = kernel_fits(x, y, grid, 1.0)
    large = [float(jnp.max(jnp.abs(f - g))) for g in (tangent, feature)]
    x, y, grid, f, _ = _train(m, 1.0, 1e-3, time)
    _, feature = kernel_fits(x, y, grid, 1e-6)
    small = float(jnp.max(jnp.abs(f - feature)))
    np.testing.assert_allclose(large, [0.0070, 0.3269], rtol=0.03)
    assert small < 1e-4


@pytest.mark.parametrize("power", [0.0, 0.25, 0.5])
def test_weights_move_like_alpha_over_width(power):
    widths = [100, 400, 1600, 6400]
    turns = [_train(m, m**power, 1.0)[-1] for m in widths]
    slope = np.polyfit(np.log(widths), np.log(np.array(turns)), 1)[0]
    assert slope == pytest.approx(power - 1, abs=0.05)


@pytest.mark.bad_input
def test_samples_whose_cubes_are_no_numbers():
    with pytest.raises(ValueError, match="cubes of the samples x must be finite"):
        spline_interpolant(jnp.array([0.0, 1e15], jnp.float32), jnp.array([1.0, 2.0], jnp.float32), law=None)
