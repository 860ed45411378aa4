"""Pictures of the papers draw what they are given, on the Axes they are given."""

import numpy as np
import pytest

from meanflow import plots
from meanflow_papers import pictures
from meanflow_papers.style import save


def labels(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_needles_end_on_one_circle():
    ax = pictures.needles(np.array([[3.0, 0.0], [0.0, -0.2]]))
    pictures.needles(np.array([[1.0, 1.0]]), ax, color="red")
    ends = ax.lines[1]
    np.testing.assert_allclose(np.hypot(ends.get_xdata(), ends.get_ydata()), 1.0)
    assert sum(line.get_gid() == "circle" for line in ax.lines) == 1


def test_field_arrows_have_one_length():
    ax = pictures.field([0.0, 1.0], [0.0, 1.0], [[3.0, 4.0], [0.0, 0.0]])
    arrows = ax.collections[0]
    np.testing.assert_allclose(arrows.U, [0.6, 0.0])
    np.testing.assert_allclose(arrows.V, [0.8, 0.0])


def test_convergence_writes_the_fitted_slope_and_ticks_the_sizes():
    sizes = np.array([10.0, 20.0, 40.0])
    ax = pictures.convergence(sizes, {"a": 3 / sizes}, orders={"guide": -0.5})
    assert labels(ax) == ["a: slope $-1.00$", "guide"]
    guide = ax.lines[1].get_ydata()
    np.testing.assert_allclose(guide, 0.3 * (sizes / 10) ** -0.5)
    assert ax.get_xscale() == ax.get_yscale() == "log"
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["10", "20", "40"]


def test_speeds_are_sorted_by_direction():
    ax = pictures.speeds([3.0, -0.5, 1.0], {"a": [30.0, 50.0, 10.0]})
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [10.0, 30.0, 50.0])  # -0.5 is 2 pi - 0.5
    assert ax.get_xlim() == (0, 2 * np.pi)


def test_angles_keep_equal_limits_for_all_points():
    ax = pictures.angles([70.0, 75.0], [71.0, 74.0], label="a")
    pictures.angles([10.0], [5.0], ax, label="b")
    assert ax.get_xlim() == ax.get_ylim() and ax.get_xlim()[0] < 5 and ax.get_xlim()[1] > 75
    assert sum(line.get_gid() == "diagonal" for line in ax.lines) == 1


def test_projection_marks_the_odd_point():
    ax = pictures.projection(np.arange(8.0).reshape(4, 2), 2)
    assert labels(ax) == ["odd point", "cluster"]
    assert (ax.lines[0].get_xdata()[0], ax.lines[0].get_ydata()[0]) == (4, 5)
    assert len(ax.lines[1].get_xdata()) == 3


def test_activity_is_a_density():
    ax = pictures.activity_histogram({"a": np.linspace(0, 1, 50)}, bins=5)
    assert labels(ax) == ["a"] and ax.get_xlim() == (0, 1)


def test_tree_puts_children_on_either_side_of_their_parent():
    layers = [np.array([[0.0, 1.0, 3.0]]), np.array([[0.0, 0.0, 1.0], [1.0, 0.5, 0.0]])]
    ax = pictures.tree(layers)
    points = [line for line in ax.lines if line.get_marker() != "None"]
    assert len(points) == 9
    depth = [round(-float(line.get_ydata()[0])) for line in points]
    assert depth == [0] * 3 + [1] * 6
    left, right = points[3].get_xdata()[0], points[6].get_xdata()[0]
    assert left < 0.5 < right
    stacked = points[4].get_ydata()[0] - points[3].get_ydata()[0]
    assert stacked > 0  # equal values lie above each other


def test_saved_figures_are_vectors_without_a_date(tmp_path):
    figure = plots.fit([0.0, 1.0], {"f": [0.0, 1.0]}, None).figure
    paths = save(figure, tmp_path / "a", ("png", "svg", "pdf"))
    assert [p.name for p in paths] == ["a.png", "a.svg", "a.pdf"]
    again = save(figure, tmp_path / "b", ("svg",))[0]
    assert paths[1].read_bytes() == again.read_bytes()
    assert b"<path" in paths[1].read_bytes()


def test_a_figure_that_fails_leaves_the_old_file(tmp_path):
    figure = plots.fit([0.0, 1.0], {"f": [0.0, 1.0]}, None).figure
    (path,) = save(figure, tmp_path / "a")
    old = path.read_bytes()
    figure.axes[0].set_title("$\\unknown$")
    with pytest.raises(ValueError, match="unknown"):
        save(figure, tmp_path / "a")
    assert path.read_bytes() == old and list(tmp_path.iterdir()) == [path]
