"""Plots draw what they are given, on the Axes they are given."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure

import meanflow as mf
from meanflow import plots
from meanflow.plots import _clouds as clouds
from meanflow.plots import style


def labels(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_directions_bars_have_the_shares_as_areas():
    turn = np.array([0.1, 0.1, 3.3, 5.0])
    cloud = mf.Cloud(
        mf.Neurons(jnp.ones(4), jnp.asarray(np.c_[np.cos(turn), np.sin(turn)])), [0.5, 0.25, 0.25, 0.0]
    )
    ax = plots.directions(cloud, bins=4)
    np.testing.assert_allclose([bar.get_height() ** 2 for bar in ax.patches], [0.75, 0.0, 0.25, 0.0])
    # the first sector is centered on the first axis
    assert ax.patches[0].get_x() == pytest.approx(-np.pi / 4)


def test_axes_are_used_and_returned():
    ax = Figure().add_subplot()
    assert plots.plane(np.array([1.0, -2.0, 0.5]), np.zeros(3), ax) is ax
    assert [len(line.get_xdata()) for line in ax.lines] == [2, 1]
    data = mf.Dataset(np.linspace(0, 1, 4), np.ones(4))
    drawn = plots.fit(np.linspace(0, 1, 9), {"f": np.zeros(9)}, data)
    assert [len(line.get_xdata()) for line in drawn.lines] == [9, 4]
    assert drawn.get_xlabel() == "$x$"


def test_knots_lie_on_the_first_curve():
    x = np.linspace(0, 1, 11)
    ax = plots.fit(x, {"f": x**2, "g": 0 * x}, None, knots=[-3.0, 0.5, 2.0, 1.0])
    knots = ax.lines[2]
    np.testing.assert_allclose(knots.get_xdata(), [0.5, 1.0])  # the others are outside the grid
    np.testing.assert_allclose(knots.get_ydata(), [0.25, 1.0])


def test_plane_shades_two_s_regions_and_draws_attracting_rays():
    x = jnp.array([-1.0, 0.0, 1.0])
    rays = mf.univariate.classify_rays(x, jnp.array([-0.5, 1.0, -0.6]))
    ax = plots.plane([1.0, -1.0], [0.3, 2.0], samples=x, rays=rays, paths=np.zeros((4, 2, 2)))
    assert len(ax.patches) == 6
    spans = sorted((wedge.theta1, wedge.theta2) for wedge in ax.patches)
    assert sum(b - a for a, b in spans) == pytest.approx(360)
    assert labels(ax) == ["attracts $r > 0$", "attracts $r < 0$", "$r > 0$", "$r < 0$"]
    drawn = [line for line in ax.lines if str(line.get_label()).startswith("attracts")]
    angle = np.arctan2(drawn[0].get_ydata()[1], drawn[0].get_xdata()[1])
    assert angle == pytest.approx(float(rays.theta[np.argmax(rays.positive == 1)]))
    assert ax.get_xlim() == ax.get_ylim()


def test_traces_show_median_and_range():
    ax = plots.traces([0, 1], {"a": [[1.0, 5.0], [3.0, 1.0], [2.0, 9.0]]}, xlabel="epoch")
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [2.0, 5.0])
    assert len(ax.collections) == 1 and ax.get_xlabel() == "epoch"


def test_heat_map_writes_numbers_that_can_be_read():
    import xarray

    table = xarray.DataArray(
        [[1.0, 100.0], [10.0, np.nan]], {"width": [1, 2], "delta": [-np.inf, np.inf]}, ["width", "delta"]
    )
    ax = plots.heat_map(table, log=True)
    ink = {text.get_text(): text.get_color() for text in ax.texts}
    assert ink["1"] == "white" and ink["1e+02"] == "black"  # dark on the light end of the scale
    assert [tick.get_text() for tick in ax.get_xticklabels()] == [r"$-\infty$", r"$\infty$"]
    with pytest.raises(ValueError, match="two axes"):
        plots.heat_map(table[0])


def test_colors_can_be_told_apart_in_grey():
    """Neighbours in the cycle differ in lightness or hue; the Okabe-Ito palette without its yellow."""
    assert len(set(style.COLORS)) == len(style.COLORS) == 7
    grey = [
        sum(w * int(c[i : i + 2], 16) for w, i in zip((0.3, 0.59, 0.11), (1, 3, 5), strict=True))
        for c in style.COLORS
    ]
    assert max(grey) < 190  # nothing too pale for a white page


def small_run(**settings):
    data = mf.Dataset(jnp.linspace(-1.0, 1.0, 5), jnp.array([1.0, -1.0, 1.0, 0.0, 1.0]))
    flow = mf.canonical()
    cloud = flow.init(jax.random.key(0), 6).pad(8)
    return mf.descend(flow, cloud, data, 4, step=0.1, every=1, **settings)


def test_plots_take_a_run():
    run = small_run()
    falling = plots.traces(run.ts, {"energy": run.energy}, logx=True, logy=True)
    assert falling.get_xscale() == falling.get_yscale() == "log" and falling.get_xlim()[0] > 0
    ax = plots.plane(run)
    drawn = sorted(u for line in ax.lines[-2:] for u in line.get_xdata())
    r, theta = (np.asarray(u)[:6] for u in run.final.particles)  # padding is not drawn
    np.testing.assert_allclose(drawn, np.sort(np.abs(r) * np.cos(theta)), rtol=1e-12)
    with pytest.raises(ValueError, match="theta must be None"):
        plots.plane(run, theta)
    seen = small_run(observe=["dissipation", "displacement", "predictions"])
    assert set(labels(plots.traces(seen))) == {"dissipation", "displacement"}
    with pytest.raises(ValueError, match="observed numbers"):
        plots.traces(run)


def test_positions_of_all_records():
    r, theta = np.array([2.0, -1.0]), np.array([0.3, 2.0])
    place, sign, _ = clouds.positions(mf.Cloud(mf.Polar(r, theta)))
    full = mf.Affine(np.cos(theta), -np.sin(theta), r)
    np.testing.assert_allclose(clouds.positions(mf.Cloud(full))[0], place, rtol=1e-14)
    np.testing.assert_array_equal(sign, [1, -1])
    planar = mf.Neurons(r, np.c_[np.cos(theta), np.sin(theta)])
    np.testing.assert_allclose(clouds.positions(mf.Cloud(planar))[0], place, rtol=1e-14)


def test_animations_have_a_frame_a_save(tmp_path):
    from PIL import Image

    run = small_run()
    path = plots.animate(run, tmp_path / "run.gif", samples=[-1.0, 0.0, 1.0], dpi=30)
    with Image.open(path) as film:
        assert film.n_frames == 5
        assert film.size == (120, 120)
    page = plots.animate(run, tmp_path / "run.html", dpi=30).read_text()
    assert page.count("data:image/png;base64") == 5
    with pytest.raises(ValueError, match="must end with one of"):
        plots.animate(run, tmp_path / "run.mp4")
    with pytest.raises(ValueError, match="saved clouds"):
        plots.animate(small_run(observe=["dissipation"]), tmp_path / "run.gif")


def test_an_animation_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = plots.animate(small_run(), tmp_path / "run.gif", dpi=30)
    old = path.read_bytes()
    monkeypatch.setattr("matplotlib.animation.PillowWriter.finish", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        plots.animate(small_run(), path, dpi=30)
    assert path.read_bytes() == old and list(tmp_path.iterdir()) == [path]


def test_knots_over_time_are_those_of_the_neurons():
    run = small_run()
    ax = plots.knots(run, samples=np.linspace(-1, 1, 5))
    drawn = np.stack([line.get_ydata() for line in ax.lines[5:]])
    assert len(drawn) == 6 and labels(ax) == ["$r > 0$", "$r < 0$"]  # padding is not drawn
    truth = -np.tan(np.asarray(run.clouds.particles.theta))[:, :6].T
    inside = np.abs(truth) < 1.15
    r = np.asarray(run.final.particles.r)[:6]
    order = np.concatenate([np.flatnonzero(r > 0), np.flatnonzero(r < 0)])
    np.testing.assert_allclose(
        np.where(inside[order], drawn, 0), np.where(inside, truth, 0)[order], atol=1e-12
    )
    with pytest.raises(ValueError, match="saved clouds"):
        plots.knots(small_run(observe=["dissipation"]))


def test_directions_over_time_do_not_jump():
    """Neurons that turn by 1.5 circles: the angle goes on where arctan2 would fall back."""
    turn = np.linspace(0.1, 3 * np.pi, 40)[:, None] + np.array([0.0, 1.0])
    b = np.stack([np.cos(turn), np.sin(turn)], -1)
    run = small_run()
    clouds = jax.vmap(lambda b: mf.Cloud(mf.Neurons(jnp.ones(2), b)))(jnp.asarray(b))
    whole = eqx.tree_at(lambda s: (s.clouds, s.ts), run, (clouds, jnp.arange(40.0)))
    ax = plots.directions(whole, label="two neurons")
    np.testing.assert_allclose(ax.lines[0].get_ydata(), np.degrees(turn[:, 0]), rtol=1e-12)
    assert len(ax.lines) == 2


def test_neurons_of_every_record_have_labels_of_their_own():
    planar = mf.vanilla().init(jax.random.key(0), 8, dim=3)
    ax = plots.plane(planar)
    assert labels(ax) == ["$a > 0$", "$a < 0$"] and "b_1" in ax.get_xlabel()
    np.testing.assert_allclose(
        sorted(u for line in ax.lines for u in line.get_xdata()),
        sorted(np.abs(planar.particles.a) * planar.particles.b[:, 0]),
        rtol=1e-12,
    )
