"""Figures of the univariate paper at their setups; the short ones and reduced horizons in the fast suite."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meanflow import univariate as uni
from meanflow.measures import Affine, Cloud
from meanflow.solvers import descend
from meanflow.univariate import balance
from meanflow_papers.catalogue import CATALOGUE
from meanflow_papers.univariate.courses import figure_5_late, figure_6_course
from meanflow_papers.univariate.figure_1 import figure_1
from meanflow_papers.univariate.figure_2 import figure_2
from meanflow_papers.univariate.figure_5 import figure_5
from meanflow_papers.univariate.figure_6 import figure_6
from meanflow_papers.univariate.figure_7 import figure_7
from meanflow_papers.univariate.figure_8 import figure_8
from meanflow_papers.univariate.figure_9 import figure_9
from meanflow_papers.univariate.lazy_slopes import lazy_slopes
from meanflow_papers.univariate.lemma_2 import lemma_2
from meanflow_papers.univariate.proposition_1 import proposition_1
from meanflow_papers.univariate.proposition_4 import proposition_4
from meanflow_papers.univariate.section_3_1 import section_3_1
from meanflow_papers.univariate.setup import concentrations, random_neurons, sinusoid, tangential_fraction
from meanflow_papers.univariate.sparse_limit import sparse_limit
from meanflow_papers.univariate.theorem_5 import corollary_6, theorem_5


def check(outcome):
    """The numbers are written out, so that ``pytest -rP`` shows them for passing tests too."""
    short = {name: value for name, value in outcome.data.items() if np.size(value) <= 100}
    rows = [f"  {name}: {np.array2string(np.asarray(value), precision=4)}" for name, value in short.items()]
    sys.stdout.write("\n".join([str(outcome), *rows]) + "\n")
    assert outcome.passed, str(outcome)


def test_figure_1():
    check(figure_1())


def test_figure_2():
    """Also the values that independent code had given."""
    outcome = figure_2()
    check(outcome)
    np.testing.assert_allclose(outcome.data["turn"], [5.5e-5, 0.116, 0.279, 0.518, 0.720], rtol=0.01)
    np.testing.assert_allclose(outcome.data["across"], [0.997, 0.650, 0.328, 0.131, 5.4e-5], rtol=0.01)


@pytest.mark.parametrize("statement", [lemma_2, proposition_1, proposition_4, theorem_5, corollary_6])
def test_statements_of_the_univariate_paper(statement):
    """Criteria of Lemma 2, Propositions 1 and 4, Theorem 5 and Corollary 6, and the numbers of the errata."""
    outcome = statement()
    check(outcome)
    if statement is proposition_1:
        assert outcome.data["on rays"][-1] == pytest.approx(0.29, abs=0.05)
        assert outcome.criteria[-1].value == pytest.approx(1.07, abs=0.2)


def test_figure_9_reduced():
    check(figure_9(times=(5.0, 10.0), width=100, step=0.05))


def test_figure_5_reduced():
    """After 200 epochs: nothing turns at delta = -inf, little at -100, and order is by delta."""
    data = figure_5(epochs=200, seeds=2).data
    assert data["share"].shape == (7, 2, 26)  # balances, seeds, times
    turn, share, loss = (np.median(data[name][..., -1], axis=1) for name in ("turn", "share", "loss"))
    assert turn[0] == 0 and turn[1] < 1e-4
    assert np.all(np.diff(turn[:5]) > 0)
    assert share[-1] > 0.5 > 0.2 > share[1]
    assert np.all(loss < 4.8) and jnp.all(jnp.diff(data["delta"][1:-1]) > 0)


def test_three_readings_of_the_concentration():
    """By hand: jumps 3 and 1 in the window, 4 outside it on a dead neuron, 2 outside it on a live one."""
    w = Affine(
        jnp.array([1.0, 1.0, 1.0, -1.0]), jnp.array([0.0, 0.5, 5.0, -5.0]), jnp.array([3.0, 1.0, 4.0, 2.0])
    )
    found = concentrations(w, jnp.linspace(-1, 1, 5), 1)
    assert [float(v) for v in found.values()] == pytest.approx([3 / 4, 3 / 10, 3 / 6])


def test_a_lifted_step_is_plain_descent_to_second_order():
    """A step of ``lifted`` has the (r, theta) of plain descent and keeps delta: (a, b, c) differ by O(step^2)."""
    data = sinusoid(6)
    start = Cloud(random_neurons(jax.random.key(0), 8, 1.0), labels=0.7)
    gaps = []
    for step in (1e-3, 5e-4):
        options = {"step": step, "clock": "gradient"}
        one = descend(uni.lifted(alpha="sqrt"), start, data, 1, **options).final
        raw = descend(uni.full(alpha="sqrt"), balance.lift(start, "sqrt"), data, 1, **options).final
        seen = balance.project(raw, "sqrt").particles
        np.testing.assert_allclose(one.particles.r, seen.r, rtol=1e-10)
        np.testing.assert_allclose(one.particles.theta, seen.theta, rtol=1e-10)
        again = balance.lift(one, "sqrt").particles
        gaps.append(max(float(jnp.max(jnp.abs(u - v))) for u, v in zip(again, raw.particles, strict=True)))
    assert gaps[0] > 1e-9 and gaps[0] / gaps[1] == pytest.approx(4, rel=0.05)


@pytest.mark.slow
def test_figure_5():
    """And the numbers of the errata."""
    outcome = figure_5()
    check(outcome)
    values = {c.name: c.value for c in outcome.criteria}
    assert values["largest share on the way at +inf"] == pytest.approx(0.96, abs=0.02)
    assert values["loss left at +inf when the share is largest"] == pytest.approx(0.28, abs=0.03)


@pytest.mark.slow
def test_figure_6():
    check(figure_6())


@pytest.mark.slow
def test_figure_7():
    check(figure_7())


@pytest.mark.slow
def test_figure_8():
    """And the numbers of the errata: delta at the start hardly grows, the share of c^2 falls with the width."""
    outcome = figure_8()
    check(outcome)
    np.testing.assert_allclose(outcome.data["expected_delta"], [-0.6658, -0.66666, -0.66667], atol=5e-5)
    values = {c.name: c.value for c in outcome.criteria}
    assert values["growth of E delta / spread of one draw"] == pytest.approx(0.0086, rel=0.1)
    assert values["c^2 fraction falls by at least"] == pytest.approx(1850, rel=0.2)
    assert values["turn falls by at least"] == pytest.approx(12, rel=0.1)
    most = {
        name: np.max(outcome.data[name][:, 0] / outcome.data[name][:, -1]) for name in ("fraction", "turn")
    }
    assert most["fraction"] == pytest.approx(18600, rel=0.2) and most["turn"] == pytest.approx(30, rel=0.1)


@pytest.mark.slow
def test_figure_8_with_the_outer_weights_of_the_library():
    """U(+-1/sqrt m), where the paper says U(+-1/m): the same story.

    Turns .086 and .010 were measured independently at widths 200 and 2000; a single draw of 20 neurons varies by a
    factor of two (.143 there, .258 here) and is not compared.
    """
    outcome = figure_8(power=0.5)
    np.testing.assert_allclose(np.median(outcome.data["turn"], axis=0)[1:], [0.086, 0.010], rtol=0.35)
    assert np.all(outcome.data["fraction"][:, -1] < outcome.data["fraction"][:, 0])


@pytest.mark.slow
def test_figure_5_late():
    """And the numbers of the errata, from three seeds."""
    outcome = figure_5_late(seeds=3)
    check(outcome)
    ends = {name: np.median(outcome.data[name], axis=0)[-1] for name in ("share", "concentration")}
    assert ends["share"] == pytest.approx(0.31, abs=0.03)
    assert ends["concentration"] == pytest.approx(0.87, abs=0.03)


@pytest.mark.slow
def test_figure_6_course():
    check(figure_6_course())


@pytest.mark.slow
def test_sparse_limit():
    check(sparse_limit())


@pytest.mark.slow
def test_figure_9():
    check(figure_9())


@pytest.mark.slow
def test_lazy_slopes():
    check(lazy_slopes())


@pytest.mark.slow
def test_section_3_1():
    """All but the standard deviation at later times, which shows no exponent at these widths; the errata's numbers."""
    outcome = section_3_1()
    failed = [c.name for c in outcome.criteria if not c.passed]
    assert all(CATALOGUE["004/section-3.1"].explanation(name) for name in failed), str(outcome)
    np.testing.assert_allclose(outcome.data["slopes"], [-0.57, -0.63, -0.39], atol=0.01)


def test_tangential_fraction_does_not_see_alpha():
    """Against c^2/(c^2 + n^2), the textbook form, and the ratio of the two mobilities for every alpha."""
    raw = Cloud(Affine(*np.random.default_rng(7).standard_normal((3, 7))))
    a, b, c = raw.particles
    fraction = tangential_fraction(balance.balance(raw.particles), c * jnp.hypot(a, b))
    np.testing.assert_allclose(fraction, c**2 / (a**2 + b**2 + c**2), rtol=1e-12)
    for alpha in ("m", "sqrt", "one"):
        polar = balance.project(raw, alpha)
        radial, turning = uni.lifted(alpha=alpha).space.mobility(polar)
        np.testing.assert_allclose(turning * polar.particles.r**2 / radial, fraction, rtol=1e-12)


def test_tangential_fraction_at_extreme_balances():
    delta = jnp.array([-1e12, -3.0, -1e-3, 0.0, 2.0, 1e12])
    q = jnp.array([0.3, -1.0, 2.0, 0.7, -0.2, 5.0])
    k = delta / (2 * jnp.abs(q))
    textbook = (1 + k / jnp.sqrt(1 + k**2)) / 2
    ours = tangential_fraction(delta, q)
    np.testing.assert_allclose(ours[1:], textbook[1:], rtol=1e-12)
    assert textbook[0] == 0.0  # cancellation
    assert ours[0] == pytest.approx(0.3**2 / 1e24, rel=1e-12)
    assert tangential_fraction(0.0, 0.0) == 0.5
    assert jnp.all(jnp.isfinite(jax.vmap(jax.grad(tangential_fraction))(delta, q)))
    # section 4, printed: the kernel regime is -delta << r^2. With r = 10, delta = -0.01 that holds, yet the neuron
    # turns at half speed; what decides is -delta >> 2 |q|
    assert tangential_fraction(-0.01, 10.0) > 0.49
    assert tangential_fraction(-2000.0, 10.0) < 1e-4
    assert tangential_fraction(-jnp.inf, 1.0) == 0.0  # c alone; printed: delta = +inf
    assert tangential_fraction(jnp.inf, 1.0) == 1.0
