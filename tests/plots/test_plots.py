"""Plots draw what they are given, on the Axes they are given."""

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import meanflow as mf
from meanflow import plots


def test_directions_bars_are_shares():
    turn = np.array([0.1, 0.1, 3.3, 5.0])
    cloud = mf.Cloud(
        mf.Neurons(jnp.ones(4), jnp.asarray(np.c_[np.cos(turn), np.sin(turn)])), [0.5, 0.25, 0.25, 0.0]
    )
    ax = plots.directions(cloud, bins=4)
    np.testing.assert_allclose([bar.get_height() for bar in ax.patches], [0.75, 0.0, 0.25, 0.0])


def test_axes_are_used_and_returned():
    ax = Figure().add_subplot()
    assert plots.plane(np.array([1.0, -2.0, 0.5]), np.zeros(3), ax) is ax
    assert [len(line.get_xdata()) for line in ax.lines] == [2, 1]
    data = mf.Dataset(np.linspace(0, 1, 4), np.ones(4))
    drawn = plots.fit(np.linspace(0, 1, 9), {"f": np.zeros(9)}, data)
    assert [len(line.get_xdata()) for line in drawn.lines] == [9, 4]
    assert drawn.get_xlabel() == "$x$"


def test_energies_skip_the_start_of_a_log_axis():
    class Run:
        ts, energy = np.array([0.0, 1.0, 2.0]), np.array([3.0, 2.0, 1.0])

    ax = plots.energies({"one": Run(), "two": Run()})
    assert len(ax.lines) == 2
    np.testing.assert_array_equal(ax.lines[0].get_xdata(), [1.0, 2.0])
