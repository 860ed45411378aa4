"""gamma and cells: against angles, orthant probabilities, Monte Carlo, scipy and simulation."""

import jax
import numpy as np
import pytest

from meanflow_papers.decomposed import rank
from meanflow_papers.decomposed.cells import cells, cone_volumes, general_position_count
from meanflow_papers.decomposed.theorem_3 import polygon


def planar_gamma(x):
    """Sorted angles modulo pi: every gap is the opening of two opposite cells."""
    angle = np.sort(np.mod(np.arctan2(x[:, 1], x[:, 0]), np.pi))
    return np.diff(np.append(angle, angle[0] + np.pi)).min() / (2 * np.pi)


@pytest.mark.parametrize("n", [3, 5, 7, 9])
def test_odd_polygons(n):
    found = rank.gamma(polygon(n))
    assert found.cells == 2 * n  # the paper says n cells and 1/n
    np.testing.assert_allclose(found.value, 1 / (2 * n), rtol=1e-12)
    assert abs(found.value - 1 / n) > 0.05
    counted = rank.gamma(polygon(n), method="monte_carlo", key=jax.random.key(n), samples=20_000)
    assert counted.low <= 1 / (2 * n) <= counted.high and counted.low > 0.4 / n


def test_even_polygons_have_the_value_printed_for_odd_ones():
    np.testing.assert_allclose(rank.gamma(polygon(6)).value, 1 / 6, rtol=1e-12)


def test_random_batches_in_the_plane():
    rng = np.random.default_rng(0)
    for n in (1, 2, 4, 15, 40):
        x = rng.normal(size=(n, 2))
        found = rank.gamma(x)
        np.testing.assert_allclose(found.value, planar_gamma(x) if n > 1 else 0.5, rtol=1e-9)
        np.testing.assert_allclose(found.total, 1.0, rtol=1e-12)
        for size in (1e-200, 1e200):  # only directions count
            np.testing.assert_allclose(rank.gamma(size * x).value, found.value, rtol=1e-9)


@pytest.mark.parametrize("k, n", [(3, 3), (3, 7), (4, 4), (4, 6), (5, 5)])
def test_random_batches_count_total_and_monte_carlo(k, n):
    x = np.random.default_rng(10 * k + n).normal(size=(n, k))
    found = cells(x)
    assert len(found.volumes) == general_position_count(n, k)  # Zaslavsky
    np.testing.assert_allclose(found.volumes.sum(), 1.0, rtol=1e-7)
    w = np.random.default_rng(1).normal(size=(100_000, k))
    signs = np.where(w @ found.lines.T > 0, 1, -1)
    code = lambda s: (s > 0) @ (1 << np.arange(n))
    count = np.bincount(code(signs), minlength=2**n)[code(found.signs)]
    assert count.sum() == 100_000  # no neuron falls outside the cells found
    noise = np.sqrt(found.volumes / 100_000)
    assert np.abs(count / 100_000 - found.volumes).max() <= 5 * noise.max()
    assert np.all(np.abs(count / 100_000 - found.volumes) <= 5 * noise + 10 / 100_000)


def test_orthants_in_closed_form():
    # four Gaussians of equal correlation 1/2: P(all positive) = 1/5
    root = np.linalg.cholesky(0.5 * np.eye(4) + 0.5)
    found = cells(root)
    np.testing.assert_allclose(found.volumes[np.all(found.signs == 1, axis=1)], 0.2, rtol=1e-9)
    np.testing.assert_allclose(cells(np.eye(4)).volumes, 1 / 16, rtol=1e-10)
    np.testing.assert_allclose(cells(np.eye(3, 7)).volumes, 1 / 8, rtol=1e-12)  # only the span counts
    np.testing.assert_allclose(cone_volumes(np.eye(5)[None]), 1 / 32, rtol=1e-6)


def test_tiny_cells_are_measured_to_relative_accuracy():
    # w_1 > 0, w_2 > 0, w_1 + w_2 + eps w_3 < 0: a triangle of area (eps w_3)^2 / 2 in (w_1, w_2), where the
    # density is 1 / 2 pi; averaged over w_3 < 0 this is eps^2 / 8 pi up to a factor 1 + O(eps^2)
    for eps in (1e-2, 1e-4, 1e-6):
        x = np.array([[1.0, 0, 0], [0, 1.0, 0], [1.0, 1.0, eps]])
        np.testing.assert_allclose(rank.gamma(x).value, eps**2 / (8 * np.pi), rtol=max(eps**2, 1e-8))


def test_degenerate_arrangement_with_many_planes_through_a_ray():
    x = np.array(
        [[1, 0, 0], [0, 1, 0], [1, 1, 0], [1, -1, 0], [0, 0, 1], [2, 0, 0], [-1, 0, 0], [0, 0, 0]], float
    )
    found = cells(x)
    assert len(found.lines) == 5 and len(found.volumes) == 16
    np.testing.assert_allclose(found.volumes, 1 / 16, rtol=1e-10)


def test_plain_counting_is_no_bound_but_its_interval_is():
    x = np.random.default_rng(38).normal(size=(8, 3))
    exact = rank.gamma(x).value
    counted = rank.gamma(x, method="monte_carlo", key=jax.random.key(0), samples=20_000)
    assert counted.low <= exact <= counted.high
    assert counted.cells < rank.gamma(x).cells and counted.low == 0.0  # cells were missed, and it says so


def test_crossing_step_of_the_proof():
    # (18)-(20): the nearest hyperplane minimises |w x_i| / |x_i|, and the step divides by |x_i|^2
    w, x = np.array([0.2, 1.0]), np.array([[1.0, 0.0], [0.05, 0.0866]])
    step = lambda i, power: w - 1.001 * (w @ x[i]) / np.linalg.norm(x[i]) ** power * x[i]
    signs = lambda v: np.sign(x @ v)
    printed = int(np.argmin(np.abs(x @ w)))
    right = int(np.argmin(np.abs(x @ w) / np.linalg.norm(x, axis=1)))
    assert printed != right
    flipped = lambda v: np.flatnonzero(signs(v) != signs(w)).tolist()
    assert flipped(step(right, 2)) == [right]  # exactly one sign changes
    assert flipped(step(printed, 2)) != [printed]  # the stated choice flips the other one too
    assert printed not in flipped(step(printed, 1))  # without the square it does not even cross


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rank.gamma(np.ones((3, 2)), method="guess"), "method"),
        (lambda: rank.gamma(np.ones((3, 2)), method="monte_carlo"), "key"),
        (lambda: rank.gamma(np.random.default_rng(0).normal(size=(12, 9))), "monte_carlo"),
        (lambda: rank.gamma(np.ones(3)), "shape"),
    ],
)
@pytest.mark.bad_input
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
