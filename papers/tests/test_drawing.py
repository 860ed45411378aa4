"""Drawings show what an outcome holds."""

import numpy as np

from meanflow_papers import Criterion, Outcome
from meanflow_papers.catalogue import CATALOGUE
from meanflow_papers.drawing import draw_criteria, figure_of
from meanflow_papers.entry import Entry


def labels(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_criteria_show_failures_outside_their_interval():
    checks = [Criterion("in", 0.5, 0, 1), Criterion("out", 2.0, 0, 1), Criterion("least", 3.0, low=1)]
    ax = draw_criteria(checks)
    spots = [line for line in ax.lines if line.get_marker() not in ("None", None)]
    assert [line.get_marker() for line in spots] == ["o", "X", "o"]
    assert spots[0].get_xdata()[0] == 0.5 and spots[1].get_xdata()[0] > 1
    assert "0 .. 1" in [text.get_text() for text in ax.texts]


def test_an_outcome_without_a_picture_is_drawn_as_its_criteria():
    outcome = Outcome("x", "", {}, (Criterion("a", 1.0, 0, 2),))
    assert [tick.get_text() for tick in figure_of(Entry("004/x", ""), outcome).axes[0].get_yticklabels()] == [
        "a"
    ]


def test_drawings_of_small_outcomes():
    """The mapping from data to panels, on arrays small enough to check."""
    turn = np.array([[0.3, 0.1], [0.4, 0.2]])
    lazy = {
        "widths": [10, 40],
        "powers": [0.0, 0.5],
        "turn": turn,
        "turn_even": turn,
        "turn_error": 0.1 * turn,
    }
    (ax,) = CATALOGUE["004/lazy-slopes"].draw(lazy).axes
    assert labels(ax)[0].startswith(r"$\alpha = m^{0}$") and ax.get_xlabel() == "$m$"
    norms = np.array([[0.1, 1.0], [0.5, 1.1], [0.6, 1.2]])
    steps = {"norms": norms, "formula": norms[1], "step_times_gradient": np.array([0.05, 0.5])}
    left, right = CATALOGUE["001/figure-3"].draw(steps).axes
    assert {"after 1 step", "no change"} <= set(labels(left)) and len(labels(left)) == 5
    assert left.get_xscale() == right.get_yscale() == "log"
    paths = np.zeros((3, 2, 4, 2))
    local = {"delta": np.array([-1.0, 0.0, np.inf]), "paths": paths + np.arange(4)[:, None]}
    local["reduced"] = local["paths"][-1]
    titles = [ax.get_title() for ax in CATALOGUE["004/figure-2"].draw(local).axes]
    assert titles == [r"$\delta = -1$", r"$\delta = 0$", r"$\delta = \infty$"]
    ics = {"BN": {"ics_exact": np.ones((10, 2)), "test_accuracy": np.ones((10, 2))}}
    left, middle, right = CATALOGUE["003/figure-3"].draw(ics).axes
    assert labels(left) == ["batch norm", "rate falls by 5"] and right.get_ylabel() == "test accuracy"
    fallen = next(
        line for line in middle.lines if len(line.get_xdata()) == 10
    ).get_ydata()  # after 3, 6 and 8 epochs
    np.testing.assert_allclose(fallen, np.repeat([20.0, 100.0, 500.0, 2500.0], [3, 3, 2, 2]))
